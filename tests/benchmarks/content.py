"""Large messages: one of 50 MB, and 5,000 of 1 MB of which the last 10 are read.

One of 50 MB is over the default limit and is refused before anything is written; with the option
raised it is taken and read back. The 5,000 make a session of five gigabytes; reading its end must
take time and memory for ten messages. Memory is Python's peak (tracemalloc) and SQLite's own
high water mark, added, though they need not have come at the same moment. Needs about 6 GB of
disk while it runs, and leaves none.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import trio
from figures import Figure, print_all, work_folder

from turnkeeper.actors import Rejected, Session, open_sessions

MB = 1_000_000
HUGE = 50 * MB
LARGE = 1 * MB
COUNT = 5_000
TOGETHER = 20
LAST = 10


class Measured:
    """What a block took."""

    seconds = 0.0
    peak = 0
    """Bytes."""


@contextmanager
def measured() -> Iterator[Measured]:
    """Measure the time of the block and how much memory it adds at most."""
    found = Measured()
    tracemalloc.start()
    apsw.memory_high_water(True)
    before = apsw.memory_used()
    started = time.perf_counter()
    try:
        yield found
    finally:
        found.seconds = time.perf_counter() - started
        _, python = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        found.peak = python + apsw.memory_high_water() - before


async def huge(path: Path) -> list[Figure]:
    """Append one message of 50 MB, below and above the limit."""
    message = {"role": "user", "content": "x" * HUGE}
    async with open_sessions(path) as sessions:
        rejected = False
        with measured() as refusal:
            try:
                await sessions["one"].append(message)
            except Rejected:
                rejected = True
        nothing = await sessions["one"].info() is None
    async with open_sessions(path, max_message_bytes=2 * HUGE) as sessions:
        with measured() as append:
            await sessions["one"].append(message)
        with measured() as read:
            same = (await sessions["one"].transcript()).bodies == [message]
    what = "one message of 50 MB"
    return [
        Figure(f"{what}, default limit: Rejected, nothing written", rejected and nothing, "", 1),
        Figure(f"{what}, default limit: time", refusal.seconds * 1e3, "ms"),
        Figure(f"{what}, limit raised: reads back equal", same, "", 1),
        Figure(f"{what}, limit raised: append", append.seconds * 1e3, "ms"),
        Figure(f"{what}, limit raised: memory of the append", append.peak / HUGE, "× its size"),
        Figure(f"{what}, limit raised: read", read.seconds * 1e3, "ms"),
        Figure(f"{what}, limit raised: memory of the read", read.peak / HUGE, "× its size"),
    ]


async def fill(session: Session) -> float:
    """Append all the large messages; return the seconds."""
    started = time.perf_counter()
    for start in range(0, COUNT, TOGETHER):
        await session.extend(
            {"role": "assistant", "content": f"{number:06}".ljust(LARGE, "x")}
            for number in range(start, start + TOGETHER)
        )
    return time.perf_counter() - started


async def large(path: Path) -> list[Figure]:
    """Append 5,000 messages of 1 MB and read the last 10."""
    async with open_sessions(path) as sessions:
        filling = await fill(sessions["one"])
    async with open_sessions(path) as sessions:
        with measured() as read:
            last = await sessions["one"].transcript(last=LAST)
        assert [str(body["content"])[:6] for body in last.bodies] == [
            f"{number:06}" for number in range(COUNT - LAST, COUNT)
        ]
    what = f"{COUNT:,} messages of 1 MB"
    size = LAST * LARGE
    return [
        Figure(f"{what}: append", COUNT * LARGE / filling / MB, "MB/s"),
        Figure(f"{what}: read the last {LAST}", read.seconds * 1e3, "ms"),
        Figure(f"{what}: memory of that read", read.peak / size, "× their size", at_most=3.0),
    ]


def measure() -> list[Figure]:
    """Return what both took, and whether the disk is as it was."""
    with work_folder() as folder:
        figures = trio.run(huge, folder / "huge.db")
    with work_folder() as folder:
        figures += trio.run(large, folder / "large.db")
    assert not folder.exists()
    return figures


if __name__ == "__main__":
    print_all(measure())
