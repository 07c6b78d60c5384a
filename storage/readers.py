"""Reading connections, lent and taken back. Knows no table.

Each question runs off the event loop, inside one read transaction, so it sees one moment; and
since that transaction begins after the call, it sees everything acknowledged before the call.
Connections are opened when they are needed, at most `size` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import apsw
import trio

from .connect import close, translated
from .errors import Closed
from .offload import Offload

__all__ = ["Readers"]

T = TypeVar("T")


class Readers:
    """A pool of connections that cannot write."""

    def __init__(
        self, connect: Callable[[], apsw.Connection], *, name: str, size: int, offload: Offload
    ) -> None:
        self._connect = connect
        self._name = name
        self._offload = offload
        self._lent = trio.CapacityLimiter(size)
        self._idle: list[apsw.Connection] = []
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._idle)} idle"
        return f"<Readers: {self._lent.borrowed_tokens} of {self._lent.total_tokens} lent, {state}>"

    async def ask(self, question: Callable[[apsw.Connection], T]) -> T:
        """Return what `question` finds.

        Waits for a free connection in order of arrival. A cancellation while waiting asks
        nothing; once begun, the question is answered first. It changes nothing either way.
        Raises what the question raises, `Closed`, and `StorageError` where SQLite cannot read.
        """
        if self._closed:
            raise Closed("store", self._name)
        return await self._offload(lambda: self._answer(question), self._lent)

    def close(self) -> None:
        """Close the idle connections now and the lent ones as they come back."""
        self._closed = True
        while self._idle:
            close(self._idle.pop())

    def _answer(self, question: Callable[[apsw.Connection], T]) -> T:
        connection = self._idle.pop() if self._idle else self._connect()
        sound = False
        try:
            with translated("reading"):
                connection.execute("BEGIN")
                found = question(connection)
                connection.execute("COMMIT")
            sound = True
            return found
        finally:
            if not sound or self._closed:
                close(connection)  # a transaction that is still open ends with it
            else:
                self._idle.append(connection)
