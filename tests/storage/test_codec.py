from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import A, S, T, U

from turnkeeper.actors import Rejected, open_sessions
from turnkeeper.storage import (
    DEFAULT_MAX_MESSAGE_BYTES,
    MAX_DEPTH,
    check_text,
    decode_message,
    encode_message,
    encode_object,
    inline,
    same_message,
)
from turnkeeper.storage.codec import decode_object

TWO_HALVES = "\ud83d\ude00"
EMOJI = "\N{GRINNING FACE}"

CONTENTS: dict[str, object] = {
    "text": "hello",
    "empty": "",
    "null": None,
    "digits": "123",
    "the word null": "null",
    "a list of parts": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}],
    "an empty list": [],
    "an empty object": {},
    "a big integer": {"n": 2**63},
    "a huge integer": {"n": -(10**3_900)},
    "true": True,
    "one": 1,
    "one point nought": 1.0,
    "minus nought": -0.0,
    "the largest float": 1.7976931348623157e308,
    "the smallest float": 5e-324,
    "emoji": "👩‍👩‍👧‍👦 🇵🇱",
    "right to left": "\u202eשלום العربية",
    "combining marks": "e\u0301 is not \u00e9",
    "NUL": "before\0after",
    "only a NUL": "\0",
    "a byte order mark": "\ufefftext",
    "a line separator": "\u2028\u2029",
    "SQL": "'; DROP TABLE messages; --",
    "a lone surrogate": "half \ud800 of it",
    "two lone halves": TWO_HALVES,
    "a lone surrogate in a part": [{"type": "text", "text": "\udfff"}],
    "surrogates and NUL": "\0\udc00\0",
}

text = st.text(alphabet=st.characters(codec=None), max_size=20)  # surrogates and NUL included
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    leaves | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
roles = st.sampled_from(["user", "assistant", "system", "tool", "developer", "Narrator", "роль"])
bodies = st.builds(
    lambda role, content, rest: {**rest, **content, "role": role},
    roles,
    st.fixed_dictionaries({}, optional={"content": values}),
    st.dictionaries(text, values, max_size=4),
)


def through(message: Mapping[str, object]) -> dict[str, object]:
    return decode_message(*encode_message(message))


def exactly(value: object) -> str:
    """Tells what == does not: true from 1, 1 from 1.0, a whole character from two halves."""
    if isinstance(value, Mapping):
        return (
            "{" + ",".join(sorted(f"{key!r}:{exactly(item)}" for key, item in value.items())) + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(exactly, value)) + "]"
    return repr(value)


def nested(levels: int) -> object:
    value: object = "core"
    for level in range(levels):
        value = [value] if level % 2 else {"in": value}
    return value


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_c81_content_comes_back_equal_with_its_type(content: object) -> None:
    for message in ({"role": "user", "content": content}, {"role": "user", "more": content}):
        assert exactly(through(message)) == exactly(message)


async def test_c81_content_comes_back_equal_through_a_store(tmp_path: Path) -> None:
    sent = [{"role": "user", "content": content} for content in CONTENTS.values()]
    sent += [
        {"role": "user"},
        {"role": "user", "content": None},
        A(call=["c1", "c2"]),
        T("c1", "r"),
    ]
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        for message in sent:
            await sessions["one by one"].append(message)
        await sessions["together"].extend(sent)
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        for id in ("one by one", "together"):
            found = (await sessions[id].transcript()).bodies
            assert [exactly(body) for body in found] == [exactly(body) for body in sent]


NUMBERS = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf, "1e400": float("1e400")}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
async def test_c81_numbers_that_json_cannot_hold_are_rejected_by_field(
    tmp_path: Path, number: float
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        with pytest.raises(Rejected) as caught:
            await session.append({"role": "user", "content": [{"score": number}]})
        assert caught.value.field == "message.content[0].score"
        with pytest.raises(Rejected) as caught:
            await session.extend([U("fine"), {"role": "user", "content": "x", "score": number}])
        assert caught.value.field == "messages[1].score"
        assert await session.info() is None
        await session.append(U("later writes go on"))


async def test_c80_a_lone_surrogate_reads_back_equal_or_is_rejected_by_field(
    tmp_path: Path,
) -> None:
    half = "x\ud800y"
    call = A(call="c1")
    assert isinstance(call["tool_calls"], list)
    call["tool_calls"][0]["function"]["arguments"] = '{"q": "' + half + '"}'
    kept: list[dict[str, object]] = [
        U(half),
        call,
        T("c1", half),
        {"role": "user", "content": "x", half: half},
        {"role": "user", "content": {half: TWO_HALVES}},
    ]
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        for body in kept:
            await session.append(body)
        await session.set_meta({half: [half, TWO_HALVES]})
        with pytest.raises(Rejected) as caught:
            await session.append({"role": half, "content": "x"})
        assert caught.value.field == "message.role"
        with pytest.raises(Rejected) as caught:
            await session.append(U("x"), key=half)
        assert caught.value.field == "key"
        with pytest.raises(Rejected) as caught:
            sessions[half]
        assert caught.value.field == "id"
        with pytest.raises(Rejected) as caught:
            await session.fork(half)
        assert caught.value.field == "id"
        with pytest.raises(Rejected) as caught:
            await sessions.delete(half)
        assert caught.value.field == "id"
        await session.append(U("later writes go on"))
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        session = sessions["a"]
        assert (await session.transcript()).bodies == [*kept, U("later writes go on")]
        assert exactly(await session.meta()) == exactly({half: [half, TWO_HALVES]})


@settings(deadline=None)
@given(bodies)
def test_every_json_message_comes_back_equal(body: dict[str, object]) -> None:
    columns = encode_message(body)
    assert exactly(decode_message(*columns)) == exactly(body)
    assert same_message(columns, encode_message(dict(reversed(body.items()))))


@settings(deadline=None)
@given(st.dictionaries(text, values, max_size=5))
def test_every_json_object_comes_back_equal_as_meta(meta: dict[str, object]) -> None:
    packed = encode_object(meta, field="meta", max_bytes=DEFAULT_MAX_MESSAGE_BYTES)
    assert exactly(decode_object(packed)) == exactly(meta)


@pytest.mark.parametrize("key", ["content", "metadata"])
def test_nesting_is_held_to_the_limit_and_rejected_beyond(key: str) -> None:
    room = MAX_DEPTH if key == "content" else MAX_DEPTH - 1
    message = {"role": "user", key: nested(room)}
    assert through(message) == message
    for levels in (room + 1, 100_000):
        with pytest.raises(Rejected, match="nested deeper than 100 levels") as caught:
            encode_message({"role": "user", key: nested(levels)})
        assert caught.value.field.startswith(f"message.{key}")
    round: list[object] = []
    round.append(round)
    with pytest.raises(Rejected, match="nested deeper"):
        encode_message({"role": "user", key: round})


def test_subclasses_of_json_types_are_taken_for_what_they_are() -> None:
    class Words(str):
        pass

    class Number(enum.IntEnum):
        TWO = 2

    class Word(enum.StrEnum):
        USER = "user"

    class Parts(list[object]):
        pass

    class Rate(float):
        pass

    message = OrderedDict(
        role=Words("user"),
        content=Parts([Words("x"), Number.TWO, defaultdict(None, k=Word.USER)]),
        rate=Rate(0.5),
    )
    plain = {"role": "user", "content": ["x", 2, {"k": "user"}], "rate": 0.5}
    assert exactly(through(message)) == exactly(plain)
    assert exactly(through(MappingProxyType(message))) == exactly(plain)
    columns = encode_message({"role": Word.USER, "content": Words("x")})
    assert exactly(decode_message(*columns)) == exactly(U("x"))


def test_a_role_may_be_a_member_of_an_enum_of_strings() -> None:
    class Role(str, enum.Enum):  # noqa: UP042, what code older than StrEnum uses
        USER = "user"

    assert through({"role": Role.USER, "content": "x"}) == U("x")


def test_the_caller_may_change_the_message_afterwards() -> None:
    parts = [{"type": "text", "text": "before"}]
    message: dict[str, object] = {"role": "user", "content": parts}
    columns = encode_message(message)
    parts[0]["text"] = "after"
    parts.clear()
    assert decode_message(*columns)["content"] == [{"type": "text", "text": "before"}]


REFUSED: dict[str, tuple[object, str]] = {
    "a list": ([], "message"),
    "a string": ("user: hi", "message"),
    "None": (None, "message"),
    "no role": ({"content": "x"}, "message.role"),
    "an empty object": ({}, "message.role"),
    "an empty role": ({"role": ""}, "message.role"),
    "a role that is a number": ({"role": 1}, "message.role"),
    "a role that is null": ({"role": None}, "message.role"),
    "a role with NUL": ({"role": "us\0er"}, "message.role"),
    "a long role": ({"role": "r" * 101}, "message.role"),
    "bytes": ({"role": "user", "content": b"x"}, "message.content"),
    "a bytearray": ({"role": "user", "content": bytearray(b"x")}, "message.content"),
    "a tuple": ({"role": "user", "content": ("x",)}, "message.content"),
    "a set": ({"role": "user", "content": {"x"}}, "message.content"),
    "bytes in a part": ({"role": "user", "content": [{"data": b"x"}]}, "message.content[0].data"),
    "a tuple in a call": (
        {"role": "assistant", "tool_calls": [{"id": "c"}, {"function": {"arguments": ()}}]},
        "message.tool_calls[1].function.arguments",
    ),
    "an object": ({"role": "user", "content": object()}, "message.content"),
    "a mapping that is no dict, inside": (
        {"role": "user", "content": MappingProxyType({})},
        "message.content",
    ),
    "a key that is a number": ({"role": "user", 1: "x"}, "message"),
    "a key that is None, inside": ({"role": "user", "content": {None: "x"}}, "message.content"),
    "a key that is true, inside": ({"role": "user", "m": [{True: "x"}]}, "message.m[0]"),
    "an integer of 5,000 digits": ({"role": "user", "content": 10**5_000}, "message.content"),
}


@pytest.mark.parametrize(("message", "field"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_json_message_is_rejected_by_field(message: object, field: str) -> None:
    with pytest.raises(Rejected) as caught:
        encode_message(message)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize("role", [[], {}, ["user"]], ids=repr)
def test_a_role_that_is_a_list_or_an_object_is_rejected(role: object) -> None:
    with pytest.raises(Rejected) as caught:
        encode_message({"role": role, "content": "x"})
    assert caught.value.field == "message.role"


@pytest.mark.parametrize("value", [None, [], "x", ("x",)], ids=repr)
def test_meta_that_is_no_object_is_rejected(value: object) -> None:
    with pytest.raises(Rejected) as caught:
        encode_object(value, field="meta", max_bytes=100)
    assert caught.value.field == "meta"


def test_meta_over_the_limit_is_rejected() -> None:
    with pytest.raises(Rejected, match="meta: is 110 bytes encoded; the limit is 100"):
        encode_object({"k": "x" * 102}, field="meta", max_bytes=100)
    assert encode_object({"k": "x" * 92}, field="meta", max_bytes=100)


@pytest.mark.parametrize("letter", ["x", "é", "語", "\ud800"], ids=["1", "2", "3", "surrogate"])
def test_the_limit_counts_encoded_bytes(letter: str) -> None:
    size = len(letter.encode("utf-8", "surrogatepass"))
    quotes = 2 if letter == "\ud800" else 0
    fits = U(letter * 10)
    assert encode_message(fits, max_bytes=10 * size + quotes)
    with pytest.raises(Rejected, match="the limit is") as caught:
        encode_message(fits, max_bytes=10 * size + quotes - 1)
    assert caught.value.field == "message"


def test_the_limit_counts_content_and_the_rest_together() -> None:
    message = {"role": "user", "content": "12345", "name": "anna"}
    size = 5 + len('{"name":"anna"}')
    assert encode_message(message, max_bytes=size)
    with pytest.raises(Rejected, match=f"is {size} bytes encoded"):
        encode_message(message, max_bytes=size - 1)


async def test_a_message_over_the_default_limit_is_rejected_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        with pytest.raises(Rejected, match="the limit is 16,777,216"):
            await sessions["a"].append(U("x" * (DEFAULT_MAX_MESSAGE_BYTES + 1)))
        assert await sessions.list() == []
        await sessions["a"].append(U("x" * DEFAULT_MAX_MESSAGE_BYTES))


async def test_the_limit_is_an_option(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with open_sessions(path, offload=inline, max_message_bytes=10) as sessions:
        session = sessions["a"]
        await session.append(U("x" * 10))
        for call in (
            session.append(U("x" * 11)),
            session.extend([U("x"), U("x" * 11)]),
            session.rewrite([U("x" * 11)]),
            session.set_meta({"k": "x" * 11}),
        ):
            with pytest.raises(Rejected, match="the limit is 10"):
                await call
        assert len(await session.transcript()) == 1


DIFFERENT: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "true and 1": ({"role": "user", "content": True}, {"role": "user", "content": 1}),
    "1 and 1.0": ({"role": "user", "content": 1}, {"role": "user", "content": 1.0}),
    "false and 0, inside": ({"role": "user", "n": [False]}, {"role": "user", "n": [0]}),
    "0.0 and -0.0": ({"role": "user", "content": 0.0}, {"role": "user", "content": -0.0}),
    "null and absent": ({"role": "user", "content": None}, {"role": "user"}),
    "empty and absent": (U(""), {"role": "user"}),
    "null and 'null'": ({"role": "user", "content": None}, U("null")),
    "123 and '123'": ({"role": "user", "content": 123}, U("123")),
    "roles": (U("x"), S("x")),
    "combining marks": (U("e\u0301"), U("\u00e9")),
    "a further key": (U("x"), {**U("x"), "name": None}),
    "order in a list": ({"role": "user", "content": [1, 2]}, {"role": "user", "content": [2, 1]}),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_messages_that_python_may_call_equal_are_told_apart(
    one: dict[str, object], other: dict[str, object]
) -> None:
    assert not same_message(encode_message(one), encode_message(other))
    assert same_message(encode_message(one), encode_message(one))


@pytest.mark.parametrize("where", ["content", "name"])
def test_two_lone_halves_are_not_the_character_that_they_would_make(where: str) -> None:
    halves, whole = (encode_message({"role": "user", where: t}) for t in (TWO_HALVES, EMOJI))
    assert not same_message(halves, whole)


def test_the_order_of_keys_makes_no_difference() -> None:
    one = {"role": "user", "content": {"a": 1, "b": [{"c": 2, "d": 3}]}, "x": 1, "y": 2}
    other = {"y": 2, "x": 1, "content": {"b": [{"d": 3, "c": 2}], "a": 1}, "role": "user"}
    assert same_message(encode_message(one), encode_message(other))


SECRET = "what she said to her doctor"


class Stubborn(dict[str, object]):
    """Says one thing when it is looked over and another when it is written."""

    def __init__(self) -> None:
        super().__init__(a=1)
        self.asked = 0

    def items(self) -> object:  # type: ignore[override]  # it lies, that is its point
        self.asked += 1
        return {"a": 1}.items() if self.asked == 1 else {"a": {SECRET}}.items()


LEAKS: dict[str, object] = {
    "bytes": SECRET.encode(),
    "tuple": (SECRET,),
    "set": {SECRET},
    "NaN beside it": [SECRET, math.nan],
    "too large": SECRET * 10,
    "a key that is no string": {(SECRET,): 1},
    "an exception": ValueError(SECRET),
    "a path": Path(SECRET),
    "a stubborn object": Stubborn(),
}


@pytest.mark.parametrize("content", LEAKS.values(), ids=LEAKS)
def test_an_error_never_says_what_a_message_says(content: object) -> None:
    with pytest.raises(Rejected) as caught:
        encode_message({"role": "user", "content": content}, max_bytes=100)
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value)


@pytest.mark.parametrize(
    "key",
    [SECRET, "k" * 100_000, "two\nlines", "\ud800", "\x1b[2J"],
    ids=["words", "long", "a newline", "a surrogate", "an escape"],
)
def test_a_key_that_is_no_plain_name_is_not_spelt_out_in_an_error(key: str) -> None:
    with pytest.raises(Rejected) as caught:
        encode_message({"role": "user", "content": {key: b""}})
    shown = str(caught.value)
    assert key not in shown
    assert shown.startswith("message.content")
    assert len(shown) < 200
    assert shown.isprintable()


NAMES: dict[str, object] = {
    "empty": "",
    "too long": "x" * 11,
    "NUL": "a\0b",
    "lone surrogate": "a\ud800",
    "a number": 7,
    "bytes": b"a",
    "None": None,
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_must_be_text_of_some_length_that_utf8_can_hold(name: object) -> None:
    with pytest.raises(Rejected) as caught:
        check_text(name, "id", max_length=10)
    assert caught.value.field == "id"


@pytest.mark.parametrize("name", ["a", "x" * 10, "../../etc", "'; drop", "a\nb", " ", "語", EMOJI])
def test_any_other_text_is_just_a_name(name: str) -> None:
    assert check_text(name, "id", max_length=10) == name


def test_what_is_stored_shows_its_type_to_sql() -> None:
    assert encode_message(U("x")) == ("user", "x", None)
    assert encode_message({"role": "user"}) == ("user", b"", None)
    assert encode_message({"role": "user", "content": None}) == ("user", None, None)
    assert encode_message({"role": "user", "content": [1]}) == ("user", b"[1]", None)
    stored = encode_message({"role": "user", "content": "x", "name": "é"})
    assert isinstance(stored.extra, str)
    assert json.loads(stored.extra) == {"name": "é"}
