"""Delete and purge: the only two that remove rows.

A row goes when nobody can reach it any more: not the live transcript of a session that is
kept, and no branch that starts behind it. Branches are looked at newest first, so a child is
always settled before its parent. The guard triggers let deletions through only in here, and
`secure_delete` on the writing connection overwrites what goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import apsw

from . import branches, heads, messages, moves, sessions
from .asked import Asked, Changed
from .records import Deleted, Purged
from .schema import define_guard
from .steps import arrive

__all__ = ["delete", "purge"]


def delete(connection: apsw.Connection, asked: Asked) -> Changed[Deleted | None]:
    """End the session; None if there is none. What a fork reaches stays, all else is removed.

    What was pending goes with it. A tombstone keeps the revision.
    """
    key = sessions.key_of(connection, asked.id)
    if key is None:
        return Changed(None, None)
    head = heads.get(connection, key)
    last = head.revision + 1
    with _removing(connection):
        moves.remove_all(connection, head.session)
        removed = 0
        for branch in branches.of_session(connection, head.session):
            removed += _trim(connection, branch, None)
        sessions.bury(connection, head.session, last)
        heads.bury(connection, head.session, last)
    return Changed(Deleted(removed, last), None)


def purge(connection: apsw.Connection, asked: Asked) -> Changed[Purged]:
    """Remove for ever what is off the live path and in no fork, and the history of moves."""
    head = arrive(connection, asked)
    if head is None:
        return Changed(Purged(0), None)
    kept = {
        part.branch: part.last for part in branches.path(connection, head.branch, head.position)
    }
    kept.setdefault(head.branch, head.position)
    with _removing(connection):
        moves.remove_all(connection, head.session)
        removed = 0
        for branch in branches.of_session(connection, head.session):
            removed += _trim(connection, branch, kept.get(branch))
        sessions.forget_history(connection, head.session, head.revision)
        heads.forget_redo(connection, head.session)
        after = head._replace(redo=None)
        moves.record(connection, "purge", after, after, asked.now)
    return Changed(Purged(removed), after)


def _trim(connection: apsw.Connection, branch: int, keep: int | None) -> int:
    """Remove what `branch` holds after `keep` and after the last start of a child.

    None keeps nothing: a branch without children then goes whole, and with it what it alone
    kept alive of sessions that were deleted before. Returns how many messages were removed.
    """
    starts = branches.child_starts(connection, branch)
    removed = messages.remove_after(connection, branch, max([keep or 0, *starts]))
    if keep is None and not starts:
        parent = branches.get(connection, branch).parent
        branches.remove(connection, branch)
        if parent is not None:
            owner = branches.get(connection, parent).session
            if not sessions.is_alive(connection, owner):
                removed += _trim(connection, parent, None)
    return removed


@contextmanager
def _removing(connection: apsw.Connection) -> Iterator[None]:
    define_guard(connection, allowed=True)
    try:
        yield
    finally:
        define_guard(connection, allowed=False)
