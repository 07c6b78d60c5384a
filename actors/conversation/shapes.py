"""What a chat message looks like, as far as the rules in this room care.

A message is a JSON object in OpenAI's chat shape. Its content is a string, a list of parts, null,
or absent. Rules read messages and never change one: what they hand out is a new object, which may
share parts with the old one.
"""

from collections.abc import Mapping
from typing import TypeAlias

__all__ = ["Content", "Message", "text_of", "with_text"]

Message: TypeAlias = Mapping[str, object]
"""A message: a JSON object with at least `role`. Unknown keys are allowed and kept."""

Content: TypeAlias = str | list[object]
"""What a person said: a text, or a list of parts where it is more than one plain text."""


def text_of(part: object) -> str | None:
    """Return the text of a text part, `{"type": "text", "text": …}` with or without other keys.

    Arguments:
        part: one element of a message's content list; any JSON value.

    Returns:
        Its text, or None where it is no text part (an image, a bare string, a text not a string).
    """
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def with_text(part: object, text: str) -> object:
    """Return a copy of a text part that says something else and keeps its other keys.

    Arguments:
        part: a text part, as `text_of` knows them.
        text: what the copy says.

    Returns:
        The copy; a part that is no text part comes back as it is.
    """
    if isinstance(part, Mapping) and text_of(part) is not None:
        return {**part, "text": text}
    return part
