"""The stress test finds nothing wrong in a store, and finds what is put there by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from support import A, U

from turnkeeper.actors import Appended

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from stress import main  # noqa: E402
from stress_calls import CANCELLED, Call, Ledger, Look, Say  # noqa: E402
from stress_check import replay  # noqa: E402
from stress_model import Model  # noqa: E402

SMALL = ("--sessions", "30", "--turns", "5", "--seed", "2")

Ledgers = dict[str, Ledger]
Fault = Callable[[apsw.Connection, Ledgers, dict[str, Model]], str]
"""Spoils a store or its ledgers; returns the session that must be named."""


def test_a_small_run_finds_nothing_wrong_and_says_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "stress.db"
    done = subprocess.run(
        [sys.executable, EXAMPLES / "stress.py", *SMALL, "--db", path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.startswith("30 sessions x 5 turns, seed 2, in ")
    assert "talking: 150 of 150" in done.stdout
    for figure in ("appends/s", "p50", "p99", "commits", "changes in a commit, mean", "file"):
        assert figure in done.stdout
    assert done.stdout.endswith("all is as it was acknowledged\n")
    assert "\x1b" not in done.stdout  # no terminal, no bar
    assert list(tmp_path.iterdir()) == []


def test_a_run_does_all_that_it_says(tmp_path: Path) -> None:
    asked: dict[str, int] = {}
    cancelled = duplicates = readings = 0

    def count(_: Path, ledgers: Ledgers) -> None:
        nonlocal cancelled, duplicates, readings
        for ledger in ledgers.values():
            readings += len(ledger.looks)
            for call in ledger.calls:
                name = type(call.operation).__name__
                asked[name] = asked.get(name, 0) + 1
                cancelled += call.outcome == CANCELLED
                duplicates += isinstance(call.outcome, Appended) and call.outcome.duplicate

    assert main([*SMALL, "--db", str(tmp_path / "stress.db")], count) == 0
    assert set(asked) == {"Say", "Rewind", "Redo", "Rewrite", "Restore", "Fork"}
    assert cancelled
    assert duplicates
    assert readings


def test_keep_leaves_the_store_and_without_it_nothing_stays(tmp_path: Path) -> None:
    path = tmp_path / "stress.db"
    arguments = ["--sessions", "2", "--turns", "1", "--seed", "1", "--db", str(path)]
    assert main(arguments) == 0
    assert not path.exists()
    assert main([*arguments, "--keep"]) == 0
    assert path.exists()


def test_a_file_that_is_there_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious.db"
    path.write_bytes(b"precious")
    with pytest.raises(SystemExit) as refusal:
        main(["--db", str(path)])
    assert refusal.value.code == 2
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("arguments", [["--sessions", "0"], ["--turns", "many"]])
def test_numbers_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == 2


# Faults, each put in between the load and the check.


def _first(models: dict[str, Model], has: Callable[[Model], object]) -> tuple[str, Model]:
    return next((id, model) for id, model in models.items() if has(model))


def _drop(connection: apsw.Connection, models: dict[str, Model], state: str) -> str:
    """Remove a message of that state which no fork shares, so that one session is at fault."""
    shared = {row.id for model in models.values() for path in model.forks.values() for row in path}
    for id, model in models.items():
        for row in model.own:
            if model.states[row.id][1] == state and row.id not in shared:
                connection.execute("DELETE FROM messages WHERE id = ?", (row.id,))
                return id
    raise AssertionError(f"no message is {state}")


def a_live_message_is_gone(
    connection: apsw.Connection, _: Ledgers, models: dict[str, Model]
) -> str:
    return _drop(connection, models, "live")


def a_rewound_message_is_gone(
    connection: apsw.Connection, _: Ledgers, models: dict[str, Model]
) -> str:
    return _drop(connection, models, "rewound")


def a_message_is_there_twice_off_every_path(
    connection: apsw.Connection, _: Ledgers, models: dict[str, Model]
) -> str:
    id, model = _first(models, lambda model: model.own)
    connection.execute(
        "INSERT INTO messages SELECT NULL, session, -1, position, revision, opener, hidden,"
        " append_id, created_at, NULL, role, content, extra, 0 FROM messages WHERE id = ?",
        (model.own[0].id,),
    )
    return id


def a_message_says_something_else(
    connection: apsw.Connection, _: Ledgers, models: dict[str, Model]
) -> str:
    id, model = _first(models, lambda model: model.own and not model.forks)
    connection.execute("UPDATE messages SET content = 'changed' WHERE id = ?", (model.own[-1].id,))
    return id


def two_messages_have_changed_places(
    connection: apsw.Connection, _: Ledgers, models: dict[str, Model]
) -> str:
    id, model = _first(
        models,
        lambda model: len(model.path) > 1 and not model.forks and model.path[-2] in model.own,
    )
    one, other = model.path[-2:]
    for row, position in ((one, 10**9), (other, one.position), (one, other.position)):
        connection.execute("UPDATE messages SET position = ? WHERE id = ?", (position, row.id))
    return id


def a_message_belongs_to_another_session(
    connection: apsw.Connection, _: Ledgers, models: dict[str, Model]
) -> str:
    ids = [id for id, model in models.items() if model.own]
    connection.execute(
        "UPDATE messages SET caller_key = NULL,"
        " session = (SELECT key FROM sessions WHERE id = ?) WHERE id = ?",
        (ids[1], models[ids[0]].own[0].id),
    )
    return ids[1]


def a_head_has_gone_back(connection: apsw.Connection, _: Ledgers, models: dict[str, Model]) -> str:
    id, _model = _first(models, lambda model: model.path)
    connection.execute(
        "UPDATE heads SET position = position - 1"
        " WHERE session = (SELECT key FROM sessions WHERE id = ?)",
        (id,),
    )
    return id


def a_redo_is_forgotten(connection: apsw.Connection, _: Ledgers, models: dict[str, Model]) -> str:
    id, _model = _first(models, lambda model: model.redoable)
    connection.execute(
        "UPDATE heads SET redo = NULL WHERE session = (SELECT key FROM sessions WHERE id = ?)",
        (id,),
    )
    return id


def a_move_is_forgotten(connection: apsw.Connection, _: Ledgers, models: dict[str, Model]) -> str:
    id, model = _first(models, lambda model: model.moves)
    connection.execute(
        "DELETE FROM moves WHERE revision = ?"
        " AND session = (SELECT key FROM sessions WHERE id = ?)",
        (model.moves[0][0], id),
    )
    return id


def an_index_lacks_a_row(connection: apsw.Connection, _: Ledgers, _models: dict[str, Model]) -> str:
    """Make an index of all rows but one, then have it say that it is of all."""
    connection.execute("CREATE INDEX short ON messages (append_id) WHERE id > 1")
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("UPDATE sqlite_schema SET sql = substr(sql, 1, 42) WHERE name = 'short'")
    return "all"


def a_receipt_names_what_was_never_written(
    _: apsw.Connection, ledgers: Ledgers, models: dict[str, Model]
) -> str:
    id, model = _first(models, lambda model: model.path)
    receipt = Appended(10**9, len(model.path) + 1, model.revision + 1, False, True)
    ledgers[id].calls.append(Call(Say((A("never"),), (None,)), ended=True, outcome=receipt))
    return id


def two_receipts_are_exchanged(
    _: apsw.Connection, ledgers: Ledgers, _models: dict[str, Model]
) -> str:
    ledger = next(iter(ledgers.values()))
    one, other, *_rest = (
        call
        for call in ledger.calls
        if isinstance(call.outcome, Appended) and not call.outcome.duplicate
    )
    one.outcome, other.outcome = other.outcome, one.outcome
    return ledger.id


def a_cancelled_caller_was_served(
    _: apsw.Connection, ledgers: Ledgers, _models: dict[str, Model]
) -> str:
    ledger = next(iter(ledgers.values()))
    served = next(call for call in ledger.calls if isinstance(call.outcome, Appended))
    served.outcome = CANCELLED
    return ledger.id


def a_caller_has_no_answer(_: apsw.Connection, ledgers: Ledgers, _models: dict[str, Model]) -> str:
    ledger = next(iter(ledgers.values()))
    ledger.calls.append(Call(Say((U("hello?"),), (None,))))
    return ledger.id


def a_reading_was_stale(_: apsw.Connection, ledgers: Ledgers, models: dict[str, Model]) -> str:
    id, model = _first(models, lambda model: model.revision > 2)
    ids = tuple(row.id for row in model.paths[2])
    ledgers[id].looks.append(Look(3, 2, ids))
    return id


def a_reading_saw_half_a_change(
    _: apsw.Connection, ledgers: Ledgers, models: dict[str, Model]
) -> str:
    id, model = _first(models, lambda model: model.path)
    ids = tuple(row.id for row in model.path[:-1])
    ledgers[id].looks.append(Look(0, model.revision, ids))
    return id


def a_session_is_missing(_: apsw.Connection, ledgers: Ledgers, _models: dict[str, Model]) -> str:
    calls = [
        Call(Say((U("hello"),), (None,)), ended=True, outcome=Appended(10**9, 1, 2, False, True))
    ]
    ledgers["nowhere"] = Ledger("nowhere", calls=calls)
    return "nowhere"


@pytest.mark.parametrize(
    "fault",
    [
        a_live_message_is_gone,
        a_rewound_message_is_gone,
        a_message_is_there_twice_off_every_path,
        a_message_says_something_else,
        two_messages_have_changed_places,
        a_message_belongs_to_another_session,
        a_head_has_gone_back,
        a_redo_is_forgotten,
        a_move_is_forgotten,
        an_index_lacks_a_row,
        a_receipt_names_what_was_never_written,
        two_receipts_are_exchanged,
        a_cancelled_caller_was_served,
        a_caller_has_no_answer,
        a_reading_was_stale,
        a_reading_saw_half_a_change,
        a_session_is_missing,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_is_found_and_its_session_named(
    fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named: list[str] = []

    def spoil(path: Path, ledgers: Ledgers) -> None:
        models, wrong = replay(ledgers)
        assert wrong == []
        with closing(apsw.Connection(str(path))) as connection:
            triggers = connection.execute(
                "SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'"
            )
            guards = list(triggers)
            for name, _ in guards:
                connection.execute(f"DROP TRIGGER {name}")
            named.append(fault(connection, ledgers, models))
            for _, sql in guards:
                connection.execute(sql)

    path = tmp_path / "stress.db"
    assert main([*SMALL, "--db", str(path)], spoil) == 1
    printed = capsys.readouterr().out
    assert f"WRONG: session {named[0]}," in printed
    assert "  expected " in printed
    assert "  found    " in printed
    assert f"seed 2; the store is left in {path}" in printed
    assert path.exists()
