"""Awaited appends of many sessions at once, as a share of what bare SQLite can do.

The limit: one APSW connection, the same file, tables and indexes, the same two statements for a
message inside a savepoint, transactions of 500 messages; no actors, no event loop. Both are
measured in turn, several times, for machines are noisy; the ratio is that of the best rounds.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import trio

from turnkeeper.actors import open_sessions
from turnkeeper.storage import changes, connect, heads, messages, schema

SESSIONS = 1_000
APPENDS = 50
TEXT = "x" * 256
PER_TRANSACTION = 500
ROUNDS = 5


def limit(folder: Path) -> float:
    """Return the appends per second of bare SQLite."""
    path = folder / "limit.db"
    connect.create(path, schema.migrate)
    connection = connect.open_writer(path, synchronous="full", vfs=None)
    schema.define_guard(connection, allowed=False)
    execute = connection.execute
    execute("BEGIN IMMEDIATE")
    at = []
    for number in range(SESSIONS):
        head = changes._begin(connection, f"session-{number}", None, 0, None, 0.0)
        at.append((head.session, head.branch))
    execute("COMMIT")
    written = 0
    started = time.perf_counter()
    for position in range(1, APPENDS + 1):
        for session, branch in at:
            if written % PER_TRANSACTION == 0:
                execute("BEGIN IMMEDIATE")
            execute("SAVEPOINT operation")
            execute(
                heads.SWAP,
                (
                    position + 1,
                    branch,
                    position,
                    True,
                    position,
                    None,
                    0.0,
                    session,
                    position,
                    branch,
                    position - 1,
                ),
            )
            execute(
                messages.INSERT,
                (
                    session,
                    branch,
                    position,
                    position + 1,
                    position,
                    False,
                    written,
                    0.0,
                    None,
                    "user",
                    TEXT,
                    None,
                ),
            )
            execute("RELEASE operation")
            written += 1
            if written % PER_TRANSACTION == 0:
                execute("COMMIT")
    seconds = time.perf_counter() - started
    connection.close()
    return written / seconds


async def awaited(folder: Path) -> float:
    """Return the awaited appends per second through the actors."""

    async def talk(id: str, appends: int) -> None:
        session = sessions[id]
        for _ in range(appends):
            await session.append({"role": "user", "content": TEXT})

    async with open_sessions(folder / "awaited.db") as sessions:
        async with trio.open_nursery() as nursery:
            for number in range(SESSIONS):
                nursery.start_soon(sessions[f"session-{number}"].set_meta, {})
        started = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number in range(SESSIONS):
                nursery.start_soon(talk, f"session-{number}", APPENDS)
        seconds = time.perf_counter() - started
    return SESSIONS * APPENDS / seconds


def measure() -> dict[str, float]:
    """Run all rounds; return the rates of the best ones and their ratio."""
    limits, rates = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            limits.append(limit(Path(folder)))
            rates.append(trio.run(awaited, Path(folder)))
    return {
        "limit_per_s": max(limits),
        "awaited_per_s": max(rates),
        "ratio": max(rates) / max(limits),
    }


if __name__ == "__main__":
    print(measure())
