"""Checks of arguments that several calls share; each raises `Rejected` and names the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import TypeVar, get_args

from ..storage import Policy, Rejected, check_text

__all__ = ["check_holder", "check_number", "check_policy", "check_seconds", "listed"]

T = TypeVar("T")

MAX_HOLDER_LENGTH = 1_000
"""Characters. A guess: it is a name."""

MAX_INTEGER = 2**63 - 1
"""What SQLite can hold."""


def check_number(value: object, field: str, *, least: int) -> None:
    """Raise `Rejected` unless `value` is an integer from `least` to `MAX_INTEGER`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise Rejected(field, f"must be an integer, not {type(value).__name__}")
    if not least <= value <= MAX_INTEGER:
        raise Rejected(field, f"must be at least {least} and fit 64 bits")


def check_seconds(value: object, field: str, *, least: float = 0.0, most: float = inf) -> float:
    """Return `value`, a number of seconds from `least` to `most`; else `Rejected`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise Rejected(field, f"must be a number of seconds, not {type(value).__name__}")
    if not least <= value <= most:  # nor NaN
        raise Rejected(field, f"must be {least:g} to {most:g} seconds")
    return float(value)


def check_policy(value: object, field: str = "policy") -> None:
    """Raise `Rejected` unless `value` is a policy, or None."""
    if value is not None and value not in get_args(Policy):
        raise Rejected(field, f"must be one of {get_args(Policy)}")


def check_holder(value: object) -> str:
    """Return `value` if it can be what a holder calls itself; else `Rejected`."""
    return check_text(value, "holder", max_length=MAX_HOLDER_LENGTH)


def listed(values: Iterable[T], field: str) -> list[T]:
    """Return `values` as a list; `Rejected` if they are none, or one string or object."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise Rejected(field, f"must be a list, not {type(values).__name__}")
    return list(values)
