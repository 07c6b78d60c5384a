"""Answers from any endpoint that speaks OpenAI's chat completions, streamed.

The stream is server-sent events: lines ``data: {json}``, each with the next piece, then
``data: [DONE]``. An answer is whole when the endpoint says so, by that line or by a
`finish_reason`. A stream that merely stops was cut, however good its last sentence looks.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus

import httpx
import trio
from lines import LineBuffer
from responder import NoAnswer, Responder

__all__ = ["from_environment", "openai_endpoint"]

CONNECT_TIMEOUT_S = 10.0
"""A guess: whoever does not answer by then is not there."""

MAX_REASON_LENGTH = 300
"""Characters of an endpoint's own words that a person is shown when it fails."""


def from_environment(environ: Mapping[str, str]) -> AbstractAsyncContextManager[Responder]:
    """Return the endpoint that the OPENAI_ variables name. Raises ValueError for what cannot be."""
    api_key = environ.get("OPENAI_API_KEY", "").strip()
    if not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("OPENAI_API_KEY: holds characters that no key has")
    timeout = environ.get("OPENAI_TIMEOUT") or "60"
    try:
        timeout_s = float(timeout)
    except ValueError:
        timeout_s = 0
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"OPENAI_TIMEOUT: must be a number of seconds, not {timeout!r}")
    model = environ.get("OPENAI_MODEL") or "gpt-4o-mini"
    base_url = environ["OPENAI_BASE_URL"].strip()
    return openai_endpoint(base_url, api_key=api_key, model=model, timeout_s=timeout_s)


@asynccontextmanager
async def openai_endpoint(
    base_url: str, *, api_key: str, model: str, timeout_s: float
) -> AsyncIterator[Responder]:
    """Give a responder that asks `model` at `base_url`; its connections close with the block.

    It gives up when the endpoint sends nothing for `timeout_s` seconds; a long answer may take
    longer than that. Without an `api_key` none is sent: local servers need none.
    """
    url = f"{base_url.rstrip('/')}/chat/completions"
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))

    async with httpx.AsyncClient(headers=headers, timeout=timeout) as client:

        async def respond(
            messages: Sequence[dict[str, object]], say: Callable[[str], None]
        ) -> None:
            asked = {"model": model, "messages": messages, "stream": True}
            # Not httpx's `json=`, which fails on half of a surrogate pair; escapes carry it.
            body = json.dumps(asked).encode("ascii")
            try:
                async with client.stream("POST", url, content=body) as response:
                    if response.status_code != HTTPStatus.OK:
                        raise NoAnswer(_refusal(response, await response.aread()))
                    await _read_answer(response, say)
            except httpx.TimeoutException:
                raise NoAnswer(f"the endpoint sent nothing for {timeout_s:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise NoAnswer(
                    f"the endpoint failed: {str(error) or type(error).__name__}"
                ) from None

        yield respond


async def _read_answer(response: httpx.Response, say: Callable[[str], None]) -> None:
    """Say the pieces of the answer as they arrive; return once it is whole."""
    answer = _Answer(say)
    # Left by a cancellation and not by `return`, which would leave httpx's async generators
    # half-run for the garbage collector; so they end in order, where they wait.
    with trio.CancelScope() as reading:
        async for chunk in response.aiter_bytes():
            if not answer.over:
                answer.feed(chunk)
            if answer.over:
                reading.cancel()
    if answer.problem:
        raise NoAnswer(answer.problem)
    if not answer.over:
        raise NoAnswer("the endpoint stopped before its answer was whole")
    if not answer.said_anything:
        raise NoAnswer("the endpoint sent an empty answer")


class _Answer:
    """The events of one stream: bytes in, pieces out."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._buffer = LineBuffer()
        self.said_anything = False
        self.over = False
        """Nothing more is to be read: the answer is whole, or there is a problem."""
        self.problem: str | None = None

    def feed(self, chunk: bytes) -> None:
        for line in self._buffer.feed(chunk):
            # Other lines are blank, name the event, or are comments that keep the line alive.
            if line.startswith(b"data:") and not self.over:
                self._take(line.removeprefix(b"data:").strip())

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.over = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            self._fail("the endpoint sent something that is not JSON")
            return
        match event:
            case {"error": problem} if problem:  # it failed after it had said 200
                self._fail(f"the endpoint says: {_reason(event)}")
            case {"choices": [{**choice}, *_]}:
                delta = choice.get("delta")
                piece = delta.get("content") if isinstance(delta, dict) else None
                if isinstance(piece, str) and piece:
                    self.said_anything = True
                    self._say(piece)
                self.over = bool(choice.get("finish_reason"))
        # Whatever else comes tells about the answer, or is newer than this file.

    def _fail(self, problem: str) -> None:
        self.over, self.problem = True, problem


def _refusal(response: httpx.Response, body: bytes) -> str:
    try:
        reason = _reason(json.loads(body))
    except (ValueError, RecursionError):
        reason = body.decode("utf-8", "replace")  # a proxy's page, as likely as not
    said = f"the endpoint says {response.status_code} {response.reason_phrase}"
    reason = " ".join(reason.split())[:MAX_REASON_LENGTH]
    return f"{said}: {reason}" if reason else said


def _reason(answer: object) -> str:
    match answer:
        case {"error": {"message": str(message)}} | {"error": str(message)}:
            return message
    return json.dumps(answer)[:MAX_REASON_LENGTH]
