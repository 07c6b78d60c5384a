"""One session's actor: its order, what it hands over together, and what happens when it fails."""

from __future__ import annotations

import logging
from pathlib import Path

import apsw
import pytest
import trio
import trio.testing
from support import A, Gate, U, failing_disk, said

from turnkeeper.actors import Appended, Rejected, Sessions, StorageFailed, open_sessions
from turnkeeper.actors.ask import Ask
from turnkeeper.storage import Asked, Changed, Connection, inline


class Bug(RuntimeError):
    """A mistake of ours."""


class Faulty:
    """A message whose change fails as only a bug does."""

    def change(self, _: Connection, __: Asked, /) -> Changed[None]:
        raise Bug("in a transaction")


class FaultyAfterWriting:
    """A message whose change has written something by the time it fails."""

    def change(self, connection: Connection, _: Asked, /) -> Changed[None]:
        connection.execute("UPDATE heads SET position = 77")
        raise Bug("in a transaction, after a write")


class Clock:
    """A clock that breaks when it is told to, once."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self) -> float:
        if self.broken:
            self.broken = False
            raise Bug("at the hand-over")
        return 0.0


async def tell(sessions: Sessions, id: str, message: Faulty | FaultyAfterWriting) -> None:
    """Deliver what no method of a session would deliver."""
    ask = Ask(message)
    sessions._registry.wake(id).deliver(ask)
    await ask.answer()


async def test_changes_happen_in_the_order_in_which_they_were_called(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        called: list[str] = []

        async def ask(n: int) -> Appended:
            called.append(str(n))
            return await session.append(U(str(n)))

        async with trio.open_nursery() as nursery:
            for n in range(50):
                nursery.start_soon(ask, n)
        assert len(called) == 50
        assert said(await session.transcript()) == called


async def test_appends_that_wait_together_are_committed_together_each_with_its_own_receipt(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with open_sessions(tmp_path / "state.db", offload=gate) as sessions:
        session = sessions["a"]
        receipts: dict[int, tuple[Appended, ...]] = {}

        async def append(n: int) -> None:
            receipts[n] = (await session.append(U(str(n))),)

        async def extend(n: int) -> None:
            receipts[n] = await session.extend([U(str(n)), A(f"{n}'")])

        gate.shut()
        async with trio.open_nursery() as nursery:
            for n in range(6):
                nursery.start_soon(extend if n == 3 else append, n)
                await trio.testing.wait_all_tasks_blocked()
            gate.open()
        stats = sessions.stats()
        assert stats.commits == 2  # the first alone, for nothing was under way, then the rest
        assert (stats.operations, stats.largest_batch, stats.mean_batch) == (6, 5, 3.0)
        # One revision each, and the session's creation was the first.
        assert {n: [one.revision for one in each] for n, each in receipts.items()} == {
            0: [2],
            1: [3],
            2: [4],
            3: [5, 5],
            4: [6],
            5: [7],
        }
        positions = [one.position for n in range(6) for one in receipts[n]]
        assert positions == [1, 2, 3, 4, 5, 6, 7]
        transcript = await session.transcript()
        assert said(transcript) == ["0", "1", "2", "3", "3'", "4", "5"]
        assert [message.id for message in transcript] == [
            one.id for n in range(6) for one in receipts[n]
        ]
        assert transcript.revision == 7


async def test_one_that_is_refused_takes_none_of_those_handed_over_with_it(tmp_path: Path) -> None:
    gate = Gate()
    async with open_sessions(tmp_path / "state.db", offload=gate) as sessions:
        session = sessions["a"]
        await session.append(U("0"), key="k")
        refusals: list[str] = []

        async def refused() -> None:
            try:
                await session.append(U("other content"), key="k")
            except Rejected as refusal:
                refusals.append(refusal.field)

        gate.shut()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.append, U("1"))
            await trio.testing.wait_all_tasks_blocked()
            for n in (2, 3):
                nursery.start_soon(session.append, U(str(n)))
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(refused)
                await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(session.append, U("4"))
            await trio.testing.wait_all_tasks_blocked()
            gate.open()
        assert refusals == ["key", "key"]
        assert said(await session.transcript()) == ["0", "1", "2", "3", "4"]
        assert [one.position for one in await session.transcript()] == [1, 2, 3, 4, 5]
        assert sessions.stats().failures == 0


async def test_a_key_that_several_send_at_once_is_stored_once(tmp_path: Path) -> None:
    gate = Gate()
    async with open_sessions(tmp_path / "state.db", offload=gate) as sessions:
        receipts: list[Appended] = []

        async def send() -> None:
            receipts.append(await sessions["a"].append(U("hello"), key="update-7"))

        gate.shut()
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            gate.open()
        assert [receipt.duplicate for receipt in receipts].count(False) == 1
        assert len({(one.id, one.position, one.revision) for one in receipts}) == 1
        assert said(await sessions["a"].transcript()) == ["hello"]


async def test_sessions_that_ask_at_once_share_a_commit(tmp_path: Path) -> None:
    gate = Gate()
    async with open_sessions(tmp_path / "state.db", offload=gate) as sessions:
        gate.shut()
        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(sessions[f"s{n}"].append, U(str(n)))
            await trio.testing.wait_all_tasks_blocked()
            gate.open()
        stats = sessions.stats()
        assert (stats.commits, stats.operations, stats.largest_batch) == (1, 20, 20)


@pytest.mark.parametrize("message", [Faulty(), FaultyAfterWriting()])
async def test_a_failing_actor_answers_with_the_bug_and_those_behind_are_served(
    tmp_path: Path, message: Faulty | FaultyAfterWriting, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    async with open_sessions(tmp_path / "state.db", offload=gate, mailbox_size=2) as sessions:
        session = sessions["a"]
        await session.append(U("0"))
        first = sessions._registry.resident("a")
        bugs: list[Bug] = []

        async def faulty() -> None:
            try:
                await tell(sessions, "a", message)
            except Bug as bug:
                bugs.append(bug)

        gate.shut()
        with caplog.at_level(logging.ERROR, logger="turnkeeper"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.append, U("1"))
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(faulty)
                await trio.testing.wait_all_tasks_blocked()
                for n in range(2, 6):
                    nursery.start_soon(session.append, U(str(n)))
                    await trio.testing.wait_all_tasks_blocked()
                assert sessions.stats().in_line == 3
                gate.open()
        assert len(bugs) == 1
        assert sessions.stats().failures == 1
        assert len(caplog.records) == 1
        assert sessions._registry.resident("a") is not first
        assert sessions.stats().busy == 0
        assert said(await session.transcript()) == ["0", "1", "2", "3", "4", "5"]
        assert [one.position for one in await session.transcript()] == [1, 2, 3, 4, 5, 6]


async def test_a_bug_in_one_session_touches_no_other_of_the_same_commit(tmp_path: Path) -> None:
    gate = Gate()
    async with open_sessions(tmp_path / "state.db", offload=gate) as sessions:
        gate.shut()
        bugs: list[Bug] = []

        async def faulty() -> None:
            try:
                await tell(sessions, "a", FaultyAfterWriting())
            except Bug as bug:
                bugs.append(bug)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sessions["b"].append, U("b"))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(faulty)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(sessions["c"].append, U("c"))
            await trio.testing.wait_all_tasks_blocked()
            gate.open()
        assert len(bugs) == 1
        for id in ("b", "c"):
            transcript = await sessions[id].transcript()
            assert said(transcript) == [id]
            assert transcript.position == 1
        assert await sessions["a"].info() is None


async def test_what_was_pending_survives_its_actors_failure(tmp_path: Path) -> None:
    with failing_disk() as disk:
        async with open_sessions(tmp_path / "state.db", offload=inline, vfs=disk.name) as sessions:
            session = sessions["a"]
            await session.append(U("1"))
            disk.write_error = apsw.IOError
            with pytest.raises(StorageFailed) as caught:
                await session.append(U("2"))
            assert caught.value.kept
            disk.write_error = None
            with pytest.raises(Bug):
                await tell(sessions, "a", Faulty())
            assert sessions.stats().failures == 1
            assert sessions.stats().pending == 1
            assert said(await session.transcript()) == ["1", "2"]
            await session.append(U("3"))
            assert sessions.stats().pending == 0
            assert said(await session.transcript()) == ["1", "2", "3"]


async def test_a_bug_at_the_hand_over_is_its_askers_answer_and_the_next_ask_fares_better(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with open_sessions(tmp_path / "state.db", offload=inline, now=clock) as sessions:
        session = sessions["a"]
        await session.append(U("1"))
        clock.broken = True
        with pytest.raises(Bug):
            await session.append(U("2"))
        await session.append(U("3"))
        assert said(await session.transcript()) == ["1", "3"]
        assert sessions.stats().failures == 1


async def test_a_bug_at_the_hand_over_of_an_idle_actor_is_counted_at_once(tmp_path: Path) -> None:
    clock = Clock()
    async with open_sessions(tmp_path / "state.db", offload=inline, now=clock) as sessions:
        await sessions["a"].append(U("1"))
        clock.broken = True
        with pytest.raises(Bug):
            await sessions["a"].append(U("2"))
        assert sessions.stats().failures == 1


@pytest.mark.parametrize("which", [1, 2, 3])
async def test_a_bug_while_several_are_handed_over_harms_one_of_them(
    tmp_path: Path, which: int
) -> None:
    gate = Gate()
    times = iter(range(1_000))
    broken_at: set[int] = set()

    def now() -> float:
        time = next(times)
        if time in broken_at:
            raise Bug("at the hand-over")
        return float(time)

    async with open_sessions(tmp_path / "state.db", offload=gate, now=now) as sessions:
        session = sessions["a"]
        bugs: list[int] = []

        async def ask(n: int) -> None:
            try:
                await session.append(U(str(n)))
            except Bug:
                bugs.append(n)

        broken_at.add(which)
        gate.shut()
        async with trio.open_nursery() as nursery:
            for n in range(5):
                nursery.start_soon(ask, n)
                await trio.testing.wait_all_tasks_blocked()
            gate.open()
        assert bugs == [which]
        assert said(await session.transcript()) == [str(n) for n in range(5) if n != which]
        assert sessions.stats().failures == 1
        assert sessions.stats().busy == 0


async def test_a_refused_or_failed_operation_is_no_failure_of_the_actor(tmp_path: Path) -> None:
    with failing_disk() as disk:
        async with open_sessions(
            tmp_path / "state.db", offload=inline, vfs=disk.name, max_pending=0
        ) as sessions:
            session = sessions["a"]
            await session.append(U("1"))
            actor = sessions._registry.resident("a")
            with pytest.raises(Rejected):
                await session.restore(99)
            disk.write_error, disk.fail_next = apsw.IOError, 1
            with pytest.raises(StorageFailed):
                await session.undo()
            await session.append(U("2"))
            assert sessions._registry.resident("a") is actor
            assert sessions.stats().failures == 0
            assert said(await session.transcript()) == ["1", "2"]


async def test_an_actor_describes_itself(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        await sessions["a"].append(U("1"))
        actor = sessions._registry.resident("a")
        assert repr(actor) == (
            "<SessionActor 'a': <Mailbox: 0 of 100, 0 in line>, 0 under way, 0 pending>"
        )
        assert repr(sessions["a"]) == "<Session 'a'>"
