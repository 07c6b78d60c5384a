from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import pytest
from support import A, S, T, Told, U, said, tables

from turnkeeper.actors.closing import close_calls
from turnkeeper.actors.conversation import NO_RESULT
from turnkeeper.storage import (
    Appended,
    Changed,
    Claim,
    Connection,
    Draft,
    Ended,
    Head,
    Kept,
    Moment,
    Moved,
    Posted,
    Rejected,
    Release,
    Rules,
    StoredMessage,
    Taken,
    TakenBack,
    TurnActive,
    TurnLost,
    appends,
    changes,
    encode_message,
    holding,
    posting,
    reads,
    removal,
)
from turnkeeper.storage.connect import create, open_reader, open_writer
from turnkeeper.storage.owners import UnlockedOwners
from turnkeeper.storage.schema import define_guard, migrate

Body: TypeAlias = Mapping[str, object]
Change: TypeAlias = Callable[[Connection, Told], Changed[object]]

TTL_S = 30.0


class SomeOwners(UnlockedOwners):
    """Owners of which some are dead."""

    def __init__(self, number: int, dead: set[int]) -> None:
        super().__init__(number)
        self.dead = dead

    def is_alive(self, owner: int) -> bool | None:
        return owner not in self.dead


class Desk:
    """A file on which one transaction after the other is made by hand, each for whom it says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = Moment("a boot", 100.0)
        self.dead: set[int] = set()
        self.last_id = 0
        create(path, migrate)
        self.writer = open_writer(path, synchronous="normal", vfs=None)
        self.reader = open_reader(path, vfs=None)
        define_guard(self.writer, allowed=False)

    def close(self) -> None:
        self.reader.close()
        self.writer.close()

    def do(
        self,
        change: Change,
        *,
        id: str = "a",
        owner: int = 1,
        token: int | None = None,
        known: Head | None = None,
        pending: tuple[Kept, ...] = (),
        renew_s: float | None = None,
        interleave: bool = False,
        unreleased: Mapping[int, Release | None] | None = None,
    ) -> Changed[object]:
        """Make one change in a transaction of its own; what it raises rolls that back."""
        self.last_id += 1
        told = Told(
            id,
            self.last_id,
            known=known,
            pending=pending,
            rules=Rules(lambda: self.now, SomeOwners(owner, self.dead), close_calls),
            token=token,
            renew_s=renew_s,
            interleave=interleave,
            unreleased=unreleased or {},
        )
        with self.writer:
            receipt, head = change(self.writer, told)
        return Changed(receipt, head)

    def say(self, *bodies: Body, id: str = "a", token: int | None = None, owner: int = 1) -> Head:
        """Append each; return where the head is then."""
        for body in bodies:
            _, head = self.do(append(body), id=id, token=token, owner=owner)
        assert head is not None
        return head

    def take(self, *, id: str = "a", owner: int = 2, force: bool = False) -> int:
        taken, _ = self.do(take(f"owner {owner}", force=force), id=id, owner=owner)
        assert isinstance(taken, Taken)
        return taken.token

    def end(self, token: int, *, id: str = "a", owner: int = 2) -> Ended:
        ended, head = self.do(end(), id=id, owner=owner, token=token)
        assert isinstance(ended, Ended)
        assert head is not None
        assert head.turn is None
        return ended

    def read(self, id: str = "a", *, hidden: bool = True) -> list[StoredMessage]:
        """The transcript, as a second connection sees it."""
        head = reads.head_of(self.reader, id, None)
        found = reads.transcript(self.reader, id, head, last=None, after=0, hidden=hidden)
        return list(found.messages)

    def head(self, id: str = "a") -> Head:
        head = reads.head_of(self.reader, id, None)
        assert head is not None
        return head

    def states(self, id: str = "a") -> list[tuple[object, str]]:
        """What every message ever on the path says, and its state."""
        found = reads.all_messages(self.reader, self.head(id))
        return [(message.body["content"], message.state) for message in found]

    def moves(self, id: str = "a") -> list[tuple[str, int, int]]:
        return [
            (move.kind, move.from_position, move.to_position)
            for move in reads.history(self.reader, self.head(id))
        ]

    def turn_rows(self) -> list[tuple[object, ...]]:
        return tables(self.path)["turns"]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with closing(Desk(tmp_path / "state.db")) as desk:
        yield desk


def draft(body: Body, key: str | None = None, *, hidden: bool = False) -> Draft:
    opens = body["role"] == "user" and isinstance(body["content"], str) and not hidden
    return Draft(*encode_message(body), hidden, opens, key)


def append(body: Body, key: str | None = None, *, hidden: bool = False) -> Change:
    return lambda c, told: appends.append(c, told, draft(body, key, hidden=hidden))


def extend(bodies: Iterable[Body]) -> Change:
    return lambda c, told: appends.extend(c, told, [draft(body) for body in bodies])


def undo(turns: int = 1) -> Change:
    return lambda c, told: changes.rewind(c, told, turns, "undo", lambda _: TakenBack("text"))


def rewrite(bodies: Iterable[Body]) -> Change:
    return lambda c, told: changes.rewrite(c, told, [draft(b) for b in bodies], "rewrite")


def restore(revision: int) -> Change:
    return lambda c, told: changes.restore(c, told, revision)


def take(holder: str = "somebody", *, force: bool = False) -> Change:
    return lambda c, told: holding.take(c, told, Claim(holder, TTL_S, force))


def end(release: Release | None = None) -> Change:
    return lambda c, told: holding.end(c, told, release)


def post(body: Body, key: str | None = None) -> Change:
    return lambda c, told: posting.post(c, told, draft(body, key), None, "queue", 10)


REFUSED: dict[str, Change] = {
    "append": append(A("x")),
    "append with a key": append(A("x"), "new"),
    "extend": extend([A("x"), U("y")]),
    "undo": undo(),
    "redo": lambda c, told: changes.redo(c, told),
    "rewrite": rewrite([U("new")]),
    "rewrite to nothing": rewrite([]),
    "restore": restore(2),
    "restore to here": restore(3),
    "purge": lambda c, told: removal.purge(c, told),
    "take": take(),
}
"""What is refused while somebody's turn lives."""

ALWAYS: dict[str, Change] = {
    "post": post(U("p")),
    "fork": lambda c, told: changes.fork(c, told, "b", None, None),
    "set_meta": lambda c, told: changes.set_meta(c, told, b"{}"),
    "set_policy": lambda c, told: changes.set_policy(c, told, "collect"),
    "drain": lambda c, told: appends.drain(c, told),
    "requeue": lambda c, told: posting.requeue(c, told, 5),
    "dismiss": lambda c, told: posting.dismiss(c, told, 5),
    "delete": lambda c, told: removal.delete(c, told),
    "append again": append(U("u1"), "k1"),
    "extend again": lambda c, told: appends.extend(c, told, [draft(U("u1"), "k1")]),
}
"""What no turn refuses."""


def begin(desk: Desk) -> None:
    """Two turns, one of which was taken back."""
    desk.do(append(U("u1"), "k1"))
    desk.say(A("a1"), U("u2"), A("a2"))
    desk.do(undo())


def kept(*bodies: Body, token: int | None = None, append_id: int = 1_000) -> Kept:
    return Kept(tuple(draft(body) for body in bodies), append_id, 5.0, token=token)


# While a turn lives


@pytest.mark.parametrize("pending", [(), (kept(A("pending")),)], ids=["", "pending"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_living_turn_refuses_it_and_nothing_changes_pending_included(
    desk: Desk, name: str, pending: tuple[Kept, ...]
) -> None:
    begin(desk)
    known = desk.head()
    desk.take()
    desk.now = Moment("a boot", 122.0)
    before = tables(desk.path)
    for remembered in (None, known, desk.head()):
        with pytest.raises(TurnActive) as caught:
            desk.do(REFUSED[name], pending=pending, known=remembered)
        refusal = caught.value
        assert (refusal.session, refusal.holder) == ("a", "owner 2")
        assert (refusal.since, refusal.expires_in) == (0.0, 8.0)
        assert tables(desk.path) == before


@pytest.mark.parametrize("name", REFUSED)
def test_a_living_turn_of_ones_own_store_refuses_it_too(desk: Desk, name: str) -> None:
    """Only the token tells: whoever does not show it is somebody else."""
    begin(desk)
    desk.take(owner=1)
    before = tables(desk.path)
    with pytest.raises(TurnActive):
        desk.do(REFUSED[name])
    assert tables(desk.path) == before


def test_a_remembered_head_that_names_the_turn_does_not_stand_in_for_the_token(desk: Desk) -> None:
    """The head is at a tip, so the append tries it first; the store that holds the turn knows it."""
    desk.say(U("u1"))
    desk.take(owner=1)
    known = desk.head()
    assert known.at_tip
    before = tables(desk.path)
    with pytest.raises(TurnActive):
        desk.do(append(A("x")), known=known)
    assert tables(desk.path) == before


def test_a_turn_of_another_boot_whose_owner_lives_refuses_for_an_unknown_time(desk: Desk) -> None:
    begin(desk)
    desk.take()
    desk.now = Moment("another boot", 100_000.0)
    with pytest.raises(TurnActive) as caught:
        desk.do(REFUSED["append"])
    assert caught.value.expires_in == float("inf")


@pytest.mark.parametrize("name", ALWAYS)
def test_no_turn_refuses_it_and_it_ends_none(desk: Desk, name: str) -> None:
    begin(desk)
    token = desk.take()
    held = desk.turn_rows()
    desk.do(ALWAYS[name], pending=(kept(A("pending")),))
    if name == "delete":
        assert desk.turn_rows() == []
        return
    assert desk.turn_rows() == held
    assert desk.head().turn == token
    assert said(desk.read()) == ["u1", "a1", "pending"], "what is pending was accepted before"


@pytest.mark.parametrize("name", ALWAYS)
def test_what_no_turn_refuses_passes_over_none_either(desk: Desk, name: str) -> None:
    begin(desk)
    desk.take()
    desk.dead.add(2)
    held = desk.turn_rows()
    desk.do(ALWAYS[name])
    assert desk.turn_rows() == ([] if name == "delete" else held)


def test_a_redelivery_is_answered_whoever_holds_the_turn(desk: Desk) -> None:
    first, _ = desk.do(append(U("u1"), "k1"))
    assert isinstance(first, Appended)
    token = desk.take()
    desk.do(append(U("under it"), "k2"), token=token)
    before = tables(desk.path)
    again, _ = desk.do(append(U("u1"), "k1"))
    assert again == first._replace(duplicate=True)
    late, _ = desk.do(append(U("under it"), "k2"), token=token + 5)
    assert isinstance(late, Appended)
    assert late.duplicate
    with pytest.raises(Rejected, match="other content"):
        desk.do(append(U("else"), "k1"))
    with pytest.raises(TurnActive):
        desk.do(
            lambda c, told: appends.extend(c, told, [draft(U("u1"), "k1"), draft(U("n"), "k3")])
        )
    assert tables(desk.path) == before


@pytest.mark.parametrize("change", [append(A("between")), extend([A("between")])])
def test_what_interleaves_goes_between_the_messages_of_a_turn(desk: Desk, change: Change) -> None:
    desk.say(U("u1"))
    token = desk.take()
    held = desk.say(A("one"), token=token, owner=2)
    rows = desk.turn_rows()
    desk.do(change, interleave=True)
    assert desk.turn_rows() == rows
    assert desk.head().turn == token
    desk.do(append(A("two")), token=token, owner=2, known=held)
    assert said(desk.read()) == ["u1", "one", "between", "two"]
    assert desk.end(token) == Ended(0, 0, False)


def test_what_interleaves_ends_a_turn_that_is_over(desk: Desk) -> None:
    desk.say(U("u1"))
    token = desk.take()
    desk.say(A(call="c1"), token=token, owner=2)
    desk.dead.add(2)
    desk.do(append(A("x")), interleave=True)
    assert desk.turn_rows() == []
    assert said(desk.read()) == ["u1", None, NO_RESULT, "x"]


# When it is over


def die(desk: Desk, token: int) -> Mapping[int, Release | None]:
    desk.dead.add(2)
    return {}


def expire(desk: Desk, token: int) -> Mapping[int, Release | None]:
    desk.now = Moment("a boot", 100.0 + TTL_S)
    return {}


def fail_to_end(desk: Desk, token: int) -> Mapping[int, Release | None]:
    return {token: None}


OVER = [die, expire, fail_to_end]


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("name", REFUSED)
def test_a_turn_that_is_over_is_ended_by_the_very_change_that_passes_it(
    desk: Desk,
    name: str,
    over: Callable[[Desk, int], Mapping[int, Release | None]],
) -> None:
    desk.say(U("u1"), A("a1"))
    token = desk.take()
    old = desk.say(U("u2"), A(call=["c1", "c2"]), T("c2", "r"), token=token, owner=2)
    unreleased = over(desk, token)
    before = tables(desk.path)

    def fail_after(connection: Connection, told: Told) -> Changed[object]:
        REFUSED[name](connection, told)
        raise LookupError

    with pytest.raises(LookupError):
        desk.do(fail_after, unreleased=unreleased)
    assert tables(desk.path) == before, "it is one transaction"

    desk.do(REFUSED[name], unreleased=unreleased)
    assert desk.head().turn != token
    assert [row[0] for row in desk.turn_rows()] == ([token + 1] if name == "take" else [])
    closing = [row for row in tables(desk.path)["messages"] if row[13]]
    assert [(row[3], row[10], row[11]) for row in closing] == [(6, "tool", NO_RESULT)]
    assert closing[0][2] == old.branch, "right behind the call, wherever the head went then"
    with pytest.raises(TurnLost):
        desk.do(append(A("late")), token=token, owner=2, known=old)


@pytest.mark.parametrize("name", [name for name in ALWAYS if name != "delete"])
def test_a_turn_whose_end_storage_did_not_take_is_ended_by_whatever_comes_next(
    desk: Desk, name: str
) -> None:
    begin(desk)
    token = desk.take(owner=1)
    desk.say(A(call="c1"), token=token)
    desk.do(ALWAYS[name], unreleased={token: None}, pending=(kept(A("pending"), token=token),))
    ends = "again" not in name
    # A redelivery writes what is pending and nothing else: it changes nothing itself.
    assert (desk.turn_rows() == []) is ends
    expected = ["u1", "a1", None, "pending", NO_RESULT]
    assert said(desk.read()) == (expected if ends else expected[:-1])


def test_a_turn_that_is_over_refuses_nobody_however_often_it_is_passed(desk: Desk) -> None:
    tokens = []
    for number in range(3):
        tokens.append(desk.take())
        desk.say(A(call=f"c{number}"), token=tokens[-1], owner=2)
        desk.now = Moment("a boot", desk.now.seconds + TTL_S)
    desk.say(U("through"))
    assert said(desk.read()) == [None, NO_RESULT] * 3 + ["through"]
    for token in tokens:
        with pytest.raises(TurnLost):
            desk.do(end(), token=token, owner=2)


RENEWING = [name for name in REFUSED if name != "take"]


@pytest.mark.parametrize("name", RENEWING)
def test_the_next_write_of_a_holder_that_nobody_passed_renews(desk: Desk, name: str) -> None:
    begin(desk)
    token = desk.take()
    desk.now = Moment("a boot", 500.0)
    desk.do(REFUSED[name], token=token, owner=2, known=desk.head(), renew_s=20.0)
    assert [row[-2:] for row in desk.turn_rows()] == [("a boot", 520.0)]
    desk.now = Moment("a boot", 519.0)
    with pytest.raises(TurnActive) as caught:
        desk.do(REFUSED["append"])
    assert caught.value.expires_in == 1.0
    desk.say(A("goes on"), token=token, owner=2)


def test_an_append_at_a_remembered_head_renews_too(desk: Desk) -> None:
    desk.say(U("u1"))
    token = desk.take()
    known = desk.head()
    assert known.at_tip
    desk.now = Moment("a boot", 500.0)
    desk.do(append(A("x")), token=token, owner=2, known=known, renew_s=20.0)
    assert [row[-2:] for row in desk.turn_rows()] == [("a boot", 520.0)]


def test_a_write_that_does_not_renew_is_done_and_leaves_the_turn_to_be_passed(desk: Desk) -> None:
    desk.say(U("u1"))
    token = desk.take()
    desk.now = Moment("a boot", 500.0)
    desk.say(A("late"), token=token, owner=2)
    desk.say(U("passes"))
    assert said(desk.read()) == ["u1", "late", "passes"]
    before = tables(desk.path)
    with pytest.raises(TurnLost):
        desk.do(append(A("later")), token=token, owner=2, renew_s=20.0)
    assert tables(desk.path) == before


def test_turns_raise_no_revision(desk: Desk) -> None:
    begin(desk)
    head = desk.head()
    rest = {k: v for k, v in tables(desk.path).items() if k not in ("heads", "turns")}
    token = desk.take()
    assert desk.head() == head._replace(turn=token)
    token = desk.take(owner=3, force=True)
    assert desk.head() == head._replace(turn=token)
    desk.now = Moment("a boot", 500.0)
    token = desk.take()
    assert desk.head() == head._replace(turn=token)
    desk.end(token)
    assert desk.head() == head
    assert {k: v for k, v in tables(desk.path).items() if k not in ("heads", "turns")} == {
        **rest,
        "sqlite_sequence": tables(desk.path)["sqlite_sequence"],
    }
    moved, _ = desk.do(REFUSED["redo"])
    assert moved == Moved(4, head.revision + 1)


def test_a_takeover_ends_a_living_turn_as_one_that_is_over(desk: Desk) -> None:
    desk.say(U("u1"))
    token = desk.take()
    desk.say(A(call="c1"), token=token, owner=2)
    rival = desk.take(owner=3, force=True)
    assert said(desk.read()) == ["u1", None, NO_RESULT]
    assert [row[:3] for row in desk.turn_rows()] == [(rival, 1, 3)]
    with pytest.raises(TurnLost):
        desk.do(end(), token=token, owner=2)


# What a lost turn had pending


def test_what_a_lost_turn_had_pending_goes_into_the_history(desk: Desk) -> None:
    begin(desk)  # something is there to redo
    token = desk.take()
    rival = desk.take(owner=3, force=True)
    live = desk.head()
    lost = kept(A("lost 1"), A("lost 2"), token=token)
    desk.do(ALWAYS["drain"], owner=2, pending=(lost,))
    assert desk.head() == live._replace(revision=live.revision + 2), "rival holds on, redo as well"
    assert live.turn == rival
    assert said(desk.read()) == ["u1", "a1"]
    assert desk.states()[-2:] == [("lost 1", "rewound"), ("lost 2", "rewound")]
    assert desk.states()[:-2] == [
        ("u1", "live"),
        ("a1", "live"),
        ("u2", "rewound"),
        ("a2", "rewound"),
    ]
    assert desk.moves() == [("undo", 4, 2), ("lost", 2, 4), ("lost", 4, 2)]
    rows = tables(desk.path)["messages"][-2:]
    assert [row[4] for row in rows] == [live.revision + 1] * 2
    desk.do(end(), owner=3, token=rival)
    moved, _ = desk.do(REFUSED["redo"])
    assert moved == Moved(4, live.revision + 3)
    assert said(desk.read()) == ["u1", "a1", "u2", "a2"]


@pytest.mark.parametrize("tip", [True, False], ids=["at a tip", "behind an undo"])
def test_every_revision_around_what_was_lost_can_be_restored(desk: Desk, tip: bool) -> None:
    if tip:
        desk.say(U("u1"), A("a1"))
    else:
        begin(desk)
    seen = {desk.head().revision: ["u1", "a1"]}
    token = desk.take()
    desk.say(A("kept"), token=token, owner=2)
    seen[desk.head().revision] = ["u1", "a1", "kept"]
    rival = desk.take(owner=3, force=True)
    desk.say(U("rival"), token=rival, owner=3)
    live = ["u1", "a1", "kept", "rival"]
    seen[desk.head().revision] = live
    first = kept(A("lost 1"), token=token, append_id=1_001)
    second = kept(A("lost 2"), token=token, append_id=1_002)
    desk.do(append(A("answer")), owner=3, token=rival, pending=(first, second))
    revision = desk.head().revision
    seen[revision - 4] = [*live, "lost 1"]
    seen[revision - 3] = live
    seen[revision - 2] = [*live, "lost 2"]
    seen[revision - 1] = live
    seen[revision] = [*live, "answer"]
    assert [place for kind, *place in desk.moves() if kind == "lost"] == [[4, 5], [5, 4]] * 2
    desk.do(end(), owner=3, token=rival)
    for revision, expected in [*seen.items(), *reversed(seen.items())]:
        desk.do(restore(revision))
        assert said(desk.read()) == expected, revision
    states = dict(desk.states())
    assert states["lost 1"] == states["lost 2"] == "rewound"


def test_what_was_lost_can_be_lived_on_once_restored(desk: Desk) -> None:
    desk.say(U("u1"), A("a1"))
    token = desk.take()
    desk.end(desk.take(owner=3, force=True), owner=3)
    desk.do(ALWAYS["drain"], pending=(kept(U("lost"), token=token),))
    desk.do(restore(desk.head().revision - 1))
    desk.say(A("on"))
    assert said(desk.read()) == ["u1", "a1", "lost", "on"]
    assert desk.head().opener == 3
    assert {state for _, state in desk.states()} == {"live"}


def test_the_live_branch_goes_on_behind_what_was_lost(desk: Desk) -> None:
    head = desk.say(U("u1"), A("a1"))
    token = desk.take()
    desk.end(desk.take(owner=3, force=True), owner=3)
    desk.do(ALWAYS["drain"], pending=(kept(A("lost"), token=token),))
    after = desk.say(A("a2"))
    assert (after.branch, after.position) == (head.branch, 3)
    desk.do(undo())
    desk.do(REFUSED["redo"])
    assert said(desk.read()) == ["u1", "a1", "a2"]
    desk.do(REFUSED["purge"])
    assert said(desk.read()) == ["u1", "a1", "a2"]
    assert [content for content, _ in desk.states()] == ["u1", "a1", "a2"]


def test_what_a_turn_has_pending_is_live_for_as_long_as_it_holds(desk: Desk) -> None:
    desk.say(U("u1"))
    token = desk.take()
    pending = (kept(A(call="c1"), token=token), kept(A("p"), append_id=1_001))
    desk.do(append(A("x")), token=token, owner=2, pending=pending)
    assert said(desk.read()) == ["u1", None, "p", "x"]
    assert desk.moves() == []


def test_the_end_of_a_turn_writes_what_is_pending_before_it_closes_calls(desk: Desk) -> None:
    desk.say(U("u1"))
    token = desk.take()
    desk.say(A(call=["c1", "c2"]), token=token, owner=2)
    pending = (kept(T("c1", "r1"), token=token),)
    ended, _ = desk.do(end(), token=token, owner=2, pending=pending)
    assert ended == Ended(1, 0, False)
    assert said(desk.read()) == ["u1", None, "r1", NO_RESULT]


# Closing calls


def call(*ids: str) -> Body:
    """An assistant's calls in Anthropic's shape."""
    parts = [{"type": "tool_use", "id": id, "name": "look", "input": {}} for id in ids]
    return {"role": "assistant", "content": parts}


def results(messages: Iterable[StoredMessage]) -> list[object]:
    """Which calls the synthetic rows close."""
    found: list[object] = []
    for message in messages:
        if message.synthetic and message.role == "tool":
            found.append(message.body["tool_call_id"])
        elif message.synthetic:
            content = message.body["content"]
            assert isinstance(content, list)
            found.append([part["tool_use_id"] for part in content])
    return found


def test_a_turn_that_left_nothing_open_writes_nothing_at_its_end(desk: Desk) -> None:
    desk.say(U("u1"))
    token = desk.take()
    desk.say(A(call="c1"), T("c1", "r"), A("done"), token=token, owner=2)
    head = desk.head()
    assert desk.end(token) == Ended(0, 0, False)
    assert desk.head() == head._replace(turn=None)


def test_an_end_that_closes_calls_is_one_revision_and_opens_no_user_turn(desk: Desk) -> None:
    desk.say(U("u1"))
    token = desk.take()
    desk.say(A(call=["c1", "c2"]), call("c3"), token=token, owner=2)
    head = desk.head()
    assert desk.end(token) == Ended(3, 0, False)
    after = desk.head()
    assert (after.revision, after.position, after.opener) == (head.revision + 1, 6, 1)
    closing = desk.read()[3:]
    assert [(m.synthetic, m.opens_turn, m.hidden, m.state) for m in closing] == [
        (True, False, False, "live")
    ] * 3
    assert {m.revision for m in closing} == {after.revision}
    assert not any(message.synthetic for message in desk.read()[:3])
    assert desk.moves() == []


def test_both_shapes_are_closed_each_in_its_own(desk: Desk) -> None:
    desk.say(U("u1"))
    token = desk.take()
    desk.say(A(call="o1"), call("n1", "n2", "n3"), token=token, owner=2)
    desk.say(
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "n2", "content": "r"}]},
        token=token,
        owner=2,
    )
    desk.end(token)
    assert results(desk.read()) == ["o1", ["n1", "n3"]]
    assert [message.role for message in desk.read()[4:]] == ["tool", "user"]


def test_only_calls_since_the_exchange_began_are_closed(desk: Desk) -> None:
    desk.say(U("u1"), A(call="old"), U("u2"))
    token = desk.take()
    desk.say(A(call="c1"), token=token, owner=2)
    desk.end(token)
    assert results(desk.read()) == ["c1"]


def test_a_call_from_before_the_turn_in_the_same_exchange_is_closed(desk: Desk) -> None:
    desk.say(U("u1"), A(call=["c1", "c2"]))
    token = desk.take()
    desk.say(T("c2", "r"), token=token, owner=2)
    desk.end(token)
    assert results(desk.read()) == ["c1"]


def test_calls_are_closed_that_stand_before_a_user_turn_of_the_same_turn(desk: Desk) -> None:
    desk.say(U("u1"))
    token = desk.take()
    desk.say(A(call="c1"), token=token, owner=2)
    desk.do(append(U("and this?")), interleave=True)
    desk.say(A(call="c2"), token=token, owner=2)
    desk.end(token)
    assert results(desk.read()) == ["c1", "c2"]


def test_an_undo_under_the_turn_leads_back_to_calls_that_are_closed_then(desk: Desk) -> None:
    desk.say(U("u1"), A(call="c1"), U("u2"), A("a2"))
    token = desk.take()
    desk.do(undo(), token=token, owner=2)
    desk.end(token)
    assert said(desk.read()) == ["u1", None, NO_RESULT]
    assert results(desk.read()) == ["c1"]


def test_calls_that_an_undo_took_back_are_not_closed(desk: Desk) -> None:
    desk.say(U("u1"), A("a1"))
    token = desk.take()
    desk.say(U("u2"), A(call="c1"), token=token, owner=2)
    desk.do(undo(), token=token, owner=2)
    assert desk.end(token).closed == 0
    assert said(desk.read()) == ["u1", "a1"]


def test_a_result_on_another_branch_closes_nothing_here(desk: Desk) -> None:
    desk.say(U("u1"))
    token = desk.take()
    open_at = desk.say(A(call=["c1", "c2"]), token=token, owner=2).revision
    desk.say(T("c1", "r1"), T("c2", "r2"), token=token, owner=2)
    desk.do(restore(open_at + 1), token=token, owner=2)
    assert desk.end(token).closed == 1
    assert said(desk.read()) == ["u1", None, "r1", NO_RESULT]
    assert results(desk.read()) == ["c2"]


def test_results_across_branches_are_found(desk: Desk) -> None:
    desk.say(U("u0"), A(call="before"), U("u1"), A(call=["c1", "c2", "c3"]), T("c1", "r1"))
    desk.do(lambda c, told: changes.fork(c, told, "b", 5, None))
    desk.do(lambda c, told: changes.fork(c, told, "c", None, None), id="b")
    desk.say(T("c2", "r2"), id="c")
    token = desk.take(id="c")
    assert desk.end(token, id="c").closed == 1
    assert results(desk.read("c")) == ["c3"]
    assert len(desk.read("a")) == 5


@pytest.mark.parametrize("row", [S("note"), A(call="c2"), T("c1", "hidden result")])
def test_hidden_rows_count_as_any_other(desk: Desk, row: Body) -> None:
    desk.say(U("u1"))
    token = desk.take()
    desk.say(A(call="c1"), token=token, owner=2)
    desk.do(append(row, hidden=True), token=token, owner=2)
    desk.end(token)
    expected = {"system": ["c1"], "assistant": ["c1", "c2"], "tool": []}[str(row["role"])]
    assert results(desk.read()) == expected
    assert results(desk.read(hidden=False)) == expected, "what closes a call is not hidden"


def test_many_calls_are_closed_in_their_order(desk: Desk) -> None:
    ids = [f"c{number}" for number in range(500)]
    desk.say(U("u1"))
    token = desk.take()
    desk.say(A(call=ids), token=token, owner=2)
    desk.do(extend([T(id, "r") for id in ids[::2]]), token=token, owner=2)
    assert desk.end(token).closed == 250
    assert results(desk.read()) == ids[1::2]


@pytest.mark.parametrize(
    "id",
    ["lone \ud800 surrogate", "x" * 1_000_000, "", "\0", "'; drop table messages; --"],
    ids=["surrogate", "megabyte", "empty", "nul", "sql"],
)
@pytest.mark.parametrize("shape", ["openai", "anthropic"])
@pytest.mark.parametrize("how", ["end", "passed", "taken over"])
def test_no_id_of_a_call_keeps_a_turn_from_ending(
    desk: Desk, id: str, shape: str, how: str
) -> None:
    token = desk.take()
    desk.say(A(call=id) if shape == "openai" else call(id), token=token, owner=2)
    if how == "end":
        desk.end(token)
    elif how == "passed":
        desk.dead.add(2)
        desk.say(U("next"))
    else:
        desk.take(owner=3, force=True)
    assert results(desk.read()) == ([id] if shape == "openai" else [[id]])


@pytest.mark.parametrize(
    "body",
    [
        {"role": "assistant", "content": None, "tool_calls": "none"},
        {"role": "assistant", "content": None, "tool_calls": [None, 7, {"id": 7}, {}, [[]]]},
        {"role": "assistant", "content": [{"type": "tool_use"}, 3, None, {"type": []}]},
        {"role": "assistant", "content": {"type": "tool_use", "id": "x"}},
        {"role": "assistant", "content": "x", "function_call": {"name": "old"}},
    ],
    ids=lambda body: json.dumps(body)[:60],
)
def test_no_message_keeps_a_turn_from_ending(desk: Desk, body: Body) -> None:
    token = desk.take()
    desk.say(body, token=token, owner=2)
    assert desk.end(token) == Ended(0, 0, False)


def test_a_dead_turns_inbox_waits_and_an_unreleased_one_is_settled_as_it_ended(desk: Desk) -> None:
    for release, left in [(None, 1), (Release("done", 3, ""), 0)]:
        posted, _ = desk.do(post(U("p")))
        assert isinstance(posted, Posted)
        taken, _ = desk.do(
            lambda c, told: holding.take(c, told, Claim("x", TTL_S, most_attempts=3))
        )
        assert isinstance(taken, Taken)
        desk.do(append(U("next")), unreleased={taken.token: release})
        assert len(tables(desk.path)["inbox"]) == left
        desk.writer.execute("DELETE FROM inbox")
