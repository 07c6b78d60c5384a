"""Turnkeeper's storage: transcripts in SQLite, one writer, nothing lost. Knows no actors."""

from .appends import append, drain, extend
from .asked import Asked, Changed, Kept, TakenBack
from .beside import beside
from .changes import fork, redo, restore, rewind, rewrite, set_meta
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
    Rejected,
    StorageBusy,
    StorageDamaged,
    StorageError,
    StorageFailed,
    StorageFull,
    TurnkeeperError,
)
from .messages import Draft
from .offload import Offload, in_thread, inline
from .operation import Operation
from .places import Place
from .records import (
    Appended,
    Deleted,
    Forked,
    Head,
    JSONObject,
    Move,
    Moved,
    MoveKind,
    Purged,
    Read,
    Rewritten,
    SessionInfo,
    State,
    StoredMessage,
    Transcript,
    Undone,
)
from .removal import delete, purge
from .store import Store, open_store
from .tally import WriterStatistics

__all__ = [
    "DEFAULT_MAX_MESSAGE_BYTES",
    "MAX_DEPTH",
    "Appended",
    "Asked",
    "Changed",
    "Closed",
    "Columns",
    "Conflict",
    "Connection",
    "Deleted",
    "Draft",
    "Forked",
    "Head",
    "JSONObject",
    "Kept",
    "Move",
    "MoveKind",
    "Moved",
    "Offload",
    "Operation",
    "Place",
    "Purged",
    "Read",
    "Rejected",
    "Rewritten",
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
    "TakenBack",
    "Transcript",
    "TurnkeeperError",
    "Undone",
    "WriterStatistics",
    "append",
    "beside",
    "check_text",
    "decode_message",
    "delete",
    "drain",
    "encode_message",
    "encode_object",
    "extend",
    "fork",
    "in_thread",
    "inline",
    "open_store",
    "purge",
    "redo",
    "restore",
    "rewind",
    "rewrite",
    "same_message",
    "set_meta",
]
