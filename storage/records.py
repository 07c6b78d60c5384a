"""The nouns that storage returns: frozen, each field documented, no behaviour to speak of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar, overload

from attrs import field, frozen

__all__ = [
    "Appended",
    "Deleted",
    "Forked",
    "Head",
    "JSONObject",
    "Move",
    "MoveKind",
    "Moved",
    "Purged",
    "Read",
    "Rewritten",
    "SessionInfo",
    "State",
    "StoredMessage",
    "Transcript",
    "Undone",
]

T_co = TypeVar("T_co", covariant=True)

JSONObject: TypeAlias = Mapping[str, object]
"""A JSON object as Python holds it: string keys; str, int, float, bool, None, list, dict."""

State: TypeAlias = Literal["live", "rewound", "replaced", "compacted"]
"""Whether a message is on the live path, or what kind of move last took it off."""

MoveKind: TypeAlias = Literal["undo", "retry", "redo", "rewrite", "compaction", "restore", "purge"]
"""What moved a head. A purge moves nothing; it stands where the history before it ends."""


class Head(NamedTuple):
    """Where a session's live transcript ends, and all that an append needs to go on there.

    A named tuple and not an attrs class, because one is made for every append (measured:
    0.19 against 0.52 microseconds).

    Attributes:
        session: The session's number in the file; never used twice, so it tells two lives of an id
            apart.
        position: 0 where nothing has been said.
        at_tip: True if the next append extends `branch`; False if it must start a new one.
        opener: Position of the message that opened the turn in which the head stands; 0 before the
            first.
        redo: Revision of the undo that a redo would take back.
    """

    session: int
    revision: int
    branch: int
    position: int
    at_tip: bool
    opener: int
    redo: int | None


class StoredMessage(NamedTuple):
    """One message as it was written, and where it stands. A named tuple for speed, as `Head`.

    Attributes:
        body: The message, equal to the one that was appended.
        id: Unique in the file, never used twice; None while `pending`.
        position: Its place in its transcript: 1, 2, 3 …
        revision: The session's revision that its append produced; None while `pending`.
        hidden: Not shown to a person (a scaffold left by an undo).
        opens_turn: True if a user turn begins here.
        key: The caller's key, if it was given one.
        created_at: Seconds since the epoch when it was accepted. For display; nothing is ordered by
            it.
        append_id: Names the append that stored it; a batch shares one.
        pending: True while it is kept in memory because storage has not taken it yet.
    """

    body: dict[str, object]
    id: int | None
    position: int
    revision: int | None
    hidden: bool
    opens_turn: bool
    key: str | None
    created_at: float
    append_id: int
    state: State
    pending: bool

    @property
    def role(self) -> str:
        return str(self.body["role"])


@frozen
class Transcript(Sequence[StoredMessage]):
    """The messages from the root to the head, oldest first: a sequence that knows its revision.

    Attributes:
        session: The session's id.
        revision: What was read; give it as `at=` to a decision made on it. 0: no such session yet.
        position: Where the head stands, whatever part of the transcript was asked for.
    """

    session: str
    revision: int
    position: int
    messages: tuple[StoredMessage, ...] = field(repr=False)

    @property
    def bodies(self) -> list[dict[str, object]]:
        """The plain messages, as they were written."""
        return [message.body for message in self.messages]

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[StoredMessage]:
        return iter(self.messages)

    @overload
    def __getitem__(self, index: int) -> StoredMessage: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StoredMessage, ...]: ...
    def __getitem__(self, index: int | slice) -> StoredMessage | tuple[StoredMessage, ...]:
        return self.messages[index]


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


class Read(NamedTuple, Generic[T_co]):
    """The answer to a question about one session, and which session it was.

    Attributes:
        life: The session's number in the file; None if there is none yet.
    """

    found: T_co
    life: int | None


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


@frozen
class Move:
    """One change of the head other than by appending. Kept for ever.

    Attributes:
        at: Seconds since the epoch. For display.
    """

    revision: int
    kind: MoveKind
    from_position: int
    to_position: int
    at: float


@frozen
class SessionInfo:
    """A session as a list shows it.

    Attributes:
        messages: Rows on the live path, hidden ones included: the head's position.
        created_at: Seconds since the epoch. For display.
        updated_at: Seconds since the epoch of the last append, move or purge. For display.
    """

    id: str
    revision: int
    messages: int
    meta: dict[str, object]
    created_at: float
    updated_at: float
