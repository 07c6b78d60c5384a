"""A process that opens a store and does what it is told, one JSON line a command.

Run as ``python -m processes.worker PATH OPTIONS``. Commands run side by side, each is answered by a
line with its number, its start and end on the clock that all processes share, and a result or an
error; lines with `event` say what nobody asked for. The end of the input is the end of the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from math import inf
from typing import Any, cast

import apsw
import trio
from support import A, U

from processes.clients import wander
from processes.told import error_of, plain
from turnkeeper.actors import Session, Sessions, Turn, open_sessions

Arguments = Mapping[str, object]

INTERRUPTED = 130
"""What a shell calls a program that Ctrl-C has ended."""


def say(**words: object) -> None:
    """Write one line, whole: what was said before a kill can be read."""
    line = (json.dumps(words) + "\n").encode()
    while line:  # a signal may cut it
        line = line[os.write(1, line) :]


class Hold:
    """A turn that is held until somebody says otherwise."""

    def __init__(self) -> None:
        self.turn: Turn | None = None
        self.begun = trio.Event()
        self.let_go = trio.Event()
        self.ended = trio.Event()
        self.error: Exception | None = None


class Worker:
    """What can be asked of the process."""

    def __init__(self, path: str, sessions: Sessions, nursery: trio.Nursery) -> None:
        self._path = path
        self._sessions = sessions
        self._nursery = nursery
        self._holds: dict[str, Hold] = {}
        self._rival: apsw.Connection | None = None
        self._enough = trio.Event()

    async def answer(self, number: int, do: str, arguments: Arguments) -> None:
        start = time.monotonic()
        try:
            method = getattr(self, f"do_{do}", None) or partial(self._call, do)
            result = plain(await cast(Callable[..., Awaitable[object]], method)(**arguments))
        except Exception as error:
            answer: dict[str, object] = {"error": error_of(error)}
        else:
            answer = {"result": result}
        say(number=number, start=start, end=time.monotonic(), **answer)

    async def _call(self, do: str, session: str, **arguments: object) -> object:
        """Do what a session, or with `turn` the turn that is held under that name, can do."""
        hold = arguments.pop("turn", None)
        target: Session | Turn = self._sessions[session]
        if hold is not None:
            turn = self._holds[str(hold)].turn
            assert turn is not None
            target = turn
        return await cast(Awaitable[object], getattr(target, do)(**arguments))

    async def do_hold(
        self, session: str, *, take_over: bool = False, name: str = "it", **wish: Any
    ) -> object:
        """Hold the session's turn under a name; answered when it was taken."""
        hold = self._holds[name] = Hold()
        self._nursery.start_soon(self._hold, hold, session, take_over, wish)
        await hold.begun.wait()
        if hold.turn is None:
            assert hold.error is not None
            raise hold.error
        return {"token": hold.turn.token}

    async def _hold(self, hold: Hold, session: str, take_over: bool, wish: dict[str, Any]) -> None:
        handle = self._sessions[session]
        try:
            async with handle.take_over(**wish) if take_over else handle.turn(**wish) as turn:
                hold.turn = turn
                hold.begun.set()
                await hold.let_go.wait()
        except Exception as error:
            hold.error = error
        hold.begun.set()
        hold.ended.set()

    async def do_let_go(self, *, name: str = "it") -> None:
        """End the turn that is held under a name; raises what came out of its block."""
        hold = self._holds.pop(name)
        hold.let_go.set()
        await hold.ended.wait()
        if hold.error is not None:
            raise hold.error

    async def do_take_turns(self, session: str, tag: str, number: int) -> None:
        """Take so many turns, of a question and an answer each."""
        for n in range(number):
            async with self._sessions[session].turn() as turn:
                await turn.append(U(f"{tag} {n}"))
                await turn.append(A(f"{tag} {n}"))

    async def do_flood(self, session: str, *, rows: int) -> None:
        """Append for ever, `rows` at a time, and say what was acknowledged."""
        while True:
            batch = await self._sessions[session].extend([U("drop")] * rows)
            say(event="appended", position=batch[-1].position)

    async def do_serve(
        self, *, hang_from: float = inf, hang_only: str | None = None, **options: int
    ) -> None:
        """Answer whatever is posted; hang in every handler from the n-th on, or at one text."""
        begun = 0

        async def handle(turn: Turn) -> None:
            nonlocal begun
            begun += 1
            asked = [message.body["content"] for message in turn.messages]
            about = {"session": turn.id, "asked": asked, "attempt": turn.attempt}
            say(event="begun", **about)
            if begun >= hang_from or asked == [hang_only]:
                try:
                    await trio.sleep_forever()
                finally:
                    say(event="stopped", **about)
            await turn.append(A(f"to {', '.join(map(str, asked))}"))
            say(event="answered", **about)

        await self._sessions.serve(handle, **options)

    async def do_wander(self, ids: list[str], name: str, seed: str) -> object:
        """Do random calls until it is enough; return them all."""
        self._enough = trio.Event()

        def tell(session: str, token: int) -> None:
            say(event="holding", session=session, token=token)

        return await wander(self._sessions, ids, name, seed, self._enough, tell)

    async def do_enough(self) -> None:
        self._enough.set()

    async def do_statistics(self) -> object:
        return self._sessions.stats()

    async def do_lock(self) -> None:
        """Hold the file's write lock, as any program may."""
        self._rival = apsw.Connection(self._path)
        self._rival.execute("BEGIN IMMEDIATE")

    async def do_unlock(self) -> None:
        assert self._rival is not None
        self._rival.close()

    async def do_die(self) -> None:
        os._exit(9)


async def main(path: str, options: dict[str, float]) -> None:
    haste = options.pop("haste", 1)
    start = time.monotonic()
    async with open_sessions(
        path,
        monotonic=lambda: time.monotonic() * haste,
        **options,  # type: ignore[arg-type]  # whatever a test gives
    ) as sessions:
        say(event="ready", took_s=time.monotonic() - start)
        async with trio.open_nursery() as nursery, trio.lowlevel.FdStream(os.dup(0)) as commands:
            worker = Worker(path, sessions, nursery)
            buffer = b""
            async for chunk in commands:
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    command = json.loads(line)
                    nursery.start_soon(
                        worker.answer, command["number"], command["do"], command["arguments"]
                    )
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    try:
        trio.run(main, sys.argv[1], json.loads(sys.argv[2]))
    except* KeyboardInterrupt:
        sys.exit(INTERRUPTED)
