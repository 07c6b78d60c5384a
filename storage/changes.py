"""Each change that a session can make, as the body of one transaction. Where the tables meet.

A change is a function of the writing connection, of what is known (`Asked`) and of its own
arguments; it returns a receipt and the head it left, or raises and has changed nothing. It may
be run again from the beginning, for the writer does so when a transaction was lost.

A head that the caller remembers is a hint. An append tries it in the statement that moves the
head; when it is stale, and in every other change, the head is read here, inside the
transaction. What is pending is written first, so that the change applies to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import apsw
from attrs import frozen

from . import branches, heads, messages, moves, sessions
from .codec import Columns, same_message
from .errors import Closed, Conflict, Rejected
from .messages import Draft
from .places import Place
from .records import (
    Appended,
    Forked,
    Head,
    JSONObject,
    Moved,
    MoveKind,
    Rewritten,
    Undone,
)

__all__ = [
    "Asked",
    "Attempt",
    "Changed",
    "Kept",
    "TakenBack",
    "append",
    "arrive",
    "drain",
    "extend",
    "fork",
    "redo",
    "restore",
    "rewind",
    "rewrite",
    "set_meta",
]

T_co = TypeVar("T_co", covariant=True)


class Attempt(Protocol):
    """An operation that may have written something: `landed` is true once that is known."""

    @property
    def landed(self) -> bool: ...


@frozen
class Kept:
    """An append that storage did not take when it came: written ahead of anything newer."""

    drafts: tuple[Draft, ...]
    append_id: int
    now: float
    life: int | None = None
    """The number of the session that it was meant for, where that was known."""
    attempt: Attempt | None = None
    """The operation that tried to write it and whose outcome nobody could tell at the time."""


class Asked(Protocol):
    """What every change is told, besides its own arguments.

    A protocol, so that whoever carries a change to the writer can say it by himself.
    """

    @property
    def id(self) -> str:
        """The session's id."""

    @property
    def append_id(self) -> int:
        """Unique in the file; names what this change appends."""

    @property
    def now(self) -> float:
        """Seconds since the epoch, to be shown beside what is written."""

    @property
    def known(self) -> Head | None:
        """Where the head was last seen."""

    @property
    def life(self) -> int | None:
        """The number of the session that the caller means; None if he never met it."""

    @property
    def at(self) -> int | None:
        """The revision that the caller decided on."""

    @property
    def pending(self) -> tuple[Kept, ...]:
        """What is to be written first."""


class Changed(NamedTuple, Generic[T_co]):
    """What a change returns: the receipt, and where the head is now (None: no such session)."""

    receipt: T_co
    head: Head | None


@frozen
class TakenBack:
    """What the rules of conversation say of a message that an undo takes back."""

    text: str | None
    """The text to give back to the person."""
    scaffold: Draft | None = None
    """The summary that the message carried; it stays behind, hidden."""


def append(connection: apsw.Connection, asked: Asked, draft: Draft) -> Changed[Appended]:
    """Append one message; as `extend`."""
    quick = _append_at_known_head(connection, asked, draft)
    if quick is not None:
        return quick
    receipts, head = extend(connection, asked, (draft,))
    return Changed(receipts[0], head)


def extend(
    connection: apsw.Connection, asked: Asked, drafts: Sequence[Draft]
) -> Changed[tuple[Appended, ...]]:
    """Append `drafts`, one revision for all, and return a receipt for each.

    A draft whose key the session has seen is not stored again; its receipt is the first one.
    Keys are looked at before `at`, so that a redelivery is answered whatever happened since.
    Raises `Closed`, `Conflict`, and `Rejected` for a key that came with other content before.
    """
    head = arrive(connection, asked, check=False)
    receipts: dict[int, Appended] = {}
    first: dict[str, int] = {}
    fresh: list[int] = []
    for index, draft in enumerate(drafts):
        earlier = None if head is None else _duplicate(connection, head, draft)
        if earlier is not None:
            receipts[index] = earlier
        elif draft.key is None or draft.key not in first:
            fresh.append(index)
            if draft.key is not None:
                first[draft.key] = index
        elif not same_message(draft, drafts[first[draft.key]]):
            raise _other_content()
    if fresh:
        _check_at(asked, head)
        before = _create(connection, asked) if head is None else head
        head = before._replace(revision=before.revision + 1, redo=None)
        new = [drafts[index] for index in fresh]
        head, written = _write(connection, head, new, asked.append_id, asked.now)
        _swap(connection, before, head, asked.now)
        receipts.update(zip(fresh, written, strict=True))
    for index, draft in enumerate(drafts):
        if index not in receipts:  # its twin stands before it in the batch
            assert draft.key is not None
            receipts[index] = receipts[first[draft.key]]._replace(duplicate=True)
    return Changed(tuple(receipts[index] for index in range(len(drafts))), head)


def _append_at_known_head(
    connection: apsw.Connection, asked: Asked, draft: Draft
) -> Changed[Appended] | None:
    """Append one message at the remembered head; None, and nothing was done, if that is stale.

    The way of nearly every append, so it is written out: two statements, three with a key. The
    head moves before the row is written, so a stale one is noticed before it does harm.
    """
    known = asked.known
    if known is None or not known.at_tip or asked.pending:
        return None
    session, revision, branch, position, _, opener, _ = known
    if (asked.at is not None and asked.at != revision) or (
        asked.life is not None and asked.life != session
    ):
        return None
    if draft.key is not None and messages.by_key(connection, session, draft.key) is not None:
        return None
    revision += 1
    position += 1
    if draft.opens_turn:
        opener = position
    after = Head(session, revision, branch, position, True, opener, None)
    if not heads.swap(connection, known, after, asked.now):
        return None
    id = messages.insert(
        connection, draft, session, branch, position, revision, opener, asked.append_id, asked.now
    )
    return Changed(Appended(id, position, revision, False, True), after)


def rewind(
    connection: apsw.Connection,
    asked: Asked,
    turns: int,
    kind: MoveKind,
    take: Callable[[JSONObject], TakenBack],
) -> Changed[Undone | None]:
    """Move the head before the `turns`-th last user turn, or the first if there are fewer.

    `take` says what becomes of the message that opened it; what it raises goes to the caller
    and nothing changes. Returns None as the receipt if there is no user turn.
    """
    head = arrive(connection, asked)
    if head is None or head.opener == 0:
        return Changed(None, head)
    branch, opener, undone = head.branch, head.opener, 0
    while True:
        branch = branches.locate(connection, branch, opener)
        undone += 1
        landing = Place(branches.locate(connection, branch, opener - 1), opener - 1)
        below = _opener_at(connection, landing)
        if undone == turns or below == 0:
            break
        branch, opener = landing.branch, below
    taken = take(messages.read(connection, branch, opener).body)
    after = _head_at(connection, head, landing)._replace(redo=head.revision + 1)
    if taken.scaffold is not None:
        after, _ = _write(connection, after, [taken.scaffold], asked.append_id, asked.now)
    _move(connection, kind, head, after, asked.now)
    receipt = Undone(
        text=taken.text,
        turns=undone,
        messages=head.position - landing.position,
        position=after.position,
        revision=after.revision,
    )
    return Changed(receipt, after)


def redo(connection: apsw.Connection, asked: Asked) -> Changed[Moved | None]:
    """Move the head back to where the last undo took it from; None if there is nothing to redo."""
    head = arrive(connection, asked)
    if head is None or head.redo is None:
        return Changed(None, head)
    place, below = moves.undone(connection, head.session, head.redo)
    after = _head_at(connection, head, place)._replace(redo=below)
    _move(connection, "redo", head, after, asked.now)
    return Changed(Moved(after.position, after.revision), after)


def rewrite(
    connection: apsw.Connection, asked: Asked, drafts: Sequence[Draft], kind: MoveKind
) -> Changed[Rewritten]:
    """Make the visible transcript read `drafts`; what it already begins with stays where it is.

    Hidden rows among and right behind that beginning stay too. Nothing is written if the
    transcript reads so already.
    """
    head = arrive(connection, asked)
    if head is None:
        if not drafts:
            return Changed(Rewritten(0, 0, (), 0, 0, changed=False), None)
        head = _create(connection, asked)
    kept, last = _common_beginning(connection, head, drafts)
    if kept == len(drafts) and last == head.position:
        unchanged = Rewritten(kept, 0, (), head.position, head.revision, changed=False)
        return Changed(unchanged, head)
    after = head._replace(revision=head.revision + 1, redo=None)
    if last < head.position:
        landing = Place(branches.locate(connection, head.branch, last), last)
        after = _head_at(connection, head, landing)
    after, receipts = _write(connection, after, drafts[kept:], asked.append_id, asked.now)
    _move(connection, kind, head, after, asked.now)
    receipt = Rewritten(
        kept=kept,
        replaced=head.position - last,
        appended=tuple(receipts),
        position=after.position,
        revision=after.revision,
        changed=True,
    )
    return Changed(receipt, after)


def restore(connection: apsw.Connection, asked: Asked, revision: int) -> Changed[Moved]:
    """Move the head to where it was after `revision`. Raises `Rejected` if there is no such one."""
    head = arrive(connection, asked)
    first = sessions.born(connection, head.session) if head is not None else 1
    if head is None or not first <= revision <= head.revision:
        last = head.revision if head is not None else 0
        raise Rejected("revision", f"{revision} does not exist; there are {first} to {last}")
    place = _head_after(connection, head, revision)
    if place == (head.branch, head.position):
        return Changed(Moved(head.position, head.revision), head)
    after = _head_at(connection, head, place)
    _move(connection, "restore", head, after, asked.now)
    return Changed(Moved(after.position, after.revision), after)


def fork(
    connection: apsw.Connection, asked: Asked, id: str, position: int | None, meta: bytes | None
) -> Changed[Forked]:
    """Make the session `id` that starts after `position` of this one; no message is copied.

    None means the head. Raises `Rejected` if the position does not exist or the id is taken.
    """
    head = arrive(connection, asked)
    end = head.position if head is not None else 0
    at = end if position is None else position
    if not 0 <= at <= end:
        raise Rejected("position", f"{at} does not exist; there are 0 to {end}")
    if sessions.key_of(connection, id) is not None:
        raise Rejected("id", f"session {id!r} exists already")
    parent, opener = None, 0
    if head is not None and at > 0:
        parent = branches.locate(connection, head.branch, at)
        opener = _opener_at(connection, Place(parent, at))
    forked = _begin(connection, id, Place(parent, at) if parent else None, opener, meta, asked.now)
    return Changed(Forked(id, at, forked.revision), head)


def set_meta(connection: apsw.Connection, asked: Asked, meta: bytes) -> Changed[None]:
    """Replace the session's meta; it is made if it was not there. No revision is raised."""
    head = arrive(connection, asked)
    if head is None:
        head = _create(connection, asked)
    sessions.set_meta(connection, head.session, meta)
    return Changed(None, head)


def drain(connection: apsw.Connection, asked: Asked) -> Changed[None]:
    """Write what is pending and nothing else."""
    return Changed(None, arrive(connection, asked))


def arrive(connection: apsw.Connection, asked: Asked, *, check: bool = True) -> Head | None:
    """Return the head with all that is pending written; None if there is no such session yet.

    Raises `Closed` if the session that the caller means was deleted, and, if `check`,
    `Conflict` if it is not at the revision that the caller decided on.
    """
    key = sessions.key_of(connection, asked.id)
    head = None if key is None else heads.get(connection, key)
    if asked.life is not None and (head is None or head.session != asked.life):
        raise Closed("session", asked.id)
    if check:
        _check_at(asked, head)
    for kept in asked.pending:
        head = _append_kept(connection, asked, head, kept)
    return head


def _append_kept(
    connection: apsw.Connection, asked: Asked, head: Head | None, kept: Kept
) -> Head | None:
    """Write one pending append, unless it is there already. It leaves the redo stack as it is."""
    if kept.attempt is not None and kept.attempt.landed:
        return head
    if kept.life is not None and (head is None or head.session != kept.life):
        return head  # the session was deleted, and what belonged to it goes with it
    drafts: list[Draft] = []
    for draft in kept.drafts:
        earlier = (
            messages.by_key(connection, head.session, draft.key) if head and draft.key else None
        )
        if earlier is None:
            drafts.append(draft)
        elif not same_message(earlier.columns, draft):
            # Another process took the key for something else meanwhile. This message was
            # accepted, so it is stored; refusing it now would lose it.
            drafts.append(draft._replace(key=None))
    if not drafts:
        return head
    if head is None:
        head = _create(connection, asked)
    after = head._replace(revision=head.revision + 1)
    after, _ = _write(connection, after, drafts, kept.append_id, kept.now)
    _swap(connection, head, after, kept.now)
    return after


def _check_at(asked: Asked, head: Head | None) -> None:
    revision = head.revision if head is not None else 0
    if asked.at is not None and asked.at != revision:
        raise Conflict(asked.id, asked.at, revision)


def _create(connection: apsw.Connection, asked: Asked) -> Head:
    return _begin(connection, asked.id, None, 0, None, asked.now)


def _begin(
    connection: apsw.Connection,
    id: str,
    start: Place | None,
    opener: int,
    meta: bytes | None,
    now: float,
) -> Head:
    """Make the session `id` and its first branch, at `start` or at the root."""
    revision = sessions.last_life(connection, id) + 1
    session = sessions.add(connection, id, revision, meta, now)
    parent, position = start or (None, 0)
    branch = branches.add(connection, session, parent, position)
    head = Head(session, revision, branch, position, True, opener, None)
    heads.place(connection, head, now)
    return head


def _with_branch(connection: apsw.Connection, head: Head) -> Head:
    """Return `head` on a branch that may be extended there."""
    if head.at_tip:
        return head
    branch = branches.add(connection, head.session, head.branch, head.position)
    return head._replace(branch=branch, at_tip=True)


def _write(
    connection: apsw.Connection, head: Head, drafts: Sequence[Draft], append_id: int, now: float
) -> tuple[Head, list[Appended]]:
    """Write rows for `drafts` after `head`, under its revision; return the head behind them."""
    if not drafts:
        return head, []
    head = _with_branch(connection, head)
    session, revision, branch, position, _, opener, redo = head
    receipts = []
    for draft in drafts:
        position += 1
        if draft.opens_turn:
            opener = position
        id = messages.insert(
            connection, draft, session, branch, position, revision, opener, append_id, now
        )
        receipts.append(Appended(id, position, revision, False, True))
    return Head(session, revision, branch, position, True, opener, redo), receipts


def _duplicate(connection: apsw.Connection, head: Head, draft: Draft) -> Appended | None:
    """Return the first receipt of the draft's key, or None if the session never saw the key."""
    if draft.key is None:
        return None
    row = messages.by_key(connection, head.session, draft.key)
    if row is None:
        return None
    if not same_message(row.columns, draft):
        raise _other_content()
    live = row.position <= head.position and row.branch == branches.locate(
        connection, head.branch, row.position
    )
    return Appended(row.id, row.position, row.revision, True, live)


def _other_content() -> Rejected:
    return Rejected("key", "came with other content before; a key names one message")


def _common_beginning(
    connection: apsw.Connection, head: Head, drafts: Sequence[Draft]
) -> tuple[int, int]:
    """Return how many visible messages agree with `drafts`, and the last position to keep."""
    parts = list(branches.path(connection, head.branch, head.position))
    kept = last = 0
    for role, content, extra, _, position, _, hidden, *_ in messages.load(
        connection, reversed(parts)
    ):
        if not hidden:
            columns = Columns(role, content, extra)
            if kept == len(drafts) or not same_message(columns, drafts[kept]):
                break
            kept += 1
        last = position
    return kept, last


def _head_after(connection: apsw.Connection, head: Head, revision: int) -> Place:
    """Return where the head was after `revision`.

    Between two moves a head only advances by appends, on one branch: the one that the next
    move left, or the one that it is on now.
    """
    move = moves.last_until(connection, head.session, revision)
    since, start = move or (0, branches.first_of(connection, head.session))
    end = moves.first_after(connection, head.session, revision)
    branch = end.branch if end is not None else head.branch
    position = messages.last_between(connection, branch, since, revision)
    return start if position is None else Place(branch, position)


def _head_at(connection: apsw.Connection, head: Head, place: Place) -> Head:
    """Return `head` moved to `place`, one revision on, with nothing to redo.

    An append may extend the branch there if its last message stands there, was written by this
    session, and is not older than a purge, which may have removed what came after it.
    """
    session, revision = head.session, head.revision + 1
    branch, position = branches.locate(connection, place.branch, place.position), place.position
    origin = messages.origin(connection, branch, position)
    if origin is None:
        return Head(session, revision, branch, position, False, 0, None)
    at_tip = (
        origin.session == session
        and messages.tip(connection, branch) == position
        and origin.revision >= sessions.born(connection, session)
    )
    return Head(session, revision, branch, position, at_tip, origin.opener, None)


def _opener_at(connection: apsw.Connection, place: Place) -> int:
    origin = messages.origin(connection, *place)
    return 0 if origin is None else origin.opener


def _move(
    connection: apsw.Connection, kind: MoveKind, before: Head, after: Head, now: float
) -> None:
    moves.record(connection, kind, before, after, now)
    _swap(connection, before, after, now)


def _swap(connection: apsw.Connection, before: Head, after: Head, now: float) -> None:
    swapped = heads.swap(connection, before, after, now)
    assert swapped, "the head was read in this transaction"
