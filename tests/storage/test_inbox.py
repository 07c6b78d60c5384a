from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Literal, TypeAlias, cast

import pytest
from support import A, S, T, Told, U, said, tables

from turnkeeper.actors import open_sessions
from turnkeeper.actors.closing import close_calls
from turnkeeper.storage import (
    Appended,
    Changed,
    Claim,
    Closed,
    Connection,
    Draft,
    Ended,
    InboxMessage,
    Kept,
    Moment,
    Policy,
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
    inline,
    posting,
    reads,
    removal,
)
from turnkeeper.storage import inbox as table
from turnkeeper.storage.asked import Outcome
from turnkeeper.storage.connect import create, open_reader, open_writer
from turnkeeper.storage.holding import TOO_OFTEN
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
        self.dead: set[int] = set()
        self.seconds = 100.0
        self.last_id = 0
        create(path, migrate)
        self.open()

    def open(self) -> None:
        self.writer = open_writer(self.path, synchronous="normal", vfs=None)
        self.reader = open_reader(self.path, vfs=None)
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
        pending: tuple[Kept, ...] = (),
        unreleased: Mapping[int, Release | None] | None = None,
        life: int | None = None,
    ) -> object:
        """Make one change in a transaction of its own; what it raises rolls that back."""
        self.last_id += 1
        clock = Moment("a boot", self.seconds)
        rules = Rules(lambda: clock, SomeOwners(owner, self.dead), close_calls)
        now = 1_000.0 + self.last_id
        told = Told(
            id,
            self.last_id,
            now,
            life=life,
            pending=pending,
            rules=rules,
            token=token,
            unreleased=unreleased or {},
        )
        with self.writer:
            receipt, _ = change(self.writer, told)
        return receipt

    def post(
        self,
        body: Body,
        key: str | None = None,
        policy: Policy | None = None,
        *,
        id: str = "a",
        most: int = 10,
        unreleased: Mapping[int, Release | None] | None = None,
    ) -> Posted:
        posted = self.do(
            lambda c, told: posting.post(c, told, draft(body, key), policy, "queue", most),
            id=id,
            unreleased=unreleased,
        )
        assert isinstance(posted, Posted)
        return posted

    def posted(self, text: str, policy: Policy | None = None) -> int:
        """Post a person's message that must be accepted; return its id."""
        receipt = self.post(U(text), policy=policy)
        assert receipt.status == "accepted"
        assert receipt.id is not None
        return receipt.id

    def append(self, body: Body, key: str | None = None, *, token: int | None = None) -> Appended:
        receipt = self.do(lambda c, told: appends.append(c, told, draft(body, key)), token=token)
        assert isinstance(receipt, Appended)
        return receipt

    def undo(self) -> None:
        self.do(lambda c, told: changes.rewind(c, told, 1, "undo", lambda _: TakenBack("text")))

    def serve(self, *, most: int = 3, id: str = "a", owner: int = 1) -> Taken | None:
        """Take a turn for what the inbox holds, each tried `most` times."""
        claim = Claim("a server", TTL_S, most_attempts=most)
        taken = self.do(lambda c, told: holding.take(c, told, claim), id=id, owner=owner)
        return cast(Taken | None, taken)

    def served(self, *, most: int = 3, owner: int = 1) -> Taken:
        taken = self.serve(most=most, owner=owner)
        assert taken is not None
        return taken

    def end(self, taken: Taken, outcome: Outcome, *, most: int = 3, owner: int = 1) -> Ended:
        release = Release(outcome, most, f"it {outcome}")
        ended = self.do(
            lambda c, told: holding.end(c, told, release), token=taken.token, owner=owner
        )
        assert isinstance(ended, Ended)
        return ended

    def crash(self, taken: Taken) -> None:
        """Let whoever holds the turn die, as owner 2, and somebody pass it over."""
        self.dead.add(2)
        self.do(lambda c, told: changes.restore(c, told, head_revision(c)))

    def requeue(self, id: int) -> bool:
        return bool(self.do(lambda c, told: posting.requeue(c, told, id)))

    def dismiss(self, id: int) -> bool:
        return bool(self.do(lambda c, told: posting.dismiss(c, told, id)))

    def inbox(self, id: str = "a") -> list[InboxMessage]:
        """All that the inbox holds, as a second connection sees it."""
        return reads.in_inbox(self.reader, id, reads.head_of(self.reader, id, None))

    def waiting(self, id: str = "a") -> list[object]:
        return [row.body["content"] for row in self.inbox(id) if row.set_aside is None]

    def read(self, id: str = "a") -> list[StoredMessage]:
        head = reads.head_of(self.reader, id, None)
        found = reads.transcript(self.reader, id, head, last=None, after=0, hidden=True)
        return list(found.messages)

    def rows(self) -> list[tuple[object, ...]]:
        """Every message in the file."""
        return tables(self.path)["messages"]


def head_revision(connection: Connection) -> int:
    head = reads.head_of(connection, "a", None)
    assert head is not None
    return head.revision


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with closing(Desk(tmp_path / "state.db")) as desk:
        yield desk


def draft(body: Body, key: str | None = None) -> Draft:
    return Draft(*encode_message(body), opens_turn=body["role"] == "user", key=key)


# What a turn takes


@pytest.mark.parametrize(
    ("waiting", "taken"),
    [
        ("", ""),
        ("q", "q"),
        ("qq", "q"),
        ("c", "c"),
        ("cc", "cc"),
        ("ccq", "cc"),
        ("ccqc", "cc"),
        ("qcc", "q"),
        ("r", "r"),
        ("rr", "r"),
        ("rc", "r"),
        ("cr", "c"),
        ("i", "i"),
        ("iq", "i"),
        ("ic", "i"),
        ("qi", "qi"),
        ("qiq", "qi"),
        ("ccqi", "ccqi"),
        ("qqciqci", "qqciqci"),
        ("ii", "ii"),
        ("iqi", "iqi"),
        ("iqiqc", "iqi"),
        ("cicq", "ci"),
        ("cicc", "ci"),
    ],
)
def test_what_the_next_turn_takes(desk: Desk, waiting: str, taken: str) -> None:
    names: dict[str, Policy] = {"q": "queue", "c": "collect", "i": "interrupt", "r": "refuse"}
    desk.append(A("the session is there"))
    key = reads.head_of(desk.writer, "a", None)
    assert key is not None
    for number, letter in enumerate(waiting):
        table.add(
            desk.writer,
            number,
            key.session,
            names[letter],
            True,
            0.0,
            None,
            encode_message(U(str(number))),
        )
    found = table.front(desk.writer, key.session)
    assert "".join(row.policy[0] for row in found) == taken
    assert [row.id for row in found] == list(range(len(taken)))


def test_what_was_set_aside_is_neither_taken_nor_does_it_interrupt(desk: Desk) -> None:
    first, second, third = (desk.posted(t, "interrupt") for t in ("i1", "i2", "i3"))
    key = desk.inbox()
    for row in (key[0], key[2]):
        table.set_aside(desk.writer, row.place, "a test says so")
    session = 1
    assert [row.id for row in table.front(desk.writer, session)] == [second]
    assert table.count(desk.writer, session, 10) == 1
    assert table.interrupts(desk.writer, session, 0)
    table.set_aside(desk.writer, key[1].place, "a test says so")
    assert table.front(desk.writer, session) == []
    assert not table.interrupts(desk.writer, session, 0)
    assert [row.id for row in table.set_aside_after(desk.writer, 0, 10)] == [first, second, third]
    assert [row.id for row in table.set_aside_after(desk.writer, key[0].place, 1)] == [second]
    assert table.waiting_after(desk.writer, 0, 10) == []
    fourth = desk.posted("q1")
    desk.posted("q2")
    desk.posted("i4", "interrupt")
    table.set_aside(desk.writer, desk.inbox()[-1].place, "a test says so")
    assert [row.id for row in table.front(desk.writer, session)] == [fourth]


def test_nothing_is_taken_and_no_turn_if_nothing_waits(desk: Desk) -> None:
    before = tables(desk.path)
    assert desk.serve() is None
    assert tables(desk.path) == before, "not even a session is made"
    desk.append(U("u1"))
    before = tables(desk.path)
    assert desk.serve() is None
    assert tables(desk.path) == before


# Delivery


def test_a_turn_appends_what_it_takes_and_its_end_removes_it(desk: Desk) -> None:
    first = desk.posted("p1")
    second = desk.posted("p2")
    taken = desk.served()
    assert said(taken.messages) == ["p1"]
    assert taken.attempt == 1
    (message,) = taken.messages
    assert (message.append_id, message.created_at) == (first, 1_001.0), "as the receipt said"
    assert message.opens_turn
    assert message == desk.read()[0]
    assert [(row.id, row.attempts, row.taken) for row in desk.inbox()] == [
        (first, 1, True),
        (second, 0, False),
    ]
    assert desk.end(taken, "done") == Ended(0, 0, waiting=True)
    assert [row.id for row in desk.inbox()] == [second]
    assert desk.end(desk.served(), "done") == Ended(0, 0, waiting=False)
    assert desk.inbox() == []
    assert said(desk.read()) == ["p1", "p2"]


def test_a_taking_is_one_revision_and_leaves_nothing_to_redo(desk: Desk) -> None:
    desk.append(U("u1"))
    desk.undo()
    for text in ("p1", "p2", "p3"):
        desk.posted(text, "collect")
    head = reads.head_of(desk.writer, "a", None)
    assert head is not None
    assert head.redo is not None
    taken = desk.served()
    assert {message.revision for message in taken.messages} == {head.revision + 1}
    assert [message.position for message in taken.messages] == [1, 2, 3]
    after = reads.head_of(desk.writer, "a", None)
    assert after is not None
    assert (after.revision, after.redo, after.turn) == (head.revision + 1, None, taken.token)


@pytest.mark.parametrize("outcome", ["failed", "given back", "crash"])
def test_a_redelivery_never_appends_again(desk: Desk, outcome: Outcome | Literal["crash"]) -> None:
    desk.posted("p1", "collect")
    desk.posted("p2", "collect")
    first = desk.served(owner=2)
    before = tables(desk.path)["heads"], desk.rows()
    for _ in range(2):
        if outcome == "crash":
            desk.crash(first)
        else:
            desk.end(first, outcome, owner=2, most=9)
        desk.dead.clear()
        again = desk.served(owner=2, most=9)
        assert again.messages == first.messages
        assert again.token > first.token
        heads, rows = tables(desk.path)["heads"], desk.rows()
        assert rows == before[1]
        assert [head[:7] for head in heads] == [head[:7] for head in before[0]]
        first = again
    desk.end(again, "done", owner=2)
    assert desk.inbox() == []
    assert said(desk.read()) == ["p1", "p2"]


def test_a_redelivery_takes_what_has_come_since_with_it_and_appends_only_that(desk: Desk) -> None:
    first = desk.posted("p1")
    taken = desk.served()
    desk.append(A("half"), token=taken.token)
    second = desk.posted("stop", "interrupt")
    desk.end(taken, "failed")
    again = desk.served()
    assert said(again.messages) == ["p1", "stop"]
    assert [message.append_id for message in again.messages] == [first, second]
    assert again.attempt == 2
    assert said(desk.read()) == ["p1", "half", "stop"]
    assert [(row.id, row.attempts) for row in desk.inbox()] == [(first, 2), (second, 1)]
    desk.end(again, "done")
    assert desk.inbox() == []


def take_back_by_undo(desk: Desk) -> None:
    desk.undo()


def take_back_by_rewrite(desk: Desk) -> None:
    drafts = [draft(U("u1")), draft(A("a1"))]
    desk.do(lambda c, told: changes.rewrite(c, told, drafts, "rewrite"))


def take_back_by_purge(desk: Desk) -> None:
    desk.undo()
    desk.do(lambda c, told: removal.purge(c, told))


def take_back_by_restore(desk: Desk) -> None:
    desk.do(lambda c, told: changes.restore(c, told, 3))


@pytest.mark.parametrize(
    "take_back",
    [take_back_by_undo, take_back_by_rewrite, take_back_by_purge, take_back_by_restore],
)
@pytest.mark.parametrize("more", [False, True])
def test_a_message_taken_back_between_two_attempts_is_removed(
    desk: Desk, take_back: Callable[[Desk], None], more: bool
) -> None:
    desk.append(U("u1"))
    desk.append(A("a1"))
    desk.posted("regretted")
    taken = desk.served()
    desk.append(A("half"), token=taken.token)
    desk.end(taken, "failed")
    if more:
        desk.posted("next")
    take_back(desk)
    assert "regretted" not in said(desk.read())
    again = desk.serve()
    if more:
        assert again is not None
        assert said(again.messages) == ["next"]
        assert again.attempt == 1
    else:
        assert again is None
        assert tables(desk.path)["turns"] == []
    assert [row.body["content"] for row in desk.inbox()] == (["next"] if more else [])
    assert said(desk.read()) == ["u1", "a1"] + (["next"] if more else [])


def test_a_message_that_was_redone_is_delivered_still(desk: Desk) -> None:
    desk.posted("p1")
    desk.end(desk.served(), "failed")
    desk.undo()
    desk.do(lambda c, told: changes.redo(c, told))
    assert said(desk.served().messages) == ["p1"]


def test_a_message_on_a_branch_that_was_left_and_taken_up_again_is_live(desk: Desk) -> None:
    desk.append(U("u1"))
    desk.posted("p1")
    desk.end(desk.served(), "failed")
    revision = head_revision(desk.writer)
    drafts = [draft(U("u1")), draft(U("other")), draft(U("third"))]
    desk.do(lambda c, told: changes.rewrite(c, told, drafts, "rewrite"))
    desk.do(lambda c, told: changes.restore(c, told, revision))
    desk.append(A("behind it"))
    taken = desk.served()
    assert said(taken.messages) == ["p1"]
    assert taken.messages[0].position == 2


def test_of_what_is_collected_only_the_first_opens_a_user_turn(desk: Desk) -> None:
    for text in ("p1", "p2", "p3"):
        desk.posted(text, "collect")
    taken = desk.served()
    assert [message.opens_turn for message in taken.messages] == [True, False, False]
    desk.append(A("to all"), token=taken.token)
    desk.end(taken, "done")
    desk.undo()
    assert said(desk.read()) == [], "they are one turn"


def test_of_what_is_collected_the_first_of_a_person_opens_the_turn(desk: Desk) -> None:
    desk.append(U("u1"))
    desk.append(A("a1"))
    desk.post(S("a note"), policy="collect")
    desk.posted("p1", "collect")
    desk.posted("p2", "collect")
    taken = desk.served()
    assert [message.opens_turn for message in taken.messages] == [False, True, False]
    desk.end(taken, "done")
    desk.undo()
    assert said(desk.read()) == ["u1", "a1", "a note"]


def test_what_is_no_persons_opens_no_turn(desk: Desk) -> None:
    desk.append(U("u1"))
    desk.post(S("a note"))
    desk.post(T("c1", "late result"))
    for _ in range(2):
        taken = desk.served()
        assert not taken.messages[0].opens_turn
        desk.end(taken, "done")
    desk.undo()
    assert said(desk.read()) == []


# Attempts


def test_what_failed_is_tried_again_and_set_aside_after_its_last_attempt(desk: Desk) -> None:
    id = desk.posted("p1")
    desk.posted("p2")
    for attempt in (1, 2, 3):
        taken = desk.served()
        assert (taken.attempt, said(taken.messages)) == (attempt, ["p1"])
        ended = desk.end(taken, "failed")
        assert ended == Ended(0, int(attempt == 3), waiting=True)
    (aside, _) = desk.inbox()
    assert (aside.id, aside.attempts, aside.set_aside, aside.taken) == (id, 3, "it failed", False)
    taken = desk.served()
    assert (taken.attempt, said(taken.messages)) == (1, ["p2"])
    assert said(desk.read()) == ["p1", "p2"], "it stays in the transcript"


def test_processes_that_die_in_the_middle_count_as_attempts(desk: Desk) -> None:
    id = desk.posted("p1")
    desk.posted("p2")
    for attempt in (1, 2, 3):
        taken = desk.served(owner=10 + attempt)
        assert (taken.attempt, said(taken.messages)) == (attempt, ["p1"])
        desk.dead.add(10 + attempt)
        desk.close()
        desk.open()
    taken = desk.served()
    assert (taken.attempt, said(taken.messages)) == (1, ["p2"])
    (aside,) = (row for row in desk.inbox() if row.set_aside)
    assert (aside.id, aside.attempts, aside.set_aside) == (id, 3, TOO_OFTEN)


def test_a_last_one_that_is_set_aside_leaves_nothing_to_take(desk: Desk) -> None:
    desk.posted("p1")
    taken = desk.served(owner=2, most=1)
    desk.crash(taken)
    assert desk.serve(most=1) is None
    assert [row.set_aside for row in desk.inbox()] == [TOO_OFTEN]
    assert tables(desk.path)["turns"] == []


def test_what_was_given_back_was_not_tried(desk: Desk) -> None:
    id, other = desk.posted("p1"), desk.posted("p2")
    for _ in range(5):
        taken = desk.served(most=1)
        assert taken.attempt == 1
        assert desk.end(taken, "given back", most=1) == Ended(0, 0, waiting=True)
    assert [(row.id, row.attempts, row.taken) for row in desk.inbox()] == [
        (id, 0, False),
        (other, 0, False),
    ]
    assert said(desk.read()) == ["p1"]


def test_of_several_only_those_tried_often_enough_are_set_aside(desk: Desk) -> None:
    desk.posted("old", "collect")
    for _ in range(2):
        desk.end(desk.served(), "failed")
    desk.posted("new", "collect")
    taken = desk.served()
    assert (taken.attempt, said(taken.messages)) == (3, ["old", "new"])
    assert desk.end(taken, "failed") == Ended(0, 1, waiting=True)
    assert [(row.body["content"], row.attempts, bool(row.set_aside)) for row in desk.inbox()] == [
        ("old", 3, True),
        ("new", 1, False),
    ]
    taken = desk.served()
    assert (taken.attempt, said(taken.messages)) == (2, ["new"])


def test_the_end_of_one_turn_says_nothing_of_what_another_took(desk: Desk) -> None:
    desk.posted("p1")
    first = desk.served(owner=2)
    desk.crash(first)
    taken = desk.served()
    with pytest.raises(TurnLost):
        desk.end(first, "done", owner=2)
    assert [row.attempts for row in desk.inbox()] == [2]
    desk.end(taken, "given back")
    assert [row.attempts for row in desk.inbox()] == [1]


def test_a_turn_that_took_nothing_leaves_the_inbox_alone(desk: Desk) -> None:
    desk.posted("p1")
    desk.end(desk.served(), "failed")
    before = tables(desk.path)["inbox"]
    taken = desk.do(lambda c, told: holding.take(c, told, Claim("x", TTL_S)))
    assert isinstance(taken, Taken)
    assert (taken.messages, taken.attempt) == ((), 0)
    with pytest.raises(TurnActive):
        desk.serve()
    desk.end(taken, "done")
    assert tables(desk.path)["inbox"] == before


# What was set aside


def set_aside(desk: Desk, text: str) -> int:
    id = desk.posted(text)
    assert desk.end(desk.served(most=1), "failed", most=1).set_aside == 1
    return id


def test_what_is_requeued_stands_behind_all_others_and_starts_anew(desk: Desk) -> None:
    id = set_aside(desk, "p1")
    desk.posted("p2")
    place = desk.inbox()[0].place
    assert desk.requeue(id)
    rows = desk.inbox()
    assert [row.body["content"] for row in rows] == ["p2", "p1"]
    assert (rows[1].id, rows[1].attempts, rows[1].set_aside, rows[1].taken) == (id, 0, None, False)
    assert rows[1].accepted_at == 1_001.0
    assert rows[1].place > rows[0].place > place
    assert not desk.requeue(id), "it waits already"
    desk.end(desk.served(), "done")
    taken = desk.served()
    assert (taken.attempt, said(taken.messages)) == (1, ["p1"])
    assert said(desk.read()) == ["p1", "p2"], "nor is it appended again"
    desk.end(taken, "done")
    assert desk.inbox() == []
    assert not desk.requeue(id)


def test_what_is_dismissed_is_gone_and_stays_in_the_transcript(desk: Desk) -> None:
    id = set_aside(desk, "p1")
    assert desk.dismiss(id)
    assert desk.inbox() == []
    assert said(desk.read()) == ["p1"]
    assert not desk.dismiss(id)
    assert desk.serve() is None


@pytest.mark.parametrize("name", ["requeue", "dismiss"])
def test_only_what_was_set_aside_in_this_session_can_be_requeued_or_dismissed(
    desk: Desk, name: str
) -> None:
    waiting = desk.posted("p1")
    taken = desk.served()
    second = desk.posted("p2")
    before = tables(desk.path)
    act = getattr(desk, name)
    for id in (waiting, second, 12_345):
        assert not act(id)
    change = getattr(posting, name)
    assert not desk.do(lambda c, told: change(c, told, waiting), id="nobody")
    assert tables(desk.path) == before
    desk.end(taken, "failed", most=1)
    assert not desk.do(lambda c, told: change(c, told, waiting), id="nobody")
    assert not desk.do(lambda c, told: change(c, told, waiting), id="b")
    assert len(desk.inbox()) == 2
    assert act(waiting)


# Posting


def test_a_post_makes_the_session_and_leaves_its_transcript_alone(desk: Desk) -> None:
    receipt = desk.post(U("p1"), "k1")
    assert receipt == Posted("accepted", 1, 1_001.0, "queue", 1)
    assert desk.read() == []
    assert desk.rows() == []
    head = tables(desk.path)["heads"]
    assert desk.post(U("p2")) == Posted("accepted", 2, 1_002.0, "queue", 2)
    assert tables(desk.path)["heads"] == head, "no revision"


def test_the_posts_own_policy_goes_before_the_sessions_and_that_before_the_stores(
    desk: Desk,
) -> None:
    assert desk.post(U("x")).policy == "queue"
    desk.do(lambda c, told: changes.set_policy(c, told, "collect"))
    assert desk.post(U("x")).policy == "collect"
    assert desk.post(U("x"), policy="interrupt").policy == "interrupt"
    assert [row.policy for row in desk.inbox()] == ["queue", "collect", "interrupt"]
    desk.do(lambda c, told: changes.set_policy(c, told, None))
    assert desk.post(U("x")).policy == "queue"


def test_c61_a_full_inbox_takes_nothing_and_drops_nothing(desk: Desk) -> None:
    for number in range(3):
        desk.post(U(f"p{number}"), f"k{number}", most=3)
    before = tables(desk.path)
    assert desk.post(U("x"), "new", most=3) == Posted("full", None, None, "queue", 3)
    assert desk.post(U("x"), most=3, policy="interrupt").status == "full"
    assert desk.post(U("p1"), "k1", most=3) == Posted("duplicate", 2, 1_002.0, "queue", 3)
    with pytest.raises(Rejected, match="other content"):
        desk.post(U("other"), "k1", most=3)
    assert tables(desk.path) == before
    desk.end(desk.served(), "done")
    assert desk.post(U("x"), "new", most=3).status == "accepted"


def test_what_is_acted_on_takes_room_and_what_was_set_aside_does_not(desk: Desk) -> None:
    desk.posted("p1")
    taken = desk.served(most=1)
    assert desk.post(U("x"), most=1).status == "full"
    desk.end(taken, "failed", most=1)
    assert desk.post(U("x"), most=1) == Posted("accepted", desk.last_id, 1_000.0 + desk.last_id, "queue", 1)  # fmt: skip
    assert desk.post(U("x"), most=1).status == "full"


def test_a_full_inbox_of_nobody_makes_no_session(desk: Desk) -> None:
    before = tables(desk.path)
    assert desk.post(U("x"), most=0).status == "full"
    assert tables(desk.path) == before


def test_a_refusing_post_is_accepted_only_by_an_idle_session(desk: Desk) -> None:
    assert desk.post(U("p1"), policy="refuse").status == "accepted", "there is not even a session"
    assert desk.post(U("x"), policy="refuse") == Posted("refused", None, None, "refuse", 1)
    taken = desk.served(owner=2)
    assert desk.post(U("x"), policy="refuse").status == "refused"
    desk.end(taken, "done", owner=2)
    assert desk.post(U("p2"), policy="refuse").status == "accepted"
    desk.end(desk.served(), "done")
    plain = desk.do(lambda c, told: holding.take(c, told, Claim("x", TTL_S)), owner=2)
    assert isinstance(plain, Taken)
    before = tables(desk.path)
    assert desk.post(U("x"), policy="refuse") == Posted("refused", None, None, "refuse", 0)
    assert tables(desk.path) == before
    desk.dead.add(2)
    assert desk.post(U("p3"), policy="refuse").status == "accepted", "a dead holder is not busy"


def test_a_turn_of_ours_that_has_ended_refuses_no_post(desk: Desk) -> None:
    taken = desk.do(lambda c, told: holding.take(c, told, Claim("x", TTL_S)))
    assert isinstance(taken, Taken)
    assert desk.post(U("x"), policy="refuse").status == "refused"
    receipt = desk.post(U("x"), policy="refuse", unreleased={taken.token: None})
    assert receipt.status == "accepted"


def test_an_inbox_does_not_hear_of_another_sessions(desk: Desk) -> None:
    desk.post(U("p1"), "k", id="a", most=1)
    assert desk.post(U("other"), "k", id="b", most=1).status == "accepted"
    assert desk.serve(id="c") is None
    taken = desk.serve(id="b")
    assert taken is not None
    assert said(taken.messages) == ["other"]
    assert desk.waiting("a") == ["p1"]


# Keys


def test_c63_a_duplicate_gets_the_first_receipt_at_every_stage(desk: Desk) -> None:
    first = desk.post(U("p1"), "k")

    def check(stage: str) -> None:
        before = tables(desk.path)
        again = desk.post({"content": "p1", "role": "user"}, "k")
        assert again.status == "duplicate", stage
        assert (again.id, again.accepted_at) == (first.id, first.accepted_at), stage
        with pytest.raises(Rejected, match="other content") as caught:
            desk.post(U("p2"), "k")
        assert caught.value.field == "key"
        assert tables(desk.path) == before, stage

    check("waiting")
    desk.close()
    desk.open()
    check("after a reopen")
    taken = desk.served(most=1)
    check("taken")
    desk.end(taken, "given back")
    check("given back")
    desk.end(desk.served(most=1), "failed", most=1)
    check("set aside")
    assert first.id is not None
    desk.requeue(first.id)
    check("requeued")
    desk.end(desk.served(), "done")
    check("done")
    desk.undo()
    check("undone")
    desk.append(U("something newer"))
    check("something newer stands there")
    desk.close()
    desk.open()
    check("and after a reopen")
    assert desk.inbox() == []
    assert desk.serve() is None
    desk.do(lambda c, told: removal.purge(c, told))
    assert desk.post(U("p1"), "k").status == "accepted", "a purge frees keys"


def test_a_dismissed_message_keeps_its_key(desk: Desk) -> None:
    first = desk.post(U("p1"), "k")
    assert first.id is not None
    desk.end(desk.served(most=1), "failed", most=1)
    desk.dismiss(first.id)
    assert desk.post(U("p1"), "k") == first._replace(status="duplicate", waiting=0)


def test_c64_posts_without_a_key_are_never_duplicates(desk: Desk) -> None:
    ids = {desk.posted("yes"), desk.posted("yes")}
    ids |= {desk.post(U("yes"), "1").id or 0, desk.post(U("yes"), "2").id or 0}
    assert len(ids) == 4
    assert desk.waiting() == ["yes"] * 4


def test_an_append_of_a_key_that_waits_is_rejected(desk: Desk) -> None:
    desk.post(U("p1"), "k")
    before = tables(desk.path)
    with pytest.raises(Rejected, match="waits in the inbox") as caught:
        desk.append(U("p1"), "k")
    assert caught.value.field == "key"
    with pytest.raises(Rejected, match="other content"):
        desk.append(U("other"), "k")
    drafts = [draft(A("x")), draft(U("p1"), "k")]
    with pytest.raises(Rejected, match="waits in the inbox"):
        desk.do(lambda c, told: appends.extend(c, told, drafts))
    assert tables(desk.path) == before
    taken = desk.served()
    receipt = desk.append(U("p1"), "k")
    assert (receipt.duplicate, receipt.live, receipt.position) == (True, True, 1)
    assert receipt.id == taken.messages[0].id


def test_an_append_of_a_key_that_waits_is_rejected_at_a_remembered_head_too(desk: Desk) -> None:
    desk.append(U("u1"))
    desk.post(U("p1"), "k")
    before = tables(desk.path)
    known = reads.head_of(desk.writer, "a", None)
    told = Told("a", 77, known=known)
    with pytest.raises(Rejected, match="waits in the inbox"), desk.writer:
        appends.append(desk.writer, told, draft(U("p1"), "k"))
    assert tables(desk.path) == before


def test_a_post_of_a_key_that_was_appended_is_a_duplicate(desk: Desk) -> None:
    desk.append(U("u1"), "k")
    before = tables(desk.path)
    assert desk.post(U("u1"), "k") == Posted("duplicate", 1, 1_001.0, "queue", 0)
    assert desk.post(U("u1"), "k", most=0).status == "duplicate"
    with pytest.raises(Rejected, match="other content"):
        desk.post(U("other"), "k")
    assert tables(desk.path) == before


def test_a_pending_append_of_a_key_that_waits_is_not_stored_twice(desk: Desk) -> None:
    """Two processes: one cannot write an append, the other accepts the same message as a post."""
    desk.post(U("p1"), "k")
    same = Kept((draft(U("p1"), "k"),), 500, 1.0)
    other = Kept((draft(U("other"), "k"),), 501, 1.0)
    desk.do(lambda c, told: appends.drain(c, told), pending=(same, other))
    assert [(m.body["content"], m.key) for m in desk.read()] == [("other", None)]
    taken = desk.served()
    assert [(m.body["content"], m.key) for m in taken.messages] == [("p1", "k")]
    desk.do(lambda c, told: appends.drain(c, told), pending=(same,))
    assert said(desk.read()) == ["other", "p1"]


def test_a_pending_append_of_the_same_key_makes_a_post_a_duplicate(desk: Desk) -> None:
    kept = Kept((draft(U("p1"), "k"),), 500, 3.0)
    posted = desk.do(
        lambda c, told: posting.post(c, told, draft(U("p1"), "k"), None, "queue", 10),
        pending=(kept,),
    )
    assert posted == Posted("duplicate", 500, 3.0, "queue", 0)
    assert said(desk.read()) == ["p1"]


# The session's end


def test_a_deleted_sessions_inbox_goes_and_its_keys_are_free(desk: Desk) -> None:
    desk.post(U("p1"), "k")
    id = desk.posted("p2")
    desk.served()
    desk.post(U("kept"), "k", id="b")
    desk.do(lambda c, told: removal.delete(c, told))
    assert [row.body["content"] for row in desk.inbox("b")] == ["kept"]
    assert len(tables(desk.path)["inbox"]) == 1
    assert desk.inbox() == []
    assert not desk.requeue(id)
    assert desk.serve() is None
    with pytest.raises(Closed):
        desk.do(lambda c, told: posting.post(c, told, draft(U("x")), None, "queue", 10), life=1)
    assert desk.post(U("a new one"), "k").status == "accepted"
    assert said(desk.served().messages) == ["a new one"]


def test_a_purged_sessions_inbox_stays(desk: Desk) -> None:
    desk.append(U("u1"))
    desk.undo()
    desk.posted("p1")
    desk.end(desk.served(), "failed")
    desk.post(U("p2"), "k")
    before = tables(desk.path)["inbox"]
    desk.do(lambda c, told: removal.purge(c, told))
    assert tables(desk.path)["inbox"] == before
    taken = desk.served()
    assert (taken.attempt, said(taken.messages)) == (2, ["p1"])
    desk.end(taken, "done")
    assert said(desk.served().messages) == ["p2"]


def test_a_fork_starts_with_an_empty_inbox_and_free_keys(desk: Desk) -> None:
    desk.append(U("u1"))
    desk.do(lambda c, told: changes.set_policy(c, told, "collect"))
    desk.post(U("p1"), "k")
    desk.do(lambda c, told: changes.fork(c, told, "b", None, None))
    assert desk.inbox("b") == []
    assert desk.serve(id="b") is None
    receipt = desk.post(U("another"), "k", id="b")
    assert (receipt.status, receipt.waiting) == ("accepted", 1)
    assert desk.waiting("a") == ["p1"]


def test_a_fork_of_what_a_turn_has_taken_has_the_message_and_not_the_post(desk: Desk) -> None:
    desk.posted("p1")
    taken = desk.served()
    desk.do(lambda c, told: changes.fork(c, told, "b", None, None))
    assert said(desk.read("b")) == ["p1"]
    assert desk.inbox("b") == []
    desk.end(taken, "failed")
    desk.do(lambda c, told: removal.delete(c, told))
    assert said(desk.read("b")) == ["p1"]


# Through the front door


async def test_a_message_is_the_same_from_its_post_to_its_turn_and_behind_a_reopen(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.db"
    body: dict[str, object] = {
        "role": "user",
        "content": [{"type": "text", "text": "\ud800"}],
        "x": 2**63,
    }
    async with open_sessions(path, offload=inline, now=lambda: 7.0) as sessions:
        receipt = await sessions["a"].post(body, key="k", policy="collect")
        assert (receipt.status, receipt.accepted_at, receipt.waiting) == ("accepted", 7.0, 1)
    async with open_sessions(path, offload=inline) as sessions:
        (waiting,) = await sessions["a"].inbox()
        assert (waiting.id, waiting.body, waiting.key) == (receipt.id, body, "k")
        assert (waiting.session, waiting.policy, waiting.accepted_at) == ("a", "collect", 7.0)
        assert (waiting.attempts, waiting.taken, waiting.set_aside) == (0, False, None)
        again = await sessions["a"].post(body, key="k")
        assert again.id == receipt.id
        assert again.status == "duplicate"
        assert await sessions.set_aside() == []
        assert await sessions.delete("a") is not None
        assert await sessions["a"].inbox() == []
