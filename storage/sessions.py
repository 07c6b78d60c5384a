"""The sessions: who they are, and the movable pointer that each of them is.

The head is compared and set by revision, which every change raises by one, so a head that
was remembered either still holds or is noticed to be stale in the statement that uses it.
A deleted session leaves its row as a tombstone; its id may then live again in a new row,
whose revisions start above.
"""

from __future__ import annotations

from collections.abc import Iterator

import apsw

from .codec import decode_object
from .records import Head, SessionInfo

__all__ = [
    "born",
    "bury",
    "create",
    "forget_history",
    "head",
    "info",
    "is_alive",
    "listed",
    "set_branch",
    "set_meta",
    "swap_head",
]

HEAD = """
SELECT key, revision, branch, position, at_tip, opener, redo
FROM sessions WHERE id = ? AND deleted_at IS NULL
"""
SWAP_HEAD = """
UPDATE sessions
SET revision = ?, branch = ?, position = ?, at_tip = ?, opener = ?, redo = ?, updated_at = ?
WHERE key = ? AND revision = ? AND branch = ? AND position = ? AND deleted_at IS NULL
"""
LAST_LIFE = "SELECT max(revision) FROM sessions WHERE id = ? AND deleted_at IS NOT NULL"
CREATE = """
INSERT INTO sessions (id, revision, branch, position, at_tip, opener, born, meta, created_at, updated_at)
VALUES (?, ?, 0, ?, 1, ?, ?, ?, ?, ?)
"""
SET_BRANCH = "UPDATE sessions SET branch = ? WHERE key = ?"
SET_META = "UPDATE sessions SET meta = ? WHERE key = ?"
BURY = """
UPDATE sessions
SET deleted_at = ?, revision = revision + 1, meta = NULL, redo = NULL, position = 0, opener = 0
WHERE key = ?
"""
FORGET_HISTORY = "UPDATE sessions SET born = revision, redo = NULL WHERE key = ?"
BORN = "SELECT born FROM sessions WHERE key = ?"
IS_ALIVE = "SELECT 1 FROM sessions WHERE key = ? AND deleted_at IS NULL"
INFO = """
SELECT id, revision, position, meta, created_at, updated_at
FROM sessions WHERE deleted_at IS NULL AND id = ?
"""
LIST = """
SELECT id, revision, position, meta, created_at, updated_at
FROM sessions WHERE deleted_at IS NULL AND id > ? ORDER BY id LIMIT ?
"""


def head(connection: apsw.Connection, id: str) -> Head | None:
    """Return the head of the living session `id`, or None if there is none."""
    row = connection.execute(HEAD, (id,)).get
    if row is None:
        return None
    assert isinstance(row, tuple)
    key, revision, branch, position, at_tip, opener, redo = row
    return Head(key, revision, branch, position, at_tip == 1, opener, redo)


def swap_head(connection: apsw.Connection, before: Head, after: Head, now: float) -> bool:
    """Set the head to `after` if it still is `before`; return whether it was."""
    connection.execute(
        SWAP_HEAD,
        (
            after.revision,
            after.branch,
            after.position,
            after.at_tip,
            after.opener,
            after.redo,
            now,
            before.session,
            before.revision,
            before.branch,
            before.position,
        ),
    )
    return connection.changes() == 1


def create(
    connection: apsw.Connection,
    id: str,
    *,
    position: int,
    opener: int,
    meta: bytes | None,
    now: float,
) -> Head:
    """Make the session `id`, its head at `position` of a branch that `set_branch` names next."""
    last_life = connection.execute(LAST_LIFE, (id,)).get
    revision = last_life + 1 if isinstance(last_life, int) else 1
    connection.execute(CREATE, (id, revision, position, opener, revision, meta, now, now))
    return Head(connection.last_insert_rowid(), revision, 0, position, True, opener, None)


def set_branch(connection: apsw.Connection, session: int, branch: int) -> None:
    """Name the first branch of a session just made."""
    connection.execute(SET_BRANCH, (branch, session))


def set_meta(connection: apsw.Connection, session: int, meta: bytes) -> None:
    """Replace the meta of a living session."""
    connection.execute(SET_META, (meta, session))


def bury(connection: apsw.Connection, session: int, now: float) -> None:
    """Make the session a tombstone, its revision raised by one."""
    connection.execute(BURY, (now, session))


def forget_history(connection: apsw.Connection, session: int) -> None:
    """Let nothing go back before the revision that the session is at."""
    connection.execute(FORGET_HISTORY, (session,))


def born(connection: apsw.Connection, session: int) -> int:
    """Return the first revision that `session` can be restored to."""
    revision = connection.execute(BORN, (session,)).get
    assert isinstance(revision, int)
    return revision


def is_alive(connection: apsw.Connection, session: int) -> bool:
    """Return False if the session is a tombstone."""
    return connection.execute(IS_ALIVE, (session,)).get is not None


def info(connection: apsw.Connection, id: str) -> SessionInfo | None:
    """Return what is known of the living session `id`."""
    for row in connection.execute(INFO, (id,)):
        return _info(*row)
    return None


def listed(connection: apsw.Connection, after: str, limit: int) -> Iterator[SessionInfo]:
    """Yield at most `limit` living sessions whose ids come after `after`, ordered by id."""
    for row in connection.execute(LIST, (after, limit)):
        yield _info(*row)


def _info(
    id: str,
    revision: int,
    position: int,
    meta: bytes | None,
    created_at: float,
    updated_at: float,
) -> SessionInfo:
    return SessionInfo(id, revision, position, decode_object(meta), created_at, updated_at)
