"""Rules for turns and inboxes: taken, acted under, lost, ended and expired through two stores.

A turn is held by a block in a task of its own. After each step it is known of every block whether
it must have ended, and what must have come out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import trio
from hypothesis import strategies as st
from hypothesis.stateful import invariant
from support import A

from machines.driver import Block, Failure
from machines.machine import Change, Handle, Holding, Store, either
from machines.model import MOST_ATTEMPTS, Release
from machines.nouns import By, Draft, Post, Refused, Row, Took, plain
from machines.said import DRAFTS, FORKS, IDS, KEYED, SOME, STALE, WORDS, person
from machines.sessions_machine import SessionsMachine
from machines.turns_model import World
from turnkeeper.actors import (
    Closed,
    Policy,
    Posted,
    Session,
    StorageError,
    StoredMessage,
    TurnActive,
    TurnLost,
)
from turnkeeper.actors.hold import Delivery, Wish
from turnkeeper.actors.hold import Holding as Taking
from turnkeeper.storage import Claim, Ended

__all__ = ["TurnsMachine"]

Cause = Literal["well", "error", "cancel", "taken", "interrupted", "overdue", "closed"]
"""Why a block ends."""

ENDS: Sequence[Cause] = ("well", "error", "cancel")
RELEASES: dict[Cause, Release] = {
    "well": "done",
    "error": "failed",
    "cancel": "given back",
    "interrupted": "done",
    "overdue": "failed",
    "closed": "given back",
}
POLICIES = st.sampled_from([None, None, "queue", "collect", "interrupt", "refuse"])
PICK = st.integers(0, 5)
TTL_S = 10.0


class TurnsMachine(SessionsMachine):
    """Does with turns whatever can be done, among all the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.last_token = 0
        self.past: list[tuple[Store, Holding]] = []
        """Turns whose blocks have ended."""

    # Taking.

    @either(
        id=SOME,
        force=st.sampled_from([False, False, True]),
        serve=st.booleans(),
        hold=st.sampled_from([3_600.0, 3_600.0, 20.0]),
    )
    def take(self, id: str, force: bool, serve: bool, hold: float) -> None:
        self.take_turn(id, force=force, serve=serve and not force, hold=hold)

    def take_turn(
        self, id: str, *, force: bool = False, serve: bool = False, hold: float = 3_600.0
    ) -> Holding | None:
        side, session = self.here, self.here.sessions[id]
        before = next((holding for holding in side.blocks if holding.id == id), None)
        by = By(side.number)

        def model(world: World) -> Took:
            if before is not None and not force:  # who waits in this process has waited too long
                raise Refused(TurnActive, "held in this process")
            return world.take(id, by, side.name, TTL_S, force=force, serve=serve)

        if serve:
            claim = Claim(side.name, TTL_S, most_attempts=MOST_ATTEMPTS)
            wanted: object = Delivery(session, Wish(claim, 0.0, hold))
        elif force:
            wanted = session.take_over(ttl=TTL_S, max_hold=hold)
        else:
            wanted = session.turn(wait=0, ttl=TTL_S, max_hold=hold)
        assert isinstance(wanted, (Delivery, Taking))
        block = Block(self.driver, wanted)
        failed = self.do(Change(id, by, block.begin, model))
        if block.turn is None:
            return None
        life = self.world.lives[id]
        assert life.turn is not None
        until = self.world.seconds + hold
        by = By(side.number, life.number, life.turn.token)
        holding = Holding(id, block, by, serve, until, life.turn.renew_at)
        if before is not None:
            self.ended(side, before, "taken", failed=failed)
        side.blocks.append(holding)
        return holding

    # Acting under a turn.

    def held(self, pick: int) -> tuple[str, Handle] | None:
        """Return a handle on one of the turns that are held through this store."""
        if not self.here.blocks:
            return None
        holding = self.here.blocks[pick % len(self.here.blocks)]
        assert holding.block.turn is not None
        by = holding.by
        return holding.id, Handle(holding.block.turn, by.side, by.life, by.token)

    @either(
        pick=PICK,
        kind=st.sampled_from("aaeeuRrwr+"),
        drafts=st.lists(KEYED, min_size=1, max_size=3),
        back=st.integers(0, 6),
        off=STALE,
    )
    def act(self, pick: int, kind: str, drafts: list[Draft], back: int, off: int | None) -> None:
        found = self.held(pick)
        if found is None:
            return
        id, handle = found
        at = self.at(id, off)
        if kind == "a":
            self.do(self.appending(handle, id, drafts[0], at))
        elif kind == "e":
            self.do(self.extending(handle, id, drafts, at))
        elif kind == "u":
            self.do(self.undoing(handle, id, back + 1, at))
        elif kind == "R":
            self.do(self.retrying(handle, id, at))
        elif kind == "r":
            self.do(self.redoing(handle, id, at))
        elif kind == "w":
            drafts = [replace(draft, key=None) for draft in drafts]
            self.do(self.rewriting(handle, id, self.shown_less(id, back) + drafts, "rewrite", at))
        else:
            self.do(self.restoring(handle, id, max(1, self.world.revision(id) - back), at))

    @either(pick=PICK, word=st.sampled_from(WORDS), calls=st.sampled_from([["c1"], ["c1", "c2"]]))
    def call_a_tool(self, pick: int, word: str, calls: list[str]) -> None:
        found = self.held(pick)
        if found is not None:
            id, handle = found
            drafts = [person(word), Draft(A(call=calls), calls=tuple(calls))]
            self.do(self.extending(handle, id, drafts, None))

    @either(pick=PICK)
    def act_too_late(self, pick: int) -> None:
        """By a turn whose block has ended."""
        past = [
            holding
            for side, holding in self.past
            if side is self.here
            and holding.by.side == side.number
            and holding.by.token not in self.world.unreleased.get((side.number, holding.id), {})
        ]
        if past:
            holding = past[-1 - pick % len(past)]
            turn = holding.block.turn
            assert turn is not None

            def model(world: World) -> None:
                there = world.lives.get(holding.id)
                gone = there is None or there.number != holding.by.life
                noticed = turn.loss in ("taken", "ended")
                raise Refused(Closed if gone and not noticed else TurnLost, "its block has ended")

            self.do(Change(holding.id, holding.by, lambda: turn.append(A("too late")), model))

    @either(id=SOME, drafts=st.lists(KEYED, min_size=1, max_size=2), off=STALE)
    def interleave(self, id: str, drafts: list[Draft], off: int | None) -> None:
        handle, at = self.handle(id, False), self.at(id, off)
        assert isinstance(handle.session, Session)
        session, by = handle.session, replace(handle.by, interleave=True)
        bodies, keys = [draft.body for draft in drafts], [draft.key for draft in drafts]
        self.do(
            Change(
                id,
                by,
                lambda: session.extend(bodies, keys=keys, at=at, interleave=True),
                lambda world: world.extend(id, by, drafts, at),
                tuple(drafts) if at is None else (),
                handle=handle,
            )
        )

    # Ending.

    @either(pick=PICK, how=st.sampled_from(ENDS))
    def end(self, pick: int, how: Cause) -> None:
        if self.here.blocks:
            self.end_turn(self.here.blocks[pick % len(self.here.blocks)], how)

    def end_turn(self, holding: Holding, how: Cause) -> None:
        self.sound = False
        side = self.here
        failures = side.disk.failures
        self.driver.run(lambda: holding.block.end(how))
        self.ended(side, holding, how, failed=side.disk.failures > failures)

    def ended(self, side: Store, holding: Holding, cause: Cause, *, failed: bool) -> None:
        """A block has ended: see what became of its turn, and what came out."""
        side.blocks.remove(holding)
        self.past.append((side, holding))
        id, block, raised = holding.id, holding.block, holding.block.raised
        assert block.over, f"{holding} was to end: {cause}"
        assert holding.by.token is not None
        if cause == "taken":
            assert isinstance(raised, TurnLost), raised
            assert raised.reason == "taken"
            return
        release = RELEASES[cause] if holding.serves else None
        after = self.world.copy()
        lost = None
        try:
            expected = after.end(id, holding.by, release)
        except Refused as refused:
            lost = refused.kind
        told = [note for note in getattr(raised, "__notes__", []) if "end of the turn" in note]
        refused_by_disk = lost is None and (isinstance(raised, StorageError) or bool(told))
        if refused_by_disk:
            assert failed, f"{raised!r} though the disk took everything"
            side.failing = None
            self.world.could_not_end(id, holding.by, release)
        elif lost is None:
            after.tidy(id, side.number)
            self.world = after
            side.failing = None if failed else False
            assert block.wanted.ended == Ended(*expected), (block.wanted.ended, expected)
        if cause == "error":
            assert isinstance(raised, Failure), raised
        elif cause == "cancel":
            assert isinstance(raised, trio.Cancelled), raised
        elif refused_by_disk:
            assert isinstance(raised, StorageError), raised
            assert raised.kept
        elif lost is Closed:
            assert isinstance(raised, Closed), raised
        elif lost is not None:
            assert isinstance(raised, TurnLost), raised
            assert raised.reason == "taken"
        elif cause == "well":
            assert raised is None, raised
        else:
            assert isinstance(raised, TurnLost), raised
            assert raised.reason == cause

    def let_go(self, side: Store, *, failed: bool) -> None:
        for holding in list(side.blocks):
            self.ended(side, holding, "closed", failed=failed)

    # Time.

    def look(self, side: Store, *, failed: bool) -> None:
        """The holders have renewed their turns, and noticed which are lost."""
        world = self.world
        kept = [holding for holding in side.blocks if holding.until > world.seconds]
        due = [holding for holding in kept if holding.renew_at <= world.seconds]
        there = {holding for holding in kept if self.has(holding)}
        renewed = True
        if failed and due:
            renewed = any(holding.block.over for holding in kept if holding not in there)
            for holding in due:
                if holding in there:
                    expires = self.ask(
                        "SELECT expires FROM turns WHERE session IN "
                        "(SELECT key FROM sessions WHERE id = ? AND buried IS NULL)",
                        holding.id,
                    )
                    renewed = expires == [] or expires[0][0] == world.seconds + TTL_S
        if renewed:
            for holding in due:
                if holding in there:
                    world.renew(holding.id)
                holding.renew_at = world.seconds + TTL_S / 3
        for holding in list(side.blocks):  # a disk that takes nothing can be read all the same
            cause: Cause | None = None
            if holding not in kept:
                cause = "overdue"
            elif holding not in there:
                cause = "taken"
            elif self.world.interrupted(holding.id):
                cause = "interrupted"
            if cause is not None:
                self.ended(side, holding, cause, failed=failed)
            else:
                assert not holding.block.over, (holding, holding.block.raised)

    def has(self, holding: Holding) -> bool:
        assert holding.by.life is not None
        assert holding.by.token is not None
        return self.world.has(holding.id, holding.by.life, holding.by.token)

    @either(
        id=SOME,
        seconds=st.sampled_from([5, 15, 15]),
        what=st.sampled_from(["nothing", "append", "undo", "take", "serve", "take over", "post"]),
        draft=KEYED,
    )
    def the_other_hangs(self, id: str, seconds: int, what: str, draft: Draft) -> None:
        """The other store's process is stopped for a while, and comes back late."""

        def meanwhile() -> None:
            handle = self.handle(id, False)
            if what == "append":
                self.do(self.appending(handle, id, draft, None))
            elif what == "undo":
                self.do(self.undoing(handle, id, 1, None))
            elif what == "post":
                self.post_message(id, draft, "interrupt")
            elif what != "nothing":
                self.take_turn(id, force=what == "take over", serve=what == "serve")

        self.let_time_pass(seconds, self.sides.index(self.here), meanwhile)

    # The inbox.

    @either(id=SOME, draft=KEYED, policy=POLICIES)
    def post(self, id: str, draft: Draft, policy: Policy | None) -> None:
        self.post_message(id, draft, policy)

    def post_message(self, id: str, draft: Draft, policy: Policy | None) -> None:
        side, session, by = self.here, self.here.sessions[id], By(self.here.number)
        before = self.world.numbers
        change = Change(
            id,
            by,
            lambda: session.post(draft.body, key=draft.key, policy=policy),
            lambda world: world.post(id, by, draft, policy),
        )
        failed = self.do(change)
        life = self.world.lives.get(id)
        last = life.inbox[-1] if life is not None and life.inbox else None
        if last is not None and last.number > before and last.policy == "interrupt":
            self.look(side, failed=failed)  # at all that it holds, for one may be interrupted

    @either(id=SOME, draft=DRAFTS, how=st.sampled_from([*ENDS, "lost", "later"]))
    def serve_one(self, id: str, draft: Draft, how: Cause | Literal["lost", "later"]) -> None:
        """What a gateway does all day."""
        self.post_message(id, draft, None)
        holding = self.take_turn(id, serve=True)
        if holding is None or holding.block.over or how == "later":
            return
        if how == "lost":
            self.here = next(side for side in self.sides if side is not self.here)
            self.take_turn(id, force=True)
        else:
            self.end_turn(holding, how)

    @either(id=SOME, policy=POLICIES)
    def set_policy(self, id: str, policy: Policy | None) -> None:
        session, by = self.here.sessions[id], By(self.here.number)
        self.do(
            Change(
                id,
                by,
                lambda: session.set_policy(policy),
                lambda world: world.set_policy(id, by, policy),
            )
        )

    @either(id=SOME, pick=PICK, kind=st.sampled_from(["requeue", "dismiss"]))
    def see_to_what_was_set_aside(self, id: str, pick: int, kind: str) -> None:
        life = self.world.lives.get(id)
        posts = [post.number for post in life.inbox if post.aside] if life is not None else []
        posts = posts or list(self.posts)
        if posts:
            number = posts[pick % len(posts)]
            session, by = self.here.sessions[id], By(self.here.number)
            if kind == "requeue":
                change = Change(
                    id,
                    by,
                    lambda: session.requeue(self.posts[number]),
                    lambda world: world.requeue(id, by, number),
                )
            else:
                change = Change(
                    id,
                    by,
                    lambda: session.dismiss(self.posts[number]),
                    lambda world: world.dismiss(id, by, number),
                )
            self.do(change)

    # What is compared.

    def compare(self, id: str, receipt: object, expected: object) -> None:
        if isinstance(receipt, Block):
            assert isinstance(expected, Took)
            self.compare_taken(receipt, expected)
        elif isinstance(receipt, Posted):
            assert isinstance(expected, tuple)
            self.compare_posted(receipt, *expected)
        else:
            super().compare(id, receipt, expected)

    def compare_taken(self, block: Block, expected: Took) -> None:
        turn = block.turn
        assert (turn is None) == (expected.held is None), (turn, expected)
        if turn is not None:
            assert turn.token > self.last_token, "a token that was given before"
            self.last_token = turn.token
            assert turn.attempt == expected.attempt
            assert len(turn.messages) == len(expected.rows)
            for message, row in zip(turn.messages, expected.rows, strict=True):
                self.compare_message(message, row.draft, row)

    def compare_posted(
        self,
        receipt: Posted,
        status: str,
        about: Post | Row | None,
        policy: Policy,
        waiting: int,
    ) -> None:
        assert (receipt.status, receipt.policy, receipt.waiting) == (status, policy, waiting)
        if about is None:
            assert receipt.id is None
            assert receipt.accepted_at is None
            return
        assert receipt.id is not None
        number = about.number if isinstance(about, Post) else about.post
        if number is not None:
            assert self.posts.setdefault(number, receipt.id) == receipt.id

    async def compare_session(self, side: Store, id: str) -> None:
        await super().compare_session(side, id)
        life, session = self.world.lives.get(id), side.sessions[id]
        holder = await session.holder()
        if life is None or life.turn is None:
            assert holder is None
        else:
            held = life.turn
            assert holder is not None
            over = held.side in self.world.dead or held.expires <= self.world.seconds
            left_s = 0.0 if over else held.expires - self.world.seconds
            assert (holder.name, holder.expires_in) == (held.holder, left_s)
        inbox = await session.inbox()
        posts = [] if life is None else life.inbox
        assert len(inbox) == len(posts)
        for message, post in zip(inbox, posts, strict=True):
            assert plain(message.body) == plain(post.draft.body)
            assert (
                message.id,
                message.key,
                message.policy,
                message.attempts,
                message.taken,
                message.set_aside is not None,
            ) == (
                self.posts[post.number],
                post.draft.key,
                post.policy,
                post.attempts,
                post.token is not None,
                post.aside,
            )
        assert len({message.place for message in inbox}) == len(inbox)
        if self.sides[self.steps % 2] is side:
            self.calls_are_closed_once(await session.transcript(hidden=True))

    def calls_are_closed_once(self, transcript: Sequence[StoredMessage]) -> None:
        """No result was made up for a call that had one."""
        called: set[object] = set()
        for message in transcript:
            result = message.body.get("tool_call_id")
            if message.synthetic:
                assert result in called, f"{result!r} was closed twice, or never made"
            called.discard(result)
            content = message.body.get("content")
            for part in content if isinstance(content, list) else []:
                called.discard(part.get("tool_use_id"))
            calls = message.body.get("tool_calls")
            called.update(call["id"] for call in (calls if isinstance(calls, list) else []))

    @invariant()
    def one_turn_holds_a_session(self) -> None:
        held = self.ask("SELECT session, token FROM turns ORDER BY session")
        named = self.ask("SELECT session, turn FROM heads WHERE turn NOTNULL ORDER BY session")
        assert held == named
        tokens = [token for _, token in held]
        assert len(set(tokens)) == len(tokens)
        assert max(tokens, default=0) <= self.last_token
        redo = dict(
            self.ask(
                "SELECT id, redo FROM heads JOIN sessions ON key = session WHERE buried ISNULL"
            )
        )
        for id in IDS + FORKS:
            life = self.world.lives.get(id)
            assert (redo.get(id) is not None) == (life is not None and bool(life.redo))
        for side in self.sides:
            stats = side.sessions.stats()
            assert stats.turns == len(side.blocks)
            assert stats.waiting_for_turn == 0
            assert not [holding for holding in side.blocks if holding.block.over]
