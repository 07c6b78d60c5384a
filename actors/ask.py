"""An ask: one message on its way from the asker to the actor, through the writer, and back.

It is answered once. The asker's task is the only one that waits for it and the only one that
is woken. A cancelled asker takes its ask back while nothing has been started: then nothing is
written and nothing is kept. Once a transaction has taken it, the asker stays until the answer
is there, and gets it. That is the whole of "`Cancelled` means not written".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import trio

from ..storage import Connection, Head, Kept, Operation, Release, Rules, StorageError
from .messages import Message

__all__ = ["AnyAsk", "Ask", "Life", "Owner"]

T = TypeVar("T")


class Owner(Protocol):
    """The actor that an ask was delivered to."""

    def settled(self, ask: AnyAsk) -> None:
        """What became of `ask` is final."""

    def withdraw(self, ask: AnyAsk) -> bool:
        """Take `ask` back if nothing has been started for it; return whether that was so."""


class Life:
    """Which life of its id a handle has met: the number of the session in the file, or None."""

    __slots__ = ("number",)

    def __init__(self, number: int | None = None) -> None:
        self.number = number


class Ask(Operation, Generic[T]):
    """One message, what it was told on its way, and what became of it."""

    __slots__ = (
        "_answered",
        "_task",
        "abandoned",
        "actor",
        "append_id",
        "at",
        "before",
        "found",
        "head",
        "id",
        "interleave",
        "known",
        "life",
        "message",
        "met",
        "now",
        "pending",
        "renew_s",
        "rules",
        "steadfast",
        "token",
        "unreleased",
    )

    value: T
    head: Head | None
    """Where the session's head was after it."""
    found: T | None
    """The receipt of the last attempt, whatever became of its transaction."""
    # The rest of what a transaction is told, as `Asked`; set by the actor when it hands over.
    id: str
    append_id: int
    now: float
    known: Head | None
    pending: tuple[Kept, ...]
    rules: Rules
    unreleased: Mapping[int, Release | None]

    def __init__(
        self,
        message: Message[T],
        at: int | None = None,
        met: Life | None = None,
        *,
        token: int | None = None,
        renew_s: float | None = None,
        interleave: bool = False,
        steadfast: bool = False,
    ) -> None:
        super().__init__()
        self.message = message
        self.at = at
        self.token = token
        self.renew_s = renew_s
        self.interleave = interleave
        self.steadfast = steadfast
        self.met = met
        self.life = None if met is None else met.number
        self.head = None
        self.found = None
        self.abandoned = False
        self.actor: Owner | None = None
        self.before: AnyAsk | None = None
        self._answered = False
        self._task: trio.lowlevel.Task | None = None

    @trio.lowlevel.enable_ki_protection
    async def answer(self) -> T:
        """Return the receipt, or raise the error that it was answered with.

        A cancellation withdraws the ask if it has not started; otherwise, and if it is steadfast, it
        is waited for.
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
        if self.head is not None and self.met is not None:
            self.met.number = self.head.session
        return self.value

    def answered(self) -> None:
        """Wake the asker: `value` or `error` is final."""
        self._answered = True
        self.before = self.known = None  # not kept alive until the asker has had his turn
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None

    def run(self, connection: Connection) -> T:
        self.head = self.found = None
        before = self.before
        if before is not None:
            # Handed over together: the one before has just moved the head in this transaction,
            # or was committed, or has failed.
            self.known = before.head
        self.found, self.head = self.message.change(connection, self)
        if before is not None and isinstance(before.error, StorageError):
            # The one before may be kept, and what is kept comes first: so this one must fail as
            # well. It was run all the same, for it may have been refused, or stored long ago.
            self.head = None
            raise type(before.error)(before.error.doing, before.error.detail)
        return self.found

    def settle(self) -> None:
        assert self.actor is not None
        self.actor.settled(self)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        if self.steadfast:
            return trio.lowlevel.Abort.FAILED
        self.abandoned = True
        if self.actor is not None and self.actor.withdraw(self):
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED
        return trio.lowlevel.Abort.FAILED


AnyAsk: TypeAlias = Ask[Any]
"""An ask whose receipt is nobody's business here."""
