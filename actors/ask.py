"""An ask: one message on its way from the asker to the actor, through the writer, and back.

It is answered once. The asker's task is the only one that waits for it and the only one that
is woken. A cancelled asker takes its ask back while nothing has been started: then nothing is
written and nothing is kept. Once a transaction has taken it, the asker stays until the answer
is there, and gets it. That is the whole of "`Cancelled` means not written".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ..storage import Asked, Changed, Connection, Operation, StorageError
from .messages import Message

if TYPE_CHECKING:
    from .actor import SessionActor

__all__ = ["Ask"]


class Ask(Operation):
    """One message, what it was told on its way, and what became of it."""

    __slots__ = (
        "_answered",
        "_task",
        "abandoned",
        "actor",
        "asked",
        "at",
        "before",
        "life",
        "message",
    )

    value: Changed[object] | None
    asked: Asked
    """What the transaction is told; set when the ask is handed over."""

    def __init__(
        self, message: Message[object], at: int | None = None, life: int | None = None
    ) -> None:
        super().__init__()
        self.message = message
        self.at = at
        self.life = life
        self.abandoned = False
        self.actor: SessionActor | None = None
        self.before: Ask | None = None
        self._answered = False
        self._task: trio.lowlevel.Task | None = None

    async def answer(self) -> Changed[object]:
        """Return the answer, or raise the error that it was answered with.

        A cancellation withdraws the ask if it has not started; otherwise it is waited for.
        """
        if not self._answered:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        error = self.error
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # a traceback that holds its own exception is freed late
        assert self.value is not None
        return self.value

    def answered(self) -> None:
        """Wake the asker: `value` or `error` is final."""
        self._answered = True
        self.before = None
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None

    def run(self, connection: Connection) -> Changed[object]:
        asked = self.asked
        before = self.before
        if before is not None:
            # Handed over together: the one before has just moved the head in this transaction,
            # or was committed, or has failed. Behind a failed one nothing is written, for that
            # one may be kept, and what is kept comes first.
            if isinstance(before.error, StorageError):
                raise type(before.error)(before.error.doing, before.error.detail)
            asked = asked._replace(known=before.value.head if before.value is not None else None)
        return self.message.change(connection, asked)

    def settle(self) -> None:
        assert self.actor is not None
        self.actor.settled(self)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self.abandoned = True
        if self.actor is not None and self.actor.withdraw(self):
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED
        return trio.lowlevel.Abort.FAILED
