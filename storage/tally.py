"""What a writer has done, and whether storage takes what it is given."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from .errors import StorageBusy, StorageError

__all__ = ["Tally", "WriterStatistics"]


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


class Tally:
    """Counts commits, and remembers a failure until something proves that it is over."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.commits = 0
        self._operations = 0
        self._largest_batch = 0
        self._failing_since: float | None = None
        self._failure: StorageError | None = None

    def committed(self, operations: int) -> None:
        """A batch of so many operations is on disk."""
        self.commits += 1
        self._operations += operations
        self._largest_batch = max(self._largest_batch, operations)
        self._failing_since = self._failure = None

    def begun(self) -> None:
        """A transaction was begun: the file is not busy any more. Of the disk it proves nothing."""
        if isinstance(self._failure, StorageBusy):
            self._failing_since = self._failure = None

    def failed(self, error: Exception) -> None:
        """An operation has failed; only an error of storage counts."""
        if isinstance(error, StorageError):
            self._failure = error
            if self._failing_since is None:
                self._failing_since = self._monotonic()

    def statistics(self, waiting: int) -> WriterStatistics:
        """Return what happened so far; `waiting` operations are to come."""
        return WriterStatistics(
            self.commits,
            self._operations,
            self._largest_batch,
            waiting,
            self._failing_since,
            self._failure,
        )
