"""The movable pointer that a session is: compare and set.

A head is compared by revision, branch and position, and whatever moves it raises the revision;
so one that was remembered either still holds or is noticed to be stale by the very statement
that uses it. Only a purge sets a head without moving it.
"""

from __future__ import annotations

import apsw

from .connect import Connection
from .errors import StorageDamaged
from .records import Head

__all__ = ["bury", "get", "place", "swap"]

GET = """
SELECT session, revision, branch, position, at_tip, opener, redo FROM heads WHERE session = ?
"""
PLACE = """
INSERT INTO heads (session, revision, branch, position, at_tip, opener, redo, updated_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
SWAP = """
UPDATE heads
SET revision = ?, branch = ?, position = ?, at_tip = ?, opener = ?, redo = ?, updated_at = ?
WHERE session = ? AND revision = ? AND branch = ? AND position = ?
"""
BURY = "UPDATE heads SET revision = ?, position = 0, opener = 0, redo = NULL WHERE session = ?"


def get(connection: apsw.Connection, session: int) -> Head:
    """Return the head of a session that exists."""
    row = connection.execute(GET, (session,)).get
    if not isinstance(row, tuple):
        raise StorageDamaged("reading", f"session {session} has no head")
    key, revision, branch, position, at_tip, opener, redo = row
    return Head(key, revision, branch, position, at_tip == 1, opener, redo)


def place(connection: apsw.Connection, head: Head, now: float) -> None:
    """Set the first head of a session just made."""
    connection.execute(PLACE, (*head, now))


def swap(connection: Connection, before: Head, after: Head, now: float) -> bool:
    """Set the head to `after` if it still is `before`; return whether it was."""
    session, revision, branch, position, at_tip, opener, redo = after
    connection.write(
        SWAP,
        (
            revision,
            branch,
            position,
            at_tip,
            opener,
            redo,
            now,
            session,
            before.revision,
            before.branch,
            before.position,
        ),
    )
    return connection.changes() == 1


def bury(connection: apsw.Connection, session: int, revision: int) -> None:
    """Set the last revision of a session that ends, so that no remembered head holds."""
    connection.execute(BURY, (revision, session))
