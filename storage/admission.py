"""May this change be made now, and what goes before it: what is pending, and the end of a dead turn.

A change that is asked under a turn shows its token, and the head must name the same. Any other
is refused while somebody's turn lives. A turn that is over refuses nobody; whoever passes it ends
it, and closes the tool calls that it left open, so that no path lacks their results.

What is pending was accepted before, so it goes first, by whomever the transaction is asked; but
not if the change is refused, for then nothing may happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from . import branches, heads, inbox, messages, moves, turns
from .asked import Asked, Kept, Release
from .clock import Moment
from .codec import Columns, same_message
from .connect import Connection
from .errors import TurnActive, TurnLost
from .messages import Draft
from .places import Range
from .reads import head_of
from .receipts import Ended
from .records import Head
from .steps import begin, check_at, hold, swap, write

__all__ = [
    "admit",
    "arrive",
    "catch_up",
    "end_turn",
    "find",
    "is_held",
    "pass_over",
    "write_pending",
]


def arrive(connection: Connection, asked: Asked) -> Head | None:
    """Return the head on which the change may be made; None if there is no such session yet.

    Raises `Closed` if the session that the caller means was deleted, `Conflict` if it was not at
    the revision that the caller decided on, `TurnActive` and `TurnLost` as `admit`.
    """
    head = find(connection, asked)
    check_at(asked, head)
    over = admit(connection, asked, head)
    head = write_pending(connection, asked, head)
    return pass_over(connection, asked, head) if over and head is not None else head


def find(connection: Connection, asked: Asked) -> Head | None:
    """Return the head of the session; the remembered one, if it still is.

    Raises `Closed` if the session that the caller means was deleted.
    """
    known = asked.known
    if known is not None and asked.life in (None, known.session) and heads.is_at(connection, known):
        return known
    return head_of(connection, asked.id, asked.life)


def catch_up(connection: Connection, asked: Asked, head: Head | None) -> Head | None:
    """Write what is pending and end what is unreleased, for a change that no turn refuses."""
    head = write_pending(connection, asked, head)
    if head is not None and head.turn in asked.unreleased:
        head = pass_over(connection, asked, head)
    return head


def pass_over(connection: Connection, asked: Asked, head: Head) -> Head:
    """End the turn that holds the session; if it was one of ours, as it has ended."""
    assert head.turn is not None
    return end_turn(connection, asked, head, asked.unreleased.get(head.turn))[0]


def admit(connection: Connection, asked: Asked, head: Head | None) -> bool:
    """Return whether a turn holds the session that is over, and is to be ended first.

    Raises `TurnLost` if the change is asked under a turn that does not hold any more, `TurnActive`
    if it is refused for somebody else's.
    """
    turn = None if head is None else head.turn
    if asked.token is not None:
        if turn != asked.token:
            raise TurnLost(asked.id)
        if asked.renew_s is not None:
            now = asked.rules.clock()
            until = now._replace(seconds=now.seconds + asked.renew_s)
            turns.renew(connection, asked.token, until)
        return False
    if turn is None:
        return False
    if not is_held(connection, asked, turn):
        return True
    if asked.interleave:
        return False
    row = turns.get(connection, turn)
    left_s = turns.remaining_s(row, asked.rules.clock())
    raise TurnActive(asked.id, row.holder, row.since, left_s)


def is_held(connection: Connection, asked: Asked, turn: int) -> bool:
    """Return whether the turn that a head names is alive."""
    if turn in asked.unreleased:
        return False
    row = turns.get(connection, turn)
    lives = asked.rules.owners.is_alive(row.owner)
    return not turns.is_over(row, asked.rules.clock(), owner_lives=lives)


def end_turn(
    connection: Connection, asked: Asked, head: Head, release: Release | None
) -> tuple[Head, Ended]:
    """End the turn that holds the session, and close the tool calls that it left open.

    `release` says what becomes of what it took from the inbox. Without, that waits again: nobody
    knows how the turn ended, or it took nothing.
    """
    assert head.turn is not None
    opener = turns.remove(connection, head.turn)
    set_aside, waiting = 0, False
    if release is not None:
        set_aside = _release(connection, asked, head.session, head.turn, release)
        waiting = inbox.count(connection, head.session, 1) > 0
    parts = _since(connection, head, min(opener, head.opener))
    results: Sequence[Draft] = ()
    if any(messages.may_call(connection, part) for part in parts):  # or large ones are read in vain
        results = asked.rules.close_calls(
            body for part in parts for body in messages.structured(connection, part)
        )
    after = head._replace(turn=None)
    if results:
        # Nothing to redo behind them: there the calls would be open again.
        after = after._replace(revision=head.revision + 1, redo=None)
        after, _ = write(connection, after, results, asked.append_id, asked.now)
        swap(connection, head, after, asked.now)
    else:
        hold(connection, head, None)
    return after, Ended(len(results), set_aside, waiting)


def _release(
    connection: Connection, asked: Asked, session: int, token: int, release: Release
) -> int:
    """Do with what the turn took from the inbox as its end says; return how many are set aside."""
    if release.outcome == "done":
        inbox.finish(connection, session, token)
    elif release.outcome == "given back":
        inbox.give_back(connection, session, token)
    else:
        boot, seconds = asked.rules.clock()
        inbox.try_later(connection, session, token, Moment(boot, seconds + release.pause_s))
        return inbox.set_aside_spent(connection, session, token, release.most_attempts, release.why)
    return 0


def write_pending(connection: Connection, asked: Asked, head: Head | None) -> Head | None:
    """Write what is pending behind `head`; return the head behind that."""
    for kept in asked.pending:
        head = _append_kept(connection, asked, head, kept)
    return head


def _since(connection: Connection, head: Head, first: int) -> list[Range]:
    """Return what is on the path to `head` from position `first` on, oldest part first."""
    parts = takewhile(
        lambda part: part.last >= first, branches.path(connection, head.branch, head.position)
    )
    return [part._replace(first=max(part.first, first)) for part in parts][::-1]


def _append_kept(
    connection: Connection, asked: Asked, head: Head | None, kept: Kept
) -> Head | None:
    """Write one pending append, unless it is there already. It leaves the redo stack as it is."""
    if kept.attempt is not None and kept.attempt.landed:
        return head
    if kept.life is not None and (head is None or head.session != kept.life):
        return head  # the session was deleted, and what belonged to it goes with it
    drafts: list[Draft] = []
    for draft in kept.drafts:
        there = _columns_by_key(connection, head, draft.key)
        if there is None:
            drafts.append(draft)
        elif not same_message(there, draft):
            # Another process took the key for something else meanwhile. This message was
            # accepted, so it is stored; refusing it now would lose it.
            drafts.append(draft._replace(key=None))
    if not drafts:
        return head
    if head is None:
        head = begin(connection, asked.id, None, 0, None, kept.now)
    if kept.token is not None and kept.token != head.turn:
        return _write_aside(connection, head, drafts, kept)
    after = head._replace(revision=head.revision + 1)
    after, _ = write(connection, after, drafts, kept.append_id, kept.now)
    swap(connection, head, after, kept.now)
    return after


def _columns_by_key(connection: Connection, head: Head | None, key: str | None) -> Columns | None:
    """Return what the session stored or has in its inbox under `key`."""
    if head is None or key is None:
        return None
    there = messages.by_key(connection, head.session, key) or inbox.by_key(
        connection, head.session, key
    )
    return None if there is None else there.columns


def _write_aside(connection: Connection, head: Head, drafts: list[Draft], kept: Kept) -> Head:
    """Write what a lost turn had pending into the history, beside the live path.

    Two moves, out to a branch of its own and back: between two moves a head only advances on one
    branch, which `restore` rests on.
    """
    out = head._replace(revision=head.revision + 1, at_tip=False)
    out, _ = write(connection, out, drafts, kept.append_id, kept.now)
    moves.record(connection, "lost", head, out, kept.now)
    back = head._replace(revision=head.revision + 2)
    moves.record(connection, "lost", out, back, kept.now)
    swap(connection, head, back, kept.now)
    return back
