"""Each change that a session can make besides appending, as the body of one transaction.

A change is a function of the writing connection, of what is known (`Asked`) and of its own
arguments; it returns a receipt and the head it left, or raises and has changed nothing. It may
be run again from the beginning, for the writer does so when a transaction was lost.

The head is read in the transaction, and what is pending is written first, so that a change
applies to what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import branches, messages, moves, sessions
from .admission import arrive, catch_up, find
from .asked import Asked, Changed, TakenBack
from .codec import Columns, same_message
from .connect import Connection
from .errors import Rejected
from .messages import Draft
from .places import Place
from .receipts import Forked, Moved, Rewritten, Undone
from .records import Head, JSONObject, MoveKind, Policy
from .steps import begin, check_at, create, head_at, move, opener_at, write

__all__ = ["fork", "redo", "restore", "rewind", "rewrite", "set_meta", "set_policy"]


def rewind(
    connection: Connection,
    asked: Asked,
    turns: int,
    kind: MoveKind,
    take: Callable[[JSONObject], TakenBack],
) -> Changed[Undone | None]:
    """Move the head before the `turns`-th last user turn, or the first if there are fewer.

    `take` says what becomes of the message that opened it; what it raises goes to the caller
    and nothing changes. Returns None as the receipt if there is no user turn.
    """
    head = arrive(connection, asked)
    if head is None or head.opener == 0:
        return Changed(None, head)
    branch, opener, undone = head.branch, head.opener, 0
    while True:
        branch = branches.locate(connection, branch, opener)
        undone += 1
        landing = Place(branches.locate(connection, branch, opener - 1), opener - 1)
        below = opener_at(connection, landing)
        if undone == turns or below == 0:
            break
        branch, opener = landing.branch, below
    taken = take(messages.read(connection, branch, opener).body)
    after = head_at(connection, head, landing)._replace(redo=head.revision + 1)
    if taken.scaffold is not None:
        after, _ = write(connection, after, [taken.scaffold], asked.append_id, asked.now)
    move(connection, kind, head, after, asked.now)
    receipt = Undone(
        text=taken.text,
        turns=undone,
        messages=head.position - landing.position,
        position=after.position,
        revision=after.revision,
    )
    return Changed(receipt, after)


def redo(connection: Connection, asked: Asked) -> Changed[Moved | None]:
    """Move the head back to where the last undo took it from; None if there is nothing to redo."""
    head = arrive(connection, asked)
    if head is None or head.redo is None:
        return Changed(None, head)
    place, below = moves.undone(connection, head.session, head.redo)
    after = head_at(connection, head, place)._replace(redo=below)
    move(connection, "redo", head, after, asked.now)
    return Changed(Moved(after.position, after.revision), after)


def rewrite(
    connection: Connection, asked: Asked, drafts: Sequence[Draft], kind: MoveKind
) -> Changed[Rewritten]:
    """Make the visible transcript read `drafts`; what it already begins with stays where it is.

    Hidden rows among and right behind that beginning stay too. Nothing is written if the
    transcript reads so already.
    """
    head = arrive(connection, asked)
    if head is None:
        if not drafts:
            return Changed(Rewritten(0, 0, (), 0, 0, changed=False), None)
        head = create(connection, asked)
    kept, last = _common_beginning(connection, head, drafts)
    if kept == len(drafts) and last == head.position:
        unchanged = Rewritten(kept, 0, (), head.position, head.revision, changed=False)
        return Changed(unchanged, head)
    after = head._replace(revision=head.revision + 1, redo=None)
    if last < head.position:
        landing = Place(branches.locate(connection, head.branch, last), last)
        after = head_at(connection, head, landing)
    after, receipts = write(connection, after, drafts[kept:], asked.append_id, asked.now)
    move(connection, kind, head, after, asked.now)
    receipt = Rewritten(
        kept=kept,
        replaced=head.position - last,
        appended=tuple(receipts),
        position=after.position,
        revision=after.revision,
        changed=True,
    )
    return Changed(receipt, after)


def restore(connection: Connection, asked: Asked, revision: int) -> Changed[Moved]:
    """Move the head to where it was after `revision`. Raises `Rejected` if there is no such one."""
    head = arrive(connection, asked)
    first = sessions.born(connection, head.session) if head is not None else 1
    if head is None or not first <= revision <= head.revision:
        last = head.revision if head is not None else 0
        raise Rejected("revision", f"{revision} does not exist; there are {first} to {last}")
    place = _head_after(connection, head, revision)
    after = head_at(connection, head, place)
    if after[2:4] == (branches.locate(connection, *head[2:4]), head.position):
        return Changed(Moved(head.position, head.revision), head)
    move(connection, "restore", head, after, asked.now)
    return Changed(Moved(after.position, after.revision), after)


def fork(
    connection: Connection, asked: Asked, id: str, position: int | None, meta: bytes | None
) -> Changed[Forked]:
    """Make the session `id` that starts after `position` of this one; no message is copied.

    None means the head. No turn refuses it, for this session stays as it is. Raises `Rejected` if
    the position does not exist or the id is taken.
    """
    head = _passing(connection, asked)
    end = head.position if head is not None else 0
    at = end if position is None else position
    if not 0 <= at <= end:
        raise Rejected("position", f"{at} does not exist; there are 0 to {end}")
    if sessions.key_of(connection, id) is not None:
        raise Rejected("id", f"session {id!r} exists already")
    parent, opener = None, 0
    if head is not None and at > 0:
        parent = branches.locate(connection, head.branch, at)
        opener = opener_at(connection, Place(parent, at))
    forked = begin(connection, id, Place(parent, at) if parent else None, opener, meta, asked.now)
    return Changed(Forked(id, at, forked.revision), head)


def set_meta(connection: Connection, asked: Asked, meta: bytes) -> Changed[None]:
    """Replace the session's meta; it is made if it was not there. No revision is raised.

    No turn refuses it.
    """
    head = _passing(connection, asked)
    if head is None:
        head = create(connection, asked)
    sessions.set_meta(connection, head.session, meta)
    return Changed(None, head)


def set_policy(connection: Connection, asked: Asked, policy: Policy | None) -> Changed[None]:
    """Set what becomes of messages posted mid-turn; None for the store's own. As `set_meta`."""
    head = _passing(connection, asked)
    if head is None:
        head = create(connection, asked)
    sessions.set_policy(connection, head.session, policy)
    return Changed(None, head)


def _passing(connection: Connection, asked: Asked) -> Head | None:
    """Return the head as `arrive` does, whoever holds the session."""
    head = find(connection, asked)
    check_at(asked, head)
    return catch_up(connection, asked, head)


def _common_beginning(
    connection: Connection, head: Head, drafts: Sequence[Draft]
) -> tuple[int, int]:
    """Return how many visible messages agree with `drafts`, and the last position to keep."""
    parts = list(branches.path(connection, head.branch, head.position))
    kept = last = 0
    for role, content, extra, _, position, _, hidden, *_ in messages.load(
        connection, reversed(parts)
    ):
        if not hidden:
            columns = Columns(role, content, extra)
            if kept == len(drafts) or not same_message(columns, drafts[kept]):
                break
            kept += 1
        last = position
    return kept, last


def _head_after(connection: Connection, head: Head, revision: int) -> Place:
    """Return where the head was after `revision`.

    Between two moves a head only advances by appends, on one branch: the one that the next
    move left, or the one that it is on now.
    """
    move = moves.last_until(connection, head.session, revision)
    since, start = move or (0, branches.first_of(connection, head.session))
    end = moves.first_after(connection, head.session, revision)
    branch = end.branch if end is not None else head.branch
    position = messages.last_between(connection, branch, since, revision)
    return start if position is None else Place(branch, position)
