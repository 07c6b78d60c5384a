"""Pending: what storage would not take is kept, in order, told, and written by itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TypeVar

import apsw
import pytest
import trio
import trio.testing
from support import A, Disk, Gate, U, failing_disk, said

from turnkeeper.actors import (
    Appended,
    Closed,
    Conflict,
    NotRetryable,
    Rejected,
    Session,
    Sessions,
    StorageBusy,
    StorageError,
    StorageFailed,
    StorageFull,
    open_sessions,
)
from turnkeeper.actors.ask import Ask
from turnkeeper.actors.messages import Append
from turnkeeper.storage import Asked, Changed, Connection, inline

T = TypeVar("T")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
async def disk() -> AsyncIterator[Disk]:
    with failing_disk() as failing:
        yield failing


@asynccontextmanager
async def opened(path: Path, disk: Disk, *, max_pending: int = 200) -> AsyncIterator[Sessions]:
    async with open_sessions(
        path, offload=inline, vfs=disk.name, max_pending=max_pending, random=random.Random(1)
    ) as sessions:
        yield sessions


@pytest.fixture
async def sessions(path: Path, disk: Disk) -> AsyncIterator[Sessions]:
    async with opened(path, disk) as sessions:
        yield sessions
        disk.write_error = disk.open_error = None


async def refused(call: Callable[[], Awaitable[object]]) -> StorageError:
    """Make a call that storage does not take, and return the error."""
    with pytest.raises(StorageError) as caught:
        await call()
    return caught.value


async def keep(disk: Disk, session: Session, *texts: str) -> None:
    """Append while the disk fails; afterwards it works again."""
    disk.write_error = apsw.IOError
    for text in texts:
        error = await refused(lambda text=text: session.append(U(text)))  # type: ignore[misc]
        assert error.kept
    disk.write_error = None


async def states(session: Session) -> dict[object, str]:
    return {message.body["content"]: message.state for message in await session.all_messages()}


async def test_what_storage_refuses_is_kept_in_order_told_and_written_first(
    sessions: Sessions, disk: Disk
) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    disk.write_error = apsw.FullError
    error = await refused(lambda: session.append(A("2")))
    assert isinstance(error, StorageFull)
    assert (error.kept, error.unknown) == (True, False)
    assert "do not send it again" in str(error)
    disk.write_error = apsw.IOError
    error = await refused(lambda: session.extend([U("3"), A("4")]))
    assert isinstance(error, StorageFailed)
    assert error.kept
    assert await states(session) == {"1": "live"}
    disk.write_error = None
    receipt = await session.append(U("5"))
    assert receipt.position == 5
    transcript = await session.transcript()
    assert said(transcript) == ["1", "2", "3", "4", "5"]
    assert [message.position for message in transcript] == [1, 2, 3, 4, 5]
    assert not any(message.pending for message in transcript)
    # Each append its own revision; the batch has one.
    assert [message.revision for message in transcript] == [2, 3, 4, 4, 5]
    assert transcript[2].append_id == transcript[3].append_id != transcript[1].append_id


async def test_the_transcript_includes_what_is_pending(sessions: Sessions, disk: Disk) -> None:
    session = sessions["a"]
    await session.extend([U("1"), A("2")])
    disk.write_error = apsw.IOError
    await refused(lambda: session.append(U("3"), key="k"))
    await refused(lambda: session.append(U("4"), hidden=True))
    await refused(lambda: session.append(A("5")))
    transcript = await session.transcript()
    assert said(transcript) == ["1", "2", "3", "5"]
    assert [message.position for message in transcript] == [1, 2, 3, 5]
    assert transcript.position == 5
    assert transcript.revision == 2
    pending = transcript[2]
    assert pending.pending
    assert (pending.id, pending.revision, pending.key, pending.state) == (None, None, "k", "live")
    assert pending.opens_turn
    assert said(await session.transcript(hidden=True)) == ["1", "2", "3", "4", "5"]
    assert said(await session.transcript(last=3)) == ["2", "3", "5"]
    assert said(await session.transcript(last=1)) == ["5"]
    assert said(await session.transcript(last=0)) == []
    assert said(await session.transcript(last=2, hidden=True)) == ["4", "5"]
    assert said(await session.transcript(after=1)) == ["2", "3", "5"]


@pytest.mark.parametrize("after", [2, 3, 99])
async def test_a_transcript_after_a_position_leaves_out_what_is_pending_before_it(
    sessions: Sessions, disk: Disk, after: int
) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    await keep(disk, session, "2", "3")
    assert said(await session.transcript(after=after)) == ["1", "2", "3"][after:]


async def test_a_session_whose_first_message_is_pending(sessions: Sessions, disk: Disk) -> None:
    session = sessions["new"]
    await keep(disk, session, "1")
    transcript = await session.transcript()
    assert said(transcript) == ["1"]
    assert (transcript.revision, transcript.position) == (0, 1)
    undone = await session.undo()
    assert undone is not None
    assert undone.text == "1"
    assert await states(session) == {"1": "rewound"}


@pytest.mark.parametrize(
    ("turns", "text", "left"),
    [(1, "4", ["1", "2", "3"]), (2, "3", ["1", "2"]), (3, "1", []), (9, "1", [])],
)
async def test_an_undo_counts_what_is_pending(
    sessions: Sessions, disk: Disk, turns: int, text: str, left: list[str]
) -> None:
    session = sessions["a"]
    await session.extend([U("1"), A("2")])
    await keep(disk, session, "3", "4")
    undone = await session.undo(turns)
    assert undone is not None
    assert (undone.text, undone.turns) == (text, min(turns, 3))
    assert said(await session.transcript()) == left
    assert sessions.stats().pending == 0
    assert sorted(map(str, await states(session))) == ["1", "2", "3", "4"]
    await session.redo()
    assert said(await session.transcript()) == ["1", "2", "3", "4"]


async def test_a_retry_gives_back_what_is_pending(sessions: Sessions, disk: Disk) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    await keep(disk, session, "2")
    undone = await session.retry()
    assert undone is not None
    assert undone.text == "2"
    assert said(await session.transcript()) == ["1"]


async def test_a_rewrite_takes_what_is_pending_into_the_history(
    sessions: Sessions, disk: Disk
) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    await keep(disk, session, "2", "3")
    rewritten = await session.rewrite([U("1"), U("2"), A("other")])
    assert (rewritten.kept, rewritten.replaced, rewritten.position) == (2, 1, 3)
    assert said(await session.transcript()) == ["1", "2", "other"]
    assert await states(session) == {"1": "live", "2": "live", "3": "replaced", "other": "live"}


async def test_a_restore_takes_what_is_pending_into_the_history(
    sessions: Sessions, disk: Disk
) -> None:
    session = sessions["a"]
    first = await session.append(U("1"))
    await session.append(U("2"))
    await keep(disk, session, "3")
    await session.restore(first.revision)
    assert said(await session.transcript()) == ["1"]
    assert list(await states(session)) == ["1", "2", "3"]
    await session.restore(4)  # the revision under which the pending one was written
    assert said(await session.transcript()) == ["1", "2", "3"]


async def test_what_is_pending_does_not_stand_in_the_way_of_a_redo(
    sessions: Sessions, disk: Disk
) -> None:
    session = sessions["a"]
    await session.extend([U("1"), A("2"), U("3"), A("4")])
    await session.undo()
    await keep(disk, session, "5")
    assert said(await session.transcript()) == ["1", "2", "5"]
    assert await session.redo() is not None
    assert said(await session.transcript()) == ["1", "2", "3", "4"]
    assert "5" in await states(session)
    assert sessions.stats().pending == 0


async def test_drained_by_itself_it_leaves_the_redo_stack_alone(
    path: Path, disk: Disk, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(path, disk) as sessions:
        session = sessions["a"]
        await session.extend([U("1"), A("2"), U("3"), A("4"), U("5"), A("6")])
        await session.undo()
        await session.undo()
        await keep(disk, session, "7")
        await trio.sleep(60)
        assert sessions.stats().pending == 0
        assert said(await session.transcript()) == ["1", "2", "7"]
        await session.redo()
        assert said(await session.transcript()) == ["1", "2", "3", "4"]
        await session.redo()
        assert said(await session.transcript()) == ["1", "2", "3", "4", "5", "6"]
        assert await session.redo() is None


async def test_a_fork_has_what_is_pending(sessions: Sessions, disk: Disk) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    await keep(disk, session, "2", "3")
    forked = await session.fork("b", position=2)
    assert forked.position == 2
    assert said(await sessions["b"].transcript()) == ["1", "2"]
    assert said(await session.transcript()) == ["1", "2", "3"]
    assert sessions.stats().pending == 0


@pytest.mark.parametrize("what", ["set_meta", "purge", "redo of nothing", "rewrite to the same"])
async def test_any_change_that_commits_writes_what_is_pending(
    sessions: Sessions, disk: Disk, what: str
) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    await keep(disk, session, "2")
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "set_meta": lambda: session.set_meta({"title": "x"}),
        "purge": lambda: sessions.purge("a"),
        "redo of nothing": session.redo,
        "rewrite to the same": lambda: session.rewrite([U("1"), U("2")]),
    }
    await calls[what]()
    assert sessions.stats().pending == 0
    assert await states(session) == {"1": "live", "2": "live"}


PICTURE: dict[str, object] = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}],
}


async def test_a_refused_operation_leaves_what_is_pending_as_it_was(
    sessions: Sessions, disk: Disk
) -> None:
    session = sessions["a"]
    await session.append(U("1"), key="k")
    await sessions["b"].append(U("taken"))
    disk.write_error = apsw.IOError
    await refused(lambda: session.append(PICTURE))
    await refused(lambda: session.append(A("3"), key="pending"))
    disk.write_error = None
    before = await session.transcript()
    refusals: list[tuple[type[Exception], Callable[[], Awaitable[object]]]] = [
        (NotRetryable, session.retry),
        (Conflict, lambda: session.undo(at=1)),
        (Conflict, lambda: session.redo(at=99)),
        (Conflict, lambda: session.rewrite([], at=1)),
        (Conflict, lambda: session.append(U("x"), at=1)),
        (Rejected, lambda: session.restore(99)),
        (Rejected, lambda: session.fork("c", position=9)),
        (Rejected, lambda: session.fork("b")),
        (Rejected, lambda: session.append(U("other content"), key="k")),
        (Rejected, lambda: session.append(U("other content"), key="pending")),
        (Rejected, lambda: session.extend([U("x"), U("other content")], keys=[None, "pending"])),
    ]
    for error, call in refusals:
        with pytest.raises(error):
            await call()
        assert await session.transcript() == before
        assert sessions.stats().pending == 2
        assert await states(session) == {"1": "live"}
    await session.append(U("4"))
    assert [message.body for message in await session.transcript()] == [
        *before.bodies,
        U("4"),
    ]


async def test_a_change_that_fails_by_storage_leaves_what_is_pending_and_is_not_kept(
    sessions: Sessions, disk: Disk
) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    await keep(disk, session, "2")
    before = await session.transcript()
    disk.write_error = apsw.IOError
    calls: list[Callable[[], Awaitable[object]]] = [
        session.undo,
        session.retry,
        session.redo,
        lambda: session.rewrite([]),
        lambda: session.restore(1),
        lambda: session.fork("b"),
        lambda: session.set_meta({}),
        lambda: sessions.delete("a"),
        lambda: sessions.purge("a"),
    ]
    for call in calls:
        error = await refused(call)
        assert (error.kept, error.unknown) == (False, False)
        assert await session.transcript() == before
    disk.write_error = None
    await session.append(U("3"))
    assert said(await session.transcript()) == ["1", "2", "3"]


async def test_a_key_that_is_pending_is_kept_once(sessions: Sessions, disk: Disk) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    disk.write_error = apsw.IOError
    for _ in range(3):  # the platform sends it again and again
        error = await refused(lambda: session.append(U("2"), key="k"))
        assert error.kept
    assert said(await session.transcript()) == ["1", "2"]
    with pytest.raises(Rejected) as caught:
        await session.append(U("other"), key="k")
    assert caught.value.field == "key"
    error = await refused(lambda: session.extend([U("2"), U("3")], keys=["k", "l"]))
    assert error.kept
    assert said(await session.transcript()) == ["1", "2", "3"]
    disk.write_error = None
    receipt = await session.append(U("2"), key="k")
    assert (receipt.position, receipt.duplicate, receipt.live) == (2, True, True)
    assert said(await session.transcript()) == ["1", "2", "3"]
    assert [message.key for message in await session.transcript()] == [None, "k", "l"]


async def test_a_duplicate_that_comes_while_storage_fails_gets_its_receipt(
    sessions: Sessions, disk: Disk
) -> None:
    session = sessions["a"]
    first = await session.append(U("1"), key="k")
    disk.write_error = apsw.IOError
    again = await session.append(U("1"), key="k")  # nothing has to be written for it
    assert again == first._replace(duplicate=True)
    assert sessions.stats().pending == 0
    disk.write_error = None
    await session.append(U("2"))
    assert said(await session.transcript()) == ["1", "2"]


async def test_more_than_may_be_pending_is_not_kept(path: Path, disk: Disk) -> None:
    async with opened(path, disk, max_pending=3) as sessions:
        session = sessions["a"]
        disk.write_error = apsw.IOError
        kept = [(await refused(lambda: session.append(U("x")))).kept for _ in range(2)]
        # A batch is kept whole or not at all; a smaller one still fits.
        kept.append((await refused(lambda: session.extend([U("no"), U("no")]))).kept)
        kept.append((await refused(lambda: session.append(U("y")))).kept)
        error = await refused(lambda: session.append(U("no")))
        kept.append(error.kept)
        assert kept == [True, True, False, True, False]
        assert "do not send it again" not in str(error)
        assert sessions.stats().pending == 3
        assert (await refused(lambda: sessions["b"].append(U("b")))).kept  # each session its own
        disk.write_error = None
        await session.append(U("z"))
        assert said(await session.transcript()) == ["x", "x", "y", "z"]


async def test_an_append_decided_on_a_revision_is_not_kept(sessions: Sessions, disk: Disk) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    disk.write_error = apsw.IOError
    assert not (await refused(lambda: session.append(A("2"), at=2))).kept
    assert not (await refused(lambda: session.extend([A("2")], at=2))).kept
    assert sessions.stats().pending == 0
    disk.write_error = None
    await session.append(A("3"))
    assert said(await session.transcript()) == ["1", "3"]


@pytest.mark.parametrize("batch", [False, True])
async def test_an_append_decided_on_what_was_read_with_something_pending_is_no_conflict(
    sessions: Sessions, disk: Disk, batch: bool
) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    await keep(disk, session, "2")
    read = await session.transcript()
    if batch:
        await session.extend([A("3")], at=read.revision)
    else:
        await session.append(A("3"), at=read.revision)
    assert said(await session.transcript()) == ["1", "2", "3"]


async def test_an_undo_decided_on_what_was_read_with_something_pending_is_no_conflict(
    sessions: Sessions, disk: Disk
) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    await keep(disk, session, "2")
    read = await session.transcript()
    undone = await session.undo(at=read.revision)
    assert undone is not None
    assert undone.text == "2"


async def test_it_is_written_without_anybody_doing_anything_after_growing_pauses(
    path: Path, disk: Disk, autojump_clock: trio.testing.MockClock
) -> None:
    tries: list[float] = []

    async def noting(work: Callable[[], T], limiter: trio.CapacityLimiter, /) -> T:
        async with limiter:
            failures = disk.failures
            done = work()
            if disk.failures > failures:
                tries.append(trio.current_time())
            return done

    async with open_sessions(
        path, offload=noting, vfs=disk.name, monotonic=trio.current_time, random=random.Random(1)
    ) as sessions:
        session = sessions["a"]
        await session.append(U("1"))
        disk.write_error = apsw.IOError
        for id in ("a", "b"):
            assert (await refused(lambda id=id: sessions[id].append(U("kept")))).kept  # type: ignore[misc]
        begun = trio.current_time()
        await trio.sleep_until(begun + 300)
        disk.write_error = None
        pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
        pauses = [pause for pause in pauses if pause > 0]  # both sessions are tried together
        longest = 0.1
        for pause in pauses:
            assert longest / 2 <= pause <= longest
            longest = min(2 * longest, 30.0)
        assert len(pauses) > 10
        assert longest == 30.0
        assert sessions.health().pending == 2
        failing_s = sessions.health().failing_s
        assert failing_s is not None
        assert 300 <= failing_s <= 301
        await trio.sleep_until(begun + 330)
        assert sessions.health().pending == 0
        assert await states(session) == {"1": "live", "kept": "live"}
        assert await states(sessions["b"]) == {"kept": "live"}
        # And the next trouble begins with a short pause again.
        tries.clear()
        await keep(disk, session, "again")
        await trio.sleep(0.2)
        assert sessions.health().pending == 0


async def test_a_store_without_trouble_tries_nothing(
    path: Path, disk: Disk, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(path, disk) as sessions:
        await keep(disk, sessions["a"], "1")
        await trio.sleep(1)
        assert sessions.stats().pending == 0
        commits = sessions.stats().commits
        await trio.sleep(10_000)
        assert sessions.stats().commits == commits


async def test_an_actor_that_fails_while_it_drains_is_tried_again(
    path: Path, disk: Disk, autojump_clock: trio.testing.MockClock
) -> None:
    broken: list[None] = []

    def now() -> float:
        if broken:
            broken.pop()
            raise RuntimeError("a bug")
        return 0.0

    async with open_sessions(path, offload=inline, vfs=disk.name, now=now) as sessions:
        await keep(disk, sessions["a"], "1")
        broken.append(None)
        await trio.sleep(60)
        assert not broken
        assert sessions.stats().failures == 1
        assert sessions.stats().pending == 0
        assert await states(sessions["a"]) == {"1": "live"}


async def test_a_delete_drops_what_is_pending(
    path: Path, disk: Disk, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(path, disk) as sessions:
        session = sessions["a"]
        await session.append(U("1"))
        await keep(disk, session, "2")
        assert await sessions.delete("a") is not None
        assert sessions.stats().pending == 0
        assert sessions.health().ok
        with pytest.raises(Closed):
            await session.append(U("3"))
        await trio.sleep(60)
        assert await sessions.list() == []
        assert said(await sessions["a"].transcript()) == []


async def test_what_is_kept_for_a_session_that_begins_after_a_delete_is_not_lost(
    sessions: Sessions, disk: Disk
) -> None:
    await sessions["a"].append(U("old"))
    await sessions.delete("a")
    await keep(disk, sessions["a"], "new")
    await sessions["a"].append(U("newer"))
    assert said(await sessions["a"].transcript()) == ["new", "newer"]


async def test_health_tells_whether_what_is_said_is_written(path: Path, disk: Disk) -> None:
    time = itertools.count(100.0)
    async with open_sessions(
        path, offload=inline, vfs=disk.name, monotonic=lambda: next(time)
    ) as sessions:
        await sessions["a"].append(U("a secret"))
        healthy = sessions.health()
        assert (healthy.ok, healthy.pending, healthy.failing_s, healthy.cause) == (
            *(True, 0),
            *(None, None),
        )
        disk.write_error = apsw.FullError
        await refused(lambda: sessions["a"].extend([U("a secret"), U("another")]))
        await refused(lambda: sessions["b"].append(U("a third")))
        ill = sessions.health()
        assert (ill.ok, ill.pending) == (False, 3)
        assert ill.failing_s is not None
        assert ill.failing_s > 0
        assert ill.cause is not None
        assert "secret" not in ill.cause
        later = sessions.health()
        assert later.failing_s is not None
        assert later.failing_s > ill.failing_s
        disk.write_error = None
        await sessions["a"].append(U("more"))
        assert (sessions.health().ok, sessions.health().pending) == (False, 1)
        assert sessions.health().failing_s is None
        await sessions["b"].append(U("more"))
        assert sessions.health() == healthy


async def test_what_a_busy_file_refuses_is_kept(path: Path) -> None:
    time = itertools.count(0.0)  # a second passes whenever somebody looks
    async with open_sessions(path, offload=inline, monotonic=lambda: next(time)) as sessions:
        session = sessions["a"]
        await session.append(U("1"))
        with closing(apsw.Connection(str(path))) as rival:
            rival.execute("BEGIN IMMEDIATE")
            error = await refused(lambda: session.append(U("2")))
            assert isinstance(error, StorageBusy)
            assert error.kept
            error = await refused(session.undo)
            assert isinstance(error, StorageBusy)
            assert not error.kept
            assert said(await session.transcript()) == ["1", "2"]
            rival.execute("ROLLBACK")
        await session.append(U("3"))
        assert said(await session.transcript()) == ["1", "2", "3"]


async def test_what_may_or_may_not_have_been_written_is_kept_and_stored_once(
    path: Path, disk: Disk
) -> None:
    time = itertools.count(0.0)
    async with open_sessions(
        path, offload=inline, vfs=disk.name, monotonic=lambda: next(time)
    ) as sessions:
        session = sessions["a"]
        await session.append(U("1"))
        disk.write_error = apsw.IOError
        disk.open_error = apsw.CantOpenError
        error = await refused(lambda: session.append(U("2")))
        assert error.kept
        assert error.unknown
        disk.write_error = disk.open_error = None
        await session.append(U("3"))
        assert said(await session.transcript()) == ["1", "2", "3"]
        assert [message.position for message in await session.transcript()] == [1, 2, 3]


async def test_readers_and_other_sessions_go_on_while_one_has_something_pending(
    sessions: Sessions, disk: Disk
) -> None:
    await sessions["b"].append(U("b1"))
    await keep(disk, sessions["a"], "a1")
    await sessions["b"].append(U("b2"))
    assert said(await sessions["b"].transcript()) == ["b1", "b2"]
    assert sessions.stats().pending == 1  # nobody spoke to it
    assert said(await sessions["a"].transcript()) == ["a1"]


@pytest.mark.parametrize("failures", range(1, 9))
async def test_of_several_that_wait_together_none_overtakes_one_that_is_kept(
    path: Path, disk: Disk, failures: int
) -> None:
    async with opened(path, disk) as sessions:
        session = sessions["a"]
        await session.append(U("0"))
        called: list[str] = []

        async def ask(text: str) -> None:
            called.append(text)
            try:
                await session.append(U(text))
            except StorageError as error:
                if not error.kept:
                    raise

        disk.write_error, disk.fail_next = apsw.IOError, failures
        async with trio.open_nursery() as nursery:
            for n in range(1, 5):
                nursery.start_soon(ask, str(n))
        disk.write_error = None
        await session.append(U("last"))
        assert said(await session.transcript()) == ["0", *called, "last"]


@pytest.mark.parametrize("held", ["before it reads", "after it has read"])
async def test_a_read_during_which_what_is_pending_is_written_shows_it_once(
    path: Path, disk: Disk, held: str
) -> None:
    may_go_on = trio.Event()
    may_go_on.set()

    async def slow_reads(work: Callable[[], T], limiter: trio.CapacityLimiter, /) -> T:
        async with limiter:
            if limiter.total_tokens == 1:  # the writer's
                return work()
            if held == "before it reads":
                await may_go_on.wait()
            done = work()
            await may_go_on.wait()
            return done

    async with open_sessions(path, offload=slow_reads, vfs=disk.name) as sessions:
        session = sessions["a"]
        await session.append(U("1"))
        await keep(disk, session, "2")
        seen: list[list[object]] = []

        async def read() -> None:
            seen.append(said(await session.transcript()))

        may_go_on = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            await session.append(U("3"))
            assert sessions.stats().pending == 0
            may_go_on.set()
        assert seen == [["1", "2", "3"]]


class TooLarge(Append):
    """A message for which alone the disk has no room."""

    def change(self, _: Connection, __: Asked, /) -> Changed[Appended]:
        raise StorageFull("writing", "a test says so")


async def test_behind_one_that_alone_is_refused_those_handed_over_with_it_are_kept_too(
    sessions: Sessions,
) -> None:
    session = sessions["a"]
    first, second, third = (session._draft(U(text), "message") for text in "123")
    asks = [Ask(Append(first)), Ask(TooLarge(second)), Ask(Append(third))]
    for ask in asks:
        sessions._registry.wake("a").deliver(ask)
    assert (await asks[0].answer()).position == 1
    for ask in asks[1:]:
        assert (await refused(ask.answer)).kept
    assert await states(session) == {"1": "live"}
    await session.append(U("4"))
    assert said(await session.transcript()) == ["1", "2", "3", "4"]


async def test_a_redelivery_is_kept_though_the_first_was_given_up_in_the_same_batch(
    path: Path,
) -> None:
    """The duplicate was one of a row that was never committed, and whose asker has gone."""
    gate = Gate()
    clock = itertools.count(0.0, 3.0)
    with failing_disk() as disk:
        async with open_sessions(
            path, offload=gate, vfs=disk.name, monotonic=lambda: next(clock)
        ) as sessions:
            session = sessions["a"]
            await session.append(U("1"))
            errors: dict[str, StorageError] = {}

            async def ask(name: str, scope: trio.CancelScope) -> None:
                with scope:
                    try:
                        await session.append(U("2"), key="k")
                    except StorageError as error:
                        errors[name] = error

            first = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                gate.shut("begin")
                nursery.start_soon(session.append, A("in front"))
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(ask, "first", first)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(ask, "again", trio.CancelScope())
                await trio.testing.wait_all_tasks_blocked()
                gate.may_begin.set()
                gate.shut("begin")
                await trio.testing.wait_all_tasks_blocked()
                disk.write_error = disk.open_error = apsw.IOError
                gate.shut("end")
                gate.may_begin.set()
                await trio.testing.wait_all_tasks_blocked()
                first.cancel()
                gate.may_end.set()
            disk.write_error = disk.open_error = None
            assert not errors["first"].kept
            assert errors["again"].kept
            await session.append(U("3"))
            assert said(await session.transcript()) == ["1", "in front", "2", "3"]
