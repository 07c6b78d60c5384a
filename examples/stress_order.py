"""One order for what several processes did in one session, and every answer held against it.

Each change raises the session's revision by one and its receipt says to which, so the receipts of
all processes together are already in order; `judge` runs them through a `Model` in that order, and
each must be what the model foretells. Three kinds of change have no receipt: those of a call that a
kill cut off, which may have happened or not, once; what turns took from the inbox; and results for
calls that a turn left open. The file tells of them, and each must be explained by one such call or
post, or by what is open.

A call that changed nothing (a duplicate, a refusal, an undo that found nothing, a reading) has no
place in that order, but a window: not before what had been answered when it began, not behind
what began when it had been answered. Somewhere in there the model must give its answer. Changes
must lie in their windows, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from attrs import Factory, define, evolve, frozen
from stress_calls import (
    CANCELLED,
    Fork,
    Operation,
    Outcome,
    Path,
    Redo,
    Refused,
    Restore,
    Rewrite,
    Say,
)
from stress_journal import Enter, Leave, Noted, Post, Read, Seen
from stress_model import Model
from stress_windows import Windows
from stress_wrong import Wrong, same

from turnkeeper.actors import (
    Appended,
    Move,
    Moved,
    Posted,
    Rewritten,
    StoredMessage,
    Undone,
)

__all__ = ["Found", "Step", "Verdict", "judge"]


@define(eq=False)
class Found:
    """What the file says of one session."""

    last: int
    """Its revision."""
    rows: dict[int, list[StoredMessage]] = Factory(lambda: defaultdict(list))
    """The messages that it wrote itself, by revision."""
    moves: dict[int, Move] = Factory(dict)


@frozen
class Step:
    """What produced a revision: a call, a delivery out of the inbox, or the end of a turn."""

    revision: int
    note: Noted | None
    """The call; None for the end of a turn, and for a delivery."""
    posts: tuple[int, ...] = ()
    """The ids of the posts that were delivered."""
    path: Path = ()
    open_calls: frozenset[str] = frozenset()
    """What is open on the path behind it."""

    @property
    def ends_a_turn(self) -> bool:
        """Whether it is the end of a turn, which closed what the turn left open."""
        return self.note is None and not self.posts


@frozen
class Verdict:
    model: Model
    steps: Sequence[Step]


def judge(id: str, notes: Sequence[Noted], found: Found, start: Path | None) -> Verdict:
    """Return what the session must be by now, or raise `Wrong`.

    `start` is the path with which a fork begins.
    """
    return _Judge(id, notes, found, start).walk()


class _Judge:
    def __init__(self, id: str, notes: Sequence[Noted], found: Found, start: Path | None) -> None:
        self._id, self._found = id, found
        self._model = Model(start)
        self._calls = [note for note in notes if not isinstance(note.operation, (Enter, Leave))]
        self._made = dict(self._by_revision())
        self._windows = Windows(self._made, self._calls)
        self._posts = {
            note.outcome.id: note.operation
            for note in self._calls
            if isinstance(note.operation, Post)
            and isinstance(note.outcome, Posted)
            and note.outcome.id is not None
        }
        self._cut_off = [note for note in self._calls if not note.answered]
        self._explains: dict[int, list[Noted]] = {}
        """Which of the calls cut off could have produced a revision."""
        self._steps: list[Step] = []

    def walk(self) -> Verdict:
        """Go through the revisions in order."""
        id, model, last = self._id, self._model, self._found.last
        beyond = max(self._made, default=0)
        if beyond > last:
            raise Wrong(id, f"{self._made[beyond]}", f"revision {beyond} at least", f"{last}")
        begins: dict[int, list[Noted]] = defaultdict(list)
        for note in self._unplaced():
            first, behind = self._windows.first(note), self._windows.last(note)
            if first > behind:
                what = f"window of {note}"
                raise Wrong(id, what, f"behind revision {first}", f"before {behind} ended")
            begins[first].append(note)
        waiting: list[Noted] = []
        for revision in range(last + 1):
            if revision == 1 and not model.revision:
                model.create()
            elif revision > model.revision:
                self._step(revision)
            for note in self._cut_off:
                if isinstance(note.operation, Fork) and note.operation.at == revision:
                    model.answer(note.operation, None)  # if it happened, the fork is there
            waiting = [*self._not_here(waiting + begins.pop(revision, []), revision)]
        for note in [*waiting, *(note for notes in begins.values() for note in notes)]:
            raise Wrong(id, f"answer to {note}", "one of a revision there is", note.outcome)
        self._check_once()
        return Verdict(model, self._steps)

    def _by_revision(self) -> Iterator[tuple[int, Noted]]:
        """Yield the change that says of itself that it produced a revision."""
        taken: set[int] = set()
        for note in sorted(self._calls, key=lambda note: note.ended):
            revision = _produced(note, self._found)
            if not revision:
                continue
            if revision in taken:
                if isinstance(note.operation, Restore):  # it found all as another had left it
                    continue
                raise Wrong(self._id, f"revision of {note}", "its own", f"another's, {revision}")
            taken.add(revision)
            yield revision, note

    def _unplaced(self) -> Iterator[Noted]:
        """Yield what was answered and changed nothing."""
        placed = {*self._made.values()}
        for note in self._calls:
            outcome = note.outcome
            if not note.answered or note in placed or outcome == CANCELLED:
                continue
            if isinstance(note.operation, Post):
                continue
            if isinstance(outcome, Refused) and outcome.error.startswith("Turn"):
                continue  # of turns, `stress_turns` knows
            yield note

    def _step(self, revision: int) -> None:
        """Do what produced `revision`."""
        model, rows = self._model, self._found.rows.get(revision, [])
        note = self._made.get(revision)
        posts: tuple[int, ...] = ()
        if note is not None:
            self._windows.check(self._id, revision, note)
            expected = model.answer(self._decided(note, revision), note.outcome)
            same(self._id, f"answer to {note}", expected, note.outcome)
        elif rows and all(row.synthetic for row in rows):
            self._close(rows)
        elif posts := self._delivered(rows):
            opens = rows[0].opens_turn
            model.deliver([(row.id or 0, row.body, row.key) for row in rows], opens)
        else:
            note = self._guess(revision, rows)
        calls = frozenset(model.open_calls)
        self._steps.append(Step(revision, note, posts, model.path, calls))

    def _decided(self, note: Noted, revision: int) -> Operation:
        """Return what was asked, as the model is to be asked it.

        What a caller decides on is compared before a turn that is over is passed over and its calls
        are closed, which takes a revision of its own.
        """
        operation = note.operation
        assert not isinstance(operation, (Enter, Leave, Post, Read))
        passed = self._steps and self._steps[-1].ends_a_turn
        if isinstance(operation, (Say, Redo, Rewrite)) and operation.at == revision - 2 and passed:
            return evolve(operation, at=revision - 1)
        return operation

    def _close(self, rows: Sequence[StoredMessage]) -> None:
        closed = [str(row.body.get("tool_call_id")) for row in rows]
        unknown = {*closed} - self._model.open_calls
        if unknown or len({*closed}) != len(closed):
            raise Wrong(self._id, "calls closed", f"of {self._model.open_calls}", closed)
        self._model.close([(row.id or 0, row.body) for row in rows])

    def _delivered(self, rows: Sequence[StoredMessage]) -> tuple[int, ...]:
        """Return the ids of the posts that `rows` are; a post that was cut off may be among them."""
        for row in rows:
            if row.append_id not in self._posts:
                for note in self._cut_off:
                    post = note.operation
                    if isinstance(post, Post) and (post.body, post.key) == (row.body, row.key):
                        self._posts[row.append_id] = post
                        self._cut_off.remove(note)
                        break
                else:
                    return ()
        for row in rows:
            post = self._posts[row.append_id]
            same(self._id, f"post {row.append_id}", (post.body, post.key), (row.body, row.key))
        return tuple(row.append_id for row in rows)

    def _guess(self, revision: int, rows: Sequence[StoredMessage]) -> Noted:
        """Find a call that was cut off and would have done what is there, and do it."""
        for note in self._cut_off:
            if isinstance(note.operation, (Post, Read)) or self._windows.first(note) >= revision:
                continue
            trial = self._model.copy()
            trial.answer(self._decided(note, revision), _receipts(note, rows))
            if self._is_there(trial, revision, rows):
                self._explains.setdefault(revision, []).append(note)
        possible = self._explains.get(revision)
        if not possible:
            there = self._found.moves.get(revision) or [row.body for row in rows]
            what = f"revision {revision}: {there}"
            raise Wrong(self._id, "changes", "only what a call explains", what)
        self._model.answer(self._decided(possible[0], revision), _receipts(possible[0], rows))
        return possible[0]

    def _is_there(self, trial: Model, revision: int, rows: Sequence[StoredMessage]) -> bool:
        """Whether what `trial` did last is what the file has of `revision`."""
        if trial.revision != revision:
            return False
        wrote = [(row.id, row.body, row.key) for row in trial.own if row.revision == revision]
        move = self._found.moves.get(revision)
        there = move and (move.revision, move.kind, move.from_position, move.to_position)
        moved = next((move for move in trial.moves if move[0] == revision), None)
        return moved == there and wrote == [(row.id, row.body, row.key) for row in rows]

    def _check_once(self) -> None:
        """See that each call that was cut off explains one revision at most."""
        by: dict[Noted, int] = {}

        def explained(revision: int, tried: set[Noted]) -> bool:
            for note in self._explains[revision]:
                if note not in tried:
                    tried.add(note)
                    if note not in by or explained(by[note], tried):
                        by[note] = revision
                        return True
            return False

        for revision in self._explains:
            if not explained(revision, set()):
                twice = f"revision {revision}, by a call that did another already"
                raise Wrong(self._id, "changes", "one a call", twice)

    def _not_here(self, notes: Iterable[Noted], revision: int) -> Iterator[Noted]:
        """Yield those of `notes` whose answer is not the model's at this revision."""
        for note in notes:
            expected = self._would_be(note)
            if expected == note.outcome and type(expected) is type(note.outcome):
                continue
            if revision >= self._windows.last(note):
                raise Wrong(self._id, f"answer to {note}", expected, note.outcome)
            yield note

    def _would_be(self, note: Noted) -> object:
        model = self._model
        if isinstance(note.operation, Read):
            return Seen(model.revision, tuple(row.id for row in model.path))
        assert not isinstance(note.operation, (Enter, Leave, Post))
        if isinstance(note.operation, Fork):
            return model.answer(note.operation, note.outcome)  # the fork needs it, nothing changes
        return model.copy().answer(note.operation, note.outcome)


def _produced(note: Noted, found: Found) -> int:
    """Return the revision that `note` says it produced; 0 if it changed nothing."""
    match note.outcome:
        case Appended(duplicate=False) | Undone() | Rewritten(changed=True):
            return note.outcome.revision
        case Moved(revision=revision):
            move = found.moves.get(revision)
            restored = move is not None and move.kind == "restore"
            return revision if restored or isinstance(note.operation, Redo) else 0
        case tuple() if isinstance(note.operation, Say) and note.operation.batch:
            fresh = (
                r.revision for r in note.outcome if isinstance(r, Appended) and not r.duplicate
            )
            return max(fresh, default=0)
        case _:
            return 0


def _receipts(note: Noted, rows: Sequence[StoredMessage]) -> Outcome:
    """Return an outcome that names the ids of `rows`, for a call that got none."""
    receipts = [Appended(row.id or 0, row.position, 0, False, True) for row in rows]
    match note.operation:
        case Say(bodies):
            unknown = Appended(0, 0, 0, True, False)
            there = [(row.body, receipt) for row, receipt in zip(rows, receipts, strict=True)]
            return tuple(next((r for b, r in there if b == body), unknown) for body in bodies)
        case Rewrite():
            return Rewritten(0, 0, tuple(receipts), 0, 0, changed=True)
    return None
