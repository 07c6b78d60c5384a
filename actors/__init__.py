"""Turnkeeper: the turns of many conversations at once. Start with `open_sessions`."""

from ..storage import (
    Appended,
    Closed,
    Conflict,
    Deleted,
    Forked,
    Holder,
    InboxMessage,
    Move,
    Moved,
    Policy,
    Posted,
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
    TurnActive,
    TurnkeeperError,
    TurnLost,
    Undone,
)
from .conversation import CarrierFormat
from .errors import NotRetryable
from .opening import open_sessions
from .serve import Handler
from .session import Session
from .sessions import Sessions
from .statistics import Health, Statistics
from .turn import Turn

__all__ = [
    "Appended",
    "CarrierFormat",
    "Closed",
    "Conflict",
    "Deleted",
    "Forked",
    "Handler",
    "Health",
    "Holder",
    "InboxMessage",
    "Move",
    "Moved",
    "NotRetryable",
    "Policy",
    "Posted",
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
    "Turn",
    "TurnActive",
    "TurnLost",
    "TurnkeeperError",
    "Undone",
    "open_sessions",
]
