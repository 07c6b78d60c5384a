"""People who type, undo, retry, change their minds and send things twice."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import trio
from attrs import evolve
from stress_callers import Callers
from stress_calls import (
    CANCELLED,
    Body,
    Fork,
    Ledger,
    Operation,
    Outcome,
    Redo,
    Restore,
    Rewind,
    Rewrite,
    Say,
)

from turnkeeper.actors import Forked, Sessions, Undone

__all__ = ["MAILBOX_SIZE", "load"]

MAILBOX_SIZE = 8
BURST = 12
"""Calls made at once: one is under way, a mailbox holds eight, so some stand in line."""

ACTS = {
    "nothing": 37,
    "undo": 10,
    "redo": 9,
    "retry": 7,
    "rewrite": 7,
    "restore": 6,
    "redeliver": 8,
    "look": 6,
    "note": 5,
    "fork": 3,
    "burst": 2,
    "drop": 1,
}
"""What may follow a turn, and how often."""


async def load(
    store: Sessions,
    callers: Callers,
    *,
    sessions: int,
    turns: int,
    seed: int,
    turn_done: Callable[[], object],
) -> None:
    """Hold `sessions` conversations of `turns` turns each, all at once; forks come on top.

    Most are held by one task, now and then one is by two or three.
    """
    async with trio.open_nursery() as nursery:
        for number in range(sessions):
            ledger = callers.open(Ledger(f"session-{number:05}"))
            keyed: list[Say] = []
            tasks = Random(f"{seed} {number}").choice((1, 1, 1, 1, 1, 1, 2, 3))
            for task in range(tasks):
                own = turns * (task + 1) // tasks - turns * task // tasks
                talk = Talk(store, callers, ledger, keyed, Random(f"{seed} {number} {task}"))
                nursery.start_soon(talk.run, own, turn_done)


class Talk:
    """One task in one session."""

    def __init__(
        self, store: Sessions, callers: Callers, ledger: Ledger, keyed: list[Say], chance: Random
    ) -> None:
        self._store = store
        self._session = store[ledger.id]
        self._callers = callers
        self._ledger = ledger
        self._keyed = keyed
        """The appends of the session that carried a key."""
        self._chance = chance

    async def run(self, turns: int, turn_done: Callable[[], object] = lambda: None) -> None:
        """Hold `turns` turns: a question, an answer, and perhaps what people do after it."""
        for _ in range(turns):
            await self._say(self._question())
            await self._say(self._answer())
            await self._act(self._chance.choices(list(ACTS), list(ACTS.values()))[0])
            turn_done()

    async def _act(self, act: str) -> None:
        chance = self._chance
        match act:
            case "undo":
                for _ in range(chance.choice((1, 1, 2, 3))):
                    await self._ask(Rewind("undo", chance.choice((1, 1, 1, 2, 3))))
                for _ in range(chance.choice((0, 0, 1, 2, 3))):
                    await self._ask(Redo())
            case "redo":
                await self._ask(Redo(self._known()))
            case "retry":
                undone = await self._ask(Rewind("retry"))
                if isinstance(undone, Undone) and undone.text is not None:
                    await self._say(_say({"role": "user", "content": undone.text}))
            case "rewrite":
                await self._rewrite()
            case "restore":
                await self._ask(Restore(chance.randint(1, self._ledger.acknowledged + 2)))
            case "redeliver" if self._keyed:
                await self._redeliver()
            case "look":
                await self._callers.look(self._session, self._ledger)
            case "note":
                note: Body = {"role": "assistant", "content": f"note {self._callers.number()}"}
                await self._say(Say((note,), (None,), hidden=True))
            case "fork":
                await self._fork()
            case "burst":
                await self._burst()
            case "drop":
                self._store.drop_idle()

    async def _ask(self, operation: Operation) -> Outcome:
        return await self._callers.ask(self._session, self._ledger, operation, self._chance)

    async def _say(self, say: Say) -> None:
        """Append; now and then twice at once, now and then again where the caller gave up."""
        if say.keys[0] is not None:
            self._keyed.append(say)
            if self._chance.random() < 0.1:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._ask, say)
                    nursery.start_soon(self._ask, say)
                return
        if await self._ask(say) == CANCELLED and self._chance.random() < 0.5:
            await self._ask(say)

    def _question(self) -> Say:
        number, chance = self._callers.number(), self._chance
        content: object = f"question {number} " + "x" * chance.randint(0, 200)
        if chance.random() < 0.05:  # nothing that a retry could send again
            content = [{"type": "image_url", "image_url": {"url": f"https://example.com/{number}"}}]
        return _say({"role": "user", "content": content}, chance.choice((None, f"key-{number}")))

    def _answer(self) -> Say:
        number, chance = self._callers.number(), self._chance
        last: Body = {"role": "assistant", "content": f"answer {number} " + "y" * 200}
        if chance.random() < 0.7:
            return Say((last,), (None,), at=self._known())
        function = {"name": "look", "arguments": "{}"}
        call = {"id": f"call-{number}", "type": "function", "function": function}
        first: Body = {"role": "assistant", "content": None, "tool_calls": [call]}
        result: Body = {"role": "tool", "tool_call_id": f"call-{number}", "content": "found"}
        key = f"key-{number}" if chance.random() < 0.3 else None
        return Say((first, result, last), (key, None, None), batch=True, at=self._known())

    def _known(self) -> int | None:
        """Now and then the revision last acknowledged: a decision made on what was there."""
        return self._ledger.acknowledged if self._chance.random() < 0.1 else None

    async def _redeliver(self) -> None:
        """Say again what came with a key, undone or not; one in ten with other words.

        A revision that is past must not matter: that a key was seen is found out first.
        """
        past = self._chance.choice((None, None, max(0, self._ledger.acknowledged - 1)))
        say = evolve(self._chance.choice(self._keyed), at=past)
        if self._chance.random() < 0.1:
            say = _say({"role": "user", "content": "other words"}, say.keys[0])
        await self._ask(say)

    async def _rewrite(self) -> None:
        """Read, and write what was read anew: shorter, changed, as a summary, or as it was."""
        chance = self._chance
        seen = await self._callers.look(self._session, self._ledger)
        if seen is None:
            return
        bodies = [message.body for message in seen if not message.hidden]
        notes = [i - n for n, i in enumerate(i for i, row in enumerate(seen) if row.hidden)]
        # Half of the time right before a hidden row, if there is one: it must stay.
        start = chance.choice((chance.randint(0, len(bodies)), *notes[-1:]))
        text = f"changed {self._callers.number()}"
        new: Body = {"role": chance.choice(("user", "assistant")), "content": text}
        at = chance.choice((None, seen.revision))
        match chance.randrange(4):
            case 0:
                await self._ask(Rewrite(tuple(bodies[:start]), "rewrite", at))
            case 1:
                changed = (*bodies[:start], new, *bodies[start + 1 :])
                await self._ask(Rewrite(changed, "rewrite", at))
            case 2:
                await self._ask(Rewrite((new, *bodies[start:]), "compaction", at))
            case _:
                await self._ask(Rewrite(tuple(bodies), "rewrite", at))

    async def _fork(self) -> None:
        """Fork, at the head or somewhere, and go on in the fork for a few turns."""
        chance = self._chance
        id = f"{self._ledger.id}/fork-{self._callers.number()}"
        position = chance.choice((None, chance.randint(0, 12)))
        forked = await self._ask(Fork(id, position, await self._point()))
        if isinstance(forked, Forked):
            ledger = self._callers.open(Ledger(id, self._ledger.id, acknowledged=forked.revision))
            # What its source has seen is new to the fork: its keys start empty.
            talk = type(self)(self._store, self._callers, ledger, self._keyed[-3:], chance)
            await talk.run(chance.randint(0, 4))

    async def _point(self) -> int | None:
        """The revision at which to fork, if others may come in between; None: whatever is there."""
        return None

    async def _burst(self) -> None:
        """Many calls at once in one session."""
        async with trio.open_nursery() as nursery:
            for _ in range(BURST):
                says = [self._question() for _ in range(4)]
                calls: list[Operation] = [*says, Rewind("undo"), Rewind("retry"), Redo()]
                nursery.start_soon(self._ask, self._chance.choice(calls))


def _say(body: Body, key: str | None = None) -> Say:
    return Say((body,), (key,))
