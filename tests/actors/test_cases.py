"""Cases from the field, through a session: each test is named after the case's number."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import apsw
import pytest
from support import A, T, U, failing_disk, said

from turnkeeper.actors import (
    CarrierFormat,
    Conflict,
    Move,
    NotRetryable,
    Rejected,
    Session,
    Sessions,
    StorageFailed,
    StoredMessage,
    Transcript,
    open_sessions,
)
from turnkeeper.storage import inline

Body = dict[str, object]

MARKS = CarrierFormat()
SUMMARY = f"{MARKS.prefix}\n{MARKS.heading}\n- a trip to Oslo\n\n{MARKS.end_marker}"


def summary_first(ask: str) -> str:
    return f"{SUMMARY}\n\n{ask}"


def ask_first(ask: str) -> str:
    return f"{ask}\n\n{MARKS.delimiter}\n\n{SUMMARY}"


def in_parts(text: str) -> Body:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


async def everything(session: Session) -> tuple[Transcript, list[StoredMessage], list[Move]]:
    """All that a session has: two equal answers mean that nothing was changed between them."""
    return (
        await session.transcript(hidden=True),
        await session.all_messages(),
        await session.history(),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
async def sessions(path: Path) -> AsyncIterator[Sessions]:
    async with open_sessions(path, offload=inline) as opened:
        yield opened


@pytest.mark.parametrize("ask", ["new ask", f"what does {MARKS.end_marker} mean?", " \nspaced\n"])
@pytest.mark.parametrize("layout", [summary_first, ask_first])
@pytest.mark.parametrize("pack", [U, in_parts])
async def test_c01_a_retried_carrier_gives_back_exactly_the_ask_and_leaves_its_summary_hidden(
    sessions: Sessions, layout: Callable[[str], str], pack: Callable[[str], Body], ask: str
) -> None:
    session = sessions["a"]
    await session.extend([U("old"), A("a0"), pack(layout(ask)), A("a1")])
    undone = await session.retry()
    assert undone is not None
    assert (undone.text, undone.turns, undone.messages) == (ask, 1, 2)
    assert undone.position == 3
    assert (await session.transcript()).bodies == [U("old"), A("a0")]
    scaffold = (await session.transcript(hidden=True))[2]
    assert scaffold.body == U(SUMMARY)
    assert scaffold.hidden
    assert not scaffold.opens_turn
    assert scaffold.revision == undone.revision


@pytest.mark.parametrize("layout", [summary_first, ask_first])
async def test_c01_an_undone_carrier_leaves_its_summary_hidden_and_comes_back_whole_by_redo(
    sessions: Sessions, layout: Callable[[str], str]
) -> None:
    session = sessions["a"]
    carrier = U(layout("new ask"))
    await session.extend([U("old"), A("a0"), carrier, A("a1")])
    undone = await session.undo()
    assert undone is not None
    assert undone.text == "new ask"
    assert said(await session.transcript()) == ["old", "a0"]
    assert said(await session.transcript(hidden=True)) == ["old", "a0", SUMMARY]
    await session.redo()
    assert (await session.transcript(hidden=True)).bodies == [U("old"), A("a0"), carrier, A("a1")]


async def test_c01_what_is_said_after_an_undone_carrier_goes_behind_its_summary(
    sessions: Sessions,
) -> None:
    session = sessions["a"]
    await session.extend([U("old"), A("a0"), U(summary_first("new ask")), A("a1")])
    await session.retry()
    receipt = await session.append(U("newer ask"))
    assert receipt.position == 4
    assert said(await session.transcript()) == ["old", "a0", "newer ask"]
    assert said(await session.transcript(hidden=True)) == ["old", "a0", SUMMARY, "newer ask"]
    undone = await session.undo(2)  # the hidden summary is no turn
    assert undone is not None
    assert (undone.text, undone.turns) == ("old", 2)
    assert len(await session.transcript(hidden=True)) == 0


async def test_c02_undo_and_redo_bring_the_same_rows_back_once(sessions: Sessions) -> None:
    session = sessions["a"]
    await session.extend([U("1"), A("a"), U("2"), A("b"), U("3"), A("c")])
    before = await session.transcript()
    await session.undo()
    assert said(await session.transcript()) == ["1", "a", "2", "b"]
    assert await session.redo() is not None
    assert (await session.transcript()).messages == before.messages
    assert await session.redo() is None
    assert (await session.transcript()).messages == before.messages


async def test_c02_undo_twice_and_redo_twice(sessions: Sessions) -> None:
    session = sessions["a"]
    await session.extend([U("1"), A("a"), U("2"), A("b"), U("3"), A("c")])
    await session.undo()
    await session.undo()
    assert said(await session.transcript()) == ["1", "a"]
    await session.redo()
    assert said(await session.transcript()) == ["1", "a", "2", "b"]
    await session.redo()
    assert said(await session.transcript()) == ["1", "a", "2", "b", "3", "c"]
    assert await session.redo() is None


async def test_c03_something_newer_refuses_a_redo_and_restore_reaches_the_undone_branch(
    sessions: Sessions,
) -> None:
    session = sessions["a"]
    await session.append(U("1"))
    spoken = await session.extend([A("a"), U("2"), A("b")])
    await session.undo()
    await session.append(U("other"))
    assert await session.redo() is None
    assert said(await session.transcript()) == ["1", "a", "other"]
    states = [(message.body["content"], message.state) for message in await session.all_messages()]
    assert states == [
        ("1", "live"),
        ("a", "live"),
        ("2", "rewound"),
        ("b", "rewound"),
        ("other", "live"),
    ]
    await session.restore(spoken[-1].revision)
    assert said(await session.transcript()) == ["1", "a", "2", "b"]


async def test_c04_a_turn_without_a_reply_is_a_turn(sessions: Sessions) -> None:
    session = sessions["a"]
    await session.append(U("a"))
    await session.extend([U("b"), A("r")])
    await session.undo()
    assert said(await session.transcript()) == ["a"]
    undone = await session.retry()
    assert undone is not None
    assert undone.text == "a"
    assert len(await session.transcript()) == 0


TOOL_RESULT_AS_USER: Body = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "r"}],
}
MIXED_TOOL_RESULT: Body = {
    "role": "user",
    "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": "r"},
        {"type": "text", "text": "and a word of the program"},
    ],
}


@pytest.mark.parametrize("result", [T("c1", "r"), TOOL_RESULT_AS_USER, MIXED_TOOL_RESULT])
async def test_c05_an_undo_takes_the_whole_exchange(sessions: Sessions, result: Body) -> None:
    session = sessions["a"]
    exchange = [U("do"), A(call="c1"), result, A("done")]
    await session.extend(exchange)
    undone = await session.undo()
    assert undone is not None
    assert (undone.text, undone.turns, undone.messages) == ("do", 1, 4)
    assert len(await session.transcript(hidden=True)) == 0
    await session.redo()
    assert (await session.transcript()).bodies == exchange


async def test_c06_an_undo_writes_nothing_that_grows_with_the_session(
    sessions: Sessions, path: Path
) -> None:
    session = sessions["a"]
    await session.extend([message for n in range(25) for message in (U(f"u{n}"), A(f"a{n}"))])
    for n in range(10):
        await session.append(U(f"again {n}"))
        await session.undo()
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:

        def rows(table: str) -> object:
            return connection.execute(f"SELECT count(*) FROM {table}").get

        assert rows("messages") == 60
        assert rows("moves") == 10
        assert rows("branches") == 10  # the first append extends the first one
        assert rows("heads") == 1
    finally:
        connection.close()
    assert len(await session.transcript()) == 50


class ModelDown(Exception):
    """The model cannot be reached."""


async def ask_again(session: Session, model: Callable[[list[Body]], Awaitable[str]]) -> str:
    """What a gateway does for /retry: take the ask back, send it again, store the answer."""
    undone = await session.retry()
    assert undone is not None
    assert undone.text is not None
    await session.append(U(undone.text))
    reply = await model((await session.transcript()).bodies)
    await session.append(A(reply))
    return reply


async def test_c07_a_retry_whose_model_fails_once_holds_the_ask_once(sessions: Sessions) -> None:
    session = sessions["a"]
    seen: list[list[Body]] = []

    async def model(context: list[Body]) -> str:
        seen.append(context)
        if len(seen) == 1:
            raise ModelDown
        return "better"

    await session.append(U("ask"), key="update-1")
    await session.append(A("poor"))
    with pytest.raises(ModelDown):
        await ask_again(session, model)
    assert (await session.transcript()).bodies == [U("ask")]
    assert await ask_again(session, model) == "better"
    assert (await session.transcript()).bodies == [U("ask"), A("better")]
    assert seen == [[U("ask")], [U("ask")]]
    # The platform sends its update again: still the one that was taken back.
    late = await session.append(U("ask"), key="update-1")
    assert late.duplicate
    assert not late.live
    assert (await session.transcript()).bodies == [U("ask"), A("better")]


async def test_c07_a_caller_who_asks_the_model_first_can_take_his_retry_back(
    sessions: Sessions,
) -> None:
    session = sessions["a"]
    await session.extend([U("ask"), A("poor")])
    before = await session.transcript()
    await session.retry()
    await session.redo()  # the model failed: put back what was there
    assert (await session.transcript()).messages == before.messages
    await session.retry()
    await session.extend([U("ask"), A("better")])
    assert said(await session.transcript()) == ["ask", "better"]


async def test_c08_a_rewrite_decided_on_an_old_revision_is_a_conflict(sessions: Sessions) -> None:
    session = sessions["a"]
    await session.append(U("0"))
    read = await session.transcript()
    assert read.revision == 2
    for n in range(1, 39):
        await session.append(A(str(n)))
    before = await everything(session)
    assert before[0].revision == 40
    with pytest.raises(Conflict) as caught:
        await session.rewrite([U("mine")], at=read.revision)
    assert (caught.value.session, caught.value.at, caught.value.revision) == ("a", 2, 40)
    assert await everything(session) == before
    assert (await session.rewrite([U("mine")], at=40)).changed


async def test_c09_undoing_a_turn_with_a_pending_answer_takes_the_answer_into_the_history(
    path: Path,
) -> None:
    with failing_disk() as disk:
        async with open_sessions(path, offload=inline, vfs=disk.name) as sessions:
            session = sessions["a"]
            await session.extend([U("1"), A("a"), U("2")])
            disk.write_error, disk.fail_next = apsw.IOError, 1
            with pytest.raises(StorageFailed) as caught:
                await session.append(A("b"))
            assert caught.value.kept
            assert said(await session.transcript()) == ["1", "a", "2", "b"]
            undone = await session.undo()
            assert undone is not None
            assert (undone.text, undone.turns, undone.messages) == ("2", 1, 2)
            transcript = await session.transcript()
            assert said(transcript) == ["1", "a"]
            assert not any(message.pending for message in transcript)
            states = [(m.body["content"], m.state, m.pending) for m in await session.all_messages()]
            assert states == [
                ("1", "live", False),
                ("a", "live", False),
                ("2", "rewound", False),
                ("b", "rewound", False),
            ]
            assert sessions.stats().pending == 0
            await session.redo()
            assert said(await session.transcript()) == ["1", "a", "2", "b"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "what is this?"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([TEXT, IMAGE], "media or unknown content"),
        ([{**TEXT, "annotations": [{"type": "citation"}]}], "annotations"),
        ("", "no text"),
        (" \n", "no text"),
        ([{"type": "text", "text": ""}], "no text"),
        ([], "no text"),
        ([{"type": "hologram", "data": "…"}], "media or unknown content"),
        ([TEXT, {"type": "text", "text": "and this?"}], "one text of several"),
        (None, "no content"),
        ({"text": "an object"}, "media or unknown content"),
    ],
)
async def test_c10_what_a_text_cannot_say_again_is_not_retryable_and_nothing_changes(
    sessions: Sessions, content: object, reason: str
) -> None:
    session = sessions["a"]
    await session.extend([U("old"), A("a0"), {"role": "user", "content": content}, A("a1")])
    before = await everything(session)
    with pytest.raises(NotRetryable, match=reason) as caught:
        await session.retry()
    assert isinstance(caught.value, ValueError)
    assert reason in caught.value.reason
    assert await everything(session) == before
    assert (await session.transcript()).revision == before[0].revision
    undone = await session.undo()  # which is always possible
    assert undone is not None
    assert undone.text is None
    assert said(await session.transcript()) == ["old", "a0"]


async def test_c11_undoing_more_turns_than_there_are_takes_all_and_says_how_many(
    sessions: Sessions,
) -> None:
    session = sessions["a"]
    await session.extend([U("1"), A("a"), U("2"), A("b"), U("3"), A("c")])
    undone = await session.undo(99)
    assert undone is not None
    assert (undone.turns, undone.messages, undone.position, undone.text) == (3, 6, 0, "1")
    assert len(await session.transcript()) == 0
    assert await session.undo(99) is None
    assert await session.redo() is not None
    assert said(await session.transcript()) == ["1", "a", "2", "b", "3", "c"]


async def test_c11_an_undo_in_an_empty_session_is_none_and_makes_no_session(
    sessions: Sessions,
) -> None:
    assert await sessions["nobody"].undo() is None
    assert await sessions["nobody"].retry() is None
    assert await sessions["nobody"].redo() is None
    assert await sessions["nobody"].info() is None
    assert await sessions.list() == []


async def test_c11_what_stands_before_the_first_turn_stays(sessions: Sessions) -> None:
    session = sessions["a"]
    await session.extend([{"role": "system", "content": "be kind"}, A("welcome"), U("1"), A("a")])
    undone = await session.undo(99)
    assert undone is not None
    assert (undone.turns, undone.messages, undone.position) == (1, 2, 2)
    assert said(await session.transcript()) == ["be kind", "welcome"]
    assert await session.undo() is None


@pytest.mark.parametrize("layout", [summary_first, ask_first])
async def test_c12_a_retry_of_a_carrier_that_is_no_longer_the_latest_turn_is_refused(
    sessions: Sessions, layout: Callable[[str], str]
) -> None:
    session = sessions["a"]
    await session.extend([U("old"), A("a0"), U(layout("new ask")), A("a1")])
    chosen = await session.transcript()
    await session.append(U("newer"))
    before = await everything(session)
    with pytest.raises(Conflict):
        await session.retry(at=chosen.revision)
    with pytest.raises(Conflict):
        await session.undo(at=chosen.revision)
    assert await everything(session) == before
    assert said(await session.transcript())[-1] == "newer"


async def test_c64_the_same_words_under_two_keys_are_two_messages(sessions: Sessions) -> None:
    session = sessions["a"]
    first = await session.append(U("yes"), key="1")
    second = await session.append(U("yes"), key="2")
    assert (first.duplicate, second.duplicate) == (False, False)
    assert said(await session.transcript()) == ["yes", "yes"]
    again = await session.append(U("yes"), key="1")
    assert again == first._replace(duplicate=True)
    await session.append(U("yes"))  # nor does it need a key to be its own
    assert [message.key for message in await session.transcript()] == ["1", "2", None]


SURROGATE = "half of a pair: \ud83d, alone"
LONE_PAIR = "\udc00\ud800"


@pytest.mark.parametrize("odd", [SURROGATE, LONE_PAIR])
async def test_c80_a_lone_surrogate_in_a_message_reads_back_equal(
    sessions: Sessions, odd: str
) -> None:
    session = sessions["a"]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": odd}}
    messages: list[Body] = [
        U(odd),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        T("c1", odd),
        {"role": "user", "content": [{"type": "text", "text": odd}]},
        {"role": "user", "content": "x", odd: {odd: [odd]}},
    ]
    await session.extend(messages)
    assert (await session.transcript()).bodies == messages
    undone = await session.undo(2)
    assert undone is not None
    assert undone.text == odd
    await session.append(A("later writes go on"))
    assert said(await session.transcript())[-1] == "later writes go on"


@pytest.mark.parametrize("odd", [SURROGATE, LONE_PAIR])
async def test_c80_a_lone_surrogate_in_meta_reads_back_equal(sessions: Sessions, odd: str) -> None:
    session = sessions["a"]
    await session.append(U("x"))
    await session.set_meta({odd: odd})
    assert await session.meta() == {odd: odd}
    forked = await session.fork("b", meta={"title": odd})
    assert await sessions[forked.session].meta() == {"title": odd}
    assert [info.meta for info in await sessions.list()] == [{odd: odd}, {"title": odd}]


@pytest.mark.parametrize("odd", [SURROGATE, LONE_PAIR, "a\0b", ""])
async def test_c80_a_name_that_is_no_plain_text_is_rejected_and_later_writes_go_on(
    sessions: Sessions, odd: str
) -> None:
    session = sessions["a"]
    for field, attempt in (
        ("key", lambda: session.append(U("x"), key=odd)),
        ("key", lambda: session.extend([U("x")], keys=[odd])),
        ("id", lambda: session.fork(odd)),
        ("id", lambda: sessions.delete(odd)),
        ("id", lambda: sessions.purge(odd)),
        ("message.role", lambda: session.append({"role": odd, "content": "x"})),
    ):
        with pytest.raises(Rejected) as caught:
            await attempt()
        assert caught.value.field == field
        str(caught.value).encode()  # fit to be printed
    with pytest.raises(Rejected) as caught:
        sessions[odd]
    assert caught.value.field == "id"
    assert await sessions.list() == []
    await session.append(U("later"))
    assert said(await session.transcript()) == ["later"]


@pytest.mark.parametrize(
    "id",
    [
        "x" * 1_000,
        "../../etc/passwd",
        "/etc/passwd",
        "'; drop table messages; --",
        '"; delete from sessions; --',
        "two\nlines\r\n",
        " ",
        "%",
        "\u202eright to left",
        "e\u0301",
        "\U0001f600" * 1_000,
    ],
    ids=range(11),
)
async def test_c85_any_text_is_a_plain_name(tmp_path: Path, id: str) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    around = entries(tmp_path)
    async with open_sessions(folder / "state.db", offload=inline) as sessions:
        await sessions["other"].append(U("untouched"))
        session = sessions[id]
        await session.append(U("hello"))
        await session.undo()
        await session.redo()
        await session.fork(f"{id[:900]}, forked")
        assert said(await sessions[id].transcript()) == ["hello"]
        assert sorted(info.id for info in await sessions.list()) == sorted(
            ["other", id, f"{id[:900]}, forked"]
        )
        await sessions.delete(id)
        assert said(await sessions["other"].transcript()) == ["untouched"]
        assert said(await sessions[f"{id[:900]}, forked"].transcript()) == ["hello"]
        assert entries(folder) == ["state.db", "state.db-shm", "state.db-wal", "state.db.owners"]
    assert entries(tmp_path) == around


async def test_c85_names_that_look_alike_are_different_sessions(sessions: Sessions) -> None:
    names = ["a", "A", "a ", " a", "e\u0301", "\u00e9", "1", "01"]
    for name in names:
        await sessions[name].append(U(name))
    for name in names:
        assert said(await sessions[name].transcript()) == [name]
    assert sorted(info.id for info in await sessions.list()) == sorted(names)


@pytest.mark.parametrize("id", ["", "x" * 1_001, "x" * 10_000, "a\0b", SURROGATE], ids=range(5))
async def test_c85_what_cannot_be_a_name_is_rejected(sessions: Sessions, id: str) -> None:
    with pytest.raises(Rejected) as caught:
        sessions[id]
    assert caught.value.field == "id"
    with pytest.raises(Rejected):
        await sessions.delete(id)
    assert await sessions.list() == []


@pytest.mark.parametrize("id", [None, 7, b"bytes", ("a",)])
async def test_c85_an_id_is_a_string(sessions: Sessions, id: object) -> None:
    with pytest.raises(Rejected, match="must be a string"):
        sessions[id]  # type: ignore[index]  # what a caller without a type checker may do


async def test_a_carrier_larger_than_the_default_limit_can_be_taken_back(tmp_path: Path) -> None:
    marks = CarrierFormat()
    summary = "x" * (17 * 1024 * 1024)
    carrier = f"{marks.prefix}\n{marks.heading}\n{summary}\n\n{marks.end_marker}\n\nthe ask"
    async with open_sessions(
        tmp_path / "state.db", offload=inline, max_message_bytes=64 * 1024 * 1024
    ) as sessions:
        await sessions["a"].append(U(carrier))
        undone = await sessions["a"].retry()
        assert undone is not None
        assert undone.text == "the ask"
