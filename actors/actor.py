"""SessionActor: the one owner of one session.

An actor is an object and not a task. It takes the next ask when one is delivered while it is
idle, and when what it waited for has been committed; between the two its state cannot change,
because nothing else runs its code. So a message wakes one task, the asker's. With a task and a
channel for each actor every message woke three.

Its state is a cached head, which is a hint that every transaction checks; what is pending; the
ends of turns that storage has not taken yet; and the line of those in this process who hold or want
the turn. An actor that was dropped or has failed is built again without a head and reads it in its
next transaction; an actor with any of the rest is never dropped.

What changes that state is protected from KeyboardInterrupt: trio then raises it at a checkpoint
of the main task, and not between two lines of an actor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import trio
from attrs import evolve, frozen
from trio_util import RepeatedEvent

from ..storage import (
    Head,
    Kept,
    Rejected,
    Release,
    Rules,
    StorageDamaged,
    StorageError,
    Store,
    TurnkeeperError,
)
from .ask import AnyAsk
from .line import Line
from .mailbox import Mailbox
from .messages import Append, EndTurn, Extend
from .pending import keep

__all__ = ["House", "SessionActor"]


@frozen
class House:
    """What all actors of a store share: where they write, and whom they tell."""

    store: Store
    rules: Rules
    """What its transactions ask about turns."""
    now: Callable[[], float]
    """Seconds since the epoch."""
    new_id: Callable[[], int]
    """A number that is unique in the file."""
    mailbox_size: int
    max_pending: int
    """Messages that one session may have pending in memory."""
    kept: Callable[[SessionActor], None]
    """Told when something has become pending."""
    failed: Callable[[SessionActor, Exception], None]
    """Told when an actor has failed and has nothing under way: build another in its place."""


NOTHING: Mapping[int, Release | None] = MappingProxyType({})


class SessionActor:
    """Serialises everything that happens to one session."""

    __slots__ = (
        "_bug",
        "_ended",
        "_head",
        "_house",
        "_under_way",
        "id",
        "line",
        "mailbox",
        "pending",
        "unreleased",
    )

    def __init__(self, id: str, house: House) -> None:
        self.id = id
        self.mailbox = Mailbox(house.mailbox_size)
        self.pending: tuple[Kept, ...] = ()
        """Appends that storage has not taken yet, in order. Replaced, never changed."""
        self.unreleased: Mapping[int, Release | None] = NOTHING
        """Turns that have ended, and whose end storage has not taken yet. Replaced as well."""
        self.line: Line | None = None
        """Who in this process holds or wants the turn; None if nobody has since it was woken."""
        self._house = house
        self._head: Head | None = None
        self._under_way: list[AnyAsk] = []
        self._bug: Exception | None = None
        self._ended: RepeatedEvent | None = None

    def __repr__(self) -> str:
        return (
            f"<SessionActor {self.id!r}: {self.mailbox!r}, {len(self._under_way)} under way, "
            f"{len(self.pending)} pending>"
        )

    @property
    def busy(self) -> bool:
        """True while an ask is under way or waits."""
        return bool(self._under_way) or len(self.mailbox) > 0

    @property
    def owes(self) -> bool:
        """True while something is to be written that nobody waits for any more."""
        return bool(self.pending or self.unreleased)

    @property
    def idle(self) -> bool:
        """True if nothing would be lost with it."""
        return not (self.busy or self.owes or self.line)

    @property
    def draining(self) -> bool:
        """True while what is pending may be on its way to the disk."""
        return bool(self.pending) and any(ask.started for ask in self._under_way)

    @trio.lowlevel.enable_ki_protection
    def deliver(self, ask: AnyAsk) -> None:
        """Accept `ask`; it is answered once, after all that was accepted before it."""
        ask.actor = self
        if self._under_way:
            ask.deadline = self._house.store.deadline()  # waiting here counts
            self.mailbox.put(ask)
        else:  # idle: nothing waits
            self._hand_over(ask, None)
            if self._bug is not None:
                self._step()

    @trio.lowlevel.enable_ki_protection
    def withdraw(self, ask: AnyAsk) -> bool:
        """Take `ask` back if nothing has been started for it; return whether that was so."""
        if self.mailbox.remove(ask):
            self._step()
            return True
        if ask not in self._under_way or not self._house.store.withdraw(ask):
            return False
        self._under_way.remove(ask)
        self._step()
        return True

    @trio.lowlevel.enable_ki_protection
    def settled(self, ask: AnyAsk) -> None:
        """Take note of what became of `ask`, answer it, and go on with the next."""
        self._under_way.remove(ask)
        try:
            self._learn(ask)
        except Exception as bug:
            ask.error = self._bug = bug
        ask.answered()
        self._step()

    def _learn(self, ask: AnyAsk) -> None:
        error = ask.error
        if error is None:
            self._head = ask.head
            if ask.pending:
                self.pending = ()
            if self.unreleased and (ask.head is None or ask.head.turn not in self.unreleased):
                self.unreleased = NOTHING
        else:
            self._head = None
            if isinstance(error, StorageError):
                self._keep(ask, error)
            elif not isinstance(error, TurnkeeperError):
                self._bug = error

    async def settled_once(self) -> None:
        """Return when something under way has ended. Leaves nothing behind when cancelled."""
        if self._ended is None:  # made only where somebody waits: there are thousands of actors
            self._ended = RepeatedEvent()
        await self._ended.wait()

    async def quiet(self) -> None:
        """Return when nothing is under way and nothing waits. Leaves nothing when cancelled."""
        while self.busy:
            await self.settled_once()

    @trio.lowlevel.enable_ki_protection
    def succeed(self, failed: SessionActor) -> None:
        """Take over what waits for an actor that has failed and what it had pending; go on."""
        self.pending = failed.pending
        self.unreleased = failed.unreleased
        self.line = failed.line
        for ask in failed.mailbox.empty():
            ask.actor = self
            self.mailbox.put(ask)
        self._step()

    @trio.lowlevel.enable_ki_protection
    def send_away(self) -> None:
        """Answer with `Rejected` whoever stands in line: the store is closing."""
        for ask in self.mailbox.send_away():
            _reject(ask)

    @trio.lowlevel.enable_ki_protection
    def dismiss(self) -> None:
        """Answer with `Rejected` all that has not started: the time for it is over."""
        for ask in self.mailbox.empty():
            _reject(ask)
        for ask in list(self._under_way):
            if self._house.store.withdraw(ask):
                self._under_way.remove(ask)
                _reject(ask)
        self._step()

    def _step(self) -> None:
        """Something has come, or has ended: hand over what is next, if nothing is under way."""
        if self._ended is not None:
            self._ended.set()
        while self.mailbox and not self._under_way and self._bug is None:
            before: AnyAsk | None = None
            for ask in self._next():
                self._hand_over(ask, before)
                before = ask
        if self._bug is not None and not self._under_way:
            bug, self._bug = self._bug, None
            self._house.failed(self, bug)

    def _next(self) -> list[AnyAsk]:
        """Take the next ask; with an append, all the appends right behind it.

        What is pending goes with one ask only, so nothing is taken together while there is any.
        """
        asks: list[AnyAsk] = []
        mailbox = self.mailbox
        while (ask := mailbox.peek()) is not None and len(asks) < mailbox.capacity:
            together = isinstance(ask.message, (Append, Extend)) and not self.pending
            if asks and not together:
                break
            asks.append(mailbox.take())
            if not together:
                break
        return asks

    def _hand_over(self, ask: AnyAsk, before: AnyAsk | None) -> None:
        house = self._house
        try:
            ask.before = before
            ask.id = self.id
            ask.append_id = house.new_id()
            ask.now = house.now()
            ask.known = self._head
            ask.pending = self.pending
            ask.rules = house.rules
            ask.unreleased = self.unreleased
            house.store.submit(ask)
        except Exception as error:  # answered to its asker; the next ask may fare better
            ask.error = error
            if not isinstance(error, TurnkeeperError):
                self._bug = error
            ask.answered()
        else:
            self._under_way.append(ask)

    def _keep(self, ask: AnyAsk, error: StorageError) -> None:
        """Keep a failed append.

        Not if nobody waits for it, if it was decided on a revision, or if the file is damaged: no
        waiting mends that, and a caller who knows can do better.
        """
        if error.unknown and ask.pending:
            self.pending = tuple(
                kept
                if kept.attempt is not None and kept.attempt.landed
                else evolve(kept, attempt=ask)
                for kept in self.pending
            )
        message = ask.message
        if isinstance(error, StorageDamaged):
            return
        if isinstance(message, EndTurn) and ask.token is not None:
            self.unreleased = {**self.unreleased, ask.token: message.release}
            error.kept = True
            self._house.kept(self)
        if not isinstance(message, (Append, Extend)):
            return
        if ask.abandoned or ask.at is not None or self._house.store.closed:
            return
        attempt = ask if error.unknown else None
        found = ask.found if ask.alone else None  # else it may be of what was rolled back
        fresh = message.fresh(found)
        more = Kept(fresh, ask.append_id, ask.now, ask.life, attempt, ask.token)
        try:
            pending = keep(self.pending, more, self._house.max_pending)
        except Rejected as refusal:
            ask.error = refusal
            return
        if pending is not None:
            self.pending = pending
            error.kept = True
            self._house.kept(self)


def _reject(ask: AnyAsk) -> None:
    ask.error = Rejected("store", "was closed before this was begun; nothing was written")
    ask.answered()
