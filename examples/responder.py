"""What an answer comes from: any `Responder`. Here the one that needs no network: a few rules.

It reads the whole conversation, as a model would. Tell it your name, ask for it, /undo twice
and ask again: what was taken back, it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeAlias

import trio

__all__ = ["NoAnswer", "Responder", "Rules"]

Responder: TypeAlias = Callable[
    [Sequence[dict[str, object]], Callable[[str], None]], Awaitable[None]
]
"""Is given the messages so far and says its answer piece by piece, through the second argument.

When it returns, the answer is whole. Raises `NoAnswer` if it cannot be made whole. It may be
cancelled. (Not an async generator: a time-out must not stay open across a `yield`.)
"""

COUNT_LIMIT = 1_000


class NoAnswer(Exception):
    """There is no answer, or only half of one. The text says why, for the person."""


class Rules:
    """Answers by a few rules, a word at a time, `pace_s` seconds apart."""

    def __init__(self, random: Random, pace_s: float) -> None:
        self._random = random
        self._pace_s = pace_s

    async def __call__(
        self, messages: Sequence[dict[str, object]], say: Callable[[str], None]
    ) -> None:
        said = [str(message["content"]) for message in messages if message["role"] == "user"]
        for word in re.findall(r"\s*\S+", self._answer(said)):
            say(word)
            await trio.sleep(self._pace_s)

    def _answer(self, said: Sequence[str]) -> str:
        *before, last = said
        if found := re.search(r"\bcount to (\d{1,9})\b", last, re.IGNORECASE):
            return " ".join(map(str, range(1, min(int(found[1]), COUNT_LIMIT) + 1)))
        if name := _name_in(last):
            return f"Pleased to meet you, {name}."
        if re.search(r"\b(what('s| is) my name|who am i)\b", last, re.IGNORECASE):
            names = [name for text in before if (name := _name_in(text))]
            return f"You are {names[-1]}." if names else "You have not told me your name."
        if re.search(r"\bwhat did i (just )?(say|ask)\b", last, re.IGNORECASE):
            return f"You said: {before[-1]}" if before else "Nothing yet."
        if re.match(r"\s*(hi|hello|hey|good (morning|day|evening))\b", last, re.IGNORECASE):
            return "Hello! I answer by a few rules. Tell me your name, or ask me to count to 100."
        if re.search(r"\b(thanks|thank you)\b", last, re.IGNORECASE):
            return "You are welcome."
        if re.search(r"\b(bye|goodbye)\b", last, re.IGNORECASE):
            return "Goodbye! /quit leaves; what we said stays here."
        if last.rstrip().endswith("?"):
            return self._random.choice(
                [
                    "A good question. What would you answer?",
                    "I have no rule for that. /retry may bring another phrase, not more wisdom.",
                    "That depends. On what, would you say?",
                ]
            )
        return self._random.choice(
            ["Go on.", "Tell me more about that.", "Why do you say so?", "And how was that?"]
        )


def _name_in(text: str) -> str | None:
    found = re.search(r"\b(?:my name is|call me) (\w+)", text, re.IGNORECASE)
    return found[1] if found else None
