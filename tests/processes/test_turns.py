"""One holder anywhere, whatever becomes of the processes: C40, C41d, C43, C44, C47, C48, C50."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing

import apsw
import pytest
from support import A, U

from processes.fleet import Fleet, Worker, until

BOUND_S = 2.0
"""A dead holder's turn is free at once, and whoever waits for it tries twice a second at least."""

SOON_S = 1.0
STOPPED_S = 3.0

SHORT_TTL_S = 1.0
"""The least that there is."""

RENEWED_TTL_S = 2.0
"""For one that must be renewed in time, on a slow machine too."""


def contents(worker: Worker, session: str = "a") -> list[object]:
    """What the session's transcript says, as the process reads it."""
    return [body["content"] for body in worker.do("transcript", session=session)["bodies"]]


def lasts(since: float, seconds: float, what: str) -> None:
    """Wait until something has lasted so long."""
    until(lambda: time.monotonic() - since >= seconds, what)


def test_c40_turns_of_two_processes_stand_whole_and_none_is_lost(fleet: Fleet) -> None:
    workers = fleet.start(2, synchronous="normal")  # the barrier: both have the file open
    told = [
        (worker, worker.tell("take_turns", session="a", tag=tag, number=200))
        for worker, tag in zip(workers, "xy", strict=True)
    ]
    for worker, number in told:
        worker.result(number)
    bodies = workers[0].do("transcript", session="a")["bodies"]
    questions, answers = bodies[0::2], bodies[1::2]
    assert [body["role"] for body in questions] == ["user"] * 400
    assert answers == [A(body["content"]) for body in questions]
    for tag in "xy":
        own = [body for body in questions if body["content"].startswith(tag)]
        assert own == [U(f"{tag} {n}") for n in range(200)]


def test_c41d_the_turn_of_a_process_that_exits_is_had_by_the_one_that_waits(fleet: Fleet) -> None:
    holder, waiter = fleet.start(2)
    token = holder.do("hold", session="a")["token"]
    waiting = waiter.tell("hold", session="a")
    until(lambda: waiter.do("statistics")["waiting_for_turn"] == 1, "it waits")
    holder.tell("die")
    assert holder.popen.wait(BOUND_S) == 9
    died = time.monotonic()
    answer = waiter.answer(waiting)
    assert answer["result"]["token"] > token
    assert answer["end"] - died < BOUND_S


def test_c43_the_turn_of_a_dead_process_can_be_taken_at_once(fleet: Fleet) -> None:
    holder, other = fleet.start(2)
    holder.do("hold", session="a")
    assert other.refused("hold", session="a", wait=0)["type"] == "TurnActive"
    holder.kill()
    assert other.do("hold", session="a", wait=0)["token"]


def test_c43_a_live_process_of_the_owners_number_is_not_the_owner(fleet: Fleet) -> None:
    """Owners are no pids: one that was given again would keep a dead turn alive."""
    holder, other = fleet.start(2)
    holder.do("hold", session="a")
    holder.kill()
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as unrelated:
        try:
            with closing(apsw.Connection(str(fleet.path))) as file:
                file.execute("UPDATE turns SET owner = ?", (unrelated.pid,))
            assert unrelated.poll() is None
            assert other.do("hold", session="a", wait=0)["token"]
        finally:
            unrelated.kill()


def test_c44_a_holder_that_slept_through_its_time_goes_on_if_nobody_passed(fleet: Fleet) -> None:
    holder, other = fleet.start(2)
    holder.do("hold", session="a", ttl=SHORT_TTL_S)
    holder.do("append", session="a", turn="it", message=A("before"))
    holder.stop()
    lasts(time.monotonic(), STOPPED_S, "the stop")
    assert other.do("holder", session="a")["expires_in"] == 0
    append = holder.tell("append", session="a", turn="it", message=A("after"))
    holder.go_on()
    holder.result(append)
    holder.do("let_go")
    assert contents(other) == ["before", "after"]


@pytest.mark.parametrize("take_over", [False, True])
def test_c44_a_holder_that_was_passed_in_its_sleep_changes_nothing(
    fleet: Fleet, take_over: bool
) -> None:
    holder, other = fleet.start(2)
    token = holder.do("hold", session="a", ttl=SHORT_TTL_S)["token"]
    holder.do("append", session="a", turn="it", message=A("before"))
    holder.stop()
    stopped = time.monotonic()
    if not take_over:
        lasts(stopped, STOPPED_S, "the stop")
    rival = other.do("hold", session="a", take_over=take_over, **({} if take_over else {"wait": 0}))
    assert rival["token"] > token
    other.do("append", session="a", turn="it", message=A("the rival's"))
    append = holder.tell("append", session="a", turn="it", message=A("too late"))
    holder.go_on()
    lost = holder.error(append)
    assert (lost["type"], lost["reason"]) == ("TurnLost", "taken")
    assert holder.refused("let_go")["type"] == "TurnLost"
    other.do("append", session="a", turn="it", message=A("the rival's again"))
    other.do("let_go")
    holder.do("hold", session="a")
    holder.do("append", session="a", turn="it", message=A("later"))
    holder.do("let_go")
    assert contents(other) == ["before", "the rival's", "the rival's again", "later"]


def test_c44_an_append_past_a_turn_that_ran_out_is_enough_to_lose_it(fleet: Fleet) -> None:
    holder, other = fleet.start(2)
    holder.do("hold", session="a", ttl=SHORT_TTL_S)
    holder.stop()
    until(lambda: other.do("holder", session="a")["expires_in"] == 0, "its time runs out")
    other.do("append", session="a", message=U("past it"))
    append = holder.tell("append", session="a", turn="it", message=A("too late"))
    holder.go_on()
    assert holder.error(append)["type"] == "TurnLost"
    assert contents(other) == ["past it"]


def test_c47_after_a_kill_in_the_middle_of_appends_the_next_one_works_at_once(fleet: Fleet) -> None:
    killed = fleet.one()
    killed.tell("flood", session="a", rows=50)
    for _ in range(5):
        acknowledged = killed.event("appended")["position"]
    killed.kill()
    next_one = fleet.one()
    answer = next_one.answer(next_one.tell("append", session="a", message=U("next")))
    position = answer["result"]["position"]
    assert answer["end"] - answer["start"] + next_one.opened_in_s < SOON_S
    assert position > acknowledged
    assert position % 50 == 1  # each batch is there whole or not at all
    assert contents(next_one) == ["drop"] * (position - 1) + ["next"]


def test_c48_a_holder_that_hangs_and_keeps_renewing_can_be_taken_over(fleet: Fleet) -> None:
    holder, other = fleet.start(2)
    token = holder.do("hold", session="a", ttl=RENEWED_TTL_S)["token"]
    (first,) = fleet.rows("SELECT expires FROM turns")
    until(lambda: fleet.rows("SELECT expires FROM turns")[0] > first, "it renews")
    lasts(time.monotonic(), RENEWED_TTL_S, "more than its time")
    assert other.refused("hold", session="a", wait=0)["type"] == "TurnActive"
    assert other.do("hold", session="a", take_over=True)["token"] > token
    lost = holder.refused("append", session="a", turn="it", message=A("too late"))
    assert lost["type"] == "TurnLost"
    assert holder.refused("let_go")["type"] == "TurnLost"
    other.do("append", session="a", turn="it", message=A("by the other"))
    other.do("let_go")
    assert contents(holder) == ["by the other"]


def test_c50_an_append_waits_for_a_rival_that_holds_the_file_for_two_seconds(fleet: Fleet) -> None:
    writer, rival = fleet.start(2)
    rival.do("lock")
    append = writer.tell("append", session="a", message=U("patient"))
    lasts(time.monotonic(), 2.0, "the lock")
    assert fleet.rows("SELECT count(*) FROM messages") == [(0,)]
    rival.do("unlock")
    assert writer.result(append)["position"] == 1


def test_c50_for_a_rival_that_holds_the_file_for_too_long_nothing_is_done_in_part(
    fleet: Fleet,
) -> None:
    writer, rival = fleet.start(2, haste=20)  # its patience of ten seconds is over in half a one
    revision = writer.do("append", session="a", message=U("1"))["revision"]
    rival.do("lock")
    refused = writer.refused("extend", session="a", messages=[U("2"), U("3")], at=revision)
    assert (refused["type"], refused["kept"]) == ("StorageBusy", False)
    assert writer.refused("undo", session="a")["type"] == "StorageBusy"
    kept = writer.refused("extend", session="a", messages=[U("4"), U("5")])
    assert (kept["type"], kept["kept"]) == ("StorageBusy", True)
    assert fleet.rows("SELECT content FROM messages") == [("1",)]
    rival.do("unlock")
    until(lambda: contents(rival) != ["1"], "what was kept is written by itself")
    assert contents(rival) == ["1", "4", "5"]
    writer.finish()
    assert contents(rival) == ["1", "4", "5"]


def test_two_processes_never_hold_one_turn(fleet: Fleet) -> None:
    workers = fleet.start(3)
    told = [(worker, worker.tell("hold", session="a", wait=0)) for worker in workers]
    answers = [worker.answer(number) for worker, number in told]
    (won,) = [answer for answer in answers if "result" in answer]
    (row,) = fleet.rows("SELECT token FROM turns")
    assert row == (won["result"]["token"],)
