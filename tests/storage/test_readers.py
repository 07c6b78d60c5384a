from __future__ import annotations

import tracemalloc
from functools import partial
from pathlib import Path

import apsw
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from support import A, U, said
from trio.testing import wait_all_tasks_blocked

from turnkeeper.actors import Rejected, open_sessions
from turnkeeper.storage import (
    Closed,
    StorageDamaged,
    StorageFailed,
    StoredMessage,
    Transcript,
    in_thread,
    inline,
    open_store,
)
from turnkeeper.storage.readers import Readers

MB = 1024 * 1024


async def test_a_transcript_read_during_writes_is_before_or_after(tmp_path: Path) -> None:
    """Each write is of three messages that stand or fall together; reads go on beside them."""
    seen: list[Transcript] = []
    async with open_sessions(tmp_path / "state.db") as sessions:  # with real threads
        session = sessions["a"]
        await session.extend([U("0.0"), A("0.1"), A("0.2")])
        done = trio.Event()

        async def read() -> None:
            while not done.is_set():
                seen.append(await session.transcript())

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read)
            for n in range(1, 60):
                three = [U(f"{n}.0"), A(f"{n}.1"), A(f"{n}.2")]
                if n % 3 == 0:
                    await session.rewrite(three)
                elif n % 3 == 1:
                    await session.undo()
                else:
                    await session.extend(three)
            done.set()
    assert len({transcript.revision for transcript in seen}) > 5, "the reads saw nothing change"
    for transcript in seen:
        assert len(transcript) % 3 == 0
        assert len(transcript) == transcript.position
        batches = [str(text).split(".")[0] for text in said(transcript)]
        assert all(len(set(batches[at : at + 3])) == 1 for at in range(0, len(batches), 3))
        assert len({message.revision for message in transcript}) == len(transcript) // 3


async def test_one_question_sees_one_moment(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        await sessions["a"].append(U("before"))
        readers = Readers(
            lambda: apsw.Connection(str(path)), name="these", size=1, offload=in_thread
        )
        asked, written = trio.Event(), trio.Event()

        def question(connection: apsw.Connection) -> tuple[object, object]:
            first = connection.execute("SELECT count(*) FROM messages").get
            trio.from_thread.run_sync(asked.set)
            trio.from_thread.run(written.wait)
            return first, connection.execute("SELECT count(*) FROM messages").get

        async def write() -> None:
            await asked.wait()
            await sessions["a"].append(U("during"))
            written.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            assert await readers.ask(question) == (1, 1)
        assert await readers.ask(lambda c: c.execute("SELECT count(*) FROM messages").get) == 2
        await readers.close()


@pytest.mark.parametrize("offload", [inline, in_thread], ids=["inline", "threads"])
async def test_a_read_sees_every_acknowledged_write(tmp_path: Path, offload: object) -> None:
    path = tmp_path / "state.db"
    chosen = inline if offload is inline else in_thread
    async with (
        open_sessions(path, offload=chosen) as ours,
        open_sessions(path, offload=chosen) as theirs,
    ):

        async def talk(id: str) -> None:
            for number in range(20):
                await ours[id].append(U(f"{number}"))
                for sessions in (ours, theirs):
                    found = await sessions[id].transcript()
                    assert said(found) == [f"{n}" for n in range(number + 1)]

        async with trio.open_nursery() as nursery:
            for id in "abcde":
                nursery.start_soon(talk, id)


@settings(deadline=None, max_examples=40)
@given(
    hidden_rows=st.lists(st.booleans(), max_size=12),
    cuts=st.lists(st.integers(1, 3), max_size=3),
)
def test_last_after_and_hidden_agree_with_slices_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, hidden_rows: list[bool], cuts: list[int]
) -> None:
    async def main() -> None:
        path = tmp_path_factory.mktemp("store") / "state.db"
        async with open_sessions(path, offload=inline, synchronous="normal") as sessions:
            session = sessions["a"]
            rest = list(hidden_rows)
            for cut in [*cuts, len(rest)]:  # an undo in between makes another branch of it
                for hidden in rest[:cut]:
                    await session.append(U("x"), hidden=hidden)
                rest = rest[cut:]
                await session.append(U("to be undone"))
                await session.undo()
            whole = list(await session.transcript(hidden=True))
            assert [message.hidden for message in whole] == hidden_rows[: len(whole)]
            ends = [0, 1, 2, len(whole) - 1, len(whole), len(whole) + 5, 2**63 - 1]
            for hidden in (False, True):
                shown = [message for message in whole if hidden or not message.hidden]
                assert list(await session.transcript(hidden=hidden)) == shown
                for after in {number for number in ends if number >= 0}:
                    behind = [message for message in shown if message.position > after]
                    found = await session.transcript(after=after, hidden=hidden)
                    assert list(found) == behind
                    assert found.position == len(whole)
                    for last in {number for number in ends if number >= 0}:
                        found = await session.transcript(after=after, last=last, hidden=hidden)
                        assert list(found) == behind[max(0, len(behind) - last) :]
                        assert found.position == len(whole)

    trio.run(main)


async def test_a_transcript_is_a_sequence_that_knows_its_revision(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        nothing = await session.transcript()
        assert (len(nothing), nothing.revision, nothing.position) == (0, 0, 0)
        await session.extend([U("x"), A("y"), U("z")])
        transcript = await session.transcript()
        assert (transcript.session, transcript.revision, transcript.position) == ("a", 2, 3)
        assert isinstance(transcript[0], StoredMessage)
        assert said(transcript[1:]) == ["y", "z"]
        assert transcript.bodies == [U("x"), A("y"), U("z")]
        assert next(reversed(transcript)) == transcript[-1]
        assert transcript[0].role == "user"


async def test_c82_a_message_of_5_mb_reads_back_equal(tmp_path: Path) -> None:
    large = U("".join(chr(0x4E00 + n % 5_000) for n in range(5 * MB // 3)))
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        await sessions["a"].append(large)
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        assert (await sessions["a"].transcript()).bodies == [large]


@pytest.mark.parametrize("hidden", [False, True])
async def test_c82_reading_the_last_10_takes_memory_for_10(tmp_path: Path, hidden: bool) -> None:
    size = 100 * 1024
    async with open_sessions(
        tmp_path / "state.db", offload=inline, synchronous="normal"
    ) as sessions:
        session = sessions["a"]
        for first in range(0, 500, 50):
            await session.extend([U(f"{n} ".ljust(size, "x")) for n in range(first, first + 50)])
        await session.transcript(last=1)
        tracemalloc.start()
        try:
            found = await session.transcript(last=10, hidden=hidden)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert [str(text).split()[0] for text in said(found)] == [f"{n}" for n in range(490, 500)]
        assert peak < 20 * size, "of 500 such messages, and 10 were asked for"


async def test_a_list_goes_by_id_and_by_pages(tmp_path: Path) -> None:
    ids = sorted(["b", "a", "Z", "é", "10", "9", "a b"])
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        for id in reversed(ids):
            await sessions[id].append(U("x"))
        await sessions["b"].set_meta({"k": [1, None]})
        found = []
        after = ""
        while page := await sessions.list(after=after, limit=3):
            assert len(page) <= 3
            found += page
            after = page[-1].id
        assert [info.id for info in found] == ids
        by_id = {info.id: info for info in found}
        assert by_id["b"].meta == {"k": [1, None]}
        assert (by_id["a"].revision, by_id["a"].messages, by_id["a"].meta) == (2, 1, {})
        assert await sessions["a"].info() == by_id["a"]


@pytest.mark.parametrize("how", ["after", "limit"])
async def test_a_list_is_refused_what_sqlite_cannot_take(tmp_path: Path, how: str) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        call = sessions.list(after="\ud800") if how == "after" else sessions.list(limit=2**70)
        with pytest.raises(Rejected):
            await call


async def test_a_last_beyond_any_number_of_messages_is_all_of_them(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        await sessions["a"].append(U("x"))
        assert len(await sessions["a"].transcript(last=2**63 - 1)) == 1


async def test_readers_wait_in_order_for_a_free_connection(tmp_path: Path) -> None:
    made: list[apsw.Connection] = []

    def connect() -> apsw.Connection:
        made.append(apsw.Connection(str(tmp_path / "state.db")))
        return made[-1]

    readers = Readers(connect, name="these", size=2, offload=in_thread)
    gate = trio.Event()
    order: list[int] = []

    def wait(_: apsw.Connection) -> None:
        trio.from_thread.run(gate.wait)

    async def ask(number: int) -> None:
        await readers.ask(lambda _: order.append(number))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(readers.ask, wait)
        nursery.start_soon(readers.ask, wait)
        await wait_all_tasks_blocked()
        assert repr(readers) == "<Readers: 2 of 2 lent, 0 idle>"
        for number in range(5):
            nursery.start_soon(ask, number)
            await wait_all_tasks_blocked()
        gate.set()
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert len(made) == 2
    await readers.close()
    with pytest.raises(Closed):
        await readers.ask(wait)
    for connection in made:
        with pytest.raises(apsw.ConnectionClosedError):
            connection.execute("SELECT 1")


async def test_a_question_that_fails_costs_its_connection_and_no_other(tmp_path: Path) -> None:
    made: list[apsw.Connection] = []

    def connect() -> apsw.Connection:
        made.append(apsw.Connection(str(tmp_path / "state.db")))
        return made[-1]

    def fail(_: apsw.Connection) -> None:
        raise errors.pop()

    readers = Readers(connect, name="these", size=1, offload=inline)
    errors = [apsw.CorruptError("a test says so"), apsw.IOError("a test says so"), KeyError("bug")]
    for expected in (KeyError, StorageFailed, StorageDamaged):
        with pytest.raises(expected):
            await readers.ask(fail)
        assert await readers.ask(lambda c: c.execute("SELECT 1").get) == 1
    assert len(made) == 4
    await readers.close()


async def test_a_reading_connection_cannot_write(tmp_path: Path) -> None:
    async with open_store(tmp_path / "state.db", offload=inline) as store:
        for sql in ("UPDATE sessions SET meta = NULL", "CREATE TABLE notes (number)"):
            with pytest.raises(StorageFailed, match="readonly"):
                await store._readers.ask(partial(_execute, sql))


def _execute(sql: str, connection: apsw.Connection) -> object:
    return connection.execute(sql)


async def test_a_closed_store_answers_no_question(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        await session.append(U("x"))
    for question in (
        session.transcript(),
        session.all_messages(),
        session.history(),
        session.info(),
        session.meta(),
        sessions.list(),
    ):
        with pytest.raises(Closed) as caught:
            await question
        assert caught.value.what == "store"
