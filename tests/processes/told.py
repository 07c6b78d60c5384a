"""What is told between processes, as JSON: receipts and errors by their fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from turnkeeper.actors import Transcript

__all__ = ["error_of", "plain"]


def plain(value: object) -> object:
    """Return `value` as JSON can say it: records become objects of their fields."""
    if isinstance(value, Transcript):
        bodies = [message.body for message in value]
        return {"revision": value.revision, "position": value.position, "bodies": bodies}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    kind = type(value)
    if attrs.has(kind):
        return {part.name: plain(getattr(value, part.name)) for part in attrs.fields(kind)}
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(part) for part in value]
    return value


def error_of(error: Exception) -> dict[str, object]:
    """Return the type of `error`, its text and its facts."""
    facts = {name: fact for name, fact in vars(error).items() if not name.startswith("_")}
    return {"type": type(error).__name__, "text": str(error), **facts}
