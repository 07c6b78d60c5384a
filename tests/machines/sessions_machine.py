"""Rules for what can be done with sessions, but for turns: random programs over a few of them.

Among the steps are disks that fail, actors that are dropped, changes that are handed over together
or cancelled, stores that are closed and opened again, and stores that are killed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import apsw
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule
from support import A, U

from machines.machine import Call, Change, Machine, either
from machines.nouns import Body, By, Draft
from machines.said import (
    DRAFTS,
    ERRORS,
    FORKS,
    IDS,
    KEYED,
    SIDES,
    SOME,
    STALE,
    WORDS,
    person,
)
from turnkeeper.actors import Rejected, TurnActive

__all__ = ["SessionsMachine"]


class SessionsMachine(Machine):
    """Does with sessions whatever can be done."""

    # The rules.

    @either(
        id=SOME,
        draft=KEYED,
        hidden=st.sampled_from([False] * 4 + [True]),
        off=STALE,
        old=st.booleans(),
    )
    def append(self, id: str, draft: Draft, hidden: bool, off: int | None, old: bool) -> None:
        draft = replace(draft, hidden=hidden)
        self.do(self.appending(self.handle(id, old), id, draft, self.at(id, off)))

    @either(id=SOME, word=st.sampled_from(WORDS))
    def say(self, id: str, word: str) -> None:
        """An exchange, so that there is something to take back."""
        handle = self.handle(id, False)
        self.do(self.extending(handle, id, [person(word), Draft(A(word))], None))

    @either(id=SOME, drafts=st.lists(KEYED, min_size=1, max_size=4), off=STALE, old=st.booleans())
    def extend(self, id: str, drafts: list[Draft], off: int | None, old: bool) -> None:
        self.do(self.extending(self.handle(id, old), id, drafts, self.at(id, off)))

    @either(id=SOME, pick=st.integers(0, 9), off=STALE)
    def deliver_again(self, id: str, pick: int, off: int | None) -> None:
        pending = self.world.pending.get((self.here.number, id), [])
        drafts = [draft for kept in pending for draft in kept.drafts]
        if id in self.world.lives:
            drafts += [row.draft for row in self.world.lives[id].keys.values()]
        drafts = [draft for draft in drafts if draft.key is not None]
        if drafts:
            draft = drafts[pick % len(drafts)]
            self.do(self.appending(self.handle(id, False), id, draft, self.at(id, off)))

    @either(id=SOME, turns=st.integers(1, 4), off=STALE, old=st.booleans())
    def undo(self, id: str, turns: int, off: int | None, old: bool) -> None:
        self.do(self.undoing(self.handle(id, old), id, turns, self.at(id, off)))

    @either(id=SOME, off=STALE, old=st.booleans())
    def retry(self, id: str, off: int | None, old: bool) -> None:
        self.do(self.retrying(self.handle(id, old), id, self.at(id, off)))

    @either(id=SOME, off=STALE, old=st.booleans())
    def redo(self, id: str, off: int | None, old: bool) -> None:
        self.do(self.redoing(self.handle(id, old), id, self.at(id, off)))

    @either(id=SOME, undos=st.integers(1, 3), redos=st.integers(1, 4))
    def back_and_forth(self, id: str, undos: int, redos: int) -> None:
        handle = self.handle(id, False)
        for _ in range(undos):
            self.do(self.undoing(handle, id, 1, None))
        for _ in range(redos):
            self.do(self.redoing(handle, id, None))

    @either(
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
        drafts = self.shown_less(id, cut) + tail
        self.do(self.rewriting(self.handle(id, old), id, drafts, reason, self.at(id, off)))

    @either(id=SOME, back=st.integers(-2, 12), off=STALE, old=st.booleans())
    def restore(self, id: str, back: int, off: int | None, old: bool) -> None:
        handle, at = self.handle(id, old), self.at(id, off)
        revision = max(1, self.world.revision(id) - back)
        self.do(self.restoring(handle, id, revision, at))

    @either(
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
        position = (
            None if back is None else max(0, len(self.world.shown(self.here.number, id)) - back)
        )
        self.do(
            Change(
                id,
                handle.by,
                lambda: handle.whole.fork(to, position=position, meta=meta, at=at),
                lambda world: world.fork(id, handle.by, to, position, meta, at),
                to=to,
                handle=handle,
            )
        )

    @either(
        id=SOME,
        meta=st.sampled_from([{}, {"title": "x"}, {"n": [1, None, 1.5]}]),
        old=st.booleans(),
    )
    def set_meta(self, id: str, meta: Body, old: bool) -> None:
        handle = self.handle(id, old)
        self.do(
            Change(
                id,
                handle.by,
                lambda: handle.whole.set_meta(meta),
                lambda world: world.set_meta(id, handle.by, meta),
                handle=handle,
            )
        )

    @either(id=SOME)
    def delete(self, id: str) -> None:
        life, by = self.world.lives.get(id), By(self.here.number)
        self.do(
            Change(
                id,
                by,
                lambda: self.here.sessions.delete(id),
                lambda world: world.delete(id, by),
            )
        )
        if life is not None and id not in self.world.lives:
            self.acknowledged.pop(life.number, None)

    @either(id=SOME)
    def purge(self, id: str) -> None:
        by = By(self.here.number)
        self.do(
            Change(
                id,
                by,
                lambda: self.here.sessions.purge(id),
                lambda world: world.purge(id, by),
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

    @either(id=st.sampled_from(IDS), data=st.data())
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

    @either(id=SOME, which=st.integers(0, 13))
    def bad_input(self, id: str, which: int) -> None:
        session = self.here.sessions[id]
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
        # Whether there is such a revision is not looked at under somebody else's turn.
        with pytest.raises((Rejected, TurnActive) if which == 11 else Rejected):
            self.driver.run(bad[which])

    @either()
    def drop_idle(self) -> None:
        self.driver.run(self._drop_idle)

    async def _drop_idle(self) -> None:
        sessions = self.here.sessions
        sessions.drop_idle()
        busy = {*self.world.owing(self.here.number), *self.here.held}
        assert sessions.stats().resident == len(busy)

    @either(
        error=ERRORS,
        times=st.sampled_from([None, None, 1, 1, 1, 2, 3]),
        skip=st.sampled_from([0, 0, 0, 1, 2, 3]),
    )
    def break_the_disk(self, error: type[apsw.Error], times: int | None, skip: int) -> None:
        disk = self.here.disk
        self.here.heal()
        disk.write_error, disk.fail_next, self.here.skip = error, times, skip

    @either()
    def heal(self) -> None:
        self.here.heal()

    @rule(seconds=st.sampled_from([1, 5, 100]), first=SIDES)
    def time_passes(self, seconds: int, first: int) -> None:
        """What is pending is tried again; through one store before the other, so that it is known."""
        self.let_time_pass(seconds, first)

    @either(healed=st.sampled_from([True, True, False]))
    def reopen(self, healed: bool) -> None:
        self.close_and_open(healed)

    @rule()
    def reopen_both(self) -> None:
        """The last one to close moves the log into the file."""
        for side in self.sides:
            self.here = side
            self.close(healed=True)
        for side in self.sides:
            self.begin(side)

    @either()
    def kill(self) -> None:
        """The store's process is gone: it releases nothing and tells nobody."""
        self.sound = False
        self.here.die()
        self.lose(self.here)
        self.begin(self.here)

    @rule()
    def integrity(self) -> None:
        self.file_is_whole()
