"""Sessions: an open store with its actors. Opens, wakes, supervises, drops, closes.

Everything that runs by itself runs inside `open_sessions`: when its block has ended, nothing
of it is left, neither task nor thread nor open file.
"""

from __future__ import annotations

import math
import os
import platform
import random as random_module
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import TypeVar

import trio

from ..storage import (
    DEFAULT_MAX_MESSAGE_BYTES,
    Claim,
    Clock,
    Deleted,
    InboxMessage,
    Offload,
    Policy,
    Purged,
    Rejected,
    Rules,
    SessionInfo,
    StorageFailed,
    Synchronous,
    beside,
    check_text,
    in_thread,
    open_store,
)
from .actor import House, SessionActor
from .ask import Ask
from .checks import check_holder, check_number, check_policy, check_seconds
from .closing import close_calls
from .conversation import CarrierFormat
from .ground import MAX_ID_LENGTH, Bell, Ground, Limits, TurnRules
from .keeper import LEAST_TTL_S, Keeper
from .messages import Delete, Purge
from .pending import number_of
from .recovery import Recovery
from .registry import Registry
from .serve import Handler, Serving
from .session import Session
from .statistics import Health, Statistics
from .turn import Wish

T = TypeVar("T")

__all__ = ["Sessions", "open_sessions"]


class Sessions:
    """An open store. Made by `open_sessions`; belongs to the event loop that made it."""

    def __init__(self, ground: Ground, recovery: Recovery, monotonic: Callable[[], float]) -> None:
        self._ground = ground
        self._store = ground.store
        self._registry = ground.registry
        self._recovery = recovery
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
        wish = Wish(claim, 0.0, held_s)
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
            waiting_for_turn=sum(len(actor.line) for actor in actors if actor.line is not None)
            - len(self._ground.keeper),
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

    async def _shut_down(self, grace_s: float) -> None:
        self._registry.close()
        self._ground.keeper.close()
        for actor in self._registry:
            actor.send_away()
        with trio.move_on_after(grace_s):
            await self._ground.keeper.emptied()
            await self._registry.quiet()
        for actor in self._registry:
            actor.dismiss()
        await self._registry.quiet()
        await self._recovery.try_all()


class _Scrubbing(Ask[T]):
    """An ask that removes rows, which must go from the write-ahead log as well."""

    __slots__ = ()
    scrub = True


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_sessions(
    path: str | os.PathLike[str],
    *,
    synchronous: Synchronous = "full",
    carriers: CarrierFormat | None = None,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    mailbox_size: int = 100,
    max_resident: int = 10_000,
    max_pending: int = 200,
    grace_s: float = 10.0,
    turn_ttl_s: float = 30.0,
    turn_wait_s: float = math.inf,
    turn_max_hold_s: float = 3_600.0,
    holder: str | None = None,
    policy: Policy = "queue",
    max_inbox: int = 1_000,
    now: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    clock: Clock | None = None,
    random: random_module.Random | None = None,
    offload: Offload = in_thread,
    vfs: str | None = None,
) -> AsyncIterator[Sessions]:
    """Open the store at `path` (made if nothing is there) and the sessions in it.

    Arguments:
        synchronous: ``"full"``: what was acknowledged survives a power loss; ``"normal"``: it
            survives the end of the process only, and commits are cheaper.
        carriers: how summaries are marked in messages that come from systems which compact by
            text; our own marks by default.
        max_message_bytes: larger messages are `Rejected`; encoded size.
        mailbox_size: messages that one session accepts ahead; more wait in line.
        max_resident: actors kept in memory; the least recently used go first.
        max_pending: messages that one session keeps in memory while storage does not take them.
        grace_s: how long, in seconds, closing waits for what was accepted. What has not been
            started by then is answered `Rejected`; what has is finished.
        turn_ttl_s: how long a turn lasts that nobody renews: after so many seconds a holder that
            hangs can be passed over.
        turn_wait_s: how long `Session.turn` waits; not less than `turn_ttl_s`, or a turn could never
            be had from a holder that hangs.
        turn_max_hold_s: how long a turn may be held.
        holder: what others are told of who holds a turn; by default the machine and the process.
        policy: what becomes of messages that are posted while a session is busy, where neither the
            post nor the session says.
        max_inbox: messages that one session's inbox holds.
        now, monotonic, clock, random, offload, vfs: for tests: seconds since the epoch, seconds for
            limits, what turns expire by, the source of chance, how blocking work is done, SQLite's
            file layer.

    Raises `StorageDamaged`, `StorageFailed`, `StorageBusy` or `Rejected` if it cannot be opened
    (see `open_store`); its bytes are then unchanged.

    Closing: new calls raise `Closed`, those in line are `Rejected`, those accepted are finished.
    It is shielded from cancellation and takes at most `grace_s`, ten seconds more if another
    process holds the file, and as many if the file is gone by then. What is pending is tried once more; if storage still does not take
    it, `StorageFailed` is raised, for it is then lost.
    """
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        raise RuntimeError(
            "Turnkeeper runs on trio: start the program with trio.run(main), not with asyncio.run"
        ) from None
    _check_options(
        synchronous=synchronous,
        max_message_bytes=max_message_bytes,
        mailbox_size=mailbox_size,
        max_resident=max_resident,
        max_pending=max_pending,
        grace_s=grace_s,
        max_inbox=max_inbox,
    )
    if policy is None:
        raise Rejected("policy", "must be given")
    check_policy(policy)
    turn_rules = TurnRules(
        holder=f"{platform.node()}/{os.getpid()}" if holder is None else check_holder(holder),
        ttl_s=check_seconds(turn_ttl_s, "turn_ttl_s", least=LEAST_TTL_S, most=1e9),
        wait_s=check_seconds(turn_wait_s, "turn_wait_s"),
        max_hold_s=check_seconds(turn_max_hold_s, "turn_max_hold_s"),
        policy=policy,
        max_inbox=max_inbox,
    )
    if turn_wait_s < turn_ttl_s:
        raise Rejected(
            "turn_wait_s",
            "must not be less than turn_ttl_s: it would always give up "
            "before a turn can be had from a holder that hangs",
        )
    chance = random_module.Random() if random is None else random
    async with open_store(
        path,
        synchronous=synchronous,
        offload=offload,
        vfs=vfs,
        monotonic=monotonic,
        clock=clock,
        random=chance,
    ) as store:

        def make(id: str) -> SessionActor:
            return SessionActor(id, house)

        registry = Registry(make, most=max_resident, name=str(store.path))
        recovery = Recovery(registry.resident, chance)
        house = House(
            store=store,
            rules=Rules(store.clock, store.owners, close_calls),
            now=now,
            # Unique in any file: counted on from a random start.
            new_id=count(chance.getrandbits(62)).__next__,
            mailbox_size=mailbox_size,
            max_pending=max_pending,
            kept=recovery.remember,
            failed=registry.replace,
        )
        limits = Limits(max_message_bytes, CarrierFormat() if carriers is None else carriers)
        keeper = Keeper(store)
        ground = Ground(store, registry, keeper, Bell(), limits, turn_rules, chance)
        sessions = Sessions(ground, recovery, monotonic)

        async def background() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(recovery.run)
                nursery.start_soon(keeper.run)

        try:
            async with beside(background, farewell=partial(sessions._shut_down, grace_s)):
                yield sessions
        except BaseException as error:
            if lost := sessions.health().pending:
                error.add_note(f"{lost} messages that were kept could not be written")
            raise
        if lost := sessions.health().pending:
            raise StorageFailed("closing", f"{lost} messages that were kept could not be written")


def _check_options(
    *, synchronous: object, grace_s: float, max_pending: int, **at_least_one: int
) -> None:
    """Raise `Rejected` for an option that cannot work; later it would only hang or fail oddly."""
    if synchronous not in ("full", "normal"):
        raise Rejected("synchronous", 'must be "full" or "normal"')
    if not grace_s >= 0:  # nor NaN
        raise Rejected("grace_s", "must be a number of seconds, at least 0")
    check_number(max_pending, "max_pending", least=0)
    for name, value in at_least_one.items():
        check_number(value, name, least=1)
