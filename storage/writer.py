"""Group commit: many operations, one COMMIT. Knows no table but its own mark.

One writing connection, used by one worker thread at a time. While a batch commits, the next
one gathers; so a commit's fsync is paid once for all that waited, and nobody waits for a
timer. One that fails takes nobody along: what it wrote, if anything, is rolled back alone.

The transaction is begun before the operations are taken, so one that waits for a busy file can
still be withdrawn. Busy is waited out here with a jitter of under a millisecond: SQLite's own
back-off let some of four writers wait for seconds.

Two things can go wrong with a whole batch. SQLite gives up the transaction on a full disk or
an I/O error: then the operations are run again, each in a transaction of its own, so that only
those fail that must. And a COMMIT that fails may have been done all the same: the connection is
opened anew, and the batch's mark, written in its own transaction, tells the truth.

The lock below guards the hand-over between the event loop and the worker thread, no longer
than it takes to move a list.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from threading import Lock
from typing import Any

import apsw
import trio
from attrs import frozen

from . import batches
from .connect import close, storage_error
from .errors import Closed, StorageError, StorageFailed
from .offload import Offload

__all__ = ["Operation", "Writer", "WriterStatistics"]

PATIENCE_S = 10.0
"""How long an operation waits for a busy file, and a commit of unknown outcome for an answer."""

JITTER_S = 0.001
"""Longest pause between two attempts on a busy file."""

MAX_BATCH = 1_000
"""Operations in one transaction. A guess: longer ones gain little and make everybody wait."""


class Operation:
    """One change on its way to the disk, and what became of it. To be derived from.

    `started` is true once a transaction has taken it; until then it can be withdrawn.
    `landed` is true once it is known to be on disk. `scrub` asks that what it removes goes from
    the log as well.
    """

    __slots__ = ("deadline", "error", "landed", "started", "value")

    scrub = False

    def __init__(self) -> None:
        self.value: Any = None  # what `run` returned; the writer does not look at it
        self.error: Exception | None = None
        self.started = False
        self.landed = False
        self.deadline = 0.0

    def run(self, connection: apsw.Connection) -> object:
        """Make the change; may be called more than once, each time from the beginning."""
        raise NotImplementedError

    def settle(self) -> None:
        """Called on the event loop once `value` or `error` is final."""
        raise NotImplementedError


@frozen
class WriterStatistics:
    """What a writer has done since it was made."""

    commits: int
    operations: int
    """Operations that were committed."""
    largest_batch: int
    waiting: int
    """Operations that wait for the next transaction."""
    failing_since: float | None
    """Monotonic seconds of the first failure of storage that no success has followed."""
    failure: StorageError | None
    """The latest such failure."""

    @property
    def mean_batch(self) -> float:
        """Operations per commit."""
        return self.operations / self.commits if self.commits else 0.0


class Writer:
    """Takes operations, commits them in batches, and tells each what became of it."""

    def __init__(
        self,
        connect: Callable[[], apsw.Connection],
        *,
        name: str,
        offload: Offload,
        monotonic: Callable[[], float],
        random: Random,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._connect = connect
        self._name = name
        self._offload = offload
        self._monotonic = monotonic
        self._random = random
        self._pause = pause
        self._id = random.getrandbits(62)
        self._connection: apsw.Connection | None = None
        self._lock = Lock()
        self._waiting: list[Operation] = []
        self._limiter = trio.CapacityLimiter(1)
        self._work = trio.Event()
        self._closed = False
        self._batch = 0
        self._unsettled: list[Operation] = []
        self._doubtful: list[Operation] = []
        self._commits = 0
        self._operations = 0
        self._largest_batch = 0
        self._failing_since: float | None = None
        self._failure: StorageError | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Writer: {state}, {len(self._waiting)} waiting, {self._commits} commits>"

    def statistics(self) -> WriterStatistics:
        """Return what happened so far."""
        return WriterStatistics(
            self._commits,
            self._operations,
            self._largest_batch,
            len(self._waiting),
            self._failing_since,
            self._failure,
        )

    def submit(self, operation: Operation) -> None:
        """Hand `operation` over; operations run in the order in which they were handed over.

        Raises `Closed` if the writer was closed.
        """
        if self._closed:
            raise Closed("store", self._name)
        operation.deadline = self._monotonic() + PATIENCE_S
        with self._lock:
            idle = not self._waiting
            self._waiting.append(operation)
        if idle:
            self._work.set()

    def withdraw(self, operation: Operation) -> bool:
        """Take `operation` back if it has not started; return whether that was so.

        A withdrawn operation never runs and never settles.
        """
        with self._lock:
            if operation.started:
                return False
            self._waiting.remove(operation)
            return True

    async def run(self) -> None:
        """Commit what is handed over until `close` was called and all that was there has ended.

        Shielded from cancellation, for what was handed over has been promised an answer. After
        `close` that takes as long as the commits under way, and at most `PATIENCE_S` more for
        each batch while another process holds the file.
        """
        try:
            with trio.CancelScope(shield=True):
                while self._waiting or not self._closed:
                    if not self._waiting:
                        self._work = trio.Event()
                        await self._work.wait()
                        continue
                    ended = await self._offload(self._cycle, self._limiter)
                    self._unsettled = ended[::-1]
                    while self._unsettled:
                        self._unsettled.pop().settle()
                await self._offload(self._disconnect, self._limiter)
        except BaseException as bug:  # of ours; nobody may be left waiting for ever
            self._closed = True
            for operation in self._unsettled + self._take(len(self._waiting)):
                operation.error = StorageFailed("writing", f"a bug: {bug!r}", unknown=True)
                with suppress(Exception):  # another one must not keep the rest waiting
                    operation.settle()
            raise

    def close(self) -> None:
        """Take nothing more; `run` ends when all that was handed over has its answer."""
        self._closed = True
        self._work.set()

    # What follows runs in the worker thread.

    def _cycle(self) -> list[Operation]:
        """Begin, take what waits, commit; return the operations whose outcome is final."""
        try:
            connection = self._connected()
            ended = self._begin(connection)
        except (apsw.Error, StorageError) as error:
            return self._fail(self._take(len(self._waiting)), error)
        if ended is not None:
            return ended
        batch = self._unsettled = self._take(MAX_BATCH)
        if self._transact(connection, batch):
            return batch
        for operation in batch:
            if operation.error is None:
                self._run_alone(operation)
        return batch

    def _begin(self, connection: apsw.Connection) -> list[Operation] | None:
        """Begin a transaction; or return the operations that have waited too long for it."""
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return None
            except apsw.BusyError as error:
                now = self._monotonic()
                with self._lock:
                    late = [one for one in self._waiting if one.deadline <= now]
                    for operation in late:
                        operation.started = True
                        self._waiting.remove(operation)
                    empty = not self._waiting
                if late or empty:
                    return self._fail(late, error)
            self._pause(self._random.uniform(0, JITTER_S))

    def _transact(self, connection: apsw.Connection, batch: list[Operation]) -> bool:
        """Run `batch` in the transaction that is open and commit it.

        Returns False if the transaction was lost: then nothing was written, and those without
        an error have still to be run.
        """
        before = connection.total_changes()
        try:
            connection.execute("SAVEPOINT batch")
            if not self._run_all(connection, batch, savepoints=False):
                if not connection.in_transaction:
                    return False
                connection.execute("ROLLBACK TO batch")
                if not self._run_all(connection, batch, savepoints=True):
                    return False
            if connection.total_changes() == before:
                connection.execute("ROLLBACK")  # all were refused, or found nothing to do
                return True
            self._batch += 1
            batches.mark(connection, self._id, self._batch)
            connection.execute("COMMIT")
        except apsw.Error as error:
            return self._find_out(batch, error)
        self._note_success(batch)
        return True

    def _run_all(
        self, connection: apsw.Connection, batch: list[Operation], *, savepoints: bool
    ) -> bool:
        """Run what has no error yet; return False if the transaction cannot be committed so.

        An operation that is refused has hardly ever written anything by then, so the first
        attempt does without savepoints (a fifth of an append's time, measured), and only where
        one did write is the whole batch run again with them.
        """
        for operation in batch:
            if operation.error is not None:
                continue
            if savepoints:
                connection.execute("SAVEPOINT operation")
            before = connection.total_changes()
            try:
                operation.value = operation.run(connection)
            except Exception as error:
                self._fail([operation], error)
                if not connection.in_transaction:
                    return False
                if savepoints:
                    connection.execute("ROLLBACK TO operation")
                elif connection.total_changes() != before:
                    return False
            if savepoints:
                connection.execute("RELEASE operation")
        return True

    def _run_alone(self, operation: Operation) -> None:
        """Run one operation of a lost batch again, in a transaction of its own."""
        try:
            connection = self._connected()
            while True:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    break
                except apsw.BusyError:
                    if self._monotonic() >= operation.deadline:
                        raise
                self._pause(self._random.uniform(0, JITTER_S))
        except (apsw.Error, StorageError) as error:
            self._fail([operation], error)
            return
        self._transact(connection, [operation])

    def _find_out(self, batch: list[Operation], error: apsw.Error) -> bool:
        """Open the file anew and see whether the last commit was done; as `_transact` returns.

        If the file does not come back in time, the operations fail with an unknown outcome;
        the mark is looked at when it does, and `landed` then tells.
        """
        give_up = self._monotonic() + PATIENCE_S
        self._doubtful = [operation for operation in batch if operation.error is None]
        doubtful = self._doubtful
        self._disconnect(forget=False)
        while True:
            try:
                self._connected()
            except (apsw.Error, StorageError):
                if self._monotonic() >= give_up:
                    self._fail(doubtful, error, unknown=True)
                    return True
                self._pause(0.01)
            else:
                break
        if doubtful and doubtful[0].landed:
            self._note_success(batch)
            return True
        if len(batch) == 1:
            self._fail(batch, error)
        return False

    def _note_success(self, batch: list[Operation]) -> None:
        done = 0
        for operation in batch:
            if operation.error is None:
                operation.landed = True
                done += 1
        self._commits += 1
        self._operations += done
        self._largest_batch = max(self._largest_batch, done)
        self._failing_since = self._failure = None
        if any(operation.scrub for operation in batch):
            self._scrub()

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, StorageError):
            self._failure = error
            if self._failing_since is None:
                self._failing_since = self._monotonic()

    def _fail(
        self, operations: list[Operation], error: Exception, *, unknown: bool = False
    ) -> list[Operation]:
        for operation in operations:
            operation.value = None
            operation.error = _meant(error, unknown=unknown)
            self._note_failure(operation.error)
        return operations

    def _take(self, most: int) -> list[Operation]:
        with self._lock:
            taken, self._waiting = self._waiting[:most], self._waiting[most:]
            for operation in taken:
                operation.started = True
        return taken

    def _connected(self) -> apsw.Connection:
        if self._connection is None:
            connection = self._connect()
            if self._doubtful:
                landed = batches.last(connection, self._id) == self._batch
                for operation in self._doubtful:
                    operation.landed = landed
                self._doubtful = []
            self._connection = connection
        return self._connection

    def _scrub(self) -> None:
        """Empty the log, which still holds what was removed, unless somebody reads from it."""
        with suppress(apsw.BusyError):  # then the next checkpoint that finds no reader does it
            self._connected().wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    def _disconnect(self, *, forget: bool = True) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if forget:
                batches.forget(connection, self._id)
        except apsw.Error:
            pass  # the mark of a writer that is gone means nothing
        finally:
            close(connection)


def _meant(error: Exception, *, unknown: bool = False) -> Exception:
    """Return what `error` means to a caller; each caller gets an object of its own."""
    if isinstance(error, StorageError):
        meant: StorageError | None = type(error)(error.doing, error.detail, unknown=unknown)
    elif isinstance(error, apsw.Error):
        meant = storage_error(error, "writing")
    else:
        meant = None
    if meant is None:
        return error
    meant.unknown = unknown
    meant.__cause__ = error
    return meant
