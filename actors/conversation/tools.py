"""Which tool calls of a conversation have no result yet, and the results that close them.

A provider refuses a conversation in which a call stands without its result, so a turn that ends
early, however it ends, leaves none: what is open gets a result that says that there was none.

Two shapes are known, and a conversation may mix them, for gateways translate:

              call, in an assistant message                  result
    openai    `tool_calls: [{"id": …, "function": {…}}]`     a `tool` message with `tool_call_id`
    anthropic a content part `{"type": "tool_use", "id": …}` a `user` message with content parts
                                                             `{"type": "tool_result", "tool_use_id": …}`

An id is an id: a result in one shape answers a call in the other. What is neither is passed over:

- A call whose id is no string. No result could name it; for the same reason OpenAI's old
  `function_call` is no call here: it has no id, and a `function` message answers it by name.
- A call that the provider carries out itself, such as `server_tool_use`. Its result is the
  provider's to give, under a type of its own and within the assistant's message.
- A result that stands before its call, or whose call is not there.

Every rule here takes any JSON and never raises: stored messages are what somebody once sent.
"""

# Where the rules come from.
#
# OpenAI, the types of the Chat Completions API
# (https://github.com/openai/openai-python, src/openai/types/chat/): a
# chat_completion_message_custom_tool_call_param has its name under `custom` as a function call has
# it under `function`; a chat_completion_tool_message_param must have `content`, `role` and
# `tool_call_id`, one call for each message. The API's own refusal: "An assistant message with
# 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'".
#
# Anthropic, https://platform.claude.com/docs/en/agents-and-tools/tool-use/handle-tool-calls: a
# `tool_result` part has `tool_use_id`, and optionally `content` and `is_error`; results stand in
# the user message right after the calls, before any other part of it. …/parallel-tool-use: one
# `tool_result` for each `tool_use`, all in one message. …/server-tools: a `server_tool_use` needs
# no `tool_result`. …/docs/en/api/messages, on `messages`: consecutive user messages are combined
# into one; so what closes a call may follow the message that answers the others.

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, TypeAlias

import attrs

from .shapes import Message

__all__ = ["NO_RESULT", "CallShape", "OpenCall", "open_calls", "synthetic_results"]

NO_RESULT = "[No result: the turn ended before this call was answered. It may or may not have taken effect.]"
"""What a synthetic result says, to a model: not that the call failed, for nobody knows that."""

CallShape: TypeAlias = Literal["openai", "anthropic"]
"""Whose shape a call came in, and so whose shape its result shall have."""


@attrs.frozen
class OpenCall:
    """A tool call that has no result yet."""

    id: str
    """By what its result names it."""

    shape: CallShape
    """The shape it came in."""

    name: str | None = None
    """The tool's name; None where the call does not say, or says something that is no string."""


def open_calls(messages: Iterable[Message]) -> list[OpenCall]:
    """Find the tool calls that have no result.

    An id that is called again counts as one call, made when it was called last: a result answers
    all calls of its id that stand before it, and none after it. A message that has the same call
    in both shapes made it in OpenAI's.

    Arguments:
        messages: a transcript, oldest first. A part of one will do if it begins where no call is
            open, such as at a user turn.

    Returns:
        The open calls in the order in which they were made, each id once.
    """
    calls: dict[str, OpenCall] = {}
    for message in messages:
        for id in _answered(message):
            calls.pop(id, None)
        made: dict[str, OpenCall] = {}
        for call in _made(message):
            made.setdefault(call.id, call)
        for id, call in made.items():
            calls.pop(id, None)  # Else a call made anew would keep the place of the old one.
            calls[id] = call
    return list(calls.values())


def synthetic_results(calls: Sequence[OpenCall]) -> list[dict[str, object]]:
    """Make the messages that close calls, each in the shape that its call came in.

    They belong right behind the calls and the results that these have already; behind anything
    else a provider may refuse them. Nothing in a message tells that it is synthetic, for a
    provider may refuse unknown keys too: whoever stores it marks its row.

    Arguments:
        calls: what `open_calls` returned.

    Returns:
        The messages in the order of the calls: one for each call in OpenAI's shape, one for each
        unbroken run of calls in Anthropic's. None of them opens a user turn.
    """
    messages: list[dict[str, object]] = []
    for shape, run in groupby(calls, key=lambda call: call.shape):
        if shape == "openai":
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": NO_RESULT} for call in run
            ]
        else:
            # In one message: results spread over several are against Anthropic's rules.
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "is_error": True,
                    "content": NO_RESULT,
                }
                for call in run
            ]
            messages.append({"role": "user", "content": results})
    return messages


def _made(message: object) -> Iterator[OpenCall]:
    """Yield the calls that a message makes, those in OpenAI's shape first."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return
    for call in _objects(message.get("tool_calls")):
        # Whatever its type: the rule is a result for each id, also for a type yet to come.
        id = call.get("id")
        if isinstance(id, str):
            yield OpenCall(id, "openai", _name(call.get("function")) or _name(call.get("custom")))
    for part in _objects(message.get("content")):
        id = part.get("id")
        if part.get("type") == "tool_use" and isinstance(id, str):
            yield OpenCall(id, "anthropic", _name(part))


def _answered(message: object) -> Iterator[str]:
    """Yield the ids of the calls that a message answers."""
    if not isinstance(message, Mapping) or message.get("role") not in ("tool", "user"):
        return
    id = message.get("tool_call_id")
    if message.get("role") == "tool" and isinstance(id, str):
        yield id
    for part in _objects(message.get("content")):
        id = part.get("tool_use_id")
        if part.get("type") == "tool_result" and isinstance(id, str):
            yield id


def _objects(value: object) -> Iterator[Mapping[object, object]]:
    """Yield the objects in a list; nothing if it is no list."""
    if isinstance(value, list):
        yield from (element for element in value if isinstance(element, Mapping))


def _name(value: object) -> str | None:
    name = value.get("name") if isinstance(value, Mapping) else None
    return name if isinstance(name, str) else None
