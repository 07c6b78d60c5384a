from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import apsw
import pytest
import trio
from support import Clock, Job, U, Wire, said, tables, writing
from trio.testing import wait_all_tasks_blocked

from turnkeeper.actors import open_sessions
from turnkeeper.storage import (
    Closed,
    Rejected,
    StorageBusy,
    StorageError,
    StorageFailed,
    in_thread,
    inline,
)
from turnkeeper.storage.committer import JITTER_S, MAX_BATCH
from turnkeeper.storage.connect import PATIENCE_S

T = TypeVar("T")


@pytest.fixture
def wire(tmp_path: Path) -> Wire:
    return Wire(tmp_path / "state.db")


@contextmanager
def locked(path: Path) -> Iterator[apsw.Connection]:
    """Somebody else holds the file's write lock."""
    with closing(apsw.Connection(str(path))) as rival:
        rival.execute("BEGIN IMMEDIATE")
        yield rival
        if rival.in_transaction:
            rival.execute("ROLLBACK")


def refuse(_: apsw.Connection) -> object:
    raise Rejected("key", "a test says so")


def write_and_refuse(connection: apsw.Connection) -> object:
    connection.execute("INSERT INTO notes VALUES (999, 'x')")
    raise Rejected("key", "a test says so")


def write_and_break(connection: apsw.Connection) -> object:
    connection.execute("INSERT INTO notes VALUES (999, 'x')")
    raise ZeroDivisionError


def marks(path: Path) -> int:
    with closing(apsw.Connection(str(path))) as connection:
        return len(list(connection.execute("SELECT * FROM batches")))


async def test_operations_that_wait_together_share_one_commit(wire: Wire) -> None:
    async with writing(wire) as writer:
        jobs = [wire.note(number) for number in range(10)]
        for job in jobs:
            writer.submit(job)
        assert writer.statistics().waiting == 10
        assert [await job.outcome() for job in jobs] == list(range(1, 11))
        statistics = writer.statistics()
    assert wire.said.count("COMMIT") == 1
    assert (statistics.commits, statistics.operations, statistics.largest_batch) == (1, 10, 10)
    assert statistics.mean_batch == 10.0
    assert all(job.landed for job in jobs)


async def test_what_comes_while_a_batch_commits_goes_with_the_next(wire: Wire) -> None:
    late = wire.note(2)
    async with writing(wire) as writer:

        def work(_: apsw.Connection) -> None:
            writer.submit(late)

        first = Job(work)
        early = wire.note(1)
        writer.submit(early)
        writer.submit(first)
        assert await late.outcome() == 2
        assert writer.statistics().mean_batch == 1.5
    assert wire.notes() == [1, 2]


async def test_a_batch_has_a_limit(wire: Wire) -> None:
    async with writing(wire) as writer:
        jobs = [wire.note(number) for number in range(MAX_BATCH + 1)]
        for job in jobs:
            writer.submit(job)
        for job in jobs:
            await job.outcome()
        assert writer.statistics().commits == 2
        assert writer.statistics().largest_batch == MAX_BATCH
    assert wire.notes() == list(range(MAX_BATCH + 1))


async def test_mean_batch_of_a_writer_that_has_done_nothing_is_nought(wire: Wire) -> None:
    async with writing(wire) as writer:
        assert writer.statistics().mean_batch == 0.0
    assert wire.opened == 0


async def test_a_refusal_before_anything_was_written_costs_nobody_a_second_run(
    wire: Wire,
) -> None:
    async with writing(wire) as writer:
        jobs = [wire.note(1), Job(refuse), wire.note(2), Job(refuse), wire.note(3)]
        for job in jobs:
            writer.submit(job)
        assert await jobs[4].outcome() == 3
        with pytest.raises(Rejected):
            await jobs[1].outcome()
        assert writer.statistics().operations == 3
    assert [job.runs for job in jobs] == [1, 1, 1, 1, 1]
    assert [job.landed for job in jobs] == [True, False, True, False, True]
    assert wire.said.count("COMMIT") == 1
    assert wire.notes() == [1, 2, 3]


@pytest.mark.parametrize("failing", [write_and_refuse, write_and_break], ids=["refusal", "bug"])
@pytest.mark.parametrize("place", [0, 1, 3])
async def test_a_failure_after_something_was_written_is_rolled_back_alone(
    wire: Wire, failing: object, place: int
) -> None:
    assert callable(failing)
    others = [wire.note(number) for number in (1, 2, 3)]
    failed = Job(failing)
    jobs = [*others[:place], failed, *others[place:]]
    async with writing(wire) as writer:
        for job in jobs:
            writer.submit(job)
        assert [await job.outcome() for job in others] == [1, 2, 3]
        with pytest.raises((Rejected, ZeroDivisionError)):
            await failed.outcome()
        assert writer.statistics().operations == 3
    assert wire.notes() == [1, 2, 3]
    assert not failed.landed
    assert wire.said.count("COMMIT") == 1


async def test_several_failures_after_writing_leave_the_others_in_order(wire: Wire) -> None:
    jobs = [Job(write_and_refuse) if number % 3 == 0 else wire.note(number) for number in range(12)]
    async with writing(wire) as writer:
        for job in jobs:
            writer.submit(job)
        found = [await job.outcome() for job in jobs if job.work is not write_and_refuse]
    assert found == list(range(1, 9))
    assert wire.notes() == [number for number in range(12) if number % 3]


async def test_a_failure_only_in_the_second_run_is_rolled_back_alone_too(wire: Wire) -> None:
    def second(connection: apsw.Connection) -> object:
        connection.execute("INSERT INTO notes VALUES (500, 'x')")
        if fickle.runs == 2:
            raise Rejected("key", "a test says so")
        return None

    fickle, other, last = Job(second), wire.note(1), wire.note(2)
    async with writing(wire) as writer:
        for job in (fickle, other, Job(write_and_refuse), last):
            writer.submit(job)
        await last.outcome()
        with pytest.raises(Rejected):
            await fickle.outcome()
    assert wire.notes() == [1, 2]


async def test_a_batch_of_refusals_commits_nothing(wire: Wire) -> None:
    before = tables(wire.path)
    async with writing(wire) as writer:
        jobs = [Job(refuse) for _ in range(3)]
        for job in jobs:
            writer.submit(job)
        for job in jobs:
            with pytest.raises(Rejected):
                await job.outcome()
        assert writer.statistics().commits == 0
        assert "COMMIT" not in wire.said
        reading = Job(lambda connection: connection.execute("SELECT 1").get)
        writer.submit(reading)
        assert await reading.outcome() == 1
        assert "COMMIT" not in wire.said
    assert tables(wire.path) == before


async def test_order_is_that_of_handing_over(wire: Wire) -> None:
    order: list[int] = []

    def work(number: int, _: apsw.Connection) -> None:
        order.append(number)

    async with writing(wire) as writer:
        for number in range(50):
            writer.submit(Job(partial(work, number)))
            if number % 7 == 0:
                await wait_all_tasks_blocked()
    assert order == list(range(50))


async def test_an_operation_is_withdrawn_before_it_starts_and_not_after(wire: Wire) -> None:
    tried: list[bool] = []

    def try_to_withdraw(_: apsw.Connection) -> None:
        tried.append(writer.withdraw(started))

    async with writing(wire) as writer:
        early, started, last = wire.note(1), Job(try_to_withdraw), wire.note(2)
        for job in (early, started, last):
            writer.submit(job)
        assert writer.withdraw(early)
        await last.outcome()
        assert tried == [False]
        assert not writer.withdraw(started)
        await wait_all_tasks_blocked()
        assert not early.settled.is_set()
    assert early.runs == 0
    assert wire.notes() == [2]


async def test_a_writer_of_which_all_was_withdrawn_goes_on(wire: Wire) -> None:
    async with writing(wire) as writer:
        for _ in range(2):
            jobs = [wire.note(1), wire.note(2)]
            for job in jobs:
                writer.submit(job)
            assert [writer.withdraw(job) for job in jobs] == [True, True]
            await wait_all_tasks_blocked()
        job = wire.note(3)
        writer.submit(job)
        await job.outcome()
    assert wire.notes() == [3]


async def test_a_closed_writer_finishes_what_it_has_and_takes_nothing_more(wire: Wire) -> None:
    async with writing(wire) as writer:
        jobs = [wire.note(number) for number in range(5)]
        for job in jobs:
            writer.submit(job)
        writer.close()
        with pytest.raises(Closed) as caught:
            writer.submit(wire.note(9))
        assert (caught.value.what, caught.value.name) == ("store", "the wire")
    assert all(job.settled.is_set() for job in jobs)
    assert wire.notes() == [0, 1, 2, 3, 4]
    assert "closed" in repr(writer)


async def test_a_writer_that_ends_well_leaves_no_mark(wire: Wire) -> None:
    async with writing(wire) as writer:
        job = wire.note(1)
        writer.submit(job)
        await job.outcome()
        assert marks(wire.path) == 1
    assert marks(wire.path) == 0


async def test_a_cancellation_does_not_leave_what_was_handed_over_without_an_answer(
    wire: Wire,
) -> None:
    jobs = [wire.note(number) for number in range(3)]
    with trio.CancelScope() as scope:
        async with writing(wire) as writer:
            for job in jobs:
                writer.submit(job)
            scope.cancel()
    assert all(job.settled.is_set() for job in jobs)
    assert wire.notes() == [0, 1, 2]


async def test_a_bug_of_ours_leaves_nobody_waiting(wire: Wire) -> None:
    class Broken(Job):
        def settle(self) -> None:
            super().settle()
            if self.error is None:
                raise ZeroDivisionError

    jobs = [wire.note(1), Broken(lambda _: None), wire.note(2)]
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with writing(wire) as writer:
            for job in jobs:
                writer.submit(job)
            for job in jobs:
                await job.settled.wait()
            await trio.sleep_forever()
    assert all(job.settled.is_set() for job in jobs)
    assert isinstance(jobs[2].error, StorageError)
    assert jobs[2].error.unknown
    with pytest.raises(Closed):
        writer.submit(wire.note(3))


async def test_c50_a_busy_file_is_waited_for(wire: Wire) -> None:
    clock = Clock()
    async with writing(wire, clock) as writer:
        with locked(wire.path) as rival:

            def release() -> None:
                if len(clock.pauses) == 2_000:
                    rival.execute("COMMIT")

            clock.on_pause = release
            job = wire.note(1)
            writer.submit(job)
            assert await job.outcome() == 1
            assert writer.statistics().failure is None
    assert len(clock.pauses) == 2_000
    assert max(clock.pauses) <= JITTER_S
    assert len(set(clock.pauses)) > 1_000, "no jitter: writers would go in step"


async def test_c50_a_file_that_stays_busy_is_storage_busy_and_nothing_is_written(
    wire: Wire,
) -> None:
    clock = Clock()
    clock.step_s = 0.5
    jobs = [wire.note(number) for number in range(3)]
    before = tables(wire.path)
    async with writing(wire, clock) as writer:
        with locked(wire.path):
            for job in jobs:
                writer.submit(job)
            for job in jobs:
                with pytest.raises(StorageBusy) as caught:
                    await job.outcome()
                assert not caught.value.unknown
            assert clock.now == 1_000 + PATIENCE_S
            assert isinstance(writer.statistics().failure, StorageBusy)
            assert writer.statistics().failing_since == clock.now
        assert tables(wire.path) == before
        assert [job.runs for job in jobs] == [0, 0, 0]
        assert len({id(job.error) for job in jobs}) == 3, "each caller gets an error of his own"
        again = wire.note(5)
        writer.submit(again)
        await again.outcome()
        assert writer.statistics().failure is None
        assert writer.statistics().failing_since is None
    assert wire.notes() == [5]


async def test_c50_patience_is_measured_for_each_operation_from_its_hand_over(wire: Wire) -> None:
    clock = Clock()
    clock.step_s = 1.0
    first, second = wire.note(1), wire.note(2)
    async with writing(wire, clock) as writer:
        with locked(wire.path) as rival:

            def go_on() -> None:
                if len(clock.pauses) == 6:
                    writer.submit(second)
                if len(clock.pauses) == 14:
                    rival.execute("COMMIT")

            clock.on_pause = go_on
            writer.submit(first)
            with pytest.raises(StorageBusy):
                await first.outcome()
            assert await second.outcome() == 1
    assert wire.notes() == [2]


async def test_an_operation_that_waits_for_a_busy_file_can_be_withdrawn(wire: Wire) -> None:
    clock = Clock()
    early, staying = wire.note(1), wire.note(2)
    withdrawn: list[bool] = []
    async with writing(wire, clock) as writer:
        with locked(wire.path) as rival:

            def go_on() -> None:
                if len(clock.pauses) == 3:
                    withdrawn.append(writer.withdraw(early))
                if len(clock.pauses) == 5:
                    rival.execute("COMMIT")

            clock.on_pause = go_on
            writer.submit(early)
            writer.submit(staying)
            await staying.outcome()
    assert withdrawn == [True]
    assert early.runs == 0
    assert not early.settled.is_set()
    assert wire.notes() == [2]


async def test_a_busy_file_is_left_alone_when_the_last_that_waited_was_withdrawn(
    wire: Wire,
) -> None:
    clock = Clock()
    job = wire.note(1)
    async with writing(wire, clock) as writer:
        with locked(wire.path):

            def withdraw() -> None:
                assert len(clock.pauses) < 5, "it goes on waiting for nobody"
                if len(clock.pauses) == 3:
                    assert writer.withdraw(job)

            clock.on_pause = withdraw
            writer.submit(job)
            await wait_all_tasks_blocked()
            assert len(clock.pauses) == 3
            assert writer.statistics().failure is None
    assert not job.settled.is_set()


async def test_c50_a_caller_that_is_cancelled_while_the_file_is_busy_has_written_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path) as sessions:  # with a real thread: the loop must go on
        session = sessions["a"]
        await session.append(U("before"))
        with locked(path):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(session.append, U("cancelled"))
                    await wait_all_tasks_blocked()
                    scope.cancel()
            assert scope.cancelled_caught
            assert sessions.stats().pending == 0
        await session.append(U("after"))
        assert said(await session.transcript()) == ["before", "after"]


async def test_c50_a_file_that_is_busy_while_it_is_opened_is_waited_for(wire: Wire) -> None:
    """So it is while another process recovers the log, or closes the file as the last one."""
    clock = Clock()
    wire.open_error = StorageBusy("opening", "a test says so")

    def release() -> None:
        if len(clock.pauses) == 5:
            wire.open_error = None

    clock.on_pause = release
    async with writing(wire, clock) as writer:
        job = wire.note(1)
        writer.submit(job)
        assert await job.outcome() == 1


async def test_two_writers_on_one_file_take_turns(wire: Wire) -> None:
    async with (
        writing(wire, offload=in_thread) as one,
        writing(wire, offload=in_thread) as other,
    ):
        jobs = [wire.note(number) for number in range(200)]
        for number, job in enumerate(jobs):
            (one if number % 2 else other).submit(job)
            if number % 20 == 0:
                await job.outcome()
        for job in jobs:
            await job.outcome()
        assert one.statistics().operations == other.statistics().operations == 100
    assert wire.notes() == list(range(200))


async def test_the_writer_describes_itself(wire: Wire) -> None:
    async with writing(wire) as writer:
        writer.submit(wire.note(1))
        assert repr(writer) == "<Writer: open, 1 waiting, 0 commits>"
        await wait_all_tasks_blocked()
        assert repr(writer) == "<Writer: open, 0 waiting, 1 commits>"


async def test_group_commit_serves_sessions(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(sessions[f"s{number}"].append, U("x"))
        stats = sessions.stats()
        assert stats.operations == 100
        assert stats.mean_batch >= 50


async def test_a_thread_that_cannot_be_had_fails_what_waits_and_the_writer_goes_on(
    wire: Wire,
) -> None:
    refusals = [StorageFailed("starting a thread", "a test says so")]

    async def sometimes(work: Callable[[], T], limiter: trio.CapacityLimiter, /) -> T:
        if refusals:
            raise refusals.pop()
        return await inline(work, limiter)

    async with writing(wire, offload=sometimes) as writer:
        job = wire.note(1)
        writer.submit(job)
        with pytest.raises(StorageFailed, match="starting a thread"):
            await job.outcome()
        again = wire.note(2)
        writer.submit(again)
        assert await again.outcome() == 1
    assert wire.notes() == [2]


async def test_no_thread_is_an_error_of_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    async def bug() -> None:
        def work() -> None:
            raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match="a bug"):
            await in_thread(work, trio.CapacityLimiter(1))

    await bug()
    monkeypatch.setattr(trio.to_thread, "run_sync", no_thread)
    with pytest.raises(StorageFailed, match="can't start new thread"):
        await in_thread(lambda: None, trio.CapacityLimiter(1))
