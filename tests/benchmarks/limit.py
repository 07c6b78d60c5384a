"""The bare limit: what APSW can do with the same statements, and nothing else around them.

One connection, opened as the store opens its own, on a file with the store's tables, indexes
and triggers. For each message the two statements of an append to a known head inside a savepoint,
with values like the real ones; no actors, no event loop, no thread, no batch mark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import apsw

from turnkeeper.storage import Head, branches, connect, heads, messages, schema, sessions

__all__ = ["Branch", "append_all", "bare_store"]


class Branch(NamedTuple):
    """Where a session's messages go."""

    session: int
    branch: int


@contextmanager
def bare_store(path: Path, count: int) -> Iterator[tuple[apsw.Connection, list[Branch]]]:
    """Make a store with `count` empty sessions; lend a writing connection and where they are."""
    connect.create(path, schema.migrate)
    connection = connect.open_writer(path, synchronous="full", vfs=None)
    schema.define_guard(connection, allowed=False)
    now = time.time()
    made = []
    connection.execute("BEGIN IMMEDIATE")
    for number in range(count):
        session = sessions.add(connection, f"session-{number}", 1, b"{}", now)
        branch = branches.add(connection, session, None, 0)
        heads.place(connection, Head(session, 1, branch, 0, True, 0, None, None), now)
        made.append(Branch(session, branch))
    connection.execute("COMMIT")
    try:
        yield connection, made
    finally:
        connection.close()


def append_all(
    execute: Callable[..., object],
    where: Sequence[Branch],
    text: str,
    *,
    first: int,
    last: int,
    per_transaction: int,
) -> None:
    """Append positions `first` to `last` to every session, a position at a time.

    `execute` is a connection's, which makes a new cursor each time, or that of one cursor, which is
    faster. All in one loop, without a call of our own for a message: it is meant to be fast. The
    number of messages must be a multiple of `per_transaction`.
    """
    swap, insert = heads.SWAP, messages.INSERT
    append_id = 1 << 61  # as long as a real one
    written = 0
    for at in range(first, last + 1):
        before, revision = at - 1, at + 1
        for session, branch in where:
            if written % per_transaction == 0:
                execute("BEGIN IMMEDIATE")
            now = time.time()
            execute("SAVEPOINT operation")
            # Sets revision, branch, position, at_tip, opener, redo, turn, updated_at; compares the
            # rest: session, revision, branch, position, turn.
            execute(
                swap,
                (
                    revision,
                    branch,
                    at,
                    True,
                    at,
                    None,
                    None,
                    now,
                    session,
                    at,
                    branch,
                    before,
                    None,
                ),
            )
            execute(
                insert,
                (
                    session,
                    branch,
                    at,
                    revision,
                    at,
                    False,
                    append_id,
                    now,
                    None,
                    "user",
                    text,
                    None,
                    False,
                ),
            )
            execute("RELEASE operation")
            written += 1
            append_id += 1
            if written % per_transaction == 0:
                execute("COMMIT")
