"""The movable pointer that a session is: compare and set.

A head is compared by revision, branch, position and turn, and whatever moves it raises the
revision; so one that was remembered either still holds or is noticed to be stale by the very
statement that uses it. That the turn is compared there is what fences: a write of a holder that
has lost its turn finds another token, or none. Only a purge sets a head without moving it.
"""

from __future__ import annotations

import apsw

from .connect import Connection
from .errors import StorageDamaged
from .records import Head

__all__ = ["bury", "get", "hold", "is_at", "place", "swap"]

GET = """
SELECT session, revision, branch, position, at_tip, opener, redo, turn FROM heads WHERE session = ?
"""
PLACE = """
INSERT INTO heads (session, revision, branch, position, at_tip, opener, redo, turn, updated_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
SWAP = """
UPDATE heads
SET revision = ?, branch = ?, position = ?, at_tip = ?, opener = ?, redo = ?, turn = ?,
    updated_at = ?
WHERE session = ? AND revision = ? AND branch = ? AND position = ? AND turn IS ?
"""
IS_AT = """
SELECT 1 FROM heads
WHERE session = ? AND revision = ? AND branch = ? AND position = ?
      AND at_tip = ? AND opener = ? AND redo IS ? AND turn IS ?
"""
HOLD = "UPDATE heads SET turn = ? WHERE session = ? AND turn IS ?"
BURY = """
UPDATE heads SET revision = ?, position = 0, opener = 0, redo = NULL, turn = NULL WHERE session = ?
"""


def get(connection: apsw.Connection, session: int) -> Head:
    """Return the head of a session that exists."""
    row = connection.execute(GET, (session,)).get
    if not isinstance(row, tuple):
        raise StorageDamaged("reading", f"session {session} has no head")
    key, revision, branch, position, at_tip, opener, redo, turn = row
    return Head(key, revision, branch, position, at_tip == 1, opener, redo, turn)


def is_at(connection: apsw.Connection, head: Head) -> bool:
    """Return whether the session's head is `head`, as it was remembered, to the last field."""
    return connection.execute(IS_AT, head).get is not None


def place(connection: apsw.Connection, head: Head, now: float) -> None:
    """Set the first head of a session just made."""
    connection.execute(PLACE, (*head, now))


def swap(connection: Connection, before: Head, after: Head, now: float) -> bool:
    """Set the head to `after` if it still is `before`; return whether it was."""
    session, revision, branch, position, at_tip, opener, redo, turn = after
    connection.write(
        SWAP,
        (
            revision,
            branch,
            position,
            at_tip,
            opener,
            redo,
            turn,
            now,
            session,
            before.revision,
            before.branch,
            before.position,
            before.turn,
        ),
    )
    return connection.changes() == 1


def hold(connection: Connection, session: int, before: int | None, token: int | None) -> bool:
    """Let the turn `token` hold the session, or nobody, if `before` still does; return whether."""
    connection.write(HOLD, (token, session, before))
    return connection.changes() == 1


def bury(connection: apsw.Connection, session: int, revision: int) -> None:
    """Set the last revision of a session that ends, so that no remembered head holds."""
    connection.execute(BURY, (revision, session))
