"""The changes that can be made in a session, whoever asks: through its handle, or under a turn.

What they all have in common is said here once:

* Order: changes of one session happen in the order in which they were called.
* Cancellation: `trio.Cancelled` out of a change means that nothing was written and nothing is
  kept. Once a transaction has taken the change, the call waits for it and returns the receipt
  or the error, cancelled or not; that takes as long as a commit, ten seconds more at most while
  another process holds the file, and as many if the file is gone when it is committed.
* `at`: the revision that the caller had read. The change is refused (`Conflict`) if the session
  is at another by then. Without it the change applies to what is there.
* Turns: while somebody holds the session's turn, only what is asked under that turn is done;
  anything else is refused (`TurnActive`). What is asked under a turn that was lost is refused
  as well (`TurnLost`).
* Errors of every change: `Rejected` (bad input), `Conflict` (`at` is past), `TurnActive`,
  `TurnLost`, `Closed` (the store, or this session was deleted), `StorageBusy`, `StorageFull`,
  `StorageFailed`, `StorageDamaged`. With any of them nothing was written, unless the error says
  `kept` or `unknown`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from typing import Literal, TypeVar

from ..storage import (
    Appended,
    Draft,
    JSONObject,
    Moved,
    Rejected,
    Rewritten,
    Undone,
    check_text,
    encode_message,
)
from .checks import check_number, listed
from .conversation import opens_turn
from .ground import Handle
from .messages import Append, Extend, Message, Redo, Restore, Rewind, Rewrite
from .taking import for_retry, for_undo

__all__ = ["MAX_KEY_LENGTH", "Changes"]

T = TypeVar("T")

MAX_KEY_LENGTH = 1_000
"""Characters. A guess: no platform's ids come near, and an index entry stays small."""


class Changes(Handle, ABC):
    """A handle through which a session can be changed. To be derived from."""

    __slots__ = ()

    @abstractmethod
    def _ask(self, message: Message[T], at: int | None) -> Coroutine[object, None, T]:
        """Deliver `message` before anything is awaited; the coroutine returns the answer."""

    async def append(
        self,
        message: JSONObject,
        *,
        key: str | None = None,
        hidden: bool = False,
        at: int | None = None,
    ) -> Appended:
        """Append one message; the session is made if it is not there yet.

        `key` is the caller's own name for the message (a platform's message id): the same key
        is stored once in this session, and every call with it returns the first receipt, whoever
        holds the turn; with other content it is `Rejected`, and so it is while the message of that
        key waits in the inbox. `hidden` rows are not shown to a person.

        A storage error with `kept=True` means that the message is held in memory and will be
        written before anything newer: do not send it again. An append with `at` is never kept.
        What a turn has pending when it is lost goes into the history, beside the transcript.
        """
        return await self._ask(Append(self._draft(message, "message", key, hidden)), at)

    async def extend(
        self,
        messages: Iterable[JSONObject],
        *,
        keys: Iterable[str | None] | None = None,
        at: int | None = None,
    ) -> tuple[Appended, ...]:
        """Append several messages, all or none, under one revision; a receipt for each.

        `keys`, as many as there are messages, are as for `append`; of those, only the messages
        whose keys are new are stored.
        """
        drafts = self._drafts(messages, keys)
        if not drafts:
            return ()
        return await self._ask(Extend(drafts), at)

    async def undo(self, turns: int = 1, *, at: int | None = None) -> Undone | None:
        """Take back the last `turns` user turns; None if there is none. Nothing is deleted.

        If there are fewer, all of them go, and the receipt says how many. Its `text` is what
        the person said in the earliest of them, to be edited and sent again, or None where that
        was more than plain text. If that message carried a summary, the summary stays, hidden.
        """
        check_number(turns, "turns", least=1)
        take = for_undo(self._ground.limits.carriers)
        return await self._ask(Rewind(turns, "undo", take), at)

    async def retry(self, *, at: int | None = None) -> Undone | None:
        """Take back the last user turn and return its text, to be sent again; None for none.

        Raises `NotRetryable`, and nothing has changed, if a text cannot say all of what the
        person sent. Send the text without a key: the old one belongs to the undone message.
        """
        take = for_retry(self._ground.limits.carriers)
        return await self._ask(Rewind(1, "retry", take), at)

    async def redo(self, *, at: int | None = None) -> Moved | None:
        """Take back the last undo or retry that was not taken back yet; None for none.

        An append, a rewrite or a restore leaves nothing to redo: something newer stands there.
        What was undone can then still be reached by `restore`.
        """
        return await self._ask(Redo(), at)

    async def rewrite(
        self,
        messages: Iterable[JSONObject],
        *,
        reason: Literal["rewrite", "compaction"] = "rewrite",
        at: int | None = None,
    ) -> Rewritten:
        """Make the visible transcript read `messages`, in one step. Nothing is deleted.

        The messages that it already begins with stay where they are, compared as JSON; the rest
        goes to a new branch. `reason` decides the state of what is retired: ``replaced``, or
        ``compacted``. Rewriting to what is there already writes nothing.
        """
        kinds = ("rewrite", "compaction")
        if reason not in kinds:
            raise Rejected("reason", f"must be one of {kinds}")
        return await self._ask(Rewrite(self._drafts(messages, None), reason), at)

    async def restore(self, revision: int, *, at: int | None = None) -> Moved:
        """Move the head to where it was after `revision`: a move's or an append's.

        Raises `Rejected` if there is no such revision, or a purge has ended the history there.
        """
        check_number(revision, "revision", least=1)
        return await self._ask(Restore(revision), at)

    def _drafts(
        self, messages: Iterable[JSONObject], keys: Iterable[str | None] | None
    ) -> tuple[Draft, ...]:
        bodies = listed(messages, "messages")
        if keys is not None:
            keys = listed(keys, "keys")
            if len(keys) != len(bodies):
                raise Rejected("keys", f"must be as many as there are messages, {len(bodies)}")
        return tuple(
            self._draft(message, f"messages[{index}]", keys[index] if keys is not None else None)
            for index, message in enumerate(bodies)
        )

    def _draft(
        self, message: JSONObject, field: str, key: str | None = None, hidden: bool = False
    ) -> Draft:
        columns = encode_message(
            message, max_bytes=self._ground.limits.max_message_bytes, field=field
        )
        if not isinstance(hidden, bool):
            raise Rejected("hidden", f"must be true or false, not {type(hidden).__name__}")
        if key is not None:
            check_text(key, "key", max_length=MAX_KEY_LENGTH)
        opens = opens_turn(message, hidden=hidden, format=self._ground.limits.carriers)
        return Draft(*columns, hidden, opens, key)
