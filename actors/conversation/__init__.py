"""Pure rules over the messages of a conversation; nothing here waits, stores, or asks the time."""

from ..errors import NotRetryable
from .carriers import CarrierFormat, Split, split
from .retryable import retry_text
from .shapes import Content, Message
from .user_turns import last_user_turn, opens_turn

__all__ = [
    "CarrierFormat",
    "Content",
    "Message",
    "NotRetryable",
    "Split",
    "last_user_turn",
    "opens_turn",
    "retry_text",
    "split",
]
