from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest
from support import A, Clock, Job, Told, U, Wire, failing_disk, said, tables, writing

from turnkeeper.actors import Rejected, StorageError, open_sessions
from turnkeeper.storage import (
    Connection,
    Draft,
    StorageFailed,
    StorageFull,
    encode_message,
    inline,
    open_store,
)
from turnkeeper.storage.appends import append
from turnkeeper.storage.connect import PATIENCE_S

DONE, NOT_DONE = "after", "before"


@pytest.fixture
def wire(tmp_path: Path) -> Wire:
    return Wire(tmp_path / "state.db")


def refuse(_: Connection) -> object:
    raise Rejected("key", "a test says so")


def lose(connection: Connection) -> object:
    """What SQLite does on an I/O error: the transaction is gone, and then it says so."""
    connection.execute("INSERT INTO notes VALUES (999, 'x')")
    connection.execute("ROLLBACK")
    raise apsw.IOError("a test says so")


def fail_commit(wire: Wire, when: str) -> None:
    (wire.after if when == DONE else wire.before)["COMMIT"] = apsw.IOError("a test says so")


async def test_c71_every_write_fails_from_now_on(tmp_path: Path) -> None:
    with failing_disk() as disk:
        async with open_sessions(tmp_path / "state.db", offload=inline, vfs=disk.name) as sessions:
            session = sessions["a"]
            await session.append(U("before"))
            assert sessions.health().ok
            disk.write_error = apsw.IOError
            with pytest.raises(StorageError) as caught:
                await session.append(U("during"))
            assert caught.value.kept
            assert not sessions.health().ok
            assert sessions.health().pending == 1
            assert said(await session.transcript()) == ["before", "during"]
            disk.write_error = None
            await session.append(U("after"))
            assert said(await session.transcript()) == ["before", "during", "after"]
            assert sessions.health().ok


async def test_c71_what_is_not_an_append_fails_and_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with failing_disk() as disk:
        async with open_sessions(path, offload=inline, vfs=disk.name) as sessions:
            session = sessions["a"]
            await session.extend([U("ask"), A("answer")])
            before = tables(path)
            disk.write_error = apsw.IOError
            for call in (
                session.undo(),
                session.retry(),
                session.rewrite([]),
                session.restore(1),
                session.fork("b"),
                session.set_meta({"k": 1}),
                sessions.delete("a"),
                sessions.purge("a"),
                session.append(U("decided"), at=2),
            ):
                with pytest.raises(StorageFailed) as caught:
                    await call
                assert not caught.value.kept
                assert not caught.value.unknown
            assert tables(path) == before
            health = sessions.health()
            assert not health.ok
            assert health.pending == 0
            assert health.cause is not None
            assert said(await session.transcript()) == ["ask", "answer"]
            disk.write_error = None
            assert await session.undo() is not None
            assert sessions.health().ok


def big(number: int) -> Draft:
    return Draft(*encode_message(U(f"{number} ".ljust(64 * 1024, "x"))))


def appending(number: int, session: str = "a") -> Job:
    return Job(lambda connection: append(connection, Told(session, number), big(number)))


@pytest.mark.parametrize("together", [1, 12], ids=["one by one", "in one batch"])
async def test_c72_a_full_disk_leaves_earlier_data_and_works_again_when_there_is_space(
    tmp_path: Path, together: int
) -> None:
    path = tmp_path / "state.db"
    async with open_store(path, offload=inline) as store:
        limit = Job(lambda c: c.pragma("max_page_count", c.pragma("page_count") + 100))
        store.submit(limit)
        await limit.outcome()
        stored: list[int] = []
        full: list[int] = []
        for first in range(0, 12, together):
            jobs = {number: appending(number) for number in range(first, first + together)}
            for job in jobs.values():
                store.submit(job)
            for number, job in jobs.items():
                await job.settled.wait()
                (stored if job.error is None else full).append(number)
                if job.error is not None:
                    with pytest.raises(StorageFull) as caught:
                        await job.outcome()
                    assert not caught.value.unknown
        assert 1 < len(stored) < 11
        assert stored + full == list(range(12)), "the first fit, the rest do not"
        assert isinstance(store.statistics().failure, StorageFull)
        small = Job(lambda c: append(c, Told("a", 50), Draft(*encode_message(A("small")))))
        store.submit(small)
        await small.outcome()
        assert store.statistics().failure is None
        more_space = Job(lambda c: c.pragma("max_page_count", 1_000_000))
        store.submit(more_space)
        await more_space.outcome()
        again = appending(100)
        store.submit(again)
        await again.outcome()
        transcript, _ = await store.transcript("a")
        beginnings = [str(text).split()[0] for text in said(transcript)]
        assert beginnings == [*map(str, stored), "small", "100"]
        assert [message.position for message in transcript] == list(range(1, len(stored) + 3))
        check = Job(lambda c: c.pragma("integrity_check"))
        store.submit(check)
        assert await check.outcome() == "ok"


async def test_c72_a_disk_that_is_full_when_rows_of_64_kb_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    text = "x" * 64 * 1024
    with failing_disk() as disk:
        async with open_sessions(path, offload=inline, vfs=disk.name) as sessions:
            session = sessions["a"]
            for number in range(5):
                await session.append(U(f"{number}{text}"))
            disk.write_error = apsw.FullError
            for number in range(5, 8):
                with pytest.raises(StorageFull) as caught:
                    await session.append(U(f"{number}{text}"))
                assert caught.value.kept
            assert len(tables(path)["messages"]) == 5
            disk.write_error = None
            await session.append(U(f"8{text}"))
            assert said(await session.transcript()) == [f"{number}{text}" for number in range(9)]
            assert len(tables(path)["messages"]) == 9
            assert sessions.health().ok
    connection = apsw.Connection(str(path))
    assert connection.pragma("integrity_check") == "ok"
    connection.close()


@pytest.mark.parametrize("place", [0, 2, 4])
async def test_a_transaction_lost_in_the_middle_of_a_batch_fails_only_whom_it_must(
    wire: Wire, place: int
) -> None:
    others = [wire.note(number) for number in range(4)]
    failed = Job(lose)
    refused = Job(refuse)
    jobs = [*others[:place], failed, *others[place:], refused]
    async with writing(wire) as writer:
        for job in jobs:
            writer.submit(job)
        assert [await job.outcome() for job in others] == [1, 2, 3, 4]
        with pytest.raises(StorageFailed) as caught:
            await failed.outcome()
        assert not caught.value.unknown
        with pytest.raises(Rejected):
            await refused.outcome()
        assert writer.statistics().operations == 4
    assert wire.notes() == [0, 1, 2, 3]
    assert all(job.landed for job in others)
    assert not failed.landed


async def test_an_io_error_at_a_commit_fails_only_whom_it_must(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with failing_disk() as disk:
        async with open_store(path, offload=inline, vfs=disk.name) as store:
            jobs = {
                id: Job(lambda c, id=id: append(c, Told(id), Draft(*encode_message(U(id)))))  # type: ignore[misc]  # a lambda's default
                for id in "abcd"
            }
            # The commit of the batch fails, then that of the first, run again alone.
            disk.write_error, disk.fail_next = apsw.IOError, 2
            for job in jobs.values():
                store.submit(job)
            with pytest.raises(StorageFailed) as caught:
                await jobs["a"].outcome()
            assert not caught.value.unknown
            for id in "bcd":
                await jobs[id].outcome()
            assert disk.failures == 2
            assert [info.id for info in await store.sessions()] == ["b", "c", "d"]


@pytest.mark.parametrize("size", [1, 4])
async def test_a_commit_that_failed_and_was_done_is_a_success(wire: Wire, size: int) -> None:
    jobs = [wire.note(number) for number in range(size)]
    async with writing(wire) as writer:
        fail_commit(wire, DONE)
        for job in jobs:
            writer.submit(job)
        assert [await job.outcome() for job in jobs] == list(range(1, size + 1))
        assert wire.opened == 2
        assert writer.statistics().commits == 1
        assert writer.statistics().operations == size
        assert writer.statistics().failure is None
    assert [job.runs for job in jobs] == [1] * size
    assert all(job.landed for job in jobs)
    assert wire.notes() == list(range(size))


async def test_a_commit_that_failed_and_was_not_done_is_a_failure(wire: Wire) -> None:
    async with writing(wire) as writer:
        for earlier in range(3):
            job = wire.note(earlier)
            writer.submit(job)
            await job.outcome()
        fail_commit(wire, NOT_DONE)
        job = wire.note(9)
        writer.submit(job)
        with pytest.raises(StorageFailed) as caught:
            await job.outcome()
        assert not caught.value.unknown
        assert not job.landed
        assert writer.statistics().failure is not None
        again = wire.note(10)
        writer.submit(again)
        await again.outcome()
    assert wire.notes() == [0, 1, 2, 10]


async def test_a_batch_whose_commit_failed_and_was_not_done_is_run_again(wire: Wire) -> None:
    jobs = [wire.note(number) for number in range(4)]
    refused = Job(refuse)
    async with writing(wire) as writer:
        fail_commit(wire, NOT_DONE)
        for job in [*jobs, refused]:
            writer.submit(job)
        assert [await job.outcome() for job in jobs] == [1, 2, 3, 4]
        with pytest.raises(Rejected):
            await refused.outcome()
    assert all(job.landed for job in jobs)
    assert wire.notes() == [0, 1, 2, 3]


async def test_a_refusal_stays_one_when_the_commit_around_it_is_in_doubt(wire: Wire) -> None:
    def write_and_refuse(connection: Connection) -> object:
        connection.execute("INSERT INTO notes VALUES (999, 'x')")
        raise Rejected("key", "a test says so")

    for when in (DONE, NOT_DONE):
        job, refused = wire.note(len(wire.notes())), Job(write_and_refuse)
        async with writing(wire) as writer:
            fail_commit(wire, when)
            writer.submit(refused)
            writer.submit(job)
            await job.outcome()
            with pytest.raises(Rejected):
                await refused.outcome()
    assert wire.notes() == [0, 1]


@pytest.mark.parametrize("when", [DONE, NOT_DONE])
async def test_a_file_that_does_not_come_back_leaves_the_outcome_unknown_until_it_does(
    wire: Wire, when: str
) -> None:
    clock = Clock()
    clock.step_s = 1.0
    jobs = [wire.note(number) for number in range(3)]
    refused = Job(refuse)
    async with writing(wire, clock) as writer:
        first = wire.note(100)
        writer.submit(first)
        await first.outcome()
        fail_commit(wire, when)
        wire.open_error = apsw.CantOpenError("a test says so")
        begun = clock.now
        for job in [*jobs, refused]:
            writer.submit(job)
        for job in jobs:
            with pytest.raises(StorageFailed) as caught:
                await job.outcome()
            assert caught.value.unknown
            assert "whether it was written is not known" in str(caught.value)
            assert not job.landed
        assert clock.now - begun == PATIENCE_S
        with pytest.raises(Rejected):
            await refused.outcome()
        during = wire.note(200)
        writer.submit(during)
        with pytest.raises(StorageFailed) as caught:
            await during.outcome()
        assert not caught.value.unknown, "it was never begun: certain"
        wire.open_error = None
        seen: list[bool] = []
        later = Job(lambda _: seen.extend(job.landed for job in jobs))
        writer.submit(later)
        await later.outcome()
        assert seen == [when == DONE] * 3, "what runs next must know already"
        assert not refused.landed
    assert wire.notes() == ([0, 1, 2, 100] if when == DONE else [100])


async def test_a_file_that_comes_back_in_time_is_a_matter_of_waiting(wire: Wire) -> None:
    clock = Clock()

    def come_back() -> None:
        if len(clock.pauses) == 5:
            wire.open_error = None

    clock.on_pause = come_back
    async with writing(wire, clock) as writer:
        first = wire.note(0)
        writer.submit(first)
        await first.outcome()
        fail_commit(wire, DONE)
        wire.open_error = apsw.CantOpenError("a test says so")
        job = wire.note(1)
        writer.submit(job)
        assert await job.outcome() == 2
    assert len(clock.pauses) == 5
    assert wire.notes() == [0, 1]


class Answers:
    """What a disk says, whatever it does."""

    vfs = "losing-answers"

    def __init__(self) -> None:
        self.fail: str | None = None
        """The next one of these, ``"xWrite"`` or ``"xSync"``, fails, and the disk is gone then."""
        self.gone = False
        """Nothing can be opened, written or synced."""

    def check(self, doing: str) -> None:
        if doing == self.fail:
            self.fail, self.gone = None, True
        if self.gone:
            raise apsw.IOError("a test says so")


@contextmanager
def losing_answers() -> Iterator[Answers]:
    """A VFS on which a sync that is said to have failed was done all the same."""
    answers = Answers()

    class File(apsw.VFSFile):
        def xWrite(self, data: bytes, offset: int) -> None:
            answers.check("xWrite")
            super().xWrite(data, offset)

        def xSync(self, flags: int) -> None:
            super().xSync(flags)
            answers.check("xSync")

    class FileSystem(apsw.VFS):
        def __init__(self) -> None:
            super().__init__(answers.vfs, "")

        def xOpen(self, name: apsw.URIFilename | str | None, flags: list[int]) -> apsw.VFSFile:
            answers.check("xOpen")
            return File("", name, flags)

    system = FileSystem()
    try:
        yield answers
    finally:
        system.unregister()


@pytest.mark.parametrize("fails", ["xWrite", "xSync"])
@pytest.mark.parametrize("then", ["append", "undo", "redelivery", "nothing"])
async def test_an_append_of_unknown_outcome_is_kept_and_stored_exactly_once(
    tmp_path: Path, fails: str, then: str
) -> None:
    path = tmp_path / "state.db"
    clock = Clock()

    def hours() -> float:  # each look at the clock is later, so the patience ends soon
        clock.now += 3
        return clock.now

    with losing_answers() as answers:
        async with open_sessions(
            path, offload=inline, vfs=answers.vfs, monotonic=hours
        ) as sessions:
            session = sessions["a"]
            await session.append(A("before"))
            answers.fail = fails
            with pytest.raises(StorageFailed) as caught:
                await session.append(U("in doubt"), key="k")
            assert caught.value.kept
            assert answers.gone
            answers.gone = False
            if then == "append":
                await session.append(A("after"))
                assert said(await session.transcript()) == ["before", "in doubt", "after"]
            elif then == "undo":
                undone = await session.undo()
                assert undone is not None
                assert undone.text == "in doubt"
                assert said(await session.transcript()) == ["before"]
            elif then == "redelivery":
                receipt = await session.append(U("in doubt"), key="k")
                assert (receipt.position, receipt.duplicate) == (2, True)
        rows = [row[11] for row in tables(path)["messages"]]
    assert rows == ["before", "in doubt", "after"][: 3 if then == "append" else 2]


@pytest.mark.parametrize("fails", ["xWrite", "xSync"])
async def test_a_transcript_shows_an_append_of_unknown_outcome_once(
    tmp_path: Path, fails: str
) -> None:
    clock = Clock()

    def hours() -> float:
        clock.now += 3
        return clock.now

    with losing_answers() as answers:
        async with open_sessions(
            tmp_path / "state.db", offload=inline, vfs=answers.vfs, monotonic=hours
        ) as sessions:
            session = sessions["a"]
            await session.append(A("before"))
            answers.fail = fails
            with pytest.raises(StorageFailed):
                await session.append(U("in doubt"))
            answers.gone = False
            assert said(await session.transcript()) == ["before", "in doubt"]


@pytest.mark.parametrize("statement", ["BEGIN", "INSERT INTO notes", "\nINSERT INTO batch"])
async def test_an_error_before_the_commit_is_a_failure_of_one_alone(
    wire: Wire, statement: str
) -> None:
    async with writing(wire) as writer:
        first = wire.note(0)
        writer.submit(first)
        await first.outcome()
        wire.before[statement] = apsw.IOError("a test says so")
        job = wire.note(1)
        writer.submit(job)
        with pytest.raises(StorageFailed) as caught:
            await job.outcome()
        assert not caught.value.unknown
        assert not job.landed
        again = wire.note(2)
        writer.submit(again)
        assert await again.outcome() == 2
    assert wire.notes() == [0, 2]


@pytest.mark.parametrize("statement", ["SAVEPOINT batch", "ROLLBACK TO batch", "RELEASE operation"])
async def test_nothing_is_said_to_be_done_that_is_not_there(wire: Wire, statement: str) -> None:
    def write_and_refuse(connection: Connection) -> object:
        connection.execute("INSERT INTO notes VALUES (999, 'x')")
        raise Rejected("key", "a test says so")

    async with writing(wire) as writer:
        first = wire.note(0)
        writer.submit(first)
        await first.outcome()
        wire.before[statement] = apsw.IOError("a test says so")
        jobs = [wire.note(1), Job(write_and_refuse), wire.note(2)]
        for job in jobs:
            writer.submit(job)
        for job in jobs:
            await job.settled.wait()
        there = wire.notes()
        for number, job in ((1, jobs[0]), (2, jobs[2])):
            assert job.landed == (job.error is None) == (number in there)


async def test_a_first_batch_that_failed_before_its_mark_is_not_taken_for_done(wire: Wire) -> None:
    async with writing(wire) as writer:
        wire.before["SAVEPOINT batch"] = apsw.IOError("a test says so")
        job = wire.note(1)
        writer.submit(job)
        with pytest.raises(StorageFailed):
            await job.outcome()
        assert not job.landed
    assert wire.notes() == []


async def test_a_file_that_cannot_be_opened_fails_what_waits_and_is_tried_again(wire: Wire) -> None:
    async with writing(wire) as writer:
        wire.open_error = apsw.CantOpenError("a test says so")
        jobs = [wire.note(1), wire.note(2)]
        for job in jobs:
            writer.submit(job)
        for job in jobs:
            with pytest.raises(StorageFailed):
                await job.outcome()
        failing_since = writer.statistics().failing_since
        assert failing_since is not None
        wire.open_error = None
        job = wire.note(3)
        writer.submit(job)
        await job.outcome()
        assert writer.statistics().failing_since is None
    assert wire.notes() == [3]


async def test_the_log_is_emptied_behind_a_removal(wire: Wire) -> None:
    async with writing(wire) as writer:
        job = wire.note(1)
        writer.submit(job)
        await job.outcome()
        log = wire.path.with_name("state.db-wal")
        assert len(log.read_bytes()) > 0
        removal = Job(lambda c: c.execute("DELETE FROM notes"), scrub=True)
        writer.submit(removal)
        await removal.outcome()
        assert log.read_bytes() == b""


async def test_a_removal_beside_a_reader_leaves_the_log_for_later(wire: Wire) -> None:
    async with writing(wire) as writer:
        job = wire.note(1)
        writer.submit(job)
        await job.outcome()
        reader = apsw.Connection(str(wire.path))
        reader.execute("BEGIN; SELECT * FROM notes")
        removal = Job(lambda c: c.execute("DELETE FROM notes"), scrub=True)
        writer.submit(removal)
        await removal.outcome()
        reader.close()
    assert wire.notes() == []


@pytest.mark.parametrize("error", [apsw.IOError, apsw.FullError], ids=["io", "full"])
async def test_a_checkpoint_that_fails_behind_a_removal_is_no_failure_of_it(
    wire: Wire, error: type[apsw.Error]
) -> None:
    async with writing(wire) as writer:
        job = wire.note(1)
        writer.submit(job)
        await job.outcome()
        wire.checkpoint_error = error("a test says so")
        removal, other = Job(lambda c: c.execute("DELETE FROM notes"), scrub=True), wire.note(2)
        writer.submit(removal)
        writer.submit(other)
        await removal.outcome()
        await other.outcome()
        assert removal.landed
        later = wire.note(3)
        writer.submit(later)
        await later.outcome()
    assert wire.notes() == [2, 3]
