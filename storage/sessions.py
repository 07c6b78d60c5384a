"""Who the sessions are: their ids, their meta and policy, and the tombstones of the deleted.

A deleted session leaves its row, which keeps its last revision. Its id may live again in a
new row, whose revisions start above; the row's key tells the two lives apart.
"""

from __future__ import annotations

import apsw

__all__ = [
    "add",
    "born",
    "bury",
    "forget_history",
    "id_of",
    "is_alive",
    "key_of",
    "last_life",
    "policy",
    "set_meta",
    "set_policy",
]

KEY_OF = "SELECT key FROM sessions WHERE id = ? AND buried IS NULL"
ID_OF = "SELECT id FROM sessions WHERE key = ?"
LAST_LIFE = "SELECT max(buried) FROM sessions WHERE id = ? AND buried IS NOT NULL"
ADD = "INSERT INTO sessions (id, born, created_at, meta) VALUES (?, ?, ?, ?)"
SET_META = "UPDATE sessions SET meta = ? WHERE key = ?"
BURY = "UPDATE sessions SET buried = ?, meta = NULL WHERE key = ?"
FORGET_HISTORY = "UPDATE sessions SET born = ? WHERE key = ?"
BORN = "SELECT born FROM sessions WHERE key = ?"
POLICY = "SELECT policy FROM sessions WHERE key = ?"
SET_POLICY = "UPDATE sessions SET policy = ? WHERE key = ?"
IS_ALIVE = "SELECT 1 FROM sessions WHERE key = ? AND buried IS NULL"


def key_of(connection: apsw.Connection, id: str) -> int | None:
    """Return the key of the living session `id`; None if there is none."""
    key = connection.execute(KEY_OF, (id,)).get
    return key if isinstance(key, int) else None


def id_of(connection: apsw.Connection, session: int) -> str:
    """Return the id of a session that is or was there."""
    id = connection.execute(ID_OF, (session,)).get
    assert isinstance(id, str)
    return id


def last_life(connection: apsw.Connection, id: str) -> int:
    """Return the last revision of the deleted sessions that were called `id`; 0 for none."""
    revision = connection.execute(LAST_LIFE, (id,)).get
    return revision if isinstance(revision, int) else 0


def add(connection: apsw.Connection, id: str, born: int, meta: bytes | None, now: float) -> int:
    """Make the session `id`, whose first revision is `born`; return its key."""
    connection.execute(ADD, (id, born, now, meta))
    return connection.last_insert_rowid()


def set_meta(connection: apsw.Connection, session: int, meta: bytes) -> None:
    """Replace the meta of a living session."""
    connection.execute(SET_META, (meta, session))


def bury(connection: apsw.Connection, session: int, revision: int) -> None:
    """Make the session a tombstone that keeps `revision`."""
    connection.execute(BURY, (revision, session))


def forget_history(connection: apsw.Connection, session: int, revision: int) -> None:
    """Let nothing go back before `revision`."""
    connection.execute(FORGET_HISTORY, (revision, session))


def born(connection: apsw.Connection, session: int) -> int:
    """Return the first revision that `session` can be restored to."""
    revision = connection.execute(BORN, (session,)).get
    assert isinstance(revision, int)
    return revision


def is_alive(connection: apsw.Connection, session: int) -> bool:
    """Return False if the session is a tombstone."""
    return connection.execute(IS_ALIVE, (session,)).get is not None


def policy(connection: apsw.Connection, session: int) -> str | None:
    """Return what becomes of messages posted mid-turn to this session; None for the usual."""
    found = connection.execute(POLICY, (session,)).get
    return found if isinstance(found, str) else None


def set_policy(connection: apsw.Connection, session: int, policy: str | None) -> None:
    """Set what becomes of messages posted mid-turn to this session."""
    connection.execute(SET_POLICY, (policy, session))
