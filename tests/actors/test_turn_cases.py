"""Cases of turns, by their numbers: calls left open, forks, long turns, and stops at every step.

Two stores on one file stand for two processes, on one virtual boot clock. A process that died is
faked: its store lets go of its owner's lock, as the system does for the dead.
"""

# ruff: noqa: PT012 - what comes out of a whole block is what is tested

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TypeAlias, TypeVar

import apsw
import pytest
import trio
import trio.testing
from support import A, T, U, failing_disk, said, tables

from turnkeeper.actors import (
    Session,
    Sessions,
    StorageFailed,
    Turn,
    TurnLost,
    open_sessions,
)
from turnkeeper.actors.conversation import open_calls
from turnkeeper.storage import Moment, Offload, inline

Clock = trio.testing.MockClock
R = TypeVar("R")


def boot_clock() -> Moment:
    return Moment("a boot", trio.current_time())


@asynccontextmanager
async def opened(
    path: Path, name: str = "one", *, vfs: str | None = None, offload: Offload = inline
) -> AsyncIterator[Sessions]:
    async with open_sessions(
        path,
        holder=name,
        vfs=vfs,
        offload=offload,
        now=lambda: 1_000 + trio.current_time(),
        clock=boot_clock,
        random=Random(name),
    ) as sessions:
        yield sessions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


# C30: the calls that a turn leaves open.


class Sorry(Exception):
    """A handler's own error."""


class Ends:
    """The ways in which a turn ends, each with how often a transaction is committed for it."""

    def __init__(self, one: Sessions, other: Sessions) -> None:
        self.one = one
        self.other = other

    async def well(self, turn: Turn) -> None:
        pass

    async def cancelled(self, turn: Turn) -> None:
        with trio.move_on_after(1):
            await trio.sleep_forever()
        raise trio.TooSlowError  # as `fail_after` says it

    async def raises(self, turn: Turn) -> None:
        raise Sorry

    async def overdue(self, turn: Turn) -> None:
        await trio.sleep_forever()

    async def taken_over_here(self, turn: Turn) -> None:
        with trio.CancelScope(shield=True):
            async with self.one["a"].take_over():
                pass

    async def taken_over_elsewhere(self, turn: Turn) -> None:
        with trio.CancelScope(shield=True):
            async with self.other["a"].take_over():
                pass

    async def dies_and_is_followed_by_a_turn(self, turn: Turn) -> None:
        self.one._store.owners.close()
        with trio.CancelScope(shield=True):
            async with self.other["a"].turn(wait=0):
                pass

    async def dies_and_is_followed_by_an_append(self, turn: Turn) -> None:
        self.one._store.owners.close()
        await self.other["a"].append(U("next"))

    async def dies_and_is_followed_by_an_undo(self, turn: Turn) -> None:
        self.one._store.owners.close()
        await self.other["a"].undo()
        await self.other["a"].redo()


WAYS = [name for name in vars(Ends) if not name.startswith("_")]


@pytest.mark.parametrize("way", WAYS)
async def test_c30_however_a_turn_ends_the_calls_that_it_left_open_get_a_result(
    autojump_clock: Clock, path: Path, way: str
) -> None:
    async with opened(path) as one, opened(path, "other") as other:
        await one["a"].extend([U("before"), A("b")])
        try:
            async with one["a"].turn(max_hold=10) as turn:
                await turn.extend([U("1"), A(call=["c1", "c2"]), T("c1", "r")])
                await getattr(Ends(one, other), way)(turn)
        except (Sorry, TurnLost, trio.TooSlowError):
            pass
        transcript = await other["a"].transcript()
        assert said(transcript)[:5] == ["before", "b", "1", None, "r"]
        result = transcript[5]
        assert result.synthetic
        assert (result.body["role"], result.body["tool_call_id"]) == ("tool", "c2")
        assert not result.opens_turn
        assert [message.synthetic for message in transcript].count(True) == 1
        assert list(open_calls(transcript.bodies)) == []
        assert said(transcript)[6:] == (["next"] if way.endswith("append") else [])
        positions = [message.position for message in transcript]
        assert positions == list(range(1, len(positions) + 1))
        assert tables(path)["turns"] == []


async def test_c30_a_cancelled_turn_gives_them_in_the_transaction_that_ends_it(
    autojump_clock: Clock, path: Path
) -> None:
    with failing_disk() as disk:
        async with opened(path, vfs=disk.name) as sessions:
            with trio.move_on_after(1):
                async with sessions["a"].turn() as turn:
                    await turn.extend([U("1"), A(call=["c1", "c2"]), T("c1", "r")])
                    commits = sessions.stats().commits
                    await trio.sleep(60)
            assert sessions.stats().commits == commits + 1
            assert len(tables(path)["messages"]) == 4
            # And with the transaction, neither is there.
            with pytest.raises(StorageFailed):
                async with sessions["a"].turn() as turn:
                    await turn.extend([U("2"), A(call="c3")])
                    disk.write_error = apsw.IOError
            assert len(tables(path)["messages"]) == 6
            assert len(tables(path)["turns"]) == 1
            disk.write_error = None
            commits = sessions.stats().commits
            await trio.sleep(10)
            assert sessions.stats().commits == commits + 1
            assert len(tables(path)["messages"]) == 7
            assert tables(path)["turns"] == []


async def test_c30_a_call_in_the_other_shape_gets_its_result_in_that_shape(
    autojump_clock: Clock, path: Path
) -> None:
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    async with opened(path) as sessions:
        async with sessions["a"].turn() as turn:
            await turn.extend([U("1"), {"role": "assistant", "content": [call]}])
        transcript = await sessions["a"].transcript()
        assert transcript[2].synthetic
        content = transcript[2].body["content"]
        assert isinstance(content, list)
        assert (content[0]["type"], content[0]["tool_use_id"]) == ("tool_result", "c")
        assert not transcript[2].opens_turn
        undone = await sessions["a"].undo()
        assert undone is not None
        assert (undone.turns, undone.messages) == (1, 3)


async def test_c30_a_call_of_the_same_exchange_from_before_the_turn_is_closed_as_well(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as sessions:
        await sessions["a"].extend([U("1"), A(call="c")])
        async with sessions["a"].turn() as turn:
            await turn.append(A(call="d"))
            await sessions["a"].append(U("in between"), interleave=True)
        transcript = await sessions["a"].transcript()
        assert list(open_calls(transcript.bodies)) == []
        assert [message.synthetic for message in transcript] == [False] * 4 + [True] * 2


async def test_c30_a_turn_that_left_nothing_open_adds_nothing(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path) as sessions:
        async with sessions["a"].turn() as turn:
            await turn.extend([U("1"), A(call="c"), T("c", "r")])
            revision = (await turn.append(A("done"))).revision
        assert (await sessions["a"].transcript()).revision == revision
        async with sessions["b"].turn() as turn:
            pass
        assert said(await sessions["b"].transcript()) == []


# C46: messages that come in a long turn.


async def test_c46_three_messages_in_a_turn_of_a_minute_are_accepted_at_once_and_handled_in_order(
    autojump_clock: Clock, path: Path
) -> None:
    handled: list[tuple[float, object]] = []

    async def answer(turn: Turn) -> None:
        handled.extend((trio.current_time(), text) for text in said(turn.messages))
        await trio.sleep(60)
        await turn.append(A("answer"))

    async with (
        opened(path) as one,
        opened(path, "other") as other,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(one.serve, answer)
        await one["a"].post(U("0"))
        await trio.sleep(10)
        for n, sessions in enumerate([one, other, one], start=1):
            now = trio.current_time()
            receipt = await sessions["a"].post(U(str(n)))
            assert trio.current_time() - now < 0.05
            assert (receipt.status, receipt.waiting) == ("accepted", n + 1)
            await trio.sleep(1)
        await trio.sleep(300)
        assert [text for _, text in handled] == ["0", "1", "2", "3"]
        starts = [at for at, _ in handled]
        assert all(60 <= b - a < 61 for a, b in pairwise(starts))
        assert said(await one["a"].transcript())[::2] == ["0", "1", "2", "3"]
        assert await one["a"].inbox() == []
        nursery.cancel_scope.cancel()


# C49: a fork in the middle of a turn.


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same store", "other store"])
async def test_c49_a_turn_in_whose_middle_the_session_was_forked_keeps_all_its_messages(
    autojump_clock: Clock, path: Path, elsewhere: bool
) -> None:
    async with opened(path) as one, opened(path, "other") as other:
        session = one["a"]
        async with session.turn() as turn:
            await turn.extend([U("1"), A("2")])
            forked = await (other if elsewhere else one)["a"].fork("b")
            assert forked.position == 2
            await other["b"].append(U("the fork's own"))  # nobody holds its turn
            await turn.append(A("3", call="c"))
            async with one["b"].turn(wait=0) as theirs:
                await theirs.append(A("and more"))
        transcript = await other["a"].transcript()
        assert said(transcript)[:3] == ["1", "2", "3"]
        assert [message.synthetic for message in transcript] == [False, False, False, True]
        assert said(await one["b"].transcript()) == ["1", "2", "the fork's own", "and more"]
        assert tables(path)["turns"] == []


# C66: stopped at every step.


async def in_steps(work: Callable[[], R], limiter: trio.CapacityLimiter, /) -> R:
    """Do the work on the spot, with steps before and after it for others to do something in."""
    async with limiter:
        await trio.lowlevel.checkpoint()
        done = work()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return done


class AtStep(trio.abc.Instrument):
    """Does something when any task is about to take its n-th step from now on."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.left = step
        self.act = act

    def before_task_step(self, _: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()

    @property
    def reached(self) -> bool:
        return self.left <= 0

    def __enter__(self) -> AtStep:
        trio.lowlevel.add_instrument(self)
        return self

    def __exit__(self, *_: object) -> None:
        trio.lowlevel.remove_instrument(self)


Handler: TypeAlias = Callable[[Session, list[object]], Awaitable[None]]


async def say(turn: Turn, done: list[object]) -> None:
    """What a handler does, noting each append that has returned."""
    await turn.transcript()
    for message in (A("thinking"), A(call="c"), T("c", "r"), A("answer")):
        await turn.append(message)
        done.append(message)
        await trio.lowlevel.checkpoint()


async def in_a_turn(session: Session, done: list[object]) -> None:
    async with session.turn() as turn:
        await say(turn, done)


async def by_taking_over(session: Session, done: list[object]) -> None:
    async with session.take_over() as turn:
        await say(turn, done)


async def in_a_nursery(session: Session, done: list[object]) -> None:
    async with session.turn() as turn, trio.open_nursery() as nursery:
        nursery.start_soon(say, turn, done)
        await trio.lowlevel.checkpoint()


async def twice(session: Session, done: list[object]) -> None:
    for message in (A("thinking"), A("answer")):
        async with session.turn(wait=1) as turn:
            await turn.append(message)
            done.append(message)


HANDLERS: list[Handler] = [in_a_turn, by_taking_over, in_a_nursery, twice]


async def check_whole(one: Session, other: Session, done: list[object], path: Path) -> None:
    """U is there, A if and only if its append has returned, and the turn is free."""
    assert tables(path)["turns"] == []
    transcript = await other.transcript()
    real = [message.body for message in transcript if not message.synthetic]
    assert real == [U("hello"), *done]
    assert list(open_calls(transcript.bodies)) == []
    for session in (one, other):
        async with session.turn(wait=0):
            pass


def check_idle(*stores: Sessions) -> None:
    for sessions in stores:
        stats = sessions.stats()
        assert (stats.turns, stats.waiting_for_turn, stats.pending, stats.busy) == (0, 0, 0, 0)
        assert stats.failures == 0


async def hold(session: Session, entered: trio.Event) -> None:
    """Hold the turn for a moment, unless it is taken over."""
    try:
        async with session.turn():
            entered.set()
            await trio.sleep(0.05)
    except TurnLost:
        pass


def all_outcomes(handler: Handler) -> set[int]:
    """How many appends can have returned: stopped before the first, after each, or not at all."""
    return set(range(3 if handler is twice else 5))


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("place", ["free", "held here", "held elsewhere"])
async def test_c66_cancelled_at_every_step_a_handler_leaves_what_it_was_told_and_a_free_turn(
    autojump_clock: Clock, path: Path, handler: Handler, place: str
) -> None:
    outcomes = set()
    async with opened(path, offload=in_steps) as one, opened(path, "other") as other:
        for step in range(1, 1_000):
            session, elsewhere = one[str(step)], other[str(step)]
            await session.append(U("hello"))
            done: list[object] = []
            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                if place != "free":
                    entered = trio.Event()
                    holder = session if place == "held here" else elsewhere
                    nursery.start_soon(hold, holder, entered)
                    await entered.wait()
                with AtStep(step, scope.cancel) as instrument, scope:
                    await handler(session, done)
            await trio.testing.wait_all_tasks_blocked()
            check_idle(one, other)
            await check_whole(session, elsewhere, done, path)
            outcomes.add((scope.cancelled_caught, len(done)))
            if not instrument.reached:
                break
        else:
            raise AssertionError("it never came to an end")
    assert {n for _, n in outcomes} == all_outcomes(handler)
    assert {cancelled for cancelled, _ in outcomes} == {True, False}


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("held", [False, True], ids=["free", "held here"])
def test_c66_interrupted_at_every_step_a_handler_leaves_what_it_was_told_and_a_free_turn(
    path: Path, handler: Handler, held: bool
) -> None:
    """As Ctrl-C does it: the main task runs the handler, and trio raises it there."""
    outcomes = set()

    async def stop_at(step: int, one: Sessions, other: Sessions) -> bool:
        session, elsewhere = one[str(step)], other[str(step)]
        await session.append(U("hello"))
        done: list[object] = []
        interrupted = False
        async with trio.open_nursery() as nursery:
            if held:
                entered = trio.Event()
                nursery.start_soon(hold, session, entered)
                await entered.wait()
            with AtStep(step, interrupt) as instrument:
                try:
                    await handler(session, done)
                    await trio.lowlevel.checkpoint()  # where one that came late is raised
                except* KeyboardInterrupt:
                    interrupted = True
        await trio.testing.wait_all_tasks_blocked()
        check_idle(one, other)
        await check_whole(session, elsewhere, done, path)
        outcomes.add((interrupted, len(done)))
        return instrument.reached

    async def main() -> None:
        async with opened(path, offload=in_steps) as one, opened(path, "other") as other:
            for step in range(1, 1_000):
                if not await stop_at(step, one, other):
                    return
            raise AssertionError("it never came to an end")

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert {n for _, n in outcomes} == all_outcomes(handler)
    assert {interrupted for interrupted, _ in outcomes} == {True, False}


async def test_c66_cancelled_at_every_step_serving_loses_no_message_and_repeats_none(
    autojump_clock: Clock, path: Path
) -> None:
    """U is in the inbox or in the transcript, once; whoever serves next answers it."""
    answered = set()

    async def answer(turn: Turn) -> None:
        await turn.append(A("thinking"))
        await trio.lowlevel.checkpoint()
        await turn.append(A("answer"))

    async with opened(path, offload=in_steps) as one, opened(path, "other") as other:
        for step in range(1, 1_000):
            session = other[str(step)]
            await one[str(step)].post(U("hello"))
            with trio.move_on_after(1) as scope:
                with AtStep(step, scope.cancel) as instrument:
                    await one.serve(answer)
            await trio.testing.wait_all_tasks_blocked()
            check_idle(one, other)
            assert tables(path)["turns"] == []
            waiting = len(await session.inbox())
            there = said(await session.transcript()).count("hello")
            assert (waiting, there) in ((1, 0), (1, 1), (0, 1))
            answered.add(waiting == 0)
            with trio.move_on_after(5):
                await other.serve(answer)
            assert await session.inbox() == []
            texts = said(await session.transcript())
            assert texts.count("hello") == 1
            assert texts[-1] == "answer"
            if not instrument.reached:
                break
        else:
            raise AssertionError("it never came to an end")
    assert answered == {True, False}
