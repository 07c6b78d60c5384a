from __future__ import annotations

from pathlib import Path

import pytest
from support import A, U, said, tables, turns

from turnkeeper.actors import Rejected, open_sessions
from turnkeeper.storage import inline


async def test_a_fork_writes_the_same_few_rows_whatever_the_length(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        written = []
        for number, length in enumerate((2, 500)):
            await sessions[f"{number}"].extend([U(f"{n}") for n in range(length)])
            before = {name: len(rows) for name, rows in tables(path).items()}
            forked = await sessions[f"{number}"].fork(f"fork {number}")
            assert (forked.position, forked.revision) == (length, 1)
            after = {name: len(rows) for name, rows in tables(path).items()}
            written.append({name: after[name] - before[name] for name in after})
            fork = await sessions[f"fork {number}"].transcript()
            assert fork.bodies == (await sessions[f"{number}"].transcript()).bodies
        assert written[0] == written[1]
        assert written[0]["messages"] == written[0]["moves"] == 0
        assert written[0]["sessions"] == written[0]["heads"] == written[0]["branches"] == 1


async def test_a_fork_and_its_source_go_each_its_own_way(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        source, fork = sessions["a"], sessions["b"]
        await turns(source)
        await source.fork("b", position=3, meta={"from": "a"})
        assert await fork.meta() == {"from": "a"}
        await source.append(U("only in a"))
        await fork.append(A("only in b"))
        assert said(await fork.transcript()) == ["u1", "a1", "u2", "only in b"]
        await fork.undo()
        assert said(await fork.transcript()) == ["u1", "a1"]
        await fork.append(U("again"))
        await fork.undo(9)
        assert said(await fork.transcript()) == []
        await fork.redo()
        assert said(await fork.transcript()) == ["u1", "a1", "again"]
        assert said(await source.transcript()) == ["u1", "a1", "u2", "a2", "u3", "a3", "only in a"]
        await source.rewrite([U("all new")])
        assert said(await fork.transcript()) == ["u1", "a1", "again"]


@pytest.mark.parametrize("position", [-1, 7, 99])
async def test_a_fork_at_a_position_that_is_not_there_is_rejected(
    tmp_path: Path, position: int
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        await turns(sessions["a"])
        with pytest.raises(Rejected) as caught:
            await sessions["a"].fork("b", position=position)
        assert caught.value.field == "position"
        assert await sessions["b"].info() is None


async def test_a_restore_to_where_a_fork_stands_already_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        await sessions["a"].append(U("x"))
        await sessions["a"].fork("b")
        await sessions["b"].append(U("y"))
        await sessions["b"].undo()
        before = tables(path)
        await sessions["b"].restore(1)
        assert tables(path) == before
        assert await sessions["b"].redo() is not None
