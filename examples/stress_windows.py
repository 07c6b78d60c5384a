"""Between which revisions a call must have been done, by when it began and when it was answered.

All processes of a machine share its clock. So a call was done behind all that had been answered
when it began, and before all that was begun when it had been answered.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping

from stress_journal import Noted, Seen
from stress_wrong import Wrong

__all__ = ["Windows"]


class Windows:
    """The windows of one session's calls; `made` are its changes by revision."""

    def __init__(self, made: Mapping[int, Noted], calls: Iterable[Noted]) -> None:
        revisions = {note: revision for revision, note in made.items()}
        floors: list[tuple[float, int]] = []
        ceilings: list[tuple[float, float]] = []
        for note in calls:
            if note in revisions:
                floors.append((note.ended, revisions[note]))
                ceilings.append((note.began, revisions[note] - 1))
            elif isinstance(note.outcome, Seen):
                floors.append((note.ended, note.outcome.revision))
                ceilings.append((note.began, note.outcome.revision))
        floors.sort()
        ceilings.sort()
        self._floor_at, self._floor = [moment for moment, _ in floors], [0]
        for _, revision in floors:
            self._floor.append(max(self._floor[-1], revision))
        self._ceiling_at, self._ceiling = [moment for moment, _ in ceilings], [math.inf]
        for _, most in reversed(ceilings):
            self._ceiling.append(min(self._ceiling[-1], most))
        self._ceiling.reverse()

    def first(self, note: Noted) -> int:
        """The last revision of which anybody knew when `note` began."""
        return self._floor[bisect_left(self._floor_at, note.began)]

    def last(self, note: Noted) -> float:
        """The revision behind which everything was begun when `note` had been answered."""
        return self._ceiling[bisect_right(self._ceiling_at, note.ended)]

    def check(self, id: str, revision: int, note: Noted) -> None:
        """Raise `Wrong` unless `note` may have produced `revision`."""
        first, last = self.first(note), self.last(note)
        if not first < revision <= last:
            raise Wrong(id, f"revision of {note}", f"behind {first}, and {last} at most", revision)
