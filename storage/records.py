"""The nouns that storage returns: frozen, each field documented, no behaviour to speak of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar, overload

from attrs import field, frozen

__all__ = [
    "Head",
    "Holder",
    "InboxMessage",
    "JSONObject",
    "Move",
    "MoveKind",
    "Policy",
    "Read",
    "SessionInfo",
    "State",
    "StoredMessage",
    "Transcript",
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
