"""Brings what is pending, and the ends of turns, to the disk: tries again, and once more at the end.

Any later change of a session takes its pending appends along, so this only serves sessions
to which nothing happens. All of them are tried together, then there is a pause, which grows
while nothing succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

import trio
from trio_util import AsyncBool

from .actor import SessionActor
from .ask import Ask
from .messages import Drain

__all__ = ["Recovery"]

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
"""Both guesses: short enough for a blip of the disk, long enough for one that is full for hours."""


class Recovery:
    """Remembers which sessions have something pending, and tries them."""

    def __init__(self, resident: Callable[[str], SessionActor | None], random: Random) -> None:
        self._resident = resident
        self._random = random
        self._ids: dict[str, None] = {}
        self._something = AsyncBool()

    def __repr__(self) -> str:
        return f"<Recovery: {len(self._ids)} sessions>"

    def remember(self, actor: SessionActor) -> None:
        """Note that `actor` has something pending."""
        self._ids[actor.id] = None
        self._something.value = True

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Try for ever. A cancellation withdraws the tries that have not started."""
        while True:
            await self._something.wait_value(True)
            pause_s = FIRST_PAUSE_S
            while True:
                await trio.sleep(pause_s * self._random.uniform(0.5, 1))
                before = len(self._ids)
                if await self.try_all() == 0:
                    break
                shrunk = len(self._ids) < before
                pause_s = FIRST_PAUSE_S if shrunk else min(2 * pause_s, LONGEST_PAUSE_S)
            self._something.value = False

    async def try_all(self) -> int:
        """Try every session once; return in how many something is pending still.

        A cancellation withdraws the tries that have not started.
        """
        async with trio.open_nursery() as nursery:
            for id in list(self._ids):
                actor = self._resident(id)
                if actor is not None and actor.owes:
                    nursery.start_soon(_try, actor)
        for id in list(self._ids):
            actor = self._resident(id)
            if actor is None or not actor.owes:
                del self._ids[id]
        return len(self._ids)


async def _try(actor: SessionActor) -> None:
    ask = Ask(Drain())
    actor.deliver(ask)
    # Whatever it is, it is pending still; `health` says so, and the next round tries again. A
    # failing actor has been logged and built again by then.
    with suppress(Exception):
        await ask.answer()
