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
from contextlib import aclosing
from typing import Protocol

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

    def __len__(self) -> int:
        return len(self._turns)

    def __repr__(self) -> str:
        return f"<Keeper: {len(self._turns)} turns>"

    def hold(self, turn: Kept) -> None:
        """Keep `turn` from now on."""
        turn.renew_at = self._store.clock().seconds + turn.ttl_s / 3
        self._turns[turn.token] = turn
        self._any.value = True

    def let_go(self, turn: Kept) -> None:
        """Keep it no more."""
        self._turns.pop(turn.token, None)
        if not self._turns:
            self._any.value = False

    async def emptied(self) -> None:
        """Return when no turn is held. Leaves nothing behind when cancelled."""
        await self._any.wait_value(False)

    def close(self) -> None:
        """Tell every turn that the store closes."""
        for turn in list(self._turns.values()):
            turn.lost("closed")

    async def run(self) -> None:
        """Keep turns for ever. A cancellation leaves them to run out."""
        while True:
            await self._any.wait_value(True)
            async with aclosing(periodic(LOOK_S)) as looks:
                async for _ in looks:
                    if not self._turns:
                        break
                    await self._look()

    async def _look(self) -> None:
        now = self._store.clock().seconds
        turns = [turn for turn in self._turns.values() if not turn.overdue]
        due = [turn for turn in turns if turn.renew_at <= now]
        lost: list[int] = []
        interrupted: list[int] = []
        try:
            if due:
                lost += await self._store.renew((turn.token, turn.ttl_s) for turn in due)
            gone, heard = await self._store.troubled([(turn.life, turn.token) for turn in turns])
            lost += gone
            interrupted += heard
        except StorageError as error:
            logger.warning("held turns could not be looked at: %s", type(error).__name__)
            return
        for turn in due:
            turn.renew_at = now + turn.ttl_s / 3
        for token in lost:
            if token in self._turns:
                self._turns[token].lost("taken")
        for token in interrupted:
            if token in self._turns:
                self._turns[token].lost("interrupted")
