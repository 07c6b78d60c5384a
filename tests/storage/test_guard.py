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
from support import A, Job, Told, U, tables

from turnkeeper.actors import open_sessions
from turnkeeper.storage import StorageFailed, inline, open_store
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
