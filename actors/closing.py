"""What closes the tool calls that a turn leaves open: the rules of conversation, as storage asks.

Pure; it runs inside the transaction that ends the turn, on the messages that stand there then.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..storage import Draft, JSONObject, encode_message
from .conversation import open_calls, synthetic_results

__all__ = ["close_calls"]


NO_LIMIT = 2**63 - 1
"""What closes a call is as long as the call's id, which was taken once already."""


def close_calls(messages: Iterable[JSONObject]) -> list[Draft]:
    """Return a result, marked as synthetic, for each call among `messages` that has none."""
    return [
        Draft(*encode_message(result, max_bytes=NO_LIMIT), synthetic=True)
        for result in synthetic_results(open_calls(messages))
    ]
