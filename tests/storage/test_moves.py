from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support import A, S, T, U, said, states, tables, turns

from turnkeeper.actors import Conflict, Session, Sessions, open_sessions
from turnkeeper.storage import inline


async def test_c06_an_undo_writes_nothing_that_grows_with_the_session(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        session = sessions["a"]
        await session.extend([U(f"{n}") if n % 2 == 0 else A(f"{n}") for n in range(50)])
        before = {name: len(rows) for name, rows in tables(path).items()}
        for number in range(10):
            await session.append(U(f"again {number}"))
            await session.undo()
        after = {name: len(rows) for name, rows in tables(path).items()}
        assert after["messages"] == 60
        assert after["moves"] - before["moves"] == 10
        assert after["branches"] - before["branches"] <= 9
        assert after["sessions"] == after["heads"] == 1
        assert len(await session.transcript()) == 50


async def test_two_undos_are_taken_back_by_two_redos(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await turns(session)
        ids = [message.id for message in await session.transcript()]
        await session.undo()
        await session.undo()
        assert said(await session.transcript()) == ["u1", "a1"]
        moved = await session.redo()
        assert moved is not None
        assert moved.position == 4
        await session.undo()  # on top of what is left of the stack
        await session.redo()
        await session.redo()
        assert [message.id for message in await session.transcript()] == ids
        assert await session.redo() is None
        revision = (await session.transcript()).revision
        assert await session.redo() is None
        assert (await session.transcript()).revision == revision


CLEARING: dict[str, Callable[[Session], Awaitable[object]]] = {
    "append": lambda session: session.append(A("x")),
    "extend": lambda session: session.extend([A("x")]),
    "rewrite": lambda session: session.rewrite([U("x")]),
    "rewrite to a prefix": lambda session: session.rewrite([U("u1")]),
    "restore": lambda session: session.restore(2),
}


LEAVING: dict[str, Callable[[Session], Awaitable[object]]] = {
    "a duplicate": lambda session: session.append(U("first"), key="k"),
    "rewrite to what is there": lambda session: session.rewrite([U("first"), U("u1"), A("a1")]),
    "restore to where it is": lambda session: session.restore(4),
    "set_meta": lambda session: session.set_meta({"k": 1}),
    "fork": lambda session: session.fork("b"),
    "an empty batch": lambda session: session.extend([]),
}


@pytest.mark.parametrize("change", CLEARING.values(), ids=CLEARING)
async def test_a_newer_change_leaves_nothing_to_redo(
    tmp_path: Path, change: Callable[[Session], Awaitable[object]]
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await turns(session)
        await session.undo()
        await session.undo()
        await change(session)
        transcript = await session.transcript()
        assert await session.redo() is None
        assert await session.transcript() == transcript
        await session.restore(7)
        assert len(await session.transcript()) == 6, "what was undone can still be reached"


@pytest.mark.parametrize("change", LEAVING.values(), ids=LEAVING)
async def test_what_changes_nothing_in_the_transcript_leaves_the_redo_as_it_is(
    tmp_path: Path, change: Callable[[Session], Awaitable[object]]
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await session.append(U("first"), key="k")
        await turns(session, 2)
        await session.undo()
        await change(session)
        assert await session.redo() is not None
        assert len(await session.transcript()) == 5


async def test_a_fork_has_nothing_to_redo(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        await turns(sessions["a"])
        await sessions["a"].undo()
        await sessions["a"].fork("b")
        assert await sessions["b"].redo() is None
        assert await sessions["b"].history() == []


async def test_a_row_off_the_live_path_is_in_the_state_of_the_move_that_took_it_off(
    tmp_path: Path,
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await turns(session)
        await session.undo()
        await session.append(U("u4"))
        await session.retry()
        found = states(await session.all_messages())
        assert found == dict.fromkeys(["u1", "a1", "u2", "a2"], "live") | dict.fromkeys(
            ["u3", "a3", "u4"], "rewound"
        )
        await session.rewrite([U("u1"), A("a1"), U("new")])
        found = states(await session.all_messages())
        assert [found[text] for text in ("u2", "a2", "u3", "u4", "new")] == [
            "replaced",
            "replaced",
            "rewound",
            "rewound",
            "live",
        ]
        await session.rewrite([S("short")], reason="compaction")
        found = states(await session.all_messages())
        assert [found[text] for text in ("u1", "a1", "new", "u2", "short")] == [
            "compacted",
            "compacted",
            "compacted",
            "replaced",
            "live",
        ]
        await session.restore(7)
        found = states(await session.all_messages())
        assert found["short"] == "rewound"
        assert [found[f"u{n}"] for n in (1, 2, 3, 4)] == ["live", "live", "live", "rewound"]
        kinds = [move.kind for move in await session.history()]
        assert kinds == ["undo", "retry", "rewrite", "compaction", "restore"]


async def test_an_undo_of_a_tool_exchange_takes_all_of_it(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await session.extend([U("do"), A(call="c1"), T("c1", "r"), A("done")])
        undone = await session.undo()
        assert undone is not None
        assert (undone.text, undone.turns, undone.messages, undone.position) == ("do", 1, 4, 0)


MEANWHILE: dict[str, Callable[[Sessions], Awaitable[object]]] = {
    "an append": lambda s: s["a"].append(U("theirs")),
    "an undo": lambda s: s["a"].undo(),
    "a rewrite": lambda s: s["a"].rewrite([U("theirs")]),
    "a purge": lambda s: s.purge("a"),
}


@pytest.mark.parametrize("meanwhile", MEANWHILE.values(), ids=MEANWHILE)
async def test_a_head_that_was_remembered_and_is_stale_is_noticed(
    tmp_path: Path, meanwhile: Callable[[Sessions], Awaitable[object]]
) -> None:
    path = tmp_path / "state.db"
    async with (
        open_sessions(path, offload=inline) as ours,
        open_sessions(path, offload=inline) as theirs,
    ):
        await turns(ours["a"], 2)
        await meanwhile(theirs)
        before = await theirs["a"].transcript()
        receipt = await ours["a"].append(A("ours"))
        assert receipt.revision == before.revision + 1
        assert receipt.position == before.position + 1
        assert said(await theirs["a"].transcript()) == [*said(before), "ours"]


async def test_a_head_that_left_and_came_back_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with (
        open_sessions(path, offload=inline) as ours,
        open_sessions(path, offload=inline) as theirs,
    ):
        await turns(ours["a"], 2)
        assert (await ours["a"].transcript()).revision == 5
        await theirs["a"].undo()
        await theirs["a"].redo()
        receipt = await ours["a"].append(A("ours"))
        assert (receipt.position, receipt.revision) == (5, 8)
        with pytest.raises(Conflict):
            await ours["a"].append(A("decided before"), at=5)
