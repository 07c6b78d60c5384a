"""An operation, and the list in which operations wait: the hand-over between two threads.

The event loop puts operations in and takes them back; the worker thread takes them out. The
lock guards no more than that, and nobody holds it longer than it takes to move a list.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from .connect import Connection

__all__ = ["Operation", "Waiting"]


class Operation:
    """One change on its way to the disk, and what became of it. To be derived from.

    `started` is true once a transaction has taken it; until then it can be withdrawn.
    `landed` is true once it is known to be on disk. `alone` is true if nothing had been written
    before it in the transaction of its last run, so that all it saw was on disk. `scrub` asks that what it removes goes from
    the log as well.
    """

    __slots__ = ("alone", "deadline", "error", "landed", "started", "value")

    scrub = False

    def __init__(self) -> None:
        self.value: Any = None  # what `run` returned; the writer does not look at it
        self.error: Exception | None = None
        self.started = False
        self.landed = False
        self.alone = False
        self.deadline: float | None = None  # set when it is handed over, if not before

    def run(self, connection: Connection) -> object:
        """Make the change; may be called more than once, each time from the beginning."""
        raise NotImplementedError

    def settle(self) -> None:
        """Called on the event loop once `value` or `error` is final."""
        raise NotImplementedError


class Waiting:
    """Operations that no transaction has taken yet, in the order in which they came."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._operations: list[Operation] = []

    def __len__(self) -> int:
        return len(self._operations)

    def put(self, operation: Operation) -> bool:
        """Add `operation`; return True if it is the only one."""
        with self._lock:
            self._operations.append(operation)
            return len(self._operations) == 1

    def withdraw(self, operation: Operation) -> bool:
        """Take `operation` back; False if it has been taken."""
        with self._lock:
            if operation.started:
                return False
            self._operations.remove(operation)
            return True

    def take(self, most: int | None = None) -> list[Operation]:
        """Take the first `most` operations, or all; they have started."""
        with self._lock:
            cut = len(self._operations) if most is None else most
            taken, self._operations = self._operations[:cut], self._operations[cut:]
            for operation in taken:
                operation.started = True
        return taken

    def anybody_late(self, now: float) -> bool:
        """Return True if some operation's deadline has come."""
        with self._lock:
            return any(_is_late(operation, now) for operation in self._operations)

    def take_late(self, now: float) -> list[Operation]:
        """Take the operations whose deadline has come; they have started, and failed."""
        with self._lock:
            late = [operation for operation in self._operations if _is_late(operation, now)]
            for operation in late:
                operation.started = True
                self._operations.remove(operation)
        return late


def _is_late(operation: Operation, now: float) -> bool:
    return operation.deadline is not None and operation.deadline <= now
