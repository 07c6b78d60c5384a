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
from stress_calls import CANCELLED, Ledger, Refused
from stress_model import Model

from turnkeeper.actors import Statistics

__all__ = ["Figures", "Progress", "show"]


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


def _ms(sorted_s: Sequence[float], part: float) -> str:
    if not sorted_s:
        return "-"
    return f"{sorted_s[int(part * (len(sorted_s) - 1))] * 1000:.1f} ms"
