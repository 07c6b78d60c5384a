"""The line for one session's turn: first come, first served, and nobody forgotten."""

from __future__ import annotations

import trio
import trio.testing

from turnkeeper.actors.line import Line


class Standing:
    """Somebody in a line, in a task of his own."""

    def __init__(self, line: Line, name: str, order: list[str]) -> None:
        self.line = line
        self.name = name
        self.order = order
        self.scope = trio.CancelScope()

    async def run(self) -> None:
        self.line.join(self)
        try:
            with self.scope:
                await self.line.front(self)
                self.order.append(self.name)
                await trio.sleep(1)
        finally:
            self.line.leave(self)


async def lined_up(
    nursery: trio.Nursery, line: Line, names: str
) -> tuple[list[Standing], list[str]]:
    order: list[str] = []
    standing = []
    for name in names:
        one = Standing(line, name, order)
        standing.append(one)
        nursery.start_soon(one.run)
        await trio.testing.wait_all_tasks_blocked()
    return standing, order


async def test_the_first_is_at_the_front_at_once_and_the_others_in_the_order_in_which_they_came(
    autojump_clock: trio.testing.MockClock,
) -> None:
    line = Line()
    async with trio.open_nursery() as nursery:
        _, order = await lined_up(nursery, line, "abcde")
        assert order == ["a"]
        assert len(line) == 5
    assert order == list("abcde")
    assert len(line) == 0
    assert trio.current_time() == 5  # one after another


async def test_whoever_gives_up_in_the_middle_is_passed_over_and_nobody_else(
    autojump_clock: trio.testing.MockClock,
) -> None:
    line = Line()
    async with trio.open_nursery() as nursery:
        standing, order = await lined_up(nursery, line, "abcdef")
        for n in (1, 2, 5):
            standing[n].scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert len(line) == 3
    assert order == ["a", "d", "e"]


async def test_one_that_moves_up_and_gives_up_in_the_same_moment_lets_the_next_move_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    line = Line()
    async with trio.open_nursery() as nursery:
        standing, order = await lined_up(nursery, line, "abc")
        standing[0].scope.cancel()
        standing[1].scope.cancel()
    assert order == ["a", "c"]


async def test_one_that_joins_first_comes_before_all_and_the_others_keep_their_order() -> None:
    line = Line()
    a, b, forced = object(), object(), object()
    assert line.join(a)
    assert not line.join(b)
    assert line.join(forced, first=True)
    assert not line.is_front(a)
    line.leave(forced)
    assert line.is_front(a)
    line.leave(a)
    assert line.is_front(b)
    line.leave(b)
    assert not line.is_front(b)


async def test_who_waits_is_not_woken_before_he_is_at_the_front(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """However many come and go before him: a waiter costs nothing."""
    line = Line()
    holder, waiter = object(), object()
    line.join(holder)
    line.join(waiter)

    class Steps(trio.abc.Instrument):
        taken = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.taken += task in nursery.child_tasks

    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.front, waiter)
        await trio.testing.wait_all_tasks_blocked()
        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        try:
            for _ in range(100):
                forced, late = object(), object()
                line.join(forced, first=True)
                line.join(late)
                await trio.testing.wait_all_tasks_blocked()
                line.leave(forced)
                line.leave(late)
                await trio.testing.wait_all_tasks_blocked()
            assert steps.taken == 0
            line.leave(holder)
            await trio.testing.wait_all_tasks_blocked()
            assert steps.taken > 0
        finally:
            trio.lowlevel.remove_instrument(steps)
    assert len(nursery.child_tasks) == 0


async def test_a_line_says_how_many_are_in_it() -> None:
    line = Line()
    assert not line
    assert repr(line) == "<Line: free, 0 in it>"
    line.join(object())
    line.join(object())
    assert line
    assert repr(line) == "<Line: free, 2 in it>"
