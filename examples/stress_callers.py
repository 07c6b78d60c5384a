"""Callers who may lose patience. Each call is noted in its session's ledger as it is made."""

from __future__ import annotations

from itertools import count
from random import Random
from time import perf_counter

import trio
from stress_calls import (
    CANCELLED,
    Call,
    Ledger,
    Look,
    Operation,
    Outcome,
    Refused,
    Say,
    perform,
)

from turnkeeper.actors import (
    Appended,
    Forked,
    Moved,
    Rewritten,
    Session,
    Transcript,
    Turn,
    Undone,
)

__all__ = ["Callers"]


class Callers:
    """What all tasks share: the ledgers and the figures."""

    def __init__(self, first_number: int = 1) -> None:
        self.ledgers: dict[str, Ledger] = {}
        """A fork stands behind its source."""
        self.waits_s: list[float] = []
        """How long each append that was acknowledged was waited for."""
        self.late = 0
        """Callers that were cancelled and got their answer all the same: it was under way."""
        self._numbers = count(first_number)

    def open(self, ledger: Ledger) -> Ledger:
        """Begin `ledger`."""
        self.ledgers[ledger.id] = ledger
        return ledger

    def number(self) -> int:
        """A number of its own for each text, key and fork."""
        return next(self._numbers)

    def began(self, session: Session | Turn, ledger: Ledger, call: Call) -> None:  # noqa: ARG002
        """Note a call that is about to be made."""
        ledger.calls.append(call)

    def ended(self, call: Call) -> None:
        """Note that it has its outcome."""

    async def ask(
        self, session: Session | Turn, ledger: Ledger, operation: Operation, chance: Random
    ) -> Outcome:
        """Make one call; one in five callers does not wait for long.

        One in twenty is cancelled before he asks, others after a few checkpoints or
        milliseconds, so a call is met before, while and after it is under way.
        """
        call, scope = Call(operation), trio.CancelScope()
        patience = chance.random()
        async with trio.open_nursery() as nursery:
            if patience < 0.05:
                scope.cancel()
            elif patience < 0.12:
                nursery.start_soon(_cancel_after, chance.randint(0, 8), scope)
            elif patience < 0.20:
                scope.deadline = trio.current_time() + chance.uniform(0, 0.02)
            with scope:
                began = perf_counter()
                self.began(session, ledger, call)
                try:
                    await perform(session, call)
                finally:
                    self.ended(call)
                took_s = perf_counter() - began
        outcome = call.outcome
        if outcome == CANCELLED:
            return CANCELLED
        if scope.cancel_called:
            self.late += 1
        if isinstance(operation, Say) and not isinstance(outcome, Refused):
            self.waits_s.append(took_s)
        ledger.acknowledged = max(ledger.acknowledged, _revision(outcome))
        return outcome

    async def look(self, session: Session, ledger: Ledger) -> Transcript | None:
        """Read the transcript while others write, and note what was seen; None after an error."""
        acknowledged = ledger.acknowledged
        try:
            seen = await session.transcript(hidden=True)
        except Exception as error:
            ledger.looks.append(Look(acknowledged, 0, (), repr(error)))
            return None
        ids = tuple(message.id or 0 for message in seen)
        ledger.looks.append(Look(acknowledged, seen.revision, ids))
        return seen


def _revision(outcome: Outcome) -> int:
    """Return the revision of its session that `outcome` tells of; 0 where it tells of none."""
    match outcome:
        case Appended() | Undone() | Moved() | Rewritten():
            return outcome.revision
        case Forked() | Refused() | None | "cancelled":
            return 0
        case _:
            return max(receipt.revision for receipt in outcome)


async def _cancel_after(checkpoints: int, scope: trio.CancelScope) -> None:
    for _ in range(checkpoints):
        await trio.lowlevel.checkpoint()
    scope.cancel()
