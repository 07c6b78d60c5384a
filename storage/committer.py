"""Group commit, the worker thread's half: many operations, one COMMIT. Knows no table but its mark.

One that fails takes nobody along: what it wrote, if anything, is rolled back alone. The
transaction is begun before the operations are taken, so one that waits for a busy file can
still be withdrawn. Busy is waited out here with a jitter of under a millisecond: SQLite's own
back-off let some of four writers wait for seconds.

Two things can go wrong with a whole batch. SQLite gives up the transaction on a full disk or
an I/O error: then the operations are run again, each in a transaction of its own, so that only
those fail that must. And a COMMIT that fails may have been done all the same: the connection is
opened anew, and the batch's mark, written in its own transaction, tells the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

import apsw

from . import batches
from .connect import PATIENCE_S, Connection, close, storage_error
from .errors import StorageBusy, StorageError, StorageFailed
from .operation import Operation, Waiting
from .tally import Tally

__all__ = ["Committer"]

JITTER_S = 0.001
"""Longest pause between two attempts on a busy file."""

MAX_BATCH = 1_000
"""Operations in one transaction. A guess: longer ones gain little and make everybody wait."""

BUSY = StorageBusy("writing", "another process held the file for the whole time limit")


class Committer:
    """Owns the writing connection. Everything here runs in one thread at a time."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        waiting: Waiting,
        *,
        number: int,
        monotonic: Callable[[], float],
        random: Random,
        pause: Callable[[float], None],
    ) -> None:
        self._connect = connect
        self._waiting = waiting
        self._monotonic = monotonic
        self._random = random
        self._pause = pause
        self._id = number
        self._connection: Connection | None = None
        self._batch = 0
        self._doubtful: list[Operation] = []
        self._to_scrub = False
        self.under_way: list[Operation] = []
        """The operations taken and not returned yet."""
        self.tally = Tally(monotonic)

    def cycle(self) -> list[Operation]:
        """Begin, take what waits, commit; return the operations whose outcome is final."""
        try:
            connection = self._begin()
        except (apsw.Error, StorageError) as error:
            return self.fail_waiting(error)
        if connection is None:
            return self._fail(self._waiting.take_late(self._monotonic()), BUSY)
        batch = self.under_way = self._waiting.take(MAX_BATCH)
        if not self._transact(connection, batch) and len(batch) > 1:
            for operation in batch:
                self._run_alone(operation)
        self.under_way = []
        return batch

    def fail_waiting(self, error: Exception) -> list[Operation]:
        """Fail all that waits with `error` and return it."""
        return self._fail(self._waiting.take(), error)

    def _begin(self) -> Connection | None:
        """Begin a transaction; None as soon as nobody waits for it, or somebody has for too long."""
        while True:
            try:
                connection = self._connected()
                connection.execute("BEGIN IMMEDIATE")
                self._check_files(connection)
            except (apsw.BusyError, StorageBusy):
                if not self._waiting or self._waiting.anybody_late(self._monotonic()):
                    return None
            else:
                self.tally.begun()
                return connection
            self._pause(self._random.uniform(0, JITTER_S))

    def _check_files(self, connection: Connection) -> None:
        """Raise `StorageFailed` if what would be written now were out of everybody's reach.

        The next attempt opens the file that is there by then, if one is.
        """
        if not connection.has_its_files():
            self.disconnect(forget=False)
            raise StorageFailed("writing", "the file or its log was removed or replaced")

    def _transact(self, connection: Connection, batch: list[Operation]) -> bool:
        """Run `batch` in the transaction that is open and commit it.

        Returns False if the transaction was lost: then nothing was written, and the operations
        are to be run again, also those that were refused, for it was by what others had written.
        A batch of one is not, its error is final.
        """
        self._batch += 1  # first, or an early error would find the mark of the batch before
        before = connection.total_changes()
        try:
            connection.execute("SAVEPOINT batch")
            if not self._run_all(connection, batch, savepoints=False):
                if not connection.in_transaction:
                    return False
                connection.execute("ROLLBACK TO batch")
                if not self._run_all(connection, batch, savepoints=True):
                    return False
            refused = all(operation.error is not None for operation in batch)
            if refused or connection.total_changes() == before:
                connection.execute("ROLLBACK")  # nothing to commit: no disk may refuse it
                return True
            batches.mark(connection, self._id, self._batch)
            connection.execute("COMMIT")
        except apsw.Error as error:
            return self._find_out(batch, error)
        self._note_success(batch)
        return True

    def _run_all(self, connection: Connection, batch: list[Operation], *, savepoints: bool) -> bool:
        """Run all, each for itself; return False if the transaction cannot be committed so.

        An operation that is refused has hardly ever written anything by then, so the first
        attempt does without savepoints (a fifth of an append's time, measured), and only where
        one did write is the whole batch run again with them.
        """
        start = connection.total_changes()
        for operation in batch:
            operation.error = None
            if savepoints:
                connection.execute("SAVEPOINT operation")
            before = connection.total_changes()
            operation.alone = before == start
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
        operation.alone = False
        while True:
            try:
                connection = self._connected()
                connection.execute("BEGIN IMMEDIATE")
                break
            except (apsw.BusyError, StorageBusy) as error:
                if operation.deadline is None or self._monotonic() >= operation.deadline:
                    self._fail([operation], error)
                    return
            except (apsw.Error, StorageError) as error:
                self._fail([operation], error)
                return
            self._pause(self._random.uniform(0, JITTER_S))
        self._transact(connection, [operation])

    def _find_out(self, batch: list[Operation], error: apsw.Error) -> bool:
        """Open the file anew and see whether the last commit was done; as `_transact` returns.

        If the file does not come back in time, the operations fail with an unknown outcome;
        the mark is looked at when it does, and `landed` then tells.
        """
        give_up = self._monotonic() + PATIENCE_S
        self._doubtful = [operation for operation in batch if operation.error is None]
        doubtful = self._doubtful
        self.disconnect(forget=False)
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
            if _is_synced(self._connected()):
                self._note_success(batch)
            else:
                self._fail(doubtful, error, unknown=True)
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
        self.tally.committed(done)
        self._to_scrub = self._to_scrub or any(operation.scrub for operation in batch)
        if self._to_scrub:
            self._scrub()

    def _fail(
        self, operations: list[Operation], error: Exception, *, unknown: bool = False
    ) -> list[Operation]:
        for operation in operations:
            operation.value = None
            operation.error = _meant(error, unknown=unknown)
            self.tally.failed(operation.error)
        return operations

    def _connected(self) -> Connection:
        if self._connection is None:
            connection = self._connect()
            try:
                self._look_back(connection)
            except BaseException:
                close(connection)
                raise
            self._connection = connection
        return self._connection

    def _look_back(self, connection: Connection) -> None:
        """Find out by the mark what became of the operations whose commit seemed to fail."""
        if not self._doubtful:
            return
        landed = batches.last(connection, self._id) == self._batch
        for operation in self._doubtful:
            operation.landed = landed
        self._doubtful = []

    def _scrub(self) -> None:
        """Empty the log, which still holds what was removed; if somebody reads, the next time."""
        with suppress(apsw.Error):
            self._connected().wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            self._to_scrub = False

    def disconnect(self, *, forget: bool = True) -> None:
        """Close the connection; `forget` removes this writer's mark first, if that can be done."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if forget:
            with suppress(apsw.Error):  # the mark of a writer that is gone means nothing
                batches.forget(connection, self._id)
        close(connection)


def _is_synced(connection: Connection) -> bool:
    """Copy the log into the file and sync it; return whether all of it is there.

    A commit whose sync failed can be read from the system's cache and yet not be on disk, and
    syncing the log again would not write it. See https://wiki.postgresql.org/wiki/Fsync_Errors.
    """
    try:
        in_log, copied = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    except apsw.Error:
        return False
    return in_log == copied


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
