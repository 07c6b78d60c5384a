from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from support import A, Told, U, tables

from turnkeeper.actors.closing import close_calls
from turnkeeper.storage import (
    Appended,
    Changed,
    Claim,
    Closed,
    Connection,
    Draft,
    Head,
    Moment,
    Rules,
    StorageDamaged,
    Taken,
    TakenBack,
    TurnActive,
    TurnLost,
    appends,
    changes,
    encode_message,
    heads,
    holding,
    removal,
)
from turnkeeper.storage import turns as table
from turnkeeper.storage.connect import create, open_writer
from turnkeeper.storage.owners import UnlockedOwners
from turnkeeper.storage.schema import define_guard, migrate

BOOT = "this boot"


def row(boot: str, expires: float) -> table.TurnRow:
    return table.TurnRow(1, 1, 2, "somebody", 0, 0, 0.0, boot, expires)


@pytest.mark.parametrize(
    ("owner_lives", "boot", "at_s", "over"),
    [
        (True, BOOT, 9.0, False),
        (True, BOOT, 10.0, True),
        (True, BOOT, 11.0, True),
        (None, BOOT, 9.0, False),
        (None, BOOT, 10.0, True),
        (None, BOOT, 11.0, True),
        (False, BOOT, 9.0, True),
        (False, BOOT, 10.0, True),
        (False, BOOT, 11.0, True),
        (True, "another boot", 9.0, False),
        (True, "another boot", 10.0, False),
        (True, "another boot", 11.0, False),
        (None, "another boot", 9.0, True),
        (None, "another boot", 10.0, True),
        (None, "another boot", 11.0, True),
        (False, "another boot", 9.0, True),
        (False, "another boot", 10.0, True),
        (False, "another boot", 11.0, True),
    ],
)
def test_who_may_be_passed_over(
    owner_lives: bool | None, boot: str, at_s: float, over: bool
) -> None:
    turn = row(boot, 10.0)
    assert table.is_over(turn, Moment(BOOT, at_s), owner_lives=owner_lives) is over


@pytest.mark.parametrize(
    ("boot", "at_s", "left_s"),
    [
        (BOOT, 4.0, 6.0),
        (BOOT, 10.0, 0.0),
        (BOOT, 99.0, 0.0),
        ("another boot", 4.0, float("inf")),
        ("another boot", 99.0, float("inf")),
    ],
)
def test_what_is_left_of_a_turn_is_not_negative_and_unknown_across_boots(
    boot: str, at_s: float, left_s: float
) -> None:
    assert table.remaining_s(row(boot, 10.0), Moment(BOOT, at_s)) == left_s


class Desk:
    """A file on which one transaction after the other is made by hand, each for whom it says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds = 100.0
        """What time it is, for what expires."""
        self.last_id = 0
        create(path, migrate)
        self.connection = open_writer(path, synchronous="normal", vfs=None)
        define_guard(self.connection, allowed=False)

    def do(
        self,
        change: Callable[[Connection, Told], Changed[object]],
        *,
        id: str = "a",
        owner: int = 1,
        token: int | None = None,
        known: Head | None = None,
        life: int | None = None,
    ) -> Changed[object]:
        """Make one change in a transaction of its own; what it raises rolls that back."""
        self.last_id += 1
        rules = Rules(lambda: Moment(BOOT, self.seconds), UnlockedOwners(owner), close_calls)
        told = Told(id, self.last_id, known=known, life=life, rules=rules, token=token)
        with self.connection:
            receipt, head = change(self.connection, told)
        return Changed(receipt, head)

    def say(self, *texts: str, id: str = "a") -> Head:
        """Append, a person and the machine in turn; return where the head is then."""
        head = None
        for number, text in enumerate(texts):
            said = draft(A(text) if number % 2 else U(text))
            _, head = self.do(partial(_append, said), id=id)
        assert head is not None
        return head

    def take(self, *, id: str = "a", owner: int = 1, force: bool = False) -> tuple[int, Head]:
        """Take the turn; return its token and the head."""
        claim = Claim(f"owner {owner}", 30.0, force)
        taken, head = self.do(lambda c, told: holding.take(c, told, claim), id=id, owner=owner)
        assert isinstance(taken, Taken)
        assert head is not None
        return taken.token, head


def _append(said: Draft, connection: Connection, told: Told) -> Changed[Appended]:
    return appends.append(connection, told, said)


def draft(body: dict[str, object]) -> Draft:
    return Draft(*encode_message(body), opens_turn=body["role"] == "user")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "state.db")
    with closing(desk.connection):
        yield desk


def test_a_token_is_larger_than_all_before_it_in_the_whole_file(desk: Desk) -> None:
    tokens = []
    for id in ("a", "b", "a", "c"):
        token, _ = desk.take(id=id)
        tokens.append(token)
        desk.do(lambda c, told: holding.end(c, told, None), id=id, token=token)
    assert tokens == sorted(set(tokens))
    assert tables(desk.path)["turns"] == []


def test_a_token_is_not_used_again_in_a_later_life_or_after_a_reopen(desk: Desk) -> None:
    first, _ = desk.take()
    desk.do(removal.delete)
    assert tables(desk.path)["turns"] == []
    assert [row[-1] for row in tables(desk.path)["heads"]] == [None]
    second, _ = desk.take()
    assert second > first
    desk.do(removal.delete)
    desk.connection.close()
    desk.connection = open_writer(desk.path, synchronous="normal", vfs=None)
    define_guard(desk.connection, allowed=False)
    third, _ = desk.take(id="b")
    assert third > second


def test_what_was_not_committed_uses_no_token_up(desk: Desk) -> None:
    first, _ = desk.take()

    def take_and_fail(connection: Connection, told: Told) -> Changed[object]:
        holding.take(connection, told, Claim("x", 30.0))
        raise LookupError

    with pytest.raises(LookupError):
        desk.do(take_and_fail, id="b")
    assert [row[0] for row in tables(desk.path)["turns"]] == [first]


def test_a_head_names_the_turn_that_holds_it_and_the_row_says_whose_it_is(desk: Desk) -> None:
    head = desk.say("u1", "a1", "u2")
    token, held = desk.take(owner=7)
    assert held == head._replace(turn=token)
    (found,) = tables(desk.path)["turns"]
    assert found == (
        token,
        head.session,
        7,
        "owner 7",
        3,
        0,
        0.0,
        BOOT,
        130.0,
    )
    assert table.seen(desk.connection, head.session, token) is not None
    assert table.seen(desk.connection, head.session + 1, token) is None
    assert table.seen(desk.connection, head.session, token + 1) is None


def test_a_turn_is_set_only_in_place_of_the_one_that_is_expected(desk: Desk) -> None:
    token, head = desk.take()
    before = tables(desk.path)
    for expected in (None, token + 1):
        assert not heads.hold(desk.connection, head.session, expected, None)
        assert tables(desk.path) == before
    assert heads.hold(desk.connection, head.session, token, None)
    assert heads.get(desk.connection, head.session) == head._replace(turn=None)


def test_only_what_is_held_can_be_renewed(desk: Desk) -> None:
    token, head = desk.take()
    assert table.renew(desk.connection, token, Moment("later boot", 7.0))
    assert table.get(desk.connection, token)[-2:] == ("later boot", 7.0)
    desk.do(lambda c, told: holding.end(c, told, None), token=token)
    before = tables(desk.path)
    assert not table.renew(desk.connection, token, Moment(BOOT, 500.0))
    assert tables(desk.path) == before
    assert table.seen(desk.connection, head.session, token) is None


def test_a_turn_that_a_head_names_and_that_has_no_row_is_damage(desk: Desk) -> None:
    token, _ = desk.take()
    desk.connection.execute("DELETE FROM turns")
    with pytest.raises(StorageDamaged, match=f"turn {token} has no row"):
        desk.say("u1")


def take_text(_: object) -> TakenBack:
    return TakenBack("text")


WRITES: dict[str, Callable[[Connection, Told], Changed[object]]] = {
    "append": lambda c, told: appends.append(c, told, draft(A("late"))),
    "extend": lambda c, told: appends.extend(c, told, [draft(A("late")), draft(U("later"))]),
    "undo": lambda c, told: changes.rewind(c, told, 1, "undo", take_text),
    "retry": lambda c, told: changes.rewind(c, told, 1, "retry", take_text),
    "redo": lambda c, told: changes.redo(c, told),
    "rewrite": lambda c, told: changes.rewrite(c, told, [draft(U("new"))], "rewrite"),
    "restore": lambda c, told: changes.restore(c, told, 2),
    "purge": lambda c, told: removal.purge(c, told),
    "end": lambda c, told: holding.end(c, told, None),
}


def taken_over(desk: Desk, token: int) -> None:
    desk.take(owner=2, force=True)


def ended(desk: Desk, token: int) -> None:
    desk.do(lambda c, told: holding.end(c, told, None), token=token)


def ended_and_taken(desk: Desk, token: int) -> None:
    ended(desk, token)
    desk.take(owner=2)


def passed_over(desk: Desk, token: int) -> None:
    desk.seconds += 30.0
    desk.do(lambda c, told: appends.append(c, told, draft(A("rival"))), owner=2)


@pytest.mark.parametrize("lose", [taken_over, ended, ended_and_taken, passed_over])
@pytest.mark.parametrize("remembered", [True, False], ids=["remembered", "unknown"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_with_a_stale_token_changes_nothing(
    desk: Desk, name: str, remembered: bool, lose: Callable[[Desk, int], None]
) -> None:
    desk.say("u1", "a1", "u2", "a2")
    desk.do(WRITES["undo"])
    token, head = desk.take()
    lose(desk, token)
    before = tables(desk.path)
    known = head if remembered else None
    with pytest.raises(TurnLost) as caught:
        desk.do(WRITES[name], token=token, known=known)
    assert (caught.value.session, caught.value.reason) == ("a", "taken")
    assert tables(desk.path) == before


@pytest.mark.parametrize("lose", [taken_over, ended, ended_and_taken])
def test_the_statement_that_moves_a_head_compares_the_turn(
    desk: Desk, lose: Callable[[Desk, int], None]
) -> None:
    """Nothing else of the head has changed, so nothing else could tell."""
    desk.say("u1", "a1")
    token, head = desk.take()
    assert head.at_tip, "or the quick way would not be tried"
    lose(desk, token)
    assert desk.connection.execute("SELECT revision, branch, position FROM heads").get == head[1:4]
    before = tables(desk.path)
    with pytest.raises(TurnLost):
        desk.do(WRITES["append"], token=token, known=head, life=head.session)
    assert tables(desk.path) == before


@pytest.mark.parametrize("name", [name for name in WRITES if name != "end"])
def test_a_head_that_was_remembered_before_the_turn_was_taken_is_stale(
    desk: Desk, name: str
) -> None:
    head = desk.say("u1", "a1")
    desk.take(owner=2)
    before = tables(desk.path)
    with pytest.raises(TurnActive):
        desk.do(WRITES[name], known=head)
    assert tables(desk.path) == before


@pytest.mark.parametrize("name", WRITES)
def test_a_token_of_another_session_is_none_here(desk: Desk, name: str) -> None:
    desk.say("u1", "a1")
    token, _ = desk.take(id="b")
    before = tables(desk.path)
    with pytest.raises(TurnLost):
        desk.do(WRITES[name], token=token)
    assert tables(desk.path) == before


@pytest.mark.parametrize("name", WRITES)
def test_a_token_says_nothing_in_a_later_life(desk: Desk, name: str) -> None:
    desk.say("u1", "a1")
    token, head = desk.take()
    desk.do(removal.delete)
    desk.say("new life")
    before = tables(desk.path)
    with pytest.raises(Closed):
        desk.do(WRITES[name], token=token, known=head, life=head.session)
    with pytest.raises(TurnLost):
        desk.do(WRITES[name], token=token)
    assert tables(desk.path) == before


def test_a_holder_that_lost_its_turn_can_hold_one_again(desk: Desk) -> None:
    desk.say("u1", "a1")
    lost, head = desk.take()
    rival, _ = desk.take(owner=2, force=True)
    desk.do(WRITES["append"], owner=2, token=rival)
    with pytest.raises(TurnLost):
        desk.do(WRITES["append"], token=lost, known=head)
    desk.do(WRITES["end"], owner=2, token=rival)
    again, _ = desk.take()
    assert again > rival > lost
    desk.do(WRITES["append"], token=again)
    assert [row[11] for row in tables(desk.path)["messages"]] == ["u1", "a1", "late", "late"]


@pytest.mark.parametrize("name", WRITES)
def test_the_token_that_is_good_lets_everything_through(desk: Desk, name: str) -> None:
    desk.say("u1", "a1", "u2", "a2")
    desk.do(WRITES["undo"])
    token, head = desk.take()
    before = tables(desk.path)
    _, after = desk.do(WRITES[name], token=token, known=head)
    assert tables(desk.path) != before
    assert after is not None
    assert after.turn == (None if name == "end" else token)
