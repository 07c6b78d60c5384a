"""Nothing is lost: a table of attempts on the rows, and who refuses them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import apsw
import pytest
import trio
from attrs import evolve
from support import A, Job, Told, U, tables

from turnkeeper.actors import open_sessions
from turnkeeper.storage import (
    Changed,
    Claim,
    Closed,
    Conflict,
    Connection,
    Draft,
    Kept,
    Rejected,
    Release,
    StorageFailed,
    Taken,
    TakenBack,
    TurnActive,
    TurnkeeperError,
    TurnLost,
    appends,
    changes,
    encode_message,
    holding,
    inline,
    open_store,
    posting,
    removal,
)
from turnkeeper.storage.connect import open_reader, open_writer
from turnkeeper.storage.removal import delete, purge
from turnkeeper.storage.schema import define_guard

COPY = """INSERT OR REPLACE INTO messages
SELECT id, session, branch, position, revision, opener, hidden, append_id, created_at, caller_key,
       role, 'forged', extra, 0 FROM messages WHERE position = 1"""
SAME_PLACE = """INSERT OR REPLACE INTO messages
SELECT NULL, session, branch, position, revision, opener, hidden, append_id, created_at, NULL,
       role, 'forged', extra, 0 FROM messages WHERE position = 1"""
SAME_KEY = """INSERT OR REPLACE INTO messages
SELECT NULL, session, branch, position + 1000, revision, opener, hidden, append_id, created_at,
       caller_key, role, 'forged', extra, 0 FROM messages WHERE caller_key IS NOT NULL"""
MOVED = """INSERT OR REPLACE INTO moves
SELECT session, revision, 'redo', 0, 0, 0, 0, NULL, 0 FROM moves"""

CHANGES = {
    "delete every message": "DELETE FROM messages",
    "delete one message": "DELETE FROM messages WHERE position = 1",
    "delete every move": "DELETE FROM moves",
    "delete every branch": "DELETE FROM branches",
    "delete a session": "DELETE FROM sessions",
    "change a content": "UPDATE messages SET content = 'forged'",
    "change a content and ignore": "UPDATE OR REPLACE messages SET content = 'forged'",
    "change a role": "UPDATE messages SET role = 'system'",
    "change the rest": "UPDATE messages SET extra = NULL",
    "hide a message": "UPDATE messages SET hidden = 1",
    "move a message": "UPDATE messages SET position = position + 1000",
    "give a message away": "UPDATE messages SET session = 99",
    "change a key": "UPDATE messages SET caller_key = NULL",
    "change a move": "UPDATE moves SET to_position = 0",
    "change a branch": "UPDATE branches SET parent = NULL",
    "upsert a message": COPY.replace("OR REPLACE ", "").replace(
        "WHERE position = 1",
        "WHERE position = 1 ON CONFLICT (id) DO UPDATE SET content = excluded.content",
    ),
}
REPLACEMENTS = {
    "replace a message by its id": COPY,
    "replace a message at its place": SAME_PLACE,
    "replace a message by its key": SAME_KEY,
    "replace a move": MOVED,
    "replace a branch": "INSERT OR REPLACE INTO branches SELECT id, 99, NULL, 0 FROM branches",
    "replace a session": "REPLACE INTO sessions SELECT key, id, 9, NULL, 0, NULL, NULL FROM sessions",
}
HEADS = {
    "delete every head": "DELETE FROM heads",
    "replace a head": "INSERT OR REPLACE INTO heads SELECT session, 1, 1, 0, 1, 0, NULL, 0, 1 FROM heads",
}


Remove: TypeAlias = Callable[[apsw.Connection, Told], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "state.db"

    async def fill() -> None:
        async with open_sessions(path, offload=inline) as sessions:
            session = sessions["a"]
            for number in range(3):
                await session.append(U(f"ask {number}"), key=f"k{number}")
                await session.append(A(f"answer {number}"))
            await session.undo()
            await session.append(U("another way"))
            await session.fork("b", position=2)

    trio.run(fill)
    return path


@pytest.fixture
def writer(path: Path) -> Iterator[apsw.Connection]:
    with closing(open_writer(path, synchronous="full", vfs=None)) as connection:
        define_guard(connection, allowed=False)
        yield connection


@pytest.mark.parametrize("sql", (CHANGES | REPLACEMENTS).values(), ids=CHANGES | REPLACEMENTS)
def test_the_writing_connection_is_refused(path: Path, writer: apsw.Connection, sql: str) -> None:
    before = tables(path)
    with pytest.raises(apsw.ConstraintError, match="never"):
        writer.execute(sql)
    assert tables(path) == before


@pytest.mark.parametrize("sql", HEADS.values(), ids=HEADS)
def test_the_writing_connection_is_refused_a_head(
    path: Path, writer: apsw.Connection, sql: str
) -> None:
    before = tables(path)
    with pytest.raises(apsw.ConstraintError, match="never"):
        writer.execute(sql)
    assert tables(path) == before


@pytest.mark.parametrize(
    "sql", (CHANGES | REPLACEMENTS | HEADS).values(), ids=CHANGES | REPLACEMENTS | HEADS
)
def test_a_reading_connection_is_refused(path: Path, sql: str) -> None:
    before = tables(path)
    with (
        closing(open_reader(path, vfs=None)) as reader,
        pytest.raises((apsw.ReadOnlyError, apsw.SQLError)) as caught,
    ):
        reader.execute(sql)
    assert "readonly" in str(caught.value) or "removal_allowed" in str(caught.value)
    assert tables(path) == before


@pytest.mark.parametrize("sql", CHANGES.values(), ids=CHANGES)
def test_another_program_is_refused(path: Path, sql: str) -> None:
    before = tables(path)
    with closing(sqlite3.connect(path)) as foreign:
        with pytest.raises(sqlite3.Error, match=r"never|no such function: removal_allowed"):
            foreign.execute(sql)
        foreign.commit()
    assert tables(path) == before


@pytest.mark.parametrize("sql", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_another_program_is_refused_a_replacement_if_its_triggers_recurse(
    path: Path, sql: str
) -> None:
    """Without that, a setting of each connection, REPLACE deletes unseen: nobody can stop it."""
    before = tables(path)
    with closing(sqlite3.connect(path)) as foreign:
        foreign.execute("PRAGMA recursive_triggers = ON")
        with pytest.raises(sqlite3.Error):
            foreign.execute(sql)
        foreign.commit()
    assert tables(path) == before


def test_a_refusal_names_the_way_that_is_open(writer: apsw.Connection) -> None:
    with pytest.raises(apsw.ConstraintError, match="never deleted, except by delete and purge"):
        writer.execute("DELETE FROM messages")


@pytest.mark.parametrize(("remove", "gone"), [(purge, 2), (delete, 5)], ids=["purge", "delete"])
async def test_purge_and_delete_pass_and_the_guard_stands_again_behind_them(
    path: Path, remove: Remove, gone: int
) -> None:
    before = len(tables(path)["messages"])
    async with open_store(path, offload=inline) as store:
        allowed = Job(lambda connection: remove(connection, Told("a")))
        refused = Job(lambda connection: connection.execute("DELETE FROM messages"))
        later = Job(lambda connection: connection.execute("DELETE FROM messages"))
        store.submit(allowed)
        store.submit(refused)
        await allowed.outcome()
        with pytest.raises(apsw.ConstraintError, match="never deleted"):
            await refused.outcome()
        store.submit(later)
        with pytest.raises(apsw.ConstraintError, match="never deleted"):
            await later.outcome()
    assert len(tables(path)["messages"]) == before - gone


@pytest.mark.parametrize("remove", [purge, delete], ids=["purge", "delete"])
async def test_the_guard_stands_again_behind_a_removal_that_failed(
    path: Path, remove: Remove
) -> None:
    before = tables(path)

    def fail(connection: apsw.Connection) -> None:
        def trace(_: object, sql: str, __: object) -> bool:
            if sql.lstrip().startswith("DELETE FROM messages"):
                raise apsw.IOError("a test says so")
            return True

        connection.exec_trace = trace
        try:
            remove(connection, Told("a"))
        finally:
            connection.exec_trace = None

    async with open_store(path, offload=inline) as store:
        failed, refused = Job(fail), Job(lambda c: c.execute("DELETE FROM moves"))
        store.submit(failed)
        with pytest.raises(StorageFailed):
            await failed.outcome()
        store.submit(refused)
        with pytest.raises(apsw.ConstraintError, match="never deleted"):
            await refused.outcome()
    assert tables(path) == before


def draft(text: str, key: str | None = None) -> Draft:
    return Draft(*encode_message(U(text)), opens_turn=True, key=key)


def take(text: object) -> TakenBack:
    return TakenBack(None)


MUTATORS: dict[str, Callable[[Connection, Told], Changed[object]]] = {
    "appends.append": lambda c, told: appends.append(c, told, draft("x")),
    "appends.extend": lambda c, told: appends.extend(c, told, [draft("x"), draft("y", "new")]),
    "appends.drain": lambda c, told: appends.drain(c, told),
    "changes.rewind": lambda c, told: changes.rewind(c, told, 1, "undo", take),
    "changes.redo": lambda c, told: changes.redo(c, told),
    "changes.rewrite": lambda c, told: changes.rewrite(c, told, [draft("x")], "rewrite"),
    "changes.restore": lambda c, told: changes.restore(c, told, 2),
    "changes.fork": lambda c, told: changes.fork(c, told, "new", None, None),
    "changes.set_meta": lambda c, told: changes.set_meta(c, told, b"{}"),
    "changes.set_policy": lambda c, told: changes.set_policy(c, told, "collect"),
    "holding.take": lambda c, told: holding.take(c, told, Claim("x", 30.0)),
    "holding.end": lambda c, told: holding.end(c, told, Release("done", 3, "")),
    "posting.post": lambda c, told: posting.post(c, told, draft("x"), None, "queue", 10),
    "posting.requeue": lambda c, told: posting.requeue(c, told, 900),
    "posting.dismiss": lambda c, told: posting.dismiss(c, told, 900),
    "removal.delete": lambda c, told: removal.delete(c, told),
    "removal.purge": lambda c, told: removal.purge(c, told),
}
"""Every body of a transaction."""

PENDING = (Kept((draft("pending"),), 700, 0.0),)
NEEDS_THE_TURN = {
    "appends.append",
    "appends.extend",
    "changes.redo",
    "changes.restore",
    "changes.rewind",
    "changes.rewrite",
    "holding.take",
    "removal.purge",
}
DECIDED_ON_A_REVISION = NEEDS_THE_TURN - {"holding.take"} | {
    "changes.fork",
    "changes.set_meta",
    "changes.set_policy",
}
REFUSALS: dict[str, tuple[set[str], Told, type[TurnkeeperError]]] = {
    "somebody holds the turn": (NEEDS_THE_TURN, Told("held"), TurnActive),
    "the turn was lost": (NEEDS_THE_TURN | {"holding.end"}, Told("held", token=99), TurnLost),
    "nobody holds the turn": ({"holding.end"}, Told("a", token=1), TurnLost),
    "the caller read something older": (DECIDED_ON_A_REVISION, Told("a", at=3), Conflict),
    "the session was deleted": (set(MUTATORS) - {"removal.delete"}, Told("a", life=99), Closed),
}


def test_the_table_of_mutators_is_whole() -> None:
    exported = {
        f"{room.__name__.rpartition('.')[2]}.{name}"
        for room in (appends, changes, holding, posting, removal)
        for name in room.__all__
        if name != "Claim"
    }
    assert exported == set(MUTATORS)


@pytest.mark.parametrize(
    ("why", "name"),
    [(why, name) for why, (names, *_) in REFUSALS.items() for name in sorted(names)],
)
@pytest.mark.parametrize("pending", [False, True], ids=["", "pending"])
async def test_what_is_refused_writes_nothing(
    path: Path, why: str, name: str, pending: bool
) -> None:
    _, told, error = REFUSALS[why]
    if pending:
        told = evolve(told, pending=PENDING)
    async with open_store(path, offload=inline) as store:
        held = Job(lambda c: holding.take(c, Told("held"), Claim("somebody", 1e9)))
        store.submit(held)
        await held.outcome()
        before = tables(path)
        first = Job(lambda c: changes.set_meta(c, Told("b"), b'{"n":1}'))
        refused = Job(lambda c: MUTATORS[name](c, told))
        last = Job(lambda c: changes.set_meta(c, Told("b"), b'{"n":2}'))
        for job in (first, refused, last):  # one transaction for all three
            store.submit(job)
        with pytest.raises(error):
            await refused.outcome()
        await first.outcome()
        await last.outcome()
        after = tables(path)
    assert [row[5] for row in after.pop("sessions")] == [
        row[5] if row[1] != "b" else b'{"n":2}' for row in before.pop("sessions")
    ]
    assert after == before


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a key of other content", lambda c, told: appends.append(c, told, draft("x", "k0"))),
        (
            "one such key in a batch",
            lambda c, told: appends.extend(c, told, [draft("x"), draft("y", "k0")]),
        ),
        (
            "a batch at odds with itself",
            lambda c, told: appends.extend(c, told, [draft("x", "n"), draft("y", "n")]),
        ),
        (
            "a post of such a key",
            lambda c, told: posting.post(c, told, draft("x", "k0"), None, "queue", 10),
        ),
        ("a revision that is not there", lambda c, told: changes.restore(c, told, 99)),
        ("a fork's id that is taken", lambda c, told: changes.fork(c, told, "b", None, None)),
        ("a position that is not there", lambda c, told: changes.fork(c, told, "n", 99, None)),
    ],
)
async def test_what_is_rejected_writes_nothing_pending_included(
    path: Path, name: str, change: Callable[[Connection, Told], Changed[object]]
) -> None:
    async with open_store(path, offload=inline) as store:
        before = tables(path)
        rejected = Job(lambda c: change(c, Told("a", pending=PENDING)))
        store.submit(rejected)
        with pytest.raises(Rejected):
            await rejected.outcome()
        assert tables(path) == before


@pytest.mark.parametrize("name", sorted(set(MUTATORS) - {"holding.take"}))
async def test_what_is_done_and_then_lost_with_its_transaction_has_written_nothing(
    path: Path, name: str
) -> None:
    def fail(connection: Connection) -> None:
        token = holding.take(connection, Told("a"), Claim("x", 30.0))[0]
        assert isinstance(token, Taken)
        MUTATORS[name](connection, Told("a", token=token.token, pending=PENDING))
        raise Rejected("x", "a test says so")

    before = tables(path)
    async with open_store(path, offload=inline) as store:
        failed = Job(fail)
        store.submit(failed)
        with pytest.raises(Rejected, match="a test says so"):
            await failed.outcome()
    assert tables(path) == before
