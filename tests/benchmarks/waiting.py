"""What it costs to wait for a turn that somebody else holds: the processor time of ten seconds.

The holder renews all the while. He is in the same process, where the one who waits stands in
line; in another process, where the file is asked again and again; and that once more with an idle
`serve` beside the one who waits. Measured is all that the waiting process uses, its threads and, in
the first, the keeping of the turn included.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from figures import Figure, print_all, work_folder

from turnkeeper.actors import Session, Sessions, Turn, open_sessions

WAITED_S = 10.0
TTL_S = 3.0
"""Renewed each second, so that renewals are among what is measured."""
ASKED_S = 0.2
ID = "telegram:dm:1"


async def waited(session: Session) -> float:
    """Wait in vain for ten seconds; return the seconds of processor time that this process used."""
    before = time.process_time()
    with trio.move_on_after(WAITED_S) as waiting:
        async with session.turn():
            pass
    assert waiting.cancelled_caught
    return time.process_time() - before


async def same_process(path: Path) -> float:
    """Wait for a turn that a task of this process holds."""
    async with open_sessions(path) as sessions, sessions[ID].turn(ttl=TTL_S):
        found: list[float] = []

        async def wait() -> None:
            found.append(await waited(sessions[ID]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
        return found[0]


async def other_process(path: Path, *, serving: bool) -> float:
    """Wait for a turn that another process holds; `serving`: and serve an empty inbox."""
    async with held_elsewhere(path), open_sessions(path) as sessions:
        async with trio.open_nursery() as nursery:
            if serving:
                nursery.start_soon(sessions.serve, nothing)
            found = await waited(sessions[ID])
            nursery.cancel_scope.cancel()
        return found


async def nothing(_: Turn) -> None:
    """Answer nothing; nothing is posted."""


@asynccontextmanager
async def held_elsewhere(path: Path) -> AsyncIterator[None]:
    """Let another process hold the turn for the length of the block."""
    process = await trio.lowlevel.open_process(
        [sys.executable, __file__, "hold", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with trio.fail_after(WAITED_S):
            assert await process.stdout.receive_some() == b"held\n"
        yield
        assert process.poll() is None
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()  # it ends then
            await process.wait()
            await process.stdout.aclose()


async def hold(path: str) -> None:
    """Hold the turn until whoever started this process closes its standard input."""
    async with open_sessions(path) as sessions, sessions[ID].turn(ttl=TTL_S):
        sys.stdout.write("held\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read)


async def idle(path: Path) -> float:
    """Wait for nothing: what an open store uses."""
    async with open_sessions(path) as sessions:
        before = time.process_time()
        await trio.sleep(WAITED_S)
        assert isinstance(sessions, Sessions)
        return time.process_time() - before


def measure() -> list[Figure]:
    """Return the processor time of each."""
    with work_folder() as folder:
        same = trio.run(same_process, folder / "same.db")
        other = trio.run(_other, folder / "other.db", False)
        served = trio.run(_other, folder / "served.db", True)
        none = trio.run(idle, folder / "idle.db")
    name = f"waiting {WAITED_S:g} s for a turn held"
    return [
        Figure(f"{name} in the same process: processor time", same, "s", at_most=ASKED_S),
        Figure(f"{name} in another process: processor time", other, "s", at_most=ASKED_S),
        Figure(f"{name} in another, and serving: processor time", served, "s", at_most=ASKED_S),
        Figure(f"an open store in {WAITED_S:g} s: processor time", none, "s"),
    ]


async def _other(path: Path, serving: bool) -> float:
    return await other_process(path, serving=serving)


if __name__ == "__main__":
    if sys.argv[1:2] == ["hold"]:
        trio.run(hold, sys.argv[2])
    else:
        print_all(measure())
