"""Taking a turn and ending it, each as the body of one transaction.

The turn that takes what the inbox holds appends it in the same transaction, and the rows stay
there until it ends well: a process that dies in between has lost nothing and repeated nothing.
"""

from __future__ import annotations

from attrs import frozen

from . import branches, inbox, messages, turns
from .admission import admit, arrive, end_turn, find, pass_over, write_pending
from .asked import Asked, Changed, Release
from .clock import Moment
from .connect import Connection
from .inbox import InboxRow
from .messages import Draft
from .receipts import Ended, NotYet, Taken
from .records import Head
from .steps import create, hold, swap, write

__all__ = ["Claim", "end", "take"]

TOO_OFTEN = "it was taken as often as it may be, and no turn ended well"


@frozen
class Claim:
    """What is wanted of a turn."""

    holder: str
    """What the holder calls itself."""
    ttl_s: float
    """How long it lasts if it is not renewed."""
    force: bool = False
    """Whether somebody else's turn is to be ended for it."""
    most_attempts: int | None = None
    """If given, the turn is wanted for what the inbox holds, each tried so often at most."""


def take(connection: Connection, asked: Asked, claim: Claim) -> Changed[Taken | NotYet | None]:
    """Take the turn; the session is made if it is not there yet.

    None, and no turn was taken, if it is wanted for what the inbox holds and nothing waits;
    `NotYet` if what comes first is to wait for its next try.
    Raises `TurnActive` if somebody else holds it.
    """
    head = find(connection, asked)
    if claim.force:
        over = head is not None and head.turn is not None
    else:
        over = admit(connection, asked, head)
    head = write_pending(connection, asked, head)
    if over and head is not None:
        head = pass_over(connection, asked, head)
    rows = None
    if claim.most_attempts is not None:
        rows = [] if head is None else _due(connection, head, claim.most_attempts)
        if not rows:
            return Changed(None, head)
        wait_s = _wait_s(rows[0], asked.rules.clock())
        if wait_s > 0:
            return Changed(NotYet(wait_s), head)
    if head is None:
        head = create(connection, asked)
    now = asked.rules.clock()
    until = now._replace(seconds=now.seconds + claim.ttl_s)
    owner = asked.rules.owners.number
    token = turns.add(
        connection,
        head.session,
        owner,
        claim.holder,
        head.opener,
        inbox.last_place(connection),
        asked.now,
        until,
    )
    head = hold(connection, head, token)
    if rows is None:
        return Changed(Taken(token, asked.now, (), 0), head)
    head, ids = _deliver(connection, asked, head, token, rows)
    taken = tuple(messages.by_id(connection, id) for id in ids)
    return Changed(Taken(token, asked.now, taken, rows[0].attempts + 1), head)


def end(connection: Connection, asked: Asked, release: Release | None) -> Changed[Ended]:
    """End the turn under which this is asked, and close the tool calls that it left open.

    Raises `TurnLost` if it does not hold any more; what it took from the inbox then waits for
    another.
    """
    head = arrive(connection, asked)
    assert head is not None  # or there were no turn
    head, ended = end_turn(connection, asked, head, release)
    return Changed(ended, head)


def _due(connection: Connection, head: Head, most_attempts: int) -> list[InboxRow]:
    """Return what a turn is to take from the inbox now.

    Sets aside on the way what was tried often enough (by processes that died in the middle), and
    removes what a person has taken back since a turn first appended it.
    """
    while rows := inbox.front(connection, head.session):
        gone = [row for row in rows if row.message and not _is_live(connection, head, row.message)]
        spent = [row for row in rows if row not in gone and row.attempts >= most_attempts]
        if not gone and not spent:
            return rows
        for row in gone:
            inbox.remove(connection, row.place)
        for row in spent:
            inbox.set_aside(connection, row.place, TOO_OFTEN)
    return []


def _wait_s(row: InboxRow, now: Moment) -> float:
    if row.retry_at is None or row.retry_boot != now.boot:
        return 0.0
    return max(0.0, row.retry_at - now.seconds)


def _is_live(connection: Connection, head: Head, message: int) -> bool:
    place = messages.place_of(connection, message)
    return (
        place is not None
        and place.position <= head.position
        and branches.locate(connection, head.branch, place.position) == place.branch
    )


def _deliver(
    connection: Connection, asked: Asked, head: Head, token: int, rows: list[InboxRow]
) -> tuple[Head, list[int]]:
    """Append what of `rows` no turn has appended yet, one revision for all; return all their ids.

    Of several only the first that a person wrote opens a turn: they are answered together.
    """
    before = head
    ids = []
    opened = False
    for row in rows:
        id = row.message
        if id is None:
            if head is before:
                head = head._replace(revision=head.revision + 1, redo=None)
            opens = row.opens_turn == 1 and not opened
            draft = Draft(row.role, row.content, row.extra, False, opens, row.caller_key)
            head, (receipt,) = write(connection, head, [draft], row.id, row.accepted_at)
            id = receipt.id
        opened = opened or row.opens_turn == 1
        inbox.give(connection, row.place, token, id)
        ids.append(id)
    if head is not before:
        swap(connection, before, head, asked.now)
    return head, ids
