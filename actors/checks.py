"""Checks of arguments that several calls share; each raises `Rejected` and names the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from ..storage import Rejected

__all__ = ["check_number", "listed"]

T = TypeVar("T")

MAX_INTEGER = 2**63 - 1
"""What SQLite can hold."""


def check_number(value: object, field: str, *, least: int) -> None:
    """Raise `Rejected` unless `value` is an integer from `least` to `MAX_INTEGER`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise Rejected(field, f"must be an integer, not {type(value).__name__}")
    if not least <= value <= MAX_INTEGER:
        raise Rejected(field, f"must be at least {least} and fit 64 bits")


def listed(values: Iterable[T], field: str) -> list[T]:
    """Return `values` as a list; `Rejected` if they are none, or one string or object."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise Rejected(field, f"must be a list, not {type(values).__name__}")
    return list(values)
