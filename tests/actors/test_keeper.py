"""The keeper of the turns that a process holds: cheap, punctual, and not to be upset by storage."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing

from turnkeeper.actors import StorageBusy, StorageError, StorageFailed, open_sessions
from turnkeeper.actors.keeper import LEAST_TTL_S, LOOK_S, Keeper
from turnkeeper.storage import LossReason, Moment, Store, inline


class Storage:
    """What a keeper asks of a store, noted; it answers as it is told."""

    def __init__(self) -> None:
        self.renewed: list[tuple[float, dict[int, float]]] = []
        self.asked: list[list[tuple[int, int]]] = []
        self.gone: set[int] = set()
        self.heard: set[int] = set()
        self.error: StorageError | None = None
        self.busy_s = 0.0
        """How long a renewal takes."""

    def clock(self) -> Moment:
        return Moment("a boot", trio.current_time())

    async def renew(self, held: Iterable[tuple[int, float]]) -> Collection[int]:
        due = dict(held)
        await trio.sleep(self.busy_s)
        if self.error is not None:
            raise self.error
        self.renewed.append((trio.current_time(), due))
        return [token for token in due if token in self.gone]

    async def troubled(
        self, held: Collection[tuple[int, int]]
    ) -> tuple[Collection[int], Collection[int]]:
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        self.asked.append(list(held))
        tokens = [token for _, token in held]
        return (
            [token for token in tokens if token in self.gone],
            [token for token in tokens if token in self.heard],
        )


class Held:
    """A turn that is held."""

    def __init__(self, token: int, ttl_s: float = 30.0) -> None:
        self.token = token
        self.ttl_s = ttl_s
        self.renew_at = 0.0
        self.life = 1_000 + token
        self.overdue = False
        self.losses: list[tuple[float, LossReason]] = []

    def lost(self, reason: LossReason) -> None:
        self.losses.append((trio.current_time(), reason))


@pytest.fixture
def storage() -> Storage:
    return Storage()


@asynccontextmanager
async def keeping(storage: Storage) -> AsyncIterator[tuple[Keeper, trio.lowlevel.Task]]:
    keeper = Keeper(cast(Store, storage))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        (task,) = nursery.child_tasks
        await trio.testing.wait_all_tasks_blocked()
        yield keeper, task
        nursery.cancel_scope.cancel()


class Steps(trio.abc.Instrument):
    """Counts how often a task is run, or any, while it is looked at."""

    def __init__(self, task: trio.lowlevel.Task | None = None) -> None:
        self.task = task
        self.taken = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.taken += self.task is None or task is self.task

    def __enter__(self) -> Steps:
        trio.lowlevel.add_instrument(self)
        return self

    def __exit__(self, *_: object) -> None:
        trio.lowlevel.remove_instrument(self)


async def test_while_nothing_is_held_it_does_not_run_at_all(
    autojump_clock: trio.testing.MockClock, storage: Storage
) -> None:
    async with keeping(storage) as (keeper, task):
        with Steps(task) as steps:
            await trio.sleep(3_600)
        assert steps.taken == 0
        turn = Held(1)
        keeper.hold(turn)
        await trio.sleep(1)
        keeper.let_go(turn)
        await trio.sleep(2 * LOOK_S)  # it looks once more and sees that nothing is left
        questions = len(storage.asked)
        with Steps(task) as steps:
            await trio.sleep(3_600)
        assert steps.taken == 0
        assert len(storage.asked) == questions
        keeper.hold(turn)  # and it wakes again
        await trio.sleep(1)
        assert len(storage.asked) > questions


async def test_an_open_store_in_which_no_turn_is_held_any_more_does_not_run_at_all(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    def clock() -> Moment:
        return Moment("a boot", trio.current_time())

    async with open_sessions(tmp_path / "state.db", offload=inline, clock=clock) as sessions:
        async with sessions["a"].turn():
            await trio.sleep(60)
        await trio.sleep(1)
        with Steps() as steps:
            await trio.sleep(3_600)
        assert steps.taken == 1  # this test's own


async def test_many_turns_are_one_question(
    autojump_clock: trio.testing.MockClock, storage: Storage
) -> None:
    async with keeping(storage) as (keeper, _):
        turns = [Held(token) for token in range(1, 101)]
        for turn in turns:
            keeper.hold(turn)
        await trio.sleep(9 + LOOK_S / 2)
        assert storage.renewed == []
        assert len(storage.asked) == 9 / LOOK_S + 1
        everybody = [(turn.life, turn.token) for turn in turns]
        assert all(question == everybody for question in storage.asked)
        await trio.sleep(1)
        assert [sorted(due) for _, due in storage.renewed] == [list(range(1, 101))]


async def test_a_turn_is_renewed_for_its_own_time_when_a_third_of_that_has_passed(
    autojump_clock: trio.testing.MockClock,
    storage: Storage,
) -> None:
    async with keeping(storage) as (keeper, _):
        keeper.hold(Held(1, ttl_s=LEAST_TTL_S))
        keeper.hold(Held(2, ttl_s=30))
        await trio.sleep(60 + LOOK_S / 2)
    short = [at for at, due in storage.renewed if 1 in due]
    long = [at for at, due in storage.renewed if 2 in due]
    pauses = [after - before for before, after in zip([0.0, *short], short, strict=False)]
    assert set(pauses) == {2 * LOOK_S}  # a third, at the next look
    assert long == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert all(
        due[token] == {1: 1.0, 2: 30.0}[token] for _, due in storage.renewed for token in due
    )


async def test_a_turn_that_was_lost_or_is_interrupted_is_told_at_the_next_look_and_no_other(
    autojump_clock: trio.testing.MockClock,
    storage: Storage,
) -> None:
    async with keeping(storage) as (keeper, _):
        turns = [Held(token) for token in (1, 2, 3)]
        for turn in turns:
            keeper.hold(turn)
        await trio.sleep(1.1)
        storage.gone.add(1)
        storage.heard.add(3)
        await trio.sleep(LOOK_S)
        assert [turn.losses[:1] for turn in turns] == [
            [(1.25, "taken")],
            [],
            [(1.25, "interrupted")],
        ]


async def test_a_turn_that_cannot_be_renewed_for_it_is_lost_is_told(
    autojump_clock: trio.testing.MockClock, storage: Storage
) -> None:
    async with keeping(storage) as (keeper, _):
        turn = Held(1)
        keeper.hold(turn)
        await trio.sleep(9.9)
        storage.gone.add(1)
        await trio.sleep(0.2)
        assert turn.losses[0] == (10.0, "taken")
        assert len(storage.renewed) == 1


async def test_a_turn_that_ends_while_it_is_looked_at_is_told_nothing(
    autojump_clock: trio.testing.MockClock, storage: Storage
) -> None:
    async with keeping(storage) as (keeper, _):
        turn = Held(1)
        keeper.hold(turn)
        storage.busy_s = 0.1
        await trio.sleep(10.05)  # in the middle of a renewal
        storage.gone.add(1)
        keeper.let_go(turn)
        await trio.sleep(1)
        assert turn.losses == []


async def test_a_turn_that_was_held_for_too_long_is_neither_renewed_nor_asked_about(
    autojump_clock: trio.testing.MockClock,
    storage: Storage,
) -> None:
    async with keeping(storage) as (keeper, _):
        late, other = Held(1), Held(2)
        keeper.hold(late)
        keeper.hold(other)
        late.overdue = True
        await trio.sleep(11)
        assert [list(due) for _, due in storage.renewed] == [[2]]
        assert storage.asked[-1] == [(other.life, 2)]


@pytest.mark.parametrize("error", [StorageFailed("x"), StorageBusy("x")])
async def test_what_storage_refuses_is_tried_at_every_look_and_upsets_nobody(
    autojump_clock: trio.testing.MockClock,
    storage: Storage,
    error: StorageError,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="turnkeeper"):
        async with keeping(storage) as (keeper, _):
            turn = Held(1, ttl_s=3)
            keeper.hold(turn)
            storage.error = error
            await trio.sleep(20)
            assert turn.losses == []
            assert caplog.records
            assert type(error).__name__ in caplog.messages[0]
            storage.error = None
            await trio.sleep(LOOK_S)
            assert len(storage.renewed) == 1
            await trio.sleep(1)
            assert len(storage.renewed) == 2  # a third of its time later


async def test_it_says_how_many_it_keeps_and_returns_when_all_are_let_go(
    autojump_clock: trio.testing.MockClock, storage: Storage
) -> None:
    async with keeping(storage) as (keeper, _), trio.open_nursery() as nursery:
        turns = [Held(1), Held(2)]
        for turn in turns:
            keeper.hold(turn)
        assert len(keeper) == 2
        assert repr(keeper) == "<Keeper: 2 turns>"
        emptied = trio.Event()

        async def wait() -> None:
            await keeper.emptied()
            emptied.set()

        nursery.start_soon(wait)
        keeper.let_go(turns[0])
        await trio.sleep(1)
        assert not emptied.is_set()
        keeper.let_go(turns[1])
        keeper.let_go(turns[1])  # twice does no harm
        with trio.fail_after(0.1):
            await emptied.wait()
        assert len(keeper) == 0


async def test_closing_tells_every_turn(
    autojump_clock: trio.testing.MockClock, storage: Storage
) -> None:
    async with keeping(storage) as (keeper, _):
        turns = [Held(1), Held(2)]
        for turn in turns:
            keeper.hold(turn)
        keeper.close()
        assert [turn.losses for turn in turns] == [[(0.0, "closed")]] * 2
