"""How fairly and how fast messages are answered that 1,000 sessions post at once.

Each session posts five, one after the other, all sessions at the same time; one `serve` with its
defaults answers each by one append. What is asked is of the first answer of every session: the time
from the call of its first post until that answer is on disk, the slowest session's against the
median. Once with a handler that answers at once, where all of it is ours, and once with one that
takes 50 ms first, as a very fast model would: then a hundred are under way at a time.

Posts and turns per second are those of the handler that answers at once: posts until the last
receipt, while turns are served too, and turns until the last answer is on disk.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import trio
import trio.testing
from figures import Figure, print_all, work_folder

from turnkeeper.actors import Turn, open_sessions

SESSIONS = 1_000
POSTS = 5
TEXT = "x" * 256
MODEL_S = 0.05
ROUNDS = 5
MODEL_ROUNDS = 3
ASKED = 3.0


class Round(NamedTuple):
    """What one round took, in seconds."""

    median: float
    slowest: float
    posting: float
    serving: float

    @property
    def spread(self) -> float:
        """The slowest session's first answer against the median."""
        return self.slowest / self.median


async def once(path: Path, model_s: float) -> Round:
    """Post and serve everything."""
    began: dict[str, float] = {}
    first: dict[str, float] = {}
    answers = 0
    posted = 0.0
    done = trio.Event()

    async def answer(turn: Turn) -> None:
        nonlocal answers
        if model_s:
            await trio.sleep(model_s)
        await turn.append({"role": "assistant", "content": TEXT})
        first.setdefault(turn.id, time.perf_counter())
        answers += 1
        if answers == SESSIONS * POSTS:
            done.set()

    async def post(id: str) -> None:
        nonlocal posted
        began[id] = time.perf_counter()
        for _ in range(POSTS):
            receipt = await sessions[id].post({"role": "user", "content": TEXT})
            assert receipt.status == "accepted"
        posted = time.perf_counter()

    async with (
        open_sessions(path, synchronous="full") as sessions,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(sessions.serve, answer)
        await trio.testing.wait_all_tasks_blocked()
        started = time.perf_counter()
        async with trio.open_nursery() as posting:
            for number in range(SESSIONS):
                posting.start_soon(post, f"telegram:dm:{number}")
        await done.wait()
        served = time.perf_counter()
        nursery.cancel_scope.cancel()
    times = [first[id] - began[id] for id in began]
    return Round(median(times), max(times), posted - started, served - started)


def rounds(count: int, model_s: float) -> list[Round]:
    """Return so many rounds, each on a new file."""
    found = []
    for _ in range(count):
        with work_folder() as folder:
            found.append(trio.run(once, folder / "serving.db", model_s))
    return found


def measure() -> list[Figure]:
    """Return the spread of first answers, and the rates."""
    quick = rounds(ROUNDS, 0.0)
    slow = rounds(MODEL_ROUNDS, MODEL_S)
    figures = []
    for what, found in (("at once", quick), (f"after {MODEL_S * 1e3:g} ms", slow)):
        name = f"{SESSIONS:,} sessions post {POSTS} each, answered {what}: first answer"
        spreads = [round.spread for round in found]
        figures += [
            Figure(f"{name}, slowest against median, median", median(spreads), "×", at_most=ASKED),
            Figure(f"{name}, slowest against median, worst", max(spreads), "×", at_most=ASKED),
            Figure(f"{name}, median", median(round.median for round in found) * 1e3, "ms"),
            Figure(f"{name}, slowest", median(round.slowest for round in found) * 1e3, "ms"),
        ]
    total = SESSIONS * POSTS
    for what, seconds in (
        ("posts, while served", [round.posting for round in quick]),
        ("turns served, while posted", [round.serving for round in quick]),
    ):
        figures.append(Figure(f"{what}, best", total / min(seconds), "/s"))
        figures.append(Figure(f"{what}, median", total / median(seconds), "/s"))
    return figures


if __name__ == "__main__":
    print_all(measure())
