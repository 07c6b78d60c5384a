"""Runs of messages, where each forks, and the walk to the root.

A branch holds messages at consecutive positions, beginning after `parent_position` of its
parent. So a path is a few ranges, and a position on it belongs to exactly one branch.
Branches are never changed; only `removal` deletes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import apsw

from .errors import StorageDamaged
from .places import Place, Range

__all__ = [
    "Branch",
    "add",
    "find",
    "first_of",
    "get",
    "last_child_start",
    "locate",
    "of_session",
    "path",
    "ranges_beyond",
    "remove",
]

ADD = "INSERT INTO branches (session, parent, parent_position) VALUES (?, ?, ?)"
GET = "SELECT session, parent, parent_position FROM branches WHERE id = ?"
FIRST = "SELECT id, parent_position FROM branches WHERE session = ? ORDER BY id LIMIT 1"
OF_SESSION = "SELECT id FROM branches WHERE session = ? ORDER BY id DESC"
LAST_CHILD_START = "SELECT max(parent_position) FROM branches WHERE parent = ?"
REMOVE = "DELETE FROM branches WHERE id = ?"


class Branch(NamedTuple):
    """Whose branch it is, and where it starts: after `parent_position` of `parent`."""

    session: int
    parent: int | None
    parent_position: int


def add(connection: apsw.Connection, session: int, parent: int | None, position: int) -> int:
    """Make a branch of `session` that starts after `position` of `parent`; return its number."""
    connection.execute(ADD, (session, parent, position))
    return connection.last_insert_rowid()


def find(connection: apsw.Connection, branch: int) -> Branch | None:
    """Return the branch of this number; None if it was removed."""
    row = connection.execute(GET, (branch,)).get
    return Branch(*row) if isinstance(row, tuple) else None


def get(connection: apsw.Connection, branch: int) -> Branch:
    """Return the branch of this number, which must exist."""
    found = find(connection, branch)
    if found is None:
        raise StorageDamaged("reading", f"branch {branch} is missing")
    return found


def locate(connection: apsw.Connection, branch: int, position: int) -> int:
    """Return the branch on the path through `branch` that holds the message at `position`.

    For position 0 that is the branch at the root.
    """
    while True:
        _, parent, parent_position = get(connection, branch)
        if parent is None or position > parent_position:
            return branch
        branch = parent


def path(connection: apsw.Connection, branch: int, position: int) -> Iterator[Range]:
    """Yield the ranges from the head (`branch`, `position`) to the root: the newest first."""
    at: int | None = branch
    while at is not None:
        _, parent, parent_position = get(connection, at)
        if position > parent_position:
            yield Range(at, parent_position + 1, position)
            position = parent_position
        at = parent


def ranges_beyond(connection: apsw.Connection, path_from: Place, path_to: Place) -> list[Range]:
    """Return what is on the path to `path_from` and not on the path to `path_to`.

    Climbs from both only to where they meet. A branch is younger than its parent, so of two
    different ones the younger cannot be on the other's way to the root.
    """
    beyond: list[Range] = []
    (branch, position), (other, kept) = path_from, path_to
    while branch != other:
        if branch > other:
            _, parent, start = get(connection, branch)
            if position > start:
                beyond.append(Range(branch, start + 1, position))
            if parent is None:
                return beyond
            branch, position = parent, min(position, start)
        else:
            _, parent, start = get(connection, other)
            other, kept = (0, 0) if parent is None else (parent, min(kept, start))
    start = get(connection, branch).parent_position
    if position > max(kept, start):
        beyond.append(Range(branch, max(kept, start) + 1, position))
    return beyond


def first_of(connection: apsw.Connection, session: int) -> Place:
    """Return where `session` began: the start of its first branch."""
    row = connection.execute(FIRST, (session,)).get
    if not isinstance(row, tuple):
        raise StorageDamaged("reading", f"session {session} has no branch")
    return Place(*row)


def of_session(connection: apsw.Connection, session: int) -> list[int]:
    """Return the branches of `session`, the newest first: children before their parents."""
    return [id for (id,) in connection.execute(OF_SESSION, (session,))]


def last_child_start(connection: apsw.Connection, branch: int) -> int | None:
    """Return the last position after which another branch starts on `branch`; None for none."""
    position = connection.execute(LAST_CHILD_START, (branch,)).get
    return position if isinstance(position, int) else None


def remove(connection: apsw.Connection, branch: int) -> None:
    """Delete the branch; only inside `removal`, or the guard refuses."""
    connection.execute(REMOVE, (branch,))
