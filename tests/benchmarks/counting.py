"""What a call costs SQLite, counted: virtual-machine steps and pages written.

Counts are the same on every machine and in every run; a disk, a cache or a busy neighbour
cannot hide in them. All connections that are opened inside `counting` are counted, whoever opens
them, so this sees everything that a call of the public API makes SQLite do. Use it with
`offload=inline`: then all of that is over when the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import apsw

__all__ = ["Cost", "Counter", "counting", "mean"]


class Cost(NamedTuple):
    """What SQLite did."""

    steps: float
    """Virtual-machine steps of all statements that ended, BEGIN and COMMIT included."""
    pages: float
    """Pages written to the log."""


class Counter:
    """Counts what its connections do."""

    def __init__(self) -> None:
        self._steps = 0
        self._connections: list[apsw.Connection] = []

    def watch(self, connection: apsw.Connection) -> None:
        """Count this connection from now on."""
        self._connections.append(connection)

    @contextmanager
    def into(self, costs: list[Cost]) -> Iterator[None]:
        """Put the cost of the block into `costs`."""
        self._steps = 0
        self._pages()
        self._trace(True)
        try:
            yield
        finally:
            self._trace(False)
            costs.append(Cost(self._steps, self._pages()))

    def _trace(self, on: bool) -> None:
        # Only while something is counted: a callback for each statement takes longer than most.
        for connection in filter(None, self._connections):  # a closed one is false
            if on:
                connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, self._ended, id=self)
            else:
                connection.trace_v2(0, None, id=self)

    def _ended(self, event: dict[str, dict[str, int]]) -> None:
        self._steps += event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]

    def _pages(self) -> int:
        """Return the pages written since the last call."""
        return sum(
            connection.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE, reset=True)[0]
            for connection in filter(None, self._connections)
        )


@contextmanager
def counting() -> Iterator[Counter]:
    """Lend a counter of every connection that is opened inside."""
    counter = Counter()
    apsw.connection_hooks.append(counter.watch)
    try:
        yield counter
    finally:
        apsw.connection_hooks.remove(counter.watch)


def mean(costs: list[Cost]) -> Cost:
    """Return the mean of `costs`."""
    steps, pages = zip(*costs, strict=True)
    return Cost(sum(steps) / len(costs), sum(pages) / len(costs))
