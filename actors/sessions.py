"""Sessions: what a caller holds of an open store. Finds, serves, removes, and says how it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..storage import Claim, Deleted, InboxMessage, Purged, SessionInfo, check_text
from .ask import Ask
from .checks import check_number, check_seconds
from .ground import MAX_ID_LENGTH, Ground
from .hold import Wish
from .keeper import LEAST_TTL_S
from .messages import Delete, Purge
from .pending import number_of
from .serve import Handler, Serving, pause_s
from .session import Session
from .statistics import Health, Statistics

T = TypeVar("T")

__all__ = ["Sessions"]


class Sessions:
    """An open store. Made by `open_sessions`; belongs to the event loop that made it."""

    def __init__(self, ground: Ground, monotonic: Callable[[], float]) -> None:
        self._ground = ground
        self._store = ground.store
        self._registry = ground.registry
        self._monotonic = monotonic

    def __repr__(self) -> str:
        return f"<Sessions {self._registry!r} over {self._store!r}>"

    def __getitem__(self, id: str) -> Session:
        """Return a handle on the session `id`, which need not exist; nothing is stored by this.

        Raises `Rejected` for an id that is not 1 to 1,000 characters, holds NUL or a lone
        surrogate. Any other text is just a name.
        """
        return Session(id, self._ground)

    # A store is no collection to walk through in one step: `list` gives it page by page.
    __contains__ = None
    __iter__ = None

    async def list(self, *, after: str = "", limit: int = 100) -> list[SessionInfo]:
        """Return at most `limit` sessions whose ids come after `after`, ordered by id.

        For the next page give the last id of this one. Raises `StorageError`, `Closed`.
        """
        self._registry.check_home()
        check_number(limit, "limit", least=1)
        if after != "":
            check_text(after, "after", max_length=MAX_ID_LENGTH)
        return await self._store.sessions(after=after, limit=limit)

    async def delete(self, id: str) -> Deleted | None:
        """End the session `id`; None if there is none. Its messages are removed for ever.

        Rows that a fork still reaches stay. Handles that have met the session, by a read or a
        change, raise `Closed` from now on; another handle begins a new session of that id, whose
        revisions start above the old one's. What is removed is overwritten, in the log as soon
        as nobody reads from it. Raises `Closed` and storage errors, and is cancelled, like any
        change of a session.
        """
        check_text(id, "id", max_length=MAX_ID_LENGTH)
        ask = _Scrubbing(Delete())
        self._registry.wake(id).deliver(ask)
        return await ask.answer()

    async def purge(self, id: str) -> Purged:
        """Remove for ever what is off the live transcript of `id`, and its history of moves.

        Nothing can be redone or restored from before it. Overwrites, raises and is cancelled as
        `delete`. What is pending is written first. Raises `TurnActive` while somebody holds the turn.
        """
        check_text(id, "id", max_length=MAX_ID_LENGTH)
        ask = _Scrubbing(Purge())
        self._registry.wake(id).deliver(ask)
        return await ask.answer()

    async def serve(
        self,
        handler: Handler,
        *,
        max_concurrent: int = 100,
        max_attempts: int = 3,
        ttl: float | None = None,
        max_hold: float | None = None,
    ) -> None:
        """Call `handler` with a turn for whatever the inboxes hold, for ever, from all processes' posts.

        One turn at a time in a session, at most `max_concurrent` sessions at once, each in its turn.
        A turn takes the first message that waits (or several, see `Policy`): it is appended in the
        transaction that takes the turn, and is `turn.messages`. It leaves the inbox in the one that
        ends the turn, if the handler returned. So it is delivered at least once, and appended once.

        If the handler raises an `Exception`, or holds the turn for longer than `max_hold`, the message
        is tried again after a pause, `max_attempts` times in all, takings by processes that died
        included; then it is set aside (`set_aside`), and the next is taken. `turn.attempt` counts. A
        handler that is cancelled from outside gives back what it took, untried.

        `ttl` and `max_hold` are as for `Session.turn`. Several processes may serve one file.

        Raises `Closed` when the store closes. A cancellation cancels the handlers, and waits until
        their turns have ended.
        """
        check_number(max_concurrent, "max_concurrent", least=1)
        check_number(max_attempts, "max_attempts", least=1)
        rules = self._ground.rules
        claim = Claim(
            rules.holder,
            rules.ttl_s if ttl is None else check_seconds(ttl, "ttl", least=LEAST_TTL_S, most=1e9),
            most_attempts=max_attempts,
        )
        held_s = rules.max_hold_s if max_hold is None else check_seconds(max_hold, "max_hold")
        wish = Wish(claim, 0.0, held_s, pause_s)
        self._registry.check_home()
        await Serving(self._ground, handler, wish, max_concurrent).run()

    async def set_aside(self, *, after: int = 0, limit: int = 100) -> Sequence[InboxMessage]:
        """Return at most `limit` messages that were set aside, of all sessions, in their order.

        For the next page give the last one's `place`. Let one wait again by `Session.requeue`, remove
        it by `Session.dismiss`. Raises `StorageError`, `Closed`.
        """
        self._registry.check_home()
        check_number(limit, "limit", least=1)
        check_number(after, "after", least=0)
        return await self._store.set_aside(after=after, limit=limit)

    def stats(self) -> Statistics:
        """Return what the store is doing and has done since it was opened."""
        actors = list(self._registry)
        writer = self._store.statistics()
        return Statistics(
            resident=len(actors),
            busy=sum(actor.busy for actor in actors),
            mailboxes=sum(len(actor.mailbox) for actor in actors),
            deepest_mailbox=max((len(actor.mailbox) for actor in actors), default=0),
            in_line=sum(actor.mailbox.in_line for actor in actors),
            pending=sum(number_of(actor.pending) for actor in actors),
            turns=len(self._ground.keeper),
            waiting_for_turn=sum(actor.line.waiting for actor in actors if actor.line is not None),
            failures=self._registry.failures,
            commits=writer.commits,
            operations=writer.operations,
            mean_batch=writer.mean_batch,
            largest_batch=writer.largest_batch,
            wal_bytes=self._store.wal_bytes(),
        )

    def health(self) -> Health:
        """Return whether storage takes what it is given, and what waits for it."""
        writer = self._store.statistics()
        pending = sum(number_of(actor.pending) for actor in self._registry)
        failing_s = None
        if writer.failing_since is not None:
            failing_s = self._monotonic() - writer.failing_since
        return Health(
            ok=writer.failure is None and pending == 0,
            pending=pending,
            failing_s=failing_s,
            cause=None if writer.failure is None else str(writer.failure),
        )

    def drop_idle(self) -> int:
        """Drop every actor that is idle from memory; return how many. Nothing is lost by it."""
        return self._registry.drop_idle()


class _Scrubbing(Ask[T]):
    """An ask that removes rows, which must go from the write-ahead log as well."""

    __slots__ = ()
    scrub = True
