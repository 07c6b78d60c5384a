"""The bot as a person meets it: a process with a pipe or a terminal at its ends, killed at will."""

from __future__ import annotations

import json
import os
import platform
import pty
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
import trio
from support import A, U

from turnkeeper.actors import Handler, InboxMessage, Session, Turn, open_sessions

BOT = Path(__file__).parents[2] / "examples" / "bot.py"

LIMIT_S = 60
"""How long anything may take before a test gives up: far more than it needs."""

NOT_PASSED_ON = ("OPENAI_", "TURNKEEPER_", "HTTP_", "HTTPS_", "ALL_", "NO_PROXY", "PYTHON")


class Bot:
    """A running bot. Development mode makes it tell of whatever it leaves open."""

    def __init__(self, folder: Path, environ: dict[str, str], *, terminal: bool = False) -> None:
        command = [sys.executable, "-X", "dev", str(BOT)]
        kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(NOT_PASSED_ON)}
        self._shown = b""
        self._keyboard, self._screen = -1, -1
        self._ours: int | None = None
        stdin, stdout = subprocess.PIPE, subprocess.PIPE
        if terminal:
            self._keyboard, self._ours = pty.openpty()
            self._screen = self._keyboard
            # A session leader's first terminal becomes the one whose Ctrl-C it gets.
            name = os.ttyname(self._ours)
            command = ["/bin/sh", "-c", 'exec "$@" <"$0" >"$0"', name, *command]
            stdin, stdout = subprocess.DEVNULL, subprocess.DEVNULL
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**kept, "PYTHONUTF8": "1", **environ},
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            start_new_session=terminal,
        )
        if self.process.stdin is not None and self.process.stdout is not None:
            self._keyboard = self.process.stdin.fileno()
            self._screen = self.process.stdout.fileno()

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def expect(self, text: str) -> str:
        """Wait until `text` is shown; return what was shown up to its end, and forget it."""
        wanted = text.encode()
        while wanted not in self._shown:
            assert self._read(), f"it ended without showing {text!r}: {self._shown.decode()}"
        before, _, self._shown = self._shown.partition(wanted)
        return (before + wanted).decode()

    def leave(self) -> int:
        """Wait until it has ended; return its exit code. It must not have complained."""
        code, complaint = self.ended()
        assert complaint == ""
        return code

    def ended(self) -> tuple[int, str]:
        while self._read():
            pass
        assert self.process.stderr is not None
        complaint = self.process.stderr.read().decode()
        return self.process.wait(LIMIT_S), complaint

    @property
    def rest(self) -> str:
        return self._shown.decode()

    def end_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def clean_up(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        if self.process.stdin is None:
            os.close(self._keyboard)
        if self._ours is not None:
            os.close(self._ours)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._screen], [], [], LIMIT_S)
        assert ready, f"nothing more came; shown was: {self._shown.decode()}"
        try:
            piece = os.read(self._screen, 65536)
        except OSError:  # how a terminal ends
            return False
        if self._ours is not None:  # held until the bot has the terminal open as well
            os.close(self._ours)
            self._ours = None
        self._shown += piece
        return bool(piece)


StartBot = Callable[..., Bot]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartBot]:
    bots: list[Bot] = []

    def starts(*, terminal: bool = False, **environ: str) -> Bot:
        bots.append(Bot(tmp_path, environ, terminal=terminal))
        return bots[-1]

    yield starts
    for bot in bots:
        bot.clean_up()


def piped(folder: Path, lines: str | bytes, **environ: str) -> list[str]:
    """Give the bot these lines all at once; return the lines it showed after its first."""
    bot = Bot(folder, environ)
    try:
        os.write(bot._keyboard, lines.encode() if isinstance(lines, str) else lines)
        bot.end_input()
        assert bot.leave() == 0
        assert sorted(os.listdir(folder)) == ["state.db"]
        assert "\x1b" not in bot.rest
        first, *others = bot.rest.split("\n")
        assert first.startswith("state.db: ")
        return others[:-1]
    finally:
        bot.clean_up()


def stored(path: Path, session: str = "main") -> list[dict[str, object]]:
    async def read() -> list[dict[str, object]]:
        async with open_sessions(path) as sessions:
            return (await sessions[session].transcript()).bodies

    return trio.run(read)


# ---- lines from a pipe


def test_lines_from_a_pipe_are_answered_once_each_and_without_a_prompt(tmp_path: Path) -> None:
    shown = piped(tmp_path, "my name is Ada\n\n  \nwho am I?\ncount to 3\n")
    assert shown == ["Pleased to meet you, Ada.", "You are Ada.", "1 2 3"]
    assert stored(tmp_path / "state.db") == [
        U("my name is Ada"),
        A("Pleased to meet you, Ada."),
        U("who am I?"),
        A("You are Ada."),
        U("count to 3"),
        A("1 2 3"),
    ]


def test_a_last_line_without_an_end_counts(tmp_path: Path) -> None:
    assert piped(tmp_path, "count to 2\r\ncount to 3") == ["1 2", "1 2 3"]
    assert stored(tmp_path / "state.db")[0] == U("count to 2")


def test_lines_hold_any_text_and_bytes_that_are_none_do_not_kill_it(tmp_path: Path) -> None:
    line = "count to 1 \u2028 \x85 مرحبا 🙂 \x00 "
    shown = piped(tmp_path, line.encode() + b"\xff\xc3\n/history\n")
    assert shown[0] == "1"
    assert shown[1].startswith("1. user: count to 1 ")
    assert stored(tmp_path / "state.db") == [U(f"{line}\ufffd\ufffd"), A("1")]


def test_control_codes_in_what_was_said_do_not_reach_the_terminal(tmp_path: Path) -> None:
    shown = piped(tmp_path, "\x1b[31mred\x07\nwhat did I say\n")
    assert shown[1] == "You said: [31mred"
    assert stored(tmp_path / "state.db")[0] == U("\x1b[31mred\x07")


@pytest.mark.parametrize("kind", ["file", "nothing", "closed"])
def test_input_that_cannot_be_waited_for_is_read_to_its_end(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "lines"
    source.write_text("count to 3\n" * 3)
    bot = [sys.executable, "-X", "dev", str(BOT)]
    redirect = {"file": '<"$0"', "nothing": "</dev/null", "closed": "<&-"}[kind]
    ran = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirect}', str(source), *bot],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split("\n")[1:-1] == (["1 2 3"] * 3 if kind == "file" else [])
    assert sorted(os.listdir(tmp_path)) == ["lines", "state.db"]


def test_it_leaves_when_nobody_reads_it_any_more(start: StartBot, tmp_path: Path) -> None:
    bot = start()
    bot.expect("state.db: 0 messages")
    assert bot.process.stdout is not None
    bot._screen = os.open(os.devnull, os.O_RDONLY)
    bot.process.stdout.close()
    bot.type("count to 3\nhello\n")  # and its input stays open
    assert bot.process.wait(LIMIT_S) == 0
    os.close(bot._screen)
    assert bot.process.stderr is not None
    assert bot.process.stderr.read() == b""
    assert os.listdir(tmp_path) == ["state.db"]
    assert stored(tmp_path / "state.db") == [U("count to 3"), A("1 2 3")]


# ---- the store


def test_the_store_is_where_the_environment_says(tmp_path: Path, start: StartBot) -> None:
    (tmp_path / "sub").mkdir()
    bot = start(TURNKEEPER_DB="sub/other.db")
    bot.expect("sub/other.db: 0 messages in main")
    bot.type("count to 3\n")
    bot.end_input()
    assert bot.leave() == 0
    assert os.listdir(tmp_path) == ["sub"]
    assert os.listdir(tmp_path / "sub") == ["other.db"]


def test_a_store_that_cannot_be_opened_is_named_and_left_as_it_is(
    tmp_path: Path, start: StartBot
) -> None:
    (tmp_path / "state.db").write_bytes(b"garbage")
    code, complaint = start().ended()
    assert code == 1
    assert complaint.startswith("bot: opening ")
    assert complaint.count("\n") == 1
    assert "state.db' (it is not an SQLite database)" in complaint
    assert (tmp_path / "state.db").read_bytes() == b"garbage"


def test_killed_at_the_prompt_it_goes_on_where_it_was(start: StartBot, tmp_path: Path) -> None:
    bot = start()
    bot.type("my name is Ada\n/fork other\nwho am I?\ncount to 3\n")
    bot.expect("1 2 3\n")
    bot.type("/history\n")  # answered when the answer before it is stored
    bot.expect("1 2 3\n")
    bot.process.kill()
    assert bot.process.wait(LIMIT_S) == -signal.SIGKILL

    again = start()
    again.expect("state.db: 6 messages in other.")
    again.type("who am I?\n/undo\n/undo\n/undo\nwho am I?\n")
    again.expect("You are Ada.\n")
    again.expect("You are Ada.\n")
    again.end_input()
    assert again.leave() == 0
    assert os.listdir(tmp_path) == ["state.db"]
    assert stored(tmp_path / "state.db") == [U("my name is Ada"), A("Pleased to meet you, Ada.")]


# ---- commands


def test_the_commands_do_what_help_says(tmp_path: Path) -> None:
    shown = piped(
        tmp_path,
        "/retry\n/undo\n/redo\n/history\ncount to 2\ncount to 3\n/undo 2\n/redo\n/retry\n/history\n",
    )
    assert shown == [
        "No previous message to retry.",
        "Nothing to undo.",
        "Nothing to redo.",
        "Nothing has been said yet.",
        "1 2",
        "1 2 3",
        "Undid 2 turns (4 messages). You had said:",
        "count to 2",
        "Redone: the conversation has 4 messages again.",
        "1 2 3",
        "1. user: count to 2",
        "2. assistant: 1 2",
        "3. user: count to 3",
        "4. assistant: 1 2 3",
    ]


def test_help_names_every_command_and_quit_leaves(tmp_path: Path) -> None:
    shown = piped(tmp_path, "/help\n/quit\ncount to 3\n")
    for command in ("help", "retry", "undo [n]", "redo", "history", "fork NAME", "switch NAME"):
        assert sum(line.startswith(f"/{command} ") for line in shown) == 1
    assert sum(line.startswith(("/sessions ", "/quit ")) for line in shown) == 2
    assert "1 2 3" not in shown


def test_a_fork_is_gone_to_and_left_again(tmp_path: Path) -> None:
    shown = piped(
        tmp_path,
        "count to 2\n/fork plan b\ncount to 3\n/sessions\n/switch main\n/sessions\n/fork plan b\n"
        "/history\n/switch zoo\n/sessions\n",
    )
    assert shown == [
        "1 2",
        "Forked to plan b after 2 messages.",
        "1 2 3",
        "  2 messages in main",
        "* 4 messages in plan b",
        "2 messages in main",
        "* 2 messages in main",
        "  4 messages in plan b",
        "Cannot fork: id: session 'plan b' exists already",
        "1. user: count to 2",
        "2. assistant: 1 2",
        "0 messages in zoo",
        "* 0 messages in zoo",
        "  2 messages in main",
        "  4 messages in plan b",
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/undu", "I do not understand '/undu'"),
        ("/undo many", "/undo needs a number, or nothing."),
        (f"/undo {'9' * 5000}", "/undo needs a number, or nothing."),
        ("/undo -1", "/undo needs a number, or nothing."),
        ("/undo 0", "Cannot undo: "),
        ("/retry it", "I do not understand '/retry it'"),
        ("/fork", "/fork needs a NAME."),
        ("/switch", "/switch needs a NAME."),
        ("/fork a\0b", "id: "),
        ("/switch " + "x" * 2000, "id: "),
        ("/switch \x00", "id: "),
    ],
)
def test_a_command_that_makes_no_sense_is_not_sent_to_the_model(
    tmp_path: Path, line: str, told: str
) -> None:
    shown = piped(tmp_path, f"{line}\n/history\n")
    assert shown[0].startswith(told)
    assert shown[1:] == ["Nothing has been said yet."]


# ---- a person at a terminal


def test_a_person_is_prompted_and_leaves_with_the_end_of_input(
    start: StartBot, tmp_path: Path
) -> None:
    bot = start(terminal=True)
    bot.expect("state.db: 0 messages in main. /help lists the commands.\r\nmain> ")
    bot.type("count to 3\n")
    assert bot.expect("main> ") == "count to 3\r\n1 2 3\r\nmain> "
    bot.type("/retry\n")
    assert bot.expect("main> ") == "/retry\r\n1 2 3\r\nmain> "
    bot.type("/fork b\n")
    bot.expect("\r\nb> ")
    bot.type("\x04")
    assert bot.leave() == 0
    assert bot.rest == "\r\n"
    assert os.listdir(tmp_path) == ["state.db"]


def test_ctrl_c_stops_the_answer_and_at_the_prompt_it_leaves(
    start: StartBot, tmp_path: Path
) -> None:
    bot = start(terminal=True)
    bot.expect("main> ")
    bot.type("count to 1000\n")
    bot.expect("\n1 2 3 ")
    bot.type("\x03")
    stopped = bot.expect("main> ")
    assert stopped.endswith(
        "\r\nNo answer: it was stopped. The question is kept; /retry asks it again.\r\nmain> "
    )
    bot.type("/history\n")
    assert bot.expect("main> ") == "/history\r\n1. user: count to 1000\r\nmain> "
    bot.type("/retry\n")
    bot.expect("\n1 2 3 ")
    bot.type("\x03")
    bot.expect("it was stopped")
    bot.expect("main> ")
    bot.type("count to 3\n")
    bot.expect("1 2 3\r\nmain> ")
    bot.type("half a li\x03")
    assert bot.leave() == 130
    assert os.listdir(tmp_path) == ["state.db"]
    assert stored(tmp_path / "state.db") == [U("count to 1000"), U("count to 3"), A("1 2 3")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_cleanly_where_no_answer_is_on_its_way(
    start: StartBot, tmp_path: Path, number: signal.Signals
) -> None:
    bot = start()
    bot.type("count to 3\n/history\n")
    bot.expect("2. assistant: 1 2 3\n")
    bot.process.send_signal(number)
    assert bot.leave() == 128 + number
    assert os.listdir(tmp_path) == ["state.db"]


# ---- an endpoint


class Endpoint:
    """A server on this machine that answers each request with the next of its plays."""

    def __init__(self) -> None:
        self.plays: list[Play] = []
        self.asked: list[dict[str, object]] = []
        self.keys: list[str | None] = []
        self.go_on = Event()
        """Plays that stop in the middle wait for it."""
        self.url = ""


class Answering(BaseHTTPRequestHandler):
    endpoint: Endpoint
    wbufsize = 0

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.endpoint.asked.append(json.loads(self.rfile.read(length)))
        self.endpoint.keys.append(self.headers["Authorization"])
        assert self.path == "/v1/chat/completions"
        self.close_connection = True
        self.endpoint.plays.pop(0)(self)

    def begin(self, status: int = 200, kind: str = "text/event-stream") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.end_headers()

    def piece(self, text: str, finish: str | None = None) -> None:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
        self.raw(f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n")

    def raw(self, text: str) -> None:
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


Play = Callable[[Answering], None]


def whole(*pieces: str) -> Play:
    def play(to: Answering) -> None:
        to.begin()
        to.raw(': a comment\n\nevent: x\ndata: {"choices": []}\n\n')
        for piece in pieces:
            to.piece(piece)
        to.raw("data: [DONE]\n\n")

    return play


def refused(status: int, body: str, kind: str = "application/json") -> Play:
    def play(to: Answering) -> None:
        to.begin(status, kind)
        to.raw(body)

    return play


def streamed(*raws: str, then: str = "end") -> Play:
    """Say "Half", then these raw lines; then end the stream, cut it, or say no more."""

    def play(to: Answering) -> None:
        to.send_response(200)
        to.send_header("Content-Type", "text/event-stream")
        if then == "cut":  # fewer bytes than promised
            to.send_header("Content-Length", "100000")
        to.end_headers()
        to.piece("Half")
        for raw in raws:
            to.raw(raw)
        if then == "stall":
            to.endpoint.go_on.wait(LIMIT_S)

    return play


def silent(to: Answering) -> None:
    to.endpoint.go_on.wait(LIMIT_S)


class Server(ThreadingHTTPServer):
    daemon_threads = False  # closing waits for them

    def handle_error(self, *_: object) -> None:
        """A client that left in the middle is no fault of ours."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    server = Server(("127.0.0.1", 0), type("Handler", (Answering,), {"endpoint": endpoint}))
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield endpoint
    endpoint.go_on.set()
    server.shutdown()
    thread.join(LIMIT_S)
    server.server_close()


def test_an_endpoint_is_asked_with_the_whole_conversation(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    endpoint.plays = [whole("Hel", "lo\u2028 ", "🙂"), whole("Good", "bye")]
    environ = {
        "OPENAI_BASE_URL": endpoint.url,
        "OPENAI_API_KEY": "sk-test",
        "OPENAI_MODEL": "small",
    }
    assert piped(tmp_path, "hi\nbye\n", **environ) == ["Hello\u2028 🙂", "Goodbye"]
    first = [U("hi")]
    second = [*first, A("Hello\u2028 🙂"), U("bye")]
    assert endpoint.asked == [
        {"model": "small", "messages": messages, "stream": True} for messages in (first, second)
    ]
    assert endpoint.keys == ["Bearer sk-test"] * 2
    assert stored(tmp_path / "state.db") == [*second, A("Goodbye")]


def test_a_retry_through_an_endpoint_shows_its_answer_once(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    endpoint.plays = [whole("one"), whole("two")]
    shown = piped(tmp_path, "hi\n/retry\n", OPENAI_BASE_URL=f"{endpoint.url}/")
    assert shown == ["one", "two"]
    assert endpoint.asked[0] == endpoint.asked[1]
    assert endpoint.keys == [None, None]
    assert stored(tmp_path / "state.db") == [U("hi"), A("two")]


def test_an_answer_that_says_it_is_finished_needs_no_last_event(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    def play(to: Answering) -> None:
        to.begin()
        to.piece("Done.", finish="stop")
        to.endpoint.go_on.wait(LIMIT_S)

    endpoint.plays = [play]
    assert piped(tmp_path, "hi\n", OPENAI_BASE_URL=endpoint.url) == ["Done."]


def test_an_answer_is_shown_as_it_comes(start: StartBot, endpoint: Endpoint) -> None:
    def play(to: Answering) -> None:
        to.begin()
        to.piece("Hel")
        assert to.endpoint.go_on.wait(LIMIT_S)
        to.piece("lo")
        to.raw("data: [DONE]\n\n")

    endpoint.plays = [play]
    bot = start(OPENAI_BASE_URL=endpoint.url)
    bot.type("hi\n")
    bot.expect("\nHel")
    endpoint.go_on.set()
    bot.expect("lo\n")
    bot.end_input()
    assert bot.leave() == 0


FAILURES: dict[str, tuple[Play, str]] = {
    "401": (
        refused(401, '{"error": {"message": "Incorrect API key"}}'),
        "the endpoint says 401 Unauthorized: Incorrect API key.",
    ),
    "500": (refused(500, ""), "the endpoint says 500 Internal Server Error."),
    "502": (
        refused(502, "<html>\n<h1>Bad\xff</h1>", "text/html"),
        "the endpoint says 502 Bad Gateway: <html> <h1>Bad\xff</h1>.",
    ),
    "redirected": (refused(307, ""), "the endpoint says 307 Temporary Redirect."),
    "no stream": (
        refused(200, "<html>hello</html>", "text/html"),
        "the endpoint stopped before its answer was whole.",
    ),
    "empty": (whole(), "the endpoint sent an empty answer."),
    "no JSON": (streamed("data: {half\n\n"), "the endpoint sent something that is not JSON."),
    "too deep": (
        streamed(f"data: {'[' * 200_000}\n\n"),
        "the endpoint sent something that is not JSON.",
    ),
    "failed later": (
        streamed('data: {"error": {"message": "overloaded"}}\n\n'),
        "the endpoint says: overloaded.",
    ),
    "other shapes": (
        streamed('data: []\n\ndata: {"choices": [{"delta": null}]}\n\ndata: {"choices": 3}\n\n'),
        "the endpoint stopped before its answer was whole.",
    ),
    "ended early": (streamed(), "the endpoint stopped before its answer was whole."),
    "cut": (streamed(then="cut"), "the endpoint failed: peer closed connection"),
    "stalled": (streamed(then="stall"), "the endpoint sent nothing for 0.5 s."),
    "silent": (silent, "the endpoint sent nothing for 0.5 s."),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_endpoint_leaves_the_question_and_nothing_half(
    tmp_path: Path, endpoint: Endpoint, failure: str
) -> None:
    play, told = FAILURES[failure]
    endpoint.plays = [play, play, whole("At last.")]
    quick = "0.5" if failure in ("stalled", "silent") else "60"
    shown = piped(
        tmp_path,
        "hi\n/history\n/retry\n/history\n/retry\n",
        OPENAI_BASE_URL=endpoint.url,
        OPENAI_TIMEOUT=quick,
    )
    half = [line for line in shown if line == "Half"]
    lines = [line for line in shown if line != "Half"]
    assert len(half) in (0, 2)
    assert len(lines) == 5
    assert lines[0].startswith(f"No answer: {told}")
    assert lines[0].endswith(". The question is kept; /retry asks it again.")
    assert lines == [lines[0], "1. user: hi", lines[0], "1. user: hi", "At last."]
    assert stored(tmp_path / "state.db") == [U("hi"), A("At last.")]


def test_an_endpoint_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        shown = piped(tmp_path, "hi\n", OPENAI_BASE_URL=url)
    assert len(shown) == 1
    assert shown[0].startswith("No answer: the endpoint failed: ")
    assert piped(tmp_path, "/retry\n") != []
    assert stored(tmp_path / "state.db")[0] == U("hi")
    assert len(stored(tmp_path / "state.db")) == 2


@pytest.mark.parametrize(
    "url", ["localhost:1/v1", "http://localhost:door", "http://\x01/", "nothing"]
)
def test_an_address_that_is_none_ends_the_turn_only(tmp_path: Path, url: str) -> None:
    shown = piped(tmp_path, "hi\n/history\n", OPENAI_BASE_URL=url)
    assert shown[0].startswith("No answer: the endpoint failed: ")
    assert shown[1:] == ["1. user: hi"]


def test_ctrl_c_leaves_an_endpoint_that_is_silent_and_the_next_line_is_read(
    start: StartBot, tmp_path: Path, endpoint: Endpoint
) -> None:
    endpoint.plays = [streamed(then="stall"), whole("Here.")]
    bot = start(OPENAI_BASE_URL=endpoint.url)
    bot.type("hi\nyou?\n")
    bot.expect("\nHalf")
    bot.process.send_signal(signal.SIGINT)
    assert bot.expect("Here.\n") == (
        "\nNo answer: it was stopped. The question is kept; /retry asks it again.\nHere.\n"
    )
    bot.end_input()
    assert bot.leave() == 0
    assert stored(tmp_path / "state.db") == [U("hi"), U("you?"), A("Here.")]


def test_a_signal_to_end_it_ends_it_in_the_middle_of_an_answer(
    start: StartBot, tmp_path: Path, endpoint: Endpoint
) -> None:
    endpoint.plays = [streamed(then="stall")]
    bot = start(OPENAI_BASE_URL=endpoint.url)
    bot.type("hi\n")
    bot.expect("\nHalf")
    bot.process.terminate()
    assert bot.leave() == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == ["state.db"]
    assert stored(tmp_path / "state.db") == [U("hi")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_in_the_middle_of_an_answer_it_answers_the_question_when_it_starts_again(
    start: StartBot, tmp_path: Path, endpoint: Endpoint, number: signal.Signals
) -> None:
    endpoint.plays = [streamed(then="stall"), whole("At last."), whole("And you?")]
    bot = start(OPENAI_BASE_URL=endpoint.url)
    bot.type("hi\n")
    bot.expect("\nHalf")
    bot.process.send_signal(number)
    assert bot.process.wait(LIMIT_S) == (-number if number == signal.SIGKILL else 128 + number)
    again = start(OPENAI_BASE_URL=endpoint.url)
    again.expect("state.db: 1 message in main. /help lists the commands.\n")
    again.type("bye\n")
    again.end_input()
    assert again.leave() == 0
    assert again.rest == (
        "A question was left without an answer; here it comes:\nhi\nAt last.\nAnd you?\n"
    )
    assert endpoint.asked[0] == endpoint.asked[1]
    assert stored(tmp_path / "state.db") == [U("hi"), A("At last."), U("bye"), A("And you?")]
    assert os.listdir(tmp_path) == ["state.db"]


def test_of_several_that_were_left_each_answer_is_shown(tmp_path: Path) -> None:
    async def leave_some() -> None:
        async with open_sessions(tmp_path / "state.db") as sessions:
            for number in range(2, 8):
                await sessions["main"].post(U(f"count to {number}"))

    trio.run(leave_some)
    shown = piped(tmp_path, "count to 8\n")
    for number in range(2, 8):
        assert shown[3 * number - 6 : 3 * number - 3] == [
            "A question was left without an answer; here it comes:",
            f"count to {number}",
            " ".join(map(str, range(1, number + 1))),
        ]
    assert shown[18:] == ["1 2 3 4 5 6 7 8"]


def test_a_question_that_was_stopped_is_not_asked_again_by_itself(
    start: StartBot, tmp_path: Path, endpoint: Endpoint
) -> None:
    endpoint.plays = [streamed(then="stall"), whole("At last.")]
    bot = start(OPENAI_BASE_URL=endpoint.url)
    bot.type("hi\n")
    bot.expect("\nHalf")
    bot.process.send_signal(signal.SIGINT)
    bot.expect("it was stopped")
    bot.end_input()
    assert bot.leave() == 0
    told = "The last question has no answer. /retry asks it again."
    shown = piped(tmp_path, "/retry\n", OPENAI_BASE_URL=endpoint.url)
    assert shown == [told, "At last."]
    assert stored(tmp_path / "state.db") == [U("hi"), A("At last.")]


def test_ctrl_c_stops_the_answer_to_what_was_left_as_well(
    start: StartBot, tmp_path: Path, endpoint: Endpoint
) -> None:
    endpoint.plays = [streamed(then="stall"), streamed(then="stall")]
    bot = start(OPENAI_BASE_URL=endpoint.url)
    bot.type("hi\n")
    bot.expect("\nHalf")
    bot.process.kill()
    bot.process.wait(LIMIT_S)
    again = start(terminal=True, OPENAI_BASE_URL=endpoint.url)
    again.expect("\nHalf")
    again.type("\x03")
    again.expect("No answer: it was stopped. The question is kept; /retry asks it again.\r\nmain> ")
    again.type("\x04")
    assert again.leave() == 0
    assert stored(tmp_path / "state.db") == [U("hi")]


# ---- two on one file


def test_two_on_one_file_talk_in_two_sessions_at_the_same_time(
    start: StartBot, tmp_path: Path
) -> None:
    one, two = start(), start()
    for bot in (one, two):
        bot.expect("/help lists the commands.\n")
    two.type("/switch other\n")
    two.expect("0 messages in other\n")
    for number in range(2, 8):
        one.type(f"count to {number}\n")
        two.type(f"count to {number + 10}\n")
    for number in range(2, 8):
        assert one.expect("\n") == " ".join(map(str, range(1, number + 1))) + "\n"
        assert two.expect("\n") == " ".join(map(str, range(1, number + 11))) + "\n"
    for bot in (one, two):
        bot.end_input()
        assert bot.leave() == 0
        assert bot.rest == ""
    assert os.listdir(tmp_path) == ["state.db"]
    for session in ("main", "other"):
        assert len(stored(tmp_path / "state.db", session)) == 12


def test_two_in_one_session_each_see_the_answers_to_their_own_questions(
    start: StartBot, tmp_path: Path
) -> None:
    one, two = start(terminal=True), start()
    one.expect("main> ")
    two.expect("/help lists the commands.\n")
    for number in range(2, 8):
        one.type(f"count to {number}\n")
        two.type(f"count to {number + 10}\n")
    for number in range(2, 8):
        assert one.expect("main> ").endswith(f" {number}\r\nmain> ")
        assert two.expect("\n") == " ".join(map(str, range(1, number + 11))) + "\n"
    two.type("/history\n")
    two.expect("\n12. assistant: ")
    two.end_input()
    assert two.leave() == 0
    one.type("\x04")
    assert one.leave() == 0
    bodies = stored(tmp_path / "state.db")
    asked = [f"count to {number}" for number in range(2, 8)]
    for mine in (asked, [f"count to {number}" for number in range(12, 18)]):
        assert [body["content"] for body in bodies if body["content"] in mine] == mine
    for question, answer in zip(bodies[::2], bodies[1::2], strict=True):
        last = str(question["content"]).removeprefix("count to ")
        assert str(answer["content"]).split()[-1] == last


def test_while_one_is_answered_the_other_is_told_so_and_may_stop_waiting(
    start: StartBot, tmp_path: Path, endpoint: Endpoint
) -> None:
    endpoint.plays = [streamed(then="stall"), whole("Spare.")]
    one, two = (start(OPENAI_BASE_URL=endpoint.url) for _ in range(2))
    two.expect("/help lists the commands.\n")
    one.type("hi\n")
    one.expect("\nHalf")
    for command in ("/undo", "/retry", "/redo"):
        two.type(f"{command}\n")
        assert two.expect("\n") == (
            "An answer is on its way; nothing was changed. Try again when it is there.\n"
        )
    two.type("/history\n")
    assert two.expect("\n") == "1. user: hi\n"
    two.type("you?\n")
    wait_for(tmp_path, lambda waiting: waiting == ["hi", "you?"])
    two.process.send_signal(signal.SIGINT)
    assert two.expect("\n") == (
        f"Not waited for any more: {platform.node()}/{one.process.pid} is answering in this session. "
        "/history shows what comes of it.\n"
    )
    late = start(OPENAI_BASE_URL=endpoint.url)
    late.expect(
        f"\n{platform.node()}/{one.process.pid} is answering here; "
        "/history shows it when it is there.\n"
    )
    two.end_input()
    assert two.leave() == 0


def test_what_one_was_killed_over_the_other_answers_without_a_word(
    start: StartBot, tmp_path: Path, endpoint: Endpoint
) -> None:
    endpoint.plays = [streamed(then="stall"), whole("At last.")]
    one, two = (start(OPENAI_BASE_URL=endpoint.url) for _ in range(2))
    two.expect("/help lists the commands.\n")
    one.type("hi\n")
    one.expect("\nHalf")
    one.process.kill()
    one.process.wait(LIMIT_S)
    wait_for(tmp_path, lambda waiting: waiting == [])
    two.type("/history\n")
    two.end_input()
    assert two.leave() == 0
    assert two.rest == "1. user: hi\n2. assistant: At last.\n"


async def says(turn: Turn) -> None:
    await turn.append(A("Said elsewhere."))


async def says_nothing(turn: Turn) -> None:
    pass


async def fails(turn: Turn) -> None:
    raise ZeroDivisionError


KEPT = "The question is kept; /retry asks it again."


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        (says, "Said elsewhere."),
        (says_nothing, f"No answer: whoever took it made none. {KEPT}"),
        (fails, f"No answer: the handler raised ZeroDivisionError, at attempt 1. {KEPT}"),
    ],
)
def test_what_becomes_of_a_question_that_another_process_took_is_told(
    start: StartBot, tmp_path: Path, handler: Handler, told: str
) -> None:
    bot = start()
    bot.expect("/help lists the commands.\n")

    async def take_it_away() -> None:
        async with open_sessions(tmp_path / "state.db") as sessions, trio.open_nursery() as nursery:
            session = sessions["main"]
            async with session.turn():
                bot.type("hello\n")
                await until(session, lambda waiting: waiting == ["hello"])
                await freeze(bot, session)
            nursery.start_soon(partial(sessions.serve, handler, max_attempts=1))
            await until(session, lambda waiting: waiting == [])
            bot.process.send_signal(signal.SIGCONT)
            nursery.cancel_scope.cancel()

    trio.run(take_it_away)
    assert bot.expect("\n") == f"{told}\n"
    bot.type("/retry\n")
    bot.expect("Hello! I answer")
    bot.end_input()
    assert bot.leave() == 0
    assert [body["role"] for body in stored(tmp_path / "state.db")] == ["user", "assistant"]
    assert inbox(tmp_path) == []


def test_what_was_set_aside_is_told_at_the_start_once(tmp_path: Path) -> None:
    async def fail() -> None:
        async with open_sessions(tmp_path / "state.db") as sessions, trio.open_nursery() as nursery:
            await sessions["main"].post(U("hello"))
            nursery.start_soon(partial(sessions.serve, fails, max_attempts=1))
            await until(sessions["main"], lambda waiting: waiting == [])
            nursery.cancel_scope.cancel()

    trio.run(fail)
    last = "The last question has no answer. /retry asks it again."
    assert piped(tmp_path, "") == [
        "A question could not be answered (the handler raised ZeroDivisionError); "
        "it can be said again:",
        "hello",
        last,
    ]
    assert piped(tmp_path, "") == [last]


async def until(session: Session, wanted: Callable[[list[object]], bool]) -> None:
    """Wait until what waits in the inbox is as `wanted`; another process decides when that is."""
    with trio.fail_after(LIMIT_S):
        while True:
            posts = [post for post in await session.inbox() if post.set_aside is None]
            if wanted([post.body["content"] for post in posts]):
                return
            await trio.sleep(0.01)


def wait_for(folder: Path, wanted: Callable[[list[object]], bool]) -> None:
    async def look() -> None:
        async with open_sessions(folder / "state.db") as sessions:
            await until(sessions["main"], wanted)

    trio.run(look)


async def freeze(bot: Bot, session: Session) -> None:
    """Stop the bot's process where it does not hold the file's write lock."""
    while True:
        bot.process.send_signal(signal.SIGSTOP)
        with trio.move_on_after(1) as trying:
            await session.set_policy(None)
        if not trying.cancelled_caught:
            return
        bot.process.send_signal(signal.SIGCONT)


def inbox(folder: Path) -> list[InboxMessage]:
    async def read() -> list[InboxMessage]:
        async with open_sessions(folder / "state.db") as sessions:
            return await sessions["main"].inbox()

    return trio.run(read)


# ---- its environment


@pytest.fixture
def without_httpx(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hides-httpx")
    missing = "raise ModuleNotFoundError(\"No module named 'httpx'\", name='httpx')\n"
    (folder / "httpx.py").write_text(missing)
    return str(folder)


def test_the_rules_need_no_httpx(tmp_path: Path, without_httpx: str) -> None:
    assert piped(tmp_path, "count to 3\n", PYTHONPATH=without_httpx) == ["1 2 3"]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"OPENAI_TIMEOUT": "soon"}, "OPENAI_TIMEOUT: must be a number of seconds, not 'soon'"),
        ({"OPENAI_TIMEOUT": "nan"}, "OPENAI_TIMEOUT: must be a number of seconds, not 'nan'"),
        ({"OPENAI_API_KEY": "sk-ä"}, "OPENAI_API_KEY: holds characters that no key has"),
        ({"OPENAI_API_KEY": "a\nb"}, "OPENAI_API_KEY: holds characters that no key has"),
        ({"PYTHONPATH": "<no httpx>"}, "OPENAI_BASE_URL needs httpx: pip install httpx"),
    ],
)
def test_settings_that_cannot_be_used_are_named_before_anything_is_opened(
    start: StartBot, tmp_path: Path, without_httpx: str, environ: dict[str, str], told: str
) -> None:
    if "PYTHONPATH" in environ:
        environ = {"PYTHONPATH": without_httpx}
    bot = start(OPENAI_BASE_URL="http://127.0.0.1:1/v1", **environ)
    assert bot.ended() == (1, f"bot: {told}\n")
    assert os.listdir(tmp_path) == []
