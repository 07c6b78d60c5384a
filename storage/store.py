"""The front door: open a store, hand changes to its writer, ask its readers.

Every write goes through `submit`, as an operation that runs one of the transaction bodies; every
read is one of the questions below. Reads see everything that was acknowledged before they were
asked.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import TypeVar

import apsw
import trio

from . import batches, inbox, reads, turns
from .beside import beside
from .clock import Clock, Moment, best_clock
from .connect import (
    PATIENCE_MS,
    Connection,
    Synchronous,
    close,
    create,
    inspect,
    open_reader,
    open_writer,
    translated,
)
from .errors import Rejected
from .offload import Offload, in_thread
from .operation import Operation
from .owners import Owners, open_owners
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
from .schema import define_guard, migrate
from .tally import WriterStatistics
from .writer import Writer

__all__ = ["Store", "open_store"]

T = TypeVar("T")

READERS = 4
"""Reads at the same time. A guess: more only queue for the interpreter's lock."""


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
        renewal = _Renewal(tuple(held), self.clock, self.owners)
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


class _Renewal(Operation):
    """Many turns renewed at once."""

    __slots__ = ("_clock", "_held", "_owners", "_settled")

    value: list[int]

    def __init__(self, held: tuple[tuple[int, float], ...], clock: Clock, owners: Owners) -> None:
        super().__init__()
        self._held = held
        self._clock = clock
        self._owners = owners
        self._settled = trio.Event()

    def run(self, connection: Connection) -> list[int]:
        self._owners.stand()
        boot, seconds = self._clock()
        return [
            token
            for token, ttl_s in self._held
            if not turns.renew(connection, token, Moment(boot, seconds + ttl_s))
        ]

    def settle(self) -> None:
        self._settled.set()

    async def lost(self) -> list[int]:
        await self._settled.wait()
        if self.error is not None:
            raise self.error
        return self.value


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_store(
    path: str | os.PathLike[str],
    *,
    synchronous: Synchronous = "full",
    offload: Offload = in_thread,
    vfs: str | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    clock: Clock | None = None,
    random: Random | None = None,
) -> AsyncIterator[Store]:
    """Open the store at `path`, made if nothing is there; it is closed when the block ends.

    `synchronous="full"` means that what was acknowledged survives a power loss; `"normal"`
    that it survives the end of the process only. `offload`, `vfs`, `monotonic` (seconds), `clock`
    and `random` are for tests: how blocking work is done, the SQLite file layer, the clock that
    limits are measured on, the one that turns expire by, the source of jitter.

    Raises `Rejected` for a path that cannot be one; `StorageDamaged` if something else is
    there (a folder, an empty file, garbage, another program's database, a newer store), its
    bytes unchanged; `StorageFailed` if it or its folder cannot be written; `StorageBusy` if
    another process holds it for ten seconds. Leaving waits for what was handed over, see
    `Writer.run`, and for the reads under way.
    """
    place = _checked(path)
    chance = Random() if random is None else random

    def connect() -> Connection:
        connection = open_writer(place, synchronous=synchronous, vfs=vfs)
        define_guard(connection, allowed=False)
        return connection

    def prepare() -> Owners:
        if not inspect(place):
            create(place, migrate, vfs=vfs)
        log = Path(f"{place}-wal")
        with translated(f"opening {str(place)!r}"):
            connection = connect()
            try:
                connection.set_busy_timeout(PATIENCE_MS)
                # A file that is refused keeps its log: closing must not move that into it.
                keep = log.exists() and log.stat().st_size > 0
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, int(keep))
                migrate(connection)
                # Not from `random`: a number must be new, also where chance is a test's.
                owners = open_owners(Path(f"{place}.owners"), secrets.randbits(62))
                with suppress(apsw.Error):  # another open can do it
                    _forget_the_dead(connection, owners)
            finally:
                close(connection)
        return owners

    name = str(place)
    owners = await offload(prepare, trio.CapacityLimiter(1))
    try:
        writer = Writer(
            connect,
            name=name,
            number=owners.number,
            offload=offload,
            monotonic=monotonic,
            random=chance,
        )
        readers = Readers(
            lambda: open_reader(place, vfs=vfs), name=name, size=READERS, offload=offload
        )
        try:
            async with beside(writer.run, writer.close):
                yield Store(place, writer, readers, owners, clock or best_clock())
        finally:
            with trio.CancelScope(shield=True):
                await readers.close()
    finally:
        owners.close()  # last: until here a turn of ours may be written to


def _forget_the_dead(connection: Connection, owners: Owners) -> None:
    """Remove the marks of writers that were killed: nobody will ask for them."""
    for number in batches.writers(connection):
        if owners.is_alive(number) is False:
            batches.forget(connection, number)


def _checked(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise Rejected("path", f"must be a string or a path, not {type(path).__name__}")
    name: str | bytes = os.fspath(path)  # a path may be bytes, whatever its type says
    if not isinstance(name, str) or not name or "\0" in name:
        raise Rejected("path", "must be the name of a file")
    if name == ":memory:" or name.startswith("file:"):
        raise Rejected("path", "must name a file on disk; a store in memory would lose everything")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Rejected("path", "must be UTF-8, for SQLite's sake") from None
    # Not behind a symbolic link: the log stands beside the file that is meant.
    return Path(os.path.realpath(name))
