"""Bad input gets an error that names the field, and nothing is written."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import A, U, said

from turnkeeper.actors import Conflict, Rejected, Session, Sessions, open_sessions
from turnkeeper.storage import inline

# Here calls are made as by somebody without a type checker.
Loose = Any


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[Sessions]:
    async with open_sessions(
        tmp_path / "state.db", offload=inline, max_message_bytes=1_000
    ) as opened:
        await opened["a"].extend([U("1"), A("2"), U("3"), A("4")])
        await opened["a"].undo()
        yield opened
        assert opened.stats().failures == 0
        await opened["a"].append(U("later writes go on"))
        assert said(await opened["a"].transcript(last=1)) == ["later writes go on"]


async def everything(sessions: Sessions) -> list[object]:
    session = sessions["a"]
    return [
        await sessions.list(),
        await session.transcript(hidden=True),
        await session.all_messages(),
        await session.history(),
    ]


async def check_rejected(
    sessions: Sessions, call: Callable[[], Awaitable[object]], field: str
) -> None:
    """Make a call that must be rejected for `field`, and change nothing."""
    before = await everything(sessions)
    commits = sessions.stats().commits
    with pytest.raises(Rejected) as caught:
        await call()
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert await everything(sessions) == before
    assert sessions.stats().commits == commits


def nested(depth: int) -> object:
    value: object = "deep"
    for _ in range(depth):
        value = [value]
    return value


class Odd:
    """Nothing that JSON knows."""


BAD_MESSAGES: list[tuple[object, str]] = [
    (None, ""),
    ("text", ""),
    (["role", "user"], ""),
    (7, ""),
    ({}, ".role"),
    ({"content": "x"}, ".role"),
    ({"role": None, "content": "x"}, ".role"),
    ({"role": 7, "content": "x"}, ".role"),
    ({"role": "", "content": "x"}, ".role"),
    ({"role": "x" * 101, "content": "x"}, ".role"),
    ({"role": "user", "content": b"bytes"}, ".content"),
    ({"role": "user", "content": ("a", "b")}, ".content"),
    ({"role": "user", "content": float("nan")}, ".content"),
    ({"role": "user", "content": float("inf")}, ".content"),
    ({"role": "user", "content": float("-inf")}, ".content"),
    ({"role": "user", "content": [{"type": "text", "text": Odd()}]}, ".content[0].text"),
    ({"role": "user", "content": {1: "x"}}, ".content"),
    ({"role": "user", "content": "x", "when": {"at": {"a", "set"}}}, ".when.at"),
    ({"role": "user", "content": "x", 7: "x"}, ""),
    ({"role": "user", "content": nested(101)}, ".content" + "[0]" * 100),
    ({"role": "user", "content": "x" * 1_001}, ""),
    ({"role": "user", "content": "\u20ac" * 334}, ""),  # the limit is in bytes
]


@pytest.mark.parametrize(("message", "place"), BAD_MESSAGES)
async def test_a_message_that_cannot_be_stored_is_rejected_by_every_way_in(
    sessions: Sessions, message: Loose, place: str
) -> None:
    session = sessions["a"]
    await check_rejected(sessions, lambda: session.append(message), f"message{place}")
    await check_rejected(
        sessions, lambda: session.extend([U("fine"), message]), f"messages[1]{place}"
    )
    await check_rejected(
        sessions, lambda: session.rewrite([U("fine"), A("fine"), message]), f"messages[2]{place}"
    )


async def test_the_largest_message_is_taken(sessions: Sessions) -> None:
    await sessions["a"].append(U("x" * 1_000))
    await sessions["a"].append({"role": "user", "content": nested(100)})
    assert len(await sessions["a"].transcript()) == 4


NO_NUMBERS: list[object] = [True, False, 1.0, "1", b"1", [], Odd()]


@pytest.mark.parametrize("bad", [*NO_NUMBERS, -1, 2**70])
async def test_at_must_be_a_revision(sessions: Sessions, bad: Loose) -> None:
    session = sessions["a"]
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: session.append(U("x"), at=bad),
        lambda: session.extend([U("x")], at=bad),
        lambda: session.undo(at=bad),
        lambda: session.retry(at=bad),
        lambda: session.redo(at=bad),
        lambda: session.rewrite([], at=bad),
        lambda: session.restore(1, at=bad),
        lambda: session.fork("b", at=bad),
    ]
    for call in calls:
        await check_rejected(sessions, call, "at")


async def test_a_revision_that_is_not_there_is_a_conflict(sessions: Sessions) -> None:
    for at in (0, 1, 2, 4, 10**9):
        with pytest.raises(Conflict) as caught:
            await sessions["a"].append(U("x"), at=at)
        assert (caught.value.at, caught.value.revision) == (at, 3)
    with pytest.raises(Conflict):
        await sessions["new"].append(U("x"), at=1)
    assert (await sessions["new"].append(U("x"), at=0)).position == 1


@pytest.mark.parametrize("bad", [*NO_NUMBERS, None, 0, -1, 2**70])
async def test_turns_must_be_a_positive_number(sessions: Sessions, bad: Loose) -> None:
    await check_rejected(sessions, lambda: sessions["a"].undo(bad), "turns")


@pytest.mark.parametrize("bad", [*NO_NUMBERS, None, 0, -1, 4, 99, 2**70])
async def test_a_revision_to_restore_must_exist(sessions: Sessions, bad: Loose) -> None:
    await check_rejected(sessions, lambda: sessions["a"].restore(bad), "revision")
    await check_rejected(sessions, lambda: sessions["nobody"].restore(bad or 1), "revision")


@pytest.mark.parametrize("bad", [*NO_NUMBERS, -1, 3, 99, 2**70])
async def test_a_position_to_fork_at_must_exist(sessions: Sessions, bad: Loose) -> None:
    await check_rejected(sessions, lambda: sessions["a"].fork("b", position=bad), "position")
    assert await sessions["b"].info() is None


@pytest.mark.parametrize("id", ["a", "", "x" * 1_001, "a\0", "\ud800", None, 7, b"b"])
async def test_a_fork_needs_an_id_that_is_free(sessions: Sessions, id: Loose) -> None:
    await check_rejected(sessions, lambda: sessions["a"].fork(id), "id")


@pytest.mark.parametrize("bad", [*NO_NUMBERS, -1, 2**70])
async def test_what_is_read_is_asked_for_in_numbers(sessions: Sessions, bad: Loose) -> None:
    session = sessions["a"]
    await check_rejected(sessions, lambda: session.transcript(last=bad), "last")
    await check_rejected(sessions, lambda: session.transcript(after=bad), "after")
    await check_rejected(sessions, lambda: sessions.list(limit=bad), "limit")


async def test_what_is_read_may_be_more_than_there_is(sessions: Sessions) -> None:
    session = sessions["a"]
    assert said(await session.transcript(last=99)) == ["1", "2"]
    assert said(await session.transcript(last=2**63 - 1)) == ["1", "2"]
    assert said(await session.transcript(last=0)) == []
    assert said(await session.transcript(after=99)) == []
    assert said(await session.transcript(after=2**63 - 1)) == []
    assert said(await session.transcript(after=1, last=99)) == ["2"]
    assert said(await sessions["nobody"].transcript(last=3, after=3)) == []
    assert [info.id for info in await sessions.list(limit=2**63 - 1)] == ["a"]


@pytest.mark.parametrize("limit", [0, None])
async def test_a_list_has_a_limit(sessions: Sessions, limit: Loose) -> None:
    await check_rejected(sessions, lambda: sessions.list(limit=limit), "limit")


@pytest.mark.parametrize("after", [7, b"a", ["a"], "\ud800", "a\0", "x" * 1_001])
async def test_a_list_goes_on_after_an_id(sessions: Sessions, after: Loose) -> None:
    await check_rejected(sessions, lambda: sessions.list(after=after), "after")


@pytest.mark.parametrize("after", [None, 0, False, b""])
async def test_a_list_goes_on_after_an_id_and_nothing_is_none(
    sessions: Sessions, after: Loose
) -> None:
    await check_rejected(sessions, lambda: sessions.list(after=after), "after")


@pytest.mark.parametrize("key", ["", "x" * 1_001, "a\0", "\udfff", 7, b"k", True, ["k"]])
async def test_a_key_must_be_a_name(sessions: Sessions, key: Loose) -> None:
    session = sessions["a"]
    await check_rejected(sessions, lambda: session.append(U("x"), key=key), "key")
    await check_rejected(
        sessions, lambda: session.extend([U("x"), U("y")], keys=[None, key]), "key"
    )


async def test_there_must_be_as_many_keys_as_messages(sessions: Sessions) -> None:
    session = sessions["a"]
    for number in (0, 1, 3):
        keys = [f"k{n}" for n in range(number)]
        call = partial(session.extend, [U("x"), U("y")], keys=keys)
        await check_rejected(sessions, call, "keys")


async def test_a_batch_in_which_a_key_names_two_messages_is_rejected_whole(
    sessions: Sessions,
) -> None:
    await check_rejected(
        sessions, lambda: sessions["a"].extend([U("x"), U("y")], keys=["k", "k"]), "key"
    )
    twice = await sessions["a"].extend([U("x"), U("x")], keys=["k", "k"])
    assert [receipt.duplicate for receipt in twice] == [False, True]
    assert said(await sessions["a"].transcript()) == ["1", "2", "x"]


@pytest.mark.parametrize("hidden", ["yes", 1, 0, None, []])
async def test_hidden_is_true_or_false(sessions: Sessions, hidden: Loose) -> None:
    await check_rejected(sessions, lambda: sessions["a"].append(U("x"), hidden=hidden), "hidden")


@pytest.mark.parametrize("reason", ["", "undo", "purge", None, 7, ["rewrite"]])
async def test_the_reason_of_a_rewrite_is_one_of_two(sessions: Sessions, reason: Loose) -> None:
    await check_rejected(sessions, lambda: sessions["a"].rewrite([], reason=reason), "reason")


BAD_META: list[tuple[object, str]] = [
    ("text", "meta"),
    (["list"], "meta"),
    (7, "meta"),
    ({"n": float("nan")}, "meta.n"),
    ({7: "x"}, "meta"),
    ({"deep": {"set": {1}}}, "meta.deep.set"),
    ({"large": "x" * 1_000}, "meta"),
]


@pytest.mark.parametrize(("meta", "field"), BAD_META)
async def test_meta_is_an_object_that_json_can_hold(
    sessions: Sessions, meta: Loose, field: str
) -> None:
    await check_rejected(sessions, lambda: sessions["a"].set_meta(meta), field)
    await check_rejected(sessions, lambda: sessions["a"].fork("b", meta=meta), field)
    assert await sessions["b"].info() is None


async def test_the_caller_may_change_what_he_has_handed_over(sessions: Sessions) -> None:
    part = {"type": "text", "text": "before"}
    message = {"role": "user", "content": [part]}
    meta = {"tags": ["before"]}
    await sessions["a"].append(message)
    await sessions["a"].set_meta(meta)
    part["text"] = meta["tags"][0] = "after"
    message["role"] = "assistant"
    newest = (await sessions["a"].transcript(last=1))[0]
    assert newest.body == {"role": "user", "content": [{"type": "text", "text": "before"}]}
    assert await sessions["a"].meta() == {"tags": ["before"]}


WRONG_SHAPES: list[tuple[str, Callable[[Loose, Session], Awaitable[object]], list[object]]] = [
    ("messages", lambda bad, session: session.extend(bad), [None, 7]),
    ("messages", lambda bad, session: session.rewrite(bad), [None, 7]),
    ("keys", lambda bad, session: session.extend([U("x")], keys=bad), [7, "k"]),
]


@pytest.mark.parametrize(
    ("field", "call", "bad"),
    [(field, call, bad) for field, call, values in WRONG_SHAPES for bad in values],
)
async def test_what_is_no_list_is_rejected_by_name(
    sessions: Sessions,
    field: str,
    call: Callable[[Loose, Session], Awaitable[object]],
    bad: object,
) -> None:
    await check_rejected(sessions, lambda: call(bad, sessions["a"]), field)


BAD_OPTIONS: list[dict[str, object]] = [
    {"mailbox_size": 0},
    {"mailbox_size": -1},
    {"mailbox_size": "many"},
    {"max_pending": -1},
    {"max_message_bytes": 0},
    {"synchronous": "off"},
]
OPTIONS_THAT_HANG: list[dict[str, object]] = [{"grace_s": -1.0}, {"grace_s": float("nan")}]


@pytest.mark.parametrize(
    "options",
    [
        *(
            pytest.param(
                options,
            )
            for options in BAD_OPTIONS
        ),
        *(
            pytest.param(
                options,
            )
            for options in OPTIONS_THAT_HANG
        ),
    ],
    ids=str,
)
async def test_an_option_that_cannot_work_is_rejected_when_the_store_is_opened(
    tmp_path: Path, options: dict[str, Loose]
) -> None:
    async def use() -> None:
        async with open_sessions(tmp_path / "other.db", offload=inline, **options):
            pass

    with pytest.raises(Rejected) as caught:
        await use()
    assert [caught.value.field] == list(options)
    assert os.listdir(tmp_path) == []
