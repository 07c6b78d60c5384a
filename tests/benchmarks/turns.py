"""Turns taken and released, as a share of plain appends; and what one costs alone.

1,000 sessions in parallel take a turn, append two messages of 256 characters in it and let go, 12
times each, awaiting everything, at `synchronous=FULL`. Beside them stand plain awaited appends, as
the measurement `appends` makes them. What is compared is rows of messages per second, in the same
run: the two that a turn adds, its taking and letting go not counted. Operations per second, which
count those too (four a turn), stand beside it; that is the milder way to look at it.

Both are measured in turn, the turns first in every other round, on new files; `best` and `median`
are as in `appends`.

Alone: in one session, with nothing to share a commit with, a turn that is taken and let go, and
one append, by turns. And with 1,000 turns held at once, the time of the processor that keeping them
takes, renewals included, per second.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import appends
import trio
from figures import Figure, print_all, work_folder

from turnkeeper.actors import open_sessions

SESSIONS = 1_000
TURNS = 12
APPENDS = 2
OPERATIONS = APPENDS + 2
TEXT = "x" * 256
ROUNDS = 12
ASKED = 1 / 3

ALONE = 500
HELD_TTL_S = 3.0
"""Renewed each second; the default's every tenth second would show little in ten."""
HELD_S = 10.0


def turns() -> float:
    """Return the turns per second."""
    with work_folder() as folder:
        return trio.run(_turns, folder / "turns.db")


async def _turns(path: Path) -> float:
    async def talk(id: str) -> None:
        session = sessions[id]
        for _ in range(TURNS):
            async with session.turn() as turn:
                for _ in range(APPENDS):
                    await turn.append({"role": "user", "content": TEXT})

    async with open_sessions(path, synchronous="full") as sessions:
        async with trio.open_nursery() as nursery:
            for number in range(SESSIONS):
                nursery.start_soon(sessions[f"session-{number}"].set_meta, {})
        started = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number in range(SESSIONS):
                nursery.start_soon(talk, f"session-{number}")
        return SESSIONS * TURNS / (time.perf_counter() - started)


async def alone(path: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of every turn taken and let go, and of every append, of one session."""
    taken, appended = [], []
    async with open_sessions(path, synchronous="full") as sessions:
        session = sessions["one"]
        await session.set_meta({})
        for _ in range(ALONE):
            started = time.perf_counter()
            async with session.turn():
                pass
            taken.append(time.perf_counter() - started)
            started = time.perf_counter()
            await session.append({"role": "user", "content": TEXT})
            appended.append(time.perf_counter() - started)
    return taken, appended


async def held(path: Path) -> tuple[float, float]:
    """Return the seconds of processor time that 1,000 held turns take per second, and that none take."""

    holders = 0
    all_hold, done = trio.Event(), trio.Event()

    async def hold(id: str) -> None:
        nonlocal holders
        async with sessions[id].turn(ttl=HELD_TTL_S):
            holders += 1
            if holders == SESSIONS:
                all_hold.set()
            await done.wait()

    async with open_sessions(path, synchronous="full") as sessions:
        none = await used_in(HELD_S)
        async with trio.open_nursery() as nursery:
            for number in range(SESSIONS):
                nursery.start_soon(hold, f"session-{number}")
            await all_hold.wait()
            some = await used_in(HELD_S)
            done.set()
    return some / HELD_S, none / HELD_S


async def used_in(seconds: float) -> float:
    """Return the seconds of processor time that this process uses meanwhile, all threads."""
    before = time.process_time()
    await trio.sleep(seconds)
    return time.process_time() - before


def measure() -> list[Figure]:
    """Run all rounds; return the shares and what they come from."""
    taken, plain = [], []
    for number in range(ROUNDS):
        if number % 2:
            taken.append(turns())
        plain.append(appends.awaited())
        if not number % 2:
            taken.append(turns())
    figures = []
    for what, each, asked in (
        ("message rows", APPENDS, ASKED),
        ("operations", OPERATIONS, None),
    ):
        shares = [each * rate / most for rate, most in zip(taken, plain, strict=True)]
        name = f"turns of {APPENDS} appends against plain appends, {what}"
        figures += [
            Figure(f"{name}, best", each * max(taken) / max(plain), "share", at_least=asked),
            Figure(f"{name}, median", median(shares), "share", at_least=asked),
        ]
    for what, found in (
        ("turns", taken),
        ("message rows in turns", [APPENDS * rate for rate in taken]),
        ("operations of turns", [OPERATIONS * rate for rate in taken]),
        ("plain awaited appends", plain),
    ):
        figures.append(Figure(f"{what}, best", max(found), "/s"))
        figures.append(Figure(f"{what}, median", median(found), "/s"))
    with work_folder() as folder:
        one, append = trio.run(alone, folder / "alone.db")
    with work_folder() as folder:
        some, none = trio.run(held, folder / "held.db")
    return [
        *figures,
        Figure("one turn taken and let go alone, median", median(one) * 1e6, "µs"),
        Figure("the same against one append, median", median(one) / median(append), "×"),
        Figure(
            f"keeping {SESSIONS:,} turns of {HELD_TTL_S:g} s: processor time per second",
            some * 1e3,
            "ms",
        ),
        Figure("keeping none: processor time per second", none * 1e3, "ms"),
    ]


if __name__ == "__main__":
    print_all(measure())
