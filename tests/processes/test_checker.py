"""The checker of histories, on histories made by hand: good ones pass, each bad one is told."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import pytest
from attrs import evolve
from support import A, U

from processes.checker import Call, check

HOLDERS = {7: "seven", 8: "eight"}


class History:
    """A history that is made call by call; each lasts a moment and begins when the last has ended."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._ids = count(1)

    def call(
        self,
        do: str,
        result: object = None,
        *,
        token: int | None = None,
        error: Mapping[str, object] | None = None,
        session: str = "a",
        **arguments: Any,  # JSON
    ) -> Call:
        start = 2.0 * len(self.calls)
        call = Call("she", session, do, arguments, start, start + 1, token, result, error)
        self.calls.append(call)
        return call

    def append(self, text: str, position: int, revision: int, **more: Any) -> Call:
        """Append a question."""
        receipt = {"id": next(self._ids), "position": position, "revision": revision}
        result = {**receipt, "duplicate": False, "live": True}
        return self.call("append", result, message=U(text), **more)

    def read(self, revision: int, *texts: str, **more: Any) -> Call:
        result = {
            "revision": revision,
            "position": len(texts),
            "bodies": [U(text) for text in texts],
        }
        return self.call("transcript", result, **more)

    def take(self, token: int) -> Call:
        return self.call("take", {"token": token}, token=token, holder=HOLDERS[token])

    def refuse(self, do: str, by: int, **arguments: Any) -> Call:
        error = {"type": "TurnActive", "holder": HOLDERS[by]}
        return self.call(do, error=error, **arguments)

    def lose(self, do: str, token: int, **arguments: Any) -> Call:
        error = {"type": "TurnLost", "reason": "taken"}
        return self.call(do, error=error, token=token, **arguments)

    def move(self, call: Call, start: float, end: float) -> None:
        """Let a call have been made at another time."""
        self.calls[self.calls.index(call)] = evolve(call, start=start, end=end)

    def wrong(self) -> str:
        """What is wrong with it; nothing, if nothing is."""
        wrong = check(self.calls)
        assert len(wrong) <= 1, wrong
        return wrong[0] if wrong else ""


@pytest.fixture
def history() -> History:
    return History()


def test_what_one_client_does_is_right(history: History) -> None:
    history.append("1", 1, 2)
    history.append("2", 2, 3, key="k")
    history.read(3, "1", "2")
    undone = {"text": "2", "turns": 1, "messages": 1, "position": 1, "revision": 4}
    history.call("undo", undone, turns=1)
    history.read(4, "1")
    again = {"id": 2, "position": 2, "revision": 3, "duplicate": True, "live": False}
    history.call("append", again, message=U("2"), key="k")
    history.call("redo", {"position": 2, "revision": 5})
    history.call("redo", None)
    rewritten = {
        "kept": 1,
        "replaced": 1,
        "appended": [{"id": 3, "position": 2, "revision": 6, "duplicate": False, "live": True}],
        "position": 2,
        "revision": 6,
        "changed": True,
    }
    history.call("rewrite", rewritten, messages=[U("1"), A("3")], at=5)
    same = {**rewritten, "kept": 2, "replaced": 0, "appended": [], "changed": False}
    history.call("rewrite", same, messages=[U("1"), A("3")], at=6)
    conflict = {"type": "Conflict", "at": 5, "revision": 6}
    history.call("rewrite", error=conflict, messages=[], at=5)
    history.call(
        "undo",
        {"text": "1", "turns": 1, "messages": 2, "position": 0, "revision": 7},
        turns=3,
    )
    history.call("undo", None, turns=1)
    assert not history.wrong()


def test_what_happens_in_turns_is_right(history: History) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.refuse("append", by=7, message=U("no"))
    history.append("1", 2, 3, token=7)
    history.refuse("take", by=7, holder="other")
    history.append("2", 3, 4, token=7)
    history.call("end", token=7)
    history.append("3", 4, 5)
    history.take(8)
    history.call("end", token=8)
    assert not history.wrong()


def test_a_turn_that_was_passed_is_lost(history: History) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.append("1", 2, 3, token=7)
    history.take(8)
    history.lose("append", 7, message=U("too late"))
    history.append("2", 3, 4, token=8)
    history.lose("end", 7)
    history.call("end", token=8)
    assert not history.wrong()


def test_calls_at_the_same_time_may_have_been_made_either_way_round(history: History) -> None:
    first = history.append("1", 1, 2)
    second = history.append("2", 2, 3)
    reading = history.read(2, "1")
    history.move(first, 5, 10)
    history.move(second, 4, 9)
    history.move(reading, 8, 12)
    assert not history.wrong()


def test_a_call_that_was_cancelled_did_nothing(history: History) -> None:
    history.append("1", 1, 2)
    history.call("append", error={"type": "Cancelled"}, message=U("no"))
    history.read(2, "1")
    assert not history.wrong()


def test_sessions_are_independent(history: History) -> None:
    history.append("1", 1, 2)
    history.append("1", 1, 2, session="b")
    history.read(2, "1")
    assert not history.wrong()


def test_a_write_under_a_turn_after_a_newer_turn_has_written_is_told(history: History) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.append("1", 2, 3, token=7)
    history.take(8)
    history.append("2", 3, 4, token=8)
    history.append("3", 4, 5, token=7)
    assert (
        "turn 7 wrote revision 5 after the newer turn 8 had written revision 4" in history.wrong()
    )


def test_a_write_under_a_turn_after_a_newer_one_was_taken_is_told(history: History) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.take(8)
    history.append("1", 2, 3, token=7)
    assert "there is no moment" in history.wrong()


def test_a_write_between_those_of_a_turn_is_told(history: History) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.append("1", 2, 3, token=7)
    history.append("2", 3, 4)
    history.append("3", 4, 5, token=7)
    assert "wrote while turn 7 was held" in history.wrong()


def test_a_write_between_the_taking_of_a_turn_and_its_first_write_is_told(
    history: History,
) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.append("1", 2, 3)
    history.append("2", 3, 4, token=7)
    assert "had ended when" in history.wrong()


def test_a_write_between_the_last_one_of_a_turn_and_its_end_is_told(history: History) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.append("1", 2, 3, token=7)
    history.append("2", 3, 4)
    history.call("end", token=7)
    assert "had ended when" in history.wrong()


def test_a_turn_taken_while_another_was_held_is_told(history: History) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.take(8)
    history.call("end", token=7)
    history.call("end", token=8)
    assert "there is no moment" in history.wrong()


def test_a_turn_lost_to_nobody_is_told(history: History) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.append("1", 2, 3, token=7)
    history.lose("append", 7, message=U("too late"))
    assert "nobody had passed" in history.wrong()


def test_a_loss_under_a_turn_that_ended_well_is_told(history: History) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.lose("append", 7, message=U("too late"))
    history.call("end", token=7)
    assert "was never lost" in history.wrong()


def test_a_refusal_for_a_turn_that_has_ended_is_told(history: History) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.append("1", 2, 3, token=7)
    history.call("end", token=7)
    history.refuse("append", by=7, message=U("2"))
    assert "there is no moment" in history.wrong()


def test_a_refusal_for_a_turn_that_wrote_nothing_and_has_ended_is_told(history: History) -> None:
    history.append("0", 1, 2)
    history.take(7)
    history.call("end", token=7)
    history.refuse("append", by=7, message=U("2"))
    assert "there is no moment" in history.wrong()


def test_an_undo_of_nothing_under_somebody_elses_turn_is_told(history: History) -> None:
    undone = {"text": "0", "turns": 1, "messages": 1, "position": 0, "revision": 3}
    history.append("0", 1, 2)
    history.call("undo", undone, turns=1)
    history.take(7)
    history.call("undo", None, turns=1)
    history.append("1", 1, 4, token=7)
    assert "there is no moment" in history.wrong()


def test_revisions_against_the_order_of_time_are_told(history: History) -> None:
    history.append("2", 2, 3)
    history.append("1", 1, 2)
    assert "had ended when" in history.wrong()


def test_a_reading_of_the_past_is_told(history: History) -> None:
    history.append("1", 1, 2)
    history.append("2", 2, 3)
    history.read(2, "1")
    assert "there is no moment" in history.wrong()


def test_a_reading_of_the_past_by_one_who_came_after_another_is_told(history: History) -> None:
    """Each alone could be; both together cannot."""
    history.append("1", 1, 2)
    second = history.append("2", 2, 3)
    newer = history.read(3, "1", "2")
    older = history.read(2, "1")
    history.move(second, 2, 20)
    history.move(newer, 4, 5)
    history.move(older, 6, 7)
    assert "there is no moment" in history.wrong()


def test_a_reading_of_what_was_not_there_is_told(history: History) -> None:
    history.append("1", 1, 2)
    history.read(2, "one")
    assert "there is no moment" in history.wrong()


def test_a_revision_that_nobody_was_told_of_is_told(history: History) -> None:
    history.append("1", 1, 2)
    history.append("3", 2, 4)
    assert "nobody was told of revision 3" in history.wrong()


def test_a_revision_that_was_made_twice_is_told(history: History) -> None:
    history.append("1", 1, 2)
    history.append("2", 1, 2)
    assert "revision 2 was made twice" in history.wrong()


def test_a_wrong_position_is_told(history: History) -> None:
    history.append("1", 1, 2)
    history.append("2", 3, 3)
    assert "its position must be 2" in history.wrong()


def test_a_key_that_was_stored_twice_is_told(history: History) -> None:
    history.append("1", 1, 2, key="k")
    history.append("1", 2, 3, key="k")
    assert "stored twice" in history.wrong()


def test_a_duplicate_of_what_came_later_is_told(history: History) -> None:
    again = {"id": 2, "position": 2, "revision": 3, "duplicate": True, "live": True}
    history.append("0", 1, 2)
    history.call("append", again, message=U("1"), key="k")
    history.append("1", 2, 3, key="k")
    assert "there is no moment" in history.wrong()


def test_a_redo_of_nothing_is_told(history: History) -> None:
    history.append("1", 1, 2)
    history.call("redo", {"position": 1, "revision": 3})
    assert "nothing to redo" in history.wrong()


def test_a_redo_that_says_there_is_nothing_after_an_undo_is_told(history: History) -> None:
    history.append("1", 1, 2)
    undone = {"text": "1", "turns": 1, "messages": 1, "position": 0, "revision": 3}
    history.call("undo", undone, turns=1)
    history.call("redo", None)
    assert "there is no moment" in history.wrong()


def test_a_conflict_with_the_revision_that_was_meant_is_told(history: History) -> None:
    history.append("1", 1, 2)
    conflict = {"type": "Conflict", "at": 2, "revision": 2}
    history.call("rewrite", error=conflict, messages=[], at=2)
    assert "there is no moment" in history.wrong()


def test_a_rewrite_decided_on_another_revision_is_told(history: History) -> None:
    history.append("1", 1, 2)
    history.append("2", 2, 3)
    result = {
        "kept": 0,
        "replaced": 2,
        "appended": [],
        "position": 0,
        "revision": 4,
        "changed": True,
    }
    history.call("rewrite", result, messages=[], at=2)
    assert "decided on revision 2" in history.wrong()


def test_an_error_that_nobody_expects_is_told(history: History) -> None:
    history.append("1", 1, 2)
    history.call("redo", error={"type": "RuntimeError", "text": "a bug"})
    assert "nobody expected this" in history.wrong()
