"""Turn: the right to act in a session, as the one who has it sees it.

How it is had and let go is `hold`, how it is kept meanwhile `keeper`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import TypeVar

import trio

from ..storage import LossReason, StoredMessage, Taken, TurnLost
from .ask import Ask, Life
from .changes import Changes
from .checks import check_number
from .ground import Handle
from .messages import Message
from .reads import Reads

__all__ = ["Turn"]

T = TypeVar("T")


class Turn(Reads, Changes):
    """The right to act in a session. Made by `Session.turn`, `Session.take_over` and `serve`.

    Changes made through it carry its token, which the transaction compares: once it was lost they
    are refused (`TurnLost`) and change nothing. Nothing else carries it: to `Session.append`, the
    code that holds the turn is somebody else.

    Attributes:
        token: Larger than every token before it in the file; give it to whatever you act on outside
            if that can compare it.
        since: When it was taken, in seconds since the epoch.
        messages: What it took from the inbox, as it stands in the transcript; empty unless served.
        attempt: How often the first of these has been taken, this time included; 0 without any.
        loss: How it was lost, or None. It is cancelled then, and `TurnLost` comes out of its block.
    """

    __slots__ = (
        "_over",
        "_scope",
        "_step_aside",
        "_task",
        "attempt",
        "loss",
        "messages",
        "renew_at",
        "since",
        "token",
        "ttl_s",
    )

    def __init__(
        self,
        handle: Handle,
        life: int,
        taken: Taken,
        ttl_s: float,
        scope: trio.CancelScope,
        step_aside: Callable[[], None],
    ) -> None:
        super().__init__(handle.id, handle._ground, Life(life))
        self.token: int = taken.token
        self.since: float = taken.since
        self.messages: tuple[StoredMessage, ...] = taken.messages
        self.attempt: int = taken.attempt
        self.loss: LossReason | None = None
        self.ttl_s = ttl_s
        self.renew_at = math.inf
        self._scope = scope
        self._step_aside = step_aside
        self._over = False
        self._task = trio.lowlevel.current_task()

    def __repr__(self) -> str:
        state = self.loss or ("ended" if self._over else "held")
        return f"<Turn {self.token} in {self.id!r}: {state}>"

    @property
    def life(self) -> int:
        """The session's number in the file."""
        assert self._life.number is not None
        return self._life.number

    @property
    def overdue(self) -> bool:
        """Whether it was held for as long as it may be."""
        return trio.current_time() >= self._scope.deadline

    @property
    def is_mine(self) -> bool:
        """Whether the calling task took it."""
        return self._task is trio.lowlevel.current_task()

    def lost(self, reason: LossReason) -> None:
        """Cancel what is done under it; its block raises `TurnLost`.

        If it does not hold any more, or not for long, the next one here need not wait until the
        block heeds that.
        """
        if self.loss is None or reason == "taken":
            self.loss = reason
            self._scope.cancel()
        if reason in ("taken", "overdue"):
            self._step_aside()

    def over(self) -> None:
        """Let nothing more be done under it."""
        self._over = True

    def _ask(self, message: Message[T], at: int | None) -> Coroutine[object, None, T]:
        if self._over or self.loss == "taken":
            raise TurnLost(self.id, self.loss or "ended")
        if at is not None:
            check_number(at, "at", least=0)
        ground = self._ground
        late = ground.store.clock().seconds >= self.renew_at
        renew_s = self.ttl_s if late else None
        return self._deliver(Ask(message, at, self._life, token=self.token, renew_s=renew_s))
