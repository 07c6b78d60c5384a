"""The rows of the conversation: written once, read in ranges, never changed.

Nothing here decides where a message goes; that is `changes`. Positions are absolute, so what
is asked of this table is always a run of one branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import apsw

from .codec import Column, Columns, decode_message
from .connect import Connection
from .places import Place, Range
from .records import State, StoredMessage

__all__ = [
    "Draft",
    "KeyedRow",
    "Origin",
    "by_id",
    "by_key",
    "insert",
    "last_between",
    "load",
    "load_backwards",
    "may_call",
    "origin",
    "place_of",
    "read",
    "remove_after",
    "stored",
    "structured",
    "tip",
]

INSERT = """
INSERT INTO messages (session, branch, position, revision, opener, hidden, append_id, created_at,
                      caller_key, role, content, extra, synthetic)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
COLUMNS = """
SELECT role, content, extra, id, position, revision, hidden, opener, caller_key, created_at,
       append_id, synthetic
FROM messages
"""
RANGE = COLUMNS + "WHERE branch = ? AND position BETWEEN ? AND ? ORDER BY position"
RANGE_BACKWARDS = RANGE + " DESC"
STRUCTURED = """
SELECT role, content, extra FROM messages
WHERE branch = ? AND position BETWEEN ? AND ? AND (extra IS NOT NULL OR typeof(content) = 'blob')
ORDER BY position
"""
MAY_CALL = """
SELECT 1 FROM messages
WHERE branch = ? AND position BETWEEN ? AND ? AND role = 'assistant'
      AND (extra IS NOT NULL OR typeof(content) = 'blob')
LIMIT 1
"""
BY_ID = COLUMNS + "WHERE id = ?"
PLACE_OF = "SELECT branch, position FROM messages WHERE id = ?"
BY_KEY = """
SELECT id, branch, position, revision, append_id, created_at, role, content, extra
FROM messages WHERE session = ? AND caller_key = ?
"""
ORIGIN = "SELECT session, revision, opener FROM messages WHERE branch = ? AND position = ?"
REMOVE = "DELETE FROM messages WHERE branch = ? AND position > ?"
TIP = "SELECT max(position) FROM messages WHERE branch = ?"
LAST_BETWEEN = """
SELECT position FROM messages
WHERE branch = ? AND revision > ? AND revision <= ? ORDER BY position DESC LIMIT 1
"""

Row: TypeAlias = tuple[str, Column, Column, int, int, int, int, int, str | None, float, int, int]


class Draft(NamedTuple):
    """A message that has been checked and encoded and has no place yet."""

    role: str
    content: Column
    extra: Column
    hidden: bool = False
    opens_turn: bool = False
    key: str | None = None
    synthetic: bool = False


class KeyedRow(NamedTuple):
    """What a second append of the same key needs to know of the first."""

    id: int
    branch: int
    position: int
    revision: int
    append_id: int
    created_at: float
    columns: Columns


class Origin(NamedTuple):
    """Which append wrote a message, and which turn it belongs to."""

    session: int
    revision: int
    opener: int


def insert(
    connection: Connection,
    draft: Draft,
    session: int,
    branch: int,
    position: int,
    revision: int,
    opener: int,
    append_id: int,
    now: float,
) -> int:
    """Write `draft` at its place and return its id."""
    role, content, extra, hidden, _, key, synthetic = draft
    connection.write(
        INSERT,
        (
            session,
            branch,
            position,
            revision,
            opener,
            hidden,
            append_id,
            now,
            key,
            role,
            content,
            extra,
            synthetic,
        ),
    )
    return connection.last_insert_rowid()


def load(connection: apsw.Connection, parts: Iterable[Range]) -> Iterator[Row]:
    """Yield the rows of `parts` in the order given, each part oldest first."""
    for part in parts:
        yield from connection.execute(RANGE, part)


def load_backwards(connection: apsw.Connection, parts: Iterable[Range]) -> Iterator[Row]:
    """Yield the rows of `parts` in the order given, each part newest first.

    Rows are fetched as they are asked for: whoever stops early has read no more than that.
    """
    for part in parts:
        yield from connection.execute(RANGE_BACKWARDS, part)


def stored(rows: Iterable[Row], state: State = "live") -> list[StoredMessage]:
    """Return `rows` as the store's users know them."""
    return [
        StoredMessage(
            decode_message(role, content, extra),
            id,
            position,
            revision,
            hidden == 1,
            opener == position,
            key,
            created_at,
            append_id,
            state,
            False,
            synthetic == 1,
        )
        for (
            role,
            content,
            extra,
            id,
            position,
            revision,
            hidden,
            opener,
            key,
            created_at,
            append_id,
            synthetic,
        ) in rows
    ]


def read(connection: apsw.Connection, branch: int, position: int) -> StoredMessage:
    """Return the one message at a place that is known to exist."""
    (message,) = stored(connection.execute(RANGE, (branch, position, position)))
    return message


def by_key(connection: apsw.Connection, session: int, key: str) -> KeyedRow | None:
    """Return the message that `session` stored under the caller's `key`."""
    row = connection.execute(BY_KEY, (session, key)).get
    if row is None:
        return None
    assert isinstance(row, tuple)
    id, branch, position, revision, append_id, created_at, *columns = row
    return KeyedRow(id, branch, position, revision, append_id, created_at, Columns(*columns))


def may_call(connection: apsw.Connection, part: Range) -> bool:
    """Return whether a tool may be called in `part`, by an assistant that says more than a text."""
    return connection.execute(MAY_CALL, part).get is not None


def structured(connection: apsw.Connection, part: Range) -> Iterator[dict[str, object]]:
    """Yield the messages of `part` that are more than a role and a text, oldest first."""
    for row in connection.execute(STRUCTURED, part):
        yield decode_message(*row)


def by_id(connection: apsw.Connection, id: int) -> StoredMessage:
    """Return the message of this id, which is known to exist."""
    (message,) = stored(connection.execute(BY_ID, (id,)))
    return message


def place_of(connection: apsw.Connection, id: int) -> Place | None:
    """Return where the message of this id stands; None if it was removed."""
    row = connection.execute(PLACE_OF, (id,)).get
    return Place(*row) if isinstance(row, tuple) else None


def origin(connection: apsw.Connection, branch: int, position: int) -> Origin | None:
    """Return where the message here came from; None if none is here."""
    row = connection.execute(ORIGIN, (branch, position)).get
    return Origin(*row) if isinstance(row, tuple) else None


def remove_after(connection: apsw.Connection, branch: int, position: int) -> int:
    """Delete what `branch` holds after `position`; return how many messages that were.

    Only inside `removal`, or the guard refuses.
    """
    connection.execute(REMOVE, (branch, position))
    return connection.changes()


def tip(connection: apsw.Connection, branch: int) -> int:
    """Return the last position that `branch` holds itself; 0 if it holds none."""
    last = connection.execute(TIP, (branch,)).get
    return last if isinstance(last, int) else 0


def last_between(connection: apsw.Connection, branch: int, after: int, until: int) -> int | None:
    """Return the last position of `branch` written after revision `after`, up to `until`."""
    last = connection.execute(LAST_BETWEEN, (branch, after, until)).get
    return last if isinstance(last, int) else None
