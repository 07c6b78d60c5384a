"""What is said in the random programs, and what the rules of conversation make of it.

That is written down beside each message by hand.
"""

from __future__ import annotations

from dataclasses import replace

import apsw
from hypothesis import strategies as st
from support import A, S, T, U

from machines.nouns import Body, Draft
from turnkeeper.actors import CarrierFormat

__all__ = [
    "DRAFTS",
    "ERRORS",
    "FORKS",
    "IDS",
    "KEYED",
    "SIDES",
    "SOME",
    "STALE",
    "WORDS",
    "person",
]

IDS = ("a", "b", "c")
FORKS = ("d", "e")
MARKS = CarrierFormat()


def person(text: str) -> Draft:
    return Draft(U(text), opens=True, text=text)


def summary(text: str) -> str:
    return f"{MARKS.prefix}\n{MARKS.heading}\n{text}\n{MARKS.end_marker}"


def carrier(content: str, ask: str, notes: str) -> Draft:
    return Draft(U(content), opens=True, text=ask, scaffold=U(summary(notes)))


def parts(*each: Body) -> Body:
    return {"role": "user", "content": list(each)}


def text_part(text: str, **more: object) -> Body:
    return {"type": "text", "text": text, **more}


WORDS = ("one", "two", "three")
PLAIN = [person(word) for word in WORDS] + [Draft(A(word)) for word in WORDS]
OTHER = [
    Draft(S("be kind")),
    Draft(A(call="c1"), calls=("c1",)),
    Draft(A(call=["c1", "c2"]), calls=("c1", "c2")),
    Draft(T("c1", "result"), answers=("c1",)),
    carrier(f"{summary('n1')}\n\nask one", "ask one", "n1"),
    carrier(f"{summary('n2')}\n\nask {MARKS.end_marker} two", f"ask {MARKS.end_marker} two", "n2"),
    carrier(f"ask three\n\n{MARKS.delimiter}\n{summary('n3')}", "ask three", "n3"),
    Draft(U(summary("nobody asks"))),
    Draft(parts(text_part("part")), opens=True, text="part"),
    Draft(parts(text_part("look"), {"type": "image_url", "image_url": {"url": "u"}}), opens=True),
    Draft(parts(text_part("noted", cache_control={"type": "ephemeral"})), opens=True),
    Draft(
        parts({"type": "tool_result", "tool_use_id": "c1", "content": "result"}), answers=("c1",)
    ),
    Draft(U(""), opens=True),
    Draft({"role": "user"}, opens=True),
    Draft({"role": "user", "content": None}, opens=True),
    Draft({"role": "user", "content": {"n": 2**63}}, opens=True),
    Draft(A("n") | {"n": 1}),
    Draft(A("n") | {"n": True}),
    Draft(A("n") | {"n": 1.0}),
    person("\U0001f600"),
    person("\ud83d\ude00"),
]
DRAFTS = st.sampled_from(PLAIN) | st.sampled_from(OTHER)
KEYS = st.none() | st.sampled_from(["k1", "k2", "k3", "k4"])
KEYED = st.builds(lambda draft, key: replace(draft, key=key), DRAFTS, KEYS)
STALE = st.sampled_from([None, None, None, 0, 0, -1, 1])
"""How far `at` is off; None for no `at`."""
SOME = st.sampled_from("aaaabbcde")
"""Mostly the same, so that enough happens to it."""
ERRORS = st.sampled_from([apsw.IOError, apsw.FullError])


SIDES = st.integers(0, 1)
"""Through which of the two stores."""
