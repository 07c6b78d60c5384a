"""What the stress test shows: how far it is, and the figures at the end."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import rich.console
import rich.progress
import rich.table
from attrs import frozen
from stress_calls import CANCELLED, Ledger, Refused, Say
from stress_journal import Enter, Held, Noted, Read
from stress_model import Model
from stress_processes import Story

from turnkeeper.actors import Appended, Posted, Statistics

__all__ = ["Figures", "Progress", "show", "show_story"]


class Progress:
    """A bar on a terminal; anywhere else a line for each tenth."""

    def __init__(self) -> None:
        self._console = rich.console.Console()
        self._bars: rich.progress.Progress | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bars = rich.progress.Progress(console=self._console)
            self._bars.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, what: str, steps: int) -> Callable[[], None]:
        """Begin a phase of `steps` steps; the function returned is called after each."""
        if self._bars is not None:
            bars, task = self._bars, self._bars.add_task(what, total=steps)
            return lambda: bars.advance(task)
        done = 0

        def advance() -> None:
            nonlocal done
            before, done = done * 10 // steps, done + 1
            if done * 10 // steps != before:
                print(f"{what}: {done:,} of {steps:,}", flush=True)

        return advance


@frozen
class Figures:
    """What a run did, and how long it took."""

    ledgers: Mapping[str, Ledger]
    models: Mapping[str, Model]
    statistics: Statistics
    waits_s: Sequence[float]
    """How long each acknowledged append was waited for, sorted."""
    late: int
    deepest_mailbox: int
    longest_line: int
    took_s: float
    checked_s: float
    file_bytes: int


def show(figures: Figures) -> None:
    """Print the figures as a table."""
    table = rich.table.Table(title="what was done", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _lines(figures):
        table.add_row(name, value)
    rich.console.Console().print(table)


def _lines(figures: Figures) -> list[tuple[str, str]]:
    ledgers, models, statistics = figures.ledgers, figures.models, figures.statistics
    forks = sum(ledger.source is not None for ledger in ledgers.values())
    outcomes = Counter(
        "refused"
        if isinstance(call.outcome, Refused)
        else "cancelled"
        if call.outcome == CANCELLED
        else "acknowledged"
        for ledger in ledgers.values()
        for call in ledger.calls
    )
    stored = sum(len(model.own) for model in models.values())
    live = sum(state == "live" for model in models.values() for _, state in model.states.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024
    waits = figures.waits_s
    return [
        ("sessions, and forks", f"{len(ledgers) - forks:,} + {forks:,}"),
        ("calls acknowledged", f"{outcomes['acknowledged']:,}"),
        ("calls refused", f"{outcomes['refused']:,}"),
        ("callers cancelled, nothing written", f"{outcomes['cancelled']:,}"),
        ("callers cancelled too late, answered", f"{figures.late:,}"),
        ("readings meanwhile", f"{sum(len(ledger.looks) for ledger in ledgers.values()):,}"),
        ("messages stored", f"{stored:,}"),
        ("of them on a live path (shared ones count in each)", f"{live:,}"),
        ("appends/s, among all the rest", f"{len(waits) / figures.took_s:,.0f}"),
        ("append waited for, p50", _ms(waits, 0.50)),
        ("append waited for, p99", _ms(waits, 0.99)),
        ("commits", f"{statistics.commits:,}"),
        ("changes in a commit, mean", f"{statistics.mean_batch:.1f}"),
        ("changes in a commit, most", f"{statistics.largest_batch:,}"),
        ("deepest mailbox, and all in line", f"{figures.deepest_mailbox}, {figures.longest_line}"),
        ("log when the load ended", f"{statistics.wal_bytes / 2**20:.1f} MiB"),
        ("file", f"{figures.file_bytes / 2**20:.1f} MiB"),
        ("most memory", f"{peak_bytes / 2**20:.0f} MiB"),
        ("talking took", f"{figures.took_s:.1f} s"),
        ("checking took", f"{figures.checked_s:.1f} s"),
    ]


def show_story(story: Story, models: Mapping[str, Model], took_s: float, checked_s: float) -> None:
    """Print what several processes did, and how long each waited for its appends."""
    table = rich.table.Table(title="what was done", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _story_lines(story, models):
        table.add_row(name, value)
    for worker in sorted(story.lives):
        waits = sorted(_waits(story, worker))
        if worker and waits:
            end = ", killed" if story.was_killed(worker) else ""
            what = f"process {worker}{end}: {len(waits):,} appends, p50 / p99 / longest"
            times = " / ".join(_ms(waits, part) for part in (0.5, 0.99, 1.0))
            table.add_row(what, times)
    table.add_row("talking took", f"{took_s:.1f} s")
    table.add_row("checking took", f"{checked_s:.1f} s")
    rich.console.Console(width=100).print(table)


def _story_lines(story: Story, models: Mapping[str, Model]) -> list[tuple[str, str]]:
    asked = [note for note in story.notes if not isinstance(note.operation, (Enter, Read))]
    refused = Counter(n.outcome.error for n in asked if isinstance(n.outcome, Refused))
    answered = [n for n in asked if n.answered and n.outcome != CANCELLED]
    held = [n for n in story.notes if isinstance(n.outcome, Held)]
    how = Counter(n.operation.how for n in held if isinstance(n.operation, Enter))
    posted = Counter(n.outcome.status for n in asked if isinstance(n.outcome, Posted))
    cut_off = [n for n in story.notes if not n.answered and not n.needs_no_answer]
    waits = sorted(wait for worker in story.lives for wait in _waits(story, worker))
    return [
        ("processes, and how many of them were killed", f"{len(story.lives) - 1}, {story.kills}"),
        ("sessions and forks", f"{len(models):,}"),
        ("calls acknowledged", f"{len(answered) - refused.total():,}"),
        ("calls refused, for a turn", f"{refused['TurnActive']:,}"),
        ("calls refused, otherwise", f"{refused.total() - refused['TurnActive']:,}"),
        ("calls that a kill cut off", f"{len(cut_off):,}"),
        ("readings meanwhile", f"{sum(isinstance(n.operation, Read) for n in story.notes):,}"),
        ("turns held", f"{how['turn']:,}"),
        ("turns taken over", f"{how['take over']:,}"),
        ("turns that took from an inbox", f"{how['serve']:,}"),
        ("posts accepted", f"{posted['accepted']:,}"),
        ("posts that were duplicates, or refused", f"{posted.total() - posted['accepted']:,}"),
        ("messages stored", f"{sum(len(model.own) for model in models.values()):,}"),
        ("append waited for, p50 / p99", f"{_ms(waits, 0.5)} / {_ms(waits, 0.99)}"),
    ]


def _waits(story: Story, worker: int) -> list[float]:
    """How long each append of a process that was acknowledged was waited for."""
    return [note.ended - note.began for note in story.notes if _counts(note, worker)]


def _counts(note: Noted, worker: int) -> bool:
    appended = isinstance(note.outcome, (Appended, tuple)) and isinstance(note.operation, Say)
    return appended and note.worker == worker


def _ms(sorted_s: Sequence[float], part: float) -> str:
    if not sorted_s:
        return "-"
    return f"{sorted_s[int(part * (len(sorted_s) - 1))] * 1000:.1f} ms"
