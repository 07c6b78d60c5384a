"""What is not as it must be, and how it is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from attrs import frozen

__all__ = ["Wrong", "alike", "same"]

T = TypeVar("T")

SHOWN = 180
"""Characters of a value that a wrong line shows."""


@frozen
class Wrong(Exception):
    """Something that is not as it must be."""

    session: str
    what: str
    expected: object
    found: object

    def __str__(self) -> str:
        expected, found = str(self.expected), str(self.found)
        pairs = zip(expected, found, strict=False)
        same = next((index for index, (one, other) in enumerate(pairs) if one != other), 0)
        return (
            f"session {self.session}, {_short(self.what, 0)}:\n"
            f"  expected {_short(expected, same)}\n  found    {_short(found, same)}"
        )


def same(id: str, what: str, expected: object, found: object) -> None:
    """Raise `Wrong` unless both are equal."""
    if expected != found or type(expected) is not type(found):
        raise Wrong(id, what, expected, found)


def alike(id: str, what: str, expected: Sequence[T], found: Iterable[T]) -> None:
    """Raise `Wrong` with the first difference of two lists."""
    there = list(found)
    for number, (one, other) in enumerate(zip(expected, there, strict=False), 1):
        same(id, f"{what}, number {number}", one, other)
    if len(expected) != len(there):
        longer = expected if len(expected) > len(there) else there
        first = longer[min(len(expected), len(there))]
        sizes = f"{len(expected)} against {len(there)}; the first without a match is {first}"
        raise Wrong(id, f"{what}, length: {sizes}", len(expected), len(there))


def _short(text: str, start: int) -> str:
    """Return at most two lines of `text`, around `start` if it is longer."""
    first = max(0, start - SHOWN // 4) if len(text) > SHOWN else 0
    before, after = "…" if first else "", "…" if len(text) > first + SHOWN else ""
    return f"{before}{text[first : first + SHOWN]}{after}"
