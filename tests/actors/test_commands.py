from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import pytest
from support import A, T, U, failing_disk, said

from turnkeeper.actors import (
    CarrierFormat,
    Closed,
    Session,
    Sessions,
    StorageFailed,
    Undone,
    commands,
    open_sessions,
)
from turnkeeper.storage import inline


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[Sessions]:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        yield sessions


async def never(text: str) -> str:
    raise AssertionError(f"dispatched {text!r}")


async def test_retry_dispatches_the_exact_text_and_returns_the_new_answer(
    sessions: Sessions,
) -> None:
    session = sessions["a"]
    await session.extend([U("first"), A("one"), U(" retry me\n"), A("old")])

    async def dispatch(text: str) -> str:
        assert said(await session.transcript()) == ["first", "one"]
        await session.extend([U(text), A("new")])
        return "new"

    assert await commands.retry(session, dispatch) == "new"
    assert said(await session.transcript()) == ["first", "one", " retry me\n", "new"]


async def test_retry_of_a_carrier_dispatches_the_ask_and_leaves_the_scaffold_hidden(
    sessions: Sessions,
) -> None:
    marks = CarrierFormat()
    session = sessions["a"]
    carrier = f"{marks.prefix}\n{marks.heading}\nsummary\n\n{marks.end_marker}\n\nthe ask"
    await session.extend([U(carrier), A("old")])

    async def dispatch(text: str) -> str:
        assert text == "the ask"
        return "new"

    assert await commands.retry(session, dispatch) == "new"
    assert len(await session.transcript()) == 0
    (scaffold,) = await session.transcript(hidden=True)
    assert "the ask" not in str(scaffold.body)


async def test_retry_without_a_user_turn_says_so(sessions: Sessions) -> None:
    session = sessions["a"]
    assert await commands.retry(session, never) == "No previous message to retry."
    await session.append(A("welcome"))
    assert await commands.retry(session, never) == "No previous message to retry."


async def test_c10_retry_of_media_is_refused_by_name_and_changes_nothing(
    sessions: Sessions,
) -> None:
    session = sessions["a"]
    await session.append(
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "image"}},
            ],
        }
    )
    before = await session.transcript()
    told = await commands.retry(session, never)
    assert told.startswith("Cannot retry that message safely: ")
    assert "media or unknown content" in told
    assert await session.transcript() == before


class Raced:
    """A conversation in which a newer turn lands between reading and taking back."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.transcript = session.transcript
        self.undo = session.undo
        self.redo = session.redo
        self.fork = session.fork

    async def retry(self, *, at: int | None = None) -> Undone | None:
        await self.session.extend([U("newer"), A("newer answer")])
        return await self.session.retry(at=at)


async def test_c12_a_retry_whose_turn_is_not_the_latest_any_more_is_refused(
    sessions: Sessions,
) -> None:
    session = sessions["a"]
    await session.extend([U("old"), A("answer")])
    told = await commands.retry(Raced(session), never)
    assert told == "Retry failed; transcript was not changed."
    assert said(await session.transcript()) == ["old", "answer", "newer", "newer answer"]


async def test_commands_say_that_nothing_was_changed_when_storage_fails(tmp_path: Path) -> None:
    with failing_disk() as disk:
        async with open_sessions(tmp_path / "state.db", offload=inline, vfs=disk.name) as sessions:
            session = sessions["a"]
            await session.extend([U("a"), A("b")])
            await session.undo()
            await session.extend([U("c"), A("d")])
            disk.write_error = apsw.FullError
            assert (
                await commands.retry(session, never) == "Retry failed; transcript was not changed."
            )
            assert await commands.undo(session) == "Undo failed; transcript was not changed."
            assert await commands.fork(session, "b") == "Fork failed; nothing was changed."
            disk.write_error = None
            assert said(await session.transcript()) == ["c", "d"]
            await session.undo()
            disk.write_error = apsw.FullError
            assert await commands.redo(session) == "Redo failed; transcript was not changed."
            disk.write_error = None


async def test_an_unknown_outcome_is_raised_and_not_put_into_false_words(
    sessions: Sessions,
) -> None:
    class Doubtful(Raced):
        async def retry(self, *, at: int | None = None) -> Undone | None:
            raise StorageFailed("writing", unknown=True)

    with pytest.raises(StorageFailed):
        await commands.retry(Doubtful(sessions["a"]), never)


async def test_a_deleted_session_is_raised(sessions: Sessions) -> None:
    session = sessions["a"]
    await session.append(U("a"))
    await sessions.delete("a")
    with pytest.raises(Closed):
        await commands.undo(session)


async def test_what_dispatch_raises_comes_out_and_redo_brings_the_turn_back(
    sessions: Sessions,
) -> None:
    session = sessions["a"]
    await session.extend([U("ask"), A("answer")])

    async def down(_: str) -> str:
        raise ConnectionError("the model is down")

    with pytest.raises(ConnectionError):
        await commands.retry(session, down)
    assert await commands.redo(session) == "Redone: the conversation has 2 messages again."
    assert said(await session.transcript()) == ["ask", "answer"]


async def test_undo_and_redo_say_what_they_did(sessions: Sessions) -> None:
    session = sessions["a"]
    assert await commands.undo(session) == "Nothing to undo."
    assert await commands.redo(session) == "Nothing to redo."
    await session.extend([U("one"), A("1"), U("two"), A(call="c1"), T("c1", "r"), A("2")])
    assert await commands.undo(session) == "Undid 1 turn (4 messages). You had said:\ntwo"
    assert await commands.undo(session, 9) == "Undid 1 turn (2 messages). You had said:\none"
    assert await commands.redo(session) == "Redone: the conversation has 2 messages again."
    assert (await commands.undo(session, 0)).startswith("Cannot undo: turns: must be at least 1")


async def test_history_shows_a_line_for_each_of_the_newest_messages(sessions: Sessions) -> None:
    session = sessions["a"]
    assert await commands.history(session) == "Nothing has been said yet."
    await session.extend(
        [
            U("one\ntwo"),
            A(call=["c1", "c2"]),
            {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url"}]},
            A("x" * 500),
            {"role": "user", "content": 7},
        ]
    )
    assert (await commands.history(session)).splitlines() == [
        "1. user: one two",
        "2. assistant: [2 tool calls]",
        "3. user: see [image_url]",
        f"4. assistant: {'x' * 99}…",
        "5. user: [data]",
    ]
    assert (await commands.history(session, last=1)).splitlines() == [
        "… 4 earlier messages",
        "5. user: [data]",
    ]


async def test_fork_says_where_it_begins_or_why_it_cannot(sessions: Sessions) -> None:
    session = sessions["a"]
    await session.append(U("one"))
    assert await commands.fork(session, "b") == "Forked to b after 1 message."
    assert (await commands.fork(session, "b")).startswith("Cannot fork: ")
    assert (await commands.fork(session, "")).startswith("Cannot fork: ")
