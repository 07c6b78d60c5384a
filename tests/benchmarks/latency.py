"""How long one awaited append takes when nothing else happens.

One session, one append after the other, `synchronous=FULL`: no batch to share a commit with, so
this is a commit, the way to the writer's thread and the way back. Beside it stands a bare commit
of the same statements, in blocks that take turns. Nothing is asked: most of it is the disk.
"""

from __future__ import annotations

import time
from pathlib import Path

import trio
from figures import Figure, print_all, quantile, work_folder
from limit import append_all, bare_store

from turnkeeper.actors import open_sessions

BLOCKS = 30
PER_BLOCK = 100
TEXT = "x" * 256


async def rounds(folder: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of every bare commit and of every awaited append."""
    bare, awaited = [], []
    with bare_store(folder / "bare.db", 1) as (connection, where):
        async with open_sessions(folder / "awaited.db", synchronous="full") as sessions:
            session = sessions["one"]
            for block in range(BLOCKS):
                for at in range(block * PER_BLOCK + 1, (block + 1) * PER_BLOCK + 1):
                    started = time.perf_counter()
                    append_all(
                        connection.execute, where, TEXT, first=at, last=at, per_transaction=1
                    )
                    bare.append(time.perf_counter() - started)
                for _ in range(PER_BLOCK):
                    started = time.perf_counter()
                    await session.append({"role": "user", "content": TEXT})
                    awaited.append(time.perf_counter() - started)
    return bare, awaited


def measure() -> list[Figure]:
    """Return what half and what all but a hundredth of them took at most."""
    with work_folder() as folder:
        bare, awaited = trio.run(rounds, folder)
    return [
        Figure(f"{name}, {part}", quantile(times, share) * 1e6, "µs")
        for name, times in (("one awaited append", awaited), ("one bare commit", bare))
        for part, share in (("p50", 0.5), ("p99", 0.99))
    ]


if __name__ == "__main__":
    print_all(measure())
