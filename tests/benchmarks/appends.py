"""Awaited appends of many sessions at once, as a share of what bare SQLite can do.

1,000 sessions in parallel append 50 messages of 256 characters each and await every receipt,
at `synchronous=FULL`. The limit (see `limit`) writes as many of the same, to as many sessions in
the same order, in transactions of 500. On both sides the sessions are made before the clock starts.

The limit is measured twice: with `connection.execute`, as programs are written, and with one
cursor that is kept, which is the most that APSW can do.

All are measured in turn, the awaited first in every other round, on new files. Two shares come
of it. `best` is that of the fastest rounds: what the code costs when the machine leaves it alone.
`median` is the median of each round's own share: noise that lasts longer than a round is in both.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import trio
from figures import Figure, print_all, work_folder
from limit import append_all, bare_store

from turnkeeper.actors import open_sessions

SESSIONS = 1_000
APPENDS = 50
TEXT = "x" * 256
PER_TRANSACTION = 500
ROUNDS = 12
ASKED = 0.40


def limit(*, one_cursor: bool) -> float:
    """Return the appends per second of bare SQLite."""
    with work_folder() as folder, bare_store(folder / "limit.db", SESSIONS) as (connection, where):
        execute = connection.cursor().execute if one_cursor else connection.execute
        started = time.perf_counter()
        append_all(execute, where, TEXT, first=1, last=APPENDS, per_transaction=PER_TRANSACTION)
        return SESSIONS * APPENDS / (time.perf_counter() - started)


def awaited() -> float:
    """Return the awaited appends per second through the actors."""
    with work_folder() as folder:
        return trio.run(_awaited, folder / "awaited.db")


async def _awaited(path: Path) -> float:
    async def talk(id: str) -> None:
        session = sessions[id]
        for _ in range(APPENDS):
            await session.append({"role": "user", "content": TEXT})

    async with open_sessions(path, synchronous="full") as sessions:
        async with trio.open_nursery() as nursery:
            for number in range(SESSIONS):
                nursery.start_soon(sessions[f"session-{number}"].set_meta, {})
        started = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number in range(SESSIONS):
                nursery.start_soon(talk, f"session-{number}")
        return SESSIONS * APPENDS / (time.perf_counter() - started)


def measure() -> list[Figure]:
    """Run all rounds; return the shares and the rates they come from."""
    plain, kept, rates = [], [], []
    for number in range(ROUNDS):
        if number % 2:
            rates.append(awaited())
        plain.append(limit(one_cursor=False))
        kept.append(limit(one_cursor=True))
        if not number % 2:
            rates.append(awaited())
    figures = []
    for how, limits in (("connection.execute", plain), ("one cursor", kept)):
        shares = [rate / most for rate, most in zip(rates, limits, strict=True)]
        what = f"awaited appends against bare SQLite by {how}"
        figures += [
            Figure(f"{what}, best", max(rates) / max(limits), "share", at_least=ASKED),
            Figure(f"{what}, median", median(shares), "share", at_least=ASKED),
        ]
    for what, found in (
        ("awaited appends", rates),
        ("bare SQLite by connection.execute", plain),
        ("bare SQLite by one cursor", kept),
    ):
        figures.append(Figure(f"{what}, best", max(found), "/s"))
        figures.append(Figure(f"{what}, median", median(found), "/s"))
    return figures


if __name__ == "__main__":
    print_all(measure())
