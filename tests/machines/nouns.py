"""What the model of a store is made of: messages, rows, sessions, turns, posts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from turnkeeper.actors import TurnkeeperError
from turnkeeper.storage import Policy

__all__ = [
    "Body",
    "By",
    "Draft",
    "Got",
    "Held",
    "Kept",
    "Life",
    "Path",
    "Post",
    "Refused",
    "Row",
    "Took",
    "open_calls",
    "opener",
    "plain",
]

Body = dict[str, object]


def plain(value: object) -> str:
    """Return a text that is the same for the same JSON: 1, 1.0 and true are three things."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


class Refused(Exception):
    """The change is refused and nothing has happened; `kind` is what the store must raise."""

    def __init__(self, kind: type[TurnkeeperError], why: str, held: Held | None = None) -> None:
        super().__init__(kind, why)
        self.kind = kind
        self.held = held
        """Whose turn refuses it, where that is known."""


@dataclass(frozen=True)
class Draft:
    """A message as it is given, and what the rules of conversation say of it."""

    body: Body
    opens: bool = False
    """A person wrote it."""
    text: str | None = None
    """What a retry may send again; None where it may not."""
    scaffold: Body | None = None
    """The summary that it carries."""
    hidden: bool = False
    key: str | None = None
    calls: tuple[str, ...] = ()
    """The tool calls that it makes."""
    answers: tuple[str, ...] = ()
    """The tool calls whose results it brings."""
    synthetic: bool = False
    """Nobody said it: it closes a call."""

    def same(self, other: Draft) -> bool:
        return plain(self.body) == plain(other.body)


@dataclass(frozen=True)
class Row:
    """A message as it was stored."""

    number: int
    draft: Draft
    position: int
    revision: int
    post: int | None = None
    """The post that it was, if it came through the inbox."""


Path = tuple[Row, ...]


def opener(path: Path) -> int:
    """Return where the last exchange of a transcript begins; 0 where there is none."""
    return max((row.position for row in path if row.draft.opens), default=0)


def open_calls(rows: Sequence[Row]) -> list[str]:
    """Return the calls that are made in `rows` and not answered behind."""
    calls: list[str] = []
    for row in rows:
        for call in row.draft.answers + row.draft.calls:
            if call in calls:
                calls.remove(call)
        calls += row.draft.calls
    return calls


@dataclass(frozen=True)
class By:
    """Who asks for a change."""

    side: int
    """The open store through which it is asked; each opening is another."""
    life: int | None = None
    """The session that is meant, where that is known."""
    token: int | None = None
    """The turn under which it is asked."""
    interleave: bool = False


@dataclass(frozen=True)
class Kept:
    """An append that storage did not take."""

    drafts: tuple[Draft, ...]
    life: int | None
    token: int | None


@dataclass(frozen=True)
class Held:
    """A turn."""

    token: int
    side: int
    holder: str
    opener: int
    """Where the exchange began in which it was taken."""
    ttl: float
    expires: float
    renew_at: float
    """When its holder renews it, if it can."""
    seen: int
    """What was posted later may interrupt it."""


@dataclass(frozen=True)
class Post:
    """A message in an inbox."""

    number: int
    draft: Draft
    policy: Policy
    place: int
    """Where it stands among all."""
    attempts: int = 0
    token: int | None = None
    row: Row | None = None
    """What it became when a turn first took it."""
    aside: bool = False


@dataclass(frozen=True)
class Got:
    """The receipt of an append, but for the id, which only the store knows."""

    row: Row
    duplicate: bool


@dataclass(frozen=True)
class Took:
    """The receipt of a turn; `held` is None if nothing waited for it."""

    held: Held | None
    rows: Path = ()
    attempt: int = 0


@dataclass
class Life:
    """One session, from its creation until it is deleted."""

    number: int
    revision: int
    live: Path
    ever: list[Row]
    """Every row that was on its path, in the order written; less what was purged."""
    states: dict[int, str]
    """For the rows that are off the path: what took them off."""
    snapshots: dict[int, Path]
    """The transcript after each revision that can be restored."""
    redo: list[Path] = field(default_factory=list)
    """Where the undos came from that have not been taken back, the last one last."""
    keys: dict[str, Row] = field(default_factory=dict)
    history: list[tuple[int, str, int, int]] = field(default_factory=list)
    """Revision, kind, from, to."""
    meta: Body = field(default_factory=dict)
    turn: Held | None = None
    inbox: list[Post] = field(default_factory=list)
    policy: Policy | None = None

    def copy(self) -> Life:
        return replace(
            self,
            ever=list(self.ever),
            states=dict(self.states),
            snapshots=dict(self.snapshots),
            redo=list(self.redo),
            keys=dict(self.keys),
            history=list(self.history),
            inbox=list(self.inbox),
        )

    @property
    def position(self) -> int:
        return len(self.live)

    @property
    def waiting(self) -> list[Post]:
        return [post for post in self.inbox if not post.aside]

    def state(self, row: Row) -> str:
        return "live" if row in self.live else self.states[row.number]

    def posted(self, key: str | None) -> Post | None:
        """Return what the inbox holds under a key."""
        return next((post for post in self.inbox if key and post.draft.key == key), None)
