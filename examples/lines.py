"""Bytes that arrive in pieces, cut into lines: what a person types, and what an endpoint streams."""

from __future__ import annotations

__all__ = ["LineBuffer"]


class LineBuffer:
    """Cuts at line feeds and nowhere else.

    `str.splitlines`, and httpx's `aiter_lines` with it, would also cut at U+2028, U+0085 and a
    few more, which may stand inside a sentence or inside an endpoint's JSON.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next piece; return the lines that it completes, without their ends."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line.removesuffix(b"\r") for line in lines]

    def end(self) -> bytes:
        """Return what came after the last line feed, and be empty."""
        rest, self._rest = self._rest, b""
        return rest
