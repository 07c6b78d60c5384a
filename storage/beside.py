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
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task)
        try:
            yield
        except BaseException as error:
            raised = error
        if farewell is not None:
            with trio.CancelScope(shield=True):
                await farewell()
        if end is None:
            nursery.cancel_scope.cancel()
        else:
            end()
    if raised is not None:
        try:
            raise raised
        finally:
            del raised
