"""Conversations that people and agents had: all stored at once, read back equal, undone and redone.

`data/conversations.jsonl` is of our own making. The hundred others (MIT, see the LICENSE beside
them) lie in a folder that not everybody has.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
from attrs import frozen

from turnkeeper.actors import CarrierFormat, Session, Sessions, open_sessions
from turnkeeper.actors.conversation import opens_turn, retry_text
from turnkeeper.storage import Offload, in_thread, inline

Body = dict[str, object]

OWN = Path(__file__).parent.parent / "data" / "conversations.jsonl"
AIRLINE = (
    Path(__file__).parent.parent.parent.parent
    / "shared"
    / "data"
    / "airline_conversations.jsonl.gz"
)
FORMAT = CarrierFormat()


@frozen
class Conversation:
    """What one line of a file holds."""

    id: str
    messages: list[Body]


def own() -> list[Conversation]:
    return [Conversation(**json.loads(line)) for line in OWN.read_text("ascii").splitlines()]


def airline() -> list[Conversation]:
    if not AIRLINE.exists():
        pytest.skip(f"there is no {AIRLINE.name} here")
    with gzip.open(AIRLINE, "rt", encoding="utf-8") as lines:
        return [Conversation(**json.loads(line)) for line in lines]


@pytest.fixture(params=[own, airline], ids=["our own", "airline"])
def conversations(request: pytest.FixtureRequest) -> list[Conversation]:
    loaded: list[Conversation] = request.param()
    return loaded


def exactly(bodies: list[Body]) -> str:
    """A text that is the same for the same JSON only: 1, 1.0 and true are three things in it."""
    return json.dumps(bodies, sort_keys=True)


def openers(messages: list[Body]) -> Iterator[int]:
    """Where the turns of a plain list begin, the last first."""
    for index in reversed(range(len(messages))):
        if opens_turn(messages[index], hidden=False, format=FORMAT):
            yield index


def expected_text(message: Body) -> str | None:
    try:
        return retry_text(message, FORMAT)
    except ValueError:
        return None


async def check(session: Session, messages: list[Body]) -> None:
    transcript = await session.transcript()
    assert exactly(transcript.bodies) == exactly(messages)
    assert [message.position for message in transcript] == list(range(1, len(messages) + 1))


async def append_one_by_one(session: Session, messages: list[Body]) -> None:
    for position, message in enumerate(messages, 1):
        assert (await session.append(message)).position == position


async def append_together(session: Session, messages: list[Body]) -> None:
    receipts = await session.extend(messages)
    assert [receipt.position for receipt in receipts] == list(range(1, len(messages) + 1))


async def undo_and_redo_every_turn(session: Session, messages: list[Body]) -> None:
    """One turn after the other back to the beginning, and forward again to the end."""
    ends = [len(messages), *openers(messages)]
    for begin, end in zip(ends[1:], ends, strict=False):
        undone = await session.undo()
        assert undone is not None
        assert (undone.turns, undone.messages, undone.position) == (1, end - begin, begin)
        assert undone.text == expected_text(messages[begin])
        await check(session, messages[:begin])
    assert await session.undo() is None
    for end in reversed(ends[:-1]):
        moved = await session.redo()
        assert moved is not None
        assert moved.position == end
        await check(session, messages[:end])
    assert await session.redo() is None
    # And all at once.
    for turns, begin in enumerate(ends[1:], 1):
        undone = await session.undo(turns)
        assert undone is not None
        assert (undone.turns, undone.position) == (turns, begin)
        await session.redo()
        await check(session, messages)
    assert {message.state for message in await session.all_messages()} == {"live"}


@pytest.mark.parametrize("offload", [inline, in_thread], ids=["inline", "in threads"])
@pytest.mark.parametrize("append", [append_together, append_one_by_one])
async def test_conversations_stored_in_parallel_read_back_equal_from_a_new_opening(
    tmp_path: Path,
    conversations: list[Conversation],
    append: Callable[[Session, list[Body]], Awaitable[None]],
    offload: Offload,
) -> None:
    path = tmp_path / "state.db"
    async with (
        open_sessions(path, offload=offload, max_resident=40) as sessions,
        trio.open_nursery() as nursery,
    ):
        for one in conversations:
            nursery.start_soon(append, sessions[one.id], one.messages)
    async with open_sessions(path, offload=offload) as sessions, trio.open_nursery() as nursery:
        for one in conversations:
            nursery.start_soon(check, sessions[one.id], one.messages)
        listed = await sessions.list(limit=1_000)
        assert [(info.id, info.messages) for info in listed] == sorted(
            (one.id, len(one.messages)) for one in conversations
        )


async def test_every_turn_of_every_conversation_is_undone_and_redone(
    tmp_path: Path, conversations: list[Conversation]
) -> None:
    async with open_sessions(
        tmp_path / "state.db", offload=inline, synchronous="normal"
    ) as sessions:

        async def live(one: Conversation) -> None:
            await append_together(sessions[one.id], one.messages)
            await undo_and_redo_every_turn(sessions[one.id], one.messages)

        async with trio.open_nursery() as nursery:
            for one in conversations:
                nursery.start_soon(live, one)


async def test_every_conversation_can_be_written_anew_and_forked_at_every_position(
    tmp_path: Path, conversations: list[Conversation]
) -> None:
    conversations = conversations[:10]
    async with open_sessions(
        tmp_path / "state.db", offload=inline, synchronous="normal"
    ) as sessions:
        for one in conversations:
            await _rewrite_and_fork(sessions, one)


async def _rewrite_and_fork(sessions: Sessions, one: Conversation) -> None:
    session, messages = sessions[one.id], one.messages
    await append_one_by_one(session, messages)
    assert not (await session.rewrite(messages)).changed
    for position in range(len(messages) + 1):
        forked = await session.fork(f"{one.id} at {position}", position=position)
        await check(sessions[forked.session], messages[:position])
        rewritten = await session.rewrite(messages[:position])
        assert rewritten.kept == position
        await check(session, messages[:position])
        await session.rewrite(messages)
        await check(session, messages)


def test_our_own_conversations_hold_what_they_are_there_for() -> None:
    conversations = own()
    messages = [message for one in conversations for message in one.messages]
    assert {message["role"] for message in messages} == {
        "assistant",
        "developer",
        "system",
        "tool",
        "user",
    }
    kinds = {type(message["content"]) for message in messages}
    assert kinds == {str, list, type(None)}
    assert any("tool_calls" in message for message in messages)
    assert any("\ud83d" in str(message["content"]) for message in messages)
    assert all(any(openers(one.messages)) for one in conversations)
