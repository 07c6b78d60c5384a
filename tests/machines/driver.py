"""A trio loop in a thread of its own, for tests that are not async themselves.

Its clock stands still unless it is told to jump, so nothing in the store happens by itself.
While the gate is closed the store's blocking work waits, so that many changes can be handed over
before the first of them begins.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

import trio
import trio.testing

from turnkeeper.actors import Sessions, open_sessions

__all__ = ["Driver"]

T = TypeVar("T")


class Driver:
    """Opens a store, does things in it, closes it, from plain code."""

    def __init__(self, path: Path, *, vfs: str, max_pending: int) -> None:
        self.sessions: Sessions
        self._path = path
        self._vfs = vfs
        self._max_pending = max_pending
        self._clock = trio.testing.MockClock()
        self._now = count(1_000)
        self._seconds = count()
        self._random = random.Random(0)
        self._gate: trio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=trio.run, args=(self._live,), kwargs={"clock": self._clock}, daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` in the loop and return what it returns."""
        return trio.from_thread.run(work, trio_token=self._token)

    def open(self) -> None:
        """Open the store. Raises what `open_sessions` raises."""

        async def begin() -> None:
            self._opened, self._closing, self._closed = (trio.Event() for _ in range(3))
            self._error: Exception | None = None
            self._nursery.start_soon(self._hold)
            await self._opened.wait()
            if self._error is not None:
                raise self._error

        self.run(begin)

    def close(self) -> None:
        """Close the store. Raises what the end of the block raises."""

        async def finish() -> None:
            self._closing.set()
            await self._closed.wait()
            if self._error is not None:
                raise self._error

        self.run(finish)

    def stop(self) -> None:
        """End the loop, with the store if it is still open."""
        trio.from_thread.run_sync(self._nursery.cancel_scope.cancel, trio_token=self._token)
        self._thread.join()

    def jump(self, seconds: float) -> None:
        """Let time pass, and what then happens by itself happen."""

        async def pass_time() -> None:
            self._clock.jump(seconds)
            await trio.testing.wait_all_tasks_blocked()

        self.run(pass_time)

    @contextmanager
    def gate(self) -> Iterator[None]:
        """Nothing reaches the disk within. To be used inside the loop."""
        self._gate = trio.Event()
        try:
            yield
        finally:
            self._gate.set()
            self._gate = None

    async def _live(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self._nursery:
            self._ready.set()
            await trio.sleep_forever()

    async def _hold(self) -> None:
        try:
            async with open_sessions(
                self._path,
                mailbox_size=4,
                max_resident=3,
                max_pending=self._max_pending,
                now=lambda: float(next(self._now)),
                monotonic=lambda: float(next(self._seconds)),
                random=self._random,
                offload=self._offload,
                vfs=self._vfs,
            ) as self.sessions:
                self._opened.set()
                await self._closing.wait()
        except Exception as error:
            self._error = error
        finally:
            self._opened.set()
            self._closed.set()

    async def _offload(self, work: Callable[[], T], limiter: trio.CapacityLimiter, /) -> T:
        if self._gate is not None:
            await self._gate.wait()
        async with limiter:
            return work()
