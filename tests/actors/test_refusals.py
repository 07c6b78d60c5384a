"""What is refused while somebody holds the turn, and what stays possible: two tables of all of it.

Whatever is refused says who holds the turn, and changes nothing, what is pending included.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import TypeAlias

import apsw
import pytest
import trio
import trio.testing
from support import A, Disk, Gate, U, failing_disk, said, tables

from turnkeeper.actors import (
    Closed,
    Rejected,
    Session,
    Sessions,
    StorageFailed,
    Turn,
    TurnActive,
    TurnLost,
    open_sessions,
)
from turnkeeper.storage import Moment, Offload, inline

Clock = trio.testing.MockClock
Call: TypeAlias = Callable[[Sessions], Awaitable[object]]


async def try_for_the_turn(sessions: Sessions) -> None:
    async with sessions["a"].turn(wait=0):
        raise AssertionError("it is held")


REFUSED: dict[str, Call] = {
    "append": lambda sessions: sessions["a"].append(A("more")),
    "append, a key": lambda sessions: sessions["a"].append(U("more"), key="new"),
    "append, hidden": lambda sessions: sessions["a"].append(U("more"), hidden=True),
    "append, at": lambda sessions: sessions["a"].append(A("more"), at=REVISION),
    "append, not interleaved": lambda sessions: sessions["a"].append(A("x"), interleave=False),
    "extend": lambda sessions: sessions["a"].extend([U("more"), A("and more")]),
    "extend, a key that is new": lambda sessions: sessions["a"].extend(
        [U("1"), U("2")], keys=["old", "new"]
    ),
    "extend, at": lambda sessions: sessions["a"].extend([A("more")], at=REVISION),
    "undo": lambda sessions: sessions["a"].undo(),
    "undo, at": lambda sessions: sessions["a"].undo(at=REVISION),
    "undo, many": lambda sessions: sessions["a"].undo(9),
    "retry": lambda sessions: sessions["a"].retry(),
    "redo": lambda sessions: sessions["a"].redo(),
    "rewrite": lambda sessions: sessions["a"].rewrite([U("other")]),
    "rewrite to nothing": lambda sessions: sessions["a"].rewrite([]),
    "rewrite to what is there": lambda sessions: sessions["a"].rewrite([U("1"), A("a")]),
    "rewrite as a compaction": lambda sessions: sessions["a"].rewrite(
        [U("short")], reason="compaction"
    ),
    "restore": lambda sessions: sessions["a"].restore(2),
    "purge": lambda sessions: sessions.purge("a"),
    "turn": try_for_the_turn,
}

POSSIBLE: dict[str, Call] = {
    "append, interleaved": lambda sessions: sessions["a"].append(A("more"), interleave=True),
    "append, interleaved, a key": lambda sessions: sessions["a"].append(
        U("more"), key="new", interleave=True
    ),
    "append, interleaved, at": lambda sessions: sessions["a"].append(
        A("more"), at=REVISION, interleave=True
    ),
    "extend, interleaved": lambda sessions: sessions["a"].extend([U("x"), A("y")], interleave=True),
    "append of what is there": lambda sessions: sessions["a"].append(U("1"), key="old"),
    "extend of what is there": lambda sessions: sessions["a"].extend([U("1")], keys=["old"]),
    "extend by nothing": lambda sessions: sessions["a"].extend([]),
    "post": lambda sessions: sessions["a"].post(U("later")),
    "post, interrupting": lambda sessions: sessions["b"].post(U("later"), policy="interrupt"),
    "fork": lambda sessions: sessions["a"].fork("c"),
    "fork, at": lambda sessions: sessions["a"].fork("c", position=1, at=REVISION),
    "set_meta": lambda sessions: sessions["a"].set_meta({"title": "new"}),
    "set_policy": lambda sessions: sessions["a"].set_policy("collect"),
    "requeue": lambda sessions: sessions["a"].requeue(77),
    "dismiss": lambda sessions: sessions["a"].dismiss(77),
    "transcript": lambda sessions: sessions["a"].transcript(),
    "all_messages": lambda sessions: sessions["a"].all_messages(),
    "history": lambda sessions: sessions["a"].history(),
    "info": lambda sessions: sessions["a"].info(),
    "meta": lambda sessions: sessions["a"].meta(),
    "inbox": lambda sessions: sessions["a"].inbox(),
    "holder": lambda sessions: sessions["a"].holder(),
    "list": lambda sessions: sessions.list(),
    "set_aside": lambda sessions: sessions.set_aside(),
    "another session": lambda sessions: sessions["b"].append(U("x")),
}

REVISION = 3
"""At which the session is furnished."""

each_refused = pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
where = pytest.mark.parametrize("elsewhere", [False, True], ids=["same store", "other store"])


def test_every_operation_of_a_session_is_in_one_of_the_tables() -> None:
    """A new one cannot be forgotten."""
    operations = {name for name in dir(Session) if not name.startswith("_") and name != "id"}
    tested = {name.replace(",", "").split()[0] for name in (*REFUSED, *POSSIBLE)}
    assert operations - tested == {"take_over"}  # ends the turn: see test_turn


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@asynccontextmanager
async def opened(
    path: Path, name: str, *, vfs: str | None = None, offload: Offload = inline
) -> AsyncIterator[Sessions]:
    async with open_sessions(
        path,
        holder=name,
        vfs=vfs,
        offload=offload,
        now=lambda: 1_000 + trio.current_time(),
        clock=lambda: Moment("a boot", trio.current_time()),
        random=Random(name),
    ) as sessions:
        yield sessions


@asynccontextmanager
async def held(
    path: Path, *, elsewhere: bool, vfs: str | None = None
) -> AsyncIterator[tuple[Sessions, Turn, trio.Event]]:
    """A session with something to undo and to redo, whose turn somebody holds; the store of those
    who are not the holder; and what is set when the holder's block is to end."""
    async with opened(path, "one", vfs=vfs) as one, opened(path, "other", vfs=vfs) as other:
        await one["a"].extend([U("1"), A("a"), U("2")], keys=["old", None, None])
        await one["a"].undo()
        assert (await one["a"].transcript()).revision == REVISION
        turns: list[Turn] = []
        entered, let_go = trio.Event(), trio.Event()

        async def hold() -> None:
            async with one["a"].turn() as turn:
                turns.append(turn)
                entered.set()
                await let_go.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            await entered.wait()
            yield (other if elsewhere else one), turns[0], let_go
            let_go.set()


@where
@each_refused
async def test_what_is_refused_says_who_holds_the_turn_and_changes_nothing(
    autojump_clock: Clock, path: Path, call: Call, elsewhere: bool
) -> None:
    async with held(path, elsewhere=elsewhere) as (sessions, turn, _):
        await trio.sleep(5)
        before = tables(path)
        commits = sessions.stats().commits
        with pytest.raises(TurnActive) as caught:
            await call(sessions)
        refusal = caught.value
        assert (refusal.session, refusal.holder) == ("a", "one")
        assert (refusal.since, refusal.expires_in) == (turn.since, 25)
        assert tables(path) == before
        assert sessions.stats().commits == commits
        assert sessions.stats().pending == sessions.stats().failures == 0
        assert turn.loss is None
        await turn.append(A("the holder's"))
        assert said(await turn.transcript()) == ["1", "a", "the holder's"]


@where
@each_refused
async def test_what_is_refused_leaves_what_is_pending_as_it_was(
    autojump_clock: Clock, path: Path, call: Call, elsewhere: bool
) -> None:
    with failing_disk() as disk:
        async with held(path, elsewhere=elsewhere, vfs=disk.name) as (sessions, _, __):
            await refused_by(disk, lambda: sessions["a"].append(U("kept"), interleave=True))
            before = tables(path)
            read = await sessions["a"].transcript()
            assert said(read) == ["1", "a", "kept"]
            with pytest.raises(TurnActive):
                await call(sessions)
            assert tables(path) == before
            assert sessions.health().pending == 1
            assert await sessions["a"].transcript() == read


@each_refused
async def test_what_is_refused_leaves_what_the_holder_has_pending_as_it_was(
    autojump_clock: Clock, path: Path, call: Call
) -> None:
    with failing_disk() as disk:
        async with held(path, elsewhere=False, vfs=disk.name) as (sessions, turn, _):
            await refused_by(disk, lambda: turn.append(A("kept")))
            before = tables(path)
            with pytest.raises(TurnActive):
                await call(sessions)
            assert tables(path) == before
            assert sessions.health().pending == 1
            await turn.append(A("behind it"))
            assert said(await turn.transcript()) == ["1", "a", "kept", "behind it"]


async def refused_by(disk: Disk, call: Callable[[], Awaitable[object]]) -> None:
    """Let storage refuse an append, which is kept."""
    disk.write_error = apsw.IOError
    with pytest.raises(StorageFailed) as caught:
        await call()
    disk.write_error = None
    assert caught.value.kept


@where
@pytest.mark.parametrize("name", POSSIBLE)
async def test_what_no_turn_refuses_is_done_and_the_holder_goes_on(
    autojump_clock: Clock, path: Path, name: str, elsewhere: bool
) -> None:
    async with held(path, elsewhere=elsewhere) as (sessions, turn, let_go):
        before = (await turn.transcript()).bodies
        held_by = tables(path)["turns"]
        await POSSIBLE[name](sessions)
        assert turn.loss is None
        assert tables(path)["turns"] == held_by
        added = [message.body for message in await turn.transcript() if message.body not in before]
        wanted = {
            "append, interleaved": [A("more")],
            "append, interleaved, a key": [U("more")],
            "append, interleaved, at": [A("more")],
            "extend, interleaved": [U("x"), A("y")],
        }
        assert added == wanted.get(name, [])
        await turn.append(A("after"))
        assert (await turn.transcript()).bodies == [*before, *added, A("after")]
        let_go.set()


@where
async def test_a_key_with_other_content_is_rejected_whoever_holds_the_turn(
    autojump_clock: Clock, path: Path, elsewhere: bool
) -> None:
    async with held(path, elsewhere=elsewhere) as (sessions, _, __):
        before = tables(path)
        for interleave in (False, True):
            with pytest.raises(Rejected):
                await sessions["a"].append(U("not 1"), key="old", interleave=interleave)
        assert tables(path) == before


@where
async def test_a_delete_ends_the_session_and_the_turn_with_it(
    autojump_clock: Clock, path: Path, elsewhere: bool
) -> None:
    errors: list[Exception] = []
    async with opened(path, "one") as one, opened(path, "other") as other:
        entered, ended = trio.Event(), trio.Event()

        async def hold() -> None:
            try:
                async with one["a"].turn() as turn:
                    await turn.append(U("1"))
                    entered.set()
                    await trio.sleep_forever()
            except (Closed, TurnLost) as error:
                errors.append(error)
                ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            await entered.wait()
            await (other if elsewhere else one).delete("a")
            with trio.fail_after(1):
                await ended.wait()
        assert len(errors) == 1
        assert tables(path)["turns"] == []
        async with other["a"].turn(wait=0) as again:  # a new session of that name
            assert said(await again.transcript()) == []


async def test_code_that_holds_the_turn_is_told_to_use_it(
    autojump_clock: Clock, path: Path
) -> None:
    async with opened(path, "one") as sessions:
        session = sessions["a"]
        async with session.turn() as turn:
            with pytest.raises(TurnActive, match="writes through the turn object") as caught:
                await session.append(U("1"))
            assert (caught.value.holder, caught.value.expires_in) == ("one", 30)
            await turn.append(U("1"))
        await session.append(A("2"))  # and no more
        assert said(await session.transcript()) == ["1", "2"]


@where
@each_refused
async def test_once_the_turn_has_ended_nothing_of_it_is_refused(
    autojump_clock: Clock, path: Path, call: Call, elsewhere: bool
) -> None:
    if call is try_for_the_turn:
        return
    async with held(path, elsewhere=elsewhere) as (sessions, _, let_go):
        let_go.set()
        await trio.testing.wait_all_tasks_blocked()
        await call(sessions)


async def test_one_that_is_refused_takes_none_of_those_handed_over_with_it(
    autojump_clock: Clock, path: Path
) -> None:
    gate = Gate()
    refusals: list[TurnActive] = []
    async with opened(path, "one", offload=gate) as sessions:
        session = sessions["a"]

        async def refused() -> None:
            with pytest.raises(TurnActive) as caught:
                await session.append(U("refused"))
            refusals.append(caught.value)

        async with session.turn() as turn, trio.open_nursery() as nursery:
            gate.shut()
            nursery.start_soon(turn.append, A("0"))
            await trio.testing.wait_all_tasks_blocked()
            for n in (1, 2, 3):
                nursery.start_soon(refused)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(turn.append, A(str(n)))
                await trio.testing.wait_all_tasks_blocked()
            gate.open()
        assert len(refusals) == 3
        assert said(await session.transcript()) == ["0", "1", "2", "3"]
        assert sessions.stats().largest_batch == 3  # one to three, with the refused between them


async def test_one_that_is_refused_in_a_shared_transaction_leaves_nothing_of_what_is_pending(
    autojump_clock: Clock, path: Path
) -> None:
    """An append looks at keys first, and for that writes what is pending; then it is refused."""
    gate = Gate()
    with failing_disk() as disk:
        async with opened(path, "one", vfs=disk.name, offload=gate) as sessions:
            session = sessions["a"]
            async with session.turn():
                await refused_by(disk, lambda: session.append(U("kept"), interleave=True))

                async def refused() -> None:
                    with pytest.raises(TurnActive):
                        await session.append(U("refused"), key="new")

                gate.shut()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(refused)
                    nursery.start_soon(sessions["b"].append, U("1"))
                    await trio.testing.wait_all_tasks_blocked()
                    gate.open()
                assert sessions.health().pending == 1
                assert len(tables(path)["messages"]) == 1
                assert said(await sessions["b"].transcript()) == ["1"]
                assert said(await session.transcript()) == ["kept"]
