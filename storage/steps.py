"""The steps that changes are made of: make a session, write behind the head, move the head.

Each is a few statements of several tables, inside a transaction that somebody else has begun.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import branches, heads, messages, moves, sessions
from .asked import Asked
from .connect import Connection
from .errors import Conflict
from .messages import Draft
from .places import Place
from .receipts import Appended
from .records import Head, MoveKind

__all__ = [
    "begin",
    "check_at",
    "create",
    "head_at",
    "hold",
    "move",
    "opener_at",
    "swap",
    "with_branch",
    "write",
]


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
    head = Head(session, revision, branch, position, True, opener, None, None)
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
    session, revision, branch, position, _, opener, redo, turn = head
    receipts = []
    for draft in drafts:
        position += 1
        if draft.opens_turn:
            opener = position
        id = messages.insert(
            connection, draft, session, branch, position, revision, opener, append_id, now
        )
        receipts.append(Appended(id, position, revision, False, True))
    return Head(session, revision, branch, position, True, opener, redo, turn), receipts


def head_at(connection: Connection, head: Head, place: Place) -> Head:
    """Return `head` moved to `place`, one revision on, with nothing to redo.

    An append may extend the branch there if its last message stands there, was written by this
    session, and is not older than a purge, which may have removed what came after it.
    """
    session, revision = head.session, head.revision + 1
    branch, position = branches.locate(connection, place.branch, place.position), place.position
    origin = messages.origin(connection, branch, position)
    if origin is None:
        return Head(session, revision, branch, position, False, 0, None, head.turn)
    at_tip = (
        origin.session == session
        and messages.tip(connection, branch) == position
        and origin.revision >= sessions.born(connection, session)
    )
    return Head(session, revision, branch, position, at_tip, origin.opener, None, head.turn)


def move(connection: Connection, kind: MoveKind, before: Head, after: Head, now: float) -> None:
    """Move the head by something else than an append, and log it."""
    moves.record(connection, kind, before, after, now)
    swap(connection, before, after, now)


def swap(connection: Connection, before: Head, after: Head, now: float) -> None:
    """Set a head that was read in this transaction."""
    if not heads.swap(connection, before, after, now):  # not an assertion: -O must not write on
        raise RuntimeError(f"the head of session {before.session} moved inside a transaction")


def hold(connection: Connection, head: Head, token: int | None) -> Head:
    """Let the turn `token` hold the session, or nobody; the head was read in this transaction."""
    if not heads.hold(connection, head.session, head.turn, token):
        raise RuntimeError(f"the turn of session {head.session} changed inside a transaction")
    return head._replace(turn=token)


def opener_at(connection: Connection, place: Place) -> int:
    """Return the position of the message that opened the turn of the one here; 0 for none."""
    origin = messages.origin(connection, *place)
    return 0 if origin is None else origin.opener


def with_branch(connection: Connection, head: Head) -> Head:
    """Return `head` on a branch that may be extended there."""
    if head.at_tip:
        return head
    branch = branches.add(connection, head.session, head.branch, head.position)
    return head._replace(branch=branch, at_tip=True)
