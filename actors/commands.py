"""What a person can say to a gateway about the conversation itself: /retry, /undo, /redo, …

Each command does the work and returns what to tell the person. They ask for a small protocol
and not for `Session`, so that a gateway with a store of its own can use them; a `Session`
fits as it is. Nothing here holds the session while the answer is made: a retry takes the turn
back, and only then is its text dispatched, like any new message.

Errors that a person can do something about become words: that somebody is answering just now
(`TurnActive`), for one. `Closed`, `TurnLost`, and a storage error whose
outcome is unknown, are raised: no true sentence could be said about them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ..storage import (
    Conflict,
    Forked,
    JSONObject,
    Moved,
    Rejected,
    StorageError,
    TurnActive,
    Undone,
)

__all__ = ["Conversation", "View", "fork", "history", "redo", "retry", "undo"]

BUSY = "An answer is on its way; nothing was changed. Try again when it is there."

LINE_LENGTH = 100
"""Characters of a message that a history shows. A guess: one line of most chat windows."""


class View(Protocol):
    """A transcript as it was read."""

    @property
    def bodies(self) -> Sequence[JSONObject]:
        """The visible messages, oldest first."""

    @property
    def revision(self) -> int:
        """What was read; a decision made on it is refused once it is past."""


class Conversation(Protocol):
    """What the commands need; `Session` has it."""

    async def transcript(self) -> View: ...

    async def retry(self, *, at: int | None = None) -> Undone | None: ...

    async def undo(self, turns: int = 1) -> Undone | None: ...

    async def redo(self) -> Moved | None: ...

    async def fork(self, id: str) -> Forked: ...


async def retry(conversation: Conversation, dispatch: Callable[[str], Awaitable[str]]) -> str:
    """Take back the last turn, send its text again, and return the new answer.

    `dispatch` handles the text like a new message of the person and returns the answer; what
    it raises is raised here, and the turn can then be had back by `redo` as long as nothing was
    appended. If the turn is not the latest any more when it is taken back, or storage fails, or
    a text cannot say what the person sent, nothing is changed, and the returned words say so.

    A cancellation before the turn was taken back changes nothing.
    """
    seen = await conversation.transcript()
    try:
        undone = await conversation.retry(at=seen.revision)
    except ValueError as refusal:  # NotRetryable, or a store's own way to say it
        return f"Cannot retry that message safely: {refusal}"
    except Conflict:
        return "Retry failed; transcript was not changed."
    except TurnActive:
        return BUSY
    except StorageError as error:
        _raise_if_unknown(error)
        return "Retry failed; transcript was not changed."
    if undone is None or undone.text is None:
        return "No previous message to retry."
    return await dispatch(undone.text)


async def undo(conversation: Conversation, turns: int = 1) -> str:
    """Take back the last `turns` turns; return how many went and what the person had said."""
    try:
        undone = await conversation.undo(turns)
    except Rejected as refusal:
        return f"Cannot undo: {refusal}"
    except TurnActive:
        return BUSY
    except StorageError as error:
        _raise_if_unknown(error)
        return "Undo failed; transcript was not changed."
    if undone is None:
        return "Nothing to undo."
    told = f"Undid {_counted(undone.turns, 'turn')} ({_counted(undone.messages, 'message')})."
    return told if undone.text is None else f"{told} You had said:\n{undone.text}"


async def redo(conversation: Conversation) -> str:
    """Bring back what the last undo took; return where the conversation stands."""
    try:
        moved = await conversation.redo()
    except TurnActive:
        return BUSY
    except StorageError as error:
        _raise_if_unknown(error)
        return "Redo failed; transcript was not changed."
    if moved is None:
        return "Nothing to redo."
    return f"Redone: the conversation has {_counted(moved.position, 'message')} again."


async def history(conversation: Conversation, last: int = 20) -> str:
    """Return the `last` newest messages, a line each."""
    bodies = (await conversation.transcript()).bodies
    if not bodies:
        return "Nothing has been said yet."
    shown = bodies[-last:] if last > 0 else []
    first = len(bodies) - len(shown) + 1
    lines = [f"{number}. {_line(body)}" for number, body in enumerate(shown, first)]
    if first > 1:
        lines.insert(0, f"… {_counted(first - 1, 'earlier message')}")
    return "\n".join(lines)


async def fork(conversation: Conversation, id: str) -> str:
    """Begin the session `id` where this one stands; return what happened."""
    try:
        forked = await conversation.fork(id)
    except Rejected as refusal:
        return f"Cannot fork: {refusal}"
    except StorageError as error:
        _raise_if_unknown(error)
        return "Fork failed; nothing was changed."
    return f"Forked to {forked.session} after {_counted(forked.position, 'message')}."


def _raise_if_unknown(error: StorageError) -> None:
    if error.unknown:
        raise error


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _line(body: JSONObject) -> str:
    """Return a message as one line: who, and as much of what as fits."""
    said = " ".join(_words(body.get("content")).split())
    calls = body.get("tool_calls")
    if isinstance(calls, list) and calls:
        said = f"{said} [{_counted(len(calls), 'tool call')}]".strip()
    if len(said) > LINE_LENGTH:
        said = said[: LINE_LENGTH - 1] + "…"
    return f"{body.get('role')}: {said}"


def _words(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else "[data]"
    words = []
    for part in content:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            words.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else None
            words.append(f"[{kind if isinstance(kind, str) else 'data'}]")
    return " ".join(words)
