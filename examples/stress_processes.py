"""Several processes on one file: started, now and then killed and replaced, and their story told.

What they did is in their journals (`stress_journal`), and in the file itself. Whoever is killed
is killed for good, in the middle of whatever it did; another begins in its place with what was
left to do. When all have ended, the inboxes are served to the end and each session's turn is
taken once, so that what the dead left behind is put in order as any process would do it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic

import trio
from attrs import Factory, define
from stress_journal import Enter, Held, Journal, Leave, Life, Noted, Post, read_journal
from stress_worker import MAX_ATTEMPTS, Noting, answering
from stress_wrong import Wrong

from turnkeeper.actors import TurnkeeperError, open_sessions

__all__ = ["Story", "run_processes"]

WORKER = Path(__file__).with_name("stress_worker.py")

LAST_S = 20.0
"""How long the inboxes are served at the end. A guess; it takes a second or two."""


@define(eq=False)
class Story:
    """All that was asked and answered, in all processes."""

    lives: dict[int, Life] = Factory(dict)
    """By the worker's number; 0 is the process that started the others."""
    notes: list[Noted] = Factory(list)
    wrong: list[Wrong] = Factory(list)

    @property
    def kills(self) -> int:
        """Processes that were killed."""
        return sum(life.killed < float("inf") for life in self.lives.values())

    def was_killed(self, worker: int) -> bool:
        """Whether the process of that number was killed."""
        return self.lives[worker].killed < float("inf")

    @contextmanager
    def no_error(self, id: str, what: str) -> Iterator[None]:
        """Note an error that comes out of the block as wrong."""
        try:
            yield
        except TurnkeeperError as error:
            self.wrong.append(Wrong(id, what, "no error", repr(error)))

    def of_session(self, id: str) -> list[Noted]:
        """What was asked of a session, in the order in which it was begun."""
        return sorted((n for n in self.notes if n.session == id), key=lambda note: note.began)


async def run_processes(
    path: Path,
    *,
    processes: int,
    kills: int,
    sessions: int,
    turns: int,
    seed: int,
    turn_done: Callable[[], object],
) -> Story:
    """Do `sessions` × `turns` turns in `processes` processes on `path`, killing `kills` of them."""
    crew = _Crew(path, sessions, seed, Story(), turn_done)
    total = sessions * turns
    shares = [total * (n + 1) // processes - total * n // processes for n in range(processes)]
    # Kills are spread evenly over the run, each where chance wants it within its part.
    crew.kill_at = [
        int(total * (number + crew.chance.random() * 0.9) / kills) for number in range(kills)
    ]
    async with trio.open_nursery() as nursery:
        for share in shares:
            nursery.start_soon(crew.keep_one_running, share)
    await _put_in_order(path, crew.journal(0), crew.story)
    for worker, life in crew.story.lives.items():
        for note in read_journal(crew.journal(worker), worker):
            if not note.answered:
                note.ended = life.gone
            crew.story.notes.append(note)
        crew.journal(worker).unlink(missing_ok=True)
    return crew.story


@define(eq=False)
class _Crew:
    """The processes that run now."""

    path: Path
    sessions: int
    seed: int
    story: Story
    turn_done: Callable[[], object]
    kill_at: list[int] = Factory(list)
    """After how many turns, of all processes together, somebody is killed."""
    done: int = 0
    running: dict[int, trio.Process] = Factory(dict)
    chance: Random = Factory(lambda self: Random(f"{self.seed} kills"), takes_self=True)

    def journal(self, worker: int) -> Path:
        """Where the worker's journal is."""
        return self.path.with_name(f"{self.path.name}-journal-{worker}")

    async def keep_one_running(self, turns: int) -> None:
        """Run a process that does `turns` turns; if it is killed, another one does the rest."""
        before: Life | None = None
        while turns > 0:
            life = Life(len(self.story.lives) + 1)
            self.story.lives[life.worker] = life
            turns -= await self._run(life, before, turns)
            if life.killed == float("inf"):
                return
            before = life

    async def _run(self, life: Life, before: Life | None, turns: int) -> int:
        """Run one process to its end; return how many turns it did."""
        options = {
            "path": str(self.path),
            "journal": str(self.journal(life.worker)),
            "worker": life.worker,
            "sessions": self.sessions,
            "turns": turns,
            "seed": self.seed,
        }
        done = 0
        process = await trio.lowlevel.open_process(
            [sys.executable, str(WORKER), json.dumps(options)], stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            async for chunk in process.stdout:
                lines = chunk.count(b"\n")
                if lines and life.opened == float("inf"):  # the first says that it has opened
                    lines -= 1
                    life.opened = monotonic()
                    self.running[life.worker] = process
                    if before is not None:
                        before.replaced = life.opened
                done += lines
                for _ in range(lines):
                    self._one_more()
        finally:
            self.running.pop(life.worker, None)
            with trio.CancelScope(shield=True):
                if process.returncode is None and sys.exc_info()[0] is not None:
                    process.kill()
                status = await process.wait()
            life.gone = monotonic()
        if life.killed == float("inf") and status != 0:
            what = f"the end of process {life.worker}"
            self.story.wrong.append(Wrong("all", what, "status 0", f"status {status}"))
        return done

    def _one_more(self) -> None:
        self.done += 1
        self.turn_done()
        if self.kill_at and self.done >= self.kill_at[0] and self.running:
            self.kill_at.pop(0)
            worker = self.chance.choice(sorted(self.running))
            self.story.lives[worker].killed = monotonic()
            os.kill(self.running.pop(worker).pid, signal.SIGKILL)


async def _put_in_order(path: Path, journal: Path, story: Story) -> None:
    """Post once more, serve what the inboxes hold, take each turn and end it; note all of it."""
    life = story.lives[0] = Life(0, opened=monotonic())
    callers = Noting(Journal(journal), 0)
    async with open_sessions(path) as store:
        ids: list[str] = []
        while page := await store.list(after=ids[-1] if ids else ""):
            ids += [info.id for info in page]
        for id in ids:
            post = Post({"role": "user", "content": "the last post"}, None, None)
            number = callers.journal.began(id, post)
            with story.no_error(id, "posting at the end"):
                callers.journal.ended(number, await store[id].post(post.body))
        handler = answering(callers, {}, Random(0), simply=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(store.serve, handler, max_attempts=MAX_ATTEMPTS))
            with trio.move_on_after(LAST_S):
                for id in ids:
                    while await store[id].inbox():  # noqa: ASYNC110 (no event tells of it)
                        await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
        for id in ids:
            number = callers.journal.began(id, Enter("turn"))
            with story.no_error(id, "taking the turn at the end"):
                async with store[id].turn(wait=0) as turn:
                    callers.journal.ended(number, Held(turn.token))
                    number = callers.journal.began(id, Leave("well"), turn.token)
                callers.journal.ended(number, None)
    life.gone = monotonic()
