"""The front door: hand changes to an open store's writer, ask its readers.

Every write goes through `submit`, as an operation that runs one of the transaction bodies; every
read is one of the questions below. Reads see everything that was acknowledged before they were
asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

import apsw

from . import inbox, reads
from .clock import Clock
from .owners import Owners
from .readers import Readers
from .records import (
    Head,
    Holder,
    InboxMessage,
    Move,
    Read,
    SessionInfo,
    StoredMessage,
    Transcript,
)
from .renewal import Renewal
from .tally import WriterStatistics
from .writer import Writer

__all__ = ["Store"]

T = TypeVar("T")


class Store:
    """An open store. Made by `open_store`; all methods belong to the event loop's thread."""

    def __init__(
        self, path: Path, writer: Writer, readers: Readers, owners: Owners, clock: Clock
    ) -> None:
        self.path = path
        self.owners = owners
        """Who this open store is, and who else lives."""
        self.clock = clock
        """What turns expire by."""
        self.submit = writer.submit
        """Hand a change to the writer; see `Writer.submit`."""
        self.deadline = writer.deadline
        """Until when something that comes now waits for a busy file."""
        self.withdraw = writer.withdraw
        """Take a change back if it has not started; see `Writer.withdraw`."""
        self._writer = writer
        self._readers = readers

    def __repr__(self) -> str:
        return f"<Store {str(self.path)!r}: {self._writer!r}, {self._readers!r}>"

    @property
    def closed(self) -> bool:
        """True once no change is taken any more."""
        return self._writer.closed

    async def transcript(
        self,
        id: str,
        *,
        life: int | None = None,
        last: int | None = None,
        after: int = 0,
        hidden: bool = False,
    ) -> Read[Transcript]:
        """Return the session's transcript.

        `last` keeps only so many of the newest messages, `after` those after a position;
        `hidden` rows are left out unless asked for. `life` is the number of the session that
        the caller means. Raises `Closed` if that one was deleted, or the store closed, and
        `StorageError`. A cancellation leaves nothing behind.
        """

        def question(connection: apsw.Connection, head: Head | None) -> Transcript:
            return reads.transcript(connection, id, head, last=last, after=after, hidden=hidden)

        return await self._ask(id, life, question)

    async def all_messages(self, id: str, *, life: int | None = None) -> Read[list[StoredMessage]]:
        """Return every message the session ever had, with its state, in the order written."""
        return await self._ask(id, life, reads.all_messages)

    async def history(self, id: str, *, life: int | None = None) -> Read[list[Move]]:
        """Return every move of the session, oldest first."""
        return await self._ask(id, life, reads.history)

    async def info(self, id: str, *, life: int | None = None) -> Read[SessionInfo | None]:
        """Return what a list shows of the session; None if there is none."""
        return await self._ask(id, life, reads.info)

    async def inbox(self, id: str, *, life: int | None = None) -> Read[list[InboxMessage]]:
        """Return all that the session's inbox holds, in order."""

        def question(connection: apsw.Connection, head: Head | None) -> list[InboxMessage]:
            return reads.in_inbox(connection, id, head)

        return await self._ask(id, life, question)

    async def holder(self, id: str, *, life: int | None = None) -> Read[Holder | None]:
        """Return who holds the session's turn; None if nobody does."""

        def question(connection: apsw.Connection, head: Head | None) -> Holder | None:
            return reads.holder(connection, head, self.clock(), self.owners)

        return await self._ask(id, life, question)

    async def _ask(
        self, id: str, life: int | None, question: Callable[[apsw.Connection, Head | None], T]
    ) -> Read[T]:
        def ask(connection: apsw.Connection) -> Read[T]:
            head = reads.head_of(connection, id, life)
            return Read(question(connection, head), None if head is None else head.session)

        return await self._readers.ask(ask)

    async def sessions(self, *, after: str = "", limit: int = 100) -> list[SessionInfo]:
        """Return at most `limit` sessions whose ids come after `after`, ordered by id."""
        return await self._readers.ask(lambda connection: reads.listed(connection, after, limit))

    async def set_aside(self, *, after: int = 0, limit: int = 100) -> list[InboxMessage]:
        """Return at most `limit` messages that were set aside, of all sessions, behind a place."""
        return await self._readers.ask(lambda connection: reads.set_aside(connection, after, limit))

    async def waiting_after(self, place: int, limit: int) -> list[tuple[int, str]]:
        """Return at most `limit` posts that wait behind `place`: their place and session's id."""
        return await self._readers.ask(
            lambda connection: inbox.waiting_after(connection, place, limit)
        )

    async def troubled(
        self, held: Collection[tuple[int, int]]
    ) -> tuple[Collection[int], Collection[int]]:
        """Of turns, given as session and token: the tokens that were lost, and those interrupted."""
        return await self._readers.ask(lambda connection: reads.troubled(connection, held))

    async def renew(self, held: Iterable[tuple[int, float]]) -> Collection[int]:
        """Let turns, given as token and seconds, last so long from now; return the lost ones.

        One transaction for all. Raises `Closed` and `StorageError`: then none was renewed. A
        cancellation may renew them or not.
        """
        renewal = Renewal(tuple(held), self.clock, self.owners)
        self.submit(renewal)
        return await renewal.lost()

    def wal_bytes(self) -> int:
        """Return the size of the write-ahead log, in bytes."""
        try:
            return os.stat(f"{self.path}-wal").st_size
        except FileNotFoundError:
            return 0

    def statistics(self) -> WriterStatistics:
        """Return what the writer has done since the store was opened."""
        return self._writer.statistics()
