"""Clients that do random things in a few sessions, and note each call for the checker."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from random import Random
from typing import Any, Protocol, TypeAlias

import trio
from support import A, Body, U

from processes.checker import Call
from processes.told import error_of, plain
from turnkeeper.actors import Session, Sessions, Transcript, Turn

__all__ = ["wander"]

CLIENTS = 2
"""In each process; they meet in the lines of its actors, and those of other processes in the file."""

KEYS = 30
"""A client draws one of so many keys, so that most come again."""

PAUSE_S = 0.01
"""Longest pause between two calls."""

THINK_S = 0.1
"""For how long a turn is held between two calls under it: long enough to be stopped in."""

WAIT_S = 0.2
"""For how long a turn is waited for."""

TTL_S = 1.0
"""The least that there is: a process that is stopped loses its turn soon."""

Tell: TypeAlias = Callable[[str, int], None]
"""Told session and token when a turn is about to be held for a while."""


class Stopper(Protocol):
    """Says when it is enough."""

    def is_set(self) -> bool: ...


async def wander(
    sessions: Sessions, ids: Sequence[str], name: str, seed: str, enough: Stopper, tell: Tell
) -> list[Call]:
    """Call at random until it is enough; return all calls."""
    calls: list[Call] = []
    async with trio.open_nursery() as nursery:
        for number in range(CLIENTS):
            client = _Client(sessions, f"{name}{number}", Random(f"{seed} {number}"), calls, tell)
            nursery.start_soon(client.run, ids, enough)
    return calls


class _Client:
    """One who calls, one call after another."""

    def __init__(
        self, sessions: Sessions, name: str, random: Random, calls: list[Call], tell: Tell
    ) -> None:
        self._sessions = sessions
        self._name = name
        self._random = random
        self._calls = calls
        self._tell = tell
        self._numbers = count(1)

    async def run(self, ids: Sequence[str], enough: Stopper) -> None:
        does = {
            self._append: 6,
            self._append_keyed: 4,
            self._extend: 2,
            self._undo: 4,
            self._redo: 4,
            self._rewrite: 3,
            self._read: 5,
            self._take_turn: 4,
            self._take_over: 0.2,  # or no turn would live long enough to run out
        }
        while not enough.is_set():
            (do,) = self._random.choices(list(does), list(does.values()))
            await do(self._sessions[self._random.choice(ids)])
            await trio.sleep(self._random.uniform(0, PAUSE_S))

    async def _append(self, target: Session | Turn) -> None:
        message = self._say()
        await self._call("append", target, target.append(message), message=message)

    async def _append_keyed(self, target: Session | Turn) -> None:
        key = f"key {self._random.randrange(KEYS)}"
        message = U(f"of {key}")
        await self._call(
            "append", target, target.append(message, key=key), message=message, key=key
        )

    async def _extend(self, target: Session | Turn) -> None:
        messages = [self._say(), self._say()]
        await self._call("extend", target, target.extend(messages), messages=messages)

    async def _undo(self, target: Session | Turn) -> None:
        turns = self._random.randint(1, 3)
        await self._call("undo", target, target.undo(turns), turns=turns)

    async def _redo(self, target: Session | Turn) -> None:
        await self._call("redo", target, target.redo())

    async def _rewrite(self, target: Session | Turn) -> None:
        """Keep a part of what is there, on condition that it is there still."""
        there = await self._call("transcript", target, target.transcript())
        if not isinstance(there, Transcript):
            return
        kept = self._random.randint(0, len(there))
        messages = [*there.bodies[:kept], *[self._say()] * self._random.randint(0, 1)]
        at = there.revision
        await self._call(
            "rewrite", target, target.rewrite(messages, at=at), messages=messages, at=at
        )

    async def _read(self, target: Session | Turn) -> None:
        await self._call("transcript", target, target.transcript())

    async def _take_turn(self, session: Session) -> None:
        holder = f"{self._name} {next(self._numbers)}"
        await self._hold(session, session.turn(wait=WAIT_S, ttl=TTL_S, holder=holder), holder)

    async def _take_over(self, session: Session) -> None:
        holder = f"{self._name} {next(self._numbers)}"
        await self._hold(session, session.take_over(ttl=TTL_S, holder=holder), holder)

    async def _hold(self, session: Session, turn: Any, holder: str) -> None:  # its own manager
        start = time.monotonic()
        arguments: dict[str, object] = {"holder": holder}
        token: int | None = None
        try:
            async with turn as held:
                token = held.token
                self._note("take", session, arguments, start, token, {"token": token})
                try:
                    await self._append(held)
                    if self._random.random() < 0.5:
                        # Stopped from here on, it wakes when that is long over and goes on at
                        # once, before the store has had time to find out what it has lost.
                        until = trio.current_time() + self._random.uniform(0, THINK_S)
                        self._tell(session.id, held.token)
                        await trio.sleep_until(until)
                    (do,) = self._random.choices(
                        [self._append, self._append_keyed, self._undo, self._rewrite], [4, 2, 1, 1]
                    )
                    await do(held)
                finally:
                    start = time.monotonic()
        except Exception as error:
            do_ = "take" if token is None else "end"
            self._note(do_, session, arguments if token is None else {}, start, token, error=error)
        else:
            self._note("end", session, {}, start, token)

    async def _call(
        self,
        do: str,
        target: Session | Turn,
        call: Coroutine[object, None, object],
        **arguments: object,
    ) -> object:
        """Make the call and note it; return what it returned, None if it was refused."""
        token = target.token if isinstance(target, Turn) else None
        start = time.monotonic()
        try:
            result = await call
        except Exception as error:
            self._note(do, target, arguments, start, token, error=error)
            return None
        except trio.Cancelled:
            self._note(do, target, arguments, start, token, error={"type": "Cancelled"})
            raise
        self._note(do, target, arguments, start, token, result)
        return result

    def _note(
        self,
        do: str,
        target: Session | Turn,
        arguments: dict[str, object],
        start: float,
        token: int | None,
        result: object = None,
        *,
        error: Exception | dict[str, object] | None = None,
    ) -> None:
        told = error_of(error) if isinstance(error, Exception) else error
        self._calls.append(
            Call(
                self._name,
                target.id,
                do,
                arguments,
                start,
                time.monotonic(),
                token,
                plain(result),
                told,
            )
        )

    def _say(self) -> Body:
        text = f"{self._name} {next(self._numbers)}"
        return U(text) if self._random.random() < 0.6 else A(text)
