"""The mailbox vocabulary: what a session's actor can be asked to do.

Each message carries its arguments, checked already, and names the transaction body that does
it. The actor treats them alike; only appends are special, for they can be handed over together,
and kept when storage does not take them.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from attrs import frozen

from ..storage import (
    Appended,
    Asked,
    Changed,
    Claim,
    Connection,
    Deleted,
    Draft,
    Ended,
    Forked,
    Moved,
    MoveKind,
    NotYet,
    Policy,
    Posted,
    Purged,
    Release,
    Rewritten,
    Taken,
    Undone,
    appends,
    changes,
    holding,
    posting,
    removal,
)
from .taking import Take

__all__ = [
    "Append",
    "Delete",
    "Dismiss",
    "Drain",
    "EndTurn",
    "Extend",
    "Fork",
    "Message",
    "Post",
    "Purge",
    "Redo",
    "Requeue",
    "Restore",
    "Rewind",
    "Rewrite",
    "SetMeta",
    "SetPolicy",
    "TakeTurn",
]


T_co = TypeVar("T_co", covariant=True)


class Message(Protocol[T_co]):
    """Anything that can be delivered to a session's actor."""

    def change(self, connection: Connection, asked: Asked) -> Changed[T_co]:
        """Do it, inside a transaction. Returns the receipt and the new head."""
        ...


@frozen
class Append:
    """Append one message."""

    draft: Draft

    def fresh(self, receipt: Appended | None) -> tuple[Draft, ...]:
        """Return what was not there yet, as far as a failed attempt has found out."""
        return () if receipt is not None and receipt.duplicate else (self.draft,)

    def change(self, connection: Connection, asked: Asked) -> Changed[Appended]:
        return appends.append(connection, asked, self.draft)


@frozen
class Extend:
    """Append several messages, all or none."""

    drafts: tuple[Draft, ...]

    def fresh(self, receipts: tuple[Appended, ...] | None) -> tuple[Draft, ...]:
        """Return what was not there yet, as far as a failed attempt has found out."""
        if receipts is None:
            return self.drafts
        pairs = zip(self.drafts, receipts, strict=True)
        return tuple(draft for draft, receipt in pairs if not receipt.duplicate)

    def change(self, connection: Connection, asked: Asked) -> Changed[tuple[Appended, ...]]:
        return appends.extend(connection, asked, self.drafts)


@frozen
class Rewind:
    """Move the head before the n-th last user turn: an undo, or the first half of a retry."""

    turns: int
    kind: MoveKind
    take: Take

    def change(self, connection: Connection, asked: Asked) -> Changed[Undone | None]:
        return changes.rewind(connection, asked, self.turns, self.kind, self.take)


@frozen
class Redo:
    """Take back the last undo that has not been taken back."""

    def change(self, connection: Connection, asked: Asked) -> Changed[Moved | None]:
        return changes.redo(connection, asked)


@frozen
class Rewrite:
    """Make the visible transcript read as these messages do."""

    drafts: tuple[Draft, ...]
    kind: MoveKind

    def change(self, connection: Connection, asked: Asked) -> Changed[Rewritten]:
        return changes.rewrite(connection, asked, self.drafts, self.kind)


@frozen
class Restore:
    """Move the head to where it was after a revision."""

    revision: int

    def change(self, connection: Connection, asked: Asked) -> Changed[Moved]:
        return changes.restore(connection, asked, self.revision)


@frozen
class Fork:
    """Begin another session at a position of this one."""

    id: str
    position: int | None
    meta: bytes | None

    def change(self, connection: Connection, asked: Asked) -> Changed[Forked]:
        return changes.fork(connection, asked, self.id, self.position, self.meta)


@frozen
class SetMeta:
    """Replace the session's meta."""

    meta: bytes

    def change(self, connection: Connection, asked: Asked) -> Changed[None]:
        return changes.set_meta(connection, asked, self.meta)


@frozen
class SetPolicy:
    """Set what becomes of messages posted mid-turn."""

    policy: Policy | None

    def change(self, connection: Connection, asked: Asked) -> Changed[None]:
        return changes.set_policy(connection, asked, self.policy)


@frozen
class TakeTurn:
    """Take the turn."""

    claim: Claim

    def change(self, connection: Connection, asked: Asked) -> Changed[Taken | NotYet | None]:
        return holding.take(connection, asked, self.claim)


@frozen
class EndTurn:
    """End the turn under which it is asked."""

    release: Release | None
    """What becomes of what it took from the inbox; None if it took nothing."""

    def change(self, connection: Connection, asked: Asked) -> Changed[Ended]:
        return holding.end(connection, asked, self.release)


@frozen
class Post:
    """Put a message into the inbox."""

    draft: Draft
    policy: Policy | None
    usual: Policy
    most: int

    def change(self, connection: Connection, asked: Asked) -> Changed[Posted]:
        return posting.post(connection, asked, self.draft, self.policy, self.usual, self.most)


@frozen
class Requeue:
    """Let a message that was set aside wait again."""

    id: int

    def change(self, connection: Connection, asked: Asked) -> Changed[bool]:
        return posting.requeue(connection, asked, self.id)


@frozen
class Dismiss:
    """Remove a message that was set aside."""

    id: int

    def change(self, connection: Connection, asked: Asked) -> Changed[bool]:
        return posting.dismiss(connection, asked, self.id)


@frozen
class Drain:
    """Write what is pending, and end what is unreleased."""

    def change(self, connection: Connection, asked: Asked) -> Changed[None]:
        return appends.drain(connection, asked)


@frozen
class Delete:
    """End the session."""

    def change(self, connection: Connection, asked: Asked) -> Changed[Deleted | None]:
        return removal.delete(connection, asked)


@frozen
class Purge:
    """Remove what is off the live path for ever."""

    def change(self, connection: Connection, asked: Asked) -> Changed[Purged]:
        return removal.purge(connection, asked)
