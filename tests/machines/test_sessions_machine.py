"""Random programs over a few sessions in two stores, beside a model of plain lists and dicts.

`TURNKEEPER_THOROUGH=1` runs two thousand programs instead of a handful.
"""

from __future__ import annotations

from collections.abc import Callable

import apsw
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from machines.machine import PROFILE, THOROUGH, assert_catches
from machines.sessions_machine import SessionsMachine
from turnkeeper.actors.pending import keep as real_keep
from turnkeeper.storage import Kept, branches, moves
from turnkeeper.storage.places import Place


@pytest.mark.timeout(0 if THOROUGH else 400)  # of which shrinking a failure takes the most
def test_any_program_over_a_few_sessions_does_what_the_model_does() -> None:
    usual = PROFILE if THOROUGH else settings(PROFILE, max_examples=25)
    run_state_machine_as_test(SessionsMachine, settings=usual)


# Broken copies: each is a fault that somebody could write, and the machine must find it.


def redo_forgets_to_pop(monkeypatch: pytest.MonkeyPatch) -> None:
    real = moves.undone

    def undone(connection: apsw.Connection, session: int, revision: int) -> tuple[Place, int]:
        place, _ = real(connection, session, revision)
        return place, revision

    monkeypatch.setattr(moves, "undone", undone)


def what_is_kept_is_kept_in_front(monkeypatch: pytest.MonkeyPatch) -> None:

    def keep(before: tuple[Kept, ...], more: Kept, most: int) -> tuple[Kept, ...] | None:
        kept = real_keep(before, more, most)
        return kept if kept is None else (*kept[-1:], *kept[:-1])

    monkeypatch.setattr("turnkeeper.actors.actor.keep", keep)


def a_purge_overlooks_the_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_child_start(connection: apsw.Connection, branch: int) -> int | None:
        return None

    monkeypatch.setattr(branches, "last_child_start", last_child_start)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("break_it", "number"),
    [
        (redo_forgets_to_pop, 1),
        (what_is_kept_is_kept_in_front, 5),
        (a_purge_overlooks_the_forks, 1),
    ],
)
def test_the_machine_catches_a_broken_store(
    break_it: Callable[[pytest.MonkeyPatch], None], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert_catches(SessionsMachine, number)
