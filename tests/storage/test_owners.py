"""Who lives, with real processes, real signals and real locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

import pytest

from turnkeeper.storage import StorageFailed
from turnkeeper.storage.owners import LockedOwners, Owners, UnlockedOwners, open_owners

LIMIT_S = 60
NOBODY = 65534
FLOCK = "turnkeeper.storage.owners.flock"
ME, OTHER, THIRD = 11, 22, 33

Own = Callable[[int], LockedOwners]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state.db.owners"


@pytest.fixture
def own(folder: Path) -> Iterator[Own]:
    """Makes owners in the folder; closes them all in the end."""
    with ExitStack() as stack:

        def make(number: int) -> LockedOwners:
            made = open_owners(folder, number)
            assert isinstance(made, LockedOwners)
            stack.callback(made.close)
            return made

        yield make


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Process:
    """A process that opens `folder` as `number`, does what it is told, says so, and lives on."""

    HEAD = """
import os, subprocess, sys, threading
from pathlib import Path
from turnkeeper.storage import owners as room
from turnkeeper.storage.owners import open_owners

folder, number = Path(sys.argv[1]), int(sys.argv[2])

def say(*words):
    print(*words, flush=True)

def live_on():
    sys.stdin.read()

def fork(child):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = child()
        os.write(w, b'.')
        live_on()
        os._exit(0)
    os.close(w)
    assert os.read(r, 1) == b'.'
    say('child', pid)
"""
    OPEN = "owners = open_owners(folder, number)\n"

    def __init__(self, folder: Path, number: int, then: str, head: str = OPEN) -> None:
        script = self.HEAD + head + then + "\nsay('ready')\nlive_on()\n"
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script, str(folder), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.children: list[int] = []

    def hears(self) -> list[str]:
        """The words of the next line that the process says."""
        assert self.popen.stdout is not None
        words = self.popen.stdout.readline().split()
        if words[:1] == ["child"]:
            self.children.append(int(words[1]))
        return words

    def kill(self) -> None:
        self.popen.kill()
        assert self.popen.wait(LIMIT_S) == -signal.SIGKILL

    def stop(self) -> None:
        self.popen.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.popen.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def end(self) -> None:
        for child in self.children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.popen.kill()
        self.popen.wait(LIMIT_S)
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        with suppress(BrokenPipeError):
            self.popen.stdin.close()
        self.popen.stdout.read()  # until the last child is gone
        self.popen.stdout.close()


Start = Callable[..., Process]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a process and waits for its first word; ends all of them in the end."""
    with ExitStack() as stack:

        def starting(
            number: int = OTHER, then: str = "", *, head: str = Process.OPEN, word: str = "ready"
        ) -> Process:
            process = Process(folder, number, then, head)
            stack.callback(process.end)
            assert process.hears()[:1] == [word]
            return process

        yield starting


def hold(path: Path, how: int) -> FileIO:
    """The file, locked; whoever calls this closes it."""
    file = FileIO(path, "r")
    fcntl.flock(file, how | fcntl.LOCK_NB)
    return file


# Living and dying


def test_an_owner_knows_itself(own: Own) -> None:
    me = own(ME)
    assert me.number == ME
    assert me.is_alive(ME) is True


def test_whoever_never_was_is_dead(own: Own) -> None:
    assert own(ME).is_alive(OTHER) is False


def test_another_process_is_alive_and_dead_as_soon_as_it_is_killed(own: Own, start: Start) -> None:
    me, other = own(ME), start(OTHER)
    assert me.is_alive(OTHER) is True
    other.kill()
    assert me.is_alive(OTHER) is False


def test_a_process_that_leaves_without_a_word_is_dead(own: Own, start: Start) -> None:
    me, other = own(ME), start(OTHER, "say('ready')\nlive_on()\nos._exit(3)")
    assert me.is_alive(OTHER) is True
    assert other.popen.stdin is not None
    other.popen.stdin.close()
    assert other.popen.wait(LIMIT_S) == 3
    assert me.is_alive(OTHER) is False


def test_a_stopped_process_is_alive(own: Own, start: Start) -> None:
    me, other = own(ME), start(OTHER)
    other.stop()
    assert me.is_alive(OTHER) is True
    other.kill()
    assert me.is_alive(OTHER) is False


def test_c43_a_dead_owner_whose_process_id_belongs_to_another_is_dead(
    own: Own, start: Start, folder: Path
) -> None:
    me, other = own(ME), start(OTHER)
    other.kill()
    assert (folder / str(OTHER)).read_bytes() == b""  # there is no process id to be fooled by
    pid = os.getpid()
    start(pid).kill()  # nor is the number taken for one
    assert me.is_alive(pid) is False


def test_two_stores_of_one_process_are_two_owners(own: Own) -> None:
    first, second = own(ME), own(OTHER)
    assert first.is_alive(OTHER) is True
    assert second.is_alive(ME) is True
    first.close()
    assert second.is_alive(ME) is False
    assert second.is_alive(OTHER) is True


def test_asking_does_not_drop_a_lock_of_the_same_process(own: Own) -> None:
    first, second, third = own(ME), own(OTHER), own(THIRD)
    for _ in range(2):
        assert second.is_alive(ME) is True
        assert third.is_alive(ME) is True
    assert first.is_alive(ME) is True


def test_one_that_asks_does_not_look_alive_to_another_that_asks(
    own: Own, start: Start, folder: Path
) -> None:
    me = own(ME)
    start(OTHER).kill()
    with hold(folder / str(OTHER), fcntl.LOCK_SH):
        assert me.is_alive(OTHER) is False


def test_a_store_that_is_forgotten_unclosed_is_dead(own: Own, folder: Path) -> None:
    me = own(ME)
    forgotten = [LockedOwners(folder, OTHER)]
    with pytest.warns(ResourceWarning):
        forgotten.clear()
    assert me.is_alive(OTHER) is False


def test_an_owner_made_anew_while_it_is_asked_for_is_alive(
    own: Own, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, other = own(ME), own(OTHER)

    def late(file: FileIO, how: int) -> None:
        monkeypatch.setattr(FLOCK, fcntl.flock)
        (folder / str(OTHER)).unlink()
        other.stand()
        fcntl.flock(file, how)  # succeeds: the file that was opened is nobody's now

    monkeypatch.setattr(FLOCK, late)
    assert me.is_alive(OTHER) is True


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_what_cannot_be_asked_is_not_dead(
    own: Own, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    me = own(ME)
    own(OTHER)

    def fails(path: str, flags: int, mode: int = 0o777) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        assert me.is_alive(OTHER) is None
        assert me.is_alive(ME) is True


# Children


def test_a_forked_child_does_not_keep_its_dead_parent_alive(own: Own, start: Start) -> None:
    me, parent = own(ME), start(OTHER, "fork(lambda: None)", word="child")
    assert me.is_alive(OTHER) is True
    parent.kill()
    os.kill(parent.children[0], 0)  # it lives
    assert me.is_alive(OTHER) is False


def test_a_forked_child_that_closes_all_leaves_the_parent_alive(
    own: Own, start: Start, folder: Path
) -> None:
    me = own(ME)
    start(
        OTHER,
        """
def child():
    assert owners.is_alive(number) is True
    owners.stand()
    owners.sweep()
    owners.close()
    assert owners.is_alive(number) is True
fork(child)
""",
        word="child",
    )
    assert names(folder) == {str(ME), str(OTHER)}
    assert me.is_alive(OTHER) is True


def test_a_forked_child_may_open_a_store_of_its_own_in_any_thread(own: Own, start: Start) -> None:
    me = own(ME)
    parent = start(
        OTHER,
        f"""
def child():
    mine = []
    thread = threading.Thread(target=lambda: mine.append(open_owners(folder, {THIRD})), daemon=True)
    thread.start()
    thread.join({LIMIT_S / 2})
    [it] = mine
    return it
fork(child)
""",
        word="child",
    )
    assert me.is_alive(THIRD) is True
    parent.kill()
    assert me.is_alive(OTHER) is False
    assert me.is_alive(THIRD) is True


def test_a_child_of_subprocess_does_not_keep_its_dead_parent_alive(own: Own, start: Start) -> None:
    me = own(ME)
    parent = start(
        OTHER,
        """
there = subprocess.Popen([sys.executable, '-c', 'input()'], close_fds=False)
say('child', there.pid)
""",
        word="child",
    )
    assert me.is_alive(OTHER) is True
    parent.kill()
    os.kill(parent.children[0], 0)  # it lives
    assert me.is_alive(OTHER) is False


@pytest.mark.parametrize("step", ["open", "unlink"])
def test_a_fork_waits_until_what_is_being_locked_is_known(
    own: Own, start: Start, folder: Path, step: str
) -> None:
    """Another thread opens a store, and is held up at a bad moment while the first one forks.

    At "open" its own file has just been opened; at "unlink" it holds the lock of a dead one,
    which the disk then refuses to remove.
    """
    me = own(ME)
    start(THIRD).kill()
    parent = start(
        OTHER,
        f"""
real = os.{step}
there, go_on = threading.Event(), threading.Event()

def slow(*args, **how):
    done = real(*args, **how) if {step!r} == 'open' else None
    there.set()
    go_on.wait()
    if {step!r} == 'unlink':
        raise PermissionError
    return done

thread = threading.Thread(target=open_owners, args=(folder, number))
os.{step} = slow
thread.start()
there.wait()
os.{step} = real
os.register_at_fork(before=go_on.set)  # hooks run in reverse: this one before the room's own
fork(lambda: None)
thread.join()
""",
        head="import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n",
        word="child",
    )
    assert parent.hears() == ["ready"]
    parent.kill()
    assert me.is_alive(OTHER) is False
    assert me.is_alive(THIRD) is False


# Files


def test_only_their_owner_may_read_the_files(own: Own, folder: Path) -> None:
    before = os.umask(0)
    try:
        own(ME)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / str(ME)).stat().st_mode) == 0o600


def test_closing_leaves_nothing_and_twice_is_harmless(own: Own, folder: Path) -> None:
    me, other = own(ME), own(OTHER)
    me.close()
    assert names(folder) == {str(OTHER)}
    me.close()
    me.stand()
    assert names(folder) == {str(OTHER)}
    assert me.is_alive(ME) is False
    assert me.is_alive(OTHER) is True
    other.close()
    assert not folder.exists()


def test_closing_leaves_what_others_put_in_the_folder(own: Own, folder: Path) -> None:
    me = own(ME)
    (folder / "note").write_text("do not touch")
    me.close()
    assert names(folder) == {"note"}


@pytest.mark.parametrize("loss", ["the file", "the folder", "another file in its place"])
def test_a_file_that_is_lost_is_made_anew(own: Own, folder: Path, loss: str) -> None:
    me, other = own(ME), own(OTHER)
    if loss == "the file":
        (folder / str(ME)).unlink()
    elif loss == "the folder":
        shutil.rmtree(folder)
    else:
        shutil.copy(folder / str(ME), folder / "copy")
        (folder / "copy").replace(folder / str(ME))
    assert other.is_alive(ME) is False
    me.stand()
    other.stand()
    assert other.is_alive(ME) is True
    assert me.is_alive(OTHER) is True
    assert names(folder) == {str(ME), str(OTHER)}
    me.close()
    assert names(folder) == {str(OTHER)}


def test_a_file_that_is_there_is_left_alone(own: Own, folder: Path) -> None:
    me = own(ME)
    before = (folder / str(ME)).stat()
    me.stand()
    after = (folder / str(ME)).stat()
    assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)


def test_a_file_that_cannot_be_made_anew_is_tried_again(own: Own, folder: Path) -> None:
    me, other = own(ME), own(OTHER)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    with pytest.raises(StorageFailed) as caught:
        me.stand()
    assert str(folder) in caught.value.detail
    folder.unlink()
    me.stand()
    assert other.is_alive(ME) is True


def test_closing_leaves_a_file_that_is_not_ours(own: Own, folder: Path) -> None:
    me = own(ME)
    (folder / str(ME)).unlink()
    (folder / str(ME)).write_text("somebody else's")
    me.close()
    assert names(folder) == {str(ME)}


# Sweeping


def test_a_store_that_opens_sweeps_the_dead_away_and_leaves_the_living(
    own: Own, start: Start, folder: Path
) -> None:
    own(ME)
    start(THIRD).stop()
    start(OTHER).kill()
    assert names(folder) == {str(ME), str(OTHER), str(THIRD)}
    own(44)
    assert names(folder) == {str(ME), str(THIRD), "44"}


def test_sweeping_leaves_what_is_being_born_until_it_is_dead(
    own: Own, start: Start, folder: Path
) -> None:
    me = own(ME)
    child = start(
        OTHER,
        """
def slow(old, new):
    say('born')
    live_on()
os.rename = slow
open_owners(folder, number)
""",
        head="",
        word="born",
    )
    [unborn] = names(folder) - {str(ME)}
    me.sweep()
    assert names(folder) == {str(ME), unborn}
    child.kill()
    me.sweep()
    assert names(folder) == {str(ME)}


def test_sweeping_leaves_what_is_not_ours(own: Own, folder: Path) -> None:
    me = own(ME)
    (folder / "note").touch()
    (folder / "7").mkdir()
    (folder / "8").symlink_to(folder / "note")
    me.sweep()
    assert names(folder) == {str(ME), "note", "7", "8"}
    assert me.is_alive(7) is None
    assert me.is_alive(8) is None
    for path in (folder / "8", folder / "note"):
        path.unlink()
    (folder / "7").rmdir()


def test_sweeping_leaves_a_file_that_took_the_place_of_the_one_it_opened(
    own: Own, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, other = own(ME), own(OTHER)
    path = folder / str(OTHER)
    path.unlink()
    path.touch()  # nobody's
    impostor = path.stat().st_ino

    def late(file: FileIO, how: int) -> None:
        monkeypatch.setattr(FLOCK, fcntl.flock)
        if Path(os.fsdecode(file.name)) == path:
            other.stand()
        else:
            monkeypatch.setattr(FLOCK, late)
        fcntl.flock(file, how)

    monkeypatch.setattr(FLOCK, late)
    me.sweep()
    assert path.exists()
    assert path.stat().st_ino != impostor
    assert me.is_alive(OTHER) is True


def test_sweeping_needs_no_folder(own: Own, folder: Path) -> None:
    me = own(ME)
    shutil.rmtree(folder)
    me.sweep()
    assert not folder.exists()


# Being born among others


@pytest.mark.parametrize("moment", ["has it locked", "has removed it"])
def test_one_that_is_swept_before_it_is_locked_is_born_again(
    own: Own, folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    me = own(ME)
    real = os.open
    sweepers: list[FileIO] = []
    births = 0

    def swept(path: str, flags: int, mode: int = 0o777) -> int:
        nonlocal births
        descriptor = real(path, flags, mode)
        if flags & os.O_CREAT:
            births += 1
            if births <= 3 and moment == "has removed it":
                monkeypatch.setattr(os, "open", real)
                me.sweep()
                monkeypatch.setattr(os, "open", swept)
            elif births <= 3:
                with monkeypatch.context() as patch:
                    patch.setattr(os, "open", real)
                    sweepers.append(hold(Path(path), fcntl.LOCK_EX))
        return descriptor

    monkeypatch.setattr(os, "open", swept)
    other = LockedOwners(folder, OTHER)
    monkeypatch.setattr(os, "open", real)
    try:
        assert births == 4
        assert me.is_alive(OTHER) is True
    finally:
        other.close()
        for sweeper in sweepers:
            sweeper.close()
    me.sweep()
    assert names(folder) == {str(ME)}


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(
    own: Own, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir
    made = 0

    def removed(path: str, mode: int = 0o777) -> None:
        nonlocal made
        real(path, mode)
        made += 1
        if made <= 3:
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", removed)
    own(ME)
    assert made == 4
    assert names(folder) == {str(ME)}


def test_a_folder_that_is_always_removed_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "mkdir", lambda path, mode: None)
    with pytest.raises(StorageFailed):
        open_owners(folder, ME)


def test_many_that_come_and_go_at_once_do_not_disturb_each_other(folder: Path) -> None:
    """Processes, for threads of one process take turns here."""
    script = (
        Process.HEAD
        + """
for n in range(number, number + 150):
    owners = open_owners(folder, n)
    assert type(owners) is room.LockedOwners
    with room.FileIO(folder / str(n)) as file:
        assert room._is_at(owners._file, folder / str(n))
    owners.close()
"""
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script, str(folder), str(n * 1_000)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(1, 5)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=LIMIT_S)
            assert (process.returncode, errors) == (0, "")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert not folder.exists()


# What the system refuses


@contextmanager
def a_plain_user() -> Iterator[None]:
    """Be somebody whom permissions stop, if one is not so already."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("folder_exists", [False, True])
def test_a_read_only_folder_is_a_failure_of_storage(folder_exists: bool) -> None:
    parent = Path(tempfile.mkdtemp(prefix="turnkeeper-"))  # pytest's own is private
    folder = parent / "state.db.owners"
    try:
        if folder_exists:
            folder.mkdir()
            folder.chmod(0o555)
        parent.chmod(0o555)
        with a_plain_user(), pytest.raises(StorageFailed) as caught:
            open_owners(folder, ME)
        assert folder.exists() == folder_exists
    finally:
        parent.chmod(0o700)
        if folder_exists:
            folder.chmod(0o700)
        shutil.rmtree(parent)
    assert caught.value.doing == "opening the store"
    assert str(folder) in caught.value.detail
    assert os.strerror(errno.EACCES) in caught.value.detail


def test_a_file_in_the_folders_place_is_a_failure_of_storage(folder: Path) -> None:
    folder.write_text("in the way")
    with pytest.raises(StorageFailed):
        open_owners(folder, ME)
    assert folder.read_text() == "in the way"


def test_a_missing_parent_is_a_failure_of_storage(folder: Path) -> None:
    with pytest.raises(StorageFailed):
        open_owners(folder / "deeper", ME)
    assert not folder.exists()


def test_a_failure_in_the_middle_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(old: Path, new: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(StorageFailed):
        open_owners(folder, ME)
    assert not folder.exists()


# Where there are no locks


def test_without_locks_one_knows_oneself_and_of_the_others_nothing() -> None:
    me: Owners = UnlockedOwners(ME)
    assert me.number == ME
    assert me.is_alive(ME) is True
    assert me.is_alive(OTHER) is None
    me.stand()
    me.close()
    me.close()


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_one_where_nobody_can_tell(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def unsupported(file: FileIO, how: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(FLOCK, unsupported)
    me = open_owners(folder, ME)
    assert type(me) is UnlockedOwners
    assert me.number == ME
    assert not folder.exists()


def test_a_platform_without_the_module_is_one_where_nobody_can_tell(folder: Path) -> None:
    script = """
import importlib, sys
from pathlib import Path
import turnkeeper.storage.owners as room

sys.platform = "win32"
sys.modules["fcntl"] = None
importlib.reload(room)
owners = room.open_owners(Path(sys.argv[1]), 11)
assert type(owners) is room.UnlockedOwners
"""
    command = [sys.executable, "-W", "error", "-c", script, str(folder)]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    assert not folder.exists()
