"""The memory of a resident session that does nothing.

Each session is appended to once and then left alone. Two ways to look at it, for each has a
blind spot. `tracemalloc` tells what Python frees when all idle actors are dropped, divided by
their number: exact, but of Python's objects only. The growth of the whole process between
10,000 and 100,000 resident sessions, divided by the 90,000: all there is, SQLite's page cache and
what the allocator keeps included. The handles that callers hold are not counted; nobody holds one.
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path

import trio
from figures import Figure, print_all, work_folder

from turnkeeper.actors import Sessions, open_sessions

FEW = 10_000
MANY = 100_000
AT_ONCE = 500
TEXT = "x" * 256


async def speak(sessions: Sessions, first: int, last: int) -> None:
    """Append once to each of these sessions, some at a time."""

    async def some(start: int) -> None:
        for number in range(start, last, AT_ONCE):
            await sessions[f"telegram:dm:{number}"].append({"role": "user", "content": TEXT})

    async with trio.open_nursery() as nursery:
        for start in range(first, first + AT_ONCE):
            nursery.start_soon(some, start)


def process_bytes() -> int:
    """Return the resident memory of this process (Linux only)."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


async def traced(path: Path) -> float:
    """Return the bytes that Python frees for each session that is dropped."""
    async with open_sessions(path, max_resident=FEW) as sessions:
        tracemalloc.start()
        await speak(sessions, 0, FEW)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        assert sessions.drop_idle() == FEW
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return (before - after) / FEW


async def grown(path: Path) -> float:
    """Return the bytes by which the process grows for each further resident session."""
    async with open_sessions(path, max_resident=MANY) as sessions:
        await speak(sessions, 0, FEW)
        before = process_bytes()
        await speak(sessions, FEW, MANY)
        after = process_bytes()
        assert sessions.stats().resident == MANY
    return (after - before) / (MANY - FEW)


def measure() -> list[Figure]:
    """Return the bytes of one session, seen both ways."""
    with work_folder() as folder:
        # The process first: what was freed before would be used again and not be seen.
        whole = trio.run(grown, folder / "grown.db")
        python = trio.run(traced, folder / "traced.db")
    return [
        Figure("a resident idle session, Python's objects", python, "bytes", at_most=3_000),
        Figure("a resident idle session, growth of the process", whole, "bytes", at_most=3_000),
    ]


if __name__ == "__main__":
    print_all(measure())
