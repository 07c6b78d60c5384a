"""Posting: what the receipt says is true, whatever fails, whoever holds the turn."""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import get_args

import apsw
import pytest
import trio
from support import A, Clock, Disk, Gate, Job, T, U, count, failing_disk, said
from trio.testing import MockClock

from turnkeeper.actors import (
    Closed,
    InboxMessage,
    Posted,
    Rejected,
    Session,
    Sessions,
    StorageBusy,
    StorageError,
    StorageFailed,
    StorageFull,
    Turn,
    TurnLost,
    open_sessions,
)
from turnkeeper.storage import Connection, Moment, Offload, Policy, inline

POLICIES: tuple[Policy, ...] = get_args(Policy)
BUSY = ("served here", "served elsewhere", "held by hand", "only waiting")


def opened(
    path: Path,
    *,
    policy: Policy = "queue",
    max_inbox: int = 1_000,
    vfs: str | None = None,
    offload: Offload = inline,
) -> AbstractAsyncContextManager[Sessions]:
    """A store whose turns expire by the virtual clock."""
    return open_sessions(
        path,
        offload=offload,
        clock=lambda: Moment("a boot", trio.current_time()),
        vfs=vfs,
        policy=policy,
        max_inbox=max_inbox,
    )


def texts(inbox: list[InboxMessage]) -> list[object]:
    """What waits, in order."""
    return [message.body["content"] for message in inbox]


async def nothing(turn: Turn) -> None:
    """Act on what was taken by doing nothing."""


async def test_what_was_accepted_waits_in_the_inbox_and_not_in_the_transcript(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        first = await session.post(U("one"), key="1")
        second = await session.post(U("two"))
        assert (first.status, first.policy, first.waiting) == ("accepted", "queue", 1)
        assert (second.status, second.waiting) == ("accepted", 2)
        assert first.id != second.id
        inbox = await session.inbox()
        assert [(m.id, m.session, m.body, m.key) for m in inbox] == [
            (first.id, "a", U("one"), "1"),
            (second.id, "a", U("two"), None),
        ]
        assert [m.accepted_at for m in inbox] == [first.accepted_at, second.accepted_at]
        assert [(m.attempts, m.taken, m.set_aside) for m in inbox] == [(0, False, None)] * 2
        assert inbox[0].place < inbox[1].place
        assert list(await session.transcript()) == []


async def test_a_post_raises_no_revision_and_no_turn_refuses_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with opened(tmp_path / "state.db") as one, opened(tmp_path / "state.db") as other:
        await one["a"].append(U("before"))
        before = (await one["a"].transcript()).revision
        async with one["a"].turn():
            assert (await one["a"].post(U("here"))).status == "accepted"
            assert (await other["a"].post(U("there"))).status == "accepted"
        assert (await one["a"].transcript()).revision == before


async def test_a_post_begins_the_session_and_one_that_is_not_accepted_does_not(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with opened(tmp_path / "state.db") as sessions:
        with pytest.raises(Rejected):
            await sessions["bad"].post({"content": "no role"})
        with pytest.raises(Rejected):
            await sessions["bad"].post(U("x"), policy="someday")  # type: ignore[arg-type]  # what is tested
        assert await sessions["bad"].info() is None
        await sessions["good"].post(U("x"))
        assert [info.id for info in await sessions.list()] == ["good"]


async def test_a_handle_on_a_deleted_session_cannot_post(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        await session.post(U("gone"), key="k")
        await sessions.delete("a")
        with pytest.raises(Closed):
            await session.post(U("late"))
        again = await sessions["a"].post(U("new"), key="k")
        assert again.status == "accepted", "another life has keys of its own"
        assert texts(await sessions["a"].inbox()) == ["new"]
    with pytest.raises(Closed):
        await session.post(U("later"))


async def test_a_post_that_is_cancelled_before_it_began_is_not_there(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    gate = Gate()
    async with opened(tmp_path / "state.db", offload=gate) as sessions:
        gate.shut()
        with trio.move_on_after(1) as impatient:
            await sessions["a"].post(U("withdrawn"))
        assert impatient.cancelled_caught
        gate.open()
        await sessions["a"].post(U("stays"))
        assert texts(await sessions["a"].inbox()) == ["stays"]


async def test_a_post_that_has_begun_gives_its_receipt_to_a_cancelled_caller(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    gate = Gate()
    receipts: list[Posted] = []
    async with opened(tmp_path / "state.db", offload=gate) as sessions:
        gate.shut("end")

        async def post() -> None:
            with trio.move_on_after(1):
                receipts.append(await sessions["a"].post(U("begun")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(post)
            await trio.sleep(5)
            assert receipts == []
            gate.open()
        assert [receipt.status for receipt in receipts] == ["accepted"]
        assert texts(await sessions["a"].inbox()) == ["begun"]


async def test_c61_a_full_inbox_says_so_and_drops_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with opened(tmp_path / "state.db", max_inbox=3) as sessions:
        session = sessions["a"]
        for n in range(3):
            assert (await session.post(U(str(n)), key=str(n))).status == "accepted"
        for _ in range(2):
            assert await session.post(U("3"), key="3") == Posted("full", None, None, "queue", 3)
        again = await session.post(U("1"), key="1")
        assert again.status == "duplicate", "what is there already needs no room"
        assert (await sessions["b"].post(U("x"))).status == "accepted", "each has its own room"
        assert texts(await session.inbox()) == ["0", "1", "2"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sessions.serve, nothing)
            await trio.sleep(5)
            nursery.cancel_scope.cancel()
        assert said(await session.transcript()) == ["0", "1", "2"]
        assert (await session.post(U("3"), key="3")).status == "accepted"


async def test_c61_what_is_acted_on_takes_room_and_what_was_set_aside_does_not(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def fail(turn: Turn) -> None:
        await trio.sleep(1)
        raise ValueError

    async with opened(tmp_path / "state.db", max_inbox=1) as sessions:
        session = sessions["a"]
        await session.post(U("bad"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: sessions.serve(fail, max_attempts=1))
            await trio.sleep(0.5)
            assert (await session.post(U("next"))).status == "full"
            await trio.sleep(2)
            assert len(await sessions.set_aside()) == 1
            assert (await session.post(U("next"))).status == "accepted"
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("place", ["waiting", "in its turn", "done", "set aside"])
async def test_the_same_key_is_a_duplicate_wherever_the_first_one_stands(
    tmp_path: Path, autojump_clock: MockClock, place: str
) -> None:
    """And the receipt is the first one's."""
    seen = trio.Event()

    async def handle(turn: Turn) -> None:
        seen.set()
        if place == "in its turn":
            await trio.sleep_forever()
        if place == "set aside":
            raise ValueError

    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        await session.post(U("other"), key="another")
        first = await session.post(U("x"), key="k")
        async with trio.open_nursery() as nursery:
            if place != "waiting":
                nursery.start_soon(lambda: sessions.serve(handle, max_attempts=1))
                await seen.wait()
                await trio.sleep(5)
            again = await session.post(U("x"), key="k")
            assert (again.status, again.id, again.accepted_at) == (
                "duplicate",
                first.id,
                first.accepted_at,
            )
            with pytest.raises(Rejected, match="key"):
                await session.post(U("different"), key="k")
            nursery.cancel_scope.cancel()
        inbox = texts(await session.inbox())
        stored = [text for text in said(await session.transcript()) if text not in inbox]
        assert (inbox + stored).count("x") == 1


async def test_posts_and_appends_share_their_keys(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        await session.append(U("x"), key="k")
        assert (await session.post(U("x"), key="k")).status == "duplicate"
        assert await session.inbox() == []
        await session.undo()
        assert (await session.post(U("x"), key="k")).status == "duplicate", "undone, not unsaid"


@pytest.mark.parametrize("vfs", ["write", "open"])
@pytest.mark.parametrize("error", [apsw.IOError, apsw.FullError], ids=["io", "full"])
async def test_c62_a_post_that_the_disk_refused_is_not_kept_and_comes_again(
    tmp_path: Path, autojump_clock: MockClock, vfs: str, error: type[apsw.Error]
) -> None:
    path = tmp_path / "state.db"
    with failing_disk() as disk:
        async with opened(path, vfs=disk.name) as sessions:
            if vfs == "write":
                await sessions["other"].post(U("before"))
                disk.write_error = error
            else:
                disk.open_error = error
            with pytest.raises((StorageFailed, StorageFull)) as caught:
                await sessions["a"].post(U("42"), key="42")
            assert not caught.value.kept
            assert not caught.value.unknown
            assert sessions.health().pending == 0
            disk.write_error = disk.open_error = None
            assert (await sessions["a"].post(U("42"), key="42")).status == "accepted"
            assert (await sessions["a"].post(U("42"), key="42")).status == "duplicate"
            assert texts(await sessions["a"].inbox()) == ["42"]


@pytest.mark.parametrize("begun", [False, True], ids=["a new session", "an old session"])
async def test_c62_whichever_write_of_the_post_fails_the_redelivery_stores_exactly_one(
    tmp_path: Path, autojump_clock: MockClock, begun: bool
) -> None:
    """Each write and sync of the transaction fails in turn, the commit's among them."""

    async def post_when(disk: Disk, path: Path, nth: int) -> bool:
        """Return whether the n-th write was reached."""
        async with opened(path, vfs=disk.name) as sessions:
            session = sessions["a"]
            await sessions["other"].post(U("before"))
            if begun:
                await session.append(U("before"))
            fail_at(disk, nth)
            first: Posted | None = None
            with suppress(StorageError):
                first = await session.post(U("42"), key="42")
            assert sessions.health().pending == 0
            reached = disk.failures > 0
            again = await session.post(U("42"), key="42")
            if first is not None:
                assert (again.status, again.id) == ("duplicate", first.id)
            assert (await session.post(U("42"), key="42")).status == "duplicate"
            assert texts(await session.inbox()) == ["42"]
            return reached

    reached = 0
    for nth in range(100):
        with failing_disk() as disk:
            path = tmp_path / f"{nth}.db"
            if not await post_when(disk, path, nth):
                break
            reached += 1
            assert count(path, "inbox") == 2
    assert 2 < reached < 99


def fail_at(disk: Disk, nth: int) -> None:
    """Let `nth` writes pass; the next one fails, and none after it."""
    passed = 0

    def check() -> None:
        nonlocal passed
        if passed == nth:
            disk.failures += 1
            passed += 1
            raise apsw.IOError("a test says so")
        passed += 1

    disk.check_write = check  # type: ignore[method-assign]  # this disk only


@pytest.mark.parametrize("fails", ["xWrite", "xSync"])
@pytest.mark.parametrize("restart", [False, True], ids=["same store", "opened again"])
async def test_c62_a_post_of_unknown_outcome_is_stored_exactly_once_by_its_redelivery(
    tmp_path: Path, fails: str, restart: bool
) -> None:
    path = tmp_path / "state.db"
    answers = LosingAnswers()
    clock = Clock()

    def hours() -> float:  # each look at the clock is later, so the patience ends soon
        clock.now += 3
        return clock.now

    def again() -> AbstractAsyncContextManager[Sessions]:
        return open_sessions(path, offload=inline, vfs=answers.vfs, monotonic=hours)

    try:
        async with again() as sessions:
            await sessions["other"].post(U("before"))
            answers.fail = fails
            with pytest.raises(StorageFailed) as caught:
                await sessions["a"].post(U("42"), key="42")
            assert caught.value.unknown
            assert not caught.value.kept
            assert sessions.health().pending == 0
            answers.gone = False
            if not restart:
                await redeliver(sessions["a"])
        if restart:
            async with again() as sessions:
                await redeliver(sessions["a"])
    finally:
        answers.system.unregister()
    assert count(path, "inbox") == 2


async def redeliver(session: Session) -> None:
    first = await session.post(U("42"), key="42")
    second = await session.post(U("42"), key="42")
    assert (second.status, second.id) == ("duplicate", first.id)
    assert texts(await session.inbox()) == ["42"]


class LosingAnswers:
    """A disk that does what it is told, says that it failed, and is gone then."""

    vfs = "losing-answers-to-posts"

    def __init__(self) -> None:
        self.fail: str | None = None
        self.gone = False
        answers = self

        class File(apsw.VFSFile):
            def xWrite(self, data: bytes, offset: int) -> None:
                answers.check("xWrite")
                super().xWrite(data, offset)

            def xSync(self, flags: int) -> None:
                super().xSync(flags)
                answers.check("xSync")

        class FileSystem(apsw.VFS):
            def __init__(self) -> None:
                super().__init__(answers.vfs, "")

            def xOpen(self, name: apsw.URIFilename | str | None, flags: list[int]) -> apsw.VFSFile:
                answers.check("xOpen")
                return File("", name, flags)

        self.system = FileSystem()

    def check(self, doing: str) -> None:
        if doing == self.fail:
            self.fail, self.gone = None, True
        if self.gone:
            raise apsw.IOError("a test says so")


async def test_c62_a_post_that_waited_for_the_file_in_vain_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    clock = Clock()

    def hours() -> float:
        clock.now += 3
        return clock.now

    async with open_sessions(path, offload=inline, monotonic=hours) as sessions:
        await sessions["other"].post(U("before"))
        rival = apsw.Connection(str(path))
        rival.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageBusy) as caught:
            await sessions["a"].post(U("42"), key="42")
        assert not caught.value.kept
        rival.execute("ROLLBACK")
        rival.close()
        await redeliver(sessions["a"])


async def test_c62_a_post_beside_one_that_fails_is_not_lost(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """They are in one transaction, and the second of them cannot be written."""
    async with opened(tmp_path / "state.db") as sessions:
        receipts: list[Posted] = []

        async def post(id: str) -> None:
            receipts.append(await sessions[id].post(U(id)))

        def lose(connection: Connection) -> None:
            connection.execute("ROLLBACK")
            raise apsw.IOError("a test says so")

        async with trio.open_nursery() as nursery:
            for id in "abc":
                nursery.start_soon(post, id)
            sessions._store.submit(Job(lose))
        assert [receipt.status for receipt in receipts] == ["accepted"] * 3
        for id in "abc":
            assert texts(await sessions[id].inbox()) == [id]


async def test_c63_a_key_that_another_store_has_posted_is_a_duplicate_with_the_first_receipt(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    async with opened(path) as one, opened(path) as other:
        first = await one["a"].post(U("x"), key="42")
        second = await other["a"].post(U("x"), key="42")
    assert (first.status, second.status) == ("accepted", "duplicate")
    assert (second.id, second.accepted_at) == (first.id, first.accepted_at)
    async with opened(path) as third:
        assert (await third["a"].post(U("x"), key="42")).id == first.id
        async with trio.open_nursery() as nursery:
            nursery.start_soon(third.serve, nothing)
            await trio.sleep(2)
            nursery.cancel_scope.cancel()
    async with opened(path) as fourth:
        last = await fourth["a"].post(U("x"), key="42")
        assert (last.status, last.id, last.accepted_at) == (
            "duplicate",
            first.id,
            first.accepted_at,
        )
        assert [message.append_id for message in await fourth["a"].transcript()] == [first.id]
        assert await fourth["a"].inbox() == []


async def test_c63_two_stores_that_post_one_key_at_once_store_it_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    receipts: list[Posted] = []

    async def post(session: Session) -> None:
        receipts.append(await session.post(U("x"), key="42"))

    async with opened(path) as one, opened(path) as other:
        async with trio.open_nursery() as nursery:
            for n in range(10):
                nursery.start_soon(post, (one if n % 2 else other)["a"])
        assert sorted(receipt.status for receipt in receipts) == ["accepted"] + ["duplicate"] * 9
        assert len({receipt.id for receipt in receipts}) == 1
        assert texts(await one["a"].inbox()) == ["x"]


def status_when_busy(policy: Policy) -> str:
    return "refused" if policy == "refuse" else "accepted"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("busy", BUSY)
async def test_c65_a_message_comes_while_the_session_is_busy(
    tmp_path: Path, autojump_clock: MockClock, busy: str, policy: Policy
) -> None:
    """Each policy as documented, whoever keeps the session busy; the receipt says which it was."""
    path = tmp_path / "state.db"
    log: list[tuple[str, list[object]]] = []
    ends: list[str] = []

    async def handle(turn: Turn) -> None:
        log.append((turn.id, said(turn.messages)))
        try:
            if said(turn.messages) == ["first"]:
                await turn.append(A(call="open"))
                await trio.sleep(10)
        except trio.Cancelled:
            ends.append("cancelled")
            raise
        ends.append("returned")

    async def hold(session: Session) -> None:
        try:
            async with session.turn() as turn:
                await turn.extend([U("first"), A(call="open")])
                await trio.sleep(10)
        except TurnLost as loss:
            ends.append("cancelled" if loss.reason == "interrupted" else loss.reason)
        else:
            ends.append("returned")

    async with (
        opened(path) as here,
        opened(path) as elsewhere,
        trio.open_nursery() as nursery,
    ):
        session = here["a"]
        if busy == "held by hand":
            nursery.start_soon(hold, session)
        else:
            await session.post(U("first"))
        if busy == "served here":
            nursery.start_soon(here.serve, handle)
        elif busy == "served elsewhere":
            nursery.start_soon(elsewhere.serve, handle)
        await trio.sleep(2)
        receipts = [await session.post(U(text), policy=policy) for text in ("x", "y")]
        assert [receipt.status for receipt in receipts] == [status_when_busy(policy)] * 2
        assert [receipt.policy for receipt in receipts] == [policy] * 2
        before = 0 if busy == "held by hand" else 1
        waiting = [before, before] if policy == "refuse" else [before + 1, before + 2]
        assert [receipt.waiting for receipt in receipts] == waiting
        if busy in ("held by hand", "only waiting"):
            if busy == "only waiting":
                assert log == []
            nursery.start_soon(here.serve, handle)
        await trio.sleep(1)
        if policy != "interrupt":
            assert ends == []
        else:
            assert ends == (["returned"] if busy == "only waiting" else ["cancelled", "returned"])
        await trio.sleep(30)
        nursery.cancel_scope.cancel()
    turns = [messages for _, messages in log]
    together = policy in ("collect", "interrupt")
    rest: list[list[object]] = [["x", "y"]] if together else [["x"], ["y"]]
    if policy == "refuse":
        rest = []
    if busy == "held by hand":
        assert turns == rest
    elif busy == "only waiting" and policy == "interrupt":
        assert turns == [["first", "x", "y"]]
    else:
        assert turns == [["first"], *rest]
    async with opened(path) as sessions:
        session = sessions["a"]
        messages = await session.transcript()
        assert await session.inbox() == []
        assert await session.holder() is None
        people = [message for message in messages if message.role == "user"]
        assert said(people) == ["first", *([] if policy == "refuse" else ["x", "y"])]
        calls = [message for message in messages if message.role == "assistant"]
        closed = [message for message in messages if message.synthetic]
        assert len(closed) == len(calls), "no turn leaves a call without its result"
        if calls:
            assert closed[0].position == calls[0].position + 1


@pytest.mark.parametrize("policy", POLICIES)
async def test_c65_a_session_that_is_not_busy_takes_a_message_under_any_policy(
    tmp_path: Path, autojump_clock: MockClock, policy: Policy
) -> None:
    async with opened(tmp_path / "state.db") as sessions:
        await sessions["old"].append(U("before"))
        async with sessions["old"].turn():
            pass
        for id in ("new", "old"):
            receipt = await sessions[id].post(U("x"), policy=policy)
            assert (receipt.status, receipt.policy, receipt.waiting) == ("accepted", policy, 1)


async def test_c65_a_dead_turn_makes_a_session_not_busy(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    async with opened(path) as one, opened(path) as other, one["a"].turn(ttl=5):
        assert (await other["a"].post(U("x"), policy="refuse")).status == "refused"
        autojump_clock.jump(10)  # the keeper gets no chance to renew it
        assert (await other["a"].post(U("x"), policy="refuse")).status == "accepted"


@pytest.mark.parametrize("usual", POLICIES)
@pytest.mark.parametrize("of_session", POLICIES)
async def test_c65_the_posts_own_policy_comes_before_the_sessions_and_that_before_the_stores(
    tmp_path: Path, autojump_clock: MockClock, usual: Policy, of_session: Policy
) -> None:
    path = tmp_path / "state.db"
    async with opened(path, policy=usual) as one, opened(path) as other:

        async def policies(sessions: Sessions) -> list[Policy]:
            """What a post without and one with a policy of its own are told."""
            return [
                (await sessions["a"].post(U("x"))).policy,
                (await sessions["a"].post(U("x"), policy="collect")).policy,
            ]

        assert await policies(one) == [usual, "collect"]
        assert await policies(other) == ["queue", "collect"]
        await other["a"].set_policy(of_session)
        assert await policies(one) == [of_session, "collect"]
        assert await policies(other) == [of_session, "collect"]
        assert (await one["b"].post(U("x"))).policy == usual, "it is that session's only"
    async with opened(path, policy=usual) as later:
        assert await policies(later) == [of_session, "collect"], "it is kept in the file"
        await later["a"].set_policy(None)
        assert await policies(later) == [usual, "collect"]


async def test_c65_the_policy_decides_that_was_there_when_the_message_came(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    turns: list[list[object]] = []

    async def handle(turn: Turn) -> None:
        turns.append(said(turn.messages))

    async with opened(tmp_path / "state.db", policy="collect") as sessions:
        session = sessions["a"]
        for text in "12":
            await session.post(U(text))
        await session.set_policy("queue")
        for text in "34":
            await session.post(U(text))
        assert [message.policy for message in await session.inbox()] == ["collect"] * 2 + [
            "queue"
        ] * 2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sessions.serve, handle)
            await trio.sleep(5)
            nursery.cancel_scope.cancel()
    assert turns == [["1", "2"], ["3"], ["4"]]


async def test_a_policy_can_be_set_under_somebody_elses_turn_and_for_a_new_session(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    async with opened(path) as one, opened(path) as other:
        await one["new"].set_policy("refuse")
        assert (await other["new"].post(U("x"))).policy == "refuse"
        async with one["a"].turn():
            await other["a"].set_policy("collect")
            assert (await one["a"].post(U("x"))).policy == "collect"
        with pytest.raises(Rejected):
            await one["a"].set_policy("someday")  # type: ignore[arg-type]  # what is tested


async def test_a_turn_by_hand_is_not_interrupted_by_what_came_before_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Nobody serves, so the message waits on; a person who acts meanwhile must be able to."""
    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        await session.post(U("now!"), policy="interrupt")
        async with session.turn() as turn:
            await trio.sleep(2)
            await turn.append(A("by hand"))
        async with session.take_over() as turn:
            await trio.sleep(2)
            await turn.append(A("and again"))
        assert said(await session.transcript()) == ["by hand", "and again"]


async def test_what_is_pending_goes_into_the_file_with_a_post_and_does_not_become_one(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with failing_disk() as disk:
        async with opened(tmp_path / "state.db", vfs=disk.name) as sessions:
            session = sessions["a"]
            await session.append(U("before"))
            disk.write_error = apsw.IOError
            with pytest.raises(StorageError):
                await session.append(U("kept"), key="k")
            disk.write_error = None
            assert (await session.post(U("kept"), key="k")).status == "duplicate"
            assert said(await session.transcript()) == ["before", "kept"]
            assert sessions.health().pending == 0


async def test_requeue_and_dismiss_say_no_to_what_was_not_set_aside(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        receipt = await session.post(U("waits"))
        assert receipt.id is not None
        for id in (receipt.id, receipt.id + 1, 0):
            assert not await session.requeue(id)
            assert not await session.dismiss(id)
        assert not await sessions["nobody"].requeue(receipt.id)
        assert await sessions["nobody"].info() is None
        assert texts(await session.inbox()) == ["waits"]
        with pytest.raises(Rejected):
            await session.requeue(-1)
        with pytest.raises(Rejected):
            await session.dismiss("1")  # type: ignore[arg-type]  # what is tested


async def test_deleting_a_session_takes_its_inbox_along_and_nobody_elses(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "state.db"
    async with opened(path) as sessions:
        for id in "ab":
            await sessions[id].post(U(id))
        await sessions.delete("a")
        assert await sessions["a"].inbox() == []
        assert texts(await sessions["b"].inbox()) == ["b"]
    assert count(path, "inbox") == 1


async def test_a_fork_and_a_purge_leave_the_inbox_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        await session.append(U("before"))
        await session.post(U("waits"), key="k")
        await session.fork("b")
        await sessions.purge("a")
        assert texts(await session.inbox()) == ["waits"]
        assert await sessions["b"].inbox() == []
        assert (await sessions["b"].post(U("waits"), key="k")).status == "accepted"


async def test_odd_messages_come_out_of_the_inbox_as_they_went_in(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    bodies: list[dict[str, object]] = [
        {"role": "user", "content": [{"type": "text", "text": "part"}], "name": "n"},
        {"role": "user", "content": None, "x": {"deep": [1, 2.5, True, None]}},
        {"role": "user"},
        {"role": "user", "content": "\ud800 lone"},
        T("call", "a result"),
    ]
    delivered: list[dict[str, object]] = []

    async def handle(turn: Turn) -> None:
        delivered.extend(message.body for message in turn.messages)

    async with opened(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        for body in bodies:
            await session.post(body)
        assert [message.body for message in await session.inbox()] == bodies
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sessions.serve, handle)
            await trio.sleep(5)
            nursery.cancel_scope.cancel()
        assert delivered == bodies
        assert (await session.transcript()).bodies == bodies


async def test_nothing_logs_what_was_posted(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with failing_disk() as disk:
        async with opened(tmp_path / "state.db", vfs=disk.name) as sessions:
            session = sessions["a"]
            await session.post(U("s3cret"), key="s3cret-key")
            with pytest.raises(Rejected) as refused:
                await session.post(U("s3cret too"), key="s3cret-key")
            disk.write_error = apsw.IOError
            with pytest.raises(StorageError) as failed:
                await session.post(U("s3cret three"))
            shown = repr(await session.inbox())
            disk.write_error = None
    for text in (caplog.text, str(refused.value), str(failed.value), shown):
        assert "s3cret t" not in text
        assert "content" not in text or "other content" in text
