"""Many sessions at once, everything that can happen to them, and then every row checked.

    make stress ARGS="--sessions 1000 --turns 20"
    make stress ARGS="--processes 4"

Each session is talked to by a task, some by several. They append, one by one and in batches,
undo, redo, retry, rewrite, restore and fork, send keys twice (also at once, also after an undo),
decide on revisions that may be past, and one caller in five is cancelled, before, while or after
his call is under way. Mailboxes are small, so bursts stand in line; actors are few, so they are
dropped and come back.

What is checked. Every call is noted in its session's ledger in the order in which calls are
made, with its outcome. When the load has ended and the store is closed:

1. A model made of plain lists runs each ledger again, without the calls that ended in
   `Cancelled`, and every outcome must be the one it foretells, to the last field: position,
   revision, text, counts, duplicates, refusals. Ids alone are taken from the receipts.
2. Each reading made meanwhile must be the model's transcript after the revision that it names,
   and that must be no older than what had been acknowledged when the reading began.
3. The store is opened anew, and each session, forks too, must read as its model: transcript
   (positions 1, 2, 3 … without a gap, revision), its visible part, its end, all messages off
   the live path with their states, history. The list holds these sessions and no others.
4. It is moved about in: redo to the end, restore to revisions old and new, the last key again,
   one more append; each outcome and what is then read must be the model's.
5. `integrity_check` says ok, and the rows of the file, wherever they hang, are exactly the
   messages that a receipt names, each written by the session that gave the receipt.
6. No actor failed.

Why that suffices. An acknowledged message is in the model, so if it is missing, live or not, 3
and 5 find it. One stored twice, or by a caller that got `Cancelled`, is a row without a
receipt, which 5 finds; it would also take a position and a revision that the next receipt then
misses, and a move that a cancelled caller made takes a revision too: 1 finds both. Order is
what the model runs on: a call served out of turn gets another position or revision than
foretold. And because the model knows the transcript after each revision, a wrong redo or
restore is found where it happens and not only where it shows.

Several processes on one file do all that in the same sessions, and hold turns, take them over,
post, serve each other's posts, and say things in between. Now and then one is killed (SIGKILL)
and another takes its place. Each writes a journal: a line before each call and one after it. At
the end one process serves what waits still and takes each turn once; then, beside 3 to 6:

7. All receipts of a session, from all journals, are put in order by the revision that each names,
   and a model runs them in that order. A call that changed nothing must have the model's answer
   somewhere between what had been answered when it began and what began when it was answered.
8. A revision without a receipt is a call that a kill cut off (each explains one at most, and does
   to the model what the file says), what a turn took from the inbox, or a call closed at a turn's
   end.
9. What was written under a turn stands together but for what interleaves; nothing is written under
   it once another has come; no two overlap; refusals and losses have a cause; what a turn left
   open, the dead one's too, is closed before anybody else goes on.
10. An accepted post is one message, in the order of acceptance, and was answered by a turn that
    ended well, or interrupted, or taken back by a person.
11. No turn, no post and no owner's file is left.

The order needs no search, for the receipts tell it; so whole runs can be checked, where a search
for an order that fits would have to be content with a few calls. The journal is written to the
system before a caller goes on, so a kill loses none of it: what was acknowledged is known, and
what was under way is known to be so.

The seed decides what is asked; when a cancellation or a kill hits is up to the machine, so the
same seed asks the same again but need not fail the same. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import trio
from stress_callers import Callers
from stress_calls import Ledger
from stress_check import check_store, replay
from stress_judge import check_story
from stress_load import MAILBOX_SIZE, load
from stress_processes import Story, run_processes
from stress_show import Figures, Progress, show, show_story
from stress_wrong import Wrong

from turnkeeper.actors import Sessions, open_sessions

__all__ = ["Between", "Meanwhile", "main", "run", "run_many"]

SHOWN = 10
"""Wrong lines that are printed; the rest is counted."""

Between = Callable[[Path, dict[str, Ledger]], object]
"""Called with the closed store and the ledgers before they are checked."""

Meanwhile = Callable[[Path, Story], object]
"""The same for several processes and what they noted."""


async def run(
    path: Path,
    *,
    sessions: int,
    turns: int,
    seed: int,
    progress: Progress,
    between: Between = lambda _path, _ledgers: None,
) -> tuple[Figures, list[Wrong]]:
    """Put the load on a new store at `path`, close it, check it; return figures and faults.

    `between` is for tests, which must see that a fault is found.
    """
    callers, deepest = Callers(), Deepest()
    async with open_sessions(
        path, mailbox_size=MAILBOX_SIZE, max_resident=max(2, sessions // 2)
    ) as store:
        began = perf_counter()
        turn_done = progress.begin("talking", sessions * turns)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deepest.watch, store)
            await load(
                store, callers, sessions=sessions, turns=turns, seed=seed, turn_done=turn_done
            )
            nursery.cancel_scope.cancel()
        took_s = perf_counter() - began
        statistics = store.stats()
    file_bytes = os.stat(path).st_size
    between(path, callers.ledgers)
    began = perf_counter()
    models, wrong = replay(callers.ledgers)
    if statistics.failures:
        wrong.append(Wrong("all", "actors that failed", 0, statistics.failures))
    wrong += await check_store(
        path,
        models,
        seed,
        unjudged=callers.ledgers.keys() - models.keys(),
        checked=progress.begin("checking", len(models)),
    )
    figures = Figures(
        ledgers=callers.ledgers,
        models=models,
        statistics=statistics,
        waits_s=sorted(callers.waits_s),
        late=callers.late,
        deepest_mailbox=deepest.mailbox,
        longest_line=deepest.line,
        took_s=took_s,
        checked_s=perf_counter() - began,
        file_bytes=file_bytes,
    )
    return figures, wrong


async def run_many(
    path: Path,
    *,
    processes: int,
    kills: int,
    sessions: int,
    turns: int,
    seed: int,
    progress: Progress,
    between: Meanwhile = lambda _path, _story: None,
) -> list[Wrong]:
    """Put the load on a new store at `path` from several processes, check it, show the figures."""
    began = perf_counter()
    story = await run_processes(
        path,
        processes=processes,
        kills=kills,
        sessions=sessions,
        turns=turns,
        seed=seed,
        turn_done=progress.begin("talking", sessions * turns),
    )
    took_s = perf_counter() - began
    between(path, story)
    began = perf_counter()
    models, wrong = await check_story(path, story, seed, progress.begin)
    show_story(story, models, took_s, perf_counter() - began)
    return wrong


class Deepest:
    """How full mailboxes were, looked at twenty times a second."""

    mailbox = 0
    line = 0

    async def watch(self, store: Sessions) -> None:
        """Look until cancelled."""
        while True:
            statistics = store.stats()
            self.mailbox = max(self.mailbox, statistics.deepest_mailbox)
            self.line = max(self.line, statistics.in_line)
            await trio.sleep(0.05)


def main(
    arguments: Sequence[str] | None = None,
    between: Between = lambda _path, _ledgers: None,
    meanwhile: Meanwhile = lambda _path, _story: None,
) -> int:
    """Read the command line, run, print what came out; return the exit code."""
    options = _options(arguments)
    seed: int = options.seed
    folder = None if options.db else Path(tempfile.mkdtemp(prefix="turnkeeper-stress-"))
    path: Path = options.db or (folder or Path()) / "stress.db"
    keep: bool = options.keep
    print(f"{options.sessions:,} sessions x {options.turns:,} turns, seed {seed}, in {path}")
    try:
        with Progress() as progress:
            load = {name: getattr(options, name) for name in ("sessions", "turns", "seed")}
            if options.processes > 1:
                load |= {"processes": options.processes, "kills": options.kills}
                many = partial(run_many, path, progress=progress, between=meanwhile, **load)
                wrong = trio.run(many)
            else:
                one = partial(run, path, progress=progress, between=between, **load)
                figures, wrong = trio.run(one)
                show(figures)
        for fault in wrong[:SHOWN]:
            print(f"WRONG: {fault}")
        if wrong:
            keep = True
            print(f"{len(wrong):,} wrong; seed {seed}; the store is left in {path}")
        else:
            print("all is as it was acknowledged")
        return 1 if wrong else 0
    finally:
        if not keep:
            for leftover in path.parent.glob(f"{path.name}*"):
                leftover.unlink()
            if folder is not None:
                shutil.rmtree(folder)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="stress.py", description="Many sessions at once, then every row checked."
    )
    parser.add_argument("--processes", type=_count, default=1, help="on one file; default 1")
    parser.add_argument("--kills", type=int, help="processes killed on the way; default 6")
    parser.add_argument("--sessions", type=_count, help="default 1,000; 100 of several processes")
    parser.add_argument(
        "--turns", type=_count, help="of each session; default 20; 120 of several processes"
    )
    parser.add_argument("--seed", type=int, help="ask the same again; by default a new one")
    parser.add_argument("--db", type=Path, help="a file to make; by default a temporary one")
    parser.add_argument("--keep", action="store_true", help="leave the file where it is")
    options = parser.parse_args(arguments)
    if options.db is not None and options.db.exists():
        parser.error(f"--db: {options.db} is there already, and is not overwritten")
    if options.db is not None and not options.db.absolute().parent.is_dir():
        parser.error(f"--db: {options.db.absolute().parent} is no folder")
    one = options.processes == 1
    if one and options.kills:
        parser.error("--kills: the only process is not killed")
    options.kills = 6 if options.kills is None else max(0, options.kills)
    options.sessions = options.sessions or (1_000 if one else 100)
    options.turns = options.turns or (20 if one else 120)
    if options.seed is None:
        options.seed = random.randrange(1_000_000)
    return options


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
