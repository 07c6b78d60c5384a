"""Many turns renewed in one transaction. The only change that belongs to no session."""

from __future__ import annotations

import trio

from . import turns
from .clock import Clock, Moment
from .connect import Connection
from .operation import Operation
from .owners import Owners

__all__ = ["Renewal"]


class Renewal(Operation):
    """Many turns renewed at once."""

    __slots__ = ("_clock", "_held", "_owners", "_settled")

    value: list[int]

    def __init__(self, held: tuple[tuple[int, float], ...], clock: Clock, owners: Owners) -> None:
        super().__init__()
        self._held = held
        self._clock = clock
        self._owners = owners
        self._settled = trio.Event()

    def run(self, connection: Connection) -> list[int]:
        self._owners.stand()
        boot, seconds = self._clock()
        return [
            token
            for token, ttl_s in self._held
            if not turns.renew(connection, token, Moment(boot, seconds + ttl_s))
        ]

    def settle(self) -> None:
        self._settled.set()

    async def lost(self) -> list[int]:
        await self._settled.wait()
        if self.error is not None:
            raise self.error
        return self.value
