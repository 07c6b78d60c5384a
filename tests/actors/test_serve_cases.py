"""Serving, as seen from outside: what is posted is handled, in order, whatever comes in between."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import apsw
import pytest
import trio
import trio.testing
from attrs import Factory, define
from support import A, T, U, failing_disk, said
from trio.testing import MockClock

from turnkeeper.actors import Closed, Session, Sessions, StorageError, Turn, TurnLost, open_sessions
from turnkeeper.storage import Moment, Policy, inline


def opened(
    path: Path, *, policy: Policy = "queue", vfs: str | None = None
) -> AbstractAsyncContextManager[Sessions]:
    """A store whose turns expire by the virtual clock."""
    return open_sessions(
        path,
        offload=inline,
        clock=lambda: Moment("a boot", trio.current_time()),
        vfs=vfs,
        policy=policy,
    )


@define
class Log:
    """What a handler was given, and when; `act` is what it does then."""

    act: Callable[[Turn], Awaitable[object]] | None = None
    turns: list[list[object]] = Factory(list)
    times: list[float] = Factory(list)
    attempts: list[int] = Factory(list)
    ids: list[str] = Factory(list)
    cancelled: list[list[object]] = Factory(list)

    async def __call__(self, turn: Turn) -> None:
        said_now = said(turn.messages)
        self.turns.append(said_now)
        self.times.append(trio.current_time())
        self.attempts.append(turn.attempt)
        self.ids.append(turn.id)
        try:
            if self.act is not None:
                await self.act(turn)
        except trio.Cancelled:
            self.cancelled.append(said_now)
            raise


@asynccontextmanager
async def serving(
    sessions: Sessions, handler: Callable[[Turn], Awaitable[object]], *, max_attempts: int = 3
) -> AsyncIterator[None]:
    """Serve as long as the block lasts."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: sessions.serve(handler, max_attempts=max_attempts))
        yield
        nursery.cancel_scope.cancel()


async def hang(seconds: float, turn: Turn) -> None:
    """Take so long, and do nothing."""
    await trio.sleep(seconds)


async def left_open(session: Session) -> int:
    """How many messages are in the inbox still."""
    return len(await session.inbox())


async def test_c46_what_is_posted_in_a_long_turn_is_accepted_at_once_and_handled_in_order_after_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def answer(turn: Turn) -> None:
        if said(turn.messages) == ["long"]:
            await trio.sleep(60)
        (message,) = turn.messages
        await turn.append(A(f"to {message.body['content']}"))

    log = Log(answer)
    async with opened(tmp_path / "state.db") as sessions, serving(sessions, log):
        session = sessions["a"]
        await session.post(U("long"))
        await trio.sleep(10)
        for n, text in enumerate(["one", "two", "three"]):
            before = trio.current_time()
            receipt = await session.post(U(text))
            assert (receipt.status, receipt.waiting) == ("accepted", n + 2)
            assert trio.current_time() == before
            await trio.sleep(10)
        assert log.turns == [["long"]]
        assert said(await session.transcript()) == ["long"]
        await trio.sleep(30)
        assert log.turns == [["long"], ["one"], ["two"], ["three"]]
        assert log.times[1] - log.times[0] == 60, "the next begins at once"
        assert said(await session.transcript()) == [
            *("long", "to long", "one", "to one", "two", "to two", "three", "to three")
        ]
        assert [m.opens_turn for m in await session.transcript()] == [True, False] * 4
        assert await left_open(session) == 0


@pytest.mark.parametrize("taken", [False, True], ids=["waiting", "in its turn"])
async def test_c60_what_was_accepted_is_delivered_by_a_store_that_is_opened_later(
    tmp_path: Path, autojump_clock: MockClock, taken: bool
) -> None:
    path = tmp_path / "state.db"

    async def call(turn: Turn) -> None:
        await turn.append(A(call="open"))
        await trio.sleep_forever()

    async with opened(path) as sessions:
        receipt = await sessions["a"].post(U("m1"))
        if taken:
            first = Log(call)
            async with serving(sessions, first):
                await trio.sleep(5)
                assert first.turns == [["m1"]]
                assert [message.taken for message in await sessions["a"].inbox()] == [True]
        assert await left_open(sessions["a"]) == 1
    log = Log()
    async with opened(path) as sessions, serving(sessions, log):
        await trio.sleep(5)
        assert log.turns == [["m1"]]
        assert log.attempts == [1], "a turn that was given back counts for nothing"
        assert await left_open(sessions["a"]) == 0
        people = [m for m in await sessions["a"].transcript() if m.role == "user"]
        assert [message.append_id for message in people] == [receipt.id]
    async with opened(path) as sessions, serving(sessions, log):
        await trio.sleep(5)
        assert log.turns == [["m1"]], "once it is acted on it is gone"


async def test_c60_a_store_that_closes_in_the_middle_of_a_turn_leaves_its_message_to_the_next(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    first = Log(partial(hang, 1_000))
    async with trio.open_nursery() as nursery, opened(path) as sessions:
        await sessions["a"].post(U("m1"))
        nursery.start_soon(until_closed, sessions, first)
        await trio.sleep(1)
        assert first.turns == [["m1"]]
    log = Log()
    async with opened(path) as sessions, serving(sessions, log):
        await trio.sleep(70)
        assert log.turns == [["m1"]]
        assert said(await sessions["a"].transcript()) == ["m1"]


async def until_closed(sessions: Sessions, handler: Callable[[Turn], Awaitable[object]]) -> None:
    with pytest.raises(Closed):
        await sessions.serve(handler)


async def test_an_interrupting_message_cancels_the_handler_and_the_next_turn_takes_all_up_to_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def act(turn: Turn) -> None:
        if said(turn.messages) == ["long"]:
            await turn.append(A("let me see", call=["done", "open"]))
            await turn.append(T("done", "result"))
            await trio.sleep_forever()

    log = Log(act)
    async with opened(tmp_path / "state.db") as sessions, serving(sessions, log):
        session = sessions["a"]
        await session.post(U("long"))
        await trio.sleep(5)
        await session.post(U("queued"))
        await session.post(U("collected"), policy="collect")
        await trio.sleep(5.1)  # between two looks of the keeper
        assert log.turns == [["long"]]
        before = trio.current_time()
        await session.post(U("stop!"), policy="interrupt")
        await trio.testing.wait_all_tasks_blocked()
        assert trio.current_time() == before, "one in this store is told at once"
        assert log.cancelled == [["long"]]
        await session.post(U("after"))
        await trio.sleep(5)
        assert log.turns == [["long"], ["queued", "collected", "stop!"], ["after"]]
        assert log.attempts == [1, 1, 1], "who interrupts wants no answer to what was before"
        assert await left_open(session) == 0
        transcript = await session.transcript()
        assert [(m.role, m.synthetic) for m in transcript] == [
            ("user", False),
            ("assistant", False),
            ("tool", False),
            ("tool", True),
            ("user", False),
            ("user", False),
            ("user", False),
            ("user", False),
        ]
        assert transcript[3].body["tool_call_id"] == "open"
        opening = [m.body["content"] for m in transcript if m.opens_turn]
        assert opening == ["long", "queued", "after"], "of several only the first opens a turn"


async def test_a_message_that_interrupts_does_not_interrupt_the_turn_that_handles_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Nor does it when it is delivered again, or posted again."""

    async def act(turn: Turn) -> None:
        await trio.sleep(20)
        if turn.attempt == 1:
            raise ValueError

    log = Log(act)
    async with opened(tmp_path / "state.db", policy="interrupt") as sessions:
        async with serving(sessions, log):
            session = sessions["a"]
            await session.post(U("x"), key="x")
            await trio.sleep(5)
            assert (await session.post(U("x"), key="x")).status == "duplicate"
            await trio.sleep(60)
        assert log.turns == [["x"], ["x"]]
        assert log.attempts == [1, 2]
        assert log.cancelled == []


async def test_messages_that_interrupt_one_another_are_handled_by_the_last_one_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    log = Log(partial(hang, 10))
    async with opened(tmp_path / "state.db", policy="interrupt") as sessions:
        async with serving(sessions, log):
            for n in range(4):
                await sessions["a"].post(U(str(n)))
                await trio.sleep(1)
            await trio.sleep(30)
        assert log.turns == [["0"], ["1"], ["2"], ["3"]]
        assert log.cancelled == [["0"], ["1"], ["2"]]
        assert said(await sessions["a"].transcript()) == ["0", "1", "2", "3"]
        assert await left_open(sessions["a"]) == 0


@pytest.mark.parametrize("held", ["served", "by hand"])
async def test_an_interruption_from_another_store_is_noticed_within_a_second(
    tmp_path: Path, autojump_clock: MockClock, held: str
) -> None:
    path = tmp_path / "state.db"
    ended: list[float] = []

    async def hold(session: Session) -> None:
        with pytest.raises(TurnLost) as caught:
            async with session.turn():
                await trio.sleep_forever()
        assert caught.value.reason == "interrupted"
        ended.append(trio.current_time())

    async def act(turn: Turn) -> None:
        if said(turn.messages) == ["long"]:
            try:
                await trio.sleep_forever()
            finally:
                ended.append(trio.current_time())

    log = Log(act)
    async with opened(path) as one, opened(path) as other, trio.open_nursery() as nursery:
        if held == "served":
            await one["a"].post(U("long"))
            nursery.start_soon(one.serve, log)
        else:
            nursery.start_soon(hold, one["a"])
        await trio.sleep(10.1)
        posted_at = trio.current_time()
        await other["a"].post(U("stop!"), policy="interrupt")
        await trio.sleep(10)
        assert len(ended) == 1
        assert ended[0] - posted_at < 1
        if held == "served":
            assert log.turns == [["long"], ["stop!"]]
            assert log.times[1] - posted_at < 1
        nursery.cancel_scope.cancel()


async def test_an_interruption_takes_no_message_of_another_session(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    log = Log(partial(hang, 10))
    async with opened(tmp_path / "state.db") as sessions, serving(sessions, log):
        for id in "ab":
            await sessions[id].post(U(id))
        await trio.sleep(1)
        await sessions["a"].post(U("stop!"), policy="interrupt")
        await trio.sleep(30)
        assert log.cancelled == [["a"]]
        assert log.turns == [["a"], ["b"], ["stop!"]] or log.turns == [["b"], ["a"], ["stop!"]]


async def test_a_handler_that_ignores_its_interruption_has_acted_on_its_message(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """It catches `Cancelled`, which it must not; nobody waits for it any longer than it takes."""

    async def act(turn: Turn) -> None:
        if said(turn.messages) == ["long"]:
            with trio.CancelScope(shield=True):
                await trio.sleep(3)
            with suppress(trio.Cancelled):
                await trio.sleep_forever()

    log = Log(act)
    async with opened(tmp_path / "state.db") as sessions, serving(sessions, log):
        session = sessions["a"]
        await session.post(U("long"))
        await trio.sleep(1)
        await session.post(U("stop!"), policy="interrupt")
        await trio.sleep(1)
        assert log.turns == [["long"]]
        await trio.sleep(5)
        assert log.turns == [["long"], ["stop!"]]
        assert log.times[1] - log.times[0] == 3
        assert await left_open(session) == 0


async def test_a_handler_that_fails_while_it_is_interrupted_keeps_nobody_waiting(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def act(turn: Turn) -> None:
        if said(turn.messages) == ["long"]:
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError

    log = Log(act)
    async with opened(tmp_path / "state.db") as sessions, serving(sessions, log):
        session = sessions["a"]
        await session.post(U("long"))
        await trio.sleep(1)
        posted_at = trio.current_time()
        await session.post(U("stop!"), policy="interrupt")
        await trio.sleep(5)
        assert log.turns == [["long"], ["stop!"]]
        assert log.times[1] == posted_at
        assert await left_open(session) == 0


async def test_collect_makes_one_turn_of_what_waits(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def act(turn: Turn) -> None:
        await trio.sleep(10)
        await turn.append(A("answer"))

    log = Log(act)
    async with opened(tmp_path / "state.db", policy="collect") as sessions:
        async with serving(sessions, log):
            session = sessions["a"]
            await session.post(U("first"))
            await trio.sleep(1)
            for text in ("x", "y", "z"):
                await session.post(U(text))
                await trio.sleep(1)
            await trio.sleep(30)
        assert log.turns == [["first"], ["x", "y", "z"]]
        messages = await session.transcript()
        assert said(messages) == ["first", "answer", "x", "y", "z", "answer"]
        assert [m.opens_turn for m in messages] == [True, False, True, False, False, False]
        assert len({m.revision for m in messages[2:5]}) == 1, "one turn takes them in one step"
        undone = await session.undo()
        assert undone is not None
        assert (undone.messages, undone.text) == (4, "x")


async def test_collect_takes_only_its_own_and_only_in_a_row(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    log = Log()
    policies: dict[str, Policy] = {
        "q1": "queue",
        "c1": "collect",
        "c2": "collect",
        "q2": "queue",
        "c3": "collect",
        "q3": "queue",
    }
    async with opened(tmp_path / "state.db") as sessions:
        for text, policy in policies.items():
            await sessions["a"].post(U(text), policy=policy)
        async with serving(sessions, log):
            await trio.sleep(5)
    assert log.turns == [["q1"], ["c1", "c2"], ["q2"], ["c3"], ["q3"]]


async def test_a_collected_turn_that_failed_is_tried_again_with_what_has_come_since(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def act(turn: Turn) -> None:
        if len(turn.messages) < 3:
            raise ValueError

    log = Log(act)
    async with opened(tmp_path / "state.db", policy="collect") as sessions:
        session = sessions["a"]
        for text in ("x", "y"):
            await session.post(U(text))
        async with serving(sessions, log):
            await trio.sleep(0.1)
            assert log.turns == [["x", "y"]]
            await session.post(U("z"))
            await trio.sleep(60)
        assert log.turns == [["x", "y"], ["x", "y", "z"]]
        assert log.attempts == [1, 2]
        messages = await session.transcript()
        assert said(messages) == ["x", "y", "z"], "what was appended is not appended again"
        assert [m.opens_turn for m in messages] == [True, False, False]
        assert await left_open(session) == 0


async def test_a_collected_turn_that_fails_too_often_sets_aside_only_what_was_tried_too_often(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def act(turn: Turn) -> None:
        raise ValueError

    log = Log(act)
    async with opened(tmp_path / "state.db", policy="collect") as sessions:
        session = sessions["a"]
        await session.post(U("x"))
        async with serving(sessions, log, max_attempts=2):
            await trio.sleep(0.1)
            await session.post(U("y"))
            await trio.sleep(60)
        assert log.turns == [["x"], ["x", "y"], ["y"]]
        assert [m.attempts for m in await session.inbox()] == [2, 2]
        assert len(await sessions.set_aside()) == 2


async def test_what_a_person_takes_back_is_not_delivered_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def act(turn: Turn) -> None:
        if said(turn.messages) == ["bad"]:
            raise ValueError

    log = Log(act)
    async with opened(tmp_path / "state.db") as sessions, serving(sessions, log):
        session = sessions["a"]
        await session.post(U("bad"))
        await trio.sleep(0.1)
        assert log.turns == [["bad"]]
        undone = await session.undo()
        assert undone is not None
        assert undone.text == "bad"
        await session.post(U("good"))
        await trio.sleep(60)
        assert log.turns == [["bad"], ["good"]]
        assert await left_open(session) == 0


async def test_a_turn_that_a_person_takes_over_stops_and_its_message_is_delivered_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"

    async def act(turn: Turn) -> None:
        await turn.append(A(f"attempt {turn.attempt}"))
        if turn.attempt == 1:
            await trio.sleep_forever()

    log = Log(act)
    async with opened(path) as one, opened(path) as other, serving(one, log):
        for sessions, id in ((one, "here"), (other, "elsewhere")):
            log.turns.clear()
            await sessions[id].post(U("m"))
            await trio.sleep(5)
            async with sessions[id].take_over() as turn:
                await trio.sleep(1)
                assert len(log.cancelled) == 1, "it is noticed within a second"
                await turn.append(A("by a person"))
                await trio.sleep(30)
                assert log.turns == [["m"]], "nobody gets past the person"
            await trio.sleep(5)
            assert log.turns == [["m"], ["m"]]
            assert await left_open(sessions[id]) == 0
            transcript = said(await sessions[id].transcript())
            assert transcript == ["m", "attempt 1", "by a person", "attempt 2"]
            log.cancelled.clear()
        assert log.attempts == [1, 2, 1, 2]


async def test_c65_interrupted_work_that_storage_could_not_end_is_ended_when_it_can(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with failing_disk() as disk:

        async def act(turn: Turn) -> None:
            if said(turn.messages) == ["long"]:
                await turn.append(A(call="open"))
                try:
                    await trio.sleep_forever()
                finally:
                    disk.write_error = apsw.IOError

        log = Log(act)
        store = opened(tmp_path / "state.db", vfs=disk.name)
        async with store as sessions, serving(sessions, log):
            session = sessions["a"]
            await session.post(U("long"))
            await trio.sleep(1)
            await session.post(U("stop!"), policy="interrupt")
            await trio.sleep(20)
            assert log.turns == [["long"]]
            disk.write_error = None
            await trio.sleep(60)
            assert log.turns == [["long"], ["stop!"]]
            assert log.attempts == [1, 1]
            synthetic = [message.synthetic for message in await session.transcript()]
            assert synthetic == [False, False, True, False]
            assert await left_open(session) == 0


async def test_what_serve_logs_holds_nobodys_words(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def act(turn: Turn) -> None:
        content = str(turn.messages[0].body["content"])
        if content == "s3cret hold":
            await trio.sleep_forever()
        raise ExceptionGroup(content, [ValueError(content), LookupError(content)])

    with failing_disk() as disk:
        async with opened(tmp_path / "state.db", vfs=disk.name) as sessions:
            async with serving(sessions, act, max_attempts=2):
                await sessions["s3cret-id"].post(U("s3cret"), key="s3cret-key")
                await sessions["b"].post(U("s3cret hold"))
                await trio.sleep(1)
                async with sessions["b"].take_over():
                    pass
                disk.write_error = apsw.IOError
                with pytest.raises(StorageError):
                    await sessions["b"].post(U("s3cret"))
                await trio.sleep(10)
                disk.write_error = None
                await trio.sleep(60)
            assert [str(m.set_aside) for m in await sessions.set_aside()] == [
                "the handler raised ExceptionGroup"
            ]
            assert "s3cret" not in repr(await sessions.set_aside()).replace("s3cret-", "")
    assert "ExceptionGroup" in caplog.text, "it says what kind of error it was"
    assert "s3cret" not in caplog.text
