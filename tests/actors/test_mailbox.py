"""The mailbox by itself, and what its bound means to those who ask."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from support import Gate, U, said

from turnkeeper.actors import open_sessions
from turnkeeper.actors.ask import AnyAsk, Ask
from turnkeeper.actors.mailbox import Mailbox
from turnkeeper.actors.messages import Redo


def asks(number: int) -> list[AnyAsk]:
    return [Ask(Redo()) for _ in range(number)]


def test_an_empty_mailbox_has_nothing_to_give() -> None:
    mailbox = Mailbox(2)
    assert len(mailbox) == 0
    assert mailbox.peek() is None
    assert mailbox.empty() == []
    assert not mailbox.remove(asks(1)[0])


def test_asks_are_taken_in_the_order_in_which_they_came() -> None:
    mailbox = Mailbox(2)
    five = asks(5)
    for ask in five:
        mailbox.put(ask)
    assert (len(mailbox), mailbox.in_line) == (2, 3)
    assert repr(mailbox) == "<Mailbox: 2 of 2, 3 in line>"
    for ask in five:
        assert mailbox.peek() is ask
        assert mailbox.take() is ask
    assert (len(mailbox), mailbox.in_line) == (0, 0)


def test_who_is_first_in_line_moves_up_when_one_is_taken() -> None:
    mailbox = Mailbox(1)
    three = asks(3)
    for ask in three:
        mailbox.put(ask)
    mailbox.take()
    assert (len(mailbox), mailbox.in_line) == (1, 1)
    assert mailbox.peek() is three[1]


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_one_that_is_removed_leaves_the_others_in_order(which: int) -> None:
    mailbox = Mailbox(2)
    four = asks(4)
    for ask in four:
        mailbox.put(ask)
    gone = four.pop(which)
    assert mailbox.remove(gone)
    assert not mailbox.remove(gone)
    assert (len(mailbox), mailbox.in_line) == (2, 1)
    assert mailbox.empty() == four


def test_who_is_sent_away_stood_in_line_and_the_box_stays() -> None:
    mailbox = Mailbox(2)
    four = asks(4)
    for ask in four:
        mailbox.put(ask)
    assert mailbox.send_away() == four[2:]
    assert (len(mailbox), mailbox.in_line) == (2, 0)
    assert mailbox.empty() == four[:2]
    assert len(mailbox) == 0


@given(
    st.integers(1, 3),
    st.lists(st.sampled_from(["put", "take", "remove first", "remove last", "send away"])),
)
def test_a_mailbox_is_a_list_whose_first_few_are_accepted(capacity: int, steps: list[str]) -> None:
    mailbox = Mailbox(capacity)
    model: list[AnyAsk] = []
    for step in steps:
        if step == "put":
            ask = asks(1)[0]
            mailbox.put(ask)
            model.append(ask)
        elif step == "send away":
            assert mailbox.send_away() == model[capacity:]
            del model[capacity:]
        elif model and step == "take":
            assert mailbox.take() is model.pop(0)
        elif model and step.startswith("remove"):
            assert mailbox.remove(model.pop(0 if step.endswith("first") else -1))
        assert len(mailbox) == min(capacity, len(model))
        assert mailbox.in_line == max(0, len(model) - capacity)
        assert mailbox.peek() is (model[0] if model else None)
    assert mailbox.empty() == model


async def test_ten_askers_at_a_mailbox_of_two_wait_in_line_and_are_served_in_order(
    tmp_path: Path,
) -> None:
    gate = Gate()
    async with open_sessions(tmp_path / "state.db", offload=gate, mailbox_size=2) as sessions:
        gate.may_begin = trio.Event()
        served: list[int] = []

        async def ask(n: int) -> None:
            receipt = await sessions["a"].append(U(str(n)))
            assert receipt.position == n + 1
            served.append(n)

        async with trio.open_nursery() as nursery:
            for n in range(10):
                nursery.start_soon(ask, n)
                await trio.testing.wait_all_tasks_blocked()
            stats = sessions.stats()
            assert (stats.busy, stats.mailboxes, stats.deepest_mailbox, stats.in_line) == (
                *(1, 2, 2),
                7,
            )
            assert served == []
            # Another session does not stand behind them: it has a mailbox of its own.
            nursery.start_soon(sessions["b"].append, U("b"))
            await trio.testing.wait_all_tasks_blocked()
            assert (sessions.stats().busy, sessions.stats().in_line) == (2, 7)
            gate.may_begin.set()
        assert sorted(served) == list(range(10))
        assert said(await sessions["a"].transcript()) == [str(n) for n in range(10)]
        stats = sessions.stats()
        assert (stats.busy, stats.mailboxes, stats.deepest_mailbox, stats.in_line) == (0, 0, 0, 0)


async def test_a_mailbox_of_one_keeps_changes_of_all_kinds_in_order(tmp_path: Path) -> None:
    gate = Gate()
    async with open_sessions(tmp_path / "state.db", offload=gate, mailbox_size=1) as sessions:
        session = sessions["a"]
        gate.may_begin = trio.Event()
        async with trio.open_nursery() as nursery:
            for call in (
                lambda: session.append(U("1")),
                lambda: session.append(U("2")),
                lambda: session.undo(),
                lambda: session.append(U("3")),
                lambda: session.fork("b"),
                lambda: session.undo(2),
                lambda: session.redo(),
                lambda: session.append(U("4")),
            ):
                nursery.start_soon(call)
                await trio.testing.wait_all_tasks_blocked()
            assert sessions.stats().in_line == 6
            gate.may_begin.set()
        assert said(await session.transcript()) == ["1", "3", "4"]
        assert said(await sessions["b"].transcript()) == ["1", "3"]
