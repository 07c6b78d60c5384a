"""The turn of a session: waited for, held, renewed, lost, taken over, and always let go.

Two stores on one file stand for two processes, on one virtual boot clock. A process that died is
faked: its store lets go of its owner's lock, as the system does for the dead.
"""

# ruff: noqa: PT012 - what comes out of a whole block is what is tested

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from random import Random
from typing import TypeVar

import apsw
import pytest
import trio
import trio.testing
from support import A, Disk, T, U, failing_disk, said, tables

from turnkeeper.actors import (
    Rejected,
    Session,
    Sessions,
    StorageError,
    StorageFailed,
    Turn,
    TurnActive,
    TurnLost,
    open_sessions,
)
from turnkeeper.actors.ask import Ask
from turnkeeper.storage import Asked, Changed, Connection, Moment, Offload, inline

Clock = trio.testing.MockClock
R = TypeVar("R")


def boot_clock() -> Moment:
    return Moment("a boot", trio.current_time())


@asynccontextmanager
async def opened(
    path: Path,
    name: str = "one",
    *,
    ttl: float = 30.0,
    wait: float = math.inf,
    max_hold: float = 3_600.0,
    grace: float = 10.0,
    vfs: str | None = None,
    offload: Offload = inline,
    monotonic: Callable[[], float] = lambda: 0.0,
) -> AsyncIterator[Sessions]:
    """A store whose name is what its turns' holders are called."""
    async with open_sessions(
        path,
        holder=name,
        turn_ttl_s=ttl,
        turn_wait_s=wait,
        turn_max_hold_s=max_hold,
        grace_s=grace,
        vfs=vfs,
        offload=offload,
        monotonic=monotonic,
        now=lambda: 1_000 + trio.current_time(),
        clock=boot_clock,
        random=Random(name),
    ) as sessions:
        yield sessions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
async def disk() -> AsyncIterator[Disk]:
    with failing_disk() as failing:
        yield failing


LONG_S = 1_000
"""As good as for ever, but a test that fails comes to an end."""


class Holder:
    """Holds a turn in a task of its own, until it is told to let go or loses it."""

    def __init__(self, session: Session, *, stuck: bool = False, force: bool = False) -> None:
        self.session = session
        self.stuck = stuck
        """Whether it takes no notice of being cancelled."""
        self.force = force
        self.entered = trio.Event()
        self.let_go = trio.Event()
        self.ended = trio.Event()
        self.scope = trio.CancelScope()
        self.error: BaseException | None = None
        self.cancelled_at: float | None = None
        self._turn: Turn | None = None

    @property
    def turn(self) -> Turn:
        assert self._turn is not None
        return self._turn

    async def run(self) -> None:
        wanted = self.session.take_over() if self.force else self.session.turn()
        try:
            with self.scope:
                async with wanted as self._turn:
                    self.entered.set()
                    try:
                        late = trio.current_time() + LONG_S
                        with trio.CancelScope(deadline=late, shield=self.stuck):
                            await self.let_go.wait()
                    except trio.Cancelled:
                        self.cancelled_at = trio.current_time()
                        raise
        except TurnLost as loss:
            self.error = loss
        finally:
            self.ended.set()


async def holding(
    nursery: trio.Nursery, session: Session, *, stuck: bool = False, force: bool = False
) -> Holder:
    """Let somebody hold the turn, from now on."""
    holder = Holder(session, stuck=stuck, force=force)
    nursery.start_soon(holder.run)
    await holder.entered.wait()
    return holder


class Refusing:
    """Counts what the writer is given to do; reads have more than one token and do not count."""

    def __init__(self) -> None:
        self.tries = 0

    async def __call__(self, work: Callable[[], R], limiter: trio.CapacityLimiter, /) -> R:
        async with limiter:
            self.tries += limiter.total_tokens == 1
            return work()


# Waiting in this process.


async def test_those_who_wait_get_it_in_the_order_in_which_they_came(
    autojump_clock: Clock, path: Path
) -> None:
    order: list[int] = []
    scopes = {n: trio.CancelScope() for n in range(2, 20, 5)}
    async with opened(path) as sessions, trio.open_nursery() as nursery:
        session = sessions["a"]

        async def want(n: int) -> None:
            if n % 5 == 2:  # cancelled in the middle of the line
                with scopes[n]:
                    async with session.turn():
                        order.append(-n)
            elif n % 5 == 4:  # out of time in the middle of the line
                with pytest.raises(TurnActive):
                    async with session.turn(wait=0.5):
                        order.append(-n)
            else:
                async with session.turn() as turn:
                    order.append(n)
                    await turn.append(U(str(n)))
                    await trio.sleep(0.1)
                    await turn.append(A(str(n)))

        holder = await holding(nursery, session)
        for n in range(20):
            nursery.start_soon(want, n)
            await trio.testing.wait_all_tasks_blocked()
        assert (sessions.stats().turns, sessions.stats().waiting_for_turn) == (1, 20)
        await trio.sleep(0.3)
        for scope in scopes.values():
            scope.cancel()
        await trio.sleep(0.3)
        assert (sessions.stats().turns, sessions.stats().waiting_for_turn) == (1, 12)
        holder.let_go.set()
        await holder.ended.wait()
    rest = [n for n in range(20) if n % 5 not in (2, 4)]
    assert order == rest
    async with opened(path) as sessions:
        assert said(await sessions["a"].transcript()) == [str(n) for n in rest for _ in "UA"]
    assert tables(path)["turns"] == []


async def test_a_turn_for_which_nobody_waits_is_tried_once(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as one, opened(path, "other") as other, trio.open_nursery() as nursery:
        holder = await holding(nursery, one["a"])
        since = trio.current_time()
        await trio.sleep(2)
        for session in (one["a"], other["a"]):
            with pytest.raises(TurnActive) as caught:
                async with session.turn(wait=0):
                    raise AssertionError("it is held")
            refusal = caught.value
            assert (refusal.session, refusal.holder, refusal.since) == ("a", "one", 1_000 + since)
            assert refusal.expires_in == 28
        assert trio.current_time() == since + 2
        holder.let_go.set()
        await holder.ended.wait()
        for session in (one["a"], other["a"]):
            async with session.turn(wait=0) as turn:
                await turn.append(U("x"))
        assert one.stats().waiting_for_turn == other.stats().waiting_for_turn == 0


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same store", "other store"])
async def test_c42_a_waiter_with_a_limit_never_runs_without_the_turn_and_writes_nothing(
    autojump_clock: Clock, path: Path, elsewhere: bool
) -> None:
    async with opened(path) as one, opened(path, "other") as other, trio.open_nursery() as nursery:
        holder = await holding(nursery, one["a"])
        waiting_store = other if elsewhere else one
        await trio.sleep(1)
        before = tables(path)
        commits = waiting_store.stats().commits
        began = trio.current_time()
        with pytest.raises(TurnActive) as caught:
            async with waiting_store["a"].turn(wait=0.05):
                raise AssertionError("it ran without the turn")
        assert trio.current_time() == pytest.approx(began + 0.05)
        assert caught.value.holder == "one"
        assert 0 < caught.value.expires_in <= 29
        assert tables(path) == before
        assert waiting_store.stats().commits == commits
        assert waiting_store.stats().waiting_for_turn == 0
        await holder.turn.append(U("still mine"))
        holder.let_go.set()


class Collapse(BaseException):
    """What no handler of errors catches."""


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same store", "other store"])
@pytest.mark.parametrize("how", ["cancelled", "raises BaseException"])
async def test_c41_after_a_holder_that_stops_early_the_next_turn_starts_in_time(
    autojump_clock: Clock, path: Path, elsewhere: bool, how: str
) -> None:
    stop = trio.Event()
    scope = trio.CancelScope()
    started: list[float] = []
    async with opened(path) as one, opened(path, "other") as other, trio.open_nursery() as nursery:

        async def hold() -> None:
            with scope:
                async with one["a"].turn() as turn:
                    await turn.append(U("1"))
                    await stop.wait()
                    raise Collapse

        async def collapse() -> None:
            try:
                await hold()
            except Collapse:
                return
            assert how == "cancelled"

        async def next_one() -> None:
            async with (other if elsewhere else one)["a"].turn():
                started.append(trio.current_time())

        nursery.start_soon(collapse)
        await trio.sleep(10)
        nursery.start_soon(next_one)
        await trio.sleep(100)
        assert started == []
        stopped = trio.current_time()
        if how == "cancelled":
            scope.cancel()
        else:
            stop.set()
        await trio.sleep(10)
        assert len(started) == 1
        # In this process at once; from another, when it next tries.
        assert started[0] - stopped <= (0.5 if elsewhere else 0)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same store", "other store"])
async def test_c41_a_waiter_that_gives_up_on_a_holder_that_hangs_changes_nothing_for_it(
    autojump_clock: Clock, path: Path, elsewhere: bool
) -> None:
    async with opened(path) as one, opened(path, "other") as other, trio.open_nursery() as nursery:
        holder = await holding(nursery, one["a"], stuck=True)
        before = tables(path)["turns"]
        with pytest.raises(TurnActive):
            async with (other if elsewhere else one)["a"].turn(wait=9):
                raise AssertionError("it is held")
        assert tables(path)["turns"] == before
        assert holder.turn.loss is None
        await holder.turn.append(U("still mine"))
        holder.let_go.set()
        with trio.fail_after(0.5):
            async with (other if elsewhere else one)["a"].turn():
                pass


async def test_c45_a_limit_that_always_gives_up_before_a_turn_can_be_had_is_refused_at_once(
    autojump_clock: Clock, path: Path, tmp_path: Path
) -> None:
    with pytest.raises(Rejected) as caught:
        async with opened(path, ttl=30, wait=29.9):
            raise AssertionError("it opened")
    assert caught.value.field == "turn_wait_s"
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240 - nobody waits for it
    async with opened(path, ttl=30, wait=30):
        pass


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("wait", -1),
        ("wait", math.nan),
        ("wait", "1"),
        ("ttl", 0.9),
        ("ttl", math.inf),
        ("ttl", True),
        ("max_hold", -0.1),
        ("max_hold", math.nan),
        ("holder", ""),
        ("holder", 7),
    ],
)
async def test_what_a_turn_cannot_be_wanted_with_is_rejected_before_anything_is_done(
    autojump_clock: Clock, path: Path, field: str, value: object
) -> None:
    async with opened(path) as sessions:
        with pytest.raises(Rejected) as caught:
            sessions["a"].turn(**{field: value})  # type: ignore[arg-type]  # wrong on purpose
        assert caught.value.field == field
        assert await sessions.list() == []


# Waiting for another process.


async def test_whoever_waits_for_another_process_tries_seldom_and_only_the_first_in_line(
    autojump_clock: Clock, path: Path
) -> None:
    work = Refusing()
    started: list[int] = []
    async with (
        opened(path) as one,
        opened(path, "other", offload=work) as other,
        trio.open_nursery() as nursery,
    ):

        async def want(n: int) -> None:
            async with other["a"].turn():
                started.append(n)

        holder = await holding(nursery, one["a"])
        before = work.tries
        for n in range(10):
            nursery.start_soon(want, n)
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(10)
        assert 20 <= work.tries - before <= 45
        before = work.tries
        await trio.sleep(100)
        assert 200 <= work.tries - before <= 400  # a quarter to half a second apart
        assert started == []
        holder.let_go.set()
        await holder.ended.wait()
        await trio.sleep(0.5)
        assert started == list(range(10))


async def test_two_that_wait_in_two_processes_both_get_it_in_the_end(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as one, opened(path, "other") as other:
        heard: list[str] = []

        async def talk(session: Session, name: str) -> None:
            for n in range(20):
                async with session.turn() as turn:
                    heard.append(name)
                    await turn.append(U(f"{name}{n}"))
                    await trio.sleep(0.05)
                    await turn.append(A(f"{name}{n}"))
                await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk, one["a"], "x")
            nursery.start_soon(talk, other["a"], "y")
        texts = said(await one["a"].transcript())
        assert texts[::2] == texts[1::2]
        assert sorted(map(str, texts[::2])) == sorted(
            f"{name}{n}" for name in "xy" for n in range(20)
        )


async def test_a_holder_whose_process_died_is_passed_at_once(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as one, opened(path, "other") as other, trio.open_nursery() as nursery:
        holder = await holding(nursery, one["a"], stuck=True)
        await holder.turn.append(A(call="c"))
        one._store.owners.close()  # a fake of its death: the lock is gone, and its turns with it
        now = trio.current_time()
        async with other["a"].turn(wait=0) as turn:
            assert trio.current_time() == now
            assert turn.token > holder.turn.token
            (call, result) = await turn.transcript()
            assert not call.synthetic
            assert result.synthetic
        holder.let_go.set()


# Nested.


async def test_a_turn_inside_ones_own_is_refused_instead_of_waiting_for_itself(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as sessions:
        session = sessions["a"]
        async with session.turn() as turn:
            for wait in (None, 0, 5):
                with trio.fail_after(0), pytest.raises(Rejected) as caught:
                    async with sessions["a"].turn(wait=wait):
                        raise AssertionError("it is held")
                assert caught.value.field == "turn"
            async with sessions["b"].turn(), sessions["c"].turn():
                assert sessions.stats().turns == 3
            assert (sessions.stats().turns, sessions.stats().waiting_for_turn) == (1, 0)
            await turn.append(U("still mine"))
        async with session.turn():  # one after the other is no nesting
            pass


# Taking over.


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same store", "other store"])
async def test_c48_a_person_takes_over_from_a_holder_that_is_stuck_and_keeps_renewing(
    autojump_clock: Clock, path: Path, elsewhere: bool
) -> None:
    async with opened(path) as one, opened(path, "other") as other, trio.open_nursery() as nursery:
        person = (other if elsewhere else one)["a"]
        holder = await holding(nursery, one["a"], stuck=True)
        await holder.turn.extend([U("1"), A(call=["c", "d"]), T("c", "r")])
        await trio.sleep(300)  # ten times as long as it would last without being renewed
        now = trio.current_time()
        async with person.take_over(holder="a person") as turn:
            assert trio.current_time() == now
            assert turn.token > holder.turn.token
            for late in (
                lambda: holder.turn.append(A("late")),
                lambda: holder.turn.extend([A("late")]),
                holder.turn.undo,
                lambda: holder.turn.rewrite([]),
            ):
                before = tables(path)
                with pytest.raises(TurnLost) as caught:
                    await late()
                assert (caught.value.session, caught.value.reason) == ("a", "taken")
                assert tables(path) == before
            found = await other["a"].holder()
            assert found is not None
            assert found.name == "a person"
            transcript = await turn.transcript()
            assert said(transcript)[:3] == ["1", None, "r"]
            assert [message.synthetic for message in transcript] == [False, False, False, True]
            assert transcript[3].body["tool_call_id"] == "d"
            await turn.append(A("better"))
        holder.let_go.set()
        await holder.ended.wait()
        assert isinstance(holder.error, TurnLost)
        assert holder.error.reason == "taken"
        assert said(await one["a"].transcript())[4:] == ["better"]
        async with one["a"].turn(wait=0), one["b"].turn():  # it can hold one again
            pass


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same store", "other store"])
async def test_a_holder_that_was_taken_over_is_cancelled_soon_though_it_writes_nothing(
    autojump_clock: Clock, path: Path, elsewhere: bool
) -> None:
    async with opened(path) as one, opened(path, "other") as other, trio.open_nursery() as nursery:
        holder = await holding(nursery, one["a"])
        await trio.sleep(3.1)
        async with (other if elsewhere else one)["a"].take_over():
            taken = trio.current_time()
            await holder.ended.wait()
            assert trio.current_time() - taken <= (0.25 if elsewhere else 0)
            assert holder.cancelled_at is not None
            assert holder.turn.loss == "taken"
            assert repr(holder.turn) == f"<Turn {holder.turn.token} in 'a': taken>"
        assert isinstance(holder.error, TurnLost)


async def test_a_turn_that_nobody_holds_is_taken_over_like_any(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as sessions:
        async with sessions["a"].take_over() as turn:
            await turn.append(U("1"))
        assert said(await sessions["a"].transcript()) == ["1"]
        assert tables(path)["turns"] == []


async def test_those_who_wait_keep_their_places_behind_one_who_takes_over(
    autojump_clock: Clock, path: Path
) -> None:
    order: list[str] = []
    async with opened(path) as sessions, trio.open_nursery() as nursery:
        session = sessions["a"]

        async def want(name: str) -> None:
            async with session.turn():
                order.append(name)
                await trio.sleep(1)

        holder = await holding(nursery, session)
        for name in "xyz":
            nursery.start_soon(want, name)
            await trio.testing.wait_all_tasks_blocked()
        async with session.take_over():
            await holder.ended.wait()
            await trio.sleep(5)
            assert order == []
            assert (sessions.stats().turns, sessions.stats().waiting_for_turn) == (1, 3)
    assert order == ["x", "y", "z"]
    assert isinstance(holder.error, TurnLost)


async def test_two_who_take_over_at_once_both_get_it_and_the_last_has_it(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as sessions, trio.open_nursery() as nursery:
        first = await holding(nursery, sessions["a"])
        second = Holder(sessions["a"], force=True)
        third = Holder(sessions["a"], force=True)
        nursery.start_soon(second.run)
        nursery.start_soon(third.run)
        await trio.testing.wait_all_tasks_blocked()
        assert first.ended.is_set()
        older, newer = sorted((second, third), key=lambda holder: holder.turn.token)
        assert older.ended.is_set()
        assert isinstance(older.error, TurnLost)
        await newer.turn.append(U("mine"))
        newer.let_go.set()
        await newer.ended.wait()
        assert newer.error is None
        async with sessions["a"].turn(wait=0):
            pass


async def test_one_who_takes_over_and_is_refused_by_storage_leaves_the_holder_as_it_was(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with opened(path, vfs=disk.name) as sessions, trio.open_nursery() as nursery:
        holder = await holding(nursery, sessions["a"])
        waiter = Holder(sessions["a"])
        nursery.start_soon(waiter.run)
        await trio.testing.wait_all_tasks_blocked()
        disk.write_error = apsw.FullError
        with pytest.raises(StorageError) as caught:
            async with sessions["a"].take_over():
                raise AssertionError("storage refused it")
        disk.write_error = None
        assert not caught.value.kept
        assert holder.turn.loss is None
        await holder.turn.append(U("still mine"))
        assert not waiter.entered.is_set()
        holder.let_go.set()
        await waiter.entered.wait()
        waiter.let_go.set()


async def test_those_who_wait_do_not_wait_for_one_whose_turn_was_taken_over(
    autojump_clock: Clock, path: Path
) -> None:
    """A person took over since it was stuck; it may be stuck for ever."""
    async with opened(path) as sessions, trio.open_nursery() as nursery:
        stuck = await holding(nursery, sessions["a"], stuck=True)
        waiter = Holder(sessions["a"])
        nursery.start_soon(waiter.run)
        await trio.testing.wait_all_tasks_blocked()
        async with sessions["a"].take_over() as turn:
            await turn.append(U("1"))
        try:
            with trio.fail_after(60):
                await waiter.entered.wait()
        finally:
            stuck.let_go.set()
            waiter.let_go.set()


async def test_those_who_wait_do_not_wait_for_one_whose_turn_another_process_took_over(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as one, opened(path, "other") as other, trio.open_nursery() as nursery:
        stuck = await holding(nursery, one["a"], stuck=True)
        async with other["a"].take_over() as turn:
            await turn.append(U("1"))
        try:
            with trio.fail_after(60):
                async with one["a"].turn():
                    pass
        finally:
            stuck.let_go.set()


async def test_those_who_wait_do_not_wait_for_one_that_is_overdue_and_has_run_out(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path, max_hold=60) as sessions, trio.open_nursery() as nursery:
        stuck = await holding(nursery, sessions["a"], stuck=True)
        try:
            with trio.fail_after(60 + 30 + 1):
                async with sessions["a"].turn():
                    pass
        finally:
            stuck.let_go.set()


# Time.


async def test_a_turn_that_is_held_for_too_long_is_cancelled_and_let_go(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as one, opened(path, "other") as other:
        began = trio.current_time()
        with pytest.raises(TurnLost) as caught:
            async with one["a"].turn(max_hold=100) as turn:
                await turn.append(U("1"))
                await trio.sleep_forever()
        assert caught.value.reason == "overdue"
        assert turn.loss == "overdue"
        assert trio.current_time() == began + 100
        assert tables(path)["turns"] == []
        for sessions in (one, other):
            async with sessions["a"].turn(wait=0) as again:
                assert said(await again.transcript()) == ["1"]
        with pytest.raises(TurnLost):
            async with one["a"].take_over(max_hold=1):
                await trio.sleep_forever()


async def test_one_that_catches_its_cancellation_and_goes_on_is_cancelled_again(
    autojump_clock: Clock, path: Path
) -> None:
    caught = 0
    async with opened(path) as sessions:
        with pytest.raises(TurnLost) as lost:
            async with sessions["a"].turn(max_hold=1) as turn:
                for _ in range(3):
                    try:
                        await turn.append(U("more"))
                        await trio.sleep_forever()
                    except trio.Cancelled:
                        caught += 1
                await trio.sleep_forever()
        assert caught == 3
        assert lost.value.reason == "overdue"
        assert said(await sessions["a"].transcript()) == ["more"]
        assert tables(path)["turns"] == []


async def test_one_that_swallows_its_cancellation_and_leaves_has_let_go_as_well(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as sessions:
        async with sessions["a"].turn(max_hold=1):
            with suppress(trio.Cancelled):
                await trio.sleep_forever()
        assert tables(path)["turns"] == []
        async with sessions["a"].turn(wait=0):
            pass


async def test_one_that_is_overdue_and_goes_on_all_the_same_is_not_renewed_and_can_be_passed(
    autojump_clock: Clock, path: Path
) -> None:
    async with (
        opened(path, max_hold=100) as one,
        opened(path, "other") as other,
        trio.open_nursery() as nursery,
    ):
        stuck = await holding(nursery, one["a"], stuck=True)
        await trio.sleep(99)
        with pytest.raises(TurnActive):
            await other["a"].append(U("too early"))
        await trio.sleep(1 + 30)
        await other["a"].append(U("in time"))
        with pytest.raises(TurnLost):
            await stuck.turn.append(A("late"))
        stuck.let_go.set()
        await stuck.ended.wait()
        assert said(await one["a"].transcript()) == ["in time"]


async def test_a_turn_of_ten_minutes_is_held_all_along_though_it_lasts_one_second_unrenewed(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as one, opened(path, "other") as other:
        async with one["a"].turn(ttl=1) as turn:
            for _ in range(1_000):
                await trio.sleep(0.6)
                found = await other["a"].holder()
                assert found is not None
                assert found.expires_in >= 0.25
            with pytest.raises(TurnActive):
                async with other["a"].turn(wait=0):
                    pass
            await turn.append(U("1"))
        assert turn.loss is None or turn.loss == "ended"
        assert await other["a"].holder() is None


async def test_a_turn_that_cannot_be_renewed_for_a_while_is_kept_if_nobody_passed_it(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with opened(path, vfs=disk.name) as one, opened(path, "other") as other:
        async with one["a"].turn(ttl=1) as turn:
            await trio.sleep(1)
            disk.write_error = apsw.IOError
            await trio.sleep(20)
            found = await other["a"].holder()
            assert found is not None
            assert found.expires_in == 0
            disk.write_error = None
            await trio.sleep(0.25)
            found = await other["a"].holder()
            assert found is not None
            assert found.expires_in > 0.7
            await turn.append(U("1"))
        assert said(await other["a"].transcript()) == ["1"]


async def test_a_turn_is_kept_while_another_process_holds_the_file(
    autojump_clock: Clock, path: Path
) -> None:
    patience = itertools.count(0, 2)  # every look at this clock finds it two seconds later
    async with opened(path, monotonic=lambda: float(next(patience))) as sessions:
        async with sessions["a"].turn(ttl=1) as turn:
            with closing(apsw.Connection(str(path))) as somebody:
                somebody.execute("BEGIN IMMEDIATE")
                await trio.sleep(20)
                somebody.execute("ROLLBACK")
            await trio.sleep(0.25)
            found = await sessions["a"].holder()
            assert found is not None
            assert found.expires_in > 0.7
            await turn.append(U("1"))
        assert said(await sessions["a"].transcript()) == ["1"]


async def test_c44_a_turn_that_has_run_out_and_was_not_passed_is_renewed_by_the_next_write(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with opened(path, vfs=disk.name) as one, opened(path, "other") as other:
        async with one["a"].turn(ttl=1) as turn:
            disk.write_error = apsw.IOError  # stands for a process that is stopped
            await trio.sleep(3.1)
            found = await other["a"].holder()
            assert found is not None
            assert found.expires_in == 0
            disk.write_error = None
            await turn.append(A("1"))  # before the keeper has looked again
            assert trio.current_time() == 3.1
            found = await other["a"].holder()
            assert found is not None
            assert found.expires_in == pytest.approx(1)
            with pytest.raises(TurnActive):
                await other["a"].append(U("x"))
        assert said(await other["a"].transcript()) == ["1"]


@pytest.mark.parametrize("rival", ["append", "turn"])
async def test_c44_a_turn_that_has_run_out_and_was_passed_is_lost_and_can_be_had_again_later(
    autojump_clock: Clock, path: Path, disk: Disk, rival: str
) -> None:
    async with opened(path, vfs=disk.name) as one, opened(path, "other") as other:
        with pytest.raises(TurnLost) as caught:
            async with one["a"].turn(ttl=1) as turn:
                await turn.extend([U("1"), A(call="c")])
                disk.write_error = apsw.IOError  # stands for a process that is stopped
                await trio.sleep(3.1)
                if rival == "append":
                    await other["a"].append(U("2"))
                else:
                    async with other["a"].turn(wait=0) as theirs:
                        assert theirs.token > turn.token
                        await theirs.append(U("2"))
                disk.write_error = None
                with pytest.raises(TurnLost) as refused:
                    await turn.append(A("late"))
                assert refused.value.reason == "taken"
                await trio.sleep(0.5)
                raise AssertionError("it was not cancelled")
        assert caught.value.reason == "taken"
        transcript = await one["a"].transcript()
        assert said(transcript)[::3] == ["1", "2"]
        assert [message.synthetic for message in transcript] == [False, False, True, False]
        assert tables(path)["turns"] == []
        async with one["a"].turn(wait=0) as again:
            await again.append(A("in time"))
        assert said(await other["a"].transcript())[4:] == ["in time"]


async def test_a_holder_that_writes_nothing_notices_soon_that_somebody_wrote_past_it(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with (
        opened(path, vfs=disk.name, ttl=1) as one,
        opened(path, "other") as other,
        trio.open_nursery() as nursery,
    ):
        holder = await holding(nursery, one["a"])
        disk.write_error = apsw.IOError  # stands for a process that is stopped
        await trio.sleep(3.1)
        await other["a"].append(U("2"))
        disk.write_error = None
        woken = trio.current_time()
        await holder.ended.wait()
        assert holder.cancelled_at is not None
        assert holder.cancelled_at - woken < 1
        assert isinstance(holder.error, TurnLost)


async def test_what_a_lost_turn_had_pending_goes_beside_the_transcript(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with opened(path, vfs=disk.name) as one, opened(path, "other") as other:
        with pytest.raises(TurnLost):
            async with one["a"].turn(ttl=1) as turn:
                await turn.append(U("1"))
                disk.write_error = apsw.IOError
                with pytest.raises(StorageFailed) as caught:
                    await turn.append(A("pending"))
                assert caught.value.kept
                await trio.sleep(2)
                await other["a"].append(U("2"))
                disk.write_error = None
                await trio.sleep_forever()
        await trio.sleep(60)
        assert one.health().pending == 0
        assert said(await one["a"].transcript()) == ["1", "2"]
        everything = {
            message.body["content"]: message.state for message in await one["a"].all_messages()
        }
        assert everything.keys() == {"1", "2", "pending"}
        assert everything["pending"] != "live"


# The object.


async def test_a_turn_says_what_it_is(autojump_clock: Clock, path: Path) -> None:
    async with opened(path) as sessions:
        await trio.sleep(5)
        async with sessions["a"].turn() as first:
            assert first.since == 1_005
            assert (first.messages, first.attempt, first.loss) == ((), 0, None)
            assert repr(first) == f"<Turn {first.token} in 'a': held>"
            assert (sessions.stats().turns, sessions.stats().waiting_for_turn) == (1, 0)
        assert first.loss is None
        assert repr(first) == f"<Turn {first.token} in 'a': ended>"
        async with sessions["b"].turn() as second, sessions["a"].turn() as third:
            assert first.token < second.token < third.token


async def test_a_turn_whose_block_has_ended_changes_nothing_any_more(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as sessions:
        async with sessions["a"].turn() as turn:
            await turn.append(U("1"), key="k")
        async with sessions["a"].turn():  # whoever holds it now
            for late in (
                lambda: turn.append(U("x")),
                lambda: turn.append(U("1"), key="k"),
                lambda: turn.extend([U("x")]),
                turn.undo,
                turn.retry,
                turn.redo,
                lambda: turn.rewrite([]),
                lambda: turn.restore(1),
            ):
                with pytest.raises(TurnLost) as caught:
                    await late()
                assert (caught.value.session, caught.value.reason) == ("a", "ended")
        assert said(await turn.transcript()) == ["1"]


async def test_a_turn_that_was_lost_says_so_after_its_block_as_well(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as sessions:
        with pytest.raises(TurnLost):
            async with sessions["a"].turn(max_hold=1) as turn:
                await trio.sleep_forever()
        with pytest.raises(TurnLost) as caught:
            await turn.append(U("x"))
        assert caught.value.reason in ("overdue", "ended")


async def test_a_turn_whose_end_storage_refused_changes_nothing_any_more(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with opened(path, vfs=disk.name) as sessions:
        with pytest.raises(StorageFailed):
            async with sessions["a"].turn() as turn:
                await turn.append(U("1"))
                disk.write_error = apsw.IOError
        disk.write_error = None
        with pytest.raises(TurnLost) as caught:
            await turn.append(A("late"))
        assert caught.value.reason == "ended"
        assert said(await sessions["a"].transcript()) == ["1"]


# What comes out of the block.


class Sorry(Exception):
    """A handler's own error."""


async def test_an_error_of_the_block_comes_out_as_it_is_and_the_turn_is_let_go(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as sessions:
        error = Sorry("mine")
        with pytest.raises(Sorry) as caught:
            async with sessions["a"].turn() as turn:
                await turn.append(U("1"))
                raise error
        assert caught.value is error
        assert not hasattr(error, "__notes__")
        assert tables(path)["turns"] == []


@pytest.mark.parametrize("noticed", [False, True], ids=["before it is noticed", "when cancelled"])
async def test_an_error_of_the_block_comes_out_though_the_turn_was_lost(
    autojump_clock: Clock, path: Path, noticed: bool
) -> None:
    async with opened(path) as one, opened(path, "other") as other:
        with pytest.raises(Sorry):
            async with one["a"].turn() as turn:
                with trio.CancelScope(shield=True):
                    async with other["a"].take_over() as theirs:
                        await theirs.append(U("theirs"))
                try:
                    if noticed:
                        await trio.sleep_forever()
                finally:
                    raise Sorry
        assert turn.loss == "taken"
        async with one["a"].turn(wait=0) as again:
            assert said(await again.transcript()) == ["theirs"]


async def test_a_block_that_ends_well_after_its_turn_was_taken_is_told(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as one, opened(path, "other") as other:
        with pytest.raises(TurnLost) as caught:
            async with one["a"].turn():
                with trio.CancelScope(shield=True):
                    async with other["a"].take_over():
                        pass
        assert caught.value.reason == "taken"
        async with one["a"].turn(wait=0):
            pass


async def test_a_block_that_catches_the_loss_and_ends_well_is_told_again(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as one, opened(path, "other") as other:
        with pytest.raises(TurnLost):
            async with one["a"].turn() as turn:
                with trio.CancelScope(shield=True):
                    async with other["a"].take_over():
                        pass
                    with pytest.raises(TurnLost):
                        await turn.append(U("late"))
        assert await one["a"].info() is not None
        assert said(await one["a"].transcript()) == []


async def test_of_a_group_of_errors_only_our_own_cancellation_is_taken_out(
    autojump_clock: Clock, path: Path
) -> None:
    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            raise Sorry("in a task") from None

    async with opened(path) as sessions:
        with pytest.raises(ExceptionGroup) as caught:
            async with sessions["a"].turn(max_hold=1) as turn, trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                nursery.start_soon(fail_when_cancelled)
        assert [type(error) for error in caught.value.exceptions] == [Sorry]
        assert turn.loss == "overdue"
        assert tables(path)["turns"] == []


async def test_a_nursery_in_which_all_was_cancelled_by_the_loss_is_one_loss(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as sessions:
        with pytest.raises(TurnLost):
            async with sessions["a"].turn(max_hold=1), trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(trio.sleep_forever)
        assert tables(path)["turns"] == []


@pytest.mark.parametrize("loss", ["overdue", "taken"])
async def test_a_cancellation_from_outside_stays_one_though_the_turn_is_lost_at_the_same_time(
    autojump_clock: Clock, path: Path, loss: str
) -> None:
    async with opened(path) as sessions:
        raised: list[BaseException] = []
        with trio.CancelScope() as outside:
            try:
                async with sessions["a"].turn(max_hold=1 if loss == "overdue" else 9) as turn:
                    if loss == "overdue":
                        outside.deadline = trio.current_time() + 1
                    else:
                        turn.lost("taken")  # what taking over in this process does
                        outside.cancel()
                    await trio.sleep(60)
            except BaseException as error:
                raised.append(error)
                raise
        assert outside.cancelled_caught
        assert [type(error) for error in raised] == [trio.Cancelled]
        assert sessions.stats().turns == sessions.stats().waiting_for_turn == 0


async def test_the_end_is_written_though_the_block_was_cancelled_from_outside(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as sessions:
        with trio.move_on_after(1) as outside:
            async with sessions["a"].turn() as turn:
                await turn.append(A(call="c"))
                await trio.sleep(60)
        assert outside.cancelled_caught
        assert [message.synthetic for message in await sessions["a"].transcript()] == [False, True]
        assert tables(path)["turns"] == []


# Storage that does not take the end.


async def refused_end(sessions: Sessions, disk: Disk) -> StorageError:
    """End a turn of "a", with an open call, that storage does not take."""
    with pytest.raises(StorageFailed) as caught:
        async with sessions["a"].turn() as turn:
            await turn.extend([U("1"), A(call="c")])
            disk.write_error = apsw.IOError
    return caught.value


async def test_an_end_that_storage_refuses_is_told_kept_and_done_by_itself(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with opened(path, vfs=disk.name) as one, opened(path, "other") as other:
        error = await refused_end(one, disk)
        assert (error.kept, error.unknown) == (True, False)
        assert one.stats().turns == one.stats().waiting_for_turn == 0
        await trio.sleep(5)
        assert await other["a"].holder() is not None
        disk.write_error = None
        await trio.sleep(7)  # its time to live is not over
        assert await other["a"].holder() is None
        transcript = await other["a"].transcript()
        assert [message.synthetic for message in transcript] == [False, False, True]
        assert tables(path)["turns"] == []


async def test_an_end_that_storage_refuses_is_done_with_the_next_change_and_refuses_nobody_here(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with opened(path, vfs=disk.name) as sessions:
        await refused_end(sessions, disk)
        disk.write_error = None
        now = trio.current_time()
        receipt = await sessions["a"].append(U("2"))
        assert (trio.current_time(), receipt.position) == (now, 4)
        transcript = await sessions["a"].transcript()
        assert [message.synthetic for message in transcript] == [False, False, True, False]
        assert tables(path)["turns"] == []


@pytest.mark.parametrize("force", [False, True], ids=["turn", "take_over"])
async def test_those_who_wait_here_get_the_turn_whose_end_storage_refused_without_waiting_for_it(
    autojump_clock: Clock, path: Path, disk: Disk, force: bool
) -> None:
    async with opened(path, vfs=disk.name) as sessions:
        session = sessions["a"]
        await refused_end(sessions, disk)
        disk.write_error = None
        now = trio.current_time()
        async with session.take_over() if force else session.turn() as turn:
            assert trio.current_time() == now
            transcript = await turn.transcript()
            assert [message.synthetic for message in transcript] == [False, False, True]
            await turn.append(A("2"))
            await trio.sleep(60)  # nothing that is done later ends this one
            await turn.append(A("3"))
        assert tables(path)["turns"] == []


async def test_an_actor_is_not_dropped_while_the_end_of_a_turn_is_to_be_written(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with opened(path, vfs=disk.name) as sessions:
        await refused_end(sessions, disk)
        assert sessions.drop_idle() == 0
        disk.write_error = None
        await trio.sleep(1)
        assert sessions.drop_idle() == 1


async def test_an_end_that_storage_refuses_is_written_when_the_store_closes(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with opened(path, vfs=disk.name) as sessions:
        await refused_end(sessions, disk)
        disk.write_error = None
    assert tables(path)["turns"] == []
    assert len(tables(path)["messages"]) == 3


async def test_an_error_of_the_block_comes_out_with_a_note_of_what_storage_said(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with opened(path, vfs=disk.name) as sessions:
        with pytest.raises(Sorry) as caught:
            async with sessions["a"].turn() as turn:
                await turn.append(U("1"))
                disk.write_error = apsw.IOError
                raise Sorry
        assert len(caught.value.__notes__) == 1
        assert caught.value.__notes__[0].startswith("the end of the turn: ")
        assert "do not send it again" in caught.value.__notes__[0]
        disk.write_error = None
        async with sessions["a"].turn(wait=0):
            pass


async def test_the_end_takes_what_is_pending_along_and_closes_the_calls_in_it(
    autojump_clock: Clock, path: Path, disk: Disk
) -> None:
    async with opened(path, vfs=disk.name) as sessions:
        async with sessions["a"].turn() as turn:
            await turn.append(U("1"))
            disk.write_error = apsw.IOError
            with pytest.raises(StorageFailed) as caught:
                await turn.append(A(call="c"))
            assert caught.value.kept
            disk.write_error = None
        assert sessions.health().pending == 0
        transcript = await sessions["a"].transcript()
        assert [message.synthetic for message in transcript] == [False, False, True]


# A store with turns in it.


async def test_closing_the_store_ends_the_turns_that_are_held_and_sends_those_who_wait_away(
    autojump_clock: Clock, path: Path
) -> None:
    errors: dict[str, BaseException] = {}

    async def note(name: str, session: Session) -> None:
        try:
            async with session.turn() as turn:
                await turn.append(A(call="c"))
                await trio.sleep_forever()
        except Exception as error:
            errors[name] = error

    async with trio.open_nursery() as nursery:
        async with opened(path) as sessions:
            nursery.start_soon(note, "holder", sessions["a"])
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(note, "waiter", sessions["a"])
            await trio.testing.wait_all_tasks_blocked()
            now = trio.current_time()
        assert trio.current_time() == now
    assert isinstance(errors["holder"], TurnLost)
    assert errors["holder"].reason == "closed"
    assert type(errors["waiter"]).__name__ == "Closed"
    assert tables(path)["turns"] == []
    assert len(tables(path)["messages"]) == 2


async def test_a_holder_that_does_not_stop_does_not_keep_the_store_open_and_its_turn_is_dead(
    autojump_clock: Clock, path: Path
) -> None:
    """Once the store is closed its owner's lock is gone, and the next one passes at once."""
    errors: list[BaseException] = []
    let_go = trio.Event()

    async def hang(session: Session) -> None:
        try:
            async with session.turn():
                late = trio.current_time() + LONG_S
                with trio.CancelScope(deadline=late, shield=True):
                    await let_go.wait()
        except Exception as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        async with opened(path, grace=5) as sessions:
            nursery.start_soon(hang, sessions["a"])
            await trio.testing.wait_all_tasks_blocked()
            now = trio.current_time()
        assert trio.current_time() == now + 5
        async with opened(path, "other") as other, other["a"].turn(wait=0) as turn:
            await turn.append(U("1"))
        let_go.set()
    assert [type(error).__name__ for error in errors] in (["Closed"], ["TurnLost"])


async def test_an_actor_whose_turn_is_held_or_waited_for_is_not_dropped(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as one, opened(path, "other") as other, trio.open_nursery() as nursery:
        holder = await holding(nursery, one["a"])
        waiter = Holder(other["a"])
        nursery.start_soon(waiter.run)
        await trio.sleep(60)
        for sessions in (one, other):
            actor = sessions._registry.resident("a")
            assert sessions.drop_idle() == 0
            assert sessions._registry.resident("a") is actor
        holder.let_go.set()
        await waiter.entered.wait()
        assert one.drop_idle() == 1
        waiter.let_go.set()
        await waiter.ended.wait()
        assert other.drop_idle() == 1


class Bug(RuntimeError):
    """A mistake of ours."""


class Faulty:
    """A message whose change fails as only a bug does."""

    def change(self, _: Connection, __: Asked, /) -> Changed[None]:
        raise Bug


async def test_an_actor_that_fails_leaves_the_turn_to_its_holder_and_the_others_in_line(
    autojump_clock: Clock, path: Path
) -> None:
    order: list[str] = []
    async with opened(path) as sessions, trio.open_nursery() as nursery:
        session = sessions["a"]

        async def want(name: str) -> None:
            async with session.turn() as turn:
                order.append(name)
                await turn.append(U(name))

        holder = await holding(nursery, session)
        for name in "xy":
            nursery.start_soon(want, name)
            await trio.testing.wait_all_tasks_blocked()
        failed = sessions._registry.resident("a")
        ask = Ask(Faulty())
        sessions._registry.wake("a").deliver(ask)
        with pytest.raises(Bug):
            await ask.answer()
        assert sessions.stats().failures == 1
        assert sessions._registry.resident("a") is not failed
        assert (sessions.stats().turns, sessions.stats().waiting_for_turn) == (1, 2)
        await holder.turn.append(U("the holder's"))
        nursery.start_soon(want, "z")  # behind those who came before
        await trio.testing.wait_all_tasks_blocked()
        assert order == []
        holder.let_go.set()
    assert order == ["x", "y", "z"]
    assert tables(path)["turns"] == []
