"""Shared by the tests: messages in a few letters, and a disk that fails on demand."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Literal, TypeVar

import apsw
import trio
from attrs import frozen

from turnkeeper.actors import Session
from turnkeeper.storage import (
    Head,
    Kept,
    Moment,
    Offload,
    Operation,
    Release,
    Rules,
    StoredMessage,
    beside,
    inline,
)
from turnkeeper.storage.connect import Connection, create
from turnkeeper.storage.owners import UnlockedOwners
from turnkeeper.storage.schema import migrate
from turnkeeper.storage.writer import Writer

if TYPE_CHECKING:
    from apsw import Bindings

R = TypeVar("R")

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


def tables(path: str | os.PathLike[str]) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table, as a second connection sees it; a writer's own mark apart.

    By APSW, and never by sqlite3: two copies of SQLite in one process undo each other's locks.
    """
    with closing(apsw.Connection(os.fspath(path))) as connection:
        names = [
            str(name)
            for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        ]
        return {
            name: connection.execute(f"SELECT * FROM {name}").fetchall()
            for name in names
            if name != "batches"
        }


__all__ += ["tables"]


class Job(Operation):
    """An operation made from a function, for tests that drive a writer by hand."""

    def __init__(self, work: Callable[[Connection], object], *, scrub: bool = False) -> None:
        super().__init__()
        self.work = work
        self.scrub = scrub
        self.runs = 0
        self.settled = trio.Event()

    def run(self, connection: Connection) -> object:
        self.runs += 1
        return self.work(connection)

    def settle(self) -> None:
        self.settled.set()

    async def outcome(self) -> object:
        """What became of it: its value, or its error raised."""
        await self.settled.wait()
        if self.error is not None:
            raise self.error
        return self.value


NO_RULES = Rules(lambda: Moment("a boot", 0.0), UnlockedOwners(1), lambda messages: [])


@frozen
class Told:
    """What a change is told (`storage.Asked`), with nothing special by default."""

    id: str
    append_id: int = 1
    now: float = 0.0
    known: Head | None = None
    life: int | None = None
    at: int | None = None
    pending: tuple[Kept, ...] = ()
    rules: Rules = NO_RULES
    token: int | None = None
    renew_s: float | None = None
    interleave: bool = False
    unreleased: Mapping[int, Release | None] = {}


__all__ += ["Job", "Told"]


class Wire:
    """A writer's way to its file, for tests: what it says is noted, and errors can be put in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []
        """Every statement, in order."""
        self.before: dict[str, Exception] = {}
        """Statements, by how they begin, that fail once without being done."""
        self.after: dict[str, Exception] = {}
        """Statements that fail once after they were done."""
        self.open_error: Exception | None = None
        """Raised by every opening while it is set."""
        self.checkpoint_error: Exception | None = None
        """Raised by every checkpoint that is asked for while it is set."""
        self.opened = 0
        create(path, self._fill)

    @staticmethod
    def _fill(connection: apsw.Connection) -> None:
        migrate(connection)
        connection.execute("CREATE TABLE notes (number INTEGER PRIMARY KEY, text TEXT)")

    def connect(self) -> Connection:
        if self.open_error is not None:
            raise self.open_error
        self.opened += 1
        connection = _Tapped(self.path, vfs=None)
        connection.wire = self
        connection.pragma("synchronous", "off")
        connection.note_files()
        return connection

    def note(self, number: int) -> Job:
        """An operation that writes one row and returns how many there are then."""

        def work(connection: Connection) -> object:
            connection.execute("INSERT INTO notes VALUES (?, 'x')", (number,))
            return connection.execute("SELECT count(*) FROM notes").get

        return Job(work)

    def notes(self) -> list[int]:
        """The numbers that are there, in the order in which they were written."""
        with closing(apsw.Connection(str(self.path))) as connection:
            return [n for (n,) in connection.execute("SELECT number FROM notes ORDER BY rowid")]


class _Tapped(Connection):
    wire: Wire

    def execute(
        self, statements: str, bindings: Bindings | None = None, **how: object
    ) -> apsw.Cursor:
        wire = self.wire
        wire.said.append(statements)
        _raise_once(wire.before, statements)
        cursor = super().execute(statements, bindings)
        _raise_once(wire.after, statements)
        return cursor

    def wal_checkpoint(
        self, dbname: str | None = None, mode: int = apsw.SQLITE_CHECKPOINT_PASSIVE
    ) -> tuple[int, int]:
        if self.wire.checkpoint_error is not None:
            raise self.wire.checkpoint_error
        return super().wal_checkpoint(dbname, mode)


def _raise_once(errors: dict[str, Exception], statement: str) -> None:
    for beginning in errors:
        if statement.startswith(beginning):
            raise errors.pop(beginning)


class Clock:
    """Time that passes only when somebody pauses."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.pauses: list[float] = []
        self.on_pause: Callable[[], None] = lambda: None
        """Called in every pause."""
        self.step_s: float | None = None
        """If set, how long each pause takes, whatever was asked for."""

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds if self.step_s is None else self.step_s
        self.on_pause()


@asynccontextmanager
async def writing(
    wire: Wire, clock: Clock | None = None, offload: Offload = inline
) -> AsyncIterator[Writer]:
    """A writer at work on the wire; leaving waits until all that was handed over has ended."""
    clock = Clock() if clock is None else clock
    writer = Writer(
        wire.connect,
        name="the wire",
        number=1,
        offload=offload,
        monotonic=clock,
        random=Random(7),
        pause=clock.pause,
    )
    async with beside(writer.run, writer.close):
        yield writer


__all__ += ["Clock", "Wire", "writing"]


def count(path: Path, table: str) -> int:
    """How many rows a table has."""
    return len(tables(path)[table])


def states(messages: list[StoredMessage]) -> dict[object, str]:
    """The state of each message, by what it says."""
    return {message.body["content"]: message.state for message in messages}


async def turns(session: Session, number: int = 3) -> None:
    """Let a session hear so many turns, of two messages each."""
    for n in range(1, number + 1):
        await session.append(U(f"u{n}"))
        await session.append(A(f"a{n}"))


__all__ += ["count", "states", "turns"]


class Gate:
    """An offload that works on the spot, but lets the writer's work begin and end when told.

    Reads have a limiter of their own, with more than one token, and pass.
    """

    def __init__(self) -> None:
        self.may_begin = trio.Event()
        self.may_end = trio.Event()
        self.open()

    def open(self) -> None:
        """Let everything pass."""
        self.may_begin.set()
        self.may_end.set()

    def shut(self, where: Literal["begin", "end"] = "begin") -> None:
        """Let nothing begin, or nothing that has begun come back."""
        if where == "begin":
            self.may_begin = trio.Event()
        else:
            self.may_end = trio.Event()

    async def __call__(self, work: Callable[[], R], limiter: trio.CapacityLimiter, /) -> R:
        async with limiter:
            if limiter.total_tokens > 1:
                return work()
            await self.may_begin.wait()
            done = work()
            await self.may_end.wait()
            return done


__all__ += ["Gate"]
