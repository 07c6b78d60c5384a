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

from . import branches, messages, moves, sessions
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


class Asked(NamedTuple):
    """What every change is told, besides its own arguments."""

    id: str
    """The session's id."""
    append_id: int
    """Unique in the file; names what this change appends."""
    now: float
    """Seconds since the epoch, to be shown beside what is written."""
    known: Head | None = None
    """Where the head was last seen."""
    life: int | None = None
    """The number of the session that the caller means; None if it never met it."""
    at: int | None = None
    """The revision that the caller decided on."""
    pending: tuple[Kept, ...] = ()


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


def append(
    connection: apsw.Connection, asked: Asked, drafts: Sequence[Draft]
) -> Changed[tuple[Appended, ...]]:
    """Append `drafts`, one revision for all, and return a receipt for each.

    A draft whose key the session has seen is not stored again; its receipt is the first one.
    Keys are looked at before `at`, so that a redelivery is answered whatever happened since.
    Raises `Closed`, `Conflict`, and `Rejected` for a key that came with other content before.
    """
    known = asked.known
    if (
        known is not None
        and known.at_tip
        and not asked.pending
        and (asked.at is None or asked.at == known.revision)
        and (asked.life is None or asked.life == known.session)
        and _keyless(drafts)
    ):
        done = _extend(connection, known, drafts, asked.append_id, asked.now)
        if done is not None:
            return done
    head = arrive(connection, asked, check=False)
    receipts: dict[int, Appended] = {}
    fresh: dict[int, Draft] = {}
    if head is not None:
        for index, draft in enumerate(drafts):
            earlier = _duplicate(connection, head, draft)
            if earlier is not None:
                receipts[index] = earlier
    twins: dict[str, int] = {}
    for index, draft in enumerate(drafts):
        if index in receipts:
            continue
        if draft.key is not None and draft.key in twins:
            if not same_message(draft.columns, drafts[twins[draft.key]].columns):
                raise _other_content()
            continue
        if draft.key is not None:
            twins[draft.key] = index
        fresh[index] = draft
    if fresh:
        _check_at(asked, head)
        if head is None:
            head = _create(connection, asked)
        done = _extend(connection, head, list(fresh.values()), asked.append_id, asked.now)
        assert done is not None, "the head was read in this transaction"
        receipts.update(zip(fresh, done.receipt, strict=True))
        head = done.head
    for index, draft in enumerate(drafts):
        if index not in receipts:  # a twin within the batch
            assert draft.key is not None
            receipts[index] = receipts[twins[draft.key]]._replace(duplicate=True)
    return Changed(tuple(receipts[index] for index in range(len(drafts))), head)


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
    if sessions.head(connection, id) is not None:
        raise Rejected("id", f"session {id!r} exists already")
    parent, opener = None, 0
    if head is not None and at > 0:
        parent = branches.locate(connection, head.branch, at)
        opener = _opener_at(connection, Place(parent, at))
    forked = sessions.create(connection, id, position=at, opener=opener, meta=meta, now=asked.now)
    branch = branches.add(connection, forked.session, parent, at)
    sessions.set_branch(connection, forked.session, branch)
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
    head = sessions.head(connection, asked.id)
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
        elif not same_message(earlier.columns, draft.columns):
            # Another process took the key for something else meanwhile. This message was
            # accepted, so it is stored; refusing it now would lose it.
            drafts.append(Draft(draft.columns, draft.hidden, draft.opens_turn, key=None))
    if not drafts:
        return head
    if head is None:
        head = _create(connection, asked)
    after = head._replace(revision=head.revision + 1)
    after, _ = _write(connection, after, drafts, kept.append_id, kept.now)
    swapped = sessions.swap_head(connection, head, after, kept.now)
    assert swapped, "the head was read in this transaction"
    return after


def _keyless(drafts: Sequence[Draft]) -> bool:
    for draft in drafts:  # noqa: SIM110 - all() takes three times as long for the usual one
        if draft.key is not None:
            return False
    return True


def _check_at(asked: Asked, head: Head | None) -> None:
    revision = head.revision if head is not None else 0
    if asked.at is not None and asked.at != revision:
        raise Conflict(asked.id, asked.at, revision)


def _create(connection: apsw.Connection, asked: Asked) -> Head:
    head = sessions.create(connection, asked.id, position=0, opener=0, meta=None, now=asked.now)
    branch = branches.add(connection, head.session, None, 0)
    sessions.set_branch(connection, head.session, branch)
    return head._replace(branch=branch)


def _extend(
    connection: apsw.Connection, head: Head, drafts: Sequence[Draft], append_id: int, now: float
) -> Changed[tuple[Appended, ...]] | None:
    """Append `drafts` at `head`; None, and nothing was done, if the head is not there any more.

    The head moves before the rows are written: a stale one is noticed before it does harm.
    """
    session, revision, branch, position, at_tip, opener, _ = head
    revision += 1
    if not at_tip:
        branch = branches.add(connection, session, branch, position)
    places: list[tuple[Draft, int, int]] = []
    for draft in drafts:
        position += 1
        if draft.opens_turn:
            opener = position
        places.append((draft, position, opener))
    after = Head(session, revision, branch, position, True, opener, None)
    if not sessions.swap_head(connection, head, after, now):
        return None
    receipts = []
    for draft, position, opener in places:
        id = messages.insert(
            connection, draft, session, branch, position, revision, opener, append_id, now
        )
        receipts.append(Appended(id, position, revision, False, True))
    return Changed(tuple(receipts), after)


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
    if not same_message(row.columns, draft.columns):
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
            if kept == len(drafts) or not same_message(columns, drafts[kept].columns):
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
    swapped = sessions.swap_head(connection, before, after, now)
    assert swapped, "the head was read in this transaction"
