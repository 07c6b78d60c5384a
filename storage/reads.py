"""What can be asked of a store: each question as a function of a reading connection.

The caller gives a connection with a read transaction open, so that all statements of one
question see the same moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice, takewhile
from typing import cast

import apsw

from . import branches, heads, inbox, messages, moves, sessions, turns
from .clock import Moment
from .codec import decode_message, decode_object
from .errors import Closed
from .inbox import InboxRow
from .owners import Owners
from .places import Range
from .records import (
    Head,
    Holder,
    InboxMessage,
    Move,
    Policy,
    SessionInfo,
    State,
    StoredMessage,
    Transcript,
)

__all__ = [
    "all_messages",
    "head_of",
    "history",
    "holder",
    "in_inbox",
    "info",
    "listed",
    "set_aside",
    "transcript",
    "troubled",
]


INFO = """
SELECT id, revision, position, meta, created_at, updated_at
FROM sessions JOIN heads ON session = key
WHERE key = ?
"""
LIST = """
SELECT id, revision, position, meta, created_at, updated_at
FROM sessions JOIN heads ON session = key
WHERE buried IS NULL AND id > ? ORDER BY id LIMIT ?
"""


def head_of(connection: apsw.Connection, id: str, life: int | None) -> Head | None:
    """Return the head of the session; None if there is none yet.

    Raises `Closed` if the session that the caller means, number `life`, was deleted.
    """
    key = sessions.key_of(connection, id)
    head = None if key is None else heads.get(connection, key)
    if life is not None and (head is None or head.session != life):
        raise Closed("session", id)
    return head


def transcript(
    connection: apsw.Connection,
    id: str,
    head: Head | None,
    *,
    last: int | None,
    after: int,
    hidden: bool,
) -> Transcript:
    """Return the messages after position `after`, the `last` newest of them if that is given.

    Hidden rows are left out, and do not count, unless `hidden`. No more rows are read than are
    returned, hidden ones apart.
    """
    if head is None:
        return Transcript(id, 0, 0, ())
    parts = list(
        takewhile(
            lambda part: part.last > after, branches.path(connection, head.branch, head.position)
        )
    )
    if parts:
        parts[-1] = parts[-1]._replace(first=max(parts[-1].first, after + 1))
    rows = (
        messages.load(connection, reversed(parts))
        if last is None
        else messages.load_backwards(connection, parts)
    )
    if not hidden:
        rows = (row for row in rows if not row[6])
    found = messages.stored(rows if last is None else islice(rows, last))
    if last is not None:
        found.reverse()
    return Transcript(id, head.revision, head.position, tuple(found))


def all_messages(connection: apsw.Connection, head: Head | None) -> list[StoredMessage]:
    """Return every message that the session ever had on its path, with its state.

    Ordered as they were written. A message off the live path is in
    the state that the last move which took it off says.
    """
    if head is None:
        return []
    states: dict[int, list[tuple[Range, State]]] = {}
    taken_off = [
        (part, move.state)
        for move in moves.taken(connection, head.session)
        for part in branches.ranges_beyond(connection, move.before, move.after)
    ]
    live: list[tuple[Range, State]] = [
        (part, "live") for part in branches.path(connection, head.branch, head.position)
    ]
    for part, what in taken_off + live:  # the later one decides
        states.setdefault(part.branch, []).append((part, what))
    found: list[StoredMessage] = []
    for branch, parts in states.items():
        span = Range(
            branch, min(part.first for part, _ in parts), max(part.last for part, _ in parts)
        )
        for message in messages.stored(messages.load(connection, [span])):
            state = _last_state(parts, message.position)
            if state is not None:
                found.append(message._replace(state=state))
    found.sort(key=lambda message: message.id or 0)
    return found


def _last_state(parts: list[tuple[Range, State]], position: int) -> State | None:
    for part, state in reversed(parts):
        if part.first <= position <= part.last:
            return state
    return None


def history(connection: apsw.Connection, head: Head | None) -> list[Move]:
    """Return every move of the session, oldest first."""
    return [] if head is None else moves.all_of(connection, head.session)


def info(connection: apsw.Connection, head: Head | None) -> SessionInfo | None:
    """Return what a list shows of the session; None if there is none."""
    if head is None:
        return None
    (found,) = map(_info, connection.execute(INFO, (head.session,)))
    return found


def listed(connection: apsw.Connection, after: str, limit: int) -> list[SessionInfo]:
    """Return at most `limit` sessions whose ids come after `after`, ordered by id."""
    return [_info(row) for row in connection.execute(LIST, (after, limit))]


def _info(row: tuple[str, int, int, bytes | None, float, float]) -> SessionInfo:
    id, revision, position, meta, created_at, updated_at = row
    return SessionInfo(id, revision, position, decode_object(meta), created_at, updated_at)


def holder(
    connection: apsw.Connection, head: Head | None, now: Moment, owners: Owners
) -> Holder | None:
    """Return who holds the session's turn; None if nobody does."""
    if head is None or head.turn is None:
        return None
    row = turns.get(connection, head.turn)
    over = turns.is_over(row, now, owner_lives=owners.is_alive(row.owner))
    return Holder(row.holder, row.since, 0.0 if over else turns.remaining_s(row, now))


def in_inbox(connection: apsw.Connection, id: str, head: Head | None) -> list[InboxMessage]:
    """Return all that the session's inbox holds, in order."""
    if head is None:
        return []
    return [_in_inbox(id, row) for row in inbox.of_session(connection, head.session)]


def set_aside(connection: apsw.Connection, after: int, limit: int) -> list[InboxMessage]:
    """Return what was set aside, of all sessions, behind place `after`."""
    return [
        _in_inbox(sessions.id_of(connection, row.session), row)
        for row in inbox.set_aside_after(connection, after, limit)
    ]


def troubled(
    connection: apsw.Connection, held: Iterable[tuple[int, int]]
) -> tuple[Collection[int], Collection[int]]:
    """Of turns, given as session and token: the tokens that were lost, and those interrupted."""
    lost, interrupted = [], []
    for session, token in held:
        seen = turns.seen(connection, session, token)
        if seen is None:
            lost.append(token)
        elif inbox.interrupts(connection, session, seen):
            interrupted.append(token)
    return lost, interrupted


def _in_inbox(id: str, row: InboxRow) -> InboxMessage:
    return InboxMessage(
        id=row.id,
        session=id,
        body=decode_message(row.role, row.content, row.extra),
        key=row.caller_key,
        policy=cast(Policy, row.policy),
        accepted_at=row.accepted_at,
        attempts=row.attempts,
        taken=row.token is not None,
        set_aside=row.set_aside,
        place=row.place,
    )
