"""The person's side of the chat: lines in, text out; a terminal, a pipe or a file."""

from __future__ import annotations

import io
import os
import sys
from collections import deque

import trio
from lines import LineBuffer

__all__ = ["Terminal"]

CONTROL_CODES = {
    code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}
"""Never shown: an answer is somebody else's text and must not steer the person's terminal."""


class Terminal:
    """Standard input and output. Ends every line that it began before it begins another."""

    def __init__(self) -> None:
        self.interactive = os.isatty(0) and os.isatty(1)
        """Whether a person sits there. Only then is there a prompt."""
        self._buffer = LineBuffer()
        self._lines: deque[bytes] = deque()
        self._ended = sys.stdin is None  # started with standard input closed
        self._in_a_line = False
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A store may hold what this terminal's encoding does not have.
            sys.stdout.reconfigure(errors="replace")

    def write(self, text: str) -> None:
        """Show `text` at once. If nobody reads any more, the input counts as ended as well."""
        shown = text.translate(CONTROL_CODES)
        if not shown:
            return
        try:
            print(shown, end="", flush=True)
        except OSError:  # `bot.py | head -1`, or a window that was closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            self._ended = True
            self._lines.clear()
        self._in_a_line = not shown.endswith("\n")

    def end_line(self) -> None:
        """Begin a new line, unless we stand at the beginning of one."""
        if self._in_a_line:
            self.write("\n")

    def say(self, text: str) -> None:
        """Show `text` on lines of its own."""
        self.end_line()
        self.write(f"{text}\n")

    async def line(self, prompt: str) -> str | None:
        """Return the next line without its end; None at the end of the input.

        Bytes that are not UTF-8 are read as U+FFFD. A cancellation loses nothing that was read.
        """
        self.end_line()
        if self.interactive:
            self.write(prompt)
        while not self._lines and not self._ended:
            piece = await _read()
            self._lines.extend(self._buffer.feed(piece))
            if not piece:
                self._ended = True
                if rest := self._buffer.end():  # the last line of a file need not have an end
                    self._lines.append(rest)
        if not self._lines:
            return None
        self._in_a_line = False  # the person's Enter has ended the prompt's line
        return self._lines.popleft().decode("utf-8", "replace")


async def _read() -> bytes:
    """Wait for input and return what is there; nothing at its end.

    A thread that sits in a blocking read cannot be cancelled and would hold up the exit;
    `trio.lowlevel.FdStream` would make the descriptor non-blocking, for the shell that we share
    it with as well. So: wait until there is something, then read no more than that.
    """
    try:
        await trio.lowlevel.wait_readable(0)
    except PermissionError:  # a file cannot be waited for, and never makes anybody wait
        await trio.lowlevel.checkpoint()
    try:
        return os.read(0, 65536)
    except OSError:  # the terminal is gone
        return b""
