"""Which actors are awake: they are made on demand, and dropped without anybody noticing."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import apsw
import pytest
import trio
import trio.testing
from support import A, Gate, U, failing_disk, said

from turnkeeper.actors import StorageFailed, open_sessions
from turnkeeper.storage import inline


async def test_a_handle_and_a_read_wake_nobody(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await session.transcript()
        await session.info()
        assert sessions.stats().resident == 0
        await session.append(U("1"))
        assert sessions.stats().resident == 1


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_many_sessions_lose_nothing_though_few_are_resident(
    tmp_path: Path, most: int
) -> None:
    ids = [f"s{n}" for n in range(7)]
    async with open_sessions(tmp_path / "state.db", offload=inline, max_resident=most) as sessions:
        handles = [sessions[id] for id in ids]
        for turn in range(4):
            for id, handle in zip(ids, handles, strict=True):
                await handle.append(U(f"{id} asks {turn}"), key=str(turn))
                await handle.append(A(f"{id} hears {turn}"))
                assert sessions.stats().resident <= most
        for id, handle in zip(ids, handles, strict=True):
            assert (await handle.append(U(f"{id} asks 0"), key="0")).duplicate
            await handle.undo()
            await handle.undo()
            await handle.redo()
            assert said(await handle.transcript()) == [
                text for turn in range(3) for text in (f"{id} asks {turn}", f"{id} hears {turn}")
            ]
        assert sessions.stats().failures == 0


async def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline, max_resident=2) as sessions:
        await sessions["a"].append(U("1"))
        await sessions["b"].append(U("1"))
        await sessions["a"].append(U("2"))
        await sessions["c"].append(U("1"))
        resident = sessions._registry.resident
        assert resident("b") is None
        assert resident("a") is not None
        assert resident("c") is not None


async def test_dropped_between_an_undo_and_its_redo(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await session.extend([U("1"), A("a"), U("2"), A("b")])
        await session.undo()
        assert sessions.drop_idle() == 1
        assert sessions.stats().resident == 0
        await session.redo()
        assert said(await session.transcript()) == ["1", "a", "2", "b"]
        assert sessions.drop_idle() == 1
        assert sessions.drop_idle() == 0
        assert (await session.append(U("3"))).position == 5


async def test_who_is_busy_is_not_dropped(tmp_path: Path) -> None:
    gate = Gate()
    async with open_sessions(tmp_path / "state.db", offload=gate, max_resident=1) as sessions:
        gate.may_begin = trio.Event()
        async with trio.open_nursery() as nursery:
            for id in ("a", "b", "a", "b"):
                nursery.start_soon(sessions[id].append, U("x"))
                await trio.testing.wait_all_tasks_blocked()
            assert sessions.stats().resident == 2  # more than wanted, rather than a lost ask
            assert sessions.drop_idle() == 0
            gate.may_begin.set()
        assert sessions.drop_idle() == 2
        for id in ("a", "b"):
            assert said(await sessions[id].transcript()) == ["x", "x"]


async def test_who_has_something_pending_is_not_dropped(tmp_path: Path) -> None:
    with failing_disk() as disk:
        async with open_sessions(
            tmp_path / "state.db", offload=inline, vfs=disk.name, max_resident=1
        ) as sessions:
            disk.write_error = apsw.IOError
            with pytest.raises(StorageFailed):
                await sessions["a"].append(U("kept"))
            with pytest.raises(StorageFailed):
                await sessions["b"].append(U("kept too"))
            assert sessions.drop_idle() == 0
            assert sessions.stats().pending == 2
            disk.write_error = None
            await sessions["c"].append(U("taken"))
            assert sessions.stats().resident == 3
            for id, text in (("a", "kept"), ("b", "kept too")):
                await sessions[id].append(U("more"))
                assert said(await sessions[id].transcript()) == [text, "more"]
            assert sessions.stats().resident == 1, "nothing is pending any more, so one is enough"


async def test_a_resident_idle_session_takes_less_than_three_kilobytes(tmp_path: Path) -> None:
    number = 300
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:

        async def speak(first: int) -> None:
            for n in range(first, first + number):
                await sessions[f"telegram:dm:{n}"].extend([U("hello"), A("hi")])

        await speak(0)  # what is made once, caches and all, is made now
        sessions.drop_idle()
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            await speak(number)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert sessions.stats().resident == number
        assert (after - before) / number < 3_000


async def test_a_burst_over_many_sessions_leaves_no_more_actors_than_allowed(
    tmp_path: Path,
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline, max_resident=10) as sessions:
        async with trio.open_nursery() as nursery:
            for number in range(300):
                nursery.start_soon(sessions[f"s{number}"].append, U("x"))
        for _ in range(10):  # each call looks at some of the oldest
            await sessions["s0"].append(U("x"))
        assert sessions.stats().resident <= 10
