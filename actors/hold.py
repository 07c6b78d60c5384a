"""How a turn is had, and how it ends.

In this process those who want it stand in the session's line, in order of arrival. The one at the
front tries the row in the file, which decides between processes, again and again with a growing,
jittered pause: nobody tells us when another process lets go. Holding it is the `Keeper`'s work.

The end is one transaction, however the block ends: it writes what is pending, closes the tool calls
that were left open, settles what was taken from the inbox, and lets go. Whoever is next in the
line moves up once that is on its way, for his own try stands behind it in the mailbox.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import trio
from attrs import frozen

from ..storage import (
    Claim,
    Closed,
    Ended,
    NotYet,
    Rejected,
    Release,
    StorageError,
    Taken,
    TurnActive,
    TurnLost,
)
from .ask import Ask
from .ground import Ground, Handle
from .line import Line
from .messages import EndTurn, TakeTurn
from .turn import Turn

__all__ = ["Delivery", "Holding", "Wish"]

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.5
"""Between two tries for a turn that another process holds. Guesses: short against a model's answer,
and ten seconds of waiting are some thirty tries."""


@frozen
class Wish:
    """How a turn is wanted."""

    claim: Claim
    wait_s: float
    """For how long it is waited for."""
    max_hold_s: float
    """For how long it may be held."""
    pause_s: Callable[[int], float] = lambda _attempt: 0.0
    """How long to wait before the next try of a message that was tried so often in vain."""


class Hold:
    """A turn that is wanted for as long as a block lasts. To be derived from."""

    def __init__(self, handle: Handle, wish: Wish) -> None:
        self._handle = handle
        self._wish = wish
        self._ground: Ground = handle._ground
        self._line: Line | None = None
        self._turn: Turn | None = None
        self.not_yet_s = 0.0
        """For how many seconds more what comes first in the inbox is to wait for its next try."""
        self.ended: Ended | None = None
        """The receipt of its end."""

    @trio.lowlevel.enable_ki_protection
    async def enter(self) -> Turn | None:
        """Take the turn; None if it was wanted for the inbox, and nothing waits there.

        A cancellation leaves the line, and nothing was taken.
        """
        claim = self._wish.claim
        actor = self._ground.registry.wake(self._handle.id)
        if actor.line is None:
            actor.line = Line()
        line = self._line = actor.line
        if not claim.force and line.held is not None and line.held.is_mine:
            raise Rejected("turn", "is held by this very task, which would wait for itself")
        line.join(self, first=claim.force)
        try:
            taken = await self._take(line)
        except BaseException:
            line.leave(self)
            raise
        if not isinstance(taken, Taken):
            line.leave(self)
            self.not_yet_s = 0.0 if taken is None else taken.in_s
            return None
        if line.held is not None:
            line.held.lost("taken")
        scope = trio.CancelScope(deadline=trio.current_time() + self._wish.max_hold_s)
        assert self._handle._life.number is not None
        turn = Turn(
            self._handle, self._handle._life.number, taken, claim.ttl_s, scope, self._step_aside
        )
        self._turn = line.held = turn
        self._ground.keeper.hold(turn)
        scope.__enter__()
        return turn

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End the turn. Shielded from cancellation, for as long as one change takes."""
        turn = self._turn
        if turn is None:
            return False
        left = error
        try:
            if turn._scope.__exit__(kind, error, traceback):
                left = None
        except BaseException as rest:  # what of a group was no cancellation of ours
            left = rest
        if turn._scope.cancelled_caught:
            turn.lost("overdue")  # if nothing else cancelled it
        try:
            await self._end(turn, self._release(turn, error, left))
        except TurnLost:
            turn.loss = "taken"
        except (StorageError, Closed, Rejected) as trouble:
            if left is None:
                raise
            left.add_note(f"the end of the turn: {trouble}")
        if left is not None:
            if left is error:
                return False
            raise left
        if turn.loss == "taken" or (turn.loss is not None and error is not None):
            raise TurnLost(turn.id, turn.loss) from None
        return False

    async def _take(self, line: Line) -> Taken | NotYet | None:
        """Wait for the front of the line, then try until the turn is ours or it takes too long."""
        id, ground = self._handle.id, self._ground
        give_up = trio.current_time() + self._wish.wait_s
        pause_s = FIRST_PAUSE_S
        while True:
            if not line.is_front(self):
                with trio.move_on_at(give_up) as waiting:
                    await line.front(self)
                if waiting.cancelled_caught:
                    raise await self._refusal()
            ask = Ask(TakeTurn(self._wish.claim), None, self._handle._life)
            ground.registry.wake(id).deliver(ask)
            try:
                return await ask.answer()
            except TurnActive as refusal:
                left_s = give_up - trio.current_time()
                if left_s <= 0:
                    raise
                chosen_s = pause_s * ground.random.uniform(0.5, 1)
                await trio.sleep(min(chosen_s, left_s, refusal.expires_in))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _refusal(self) -> TurnActive:
        """Return what to tell somebody who has waited in the line for too long."""
        found = await self._ground.store.holder(self._handle.id, life=self._handle._life.number)
        holder = found.found
        if holder is None:  # somebody before us is about to take it
            return TurnActive(self._handle.id, self._ground.rules.holder, 0.0, 0.0)
        return TurnActive(self._handle.id, holder.name, holder.since, holder.expires_in)

    async def _end(self, turn: Turn, release: Release | None) -> None:
        ground = self._ground
        ground.keeper.let_go(turn)
        turn.over()
        ask: Ask[Ended] | None = None
        if turn.loss != "taken":
            # Whatever cancels us: a turn that is not ended would refuse everybody until it runs out.
            ask = Ask(EndTurn(release), None, turn._life, token=turn.token, steadfast=True)
            ground.registry.reach(turn.id).deliver(ask)
        self._step_aside()
        try:
            if ask is not None:
                self.ended = await ask.answer()
        finally:
            ground.bell.freed(turn.id)

    def _step_aside(self) -> None:
        """Let the next one in the line try."""
        line = self._line
        assert line is not None
        if line.held is self._turn:
            line.held = None
        line.leave(self)

    def _release(
        self, turn: Turn, error: BaseException | None, left: BaseException | None
    ) -> Release | None:
        """Return what becomes of the messages that it took, by what came out of the block.

        `left` is what is left of `error` once our own cancellation is taken out of it.
        """
        most = self._wish.claim.most_attempts
        if most is None:
            return None
        if error is None or turn.loss == "interrupted":
            return Release("done", most)  # who interrupts wants no answer to what was before
        if turn.loss == "overdue":
            why = "it was acted on for too long"
        elif isinstance(left, Exception):
            why = f"the handler raised {type(left).__name__}"
        else:
            return Release("given back", most)
        return Release("failed", most, why, self._wish.pause_s(turn.attempt))


class Delivery(Hold):
    """A turn that is wanted for what the inbox holds; None where that is nothing."""

    async def __aenter__(self) -> Turn | None:
        return await self.enter()


class Holding(Hold):
    """A turn that is wanted whatever the inbox holds."""

    async def __aenter__(self) -> Turn:
        turn = await self.enter()
        assert turn is not None  # only one that is wanted for the inbox can be in vain
        return turn
