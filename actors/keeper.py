"""Keeps the turns that this process holds: renews them, and notices when one is lost.

One task for all of them, and none while none is held. A task for each turn was tried first and
cost more than the rest of the turn.

Time is the boot clock's. A turn is renewed when a third of its time has passed; in between it is
looked at, for a turn that was taken over, or that a newer message interrupts, should stop soon.
What cannot be renewed or looked at now is tried again at the next look: while storage takes
nothing from us, mostly nobody else gets past us either, and if so the token tells.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import aclosing
from typing import Protocol

import trio
from trio_util import AsyncBool, periodic

from ..storage import LossReason, StorageError, Store

__all__ = ["LEAST_TTL_S", "Keeper", "Kept"]

LOOK_S = 0.25
"""How often held turns are looked at. A guess: what a person hardly notices. One question to
storage for all of them."""

LEAST_TTL_S = 4 * LOOK_S
"""A turn that lasts less could run out between two looks."""

logger = logging.getLogger(__name__)


class Kept(Protocol):
    """A turn, as far as it is kept."""

    token: int
    ttl_s: float
    renew_at: float
    """When it is to be renewed, in seconds of the boot clock."""

    @property
    def life(self) -> int:
        """The number of its session."""

    @property
    def overdue(self) -> bool:
        """Whether it was held for as long as it may be. Then it is not renewed."""

    def lost(self, reason: LossReason) -> None:
        """Told when it was lost."""


class Keeper:
    """The turns that are held through one open store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turns: dict[int, Kept] = {}
        self._any = AsyncBool()
        self._soon = AsyncBool()

    def __len__(self) -> int:
        return len(self._turns)

    def __repr__(self) -> str:
        return f"<Keeper: {len(self._turns)} turns>"

    def hold(self, turn: Kept) -> None:
        """Keep `turn` from now on."""
        turn.renew_at = self._store.clock().seconds + turn.ttl_s / 3
        self._turns[turn.token] = turn
        if len(self._turns) == 1:
            self._any.value = True

    def let_go(self, turn: Kept) -> None:
        """Keep it no more."""
        self._turns.pop(turn.token, None)
        if not self._turns:
            self._any.value = False

    def look_now(self) -> None:
        """Look at the turns at once: a message was posted that may interrupt one of them."""
        self._soon.value = True

    async def emptied(self) -> None:
        """Return when no turn is held. Leaves nothing behind when cancelled."""
        await self._any.wait_value(False)

    def close(self) -> None:
        """Tell every turn that the store closes."""
        for turn in list(self._turns.values()):
            turn.lost("closed")

    async def run(self) -> None:
        """Keep turns for ever. A cancellation leaves them to run out."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_now_and_then)
            nursery.start_soon(self._look_when_told)

    async def _look_when_told(self) -> None:
        while True:
            await self._soon.wait_value(True)
            self._soon.value = False
            await self._look()

    async def _look_now_and_then(self) -> None:
        while True:
            await self._any.wait_value(True)
            async with aclosing(periodic(LOOK_S)) as looks:
                async for _ in looks:
                    if not self._turns:
                        break
                    await self._look()

    async def _look(self) -> None:
        now = self._store.clock().seconds
        for turn in [turn for turn in self._turns.values() if turn.overdue]:
            turn.lost("overdue")  # and is not renewed, should its block go on
        turns = [turn for turn in self._turns.values() if not turn.overdue]
        due = [turn for turn in turns if turn.renew_at <= now]
        await self._renew(due, now)
        try:
            lost, interrupted = await self._store.troubled(
                [(turn.life, turn.token) for turn in turns]
            )
        except StorageError as error:
            logger.warning("held turns could not be looked at: %s", type(error).__name__)
        else:
            self._tell(lost, "taken")
            self._tell(interrupted, "interrupted")

    async def _renew(self, due: list[Kept], now: float) -> None:
        if not due:
            return
        try:
            lost = await self._store.renew((turn.token, turn.ttl_s) for turn in due)
        except StorageError as error:
            logger.warning("held turns could not be renewed: %s", type(error).__name__)
        else:
            for turn in due:
                turn.renew_at = now + turn.ttl_s / 3
            self._tell(lost, "taken")

    def _tell(self, tokens: Collection[int], reason: LossReason) -> None:
        for token in tokens:
            if token in self._turns:  # it may have ended meanwhile
                self._turns[token].lost(reason)
