"""Two stores on one file: nobody owns it, and what an actor remembers is checked each time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trio
from support import A, U, said

from turnkeeper.actors import Closed, Conflict, Rejected, Sessions, open_sessions
from turnkeeper.storage import Offload, in_thread, inline


@pytest.fixture(params=[inline, in_thread], ids=["inline", "in threads"])
async def two(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[Sessions, Sessions]]:
    offload: Offload = request.param
    path = tmp_path / "state.db"
    async with (
        open_sessions(path, offload=offload) as one,
        open_sessions(path, offload=offload) as other,
    ):
        yield one, other


async def test_each_sees_what_the_other_acknowledged(two: tuple[Sessions, Sessions]) -> None:
    one, other = (sessions["a"] for sessions in two)
    for n in range(10):
        receipt = await (one if n % 2 else other).append(U(str(n)))
        assert receipt.position == n + 1
        assert receipt.revision == n + 2
        for session in (one, other):
            assert said(await session.transcript()) == [str(m) for m in range(n + 1)]


async def test_a_stale_head_is_noticed_and_every_change_applies_to_what_is_there(
    two: tuple[Sessions, Sessions],
) -> None:
    one, other = (sessions["a"] for sessions in two)
    await one.extend([U("1"), A("2")])
    await other.extend([U("3"), A("4")])
    undone = await one.undo()  # whose actor remembers a head at position 2
    assert undone is not None
    assert undone.text == "3"
    await other.redo()
    assert said(await one.transcript()) == ["1", "2", "3", "4"]
    rewritten = await one.rewrite([U("1"), A("better")])
    assert (rewritten.kept, rewritten.replaced) == (1, 3)
    await other.append(U("5"))
    assert said(await one.transcript()) == ["1", "better", "5"]
    await one.restore(3)
    await other.append(U("6"))
    assert said(await one.transcript()) == ["1", "2", "3", "4", "6"]
    await other.fork("b", position=1)
    with pytest.raises(Rejected):
        await one.fork("b")
    await one.set_meta({"title": "x"})
    assert await other.meta() == {"title": "x"}
    assert [message.position for message in await other.transcript()] == [1, 2, 3, 4, 5]


async def test_an_append_behind_a_head_that_the_other_moved_goes_to_a_branch_of_its_own(
    two: tuple[Sessions, Sessions],
) -> None:
    one, other = (sessions["a"] for sessions in two)
    await one.extend([U("1"), A("2"), U("3"), A("4")])
    await other.undo()
    await one.append(U("5"))
    await one.append(A("6"))
    assert said(await other.transcript()) == ["1", "2", "5", "6"]
    states = {message.body["content"]: message.state for message in await other.all_messages()}
    assert states == {
        "1": "live",
        "2": "live",
        "3": "rewound",
        "4": "rewound",
        "5": "live",
        "6": "live",
    }
    assert await other.redo() is None


async def test_a_decision_on_what_the_other_has_changed_is_a_conflict(
    two: tuple[Sessions, Sessions],
) -> None:
    one, other = (sessions["a"] for sessions in two)
    await one.extend([U("1"), A("2")])
    read = await one.transcript()
    await other.append(U("3"))
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: one.append(U("x"), at=read.revision),
        lambda: one.extend([U("x")], at=read.revision),
        lambda: one.undo(at=read.revision),
        lambda: one.retry(at=read.revision),
        lambda: one.redo(at=read.revision),
        lambda: one.rewrite([], at=read.revision),
        lambda: one.restore(1, at=read.revision),
        lambda: one.fork("b", at=read.revision),
    ]
    for call in calls:
        with pytest.raises(Conflict) as caught:
            await call()
        assert (caught.value.at, caught.value.revision) == (read.revision, read.revision + 1)
    assert said(await one.transcript()) == ["1", "2", "3"]
    assert (await one.append(A("4"), at=read.revision + 1)).position == 4


async def test_a_delete_in_one_closes_the_handles_of_the_other(
    two: tuple[Sessions, Sessions],
) -> None:
    one, other = two
    handle = other["a"]
    last = await handle.append(U("1"))
    deleted = await one.delete("a")
    assert deleted is not None
    assert deleted.revision > last.revision
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: handle.append(U("x")),
        lambda: handle.extend([U("x")]),
        handle.undo,
        handle.retry,
        handle.redo,
        lambda: handle.rewrite([U("x")]),
        lambda: handle.restore(1),
        lambda: handle.fork("b"),
        lambda: handle.set_meta({}),
        handle.transcript,
        handle.all_messages,
        handle.history,
        handle.info,
    ]
    for call in calls:
        with pytest.raises(Closed) as caught:
            await call()
        assert (caught.value.what, caught.value.name) == ("session", "a")
    assert await other.list() == []
    # A new life of the same name is not the one that the old handle has met.
    receipt = await one["a"].append(U("2"))
    assert receipt.revision > deleted.revision
    with pytest.raises(Closed):
        await handle.append(U("x"))
    assert said(await other["a"].transcript()) == ["2"]
    await other["a"].append(U("3"))
    assert said(await one["a"].transcript()) == ["2", "3"]


async def test_keys_are_shared(two: tuple[Sessions, Sessions]) -> None:
    one, other = (sessions["a"] for sessions in two)
    first = await one.append(U("1"), key="k")
    assert await other.append(U("1"), key="k") == first._replace(duplicate=True)
    with pytest.raises(Rejected):
        await other.append(U("something else"), key="k")
    await other.append(A("2"))
    assert await one.append(U("1"), key="k") == first._replace(duplicate=True)


async def test_both_at_once_lose_nothing_and_store_nothing_twice(
    two: tuple[Sessions, Sessions],
) -> None:
    spoken: list[tuple[str, ...]] = []

    async def talk(sessions: Sessions, name: str) -> None:
        for n in range(15):
            texts = (f"{name} {n}", f"{name} {n}'")
            await sessions["a"].extend([U(texts[0]), A(texts[1])])
            await sessions["a"].append(
                U(f"update {n}"), key=f"update {n}"
            )  # the others send it too
            spoken.append(texts)

    async with trio.open_nursery() as nursery:
        for number, sessions in enumerate(two):
            nursery.start_soon(talk, sessions, f"{number}a")
            nursery.start_soon(talk, sessions, f"{number}b")
    transcript = await two[0]["a"].transcript()
    assert [message.position for message in transcript] == list(range(1, 60 * 2 + 15 + 1))
    assert transcript.messages == (await two[1]["a"].transcript()).messages
    texts = said(transcript)
    assert len(set(texts)) == len(texts)
    for pair in spoken:
        place = texts.index(pair[0])
        assert texts[place + 1] == pair[1]
    revisions = [message.revision for message in transcript]
    assert revisions == sorted(revisions, key=lambda revision: revision or 0)
    assert len(set(revisions)) == 60 + 15


async def test_one_can_close_while_the_other_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as one:
        for n in range(3):
            async with open_sessions(path, offload=inline) as other:
                await other["a"].append(U(f"other {n}"))
            await one["a"].append(U(f"one {n}"))
        assert said(await one["a"].transcript()) == [
            text for n in range(3) for text in (f"other {n}", f"one {n}")
        ]
