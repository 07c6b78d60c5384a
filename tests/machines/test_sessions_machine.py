"""Random programs over a few sessions, beside a model of plain lists and dicts.

Each step does one thing to the store and to the model, compares the answers, and then compares
all that can be read of every session. Among the steps are disks that fail, actors that are
dropped, changes that are handed over together or cancelled, and closing and opening the file.

`TURNKEEPER_THOROUGH=1` runs two thousand programs instead of a handful.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import apsw
import pytest
import trio
import trio.testing
from attrs import evolve
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import A, Disk, S, T, U, failing_disk

from machines.driver import Driver
from machines.model import Draft, Got, Refused, Row, World, plain
from turnkeeper.actors import (
    Appended,
    CarrierFormat,
    Closed,
    Conflict,
    Rejected,
    Rewritten,
    Session,
    StorageError,
    StorageFailed,
    StoredMessage,
)
from turnkeeper.actors.pending import keep as real_keep
from turnkeeper.storage import Kept, branches, moves
from turnkeeper.storage.places import Place

THOROUGH = os.environ.get("TURNKEEPER_THOROUGH") == "1"
IDS = ("a", "b", "c")
FORKS = ("d", "e")
MAX_PENDING = 4
MARKS = CarrierFormat()

Body = dict[str, object]
Call = Callable[[], Awaitable[object]]
Outcome = object


# What is said. What the rules of conversation make of it is written down beside it by hand.


def person(text: str) -> Draft:
    return Draft(U(text), opens=True, text=text)


def summary(text: str) -> str:
    return f"{MARKS.prefix}\n{MARKS.heading}\n{text}\n{MARKS.end_marker}"


def carrier(content: str, ask: str, notes: str) -> Draft:
    return Draft(U(content), opens=True, text=ask, scaffold=U(summary(notes)))


def parts(*each: Body) -> Body:
    return {"role": "user", "content": list(each)}


def text_part(text: str, **more: object) -> Body:
    return {"type": "text", "text": text, **more}


WORDS = ("one", "two", "three")
PLAIN = [person(word) for word in WORDS] + [Draft(A(word)) for word in WORDS]
OTHER = [
    Draft(S("be kind")),
    Draft(A(call="c1")),
    Draft(T("c1", "result")),
    carrier(f"{summary('n1')}\n\nask one", "ask one", "n1"),
    carrier(f"{summary('n2')}\n\nask {MARKS.end_marker} two", f"ask {MARKS.end_marker} two", "n2"),
    carrier(f"ask three\n\n{MARKS.delimiter}\n{summary('n3')}", "ask three", "n3"),
    Draft(U(summary("nobody asks"))),
    Draft(parts(text_part("part")), opens=True, text="part"),
    Draft(parts(text_part("look"), {"type": "image_url", "image_url": {"url": "u"}}), opens=True),
    Draft(parts(text_part("noted", cache_control={"type": "ephemeral"})), opens=True),
    Draft(parts({"type": "tool_result", "tool_use_id": "c1", "content": "result"})),
    Draft(U(""), opens=True),
    Draft({"role": "user"}, opens=True),
    Draft({"role": "user", "content": None}, opens=True),
    Draft({"role": "user", "content": {"n": 2**63}}, opens=True),
    Draft(A("n") | {"n": 1}),
    Draft(A("n") | {"n": True}),
    Draft(A("n") | {"n": 1.0}),
    person("\U0001f600"),
    person("\ud83d\ude00"),
]
DRAFTS = st.sampled_from(PLAIN) | st.sampled_from(OTHER)
KEYS = st.none() | st.sampled_from(["k1", "k2", "k3", "k4"])
KEYED = st.builds(lambda draft, key: replace(draft, key=key), DRAFTS, KEYS)
STALE = st.sampled_from([None, None, None, 0, 0, -1, 1])
"""How far `at` is off; None for no `at`."""
SOME = st.sampled_from("aaaabbcde")
"""Mostly the same, so that enough happens to it."""
ERRORS = st.sampled_from([apsw.IOError, apsw.FullError])


@dataclass(frozen=True)
class Handle:
    """What a caller holds, and the life that it has met."""

    session: Session
    life: int | None


@dataclass(frozen=True)
class Change:
    """One change, as it is asked of the store and of the model."""

    id: str
    call: Call
    model: Callable[[World], object]
    kept: tuple[Draft, ...] = ()
    """What the store keeps if storage does not take it."""
    to: str | None = None
    """The session that it makes, if it is a fork."""
    handle: Handle | None = None


class SessionsMachine(RuleBasedStateMachine):
    """Drives a store and the model side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.stack.callback(shutil.rmtree, self.folder)
        self.path = self.folder / "state.db"
        self.disk: Disk = self.stack.enter_context(failing_disk())
        self.skip = 0
        """Writes that go well before the next one fails."""
        vars(self.disk)["check_write"] = self.check_write
        self.driver = Driver(self.path, vfs=self.disk.name, max_pending=MAX_PENDING)
        self.stack.callback(self.driver.stop)
        self.driver.open()
        self.world = World(MAX_PENDING)
        self.old: dict[str, Handle] = {}
        self.ids: dict[int, int] = {}
        """The store's id of each row of the model, once it was seen."""
        self.acknowledged: dict[int, set[int]] = {}
        """For each life, the ids of what was said to be on disk."""
        self.clocks: dict[tuple[int, int], tuple[float, float]] = {}
        """When each session was made and last changed, as it was first read after a change."""
        self.failing: bool | None = False
        """Whether the last commit failed; None where the order of commits is not known."""
        self.steps = 0
        self.sound = True

    def check_write(self) -> None:
        if self.disk.write_error is not None and self.skip:
            self.skip -= 1
        else:
            Disk.check_write(self.disk)

    # One change, or several handed over together.

    def do(self, *changes: Change, cancelled: frozenset[int] = frozenset()) -> None:
        self.sound = False
        failures = self.disk.failures
        certain = self.disk.write_error is not None and self.skip == 0
        certain = certain and (self.disk.fail_next is None or len(changes) == 1)
        outcomes = self.driver.run(lambda: self.together(changes, cancelled))
        failed = self.disk.failures > failures
        for index, change in enumerate(changes):
            if index in cancelled:
                assert outcomes[index] is None, "a cancelled change was not withdrawn"
            else:
                self.settle(change, outcomes[index], failed=failed, certain=certain)
        if failed and len(changes) > 1:
            self.failing = None

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
            with self.driver.gate():
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
            if isinstance(outcome, Conflict):
                assert outcome.revision == self.world.revision(change.id)
            if isinstance(outcome, Closed):
                assert outcome.what == "session"
            return
        writes = after.writes != self.world.writes
        if isinstance(outcome, StorageError):
            assert failed, f"{outcome!r} though the disk took everything"
            self.failing = True
            kept = self.world.keep(change.id, change.kept) if change.kept else False
            assert outcome.kept == kept, (outcome, kept)
            return
        if isinstance(outcome, Exception):
            raise AssertionError(f"failed for no reason: {outcome!r}") from outcome
        assert isinstance(outcome, tuple)
        assert not (certain and writes), "written to a disk that takes nothing"
        there = self.world.lives.get(change.id)
        was_there = there is not None
        self.world = after
        self.compare(change.id, outcome[0], expected)
        if writes:
            self.failing = False
        handle, life = change.handle, after.lives.get(change.id)
        if handle is not None and life is not None and (was_there or change.to is None):
            self.old[change.id] = replace(handle, life=life.number)

    def compare(self, id: str, receipt: object, expected: object) -> None:
        if isinstance(expected, list):
            receipts = receipt if type(receipt) is tuple else (receipt,)
            assert len(receipts) == len(expected)
            for one, got in zip(receipts, expected, strict=True):
                self.compare_appended(id, one, got)
        elif isinstance(expected, tuple):  # a rewrite, and what it appended
            assert isinstance(receipt, Rewritten)
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
        if old and id in self.old:
            return self.old[id]
        return Handle(self.driver.sessions[id], None)

    def at(self, id: str, off: int | None) -> int | None:
        return None if off is None else max(0, self.world.revision(id) + off)

    def appending(self, handle: Handle, id: str, draft: Draft, at: int | None) -> Change:
        if draft.hidden:
            draft = replace(draft, opens=False)
        return Change(
            id,
            lambda: handle.session.append(draft.body, key=draft.key, hidden=draft.hidden, at=at),
            lambda world: world.extend(id, [draft], handle.life, at),
            (draft,) if at is None else (),
            handle=handle,
        )

    def extending(self, handle: Handle, id: str, drafts: list[Draft], at: int | None) -> Change:
        bodies, keys = [draft.body for draft in drafts], [draft.key for draft in drafts]
        return Change(
            id,
            lambda: handle.session.extend(bodies, keys=keys, at=at),
            lambda world: world.extend(id, drafts, handle.life, at),
            tuple(drafts) if at is None else (),
            handle=handle,
        )

    def undoing(self, handle: Handle, id: str, turns: int, at: int | None) -> Change:
        return Change(
            id,
            lambda: handle.session.undo(turns, at=at),
            lambda world: world.rewind(id, turns, "undo", handle.life, at),
            handle=handle,
        )

    def retrying(self, handle: Handle, id: str, at: int | None) -> Change:
        return Change(
            id,
            lambda: handle.session.retry(at=at),
            lambda world: world.rewind(id, 1, "retry", handle.life, at),
            handle=handle,
        )

    def redoing(self, handle: Handle, id: str, at: int | None) -> Change:
        return Change(
            id,
            lambda: handle.session.redo(at=at),
            lambda world: world.redo(id, handle.life, at),
            handle=handle,
        )

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
            lambda: handle.session.rewrite(bodies, reason=reason, at=at),
            lambda world: world.rewrite(id, drafts, reason, handle.life, at),
            handle=handle,
        )

    # The rules.

    @rule(
        id=SOME,
        draft=KEYED,
        hidden=st.sampled_from([False] * 4 + [True]),
        off=STALE,
        old=st.booleans(),
    )
    def append(self, id: str, draft: Draft, hidden: bool, off: int | None, old: bool) -> None:
        draft = replace(draft, hidden=hidden)
        self.do(self.appending(self.handle(id, old), id, draft, self.at(id, off)))

    @rule(id=SOME, word=st.sampled_from(WORDS))
    def say(self, id: str, word: str) -> None:
        """An exchange, so that there is something to take back."""
        handle = self.handle(id, False)
        self.do(self.extending(handle, id, [person(word), Draft(A(word))], None))

    @rule(id=SOME, drafts=st.lists(KEYED, min_size=1, max_size=4), off=STALE, old=st.booleans())
    def extend(self, id: str, drafts: list[Draft], off: int | None, old: bool) -> None:
        self.do(self.extending(self.handle(id, old), id, drafts, self.at(id, off)))

    @rule(id=SOME, pick=st.integers(0, 9), off=STALE)
    def deliver_again(self, id: str, pick: int, off: int | None) -> None:
        drafts = [draft for kept in self.world.pending.get(id, []) for draft in kept]
        if id in self.world.lives:
            drafts += [row.draft for row in self.world.lives[id].keys.values()]
        drafts = [draft for draft in drafts if draft.key is not None]
        if drafts:
            draft = drafts[pick % len(drafts)]
            self.do(self.appending(self.handle(id, False), id, draft, self.at(id, off)))

    @rule(id=SOME, turns=st.integers(1, 4), off=STALE, old=st.booleans())
    def undo(self, id: str, turns: int, off: int | None, old: bool) -> None:
        self.do(self.undoing(self.handle(id, old), id, turns, self.at(id, off)))

    @rule(id=SOME, off=STALE, old=st.booleans())
    def retry(self, id: str, off: int | None, old: bool) -> None:
        self.do(self.retrying(self.handle(id, old), id, self.at(id, off)))

    @rule(id=SOME, off=STALE, old=st.booleans())
    def redo(self, id: str, off: int | None, old: bool) -> None:
        self.do(self.redoing(self.handle(id, old), id, self.at(id, off)))

    @rule(id=SOME, undos=st.integers(1, 3), redos=st.integers(1, 4))
    def back_and_forth(self, id: str, undos: int, redos: int) -> None:
        handle = self.handle(id, False)
        for _ in range(undos):
            self.do(self.undoing(handle, id, 1, None))
        for _ in range(redos):
            self.do(self.redoing(handle, id, None))

    @rule(
        id=SOME,
        cut=st.sampled_from([0, 0, 1, 2, 99]),
        tail=st.lists(DRAFTS, max_size=3),
        reason=st.sampled_from(["rewrite", "compaction"]),
        off=STALE,
        old=st.booleans(),
    )
    def rewrite(
        self,
        id: str,
        cut: int,
        tail: list[Draft],
        reason: Literal["rewrite", "compaction"],
        off: int | None,
        old: bool,
    ) -> None:
        """To what stands there, less the last `cut`, and then `tail`."""
        visible = [
            replace(draft, key=None) for draft, _ in self.world.shown(id) if not draft.hidden
        ]
        drafts = visible[: max(0, len(visible) - cut)] + tail
        self.do(self.rewriting(self.handle(id, old), id, drafts, reason, self.at(id, off)))

    @rule(id=SOME, back=st.integers(-2, 12), off=STALE, old=st.booleans())
    def restore(self, id: str, back: int, off: int | None, old: bool) -> None:
        handle, at = self.handle(id, old), self.at(id, off)
        revision = max(1, self.world.revision(id) - back)
        self.do(
            Change(
                id,
                lambda: handle.session.restore(revision, at=at),
                lambda world: world.restore(id, revision, handle.life, at),
                handle=handle,
            )
        )

    @rule(
        id=SOME,
        to=SOME | st.sampled_from(FORKS),
        back=st.none() | st.integers(-1, 4),
        meta=st.none() | st.just({"forked": True}),
        off=STALE,
        old=st.booleans(),
    )
    def fork(
        self, id: str, to: str, back: int | None, meta: Body | None, off: int | None, old: bool
    ) -> None:
        handle, at = self.handle(id, old), self.at(id, off)
        position = None if back is None else max(0, len(self.world.shown(id)) - back)
        self.do(
            Change(
                id,
                lambda: handle.session.fork(to, position=position, meta=meta, at=at),
                lambda world: world.fork(id, to, position, meta, handle.life, at),
                to=to,
                handle=handle,
            )
        )

    @rule(
        id=SOME,
        meta=st.sampled_from([{}, {"title": "x"}, {"n": [1, None, 1.5]}]),
        old=st.booleans(),
    )
    def set_meta(self, id: str, meta: Body, old: bool) -> None:
        handle = self.handle(id, old)
        self.do(
            Change(
                id,
                lambda: handle.session.set_meta(meta),
                lambda world: world.set_meta(id, meta, handle.life),
                handle=handle,
            )
        )

    @rule(id=SOME)
    def delete(self, id: str) -> None:
        life = self.world.lives.get(id)
        self.do(
            Change(
                id,
                lambda: self.driver.sessions.delete(id),
                lambda world: world.delete(id),
            )
        )
        if life is not None and id not in self.world.lives:
            self.acknowledged.pop(life.number, None)

    @rule(id=SOME)
    def purge(self, id: str) -> None:
        self.do(
            Change(
                id,
                lambda: self.driver.sessions.purge(id),
                lambda world: world.purge(id),
            )
        )
        life = self.world.lives.get(id)
        if life is not None and life.history[-1:] == [
            (life.revision, "purge", life.position, life.position)
        ]:
            self.clocks.pop((life.number, life.revision), None)  # it may count as a change
            live = {self.ids.get(row.number) for row in life.live}
            self.acknowledged[life.number] = self.acknowledged.get(life.number, set()) & {
                id for id in live if id is not None
            }

    @rule(id=st.sampled_from(IDS), data=st.data())
    def together_on_all(self, id: str, data: st.DataObject) -> None:
        """Several callers at once; some give up before anything has begun."""
        changes = []
        for _ in range(data.draw(st.integers(2, 8), label="callers")):
            which = data.draw(st.sampled_from(IDS) | st.just(id), label="id")
            handle = self.handle(which, False)
            kind = data.draw(st.sampled_from("aaaaeeurRw"), label="kind")
            if kind == "a":
                changes.append(self.appending(handle, which, data.draw(KEYED), None))
            elif kind == "e":
                drafts = data.draw(st.lists(KEYED, min_size=1, max_size=2))
                changes.append(self.extending(handle, which, drafts, None))
            elif kind == "u":
                changes.append(self.undoing(handle, which, 1, None))
            elif kind == "r":
                changes.append(self.redoing(handle, which, None))
            elif kind == "R":
                changes.append(self.retrying(handle, which, None))
            else:
                drafts = data.draw(st.lists(DRAFTS, max_size=2))
                changes.append(self.rewriting(handle, which, drafts, "rewrite", None))
        cancelled = data.draw(st.sets(st.integers(0, len(changes) - 1), max_size=2))
        self.do(*changes, cancelled=frozenset(cancelled))

    @rule(id=SOME, which=st.integers(0, 13))
    def bad_input(self, id: str, which: int) -> None:
        session = self.driver.sessions[id]
        bad: list[Call] = [
            lambda: session.append({"content": "no role"}),
            lambda: session.append({"role": 1, "content": "x"}),
            lambda: session.append({"role": "user", "content": float("nan")}),
            lambda: session.append({"role": "user", "content": b"bytes"}),
            lambda: session.append(U("x"), key=""),
            lambda: session.append(U("x"), at=-1),
            lambda: session.extend([U("good"), {"role": "user", "content": ("tuple",)}]),
            lambda: session.extend([U("good")], keys=["k1", "k2"]),
            lambda: session.rewrite([U("good"), {"role": ""}]),
            lambda: session.undo(0),
            lambda: session.restore(0),
            lambda: session.restore(10**6),
            lambda: session.fork("nul\0"),
            lambda: session.fork("d", position=10**6),
        ]
        with pytest.raises(Rejected):
            self.driver.run(bad[which])

    @rule()
    def drop_idle(self) -> None:
        self.driver.run(self._drop_idle)

    async def _drop_idle(self) -> None:
        sessions = self.driver.sessions
        sessions.drop_idle()
        assert sessions.stats().resident == sum(map(bool, self.world.pending.values()))

    @rule(
        error=ERRORS,
        times=st.sampled_from([None, None, 1, 1, 1, 2, 3]),
        skip=st.sampled_from([0, 0, 0, 1, 2, 3]),
    )
    def break_the_disk(self, error: type[apsw.Error], times: int | None, skip: int) -> None:
        self.heal()
        self.disk.write_error, self.disk.fail_next, self.skip = error, times, skip

    @precondition(lambda self: self.disk.write_error is not None)
    @rule()
    def heal(self) -> None:
        self.disk.write_error = self.disk.open_error = self.disk.fail_next = None
        self.skip = 0

    @rule()
    def time_passes(self) -> None:
        """What is pending is tried again."""
        self.sound = False
        failures = self.disk.failures
        self.driver.jump(100)
        self.follow_pending(lost=False, failed=self.disk.failures > failures)

    @rule(healed=st.sampled_from([True, True, False]))
    def reopen(self, healed: bool) -> None:
        self.sound = False
        if healed:
            self.heal()
        failures = self.disk.failures
        try:
            self.driver.close()
        except StorageFailed:
            assert self.world.pending_number()
            assert self.disk.failures > failures
        self.heal()
        failed = self.disk.failures > failures
        self.driver.open()
        self.follow_pending(lost=True, failed=failed)
        self.old.clear()
        self.failing = False

    def follow_pending(self, *, lost: bool, failed: bool) -> None:
        """See what became of what was pending; it must be on disk if the disk took it."""
        for id in [id for id, kept in self.world.pending.items() if kept]:
            after = self.world.copy()
            after.drain(id)
            info = self.driver.run(self.driver.sessions[id].info)
            there = 0 if info is None else info.revision
            if there != after.revision(id):
                assert failed, f"{id!r} still has something pending"
                assert there == self.world.revision(id)
                self.failing = True
                if lost:
                    self.world.forget_pending(id)
            else:
                self.world = after
                self.failing = False

    @rule()
    def integrity(self) -> None:
        connection = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            assert connection.pragma("integrity_check") == "ok"
            stored = {id for (id,) in connection.execute("SELECT id FROM messages")}
        finally:
            connection.close()
        assert stored == {self.ids[number] for number in self.world.reached()}

    # What must hold after every step.

    @invariant()
    def reads_as_the_model(self) -> None:
        self.steps += 1
        self.driver.run(self.compare_all)
        self.sound = True

    async def compare_all(self) -> None:
        world, sessions = self.world, self.driver.sessions
        for id in IDS + FORKS:
            await self.compare_session(id)
        listed = await sessions.list()
        assert [info.id for info in listed] == sorted(world.lives)
        health, stats = sessions.health(), sessions.stats()
        assert health.pending == stats.pending == world.pending_number()
        assert not (health.ok and health.pending)
        if self.failing is not None:
            assert health.ok == (not self.failing and not health.pending), health
        assert stats.failures == stats.mailboxes == stats.in_line == stats.busy == 0

    async def compare_session(self, id: str) -> None:
        life, session = self.world.lives.get(id), self.driver.sessions[id]
        shown = self.world.shown(id)
        everything = await session.transcript(hidden=True)
        assert everything.revision == self.world.revision(id)
        assert everything.position == len(shown)
        assert [message.position for message in everything] == list(range(1, len(shown) + 1))
        for message, (draft, row) in zip(everything, shown, strict=True):
            self.compare_message(message, draft, row)
        visible = [message for message in everything if not message.hidden]
        assert list(await session.transcript()) == visible
        after, last = self.steps % 7, self.steps % 3
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
        assert message.pending == (row is None)
        if row is not None:
            assert (message.position, message.revision) == (row.position, row.revision)
            self.learn(row, message.id)

    def teardown(self) -> None:
        with self.stack:
            if self.sound:
                self.reopen(healed=True)
                self.reads_as_the_model()
                self.integrity()
                self.driver.close()


PROFILE = settings(
    max_examples=2_000 if THOROUGH else 60,
    stateful_step_count=40,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    derandomize=not THOROUGH,
    database=None,
)


@pytest.mark.timeout(0 if THOROUGH else 400)  # of which shrinking a failure takes the most
def test_any_program_over_a_few_sessions_does_what_the_model_does() -> None:
    run_state_machine_as_test(SessionsMachine, settings=PROFILE)


# Broken copies: each is a fault that somebody could write, and the machine must find it.


def redo_forgets_to_pop(monkeypatch: pytest.MonkeyPatch) -> None:
    real = moves.undone

    def undone(connection: apsw.Connection, session: int, revision: int) -> tuple[Place, int]:
        place, _ = real(connection, session, revision)
        return place, revision

    monkeypatch.setattr(moves, "undone", undone)


def what_is_kept_is_kept_in_front(monkeypatch: pytest.MonkeyPatch) -> None:

    def keep(before: tuple[Kept, ...], more: Kept, most: int) -> tuple[Kept, ...] | None:
        kept = real_keep(before, more, most)
        return kept if kept is None else (*kept[-1:], *kept[:-1])

    monkeypatch.setattr("turnkeeper.actors.actor.keep", keep)


def a_purge_overlooks_the_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_child_start(connection: apsw.Connection, branch: int) -> int | None:
        return None

    monkeypatch.setattr(branches, "last_child_start", last_child_start)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "break_it",
    [
        redo_forgets_to_pop,
        what_is_kept_is_kept_in_front,
        a_purge_overlooks_the_forks,
    ],
)
def test_the_machine_catches_a_broken_store(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    search = settings(
        PROFILE,
        max_examples=500,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(SessionsMachine, settings=search)
