"""A question and its answer: posted to the inbox of its session, taken from there in a turn.

`Asking.ask` posts what the person said, and waits until it has left the inbox. `Asking.answer`
is what `Sessions.serve` calls with a turn for it, in this process or in another that serves the
same file. So the question is on disk before a model hears of it, the answer is stored when it is
whole, and nothing in between has to be cleaned up, whatever ends it: what was not answered
waits in the inbox, and whoever serves the file next finds it there.

The person is shown the answers to what was asked here: as they come if they are made here, and
otherwise as soon as they are stored. A question that was asked elsewhere and is answered here is
stored without a word; whoever asked is waiting for it, and /history has it for everybody.
"""

from __future__ import annotations

import trio
from responder import NoAnswer, Responder
from terminal import Terminal

from turnkeeper.actors import InboxMessage, Session, StorageError, Turn

__all__ = ["Asking"]

LOOK_S = 0.05
"""How often to look whether a question has left the inbox. A guess: what a person hardly notices."""


class Question:
    """What became of one question in this process."""

    def __init__(self) -> None:
        self.stopped = False
        """Whether the person wants no answer any more."""
        self.making: trio.CancelScope | None = None
        """Stops its answer, if that is made here."""
        self.shown = False
        """Whether the person has seen the whole answer as it came."""
        self.problem = "whoever took it made none"
        """Why there is no answer, if there is none."""

    def stop(self) -> None:
        self.stopped = True
        if self.making is not None:
            self.making.cancel()


class Asking:
    """The questions of one person, and the answers to everybody's."""

    def __init__(self, respond: Responder, terminal: Terminal) -> None:
        self._respond = respond
        self._terminal = terminal
        self._questions: dict[int, Question] = {}
        """What was asked here and is not settled, by the id of its receipt."""
        self._current: Question | None = None
        """The one that the person waits for."""
        self._posting = trio.Lock()

    async def ask(self, session: Session, text: str) -> str:
        """Ask `text`, show its answer, return it; "" if there is none, and the person knows why."""
        # Before the post, so that Ctrl-C counts from the moment the line was sent.
        question = self._current = Question()
        try:
            async with self._posting:
                # "queue", whatever the session's policy is: a turn and an answer for each question.
                posted = await session.post({"role": "user", "content": text}, policy="queue")
                if posted.id is not None:
                    self._questions[posted.id] = question
        finally:
            self._current = None
        if posted.id is None:
            self._terminal.say(f"Not asked: {posted.waiting} questions wait here already.")
            return ""
        return await self.wait(session, posted.id)

    async def answer(self, turn: Turn) -> None:
        """Answer what the turn has taken; `serve` calls this.

        A model that has no answer is no failure of ours: the turn ends well, without one. Whatever
        else is raised makes `serve` try again later.
        """
        async with self._posting:  # `serve` may be faster than the receipt
            ours = [m.append_id for m in turn.messages if m.append_id in self._questions]
        question = self._questions[ours[0]] if ours else Question()  # which nobody waits for
        # One that is waited for only later is shown when it is stored, rather than its second half.
        shows = question is self._current
        pieces: list[str] = []

        def say(piece: str) -> None:
            pieces.append(piece)
            if shows and question is self._current:
                self._terminal.write(piece)

        if shows:
            self._terminal.end_line()  # an attempt before this one may have come half of the way

        with trio.CancelScope() as question.making:
            if question.stopped:
                question.stop()
            try:
                await self._respond((await turn.transcript()).bodies, say)
            except NoAnswer as reason:
                question.problem = str(reason)
                return
        if question.making.cancelled_caught:
            return
        try:
            await turn.append({"role": "assistant", "content": "".join(pieces)})
        except StorageError as error:
            if not error.kept:
                raise
            # As good as stored: another attempt would say it twice.
            if question is self._current:
                self._terminal.say(str(error))
        question.shown = shows

    def stop(self) -> bool:
        """Stop the answer that the person waits for; False if there is none, or it was stopped."""
        question = self._current
        if question is None or question.stopped:
            return False
        question.stop()
        return True

    async def wait(self, session: Session, id: int) -> str:
        """Wait until the question `id` is settled, show what came of it, return the answer or ""."""
        question = self._current = self._questions[id]
        try:
            while (post := await _in_inbox(session, id)) is not None and post.set_aside is None:
                elsewhere = question.stopped and question.making is None
                if elsewhere and (busy := await who_answers(session)) is not None:
                    self._terminal.say(
                        f"Not waited for any more: {busy} is answering in this session. "
                        "/history shows what comes of it."
                    )
                    return ""
                await trio.sleep(LOOK_S)
        finally:
            self._current = None
        del self._questions[id]
        problem = "it was stopped" if question.stopped else question.problem
        if post is not None:
            problem = f"{post.set_aside}, at attempt {post.attempts}"
            await session.dismiss(id)  # it stands in the transcript, which is enough for /retry
        answer = await _stored_answer(session, id)
        if answer is None:
            self._terminal.say(f"No answer: {problem}. The question is kept; /retry asks it again.")
            return ""
        if question.shown:
            self._terminal.end_line()
        else:
            self._terminal.say(answer)
        return answer

    async def left_behind(self, session: Session) -> list[InboxMessage]:
        """Return what earlier runs left in the inbox, to `resume`; tell what was given up there."""
        posts = await session.inbox()
        for post in posts:
            if post.set_aside is not None:
                self._terminal.say(
                    f"A question could not be answered ({post.set_aside}); it can be said again:\n"
                    f"{post.body.get('content')}"
                )
                await session.dismiss(post.id)
        waiting = [post for post in posts if post.set_aside is None]
        if (busy := await who_answers(session)) is not None:
            self._terminal.say(f"{busy} is answering here; /history shows it when it is there.")
            return []
        self._questions.update((post.id, Question()) for post in waiting)
        return waiting

    async def resume(self, session: Session, left: InboxMessage) -> None:
        """Wait for the answer to a question that was left, as if it had been asked now."""
        self._terminal.say(
            f"A question was left without an answer; here it comes:\n{left.body.get('content')}"
        )
        await self.wait(session, left.id)


async def who_answers(session: Session) -> str | None:
    """Return who holds the session's turn, if that one lives."""
    holder = await session.holder()
    return None if holder is None or not holder.expires_in else holder.name


async def _in_inbox(session: Session, id: int) -> InboxMessage | None:
    return next((post for post in await session.inbox() if post.id == id), None)


async def _stored_answer(session: Session, id: int) -> str | None:
    """Return what the transcript says in answer to the question `id`."""
    asked = False
    for message in await session.transcript():
        if asked and message.role == "assistant":
            return str(message.body["content"])
        asked = message.append_id == id or (asked and not message.opens_turn)
    return None
