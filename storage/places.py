"""Where in the tree: a place, and a run of messages. The tables' shared coordinates."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Place", "Range"]


class Place(NamedTuple):
    """A position on the path through a branch. Position 0 is before the first message."""

    branch: int
    position: int


class Range(NamedTuple):
    """The messages of `branch` at positions `first` to `last`, both included."""

    branch: int
    first: int
    last: int
