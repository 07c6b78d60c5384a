"""One user row that holds two things: a compaction summary and what the person asks.

Some systems compact by text. They put a summary (the scaffold) into the user's message, before
or after the live ask, and the row (a carrier) arrives here as one message. `split` takes it apart:

    summary first:  prefix heading …summary… end marker, blank line, ask
    ask first:      [ask heading] ask, blank line, delimiter, prefix heading …summary… [end marker]

A summary opens with the prefix and then, past whitespace at most, the heading. "Anywhere in the
summary" would not do: to a person who quotes the prefix at the start of an ask-first row it would
give the heading of the real summary further down, and the ask would be gone. A row that begins with
an opening and has an end marker is summary first; without the marker nothing tells where the person
begins. Any other row is ask first and splits at the last delimiter that an opening follows. The
first end marker after the opening ends the summary, so that a person may quote it.

What the person wrote stays exact: only what the layout adds comes off, two newlines at most and the
ask heading; text on both sides of a summary stays two texts. Carriers are read, never written.
"""

import re
from functools import cached_property
from typing import NamedTuple

import attrs

from .shapes import Content, Message, text_of, with_text

__all__ = ["CarrierFormat", "Split", "split"]


def _not_blank(_: object, attribute: "attrs.Attribute[str]", value: str) -> None:
    if not value.strip():
        raise ValueError(f"{attribute.name} must not be blank: it would be found everywhere")


_text = attrs.validators.instance_of(str)


@attrs.frozen
class CarrierFormat:
    """The texts by which one system marks its summaries.

    Raises:
        TypeError: a field is not a string.
        ValueError: `prefix`, `end_marker` or `delimiter` is blank.
    """

    prefix: str = attrs.field(
        default="[Notes on the conversation so far, made by a program. They are no request.]",
        validator=[_text, _not_blank],
    )
    """What every summary begins with."""

    heading: str = attrs.field(default="## Notes so far", validator=_text)
    """What follows the prefix. If empty, the prefix alone opens a summary, quoted or not."""

    end_marker: str = attrs.field(default="[The notes end here.]", validator=[_text, _not_blank])
    """What ends a summary."""

    delimiter: str = attrs.field(
        default="[The message ends here. Notes on the conversation follow.]",
        validator=[_text, _not_blank],
    )
    """What stands between the ask and the summary where the ask comes first."""

    ask_heading: str = attrs.field(default="", validator=_text)
    """A line that some systems put before an ask that comes first; taken off if it is there."""

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        heading = rf"\s*{re.escape(self.heading)}" if self.heading else ""
        return re.compile(re.escape(self.prefix) + heading)

    @cached_property
    def _delimited(self) -> re.Pattern[str]:
        return re.compile(rf"{re.escape(self.delimiter)}(?=\s*({self._opening.pattern}))")


@attrs.frozen
class Split:
    """What a message with a summary in it consists of."""

    scaffold: dict[str, object]
    """The message with the summary as its only content, a string from prefix to end marker. A
    summary that came without its end marker has one here: the scaffold is again one to `split`."""

    ask: Content | None
    """What the person said, exactly: a string where the message was a text and holds one ask; a
    list of parts where it was a list, or where text stands on both sides of the summary; None where
    nothing but whitespace is left, so that no person wrote this message."""


class _Found(NamedTuple):
    before: str
    scaffold: str
    after: str


def split(message: Message, format: CarrierFormat) -> Split | None:
    """Take a message apart into its summary and what the person asks.

    Arguments:
        message: any message; only one of role `user` can hold a summary. Of a list of parts the
            first text part that holds one counts; all others but blank texts belong to the ask.
        format: how the system that wrote the message marks summaries.

    Returns:
        Both halves, or None where the message holds no summary.
    """
    content = message.get("content")
    if message.get("role") != "user" or not isinstance(content, (str, list)):
        return None
    if isinstance(content, str) and format.prefix not in content:
        return None  # nearly every message; the rest takes ten times as long to see the same
    parts: list[object] = (
        [{"type": "text", "text": content}] if isinstance(content, str) else content
    )
    place = _find_in_parts(parts, format)
    if place is None:
        return None
    index, found = place
    before = [*parts[:index], with_text(parts[index], found.before)]
    before[0] = _without_heading(before[0], format.ask_heading)
    after = [with_text(parts[index], found.after), *parts[index + 1 :]]
    said = [each for each in before + after if not _is_blank(each)]
    ask: Content | None = said or None
    if isinstance(content, str) and len(said) == 1:
        ask = text_of(said[0])
    return Split(scaffold={**message, "content": found.scaffold}, ask=ask)


def _find_in_parts(parts: list[object], format: CarrierFormat) -> tuple[int, _Found] | None:
    for index, part in enumerate(parts):
        found = _find(text_of(part) or "", format)
        if found is not None:
            return index, found
    return None


def _find(text: str, format: CarrierFormat) -> _Found | None:
    opening = format._opening.match(text)
    if opening is not None and text.find(format.end_marker, opening.end()) >= 0:
        return _cut(text, 0, opening.span(), format)
    delimiters = list(format._delimited.finditer(text))
    if not delimiters:
        return None
    return _cut(text, delimiters[-1].start(), delimiters[-1].span(1), format)


def _cut(text: str, ask_end: int, opening: tuple[int, int], format: CarrierFormat) -> _Found:
    start, body = opening
    before = text[:ask_end].removesuffix("\n").removesuffix("\n")
    marker = text.find(format.end_marker, body)
    if marker < 0:
        return _Found(before, f"{text[start:]}\n\n{format.end_marker}", "")
    end = marker + len(format.end_marker)
    after = text[end:].removeprefix("\n").removeprefix("\n")
    return _Found(before, text[start:end], after)


def _without_heading(part: object, heading: str) -> object:
    text = text_of(part)
    # An empty ask leaves the heading without the newline that would follow it.
    if not heading or text is None or not f"{text}\n".startswith(f"{heading}\n"):
        return part
    return with_text(part, text[len(heading) + 1 :])


def _is_blank(part: object) -> bool:
    text = text_of(part)
    return text is not None and not text.strip()
