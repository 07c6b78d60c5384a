"""What each process asked and was answered, in a file that outlives it.

One line of JSON before a call and one after it, written to the system at once: a process that is
killed has lost nothing that its callers were told, and of each call that it had begun there is a
line. Moments are those of the machine's monotonic clock, which all its processes share.

The words of one process (`stress_calls`) are used here too; to them come a turn's beginning and
end, posts, and readings.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Literal, TypeAlias, cast

import attrs
from attrs import define, frozen
from stress_calls import (
    Body,
    Fork,
    Operation,
    Outcome,
    Redo,
    Refused,
    Restore,
    Rewind,
    Rewrite,
    Say,
)

from turnkeeper.actors import Appended, Forked, Moved, Policy, Posted, Rewritten, Undone

__all__ = [
    "Answer",
    "Deed",
    "Enter",
    "Held",
    "Journal",
    "Leave",
    "Life",
    "Noted",
    "Post",
    "Read",
    "Seen",
    "read_journal",
]


@frozen
class Enter:
    """A turn is wanted. One of `serve` is noted when its handler is called."""

    how: Literal["turn", "take over", "serve"]


@frozen
class Held:
    """A turn was had; `taken` are the posts that it acts on, `first` whether for the first time."""

    token: int
    taken: tuple[int, ...] = ()
    first: bool = True


@frozen
class Leave:
    """A turn's block is left. A handler's is noted when it returns, so its end has no answer."""

    how: str
    """``well``, ``raised``, or why it was lost or cancelled."""
    serving: bool = False


@frozen
class Post:
    body: Body
    key: str | None
    policy: Policy | None


@frozen
class Read:
    """A reading of the whole transcript."""


@frozen
class Seen:
    revision: int
    ids: tuple[int, ...]


Deed: TypeAlias = Operation | Enter | Leave | Post | Read
Answer: TypeAlias = Outcome | Held | Posted | Seen

WORDS: dict[str, type] = {
    word.__name__: word
    for word in (
        *(Say, Rewind, Redo, Rewrite, Restore, Fork, Enter, Leave, Post, Read),
        *(Appended, Undone, Moved, Rewritten, Forked, Posted, Refused, Held, Seen, tuple),
    )
}


@define(eq=False)
class Noted:
    """One call of one process."""

    worker: int
    session: str
    token: int | None
    """The turn under which it was made."""
    operation: Deed
    began: float
    ended: float = math.inf
    """When it was answered; if a kill cut it off, when the process was gone."""
    answered: bool = False
    outcome: Answer = None

    @property
    def needs_no_answer(self) -> bool:
        """Whether it is the return of a handler of `serve`."""
        return isinstance(self.operation, Leave) and self.operation.serving

    def __str__(self) -> str:
        under = f" under turn {self.token}" if self.token is not None else ""
        return f"{self.operation} of process {self.worker}{under}"


@define(eq=False)
class Life:
    """One process, on the machine's monotonic clock."""

    worker: int
    opened: float = math.inf
    killed: float = math.inf
    gone: float = math.inf
    """When the system had ended it."""
    replaced: float = math.inf
    """When the one in its place had opened the store."""


class Journal:
    """The journal of this process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._numbers = count(1)

    def began(self, session: str, operation: Deed, token: int | None = None) -> int:
        """Note a call that is about to be made; return its number here."""
        number = next(self._numbers)
        self._write([number, monotonic(), session, token, _pack(operation)])
        return number

    def ended(self, number: int, outcome: Answer) -> None:
        """Note its outcome."""
        self._write([number, monotonic(), _pack(outcome)])

    def _write(self, line: list[object]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read_journal(path: Path, worker: int) -> Iterator[Noted]:
    """Yield the calls of a process that has ended. A line that the kill cut off is left out."""
    notes: dict[int, Noted] = {}
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        number, moment, *rest = json.loads(line)
        if len(rest) == 1:
            note = notes[number]
            note.ended, note.answered = moment, True
            note.outcome = cast(Answer, _unpack(rest[0]))
        else:
            session, token, packed = rest
            notes[number] = Noted(worker, session, token, cast(Deed, _unpack(packed)), moment)
    yield from notes.values()


def _pack(value: object) -> object:
    """Return `value` as JSON: a word is a list that begins with its name, a body is as it is."""
    name = type(value).__name__
    kind: type = type(value)
    if attrs.has(kind):
        return [name, *(_pack(getattr(value, field.name)) for field in attrs.fields(kind))]
    if isinstance(value, tuple):
        return [name, *map(_pack, value)]
    return value


def _unpack(value: object) -> object:
    if not isinstance(value, list):
        return value
    name, *fields = value
    parts = [_unpack(field) for field in fields]
    return tuple(parts) if name == "tuple" else WORDS[name](*parts)
