"""Session: what a caller holds. An id and a way to deliver, so it survives its actor.

What its changes have in common is said in `changes`, what its reads have in `reads`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from ..storage import (
    Appended,
    Claim,
    Forked,
    JSONObject,
    Policy,
    Posted,
    check_text,
    encode_object,
)
from .ask import Ask
from .changes import Changes
from .checks import check_holder, check_number, check_policy, check_seconds
from .ground import MAX_ID_LENGTH
from .hold import Holding, Wish
from .keeper import LEAST_TTL_S
from .messages import (
    Append,
    Dismiss,
    Extend,
    Fork,
    Message,
    Post,
    Requeue,
    SetMeta,
    SetPolicy,
)
from .reads import Reads
from .turn import Turn

__all__ = ["Session"]

T = TypeVar("T")


class Session(Reads, Changes):
    """One conversation, by its id. Made by `Sessions[id]`; nothing is stored until it is used."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Session {self.id!r}>"

    async def append(
        self,
        message: JSONObject,
        *,
        key: str | None = None,
        hidden: bool = False,
        at: int | None = None,
        interleave: bool = False,
    ) -> Appended:
        """Append one message, as `Changes.append`.

        While somebody holds the turn it is refused (`TurnActive`), unless `interleave`: then it
        goes between the messages of that turn. To have it answered after the turn, `post` it.
        """
        draft = self._draft(message, "message", key, hidden)
        return await self._ask(Append(draft), at, interleave=interleave)

    async def extend(
        self,
        messages: Iterable[JSONObject],
        *,
        keys: Iterable[str | None] | None = None,
        at: int | None = None,
        interleave: bool = False,
    ) -> tuple[Appended, ...]:
        """Append several messages, as `Changes.extend`; `interleave` as for `append`."""
        drafts = self._drafts(messages, keys)
        if not drafts:
            return ()
        return await self._ask(Extend(drafts), at, interleave=interleave)

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
        other whole. Keys, history, inbox and redo of the fork start empty. No turn refuses it: this
        session stays as it is. Raises `Rejected` if the position does not exist or `id` is taken.
        """
        check_text(id, "id", max_length=MAX_ID_LENGTH)
        if position is not None:
            check_number(position, "position", least=0)
        packed = self._pack(meta) if meta is not None else None
        return await self._ask(Fork(id, position, packed), at)

    async def set_meta(self, meta: JSONObject) -> None:
        """Replace the session's meta, a JSON object of the caller's.

        Raises no revision, and no turn refuses it.
        """
        await self._ask(SetMeta(self._pack(meta)), None)

    def turn(
        self,
        *,
        wait: float | None = None,
        ttl: float | None = None,
        max_hold: float | None = None,
        holder: str | None = None,
    ) -> AbstractAsyncContextManager[Turn]:
        """Hold the session's turn for the length of an ``async with`` block.

        One holder anywhere, in any process, at a time. In this process those who wait get it in
        the order in which they came.

        Arguments, in seconds; the store's own where they are not given:
            wait: how long to wait for it. 0: try once. A busy file may add ten seconds.
            ttl: how long it lasts if this process stops renewing it, at least 1. It is renewed while
                the block lasts; the turn of a process that has died is free at once.
            max_hold: how long the block may last. Then it is cancelled.
            holder: what the others are told of who holds it.

        Entering raises `TurnActive` if it could not be had in time, and the errors of a change; a
        cancellation leaves nothing behind. In the block, act through the `Turn`. If it is lost (taken
        over, interrupted, held for too long) the block is cancelled, and `TurnLost` comes out of it.

        Leaving, however that happens, writes what is pending, closes tool calls that have no result
        with a synthetic one, and lets go, in one transaction, shielded from cancellation for as long
        as a change may take. If storage does not take it, a storage error with `kept=True` is raised:
        it is done by itself as soon as storage does, and refuses nobody in this process meanwhile.
        """
        return Holding(self, self._wish(wait, ttl, max_hold, holder, force=False))

    def take_over(
        self,
        *,
        ttl: float | None = None,
        max_hold: float | None = None,
        holder: str | None = None,
    ) -> AbstractAsyncContextManager[Turn]:
        """Hold the turn as `turn` does, ending somebody else's for it at once.

        For a person who sees that a holder is stuck. The other one's open tool calls are closed, its
        writes from now on are refused with `TurnLost`, and what it had pending goes into the history.
        """
        return Holding(self, self._wish(None, ttl, max_hold, holder, force=True))

    async def post(
        self, message: JSONObject, *, key: str | None = None, policy: Policy | None = None
    ) -> Posted:
        """Put a message into the session's inbox, for a turn of `serve` to take. Always possible.

        The receipt is given after the commit: what was ``accepted`` survives whatever ends the
        process, is delivered in the order of acceptance, and at least once. It says ``duplicate``,
        with the first receipt, if `key` was seen before, and ``full`` or ``refused`` if the message
        was not accepted. `policy` decides what becomes of it while the session is busy; by default
        the session's (`set_policy`), else the store's.

        Raises and is cancelled as any change; it is never kept. Post it again with the same key if
        you do not know whether it was accepted.
        """
        check_policy(policy)
        draft = self._draft(message, "message", key)
        rules = self._ground.rules
        receipt = await self._ask(Post(draft, policy, rules.policy, rules.max_inbox), None)
        if receipt.status == "accepted":
            self._ground.bell.posted()
            if receipt.policy == "interrupt":
                self._ground.keeper.look_now()
        return receipt

    async def set_policy(self, policy: Policy | None) -> None:
        """Set what becomes of messages that are posted to this session while it is busy.

        It is kept in the file; None is the store's own policy. No turn refuses it.
        """
        check_policy(policy)
        await self._ask(SetPolicy(policy), None)

    async def requeue(self, id: int) -> bool:
        """Let a message that was set aside wait again, behind all others; False if there is none.

        It is then tried as often as a new one. `id` is that of its receipt.
        """
        check_number(id, "id", least=0)
        found = await self._ask(Requeue(id), None)
        if found:
            self._ground.bell.posted()
        return found

    async def dismiss(self, id: int) -> bool:
        """Remove a message that was set aside from the inbox; False if there is none.

        If a turn has taken it, it stays in the transcript.
        """
        check_number(id, "id", least=0)
        return await self._ask(Dismiss(id), None)

    def _wish(
        self,
        wait: float | None,
        ttl: float | None,
        max_hold: float | None,
        holder: str | None,
        *,
        force: bool,
    ) -> Wish:
        rules = self._ground.rules
        ttl = rules.ttl_s if ttl is None else check_seconds(ttl, "ttl", least=LEAST_TTL_S, most=1e9)
        claim = Claim(rules.holder if holder is None else check_holder(holder), ttl, force)
        return Wish(
            claim,
            rules.wait_s if wait is None else check_seconds(wait, "wait"),
            rules.max_hold_s if max_hold is None else check_seconds(max_hold, "max_hold"),
        )

    def _pack(self, meta: JSONObject) -> bytes:
        return encode_object(meta, field="meta", max_bytes=self._ground.limits.max_message_bytes)

    def _ask(
        self, message: Message[T], at: int | None, *, interleave: bool = False
    ) -> Coroutine[object, None, T]:
        if at is not None:
            check_number(at, "at", least=0)
        return self._deliver(Ask(message, at, self._life, interleave=interleave))
