"""Ctrl-C at the worst moments: trio's own words are `KeyboardInterrupt`, never an internal error."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from support import U, said

from turnkeeper.actors import open_sessions

RaiseCancel = Callable[[Callable[[], None]], trio.lowlevel.Abort]


def test_an_interrupt_while_an_asker_goes_to_sleep_leaves_the_store_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came between noting who is to be woken and sleeping: a sleeper elsewhere was woken."""
    path = tmp_path / "state.db"
    sleep = trio.lowlevel.wait_task_rescheduled
    interrupts = 1

    async def interrupted(abort: RaiseCancel) -> object:
        nonlocal interrupts
        if interrupts and getattr(abort, "__name__", "") == "_abort":
            interrupts -= 1
            signal.raise_signal(signal.SIGINT)
        return await sleep(abort)

    async def main() -> None:
        async with open_sessions(path) as sessions:
            try:
                await sessions["a"].append(U("1"))
                await trio.sleep(1)
            except KeyboardInterrupt:
                pass
            await trio.sleep(0.01)  # woken by nobody but the clock
            await sessions["a"].append(U("2"))
            assert said(await sessions["a"].transcript())[-1] == "2"

    monkeypatch.setattr(trio.lowlevel, "wait_task_rescheduled", interrupted)
    trio.run(main)
    assert not interrupts
