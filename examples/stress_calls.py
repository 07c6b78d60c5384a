"""The words of the stress test: what is asked of a session, what it answers, and where it is noted."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import trio
from attrs import Factory, define, frozen

from turnkeeper.actors import (
    Appended,
    Conflict,
    Forked,
    Moved,
    Rejected,
    Rewritten,
    Session,
    StorageError,
    Turn,
    TurnkeeperError,
    TurnLost,
    Undone,
)

__all__ = [
    "CANCELLED",
    "Body",
    "Call",
    "Fork",
    "Ledger",
    "Look",
    "Operation",
    "Outcome",
    "Path",
    "Redo",
    "Refused",
    "Restore",
    "Rewind",
    "Rewrite",
    "Row",
    "Say",
    "perform",
    "refused",
]

Body: TypeAlias = dict[str, object]


class Row(NamedTuple):
    """A message as it must be read."""

    id: int
    position: int
    revision: int
    body: Body
    key: str | None
    hidden: bool
    opens_turn: bool


Path: TypeAlias = tuple[Row, ...]


@frozen
class Say:
    """An append, or an extend if `batch`."""

    bodies: tuple[Body, ...]
    keys: tuple[str | None, ...]
    hidden: bool = False
    batch: bool = False
    at: int | None = None
    interleave: bool = False


@frozen
class Rewind:
    kind: Literal["undo", "retry"]
    turns: int = 1


@frozen
class Redo:
    at: int | None = None


@frozen
class Rewrite:
    bodies: tuple[Body, ...]
    reason: Literal["rewrite", "compaction"]
    at: int | None = None


@frozen
class Restore:
    revision: int


@frozen
class Fork:
    id: str
    position: int | None
    at: int | None = None


Operation: TypeAlias = Say | Rewind | Redo | Rewrite | Restore | Fork


@frozen
class Refused:
    """An error, as far as it can be foretold."""

    error: str
    revision: int | None = None
    """The one that was there, of a conflict."""


CANCELLED: Literal["cancelled"] = "cancelled"

Outcome: TypeAlias = (
    Appended
    | tuple[Appended, ...]
    | Undone
    | Moved
    | Rewritten
    | Forked
    | Refused
    | Literal["cancelled"]
    | None
)


@define(eq=False)
class Call:
    """One call and its outcome."""

    operation: Operation
    ended: bool = False
    outcome: Outcome = None


class Look(NamedTuple):
    """One reading while others wrote: what was seen, and the least that had to be."""

    acknowledged: int
    """The highest revision of which a receipt had come before the reading began."""
    revision: int
    ids: tuple[int, ...]
    error: str | None = None


@define(eq=False)
class Ledger:
    """All that one session was asked, in the order of the calls, and what it answered."""

    id: str
    source: str | None = None
    """The session that it was forked from."""
    calls: list[Call] = Factory(list)
    looks: list[Look] = Factory(list)
    acknowledged: int = 0


async def perform(session: Session | Turn, call: Call) -> None:
    """Make `call` and note its outcome in it; only a cancellation is raised.

    Up to the mailbox nothing is awaited, so calls reach it in the order in which they are made.
    """
    try:
        call.outcome = await _ask(session, call.operation)
    except trio.Cancelled:
        call.outcome = CANCELLED
        raise
    except TurnkeeperError as error:
        call.outcome = refused(error)
    except Exception as error:  # a bug of ours; the checker will say that it was not expected
        call.outcome = Refused(repr(error))
    finally:
        call.ended = True


def refused(error: TurnkeeperError) -> Refused:
    """Return what of `error` can be foretold; of one of storage, which nobody foretells, all."""
    match error:
        case Rejected():
            return Refused(f"Rejected: {error.field}")
        case Conflict():
            return Refused("Conflict", error.revision)
        case TurnLost():
            return Refused(f"TurnLost: {error.reason}")
        case StorageError():
            return Refused(f"{type(error).__name__}: {error}")
    return Refused(type(error).__name__)


async def _ask(session: Session | Turn, operation: Operation) -> Outcome:
    match operation:
        case Say((body,), (key,), hidden, at=at, interleave=True) if isinstance(session, Session):
            return await session.append(body, key=key, hidden=hidden, at=at, interleave=True)
        case Say(bodies, keys, batch=True, at=at):
            return await session.extend(bodies, keys=keys, at=at)
        case Say((body,), (key,), hidden, at=at):
            return await session.append(body, key=key, hidden=hidden, at=at)
        case Rewind("undo", turns):
            return await session.undo(turns)
        case Rewind():
            return await session.retry()
        case Redo(at):
            return await session.redo(at=at)
        case Rewrite(bodies, reason, at):
            return await session.rewrite(bodies, reason=reason, at=at)
        case Restore(revision):
            return await session.restore(revision)
        case Fork(id, position, at) if isinstance(session, Session):
            return await session.fork(id, position=position, at=at)
    raise ValueError(f"{operation} is none of these")
