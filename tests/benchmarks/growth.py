"""One undo and one append, in a long session and in a short one.

Each is measured through the public API, one call at a time, in files that hold one session. What
is asked is counted in SQLite's virtual-machine steps and in pages written, as the mean of many
calls, for now and then an append splits a page. The times beside it (the best of the same
calls, commit included, uncounted) are for information: they are mostly the disk's.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from counting import Cost, Counter, counting, mean
from figures import Figure, print_all, work_folder

from turnkeeper.actors import Session, open_sessions
from turnkeeper.storage import inline

SHORT = 100
LONG_FOR_UNDO = 10_000
LONG_FOR_APPEND = 100_000
CALLS = 100
TEXT = "x" * 256

Messages = list[dict[str, object]]


def exchange(messages: int) -> Messages:
    """Return so many messages: a person and an assistant in turn."""
    return [
        {"role": "user" if number % 2 == 0 else "assistant", "content": TEXT}
        for number in range(messages)
    ]


@asynccontextmanager
async def session_of(path: Path, messages: int) -> AsyncIterator[Session]:
    """Open a new store whose only session holds so many messages."""
    async with open_sessions(path, offload=inline) as sessions:
        session = sessions["one"]
        for start in range(0, messages, 1_000):
            await session.extend(exchange(min(1_000, messages - start)))
        yield session


async def repeated(
    counter: Counter, call: Callable[[], Awaitable[object]], back: Callable[[], Awaitable[object]]
) -> tuple[Cost, float]:
    """Return the mean cost of `call` and the shortest time it took, in µs; `back` undoes it."""
    costs: list[Cost] = []
    best = float("inf")
    for _ in range(CALLS):
        with counter.into(costs):
            await call()
        await back()
        started = time.perf_counter()
        await call()
        best = min(best, time.perf_counter() - started)
        await back()
    return mean(costs), best * 1e6


async def undos(path: Path, messages: int, counter: Counter) -> tuple[Cost, float]:
    """Undo the last turn and redo it, again and again."""
    async with session_of(path, messages) as session:
        return await repeated(counter, session.undo, session.redo)


async def appends(path: Path, messages: int, counter: Counter) -> tuple[Cost, float]:
    """Append messages one by one."""

    async def append() -> None:
        await session.append({"role": "user", "content": TEXT})

    async with session_of(path, messages) as session:
        return await repeated(counter, append, trio.lowlevel.checkpoint)


def compare(
    what: str,
    run: Callable[[Path, int, Counter], Awaitable[tuple[Cost, float]]],
    long: int,
    asked: float,
) -> list[Figure]:
    """Measure `run` in a short session and one of `long` messages."""
    with work_folder() as folder, counting() as counter:
        few, few_us = trio.run(run, folder / "short.db", SHORT, counter)
        many, many_us = trio.run(run, folder / "long.db", long, counter)
    name = f"{what}: {long:,} messages against {SHORT}"
    return [
        Figure(f"{name}, steps", many.steps / few.steps, "×", at_most=asked),
        Figure(f"{name}, pages", many.pages / few.pages, "×", at_most=asked),
        Figure(f"{name}, time", many_us / few_us, "×"),
        Figure(f"{what} at {SHORT}: steps", few.steps, "steps"),
        Figure(f"{what} at {SHORT}: pages", few.pages, "pages"),
        Figure(f"{what} at {SHORT}: time", few_us, "µs"),
    ]


def measure() -> list[Figure]:
    """Return the ratios and what they come from."""
    return [
        *compare("one undo", undos, LONG_FOR_UNDO, 1.5),
        *compare("one append", appends, LONG_FOR_APPEND, 1.3),
    ]


if __name__ == "__main__":
    print_all(measure())
