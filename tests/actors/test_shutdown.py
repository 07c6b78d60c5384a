"""Leaving `open_sessions`: what was accepted is finished, the rest is told, nothing is left."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import apsw
import pytest
import trio
import trio.testing
from support import A, Gate, U, failing_disk, said

from turnkeeper.actors import (
    Closed,
    Rejected,
    Session,
    Sessions,
    StorageFailed,
    StorageFull,
    TurnkeeperError,
    open_sessions,
)
from turnkeeper.actors.ask import Ask
from turnkeeper.storage import Asked, Changed, Connection, inline


class Answers:
    """Appends in tasks of their own, outside the store's block, and how each of them ended."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.of: dict[str, str] = {}

    async def append(self, session: Session, text: str) -> None:
        """Begin to append `text`, and return once the call stands where it has to wait."""
        self.nursery.start_soon(self._append, session, text)
        await trio.testing.wait_all_tasks_blocked()

    async def _append(self, session: Session, text: str) -> None:
        try:
            await session.append(U(text))
        except TurnkeeperError as error:
            self.of[text] = type(error).__name__
        else:
            self.of[text] = "stored"


async def stored(path: Path, id: str = "a") -> list[object]:
    """What the file holds, as somebody sees who opens it later."""
    async with open_sessions(path, offload=inline) as sessions:
        return said(await sessions[id].transcript())


async def test_what_was_accepted_is_finished_and_who_stands_in_line_is_rejected(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    path = tmp_path / "state.db"
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        answers = Answers(nursery)
        async with open_sessions(path, offload=gate, mailbox_size=2, grace_s=10) as sessions:
            gate.may_begin = trio.Event()
            for n in range(6):
                await answers.append(sessions["a"], str(n))
            nursery.start_soon(open_later, gate, 9)
        assert trio.current_time() - begun == 9
        assert answers.of == {
            **{str(n): "stored" for n in range(3)},
            **{str(n): "Rejected" for n in range(3, 6)},
        }
    assert await stored(path) == ["0", "1", "2"]


async def open_later(gate: Gate, seconds: float) -> None:
    await trio.sleep(seconds)
    gate.open()


async def test_what_has_not_started_within_the_grace_is_rejected_and_not_written(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    path = tmp_path / "state.db"
    told_in_time: dict[str, str] = {}
    async with trio.open_nursery() as nursery:
        answers = Answers(nursery)
        begun = trio.current_time()
        async with open_sessions(path, offload=gate, grace_s=10) as sessions:
            gate.may_begin = trio.Event()
            for n in range(3):
                await answers.append(sessions["a"], str(n))
                await answers.append(sessions["b"], f"b{n}")

            async def look() -> None:
                await trio.sleep_until(begun + 10.5)
                told_in_time.update(answers.of)

            nursery.start_soon(look)
            nursery.start_soon(open_later, gate, 60)
        assert trio.current_time() - begun == 60
    assert list(answers.of.values()) == ["Rejected"] * 6
    # The askers do not wait for the disk, only the block does.
    assert told_in_time == answers.of
    assert await stored(path) == []


async def test_what_has_started_is_finished_however_long_it_takes(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    path = tmp_path / "state.db"
    async with trio.open_nursery() as nursery:
        answers = Answers(nursery)
        async with open_sessions(path, offload=gate, grace_s=10) as sessions:
            gate.may_end = trio.Event()
            await answers.append(sessions["a"], "started")
            await answers.append(sessions["a"], "waits")
            nursery.start_soon(open_later, gate, 60)
    assert answers.of == {"started": "stored", "waits": "Rejected"}
    assert await stored(path) == ["started"]


async def test_everybody_is_answered_while_many_sessions_close(tmp_path: Path) -> None:
    gate = Gate()
    path = tmp_path / "state.db"
    async with trio.open_nursery() as nursery:
        answers = Answers(nursery)
        async with open_sessions(path, offload=gate, mailbox_size=3) as sessions:
            gate.may_end = trio.Event()
            for n in range(200):
                nursery.start_soon(answers._append, sessions[f"s{n % 5}"], str(n))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(open_when_all_wait, gate)
    assert len(answers.of) == 200
    # Of each session one was under way, and three were in the mailbox.
    assert sorted(answers.of.values()) == ["Rejected"] * 180 + ["stored"] * 20
    there = [str(text) for n in range(5) for text in await stored(path, f"s{n}")]
    assert sorted(there) == sorted(n for n, answer in answers.of.items() if answer == "stored")


async def open_when_all_wait(gate: Gate) -> None:
    await trio.testing.wait_all_tasks_blocked()
    gate.open()


async def test_new_calls_are_refused_while_the_store_closes_and_afterwards(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    path = tmp_path / "state.db"
    async with trio.open_nursery() as nursery:
        answers = Answers(nursery)
        async with open_sessions(path, offload=gate) as sessions:
            session = sessions["a"]
            await session.append(U("0"))
            gate.may_end = trio.Event()
            await answers.append(session, "1")

            async def come_late() -> None:
                await trio.sleep(1)
                await answers.append(session, "late")
                await answers.append(sessions["b"], "late elsewhere")
                gate.open()

            nursery.start_soon(come_late)
    assert answers.of == {"1": "stored", "late": "Closed", "late elsewhere": "Closed"}
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: session.append(U("x")),
        lambda: session.extend([U("x")]),
        session.undo,
        session.retry,
        session.redo,
        lambda: session.rewrite([]),
        lambda: session.restore(1),
        lambda: session.fork("c"),
        lambda: session.set_meta({}),
        session.meta,
        session.info,
        session.transcript,
        session.all_messages,
        session.history,
        sessions.list,
        lambda: sessions.delete("a"),
        lambda: sessions.purge("a"),
        lambda: sessions["new"].append(U("x")),
    ]
    for call in calls:
        with pytest.raises(Closed) as caught:
            await call()
        assert caught.value.what == "store"
        assert str(path) in str(caught.value)
    assert await stored(path) == ["0", "1"]


class Stop(BaseException):
    """As KeyboardInterrupt is: no Exception."""


@pytest.mark.parametrize("error", [ValueError("mine"), Stop("now"), Rejected("field", "mine")])
@pytest.mark.parametrize("busy", [False, True])
async def test_an_error_of_the_block_comes_out_as_it_is(
    tmp_path: Path, error: BaseException, busy: bool
) -> None:
    gate = Gate()
    path = tmp_path / "state.db"

    async def use(nursery: trio.Nursery) -> None:
        async with open_sessions(path, offload=gate) as sessions:
            if busy:
                gate.may_end = trio.Event()
                await Answers(nursery).append(sessions["a"], "under way")
                nursery.start_soon(open_when_all_wait, gate)
            raise error

    async with trio.open_nursery() as nursery:
        with pytest.raises(type(error)) as caught:
            await use(nursery)
        assert caught.value is error
    assert await stored(path) == (["under way"] if busy else [])


async def test_a_group_of_the_blocks_own_nursery_comes_out_as_it_is(tmp_path: Path) -> None:
    async def fail() -> None:
        raise ValueError("mine")

    async def use() -> None:
        async with (
            open_sessions(tmp_path / "state.db", offload=inline),
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(fail)

    with pytest.raises(ExceptionGroup) as caught:
        await use()
    assert [type(error) for error in caught.value.exceptions] == [ValueError]


async def test_cancelled_around_askers_and_store_alike_what_had_started_is_finished(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    path = tmp_path / "state.db"
    outcomes: dict[str, str] = {}
    begun = trio.current_time()

    async def ask(session: Session, text: str) -> None:
        try:
            await session.append(U(text))
        except trio.Cancelled:
            outcomes[text] = "cancelled"
            raise
        outcomes[text] = "stored"

    async with trio.open_nursery() as outer:
        with trio.CancelScope() as scope:
            async with open_sessions(path, offload=gate, mailbox_size=2) as sessions:
                gate.may_end = trio.Event()
                outer.start_soon(open_later, gate, 5)
                async with trio.open_nursery() as nursery:
                    for n in range(6):
                        nursery.start_soon(ask, sessions["a"], str(n))
                        await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
        assert scope.cancelled_caught
        assert trio.current_time() - begun == 5
    assert outcomes == {"0": "stored", **{str(n): "cancelled" for n in range(1, 6)}}
    assert await stored(path) == ["0"]


@pytest.mark.parametrize("error", [None, ValueError("mine"), Stop("now")])
async def test_cancelled_while_it_closes_it_closes_as_it_would_have(
    tmp_path: Path, error: BaseException | None, autojump_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    path = tmp_path / "state.db"
    came_out: list[BaseException] = []
    begun = trio.current_time()

    async def cancel_later(scope: trio.CancelScope) -> None:
        await trio.sleep(1)
        scope.cancel()

    async with trio.open_nursery() as outer:
        answers = Answers(outer)
        with trio.CancelScope() as scope:
            try:
                async with open_sessions(path, offload=gate, mailbox_size=2) as sessions:
                    gate.may_end = trio.Event()
                    for n in range(6):
                        await answers.append(sessions["a"], str(n))
                    outer.start_soon(open_later, gate, 5)
                    outer.start_soon(cancel_later, scope)
                    if error is not None:
                        raise error
            except (ValueError, Stop) as raised:
                came_out.append(raised)
        assert trio.current_time() - begun == 5
    assert came_out == ([] if error is None else [error])
    assert answers.of == {
        **{str(n): "stored" for n in range(3)},
        **{str(n): "Rejected" for n in range(3, 6)},
    }
    assert await stored(path) == ["0", "1", "2"]


async def test_what_is_pending_is_written_at_the_end_if_storage_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with failing_disk() as disk:
        async with open_sessions(path, offload=inline, vfs=disk.name) as sessions:
            disk.write_error = apsw.FullError
            for id in ("a", "b"):
                for n in range(3):
                    with pytest.raises(StorageFull) as caught:
                        await sessions[id].append(U(str(n)))
                    assert caught.value.kept
            disk.write_error = None
    for id in ("a", "b"):
        assert await stored(path, id) == ["0", "1", "2"]


async def test_what_storage_never_takes_is_counted_in_the_error_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with failing_disk() as disk:

        async def use() -> None:
            async with open_sessions(path, offload=inline, vfs=disk.name) as sessions:
                await sessions["a"].append(U("before"))
                disk.write_error = apsw.IOError
                for id, number in (("a", 3), ("b", 2)):
                    for n in range(number):
                        with pytest.raises(StorageFailed):
                            await sessions[id].append(U(str(n)))

        with pytest.raises(StorageFailed, match="5 messages") as caught:
            await use()
        assert not caught.value.kept
    assert await stored(path) == ["before"]
    assert await stored(path, "b") == []


class Faulty:
    """A message whose change fails as only a bug does."""

    def change(self, _: Connection, __: Asked, /) -> Changed[None]:
        raise RuntimeError("a bug")


async def test_what_waits_behind_a_failing_actor_is_finished_while_the_store_closes(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    path = tmp_path / "state.db"
    async with trio.open_nursery() as nursery:
        answers = Answers(nursery)

        async def faulty(sessions: Sessions) -> None:
            ask = Ask(Faulty())
            sessions._registry.wake("a").deliver(ask)
            with pytest.raises(RuntimeError):
                await ask.answer()

        async with open_sessions(path, offload=gate, grace_s=10) as sessions:
            gate.may_begin = trio.Event()
            await answers.append(sessions["a"], "before")
            nursery.start_soon(faulty, sessions)
            await trio.testing.wait_all_tasks_blocked()
            for n in range(3):
                await answers.append(sessions["a"], str(n))
            nursery.start_soon(open_later, gate, 1)
    assert set(answers.of.values()) == {"stored"}
    assert await stored(path) == ["before", "0", "1", "2"]


async def test_a_try_at_what_is_pending_that_the_grace_cuts_short_is_no_error(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    gate = Gate()
    path = tmp_path / "state.db"
    with failing_disk() as disk:
        async with (
            trio.open_nursery() as nursery,
            open_sessions(path, offload=gate, vfs=disk.name, grace_s=10) as sessions,
        ):
            disk.write_error, disk.fail_next = apsw.IOError, 1
            with pytest.raises(StorageFailed) as caught:
                await sessions["a"].append(U("kept"))
            assert caught.value.kept
            gate.may_begin = trio.Event()
            await trio.sleep(1)  # recovery has handed its try to the writer
            nursery.start_soon(open_later, gate, 60)
    assert await stored(path) == ["kept"]


def descriptors() -> set[str]:
    """What this process has open, by name."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the one that listed them
            continue
    return found


def threads_at_work() -> list[str]:
    """The threads that are in code of ours; trio keeps idle ones of its own for a while."""
    busy = []
    for frame in list(sys._current_frames().values()):
        walker = frame
        while walker.f_back is not None:
            walker = walker.f_back
            name = walker.f_globals.get("__name__", "")
            if str(name).startswith("turnkeeper."):
                busy.append(walker.f_code.co_name)
    return busy


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="lists descriptors by /proc")
@pytest.mark.parametrize("end", ["well", "by an error", "cancelled"])
async def test_no_task_thread_or_descriptor_is_left(tmp_path: Path, end: str) -> None:
    path = tmp_path / "state.db"
    tasks = trio.lowlevel.current_statistics().tasks_living

    async def use() -> None:
        async with open_sessions(path) as sessions:
            async with trio.open_nursery() as nursery:
                for n in range(20):
                    nursery.start_soon(sessions[f"s{n}"].extend, [U("x"), A("y")])
            await sessions["s1"].undo()
            async with trio.open_nursery() as nursery:
                for n in range(20):
                    nursery.start_soon(sessions[f"s{n}"].transcript)
            assert any(str(path) in name for name in descriptors())
            outer.start_soon(_ignore_errors, sessions["s1"])
            await trio.lowlevel.checkpoint()
            if end == "by an error":
                raise ValueError("mine")
            if end == "cancelled":
                scope.cancel()
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as outer:
        with trio.CancelScope() as scope:
            if end == "by an error":
                with pytest.raises(ValueError, match="mine"):
                    await use()
            else:
                await use()
        assert not [name for name in descriptors() if str(tmp_path) in name]
        assert threads_at_work() == []
    await trio.testing.wait_all_tasks_blocked()
    # Trio makes a task of its own for its threads' messages, and keeps it.
    assert trio.lowlevel.current_statistics().tasks_living <= tasks + 1


async def _ignore_errors(session: Session) -> None:
    try:
        await session.append(U("under way"))
    except TurnkeeperError:
        return


async def test_a_store_can_be_closed_and_opened_many_times(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    for n in range(20):
        async with open_sessions(path, offload=inline) as sessions:
            assert (await sessions["a"].append(U(str(n)))).position == n + 1
    assert await stored(path) == [str(n) for n in range(20)]


async def test_a_store_that_is_left_at_once_leaves_nothing_behind(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline):
        pass
    assert os.listdir(tmp_path) == ["state.db"]


async def test_a_read_under_way_is_over_and_its_connection_closed_when_the_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.db"
    reading = threading.Event()
    go_on = threading.Event()

    def question(connection: apsw.Connection) -> object:
        reading.set()
        assert go_on.wait(10)
        return connection.execute("SELECT 1").get

    async def let_go() -> None:
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()

    async with trio.open_nursery() as nursery:
        async with open_sessions(path) as sessions:
            await sessions["a"].append(U("x"))
            readers = sessions._store._readers
            nursery.start_soon(readers.ask, question)
            await trio.to_thread.run_sync(reading.wait)
            close = readers.close

            async def close_and_let_go() -> None:
                nursery.start_soon(let_go)
                await close()

            monkeypatch.setattr(readers, "close", close_and_let_go)
        assert not [name for name in descriptors() if name.startswith(str(path))]
