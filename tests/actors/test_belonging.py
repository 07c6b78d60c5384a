"""A store belongs to one event loop, and a handle to the session that it has met."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from support import U, said

from turnkeeper.actors import Closed, Rejected, Session, open_sessions
from turnkeeper.storage import inline

CALLS: dict[str, Callable[[Session], Awaitable[object]]] = {
    "append": lambda session: session.append(U("x")),
    "undo": lambda session: session.undo(),
    "transcript": lambda session: session.transcript(),
    "info": lambda session: session.info(),
    "history": lambda session: session.history(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_another_event_loop_is_sent_home_and_the_store_goes_on(
    tmp_path: Path, call: Callable[[Session], Awaitable[object]]
) -> None:
    async def elsewhere(session: Session) -> None:
        with pytest.raises(Rejected, match="another event loop"):
            await call(session)

    async with open_sessions(tmp_path / "state.db") as sessions:
        session = sessions["a"]
        await trio.to_thread.run_sync(lambda: trio.run(elsewhere, session))
        await session.append(U("here"))
        assert said(await session.transcript()) == ["here"]
        assert sessions.stats().failures == 0


def test_asyncio_is_told_that_this_is_for_trio(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_sessions(tmp_path / "state.db"):
            pass

    with pytest.raises(RuntimeError, match=r"trio\.run"):
        asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [42, None, b"state.db", ["state.db"], "", "a\0b", ":memory:"])
async def test_a_path_that_cannot_be_one_is_rejected(path: str) -> None:
    with pytest.raises(Rejected) as caught:
        async with open_sessions(path, offload=inline):
            pass
    assert caught.value.field == "path"


@pytest.mark.parametrize(
    "read",
    [
        lambda session: session.info(),
        lambda session: session.meta(),
        lambda session: session.all_messages(),
        lambda session: session.history(),
        lambda session: session.transcript(last=1),
    ],
    ids=["info", "meta", "all_messages", "history", "transcript"],
)
async def test_a_handle_that_has_read_a_session_does_not_begin_it_anew_after_a_delete(
    tmp_path: Path, read: Callable[[Session], Awaitable[object]]
) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        await sessions["a"].append(U("old"))
        handle = sessions["a"]
        await read(handle)
        await sessions.delete("a")
        with pytest.raises(Closed):
            await handle.append(U("late"))
        with pytest.raises(Closed):
            await read(handle)
        assert await sessions.list() == []


async def test_a_store_is_no_collection(tmp_path: Path) -> None:
    async with open_sessions(tmp_path / "state.db", offload=inline) as sessions:
        with pytest.raises(TypeError):
            "a" in sessions  # type: ignore[misc]  # noqa: B015 - that is what is tested
        with pytest.raises(TypeError):
            iter(sessions)  # type: ignore[call-overload]  # that is what is tested
