"""Opening a store and closing it: the file, its migration, our lock, the writer and the readers."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import apsw
import trio

from . import batches
from .beside import beside
from .clock import Clock, best_clock
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
from .owners import Owners, open_owners
from .readers import Readers
from .schema import define_guard, migrate
from .store import Store
from .writer import Writer

__all__ = ["open_store"]

READERS = 4
"""Reads at the same time. A guess: more only queue for the interpreter's lock."""


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
                connection.set_busy_timeout(0)
                with suppress(apsw.Error):  # if anything is in the way, another open will do it
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
