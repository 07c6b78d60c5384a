"""Turnkeeper: the turns of many conversations at once. Start with `open_sessions`."""

from ..storage import (
    Appended,
    Closed,
    Conflict,
    Deleted,
    Forked,
    Move,
    Moved,
    Purged,
    Rejected,
    Rewritten,
    SessionInfo,
    StorageBusy,
    StorageDamaged,
    StorageError,
    StorageFailed,
    StorageFull,
    StoredMessage,
    Transcript,
    TurnkeeperError,
    Undone,
)
from .conversation import CarrierFormat
from .errors import NotRetryable
from .session import Session
from .sessions import Sessions, open_sessions
from .statistics import Health, Statistics

__all__ = [
    "Appended",
    "CarrierFormat",
    "Closed",
    "Conflict",
    "Deleted",
    "Forked",
    "Health",
    "Move",
    "Moved",
    "NotRetryable",
    "Purged",
    "Rejected",
    "Rewritten",
    "Session",
    "SessionInfo",
    "Sessions",
    "Statistics",
    "StorageBusy",
    "StorageDamaged",
    "StorageError",
    "StorageFailed",
    "StorageFull",
    "StoredMessage",
    "Transcript",
    "TurnkeeperError",
    "Undone",
    "open_sessions",
]
