"""Which open stores still live, asked of the operating system.

Each open store holds a lock on a file of its own, named after its number, in a folder beside
the database. The system lets go of the lock when the process ends, however it ends, and not
before: a lock that can be taken belongs to nobody. No process ids: they are given to others,
and mean nothing across containers.

Locks are `flock`'s. Those of POSIX belong to the process: two stores in one could not be told
apart, and closing any descriptor of the file would drop them.

Three rules make it safe. A file gets its number only when it is locked, so a number without
one is dead from the beginning. A file is removed only by somebody who holds its lock and has
seen that it is still the file of that name. Numbers are never used twice.

The caller provides the number, calls `stand` now and then, and does not keep these files on a
network file system. What forks without Python's knowledge, and then does not exec, keeps its
parent's lock.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import sys
from contextlib import suppress
from io import FileIO
from pathlib import Path
from threading import RLock
from typing import Final, Protocol
from weakref import WeakSet

from .errors import StorageFailed

if sys.platform != "win32":
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock

    # Neither led elsewhere nor kept waiting by what is no file of ours.
    WARILY = os.O_NOFOLLOW | os.O_NONBLOCK
else:
    LOCK_EX = LOCK_NB = LOCK_SH = WARILY = 0

    def flock(_file: FileIO, _how: int, /) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


__all__ = ["LockedOwners", "Owners", "UnlockedOwners", "open_owners"]

ATTEMPTS = 100
"""How often a file is born anew when others clear away around it. A guess: one or two do."""

OURS = re.compile(r"[0-9]+|new-[0-9a-f]{16}")
"""The names that `sweep` may remove; whatever else is in the folder is somebody else's."""

UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""How a file system says that it knows no such locks."""


class Owners(Protocol):
    """Who we are, and who else lives. Everything here may wait for the disk: use a thread."""

    @property
    def number(self) -> int:
        """Our own."""

    def is_alive(self, owner: int) -> bool | None:
        """Return True if `owner` lives, False if it is dead for sure, None if nobody can tell."""

    def stand(self) -> None:
        """See to it that others find us. Raises `StorageFailed` if they cannot."""

    def close(self) -> None:
        """Be dead from now on. A second time does nothing; never raises."""


class LockedOwners:
    """Owners by file lock.

    Raises `OSError` if the file cannot be made; nothing is left behind then.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.number: Final = number
        self._folder = folder
        self._path = folder / str(number)
        with _forks.lock:
            self._file = _born(folder, self._path)

    def is_alive(self, owner: int) -> bool | None:
        """Return whether somebody holds the lock of `owner`; None if its file cannot be asked.

        May say True of a dead one, once, while another store clears its file away.
        """
        if owner == self.number and not self._file.closed:
            return True
        path = self._folder / str(owner)
        try:
            # No need to keep forks off: a shared lock that a child keeps misleads nobody.
            with FileIO(path, opener=_open_old) as file:
                # Shared, or of two that ask at once each would take the other for the owner.
                if not _take(file, exclusive=False):
                    return True
                if _is_at(file, path):
                    return False
        except FileNotFoundError:
            return False
        except OSError:  # no descriptor left, no permission: that says nothing about the owner
            return None
        return self.is_alive(owner)  # removed, or made anew by `stand`, since we opened it

    def stand(self) -> None:
        """Make our file anew if somebody has removed or replaced it; else this is one look.

        Until then the others take us for dead. Raises `StorageFailed` if it cannot be made; the
        next call tries again. Does nothing when closed.
        """
        with _forks.lock:  # also keeps `close` in another thread off
            if self._file.closed:
                return
            try:
                if not _is_at(self._file, self._path):
                    # A sweep that is about to remove what stands in our place may remove ours
                    # instead. The next call finds out.
                    lost, self._file = self._file, _born(self._folder, self._path)
                    lost.close()
            except OSError as error:
                raise _failed("holding the store's own lock", self._folder, error) from error

    def sweep(self) -> None:
        """Remove the files of the dead, also of those that died while being born.

        Never raises: what cannot be removed now is removed another time.
        """
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(self._folder)
        for name in filter(OURS.fullmatch, names):
            with suppress(OSError), _forks.lock:
                _bury(self._folder / name)

    def close(self) -> None:
        """Remove our file, let go of the lock, and remove the folder if we are the last."""
        with _forks.lock:
            if self._file.closed:  # by us before, or because this is a forked child
                return
            with suppress(OSError):
                if _is_at(self._file, self._path):
                    os.unlink(self._path)
            with suppress(OSError):
                self._file.close()
        with suppress(OSError):
            os.rmdir(self._folder)


class UnlockedOwners:
    """Owners where there are no such locks: of the others nobody can tell.

    One that has locks takes one of these for dead, so all stores of a file must have them or none.
    That holds by itself: they are on one machine and one file system.
    """

    def __init__(self, number: int) -> None:
        self.number: Final = number

    def is_alive(self, owner: int) -> bool | None:
        """Return True for ourselves and None for anybody else."""
        return True if owner == self.number else None

    def stand(self) -> None:
        """Do nothing: there is nothing to find."""

    def close(self) -> None:
        """Do nothing: nothing is held."""


def open_owners(folder: Path, number: int) -> Owners:
    """Return the best owners that there are in `folder`, ourselves alive, the dead swept away.

    `folder` is made if it is missing, its parent is not. `number` must never have been used.
    Raises `StorageFailed` if the system does not let us make our file.
    """
    try:
        owners = LockedOwners(folder, number)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return UnlockedOwners(number)
        raise _failed("opening the store", folder, error) from error
    try:
        owners.sweep()
    except BaseException:  # Ctrl-C
        owners.close()
        raise
    return owners


def _failed(doing: str, folder: Path, error: OSError) -> StorageFailed:
    return StorageFailed(doing, f"{str(folder)!r}: {error.strerror or error}")


class _Forks:
    """Sees to it that a forked child holds no lock of ours.

    A child has all descriptors of its parent, and a lock lasts until the last copy is closed:
    the parent could die and still look alive. So the child closes its copies, which leaves the
    parent's lock as it is. (Unlocking through a copy would not.)

    Whoever opens a file that it will lock holds `lock` until the file is in `files` or closed
    again; a fork in another thread waits for that, or the child would get a descriptor that
    nobody knows of. Reentrant, for a signal handler that forks.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.files: WeakSet[FileIO] = WeakSet()

    def before(self) -> None:
        self.lock.acquire()

    def in_parent(self) -> None:
        self.lock.release()

    def in_child(self) -> None:
        self.lock = RLock()
        for file in list(self.files):
            with suppress(OSError):
                file.close()
        self.files.clear()


_forks = _Forks()
"""The only thing here that is global to the process, for so is a fork: Python's hooks cannot be
taken back, and one a store would keep every store for ever. It knows the files weakly: one that
is forgotten unclosed is closed by Python, with a warning, and its owner is dead."""

if sys.platform != "win32":
    os.register_at_fork(
        before=_forks.before,
        after_in_parent=_forks.in_parent,
        after_in_child=_forks.in_child,
    )


def _born(folder: Path, path: Path) -> FileIO:
    """Return a new file at `path` that nobody has ever seen there unlocked."""
    try:
        for _ in range(ATTEMPTS):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            file = _born_once(folder / f"new-{secrets.token_hex(8)}", path)
            if file is not None:
                return file
    except BaseException:
        with suppress(OSError):
            folder.rmdir()
        raise
    raise FileNotFoundError(errno.ENOENT, "what is made there is removed at once")


def _born_once(unborn: Path, path: Path) -> FileIO | None:
    """Make the file as `unborn` and give it its name; None if somebody cleared it away."""
    try:
        file = FileIO(unborn, "x", opener=_open_new)
    except FileNotFoundError:  # the last one to close has just removed the folder
        return None
    try:
        _forks.files.add(file)
        # Until it is locked, a sweep may take it for a leftover. The sweep then has the lock,
        # or has removed the name.
        if _take(file, exclusive=True):
            os.rename(unborn, path)
            return file
        file.close()
    except BaseException as error:
        file.close()
        with suppress(OSError):
            os.unlink(unborn)
        if not isinstance(error, FileNotFoundError):
            raise
    return None


def _bury(path: Path) -> None:
    """Remove the file at `path` if nobody holds its lock."""
    with FileIO(path, opener=_open_old) as file:
        if _take(file, exclusive=True) and _is_at(file, path):
            os.unlink(path)


def _take(file: FileIO, *, exclusive: bool) -> bool:
    """Lock `file`; return False if somebody else's lock is in the way. Never waits."""
    try:
        flock(file, (LOCK_EX if exclusive else LOCK_SH) | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: FileIO, path: Path) -> bool:
    """Return whether `path` is the name of this very file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _open_new(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # FileIO adds O_EXCL for "x", and always O_CLOEXEC


def _open_old(path: str, flags: int) -> int:
    return os.open(path, flags | WARILY)
