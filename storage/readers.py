"""Reading connections, lent and taken back. Knows no table.

Each question runs off the event loop, inside one read transaction, so it sees one moment; and
since that transaction begins after the call, it sees everything acknowledged before the call.
Connections are opened when they are needed, at most `size` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
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
        self._lock = Lock()  # for the two below, which several threads use
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

    async def close(self) -> None:
        """Refuse new questions, wait for those under way, and close all connections.

        Takes as long as the longest question, and that long again if it is cancelled.
        """
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            close(connection)
        for _ in range(int(self._lent.total_tokens)):  # each comes free when its reader is done
            await self._lent.acquire_on_behalf_of(object())

    def _answer(self, question: Callable[[apsw.Connection], T]) -> T:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connect()
        sound = False
        try:
            with translated("reading"):
                connection.execute("BEGIN")
                found = question(connection)
                connection.execute("COMMIT")
            sound = True
            return found
        finally:
            with self._lock:
                again = sound and not self._closed
                if again:
                    self._idle.append(connection)
            if not again:
                close(connection)  # a transaction that is still open ends with it
