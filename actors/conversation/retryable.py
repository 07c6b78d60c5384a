"""The text that a retry may send again, or why there is none.

A retry sends one text, as if the person had typed it once more. That is right only if the text is
all that the person sent; a retry that would drop a picture or an annotation, or make one text of
two, is refused before anything changes. What stands beside `role` and `content` (a platform's ids,
a name) tells of the delivery and not of what was said: the new message gets its own, so it is no
reason to refuse.
"""

from ..errors import NotRetryable
from .carriers import CarrierFormat, split
from .shapes import Message, text_of

__all__ = ["retry_text"]


def retry_text(message: Message, format: CarrierFormat) -> str:
    """Return what the person sent, exactly, if a text can say all of it.

    Arguments:
        message: the message that opens the turn; of a carrier only the ask counts.
        format: how compaction summaries are marked.

    Returns:
        The text, to the letter.

    Raises:
        NotRetryable: the message is no user message, is a summary without an ask, has no content,
            has a part that is no text, an annotated text part or several text parts, or says
            nothing but whitespace. Its `reason` says which.
    """
    if message.get("role") != "user":
        raise NotRetryable("it is not a user message")
    halves = split(message, format)
    if halves is None:
        content = message.get("content")
    elif halves.ask is None:
        raise NotRetryable("it holds a summary and nothing that a person asked")
    else:
        content = halves.ask
    text = _only_text(content)
    if not text.strip():
        raise NotRetryable("it has no text")
    return text


def _only_text(content: object) -> str:
    if content is None:
        raise NotRetryable("it has no content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or any(text_of(part) is None for part in content):
        raise NotRetryable("a retry cannot send media or unknown content again")
    if any(part.keys() != {"type", "text"} for part in content):
        raise NotRetryable("a retry would lose the annotations of its text")
    if len(content) > 1:
        # Joined with or without a separator, one text is not what was sent.
        raise NotRetryable("a retry would make one text of several")
    return "".join(text_of(part) or "" for part in content)
