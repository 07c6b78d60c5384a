"""`Cancelled` out of a mutation means that nothing was written and nothing is kept.

Every mutation is cancelled at every place where it can stand: before the call, in the mailbox,
in line, with the writer, and in the middle of a transaction. What the session then holds is
compared with a session in which the call was never made, or was made and not cancelled.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import apsw
import pytest
import trio
import trio.testing
from attrs import frozen
from support import A, Disk, Gate, U, failing_disk, said

from turnkeeper.actors import Closed, Sessions, StorageError, StorageFailed, open_sessions
from turnkeeper.storage import inline

T = TypeVar("T")
Mutation: TypeAlias = Callable[[Sessions], Coroutine[object, None, object]]


MUTATIONS: dict[str, Mutation] = {
    "append": lambda sessions: sessions["a"].append(A("more")),
    "append with a key": lambda sessions: sessions["a"].append(U("more"), key="new"),
    "append hidden": lambda sessions: sessions["a"].append(U("more"), hidden=True),
    "extend": lambda sessions: sessions["a"].extend([A("more"), U("and more")]),
    "undo": lambda sessions: sessions["a"].undo(),
    "retry": lambda sessions: sessions["a"].retry(),
    "redo": lambda sessions: sessions["a"].redo(),
    "rewrite": lambda sessions: sessions["a"].rewrite([U("1"), A("other")]),
    "restore": lambda sessions: sessions["a"].restore(2),
    "fork": lambda sessions: sessions["a"].fork("b", position=1),
    "set_meta": lambda sessions: sessions["a"].set_meta({"title": "new"}),
    "delete": lambda sessions: sessions.delete("a"),
    "purge": lambda sessions: sessions.purge("a"),
}

each_mutation = pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())


async def furnish(sessions: Sessions) -> None:
    """Two live turns and one that can be redone, so that every mutation changes something."""
    await sessions["a"].set_meta({"title": "old"})
    await sessions["a"].append(U("1"), key="old")
    await sessions["a"].extend([A("a"), U("2"), A("b"), U("3"), A("c")])
    await sessions["a"].undo()


@asynccontextmanager
async def furnished(path: Path, gate: Gate) -> AsyncIterator[Sessions]:
    """A store that is the same in every run, down to its ids and times."""
    async with open_sessions(
        path, offload=gate, mailbox_size=1, now=lambda: 0.0, random=random.Random(1)
    ) as sessions:
        await furnish(sessions)
        yield sessions


@frozen
class Seen:
    """All that a store says of its sessions."""

    parts: list[object]


async def look(sessions: Sessions) -> Seen:
    parts: list[object] = []
    for info in await sessions.list():
        session = sessions[info.id]
        transcript = await session.transcript(hidden=True)
        messages = [message._replace(append_id=0) for message in await session.all_messages()]
        parts += [info, transcript.bodies, transcript.revision, messages]
        parts += await session.history()
    return Seen([*parts, sessions.stats().pending])


class Asker:
    """Calls a mutation in a task of its own and notes how it ended."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self.scope = trio.CancelScope()
        self.cancelled = False
        self.receipt: object = None
        self.error: Exception | None = None
        self.ended = trio.Event()
        self.task: trio.lowlevel.Task | None = None
        self._call = call

    async def run(self) -> None:
        self.task = trio.lowlevel.current_task()
        with self.scope:
            try:
                self.receipt = await self._call()
            except trio.Cancelled:
                self.cancelled = True
                raise
            except Exception as error:
                self.error = error
        self.ended.set()


# Where a call can stand when its scope is cancelled: how the gate is shut, and how many
# appends of others come first (the mailbox holds one).
PLACES: dict[str, tuple[Literal["begin", "end"], int]] = {
    "with the writer": ("begin", 0),
    "in the mailbox": ("begin", 1),
    "in line": ("begin", 2),
    "in the mailbox behind one that has started": ("end", 1),
    "in line behind one that has started": ("end", 2),
}


async def run_with_others(
    path: Path, place: Literal["begin", "end"], others: int, mutation: Mutation | None
) -> tuple[Seen, Asker | None]:
    """Cancel `mutation` behind the appends of `others`, and let those go on; None: no mutation."""
    gate = Gate()
    asker = None
    async with furnished(path, gate) as sessions, trio.open_nursery() as nursery:
        gate.shut(place)
        for n in range(others):
            nursery.start_soon(sessions["a"].append, A(f"other {n}"))
            await trio.testing.wait_all_tasks_blocked()
        if mutation is not None:
            asker = Asker(lambda: mutation(sessions))
            nursery.start_soon(asker.run)
            await trio.testing.wait_all_tasks_blocked()
            assert not asker.ended.is_set()
            asker.scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert asker.ended.is_set()  # while the others wait still
        gate.open()
        await trio.testing.wait_all_tasks_blocked()
        assert sessions.stats().busy == 0
        return await look(sessions), asker
    raise AssertionError("unreachable")


@each_mutation
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
async def test_what_has_not_started_is_withdrawn_at_once_and_nothing_is_written(
    tmp_path: Path, mutation: Mutation, place: tuple[Literal["begin", "end"], int]
) -> None:
    without, _ = await run_with_others(tmp_path / "without.db", *place, None)
    seen, asker = await run_with_others(tmp_path / "state.db", *place, mutation)
    assert asker is not None
    assert asker.cancelled
    assert seen == without


@each_mutation
async def test_a_call_in_a_cancelled_scope_writes_nothing(
    tmp_path: Path, mutation: Mutation
) -> None:
    async with furnished(tmp_path / "state.db", Gate()) as sessions:
        before = await look(sessions)
        commits = sessions.stats().commits
        with trio.CancelScope() as scope:
            scope.cancel()
            await mutation(sessions)
        assert scope.cancelled_caught
        await trio.testing.wait_all_tasks_blocked()
        assert await look(sessions) == before
        assert sessions.stats().commits == commits
        assert sessions.stats().busy == 0


@each_mutation
async def test_what_has_started_is_waited_for_and_its_receipt_returned(
    tmp_path: Path, mutation: Mutation
) -> None:
    async with furnished(tmp_path / "uncancelled.db", Gate()) as sessions:
        receipt = await mutation(sessions)
        expected = await look(sessions)
    gate = Gate()
    async with (
        furnished(tmp_path / "state.db", gate) as sessions,
        trio.open_nursery() as nursery,
    ):
        gate.shut("end")
        asker = Asker(lambda: mutation(sessions))
        nursery.start_soon(asker.run)
        await trio.testing.wait_all_tasks_blocked()
        asker.scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not asker.ended.is_set()
        gate.open()
        await asker.ended.wait()
        assert not asker.cancelled
        assert asker.error is None
        assert asker.receipt == receipt
        assert await look(sessions) == expected


@each_mutation
async def test_what_has_started_and_fails_raises_its_error_and_is_not_kept(
    tmp_path: Path, mutation: Mutation
) -> None:
    gate = Gate()
    with failing_disk() as disk:
        async with (
            open_sessions(tmp_path / "state.db", offload=gate, vfs=disk.name) as sessions,
            trio.open_nursery() as nursery,
        ):
            await furnish(sessions)
            before = await look(sessions)
            disk.write_error = apsw.IOError
            gate.shut("end")
            asker = Asker(lambda: mutation(sessions))
            nursery.start_soon(asker.run)
            await trio.testing.wait_all_tasks_blocked()
            asker.scope.cancel()
            disk.write_error = None
            gate.open()
            await asker.ended.wait()
            assert not asker.cancelled
            assert isinstance(asker.error, StorageFailed)
            assert not asker.error.kept
            assert not asker.error.unknown
            assert await look(sessions) == before
            assert sessions.health().pending == 0


@pytest.mark.parametrize("cancelled", [True, False])
async def test_of_two_appends_that_fail_together_only_the_one_still_waited_for_is_kept(
    tmp_path: Path, cancelled: bool
) -> None:
    gate = Gate()
    with failing_disk() as disk:
        async with open_sessions(tmp_path / "state.db", offload=gate, vfs=disk.name) as sessions:
            async with trio.open_nursery() as nursery:
                gate.shut("begin")
                nursery.start_soon(sessions["a"].append, U("first"))
                await trio.testing.wait_all_tasks_blocked()
                askers = [
                    Asker(lambda text=text: sessions["a"].append(U(text)))  # type: ignore[misc]
                    for text in ("given up", "waited for")
                ]
                for asker in askers:
                    nursery.start_soon(asker.run)
                    await trio.testing.wait_all_tasks_blocked()
                gate.shut("end")
                gate.may_begin.set()
                await trio.testing.wait_all_tasks_blocked()  # the first is written
                disk.write_error = apsw.IOError
                gate.may_end.set()  # and so the two are handed over, together
                gate.shut("end")
                await trio.testing.wait_all_tasks_blocked()
                if cancelled:
                    askers[0].scope.cancel()
                disk.write_error = None
                gate.open()
            kept = [asker.error.kept for asker in askers if isinstance(asker.error, StorageError)]
            assert kept == [not cancelled, True]
            wanted = ["first", "waited for"] if cancelled else ["first", "given up", "waited for"]
            assert said(await sessions["a"].transcript()) == wanted


async def test_those_behind_a_withdrawn_one_move_up_in_order(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        open_sessions(tmp_path / "state.db", offload=gate, mailbox_size=2) as sessions,
        trio.open_nursery() as nursery,
    ):
        gate.shut("begin")
        askers = []
        for n in range(8):
            asker = Asker(lambda n=n: sessions["a"].append(U(str(n))))  # type: ignore[misc]
            askers.append(asker)
            nursery.start_soon(asker.run)
            await trio.testing.wait_all_tasks_blocked()
        assert (sessions.stats().mailboxes, sessions.stats().in_line) == (2, 5)
        for n in (0, 2, 5):  # with the writer, in the mailbox, in line
            askers[n].scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert askers[n].cancelled
        gate.open()
        for asker in askers:
            await asker.ended.wait()
        assert said(await sessions["a"].transcript()) == ["1", "3", "4", "6", "7"]
        assert [message.position for message in await sessions["a"].transcript()] == [1, 2, 3, 4, 5]


class CancelAtStep(trio.abc.Instrument):
    """Cancels an asker when any task is about to take its n-th step from now on."""

    def __init__(self, asker: Asker, step: int) -> None:
        self.asker = asker
        self.left = step

    def before_task_step(self, _: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.asker.scope.cancel()

    @property
    def reached(self) -> bool:
        return self.left <= 0


async def in_steps(work: Callable[[], T], limiter: trio.CapacityLimiter, /) -> T:
    """Do the work on the spot, with steps before and after it for others to do something in."""
    async with limiter:
        await trio.lowlevel.checkpoint()
        done = work()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return done


async def cancel_at_step(
    sessions: Sessions, mutation: Mutation, step: int
) -> tuple[Asker, CancelAtStep]:
    asker = Asker(lambda: mutation(sessions))
    instrument = CancelAtStep(asker, step)
    trio.lowlevel.add_instrument(instrument)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sessions["a"].append, A("an other's"))
            nursery.start_soon(asker.run)
    finally:
        trio.lowlevel.remove_instrument(instrument)
    await trio.testing.wait_all_tasks_blocked()
    return asker, instrument


async def outcome_of(path: Path, calls: list[Mutation]) -> Seen:
    async with open_sessions(
        path, offload=inline, now=lambda: 0.0, random=random.Random(1)
    ) as sessions:
        await furnish(sessions)
        for call in calls:
            await call(sessions)
        return await look(sessions)
    raise AssertionError("unreachable")


@each_mutation
async def test_at_every_step_a_mutation_is_either_cancelled_or_done(
    tmp_path: Path, mutation: Mutation
) -> None:
    def other(sessions: Sessions) -> Coroutine[object, None, object]:
        return sessions["a"].append(A("an other's"))

    undone = await outcome_of(tmp_path / "undone.db", [other])
    done = [  # the two race
        await outcome_of(tmp_path / "first.db", [mutation, other]),
        await outcome_of(tmp_path / "second.db", [other, mutation]),
    ]
    outcomes = set()
    for step in range(1, 200):
        async with open_sessions(
            tmp_path / f"{step}.db", offload=in_steps, now=lambda: 0.0, random=random.Random(1)
        ) as sessions:
            await furnish(sessions)
            asker, instrument = await cancel_at_step(sessions, mutation, step)
            seen = await look(sessions)
        assert asker.error is None
        if asker.cancelled:
            assert seen == undone
        else:
            assert seen in done
        outcomes.add(asker.cancelled)
        if not instrument.reached:
            break
    else:
        raise AssertionError("it never came to an end")
    assert outcomes == {True, False}


async def test_at_every_step_an_append_that_storage_refuses_is_cancelled_or_kept_or_given_back(
    tmp_path: Path,
) -> None:
    outcomes: set[str] = set()
    with failing_disk() as disk:
        for step in range(1, 200):
            outcome, reached = await _refused_at_step(tmp_path / f"{step}.db", disk, step)
            outcomes.add(outcome)
            if not reached:
                break
        else:
            raise AssertionError("it never came to an end")
    assert outcomes == {"cancelled", "given back", "kept"}


async def _refused_at_step(path: Path, disk: Disk, step: int) -> tuple[str, bool]:
    async with open_sessions(path, offload=in_steps, vfs=disk.name) as sessions:
        await sessions["a"].append(U("before"))
        disk.write_error = apsw.IOError
        asker = Asker(lambda: sessions["a"].append(U("refused")))
        instrument = CancelAtStep(asker, step)
        trio.lowlevel.add_instrument(instrument)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(asker.run)
        finally:
            trio.lowlevel.remove_instrument(instrument)
        disk.write_error = None
        if asker.cancelled:
            outcome = "cancelled"
        else:
            assert isinstance(asker.error, StorageFailed)
            outcome = "kept" if asker.error.kept else "given back"
        kept = outcome == "kept"
        assert sessions.stats().pending == kept
        await sessions["a"].append(U("after"))
        wanted = ["before", "refused", "after"] if kept else ["before", "after"]
        assert said(await sessions["a"].transcript()) == wanted
        return outcome, instrument.reached


async def test_a_cancelled_read_leaves_the_session_as_usable_as_before(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=in_steps) as sessions:
        await furnish(sessions)
        for read in (
            sessions["a"].transcript,
            sessions["a"].all_messages,
            sessions["a"].history,
            sessions["a"].info,
            sessions["a"].meta,
            sessions.list,
        ):
            with trio.CancelScope() as scope:
                scope.cancel()
                await read()
            assert scope.cancelled_caught
        assert said(await sessions["a"].transcript()) == ["1", "a", "2", "b"]


async def test_a_call_cancelled_while_a_deleted_session_refuses_it_gets_its_answer(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with furnished(tmp_path / "state.db", gate) as sessions:
        handle = sessions["a"]
        await handle.transcript()
        await sessions.delete("a")
        async with trio.open_nursery() as nursery:
            gate.shut("end")
            asker = Asker(lambda: handle.append(U("too late")))
            nursery.start_soon(asker.run)
            await trio.testing.wait_all_tasks_blocked()
            asker.scope.cancel()
            gate.open()
        assert isinstance(asker.error, Closed)
        assert await sessions.list() == []
