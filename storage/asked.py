"""What a change is told, and what it returns: the vocabulary between actors and transactions."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

from attrs import frozen

from .messages import Draft
from .records import Head

__all__ = ["Asked", "Attempt", "Changed", "Kept", "TakenBack"]

T_co = TypeVar("T_co", covariant=True)


class Attempt(Protocol):
    """An operation that may have written something: `landed` is true once that is known."""

    @property
    def landed(self) -> bool: ...


@frozen
class Kept:
    """An append that storage did not take when it came: written ahead of anything newer."""

    drafts: tuple[Draft, ...]
    append_id: int
    now: float
    life: int | None = None
    """The number of the session that it was meant for, where that was known."""
    attempt: Attempt | None = None
    """The operation that tried to write it and whose outcome nobody could tell at the time."""


class Asked(Protocol):
    """What every change is told, besides its own arguments.

    A protocol, so that whoever carries a change to the writer can say it by himself.
    """

    @property
    def id(self) -> str:
        """The session's id."""

    @property
    def append_id(self) -> int:
        """Unique in the file; names what this change appends."""

    @property
    def now(self) -> float:
        """Seconds since the epoch, to be shown beside what is written."""

    @property
    def known(self) -> Head | None:
        """Where the head was last seen."""

    @property
    def life(self) -> int | None:
        """The number of the session that the caller means; None if he never met it."""

    @property
    def at(self) -> int | None:
        """The revision that the caller decided on."""

    @property
    def pending(self) -> tuple[Kept, ...]:
        """What is to be written first."""


class Changed(NamedTuple, Generic[T_co]):
    """What a change returns: the receipt, and where the head is now (None: no such session)."""

    receipt: T_co
    head: Head | None


@frozen
class TakenBack:
    """What the rules of conversation say of a message that an undo takes back."""

    text: str | None
    """The text to give back to the person."""
    scaffold: Draft | None = None
    """The summary that the message carried; it stays behind, hidden."""
