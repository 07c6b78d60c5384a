"""What can be read of a session, whoever asks: through its handle, or under a turn.

Reads do not stand in the mailbox. They see everything acknowledged before the call; `transcript`
sees what is pending, too. They raise `Closed` and the storage errors, and a cancelled one
leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TypeVar

from ..storage import Holder, InboxMessage, Move, Read, SessionInfo, StoredMessage, Transcript
from .checks import check_number
from .ground import Handle
from .pending import with_pending

__all__ = ["Reads"]

T = TypeVar("T")


class Reads(Handle):
    """A handle through which a session can be read. To be derived from."""

    __slots__ = ()

    async def meta(self) -> dict[str, object]:
        """Return the session's meta; empty if none was set."""
        info = await self.info()
        return {} if info is None else info.meta

    async def info(self) -> SessionInfo | None:
        """Return what a list shows of this session; None if nothing was stored yet."""
        return await self._meet(self._ground.store.info(self.id, life=self._life.number))

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
        registry = self._ground.registry
        while True:
            actor = registry.resident(self.id)
            pending = actor.pending if actor is not None else ()
            # What is pending and may be on disk all the same is looked for in the whole.
            whole = any(kept.attempt is not None for kept in pending)
            transcript = await self._meet(
                self._ground.store.transcript(
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
            elif actor.pending is pending and registry.resident(self.id) is actor:
                return with_pending(transcript, pending, last=last, after=after, hidden=hidden)

    async def all_messages(self) -> list[StoredMessage]:
        """Return every message that this session ever had, with its state, as they were written.

        ``live`` is on the path to the head; ``rewound``, ``replaced`` or ``compacted`` says what
        kind of move last took it off. What is pending is not among them.
        """
        return await self._meet(self._ground.store.all_messages(self.id, life=self._life.number))

    async def history(self) -> list[Move]:
        """Return every move of the head, oldest first. Appends are no moves."""
        return await self._meet(self._ground.store.history(self.id, life=self._life.number))

    async def inbox(self) -> list[InboxMessage]:
        """Return all that the inbox holds, in order: what waits, is acted on, or was set aside."""
        return await self._meet(self._ground.store.inbox(self.id, life=self._life.number))

    async def holder(self) -> Holder | None:
        """Return who holds the session's turn, in whatever process; None if nobody does."""
        return await self._meet(self._ground.store.holder(self.id, life=self._life.number))

    async def _meet(self, read: Coroutine[object, None, Read[T]]) -> T:
        try:
            self._ground.registry.check_home()
        except BaseException:
            read.close()
            raise
        found, life = await read
        if life is not None:
            self._life.number = life
        return found
