"""The stress test over several processes finds nothing wrong, and finds what is put there by hand."""

from __future__ import annotations

import copy
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest
import trio

from turnkeeper.actors import Appended, Posted, Undone

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from stress_calls import Refused, Rewind, Say  # noqa: E402
from stress_journal import (  # noqa: E402
    Enter,
    Held,
    Journal,
    Leave,
    Noted,
    Post,
    Read,
    Seen,
    read_journal,
)
from stress_judge import check_story  # noqa: E402
from stress_processes import Story, run_processes  # noqa: E402
from stress_wrong import Wrong  # noqa: E402

Run = tuple[Path, Story]
Fault = Callable[[apsw.Connection, Story], str]
"""Spoils a store or what was noted; returns the session that must be named."""


def test_processes_that_are_killed_lose_nothing_and_the_run_says_what_it_did(
    tmp_path: Path,
) -> None:
    path = tmp_path / "stress.db"
    small = ("--processes", "3", "--kills", "2", "--sessions", "5", "--turns", "30", "--seed", "3")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "stress.py", *small, "--db", path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for figure in ("killed", "calls acknowledged", "turns held", "taken over", "posts", "longest"):
        assert figure in done.stdout
    assert done.stdout.endswith("all is as it was acknowledged\n")
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_a_kill_cut_off_is_a_call_without_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    say = Say(({"role": "user", "content": "hello", "tags": ["a", {"b": None}]},), (None,))
    number = journal.began("chat", say, token=4)
    journal.ended(number, Appended(1, 1, 2, False, True))
    number = journal.began("chat", Post({"role": "user", "content": "and?"}, "key", "collect"))
    journal.ended(number, Posted("accepted", 7, 1.5, "collect", 1))
    journal.began("chat", say)
    path.write_bytes(path.read_bytes() + b'[3, 12.5, ["Appe')
    first, second, third = read_journal(path, 2)
    assert (first.session, first.token, first.operation) == ("chat", 4, say)
    assert first.outcome == Appended(1, 1, 2, False, True)
    assert second.outcome == Posted("accepted", 7, 1.5, "collect", 1)
    assert first.answered
    assert (third.operation, third.answered, third.ended) == (say, False, math.inf)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was not spoiled."""
    path = tmp_path_factory.mktemp("stress") / "stress.db"

    async def run() -> Story:
        return await run_processes(
            path, processes=3, kills=2, sessions=4, turns=60, seed=5, turn_done=lambda: None
        )

    return path, trio.run(run)


@pytest.fixture
def fresh(finished: Run, tmp_path: Path) -> Run:
    """A copy of that run's store, and of what was noted."""
    path, story = finished
    shutil.copy(path, tmp_path / path.name)
    return tmp_path / path.name, copy.deepcopy(story)


def check(path: Path, story: Story) -> list[Wrong]:
    async def run() -> list[Wrong]:
        _, wrong = await check_story(path, story, 1, lambda _what, _steps: lambda: None)
        return wrong

    return trio.run(run)


def test_what_was_not_spoiled_is_right_and_had_all_that_is_spoiled_below(fresh: Run) -> None:
    path, story = fresh
    assert check(path, story) == []
    assert story.kills == 2
    assert any(not note.answered and not note.needs_no_answer for note in story.notes)
    hows = {note.operation.how for note in story.notes if isinstance(note.operation, Enter)}
    assert hows == {"turn", "take over", "serve"}


# Faults, each put in between the load and the check.


def _appends(story: Story) -> Iterator[tuple[Noted, Appended]]:
    """Appends of one message that wrote it."""
    for note in story.notes:
        if isinstance(note.outcome, Appended) and not note.outcome.duplicate:
            yield note, note.outcome


def _posts(story: Story) -> Iterator[tuple[Noted, Posted]]:
    for note in story.notes:
        if isinstance(note.outcome, Posted) and note.outcome.status == "accepted":
            yield note, note.outcome


def _double(connection: apsw.Connection, where: str, id: int | None) -> None:
    connection.execute(
        "INSERT INTO messages SELECT NULL, session, -1, position, revision, opener, hidden,"
        f" append_id, created_at, NULL, role, content, extra, 0 FROM messages WHERE {where} = ?",
        (id,),
    )


def a_message_is_gone(connection: apsw.Connection, story: Story) -> str:
    note, receipt = next(_appends(story))
    connection.execute("DELETE FROM messages WHERE id = ?", (receipt.id,))
    return note.session


def a_message_is_there_twice(connection: apsw.Connection, story: Story) -> str:
    note, receipt = next(_appends(story))
    _double(connection, "id", receipt.id)
    return note.session


def a_post_is_gone(connection: apsw.Connection, story: Story) -> str:
    note, receipt = next(_posts(story))
    connection.execute("DELETE FROM messages WHERE append_id = ?", (receipt.id,))
    return note.session


def a_post_was_appended_twice(connection: apsw.Connection, story: Story) -> str:
    note, receipt = next(_posts(story))
    _double(connection, "append_id", receipt.id)
    return note.session


def a_post_waits_still(connection: apsw.Connection, _: Story) -> str:
    connection.execute(
        "INSERT INTO inbox (id, session, policy, opens_turn, accepted_at, attempts, role)"
        " SELECT 1, key, 'queue', 1, 0.0, 0, 'user' FROM sessions LIMIT 1"
    )
    return "all"


def a_turn_was_never_ended(connection: apsw.Connection, _: Story) -> str:
    connection.execute(
        "INSERT INTO turns (session, owner, holder, opener, seen, since, boot, expires)"
        " VALUES (1000000, 1, 'x', 0, 0, 0.0, 'boot', 0.0)"
    )
    return "all"


def a_call_was_left_open(connection: apsw.Connection, story: Story) -> str:
    """The result that closed it becomes one of a revision that is explained otherwise."""
    (id, session), *_ = connection.execute(
        "SELECT messages.id, sessions.id FROM messages JOIN sessions ON session = key"
        " WHERE synthetic ORDER BY messages.id"
    )
    connection.execute("DELETE FROM messages WHERE id = ?", (id,))
    return str(session)


def something_was_appended_that_nobody_sent(connection: apsw.Connection, story: Story) -> str:
    note, _receipt = next(_appends(story))
    key = connection.execute("SELECT key FROM sessions WHERE id = ?", (note.session,)).get
    connection.execute(
        "INSERT INTO messages SELECT NULL, session, branch, position + 1, revision + 1, opener, 0,"
        " 1, 0.0, NULL, 'user', 'who?', NULL, 0 FROM heads WHERE session = ?",
        (key,),
    )
    connection.execute(
        "UPDATE heads SET position = position + 1, revision = revision + 1 WHERE session = ?",
        (key,),
    )
    return note.session


def a_write_came_after_the_turn_was_lost(_: apsw.Connection, story: Story) -> str:
    """Of two turns with changes, the last change of the later is the earlier one's."""
    under = [note for note, _ in _appends(story) if note.token is not None]
    for early in under:
        for late in reversed(under):
            if early.session == late.session and (early.token or 0) < (late.token or 0):
                late.token = early.token
                return early.session
    raise AssertionError("no session has two turns")


def somebody_wrote_in_the_middle_of_a_turn(_: apsw.Connection, story: Story) -> str:
    under = sorted(
        (note.session, note.token, receipt.revision, number)
        for number, (note, receipt) in enumerate(_appends(story))
        if note.token is not None
    )
    notes = [note for note, _ in _appends(story)]
    for one, two, three in zip(under, under[1:], under[2:], strict=False):
        if one[:2] == two[:2] == three[:2]:
            notes[two[3]].token = None
            return str(one[0])
    raise AssertionError("no turn has three changes")


def two_held_the_turn_at_once(_: apsw.Connection, story: Story) -> str:
    entries = [n for n in story.notes if n.operation == Enter("turn") and n.answered]
    held = [n for n in entries if isinstance(n.outcome, Held)]
    (note,) = (n for n in held[:1])
    (leave,) = (
        n for n in story.notes if isinstance(n.operation, Leave) and n.token == _token(note)
    )
    middle = (note.ended + leave.began) / 2
    story.notes.append(
        Noted(0, note.session, None, Enter("turn"), note.began, middle, True, Held(10**6))
    )
    return note.session


def _token(note: Noted) -> int:
    assert isinstance(note.outcome, Held)
    return note.outcome.token


def a_token_was_given_twice(_: apsw.Connection, story: Story) -> str:
    note = next(n for n in story.notes if isinstance(n.outcome, Held))
    story.notes.append(copy.copy(note))
    return note.session


def a_turn_was_refused_that_nobody_held(_: apsw.Connection, story: Story) -> str:
    note = next(n for n in story.notes if n.outcome == Refused("TurnActive"))
    note.began = note.ended = max(n.ended for n in story.notes if n.ended < math.inf) + 1
    return note.session


def a_turn_was_lost_that_nobody_took(_: apsw.Connection, story: Story) -> str:
    note = next(n for n in story.notes if n.token is not None and isinstance(n.outcome, Appended))
    before = min(n.began for n in story.notes)
    story.notes.append(Noted(0, note.session, note.token, Rewind("undo"), before, before, True))
    story.notes[-1].outcome = Refused("TurnLost: taken")
    return note.session


def a_post_was_never_answered(_: apsw.Connection, story: Story) -> str:
    """Its last turn failed, and there was no other."""
    note, receipt = next((n, r) for n, r in _posts(story) if n.worker == 0)
    for entry in story.notes:
        if isinstance(entry.outcome, Held) and receipt.id in entry.outcome.taken:
            for leave in story.notes:
                if leave.token == entry.outcome.token and isinstance(leave.operation, Leave):
                    leave.operation = Leave("raised", serving=True)
    return note.session


def a_post_that_was_done_was_taken_again(_: apsw.Connection, story: Story) -> str:
    last = story.lives[0]
    for entry in story.notes:
        if isinstance(entry.outcome, Held) and entry.outcome.taken and entry.worker == 0:
            again = Held(10**6, entry.outcome.taken, first=False)
            late = last.gone + 1
            story.notes.append(
                Noted(0, entry.session, None, Enter("serve"), late, late, True, again)
            )
            return entry.session
    raise AssertionError("the last one has served nothing")


def posts_were_taken_out_of_order(_: apsw.Connection, story: Story) -> str:
    posts = [note for note, _ in _posts(story)]
    first = posts[0]
    then = next(n for n in posts if n.session == first.session and n.began > first.ended)
    first.began, first.ended, then.began, then.ended = (
        *(then.began, then.ended),
        *(first.began, first.ended),
    )
    return first.session


def a_caller_has_no_answer(_: apsw.Connection, story: Story) -> str:
    note, _receipt = next((n, r) for n, r in _appends(story) if not story.was_killed(n.worker))
    note.answered, note.outcome = False, None
    return note.session


def a_call_that_was_cut_off_happened_twice(_: apsw.Connection, story: Story) -> str:
    """Two undos of one session, and only one of them was asked for, by somebody who was killed."""
    undos = [n for n in story.notes if isinstance(n.outcome, Undone) and n.token is None]
    one, other = next(
        (one, other)
        for one in undos
        for other in undos
        if one is not other and one.session == other.session and one.operation == other.operation
    )
    story.notes.remove(other)
    one.began = 0.0
    one.answered, one.outcome, one.ended = False, None, math.inf
    one.worker = next(worker for worker in story.lives if story.was_killed(worker))
    return one.session


def a_receipt_names_what_was_never_written(_: apsw.Connection, story: Story) -> str:
    note, receipt = next(_appends(story))
    story.notes.append(copy.copy(note))
    story.notes[-1].outcome = receipt._replace(id=10**9, revision=10**6)
    return note.session


def two_receipts_are_exchanged(_: apsw.Connection, story: Story) -> str:
    (one, first), *rest = _appends(story)
    other, second = next((n, r) for n, r in rest if n.session == one.session)
    one.outcome, other.outcome = second, first
    return one.session


def changes_were_made_out_of_order(_: apsw.Connection, story: Story) -> str:
    """One was answered before another began, and came behind it."""
    (one, _first), *rest = _appends(story)
    other, _second = next((n, r) for n, r in rest if n.session == one.session and r.revision > 5)
    one.began, one.ended = other.ended + 1, other.ended + 2
    return one.session


def a_reading_was_stale(_: apsw.Connection, story: Story) -> str:
    note = next(n for n in story.notes if isinstance(n.outcome, Seen) and n.outcome.revision > 20)
    assert isinstance(note.operation, Read)
    note.outcome = Seen(0, ())
    return note.session


@pytest.mark.parametrize(
    "fault",
    [
        a_message_is_gone,
        a_message_is_there_twice,
        a_post_is_gone,
        a_post_was_appended_twice,
        a_post_waits_still,
        a_turn_was_never_ended,
        a_call_was_left_open,
        something_was_appended_that_nobody_sent,
        a_write_came_after_the_turn_was_lost,
        somebody_wrote_in_the_middle_of_a_turn,
        two_held_the_turn_at_once,
        a_token_was_given_twice,
        a_turn_was_refused_that_nobody_held,
        a_turn_was_lost_that_nobody_took,
        a_post_was_never_answered,
        a_post_that_was_done_was_taken_again,
        posts_were_taken_out_of_order,
        a_caller_has_no_answer,
        a_call_that_was_cut_off_happened_twice,
        a_receipt_names_what_was_never_written,
        two_receipts_are_exchanged,
        changes_were_made_out_of_order,
        a_reading_was_stale,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_among_processes_is_found_and_its_session_named(fault: Fault, fresh: Run) -> None:
    path, story = fresh
    with closing(apsw.Connection(str(path))) as connection:
        guards = list(
            connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'")
        )
        for name, _ in guards:
            connection.execute(f"DROP TRIGGER {name}")
        session = fault(connection, story)
        for _, sql in guards:
            connection.execute(sql)
    wrong = check(path, story)
    assert session in [found.session for found in wrong]
