from __future__ import annotations

from pathlib import Path

from support import A, S, U, said, states, tables, turns

from turnkeeper.actors import open_sessions
from turnkeeper.storage import inline


async def test_cutting_the_end_by_a_rewrite_is_a_rewrite(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await turns(session, 2)
        got = await session.rewrite([U("u1"), A("a1")])
        assert (got.kept, got.replaced, got.appended, got.changed) == (2, 2, (), True)
        assert states(await session.all_messages())["u2"] == "replaced"
        assert await session.redo() is None


async def test_a_rewrite_keeps_what_it_begins_with_and_branches_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        session = sessions["a"]
        await session.append(S("rules"))
        await turns(session)
        before = await session.transcript()
        got = await session.rewrite([*before.bodies[:3], U("other"), A("way")])
        assert (got.kept, got.replaced, got.position, got.changed) == (3, 4, 5, True)
        assert [receipt.position for receipt in got.appended] == [4, 5]
        after = await session.transcript()
        assert after.messages[:3] == before.messages[:3]
        assert said(after) == ["rules", "u1", "a1", "other", "way"]
        assert after.revision == got.revision == before.revision + 1


async def test_a_rewrite_to_what_is_there_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        session = sessions["a"]
        await turns(session)
        before = tables(path)
        bodies = [dict(reversed(body.items())) for body in (await session.transcript()).bodies]
        got = await session.rewrite(bodies)
        assert (got.kept, got.replaced, got.appended, got.changed) == (6, 0, (), False)
        assert tables(path) == before
        assert not (await sessions["nobody"].rewrite([])).changed
        assert tables(path) == before


async def test_a_rewrite_that_only_goes_on_takes_nothing_off(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await turns(session, 1)
        got = await session.rewrite([*(await session.transcript()).bodies, U("more")])
        assert (got.kept, got.replaced, got.position) == (2, 0, 3)
        assert set(states(await session.all_messages()).values()) == {"live"}
        await session.undo()
        assert said(await session.transcript()) == ["u1", "a1"]


async def test_a_rewrite_compares_as_json_and_not_as_python(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await session.append({"role": "user", "content": "x", "n": 1})
        for n in (True, 1.0):
            got = await session.rewrite([{"role": "user", "content": "x", "n": n}])
            assert got.kept == 0
            assert got.replaced == 1


async def test_hidden_rows_between_kept_ones_keep_their_positions(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await session.append(U("h0"), hidden=True)
        await session.append(U("u1"))
        await session.append(U("h1"), hidden=True)
        await session.append(A("a1"))
        await session.append(U("h2"), hidden=True)
        await session.append(U("u2"))
        before = await session.transcript(hidden=True)
        got = await session.rewrite([U("u1"), A("a1"), U("other")])
        assert (got.kept, got.replaced, got.position) == (2, 1, 6)
        after = await session.transcript(hidden=True)
        assert said(after) == ["h0", "u1", "h1", "a1", "h2", "other"]
        assert after.messages[:5] == before.messages[:5]
        got = await session.rewrite([])
        assert (got.kept, got.replaced, got.position) == (0, 5, 1)
        assert said(await session.transcript(hidden=True)) == ["h0"]


async def test_a_rewrite_makes_a_session_that_is_not_there(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        got = await sessions["a"].rewrite([U("x"), A("y")])
        assert (got.kept, got.replaced, got.position, got.revision) == (0, 0, 2, 2)
        assert said(await sessions["a"].transcript()) == ["x", "y"]
