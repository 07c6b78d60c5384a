"""How blocking work is done: in a worker thread, or on the spot where time is virtual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

from .errors import StorageFailed

__all__ = ["Offload", "in_thread", "inline"]

T = TypeVar("T")


class Offload(Protocol):
    """Does `work` and returns what it returns; at most as many at once as `limiter` has tokens.

    A cancellation before the work has begun may prevent it. Once it has begun it is waited
    for, cancelled or not: what it does to a connection must never go on behind our back.
    """

    async def __call__(self, work: Callable[[], T], limiter: trio.CapacityLimiter, /) -> T: ...


async def in_thread(work: Callable[[], T], limiter: trio.CapacityLimiter, /) -> T:
    """Do the work in one of trio's worker threads; waits for a token in order of arrival.

    Raises `StorageFailed` if the system does not give us a thread; nothing was done then.
    """
    begun = False

    def begin() -> T:
        nonlocal begun
        begun = True
        return work()

    try:
        return await trio.to_thread.run_sync(begin, limiter=limiter)
    except RuntimeError as error:
        if begun:
            raise
        raise StorageFailed("starting a thread", str(error)) from error


async def inline(work: Callable[[], T], limiter: trio.CapacityLimiter, /) -> T:
    """Do the work on the spot. For tests: trio's virtual clock cannot see a thread."""
    async with limiter:
        return work()
