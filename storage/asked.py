"""What a change is told, and what it returns: the vocabulary between actors and transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from attrs import frozen

from .clock import Clock
from .messages import Draft
from .owners import Owners
from .records import Head, JSONObject

__all__ = ["Asked", "Attempt", "Changed", "Kept", "Outcome", "Release", "Rules", "TakenBack"]

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
    token: int | None = None
    """The turn under which it was appended. If that is lost by now, it only goes into the history."""


Outcome: TypeAlias = Literal["done", "failed", "given back"]
"""What becomes of the messages that a turn took. ``done``: they were acted on, and leave the inbox.
``failed``: they are tried again, or set aside if that was the last try. ``given back``: they wait as
if this turn had not been."""


@frozen
class Release:
    """How a turn has ended."""

    outcome: Outcome
    most_attempts: int
    """How often a message is tried."""
    why: str = ""
    """Noted with messages that are set aside now."""
    pause_s: float = 0.0
    """How long the others wait for their next try."""


@frozen
class Rules:
    """What the transactions of a store ask about turns, and cannot know by themselves."""

    clock: Clock
    """What time it is, for what expires."""
    owners: Owners
    """Who we are, and who else lives."""
    close_calls: Callable[[Iterable[JSONObject]], Sequence[Draft]]
    """The results that close what these messages leave open, of tool calls."""


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

    @property
    def rules(self) -> Rules:
        """What is asked about turns."""

    @property
    def token(self) -> int | None:
        """The turn under which this is asked; None: under none."""

    @property
    def renew_s(self) -> float | None:
        """For how many seconds from now that turn is to last; None: as long as it did."""

    @property
    def interleave(self) -> bool:
        """Whether this may go between the messages of somebody else's turn."""

    @property
    def unreleased(self) -> Mapping[int, Release | None]:
        """Turns of ours that have ended, by token, and whose end storage did not take yet."""


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
