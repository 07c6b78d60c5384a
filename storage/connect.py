"""Open a connection the house way, or say exactly why not.

Every connection of a store is opened here, so that none lacks a pragma that a promise rests
on. `inspect` looks at a file before SQLite may touch it: what is empty, garbage, foreign or a
folder is refused with its bytes as they were. `create` makes a new file under another name
and links it into place when it is whole: a kill in between leaves nothing that looks like a
damaged store.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeAlias

import apsw

from .errors import StorageBusy, StorageDamaged, StorageError, StorageFailed, StorageFull

__all__ = [
    "APPLICATION_ID",
    "PATIENCE_MS",
    "PATIENCE_S",
    "Connection",
    "Synchronous",
    "close",
    "create",
    "inspect",
    "open_reader",
    "open_writer",
    "storage_error",
    "translated",
]

APPLICATION_ID = 0x544B5052
"""'TKPR' in the file's header: this is a Turnkeeper store."""

MAGIC = b"SQLite format 3\0"
APPLICATION_ID_OFFSET = 68  # https://www.sqlite.org/fileformat.html, section 1.3

CACHE_KIB = 32 * 1024
"""Page cache of the writing connection. Measured with 1,000 sessions of 100 messages: SQLite's
2 MiB made appends up to a third slower, for the indexes' leaves no longer fit."""

LOG_KIB = 64 * 1024
"""The log is cut to this size when it starts anew. A guess: sixteen times what it usually has."""

PATIENCE_S = 10.0
"""How long anything waits for a file that somebody holds."""

PATIENCE_MS = int(PATIENCE_S * 1_000)


class Connection(apsw.Connection):
    """A connection that knows its files, and keeps a cursor for statements whose rows nobody wants.

    `execute` makes a new cursor each time, so that the rows of one statement can be read while
    another runs. For one that only writes this is waste: a tenth of an append in the writer's
    thread, measured.
    """

    def __init__(self, path: Path, *, vfs: str | None) -> None:
        super().__init__(str(path), flags=apsw.SQLITE_OPEN_READWRITE, vfs=vfs)
        self.write = self.cursor().execute
        self._files: list[tuple[int, int] | None] = []

    def note_files(self) -> None:
        """Remember which file and which log these are; both must be there."""
        self._files = [_identity(self.filename), _identity(self.filename_wal)]

    def has_its_files(self) -> bool:
        """Return False if the file or its log was removed or replaced since `note_files`.

        What is written to them then is in nobody's reach, though SQLite does not notice.
        """
        return self._files == [_identity(self.filename), _identity(self.filename_wal)]


Synchronous: TypeAlias = Literal["full", "normal"]


def _identity(name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def storage_error(error: apsw.Error, doing: str) -> StorageError | None:
    """Return what `error` of SQLite means to a caller; None if it is a bug and no trouble."""
    detail = str(error)
    match error:
        case apsw.BusyError() | apsw.LockedError():
            return StorageBusy(doing, detail)
        case apsw.FullError():
            return StorageFull(doing, detail)
        case apsw.CorruptError() | apsw.NotADBError() | apsw.FormatError() | apsw.SQLError():
            # SQL that fails, too: the statements are ours, so the tables are not.
            return StorageDamaged(doing, detail)
        case (
            apsw.IOError()
            | apsw.CantOpenError()
            | apsw.ReadOnlyError()
            | apsw.PermissionsError()
            | apsw.NoMemError()
            | apsw.ProtocolError()
            | apsw.AuthError()
        ):
            return StorageFailed(doing, detail)
    return None


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise SQLite's and the system's troubles inside as a `StorageError` about `doing`."""
    try:
        yield
    except apsw.Error as error:
        meant = storage_error(error, doing)
        if meant is None:
            raise
        raise meant from error
    except OSError as error:
        raise StorageFailed(doing, error.strerror or str(error)) from error


def inspect(path: Path) -> bool:
    """Return True if a store is at `path`, False if nothing is.

    Raises `StorageDamaged` for a folder, an empty file, a file that is no SQLite database and a
    database of another program; `StorageFailed` if the file cannot be read and written, or
    nothing can be created beside it. Reads a few bytes and changes none.
    """
    doing = f"opening {str(path)!r}"
    folder = path.parent
    if not folder.is_dir():
        raise StorageFailed(doing, f"there is no folder {str(folder)!r}")
    with translated(doing):
        is_there = path.exists()
    if not is_there:
        if not _may(folder, os.W_OK | os.X_OK):
            raise StorageFailed(doing, "its folder is read-only, and the file does not exist")
        return False
    if path.is_dir():
        raise StorageDamaged(doing, "it is a folder")
    if not path.is_file():
        raise StorageDamaged(doing, "it is not a regular file")
    with translated(doing):
        header = _first_bytes(path, 100)
    if not header:
        raise StorageDamaged(doing, "the file is empty: not a store, or one whose data is gone")
    if len(header) < 100 or not header.startswith(MAGIC):
        raise StorageDamaged(doing, "it is not an SQLite database")
    found = int.from_bytes(header[APPLICATION_ID_OFFSET : APPLICATION_ID_OFFSET + 4], "big")
    if found != APPLICATION_ID:
        raise StorageDamaged(doing, "it is an SQLite database of another program")
    if not _may(path, os.R_OK | os.W_OK):
        raise StorageFailed(doing, "the file is read-only")
    if not _may(folder, os.W_OK | os.X_OK):
        raise StorageFailed(doing, "its folder is read-only, and SQLite keeps its log beside it")
    return True


def _first_bytes(path: Path, most: int) -> bytes:
    """Return the beginning of the file, read through SQLite's own file layer.

    Never with `open`: closing any descriptor of a file drops all POSIX locks that the process
    holds on it, also those of a store that it has open. Another program would then take itself
    for the last one, and delete the log that we write to.
    See https://www.sqlite.org/howtocorrupt.html, section 2.2.
    """
    if not _may(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    size = min(most, path.stat().st_size)
    if size == 0:
        return b""
    file = apsw.VFSFile("", str(path), [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0])
    try:
        return file.xRead(size, 0)
    finally:
        file.xClose()


def _may(path: Path, mode: int) -> bool:
    """Return whether the user that this process acts as may do so."""
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def create(path: Path, fill: Callable[[apsw.Connection], None], *, vfs: str | None = None) -> None:
    """Make a new store at `path`, whole or not at all, readable by its owner only.

    `fill` makes the tables. If somebody else makes the same file first, theirs stands.
    Raises `StorageError` if the disk or the system refuses.
    """
    unborn = path.with_name(f"{path.name}.new-{secrets.token_hex(8)}")
    with translated(f"creating {str(path)!r}"):
        os.close(os.open(unborn, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        try:
            connection = apsw.Connection(str(unborn), flags=apsw.SQLITE_OPEN_READWRITE, vfs=vfs)
            try:
                connection.pragma("application_id", APPLICATION_ID)
                connection.pragma("journal_mode", "wal")
                _house_rules(connection, "full")
                fill(connection)
            finally:
                # The last connection: this also empties the log into the file.
                connection.close()
            _sync(unborn)
            with suppress(FileExistsError):
                os.link(unborn, path)
            _sync(path.parent)
        finally:
            unborn.unlink(missing_ok=True)


def open_writer(path: Path, *, synchronous: Synchronous, vfs: str | None) -> Connection:
    """Return a connection that may write; the file must exist. Raises `StorageError`."""
    with translated(f"opening {str(path)!r}"):
        connection = Connection(path, vfs=vfs)
        with _closed_on_error(connection):
            _house_rules(connection, synchronous)
            if connection.pragma("journal_mode", "wal") != "wal":  # a copy may have lost it
                raise StorageFailed("opening the store", "it cannot keep a write-ahead log here")
            connection.pragma("cache_size", -CACHE_KIB)
            connection.pragma("journal_size_limit", LOG_KIB * 1024)
            connection.pragma("secure_delete", True)
            connection.set_busy_timeout(0)  # from here on the committer waits, in its own way
            connection.note_files()
    return connection


def open_reader(path: Path, *, vfs: str | None) -> apsw.Connection:
    """Return a connection that cannot write; the file must exist. Raises `StorageError`."""
    with translated(f"opening {str(path)!r}"):
        # Not SQLITE_OPEN_READONLY: such a connection cannot recover the log after a crash.
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE, vfs=vfs)
        with _closed_on_error(connection):
            _house_rules(connection, "full")
            connection.pragma("query_only", True)
    return connection


@contextmanager
def _closed_on_error(connection: apsw.Connection) -> Iterator[None]:
    """Close `connection` if it cannot be set up: an error that is kept would keep it open."""
    try:
        yield
    except BaseException:
        close(connection)
        raise


def close(connection: apsw.Connection) -> None:
    """Close `connection`, whatever the disk says: what was committed is in the log already."""
    with suppress(apsw.Error):  # the checkpoint of a last connection, which the next open does
        connection.close()


def _house_rules(connection: apsw.Connection, synchronous: Synchronous) -> None:
    # A reader of a log waits only while somebody opens, recovers or closes the file, shortly.
    connection.set_busy_timeout(PATIENCE_MS)
    connection.pragma("synchronous", synchronous)
    connection.pragma("recursive_triggers", True)  # the guard against a replacing INSERT
    connection.pragma("trusted_schema", False)
    if connection.pragma("application_id") != APPLICATION_ID:  # replaced while we were away
        raise StorageDamaged("opening the store", "the file is not a Turnkeeper store any more")
    # A refusal must not depend on the disk, and rolling back to a savepoint may need a journal.
    connection.pragma("temp_store", "memory")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
