"""What a store must be like, in plain lists and dicts: sessions, and who may change them.

Written from the promises and the docstrings, not from the code, and naive on purpose: a session
keeps its live transcript as a tuple of rows, everything it ever had, and the transcript as it was
after each revision. An undo is a search from the end, a restore a look into a dict. Each change
is a method that changes the world or raises `Refused`; whoever wants to go back keeps a `copy`.

Taking turns, and the inbox, are in `turns_model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from machines.nouns import (
    Body,
    By,
    Draft,
    Got,
    Held,
    Kept,
    Life,
    Path,
    Refused,
    Row,
    open_calls,
    opener,
)
from turnkeeper.actors import (
    Closed,
    Conflict,
    Deleted,
    Forked,
    Moved,
    NotRetryable,
    Purged,
    Rejected,
    Rewritten,
    TurnActive,
    TurnLost,
    Undone,
)
from turnkeeper.actors.conversation.tools import NO_RESULT

__all__ = ["MOST_ATTEMPTS", "Release", "Sessions"]

MOST_ATTEMPTS = 2


Release = Literal["done", "failed", "given back"]
"""What becomes of the posts that a turn took."""


def closing(call: str) -> Draft:
    """Return what closes a call that has no result."""
    body: Body = {"role": "tool", "tool_call_id": call, "content": NO_RESULT}
    return Draft(body, answers=(call,), synthetic=True)


STATES = {"rewrite": "replaced", "compaction": "compacted"}


@dataclass
class Sessions:
    """A file: the living sessions, what the deleted leave behind, what each open store remembers."""

    max_pending: int
    lives: dict[str, Life] = field(default_factory=dict)
    pending: dict[tuple[int, str], list[Kept]] = field(default_factory=dict)
    unreleased: dict[tuple[int, str], dict[int, Release | None]] = field(default_factory=dict)
    """Turns that have ended, and whose end storage did not take yet."""
    tombstones: dict[str, int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    """The open stores that were killed or closed."""
    seconds: float = 0.0
    """What time it is, on the clock that turns expire by."""
    numbers: int = 0
    writes: int = 0
    """Raised by whatever must reach the disk."""

    def copy(self) -> Self:
        return replace(
            self,
            lives={id: life.copy() for id, life in self.lives.items()},
            pending={key: list(kept) for key, kept in self.pending.items()},
            unreleased={key: dict(ended) for key, ended in self.unreleased.items()},
            tombstones=dict(self.tombstones),
            dead=set(self.dead),
        )

    # What can be asked.

    def revision(self, id: str) -> int:
        return self.lives[id].revision if id in self.lives else 0

    def pending_number(self, side: int) -> int:
        return sum(
            len(kept.drafts) for key, all in self.pending.items() if key[0] == side for kept in all
        )

    def owing(self, side: int) -> list[str]:
        """Return the sessions for which an open store has something to write by itself."""
        owed = [*self.pending.items(), *self.unreleased.items()]
        return sorted({id for (by, id), things in owed if by == side and things})

    def shown(self, side: int, id: str) -> list[tuple[Draft, Row | None]]:
        """Return the transcript, hidden rows and pending drafts (they have no row) included."""
        found: list[tuple[Draft, Row | None]] = []
        life = self.lives.get(id)
        if life is not None:
            found += [(row.draft, row) for row in life.live]
        kept = self.pending.get((side, id), [])
        return found + [(draft, None) for each in kept for draft in each.drafts]

    def is_held(self, held: Held, by: By, id: str) -> bool:
        """Return whether a turn refuses others: its owner lives, and its time has not run out."""
        return (
            held.side not in self.dead
            and held.expires > self.seconds
            and held.token not in self.unreleased.get((by.side, id), {})
        )

    def reached(self, *, but: str | None = None) -> set[int]:
        """Return the numbers of the rows that the sessions reach, all but one."""
        return {row.number for id, life in self.lives.items() if id != but for row in life.ever}

    # What can be done.

    def extend(self, id: str, by: By, drafts: Sequence[Draft], at: int | None) -> list[Got]:
        before = self.revision(id)
        there = self._write_pending(id, by, self._meant(id, by))
        known = dict(there.keys) if there is not None else {}
        batch: dict[str, Draft] = {}
        fresh = []
        for draft in drafts:
            first = None
            if draft.key is not None:
                waits = None if there is None or draft.key in known else there.posted(draft.key)
                if waits is not None:
                    raise Refused(Rejected, "the key waits in the inbox, or was posted otherwise")
                first = known[draft.key].draft if draft.key in known else batch.get(draft.key)
            if first is None:
                fresh.append(draft)
                if draft.key is not None:
                    batch[draft.key] = draft
            elif not first.same(draft):
                raise Refused(Rejected, "the key came with other content")
        if fresh:
            self._compare(at, before)
            if self._admit(id, by, there) and there is not None:
                self._pass_over(id, by, there)
            there = there or self._create(id)
            there.redo = []
            written = iter(self._append(there, fresh))
        got = []
        for draft in drafts:
            if draft in fresh:
                fresh.remove(draft)
                got.append(Got(next(written), False))
            else:
                assert there is not None
                assert draft.key is not None
                got.append(Got(there.keys[draft.key], True))
        return got

    def keep(self, id: str, by: By, drafts: Sequence[Draft]) -> bool:
        """Keep an append that storage did not take; return whether it could be kept."""
        kept = self.pending.setdefault((by.side, id), [])
        before = [draft for each in kept for draft in each.drafts]
        known = {draft.key: draft for draft in before if draft.key is not None}
        stored = self.lives[id].keys if id in self.lives else {}
        fresh = []
        for draft in drafts:
            if draft.key is None:
                fresh.append(draft)
            elif draft.key in known:
                if not known[draft.key].same(draft):
                    raise Refused(Rejected, "the key is pending with other content")
            elif draft.key not in stored:
                fresh.append(draft)
                known[draft.key] = draft
        if len(before) + len(fresh) > self.max_pending:
            return False
        if fresh:
            kept.append(Kept(tuple(fresh), by.life, by.token))
        return True

    def rewind(self, id: str, by: By, turns: int, kind: str, at: int | None) -> Undone | None:
        there = self._arrive(id, by, at)
        openers = [row for row in there.live if row.draft.opens] if there is not None else []
        if there is None or not openers:
            return None
        gone = openers[-turns:]
        first = gone[0]
        if kind == "retry" and first.draft.text is None:
            raise Refused(NotRetryable, "a text cannot say it")
        before = there.live
        landing = before[: first.position - 1]
        there.redo.append(before)
        scaffold = (
            [] if first.draft.scaffold is None else [Draft(first.draft.scaffold, hidden=True)]
        )
        self._move(there, kind, landing, scaffold)
        return Undone(
            text=first.draft.text,
            turns=len(gone),
            messages=len(before) - len(landing),
            position=there.position,
            revision=there.revision,
        )

    def redo(self, id: str, by: By, at: int | None) -> Moved | None:
        there = self._arrive(id, by, at)
        if there is None or not there.redo:
            return None
        self._move(there, "redo", there.redo.pop())
        return Moved(there.position, there.revision)

    def rewrite(
        self, id: str, by: By, drafts: Sequence[Draft], kind: str, at: int | None
    ) -> tuple[Rewritten, Path]:
        """Return the receipt without the appended, and the appended rows."""
        there = self._arrive(id, by, at)
        if there is None:
            if not drafts:
                return Rewritten(0, 0, (), 0, 0, changed=False), ()
            there = self._create(id)
        kept = last = 0
        for row in there.live:
            if not row.draft.hidden:
                if kept == len(drafts) or not row.draft.same(drafts[kept]):
                    break
                kept += 1
            last = row.position
        replaced = there.position - last
        changed = kept < len(drafts) or replaced > 0
        if changed:
            there.redo = []
            self._move(there, kind, there.live[:last], drafts[kept:])
        receipt = Rewritten(kept, replaced, (), there.position, there.revision, changed)
        return receipt, there.live[last:] if changed else ()

    def restore(self, id: str, by: By, revision: int, at: int | None) -> Moved:
        there = self._arrive(id, by, at)
        if there is None or revision not in there.snapshots:
            raise Refused(Rejected, "there is no such revision")
        path = there.snapshots[revision]
        if path != there.live:
            there.redo = []
            self._move(there, "restore", path)
        return Moved(there.position, there.revision)

    def fork(
        self,
        id: str,
        by: By,
        to: str,
        position: int | None,
        meta: Body | None,
        at: int | None,
    ) -> Forked:
        there = self._passing(id, by, at)
        path = there.live if there is not None else ()
        if position is not None and position > len(path):
            raise Refused(Rejected, "there is no such position")
        if to in self.lives:
            raise Refused(Rejected, "the id is taken")
        forked = self._create(to, path if position is None else path[:position])
        forked.meta = meta or {}
        return Forked(to, forked.position, forked.revision)

    def set_meta(self, id: str, by: By, meta: Body) -> None:
        there = self._passing(id, by, None) or self._create(id)
        there.meta = meta
        self.writes += 1

    def delete(self, id: str, by: By) -> Deleted | None:
        self.pending.pop((by.side, id), None)
        life = self.lives.get(id)
        if life is None:
            return None
        others = self.reached(but=id)
        del self.lives[id]
        self.tombstones[id] = life.revision + 1
        self.writes += 1
        return Deleted(sum(row.number not in others for row in life.ever), life.revision + 1)

    def purge(self, id: str, by: By) -> Purged:
        life = self._arrive(id, by, None)
        if life is None:
            return Purged(0)
        others = self.reached(but=id)
        retired = [row for row in life.ever if row not in life.live]
        removed = [row for row in retired if row.number not in others]
        life.ever = list(life.live)
        life.states = {}
        life.snapshots = {life.revision: life.live}
        life.redo = []
        life.keys = {key: row for key, row in life.keys.items() if row not in removed}
        life.history = [(life.revision, "purge", life.position, life.position)]
        self.writes += 1
        return Purged(len(removed))

    def drain(self, id: str, by: By) -> None:
        self._passing(id, by, None)

    def forget(self, side: int) -> None:
        """What an open store remembers is gone with it."""
        self.pending = {key: kept for key, kept in self.pending.items() if key[0] != side}
        self.unreleased = {key: ended for key, ended in self.unreleased.items() if key[0] != side}
        self.dead.add(side)

    # What they have in common.

    def _meant(self, id: str, by: By) -> Life | None:
        life = self.lives.get(id)
        if by.life is not None and (life is None or life.number != by.life):
            raise Refused(Closed, "the session was deleted")
        return life

    def _arrive(self, id: str, by: By, at: int | None) -> Life | None:
        """Return the session as it is when the change may be made."""
        life = self._meant(id, by)
        self._compare(at, self.revision(id))
        over = self._admit(id, by, life)
        life = self._write_pending(id, by, life)
        if over and life is not None:
            self._pass_over(id, by, life)
        return life

    def _passing(self, id: str, by: By, at: int | None) -> Life | None:
        """Return the session for a change that no turn refuses; it leaves the redo as it is."""
        life = self._meant(id, by)
        self._compare(at, self.revision(id))
        life = self._write_pending(id, by, life)
        token = None if life is None or life.turn is None else life.turn.token
        if life is not None and token in self.unreleased.get((by.side, id), {}):
            self._pass_over(id, by, life)
        return life

    def _admit(self, id: str, by: By, life: Life | None) -> bool:
        """Return whether a turn is in the way that is over."""
        held = None if life is None else life.turn
        if by.token is not None:
            if life is None or held is None or held.token != by.token:
                raise Refused(TurnLost, "somebody else has taken the turn")
            if self.seconds >= held.renew_at:
                life.turn = replace(held, expires=self.seconds + held.ttl)
                self.writes += 1
            return False
        if held is None:
            return False
        if not self.is_held(held, by, id):
            return True
        if by.interleave:
            return False
        raise Refused(TurnActive, "somebody holds the turn", held)

    def _pass_over(self, id: str, by: By, life: Life) -> tuple[int, int]:
        assert life.turn is not None
        return self._end(life, self.unreleased.get((by.side, id), {}).get(life.turn.token))

    def _end(self, life: Life, release: Release | None) -> tuple[int, int]:
        """End the turn; return how many calls were closed and how many posts set aside."""
        held = life.turn
        assert held is not None
        before = len(life.waiting)
        posts, life.inbox = life.inbox, []
        for post in posts:
            if release is None or post.aside or post.token != held.token:
                life.inbox.append(post)
            elif release == "given back":
                life.inbox.append(replace(post, token=None, attempts=post.attempts - 1))
            elif release == "failed" and post.attempts >= MOST_ATTEMPTS:
                life.inbox.append(replace(post, token=None, aside=True))
            elif release == "failed":
                life.inbox.append(post)
        aside = before - len(life.waiting) if release == "failed" else 0
        first = min(held.opener, opener(life.live))
        calls = open_calls([row for row in life.live if row.position >= first])
        life.turn = None
        self.writes += 1
        if calls:
            self._append(life, [closing(call) for call in calls])
        return len(calls), aside

    def _write_pending(self, id: str, by: By, life: Life | None) -> Life | None:
        for kept in self.pending.pop((by.side, id), []):
            if kept.life is not None and (life is None or life.number != kept.life):
                continue
            drafts = []
            for draft in kept.drafts:
                there = None
                if life is not None and draft.key is not None:
                    row, post = life.keys.get(draft.key), life.posted(draft.key)
                    there = row.draft if row is not None else None if post is None else post.draft
                if there is None:
                    drafts.append(draft)
                elif not there.same(draft):
                    drafts.append(replace(draft, key=None))
            if not drafts:
                continue
            life = life or self._create(id)
            if kept.token is None or (life.turn is not None and life.turn.token == kept.token):
                self._append(life, drafts)
            else:
                self._put_beside(life, drafts)
        return life

    def _put_beside(self, life: Life, drafts: Sequence[Draft]) -> None:
        """What a lost turn had pending goes into the history."""
        here, redo = life.live, life.redo
        self._move(life, "lost", here, drafts)
        self._move(life, "lost", here)
        life.redo = redo

    def _compare(self, at: int | None, revision: int) -> None:
        if at is not None and at != revision:
            raise Refused(Conflict, f"at {revision}")

    def _create(self, id: str, path: Path = ()) -> Life:
        self.numbers += 1
        self.writes += 1
        revision = self.tombstones.get(id, 0) + 1
        life = Life(
            self.numbers,
            revision,
            path,
            sorted(path, key=lambda row: row.number),
            {},
            {revision: path},
        )
        self.lives[id] = life
        return life

    def _append(
        self, life: Life, drafts: Sequence[Draft], posts: Sequence[int | None] = ()
    ) -> list[Row]:
        life.revision += 1
        rows = self._write(life, drafts, posts)
        life.snapshots[life.revision] = life.live
        return rows

    def _move(self, life: Life, kind: str, path: Path, more: Sequence[Draft] = ()) -> None:
        before = life.live
        life.revision += 1
        life.live = path
        self._write(life, more)
        for row in before:
            if row not in life.live:
                life.states[row.number] = STATES.get(kind, "rewound")
        life.snapshots[life.revision] = life.live
        life.history.append((life.revision, kind, len(before), life.position))

    def _write(
        self, life: Life, drafts: Sequence[Draft], posts: Sequence[int | None] = ()
    ) -> list[Row]:
        rows = []
        for draft, post in zip(drafts, posts or [None] * len(drafts), strict=True):
            self.numbers += 1
            row = Row(self.numbers, draft, life.position + 1, life.revision, post)
            life.live = (*life.live, row)
            life.ever.append(row)
            if draft.key is not None:
                life.keys[draft.key] = row
            rows.append(row)
        self.writes += 1
        return rows
