"""Both layouts, there and back: whatever ask and summary say, `split` gives them back exactly."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from turnkeeper.actors.conversation import CarrierFormat, Split, split

OURS = CarrierFormat()
THEIRS = CarrierFormat(
    prefix="[BACKGROUND ONLY] Older turns follow as a digest; answer the newest message.",
    heading="## Old task",
    end_marker="--- digest ends, answer below ---",
    delimiter="[TAIL ENDS, DIGEST BELOW]",
    ask_heading="[OLDER TAIL, not a new message]",
)
FORMATS = [OURS, THEIRS, CarrierFormat(heading="")]


def user(content: object, **extra: object) -> dict[str, object]:
    return {"role": "user", "content": content, **extra}


def text_part(text: str, **extra: object) -> dict[str, object]:
    return {"type": "text", "text": text, **extra}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def render_scaffold(format: CarrierFormat, summary: str) -> str:
    return f"{format.prefix}\n{format.heading}\n{summary}\n\n{format.end_marker}"


def render_summary_first(format: CarrierFormat, summary: str, ask: str) -> str:
    return f"{render_scaffold(format, summary)}\n\n{ask}"


def render_ask_first(format: CarrierFormat, summary: str, ask: str) -> str:
    heading = f"{format.ask_heading}\n" if format.ask_heading else ""
    return f"{heading}{ask}\n\n{format.delimiter}\n\n{render_scaffold(format, summary)}"


RENDERERS = [render_summary_first, render_ask_first]


def opening(format: CarrierFormat) -> str:
    return f"{format.prefix}\n{format.heading}"


def squeezed(text: str) -> str:
    return "".join(text.split())


def texts(format: CarrierFormat) -> st.SearchStrategy[str]:
    """Texts that love the marks of the format, whole ones and halves, and newlines at the edges."""
    marks = [format.prefix, format.heading, format.end_marker, format.delimiter, format.ask_heading]
    pieces = st.one_of(
        st.sampled_from([*marks, opening(format), *(mark[:9] for mark in marks)]),
        st.sampled_from(["\n", "\n\n", " ", "REAL ASK", "é"]),
        st.text(max_size=5),
    )
    return st.lists(pieces, max_size=8).map("".join)


formats = st.sampled_from(FORMATS)
formats_and_two_texts = formats.flatmap(lambda f: st.tuples(st.just(f), texts(f), texts(f)))


# There and back


@given(formats_and_two_texts)
@example((OURS, "s", f"quote {OURS.end_marker} end"))
@example((OURS, "s", "\n\n  indented, with newlines at both ends\n\n"))
@example((THEIRS, "s", f"x\n\n{THEIRS.delimiter}\n\n{opening(THEIRS)}\ny"))
def test_a_summary_first_carrier_gives_back_any_ask_exactly(
    case: tuple[CarrierFormat, str, str],
) -> None:
    format, summary, ask = case
    assume(ask.strip())
    # The first end marker ends the summary: the one thing that a summary cannot say here.
    assume(format.end_marker not in f"{summary}\n\n{format.end_marker[:-1]}")

    halves = split(user(render_summary_first(format, summary, ask)), format)

    assert halves == Split(scaffold=user(render_scaffold(format, summary)), ask=ask)


@given(formats_and_two_texts)
@example((OURS, "s", f"quote {OURS.end_marker} end"))
@example((OURS, "s", f"x {OURS.delimiter} y\n\n{OURS.delimiter}\n\n{opening(OURS)}\nz"))
@example((OURS, "s", f"{OURS.prefix} is what I keep seeing"))
@example((THEIRS, "s", f"{THEIRS.ask_heading}\nquoted"))
@example((THEIRS, "s", "\n\n  newlines at both ends\n\n"))
def test_an_ask_first_carrier_gives_back_any_ask_exactly(
    case: tuple[CarrierFormat, str, str],
) -> None:
    format, summary, ask = case
    assume(ask.strip())
    assume(format.end_marker not in f"{summary}\n\n{format.end_marker[:-1]}")
    # The last delimiter before an opening is the real one.
    assume(format.delimiter not in summary)
    # A row that begins with an opening is read summary first.
    assume(format.ask_heading or not squeezed(ask).startswith(squeezed(opening(format))))

    halves = split(user(render_ask_first(format, summary, ask)), format)

    assert halves == Split(scaffold=user(render_scaffold(format, summary)), ask=ask)


@given(formats, st.sampled_from(RENDERERS), st.text())
def test_a_scaffold_is_a_scaffold_again_and_has_nothing_of_the_ask(
    format: CarrierFormat, render: object, ask: str
) -> None:
    assert callable(render)
    halves = split(user(render(format, "old task", f"REAL ASK {ask}")), format)
    assert halves is not None
    assert "REAL ASK" not in str(halves.scaffold["content"])
    assert split(halves.scaffold, format) == Split(scaffold=halves.scaffold, ask=None)


@given(
    st.one_of(st.none(), st.text(), st.lists(st.one_of(st.text(), st.builds(text_part, st.text()))))
)
def test_what_holds_no_marks_holds_no_summary(content: object) -> None:
    assert split(user(content), OURS) is None


# Cases


@pytest.mark.parametrize("render", RENDERERS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ask", ["new ask", "what does {} mean?"])
def test_c01_the_ask_of_a_carrier_comes_back_to_the_letter_in_both_layouts(
    render: object, format: CarrierFormat, ask: str
) -> None:
    assert callable(render)
    ask = ask.replace("{}", format.end_marker)

    halves = split(user(render(format, "S1", ask)), format)

    assert halves == Split(scaffold=user(render_scaffold(format, "S1")), ask=ask)


def test_c01_a_carrier_built_like_the_gateways_fixture_is_split() -> None:
    content = f"{THEIRS.prefix}\n{THEIRS.heading}\nold task\n\n{THEIRS.end_marker}\n\nREAL ASK"

    halves = split({"role": "user", "content": content}, THEIRS)

    assert halves is not None
    assert halves.ask == "REAL ASK"
    assert halves.scaffold["content"] == content.removesuffix("\n\nREAL ASK")


# What is no summary


@pytest.mark.parametrize("role", ["assistant", "system", "tool", None])
def test_only_user_messages_are_split(role: object) -> None:
    content = render_summary_first(OURS, "s", "ask")
    assert split({"role": role, "content": content}, OURS) is None


@pytest.mark.parametrize(
    "content",
    [
        OURS.prefix,
        f"{OURS.prefix} why do I see this?",
        f"{OURS.prefix} why do I see this {OURS.end_marker}?",
        f"{OURS.prefix} is above {OURS.heading}, and below them {OURS.end_marker}",
        f"{opening(OURS)}\nwithout an end marker",
        f"why do I see\n{render_scaffold(OURS, 's')}",
        f"why do I see {OURS.delimiter}?",
        f"why do I see {OURS.delimiter} and {opening(OURS)}",
        None,
        [],
        {"text": render_scaffold(OURS, "s")},
        [render_scaffold(OURS, "s")],
        [{"type": "text", "text": None}, {"type": "tool_result", "text": opening(OURS)}, IMAGE],
    ],
)
def test_a_person_who_quotes_the_marks_is_not_taken_for_a_summary(content: object) -> None:
    assert split(user(content), OURS) is None


def test_a_message_without_content_holds_no_summary() -> None:
    assert split({"role": "user"}, OURS) is None


def test_an_ask_that_begins_with_the_prefix_is_not_read_as_the_summary_that_follows_it() -> None:
    ask = f"{OURS.prefix} is what I keep seeing"
    halves = split(user(render_ask_first(OURS, "s", ask)), OURS)
    assert halves == Split(scaffold=user(render_scaffold(OURS, "s")), ask=ask)


# Scaffolds


@pytest.mark.parametrize("tail", ["", "\n", "\n\n", "\n\n \t\n\n\n"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_summary_with_nothing_but_whitespace_beside_it_has_no_ask(
    format: CarrierFormat, tail: str
) -> None:
    pure = render_scaffold(format, "s")
    none = Split(scaffold=user(pure), ask=None)
    assert split(user(pure + tail), format) == none
    assert split(user([text_part(pure + tail)]), format) == none
    assert split(user(render_ask_first(format, "s", tail)), format) == none
    assert split(user(render_ask_first(format, "s", tail) + tail), format) == none


def test_a_scaffold_keeps_the_other_keys_of_its_message_and_the_message_is_left_alone() -> None:
    content = render_summary_first(OURS, "s", "ask")
    message = user(content, name="ann", platform_id=7)

    halves = split(message, OURS)

    assert halves is not None
    assert halves.scaffold == user(render_scaffold(OURS, "s"), name="ann", platform_id=7)
    assert message == user(content, name="ann", platform_id=7)


@pytest.mark.parametrize("gap", ["", " ", "\n\n", "\n \n"])
def test_whitespace_between_prefix_and_heading_is_free(gap: str) -> None:
    scaffold = f"{OURS.prefix}{gap}{OURS.heading}\ns\n\n{OURS.end_marker}"
    assert split(user(f"{scaffold}\n\nask"), OURS) == Split(scaffold=user(scaffold), ask="ask")


def test_an_end_marker_inside_the_prefix_does_not_end_the_summary() -> None:
    format = CarrierFormat(prefix="[digest; ends at <end>]", heading="", end_marker="<end>")
    content = render_summary_first(format, "s", "ask")
    halves = split(user(content), format)
    assert halves == Split(scaffold=user(render_scaffold(format, "s")), ask="ask")
    assert split(user(f"{format.prefix} why do I see this?"), format) is None


# Ask first


def test_a_summary_that_comes_last_may_lack_its_end_marker_and_is_given_it() -> None:
    marked = render_ask_first(OURS, "s", "ask")
    halves = split(user(marked.removesuffix(f"\n\n{OURS.end_marker}")), OURS)
    assert halves == Split(scaffold=user(render_scaffold(OURS, "s")), ask="ask")


def test_the_delimiter_needs_no_blank_lines_around_it() -> None:
    content = f"ask\n{OURS.delimiter}\n{render_scaffold(OURS, 's')}"
    assert split(user(content), OURS) == Split(user(render_scaffold(OURS, "s")), "ask")


def test_an_ask_heading_is_taken_off_once_and_need_not_be_there() -> None:
    whole = render_ask_first(THEIRS, "s", f"{THEIRS.ask_heading}\nask")
    bare = whole.removeprefix(f"{THEIRS.ask_heading}\n{THEIRS.ask_heading}\n")
    scaffold = user(render_scaffold(THEIRS, "s"))
    assert split(user(whole), THEIRS) == Split(scaffold, f"{THEIRS.ask_heading}\nask")
    assert split(user(bare), THEIRS) == Split(scaffold, "ask")


def test_an_ask_heading_is_only_a_heading_with_a_line_of_its_own() -> None:
    content = render_ask_first(OURS, "s", "Question: what now?")
    format = CarrierFormat(ask_heading="Question")
    halves = split(user(content), format)
    assert halves is not None
    assert halves.ask == "Question: what now?"


def test_a_heading_with_nothing_under_it_is_no_ask() -> None:
    content = f"{THEIRS.ask_heading}\n\n{THEIRS.delimiter}\n\n{render_scaffold(THEIRS, 's')}"
    assert split(user(content), THEIRS) == Split(user(render_scaffold(THEIRS, "s")), None)


def test_texts_on_both_sides_of_a_summary_stay_two_texts() -> None:
    content = render_ask_first(OURS, "s", "first") + "\n\nsecond"
    halves = split(user(content), OURS)
    assert halves == Split(
        scaffold=user(render_scaffold(OURS, "s")), ask=[text_part("first"), text_part("second")]
    )


# Lists of parts


@pytest.mark.parametrize("render", RENDERERS)
def test_an_ask_in_a_list_of_parts_is_a_list_with_everything_beside_the_summary(
    render: object,
) -> None:
    assert callable(render)
    carrier = text_part(render(OURS, "s", "look"))
    scaffold = user(render_scaffold(OURS, "s"))
    assert split(user([carrier]), OURS) == Split(scaffold, [text_part("look")])
    assert split(user([carrier, IMAGE]), OURS) == Split(scaffold, [text_part("look"), IMAGE])
    assert split(user([IMAGE, carrier]), OURS) == Split(scaffold, [IMAGE, text_part("look")])


def test_a_summary_in_a_part_of_its_own_leaves_the_other_parts_as_they_are() -> None:
    summary = text_part(render_scaffold(OURS, "s") + "\n\n")
    halves = split(user([summary, text_part("\nlook "), "bare", IMAGE]), OURS)
    assert halves is not None
    assert halves.ask == [text_part("\nlook "), "bare", IMAGE]


def test_an_ask_first_carrier_may_be_spread_over_the_parts() -> None:
    summary = f"\n\n{THEIRS.delimiter}\n\n{render_scaffold(THEIRS, 's')}"
    parts = [text_part(f"{THEIRS.ask_heading}\n"), text_part("look"), IMAGE, text_part(summary)]
    halves = split(user(parts), THEIRS)
    assert halves == Split(user(render_scaffold(THEIRS, "s")), [text_part("look"), IMAGE])


def test_annotations_of_a_carriers_part_stay_with_the_ask() -> None:
    carrier = text_part(
        render_summary_first(OURS, "s", "look"), cache_control={"type": "ephemeral"}
    )
    halves = split(user([carrier]), OURS)
    assert halves is not None
    assert halves.ask == [text_part("look", cache_control={"type": "ephemeral"})]
    assert halves.scaffold["content"] == render_scaffold(OURS, "s")


def test_an_image_beside_a_summary_is_an_ask() -> None:
    halves = split(user([text_part(render_scaffold(OURS, "s")), IMAGE]), OURS)
    assert halves is not None
    assert halves.ask == [IMAGE]


# The format


@pytest.mark.parametrize("name", ["prefix", "end_marker", "delimiter"])
@pytest.mark.parametrize("value", ["", " \n"])
def test_a_mark_that_would_be_found_everywhere_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        CarrierFormat(**{name: value})


@pytest.mark.parametrize("name", ["prefix", "heading", "end_marker", "delimiter", "ask_heading"])
def test_a_mark_is_a_string(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        CarrierFormat(**{name: None})  # type: ignore[arg-type]


def test_marks_are_read_literally_and_not_as_patterns() -> None:
    format = CarrierFormat(prefix="(a|b)*", heading="[x]+", end_marker="$^", delimiter="a.c\\d")
    content = render_ask_first(format, "s", "abc1 aab x ask")
    halves = split(user(content), format)
    assert halves == Split(user(render_scaffold(format, "s")), "abc1 aab x ask")


def test_formats_with_the_same_texts_are_equal() -> None:
    assert CarrierFormat() == OURS
    assert hash(CarrierFormat()) == hash(OURS)
    assert CarrierFormat(heading="") != OURS
