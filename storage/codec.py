"""A message to columns and back, losslessly.

A message becomes its role, its content and the rest. The SQL type of `content` says what it
was: TEXT a string, NULL null, an empty BLOB no content at all, any other BLOB JSON in UTF-8.
`extra` holds the remaining keys as JSON, NULL if there are none. A string that UTF-8 cannot
hold (a lone surrogate) goes into a BLOB with its surrogates passed through; escaping them as
\\uD800 was tried and is wrong, for two lone halves in a row would come back as one character.

What is read equals what was written. What could not come back equal (bytes, tuples, NaN,
infinities, keys that are not strings) is `Rejected`, and the error names the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeAlias

from .errors import Rejected, StorageDamaged

__all__ = [
    "DEFAULT_MAX_MESSAGE_BYTES",
    "MAX_DEPTH",
    "Column",
    "Columns",
    "Encoded",
    "check_text",
    "decode_message",
    "decode_object",
    "encode_message",
    "encode_object",
    "same_message",
]

Column: TypeAlias = str | bytes | None

DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""A message may be this large, encoded. A guess: above any provider's limit, below what hurts."""

MAX_DEPTH = 100
"""Lists and objects may be nested this deep. A guess, far below Python's recursion limit (1,000),
so that a message that was written can be read on any stack."""

MAX_INT_BITS = 13_000
"""About 3,900 digits. Python refuses to parse integers of more than 4,300 digits."""

USUAL_ROLES = frozenset({"user", "assistant", "system", "developer", "tool", "function"})
MAX_ROLE_LENGTH = 100
"""Characters. A guess: roles are words."""

ABSENT = b""
"""Stands for a message without a `content` key."""

_encode_json = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


class Columns(NamedTuple):
    """A message as the table holds it."""

    role: str
    content: Column
    extra: Column


def encode_message(
    message: object, *, max_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, field: str = "message"
) -> Columns:
    """Return the columns of `message`; the caller may change the object afterwards.

    `max_bytes` limits the encoded size; `field` is what errors call the message.
    Raises `Rejected` if it is not an object with a string `role`, holds a value that JSON
    cannot hold, is nested deeper than `MAX_DEPTH`, or is larger than `max_bytes`.
    """
    if not isinstance(message, (dict, Mapping)):  # dict first: asking an ABC takes far longer
        raise Rejected(field, f"must be a JSON object, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in USUAL_ROLES:
        if "role" not in message:
            raise Rejected(f"{field}.role", "is missing")
        role = check_text(role, f"{field}.role", max_length=MAX_ROLE_LENGTH)
    content = message.get("content", ABSENT)
    stored: Column
    if (
        (isinstance(content, str) and _is_utf8(content))
        or content is None
        or (content is ABSENT and "content" not in message)
    ):
        stored = content
    else:
        _check(content, f"{field}.content", 1)
        stored = _pack(content, f"{field}.content")
    extra: Column = None
    if len(message) > 1 + ("content" in message):
        rest = {key: value for key, value in message.items() if key not in ("role", "content")}
        _check(rest, field, 1)
        text = _to_json(rest, field)
        extra = text if _is_utf8(text) else text.encode("utf-8", "surrogatepass")
    size = _size(stored) + _size(extra)
    if size > max_bytes:
        raise Rejected(field, f"is {size:,} bytes encoded; the limit is {max_bytes:,}")
    # Not str(role): that of an Enum with strings is the name of its member.
    return Columns(str.__str__(role), stored, extra)


def decode_message(role: str, content: Column, extra: Column) -> dict[str, object]:
    """Return the message that `encode_message` took these columns from.

    Raises `StorageDamaged` if they are not JSON any more.
    """
    message: dict[str, object]
    try:
        if content.__class__ is bytes:
            message = {"role": role}
            if content != ABSENT:
                message["content"] = json.loads(content)
        else:
            message = {"role": role, "content": content}
        if extra is not None:
            message.update(json.loads(extra))
    except ValueError:  # whose text would quote the message
        raise StorageDamaged("reading", "a message is not what was written") from None
    return message


class Encoded(Protocol):
    """Anything that holds a message's columns."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> Column: ...
    @property
    def extra(self) -> Column: ...


def same_message(one: Encoded, other: Encoded) -> bool:
    """Return True if both are the same JSON, whatever the order of their keys.

    Stricter than Python's ==, for which true is 1 and 1 is 1.0.
    """
    if one.role != other.role:
        return False
    if one.content == other.content and one.extra == other.extra:
        return True
    return _canonical(one) == _canonical(other)


def encode_object(value: object, *, field: str, max_bytes: int) -> bytes:
    """Return a JSON object (a session's meta) as JSON in UTF-8; `Rejected` as for a message."""
    if not isinstance(value, Mapping):
        raise Rejected(field, f"must be a JSON object, not {type(value).__name__}")
    value = dict(value)
    _check(value, field, 1)
    packed = _pack(value, field)
    if len(packed) > max_bytes:
        raise Rejected(field, f"is {len(packed):,} bytes encoded; the limit is {max_bytes:,}")
    return packed


def decode_object(packed: bytes | None) -> dict[str, object]:
    """Return the object that `encode_object` packed; an empty one for None."""
    if packed is None:
        return {}
    value: dict[str, object] = json.loads(packed)
    return value


def check_text(value: object, field: str, *, max_length: int) -> str:
    """Return `value` if it can be a name: 1 to `max_length` characters, no NUL, valid UTF-8.

    Raises `Rejected` otherwise. Nothing else about it matters: it only ever becomes a bound
    parameter, never a path and never SQL.
    """
    if not isinstance(value, str):
        raise Rejected(field, f"must be a string, not {type(value).__name__}")
    if not 1 <= len(value) <= max_length:
        raise Rejected(field, f"must have 1 to {max_length:,} characters, not {len(value):,}")
    if "\0" in value:
        raise Rejected(field, "must not contain NUL")
    if not _is_utf8(value):
        raise Rejected(field, "must not contain a lone surrogate")
    return value


def _canonical(message: Encoded) -> str:
    decoded = decode_message(message.role, message.content, message.extra)
    return json.dumps(decoded, ensure_ascii=False, sort_keys=True)


def _shown(key: str) -> str:
    """Return `key` as an error may show it: a plain name, for anything else may be content."""
    return key if key.isidentifier() and key.isascii() and len(key) <= 40 else "…"


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _size(column: Column) -> int:
    if column is None:
        return 0
    if isinstance(column, bytes) or column.isascii():
        return len(column)
    return len(column.encode())


def _pack(value: object, field: str) -> bytes:
    return _to_json(value, field).encode("utf-8", "surrogatepass")


def _to_json(value: object, field: str) -> str:
    try:
        return _encode_json(value)
    except (TypeError, ValueError, RecursionError) as error:  # a subclass with ways of its own
        raise Rejected(field, f"cannot be held by JSON ({error})") from error


def _check(value: object, path: str, depth: int) -> None:
    """Raise `Rejected` at the first value under `value` that would not come back equal."""
    if value is None or isinstance(value, str):
        return
    if isinstance(value, int):
        if value.bit_length() > MAX_INT_BITS:
            raise Rejected(path, "is an integer of too many digits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise Rejected(path, f"is {value}, which JSON cannot hold")
    elif isinstance(value, (dict, list)):
        if depth > MAX_DEPTH:
            raise Rejected(path, f"is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, list):
            for index, item in enumerate(value):
                _check(item, f"{path}[{index}]", depth + 1)
        else:
            for key, item in value.items():
                if not isinstance(key, str):
                    raise Rejected(path, f"has a key that is not a string ({type(key).__name__})")
                _check(item, f"{path}.{_shown(key)}", depth + 1)
    else:
        raise Rejected(path, f"is a {type(value).__name__}, which JSON cannot hold")
