"""Who of this process is next for the turn of one session: first come, first served.

Whoever is at the front may try to take the turn, and stays there while holding it; the others
wait and cost nothing. Of other processes the line knows nothing: the row in the file decides
between them, so the one at the front tries again and again, and nobody else does.
"""

from __future__ import annotations

from typing import Protocol

import trio
from trio_util import AsyncValue

from ..storage import LossReason

__all__ = ["Held", "Line"]


class Held(Protocol):
    """A turn that is held in this process."""

    @property
    def is_mine(self) -> bool:
        """Whether the calling task took it."""

    def lost(self, reason: LossReason) -> None:
        """Told when somebody else in this process takes it over."""


class Line:
    """Those who want the turn, in order of arrival; the one at the front may have it."""

    __slots__ = ("_front", "_places", "held")

    def __init__(self) -> None:
        self._places: list[object] = []
        self._front: AsyncValue[object] = AsyncValue(None)
        """Changes when somebody moves up."""
        self.held: Held | None = None
        """The turn that is held in this process, if one is."""

    def __len__(self) -> int:
        """How many hold or want the turn."""
        return len(self._places)

    @property
    def waiting(self) -> int:
        """How many want the turn and do not hold it."""
        return len(self._places) - (self.held is not None)

    def __repr__(self) -> str:
        return f"<Line: {'held' if self.held else 'free'}, {len(self._places)} in it>"

    def join(self, place: object, *, first: bool = False) -> bool:
        """Take a place at the end, or before everybody; return whether it is the front."""
        self._places.insert(0 if first else len(self._places), place)
        return self.is_front(place)

    def is_front(self, place: object) -> bool:
        """Whether `place` is at the front."""
        return bool(self._places) and self._places[0] is place

    async def front(self, place: object) -> None:
        """Wait until `place` is at the front. A cancellation leaves it where it stands."""
        await self._front.wait_value(lambda _: self.is_front(place))

    @trio.lowlevel.enable_ki_protection
    def leave(self, place: object) -> None:
        """Give up a place, unless that was done; the next one moves up."""
        if place in self._places:
            self._places.remove(place)
        self._front.value = self._places[0] if self._places else None
