"""Delete and purge: the only two that remove rows.

A row goes when nobody can reach it any more. Its session reaches the places where its head
stands and where its history of moves has been; a branch that starts behind it reaches it for
whoever owns that branch. Branches are looked at newest first, so a child is always settled
before its parent. The guard triggers let deletions through only in here, and `secure_delete`
on the writing connection overwrites what goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import contextmanager

from . import branches, heads, inbox, messages, moves, sessions, turns
from .admission import arrive
from .asked import Asked, Changed
from .connect import Connection
from .reads import head_of
from .receipts import Deleted, Purged
from .records import Head
from .schema import define_guard
from .steps import swap, with_branch

__all__ = ["delete", "purge"]


def delete(connection: Connection, asked: Asked) -> Changed[Deleted | None]:
    """End the session; None if there is none. What a fork reaches stays, all else is removed.

    What was pending goes with it, what its inbox holds, and the turn of whoever holds it. A
    tombstone keeps the revision.
    """
    head = head_of(connection, asked.id, None)
    if head is None:
        return Changed(None, None)
    last = head.revision + 1
    with _removing(connection):
        sessions.bury(connection, head.session, last)
        heads.bury(connection, head.session, last)
        if head.turn is not None:
            turns.remove(connection, head.turn)
        inbox.remove_all(connection, head.session)
        removed = _retire(connection, head.session)
    return Changed(Deleted(removed, last), None)


def purge(connection: Connection, asked: Asked) -> Changed[Purged]:
    """Remove for ever what is off the live path and in no fork, and the history of moves.

    Raises `TurnActive` while a turn is held.
    """
    head = arrive(connection, asked)
    if head is None:
        return Changed(Purged(0), None)
    with _removing(connection):
        after = _at_home(connection, head)._replace(redo=None)
        swap(connection, head, after, asked.now)
        removed = _retire(connection, head.session)
        sessions.forget_history(connection, head.session, head.revision)
        moves.record(connection, "purge", after, after, asked.now)
    return Changed(Purged(removed), after)


def _at_home(connection: Connection, head: Head) -> Head:
    """Return `head` at the same place, on a branch of its own session.

    A fork that went back before its start stands on a branch of its source. Only a branch of
    its own keeps the source from removing what it stands on.
    """
    if branches.get(connection, head.branch).session == head.session:
        return head
    return with_branch(connection, head)


def _retire(connection: Connection, session: int) -> int:
    """Forget the moves of `session`, and remove what nobody reaches then; return how much.

    A branch that is not reached at all goes whole, and its parent is looked at after it,
    whoever owns that, for the branch may have been what kept some of it. A parent is older than
    its children, so that the youngest comes first means that each is looked at once.
    """
    moves.remove_all(connection, session)
    removed = 0
    seen = set(branches.of_session(connection, session))
    youngest_first = [-branch for branch in seen]
    heapq.heapify(youngest_first)
    while youngest_first:
        branch = -heapq.heappop(youngest_first)
        owner, parent, _ = branches.get(connection, branch)
        reached = _reached(connection, branch, owner)
        removed += messages.remove_after(connection, branch, reached or 0)
        if reached is None:
            branches.remove(connection, branch)
            if parent is not None and parent not in seen:
                seen.add(parent)
                heapq.heappush(youngest_first, -parent)
    return removed


def _reached(connection: Connection, branch: int, owner: int) -> int | None:
    """Return the last position of `branch` that somebody reaches; None if nobody needs it."""
    reached = [branches.last_child_start(connection, branch)]
    if sessions.is_alive(connection, owner):
        head = heads.get(connection, owner)
        reached.append(head.position if head.branch == branch else None)
        reached.append(moves.last_place_on(connection, owner, branch))
    return max((position for position in reached if position is not None), default=None)


@contextmanager
def _removing(connection: Connection) -> Iterator[None]:
    define_guard(connection, allowed=True)
    try:
        yield
    finally:
        define_guard(connection, allowed=False)
