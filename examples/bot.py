"""A chat in the terminal that forgets nothing: a whole program over Turnkeeper.

    python examples/bot.py        # over ./state.db, or the file that TURNKEEPER_DB names

Answers come from a few rules, so that it runs anywhere. With OPENAI_BASE_URL set they come
from that endpoint instead, with OPENAI_API_KEY, OPENAI_MODEL and OPENAI_TIMEOUT (the seconds
that it may stay silent, 60 by default) where they are set.

Read `asking.py` first. It is the idea of the program: what a person says is posted to an inbox on
disk, and `serve` takes it from there to be answered. Kill the program at any moment and start it
again: it answers the question that was left and goes on where it was. Start it twice on one file:
the two serve one inbox, and each shows what its own person asked.

Lines are taken one after the other; what is typed while an answer comes is read after it. Ctrl-C
while an answer comes stops that answer; otherwise it leaves. The exit code is 0 after
/quit and at the end of the input, 1 if the store cannot be used, and 128 plus the number of the
signal that ended it (130 for Ctrl-C), as shells do. All of them leave a clean store.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from random import Random

import trio
from asking import Asking
from responder import Responder, Rules
from terminal import Terminal

from turnkeeper.actors import (
    InboxMessage,
    Session,
    Sessions,
    TurnkeeperError,
    commands,
    open_sessions,
)

HELP = """\
/help          this list
/retry         ask the last question again
/undo [n]      take back the last turn, or the last n; nothing is deleted
/redo          bring back what the last /undo took
/history       what has been said, here and by whoever else is in this session
/fork NAME     begin the session NAME as a copy of this one, and go there
/switch NAME   go to the session NAME; it begins empty if there is none
/sessions      list the sessions; * marks where we are
/quit          leave (so do Ctrl-C and Ctrl-D); everything stays in the file
Anything else is said to the bot. Ctrl-C stops an answer; the question is kept. While somebody else
is answered in this session, /retry, /undo and /redo change nothing, and say so."""

HOME = "main"
"""The session that one starts in. Its meta remembers where the person went from there."""

SHOWN_SESSIONS = 50


class Chat:
    """One person, one terminal, and at each moment one session."""

    def __init__(self, sessions: Sessions, asking: Asking, terminal: Terminal) -> None:
        self.sessions = sessions
        self.asking = asking
        self.terminal = terminal
        self.session: Session = sessions[HOME]
        self.left: list[InboxMessage] = []
        """Questions of an earlier run, whose answers are waited for before the next line is."""
        self.ended_by: int | None = None
        """The signal that made us leave, if one did."""

    async def begin(self, file: str) -> None:
        """Go to where the person was last, and say where that is and what was left there."""
        went_to = (await self.session.meta()).get("went_to", HOME)
        self.session = self.sessions[str(went_to)]
        self.terminal.say(f"{file}: {await self._where()}. /help lists the commands.")
        self.left = await self.asking.left_behind(self.session)
        newest = await self.session.transcript(last=1)
        if newest and newest[0].role == "user" and not await self.session.inbox():
            self.terminal.say("The last question has no answer. /retry asks it again.")

    async def run(self) -> None:
        """Take one line after the other, until the input ends or the person leaves."""
        try:
            while True:
                try:
                    while self.left:
                        await self.asking.resume(self.session, self.left.pop(0))
                    line = await self.terminal.line(f"{self.session.id}> ")
                    if line is None or line.strip() == "/quit":
                        return
                    await self.take(line)
                except TurnkeeperError as error:
                    self.terminal.say(str(error))  # it says what happened and what to do next
        finally:
            self.terminal.end_line()

    async def take(self, line: str) -> None:
        """Do what one line says."""
        match line.strip().split(maxsplit=1):
            case []:
                pass
            case ["/help"]:
                self.terminal.say(HELP)
            case ["/retry"]:
                await self.retry()
            case ["/undo"]:
                self.terminal.say(await commands.undo(self.session))
            case ["/undo", turns] if turns.isdecimal() and len(turns) < 10:
                self.terminal.say(await commands.undo(self.session, int(turns)))
            case ["/redo"]:
                self.terminal.say(await commands.redo(self.session))
            case ["/history"]:
                self.terminal.say(await commands.history(self.session))
            case ["/fork" | "/switch" as command]:
                self.terminal.say(f"{command} needs a NAME.")
            case ["/undo", _]:
                self.terminal.say("/undo needs a number, or nothing.")
            case ["/fork", name]:
                await self.fork(name)
            case ["/switch", name]:
                await self.switch(name)
            case ["/sessions"]:
                await self.list_sessions()
            case [command, *_] if command.startswith("/"):
                self.terminal.say(
                    f"I do not understand {line.strip()!r}. /help lists the commands."
                )
            case _:
                await self.asking.ask(self.session, line)

    async def retry(self) -> None:
        shown: str | None = None

        async def ask_again(text: str) -> str:
            nonlocal shown
            shown = await self.asking.ask(self.session, text)
            return shown

        told = await commands.retry(self.session, ask_again)
        if told != shown:  # words of its own; the answer has been shown
            self.terminal.say(told)

    async def fork(self, name: str) -> None:
        taken = await self.sessions[name].info() is not None
        self.terminal.say(await commands.fork(self.session, name))
        if not taken and await self.sessions[name].info() is not None:
            await self.go(name)

    async def switch(self, name: str) -> None:
        await self.go(name)
        self.terminal.say(await self._where())
        self.left = await self.asking.left_behind(self.session)

    async def go(self, name: str) -> None:
        session = self.sessions[name]  # refuses what cannot be a name
        home = self.sessions[HOME]
        await home.set_meta({**await home.meta(), "went_to": name})
        self.session = session

    async def list_sessions(self) -> None:
        infos = await self.sessions.list(limit=SHOWN_SESSIONS)
        if self.session.id not in [info.id for info in infos]:
            self.terminal.say(f"* {await self._where()}")  # new, or further down the alphabet
        for info in infos:
            mark = "*" if info.id == self.session.id else " "
            self.terminal.say(f"{mark} {_counted(info.messages)} in {info.id}")
        if len(infos) == SHOWN_SESSIONS:
            self.terminal.say("  …")

    async def heed(self, signals: AsyncIterator[int], leave: Callable[[], None]) -> None:
        """Let Ctrl-C stop the answer; leave at a second one, without an answer, and at others."""
        async for number in signals:
            if number != signal.SIGINT or not self.asking.stop():
                self.ended_by = number
                leave()

    async def _where(self) -> str:
        info = await self.session.info()
        return f"{_counted(info.messages if info else 0)} in {self.session.id}"


def _counted(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages} messages"


def choose_responder(terminal: Terminal) -> AbstractAsyncContextManager[Responder]:
    """Return what the environment asks for; ends the program if that cannot be had."""
    if not os.environ.get("OPENAI_BASE_URL"):
        return nullcontext(Rules(Random(), pace_s=0.03 if terminal.interactive else 0))
    try:
        from openai_endpoint import from_environment  # needs httpx, which the rules do not

        return from_environment(os.environ)
    except ModuleNotFoundError as error:
        missing = error.name
        raise SystemExit(f"bot: OPENAI_BASE_URL needs {missing}: pip install {missing}") from None
    except ValueError as error:
        raise SystemExit(f"bot: {error}") from None


async def talk(
    file: str, responder: AbstractAsyncContextManager[Responder], terminal: Terminal
) -> int:
    """Open the store, chat, close it; return the exit code."""
    # Outermost: a Ctrl-C while the store is being opened or closed waits for its turn.
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with responder as respond, open_sessions(file) as sessions:
            asking = Asking(respond, terminal)
            chat = Chat(sessions, asking, terminal)
            await chat.begin(file)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sessions.serve, asking.answer)
                nursery.start_soon(chat.heed, signals, nursery.cancel_scope.cancel)
                await chat.run()
                nursery.cancel_scope.cancel()
    return 0 if chat.ended_by is None else 128 + chat.ended_by


def main() -> int:
    # While the chat runs it is told of a Ctrl-C. One that comes just before or after must not
    # end in a traceback, over a store that is about to be closed or is closed already.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="bot: %(message)s")  # what `serve` says of turns that went wrong
    terminal = Terminal()
    file = os.environ.get("TURNKEEPER_DB") or "state.db"
    try:
        return trio.run(talk, file, choose_responder(terminal), terminal)
    except TurnkeeperError as error:
        print(f"bot: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
