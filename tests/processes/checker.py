"""Is what several processes were told about the sessions of a file what one after the other gives?

Pure: a list of calls goes in, each with its start and end on one clock, its arguments and its result;
out come sentences about what cannot be. A history is right if each call can be given one moment
between its start and its end, so that the calls, done in the order of those moments, give
these results.

Sessions are checked one by one, for what is right of each is right of all. Finding an order is
hard in general; here it is not, because receipts say most of it. A call that raised the revision says
which, so those stand in one order, and replaying it gives each revision's state. Tokens grow in the
order in which turns are taken; a turn's writes stand together, its taking right before them and
its end right behind. That is the chain. All other calls change nothing and stand between two of its links:
each at the first place where the state gives its result and that what it came after allows. The
first is the best, for it leaves the most to those that come later.

A call whose turn was lost while it waited was cancelled; that means that nothing was written, so
it is left out, and a revision that nobody was told of is found.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple, TypeAlias

from attrs import evolve, field, frozen

__all__ = ["Call", "check"]

Body: TypeAlias = Mapping[str, object]


@frozen
class Call:
    """One call in a session, as its caller saw it.

    Attributes:
        who: The caller, to be shown.
        do: A method of a session or a turn; ``take`` and ``end`` are the two ends of a turn.
        start: When it was called, and
        end: when it returned, on one clock.
        token: Of the turn under which it was made, or that was taken or ended; None for none.
        result: The receipt's fields; of ``take`` the token, of ``end`` nothing.
        error: Type and facts of what was raised instead.
    """

    who: str
    session: str
    do: str
    arguments: Mapping[str, Any]  # JSON
    start: float
    end: float
    token: int | None = None
    result: Any = None  # JSON
    error: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        turn = "" if self.token is None or self.do == "take" else f" under turn {self.token}"
        outcome = self.result if self.error is None else self.error["type"]
        return f"{self.do} by {self.who}{turn} ({self.start:.4f} to {self.end:.4f}): {outcome}"


class Row(NamedTuple):
    """A message."""

    id: int
    position: int
    revision: int
    body: Body


@frozen
class State:
    """What a session is at one revision."""

    live: tuple[Row, ...] = ()
    redo: tuple[tuple[Row, ...], ...] = ()
    keys: Mapping[str, Row] = field(factory=dict)

    @property
    def openers(self) -> list[Row]:
        return [row for row in self.live if row.body["role"] == "user"]

    @property
    def bodies(self) -> list[Body]:
        return [row.body for row in self.live]

    def common(self, bodies: Sequence[Body]) -> int:
        """With how many of `bodies` it begins."""
        same = 0
        for row, body in zip(self.live, bodies, strict=False):
            if row.body != body:
                break
            same += 1
        return same


class Slot(NamedTuple):
    """A place between two links of the chain, or before or behind all.

    `holder` holds the turn there; not for `sure` if it may have been lost already.
    """

    revision: int
    holder: int | None
    sure: bool


class Wrong(Exception):
    """The history cannot be."""


def check(calls: Iterable[Call]) -> list[str]:
    """Return what is wrong with the history; of each session at most one thing, the first."""
    sessions: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if call.error is None or call.error["type"] != "Cancelled":
            sessions[call.session].append(call)
    wrong = []
    for id, own in sorted(sessions.items()):
        try:
            _Session(own).check()
        except Wrong as error:
            wrong.append(f"session {id}: {error}")
    return wrong


def revision_of(call: Call) -> int | None:
    """Return the revision that a call made; None if it made none."""
    result = call.result
    if call.error is not None or not result:
        return None
    if call.do == "append":
        new = not result["duplicate"]
    elif call.do == "extend":
        result, new = result[0], True
    elif call.do in ("undo", "redo"):
        new = True
    else:
        new = call.do == "rewrite" and result["changed"]
    return int(result["revision"]) if new else None


class _Session:
    """The calls of one session."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.steps: dict[int, Call] = {}
        """The calls that made a revision, by it."""
        self.states: dict[int, State] = {}
        """The state after each revision."""
        self.takes: dict[int, Call] = {}
        self.ends: dict[int, Call] = {}
        self.names: dict[str, int] = {}
        """Turns by what their holders call themselves."""
        self.chain: list[Call] = []
        self.slots: list[Slot] = []
        self.first_slot: dict[int, int] = {}
        """Of each turn, the slot behind its taking."""
        self.last_slot: dict[int, int] = {}
        """Of each turn, the first slot in which it may have been lost, or has ended."""
        self.starts: list[float] = []
        """The latest start in the chain up to each link."""
        self.finishes: list[float] = []
        """The earliest end in the chain from each link on."""

    def check(self) -> None:
        self._sort()
        self._check_fences()  # first, for what a broken fence lets in breaks the rest as well
        self._check_whole()
        self._replay()
        self._link()
        self._insert_the_silent()
        self._lay_slots()
        self._place_the_others()

    def _sort(self) -> None:
        for call in self.calls:
            if call.error is not None:
                continue
            revision = revision_of(call)
            if revision is not None:
                if revision in self.steps:
                    raise Wrong(
                        f"revision {revision} was made twice: {self.steps[revision]}; {call}"
                    )
                self.steps[revision] = call
            if call.do == "take":
                assert call.token is not None
                if call.token in self.takes:
                    raise Wrong(f"token {call.token} was given twice")
                self.takes[call.token] = call
                self.names[str(call.arguments["holder"])] = call.token
            if call.do == "end":
                assert call.token is not None
                self.ends[call.token] = call
        self.steps = dict(sorted(self.steps.items()))

    def _check_whole(self) -> None:
        """Nothing happened that no caller was told of."""
        expected = {"TurnActive", "TurnLost", "Conflict"}
        for call in self.calls:
            if call.error is not None and call.error["type"] not in expected:
                raise Wrong(f"nobody expected this: {call}, {call.error}")
        for revision, following in pairwise(self.steps):
            if following != revision + 1:
                raise Wrong(f"nobody was told of revision {revision + 1}")

    def _replay(self) -> None:
        """Do again what made the revisions, and compare each receipt with what it gives."""
        state = State()
        for revision, call in self.steps.items():
            if not self.states:
                self.states[revision - 1] = state
            state = self._do_again(state, revision, call)
            self.states[revision] = state
        ids = [row.id for state in self.states.values() for row in state.live]
        rows = {row for state in self.states.values() for row in map(_named, state.live)}
        if len(rows) != len(set(ids)):
            raise Wrong("two messages have one id")

    def _do_again(self, state: State, revision: int, call: Call) -> State:
        arguments, result = call.arguments, call.result
        if call.do in ("append", "extend"):
            bodies = arguments["messages"] if call.do == "extend" else [arguments["message"]]
            receipts = result if call.do == "extend" else [result]
            key = arguments.get("key")
            if key is not None and key in state.keys:
                raise Wrong(f"a key was stored twice: {call}")
            rows = _rows(call, len(state.live), revision, bodies, receipts)
            keys = {**state.keys, key: rows[0]} if key is not None else state.keys
            return State((*state.live, *rows), (), keys)
        if call.do == "undo":
            gone = state.openers[-arguments["turns"] :]
            if not gone:
                raise Wrong(f"there was nothing to undo: {call}")
            live = state.live[: gone[0].position - 1]
            _compare(
                call,
                result,
                text=gone[0].body["content"],
                turns=len(gone),
                messages=len(state.live) - len(live),
                position=len(live),
            )
            return evolve(state, live=live, redo=(*state.redo, state.live))
        if call.do == "redo":
            if not state.redo:
                raise Wrong(f"there was nothing to redo: {call}")
            _compare(call, result, position=len(state.redo[-1]))
            return evolve(state, live=state.redo[-1], redo=state.redo[:-1])
        bodies, at = arguments["messages"], arguments.get("at")
        if at is not None and at != revision - 1:
            raise Wrong(f"it was decided on revision {at}: {call}")
        kept = state.common(bodies)
        rows = _rows(call, kept, revision, bodies[kept:], result["appended"])
        live = (*state.live[:kept], *rows)
        _compare(call, result, kept=kept, replaced=len(state.live) - kept, position=len(live))
        return State(live, (), state.keys)

    def _check_fences(self) -> None:
        """No turn writes after a newer one has written, nor anybody between a turn's writes."""
        newest: tuple[int, int] | None = None
        last: dict[int, int] = {}
        for revision, call in self.steps.items():
            token = call.token
            if token is None:
                continue
            if token not in self.takes:
                raise Wrong(f"nobody was given the turn: {call}")
            if newest is not None and token < newest[0]:
                raise Wrong(
                    f"turn {token} wrote revision {revision} after the newer turn {newest[0]} "
                    f"had written revision {newest[1]}: {call}"
                )
            if last.get(token, revision - 1) != revision - 1:
                other = self.steps.get(revision - 1, "somebody")
                raise Wrong(f"this wrote while turn {token} was held: {other}; before {call}")
            if newest is None or token > newest[0]:
                newest = token, revision
            last[token] = revision

    def _link(self) -> None:
        """Make the chain of what made a revision and the turns that did."""
        before: int | None = None
        for call in self.steps.values():
            if call.token != before:
                if before in self.ends:
                    self.chain.append(self.ends[before])
                if call.token is not None:
                    self.chain.append(self.takes[call.token])
                before = call.token
            self.chain.append(call)
        if before in self.ends:
            self.chain.append(self.ends[before])
        self._measure()
        latest = self.chain[0]
        for call in self.chain:
            if call.end < latest.start:
                raise Wrong(f"this had ended when what it follows began: {call}; {latest}")
            latest = max(latest, call, key=lambda link: link.start)

    def _measure(self) -> None:
        self.starts = list(accumulate((call.start for call in self.chain), max))
        self.finishes = list(accumulate((call.end for call in reversed(self.chain)), min))[::-1]

    def _window(self, call: Call) -> tuple[int, int]:
        """Return the first and last slot in which the chain's times allow the call.

        Behind whatever had ended when it began, before whatever began when it had ended.
        """
        # `finishes` grows along the chain: all links from the first that is not past on may be.
        return bisect_left(self.finishes, call.start), bisect_right(self.starts, call.end)

    def _insert_the_silent(self) -> None:
        """Put into the chain the turns that wrote nothing: anywhere between their neighbours."""
        wrote = {call.token for call in self.steps.values()}
        said: defaultdict[int, list[Call]] = defaultdict(list)
        for call in self.calls:
            if _is_refused(call, "TurnActive"):
                assert call.error is not None
                named = self.names.get(call.error["holder"])
                if named is not None:
                    said[named].append(call)
            elif call.token is not None and call.error is None and not _is_free(call):
                said[call.token].append(call)
        floor = 0
        for token, take in sorted(self.takes.items()):
            if token in wrote:
                floor = 1 + max(i for i, link in enumerate(self.chain) if link.token == token)
                continue
            ceiling = next(
                (i for i, link in enumerate(self.chain) if (link.token or 0) > token),
                len(self.chain),
            )
            windows = [self._window(call) for call in said[token]]
            low = max(floor, *(low for low, _ in windows))
            high = min(ceiling, *(high for _, high in windows))
            slot = next(
                (slot for slot in range(low, high + 1) if self._fits(said[token], slot)), None
            )
            if slot is None:
                raise Wrong(f"there is no moment at which it could be: {take}")
            links = [take, self.ends[token]] if token in self.ends else [take]
            self.chain[slot:slot] = links
            self._measure()
            floor = slot + len(links)

    def _fits(self, calls: list[Call], slot: int) -> bool:
        """Whether what was done under a turn that wrote nothing gives its results there."""
        state = self.states[self._revision_before(slot)]
        return all(
            NOTHING[call.do](state, call)
            for call in calls
            if call.error is None and call.do not in ("take", "end")
        )

    def _revision_before(self, slot: int) -> int:
        for link in reversed(self.chain[:slot]):
            revision = revision_of(link)
            if revision is not None:
                return revision
        return min(self.states)

    def _lay_slots(self) -> None:
        revision, holder, sure = min(self.states), None, False
        last = {call.token: i for i, call in enumerate(self.chain) if call.token is not None}
        self.slots = [Slot(revision, None, False)]
        for i, call in enumerate(self.chain):
            revision = revision_of(call) or revision
            holder = None if call.do == "end" else call.token
            sure = holder is not None and (last[holder] > i)
            self.slots.append(Slot(revision, holder, sure))
            if call.do == "take" and call.token is not None:
                self.first_slot[call.token] = i + 1
                self.last_slot[call.token] = last[call.token] + 1

    def _place_the_others(self) -> None:
        linked = set(map(id, self.chain))
        others = sorted(
            (call for call in self.calls if id(call) not in linked), key=lambda call: call.start
        )
        ended: list[tuple[float, int]] = []
        for call in others:
            low, high = self._window(call)
            # Quadratic in what overlaps only: what has ended is folded into one number.
            past = [slot for end, slot in ended if end < call.start]
            if past:
                most = max(past)
                ended = [(end, slot) for end, slot in ended if end >= call.start]
                ended.append((-inf, most))
                low = max(low, most)
            possible = self._rule(call)
            slot = next((slot for slot in range(low, high + 1) if possible(slot)), None)
            if slot is None:
                around = sorted({self.slots[i] for i in (low, min(high, len(self.chain)))})
                raise Wrong(f"there is no moment at which it gives this: {call}; {around}")
            ended.append((call.end, slot))

    def _rule(self, call: Call) -> Callable[[int], bool]:
        """Return at which slots the call, which changed nothing, gives what it gave."""
        error = call.error
        if error is not None:
            return {
                "TurnActive": self._refused,
                "TurnLost": self._lost,
                "Conflict": self._conflicting,
            }[error["type"]](call)
        gives = NOTHING[call.do]

        def possible(slot: int) -> bool:
            place = self.slots[slot]
            if not _is_free(call):
                if call.token is None and place.holder is not None and place.sure:
                    return False
                if call.token is not None and place.holder != call.token:
                    return False
            return gives(self.states[place.revision], call) and (
                call.do != "transcript" or place.revision == call.result["revision"]
            )

        return possible

    def _refused(self, call: Call) -> Callable[[int], bool]:
        """Somebody else held the turn; the one that is named, if it is a turn's name."""
        assert call.error is not None
        named = self.names.get(call.error["holder"])
        key, at = call.arguments.get("key"), call.arguments.get("at")

        def possible(slot: int) -> bool:
            place = self.slots[slot]
            return (
                (named is None or place.holder == named)
                and (key is None or key not in self.states[place.revision].keys)
                and (at is None or at == place.revision)
            )

        return possible

    def _lost(self, call: Call) -> Callable[[int], bool]:
        """Its turn had been passed by somebody by then."""
        token = call.token
        assert token is not None
        if token in self.ends:
            raise Wrong(f"its turn was never lost: {call}; {self.ends[token]}")
        after = self.last_slot[token]
        passed = any(link.start <= call.end for link in self.chain[after:]) or any(
            other.start <= call.end
            and other.end >= self.takes[token].start
            and other.error is None
            and other.token is None
            and not _is_free(other)
            for other in self.calls
        )
        if not passed:
            raise Wrong(f"nobody had passed its turn: {call}")
        return lambda slot: slot >= after

    def _conflicting(self, call: Call) -> Callable[[int], bool]:
        assert call.error is not None
        revision, at = call.error["revision"], call.arguments["at"]
        return lambda slot: at != revision and self.slots[slot].revision == revision


def _same_duplicate(state: State, call: Call) -> bool:
    if not _is_duplicate(call):
        return False
    first = state.keys.get(call.arguments["key"])
    return first is not None and call.result == {
        "id": first.id,
        "position": first.position,
        "revision": first.revision,
        "duplicate": True,
        "live": first in state.live,
    }


def _same_reading(state: State, call: Call) -> bool:
    result = call.result
    return bool(result["bodies"] == state.bodies and result["position"] == len(state.live))


def _nothing_new(state: State, call: Call) -> bool:
    bodies = call.arguments["messages"]
    at = call.arguments.get("at")
    revision = call.result["revision"]
    return state.bodies == bodies and (at is None or at == revision)


NOTHING: Mapping[str, Callable[[State, Call], bool]] = {
    "append": _same_duplicate,
    "undo": lambda state, call: not state.openers,
    "redo": lambda state, call: not state.redo,
    "rewrite": _nothing_new,
    "transcript": _same_reading,
}
"""In which states a call that changes nothing gives what it gave."""


def _is_refused(call: Call, why: str) -> bool:
    return call.error is not None and call.error["type"] == why


def _is_duplicate(call: Call) -> bool:
    return call.do == "append" and call.error is None and bool(call.result["duplicate"])


def _is_free(call: Call) -> bool:
    """Whether no turn refuses it: a read, or a key that was seen."""
    return call.do == "transcript" or _is_duplicate(call)


def _rows(
    call: Call, before: int, revision: int, bodies: Sequence[Body], receipts: Sequence[Body]
) -> list[Row]:
    """Return the rows that `bodies` become behind position `before`, if the receipts say so."""
    if len(bodies) != len(receipts):
        raise Wrong(f"{len(bodies)} messages, {len(receipts)} receipts: {call}")
    rows = []
    for position, (body, receipt) in enumerate(zip(bodies, receipts, strict=True), before + 1):
        _compare(call, receipt, position=position, revision=revision, duplicate=False, live=True)
        id = receipt["id"]
        assert isinstance(id, int)
        rows.append(Row(id, position, revision, body))
    return rows


def _compare(call: Call, receipt: Body, **model: object) -> None:
    for name, value in model.items():
        if receipt[name] != value:
            raise Wrong(f"its {name} must be {value!r}: {call}")


def _named(row: Row) -> tuple[int, int, int]:
    return row.id, row.position, row.revision
