"""What time it is, on a clock that nobody sets.

How long something has lasted must not depend on the wall clock: a person, or a time server,
may step it by hours. `boot_clock` counts from the start of the machine, suspended or not, and
says which start that was, so that moments that cannot be compared can be told from those that
can. `best_clock` gives it where the platform has it, and the wall clock where it has not.

Moments with the same `boot` are on one clock. Of two different ones nothing follows but that:
mostly the machine was started again in between, but a container may be told a boot of its own.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

__all__ = ["BOOT_ID", "WALL", "Clock", "Moment", "best_clock", "boot_clock", "wall_clock"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Where Linux says which start of the machine this is; a new UUID each time."""

WALL = "wall"
"""The `boot` of a moment on the wall clock; no boot id looks like this."""


class Moment(NamedTuple):
    """A point in time: seconds since a start of the machine, and which start that was."""

    boot: str
    seconds: float


Clock: TypeAlias = Callable[[], Moment]


def boot_clock(boot_id: Path = BOOT_ID) -> Moment:
    """Return the seconds since the machine started, those in suspension included.

    Raises `OSError` where the platform has no such clock, or does not name its boots.
    """
    # Not time.monotonic(): it stands still on Linux while the machine is suspended, and
    # nowhere says since when it counts.
    return Moment(_boot(boot_id), _since_boot())


def wall_clock() -> Moment:
    """Return the seconds since 1970. Whoever sets the clock moves these moments too."""
    return Moment(WALL, time.time())


def best_clock(boot_id: Path = BOOT_ID) -> Clock:
    """Return the boot clock where it works, else the wall clock. Never raises.

    Which one is decided here, once: one that changed its mind would make its own moments
    incomparable.
    """
    clock = partial(boot_clock, boot_id)
    try:
        clock()
    except (AttributeError, OSError, ValueError):  # a C library without it, no boot id, or garbage
        return wall_clock
    return clock


if sys.platform == "linux":

    def _since_boot() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def _since_boot() -> float:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@cache  # a process does not outlive its boot; what failed is not remembered
def _boot(file: Path) -> str:
    boot = file.read_text("ascii").strip()
    if not boot:
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA), str(file))
    return boot
