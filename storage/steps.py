"""The steps that changes are made of: arrive, write behind the head, move the head.

Each is a few statements of several tables, inside a transaction that somebody else has begun.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import branches, heads, messages, moves, sessions
from .asked import Asked, Kept
from .codec import same_message
from .connect import Connection
from .errors import Conflict
from .messages import Draft
from .places import Place
from .reads import head_of
from .records import Appended, Head, MoveKind

__all__ = [
    "arrive",
    "begin",
    "check_at",
    "create",
    "head_at",
    "move",
    "opener_at",
    "swap",
    "with_branch",
    "write",
    "write_pending",
]


def arrive(connection: Connection, asked: Asked) -> Head | None:
    """Return the head with all that is pending written; None if there is no such session yet.

    Raises `Closed` if the session that the caller means was deleted, and `Conflict` if it was
    not at the revision that the caller decided on before that.
    """
    head = head_of(connection, asked.id, asked.life)
    check_at(asked, head)
    return write_pending(connection, asked, head)


def write_pending(connection: Connection, asked: Asked, head: Head | None) -> Head | None:
    """Write what is pending behind `head`; return the head behind that."""
    for kept in asked.pending:
        head = _append_kept(connection, asked, head, kept)
    return head


def create(connection: Connection, asked: Asked) -> Head:
    """Make the session that is asked for, which is not there yet."""
    return begin(connection, asked.id, None, 0, None, asked.now)


def begin(
    connection: Connection,
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


def check_at(asked: Asked, head: Head | None) -> None:
    """Raise `Conflict` unless `head` is at the revision that the caller decided on, if he did."""
    revision = head.revision if head is not None else 0
    if asked.at is not None and asked.at != revision:
        raise Conflict(asked.id, asked.at, revision)


def write(
    connection: Connection, head: Head, drafts: Sequence[Draft], append_id: int, now: float
) -> tuple[Head, list[Appended]]:
    """Write rows for `drafts` after `head`, under its revision; return the head behind them."""
    if not drafts:
        return head, []
    head = with_branch(connection, head)
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


def head_at(connection: Connection, head: Head, place: Place) -> Head:
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


def move(connection: Connection, kind: MoveKind, before: Head, after: Head, now: float) -> None:
    """Move the head by something else than an append, and log it."""
    moves.record(connection, kind, before, after, now)
    swap(connection, before, after, now)


def swap(connection: Connection, before: Head, after: Head, now: float) -> None:
    """Set a head that was read in this transaction."""
    if not heads.swap(connection, before, after, now):  # not an assertion: -O must not write on
        raise RuntimeError(f"the head of session {before.session} moved inside a transaction")


def opener_at(connection: Connection, place: Place) -> int:
    """Return the position of the message that opened the turn of the one here; 0 for none."""
    origin = messages.origin(connection, *place)
    return 0 if origin is None else origin.opener


def _append_kept(
    connection: Connection, asked: Asked, head: Head | None, kept: Kept
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
        head = begin(connection, asked.id, None, 0, None, kept.now)
    after = head._replace(revision=head.revision + 1)
    after, _ = write(connection, after, drafts, kept.append_id, kept.now)
    swap(connection, head, after, kept.now)
    return after


def with_branch(connection: Connection, head: Head) -> Head:
    """Return `head` on a branch that may be extended there."""
    if head.at_tip:
        return head
    branch = branches.add(connection, head.session, head.branch, head.position)
    return head._replace(branch=branch, at_tip=True)
