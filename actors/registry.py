"""Which sessions are awake: at most one actor an id.

An actor is made when its session is spoken to and dropped when too many are resident, least
recently used first. Dropping costs nothing, for an actor remembers only what it can read
again; one that is not idle stays. An actor that has failed is replaced by
a new one, which serves what waited for it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

import trio

from ..storage import Closed, Rejected
from .actor import SessionActor

__all__ = ["Registry"]

SCAN = 100
"""Actors looked at in one call. A guess: if so many are busy, memory is not what is short."""

logger = logging.getLogger(__name__)


class Registry:
    """The resident actors of a store."""

    def __init__(self, make: Callable[[str], SessionActor], *, most: int, name: str) -> None:
        self._make = make
        self._most = most
        self._name = name
        self._actors: OrderedDict[str, SessionActor] = OrderedDict()
        self._closed = False
        self._home = trio.lowlevel.current_trio_token()
        self.failures = 0

    def __len__(self) -> int:
        return len(self._actors)

    def __iter__(self) -> Iterator[SessionActor]:
        return iter(list(self._actors.values()))

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Registry: {state}, {len(self._actors)} of {self._most} resident>"

    def wake(self, id: str) -> SessionActor:
        """Return the actor of session `id`, made if it was not resident.

        Raises `Closed`, and `Rejected` in another event loop than the one that opened the store.
        """
        self.check_home()
        if self._closed:
            raise Closed("store", self._name)
        actor = self._actors.get(id)
        if actor is None:
            actor = self._actors[id] = self._make(id)
        else:
            self._actors.move_to_end(id)
        if len(self._actors) > self._most:
            self._drop(kept=actor)
        return actor

    def reach(self, id: str) -> SessionActor:
        """Return the actor of session `id` as `wake`, also while the store closes.

        For what ends something that was begun before.
        """
        actor = self._actors.get(id)
        if actor is None:
            actor = self._actors[id] = self._make(id)
        return actor

    def check_home(self) -> None:
        """Raise `Rejected` in another event loop than the one that opened the store.

        What an actor does there would wake tasks of a loop that is not asleep, or not theirs.
        """
        if trio.lowlevel.current_trio_token() is not self._home:
            raise Rejected(
                "store", "belongs to another event loop; go there with trio.from_thread.run"
            )

    def resident(self, id: str) -> SessionActor | None:
        """Return the actor of session `id` if it is resident; it is not thereby used."""
        return self._actors.get(id)

    def drop_idle(self) -> int:
        """Drop every actor that can be dropped; return how many those were."""
        idle = [id for id, actor in self._actors.items() if actor.idle]
        for id in idle:
            del self._actors[id]
        return len(idle)

    def replace(self, failed: SessionActor, error: Exception) -> None:
        """Put a new actor in the place of one that has failed."""
        self.failures += 1
        # The error went to its asker. Its text may hold somebody's words, so it is not logged.
        logger.error("an actor failed with %s and was built again", type(error).__name__)
        actor = self._actors[failed.id] = self._make(failed.id)
        actor.succeed(failed)

    async def quiet(self) -> None:
        """Return when no actor has anything under way or waiting, one built again meanwhile too."""
        while busy := [actor for actor in self if actor.busy]:
            for actor in busy:
                await actor.quiet()

    def close(self) -> None:
        """Wake nobody any more."""
        self._closed = True

    def _drop(self, kept: SessionActor) -> None:
        """Drop what can be dropped until there are few enough, looking at the oldest first."""
        for id in list(islice(self._actors, SCAN)):
            if len(self._actors) <= self._most:
                break
            actor = self._actors[id]
            if actor is not kept and actor.idle:
                del self._actors[id]
            else:
                self._actors.move_to_end(id)  # or it would hide for ever what stands behind it
