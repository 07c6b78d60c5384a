"""Who opens a turn: people, whatever they send; and nobody else who uses their role."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper.actors.conversation import CarrierFormat, last_user_turn, opens_turn

FORMAT = CarrierFormat()
SCAFFOLD = f"{FORMAT.prefix}\n{FORMAT.heading}\nold task\n\n{FORMAT.end_marker}"
ASK_FIRST = f"look\n\n{FORMAT.delimiter}\n\n{SCAFFOLD}"
IMAGE = {"type": "image_url", "image_url": {"url": "image"}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "r"}


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, object]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    "content",
    ["hello", "", "  ", None, [], [{"type": "text", "text": "hello"}], [IMAGE], ["tool_result"]],
)
def test_whatever_a_person_sends_opens_a_turn(content: object) -> None:
    assert opens_turn(user(content), hidden=False, format=FORMAT)


def test_a_user_message_without_content_opens_a_turn() -> None:
    assert opens_turn({"role": "user"}, hidden=False, format=FORMAT)


@pytest.mark.parametrize("role", ["assistant", "system", "tool", "session_meta", None])
def test_no_other_role_opens_a_turn(role: object) -> None:
    assert not opens_turn({"role": role, "content": "hello"}, hidden=False, format=FORMAT)


def test_a_hidden_row_opens_no_turn() -> None:
    assert not opens_turn(user("hello"), hidden=True, format=FORMAT)
    assert not opens_turn(user(ASK_FIRST), hidden=True, format=FORMAT)


@pytest.mark.parametrize(
    "content", [SCAFFOLD, f"{SCAFFOLD}\n\n \n", [{"type": "text", "text": SCAFFOLD}]]
)
def test_a_summary_alone_opens_no_turn(content: object) -> None:
    assert not opens_turn(user(content), hidden=False, format=FORMAT)


@pytest.mark.parametrize(
    "content",
    [
        f"{SCAFFOLD}\n\nask",
        ASK_FIRST,
        [{"type": "text", "text": SCAFFOLD}, IMAGE],
        f"{FORMAT.prefix} is what I keep seeing",
    ],
)
def test_a_carrier_and_a_quotation_open_a_turn(content: object) -> None:
    assert opens_turn(user(content), hidden=False, format=FORMAT)


def test_a_tool_result_opens_no_turn_even_with_text_beside_it() -> None:
    assert not opens_turn(user([TOOL_RESULT]), hidden=False, format=FORMAT)
    text = {"type": "text", "text": "here it is"}
    assert not opens_turn(user([text, TOOL_RESULT]), hidden=False, format=FORMAT)


def test_c05_a_tool_result_under_the_users_role_stays_in_the_turn_of_its_call() -> None:
    call: dict[str, object] = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}
    messages = [user("do"), call, user([TOOL_RESULT]), assistant("done")]
    assert last_user_turn(messages, FORMAT) == 0


def test_the_last_user_turn_begins_with_the_newest_message_of_a_person() -> None:
    turns = [user("a"), assistant("r"), user(ASK_FIRST), assistant("r")]
    messages = [*turns, user(SCAFFOLD)]
    assert last_user_turn(messages, FORMAT) == 2
    assert last_user_turn(messages[:2], FORMAT) == 0


@pytest.mark.parametrize("messages", [[], [assistant("r")], [user(SCAFFOLD), assistant("r")]])
def test_without_a_person_there_is_no_turn(messages: list[dict[str, object]]) -> None:
    assert last_user_turn(messages, FORMAT) is None


def test_a_list_may_say_which_of_its_messages_are_hidden() -> None:
    messages = [user("a"), {**user("notice"), "display_kind": "hidden"}]
    assert last_user_turn(messages, FORMAT) == 1
    assert last_user_turn(messages, FORMAT, hidden=lambda message: "display_kind" in message) == 0


@given(st.lists(st.sampled_from([user("a"), assistant("r"), user(SCAFFOLD), user([TOOL_RESULT])])))
def test_nothing_after_the_last_user_turn_opens_one(messages: list[dict[str, object]]) -> None:
    opens = [opens_turn(message, hidden=False, format=FORMAT) for message in messages]
    index = last_user_turn(messages, FORMAT)
    assert index == (max(i for i, is_open in enumerate(opens) if is_open) if any(opens) else None)
