"""What becomes of a message that an undo or a retry takes back.

The rules of conversation, in the form in which storage asks for them: a function from the
message to the text to give back and the scaffold to leave behind. Pure; it runs inside the
transaction, on whatever message stands there then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ..storage import Draft, JSONObject, TakenBack, encode_message
from .conversation import CarrierFormat, NotRetryable, retry_text, split

__all__ = ["Take", "for_retry", "for_undo"]

NO_LIMIT = 2**63 - 1
"""A scaffold is a part of a message that was taken once already."""

Take: TypeAlias = Callable[[JSONObject], TakenBack]


def for_undo(format: CarrierFormat) -> Take:
    """Return the rule of an undo: the text if there is one, never a refusal."""

    def take(message: JSONObject) -> TakenBack:
        try:
            text = retry_text(message, format)
        except NotRetryable:
            text = None
        return TakenBack(text, _scaffold(message, format))

    return take


def for_retry(format: CarrierFormat) -> Take:
    """Return the rule of a retry: the exact text, or `NotRetryable`."""

    def take(message: JSONObject) -> TakenBack:
        return TakenBack(retry_text(message, format), _scaffold(message, format))

    return take


def _scaffold(message: JSONObject, format: CarrierFormat) -> Draft | None:
    halves = split(message, format)
    return (
        None
        if halves is None
        else Draft(*encode_message(halves.scaffold, max_bytes=NO_LIMIT), hidden=True)
    )
