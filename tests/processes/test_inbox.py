"""What was accepted is acted on, whatever becomes of the processes: C60, C63, and several that serve."""

from __future__ import annotations

from collections import Counter

from support import A, Body, U

from processes.fleet import Fleet, Worker, until
from processes.worker import INTERRUPTED


def inbox(fleet: Fleet) -> int:
    """How many messages any inbox holds."""
    ((number,),) = fleet.rows("SELECT count(*) FROM inbox")
    return int(number)


def bodies(worker: Worker, session: str = "a") -> list[Body]:
    """The session's transcript, as the process reads it."""
    found: list[Body] = worker.do("transcript", session=session)["bodies"]
    return found


def test_c60_what_was_accepted_while_a_turn_ran_survives_a_kill_and_is_acted_on(
    fleet: Fleet,
) -> None:
    killed = fleet.one()
    killed.do("hold", session="a")
    assert killed.do("post", session="a", message=U("m1"))["status"] == "accepted"
    killed.kill()
    other = fleet.one()
    assert [row["body"] for row in other.do("inbox", session="a")] == [U("m1")]
    other.tell("serve")
    assert other.event("answered")["asked"] == ["m1"]
    until(lambda: inbox(fleet) == 0, "once it is acted on it is gone")
    assert bodies(other) == [U("m1"), A("to m1")]


def test_c60_what_a_killed_handler_was_acting_on_is_delivered_again_and_not_appended_again(
    fleet: Fleet,
) -> None:
    killed, other = fleet.start(2)
    killed.tell("serve", hang_from=1)
    other.do("post", session="a", message=U("m1"))
    assert killed.event("begun")["attempt"] == 1
    other.do("post", session="a", message=U("m2"))
    killed.kill()
    other.tell("serve")
    first, second = other.event("begun"), other.event("begun")
    assert (first["asked"], first["attempt"]) == (["m1"], 2)
    assert (second["asked"], second["attempt"]) == (["m2"], 1)
    until(lambda: inbox(fleet) == 0, "both are acted on")
    assert bodies(other) == [U("m1"), A("to m1"), U("m2"), A("to m2")]


def test_c63_a_key_that_comes_again_after_a_restart_gets_the_first_receipt(fleet: Fleet) -> None:
    first = fleet.one()
    accepted = first.do("post", session="a", message=U("m"), key="42")
    assert accepted["status"] == "accepted"
    first.finish()
    second = fleet.one()
    again = second.do("post", session="a", message=U("m"), key="42")
    assert again == {**accepted, "status": "duplicate"}
    second.tell("serve")
    second.event("answered")
    until(lambda: inbox(fleet) == 0, "it is acted on")
    later = second.do("post", session="a", message=U("m"), key="42")
    assert later == {**accepted, "status": "duplicate", "waiting": 0}
    assert bodies(second) == [U("m"), A("to m")]


def test_what_one_process_posts_another_answers(fleet: Fleet) -> None:
    poster, server = fleet.start(2)
    server.tell("serve")
    for n in range(3):
        poster.do("post", session="a", message=U(f"m{n}"))
        assert server.event("answered")["asked"] == [f"m{n}"]
    assert bodies(poster) == [body for n in range(3) for body in (U(f"m{n}"), A(f"to m{n}"))]


def test_a_message_from_another_process_interrupts_the_turn_that_runs(fleet: Fleet) -> None:
    poster, server = fleet.start(2)
    server.tell("serve", hang_only="long")
    poster.do("post", session="a", message=U("long"))
    server.event("begun")
    poster.do("post", session="a", message=U("no, this"), policy="interrupt")
    assert server.event("stopped", limit_s=2)["asked"] == ["long"]
    assert server.event("answered")["asked"] == ["no, this"]
    until(lambda: inbox(fleet) == 0, "the interrupted one is done with")
    assert bodies(poster) == [U("long"), U("no, this"), A("to no, this")]


def test_when_one_of_two_that_serve_is_killed_in_its_handlers_every_message_is_answered(
    fleet: Fleet,
) -> None:
    killed, other, poster = fleet.start(3, synchronous="normal")
    posted = {f"{session}{n}" for session in "abcd" for n in range(8)}
    killed.tell("serve", hang_from=2, max_concurrent=2)
    for message in sorted(posted, key=lambda name: name[::-1]):
        poster.do("post", session=message[0], message=U(message))
    for _ in range(3):
        killed.event("begun")  # it has answered one, and holds two
    other.tell("serve")
    other.event("answered")
    killed.kill()
    until(lambda: inbox(fleet) == 0, "every message is acted on")
    assert fleet.rows("SELECT * FROM turns") == []
    for session in "abcd":
        said = [(body["role"], body["content"]) for body in bodies(poster, session)]
        asked = [text for role, text in said if role == "user"]
        assert asked == [f"{session}{n}" for n in range(8)]  # in order, and each once
        answers = Counter(text for role, text in said if role == "assistant")
        assert set(answers) == {f"to {text}" for text in asked}


def test_ctrl_c_in_a_process_that_serves_leaves_nothing_behind(fleet: Fleet) -> None:
    server = fleet.one()
    server.tell("serve", hang_from=2)
    server.do("post", session="a", message=U("answered"))
    server.event("answered")
    server.do("post", session="a", message=U("under way"))
    server.event("begun", asked=["under way"])
    assert server.interrupt() == INTERRUPTED, server.complaints()
    assert server.complaints() == ""
    assert fleet.owner_files() == set()
    assert fleet.rows("SELECT * FROM turns") == []
    assert fleet.rows("SELECT turn FROM heads") == [(None,)]
    assert fleet.rows("SELECT * FROM batches") == []
    ((attempts, token),) = fleet.rows("SELECT attempts, token FROM inbox")
    assert (attempts, token) == (0, None)  # given back, as if it had not been tried
    other = fleet.one()
    other.tell("serve")
    assert other.event("answered")["asked"] == ["under way"]


def test_what_a_killed_process_left_beside_the_file_and_in_it_the_next_open_sweeps(
    fleet: Fleet,
) -> None:
    killed = fleet.one()
    killed.do("append", session="a", message=U("1"))
    killed.kill()
    (left,) = fleet.owner_files()
    assert fleet.rows("SELECT writer FROM batches") == [(int(left),)]
    other = fleet.one()
    (own,) = fleet.owner_files()
    assert own != left
    assert fleet.rows("SELECT writer FROM batches") == []
    other.finish()
    assert fleet.owner_files() == set()
