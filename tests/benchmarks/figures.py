"""What a measurement returns, and the folder it works in.

A figure is judged only where the project has promised something. Machines are noisy, so
whatever is compared is measured in turn, in the same run, several times.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["Figure", "print_all", "quantile", "work_folder"]


class Figure(NamedTuple):
    """One measured number, with what is asked of it."""

    name: str
    measured: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def asked(self) -> str:
        """What is asked, in words; empty if nothing is."""
        if self.at_least is not None:
            return f"≥ {self.at_least:,g}"
        return "" if self.at_most is None else f"≤ {self.at_most:,g}"

    @property
    def ok(self) -> bool | None:
        """Whether it is what was asked; None if nothing was."""
        if self.at_least is not None:
            return self.measured >= self.at_least
        return None if self.at_most is None else self.measured <= self.at_most


@contextmanager
def work_folder() -> Iterator[Path]:
    """Lend an empty folder on a disk, removed afterwards.

    Not simply the system's default: on many machines that is memory, where a sync costs nothing.
    """
    place = os.environ.get("TMPDIR") or ("/var/tmp" if os.path.isdir("/var/tmp") else None)
    with tempfile.TemporaryDirectory(prefix="turnkeeper-bench-", dir=place) as folder:
        gc.collect()  # nobody pays for what the one before has left
        yield Path(folder)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def print_all(figures: Sequence[Figure]) -> None:
    """Print figures as plain lines, for a measurement that is run by itself."""
    for figure in figures:
        asked = f"  (asked: {figure.asked})" if figure.asked else ""
        print(f"{figure.name}: {figure.measured:,.4g} {figure.unit}{asked}")
