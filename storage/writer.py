"""Group commit, the event loop's half: takes operations, tells each what became of it.

While a batch commits, the next one gathers; so a commit's fsync is paid once for all that
waited, and nobody waits for a timer. The worker thread's half is `committer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from random import Random

import trio

from .committer import Committer
from .connect import PATIENCE_S, Connection
from .errors import Closed, StorageError, StorageFailed
from .offload import Offload
from .operation import Operation, Waiting
from .tally import WriterStatistics

__all__ = ["Writer"]


class Writer:
    """Takes operations, commits them in batches, and tells each what became of it.

    `number` is its own among all that write to the file, ever.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        *,
        name: str,
        number: int,
        offload: Offload,
        monotonic: Callable[[], float],
        random: Random,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._name = name
        self._offload = offload
        self._monotonic = monotonic
        self._waiting = Waiting()
        self._committer = Committer(
            connect,
            self._waiting,
            number=number,
            monotonic=monotonic,
            random=random,
            pause=pause,
        )
        self._limiter = trio.CapacityLimiter(1)
        self._work = trio.Event()
        self._closed = False
        self._unsettled: list[Operation] = []

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        commits = self._committer.tally.commits
        return f"<Writer: {state}, {len(self._waiting)} waiting, {commits} commits>"

    def statistics(self) -> WriterStatistics:
        """Return what happened so far."""
        return self._committer.tally.statistics(len(self._waiting))

    @trio.lowlevel.enable_ki_protection
    def submit(self, operation: Operation) -> None:
        """Hand `operation` over; operations run in the order in which they were handed over.

        Raises `Closed` if the writer was closed.
        """
        if self._closed:
            raise Closed("store", self._name)
        if operation.deadline is None:
            operation.deadline = self.deadline()
        if self._waiting.put(operation):
            self._work.set()

    @property
    def closed(self) -> bool:
        """True once nothing is taken any more."""
        return self._closed

    def deadline(self) -> float:
        """Return until when something that comes now waits for a busy file."""
        return self._monotonic() + PATIENCE_S

    @trio.lowlevel.enable_ki_protection
    def withdraw(self, operation: Operation) -> bool:
        """Take `operation` back if it has not started; return whether that was so.

        A withdrawn operation never runs and never settles.
        """
        return self._waiting.withdraw(operation)

    @trio.lowlevel.enable_ki_protection
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
                    # No local name for the batch: it would live until the next one has ended.
                    try:
                        self._unsettled = await self._offload(self._committer.cycle, self._limiter)
                    except StorageError as error:  # no thread could be had
                        self._unsettled = self._committer.fail_waiting(error)
                    self._unsettled.reverse()
                    while self._unsettled:
                        self._unsettled.pop().settle()
                with suppress(StorageError):  # no thread: closing then waits for the last reader's
                    await self._offload(self._committer.disconnect, self._limiter)
        except BaseException as bug:  # of ours; nobody may be left waiting for ever
            self._closed = True
            left = self._unsettled[::-1] + self._committer.under_way + self._waiting.take()
            for operation in left:
                operation.error = StorageFailed(
                    "writing", f"a bug: {type(bug).__name__}", unknown=True
                )
                with suppress(Exception):  # another one must not keep the rest waiting
                    operation.settle()
            raise

    def close(self) -> None:
        """Take nothing more; `run` ends when all that was handed over has its answer."""
        self._closed = True
        self._work.set()
