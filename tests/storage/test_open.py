from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path

import apsw
import pytest
import trio
from support import A, U, said, tables

from turnkeeper.actors import open_sessions
from turnkeeper.storage import (
    Offload,
    Rejected,
    StorageDamaged,
    StorageError,
    StorageFailed,
    StorageFull,
    in_thread,
    inline,
)
from turnkeeper.storage.connect import APPLICATION_ID, create
from turnkeeper.storage.schema import VERSION, migrate

NOBODY = 65534
PAGE = 4096


async def make(path: Path) -> None:
    """A store with two messages, closed."""
    async with open_sessions(path, offload=inline) as sessions:
        await sessions["a"].extend([U("hello"), A("hi")])


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below `folder` with its bytes; None for a folder."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


async def refused(path: Path) -> StorageError:
    """The error of opening `path`, having seen that it changed nothing."""
    before = contents(path.parent)
    with pytest.raises(StorageError) as caught:
        async with open_sessions(path, offload=inline):
            raise AssertionError("it opened")
    assert contents(path.parent) == before
    assert str(path) in caught.value.doing or caught.value.doing == "opening the store"
    assert not caught.value.kept
    assert not caught.value.unknown
    return caught.value


@contextmanager
def a_folder_for_anybody() -> Iterator[Path]:
    """A folder that every user may enter and, as a start, write; pytest's own is private."""
    folder = Path(tempfile.mkdtemp(prefix="turnkeeper-"))
    try:
        folder.chmod(0o777)
        yield folder
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)


@contextmanager
def a_plain_user() -> Iterator[None]:
    """Be somebody whom permissions stop, if one is not so already."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@contextmanager
def a_plain_effective_user() -> Iterator[None]:
    """As a program that has put its powers aside for a while: only the effective user changes."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


async def test_c75_a_file_that_is_read_only() -> None:
    with a_folder_for_anybody() as folder:
        path = folder / "state.db"
        await make(path)
        path.chmod(0o444)
        with a_plain_user():
            error = await refused(path)
    assert type(error) is StorageFailed
    assert error.detail == "the file is read-only"


async def test_c75_a_file_that_may_not_be_read() -> None:
    with a_folder_for_anybody() as folder:
        path = folder / "state.db"
        await make(path)
        path.chmod(0)
        with a_plain_user(), pytest.raises(StorageFailed, match="Permission denied"):
            async with open_sessions(path, offload=inline):
                pass


async def test_c75_a_folder_that_is_read_only() -> None:
    with a_folder_for_anybody() as folder:
        path = folder / "state.db"
        await make(path)
        path.chmod(0o666)
        folder.chmod(0o555)
        with a_plain_user():
            error = await refused(path)
    assert type(error) is StorageFailed
    assert error.detail == "its folder is read-only, and SQLite keeps its log beside it"


async def test_c75_a_folder_that_is_read_only_and_has_no_store() -> None:
    with a_folder_for_anybody() as folder:
        folder.chmod(0o555)
        with a_plain_user():
            error = await refused(folder / "state.db")
    assert type(error) is StorageFailed
    assert error.detail == "its folder is read-only, and the file does not exist"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can put its powers aside")
@pytest.mark.parametrize("what", ["file", "folder", "empty folder"])
async def test_c75_permissions_are_those_of_the_effective_user(what: str) -> None:
    with a_folder_for_anybody() as folder:
        path = folder / "state.db"
        if what != "empty folder":
            await make(path)
            path.chmod(0o444 if what == "file" else 0o666)
        if what != "file":
            folder.chmod(0o555)
        with a_plain_effective_user():
            error = await refused(path)
    assert type(error) is StorageFailed
    assert "read-only" in error.detail
    assert what.split()[-1] in error.detail


async def test_c75_a_file_of_0_bytes(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.touch()
    error = await refused(path)
    assert type(error) is StorageDamaged
    assert error.detail.startswith("the file is empty")


async def test_c75_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.mkdir()
    error = await refused(path)
    assert type(error) is StorageDamaged
    assert error.detail == "it is a folder"


async def test_c75_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="there is no folder"):
        async with open_sessions(tmp_path / "nowhere" / "state.db", offload=inline):
            pass
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    "bytes",
    [
        b"x",
        b"not a database\n" * 1_000,
        b"\0" * PAGE,
        b"SQLite format 3\0",
        b"SQLite format 2\0" * 9,
    ],
    ids=["one byte", "text", "noughts", "only the magic words", "an older SQLite"],
)
async def test_c75_garbage(tmp_path: Path, bytes: bytes) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(bytes)
    error = await refused(path)
    assert type(error) is StorageDamaged
    assert error.detail == "it is not an SQLite database"


@pytest.mark.parametrize("length", [100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
async def test_c75_a_store_cut_short(tmp_path: Path, length: int) -> None:
    path = tmp_path / "state.db"
    await make(path)
    path.write_bytes(path.read_bytes()[:length])
    assert type(await refused(path)) is StorageDamaged


@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param(16, 24, id="page size"),
        pytest.param(44, 48, id="schema format"),
        pytest.param(100, PAGE, id="first page"),
    ],
)
async def test_c75_a_store_whose_first_page_was_scribbled_on(
    tmp_path: Path, first: int, last: int
) -> None:
    path = tmp_path / "state.db"
    await make(path)
    whole = bytearray(path.read_bytes())
    whole[first:last] = b"\xaa" * (last - first)
    path.write_bytes(whole)
    assert type(await refused(path)) is StorageDamaged


async def test_c75_a_header_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    await make(path)
    path.write_bytes(path.read_bytes()[:99])
    assert type(await refused(path)) is StorageDamaged


@pytest.mark.parametrize("mode", ["delete", "wal"])
async def test_c75_an_sqlite_file_of_another_program(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {mode}")
        connection.execute("CREATE TABLE messages (id INTEGER PRIMARY KEY, session TEXT)")
    error = await refused(path)
    assert type(error) is StorageDamaged
    assert error.detail == "it is an SQLite database of another program"


async def test_c75_a_file_of_a_newer_schema(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    await make(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    error = await refused(path)
    assert type(error) is StorageDamaged
    assert f"version {VERSION + 1}" in error.detail
    assert "newer Turnkeeper" in error.detail


async def test_c75_every_refusal_has_words_of_its_own(tmp_path: Path) -> None:
    async def detail(name: str, content: bytes | None) -> str:
        path = tmp_path / name
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
        return (await refused(path)).detail

    whole = tmp_path / "whole.db"
    await make(whole)
    good = whole.read_bytes()
    newer = good[:60] + (VERSION + 1).to_bytes(4, "big") + good[64:]
    foreign = good[:68] + b"\0\0\0\0" + good[72:]
    details = {
        await detail("empty", b""),
        await detail("folder", None),
        await detail("garbage", b"garbage" * 100),
        await detail("foreign", foreign),
        await detail("newer", newer),
    }
    assert len(details) == 5


@pytest.mark.parametrize("path", ["", ":memory:", "file:x?mode=memory", "a\0b"], ids=repr)
async def test_a_path_that_names_no_file_is_rejected(path: str) -> None:
    with pytest.raises(Rejected) as caught:
        async with open_sessions(path, offload=inline):
            pass
    assert caught.value.field == "path"


async def test_a_damaged_page_is_named_damage_and_no_other_session_suffers(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        for id in "ab":
            await sessions[id].extend([U(f"{id}{number} " + "x" * 500) for number in range(100)])
    whole = bytearray(path.read_bytes())
    at = whole.index(b"a50 xxx")
    whole[at // PAGE * PAGE : (at // PAGE + 1) * PAGE] = b"\xaa" * PAGE
    path.write_bytes(whole)
    async with open_sessions(path, offload=inline) as sessions:
        with pytest.raises(StorageDamaged):
            await sessions["a"].transcript()
        assert len(await sessions["b"].transcript()) == 100
        await sessions["b"].append(U("b goes on"))


async def test_a_new_file_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
            await sessions["a"].append(U("hello"))
            modes = {
                name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in contents(tmp_path)
            }
            assert modes.pop("state.db.owners") == 0o700
            (owner,) = (name for name in modes if name.startswith("state.db.owners/"))
            assert modes == dict.fromkeys(
                ["state.db", "state.db-shm", "state.db-wal", owner], 0o600
            )
    finally:
        os.umask(before)


async def test_a_closed_store_is_one_file(tmp_path: Path) -> None:
    await make(tmp_path / "state.db")
    assert list(contents(tmp_path)) == ["state.db"]
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        assert said(await sessions["a"].transcript()) == ["hello", "hi"]


@pytest.mark.parametrize("error", [apsw.FullError, apsw.IOError], ids=["full", "io"])
def test_making_a_file_leaves_nothing_when_the_tables_cannot_be_made(
    tmp_path: Path, error: type[apsw.Error]
) -> None:
    def fill(connection: apsw.Connection) -> None:
        migrate(connection)
        raise error("a test says so")

    meant = StorageFull if error is apsw.FullError else StorageFailed
    with pytest.raises(meant, match="creating"):
        create(tmp_path / "state.db", fill)
    assert contents(tmp_path) == {}


async def test_making_a_file_leaves_nothing_when_it_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(_: object, __: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        with pytest.raises(StorageFailed, match=r"creating .*Operation not permitted"):
            async with open_sessions(tmp_path / "state.db", offload=inline):
                pass
    assert contents(tmp_path) == {}
    await make(tmp_path / "state.db")


class Killed(BaseException):
    """As good as a kill, for a test that wants to live on."""


@pytest.mark.parametrize("moment", ["begun", "filled", "whole"])
async def test_a_kill_while_a_file_is_made_leaves_nothing_that_looks_like_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "state.db"

    def fill(connection: apsw.Connection) -> None:
        if moment == "filled":
            migrate(connection)
        if moment != "whole":
            raise Killed
        migrate(connection)

    def link(_: object, __: object) -> None:
        raise Killed

    def unlink(_: Path, *, missing_ok: bool = False) -> None:
        """A killed process does not clean up."""

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(Killed):
            create(path, fill)
    left = contents(tmp_path)
    assert left, "the kill came before anything was there: the test shows nothing"
    assert "state.db" not in left
    await make(path)
    async with open_sessions(path, offload=inline) as sessions:
        assert said(await sessions["a"].transcript()) == ["hello", "hi"]
    assert {name: bytes for name, bytes in contents(tmp_path).items() if name in left} == left


def test_a_file_that_somebody_else_makes_first_stands(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    theirs = b"theirs"

    def fill(connection: apsw.Connection) -> None:
        migrate(connection)
        path.write_bytes(theirs)

    create(path, fill)
    assert contents(tmp_path) == {"state.db": theirs}


@pytest.mark.parametrize("offload", [in_thread, inline], ids=["threads", "inline"])
async def test_openers_that_create_at_once_get_one_store(tmp_path: Path, offload: Offload) -> None:
    path = tmp_path / "state.db"
    ready = trio.Event()
    opened = 0

    async def one(number: int) -> None:
        nonlocal opened
        async with open_sessions(path, offload=offload) as sessions:
            opened += 1
            if opened == 5:
                ready.set()
            await ready.wait()
            await sessions["shared"].append(U(f"from {number}"))
            await sessions[f"own {number}"].append(U("x"))

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(one, number)
    assert list(contents(tmp_path)) == ["state.db"]
    async with open_sessions(path, offload=inline) as sessions:
        shared = await sessions["shared"].transcript()
        assert sorted(map(str, said(shared))) == [f"from {number}" for number in range(5)]
        assert [message.position for message in shared] == [1, 2, 3, 4, 5]
        assert len(await sessions.list()) == 6


async def test_the_schema_of_a_new_file_is_the_sum_of_its_migrations(tmp_path: Path) -> None:
    await make(tmp_path / "state.db")
    folder = resources.files("turnkeeper.storage").joinpath("sql")
    scripts = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".sql")),
        key=lambda entry: entry.name,
    )
    numbers = [int(script.name[:4]) for script in scripts]
    assert numbers == list(range(1, VERSION + 1))
    schema = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY type, name"
    with closing(sqlite3.connect(":memory:")) as plain:
        plain.create_function("removal_allowed", 0, lambda: 0)
        for script in scripts:
            plain.executescript(script.read_text("utf-8"))
        expected = plain.execute(schema).fetchall()
    with closing(sqlite3.connect(tmp_path / "state.db")) as made:
        assert made.execute(schema).fetchall() == expected
        assert made.execute("PRAGMA user_version").fetchone() == (VERSION,)
        assert made.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert made.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert made.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_migration_runs_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    create(path, migrate)
    before = tables(path)
    with closing(apsw.Connection(str(path))) as connection:
        changes = connection.total_changes()
        migrate(connection)
        assert connection.total_changes() == changes
        assert not connection.in_transaction
    assert tables(path) == before


async def test_a_store_that_was_killed_opens_with_all_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    (tmp_path / "copy").mkdir()
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        for number in range(20):
            await sessions["a"].append(U(f"{number}"))
        for name in ("state.db", "state.db-wal", "state.db-shm"):  # as a kill here would leave them
            shutil.copy(tmp_path / name, tmp_path / "copy" / name)
    assert (tmp_path / "copy" / "state.db-wal").stat().st_size > 0
    async with open_sessions(tmp_path / "copy" / "state.db", offload=inline) as sessions:
        assert said(await sessions["a"].transcript()) == [f"{number}" for number in range(20)]
        await sessions["a"].append(U("more"))


async def test_a_newer_store_that_was_not_closed_keeps_its_log(tmp_path: Path) -> None:
    """Closing the last connection moves the log into the file; a refusal must not do that."""
    path = tmp_path / "state.db"
    await make(path)
    copy = tmp_path / "copy"
    copy.mkdir()
    with closing(apsw.Connection(str(path))) as connection:
        connection.pragma("user_version", VERSION + 1)
        for name in ("state.db", "state.db-wal"):  # as a killed process leaves them
            (copy / name).write_bytes((tmp_path / name).read_bytes())
    before = {name: bytes for name, bytes in contents(copy).items() if name != "state.db-shm"}
    assert before["state.db-wal"]
    with pytest.raises(StorageDamaged, match="newer than version"):
        async with open_sessions(copy / "state.db", offload=inline):
            pass
    after = {name: bytes for name, bytes in contents(copy).items() if name != "state.db-shm"}
    assert after == before


async def test_what_is_damaged_inside_is_said_to_be_so_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    await make(path)
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("DROP TRIGGER messages_stay; UPDATE messages SET extra = '{secret'")
    async with open_sessions(path, offload=inline) as sessions:
        with pytest.raises(StorageDamaged) as caught:
            await sessions["a"].transcript()
        assert "secret" not in str(caught.value)
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("DROP TRIGGER heads_keep; DELETE FROM heads")
    async with open_sessions(path, offload=inline) as sessions:
        with pytest.raises(StorageDamaged):
            await sessions["a"].transcript()
        with pytest.raises(StorageDamaged):
            await sessions["a"].append(U("x"))


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux lists its locks")
async def test_opening_a_file_again_keeps_the_locks_that_this_process_holds(tmp_path: Path) -> None:
    """Closing any descriptor of a file drops them; then another program deletes our log."""
    path = tmp_path / "state.db"

    def locks() -> int:
        inode = f":{path.stat().st_ino} "
        return sum(inode in line for line in Path("/proc/locks").read_text().splitlines())

    async with open_sessions(path, offload=inline) as sessions:
        await sessions["a"].append(U("x"))
        held = locks()
        assert held > 0
        async with open_sessions(path, offload=inline) as others:
            assert locks() >= held
            assert said(await others["a"].transcript()) == ["x"]
        assert locks() == held


async def test_a_copy_that_lost_its_way_of_logging_gets_it_back(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    await make(path)
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("VACUUM INTO ?", (str(tmp_path / "copy.db"),))
    async with open_sessions(tmp_path / "copy.db", offload=inline) as sessions:
        assert said(await sessions["a"].transcript()) == ["hello", "hi"]
    with closing(apsw.Connection(str(tmp_path / "copy.db"))) as connection:
        assert connection.pragma("journal_mode") == "wal"


async def test_a_log_that_is_removed_while_the_store_is_open_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline) as sessions:
        session = sessions["a"]
        await session.append(U("before"))
        (tmp_path / "state.db-wal").unlink()
        with pytest.raises(StorageFailed) as caught:
            await session.append(U("during"))
        assert caught.value.kept
        assert not sessions.health().ok
        await session.append(U("after"))
        assert sessions.health().ok
    async with open_sessions(path, offload=inline) as sessions:
        assert said(await sessions["a"].transcript()) == ["before", "during", "after"]


async def test_a_store_behind_a_link_keeps_its_log_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    await make(tmp_path / "real" / "state.db")
    (tmp_path / "link.db").symlink_to(tmp_path / "real" / "state.db")
    async with open_sessions(tmp_path / "link.db", offload=inline) as sessions:
        await sessions["a"].append(U("x"))
        assert sessions.stats().wal_bytes > 0
