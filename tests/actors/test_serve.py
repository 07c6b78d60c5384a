"""How serving goes on: fairly, in the face of handlers and storage that fail, and quietly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import apsw
import pytest
import trio
import trio.testing
from attrs import Factory, define
from support import A, Gate, U, failing_disk, said
from trio.testing import MockClock

from turnkeeper.actors import (
    Closed,
    Conflict,
    InboxMessage,
    Posted,
    Rejected,
    Session,
    Sessions,
    StorageFailed,
    Turn,
    TurnActive,
    TurnLost,
    open_sessions,
)
from turnkeeper.actors import serve as serve_room
from turnkeeper.storage import Moment, Offload, Policy, inline

R = TypeVar("R")
Act = Callable[[Turn], Awaitable[object]]


def opened(
    path: Path, *, policy: Policy = "queue", vfs: str | None = None, offload: Offload = inline
) -> AbstractAsyncContextManager[Sessions]:
    """A store whose turns expire by the virtual clock. Not synced: these are many commits."""
    return open_sessions(
        path,
        synchronous="normal",
        offload=offload,
        clock=lambda: Moment("a boot", trio.current_time()),
        vfs=vfs,
        policy=policy,
    )


@asynccontextmanager
async def serving(
    sessions: Sessions,
    handler: Act,
    *,
    max_concurrent: int = 100,
    max_attempts: int = 3,
    max_hold: float | None = None,
) -> AsyncIterator[None]:
    """Serve as long as the block lasts."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: sessions.serve(
                handler,
                max_concurrent=max_concurrent,
                max_attempts=max_attempts,
                max_hold=max_hold,
            )
        )
        yield
        nursery.cancel_scope.cancel()


@define
class Log:
    """What a handler was given, and when; `act` is what it does then."""

    act: Act | None = None
    ids: list[str] = Factory(list)
    texts: list[object] = Factory(list)
    times: list[float] = Factory(list)
    attempts: list[int] = Factory(list)
    now: set[str] = Factory(set)
    """The sessions that are acted on now; one twice at once is refused."""
    most: int = 0
    """At most so many were acted on at once."""

    async def __call__(self, turn: Turn) -> None:
        assert turn.id not in self.now
        self.ids.append(turn.id)
        self.texts.extend(said(turn.messages))
        self.times.append(trio.current_time())
        self.attempts.append(turn.attempt)
        self.now.add(turn.id)
        self.most = max(self.most, len(self.now))
        try:
            if self.act is not None:
                await self.act(turn)
        finally:
            self.now.remove(turn.id)

    def pauses(self) -> list[float]:
        """The times between the calls."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


async def hang(seconds: float, turn: Turn) -> None:
    """Take so long, and do nothing."""
    await trio.sleep(seconds)


def failing(*texts: str, error: BaseException | None = None) -> Act:
    """A handler that fails with these messages, all by default, and acts on others."""

    async def act(turn: Turn) -> None:
        if not texts or turn.messages[0].body["content"] in texts:
            raise ValueError("a test says so") if error is None else error

    return act


async def waiting(session: Session) -> list[tuple[object, int, str | None]]:
    """What the inbox holds: text, attempts, and why it was set aside."""
    return [(m.body["content"], m.attempts, m.set_aside) for m in await session.inbox()]


class Counting:
    """An offload that works on the spot, counts, and fails on demand. Reads have several tokens."""

    def __init__(self, most: float = math.inf) -> None:
        self.reads = self.writes = 0
        self.most = most
        """More than that are a busy loop."""
        self.fail_reads = self.fail_writes = False

    async def __call__(self, work: Callable[[], R], limiter: trio.CapacityLimiter, /) -> R:
        async with limiter:
            is_read = limiter.total_tokens > 1
            self.reads += is_read
            self.writes += not is_read
            assert self.reads + self.writes <= self.most, "a busy loop"
            if self.fail_reads if is_read else self.fail_writes:
                raise StorageFailed("starting a thread", "a test says so")
            return work()


# What a handler that fails leads to.


async def test_a_failing_message_is_tried_again_after_growing_pauses_and_set_aside(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    log = Log(failing("bad"))
    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        receipt = await session.post(U("bad"))
        async with serving(sessions, log, max_attempts=10):
            await trio.sleep(400)
        assert log.attempts == list(range(1, 11))
        for n, pause in enumerate(log.pauses()):
            most = min(2.0**n, 60.0)
            assert most / 2 <= pause <= most + 0.25
        assert said(await session.transcript()) == ["bad"], "appended once"
        assert await waiting(session) == [("bad", 10, "the handler raised ValueError")]
        (found,) = await sessions.set_aside()
        assert (found.id, found.session, found.taken) == (receipt.id, "a", False)
        assert await session.holder() is None


async def test_a_message_that_is_tried_a_thousand_times_does_not_end_serve(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_room, "LONGEST_PAUSE_S", 0.1)
    log = Log(failing("bad"))
    async with opened(tmp_path / "state.db") as sessions:
        await sessions["a"].post(U("bad"))
        async with serving(sessions, log, max_attempts=1_050):
            await trio.sleep(1_050 * 0.35)
            assert log.attempts == list(range(1, 1_051))
            await sessions["a"].post(U("good"))
            await trio.sleep(1)
        assert log.texts[-1] == "good"


async def test_later_messages_wait_behind_a_failing_one_and_then_go_on(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    log = Log(failing("bad"))
    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        await session.post(U("bad"))
        await session.post(U("next"))
        async with serving(sessions, log):
            await trio.sleep(0.1)
            await session.post(U("last"))
            await trio.sleep(60)
        assert log.texts == ["bad", "bad", "bad", "next", "last"]
        assert log.pauses()[2:] == [0, 0], "once it is set aside, the next is taken at once"
        assert await waiting(session) == [("bad", 3, "the handler raised ValueError")]


async def test_a_failing_session_holds_nobody_up(tmp_path: Path, autojump_clock: MockClock) -> None:
    log = Log(failing("bad"))
    async with opened(tmp_path / "state.db") as sessions:
        await sessions["failing"].post(U("bad"))
        async with serving(sessions, log, max_concurrent=1):
            for n in range(20):
                await trio.sleep(0.1)
                before = trio.current_time()
                await sessions[str(n)].post(U(str(n)))
                await trio.testing.wait_all_tasks_blocked()
                assert log.ids[-1] == str(n)
                assert trio.current_time() == before
            await trio.sleep(60)
        assert log.texts.count("bad") == 3


async def test_the_attempts_are_counted_over_restarts(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    log = Log(failing("bad"))
    for n in range(3):
        async with opened(path) as sessions:
            if n == 0:
                await sessions["a"].post(U("bad"))
            async with serving(sessions, log):
                await trio.sleep(0.1)
                assert len(log.attempts) == n + 1
        await trio.sleep(5)  # a restart does not shorten the pause before the next try
    assert log.attempts == [1, 2, 3]
    async with opened(path) as sessions:
        assert await waiting(sessions["a"]) == [("bad", 3, "the handler raised ValueError")]


async def test_what_takings_that_never_ended_have_spent_is_set_aside_untried(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """As by processes that died in the middle: nobody says how their turns ended."""
    path = tmp_path / "state.db"
    log = Log(partial(hang, 1_000))
    async with opened(path) as sessions:
        session = sessions["a"]
        await session.post(U("deadly"))
        await session.post(U("next"))
        async with serving(sessions, log):
            for _ in range(3):
                await trio.sleep(5)
                async with session.take_over():
                    await trio.sleep(1)
            await trio.sleep(5)
            assert log.texts == ["deadly", "deadly", "deadly", "next"]
            assert log.attempts == [1, 2, 3, 1]
            ((text, attempts, why), _) = await waiting(session)
            assert (text, attempts) == ("deadly", 3)
            assert why is not None


OTHERS: list[Exception] = [
    ExceptionGroup("a test says so", [ValueError(), LookupError()]),
    TurnActive("another", "somebody", 0.0, 0.0),
    TurnActive("another", "somebody", 0.0, 1e9),
    TurnLost("another", "taken"),
    TurnLost("another", "interrupted"),
    Closed("session", "another"),
    Closed("store", "another"),
    Conflict("another", 1, 2),
    Rejected("field", "a test says so"),
    StorageFailed("writing", "a test says so"),
]


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(error, id=f"{type(error).__name__}-{index}")
        for index, error in enumerate(OTHERS)
    ],
)
async def test_a_handler_may_fail_with_any_exception(
    tmp_path: Path,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """Those of this library too, about another session or another store."""
    log = Log(failing("bad", error=error))
    async with opened(tmp_path / "state.db") as sessions:
        await sessions["a"].post(U("bad"))
        await sessions["a"].post(U("next"))
        async with serving(sessions, log):
            await trio.sleep(60)
        assert log.texts == ["bad", "bad", "bad", "next"]
        first, second, _ = log.pauses()
        assert 0.5 <= first <= 1.25
        assert 1.0 <= second <= 2.25
        why = f"the handler raised {type(error).__name__}"
        assert await waiting(sessions["a"]) == [("bad", 3, why)]
        assert caplog.text.count(type(error).__name__) >= 3


async def test_an_exception_group_is_a_failure_also_beside_a_cancellation_of_ours(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A child fails while the turn is being cancelled for having lasted too long."""

    async def clean_up_badly() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError

    async def act(turn: Turn) -> None:
        if turn.messages[0].body["content"] == "bad":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(clean_up_badly)
                nursery.start_soon(trio.sleep_forever)

    log = Log(act)
    async with opened(tmp_path / "state.db") as sessions:
        await sessions["a"].post(U("bad"))
        await sessions["a"].post(U("next"))
        async with serving(sessions, log, max_hold=5):
            await trio.sleep(60)
        assert log.texts == ["bad", "bad", "bad", "next"]
        ((_, attempts, why),) = await waiting(sessions["a"])
        assert attempts == 3
        assert why is not None


async def test_a_handler_that_takes_too_long_is_cancelled_and_has_failed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def act(turn: Turn) -> None:
        await turn.append(A(call="open"))
        if turn.messages[0].body["content"] == "long":
            await trio.sleep_forever()

    log = Log(act)
    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        await session.post(U("long"))
        await session.post(U("next"))
        async with serving(sessions, log, max_attempts=2, max_hold=5):
            await trio.sleep(60)
        assert log.texts == ["long", "long", "next"]
        assert 5.5 <= log.pauses()[0] <= 6.25
        assert await waiting(session) == [("long", 2, "it was acted on for too long")]
        calls = [m for m in await session.transcript() if m.role == "assistant"]
        assert len([m for m in await session.transcript() if m.synthetic]) == len(calls) == 3


async def test_a_handler_that_catches_its_cancellation_and_returns_has_acted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def act(turn: Turn) -> None:
        with suppress(trio.Cancelled):
            await trio.sleep_forever()

    log = Log(act)
    async with opened(tmp_path / "state.db") as sessions:
        await sessions["a"].post(U("x"))
        await sessions["a"].post(U("y"))
        async with serving(sessions, log, max_hold=5):
            await trio.sleep(60)
        assert log.texts == ["x", "y"]
        assert await waiting(sessions["a"]) == []


async def test_a_handler_that_cancels_a_part_of_its_work_has_not_failed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def act(turn: Turn) -> None:
        with trio.move_on_after(1):
            await trio.sleep(100)
        await turn.append(A("gave up"))

    log = Log(act)
    async with opened(tmp_path / "state.db") as sessions:
        await sessions["a"].post(U("x"))
        async with serving(sessions, log):
            await trio.sleep(60)
        assert log.texts == ["x"]
        assert said(await sessions["a"].transcript()) == ["x", "gave up"]


@pytest.mark.parametrize("before", [0, 1], ids=["first attempt", "second attempt"])
async def test_a_cancelled_serve_gives_back_what_it_took_and_holds_nothing(
    tmp_path: Path, autojump_clock: MockClock, before: int
) -> None:
    async def act(turn: Turn) -> None:
        if turn.attempt <= before:
            raise ValueError
        await turn.append(A(call="open"))
        await trio.sleep_forever()

    log = Log(act)
    async with opened(tmp_path / "state.db") as sessions:
        for id in "abc":
            await sessions[id].post(U(id))
            await sessions[id].post(U("next"))
        async with serving(sessions, log, max_concurrent=2):
            await trio.sleep(30)
            assert len(log.now) == 2
        # It has returned.
        assert log.now == set()
        assert sessions.stats().turns == 0
        for id in "abc":
            assert await sessions[id].holder() is None
            if before == 0:
                assert [message.taken for message in await sessions[id].inbox()] == [False, False]
            assert await waiting(sessions[id]) == [(id, before, None), ("next", 0, None)]
            calls = [m for m in await sessions[id].transcript() if m.role == "assistant"]
            assert len([m for m in await sessions[id].transcript() if m.synthetic]) == len(calls)
        log.act = None
        async with serving(sessions, log):
            await trio.sleep(5)
        for id in "abc":
            assert await waiting(sessions[id]) == []


async def test_a_handler_that_ends_the_program_gives_back_its_message_and_ends_serve(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def act(turn: Turn) -> None:
        raise SystemExit(3)

    async with opened(tmp_path / "state.db") as sessions:
        await sessions["a"].post(U("x"))
        with pytest.raises(BaseExceptionGroup) as caught:
            await sessions.serve(act)
        assert caught.group_contains(SystemExit)
        assert await waiting(sessions["a"]) == [("x", 0, None)]
        assert await sessions["a"].holder() is None


@pytest.mark.parametrize("then", ["returns", "goes on", "appends"])
async def test_a_handler_may_delete_its_own_session(
    tmp_path: Path, autojump_clock: MockClock, then: str
) -> None:
    log = Log()
    async with opened(tmp_path / "state.db") as sessions:

        async def act(turn: Turn) -> None:
            if turn.messages[0].body["content"] == "end it":
                await sessions.delete(turn.id)
                if then == "goes on":
                    await trio.sleep(100)
                elif then == "appends":
                    await turn.append(A("too late"))

        log.act = act
        await sessions["a"].post(U("end it"))
        await sessions["a"].post(U("gone with it"))
        await sessions["b"].post(U("b"))
        async with serving(sessions, log):
            await trio.sleep(5)
            assert log.now == set(), "its turn is lost with the session"
            assert sorted(map(str, log.texts)) == ["b", "end it"]
            await sessions["a"].post(U("another life"))
            await trio.sleep(5)
        assert log.texts[-1] == "another life"
        assert await sessions.set_aside() == []


@pytest.mark.parametrize("state", ["waiting", "acted on", "failing"])
async def test_a_session_may_be_deleted_at_any_time(
    tmp_path: Path, autojump_clock: MockClock, state: str
) -> None:
    path = tmp_path / "state.db"

    async def act(turn: Turn) -> None:
        if turn.messages[0].body["content"] != "old":
            return
        if state == "failing":
            raise ValueError
        await trio.sleep(20)

    log = Log(act)
    async with (
        opened(path) as sessions,
        opened(path) as other,
        serving(sessions, log, max_concurrent=1),
    ):
        if state == "waiting":
            await sessions["before"].post(U("old"))
            await trio.sleep(1)
        await sessions["a"].post(U("old"))
        await trio.sleep(0.2)
        await other.delete("a")
        await other["a"].post(U("new"))
        await trio.sleep(60)
        assert log.texts.count("old") == 1
        assert log.texts[-1] == "new"
        assert await waiting(sessions["a"]) == []
        assert said(await sessions["a"].transcript()) == ["new"]


async def test_what_was_set_aside_is_listed_in_pages_requeued_and_dismissed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    log = Log(failing())
    async with opened(path) as sessions:
        receipts: dict[str, Posted] = {}
        for n in range(5):
            receipts[str(n)] = await sessions[f"s{n % 2}"].post(U(str(n)), key=str(n))
        async with serving(sessions, log, max_attempts=1):
            await trio.sleep(5)
        found: list[InboxMessage] = []
        while page := await sessions.set_aside(after=found[-1].place if found else 0, limit=2):
            assert len(page) <= 2
            found.extend(page)
        assert [(m.body["content"], m.session) for m in found] == [
            (str(n), f"s{n % 2}") for n in range(5)
        ]
        with pytest.raises(Rejected):
            await sessions.set_aside(limit=0)

        id = receipts["0"].id
        assert id is not None
        assert not await sessions["s1"].requeue(id), "it is another session's"
        log.act = None
        log.texts.clear()
        log.attempts.clear()
        async with serving(sessions, log, max_attempts=1):
            await trio.sleep(5)
            assert log.texts == [], "nothing is delivered by itself any more"
            assert await sessions["s0"].requeue(id)
            await trio.testing.wait_all_tasks_blocked()
            assert log.texts == ["0"], "it is noticed at once"
            assert log.attempts == [1], "and tried as often as a new one"
            assert not await sessions["s0"].requeue(id)
        async with opened(path) as other, serving(sessions, log, max_attempts=1):
            id = receipts["1"].id
            assert id is not None
            assert await other["s1"].requeue(id)
            await trio.sleep(1)
            assert log.texts == ["0", "1"], "another store's is noticed within a second"
        id = receipts["2"].id
        assert id is not None
        assert await sessions["s0"].dismiss(id)
        assert not await sessions["s0"].dismiss(id)
        assert [m.body["content"] for m in await sessions.set_aside()] == ["3", "4"]
        assert said(await sessions["s0"].transcript()) == ["0", "2", "4"], "it stays there"
        assert (await sessions["s0"].post(U("2"), key="2")).status == "duplicate"


async def test_a_requeued_message_waits_behind_all_others(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    log = Log(failing("bad"))
    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        receipt = await session.post(U("bad"))
        async with serving(sessions, log, max_attempts=1):
            await trio.sleep(5)
        for n in range(3):
            await session.post(U(str(n)))
        assert receipt.id is not None
        await session.requeue(receipt.id)
        log.act = None
        log.texts.clear()
        async with serving(sessions, log):
            await trio.sleep(5)
        assert log.texts == ["0", "1", "2", "bad"]
        assert said(await session.transcript()) == ["bad", "0", "1", "2"], "appended once, at first"


# Who is next.


async def test_a_session_with_a_thousand_messages_keeps_nobody_waiting_for_more_than_its_share(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    log = Log(partial(hang, 0.01))
    async with opened(tmp_path / "state.db") as sessions:
        for n in range(1_000):
            await sessions["big"].post(U(str(n)))
        for n in range(100):
            await sessions[f"small {n}"].post(U("x"))
        async with serving(sessions, log, max_concurrent=1):
            await trio.sleep(2)
            assert len(set(log.ids[:101])) == 101
            before = len(log.ids)
            await sessions["late"].post(U("x"))
            await trio.sleep(1)
            assert "late" in log.ids[before : before + 3]
            await trio.sleep(30)
        assert [text for text in log.texts if text != "x"] == [str(n) for n in range(1_000)]
        assert log.most == 1


async def test_sessions_behind_the_first_page_get_their_share_as_well(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_room, "PAGE", 5)
    log = Log(partial(hang, 0.01))
    async with opened(tmp_path / "state.db") as sessions:
        for n in range(10):
            for number in range(40):
                await sessions[str(number)].post(U(str(n)))
        async with serving(sessions, log, max_concurrent=1):
            await trio.sleep(60)
    assert len(log.ids) == 400
    turns = Counter[str]()
    for id in log.ids:
        turns[id] += 1
        behind = min(turns[str(n)] for n in range(40))
        assert turns[id] - behind <= 2, "somebody had a third turn before everybody had one"


@pytest.mark.parametrize("most", [1, 7, 100])
async def test_no_more_handlers_run_at_once_than_may_and_as_many_as_can(
    tmp_path: Path, autojump_clock: MockClock, most: int
) -> None:
    async def act(turn: Turn) -> None:
        await trio.sleep(1)
        if turn.messages[0].body["content"] == "1" and turn.attempt == 1:
            raise ValueError

    log = Log(act)
    async with opened(tmp_path / "state.db") as sessions:
        for n in range(3):
            for id in range(20):
                await sessions[str(id)].post(U(str(n)))
        async with serving(sessions, log, max_concurrent=most):
            await trio.sleep(200)
        assert log.most == min(most, 20)
        for id in range(20):
            texts = [text for i, text in zip(log.ids, log.texts, strict=True) if i == str(id)]
            assert texts == ["0", "1", "1", "2"]


async def test_more_sessions_than_a_page_that_wait_at_the_start_are_all_served(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    log = Log()
    number = 2 * serve_room.PAGE + 500
    async with opened(path) as sessions, trio.open_nursery() as nursery:
        for n in range(number):
            nursery.start_soon(sessions[str(n)].post, U(str(n)))
    async with opened(path) as sessions:
        async with serving(sessions, log, max_concurrent=1):
            await trio.sleep(60)
        assert sorted(map(int, log.ids)) == list(range(number))
        places = Counter(log.ids)
        assert set(places.values()) == {1}


async def test_two_stores_share_the_work_and_never_handle_a_message_twice(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    one_did: list[str] = []
    other_did: list[str] = []
    log = Log()  # of both: it refuses a session twice at once

    async def act(mine: list[str], turn: Turn) -> None:
        mine.append(turn.id)
        await log(turn)
        await turn.append(A("answer"))

    log.act = partial(hang, 1)
    async with opened(path) as one, opened(path) as other:
        for n in range(3):
            for id in range(30):
                await (one if n % 2 else other)[str(id)].post(U(f"{id}/{n}"))
        async with (
            serving(one, partial(act, one_did), max_concurrent=10),
            serving(other, partial(act, other_did), max_concurrent=10),
        ):
            await trio.sleep(120)
        assert sorted(map(str, log.texts)) == sorted(
            f"{id}/{n}" for id in range(30) for n in range(3)
        )
        assert log.attempts == [1] * 90
        assert min(len(one_did), len(other_did)) >= 20
        for id in range(30):
            assert said(await one[str(id)].transcript()) == [
                *(f"{id}/0", "answer", f"{id}/1", "answer", f"{id}/2", "answer")
            ]


async def test_two_serves_in_one_store_share_the_work(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    log = Log(partial(hang, 1))
    async with opened(tmp_path / "state.db") as sessions:
        for n in range(3):
            for id in range(10):
                await sessions[str(id)].post(U(f"{id}/{n}"))
        async with (
            serving(sessions, log, max_concurrent=5),
            serving(sessions, log, max_concurrent=5),
        ):
            await trio.sleep(60)
        assert sorted(map(str, log.texts)) == [f"{id}/{n}" for id in range(10) for n in range(3)]
        assert log.most > 5
        assert log.attempts == [1] * 30


@pytest.mark.parametrize("stores", [1, 2])
async def test_two_that_serve_keep_the_pauses_of_a_failing_message(
    tmp_path: Path, autojump_clock: MockClock, stores: int
) -> None:
    path = tmp_path / "state.db"

    async def act(turn: Turn) -> None:
        await trio.sleep(1)
        raise ValueError

    log = Log(act)
    async with opened(path) as one, opened(path) as another:
        await one["a"].post(U("bad"))
        async with (
            serving(one, log, max_attempts=6),
            serving(another if stores == 2 else one, log, max_attempts=6),
        ):
            await trio.sleep(200)
        assert log.attempts == [1, 2, 3, 4, 5, 6]
        for n, pause in enumerate(log.pauses()):
            assert pause - 1 >= 2**n / 2


async def test_a_serve_that_comes_later_and_posts_of_another_store_are_noticed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    log = Log()
    async with opened(path) as one, opened(path) as other:
        await other["a"].post(U("before"))
        await trio.sleep(100)
        async with serving(one, log):
            await trio.testing.wait_all_tasks_blocked()
            assert log.texts == ["before"]
            for n in range(20):
                await trio.sleep(0.37)
                posted_at = trio.current_time()
                await other["a"].post(U(str(n)))
                await trio.sleep(0.63)
                assert log.texts[-1] == str(n)
                assert log.times[-1] - posted_at <= 0.25
                await one["a"].post(U("at once"))
                await trio.testing.wait_all_tasks_blocked()
                assert log.texts[-1] == "at once"


@pytest.mark.parametrize("held", ["here", "elsewhere"])
async def test_a_session_that_is_held_by_hand_takes_no_room_and_is_served_soon_after(
    tmp_path: Path, autojump_clock: MockClock, held: str
) -> None:
    path = tmp_path / "state.db"
    log = Log()
    async with opened(path) as one, opened(path) as other:
        holder = one if held == "here" else other
        async with serving(one, log, max_concurrent=1):
            async with holder["a"].turn():
                await one["a"].post(U("a"))
                await one["b"].post(U("b"))
                await trio.sleep(100)
                assert log.texts == ["b"]
                freed_at = trio.current_time()
            await trio.sleep(5)
            assert log.texts == ["b", "a"]
            assert log.times[-1] - freed_at <= (0 if held == "here" else 1.25)
            assert log.attempts == [1, 1]


@pytest.mark.parametrize("from_another", [False, True], ids=["same store", "another store"])
async def test_no_post_is_overlooked_however_it_falls_on_the_end_of_a_turn(
    tmp_path: Path, autojump_clock: MockClock, from_another: bool
) -> None:
    """Committed between the look whether more waits, at a turn's end, and forgetting the session."""
    path = tmp_path / "state.db"
    ended = trio.Event()
    log = Log()

    async def act(turn: Turn) -> None:
        await trio.sleep(1)
        ended.set()

    log.act = act
    async with opened(path) as sessions, opened(path) as another:
        poster = (another if from_another else sessions)["a"]
        async with serving(sessions, log):
            for steps in range(60):
                ended = trio.Event()
                await sessions["a"].post(U(f"first {steps}"))
                await ended.wait()
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                await poster.post(U(f"second {steps}"))
                await trio.sleep(10)
                assert log.texts[-2:] == [f"first {steps}", f"second {steps}"]


async def test_no_post_is_overlooked_while_the_end_of_a_turn_is_on_its_way(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The end is committed and not answered yet; then the other store posts, and it is found."""
    path = tmp_path / "state.db"
    gate = Gate()
    log = Log()

    async def act(turn: Turn) -> None:
        if turn.messages[0].body["content"] == "first":
            gate.shut("end")

    log.act = act
    async with (
        opened(path, offload=gate) as sessions,
        opened(path) as another,
        serving(sessions, log),
    ):
        await sessions["a"].post(U("first"))
        await trio.sleep(1)
        await another["a"].post(U("second"))
        await trio.sleep(5)
        assert log.texts == ["first"]
        gate.open()
        await trio.sleep(5)
        assert log.texts == ["first", "second"]


# When storage fails.


async def test_serve_goes_on_when_inboxes_could_not_be_read_for_a_while(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    disk = Counting()
    log = Log()
    async with opened(tmp_path / "state.db", offload=disk) as sessions, serving(sessions, log):
        disk.fail_reads = True
        for id in "abc":
            await sessions[id].post(U(id))
        disk.reads = 0
        await trio.sleep(60)
        assert log.texts == []
        assert 1 < disk.reads <= 60 * 4 + 1
        disk.fail_reads = False
        await trio.sleep(5)
        assert sorted(map(str, log.texts)) == ["a", "b", "c"]


async def test_serve_goes_on_when_turns_could_not_be_taken_for_a_while(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Counting()
    log = Log()
    async with opened(tmp_path / "state.db", offload=disk) as sessions:
        for id in "abc":
            await sessions[id].post(U(id))
        disk.fail_writes = True
        disk.writes = 0
        async with serving(sessions, log):
            await trio.sleep(60)
            assert log.texts == []
            assert 3 < disk.writes <= 3 * 2 * 60 + 3
            assert "handler" not in caplog.text, "none was called"
            disk.fail_writes = False
            await trio.sleep(5)
            assert sorted(map(str, log.texts)) == ["a", "b", "c"]
            assert log.attempts == [1, 1, 1]


@pytest.mark.parametrize("fails", [False, True], ids=["the handler returns", "the handler fails"])
async def test_ends_that_could_not_be_written_for_a_while_are_not_forgotten(
    tmp_path: Path, autojump_clock: MockClock, fails: bool
) -> None:
    with failing_disk() as disk:

        async def act(turn: Turn) -> None:
            if turn.messages[0].body["content"] == "first" and turn.attempt == 1:
                await trio.sleep(1)
                disk.write_error = apsw.IOError
                if fails:
                    raise ValueError

        log = Log(act)
        async with opened(tmp_path / "state.db", vfs=disk.name) as sessions:
            session = sessions["a"]
            await session.post(U("first"))
            await session.post(U("second"))
            async with serving(sessions, log):
                await trio.sleep(60)
                assert log.texts == ["first"]
                assert disk.failures < 500
                disk.write_error = None
                await trio.sleep(100)
                assert log.texts == ["first", *(["first"] if fails else []), "second"]
                assert log.attempts == [1, *([2] if fails else []), 1]
            assert await waiting(session) == []
            assert said(await session.transcript()) == ["first", "second"]
            assert sessions.health().ok


async def test_a_handler_whose_appends_fail_has_failed_and_what_was_kept_is_there(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with failing_disk() as disk:

        async def act(turn: Turn) -> None:
            if turn.attempt == 1:
                disk.write_error = apsw.IOError
            await turn.append(A(f"answer {turn.attempt}"), key=f"answer {turn.attempt}")

        log = Log(act)
        async with opened(tmp_path / "state.db", vfs=disk.name) as sessions:
            await sessions["a"].post(U("x"))
            async with serving(sessions, log):
                await trio.sleep(5)
                disk.write_error = None
                await trio.sleep(100)
            assert log.attempts == [1, 2]
            assert said(await sessions["a"].transcript()) == ["x", "answer 1", "answer 2"]
            assert await waiting(sessions["a"]) == []


async def test_a_serve_that_is_cancelled_while_storage_fails_returns_and_loses_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    with failing_disk() as disk:
        log = Log(partial(hang, 1_000))
        async with opened(path, vfs=disk.name) as sessions:
            await sessions["a"].post(U("x"))
            async with serving(sessions, log):
                await trio.sleep(5)
                disk.write_error = apsw.IOError
            assert sessions.stats().turns == 0
            disk.write_error = None
            await trio.sleep(60)
            assert await sessions["a"].holder() is None
            assert await waiting(sessions["a"]) == [("x", 0, None)]


async def test_a_disk_that_fails_now_and_then_delays_and_loses_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The handler sees some of it. Everything is acted on in order, and appended once."""
    with failing_disk() as disk:

        async def act(turn: Turn) -> None:
            await trio.sleep(0.3)

        async def trouble() -> None:
            while True:
                await trio.sleep(0.7)
                disk.write_error = apsw.IOError
                await trio.sleep(0.4)
                disk.write_error = None

        log = Log(act)
        async with opened(tmp_path / "state.db", vfs=disk.name) as sessions:
            for n in range(10):
                for id in "abcde":
                    await sessions[id].post(U(f"{n}"))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trouble)
                async with serving(sessions, log, max_concurrent=3, max_attempts=10**6):
                    await trio.sleep(300)
                nursery.cancel_scope.cancel()
            disk.write_error = None
            for id in "abcde":
                assert said(await sessions[id].transcript()) == [str(n) for n in range(10)]
                assert await waiting(sessions[id]) == []
            assert disk.failures > 0


# What it costs, and how it ends.


async def test_an_idle_serve_asks_a_few_times_a_second_and_writes_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    disk = Counting()
    async with opened(tmp_path / "state.db", offload=disk) as sessions:
        for id in range(50):
            await sessions[str(id)].post(U("x"))
        async with serving(sessions, Log()):
            await trio.sleep(5)
            disk.reads = disk.writes = 0
            await trio.sleep(600)
            assert 600 <= disk.reads <= 4 * 600 + 1
            assert disk.writes == 0


async def test_a_serve_that_waits_for_others_does_little(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    disk = Counting(most=10_000)
    log = Log()
    async with opened(path, offload=disk) as sessions, opened(path) as other:
        async with other["a"].turn(), other["b"].turn(), other["c"].turn():
            for id in "abc":
                await sessions[id].post(U(id))
            async with serving(sessions, log):
                await trio.sleep(600)
            assert log.texts == []
            assert disk.writes <= 3 * 2 * 600 + 10
        async with serving(sessions, log):
            await trio.sleep(5)
        assert sorted(map(str, log.texts)) == ["a", "b", "c"]


@pytest.mark.parametrize("first", ["another serve", "a person"])
async def test_a_serve_behind_somebody_whose_try_is_under_way_does_not_spin(
    tmp_path: Path, autojump_clock: MockClock, first: str
) -> None:
    """The writer is stuck with the turn of whoever was first; nobody holds it yet."""
    gate, disk = Gate(), Counting(most=2_000)

    async def offload(work: Callable[[], R], limiter: trio.CapacityLimiter, /) -> R:
        async def counted() -> R:
            return await disk(work, limiter)

        if limiter.total_tokens == 1:
            await gate.may_begin.wait()
        return await counted()

    async def take(session: Session) -> None:
        async with session.turn():
            await trio.sleep(1)

    log = Log()
    async with opened(tmp_path / "state.db", offload=offload) as sessions:
        await sessions["a"].post(U("x"))
        gate.shut()
        async with trio.open_nursery() as nursery:
            if first == "a person":
                nursery.start_soon(take, sessions["a"])
            else:
                nursery.start_soon(sessions.serve, log)
            await trio.testing.wait_all_tasks_blocked()
            async with serving(sessions, log):
                await trio.sleep(100)
                gate.open()
                await trio.sleep(10)
            nursery.cancel_scope.cancel()
        assert log.texts == ["x"]


async def test_a_serve_behind_somebody_who_waits_for_an_expired_turn_does_not_spin(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The person at the front pauses between two tries, and the turn runs out in between."""
    path = tmp_path / "state.db"
    disk = Counting(most=2_000)
    log = Log()

    async def take(session: Session) -> None:
        async with session.turn():
            await trio.sleep(1)

    async with opened(path, offload=disk) as sessions, opened(path) as other:
        await sessions["a"].post(U("x"))
        async with other["a"].turn(ttl=30), trio.open_nursery() as nursery:
            nursery.start_soon(take, sessions["a"])
            async with serving(sessions, log):
                await trio.sleep(20.1)
                autojump_clock.jump(9.5)
                await trio.sleep(10)
            nursery.cancel_scope.cancel()


async def test_serve_raises_closed_when_the_store_closes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """By itself and not in a group, whatever it was doing."""
    path = tmp_path / "state.db"
    raised: list[str] = []

    async def serve(sessions: Sessions, handler: Act) -> None:
        with pytest.raises(Closed) as caught:
            await sessions.serve(handler)
        raised.append(caught.value.what)

    async with trio.open_nursery() as nursery:
        async with opened(path) as idle:
            nursery.start_soon(serve, idle, Log())
            await trio.sleep(1)
        async with opened(path) as busy:
            for id in "abc":
                await busy[id].post(U(id))
                await busy[id].post(U("next"))
            nursery.start_soon(serve, busy, Log(partial(hang, 1_000)))
            await trio.sleep(1)
            assert busy.stats().turns == 3
    assert raised == ["store", "store"]
    with pytest.raises(Closed):
        await busy.serve(Log())
    async with opened(path) as sessions:
        for id in "abc":
            assert await waiting(sessions[id]) == [(id, 0, None), ("next", 0, None)]
            assert await sessions[id].holder() is None


async def test_serve_refuses_what_cannot_work(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with opened(tmp_path / "state.db") as sessions:
        for call in (
            sessions.serve(Log(), max_concurrent=0),
            sessions.serve(Log(), max_concurrent=True),
            sessions.serve(Log(), max_attempts=0),
            sessions.serve(Log(), ttl=0.5),
            sessions.serve(Log(), ttl=math.nan),
            sessions.serve(Log(), max_hold=-1.0),
        ):
            with pytest.raises(Rejected):
                await call


async def test_a_handler_that_wants_the_turn_it_has_is_told_so(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """It would wait for itself; and what it does past its turn is refused as somebody else's."""
    async with opened(tmp_path / "state.db") as sessions:

        async def act(turn: Turn) -> None:
            for attempt in (sessions[turn.id].turn(), sessions[turn.id].turn(wait=0)):
                with pytest.raises(Rejected):
                    async with attempt:
                        pass
            with pytest.raises(TurnActive):
                await sessions[turn.id].append(A("past it"))
            if said(turn.messages) == ["x"]:
                await sessions[turn.id].post(U("from inside"))

        log = Log(act)
        await sessions["a"].post(U("x"))
        async with serving(sessions, log):
            await trio.sleep(0.1)
        assert log.texts == ["x", "from inside"]
        assert log.attempts == [1, 1]
