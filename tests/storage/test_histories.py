"""Random histories against a model in plain lists: what is live, in which state, and what was.

The model keeps, for each session, its path and a copy of the path for every revision. It knows
no branches, no heads and no positions: all that is what it is there to check.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import TypeAlias

import pytest
import trio
from attrs import define, evolve, field
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import A, U, tables

from turnkeeper.actors import Rejected, Sessions, StoredMessage, open_sessions
from turnkeeper.storage import State, inline

Step: TypeAlias = tuple[str, int, int]
"""What to do, and two numbers that choose among what can be chosen."""


@define
class Row:
    text: str
    hidden: bool
    opens: bool


@define
class Model:
    """One session."""

    path: list[Row] = field(factory=list)
    revision: int = 0
    versions: dict[int, list[Row]] = field(factory=dict)
    redo: list[list[Row]] = field(factory=list)
    states: dict[str, State] = field(factory=dict)

    def step(self, path: list[Row]) -> None:
        if self.revision == 0:
            self.versions[1] = []
            self.revision = 1
        self.path = path
        self.revision += 1
        self.versions[self.revision] = path
        self.states |= {row.text: "live" for row in path}

    def move(self, path: list[Row], state: State) -> None:
        left = [row.text for row in self.path if row not in path]
        self.step(path)
        self.states |= dict.fromkeys(left, state)


STEPS = ["append", "append hidden", "extend", "undo", "retry", "redo", "rewrite", "compact"]
STEPS += ["restore", "fork", "drop"]
REMOVALS = ["purge", "delete"]


def histories(steps: list[str]) -> st.SearchStrategy[list[Step]]:
    number = st.integers(0, 7)
    return st.lists(st.tuples(st.sampled_from(steps), number, number), max_size=25)


class Run:
    """A store and its model, side by side."""

    def __init__(self, sessions: Sessions, path: Path) -> None:
        self.sessions = sessions
        self.path = path
        self.models: dict[str, Model] = {"s0": Model()}
        self.names = (f"s{number}" for number in itertools.count(1))
        self.texts = (f"m{number}" for number in itertools.count())
        self.last_life: dict[str, int] = {}

    def rows(self, number: int, *, hidden: bool = False) -> list[Row]:
        return [
            Row(next(self.texts), hidden, (n + number) % 2 == 0 and not hidden)
            for n in range(number)
        ]

    async def do(self, step: Step) -> None:
        what, first, second = step
        id = list(self.models)[first % len(self.models)]
        model, session = self.models[id], self.sessions[id]
        match what:
            case "append" | "append hidden":
                (row,) = self.rows(1, hidden=what != "append")
                row.opens = not row.hidden and second % 2 == 0
                model.redo = []
                model.step([*model.path, row])
                receipt = await session.append(body(row), hidden=row.hidden)
                assert receipt.position == len(model.path)
                assert receipt.revision == model.revision
            case "extend":
                rows = self.rows(1 + second % 3)
                model.redo = []
                model.step([*model.path, *rows])
                receipts = await session.extend([body(row) for row in rows])
                assert {receipt.revision for receipt in receipts} == {model.revision}
            case "undo" | "retry":
                turns = 1 + second % 3 if what == "undo" else 1
                openers = [index for index, row in enumerate(model.path) if row.opens]
                undone = await (session.undo(turns) if what == "undo" else session.retry())
                if not openers:
                    assert undone is None
                    return
                cut = openers[-min(turns, len(openers))]
                assert undone is not None
                assert undone.text == model.path[cut].text
                assert undone.turns == min(turns, len(openers))
                assert undone.messages == len(model.path) - cut
                model.redo.append(model.path)
                model.move(model.path[:cut], "rewound")
                assert undone.revision == model.revision
            case "redo":
                moved = await session.redo()
                assert (moved is None) == (not model.redo)
                if moved is not None:
                    model.move(model.redo.pop(), "rewound")
            case "rewrite" | "compact":
                await self.rewrite(id, second, compact=what == "compact")
            case "restore":
                revision = 1 + second * 2 if second < 5 else model.revision - second + 5
                await self.restore(id, revision)
            case "fork":
                name = next(self.names)
                position = min(second, len(model.path))
                forked = await session.fork(name, position=position)
                assert (forked.position, forked.revision) == (position, 1)
                path = model.path[:position]
                self.models[name] = Model(
                    path, 1, {1: path}, [], {row.text: "live" for row in path}
                )
            case "drop":
                self.sessions.drop_idle()
            case "purge":
                await self.sessions.purge(id)
                if model.revision:
                    model.versions = {model.revision: model.path}
                    model.redo = []
                    model.states = {row.text: "live" for row in model.path}
            case "delete":
                await self.sessions.delete(id)
                del self.models[id]
                self.models[next(self.names)] = Model()

    async def rewrite(self, id: str, choice: int, *, compact: bool) -> None:
        model, session = self.models[id], self.sessions[id]
        visible = [row for row in model.path if not row.hidden]
        kept = min(choice, len(visible))
        new = self.rows((choice * 3) % 4)
        end = len(model.path)
        if kept < len(visible):
            end = model.path.index(visible[kept])
        wanted = [body(row) for row in [*visible[:kept], *new]]
        got = await session.rewrite(wanted, reason="compaction" if compact else "rewrite")
        assert got.kept == kept
        assert got.changed == (end < len(model.path) or bool(new))
        assert got.replaced == len(model.path) - end
        if got.changed:
            model.redo = []
            model.move([*model.path[:end], *new], "compacted" if compact else "replaced")
        assert got.revision == model.revision

    async def restore(self, id: str, revision: int) -> None:
        model, session = self.models[id], self.sessions[id]
        if revision not in model.versions:
            with pytest.raises(Rejected):
                await session.restore(revision)
            return
        moved = await session.restore(revision)
        assert moved.position == len(model.versions[revision])
        # A fork that is where it began may move from one name of the place to another.
        if model.versions[revision] != model.path or moved.revision > model.revision:
            model.redo = []
            model.move(model.versions[revision], "rewound")
        assert moved.revision == model.revision

    async def check(self) -> None:
        """All that can be seen agrees."""
        known: set[str] = set()
        for id, model in self.models.items():
            session = self.sessions[id]
            whole = await session.transcript(hidden=True)
            assert [text(message) for message in whole] == [row.text for row in model.path]
            assert [message.hidden for message in whole] == [row.hidden for row in model.path]
            assert [message.opens_turn for message in whole] == [row.opens for row in model.path]
            assert [message.position for message in whole] == list(range(1, len(whole) + 1))
            assert whole.revision == model.revision
            every = await session.all_messages()
            assert {text(message): message.state for message in every} == model.states
            assert len(every) == len(model.states)
            known |= set(model.states)
        stored = [str(row[11]) for row in tables(self.path)["messages"]]
        assert len(stored) == len(set(stored))
        assert known <= set(stored)

    async def check_versions(self) -> None:
        """Every revision can be had back, whatever came later."""
        for id, model in self.models.items():
            for revision in list(model.versions):
                await self.restore(id, revision)
                whole = await self.sessions[id].transcript(hidden=True)
                assert [text(message) for message in whole] == [
                    row.text for row in model.versions[revision]
                ]


def body(row: Row) -> dict[str, object]:
    return U(row.text) if row.opens or row.hidden else A(row.text)


def text(message: StoredMessage) -> str:
    return str(message.body["content"])


def live_out(steps: list[Step]) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.db"
            async with open_sessions(path, offload=inline, synchronous="normal") as sessions:
                run = Run(sessions, path)
                for step in steps:
                    await run.do(step)
                    await run.check()
                await run.check_versions()
                await run.check()

    trio.run(main)


@settings(deadline=None, max_examples=60)
@given(histories(STEPS))
def test_every_history_reads_as_the_model_and_every_revision_can_be_restored(
    steps: list[Step],
) -> None:
    live_out(steps)


GONE: list[Step] = [
    ("extend", 0, 2),
    ("fork", 0, 3),
    ("undo", 1, 0),
    ("purge", 1, 0),
    ("delete", 0, 0),
]


@settings(deadline=None, max_examples=60)
@given(histories(STEPS + REMOVALS))
@example(GONE)
def test_no_history_with_removals_loses_what_somebody_still_reaches(steps: list[Step]) -> None:
    live_out(steps)


def test_the_model_notices_a_lost_row() -> None:
    model = Model()
    model.step([Row("a", False, True)])
    other = evolve(model, path=[])
    assert model.path != other.path
    model.move([], "rewound")
    assert model.states == {"a": "rewound"}
    assert model.versions == {1: [], 2: [Row("a", False, True)], 3: []}
