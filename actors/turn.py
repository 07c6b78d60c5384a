"""Turn: the right to act in a session, from the moment it was taken until its block ends.

In this process those who want it stand in the session's line, in order of arrival. The one at the
front tries the row in the file, which decides between processes, again and again with a growing,
jittered pause: nobody tells us when another process lets go. Holding it is the `Keeper`'s work.

The end is one transaction, however the block ends: it writes what is pending, closes the tool calls
that were left open, settles what was taken from the inbox, and lets go. Whoever is next in the
line moves up once that is on its way, for his own try stands behind it in the mailbox.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine
from types import TracebackType
from typing import TypeVar

import trio
from attrs import frozen

from ..storage import (
    Claim,
    Closed,
    Ended,
    LossReason,
    Rejected,
    Release,
    StorageError,
    StoredMessage,
    Taken,
    TurnActive,
    TurnLost,
)
from .ask import Ask, Life
from .changes import Changes
from .checks import check_number
from .ground import Ground, Handle
from .line import Line
from .messages import EndTurn, Message, TakeTurn
from .reads import Reads

__all__ = ["Delivery", "Holding", "Turn", "Wish"]

T = TypeVar("T")

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


class Turn(Reads, Changes):
    """The right to act in a session. Made by `Session.turn`, `Session.take_over` and `serve`.

    Changes made through it carry its token, which the transaction compares: once it was lost they
    are refused (`TurnLost`) and change nothing. Nothing else carries it: to `Session.append`, the
    code that holds the turn is somebody else.

    Attributes:
        token: Larger than every token before it in the file; give it to whatever you act on outside
            if that can compare it.
        since: When it was taken, in seconds since the epoch.
        messages: What it took from the inbox, as it stands in the transcript; empty unless served.
        attempt: How often the first of these has been taken, this time included; 0 without any.
        loss: How it was lost, or None. It is cancelled then, and `TurnLost` comes out of its block.
    """

    __slots__ = (
        "_task",
        "attempt",
        "loss",
        "messages",
        "renew_at",
        "scope",
        "since",
        "token",
        "ttl_s",
    )

    def __init__(
        self, handle: Handle, life: int, taken: Taken, ttl_s: float, scope: trio.CancelScope
    ) -> None:
        super().__init__(handle.id, handle._ground, Life(life))
        self.token: int = taken.token
        self.since: float = taken.since
        self.messages: tuple[StoredMessage, ...] = taken.messages
        self.attempt: int = taken.attempt
        self.loss: LossReason | None = None
        self.ttl_s = ttl_s
        self.renew_at = math.inf
        self.scope = scope
        self._task = trio.lowlevel.current_task()

    def __repr__(self) -> str:
        state = "held" if self.loss is None else self.loss
        return f"<Turn {self.token} in {self.id!r}: {state}>"

    @property
    def life(self) -> int:
        """The session's number in the file."""
        assert self._life.number is not None
        return self._life.number

    @property
    def overdue(self) -> bool:
        """Whether it was held for as long as it may be."""
        return trio.current_time() >= self.scope.deadline

    @property
    def is_mine(self) -> bool:
        """Whether the calling task took it."""
        return self._task is trio.lowlevel.current_task()

    def lost(self, reason: LossReason) -> None:
        """Cancel what is done under it; its block raises `TurnLost`."""
        if self.loss is None:
            self.loss = reason
            self.scope.cancel()

    def interrupted_by(self, id: int) -> None:
        """Cancel what is done under it, unless it is what the message `id` itself waits for."""
        if id not in [message.append_id for message in self.messages]:
            self.lost("interrupted")

    def _ask(self, message: Message[T], at: int | None) -> Coroutine[object, None, T]:
        if self.loss in ("taken", "ended"):
            raise TurnLost(self.id, self.loss)
        if at is not None:
            check_number(at, "at", least=0)
        ground = self._ground
        late = ground.store.clock().seconds >= self.renew_at
        renew_s = self.ttl_s if late else None
        return self._deliver(Ask(message, at, self._life, token=self.token, renew_s=renew_s))


class Delivery:
    """A turn that is wanted, for as long as a block lasts; None where it took nothing."""

    def __init__(self, handle: Handle, wish: Wish) -> None:
        self._handle = handle
        self._wish = wish
        self._ground: Ground = handle._ground
        self._line: Line | None = None
        self._turn: Turn | None = None
        self.ended: Ended | None = None
        """The receipt of its end."""

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Turn | None:
        """Take the turn. A cancellation leaves the line, and nothing was taken."""
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
        if taken is None:
            line.leave(self)
            return None
        if line.held is not None:
            line.held.lost("taken")
        scope = trio.CancelScope(deadline=trio.current_time() + self._wish.max_hold_s)
        assert self._handle._life.number is not None
        turn = Turn(self._handle, self._handle._life.number, taken, claim.ttl_s, scope)
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
            if turn.scope.__exit__(kind, error, traceback):
                left = None
        except BaseException as rest:  # what of a group was no cancellation of ours
            left = rest
        if turn.scope.cancelled_caught:
            turn.lost("overdue")  # if nothing else cancelled it
        try:
            await self._end(turn, self._release(turn, error, left))
        except TurnLost:
            turn.loss = "taken"
        except (StorageError, Closed) as trouble:
            if left is None:
                raise
            left.add_note(f"the end of the turn: {trouble}")
        loss, turn.loss = turn.loss, turn.loss or "ended"
        if left is not None:
            if left is error:
                return False
            raise left
        if loss == "taken" or (loss is not None and error is not None):
            raise TurnLost(turn.id, loss) from None
        return False

    async def _take(self, line: Line) -> Taken | None:
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
        ground, line = self._ground, self._line
        assert line is not None
        ground.keeper.let_go(turn)
        if line.held is turn:
            line.held = None
        ask: Ask[Ended] | None = None
        if turn.loss != "taken":
            ask = Ask(EndTurn(release), None, turn._life, token=turn.token)
            ground.registry.reach(turn.id).deliver(ask)
        line.leave(self)
        if ask is not None:
            with trio.CancelScope(shield=True):
                self.ended = await ask.answer()
        ground.bell.freed(turn.id)

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
            return Release("done", most, "")  # who interrupts wants no answer to what was before
        if turn.loss == "overdue":
            return Release("failed", most, "it was acted on for too long")
        if isinstance(left, Exception):
            return Release("failed", most, f"the handler raised {type(left).__name__}")
        return Release("given back", most, "")


class Holding(Delivery):
    """A turn that is wanted whatever the inbox holds."""

    async def __aenter__(self) -> Turn:
        turn = await super().__aenter__()
        assert turn is not None  # only one that is wanted for the inbox can be in vain
        return turn
