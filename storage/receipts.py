"""What a change says once it is on disk: frozen, each field documented."""

from __future__ import annotations

from typing import Literal, NamedTuple

from attrs import frozen

from .records import Policy, StoredMessage

__all__ = [
    "Appended",
    "Deleted",
    "Ended",
    "Forked",
    "Moved",
    "NotYet",
    "Posted",
    "Purged",
    "Rewritten",
    "Taken",
    "Undone",
]


class Appended(NamedTuple):
    """The receipt of one message: it is on disk.

    Attributes:
        duplicate: True if its key had been seen before; the other fields are then the first
            receipt's.
        live: True if the message is on the live path. An undone duplicate is not.
    """

    id: int
    position: int
    revision: int
    duplicate: bool
    live: bool


@frozen
class Undone:
    """The receipt of an undo, and of the undo that is half of a retry.

    Attributes:
        text: The person's text that was taken back; None where it was not plain text (never so for
            a retry).
        turns: User turns taken off the live path.
        messages: Rows taken off the live path, hidden ones included.
        position: The new last position.
    """

    text: str | None
    turns: int
    messages: int
    position: int
    revision: int


@frozen
class Moved:
    """The receipt of a redo or a restore."""

    position: int
    revision: int


@frozen
class Rewritten:
    """The receipt of a rewrite.

    Attributes:
        kept: Visible messages at the beginning that were left where they are.
        replaced: Rows taken off the live path.
        appended: Receipts of the new messages, in order.
        changed: False if the transcript already read so; nothing was written then.
    """

    kept: int
    replaced: int
    appended: tuple[Appended, ...]
    position: int
    revision: int
    changed: bool


@frozen
class Forked:
    """The receipt of a fork.

    Attributes:
        session: The new session's id.
        position: Where it starts, in the source and in the fork alike.
        revision: The new session's first revision.
    """

    session: str
    position: int
    revision: int


@frozen
class Deleted:
    """The receipt of a delete.

    Attributes:
        messages: Rows removed from the file; rows that a fork still reaches stay.
        revision: The last revision of this session; a new one of the same id starts above it.
    """

    messages: int
    revision: int


@frozen
class Purged:
    """The receipt of a purge.

    Attributes:
        messages: Retired rows removed from the file for ever.
    """

    messages: int


class Taken(NamedTuple):
    """The receipt of a turn that was taken.

    Attributes:
        token: Larger than every token before it, in the whole file.
        messages: What it took from the inbox, in order, as it stands in the transcript.
        attempt: How often the first of these has been taken, this time included; 0 without any.
    """

    token: int
    since: float
    messages: tuple[StoredMessage, ...]
    attempt: int


class NotYet(NamedTuple):
    """No turn was taken: what comes first in the inbox failed, and waits for its next try.

    Attributes:
        in_s: For how many seconds more.
    """

    in_s: float


class Ended(NamedTuple):
    """The receipt of a turn's end.

    Attributes:
        closed: Tool calls that it left open and that were given a synthetic result.
        set_aside: Messages that were tried often enough and are not delivered any more.
        waiting: Whether messages wait in the inbox, if it had taken some from there.
    """

    closed: int
    set_aside: int
    waiting: bool


class Posted(NamedTuple):
    """The receipt of a post; said after the commit.

    Attributes:
        status: ``accepted``: it is on disk and will be delivered. ``duplicate``: its key had been
            seen before; `id` and `accepted_at` are the first receipt's. ``full``: the inbox holds as
            many as it may; nothing was stored, nothing dropped. ``refused``: the session is busy
            and the policy says so; nothing was stored.
        id: Names the message for ever, also when it is delivered again; None if nothing was stored.
        accepted_at: Seconds since the epoch. For display.
        policy: The policy that was applied.
        waiting: Messages in the inbox that wait or are acted on, this one included.
    """

    status: Literal["accepted", "duplicate", "full", "refused"]
    id: int | None
    accepted_at: float | None
    policy: Policy
    waiting: int
