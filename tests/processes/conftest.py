"""Every test here gets its processes from the fleet, which ends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from processes.fleet import Fleet, fleet_in


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """No process yet, and no file."""
    with fleet_in(tmp_path) as fleet:
        yield fleet
