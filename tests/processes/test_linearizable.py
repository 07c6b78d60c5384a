"""What several processes do to the same sessions, one of them stopped now and then, is as if one after the other."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from support import U

from processes.checker import Call, check
from processes.fleet import Fleet, TooLate, Worker, until

PROCESSES = 3
SESSIONS = ["a", "b"]
STOPS = 5

TURN_LIMIT_S = 5.0
"""Some turn is held for a moment in far less."""

STOPPED_S = 2.5
"""For how long a process is stopped at most: the turn that it holds runs out after one second, and
somebody passes it at once; but not if it was stopped while it was writing to the file."""


def test_what_several_processes_do_at_once_is_as_if_one_did_it_after_the_other(
    fleet: Fleet,
) -> None:
    seed = os.urandom(4).hex()
    workers = fleet.start(PROCESSES)
    calls: list[Call] = []
    for id in SESSIONS:
        answer = workers[0].answer(workers[0].tell("append", session=id, message=U("first")))
        first = {"message": U("first")}
        calls.append(
            Call(
                "the test",
                id,
                "append",
                first,
                answer["start"],
                answer["end"],
                None,
                answer["result"],
            )
        )
    wandering = [
        (worker, worker.tell("wander", ids=SESSIONS, name="ABC"[number], seed=f"{seed} {number}"))
        for number, worker in enumerate(workers)
    ]
    with suppress(TooLate):  # if nobody can have a turn any more, the history says why
        for stop in range(STOPS):
            stop_in_a_turn(fleet, workers[stop % PROCESSES])
    for worker in workers:
        worker.do("enough")
    for worker, number in wandering:
        calls += [Call(**call) for call in worker.result(number)]
    for id in SESSIONS:
        answer = workers[0].answer(workers[0].tell("transcript", session=id))
        calls.append(
            Call(
                "the test",
                id,
                "transcript",
                {},
                answer["start"],
                answer["end"],
                None,
                answer["result"],
            )
        )
    wrong = check(calls)
    assert not wrong, "\n".join([f"seed {seed}", *wrong])
    losses = [call for call in calls if call.error is not None and call.error["type"] == "TurnLost"]
    assert losses, f"no turn was ever lost, so nothing was tried; seed {seed}"


def stop_in_a_turn(fleet: Fleet, worker: Worker) -> None:
    """Stop a process while it holds a turn, until somebody has passed that."""

    def held() -> bool:
        return bool(fleet.rows("SELECT 1 FROM turns WHERE token = ?", token))

    while True:
        worker.forget_events()
        token = worker.event("holding", TURN_LIMIT_S)["token"]
        worker.stop()
        if held():
            break
        worker.go_on()  # that turn has ended just before
    give_up = time.monotonic() + STOPPED_S
    until(lambda: not held() or time.monotonic() > give_up, "somebody passes the turn")
    worker.go_on()
