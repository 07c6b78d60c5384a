"""What a session must look like after a series of calls, worked out with plain lists.

Changes of one session happen in the order in which they were called. So the calls of all its
tasks, noted in that order as they are made, are one program, and a `Model` that runs it knows
every answer beforehand: also that of a duplicate, of a refusal and of an undo that found
nothing. A call that ended in `Cancelled` is left out, for it must have changed nothing. Only the
ids of new messages are taken from the receipts.

Nothing here knows the library's inside; the rules are those of its documentation, said again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

from stress_calls import (
    Body,
    Fork,
    Operation,
    Outcome,
    Path,
    Redo,
    Refused,
    Restore,
    Rewind,
    Rewrite,
    Row,
    Say,
)

from turnkeeper.actors import Appended, Forked, Moved, Rewritten, Undone

__all__ = ["Model"]


class Model:
    """One session as plain lists."""

    def __init__(self, start: Path | None = None) -> None:
        """A session that is not there yet; or a fork that starts with `start`."""
        self.path: Path = start or ()
        self.revision = 0 if start is None else 1
        self.paths: dict[int, Path] = {self.revision: self.path}
        """The transcript after each revision."""
        self.moves: list[tuple[int, str, int, int]] = []
        """Revision, kind, from which position, to which."""
        self.states: dict[int, tuple[Row, str]] = {row.id: (row, "live") for row in self.path}
        """Every message that was ever on the path."""
        self.own: list[Row] = []
        """The messages that this session wrote."""
        self.forks: dict[str, Path] = {}
        self._keys: dict[str, Row] = {}
        self._undone: list[Path] = []

    @property
    def redoable(self) -> int:
        """How many undos can be taken back."""
        return len(self._undone)

    def answer(self, operation: Operation, found: object) -> Outcome:
        """Do `operation` and return the outcome that it must have.

        Of `found`, the outcome that it had, only the ids of new messages are used.
        """
        match operation:
            case Say(bodies):
                return self._say(operation, _ids(found, len(bodies)))
            case Rewind(kind, turns):
                return self._rewind(kind, turns)
            case Redo(at):
                return self._conflict(at) or self._redo()
            case Rewrite(bodies, _, at):
                return self._conflict(at) or self._rewrite(operation, _ids(found, len(bodies)))
            case Restore(revision):
                return self._restore(revision)
            case Fork(id, position, at):
                return self._conflict(at) or self._fork(id, position)

    def copy(self) -> Model:
        """Return one that can be asked what would be, without anything happening here."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (dict, list)):
                setattr(twin, name, value.copy())
        return twin

    def create(self) -> None:
        """The session is made, by whatever came first."""
        self.revision = 1
        self.paths[1] = self.path

    @property
    def open_calls(self) -> set[str]:
        """The tool calls on the path that have no result there."""
        calls: dict[str, None] = {}
        for row in self.path:
            made = row.body.get("tool_calls")
            for call in made if isinstance(made, list) else ():
                calls[str(call["id"])] = None
            if row.body["role"] == "tool":
                calls.pop(str(row.body["tool_call_id"]), None)
        return {*calls}

    def deliver(self, messages: Sequence[tuple[int, Body, str | None]], opens: bool) -> None:
        """A turn takes these from the inbox; of several at most the first opens an exchange."""
        self._advance()
        for index, (id, body, key) in enumerate(messages):
            self._write(body, id, key, False, opens_turn=opens and index == 0)
        self.paths[self.revision] = self.path
        self._undone.clear()

    def close(self, results: Sequence[tuple[int, Body]]) -> None:
        """A turn ends, and results are written for calls it left open. What was undone stays so."""
        self._advance()
        for id, body in results:
            self._write(body, id, None, False)
        self.paths[self.revision] = self.path

    def _say(self, say: Say, ids: Sequence[int]) -> Outcome:
        fresh: dict[int, str | None] = {}
        new: dict[str, Body] = {}
        for index, (body, key) in enumerate(zip(say.bodies, say.keys, strict=True)):
            if key is None:
                fresh[index] = None
            elif key in self._keys or key in new:
                first = self._keys[key].body if key in self._keys else new[key]
                if first != body:
                    return Refused("Rejected: key")
            else:
                fresh[index] = key
                new[key] = body
        rows: dict[int, Row] = {}
        if fresh:
            if refusal := self._conflict(say.at):
                return refusal
            self._advance()
            for index, key in fresh.items():
                rows[index] = self._write(say.bodies[index], ids[index], key, say.hidden)
            self.paths[self.revision] = self.path
            self._undone.clear()
        live = {row.id for row in self.path}
        receipts = []
        for index, key in enumerate(say.keys):
            row = rows[index] if key is None or index in rows else self._keys[key]
            duplicate = index not in rows
            receipts.append(Appended(row.id, row.position, row.revision, duplicate, row.id in live))
        return tuple(receipts) if say.batch else receipts[0]

    def _rewind(self, kind: Literal["undo", "retry"], turns: int) -> Outcome:
        openers = [index for index, row in enumerate(self.path) if row.opens_turn]
        if not openers:
            return None
        turns = min(turns, len(openers))
        landing = openers[-turns]
        content = self.path[landing].body["content"]
        text = content if isinstance(content, str) else None
        if kind == "retry" and text is None:
            return Refused("NotRetryable")
        taken = len(self.path) - landing
        self._undone.append(self.path)
        self._advance()
        self._move(kind, "rewound", self.path[:landing])
        return Undone(text, turns, taken, landing, self.revision)

    def _redo(self) -> Outcome:
        if not self._undone:
            return None
        self._advance()
        self._move("redo", "rewound", self._undone.pop())
        return Moved(len(self.path), self.revision)

    def _rewrite(self, rewrite: Rewrite, ids: Sequence[int]) -> Outcome:
        bodies = rewrite.bodies
        kept = last = 0
        for row in self.path:
            if not row.hidden:
                if kept == len(bodies) or row.body != bodies[kept]:
                    break
                kept += 1
            last = row.position
        if kept == len(bodies) and last == len(self.path):
            return Rewritten(kept, 0, (), last, self.revision, changed=False)
        before = self.path
        self._advance()
        self.path = self.path[:last]
        new = [
            self._write(body, ids[index], None, False) for index, body in enumerate(bodies[kept:])
        ]
        after, self.path = self.path, before
        state = "compacted" if rewrite.reason == "compaction" else "replaced"
        self._move(rewrite.reason, state, after)
        self._undone.clear()
        receipts = tuple(Appended(row.id, row.position, row.revision, False, True) for row in new)
        position = len(self.path)
        return Rewritten(kept, len(before) - last, receipts, position, self.revision, changed=True)

    def _restore(self, revision: int) -> Outcome:
        if not 1 <= revision <= self.revision:
            return Refused("Rejected: revision")
        path = self.paths[revision]
        if path != self.path:
            self._advance()
            self._move("restore", "rewound", path)
            self._undone.clear()
        return Moved(len(self.path), self.revision)

    def _fork(self, id: str, position: int | None) -> Outcome:
        at = len(self.path) if position is None else position
        if at > len(self.path):
            return Refused("Rejected: position")
        self.forks[id] = self.path[:at]
        return Forked(id, at, 1)

    def _conflict(self, at: int | None) -> Refused | None:
        return Refused("Conflict", self.revision) if at not in (None, self.revision) else None

    def _advance(self) -> None:
        """Go on by one revision; a session that is not there yet is made first."""
        if self.revision == 0:
            self.revision = 1
            self.paths[1] = ()
        self.revision += 1

    def _write(
        self, body: Body, id: int, key: str | None, hidden: bool, opens_turn: bool | None = None
    ) -> Row:
        if opens_turn is None:
            opens_turn = body["role"] == "user" and not hidden
        row = Row(id, len(self.path) + 1, self.revision, body, key, hidden, opens_turn)
        self.path += (row,)
        self.own.append(row)
        self.states[id] = (row, "live")
        if key is not None:
            self._keys[key] = row
        return row

    def _move(self, kind: str, state: str, path: Path) -> None:
        self.moves.append((self.revision, kind, len(self.path), len(path)))
        for row in self.path:
            self.states[row.id] = (row, state)
        for row in path:
            self.states[row.id] = (row, "live")
        self.path = self.paths[self.revision] = path


def _ids(found: object, most: int) -> list[int]:
    """Return the ids in the receipts of `found`; zeros where there are too few."""
    match found:
        case Appended():
            ids = [found.id]
        case Rewritten():
            ids = [receipt.id for receipt in found.appended]
        case tuple():
            ids = [receipt.id for receipt in found if isinstance(receipt, Appended)]
        case _:
            ids = []
    return ids + [0] * most
