"""What a retry may send again: the exact text, or nothing and the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper.actors.conversation import CarrierFormat, NotRetryable, retry_text

FORMAT = CarrierFormat()
SCAFFOLD = f"{FORMAT.prefix}\n{FORMAT.heading}\nold task\n\n{FORMAT.end_marker}"
IMAGE = {"type": "image_url", "image_url": {"url": "image"}}


def user(content: object, **extra: object) -> dict[str, object]:
    return {"role": "user", "content": content, **extra}


def text_part(text: object, **extra: object) -> dict[str, object]:
    return {"type": "text", "text": text, **extra}


def reason(message: dict[str, object]) -> str:
    with pytest.raises(NotRetryable) as refused:
        retry_text(message, FORMAT)
    assert str(refused.value) == refused.value.reason
    return refused.value.reason


said = st.text().filter(lambda text: bool(text.strip()))


@given(said)
def test_a_text_comes_back_to_the_letter_as_a_string_and_as_one_part(text: str) -> None:
    assert retry_text(user(text), FORMAT) == text
    assert retry_text(user([text_part(text)]), FORMAT) == text


@given(said)
def test_c01_a_carrier_is_retried_with_its_ask_alone(ask: str) -> None:
    summary_first = f"{SCAFFOLD}\n\n{ask}"
    ask_first = f"{ask}\n\n{FORMAT.delimiter}\n\n{SCAFFOLD}"
    for content in (summary_first, ask_first):
        assert retry_text(user(content), FORMAT) == ask
        assert retry_text(user([text_part(content)]), FORMAT) == ask


def test_c01_an_ask_that_quotes_the_end_marker_is_retried_whole() -> None:
    ask = f"what is {FORMAT.end_marker} for?"
    assert retry_text(user(f"{SCAFFOLD}\n\n{ask}"), FORMAT) == ask


@pytest.mark.parametrize(
    "content",
    [
        [text_part("look again"), IMAGE],
        [IMAGE],
        [
            text_part("listen"),
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        ],
        [text_part("a"), {"type": "from_the_future", "text": "b"}],
        [{"type": "tool_result", "tool_use_id": "c1", "content": "r"}],
        [{"text": "no type"}],
        [text_part(None)],
        ["a bare string"],
        [None],
        {"text": "no list"},
        17,
        [text_part(f"{SCAFFOLD}\n\nREAL ASK"), IMAGE],
        [text_part("a", cache_control={}), text_part("b"), IMAGE],
    ],
)
def test_c10_what_is_no_text_is_refused(content: object) -> None:
    assert "media or unknown content" in reason(user(content))


@pytest.mark.parametrize(
    "part",
    [
        text_part("a", cache_control={"type": "ephemeral"}),
        text_part("a", annotations=[]),
        text_part(f"{SCAFFOLD}\n\nREAL ASK", cache_control={"type": "ephemeral"}),
    ],
)
def test_c10_an_annotated_text_is_refused(part: object) -> None:
    assert "annotations" in reason(user([part]))


@pytest.mark.parametrize("content", ["", " \n\t", [], [text_part("")], [text_part("\u2003\n")]])
def test_c10_an_empty_text_is_refused(content: object) -> None:
    assert "no text" in reason(user(content))


def test_c10_missing_content_is_refused() -> None:
    assert "no content" in reason(user(None))
    assert "no content" in reason({"role": "user"})


def test_several_texts_are_refused_for_joined_they_are_another_message() -> None:
    assert "several" in reason(user([text_part("a"), text_part("b")]))
    both_sides = f"a\n\n{FORMAT.delimiter}\n\n{SCAFFOLD}\n\nb"
    assert "several" in reason(user(both_sides))


@pytest.mark.parametrize("content", [SCAFFOLD, f"{SCAFFOLD}\n\n ", [text_part(SCAFFOLD)]])
def test_a_summary_without_an_ask_is_refused(content: object) -> None:
    assert "summary" in reason(user(content))


@pytest.mark.parametrize("role", ["assistant", "system", "tool", None])
def test_what_is_no_user_message_is_refused(role: object) -> None:
    assert "not a user message" in reason({"role": role, "content": "a"})


def test_a_platforms_keys_beside_the_content_are_no_reason_to_refuse() -> None:
    assert retry_text(user("a", name="ann", message_id=7, reply_to=None), FORMAT) == "a"


def test_a_refusal_is_a_value_error_whose_text_is_the_reason() -> None:
    with pytest.raises(ValueError, match="media or unknown content"):
        retry_text(user([IMAGE]), FORMAT)
