"""The clock that nobody sets, and what stands in for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from turnkeeper.storage.clock import BOOT_ID, WALL, Moment, best_clock, boot_clock, wall_clock

needs_linux = pytest.mark.skipif(not BOOT_ID.exists(), reason="this platform names no boots")


@pytest.fixture
def boot_id(tmp_path: Path) -> Path:
    """A file that names a boot, as Linux writes it."""
    path = tmp_path / "boot_id"
    path.write_text("7d3c\n", "ascii")
    return path


@needs_linux
def test_the_boot_clock_says_which_boot_it_counts_from() -> None:
    assert boot_clock().boot == BOOT_ID.read_text("ascii").strip()


@needs_linux
def test_the_boot_clock_counts_on_within_a_boot(boot_id: Path) -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    first, second = boot_clock(boot_id), boot_clock(boot_id)
    assert before <= first.seconds <= second.seconds <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert first.boot == second.boot == "7d3c"


@needs_linux
def test_the_boot_clock_does_not_follow_the_wall_clock(
    boot_id: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = boot_clock(boot_id)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # somebody sets the clock back by decades
    assert wall_clock().seconds == 0.0
    assert boot_clock(boot_id).seconds >= first.seconds


@needs_linux
def test_the_boot_is_read_once(boot_id: Path) -> None:
    boot_clock(boot_id)
    boot_id.unlink()
    assert boot_clock(boot_id).boot == "7d3c"


def test_a_boot_clock_without_a_boot_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - which one is the system's affair
        boot_clock(tmp_path / "missing")


def test_the_wall_clock_names_no_boot_and_counts_from_1970() -> None:
    before = time.time()
    moment = wall_clock()
    assert before <= moment.seconds <= time.time()
    assert moment.boot == WALL


@needs_linux
def test_the_best_clock_is_the_boot_clock() -> None:
    clock = best_clock()
    assert clock().boot == boot_clock().boot != WALL


def test_the_best_clock_is_the_wall_clock_where_boots_have_no_name(tmp_path: Path) -> None:
    assert best_clock(tmp_path / "missing") is wall_clock


@pytest.mark.parametrize("garbage", [b"", b"\n", b"\xff\xfe"])
def test_the_best_clock_is_the_wall_clock_where_the_name_is_garbage(
    tmp_path: Path, garbage: bytes
) -> None:
    path = tmp_path / "boot_id"
    path.write_bytes(garbage)
    assert best_clock(path) is wall_clock


@needs_linux
@pytest.mark.parametrize("error", [OSError("no such clock"), AttributeError("CLOCK_BOOTTIME")])
def test_the_best_clock_is_the_wall_clock_where_nothing_counts_from_the_boot(
    boot_id: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(clock: int) -> float:
        raise error

    monkeypatch.setattr(time, "clock_gettime", fails)
    assert best_clock(boot_id) is wall_clock


def test_a_clock_that_was_chosen_stays(boot_id: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    clock = best_clock(missing)
    missing.write_text("9e1f\n", "ascii")
    assert clock().boot == WALL


def test_moments_are_compared_field_by_field() -> None:
    assert Moment("a", 1.0) == Moment("a", 1.0) != Moment("b", 1.0)
