from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support import A, Job, Told, U, count, said, tables, turns

from turnkeeper.actors import Closed, Rejected, open_sessions
from turnkeeper.storage import Connection, Draft, appends, changes, inline, open_store, removal


async def test_a_delete_leaves_what_forks_reach_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        await turns(sessions["a"])
        await sessions["a"].fork("b", position=4)
        await turns(sessions["b"], 2)
        await sessions["b"].fork("c", position=6)
        await sessions["c"].append(U("deep"))
        await sessions["c"].fork("d", position=3)
        expected = {id: (await sessions[id].transcript()).bodies for id in "bcd"}
        deleted = await sessions.delete("a")
        assert deleted is not None
        assert deleted.messages == 2, "positions 5 and 6 were its own"
        for id in "bcd":
            assert (await sessions[id].transcript()).bodies == expected[id]
        deleted = await sessions.delete("b")
        assert deleted is not None
        assert deleted.messages == 2
        for id in "cd":
            assert (await sessions[id].transcript()).bodies == expected[id]
        await sessions["d"].append(U("goes on"))
        await sessions["d"].undo()
        assert count(path, "messages") == 8
        await sessions.delete("c")
        assert count(path, "messages") == 4, "what d reaches, and what it wrote"
        assert (await sessions["d"].transcript()).bodies == expected["d"]
        deleted = await sessions.delete("d")
        assert deleted is not None
        assert deleted.messages == 4
    found = tables(path)
    assert found["messages"] == found["branches"] == found["moves"] == []
    assert len(found["sessions"]) == 4, "tombstones"


async def test_a_deleted_session_is_closed_to_old_handles_and_born_again_above(
    tmp_path: Path,
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        old = sessions["a"]
        await turns(old)
        await old.undo()
        assert (await old.transcript()).revision == 8
        deleted = await sessions.delete("a")
        assert deleted is not None
        assert deleted.revision == 9
        assert await sessions.delete("a") is None
        assert await sessions.list() == []
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: old.append(U("x")),
            lambda: old.undo(),
            lambda: old.redo(),
            lambda: old.rewrite([]),
            lambda: old.restore(1),
            lambda: old.fork("b"),
            lambda: old.set_meta({}),
            lambda: old.transcript(),
            lambda: old.all_messages(),
            lambda: old.history(),
            lambda: old.info(),
        ]
        for again in (False, True):
            if again:
                new = sessions["a"]
                receipt = await new.append(U("new life"), key="k1")
                assert receipt.revision == 11, "creation is a revision of its own"
                assert receipt.position == 1
                with pytest.raises(Rejected, match="there are 10 to 11"):
                    await new.restore(8)
                assert await new.redo() is None
            for call in calls:
                with pytest.raises(Closed) as caught:
                    await call()
                assert (caught.value.what, caught.value.name) == ("session", "a")
        assert said(await new.transcript()) == ["new life"]
        await sessions.delete("a")
        await sessions["a"].append(U("third life"))
        assert (await sessions["a"].transcript()).revision == 14


async def test_a_fork_under_the_id_of_a_deleted_session_starts_above_it(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        await turns(sessions["a"])
        await turns(sessions["b"])
        deleted = await sessions.delete("b")
        assert deleted is not None
        forked = await sessions["a"].fork("b")
        assert forked.revision == deleted.revision + 1


async def test_a_purge_removes_what_is_off_the_live_path_and_the_history(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        session = sessions["a"]
        await turns(session)
        await session.undo(2)
        await session.extend([U("u4"), A("a4")])
        await session.undo()
        live = await session.transcript()
        purged = await sessions.purge("a")
        assert purged is not None
        assert purged.messages == 6
        assert (await session.transcript()).messages == live.messages
        assert [m.body["content"] for m in await session.all_messages()] == ["u1", "a1"]
        assert [move.kind for move in await session.history()] == ["purge"]
        assert await session.redo() is None
        revision = (await session.transcript()).revision
        for gone in range(1, revision):
            with pytest.raises(Rejected) as caught:
                await session.restore(gone)
            assert caught.value.field == "revision"
        await session.restore(revision)
        again = await sessions.purge("a")
        assert again is not None
        assert again.messages == 0
        text = b"".join((tmp_path / name).read_bytes() for name in ("state.db", "state.db-wal"))
        assert b"u4" not in text
        assert b"u3" not in text


async def test_a_purge_frees_keys_and_the_content_may_come_again(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await session.append(U("x"), key="k")
        await session.undo()
        await sessions.purge("a")
        assert not (await session.append(U("y"), key="k")).duplicate


async def test_positions_are_never_used_twice_on_a_branch_after_a_purge(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    seen: dict[tuple[object, object], object] = {}

    def note() -> None:
        for row in tables(path)["messages"]:
            id, branch, position = row[0], row[2], row[3]
            assert seen.setdefault((branch, position), id) == id

    async with open_sessions(path, offload=inline) as sessions:
        session = sessions["a"]
        for number in range(6):
            await session.extend([U(f"u{number}"), A("a"), U(f"v{number}"), A("b")])
            note()
            await session.undo(1 + number % 3)
            if number % 2:
                await sessions.purge("a")
            await session.append(U("between"))
            note()
            if number % 3 == 0:
                await session.undo()
                await sessions.purge("a")
                sessions.drop_idle()
    async with open_sessions(path, offload=inline) as sessions:
        await sessions["a"].append(U("last"))
        note()


async def test_a_purge_of_a_source_leaves_what_forks_reach(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        await turns(sessions["a"])
        await sessions["a"].fork("b", position=4)
        await sessions["a"].undo(3)
        purged = await sessions.purge("a")
        assert purged is not None
        assert purged.messages == 2
        assert said(await sessions["a"].transcript()) == []
        assert said(await sessions["b"].transcript()) == ["u1", "a1", "u2", "a2"]
        await sessions["b"].undo()
        await sessions["b"].redo()
        assert said(await sessions["b"].transcript()) == ["u1", "a1", "u2", "a2"]


@pytest.mark.parametrize(
    ("end", "turns_back", "first"),
    [
        ("delete", 1, "fork"),
        ("delete", 1, "source"),
        ("delete", 2, "fork"),
        ("delete", 2, "source"),
        ("purge", 1, "fork"),
        ("purge", 1, "source"),
        ("purge", 2, "fork"),
        ("purge", 2, "source"),
    ],
)
async def test_a_fork_that_went_back_before_its_start_is_whole_after_a_purge(
    tmp_path: Path, end: str, turns_back: int, first: str
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        source, fork = sessions["a"], sessions["b"]
        await turns(source)
        await source.fork("b", position=4)
        await fork.undo(turns_back)
        live = await fork.transcript()

        async def end_source() -> None:
            if end == "delete":
                await sessions.delete("a")
            else:
                await source.undo(3)
                await sessions.purge("a")

        if first == "source":
            await end_source()
        await sessions.purge("b")
        if first == "fork":
            await end_source()
        assert (await fork.transcript()).messages == live.messages
        await fork.append(U("goes on"))
        await fork.restore((await fork.transcript()).revision - 1)
        assert (await fork.transcript()).messages == live.messages
        await sessions.delete("b")


async def test_what_a_purge_left_for_a_fork_goes_with_the_last_fork(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        await turns(sessions["a"])
        await sessions["a"].fork("b", position=4)
        await sessions["a"].undo(3)
        await sessions.purge("a")
        assert count(path, "messages") == 4
        await sessions.delete("b")
        assert count(path, "messages") == 0


async def test_delete_and_purge_of_what_is_not_there_do_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        before = tables(path)
        assert await sessions.delete("nobody") is None
        purged = await sessions.purge("nobody")
        assert purged is not None
        assert purged.messages == 0
        assert tables(path) == before


@pytest.mark.parametrize("end", ["delete", "purge"])
async def test_a_session_of_thousands_of_retries_can_be_removed(tmp_path: Path, end: str) -> None:
    """Each retry forks off the one before: a branch for each, one behind the other."""
    retries = 3_000
    path = tmp_path / "state.db"
    async with open_store(path, offload=inline) as store:

        def grow(connection: Connection) -> None:
            for number in range(retries):
                appends.append(connection, Told("a", number), Draft("user", "x", None, False, True))
                appends.append(connection, Told("a", number), Draft("assistant", "y", None))
                changes.restore(connection, Told("a", number), 2 + 3 * number)

        job = Job(grow)
        store.submit(job)
        await job.outcome()
        ended = Job(lambda connection: getattr(removal, end)(connection, Told("a")))
        store.submit(ended)
        await ended.outcome()
    assert count(path, "messages") == (0 if end == "delete" else retries)
