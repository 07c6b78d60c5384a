"""The log of every change of a head other than by appending: a session's reflog.

Kept for ever. The redo stack lies in it as a linked list: a session's `redo` names the undo
that a redo would take back, and that undo's `redo_below` the next one. So redo costs the same
after a thousand moves; walking the log to pair undos with redos did not.
"""

from __future__ import annotations

from typing import NamedTuple

import apsw

from .errors import StorageDamaged
from .places import Place
from .records import Head, Move, MoveKind, State

__all__ = [
    "Taken",
    "all_of",
    "first_after",
    "last_place_on",
    "last_until",
    "record",
    "remove_all",
    "taken",
    "undone",
]

RECORD = """
INSERT INTO moves (session, revision, kind, from_branch, from_position, to_branch, to_position,
                   redo_below, at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
UNDONE = (
    "SELECT from_branch, from_position, redo_below FROM moves WHERE session = ? AND revision = ?"
)
LAST_UNTIL = """
SELECT revision, to_branch, to_position FROM moves
WHERE session = ? AND revision <= ? ORDER BY revision DESC LIMIT 1
"""
FIRST_AFTER = """
SELECT from_branch, from_position FROM moves
WHERE session = ? AND revision > ? ORDER BY revision LIMIT 1
"""
ALL = """
SELECT revision, kind, from_position, to_position, at FROM moves WHERE session = ? ORDER BY revision
"""
TAKEN = """
SELECT kind, from_branch, from_position, to_branch, to_position
FROM moves WHERE session = ? ORDER BY revision
"""
LAST_PLACE_ON = """
SELECT max(position) FROM (
    SELECT from_position AS position FROM moves WHERE session = ?1 AND from_branch = ?2
    UNION ALL SELECT to_position FROM moves WHERE session = ?1 AND to_branch = ?2
)
"""
REMOVE_ALL = "DELETE FROM moves WHERE session = ?"

STATE_AFTER: dict[str, State] = {
    "undo": "rewound",
    "retry": "rewound",
    "redo": "rewound",
    "restore": "rewound",
    "purge": "rewound",
    "lost": "rewound",
    "rewrite": "replaced",
    "compaction": "compacted",
}


class Taken(NamedTuple):
    """One move: what it leaves of the path `before` is in `state`, unless it is on `after`."""

    state: State
    before: Place
    after: Place


def record(
    connection: apsw.Connection, kind: MoveKind, before: Head, after: Head, now: float
) -> None:
    """Log the move from `before` to `after`, under the revision of `after`."""
    connection.execute(
        RECORD,
        (
            after.session,
            after.revision,
            kind,
            before.branch,
            before.position,
            after.branch,
            after.position,
            before.redo,
            now,
        ),
    )


def undone(connection: apsw.Connection, session: int, revision: int) -> tuple[Place, int | None]:
    """Return where the undo at `revision` came from, and the redo that lies below it."""
    row = connection.execute(UNDONE, (session, revision)).get
    if not isinstance(row, tuple):
        raise StorageDamaged("reading", f"session {session} has no move at revision {revision}")
    branch, position, below = row
    return Place(branch, position), below


def last_until(
    connection: apsw.Connection, session: int, revision: int
) -> tuple[int, Place] | None:
    """Return the revision of the last move up to `revision` and where it went; None for none."""
    row = connection.execute(LAST_UNTIL, (session, revision)).get
    return (row[0], Place(*row[1:])) if isinstance(row, tuple) else None


def first_after(connection: apsw.Connection, session: int, revision: int) -> Place | None:
    """Return where the first move after `revision` came from, None if there was none."""
    row = connection.execute(FIRST_AFTER, (session, revision)).get
    return Place(*row) if isinstance(row, tuple) else None


def all_of(connection: apsw.Connection, session: int) -> list[Move]:
    """Return every move of `session`, oldest first."""
    return [Move(*row) for row in connection.execute(ALL, (session,))]


def taken(connection: apsw.Connection, session: int) -> list[Taken]:
    """Return every move of `session` as what it took off the live path, oldest first."""
    return [
        Taken(STATE_AFTER[kind], Place(*row[:2]), Place(*row[2:]))
        for kind, *row in connection.execute(TAKEN, (session,))
    ]


def last_place_on(connection: apsw.Connection, session: int, branch: int) -> int | None:
    """Return the last position of `branch` where a move of `session` began or ended; or None."""
    position = connection.execute(LAST_PLACE_ON, (session, branch)).get
    return position if isinstance(position, int) else None


def remove_all(connection: apsw.Connection, session: int) -> None:
    """Delete the log of `session`; only inside `removal`, or the guard refuses."""
    connection.execute(REMOVE_ALL, (session,))
