"""Opening a store with its actors, and closing it.

Everything that runs by itself runs inside `open_sessions`: when its block has ended, nothing
of it is left, neither task nor thread nor open file.
"""

from __future__ import annotations

import math
import os
import platform
import random as random_module
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import trio

from ..storage import (
    DEFAULT_MAX_MESSAGE_BYTES,
    Clock,
    Offload,
    Policy,
    Rejected,
    Rules,
    StorageFailed,
    Synchronous,
    beside,
    in_thread,
    open_store,
)
from .actor import House, SessionActor
from .checks import check_holder, check_number, check_policy, check_seconds
from .closing import close_calls
from .conversation import CarrierFormat
from .ground import Bell, Ground, Limits, TurnRules
from .keeper import LEAST_TTL_S, Keeper
from .recovery import Recovery
from .registry import Registry
from .sessions import Sessions

__all__ = ["open_sessions"]


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
        sessions = Sessions(ground, monotonic)

        async def background() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(recovery.run)
                nursery.start_soon(keeper.run)

        try:
            async with beside(background, farewell=partial(_shut_down, ground, recovery, grace_s)):
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


async def _shut_down(ground: Ground, recovery: Recovery, grace_s: float) -> None:
    """Finish what was accepted, send away what was not, and write what is pending once more."""
    ground.registry.close()
    ground.keeper.close()
    for actor in ground.registry:
        actor.send_away()
    with trio.move_on_after(grace_s):
        await ground.keeper.emptied()
        await ground.registry.quiet()
    for actor in ground.registry:
        actor.dismiss()
    await ground.registry.quiet()
    await recovery.try_all()
