"""A file that somebody else holds makes its askers wait, and nobody but them."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import apsw
import trio
import trio.testing
from support import A, U, said

from turnkeeper.actors import open_sessions

TICKS = 2_000


class Rival:
    """Holds the file's write lock, in a thread, until it is told to let go.

    By APSW, for two copies of SQLite in one process undo each other's locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holds = threading.Event()
        self.let_go = threading.Event()
        self.was_told = False

    def hold(self) -> None:
        with closing(apsw.Connection(str(self.path))) as connection:
            connection.execute("BEGIN IMMEDIATE")
            self.holds.set()
            # The limit only ends a test whose event loop stands still, and so cannot tell.
            self.was_told = self.let_go.wait(30)
            connection.execute("ROLLBACK")


async def test_c51_twenty_appends_wait_for_a_rivals_lock_and_the_event_loop_ticks_on(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.db"
    # Nobody's patience ends: time stands still for the store.
    async with open_sessions(path, monotonic=lambda: 0.0) as sessions:
        await sessions["s0"].append(U("before"))
        rival = Rival(path)
        answered: list[int] = []

        async def ask(n: int) -> None:
            await sessions[f"s{n % 10}"].append(U(str(n)))
            answered.append(n)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, rival.hold)
            await trio.to_thread.run_sync(rival.holds.wait)
            for n in range(20):
                nursery.start_soon(ask, n)
            # No waiting until all are blocked: the writer's thread tries all the time.
            while sessions.stats().busy < 10 or sessions.stats().mailboxes < 10:
                await trio.lowlevel.checkpoint()
            for _ in range(TICKS):
                await trio.lowlevel.checkpoint()
                assert answered == []
            # Reads do not wait for a writer, nor does anything that writes nothing.
            assert said(await sessions["s0"].transcript()) == ["before"]
            assert sessions.stats().busy == 10
            assert sessions["new"].id == "new"
            rival.let_go.set()
        assert rival.was_told
        assert sorted(answered) == list(range(20))
        for n in range(10):
            texts = sorted(map(str, said(await sessions[f"s{n}"].transcript())))
            assert texts == sorted([str(n), str(n + 10), *(["before"] if n == 0 else [])])
        assert sessions.health().ok


async def test_c51_who_waits_for_a_rivals_lock_can_be_cancelled_at_once(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, monotonic=lambda: 0.0) as sessions:
        await sessions["a"].append(U("before"))
        rival = Rival(path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, rival.hold)
            await trio.to_thread.run_sync(rival.holds.wait)
            async with trio.open_nursery() as askers:
                for n in range(20):
                    askers.start_soon(sessions[f"s{n % 10}"].append, U(str(n)))
                while sessions.stats().busy < 10 or sessions.stats().mailboxes < 10:
                    await trio.lowlevel.checkpoint()
                askers.cancel_scope.cancel()
            assert sessions.stats().busy == 0
            assert sessions.stats().mailboxes == 0
            rival.let_go.set()
        assert rival.was_told
        await sessions["a"].append(A("after"))
        assert [info.id for info in await sessions.list()] == ["a"]
        assert sessions.health().pending == 0
