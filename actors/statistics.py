"""What an open store says of itself: frozen, each field documented."""

from __future__ import annotations

from attrs import frozen

__all__ = ["Health", "Statistics"]


@frozen
class Statistics:
    """What a store is doing and has done.

    Attributes:
        resident: Actors in memory.
        busy: Of those, the ones with something under way or waiting.
        mailboxes: Messages accepted and not yet taken, in all mailboxes.
        in_line: Messages that wait for room in a full mailbox.
        pending: Messages kept in memory because storage has not taken them yet.
        turns: Turns that this process holds.
        waiting_for_turn: Those in this process who wait for one.
        failures: Actors that failed and were built again. Each is a bug.
        operations: Changes in those commits.
        mean_batch: Changes in a commit.
        wal_bytes: Size of SQLite's write-ahead log. It grows while somebody holds a read
            transaction open.
    """

    resident: int
    busy: int
    mailboxes: int
    deepest_mailbox: int
    in_line: int
    pending: int
    turns: int
    waiting_for_turn: int
    failures: int
    commits: int
    operations: int
    mean_batch: float
    largest_batch: int
    wal_bytes: int


@frozen
class Health:
    """Whether what is said is also written.

    Attributes:
        ok: False while storage fails, or something is pending.
        pending: Messages in memory that are not on disk yet.
        failing_s: For how many seconds storage has been failing; None if the last commit went well.
        cause: What storage said last, without any message's content.
    """

    ok: bool
    pending: int
    failing_s: float | None
    cause: str | None
