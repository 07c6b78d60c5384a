"""Tool calls without a result: which they are, and that closing them leaves none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import A, S, T, U

from turnkeeper.actors.conversation import (
    NO_RESULT,
    CallShape,
    CarrierFormat,
    Message,
    OpenCall,
    open_calls,
    opens_turn,
    synthetic_results,
)

Body = dict[str, object]

CONVERSATIONS = Path(__file__).parent.parent.parent / "data" / "conversations.jsonl"


def use(id: object, name: object = "look") -> Body:
    """A part that calls, in Anthropic's shape."""
    return {"type": "tool_use", "id": id, "name": name, "input": {}}


def result(id: object) -> Body:
    """A part that answers a call, in Anthropic's shape."""
    return {"type": "tool_result", "tool_use_id": id, "content": "r"}


def assistant(*parts: object) -> Body:
    return {"role": "assistant", "content": list(parts)}


def user(*parts: object) -> Body:
    return {"role": "user", "content": list(parts)}


def ids(messages: list[Body]) -> list[str]:
    return [call.id for call in open_calls(messages)]


TEXT: Body = {"type": "text", "text": "one moment"}


@pytest.mark.parametrize(
    ("messages", "open"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([S("be kind"), U("hi"), A("hello")], [], id="no calls"),
        pytest.param([A(call="c1")], ["c1"], id="a call"),
        pytest.param([A(call="c1"), T("c1", "r")], [], id="a call and its result"),
        pytest.param([A("wait", call=["c1", "c2"])], ["c1", "c2"], id="parallel calls"),
        pytest.param([A(call=["b", "c", "a"]), T("c", "r")], ["b", "a"], id="the order of calls"),
        pytest.param([A(call=["c1", "c2"]), T("c2", "r"), T("c1", "r")], [], id="any order"),
        pytest.param([assistant(TEXT, use("t1"))], ["t1"], id="tool_use"),
        pytest.param([assistant(use("t1")), user(result("t1"), TEXT)], [], id="tool_result"),
        pytest.param(
            [assistant(use("t1"), use("t2"), use("t3")), user(result("t3"), result("t1"))],
            ["t2"],
            id="several results in one message",
        ),
        pytest.param([assistant(use("t1")), T("t1", "r")], [], id="tool answers tool_use"),
        pytest.param([A(call="c1"), user(result("c1"))], [], id="tool_result answers tool_calls"),
        pytest.param(
            [A(call="c1"), {"role": "tool", "content": [result("c1")]}],
            [],
            id="tool_result in a tool message",
        ),
        pytest.param([T("c1", "r"), A(call="c1")], ["c1"], id="a result before its call"),
        pytest.param([A(call="c1"), T("c9", "r")], ["c1"], id="a result of no call"),
        pytest.param([A(call="c1"), T("c1", "r"), T("c1", "r")], [], id="a result twice"),
        pytest.param(
            [assistant(use("t1")), user(result("t1"), result("t1"))], [], id="twice in a message"
        ),
        pytest.param([A(call="c1"), T("c1", "r"), A(call="c1")], ["c1"], id="called again"),
        pytest.param(
            [A(call="c1"), T("c1", "r"), A(call="c1"), T("c1", "r")], [], id="answered again"
        ),
        pytest.param([A(call=["c1", "c1"])], ["c1"], id="an id twice in a message"),
        pytest.param([A(call="c1"), U("go on"), A(call="c1"), T("c1", "r")], [], id="one for both"),
        pytest.param([A(call=["a", "b"]), A(call="a")], ["b", "a"], id="made when called last"),
        pytest.param([A(call="c1"), U("c1"), A("done")], ["c1"], id="words are no result"),
        pytest.param([A(call="")], [""], id="an empty id is a string"),
    ],
)
def test_a_call_is_open_until_a_result_with_its_id_follows(
    messages: list[Body], open: list[str]
) -> None:
    assert ids(messages) == open
    assert open_calls(iter(messages)) == open_calls(messages)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (A(call="c1"), OpenCall("c1", "openai", "look")),
        (assistant(use("t1")), OpenCall("t1", "anthropic", "look")),
        (
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c1", "type": "custom", "custom": {"name": "sql", "input": "SELECT 1"}}
                ],
            },
            OpenCall("c1", "openai", "sql"),
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "yet to come"}]},
            OpenCall("c1", "openai"),
        ),
        ({"role": "assistant", "tool_calls": [{"id": "c1"}]}, OpenCall("c1", "openai")),
        (
            {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": 7}}]},
            OpenCall("c1", "openai"),
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c1", "function": "look"}]},
            OpenCall("c1", "openai"),
        ),
        (assistant(use("t1", name=None)), OpenCall("t1", "anthropic")),
        ({**A(call="c1"), "content": [use("c1", "see")]}, OpenCall("c1", "openai", "look")),
    ],
)
def test_an_open_call_knows_its_shape_and_its_tool(message: Body, call: OpenCall) -> None:
    assert open_calls([message]) == [call]


def test_an_id_called_again_in_the_other_shape_is_closed_in_that_shape() -> None:
    assert open_calls([A(call="x"), assistant(use("x"))]) == [OpenCall("x", "anthropic", "look")]
    assert open_calls([assistant(use("x")), A(call="x")]) == [OpenCall("x", "openai", "look")]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look"}}]},
        {"role": "assistant", "tool_calls": [{"id": None}, {"id": 1}, {"id": ["c"]}, {"id": {}}]},
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": ""}},
        {"role": "assistant", "tool_calls": {"id": "c1"}},
        {"role": "assistant", "tool_calls": "c1"},
        {"role": "assistant", "tool_calls": 1, "content": True},
        {"role": "assistant", "tool_calls": True, "content": 1.5},
        {"role": "assistant", "tool_calls": [None, "c1", 1, [{"id": "c1"}]]},
        assistant(use(None), use(1), use([]), {"type": "tool_use"}, "tool_use", None),
        assistant({"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}),
        assistant({"type": "text", "text": "tool_use", "id": "t1"}),
        {"role": "assistant", "content": use("t1")},
        user(use("t1")),
        {**A(call="c1"), "role": "user"},
        {**A(call="c1"), "role": ["assistant"]},
        {"tool_calls": [{"id": "c1"}]},
    ],
)
def test_what_no_result_can_name_or_nobody_called_is_not_open(message: Body) -> None:
    assert open_calls([message]) == []


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "r"},
        {"role": "tool", "tool_call_id": ["c1"], "content": "r"},
        {"role": "tool", "tool_use_id": "c1", "content": "c1"},
        {"role": "user", "tool_call_id": "c1", "content": "r"},
        {"role": "function", "name": "look", "content": "r", "tool_call_id": "c1"},
        {"role": "assistant", "tool_call_id": "c1", "content": "r"},
        {"tool_call_id": "c1", "content": "r"},
        user({"type": "tool_result", "tool_call_id": "c1"}, {"type": "tool_result"}),
        user(result(None), result({}), result(["c1"]), "c1", None),
        user({"type": "text", "text": "r", "tool_use_id": "c1"}),
        user([result("c1")]),
        {"role": "user", "content": result("c1")},
        {"role": "user", "content": 1},
        assistant(result("c1")),
    ],
)
def test_what_only_looks_like_a_result_answers_nothing(message: Body) -> None:
    assert ids([A(call="c1"), message]) == ["c1"]


@pytest.mark.parametrize("message", [None, True, 1, 1.5, "assistant", [], ["role"], {}])
def test_a_message_that_is_none_is_passed_over(message: object) -> None:
    messages = [A(call="c1"), cast(Message, message), A(call="c2")]
    assert [call.id for call in open_calls(messages)] == ["c1", "c2"]


def calls(shape: CallShape, *ids: str) -> list[OpenCall]:
    return [OpenCall(id, shape, "look") for id in ids]


def closing(id: str) -> Body:
    return {"type": "tool_result", "tool_use_id": id, "is_error": True, "content": NO_RESULT}


def test_no_calls_need_no_results() -> None:
    assert synthetic_results([]) == []


def test_each_call_in_openais_shape_gets_a_message_of_its_own() -> None:
    assert synthetic_results(calls("openai", "b", "a")) == [
        {"role": "tool", "tool_call_id": "b", "content": NO_RESULT},
        {"role": "tool", "tool_call_id": "a", "content": NO_RESULT},
    ]


def test_a_run_of_calls_in_anthropics_shape_gets_one_message() -> None:
    assert synthetic_results(calls("anthropic", "b", "a")) == [
        {"role": "user", "content": [closing("b"), closing("a")]}
    ]


def test_a_mixture_is_closed_in_the_order_of_the_calls() -> None:
    mixed = [*calls("anthropic", "1", "2"), *calls("openai", "3"), *calls("anthropic", "4")]
    assert synthetic_results(mixed) == [
        {"role": "user", "content": [closing("1"), closing("2")]},
        {"role": "tool", "tool_call_id": "3", "content": NO_RESULT},
        {"role": "user", "content": [closing("4")]},
    ]


def test_a_synthetic_result_opens_no_user_turn() -> None:
    for message in synthetic_results([*calls("anthropic", "1"), *calls("openai", "2")]):
        assert not opens_turn(message, hidden=False, format=CarrierFormat())


def test_c30_the_call_that_a_cancelled_turn_left_open_gets_a_result() -> None:
    messages = [U("do"), A(call=["c1", "c2"]), T("c1", "r")]
    assert synthetic_results(open_calls(messages)) == [T("c2", NO_RESULT)]


def assert_closing_leaves_none_open(messages: list[Body]) -> None:
    before = json.dumps(messages)
    open = open_calls(messages)
    results = synthetic_results(open)
    assert open_calls([*messages, *results]) == []
    assert json.dumps(messages) == before
    # No result is there for nothing: without it, its call is open.
    for left_out in range(len(results)):
        others = results[:left_out] + results[left_out + 1 :]
        assert open_calls([*messages, *others]) != []


RUBBISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "id", "type", "function", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
# Few ids, so that calls meet results, and one that is no string.
ID = st.sampled_from(["a", "b", "c", ""]) | RUBBISH
ROLE = st.sampled_from(["assistant", "user", "tool", "system"]) | RUBBISH
OPENAI_CALL = (
    st.fixed_dictionaries(
        {"id": ID},
        optional={
            "type": st.sampled_from(["function", "custom"]) | RUBBISH,
            "function": st.just({"name": "look", "arguments": "{}"}) | RUBBISH,
            "custom": st.just({"name": "sql", "input": ""}) | RUBBISH,
        },
    )
    | RUBBISH
)
PART = st.just(TEXT) | st.builds(use, ID, RUBBISH) | st.builds(result, ID) | RUBBISH
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE},
    optional={
        "content": st.lists(PART, max_size=4) | RUBBISH,
        "tool_calls": st.lists(OPENAI_CALL, max_size=4) | RUBBISH,
        "tool_call_id": ID,
    },
)
MESSAGES = st.lists(
    MESSAGE
    | st.builds(lambda ids: A(call=ids), st.lists(st.sampled_from("abc"), max_size=3))
    | st.builds(lambda id: T(id, "r"), st.sampled_from("abc"))
    | st.lists(st.builds(use, st.sampled_from("abc")), max_size=3).map(lambda p: assistant(*p))
    | st.lists(st.builds(result, st.sampled_from("abc")), max_size=3).map(lambda p: user(*p))
    | cast("st.SearchStrategy[Body]", RUBBISH),
    max_size=8,
)


@given(MESSAGES)
def test_closing_leaves_no_call_open_whatever_stands_there(messages: list[Body]) -> None:
    assert_closing_leaves_none_open(messages)


@given(st.lists(st.sampled_from([("call", id) for id in "abc"] + [("answer", id) for id in "abc"])))
def test_both_shapes_agree_with_a_plain_list_of_open_ids(steps: list[tuple[str, str]]) -> None:
    expected: list[str] = []
    openai: list[Body] = []
    anthropic: list[Body] = []
    for step, id in steps:
        expected = [other for other in expected if other != id]
        if step == "call":
            expected.append(id)
            openai.append(A(call=id))
            anthropic.append(assistant(use(id)))
        else:
            openai.append(T(id, "r"))
            anthropic.append(user(result(id)))
    assert ids(openai) == ids(anthropic) == expected


def test_closing_leaves_no_call_open_wherever_our_own_conversations_are_cut() -> None:
    cut_short = 0
    for line in CONVERSATIONS.read_text("ascii").splitlines():
        messages: list[Body] = json.loads(line)["messages"]
        assert open_calls(messages) == []
        for end in range(len(messages) + 1):
            cut_short += bool(open_calls(messages[:end]))
            assert_closing_leaves_none_open(messages[:end])
    assert cut_short > 0
