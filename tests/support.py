"""Shared by the tests: messages in a few letters, and a disk that fails on demand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import apsw

from turnkeeper.storage import StoredMessage

__all__ = ["A", "Disk", "S", "T", "U", "failing_disk", "said"]

Body = dict[str, object]


def U(text: str) -> Body:
    """A user message."""
    return {"role": "user", "content": text}


def A(text: str | None = None, *, call: str | Iterable[str] = ()) -> Body:
    """An assistant message; `call` names its tool calls."""
    calls = [call] if isinstance(call, str) else list(call)
    message: Body = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
            for id in calls
        ]
    return message


def T(call: str, text: str) -> Body:
    """A tool's result."""
    return {"role": "tool", "tool_call_id": call, "content": text}


def S(text: str) -> Body:
    """A system message."""
    return {"role": "system", "content": text}


def said(messages: Iterable[StoredMessage]) -> list[object]:
    """What the messages say, in order."""
    return [message.body.get("content") for message in messages]


class Disk:
    """The switches of a disk that fails on demand."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Give this as `vfs=`."""
        self.write_error: type[apsw.Error] | None = None
        """Raised by every write and sync while it is set."""
        self.open_error: type[apsw.Error] | None = None
        """Raised by every opening of a file while it is set."""
        self.failures = 0
        """How often an error was raised."""
        self.fail_next: int | None = None
        """If set, only so many writes and syncs fail; then `write_error` is cleared."""

    def check_write(self) -> None:
        if self.write_error is None:
            return
        error = self.write_error
        self.failures += 1
        if self.fail_next is not None:
            self.fail_next -= 1
            if self.fail_next == 0:
                self.write_error = self.fail_next = None
        raise error("a test says so")


_numbers = itertools.count(1)


@contextmanager
def failing_disk() -> Iterator[Disk]:
    """A VFS over the system's own that fails when its switches say so."""
    disk = Disk(f"failing-{next(_numbers)}")

    class File(apsw.VFSFile):
        def __init__(self, name: apsw.URIFilename | str | None, flags: list[int]) -> None:
            super().__init__("", name, flags)

        def xWrite(self, data: bytes, offset: int) -> None:
            disk.check_write()
            super().xWrite(data, offset)

        def xSync(self, flags: int) -> None:
            disk.check_write()
            super().xSync(flags)

        def xTruncate(self, size: int) -> None:
            disk.check_write()
            super().xTruncate(size)

    class FileSystem(apsw.VFS):
        def __init__(self) -> None:
            super().__init__(disk.name, "")

        def xOpen(self, name: apsw.URIFilename | str | None, flags: list[int]) -> apsw.VFSFile:
            if disk.open_error is not None:
                disk.failures += 1
                raise disk.open_error("a test says so")
            return File(name, flags)

    system = FileSystem()
    try:
        yield disk
    finally:
        system.unregister()
