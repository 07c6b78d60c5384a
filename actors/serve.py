"""Takes what the inboxes hold: one turn at a time in a session, many sessions at once, fairly.

What waits is found by walking along the inboxes in the order of acceptance: from the beginning when
it starts, and then behind the place reached, whenever something was posted here, and every now and
then for what other processes posted. A session in which something waits stands in a queue; it is
given one turn and goes to the end, so one with a thousand messages keeps nobody waiting for more
than its one.

The file decides who may act. A session whose turn somebody else holds is tried again later; one
that has nothing left is forgotten, and found again when something is posted to it.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio
from trio_util import AsyncBool

from ..storage import Closed, StorageError, TurnActive, TurnLost
from .ground import Ground
from .session import Session
from .turn import Delivery, Turn, Wish

__all__ = ["Handler", "Serving"]

Handler: TypeAlias = Callable[[Turn], Awaitable[object]]
"""Acts on `turn.messages`, and answers through the turn. What it returns is ignored."""

LOOK_S = 0.25
"""How often to look for what other processes posted. A guess: what a person hardly notices."""

PAGE = 1_000
"""Waiting messages that are read at once, and sessions that wait in memory before more are read."""

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
"""Before a message whose handler has failed is tried again; it doubles. Guesses: a model that is
overloaded wants seconds, and nobody wants to wait for minutes."""

TAKEN_DELAY_S = 1.0
"""Longest pause before a session that somebody else holds is tried again."""

logger = logging.getLogger(__name__)


class Serving:
    """One call of `serve`."""

    def __init__(self, ground: Ground, handler: Handler, wish: Wish, max_concurrent: int) -> None:
        self._ground = ground
        self._handler = handler
        self._wish = wish
        self._room = trio.Semaphore(max_concurrent)
        self._place = 0
        self._posted = AsyncBool()
        self._some_ready = AsyncBool()
        self._ready: deque[str] = deque()
        self._later: list[tuple[float, str]] = []
        self._known: dict[str, bool] = {}
        """Sessions that are ready, or acted on, or tried later; true: something has come since."""
        self._waiting: set[str] = set()
        """Of those, the ones that are tried later."""

    def __repr__(self) -> str:
        return (
            f"<Serving: {len(self._ready)} ready, {len(self._waiting)} later, "
            f"{len(self._known)} known>"
        )

    def posted(self) -> None:
        """Look for what was posted at once."""
        self._posted.value = True

    def freed(self, id: str) -> None:
        """Try the session now if it waits for somebody else's turn to end."""
        if id in self._waiting:
            self._waiting.discard(id)
            self._make_ready(id)

    async def run(self) -> None:
        """Serve for ever. A cancellation cancels the handlers; what they took waits again."""
        self._ground.bell.listeners.append(self)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._find)
                while True:
                    await self._some_ready.wait_value(True)
                    await self._room.acquire()
                    # Whoever was ready still is: only this task takes.
                    id = self._ready.popleft()
                    self._some_ready.value = bool(self._ready)
                    nursery.start_soon(self._serve, id)
        finally:
            self._ground.bell.listeners.remove(self)

    async def _find(self) -> None:
        """Find out which sessions have something waiting, for ever."""
        while True:
            now = trio.current_time()
            while self._later and self._later[0][0] <= now:
                _, id = heapq.heappop(self._later)
                self.freed(id)
            self._posted.value = False
            try:
                while len(self._ready) < PAGE:
                    page = await self._ground.store.waiting_after(self._place, PAGE)
                    for place, id in page:
                        self._place = place
                        self._note(id)
                    if len(page) < PAGE:
                        break
            except StorageError as error:
                logger.warning("inboxes could not be read: %s", type(error).__name__)
            with trio.move_on_after(LOOK_S):
                await self._posted.wait_value(True)

    def _note(self, id: str) -> None:
        if id in self._known:
            self._known[id] = True
        else:
            self._known[id] = False
            self._make_ready(id)

    def _make_ready(self, id: str) -> None:
        self._ready.append(id)
        self._some_ready.value = True

    async def _serve(self, id: str) -> None:
        """Give the session one turn, and a place in the queue if there may be more to do."""
        try:
            self._known[id] = False
            delay_s = await self._one_turn(id)
        finally:
            self._room.release()
        if delay_s is None and not self._known[id]:
            del self._known[id]
        elif delay_s:
            self._waiting.add(id)
            heapq.heappush(self._later, (trio.current_time() + delay_s, id))
        else:
            self._make_ready(id)

    async def _one_turn(self, id: str) -> float | None:
        """Act on what waits; return after how long to try again, None if nothing waits."""
        delivery = Delivery(Session(id, self._ground), self._wish)
        attempt = 1
        try:
            async with delivery as turn:
                if turn is None:
                    return None
                attempt = turn.attempt
                await self._handler(turn)
        except TurnActive as refusal:
            return self._delay_s(min(TAKEN_DELAY_S, refusal.expires_in))
        except TurnLost as loss:
            if loss.reason == "interrupted":
                return 0.0
            logger.warning("a turn was lost: %s", loss.reason)
            return self._delay_s(TAKEN_DELAY_S)
        except Closed as closed:
            if closed.what == "store":
                raise
            return None
        except Exception as error:
            # The text of an error may hold somebody's words, so only its type is logged.
            logger.error("a handler failed with %s, at attempt %d", type(error).__name__, attempt)
            if delivery.ended is not None and delivery.ended.set_aside:
                return 0.0
            return self._delay_s(min(FIRST_DELAY_S * 2 ** (attempt - 1), LONGEST_DELAY_S))
        return 0.0 if delivery.ended is not None and delivery.ended.waiting else None

    def _delay_s(self, most: float) -> float:
        return most * self._ground.random.uniform(0.5, 1)
