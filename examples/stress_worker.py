"""One of several processes on one file. Started by `stress_processes`, and now and then killed.

    python stress_worker.py '{"path": …, "journal": …, "worker": 1, "sessions": 20, "turns": 100, "seed": 7}'

It talks in every session, one task each, until so many turns are done, and serves the inboxes
meanwhile. It writes a line when the store is open and one for each turn done.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random

import trio
from stress_callers import Callers
from stress_calls import CANCELLED, Body, Call, Ledger, Outcome, Rewind, Say, refused
from stress_journal import Enter, Held, Journal, Leave, Post, Read, Seen
from stress_load import MAILBOX_SIZE, Talk

from turnkeeper.actors import (
    Handler,
    Policy,
    Session,
    Sessions,
    Transcript,
    Turn,
    TurnkeeperError,
    open_sessions,
)

__all__ = ["MAX_ATTEMPTS", "Noting", "answering", "session_name"]

NUMBERS = 10_000_000
"""Of each process, for its texts, keys and forks; more than it will use."""

TTL_S = 60.0
"""A turn lasts longer than any machine stalls: it ends by its block, a kill or a takeover only."""

MAX_ATTEMPTS = 1_000
"""Kills and takeovers count, and none of them may cost a post its answer."""

SHARED = 40
"""Keys that all processes use in each session, so that some send the same at once."""

ACTS = {"talk": 60, "turn": 9, "take over": 2, "post": 12, "shared": 9, "interleave": 4, "read": 4}
"""What is done in a session, and how often; to talk is what one process does alone."""

POLICIES: tuple[Policy | None, ...] = (
    *(None, None, None, None),
    *("collect", "collect", "interrupt", "refuse"),
)
"""Of posts."""


def session_name(number: int) -> str:
    """The sessions that all processes share."""
    return f"session-{number:05}"


class Noting(Callers):
    """Callers whose calls are noted in the process's journal."""

    def __init__(self, journal: Journal, worker: int) -> None:
        super().__init__(worker * NUMBERS)
        self.journal = journal
        self._under_way: dict[Call, int] = {}

    def began(self, session: Session | Turn, ledger: Ledger, call: Call) -> None:
        """Note a call that is about to be made."""
        token = session.token if isinstance(session, Turn) else None
        self._under_way[call] = self.journal.began(ledger.id, call.operation, token)

    def ended(self, call: Call) -> None:
        """Note that it has its outcome."""
        self.journal.ended(self._under_way.pop(call), call.outcome)

    async def look(self, session: Session, ledger: Ledger) -> Transcript | None:
        """Read the transcript while others write, and note what was seen."""
        number = self.journal.began(ledger.id, Read())
        seen = await session.transcript(hidden=True)
        self.journal.ended(number, Seen(seen.revision, tuple(row.id or 0 for row in seen)))
        ledger.acknowledged = max(ledger.acknowledged, seen.revision)
        return seen


class SharedTalk(Talk):
    """One task in a session in which other processes talk as well."""

    _callers: Noting

    async def run(self, turns: int, turn_done: Callable[[], object] = lambda: None) -> None:
        """Do `turns` things that people do."""
        for _ in range(turns):
            act = self._chance.choices(list(ACTS), list(ACTS.values()))[0]
            match act:
                case "talk":
                    await super().run(1)
                case "turn":
                    await self._turn(Enter("turn"))
                case "take over":
                    await self._turn(Enter("take over"))
                case "post":
                    await self._post()
                case "shared":
                    number = self._chance.randrange(SHARED)
                    body: Body = {"role": "user", "content": f"shared {number}"}
                    await self._ask(Say((body,), (f"shared-{number}",)))
                case "interleave":
                    body = {"role": "user", "content": f"by the way {self._callers.number()}"}
                    await self._ask(Say((body,), (None,), interleave=True))
                case _:
                    await self._callers.look(self._session, self._ledger)
            turn_done()

    async def _point(self) -> int | None:
        seen = await self._callers.look(self._session, self._ledger)
        return None if seen is None else seen.revision

    async def _turn(self, enter: Enter) -> None:
        """Hold the turn for a few calls; now and then leave by an error, or a tool call open."""
        journal, session = self._callers.journal, self._session
        number = journal.began(session.id, enter)
        take = session.turn if enter.how == "turn" else session.take_over
        lost: Outcome = None
        try:
            async with take() as turn:
                journal.ended(number, Held(turn.token))
                how = "well"
                try:
                    await _act(turn, self._callers, self._ledger, self._chance)
                except BaseException:
                    how = turn.loss or "raised"
                    raise
                finally:
                    number = journal.began(session.id, Leave(how), turn.token)
        except Expected:
            pass
        except TurnkeeperError as error:
            lost = refused(error)
        journal.ended(number, lost)

    async def _post(self) -> None:
        """Post; now and then what another process may have posted, or may be about to."""
        chance, journal = self._chance, self._callers.journal
        name = f"post-{self._callers.number()}"
        key: str | None = name if chance.random() < 0.5 else None
        if chance.random() < 0.3:
            key = name = f"post-shared-{chance.randrange(SHARED)}"
        policy = chance.choice(POLICIES)
        post = Post({"role": "user", "content": name}, key, policy)
        for _ in range(chance.choice((1, 1, 1, 2))):
            number = journal.began(self._session.id, post)
            try:
                receipt = await self._session.post(post.body, key=key, policy=policy)
            except TurnkeeperError as error:
                journal.ended(number, refused(error))
            else:
                journal.ended(number, receipt)
            if key is None:
                break


class Expected(Exception):
    """What people's code raises in its turns."""


async def _act(turn: Turn, callers: Noting, ledger: Ledger, chance: Random) -> None:
    """Ask, call a tool and answer; one in four leaves the call open, one in ten undoes it all."""
    number = callers.number()
    function = {"name": "look", "arguments": "{}"}
    call = {"id": f"call-{number}", "type": "function", "function": function}
    await callers.ask(turn, ledger, _say("assistant", None, tool_calls=[call]), chance)
    if chance.random() < 0.25:
        if chance.random() < 0.5:
            raise Expected
        return
    await callers.ask(turn, ledger, _say("tool", "found", tool_call_id=f"call-{number}"), chance)
    await callers.ask(turn, ledger, _say("assistant", f"answer {number}"), chance)
    if chance.random() < 0.1:
        await callers.ask(turn, ledger, Rewind("undo"), chance)


def _say(role: str, content: str | None, **more: object) -> Say:
    return Say(({"role": role, "content": content, **more},), (None,))


def answering(
    callers: Noting, ledgers: Mapping[str, Ledger], chance: Random, *, simply: bool
) -> Handler:
    """Return a handler that answers what it is given, unless `simply` after other things.

    Then it also fails now and then, and what it was given is tried again.
    """

    async def answer(turn: Turn) -> None:
        journal = callers.journal
        ledger = ledgers.get(turn.id) or Ledger(turn.id)  # a fork's
        taken = tuple(message.append_id for message in turn.messages)
        number = journal.began(turn.id, Enter("serve"))
        journal.ended(number, Held(turn.token, taken, turn.attempt == 1))
        how = "well"
        try:
            if not simply and chance.random() < 0.5:
                await _act(turn, callers, ledger, chance)
            if not simply and chance.random() < 0.05:
                raise Expected
            said = _say("assistant", f"answered under {turn.token}")
            while await callers.ask(turn, ledger, said, chance) == CANCELLED:
                pass
        except BaseException as error:
            how = turn.loss or ("raised" if isinstance(error, Exception) else "cancelled")
            raise
        finally:
            journal.began(turn.id, Leave(how, serving=True), turn.token)

    return answer


async def work(path: Path, journal: Path, worker: int, sessions: int, turns: int, seed: int) -> int:
    """Do `turns` things in `sessions` sessions, and serve them meanwhile; return what failed."""
    callers, chance = Noting(Journal(journal), worker), Random(f"{seed} {worker}")
    ledgers = {id: Ledger(id) for id in map(session_name, range(sessions))}
    left = turns

    async def talk(store: Sessions, ledger: Ledger) -> None:
        nonlocal left
        talk = SharedTalk(store, callers, ledger, [], Random(f"{seed} {worker} {ledger.id}"))
        while left > 0:
            left -= 1
            await talk.run(1, partial(print, "turn", flush=True))

    async with open_sessions(
        path,
        mailbox_size=MAILBOX_SIZE,
        max_resident=max(2, sessions // 2),
        turn_ttl_s=TTL_S,
        turn_wait_s=TTL_S,
    ) as store:
        print("open", flush=True)
        handler = answering(callers, ledgers, chance, simply=False)
        async with trio.open_nursery() as serving:
            serving.start_soon(partial(store.serve, handler, max_attempts=MAX_ATTEMPTS))
            async with trio.open_nursery() as talking:
                for ledger in ledgers.values():
                    talking.start_soon(talk, store, ledger)
            serving.cancel_scope.cancel()
        return store.stats().failures


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # handlers fail on purpose, and turns are lost
    options = json.loads(sys.argv[1])
    options |= {name: Path(options[name]) for name in ("path", "journal")}
    sys.exit(trio.run(partial(work, **options)))
