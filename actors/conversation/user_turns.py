"""Which messages open a user turn: the ones that a person wrote.

The role `user` serves for more than people: summaries, rows that only the model shall see and, in
Anthropic's shape, tool results arrive under it too. Undo and retry count in turns of people, so
this is decided once, when a row is appended, and stored with it; no later reader decides anew.
"""

from collections.abc import Callable, Mapping, Sequence

from .carriers import CarrierFormat, split
from .shapes import Message

__all__ = ["last_user_turn", "opens_turn"]


def opens_turn(message: Message, *, hidden: bool, format: CarrierFormat) -> bool:
    """Say whether a person wrote this message, at least in part.

    A carrier opens a turn, for an ask is in it; so does an empty text, for a person can send one.

    Arguments:
        message: the message as it is appended.
        hidden: whether its row is hidden.
        format: how compaction summaries are marked.

    Returns:
        False for another role, a hidden row, content with a part of type `tool_result`, and a
        summary without an ask; else True.
    """
    if hidden or message.get("role") != "user" or _has_tool_result(message.get("content")):
        return False
    halves = split(message, format)
    return halves is None or halves.ask is not None


def last_user_turn(
    messages: Sequence[Message],
    format: CarrierFormat,
    *,
    hidden: Callable[[Message], bool] = lambda _: False,
) -> int | None:
    """Find where the last user turn begins in a plain list, as gateways hold one.

    Arguments:
        messages: a transcript, oldest first.
        format: how compaction summaries are marked.
        hidden: tells hidden messages, where the list holds such.

    Returns:
        The index of the message that opens the turn, or None where no message does.
    """
    for index in reversed(range(len(messages))):
        message = messages[index]
        if opens_turn(message, hidden=hidden(message), format=format):
            return index
    return None


def _has_tool_result(content: object) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") == "tool_result" for part in content
    )
