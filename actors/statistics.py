"""What an open store says of itself: frozen, each field documented."""

from __future__ import annotations

from attrs import frozen

__all__ = ["Health", "Statistics"]


@frozen
class Statistics:
    """What a store is doing and has done."""

    resident: int
    """Actors in memory."""
    busy: int
    """Of those, the ones with something under way or waiting."""
    mailboxes: int
    """Messages accepted and not yet taken, in all mailboxes."""
    deepest_mailbox: int
    in_line: int
    """Messages that wait for room in a full mailbox."""
    pending: int
    """Messages kept in memory because storage has not taken them yet."""
    failures: int
    """Actors that failed and were built again. Each is a bug."""
    commits: int
    operations: int
    """Changes in those commits."""
    mean_batch: float
    """Changes in a commit."""
    largest_batch: int
    wal_bytes: int
    """Size of SQLite's write-ahead log. It grows while somebody holds a read transaction open."""


@frozen
class Health:
    """Whether what is said is also written."""

    ok: bool
    """False while storage fails, or something is pending."""
    pending: int
    """Messages in memory that are not on disk yet."""
    failing_s: float | None
    """For how many seconds storage has been failing; None if the last commit went well."""
    cause: str | None
    """What storage said last, without any message's content."""
