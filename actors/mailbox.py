"""A bounded queue with one reader.

The box holds what was accepted; whoever finds it full stands in line, in order of arrival, and
moves up as the reader takes from it. To the asker both are the same wait. They differ when the
store closes: what is in the box is finished, what stands in line is sent away.
"""

from __future__ import annotations

from .ask import AnyAsk

__all__ = ["Mailbox"]


class Mailbox:
    """The asks of one session that its actor has not taken yet."""

    __slots__ = ("_box", "_line", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Lists, not deques: an empty deque takes 600 bytes, and there are thousands of these.
        self._box: list[AnyAsk] = []
        self._line: list[AnyAsk] = []

    def __len__(self) -> int:
        """The accepted asks; those in line do not count."""
        return len(self._box)

    def __repr__(self) -> str:
        return f"<Mailbox: {len(self._box)} of {self.capacity}, {len(self._line)} in line>"

    @property
    def in_line(self) -> int:
        """The asks that wait for room."""
        return len(self._line)

    def put(self, ask: AnyAsk) -> None:
        """Accept `ask`, or let it stand in line."""
        (self._box if len(self._box) < self.capacity else self._line).append(ask)

    def peek(self) -> AnyAsk | None:
        """Return the next ask and leave it there; None if there is none."""
        return self._box[0] if self._box else None

    def take(self) -> AnyAsk:
        """Take the next ask, which must be there. Whoever is first in line moves up."""
        ask = self._box.pop(0)
        if self._line:
            self._box.append(self._line.pop(0))
        return ask

    def remove(self, ask: AnyAsk) -> bool:
        """Take `ask` out wherever it stands; return False if it is not here."""
        if ask in self._line:
            self._line.remove(ask)
            return True
        if ask not in self._box:
            return False
        self._box.remove(ask)
        if self._line:
            self._box.append(self._line.pop(0))
        return True

    def send_away(self) -> list[AnyAsk]:
        """Empty the line and return, in order, who stood there."""
        line, self._line = self._line, []
        return line

    def empty(self) -> list[AnyAsk]:
        """Empty the box and the line, and return, in order, what was there."""
        everything = self._box + self.send_away()
        self._box = []
        return everything
