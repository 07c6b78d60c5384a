from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import apsw
import pytest
import trio
from attrs import frozen
from support import A, S, U, failing_disk, said, tables

from turnkeeper.actors import Conflict, Rejected, Session, Sessions, open_sessions
from turnkeeper.storage import inline


@frozen
class Mutator:
    """One way to change a store, and one way to be refused it."""

    change: Callable[[Sessions], Awaitable[object]]
    refused: Callable[[Sessions], Awaitable[object]]


MUTATORS = {
    "append": Mutator(
        lambda s: s["a"].append(U("new"), key="new"), lambda s: s["a"].append(U("new"), at=2)
    ),
    "append a hidden row": Mutator(
        lambda s: s["a"].append(U("new"), hidden=True), lambda s: s["a"].append(U("new"), key="k0")
    ),
    "append to a new session": Mutator(
        lambda s: s["new"].append(U("new")), lambda s: s["new"].append(U("new"), at=1)
    ),
    "extend": Mutator(
        lambda s: s["a"].extend([U("x"), A("y")], keys=["x", None]),
        lambda s: s["a"].extend([U("x"), U("y")], keys=["x", "k0"]),
    ),
    "undo": Mutator(lambda s: s["a"].undo(), lambda s: s["a"].undo(at=2)),
    "undo 2": Mutator(lambda s: s["a"].undo(2), lambda s: s["a"].undo(2, at=2)),
    "retry": Mutator(lambda s: s["a"].retry(), lambda s: s["a"].retry(at=2)),
    "redo": Mutator(lambda s: s["undone"].redo(), lambda s: s["undone"].redo(at=2)),
    "rewrite": Mutator(
        lambda s: s["a"].rewrite([U("ask 0"), A("other")]), lambda s: s["a"].rewrite([], at=2)
    ),
    "rewrite to a prefix": Mutator(
        lambda s: s["a"].rewrite([U("ask 0")]), lambda s: s["a"].rewrite([U("ask 0")], at=2)
    ),
    "rewrite as a compaction": Mutator(
        lambda s: s["a"].rewrite([S("short"), U("ask 1")], reason="compaction"),
        lambda s: s["a"].rewrite([S("short")], reason="compaction", at=2),
    ),
    "restore": Mutator(lambda s: s["a"].restore(2), lambda s: s["a"].restore(99)),
    "fork": Mutator(lambda s: s["a"].fork("b", position=2), lambda s: s["a"].fork("undone")),
    "set_meta": Mutator(
        lambda s: s["a"].set_meta({"k": 1}), lambda s: s["a"].set_meta({"k": b"1"})
    ),
    "delete": Mutator(lambda s: s.delete("a"), lambda s: s.delete("a\0")),
    "purge": Mutator(lambda s: s.purge("undone"), lambda s: s.purge("")),
}


AT: dict[str, Callable[[Session, int], Awaitable[object]]] = {
    "append": lambda session, at: session.append(U("new"), at=at),
    "extend": lambda session, at: session.extend([U("new")], at=at),
    "undo": lambda session, at: session.undo(at=at),
    "retry": lambda session, at: session.retry(at=at),
    "redo": lambda session, at: session.redo(at=at),
    "rewrite": lambda session, at: session.rewrite([U("new")], at=at),
    "rewrite to the same": lambda session, at: session.rewrite([U("only")], at=at),
    "restore": lambda session, at: session.restore(1, at=at),
    "restore of nothing": lambda session, at: session.restore(99, at=at),
    "fork": lambda session, at: session.fork("b", at=at),
}


async def prepare(sessions: Sessions) -> None:
    """Two sessions of three turns each; in one of them the last two were undone."""
    for id in ("a", "undone"):
        for number in range(3):
            await sessions[id].append(U(f"ask {number}"), key=f"k{number}")
            await sessions[id].append(A(f"answer {number}"))
    await sessions["undone"].undo()
    await sessions["undone"].undo()


@pytest.mark.parametrize("mutator", MUTATORS.values(), ids=MUTATORS)
async def test_a_change_is_committed_before_it_is_acknowledged(
    tmp_path: Path, mutator: Mutator
) -> None:
    path = tmp_path / "state.db"
    async with (
        open_sessions(path, offload=inline) as sessions,
        open_sessions(path, offload=inline) as others,
    ):
        await prepare(sessions)
        before = tables(path)
        await mutator.change(sessions)
        after = tables(path)
        assert after != before
        for info in await sessions.list():
            ours, theirs = sessions[info.id], others[info.id]
            assert await theirs.transcript(hidden=True) == await ours.transcript(hidden=True)
            assert await theirs.info() == await ours.info()


@pytest.mark.parametrize("mutator", MUTATORS.values(), ids=MUTATORS)
async def test_a_refused_change_leaves_every_table_as_it_was(
    tmp_path: Path, mutator: Mutator
) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        await prepare(sessions)
        before = tables(path)
        commits = sessions.stats().commits
        with pytest.raises((Rejected, Conflict)):
            await mutator.refused(sessions)
        assert tables(path) == before
        assert sessions.stats().commits == commits


@pytest.mark.parametrize("mutator", MUTATORS.values(), ids=MUTATORS)
async def test_a_change_whose_transaction_was_lost_is_run_again_to_the_same_end(
    tmp_path: Path, mutator: Mutator
) -> None:
    found: list[object] = []
    for lose in (False, True):
        path = tmp_path / f"{lose}.db"
        with failing_disk() as disk:
            async with open_sessions(
                path, offload=inline, vfs=disk.name, random=Random(1), now=lambda: 7.0
            ) as sessions:
                await prepare(sessions)
                await sessions["beside"].append(U("beside"))
                if lose:
                    disk.write_error, disk.fail_next = apsw.IOError, 1
                receipts: list[object] = []

                async def call(sessions: Sessions, receipts: list[object]) -> None:
                    receipts.append(await mutator.change(sessions))

                async with trio.open_nursery() as nursery:  # both go into one batch
                    nursery.start_soon(call, sessions, receipts)
                    nursery.start_soon(sessions["beside"].set_meta, {"k": 1})
                assert disk.failures == lose
        found.append((receipts, without_append_ids(path)))
    assert found[0] == found[1]


def without_append_ids(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Every table; which of two tasks is given the next append id is chance."""
    found = tables(path)
    found["messages"] = [(*row[:7], *row[8:]) for row in found["messages"]]
    return found


@pytest.mark.parametrize("call", AT.values(), ids=AT)
async def test_c08_a_decision_on_an_old_revision_is_a_conflict_and_changes_nothing(
    tmp_path: Path, call: Callable[[Session, int], Awaitable[object]]
) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        session = sessions["a"]
        await session.append(U("only"))
        for number in range(38):
            await session.append(A(f"{number}"))
        assert (await session.transcript()).revision == 40
        before = tables(path)
        for at in (0, 2, 39, 41):
            with pytest.raises(Conflict) as caught:
                await call(session, at)
            assert (caught.value.session, caught.value.at, caught.value.revision) == ("a", at, 40)
            assert tables(path) == before


@pytest.mark.parametrize(
    ("name", "at"), [(name, at) for name in AT for at in (0, 1) if name != "restore of nothing"]
)
async def test_a_decision_on_the_revision_that_is_there_is_carried_out(
    tmp_path: Path, name: str, at: int
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        if at:
            await session.set_meta({})
        if name == "restore" and at == 0:
            with pytest.raises(Rejected):
                await AT[name](session, at)
        else:
            await AT[name](session, at)


async def test_c85_session_ids_are_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "inner" / "state.db"
    (tmp_path / "inner").mkdir()
    ids = ["../../etc/passwd", "'; drop table messages", "a\nb", " ", "%", "é", "x" * 1_000]
    async with open_sessions(path, offload=inline) as sessions:
        for id in ids:
            await sessions[id].append(U(id))
        for id in ("", "x" * 10_000, "a\0b"):
            with pytest.raises(Rejected) as caught:
                sessions[id]
            assert caught.value.field == "id"
        assert [info.id for info in await sessions.list()] == sorted(ids)
        for id in ids:
            assert said(await sessions[id].transcript()) == [id]
    assert os.listdir(tmp_path) == ["inner"]
    assert os.listdir(path.parent) == ["state.db"]
