"""A test's side of several processes on one file: start them, tell them, signal them, end them.

Everything that waits has a limit, and whatever a process said on stderr is shown when it is late.
A process that was started is gone when the fixture ends, however the test did.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import apsw

__all__ = ["LIMIT_S", "Fleet", "TooLate", "Worker", "until"]

LIMIT_S = 30.0
"""For whatever has no limit of its own. Reached only by a failure."""

LOOK_S = 0.005
"""Between two looks at what tells nobody that it has changed."""

Told: TypeAlias = dict[str, Any]  # JSON, of whatever shape the command has


def until(condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until `condition` holds; it is not so for long, or the test fails."""
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up, f"{what}: not in {limit_s:g} s"
        time.sleep(LOOK_S)


class TooLate(AssertionError):
    """A process did not say in time what it was to say."""


class Worker:
    """A process of `processes.worker`."""

    def __init__(self, path: Path, errors: Path, options: Told) -> None:
        self._errors = errors
        with open(errors, "wb") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "processes.worker", str(path), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
                bufsize=0,
            )
        self.opened_in_s = 0.0
        """How long it took to open the store."""
        self._number = 0
        self._buffer = b""
        self._answers: dict[int, Told] = {}
        self._events: deque[Told] = deque()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def tell(self, do: str, /, **arguments: object) -> int:
        """Give a command; return its number, to ask for the answer."""
        self._number += 1
        command = {"number": self._number, "do": do, "arguments": arguments}
        assert self.popen.stdin is not None
        self.popen.stdin.write((json.dumps(command) + "\n").encode())
        return self._number

    def answer(self, number: int, limit_s: float = LIMIT_S) -> Told:
        """Return the answer to a command: its `start` and `end`, a `result` or an `error`."""
        give_up = time.monotonic() + limit_s
        while number not in self._answers:
            self._hear(give_up, f"the answer to command {number}")
        return self._answers.pop(number)

    def do(self, do: str, /, **arguments: object) -> Any:  # JSON
        """Do something that succeeds; return the result."""
        return self.result(self.tell(do, **arguments))

    def result(self, number: int) -> Any:  # JSON
        """Return the result of a command that succeeds."""
        answer = self.answer(number)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def error(self, number: int) -> Told:
        """Return the error of a command that is refused or fails."""
        answer = self.answer(number)
        assert "error" in answer, answer
        error: Told = answer["error"]
        return error

    def refused(self, do: str, /, **arguments: object) -> Told:
        """Do something that is refused or fails; return the error."""
        return self.error(self.tell(do, **arguments))

    def event(self, name: str, limit_s: float = LIMIT_S, **facts: object) -> Told:
        """Return the next event of that name (and those facts); forget the ones before it."""
        give_up = time.monotonic() + limit_s
        while True:
            while self._events:
                event = self._events.popleft()
                if event["event"] == name and facts.items() <= event.items():
                    return event
            self._hear(give_up, f"the event {name!r}")

    def forget_events(self) -> None:
        """Forget all that it has said so far that nobody asked for."""
        assert self.popen.stdout is not None
        while select.select([self.popen.stdout], [], [], 0)[0]:
            self._hear(time.monotonic() + LIMIT_S, "what it has said")
        self._events.clear()

    def stop(self) -> None:
        """Let the system stop it, as a laptop's lid does."""
        self.popen.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def go_on(self) -> None:
        """Let it go on."""
        self.popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash does; its word stands as far as it was said."""
        self.popen.kill()
        assert self.popen.wait(LIMIT_S) == -signal.SIGKILL

    def interrupt(self) -> int:
        """Press Ctrl-C; return the exit status."""
        self.popen.send_signal(signal.SIGINT)
        return self.popen.wait(LIMIT_S)

    def finish(self) -> None:
        """Let it close its store and end."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        assert self.popen.wait(LIMIT_S) == 0, self.complaints()

    def end(self) -> None:
        """Let nothing of it be left."""
        if self.popen.poll() is None:
            self.popen.kill()  # ends one that is stopped as well
            self.popen.wait(LIMIT_S)
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()

    def _hear(self, give_up: float, what: str) -> None:
        """Read what the process says next."""
        assert self.popen.stdout is not None
        file = self.popen.stdout.fileno()
        ready, _, _ = select.select([file], [], [], max(0.0, give_up - time.monotonic()))
        if not ready:
            raise TooLate(f"{what} did not come in time; its stderr: {self.complaints()}")
        chunk = os.read(file, 1 << 16)
        assert chunk, (
            f"{what} will not come: the process has ended; its stderr: {self.complaints()}"
        )
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "event" in told:
                self._events.append(told)
            else:
                self._answers[told["number"]] = told

    def complaints(self) -> str:
        """The end of what it wrote to stderr."""
        return self._errors.read_text()[-2_000:]


class Fleet:
    """The processes of one test, all on one file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "state.db"
        self.owners = folder / "state.db.owners"
        self._workers: list[Worker] = []

    def start(self, number: int = 1, **options: object) -> list[Worker]:
        """Start so many processes at once and wait until each has the store open."""
        new = []
        for _ in range(number):
            errors = self._folder / f"stderr-{len(self._workers)}"
            new.append(Worker(self.path, errors, options))
            self._workers.append(new[-1])
        for worker in new:
            worker.opened_in_s = worker.event("ready")["took_s"]
        return new

    def one(self, **options: object) -> Worker:
        """Start one process."""
        return self.start(1, **options)[0]

    def rows(self, query: str, *values: int | str) -> list[tuple[Any, ...]]:  # what SQL gives
        """Ask the file itself, without disturbing anybody."""
        with closing(apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READONLY)) as file:
            file.set_busy_timeout(1_000)
            return file.execute(query, values).fetchall()

    def owner_files(self) -> set[str]:
        """The names of the stores that say that they are open."""
        return {file.name for file in self.owners.iterdir()} if self.owners.exists() else set()

    def end(self) -> None:
        for worker in self._workers:
            worker.end()


@contextmanager
def fleet_in(folder: Path) -> Iterator[Fleet]:
    """A fleet that is gone in the end."""
    fleet = Fleet(folder)
    try:
        yield fleet
    finally:
        fleet.end()


__all__ += ["fleet_in"]
