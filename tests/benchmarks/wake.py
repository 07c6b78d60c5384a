"""Waking a session that was dropped from memory, against the bare read of its row.

Waking has no call of its own: a dropped session wakes with its next message. So its price is
what an append to a dropped session takes more than one to a resident session. The bare read is
one SELECT by id of the session's row and its head on an APSW connection, inside a transaction that is
open already.

In time: 1,000 sessions are appended to at once, resident and dropped in turn, on the spot
(`offload=inline`) and without syncs, whose noise would drown the difference; what the difference of
the shortest rounds comes to for one session is compared with one of 1,000 bare reads. Counted: the
virtual-machine steps of one such append more, against those of the bare read.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import apsw
import trio
from counting import Cost, counting, mean
from figures import Figure, print_all, work_folder

from turnkeeper.actors import Sessions, open_sessions
from turnkeeper.storage import inline

SESSIONS = 1_000
ROUNDS = 40
TEXT = "x" * 256

READ = """
SELECT key, born, created_at, meta, revision, branch, position, at_tip, opener, redo, updated_at
FROM sessions JOIN heads ON session = key WHERE buried IS NULL AND id = ?
"""


def name_of(number: int) -> str:
    """Return a session's id."""
    return f"telegram:dm:{number}"


async def speak(sessions: Sessions) -> float:
    """Append once to every session, all at once; return the seconds for one."""

    async def append(id: str) -> None:
        await sessions[id].append({"role": "user", "content": TEXT})

    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for number in range(SESSIONS):
            nursery.start_soon(append, name_of(number))
    return (time.perf_counter() - started) / SESSIONS


def read(connection: apsw.Connection) -> float:
    """Read the row of every session; return the seconds for one."""
    ids = [name_of(number) for number in range(SESSIONS)]
    connection.execute("BEGIN")
    seconds = 0.0
    for _ in range(2):  # the first time fills the page cache, which the writer's has kept
        started = time.perf_counter()
        for id in ids:
            assert connection.execute(READ, (id,)).get is not None
        seconds = time.perf_counter() - started
    connection.execute("COMMIT")
    return seconds / SESSIONS


async def timed(path: Path) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of appends to resident and to dropped sessions, and of bare reads."""
    resident, dropped, bare = [], [], []
    async with open_sessions(path, offload=inline, synchronous="normal") as sessions:
        await speak(sessions)
        connection = apsw.Connection(str(path))
        for _ in range(ROUNDS):
            resident.append(await speak(sessions))
            assert sessions.drop_idle() == SESSIONS
            dropped.append(await speak(sessions))
            bare.append(read(connection))
        connection.close()
    return resident, dropped, bare


async def counted(path: Path) -> tuple[Cost, Cost, Cost]:
    """Return what one append to a resident and to a dropped session costs, and one bare read."""
    resident: list[Cost] = []
    dropped: list[Cost] = []
    bare: list[Cost] = []
    with counting() as counter:
        async with open_sessions(path, offload=inline) as sessions:
            await speak(sessions)
            connection = apsw.Connection(str(path))
            for number in range(100):
                session = sessions[name_of(number)]
                await session.append({"role": "user", "content": TEXT})
                with counter.into(resident):
                    await session.append({"role": "user", "content": TEXT})
                sessions.drop_idle()
                with counter.into(dropped):
                    await session.append({"role": "user", "content": TEXT})
                with counter.into(bare):
                    assert connection.execute(READ, (session.id,)).get is not None
            connection.close()
    return mean(resident), mean(dropped), mean(bare)


def measure() -> list[Figure]:
    """Return the ratios and what they come from."""
    with work_folder() as folder:
        resident, dropped, bare = trio.run(timed, folder / "timed.db")
        kept, woken, row = trio.run(counted, folder / "counted.db")
    waking = min(dropped) - min(resident)
    differences = [late - soon for late, soon in zip(dropped, resident, strict=True)]
    ask = "waking a dropped session against the bare read of its row"
    return [
        Figure(f"{ask}, time, best", waking / min(bare), "×", at_most=5.0),
        Figure(f"{ask}, time, median", median(differences) / median(bare), "×", at_most=5.0),
        Figure(f"{ask}, steps", (woken.steps - kept.steps) / row.steps, "×", at_most=5.0),
        Figure("waking a dropped session: time", waking * 1e6, "µs"),
        Figure("the bare read of its row: time", min(bare) * 1e6, "µs"),
        Figure("waking a dropped session: steps", woken.steps - kept.steps, "steps"),
        Figure("the bare read of its row: steps", row.steps, "steps"),
    ]


if __name__ == "__main__":
    print_all(measure())
