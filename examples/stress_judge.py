"""Everything that several processes did, held against the file they did it in.

The file is opened and each session judged: the order of its changes (`stress_order`), its turns
(`stress_turns`), its posts (`stress_posts`). What was right gives a model, with which `stress_check`
then compares the file row by row, as after a run of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import apsw
import trio
from stress_calls import Fork
from stress_calls import Path as Messages
from stress_check import check_store
from stress_model import Model
from stress_order import Found, judge
from stress_posts import check_posts
from stress_processes import Story
from stress_turns import check_turns, holds_of
from stress_wrong import Wrong

from turnkeeper.actors import Sessions, open_sessions

__all__ = ["check_story"]


async def check_story(
    path: Path, story: Story, seed: int, begin: Callable[[str, int], Callable[[], object]]
) -> tuple[dict[str, Model], list[Wrong]]:
    """Return the model of each session, and what is wrong with `story` and the store at `path`.

    `begin` is told how many sessions are to be checked; what it returns is called after each.
    """
    models, wrong = await _judge_all(path, story)
    wrong += story.wrong + _leftovers(path)
    unjudged = {note.session for note in story.notes} - models.keys()
    checked = begin("checking", max(1, len(models)))
    wrong += await check_store(path, models, seed, unjudged=unjudged, checked=checked)
    return models, wrong


async def _judge_all(path: Path, story: Story) -> tuple[dict[str, Model], list[Wrong]]:
    """Return the model of every session whose story is right, and the first fault of each other."""
    models: dict[str, Model] = {}
    wrong: list[Wrong] = []
    forks = {
        note.operation.id: note.session for note in story.notes if isinstance(note.operation, Fork)
    }
    writer = _writers(path)
    async with open_sessions(path) as sessions:
        ids: list[str] = []
        while page := await sessions.list(after=ids[-1] if ids else ""):
            ids += [info.id for info in page]
        for id in sorted({*ids, *(note.session for note in story.notes)}):  # forks behind sources
            source, start = forks.get(id), None
            if source is not None:
                if source not in models:
                    continue
                start = models[source].forks.get(id)
            try:
                found = await _read(sessions, id, writer)
                models[id] = _judge(id, story, found, start)
            except Wrong as error:
                wrong.append(error)
            await trio.lowlevel.checkpoint()
    return models, wrong


def _judge(id: str, story: Story, found: Found, start: Messages | None) -> Model:
    notes = story.of_session(id)
    for note in notes:
        if not (note.answered or note.needs_no_answer or story.was_killed(note.worker)):
            raise Wrong(id, f"{note}", "an answer", "none")
    verdict = judge(id, notes, found, start)
    holds = holds_of(notes, story.lives)
    check_turns(id, notes, verdict.steps, holds, story.lives)
    check_posts(id, notes, verdict.steps, holds, found)
    return verdict.model


def _writers(path: Path) -> Mapping[int, str]:
    """Return which session wrote each message."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        sql = "SELECT messages.id, sessions.id FROM messages JOIN sessions ON session = key"
        return {message: str(id) for message, id in connection.execute(sql)}
    finally:
        connection.close()


async def _read(sessions: Sessions, id: str, writer: Mapping[int, str]) -> Found:
    info = await sessions[id].info()
    found = Found(info.revision if info is not None else 0)
    for row in await sessions[id].all_messages():
        if writer.get(row.id or 0) == id:
            found.rows[row.revision or 0].append(row)
    found.moves = {move.revision: move for move in await sessions[id].history()}
    return found


def _leftovers(path: Path) -> list[Wrong]:
    """Return what is left that must not be, once the store is closed: turns, posts, owners."""
    wrong: list[Wrong] = []
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        for table in ("turns", "inbox"):
            rows = list(connection.execute(f"SELECT * FROM {table}"))
            if rows:
                wrong.append(Wrong("all", f"rows of {table}", "none", rows))
        held = list(connection.execute("SELECT session, turn FROM heads WHERE turn IS NOT NULL"))
        if held:
            wrong.append(Wrong("all", "heads that name a turn", "none", held))
    finally:
        connection.close()
    owners = path.with_name(f"{path.name}.owners")
    if owners.exists():
        left = sorted(file.name for file in owners.iterdir())
        wrong.append(Wrong("all", f"{owners.name}", "gone", left))
    return wrong
