"""The number of each open writer's last batch: how a COMMIT of unknown outcome is found out."""

from __future__ import annotations

import apsw

__all__ = ["forget", "last", "mark", "writers"]

MARK = """
INSERT INTO batches (writer, last) VALUES (?1, ?2) ON CONFLICT (writer) DO UPDATE SET last = ?2
"""
LAST = "SELECT last FROM batches WHERE writer = ?"
WRITERS = "SELECT writer FROM batches"
FORGET = "DELETE FROM batches WHERE writer = ?"


def mark(connection: apsw.Connection, writer: int, batch: int) -> None:
    """Note, in the transaction of a batch, that it is `batch` of `writer`."""
    connection.execute(MARK, (writer, batch))


def last(connection: apsw.Connection, writer: int) -> int:
    """Return the last batch of `writer` that was committed; 0 if none was."""
    batch = connection.execute(LAST, (writer,)).get
    return batch if isinstance(batch, int) else 0


def forget(connection: apsw.Connection, writer: int) -> None:
    """Remove the note of a writer that ends well."""
    connection.execute(FORGET, (writer,))


def writers(connection: apsw.Connection) -> list[int]:
    """Return the writers that have a mark."""
    return [writer for (writer,) in connection.execute(WRITERS)]
