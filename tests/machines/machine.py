"""Two stores on one file and the model, side by side.

Each step does one thing to a store and to the model, compares the answers, and then compares all
that can be read of every session, through both stores. The rules are in `sessions_machine` and
`turns_machine`.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import apsw
import pytest
import trio
import trio.testing
from attrs import evolve
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import SearchStrategy
from support import Disk, failing_disk

from machines.driver import Block, Driver, Side
from machines.nouns import By, Draft, Got, Held, Refused, Row, plain
from machines.said import FORKS, IDS, SIDES
from machines.turns_model import World
from turnkeeper.actors import (
    Appended,
    Closed,
    Conflict,
    Rewritten,
    Session,
    StorageDamaged,
    StorageError,
    StorageFailed,
    StoredMessage,
    Turn,
    TurnActive,
)

__all__ = [
    "PROFILE",
    "THOROUGH",
    "Call",
    "Change",
    "Handle",
    "Holding",
    "Machine",
    "Store",
    "assert_catches",
    "either",
]

THOROUGH = os.environ.get("TURNKEEPER_THOROUGH") == "1"
MAX_PENDING = 4
MAX_INBOX = 3

PROFILE = settings(
    max_examples=2_000 if THOROUGH else 60,
    stateful_step_count=40,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    derandomize=not THOROUGH,
    database=None,
)


def assert_catches(machine: Callable[[], RuleBasedStateMachine], number: int) -> None:
    """See to it that a machine finds what is wrong; `number` is a seed that leads there soon."""

    def begin() -> RuleBasedStateMachine:
        return machine()

    seed(number)(begin)
    search = settings(
        PROFILE,
        max_examples=500,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        derandomize=False,
    )
    with pytest.raises((AssertionError, StorageDamaged)):
        run_state_machine_as_test(begin, settings=search)  # type: ignore[arg-type]  # it calls it


Call = Callable[[], Awaitable[object]]
Outcome = object


def either(**drawn: SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A rule that is followed through one of the two stores."""

    def decorate(follow: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(follow)
        def followed(self: Machine, through: int, **values: object) -> None:
            self.here = self.sides[through]
            follow(self, **values)

        strategies: dict[str, Any] = {"through": SIDES, **drawn}
        made: Callable[..., None] = rule(**strategies)(followed)  # type: ignore[no-untyped-call]  # its overloads take no mapping
        return made

    return decorate


class Store(Side):
    """One of the two, and what the machine knows of it."""

    number = 0
    """Which opening of a store it is."""
    failing: bool | None = False
    """Whether its last commit failed; None where the order of commits is not known."""

    def __init__(self, driver: Driver, path: Path, disk: Disk, name: str) -> None:
        super().__init__(driver, path, disk, name, max_pending=MAX_PENDING, max_inbox=MAX_INBOX)
        self.old: dict[str, Handle] = {}
        self.blocks: list[Holding] = []

    @property
    def held(self) -> set[str]:
        """The sessions whose turns are held through it, as far as it knows."""
        return {holding.id for holding in self.blocks}


@dataclass(eq=False)
class Holding:
    """A turn that is held."""

    id: str
    block: Block
    by: By
    serves: bool
    """Whether it is for what the inbox holds."""
    until: float
    """How long it may be held."""
    renew_at: float
    """When it is to be renewed next."""


@dataclass(frozen=True)
class Handle:
    """What a caller holds, through which open store, and the life that it has met."""

    session: Session | Turn
    side: int
    life: int | None
    token: int | None = None

    @property
    def by(self) -> By:
        return By(self.side, self.life, self.token)

    @property
    def whole(self) -> Session:
        assert isinstance(self.session, Session)
        return self.session


@dataclass(frozen=True)
class Change:
    """One change, as it is asked of the store and of the model."""

    id: str
    by: By
    call: Call
    model: Callable[[World], object]
    kept: tuple[Draft, ...] = ()
    """What the store keeps if storage does not take it."""
    to: str | None = None
    """The session that it makes, if it is a fork."""
    handle: Handle | None = None


class Machine(RuleBasedStateMachine):
    """Drives two stores and the model side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.stack.callback(shutil.rmtree, self.folder)
        self.path = self.folder / "state.db"
        self.driver = Driver()
        self.stack.callback(self.driver.stop)
        self.world = World(MAX_PENDING, max_inbox=MAX_INBOX)
        self.openings = itertools.count(1)
        self.sides = [self.side(name) for name in ("one", "two")]
        self.here = self.sides[0]
        """The store that is spoken to."""
        self.ids: dict[int, int] = {}
        """The store's id of each row of the model, once it was seen."""
        self.posts: dict[int, int] = {}
        """The store's id of each post."""
        self.acknowledged: dict[int, set[int]] = {}
        """For each life, the ids of what was said to be on disk."""
        self.clocks: dict[tuple[int, int], tuple[float, float]] = {}
        """When each session was made and last changed, as it was first read after a change."""
        self.steps = 0
        self.sound = True

    def side(self, name: str) -> Store:
        disk = self.stack.enter_context(failing_disk())
        side = Store(self.driver, self.path, disk, name)
        self.begin(side)
        return side

    def begin(self, side: Store) -> None:
        """Open a store, which then knows nothing."""
        side.open()
        side.number = next(self.openings)
        side.old, side.failing = {}, False

    def close(self, *, healed: bool) -> None:
        """Close a store; what it has pending must be on disk then, if the disk took it."""
        side = self.here
        self.sound = False
        if healed:
            side.heal()
        failures = side.disk.failures
        try:
            side.close()
        except StorageFailed:
            assert self.world.pending_number(side.number)
            assert side.disk.failures > failures
        failed = side.disk.failures > failures
        side.heal()
        self.let_go(side, failed=failed)
        self.catch_up(side, failed=failed)
        self.lose(side)

    def close_and_open(self, healed: bool) -> None:
        self.close(healed=healed)
        self.begin(self.here)

    def lose(self, side: Store) -> None:
        """What a store remembered is gone with it."""
        self.world.forget(side.number)
        side.blocks = []

    def let_go(self, side: Store, *, failed: bool) -> None:
        """See what became of the turns that a store held when it closed; to be added to."""

    def let_time_pass(
        self, seconds: float, first: int, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Let time pass for one store, then do something `meanwhile`, then let the other go on."""
        self.sound = False
        sides = [self.sides[first], self.sides[1 - first]]
        failures = {side: side.disk.failures for side in sides}
        for side in sides:
            self.driver.run(partial(self.at_once, side.shut))
        self.world.seconds = self.driver.jump(seconds)
        for side in sides:
            self.driver.run(partial(self.at_once, side.let_on))
            failed = side.disk.failures > failures[side]
            if failed or side.failing:
                side.failing = None
            self.look(side, failed=failed)
            self.catch_up(side, failed=failed)
            if meanwhile is not None and side is sides[0]:
                self.here = side
                meanwhile()
                failures[sides[1]] = sides[1].disk.failures

    async def at_once(self, work: Callable[[], None]) -> None:
        work()

    def look(self, side: Store, *, failed: bool) -> None:
        """See what became of the turns that a store holds; to be added to."""

    def catch_up(self, side: Store, *, failed: bool) -> None:
        """See what became of what was pending; it must be on disk if the disk took it."""
        for id in self.world.owing(side.number):
            after = self.world.copy()
            after.drain(id, By(side.number))
            after.pending.pop((side.number, id), None)
            after.tidy(id, side.number)
            if self.stands(id) == self.expected(after, id):
                self.world = after
                continue
            assert failed, f"{id!r} still has something to be written"
            side.failing = None
            if self.stands(id) != self.expected(self.world, id):
                # Two tries: one brought what is pending, one the end of the turn, or did not.
                after = self.world.copy()
                unreleased = after.unreleased.pop((side.number, id), {})
                after.drain(id, By(side.number))
                after.unreleased[side.number, id] = unreleased
                assert self.stands(id) == self.expected(after, id)
                self.world = after

    def expected(self, world: World, id: str) -> tuple[int, bool]:
        life = world.lives.get(id)
        return (0, False) if life is None else (life.revision, life.turn is not None)

    def stands(self, id: str) -> tuple[int, bool]:
        """Return the revision of a session and whether a turn holds it, by another connection."""
        rows = self.ask(
            "SELECT revision, turn FROM heads JOIN sessions ON key = session "
            "WHERE id = ? AND buried IS NULL",
            id,
        )
        return (0, False) if not rows else (rows[0][0], rows[0][1] is not None)

    def ask(self, question: str, *values: object) -> list[tuple[Any, ...]]:
        with closing(
            apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READONLY)
        ) as connection:
            return connection.execute(question, values).fetchall()

    # One change, or several handed over together.

    def do(self, *changes: Change, cancelled: frozenset[int] = frozenset()) -> bool:
        """Do the changes, compare what comes of them, and return whether the disk failed."""
        self.sound = False
        disk = self.here.disk
        failures = disk.failures
        certain = disk.write_error is not None and self.here.skip == 0
        certain = certain and (disk.fail_next is None or len(changes) == 1)
        outcomes = self.driver.run(lambda: self.together(changes, cancelled))
        failed = disk.failures > failures
        for index, change in enumerate(changes):
            if index in cancelled:
                assert outcomes[index] is None, "a cancelled change was not withdrawn"
            else:
                self.settle(change, outcomes[index], failed=failed, certain=certain)
        if failed and len(changes) > 1:
            self.here.failing = None
        return failed

    async def together(self, changes: Sequence[Change], cancelled: frozenset[int]) -> list[Outcome]:
        """Hand the changes over in order before the first of them begins; return the outcomes."""
        outcomes: list[Outcome] = [None] * len(changes)
        turns = [trio.Event() for _ in range(len(changes) + 1)]
        scopes = [trio.CancelScope() for _ in changes]

        async def ask(index: int) -> None:
            await turns[index].wait()
            turns[index + 1].set()
            with scopes[index]:
                try:
                    outcomes[index] = (await changes[index].call(),)
                except Exception as error:
                    outcomes[index] = error

        async with trio.open_nursery() as nursery:
            with self.here.gate():
                for index in range(len(changes)):
                    nursery.start_soon(ask, index)
                turns[0].set()
                await trio.testing.wait_all_tasks_blocked()
                for index in cancelled:
                    scopes[index].cancel()
                await trio.testing.wait_all_tasks_blocked()
        return outcomes

    def settle(self, change: Change, outcome: Outcome, *, failed: bool, certain: bool) -> None:
        """Do the change in the model and compare the answers."""
        after = self.world.copy()
        try:
            expected: object = change.model(after)
        except Refused as refused:
            refusal: Refused | None = refused
        else:
            refusal = None
        if refusal is not None:
            assert type(outcome) is refusal.kind, f"{outcome!r} where {refusal!r} was due"
            if isinstance(outcome, TurnActive):
                self.compare_refusal(change.id, outcome, refusal.held)
            if isinstance(outcome, Conflict):
                assert outcome.revision == self.world.revision(change.id)
            if isinstance(outcome, Closed):
                assert outcome.what == "session"
            return
        writes = after.writes != self.world.writes
        if isinstance(outcome, StorageError):
            assert failed, f"{outcome!r} though the disk took everything"
            self.here.failing = True
            kept = self.world.keep(change.id, change.by, change.kept) if change.kept else False
            assert outcome.kept == kept, (outcome, kept)
            return
        if isinstance(outcome, Exception):
            raise AssertionError(f"failed for no reason: {outcome!r}") from outcome
        assert isinstance(outcome, tuple)
        assert not (certain and writes), "written to a disk that takes nothing"
        there = self.world.lives.get(change.id)
        was_there = there is not None
        after.tidy(change.id, change.by.side)
        self.world = after
        self.compare(change.id, outcome[0], expected)
        if writes:
            self.here.failing = False
        handle, life = change.handle, after.lives.get(change.id)
        if (
            handle is not None
            and handle.token is None
            and life is not None
            and (was_there or change.to is None)
        ):
            self.here.old[change.id] = replace(handle, life=life.number)

    def compare_refusal(self, id: str, refusal: TurnActive, held: Held | None) -> None:
        assert refusal.session == id
        if held is not None:
            assert refusal.holder == held.holder
            assert refusal.expires_in == held.expires - self.world.seconds

    def compare(self, id: str, receipt: object, expected: object) -> None:
        if isinstance(expected, list):
            receipts = receipt if type(receipt) is tuple else (receipt,)
            assert len(receipts) == len(expected)
            for one, got in zip(receipts, expected, strict=True):
                self.compare_appended(id, one, got)
        elif isinstance(receipt, Rewritten):
            assert isinstance(expected, tuple)
            rewritten, rows = expected
            assert evolve(receipt, appended=()) == rewritten, (receipt, rewritten)
            assert len(receipt.appended) == len(rows)
            for one, row in zip(receipt.appended, rows, strict=True):
                self.compare_appended(id, one, Got(row, False))
        else:
            assert receipt == expected, f"{receipt!r} is not {expected!r}"

    def compare_appended(self, id: str, receipt: object, got: Got) -> None:
        assert isinstance(receipt, Appended)
        life, row = self.world.lives[id], got.row
        assert receipt[1:] == (row.position, row.revision, got.duplicate, row in life.live)
        self.learn(row, receipt.id)
        if not got.duplicate:
            self.acknowledged.setdefault(life.number, set()).add(receipt.id)

    def learn(self, row: Row, id: int | None) -> None:
        assert id is not None
        assert self.ids.setdefault(row.number, id) == id, f"{row!r} has changed its id"

    # What a session can be asked.

    def handle(self, id: str, old: bool) -> Handle:
        """Return a handle on `id`: the one used before, if wanted, else one that knows nothing."""
        if old and id in self.here.old:
            return self.here.old[id]
        return Handle(self.here.sessions[id], self.here.number, None)

    def at(self, id: str, off: int | None) -> int | None:
        return None if off is None else max(0, self.world.revision(id) + off)

    def appending(self, handle: Handle, id: str, draft: Draft, at: int | None) -> Change:
        if draft.hidden:
            draft = replace(draft, opens=False)
        return Change(
            id,
            handle.by,
            lambda: handle.session.append(draft.body, key=draft.key, hidden=draft.hidden, at=at),
            lambda world: world.extend(id, handle.by, [draft], at),
            (draft,) if at is None else (),
            handle=handle,
        )

    def extending(self, handle: Handle, id: str, drafts: list[Draft], at: int | None) -> Change:
        bodies, keys = [draft.body for draft in drafts], [draft.key for draft in drafts]
        return Change(
            id,
            handle.by,
            lambda: handle.session.extend(bodies, keys=keys, at=at),
            lambda world: world.extend(id, handle.by, drafts, at),
            tuple(drafts) if at is None else (),
            handle=handle,
        )

    def undoing(self, handle: Handle, id: str, turns: int, at: int | None) -> Change:
        return Change(
            id,
            handle.by,
            lambda: handle.session.undo(turns, at=at),
            lambda world: world.rewind(id, handle.by, turns, "undo", at),
            handle=handle,
        )

    def retrying(self, handle: Handle, id: str, at: int | None) -> Change:
        return Change(
            id,
            handle.by,
            lambda: handle.session.retry(at=at),
            lambda world: world.rewind(id, handle.by, 1, "retry", at),
            handle=handle,
        )

    def redoing(self, handle: Handle, id: str, at: int | None) -> Change:
        return Change(
            id,
            handle.by,
            lambda: handle.session.redo(at=at),
            lambda world: world.redo(id, handle.by, at),
            handle=handle,
        )

    def restoring(self, handle: Handle, id: str, revision: int, at: int | None) -> Change:
        return Change(
            id,
            handle.by,
            lambda: handle.session.restore(revision, at=at),
            lambda world: world.restore(id, handle.by, revision, at),
            handle=handle,
        )

    def shown_less(self, id: str, cut: int) -> list[Draft]:
        """Return what a person sees of the transcript, but for the last `cut`."""
        shown = self.world.shown(self.here.number, id)
        visible = [replace(draft, key=None) for draft, _ in shown if not draft.hidden]
        return visible[: max(0, len(visible) - cut)]

    def rewriting(
        self,
        handle: Handle,
        id: str,
        drafts: list[Draft],
        reason: Literal["rewrite", "compaction"],
        at: int | None,
    ) -> Change:
        bodies = [draft.body for draft in drafts]
        return Change(
            id,
            handle.by,
            lambda: handle.session.rewrite(bodies, reason=reason, at=at),
            lambda world: world.rewrite(id, handle.by, drafts, reason, at),
            handle=handle,
        )

    def file_is_whole(self) -> None:
        assert self.ask("PRAGMA integrity_check") == [("ok",)]
        stored = {id for (id,) in self.ask("SELECT id FROM messages")}
        assert stored == {self.ids[number] for number in self.world.reached()}

    # What must hold after every step.

    @invariant()
    def reads_as_the_model(self) -> None:
        self.steps += 1
        self.driver.run(self.compare_all)
        self.sound = True

    async def compare_all(self) -> None:
        for side in self.sides:
            await self.compare_side(side)

    async def compare_side(self, side: Store) -> None:
        world, sessions = self.world, side.sessions
        for id in IDS + FORKS:
            await self.compare_session(side, id)
        listed = await sessions.list()
        assert [info.id for info in listed] == sorted(world.lives)
        health, stats = sessions.health(), sessions.stats()
        assert health.pending == stats.pending == world.pending_number(side.number)
        assert not (health.ok and health.pending)
        if side.failing is not None:
            assert health.ok == (not side.failing and not health.pending), health
        assert stats.failures == stats.mailboxes == stats.in_line == stats.busy == 0

    async def compare_session(self, side: Store, id: str) -> None:
        life, session = self.world.lives.get(id), side.sessions[id]
        shown = self.world.shown(side.number, id)
        everything = await session.transcript(hidden=True)
        assert everything.revision == self.world.revision(id)
        assert everything.position == len(shown)
        assert [message.position for message in everything] == list(range(1, len(shown) + 1))
        for message, (draft, row) in zip(everything, shown, strict=True):
            self.compare_message(message, draft, row)
        if self.sides[self.steps % 2] is not side:
            return  # the rest is asked of both in turns
        visible = [message for message in everything if not message.hidden]
        assert list(await session.transcript()) == visible
        after, last = self.steps // 2 % 7, self.steps // 2 % 3
        assert list(await session.transcript(after=after)) == [
            message for message in visible if message.position > after
        ]
        assert list(await session.transcript(last=last, after=after, hidden=True)) == list(
            everything[after:][max(0, len(everything) - after - last) :]
        )
        messages = await session.all_messages()
        info = await session.info()
        moves = [
            (move.revision, move.kind, move.from_position, move.to_position)
            for move in await session.history()
        ]
        if life is None:
            assert not messages
            assert info is None
            assert not moves
            return
        assert len(messages) == len(life.ever)
        for message, row in zip(messages, life.ever, strict=True):
            self.compare_message(message, row.draft, row, state=life.state(row))
        assert self.acknowledged.get(life.number, set()) <= {message.id for message in messages}
        assert moves == life.history
        assert info is not None
        assert (info.id, info.revision, info.messages) == (id, life.revision, life.position)
        assert info.meta == life.meta == await session.meta()
        moment = (life.number, life.revision)
        clocks = (info.created_at, info.updated_at)
        assert clocks == self.clocks.setdefault(moment, clocks)

    def compare_message(
        self, message: StoredMessage, draft: Draft, row: Row | None, state: str = "live"
    ) -> None:
        assert plain(message.body) == plain(draft.body)
        assert (message.hidden, message.opens_turn, message.key, message.state) == (
            draft.hidden,
            draft.opens,
            draft.key,
            state,
        )
        assert message.synthetic == draft.synthetic
        assert message.pending == (row is None)
        if row is not None:
            assert (message.position, message.revision) == (row.position, row.revision)
            self.learn(row, message.id)
            if row.post is not None:
                assert message.append_id == self.posts[row.post]

    def teardown(self) -> None:
        with self.stack:
            for side in self.sides:
                self.driver.run(partial(self.at_once, side.let_on))  # or it could never end
                side.heal()
            if self.sound:
                self.here = self.sides[self.steps % 2]
                self.close_and_open(healed=True)
                self.reads_as_the_model()
                self.file_is_whole()
                for side in self.sides:
                    side.close()
