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
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import trio
from trio_util import AsyncBool

from ..storage import Closed, StorageError, TurnActive
from .ground import Ground
from .hold import Delivery, Wish
from .session import Session
from .turn import Turn

__all__ = ["Handler", "Serving", "pause_s"]

Handler: TypeAlias = Callable[[Turn], Awaitable[object]]
"""Acts on `turn.messages`, and answers through the turn. What it returns is ignored."""

LOOK_S = 0.25
"""How often to look for what other processes posted. A guess: what a person hardly notices."""

PAGE = 1_000
"""Waiting messages that are read at once."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Before a message whose handler has failed is tried again; it doubles. Guesses: a model that is
overloaded wants seconds, and nobody wants to wait for minutes."""

TAKEN_DELAY_S = 1.0
"""Longest pause before a session that somebody else holds is tried again."""


def pause_s(attempt: int) -> float:
    """Return how long a message waits whose try number `attempt` has failed."""
    return float(min(FIRST_PAUSE_S * 2 ** min(attempt - 1, 30), LONGEST_PAUSE_S))


logger = logging.getLogger(__name__)


class _Later(NamedTuple):
    """A session that is tried later."""

    due: float
    id: str
    taken: bool
    """Because somebody else holds its turn; tried as soon as that is known to have ended."""


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
        self._known: dict[str, bool] = {}
        """Sessions that are ready, acted on, or tried later; true: something has come since."""
        self._later: dict[str, _Later] = {}
        self._freed: set[str] = set()
        """Those of them whose turn somebody let go since it was tried."""
        self._due: list[_Later] = []
        """A heap of these, with some that do not count any more."""
        self._closed: Closed | None = None

    def __repr__(self) -> str:
        return (
            f"<Serving: {len(self._ready)} ready, {len(self._later)} later, "
            f"{len(self._known)} known>"
        )

    def posted(self) -> None:
        """Look for what was posted at once."""
        self._posted.value = True

    def freed(self, id: str) -> None:
        """Try the session now if it waits for somebody else's turn to end."""
        later = self._later.get(id)
        if later is not None and later.taken:
            del self._later[id]
            self._make_ready(id)
        elif later is None and id in self._known:
            self._freed.add(id)

    async def run(self) -> None:
        """Serve until the store closes. A cancellation cancels the handlers."""
        self._ground.bell.listeners.append(self)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_closed, self._find, nursery.cancel_scope)
                await self._start_turns(nursery)
        finally:
            self._ground.bell.listeners.remove(self)
        if self._closed is not None:
            raise self._closed

    async def _start_turns(self, nursery: trio.Nursery) -> None:
        """Give a turn to whoever is ready, as long as there is room, for ever."""
        while True:
            await self._some_ready.wait_value(True)
            await self._room.acquire()
            # Whoever was ready still is: only this task takes.
            serve = partial(self._serve, self._ready.popleft())
            self._some_ready.value = bool(self._ready)
            nursery.start_soon(self._until_closed, serve, nursery.cancel_scope)

    async def _until_closed(
        self, work: Callable[[], Awaitable[None]], scope: trio.CancelScope
    ) -> None:
        """Do `work`; if the store closes meanwhile, `run` says so, and not in a group."""
        try:
            await work()
        except Closed as closed:
            self._closed = closed
            scope.cancel()

    async def _find(self) -> None:
        """Find out which sessions have something waiting, for ever."""
        while True:
            self._wake_the_due()
            self._posted.value = False
            try:
                while True:  # to the end, or those served again and again would hide the rest
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

    def _wake_the_due(self) -> None:
        now = trio.current_time()
        while self._due and self._due[0].due <= now:
            later = heapq.heappop(self._due)
            if self._later.get(later.id) is later:
                del self._later[later.id]
                self._make_ready(later.id)

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
        self._known[id] = False
        self._freed.discard(id)
        try:
            verdict = await self._one_turn(id)
        finally:
            self._room.release()
        if isinstance(verdict, _Later) and not (verdict.taken and id in self._freed):
            self._later[id] = verdict
            heapq.heappush(self._due, verdict)
        elif isinstance(verdict, _Later) or verdict == "again" or self._known[id]:
            self._make_ready(id)
        else:
            del self._known[id]
        self._freed.discard(id)

    async def _one_turn(self, id: str) -> _Later | Literal["again", "nothing more"]:
        """Act on what waits in one session; return what is to be done with it next."""
        delivery = Delivery(Session(id, self._ground), self._wish)
        turn: Turn | None = None
        failure: Exception | None = None
        try:
            async with delivery as turn:
                if turn is not None:
                    try:
                        await self._handler(turn)
                    except Exception as error:
                        failure = error  # the handler's own, also if it is an error of ours
                        raise
        except Exception as error:
            if isinstance(error, Closed) and error is not failure:
                if error.what == "store":
                    raise
            elif turn is None:
                if not isinstance(error, TurnActive):
                    logger.warning("a turn could not be taken: %s", type(error).__name__)
                return self._later_for(id, TAKEN_DELAY_S, taken=True)
            elif turn.loss == "interrupted":
                return "again"
            else:
                # The text of an error may hold somebody's words, so only its type is logged.
                name, attempt = type(error).__name__, turn.attempt
                logger.error("a turn ended with %s, at attempt %d", name, attempt)
                if turn.loss == "taken" or delivery.ended is None:
                    return self._later_for(id, TAKEN_DELAY_S, taken=True)
        if delivery.not_yet_s:
            return _Later(trio.current_time() + delivery.not_yet_s, id, False)
        more = delivery.ended is not None and delivery.ended.waiting
        return "again" if more else "nothing more"

    def _later_for(self, id: str, most_s: float, *, taken: bool) -> _Later:
        delay_s = most_s * self._ground.random.uniform(0.5, 1)
        return _Later(trio.current_time() + delay_s, id, taken)
