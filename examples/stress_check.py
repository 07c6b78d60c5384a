"""Is a store what its callers were told? Every answer, every reading, every row.

`replay` runs the calls of each session through a `Model` and compares every outcome. Then
`check_store` opens the file anew and compares what it holds with the models. The module
`stress` says what is checked and why that is enough.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path

import apsw
import trio
from stress_calls import (
    CANCELLED,
    Call,
    Ledger,
    Operation,
    Redo,
    Restore,
    Row,
    Say,
    perform,
)
from stress_model import Model
from stress_wrong import Wrong, alike, same

from turnkeeper.actors import Session, Sessions, StoredMessage, TurnkeeperError, open_sessions

__all__ = ["check_store", "replay"]

READERS = 16
"""Sessions that are compared at once. A guess: enough to keep the readers busy."""


def replay(ledgers: Mapping[str, Ledger]) -> tuple[dict[str, Model], list[Wrong]]:
    """Return the model of every session that is there, and the first wrong answer of each.

    A session with a wrong answer has no model, and neither have its forks.
    """
    models: dict[str, Model] = {}
    wrong: list[Wrong] = []
    for ledger in ledgers.values():  # a fork stands behind its source
        model = Model()
        if ledger.source is not None:
            source = models.get(ledger.source)
            if source is None:
                continue
            model = Model(source.forks.get(ledger.id, ()))
        try:
            for number, call in enumerate(ledger.calls, 1):
                check_call(ledger.id, number, call, model)
            _check_looks(ledger, model)
        except Wrong as error:
            wrong.append(error)
        else:
            models[ledger.id] = model
    return models, wrong


def check_call(id: str, number: int, call: Call, model: Model, when: str = "") -> None:
    """Raise `Wrong` unless `model` gives the answer that `call` got."""
    if not call.ended:
        raise Wrong(id, f"{when}call {number} {call.operation}", "an answer", "none")
    if call.outcome != CANCELLED:
        expected = model.answer(call.operation, call.outcome)
        same(id, f"{when}answer to call {number} {call.operation}", expected, call.outcome)


def _check_looks(ledger: Ledger, model: Model) -> None:
    for acknowledged, revision, ids, error in ledger.looks:
        if error is not None:
            raise Wrong(ledger.id, "a reading meanwhile", "no error", error)
        if revision < acknowledged:
            least = f"revision {acknowledged} at least, for it was acknowledged"
            raise Wrong(ledger.id, "a reading meanwhile", least, f"revision {revision}")
        path = model.paths.get(revision, ())
        what = f"a reading meanwhile at revision {revision}"
        same(ledger.id, what, tuple(row.id for row in path), ids)


async def check_store(
    path: Path,
    models: Mapping[str, Model],
    seed: int,
    *,
    unjudged: Set[str] = frozenset(),
    checked: Callable[[], object] = lambda: None,
) -> list[Wrong]:
    """Return what is wrong in the store at `path`, at most one thing a session.

    The sessions that are `unjudged`, for a wrong answer was found before, are left alone.
    `checked` is called after each session.
    """
    wrong: list[Wrong] = []
    todo = iter(models.items())

    async def work(sessions: Sessions) -> None:
        for id, model in todo:
            try:
                await _check_session(sessions[id], model, random.Random(f"{seed} check {id}"))
            except Wrong as error:
                wrong.append(error)
            except Exception as error:
                wrong.append(Wrong(id, "reading it", "no error", repr(error)))
            checked()

    try:
        async with open_sessions(path) as sessions:
            await _check_list(sessions, models, unjudged, wrong)
            async with trio.open_nursery() as nursery:
                for _ in range(READERS):
                    nursery.start_soon(work, sessions)
    except TurnkeeperError as error:
        wrong.append(Wrong("all", "opening the store", "no error", repr(error)))
    return wrong + list(_check_file(path, models))


async def _check_list(
    sessions: Sessions, models: Mapping[str, Model], unjudged: Set[str], wrong: list[Wrong]
) -> None:
    listed: list[str] = []
    while page := await sessions.list(after=listed[-1] if listed else ""):
        listed += [info.id for info in page]
    listed = [id for id in listed if id not in unjudged]
    there = sorted(id for id, model in models.items() if model.revision)
    if listed != there:
        missing, extra = sorted({*there} - {*listed}), sorted({*listed} - {*there})
        wrong.append(Wrong("list", "sessions", f"also {missing}", f"also {extra}"))


async def _check_session(session: Session, model: Model, chance: random.Random) -> None:
    """Compare what is there; then move about in it, as far as it went before, and compare."""
    await _compare(session, model)
    if model.revision == 0:
        return
    further: list[Operation] = [Redo() for _ in range(model.redoable + 1)]
    further += [Restore(chance.randint(1, model.revision)) for _ in range(3)]
    further += [Restore(model.revision), Restore(model.revision + 1_000)]
    keyed = [row for row in model.own if row.key is not None]
    further += [Say((row.body,), (row.key,), row.hidden) for row in keyed[-1:]]
    further += [Say(({"role": "user", "content": "the last word"},), (None,))]
    for number, operation in enumerate(further, 1):
        call = Call(operation)
        await perform(session, call)
        check_call(session.id, number, call, model, "reopened, ")
        if isinstance(operation, Restore):
            await _compare_transcript(session, model)
    await _compare(session, model)


async def _compare(session: Session, model: Model) -> None:
    await _compare_transcript(session, model)
    id, path = session.id, model.path
    visible = [row for row in path if not row.hidden]
    alike(id, "visible transcript", visible, map(_row, await session.transcript()))
    alike(id, "last 3", path[-3:], map(_row, await session.transcript(last=3, hidden=True)))
    ever = [(row, state) for _, (row, state) in sorted(model.states.items())]
    found = [(_row(message), message.state) for message in await session.all_messages()]
    alike(id, "all messages", ever, found)
    moves = [(m.revision, m.kind, m.from_position, m.to_position) for m in await session.history()]
    alike(id, "history", model.moves, moves)
    info = await session.info()
    there = (info.revision, info.messages) if info is not None else None
    same(id, "info", (model.revision, len(path)) if model.revision else None, there)


async def _compare_transcript(session: Session, model: Model) -> None:
    transcript = await session.transcript(hidden=True)
    alike(session.id, "transcript", model.path, map(_row, transcript))
    positions = [message.position for message in transcript]
    same(session.id, "positions", list(range(1, len(model.path) + 1)), positions)
    at = (transcript.revision, transcript.position)
    same(session.id, "revision and position", (model.revision, len(model.path)), at)


def _check_file(path: Path, models: Mapping[str, Model]) -> Iterable[Wrong]:
    """Compare all rows of the file, wherever they hang, with all that was acknowledged."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        answer = connection.execute("PRAGMA integrity_check").get
        if answer != "ok":
            yield Wrong("all", "integrity_check", "ok", answer)
        owner = {row.id: id for id, model in models.items() for row in model.own}
        rows = connection.execute(
            "SELECT messages.id, sessions.id FROM messages LEFT JOIN sessions ON session = key"
        )
        stored = {message: str(id) for message, id in rows if id is None or id in models}
        for message in sorted(owner.keys() - stored.keys()):
            yield Wrong(owner[message], "rows of the file", f"message {message}", "it is missing")
        for message in sorted(stored.keys() - owner.keys()):
            what = f"message {message}, of which there is no receipt"
            yield Wrong(stored[message], "rows of the file", "only acknowledged messages", what)
        for message in sorted(owner.keys() & stored.keys()):
            if owner[message] != stored[message]:
                found = f"{owner[message]} had its receipt"
                yield Wrong(stored[message], f"writer of message {message}", "itself", found)
    except apsw.Error as error:
        yield Wrong("all", "reading the file", "no error", repr(error))
    finally:
        connection.close()


def _row(message: StoredMessage) -> Row:
    return Row(
        message.id or 0,
        message.position,
        message.revision or 0,
        message.body,
        message.key,
        message.hidden,
        message.opens_turn,
    )
