"""What all handles on one open store stand on, and what a handle is: an id and a way to deliver."""

from __future__ import annotations

from collections.abc import Coroutine
from random import Random
from typing import Protocol, TypeVar

from attrs import frozen

from ..storage import Policy, Store, check_text
from .ask import Ask, Life
from .conversation import CarrierFormat
from .keeper import Keeper
from .registry import Registry

__all__ = ["MAX_ID_LENGTH", "Bell", "Ground", "Handle", "Limits", "Listener", "TurnRules"]

T = TypeVar("T")

MAX_ID_LENGTH = 1_000
"""Characters. A guess: no platform's ids come near, and an index entry stays small."""


@frozen
class Limits:
    """What is checked before an actor is asked."""

    max_message_bytes: int
    carriers: CarrierFormat


@frozen
class TurnRules:
    """How turns are taken and inboxes are filled where the caller does not say."""

    holder: str
    """What this process calls itself as a holder."""
    ttl_s: float
    wait_s: float
    max_hold_s: float
    policy: Policy
    max_inbox: int


class Listener(Protocol):
    """Whoever serves what the inboxes hold."""

    def posted(self) -> None:
        """Told when a message was posted."""

    def freed(self, id: str) -> None:
        """Told when a turn of the session has ended."""


class Bell:
    """Tells those who serve, in this process, what they would else find out later."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []

    def posted(self) -> None:
        """Say that a message was posted."""
        for listener in self.listeners:
            listener.posted()

    def freed(self, id: str) -> None:
        """Say that a turn of the session `id` has ended."""
        for listener in self.listeners:
            listener.freed(id)


@frozen
class Ground:
    """What the handles share."""

    store: Store
    registry: Registry
    keeper: Keeper
    bell: Bell
    limits: Limits
    rules: TurnRules
    random: Random


class Handle:
    """An id, and where to deliver what is asked of the session. To be derived from."""

    __slots__ = ("_ground", "_life", "id")

    def __init__(self, id: str, ground: Ground, life: Life | None = None) -> None:
        self.id = check_text(id, "id", max_length=MAX_ID_LENGTH)
        self._ground = ground
        self._life = Life() if life is None else life

    def _deliver(self, ask: Ask[T]) -> Coroutine[object, None, T]:
        # Not async itself: one coroutine less for each message on its way.
        self._ground.registry.wake(self.id).deliver(ask)
        return ask.answer()
