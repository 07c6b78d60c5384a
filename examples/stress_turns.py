"""Turns, seen from outside: one holder at a time, nothing after its loss, nothing left open.

What is checked of one session, on the order that `stress_order` has found:

* What was written under a turn stands together: between its first revision and its last there is
  nothing of anybody else's, apart from appends that said `interleave`.
* Turns follow each other by their tokens, and none writes behind another that came later.
* While a turn surely lasts (from its receipt until its block ends, somebody begins to take it over,
  or its process is killed) nothing is acknowledged that is not of it and does not interleave.
* Tool calls that a turn left open are closed before anybody else changes anything, and at the end.
* A refusal for somebody's turn (`TurnActive`) names a time in which there may have been one, and a
  loss (`TurnLost`) had a cause: a takeover, or a message that interrupts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from attrs import define
from stress_calls import Refused, Say
from stress_journal import Enter, Held, Leave, Life, Noted, Post
from stress_order import Step
from stress_wrong import Wrong

__all__ = ["Hold", "check_turns", "holds_of"]

LATE_S = 2.0
"""How long before its death a process may have taken a turn that its journal does not tell of."""


@define(eq=False)
class Hold:
    """One turn that was held."""

    token: int
    how: str
    taken: tuple[int, ...]
    first: bool
    killed: bool
    """Whether its process was killed later; its end may be missing then."""
    asked: float
    had: float
    left: Leave | None = None
    leaving: float = math.inf
    gone: float = math.inf
    """When it was over for sure."""
    sure: float = math.inf
    """Until when it lasted for sure."""


def holds_of(notes: Sequence[Noted], lives: Mapping[int, Life]) -> list[Hold]:
    """Return the turns of a session, by their tokens."""
    holds: dict[int, Hold] = {}
    posted = min((n.began for n in notes if isinstance(n.operation, Post)), default=math.inf)
    for note in notes:
        if isinstance(note.operation, Enter) and isinstance(note.outcome, Held):
            held, how = note.outcome, note.operation.how
            if held.token in holds:
                raise Wrong(note.session, f"token of {note}", "one that is new", held.token)
            asked = posted if how == "serve" else note.began
            life = lives[note.worker]
            killed = life.killed < math.inf
            hold = Hold(held.token, how, held.taken, held.first, killed, asked, note.ended)
            hold.sure, hold.gone = life.killed, life.replaced
            holds[held.token] = hold
    for note in notes:
        if isinstance(note.operation, Leave):
            hold = holds[note.token or 0]
            hold.left, hold.leaving = note.operation, note.began
            hold.sure = min(hold.sure, note.began)
            if note.answered:
                hold.gone = note.ended
    ordered = [holds[token] for token in sorted(holds)]
    for earlier, later in pairwise(ordered):
        earlier.gone = min(earlier.gone, later.had)
    # A takeover that a kill cut off may have happened: its token is then nowhere.
    cut_off = [n for n in notes if n.operation == Enter("take over") and not n.answered]
    for number, hold in enumerate(ordered):
        forced = [later.asked for later in ordered[number + 1 :] if later.how == "take over"]
        forced += [note.began for note in cut_off if note.ended > hold.had]
        hold.sure = min(hold.sure, *forced, math.inf)
    return ordered


def check_turns(
    id: str,
    notes: Sequence[Noted],
    steps: Sequence[Step],
    holds: Sequence[Hold],
    lives: Mapping[int, Life],
) -> None:
    """Raise `Wrong` unless turns were what they must be."""
    _check_order(id, holds)
    spans = _check_spans(id, steps, holds)
    _check_open_calls(id, steps, spans)
    placed = {step.note for step in steps}
    for note in notes:
        if note in placed and note.answered and not _is_interleaved(note):
            _check_alone(id, note, holds)
        if isinstance(note.outcome, Refused):
            _check_refusal(id, note, note.outcome.error, notes, holds, lives)


def _check_order(id: str, holds: Sequence[Hold]) -> None:
    for earlier, later in pairwise(holds):
        if later.had < earlier.asked:
            raise Wrong(id, "tokens", f"{later.token} after {earlier.token}", "the other way")
        if later.had < earlier.sure:
            what = f"turn {later.token}"
            raise Wrong(id, what, f"when turn {earlier.token} had ended", "while it was held")


def _check_spans(
    id: str, steps: Sequence[Step], holds: Sequence[Hold]
) -> dict[int, tuple[int, int]]:
    """See that each turn's changes stand together; return the first and last of each."""
    # What a handler that was cancelled gives back counts as taken for the first time again.
    by_post = {hold.taken: hold.token for hold in reversed(holds) if hold.first and hold.taken}
    tokens = [_token(step, by_post) for step in steps]
    spans: dict[int, tuple[int, int]] = {}
    for index, token in enumerate(tokens):
        if token is not None:
            spans[token] = (spans.get(token, (index, 0))[0], index)
    for token, (first, last) in spans.items():
        for index in range(first, last + 1):
            if tokens[index] != token and not _is_interleaved(steps[index].note):
                what = f"revision {steps[index].revision}, in the middle of turn {token}"
                raise Wrong(id, what, "the turn's own", steps[index].note or "the end of a turn")
    in_order = sorted(spans, key=lambda token: spans[token])
    if in_order != sorted(spans):
        raise Wrong(id, "turns by their changes", sorted(spans), in_order)
    return spans


def _token(step: Step, by_post: Mapping[tuple[int, ...], int]) -> int | None:
    return step.note.token if step.note is not None else by_post.get(step.posts)


def _check_open_calls(id: str, steps: Sequence[Step], spans: Mapping[int, tuple[int, int]]) -> None:
    """See that what a turn left open is closed by the next change that is not its own."""
    for token, (first, last) in spans.items():
        made: set[str] = set()
        for step in steps[first : last + 1]:
            if step.note is not None and step.note.token == token:
                made |= {*_calls_of(step.note)}
        following = last
        while following + 1 < len(steps) and _is_interleaved(steps[following + 1].note):
            following += 1
        if not made & steps[following].open_calls:
            continue
        closing = steps[following + 1] if following + 1 < len(steps) else None
        if closing is None or not closing.ends_a_turn or made & closing.open_calls:
            open = sorted(made & (closing or steps[following]).open_calls)
            raise Wrong(id, f"calls of turn {token}", "closed at its end", f"{open} are open")


def _calls_of(note: Noted) -> Iterator[str]:
    if isinstance(note.operation, Say):
        for body in note.operation.bodies:
            calls = body.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                yield str(call["id"])


def _check_alone(id: str, note: Noted, holds: Sequence[Hold]) -> None:
    for hold in holds:
        if hold.token == note.token:
            continue
        if hold.had < note.began and note.ended < hold.sure:
            raise Wrong(id, f"{note}", f"refused, for turn {hold.token} was held", note.outcome)
        if note.token is not None and note.token < hold.token and hold.had < note.began:
            raise Wrong(id, f"{note}", f"refused, for turn {hold.token} came after", note.outcome)


def _check_refusal(
    id: str,
    note: Noted,
    error: str,
    notes: Sequence[Noted],
    holds: Sequence[Hold],
    lives: Mapping[int, Life],
) -> None:
    if error == "TurnActive":
        held = any(
            hold.token != note.token and hold.asked < note.ended and note.began < hold.gone
            for hold in holds
        )
        # What was killed before its journal could tell, or is waiting for a turn itself.
        held |= any(
            life.killed - LATE_S < note.ended and note.began < life.replaced
            for life in lives.values()
        )
        if not held:
            raise Wrong(id, f"answer to {note}", "no refusal, for nobody held the turn", error)
    elif error == "TurnLost: taken":
        if not any(
            hold.how == "take over" and hold.token > (note.token or 0) and hold.asked < note.ended
            for hold in holds
        ) and not _cut_off_takeover(notes, note):
            raise Wrong(id, f"answer to {note}", "held still, for nobody took it over", error)
    elif error == "TurnLost: interrupted":
        if not any(
            isinstance(other.operation, Post)
            and other.operation.policy == "interrupt"
            and other.began < note.ended
            for other in notes
        ):
            raise Wrong(id, f"answer to {note}", "held still, for nothing interrupts", error)
    elif error.startswith(("TurnLost", "Storage", "Closed")):
        raise Wrong(id, f"answer to {note}", "no such error", error)


def _cut_off_takeover(notes: Sequence[Noted], lost: Noted) -> bool:
    return any(
        note.operation == Enter("take over") and not note.answered and note.began < lost.ended
        for note in notes
    )


def _is_interleaved(note: Noted | None) -> bool:
    return note is not None and isinstance(note.operation, Say) and note.operation.interleave
