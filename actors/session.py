"""Session: what a caller holds. An id and a way to deliver, so it survives its actor.

Every change goes through the mailbox and returns a receipt once it is on disk. What they all
have in common is said here once:

* Order: changes of one session happen in the order in which they were called.
* Cancellation: `trio.Cancelled` out of a change means that nothing was written and nothing is
  kept. Once a transaction has taken the change, the call waits for it and returns the receipt
  or the error, cancelled or not; that takes as long as a commit, ten seconds more at most while
  another process holds the file, and as many if the file is gone when it is committed.
* `at`: the revision that the caller had read. The change is refused (`Conflict`) if the session
  is at another by then. Without it the change applies to what is there.
* Errors of every change: `Rejected` (bad input), `Conflict` (`at` is past), `Closed` (the store,
  or this session was deleted), `StorageBusy`, `StorageFull`, `StorageFailed`,
  `StorageDamaged`. With any of them nothing was written, unless the error says `kept` or
  `unknown`.

Reads do not stand in the mailbox. They see everything acknowledged before the call; `transcript`
sees what is pending, too. They raise `Closed` and the storage errors, and a cancelled one
leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Literal, TypeVar

from attrs import frozen

from ..storage import (
    Appended,
    Draft,
    Forked,
    JSONObject,
    Move,
    Moved,
    Read,
    Rejected,
    Rewritten,
    SessionInfo,
    Store,
    StoredMessage,
    Transcript,
    Undone,
    check_text,
    encode_message,
    encode_object,
)
from .ask import Ask, Life
from .checks import check_number, listed
from .conversation import CarrierFormat, opens_turn
from .messages import Append, Extend, Fork, Message, Redo, Restore, Rewind, Rewrite, SetMeta
from .pending import with_pending
from .registry import Registry
from .taking import for_retry, for_undo

__all__ = ["MAX_ID_LENGTH", "MAX_KEY_LENGTH", "Limits", "Session"]

T = TypeVar("T")

MAX_ID_LENGTH = 1_000
MAX_KEY_LENGTH = 1_000
"""Characters. Guesses: no platform's ids come near, and an index entry stays small."""


@frozen
class Limits:
    """What a session checks before it asks its actor."""

    max_message_bytes: int
    carriers: CarrierFormat


class Session:
    """One conversation, by its id. Made by `Sessions[id]`; nothing is stored until it is used."""

    __slots__ = ("_life", "_limits", "_registry", "_store", "id")

    def __init__(self, id: str, registry: Registry, store: Store, limits: Limits) -> None:
        self.id = check_text(id, "id", max_length=MAX_ID_LENGTH)
        self._registry = registry
        self._store = store
        self._limits = limits
        self._life = Life()

    def __repr__(self) -> str:
        return f"<Session {self.id!r}>"

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
        is stored once in this session, and every call with it returns the first receipt; with
        other content it is `Rejected`. `hidden` rows are not shown to a person.

        A storage error with `kept=True` means that the message is held in memory and will be
        written before anything newer: do not send it again. An append with `at` is never kept.
        """
        draft = self._draft(message, "message", key, hidden)
        return await self._ask(Append(draft), at)

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
        bodies = listed(messages, "messages")
        if keys is not None:
            keys = listed(keys, "keys")
            if len(keys) != len(bodies):
                raise Rejected("keys", f"must be as many as there are messages, {len(bodies)}")
        drafts = tuple(
            self._draft(message, f"messages[{index}]", keys[index] if keys is not None else None)
            for index, message in enumerate(bodies)
        )
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
        take = for_undo(self._limits.carriers)
        return await self._ask(Rewind(turns, "undo", take), at)

    async def retry(self, *, at: int | None = None) -> Undone | None:
        """Take back the last user turn and return its text, to be sent again; None for none.

        Raises `NotRetryable`, and nothing has changed, if a text cannot say all of what the
        person sent. Send the text without a key: the old one belongs to the undone message.
        """
        take = for_retry(self._limits.carriers)
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
        drafts = tuple(
            self._draft(message, f"messages[{index}]")
            for index, message in enumerate(listed(messages, "messages"))
        )
        return await self._ask(Rewrite(drafts, reason), at)

    async def restore(self, revision: int, *, at: int | None = None) -> Moved:
        """Move the head to where it was after `revision`: a move's or an append's.

        Raises `Rejected` if there is no such revision, or a purge has ended the history there.
        """
        check_number(revision, "revision", least=1)
        return await self._ask(Restore(revision), at)

    async def fork(
        self,
        id: str,
        *,
        position: int | None = None,
        meta: JSONObject | None = None,
        at: int | None = None,
    ) -> Forked:
        """Begin the session `id` after `position` of this one, the head by default.

        No message is copied; each goes its own way from there, and deleting either leaves the
        other whole. Keys, history and redo of the fork start empty. Raises `Rejected` if
        the position does not exist or `id` is taken.
        """
        check_text(id, "id", max_length=MAX_ID_LENGTH)
        if position is not None:
            check_number(position, "position", least=0)
        packed = self._pack(meta) if meta is not None else None
        return await self._ask(Fork(id, position, packed), at)

    async def set_meta(self, meta: JSONObject) -> None:
        """Replace the session's meta, a JSON object of the caller's. Raises no revision."""
        await self._ask(SetMeta(self._pack(meta)), None)

    async def meta(self) -> dict[str, object]:
        """Return the session's meta; empty if none was set."""
        info = await self.info()
        return {} if info is None else info.meta

    async def info(self) -> SessionInfo | None:
        """Return what a list shows of this session; None if nothing was stored yet."""
        return await self._meet(self._store.info(self.id, life=self._life.number))

    async def transcript(
        self, *, last: int | None = None, after: int = 0, hidden: bool = False
    ) -> Transcript:
        """Return the messages from the root to the head, oldest first.

        `last` keeps only so many of the newest, `after` those after a position; hidden rows are
        left out unless asked for. What is pending is included, at the end.
        """
        if last is not None:
            check_number(last, "last", least=0)
        check_number(after, "after", least=0)
        while True:
            actor = self._registry.resident(self.id)
            pending = actor.pending if actor is not None else ()
            # What is pending and may be on disk all the same is looked for in the whole.
            whole = any(kept.attempt is not None for kept in pending)
            transcript = await self._meet(
                self._store.transcript(
                    self.id,
                    life=self._life.number,
                    last=None if whole else last,
                    after=0 if whole else after,
                    hidden=hidden or whole,
                )
            )
            if not pending or actor is None:
                return transcript
            if actor.draining:  # what is pending may have been in what we read, or not
                await actor.settled_once()
            elif actor.pending is pending and self._registry.resident(self.id) is actor:
                return with_pending(transcript, pending, last=last, after=after, hidden=hidden)

    async def all_messages(self) -> list[StoredMessage]:
        """Return every message that this session ever had, with its state, as they were written.

        ``live`` is on the path to the head; ``rewound``, ``replaced`` or ``compacted`` says what
        kind of move last took it off. What is pending is not among them.
        """
        return await self._meet(self._store.all_messages(self.id, life=self._life.number))

    async def history(self) -> list[Move]:
        """Return every move of the head, oldest first. Appends are no moves."""
        return await self._meet(self._store.history(self.id, life=self._life.number))

    async def _meet(self, read: Coroutine[object, None, Read[T]]) -> T:
        try:
            self._registry.check_home()
        except BaseException:
            read.close()
            raise
        found, life = await read
        if life is not None:
            self._life.number = life
        return found

    def _draft(
        self, message: JSONObject, field: str, key: str | None = None, hidden: bool = False
    ) -> Draft:
        columns = encode_message(message, max_bytes=self._limits.max_message_bytes, field=field)
        if not isinstance(hidden, bool):
            raise Rejected("hidden", f"must be true or false, not {type(hidden).__name__}")
        if key is not None:
            check_text(key, "key", max_length=MAX_KEY_LENGTH)
        opens = opens_turn(message, hidden=hidden, format=self._limits.carriers)
        return Draft(*columns, hidden, opens, key)

    def _pack(self, meta: JSONObject) -> bytes:
        return encode_object(meta, field="meta", max_bytes=self._limits.max_message_bytes)

    def _ask(self, message: Message[T], at: int | None) -> Coroutine[object, None, T]:
        # Not async itself: one coroutine less for each message on its way.
        if at is not None:
            check_number(at, "at", least=0)
        ask = Ask(message, at, self._life)
        self._registry.wake(self.id).deliver(ask)
        return ask.answer()
