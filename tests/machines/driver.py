"""A trio loop in a thread of its own, for tests that are not async themselves, and stores in it.

Its clock stands still unless it is told to jump, so nothing in a store happens by itself, and what
does happen has ended when a call comes back. While a side is shut its blocking work waits: so many
changes can be handed over before the first of them begins, and so a process is held still while
another goes on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import apsw
import trio
import trio.testing
from support import Disk

from turnkeeper.actors import Sessions, Turn, open_sessions
from turnkeeper.storage import Ended, Moment

__all__ = ["Block", "Driver", "Failure", "Side"]

T = TypeVar("T")


class Wanted(Protocol):
    """What an ``async with`` takes a turn by."""

    ended: Ended | None

    async def __aenter__(self) -> Turn | None: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool: ...


class Failure(Exception):
    """What goes wrong inside a block."""


class Driver:
    """Runs a loop under a clock that stands still."""

    def __init__(self) -> None:
        self._clock = trio.testing.MockClock()
        self.now = count(1_000)
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=trio.run, args=(self._live,), kwargs={"clock": self._clock}, daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` in the loop, and all that follows from it, and return what it returns."""

        async def whole() -> T:
            try:
                return await work()
            finally:
                await trio.testing.wait_all_tasks_blocked()

        return trio.from_thread.run(whole, trio_token=self._token)

    def stop(self) -> None:
        """End the loop, with what is open still."""
        trio.from_thread.run_sync(self.nursery.cancel_scope.cancel, trio_token=self._token)
        self._thread.join()

    def jump(self, seconds: float) -> float:
        """Let time pass; return what time it is then, on the clock that turns expire by."""

        async def pass_time() -> float:
            self._clock.jump(seconds)
            return trio.current_time()

        return self.run(pass_time)

    async def _live(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as self.nursery:
            self._ready.set()
            await trio.sleep_forever()


class Side:
    """One store on the file, with a disk of its own that fails on demand."""

    def __init__(
        self, driver: Driver, path: Path, disk: Disk, name: str, *, max_pending: int, max_inbox: int
    ) -> None:
        self.sessions: Sessions
        self.disk = disk
        self.name = name
        self.skip = 0
        """Writes that go well before the next one fails."""
        self._driver = driver
        self._path = path
        self._max_pending = max_pending
        self._max_inbox = max_inbox
        self._seconds = count()
        self._random = random.Random(name)
        self._gate: trio.Event | None = None
        vars(disk)["check_write"] = self._check_write

    def __repr__(self) -> str:
        return f"<Side {self.name}>"

    def open(self) -> None:
        """Open the store. Raises what `open_sessions` raises."""

        async def begin() -> None:
            self._opened, self._closing, self._closed = (trio.Event() for _ in range(3))
            self._error: Exception | None = None
            self._driver.nursery.start_soon(self._hold)
            await self._opened.wait()
            if self._error is not None:
                raise self._error

        self._driver.run(begin)

    def close(self) -> None:
        """Close the store. Raises what the end of its block raises."""

        async def finish() -> None:
            self._closing.set()
            await self._closed.wait()
            if self._error is not None:
                raise self._error

        self._driver.run(finish)

    def die(self) -> None:
        """End the store as a kill does: nothing is released, and its lock is free."""
        self.heal()
        self.disk.write_error = apsw.IOError  # so nothing that the end tries gets anywhere
        self._driver.run(self._let_go_of_the_lock)
        with suppress(Exception):  # who is dead tells nobody
            self.close()
        self.heal()

    async def _let_go_of_the_lock(self) -> None:
        self.sessions._store.owners.close()

    def heal(self) -> None:
        """Let the disk take everything."""
        self.disk.write_error = self.disk.open_error = self.disk.fail_next = None
        self.skip = 0

    def shut(self) -> None:
        """Let no blocking work begin. To be used inside the loop, as is `let_on`."""
        self._gate = trio.Event()

    def let_on(self) -> None:
        """Let the work that waits begin."""
        if self._gate is not None:
            self._gate.set()
            self._gate = None

    @contextmanager
    def gate(self) -> Iterator[None]:
        """Nothing reaches the disk within."""
        self.shut()
        try:
            yield
        finally:
            self.let_on()

    async def _hold(self) -> None:
        try:
            async with open_sessions(
                self._path,
                mailbox_size=4,
                max_resident=3,
                max_pending=self._max_pending,
                max_inbox=self._max_inbox,
                holder=self.name,
                now=lambda: float(next(self._driver.now)),
                monotonic=lambda: float(next(self._seconds)),
                clock=lambda: Moment("a boot", trio.current_time()),
                random=self._random,
                offload=self._offload,
                vfs=self.disk.name,
            ) as self.sessions:
                self._opened.set()
                await self._closing.wait()
        except Exception as error:
            self._error = error
        finally:
            self._opened.set()
            self._closed.set()

    async def _offload(self, work: Callable[[], T], limiter: trio.CapacityLimiter, /) -> T:
        while self._gate is not None:
            await self._gate.wait()
        async with limiter:
            return work()

    def _check_write(self) -> None:
        if self.disk.write_error is not None and self.skip:
            self.skip -= 1
        else:
            Disk.check_write(self.disk)


class Block:
    """An ``async with`` block that holds a turn, in a task of its own, and ends when it is told."""

    def __init__(self, driver: Driver, turn: Wanted) -> None:
        self.turn: Turn | None = None
        self.over = False
        """Whether it has ended."""
        self.raised: BaseException | None = None
        """What came out of it."""
        self._driver = driver
        self.wanted = turn

    async def begin(self) -> Block:
        """Enter it; raises what entering raises."""
        self._entered, self._told = trio.Event(), trio.Event()
        self._scope = trio.CancelScope()
        self._error: Exception | None = None
        self._driver.nursery.start_soon(self._live)
        try:
            await self._entered.wait()
        except trio.Cancelled:
            self._scope.cancel()
            raise
        if self.turn is None and self.raised is not None:
            raise self.raised
        return self

    async def end(self, how: str) -> None:
        """End it: ``well``, by an ``error``, or by a ``cancel``."""
        if how == "cancel":
            self._scope.cancel()
        else:
            self._error = Failure() if how == "error" else None
            self._told.set()
        await trio.testing.wait_all_tasks_blocked()

    async def _live(self) -> None:
        try:
            with self._scope:
                try:
                    async with self.wanted as self.turn:
                        self._entered.set()
                        if self.turn is not None:
                            await self._told.wait()
                            if self._error is not None:
                                raise self._error
                except BaseException as error:
                    self.raised = error
                    if not isinstance(error, Exception):
                        raise
        finally:
            self.over = True
            self._entered.set()
