"""Run the measurements, print one table, write the figures as JSON.

    python tests/benchmarks/run.py [NAME ...] [--json FILE]

Each runs in a process of its own, so that none inherits another's memory. Nothing fails because
a figure is missed: that is for a reader to judge, who knows what else the machine was doing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import apsw
from figures import Figure
from rich.console import Console
from rich.table import Table

NAMES = (
    "appends",
    "growth",
    "load",
    "idle",
    "wake",
    "content",
    "latency",
    "turns",
    "waiting",
    "serving",
)


def measure(name: str) -> list[Figure]:
    """Return the figures of one measurement."""
    figures: list[Figure] = import_module(name).measure()
    return figures


def table_of(figures: dict[str, list[Figure]]) -> Table:
    """Return the figures as a table, a section for each measurement."""
    table = Table("name", "asked", "measured", "unit", "ok")
    table.columns[1].justify = table.columns[2].justify = "right"
    for found in figures.values():
        for figure in found:
            ok = {None: "", True: "[green]yes", False: "[red]no"}[figure.ok]
            table.add_row(figure.name, figure.asked, number(figure.measured), figure.unit, ok)
        table.add_section()
    return table


def number(value: float) -> str:
    """Return `value` with three digits that mean something."""
    return f"{value:,.0f}" if abs(value) >= 1_000 or value == int(value) else f"{value:.3g}"


def as_json(figures: dict[str, list[Figure]]) -> str:
    """Return the figures, and what they were measured on, as JSON."""
    machine = {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "trio": version("trio"),
        "turnkeeper": version("turnkeeper"),
    }
    rows = [
        {"measurement": name, **figure._asdict(), "ok": figure.ok}
        for name, found in figures.items()
        for figure in found
    ]
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return json.dumps({"measured_at": when, "machine": machine, "figures": rows}, indent=1)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description="Measure Turnkeeper.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--json", type=Path, default=Path("benchmarks.json"), metavar="FILE")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    console = Console()
    console.width = max(console.width, 120)  # a line for each figure, in a log as well
    figures: dict[str, list[Figure]] = {}
    for name in options.names or NAMES:
        started = time.perf_counter()
        with (
            console.status(f"measuring {name} …"),
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
        ):
            figures[name] = process.submit(measure, name).result()
        console.print(f"{name}: {time.perf_counter() - started:.1f} s", style="dim")
    console.print(table_of(figures))
    options.json.write_text(as_json(figures) + "\n", "utf-8")
    console.print(f"written to {options.json}")


if __name__ == "__main__":
    main()
