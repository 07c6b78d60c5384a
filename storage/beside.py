"""A task that runs beside a block, without the block's errors being wrapped for it.

A nursery puts every error into a group, also the only one and also the caller's own. Whoever
opens a store did not ask for a nursery, so his `except ValueError` must go on working.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

__all__ = ["beside"]


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def beside(
    task: Callable[[], Awaitable[None]],
    end: Callable[[], None] | None = None,
    farewell: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[None]:
    """Run `task` while the block runs.

    At the end of the block, however it ends, `farewell` is awaited, shielded from cancellation:
    it must end by itself. Then `end` is called, after which the task must end by itself;
    without `end` the task is cancelled. An error of the block is raised as it is. One of the
    task cancels the block and is raised, in a group: it is a bug.
    """
    raised: BaseException | None = None
    done = trio.Event()
    # Shielded, or a cancellation from outside would come out of the task and take the place of
    # `raised`; the block ends with a cancellation, and the task then with the block.
    scope = trio.CancelScope(shield=True)

    async def watched() -> None:
        try:
            with scope:
                await task()
        finally:
            done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched)
        try:
            yield
        except BaseException as error:
            raised = error
        with trio.CancelScope(shield=True):
            try:
                if farewell is not None:
                    await farewell()
            finally:
                if end is None:
                    scope.cancel()
                else:
                    end()
                await done.wait()
    if raised is not None:
        try:
            raise raised
        finally:
            del raised
