"""What can go wrong above storage; storage's own errors pass through unchanged."""

from __future__ import annotations

from ..storage import TurnkeeperError

__all__ = ["NotRetryable"]


class NotRetryable(TurnkeeperError, ValueError):
    """The last ask cannot be sent again without losing some of it; nothing was changed.

    `reason` says why. Let the person send it again by hand.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
