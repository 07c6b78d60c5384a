"""What was accepted for a session and not acted on yet: first in, first out.

A row stays until the turn that took it has ended well, so nothing that ends a process can lose
it. It remembers the message that it became, so that a second delivery does not append it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import apsw

from .clock import Moment
from .codec import Column, Columns

__all__ = [
    "InboxRow",
    "KeyedPost",
    "add",
    "by_key",
    "count",
    "finish",
    "front",
    "get",
    "give",
    "give_back",
    "interrupts",
    "last_place",
    "move_to_the_end",
    "of_session",
    "remove",
    "remove_all",
    "set_aside",
    "set_aside_after",
    "set_aside_spent",
    "try_later",
    "waiting_after",
]

ADD = """
INSERT INTO inbox (id, session, policy, opens_turn, accepted_at, attempts, caller_key,
                   role, content, extra)
VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?, ?)
"""
COLUMNS = """
SELECT place, id, session, policy, opens_turn, accepted_at, attempts, token, message, set_aside,
       retry_boot, retry_at, caller_key, role, content, extra
FROM inbox
"""
WAITING = COLUMNS + "WHERE session = ? AND set_aside IS NULL ORDER BY place"
OF_SESSION = COLUMNS + "WHERE session = ? ORDER BY place"
GET = COLUMNS + "WHERE session = ? AND id = ?"
SET_ASIDE_AFTER = COLUMNS + "WHERE place > ? AND set_aside IS NOT NULL ORDER BY place LIMIT ?"
COUNT = """
SELECT count(*) FROM (SELECT 1 FROM inbox WHERE session = ? AND set_aside IS NULL LIMIT ?)
"""
BY_KEY = """
SELECT id, accepted_at, policy, role, content, extra FROM inbox
WHERE session = ? AND caller_key = ?
"""
GIVE = "UPDATE inbox SET token = ?, message = ?, attempts = attempts + 1 WHERE place = ?"
GIVE_BACK = """
UPDATE inbox SET token = NULL, attempts = attempts - 1
WHERE session = ? AND set_aside IS NULL AND token = ?
"""
FINISH = "DELETE FROM inbox WHERE session = ? AND set_aside IS NULL AND token = ?"
SET_ASIDE_SPENT = """
UPDATE inbox SET token = NULL, set_aside = ?
WHERE session = ? AND set_aside IS NULL AND token = ? AND attempts >= ?
"""
TRY_LATER = """
UPDATE inbox SET retry_boot = ?, retry_at = ?
WHERE session = ? AND set_aside IS NULL AND token = ?
"""
SET_ASIDE = "UPDATE inbox SET token = NULL, set_aside = ? WHERE place = ?"
REMOVE = "DELETE FROM inbox WHERE place = ?"
REMOVE_ALL = "DELETE FROM inbox WHERE session = ?"
ADD_AGAIN = """
INSERT INTO inbox (id, session, policy, opens_turn, accepted_at, attempts, message, caller_key,
                   role, content, extra)
VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?)
"""
WAITING_AFTER = """
SELECT place, sessions.id FROM inbox JOIN sessions ON key = session
WHERE place > ? AND set_aside IS NULL ORDER BY place LIMIT ?
"""
INTERRUPTS = """
SELECT 1 FROM inbox
WHERE session = ? AND place > ? AND set_aside IS NULL AND policy = 'interrupt' LIMIT 1
"""
LAST_PLACE = "SELECT max(place) FROM inbox"
LAST_INTERRUPT = """
SELECT max(place) FROM inbox
WHERE session = ? AND set_aside IS NULL AND policy = 'interrupt'
"""


class InboxRow(NamedTuple):
    """A posted message as the table holds it."""

    place: int
    id: int
    session: int
    policy: str
    opens_turn: int
    accepted_at: float
    attempts: int
    token: int | None
    message: int | None
    set_aside: str | None
    retry_boot: str | None
    retry_at: float | None
    caller_key: str | None
    role: str
    content: Column
    extra: Column


class KeyedPost(NamedTuple):
    """What a second post of the same key needs to know of the first."""

    id: int
    accepted_at: float
    policy: str
    columns: Columns


def add(
    connection: apsw.Connection,
    id: int,
    session: int,
    policy: str,
    opens_turn: bool,
    now: float,
    key: str | None,
    columns: Columns,
) -> None:
    """Put a message at the end."""
    connection.execute(ADD, (id, session, policy, opens_turn, now, key, *columns))


def count(connection: apsw.Connection, session: int, most: int) -> int:
    """Return how many messages wait or are acted on, and no more than `most`."""
    number = connection.execute(COUNT, (session, most)).get
    assert isinstance(number, int)
    return number


def by_key(connection: apsw.Connection, session: int, key: str) -> KeyedPost | None:
    """Return the post under the caller's `key` that is here still."""
    row = connection.execute(BY_KEY, (session, key)).get
    if row is None:
        return None
    assert isinstance(row, tuple)
    id, accepted_at, policy, role, content, extra = row
    return KeyedPost(id, accepted_at, policy, Columns(role, content, extra))


def get(connection: apsw.Connection, session: int, id: int) -> InboxRow | None:
    """Return the post of this id; None if it is not here any more."""
    row = connection.execute(GET, (session, id)).get
    return InboxRow(*row) if isinstance(row, tuple) else None


def front(connection: apsw.Connection, session: int) -> list[InboxRow]:
    """Return what the next turn takes: the first that waits.

    If one that interrupts waits, all up to the last such: what stood before it would be interrupted
    at once. Else, if the first is to be collected, those right behind it that are too.
    """
    last = connection.execute(LAST_INTERRUPT, (session,)).get
    rows: list[InboxRow] = []
    for values in connection.execute(WAITING, (session,)):
        row = InboxRow(*values)
        together = not rows or rows[-1].policy == row.policy == "collect"
        if not together and (not isinstance(last, int) or row.place > last):
            break
        rows.append(row)
    return rows


def of_session(connection: apsw.Connection, session: int) -> Iterator[InboxRow]:
    """Yield all that is here of `session`, in order, what was set aside included."""
    return (InboxRow(*row) for row in connection.execute(OF_SESSION, (session,)))


def set_aside_after(connection: apsw.Connection, place: int, limit: int) -> Iterator[InboxRow]:
    """Yield what was set aside, of all sessions, behind `place`."""
    return (InboxRow(*row) for row in connection.execute(SET_ASIDE_AFTER, (place, limit)))


def waiting_after(connection: apsw.Connection, place: int, limit: int) -> list[tuple[int, str]]:
    """Return place and session's id of what waits behind `place`, in order."""
    return [(place, id) for place, id in connection.execute(WAITING_AFTER, (place, limit))]


def last_place(connection: apsw.Connection) -> int:
    """Return the last place that is taken in any inbox; 0 for none."""
    place = connection.execute(LAST_PLACE).get
    return place if isinstance(place, int) else 0


def interrupts(connection: apsw.Connection, session: int, after: int) -> bool:
    """Return whether a message that interrupts stands behind the place `after`."""
    return connection.execute(INTERRUPTS, (session, after)).get is not None


def give(connection: apsw.Connection, place: int, token: int, message: int) -> None:
    """Note that the turn `token` takes this one, as the message of that id."""
    connection.execute(GIVE, (token, message, place))


def give_back(connection: apsw.Connection, session: int, token: int) -> None:
    """Let what the turn took wait again, as if it had not been tried."""
    connection.execute(GIVE_BACK, (session, token))


def try_later(connection: apsw.Connection, session: int, token: int, when: Moment) -> None:
    """Let what the turn took wait again, for another try at `when`."""
    connection.execute(TRY_LATER, (*when, session, token))


def set_aside_spent(
    connection: apsw.Connection, session: int, token: int, most: int, why: str
) -> int:
    """Set aside what the turn took and was tried `most` times; return how many those were."""
    connection.execute(SET_ASIDE_SPENT, (why, session, token, most))
    return connection.changes()


def finish(connection: apsw.Connection, session: int, token: int) -> None:
    """Remove what the turn took: it was acted on."""
    connection.execute(FINISH, (session, token))


def set_aside(connection: apsw.Connection, place: int, why: str) -> None:
    """Deliver this one no more."""
    connection.execute(SET_ASIDE, (why, place))


def move_to_the_end(connection: apsw.Connection, row: InboxRow) -> None:
    """Let the post wait again, behind all others, as if it had not been tried."""
    connection.execute(REMOVE, (row.place,))
    connection.execute(
        ADD_AGAIN,
        (
            row.id,
            row.session,
            row.policy,
            row.opens_turn,
            row.accepted_at,
            row.message,
            row.caller_key,
            row.role,
            row.content,
            row.extra,
        ),
    )


def remove(connection: apsw.Connection, place: int) -> None:
    """Remove one post."""
    connection.execute(REMOVE, (place,))


def remove_all(connection: apsw.Connection, session: int) -> None:
    """Remove what is here of a session that ends."""
    connection.execute(REMOVE_ALL, (session,))
