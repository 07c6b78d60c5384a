"""What a store must be like, in plain lists and dicts.

Written from the promises and the docstrings, not from the code, and naive on purpose: a session
keeps its live transcript as a tuple of rows, everything it ever had, and the transcript as it was
after each revision. An undo is a search from the end, a restore a look into a dict. Each change
is a method that changes the world or raises `Refused`; whoever wants to go back keeps a `copy`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
    TurnkeeperError,
    Undone,
)

__all__ = ["Draft", "Got", "Life", "Refused", "Row", "World", "plain"]

Body = dict[str, object]


def plain(value: object) -> str:
    """Return a text that is the same for the same JSON: 1, 1.0 and true are three things."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


class Refused(Exception):
    """The change is refused and nothing has happened; `kind` is what the store must raise."""

    def __init__(self, kind: type[TurnkeeperError], why: str) -> None:
        super().__init__(kind, why)
        self.kind = kind


@dataclass(frozen=True)
class Draft:
    """A message as it is given, and what the rules of conversation say of it."""

    body: Body
    opens: bool = False
    """A person wrote it."""
    text: str | None = None
    """What a retry may send again; None where it may not."""
    scaffold: Body | None = None
    """The summary that it carries."""
    hidden: bool = False
    key: str | None = None

    def same(self, other: Draft) -> bool:
        return plain(self.body) == plain(other.body)


@dataclass(frozen=True)
class Row:
    """A message as it was stored."""

    number: int
    draft: Draft
    position: int
    revision: int


Path = tuple[Row, ...]


@dataclass(frozen=True)
class Got:
    """The receipt of an append, but for the id, which only the store knows."""

    row: Row
    duplicate: bool


@dataclass
class Life:
    """One session, from its creation until it is deleted."""

    number: int
    revision: int
    live: Path
    ever: list[Row]
    """Every row that was on its path, in the order written; less what was purged."""
    states: dict[int, str]
    """For the rows that are off the path: what took them off."""
    snapshots: dict[int, Path]
    """The transcript after each revision that can be restored."""
    redo: list[Path] = field(default_factory=list)
    """Where the undos came from that have not been taken back, the last one last."""
    keys: dict[str, Row] = field(default_factory=dict)
    history: list[tuple[int, str, int, int]] = field(default_factory=list)
    """Revision, kind, from, to."""
    meta: Body = field(default_factory=dict)

    def copy(self) -> Life:
        return replace(
            self,
            ever=list(self.ever),
            states=dict(self.states),
            snapshots=dict(self.snapshots),
            redo=list(self.redo),
            keys=dict(self.keys),
            history=list(self.history),
        )

    @property
    def position(self) -> int:
        return len(self.live)

    def state(self, row: Row) -> str:
        return "live" if row in self.live else self.states[row.number]


STATES = {"rewrite": "replaced", "compaction": "compacted"}


@dataclass
class World:
    """A store: the living sessions, what is pending, and what the deleted leave behind."""

    max_pending: int
    lives: dict[str, Life] = field(default_factory=dict)
    pending: dict[str, list[tuple[Draft, ...]]] = field(default_factory=dict)
    tombstones: dict[str, int] = field(default_factory=dict)
    numbers: int = 0
    writes: int = 0
    """Raised by whatever must reach the disk."""

    def copy(self) -> World:
        return replace(
            self,
            lives={id: life.copy() for id, life in self.lives.items()},
            pending={id: list(kept) for id, kept in self.pending.items()},
            tombstones=dict(self.tombstones),
        )

    # What can be asked.

    def revision(self, id: str) -> int:
        return self.lives[id].revision if id in self.lives else 0

    def pending_number(self) -> int:
        return sum(len(drafts) for kept in self.pending.values() for drafts in kept)

    def shown(self, id: str) -> list[tuple[Draft, Row | None]]:
        """Return the transcript, hidden rows and pending drafts (they have no row) included."""
        found: list[tuple[Draft, Row | None]] = []
        life = self.lives.get(id)
        if life is not None:
            found += [(row.draft, row) for row in life.live]
        return found + [(draft, None) for drafts in self.pending.get(id, []) for draft in drafts]

    def reached(self, *, but: str | None = None) -> set[int]:
        """Return the numbers of the rows that the sessions reach, all but one."""
        return {row.number for id, life in self.lives.items() if id != but for row in life.ever}

    # What can be done.

    def extend(
        self, id: str, drafts: Sequence[Draft], life: int | None, at: int | None
    ) -> list[Got]:
        before = self.revision(id)
        there = self._arrive(id, life, None)
        known = dict(there.keys) if there is not None else {}
        batch: dict[str, Draft] = {}
        fresh = []
        for draft in drafts:
            first = None
            if draft.key is not None:
                first = known[draft.key].draft if draft.key in known else batch.get(draft.key)
            if first is None:
                fresh.append(draft)
                if draft.key is not None:
                    batch[draft.key] = draft
            elif not first.same(draft):
                raise Refused(Rejected, "the key came with other content")
        if fresh:
            self._compare(at, before)
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

    def keep(self, id: str, drafts: Sequence[Draft]) -> bool:
        """Keep an append that storage did not take; return whether it could be kept."""
        kept = self.pending.setdefault(id, [])
        known = {draft.key: draft for each in kept for draft in each if draft.key is not None}
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
        if sum(map(len, kept)) + len(fresh) > self.max_pending:
            return False
        if fresh:
            kept.append(tuple(fresh))
        return True

    def rewind(
        self, id: str, turns: int, kind: str, life: int | None, at: int | None
    ) -> Undone | None:
        there = self._arrive(id, life, at)
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

    def redo(self, id: str, life: int | None, at: int | None) -> Moved | None:
        there = self._arrive(id, life, at)
        if there is None or not there.redo:
            return None
        self._move(there, "redo", there.redo.pop())
        return Moved(there.position, there.revision)

    def rewrite(
        self, id: str, drafts: Sequence[Draft], kind: str, life: int | None, at: int | None
    ) -> tuple[Rewritten, Path]:
        """Return the receipt without the appended, and the appended rows."""
        there = self._arrive(id, life, at)
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

    def restore(self, id: str, revision: int, life: int | None, at: int | None) -> Moved:
        there = self._arrive(id, life, at)
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
        to: str,
        position: int | None,
        meta: Body | None,
        life: int | None,
        at: int | None,
    ) -> Forked:
        there = self._arrive(id, life, at)
        path = there.live if there is not None else ()
        if position is not None and position > len(path):
            raise Refused(Rejected, "there is no such position")
        if to in self.lives:
            raise Refused(Rejected, "the id is taken")
        forked = self._create(to, path if position is None else path[:position])
        forked.meta = meta or {}
        return Forked(to, forked.position, forked.revision)

    def set_meta(self, id: str, meta: Body, life: int | None) -> None:
        there = self._arrive(id, life, None) or self._create(id)
        there.meta = meta
        self.writes += 1

    def delete(self, id: str) -> Deleted | None:
        self.pending.pop(id, None)
        life = self.lives.get(id)
        if life is None:
            return None
        others = self.reached(but=id)
        del self.lives[id]
        self.tombstones[id] = life.revision + 1
        self.writes += 1
        return Deleted(sum(row.number not in others for row in life.ever), life.revision + 1)

    def purge(self, id: str) -> Purged:
        life = self._arrive(id, None, None)
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

    def drain(self, id: str) -> None:
        self._arrive(id, None, None)

    def forget_pending(self, id: str) -> None:
        self.pending.pop(id, None)

    # What they have in common.

    def _arrive(self, id: str, number: int | None, at: int | None) -> Life | None:
        """Return the session with what is pending written; it leaves the redo as it is."""
        life = self.lives.get(id)
        if number is not None and (life is None or life.number != number):
            raise Refused(Closed, "the session was deleted")
        self._compare(at, self.revision(id))
        for drafts in self.pending.pop(id, []):
            life = life or self._create(id)
            self._append(life, drafts)
        return life

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

    def _append(self, life: Life, drafts: Sequence[Draft]) -> list[Row]:
        life.revision += 1
        rows = self._write(life, drafts)
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

    def _write(self, life: Life, drafts: Sequence[Draft]) -> list[Row]:
        rows = []
        for draft in drafts:
            self.numbers += 1
            row = Row(self.numbers, draft, life.position + 1, life.revision)
            life.live = (*life.live, row)
            life.ever.append(row)
            if draft.key is not None:
                life.keys[draft.key] = row
            rows.append(row)
        self.writes += 1
        return rows
