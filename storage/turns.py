"""Who may act in a session, and until when.

A turn names one holder until a moment on the boot clock. Each new holder gets a larger token and
shows it with every write; the head names the one that is good, and a write that shows another is
refused. So a holder that slept through its time can come back late and do no harm: the clock may
be wrong, the token is not.

`is_over` is the whole rule of who may be passed over. Nothing here opens a transaction.
"""

from __future__ import annotations

from typing import NamedTuple

import apsw

from .clock import Moment
from .connect import Connection
from .errors import StorageDamaged

__all__ = ["TurnRow", "add", "get", "is_over", "remaining_s", "remove", "renew", "seen"]

ADD = """
INSERT INTO turns (session, owner, holder, opener, seen, since, boot, expires)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
GET = """
SELECT token, session, owner, holder, opener, seen, since, boot, expires FROM turns
WHERE token = ?
"""
RENEW = "UPDATE turns SET boot = ?, expires = ? WHERE token = ?"
REMOVE = "DELETE FROM turns WHERE token = ? RETURNING opener"
SEEN = "SELECT seen FROM turns WHERE token = ? AND session = ?"


class TurnRow(NamedTuple):
    """A turn as the table holds it."""

    token: int
    session: int
    owner: int
    holder: str
    opener: int
    seen: int
    since: float
    boot: str
    expires: float


def is_over(turn: TurnRow, now: Moment, *, owner_lives: bool | None) -> bool:
    """Return whether the turn refuses nobody any more.

    `owner_lives` is None where the platform cannot tell. A dead owner's turn is over at once, a
    living one's when its time has run out. If a living owner's time stands on the clock of
    another boot, the two cannot be compared: it lasts until the owner dies or somebody takes it
    over. Where nobody can tell, a turn of another boot is a dead one's.
    """
    if owner_lives is False:
        return True
    if turn.boot == now.boot:
        return turn.expires <= now.seconds
    return owner_lives is None


def remaining_s(turn: TurnRow, now: Moment) -> float:
    """Return for how many seconds the turn lasts if nobody renews it; infinity if unknown."""
    return max(0.0, turn.expires - now.seconds) if turn.boot == now.boot else float("inf")


def add(
    connection: Connection,
    session: int,
    owner: int,
    holder: str,
    opener: int,
    seen: int,
    since: float,
    until: Moment,
) -> int:
    """Write the row of a new turn and return its token. The session must have none."""
    connection.write(ADD, (session, owner, holder, opener, seen, since, *until))
    return connection.last_insert_rowid()


def get(connection: apsw.Connection, token: int) -> TurnRow:
    """Return the turn that a head names."""
    row = connection.execute(GET, (token,)).get
    if not isinstance(row, tuple):
        raise StorageDamaged("reading", f"turn {token} has no row")
    return TurnRow(*row)


def renew(connection: apsw.Connection, token: int, until: Moment) -> bool:
    """Let the turn last until `until`; return False if it is not held any more."""
    connection.execute(RENEW, (*until, token))
    return connection.changes() == 1


def remove(connection: apsw.Connection, token: int) -> int:
    """Remove the row of a turn that has ended; return where its exchange had been opened."""
    opener = connection.execute(REMOVE, (token,)).get
    if not isinstance(opener, int):
        raise StorageDamaged("reading", f"turn {token} has no row")
    return opener


def seen(connection: apsw.Connection, session: int, token: int) -> int | None:
    """Return the last place in an inbox when the turn was taken; None if it is not held any more."""
    place = connection.execute(SEEN, (token, session)).get
    return place if isinstance(place, int) else None
