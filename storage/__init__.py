"""Turnkeeper's storage: transcripts in SQLite, one writer, nothing lost. Knows no actors."""

from . import appends, changes, holding, posting, removal
from .asked import Asked, Changed, Kept, Release, Rules, TakenBack
from .beside import beside
from .clock import Clock, Moment
from .codec import (
    DEFAULT_MAX_MESSAGE_BYTES,
    MAX_DEPTH,
    Columns,
    check_text,
    decode_message,
    encode_message,
    encode_object,
    same_message,
)
from .connect import Connection, Synchronous
from .errors import (
    Closed,
    Conflict,
    LossReason,
    Rejected,
    StorageBusy,
    StorageDamaged,
    StorageError,
    StorageFailed,
    StorageFull,
    TurnActive,
    TurnkeeperError,
    TurnLost,
)
from .holding import Claim
from .messages import Draft
from .offload import Offload, in_thread, inline
from .opening import open_store
from .operation import Operation
from .owners import Owners
from .places import Place
from .receipts import (
    Appended,
    Deleted,
    Ended,
    Forked,
    Moved,
    Posted,
    Purged,
    Rewritten,
    Taken,
    Undone,
)
from .records import (
    Head,
    Holder,
    InboxMessage,
    JSONObject,
    Move,
    MoveKind,
    Policy,
    Read,
    SessionInfo,
    State,
    StoredMessage,
    Transcript,
)
from .store import Store
from .tally import WriterStatistics

__all__ = [
    "DEFAULT_MAX_MESSAGE_BYTES",
    "MAX_DEPTH",
    "Appended",
    "Asked",
    "Changed",
    "Claim",
    "Clock",
    "Closed",
    "Columns",
    "Conflict",
    "Connection",
    "Deleted",
    "Draft",
    "Ended",
    "Forked",
    "Head",
    "Holder",
    "InboxMessage",
    "JSONObject",
    "Kept",
    "LossReason",
    "Moment",
    "Move",
    "MoveKind",
    "Moved",
    "Offload",
    "Operation",
    "Owners",
    "Place",
    "Policy",
    "Posted",
    "Purged",
    "Read",
    "Rejected",
    "Release",
    "Rewritten",
    "Rules",
    "SessionInfo",
    "State",
    "StorageBusy",
    "StorageDamaged",
    "StorageError",
    "StorageFailed",
    "StorageFull",
    "Store",
    "StoredMessage",
    "Synchronous",
    "Taken",
    "TakenBack",
    "Transcript",
    "TurnActive",
    "TurnLost",
    "TurnkeeperError",
    "Undone",
    "WriterStatistics",
    "appends",
    "beside",
    "changes",
    "check_text",
    "decode_message",
    "encode_message",
    "encode_object",
    "holding",
    "in_thread",
    "inline",
    "open_store",
    "posting",
    "removal",
    "same_message",
]
