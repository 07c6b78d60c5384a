"""Random programs with turns and inboxes in two stores, beside a model of plain lists and dicts.

`TURNKEEPER_THOROUGH=1` runs two thousand programs instead of a handful.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import inf
from typing import TypeAlias

import apsw
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from machines.machine import PROFILE, THOROUGH, assert_catches
from machines.said import person
from machines.turns_machine import TurnsMachine
from turnkeeper.actors import opening
from turnkeeper.storage import (
    Asked,
    Connection,
    Draft,
    Head,
    JSONObject,
    Kept,
    Moment,
    admission,
    appends,
    heads,
    holding,
    inbox,
    turns,
)
from turnkeeper.storage.steps import swap, write


@pytest.mark.timeout(0 if THOROUGH else 400)  # of which shrinking a failure takes the most
def test_any_program_with_turns_does_what_the_model_does() -> None:
    usual = PROFILE if THOROUGH else settings(PROFILE, max_examples=25)
    run_state_machine_as_test(TurnsMachine, settings=usual)


# Broken copies: each is a fault that somebody could write, and the machine must find it.


def the_token_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    real = admission.admit

    def admit(connection: Connection, asked: Asked, head: Head | None) -> bool:
        if asked.token is not None and head is not None and head.turn != asked.token:
            return False
        return real(connection, asked, head)

    for module in (admission, appends, holding):
        monkeypatch.setattr(module, "admit", admit)
    monkeypatch.setattr(heads, "SWAP", heads.SWAP.replace("turn IS ?\n", "(turn IS ? OR TRUE)\n"))


def open_calls_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def close_calls(messages: Iterable[JSONObject]) -> Sequence[Draft]:
        return ()

    monkeypatch.setattr(opening, "close_calls", close_calls)


def what_a_lost_turn_had_pending_goes_live(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_aside(connection: Connection, head: Head, drafts: list[Draft], kept: Kept) -> Head:
        after = head._replace(revision=head.revision + 1)
        after, _ = write(connection, after, drafts, kept.append_id, kept.now)
        swap(connection, head, after, kept.now)
        return after

    monkeypatch.setattr(admission, "_write_aside", write_aside)


def a_redelivery_appends_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = inbox.give

    def give(connection: apsw.Connection, place: int, token: int, message: int) -> None:
        real(connection, place, token, message)
        connection.execute("UPDATE inbox SET message = NULL WHERE place = ?", (place,))

    monkeypatch.setattr(inbox, "give", give)


def a_turn_never_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    real = turns.is_over

    def is_over(turn: turns.TurnRow, now: Moment, *, owner_lives: bool | None) -> bool:
        return real(turn._replace(expires=inf), now, owner_lives=owner_lives)

    monkeypatch.setattr(turns, "is_over", is_over)


# The programs that lead to each; a search finds them as well, but may take minutes.


def a_turn_is_taken_over_and_its_holder_goes_on(machine: TurnsMachine) -> Iterator[None]:
    machine.take_turn("a")
    yield
    machine.here = machine.sides[1]
    machine.take_turn("a", force=True)
    yield
    machine.act(through=0, pick=0, kind="a", drafts=[person("one")], back=0, off=None)
    yield
    machine.end(through=0, pick=0, how="well")


def a_tool_is_called_and_the_turn_ends(machine: TurnsMachine) -> Iterator[None]:
    machine.take_turn("a")
    machine.call_a_tool(through=0, pick=0, word="one", calls=["c1", "c2"])
    yield
    machine.end(through=0, pick=0, how="error")


def a_turn_is_lost_with_something_pending(machine: TurnsMachine) -> Iterator[None]:
    machine.take_turn("a")
    machine.break_the_disk(through=0, error=apsw.FullError, times=None, skip=0)
    machine.act(through=0, pick=0, kind="a", drafts=[person("one")], back=0, off=None)
    yield
    machine.take(through=1, id="a", force=True, serve=False, hold=20.0)
    yield
    machine.heal(through=0)
    machine.time_passes(first=0, seconds=1)


def a_message_is_tried_again(machine: TurnsMachine) -> Iterator[None]:
    machine.serve_one(through=0, id="a", draft=person("one"), how="error")
    yield
    machine.take(through=1, id="a", force=False, serve=True, hold=20.0)
    yield
    machine.end(through=1, pick=0, how="error")


def a_holder_hangs(machine: TurnsMachine) -> Iterator[None]:
    machine.take_turn("a")
    yield
    machine.the_other_hangs(through=1, id="a", seconds=15, what="append", draft=person("one"))


BREAKS = [
    (the_token_is_not_compared, a_turn_is_taken_over_and_its_holder_goes_on),
    (open_calls_stay_open, a_tool_is_called_and_the_turn_ends),
    (what_a_lost_turn_had_pending_goes_live, a_turn_is_lost_with_something_pending),
    (a_redelivery_appends_again, a_message_is_tried_again),
    (a_turn_never_expires, a_holder_hangs),
]
Break: TypeAlias = Callable[[pytest.MonkeyPatch], None]
Program: TypeAlias = Callable[[TurnsMachine], Iterator[None]]


def play(program: Program) -> None:
    """Follow a program, and look at everything after each step."""
    machine = TurnsMachine()
    try:
        for _ in chain(program(machine), (None,)):
            machine.reads_as_the_model()
            machine.one_turn_holds_a_session()
    finally:
        machine.teardown()


@pytest.mark.parametrize(("break_it", "program"), BREAKS)
def test_the_machine_catches_a_broken_turn(
    break_it: Break, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(program)
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        play(program)


@pytest.mark.skipif(not THOROUGH, reason="a search for minutes")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("break_it", [break_it for break_it, _ in BREAKS])
def test_a_search_finds_a_broken_turn(break_it: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    assert_catches(TurnsMachine, 1)
