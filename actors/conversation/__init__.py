"""Pure rules over the messages of a conversation; nothing here waits, stores, or asks the time."""

from ..errors import NotRetryable
from .carriers import CarrierFormat, Split, split
from .retryable import retry_text
from .shapes import Content, Message
from .tools import NO_RESULT, CallShape, OpenCall, open_calls, synthetic_results
from .user_turns import last_user_turn, opens_turn

__all__ = [
    "NO_RESULT",
    "CallShape",
    "CarrierFormat",
    "Content",
    "Message",
    "NotRetryable",
    "OpenCall",
    "Split",
    "last_user_turn",
    "open_calls",
    "opens_turn",
    "retry_text",
    "split",
    "synthetic_results",
]
