from __future__ import annotations

from pathlib import Path

import pytest
import trio
from support import A, U, count, said, tables

from turnkeeper.actors import Rejected, Sessions, open_sessions
from turnkeeper.storage import inline


async def test_c64_only_keys_make_duplicates(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        one = await session.append(U("yes"), key="1")
        two = await session.append(U("yes"), key="2")
        three = await session.append(U("yes"))
        assert [one.position, two.position, three.position] == [1, 2, 3]
        assert said(await session.transcript()) == ["yes"] * 3


async def test_the_same_key_is_stored_once_and_every_call_gets_the_first_receipt(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        session = sessions["a"]
        first = await session.append(U("hello"), key="k")
        assert not first.duplicate
        await session.append(A("hi"))
        before = tables(path)
        for again in (
            await session.append({"content": "hello", "role": "user"}, key="k"),
            (await session.extend([U("hello")], keys=["k"]))[0],
            await session.append(U("hello"), key="k", at=1),  # keys are looked at before `at`
        ):
            assert again == first._replace(duplicate=True)
        assert tables(path) == before
    async with open_sessions(path, offload=inline) as sessions:
        assert await sessions["a"].append(U("hello"), key="k") == first._replace(duplicate=True)


async def test_callers_that_race_with_one_key_store_it_once(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    receipts = []

    async with open_sessions(path) as one, open_sessions(path) as other:

        async def send(sessions: Sessions) -> None:
            receipts.append(await sessions["a"].append(U("hello"), key="k"))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(send, one)
                nursery.start_soon(send, other)
    assert sum(not receipt.duplicate for receipt in receipts) == 1
    assert len({receipt._replace(duplicate=False) for receipt in receipts}) == 1
    assert count(path, "messages") == 1


async def test_the_same_key_with_other_content_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        session = sessions["a"]
        await session.append({"role": "user", "content": "x", "n": 1}, key="k")
        before = tables(path)
        for other in (
            {"role": "user", "content": "y", "n": 1},
            {"role": "system", "content": "x", "n": 1},
            {"role": "user", "content": "x", "n": 1.0},
            {"role": "user", "content": "x", "n": True},
            {"role": "user", "content": "x"},
        ):
            with pytest.raises(Rejected) as caught:
                await session.append(other, key="k")
            assert caught.value.field == "key"
            with pytest.raises(Rejected):
                await session.extend([U("fine"), other], keys=["fine", "k"])
        assert tables(path) == before
        await sessions["b"].append(U("y"), key="k")


async def test_of_a_batch_the_messages_whose_keys_are_new_are_stored(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        first = await session.append(U("one"), key="1")
        batch = [U("one"), U("two"), A("no key"), U("three")]
        got = await session.extend(batch, keys=["1", "2", None, "3"])
        assert [receipt.duplicate for receipt in got] == [True, False, False, False]
        assert got[0] == first._replace(duplicate=True)
        assert [receipt.position for receipt in got] == [1, 2, 3, 4]
        assert {receipt.revision for receipt in got[1:]} == {3}
        again = await session.extend(batch[:2] + batch[3:], keys=["1", "2", "3"])
        assert all(receipt.duplicate for receipt in again)
        transcript = await session.transcript()
        assert transcript.revision == 3
        assert said(transcript) == ["one", "two", "no key", "three"]


async def test_twin_keys_in_one_batch_are_one_message(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        session = sessions["a"]
        got = await session.extend([U("x"), A("between"), U("x")], keys=["k", None, "k"])
        assert [receipt.duplicate for receipt in got] == [False, False, True]
        assert got[2] == got[0]._replace(duplicate=True)
        assert said(await session.transcript()) == ["x", "between"]
        before = tables(path)
        with pytest.raises(Rejected) as caught:
            await session.extend([U("x"), U("y")], keys=["new", "new"])
        assert caught.value.field == "key"
        assert tables(path) == before


async def test_undone_messages_keep_their_keys_and_the_receipt_says_that_they_are_not_live(
    tmp_path: Path,
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        first = await session.append(U("x"), key="k")
        assert first.live
        await session.undo()
        gone = first._replace(duplicate=True, live=False)
        assert await session.append(U("x"), key="k") == gone
        assert said(await session.transcript()) == []
        await session.redo()
        assert (await session.append(U("x"), key="k")).live
        await session.rewrite([U("instead"), A("of it")])
        assert await session.append(U("x"), key="k") == gone
        with pytest.raises(Rejected):
            await session.append(U("y"), key="k")


async def test_a_duplicate_on_another_branch_at_the_same_position_is_not_live(
    tmp_path: Path,
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await session.append(U("x"), key="k")
        await session.append(A("y"), key="l")
        await session.undo()
        await session.extend([U("z"), A("w")])
        for body, key in ((U("x"), "k"), (A("y"), "l")):
            receipt = await session.append(body, key=key)
            assert receipt.duplicate
            assert not receipt.live


async def test_a_forks_keys_start_empty(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        await sessions["a"].append(U("x"), key="k")
        await sessions["a"].fork("b")
        receipt = await sessions["b"].append(U("x"), key="k")
        assert not receipt.duplicate
        assert said(await sessions["b"].transcript()) == ["x", "x"]
        assert (await sessions["a"].append(U("x"), key="k")).duplicate
        assert (await sessions["b"].append(U("other"), key="m")).position == 3
