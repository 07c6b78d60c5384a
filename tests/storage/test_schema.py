"""A file of the first version becomes one of this version, with all that is in it."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from support import A, T, U, said, tables

from turnkeeper.actors import Rejected, open_sessions
from turnkeeper.storage import Moment, StorageDamaged, encode_object, inline, open_store
from turnkeeper.storage.connect import APPLICATION_ID, create
from turnkeeper.storage.schema import VERSION, define_guard, migrate, version_of

META = encode_object({"who": "somebody"}, field="meta", max_bytes=100)
PARTS = b'[{"type":"text","text":"look"}]'
CALL = b'{"tool_calls":[{"id":"c1","type":"function","function":{"name":"look","arguments":"{}"}}]}'
ANSWERS = b'{"tool_call_id":"c1"}'

ROWS: dict[str, list[tuple[apsw.SQLiteValue, ...]]] = {
    # Session a: u1 a1 u2 a2 | undo | another, with a call and its result | undo
    # Session b: a fork of a behind a1; one hidden row, and a message of parts
    # Session gone: deleted
    "sessions": [
        (1, "a", 1, None, 10.0, META),
        (2, "b", 1, None, 11.0, None),
        (3, "gone", 1, 7, 12.0, None),
    ],
    "heads": [
        (1, 9, 1, 2, 0, 1, 9, 19.0),
        (2, 3, 3, 4, 1, 4, None, 21.0),
        (3, 7, 4, 0, 1, 0, None, 22.0),
    ],
    "branches": [(1, 1, None, 0), (2, 1, 1, 2), (3, 2, 1, 2)],
    "messages": [
        (1, 1, 1, 1, 2, 1, 0, 501, 10.0, "k1", "user", "u1", None),
        (2, 1, 1, 2, 3, 1, 0, 502, 11.0, None, "assistant", "a1", None),
        (3, 1, 1, 3, 4, 3, 0, 503, 12.0, "k2", "user", "u2", None),
        (4, 1, 1, 4, 5, 3, 0, 504, 13.0, None, "assistant", "a2", None),
        (5, 1, 2, 3, 7, 3, 0, 505, 15.0, None, "user", "another", None),
        (6, 1, 2, 4, 8, 3, 0, 506, 16.0, None, "assistant", None, CALL),
        (7, 1, 2, 5, 8, 3, 0, 506, 16.0, None, "tool", "r", ANSWERS),
        (8, 2, 3, 3, 2, 1, 1, 507, 17.0, None, "system", "a scaffold", None),
        (9, 2, 3, 4, 3, 4, 0, 508, 18.0, "k1", "user", PARTS, None),
    ],
    "moves": [
        (1, 6, "undo", 1, 4, 1, 2, None, 14.0),
        (1, 9, "undo", 2, 5, 1, 2, None, 19.0),
    ],
    "batches": [(77, 5)],
}
SCRIPTS = importlib.resources.files("turnkeeper.storage").joinpath("sql")


def first_version(connection: apsw.Connection) -> None:
    """Make the tables of version 1, and nothing newer."""
    define_guard(connection, allowed=False)
    connection.execute(SCRIPTS.joinpath("0001_sessions_that_remember.sql").read_text("utf-8"))
    connection.pragma("user_version", 1)


def fill(connection: apsw.Connection) -> None:
    """Write rows as version 1 left them."""
    first_version(connection)
    for table, rows in ROWS.items():
        marks = ", ".join("?" * len(rows[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "state.db"
    create(path, fill)
    yield path
    with closing(apsw.Connection(str(path))) as connection:
        assert connection.pragma("integrity_check") == "ok"
        assert version_of(connection) == VERSION


def schema(path: Path) -> tuple[object, ...]:
    """Everything that a file says of its own shape."""
    with closing(apsw.Connection(str(path))) as connection:
        entries = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema")
        shape = sorted(entries, key=str)
        names = sorted(name for kind, name, *_ in shape if kind == "table")
        columns = [
            connection.execute(f"SELECT * FROM pragma_table_xinfo('{name}')").fetchall()
            for name in names
        ]
        indexes = [
            connection.execute(f"SELECT * FROM pragma_index_list('{name}')").fetchall()
            for name in names
        ]
        versions = [connection.pragma(name) for name in ("user_version", "application_id")]
        return shape, columns, indexes, versions


async def test_the_schema_of_a_migrated_file_is_that_of_a_new_one(
    path: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new.db"
    assert schema(path)[-1] == [1, APPLICATION_ID]
    async with open_store(path, offload=inline), open_store(new, offload=inline):
        pass
    assert schema(path) == schema(new)
    assert schema(path)[-1] == [VERSION, APPLICATION_ID]


async def test_a_migration_adds_columns_and_changes_no_row(path: Path) -> None:
    async with open_store(path, offload=inline):
        pass
    after = tables(path)
    assert after["messages"] == [(*row, 0) for row in ROWS["messages"]]
    assert after["heads"] == [(*row, None) for row in ROWS["heads"]]
    assert after["sessions"] == [(*row, None) for row in ROWS["sessions"]]
    assert (after["branches"], after["moves"]) == (ROWS["branches"], ROWS["moves"])
    assert after["turns"] == after["inbox"] == []
    async with open_store(path, offload=inline):
        pass
    assert tables(path) == after, "it is done once"


async def test_everything_of_a_migrated_file_reads_as_before(path: Path) -> None:
    async with open_sessions(path, offload=inline) as sessions:
        a, b = sessions["a"], sessions["b"]
        assert (await a.transcript()).bodies == [U("u1"), A("a1")]
        assert (await b.transcript()).bodies == [
            U("u1"),
            A("a1"),
            {"role": "user", "content": [{"type": "text", "text": "look"}]},
        ]
        assert said(await b.transcript(hidden=True))[2] == "a scaffold"
        found = await a.all_messages()
        assert [(message.body["content"], message.state) for message in found] == [
            ("u1", "live"),
            ("a1", "live"),
            ("u2", "rewound"),
            ("a2", "rewound"),
            ("another", "rewound"),
            (None, "rewound"),
            ("r", "rewound"),
        ]
        assert [message.opens_turn for message in found] == [True, False] * 2 + [True, False, False]
        assert not any(message.synthetic for message in found)
        assert [(move.kind, move.revision) for move in await a.history()] == [
            ("undo", 6),
            ("undo", 9),
        ]
        listed = await sessions.list()
        assert [(info.id, info.revision, info.messages, info.meta) for info in listed] == [
            ("a", 9, 2, {"who": "somebody"}),
            ("b", 3, 4, {}),
        ]
        assert await a.holder() is None
        assert await a.inbox() == []
        receipt = await a.append(U("u2"), key="k2")
        assert (receipt.id, receipt.duplicate, receipt.live) == (3, True, False)
        with pytest.raises(Rejected):
            await a.append(U("else"), key="k1")


async def test_a_migrated_file_lives_on(path: Path) -> None:
    async with open_sessions(path, offload=inline) as sessions:
        a = sessions["a"]
        moved = await a.redo()
        assert moved is not None
        assert moved.position == 5
        assert (await a.transcript()).bodies == [
            U("u1"),
            A("a1"),
            U("another"),
            A(call="c1"),
            T("c1", "r"),
        ]
        await a.append(A("goes on"))
        await a.restore(5)
        assert said(await a.transcript()) == ["u1", "a1", "u2", "a2"]
        await sessions["b"].append(A("seen"))
        reborn = await sessions["gone"].append(U("back"))
        assert reborn.revision == 9, "above the tombstone"
        purged = await sessions.purge("a")
        assert purged is not None
        assert purged.messages == 4
        assert await sessions.delete("b") is not None


async def test_turns_and_posts_work_in_a_migrated_file(path: Path) -> None:
    clock = Moment("a boot", 0.0)
    async with open_sessions(path, offload=inline, clock=lambda: clock) as sessions:
        a = sessions["a"]
        again = await a.post(U("u2"), key="k2")
        assert (again.status, again.id, again.accepted_at) == ("duplicate", 503, 12.0)
        posted = await a.post(U("p1"), key="k3")
        assert posted.status == "accepted"
        async with a.turn(wait=0) as turn:
            assert turn.token == 1
            await turn.append(A(call="c9"))
        assert [message.synthetic for message in await a.transcript()] == [False] * 3 + [True]
        await a.set_policy("collect")
        assert (await a.post(U("p2"))).policy == "collect"
        assert [message.body["content"] for message in await a.inbox()] == ["p1", "p2"]
        assert await sessions["b"].holder() is None
        async with sessions["b"].turn(wait=0) as turn:
            assert turn.token == 2
    assert tables(path)["turns"] == []


def test_a_migration_that_fails_leaves_the_first_version(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    create(path, fill)
    before = schema(path), tables(path)
    with closing(apsw.Connection(str(path))) as connection:

        def refuse(_: object, sql: str, __: object) -> bool:
            if "CREATE TABLE inbox" in sql:
                raise apsw.FullError("a test says so")
            return True

        connection.exec_trace = refuse
        with pytest.raises(apsw.FullError):
            migrate(connection)
        assert not connection.in_transaction
    assert (schema(path), tables(path)) == before
    with closing(apsw.Connection(str(path))) as connection:
        migrate(connection)
        assert version_of(connection) == VERSION
    assert len(tables(path)["messages"]) == len(ROWS["messages"])


async def test_a_file_of_the_next_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "state.db"

    def make(connection: apsw.Connection) -> None:
        fill(connection)
        migrate(connection)
        connection.pragma("user_version", VERSION + 1)

    create(path, make)
    before = schema(path), tables(path)
    with pytest.raises(StorageDamaged, match="newer than version"):
        async with open_store(path, offload=inline):
            pass
    assert (schema(path), tables(path)) == before


def test_the_scripts_are_numbered_from_one_without_gaps() -> None:
    numbers = sorted(int(entry.name[:4]) for entry in SCRIPTS.iterdir() if entry.name.endswith("l"))
    assert numbers == list(range(1, VERSION + 1))
