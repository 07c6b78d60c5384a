"""The nouns that storage returns: frozen, each field documented, no behaviour to speak of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar, overload

from attrs import field, frozen

__all__ = [
    "Appended",
    "Deleted",
    "Ended",
    "Forked",
    "Head",
    "Holder",
    "InboxMessage",
    "JSONObject",
    "Move",
    "MoveKind",
    "Moved",
    "Policy",
    "Posted",
    "Purged",
    "Read",
    "Rewritten",
    "SessionInfo",
    "State",
    "StoredMessage",
    "Taken",
    "Transcript",
    "Undone",
]

T_co = TypeVar("T_co", covariant=True)

JSONObject: TypeAlias = Mapping[str, object]
"""A JSON object as Python holds it: string keys; str, int, float, bool, None, list, dict."""

State: TypeAlias = Literal["live", "rewound", "replaced", "compacted"]
"""Whether a message is on the live path, or what kind of move last took it off."""

MoveKind: TypeAlias = Literal[
    "undo", "retry", "redo", "rewrite", "compaction", "restore", "purge", "lost"
]
"""What moved a head. A purge moves nothing; it stands where the history before it ends. Two moves
``lost``, out and back, leave beside the path what a lost turn had pending."""

Policy: TypeAlias = Literal["queue", "collect", "interrupt", "refuse"]
"""What becomes of a message that is posted while the session is busy: a turn is held, or other
messages wait. ``queue``: it waits for a turn of its own. ``collect``: it waits, and one turn takes
all such messages that wait in a row. ``interrupt``: the turn that is held is cancelled and ended, and
the next one takes all that waits up to it. ``refuse``: it is not accepted."""


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
        turn: Token of the turn that holds the session; None if nobody does.
    """

    session: int
    revision: int
    branch: int
    position: int
    at_tip: bool
    opener: int
    redo: int | None
    turn: int | None


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
        append_id: Names the append that stored it; a batch shares one. Of a message that came
            through the inbox it is the id that its receipt said.
        pending: True while it is kept in memory because storage has not taken it yet.
        synthetic: True if nobody said it: it closes a tool call whose turn ended without a result.
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
    synthetic: bool

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


class Holder(NamedTuple):
    """Who holds a session's turn.

    Attributes:
        name: What it calls itself.
        since: When it took the turn, in seconds since the epoch. For display.
        expires_in: For how many seconds it lasts if it is not renewed; 0 if it is over, so that
            anybody may pass.
    """

    name: str
    since: float
    expires_in: float


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


@frozen
class InboxMessage:
    """A message in an inbox.

    Attributes:
        id: As its receipt said.
        session: The session's id.
        attempts: How often a turn has taken it.
        taken: Whether a turn has it now, or had it and did not end well.
        set_aside: Why it is not delivered any more; None if it waits.
        place: Where it stands among all; give the last one's as `after=` for the next page.
    """

    id: int
    session: str
    body: dict[str, object] = field(repr=False)
    key: str | None
    policy: Policy
    accepted_at: float
    attempts: int
    taken: bool
    set_aside: str | None
    place: int


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
