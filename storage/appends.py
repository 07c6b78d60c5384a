"""Appending: the change that nearly every operation is, as the body of one transaction.

The head that the caller remembers is tried in the statement that moves it. Only where it is
stale, or unknown, or something is pending, is it read first. Like every change these may be
run again from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import branches, heads, inbox, messages
from .admission import admit, catch_up, pass_over, write_pending
from .asked import Asked, Changed
from .codec import same_message
from .connect import Connection
from .errors import Rejected
from .messages import Draft
from .reads import head_of
from .receipts import Appended
from .records import Head
from .steps import check_at, create, swap, write

__all__ = ["append", "drain", "extend"]


def append(connection: Connection, asked: Asked, draft: Draft) -> Changed[Appended]:
    """Append one message; as `extend`."""
    quick = _append_at_known_head(connection, asked, draft)
    if quick is not None:
        return quick
    receipts, head = extend(connection, asked, (draft,))
    return Changed(receipts[0], head)


def extend(
    connection: Connection, asked: Asked, drafts: Sequence[Draft]
) -> Changed[tuple[Appended, ...]]:
    """Append `drafts`, one revision for all, and return a receipt for each.

    A draft whose key the session has seen is not stored again; its receipt is the first one.
    Keys are looked at before `at` and before turns, so that a redelivery is answered whatever
    happened since. Raises `Closed`, `Conflict`, `TurnActive`, `TurnLost`, and `Rejected` for a key
    that came with other content before, or whose message waits in the inbox.
    """
    found = head_of(connection, asked.id, asked.life)
    head = write_pending(connection, asked, found)
    receipts: dict[int, Appended] = {}
    first: dict[str, int] = {}
    fresh: list[int] = []
    for index, draft in enumerate(drafts):
        earlier = None if head is None else _duplicate(connection, head, draft)
        if earlier is not None:
            receipts[index] = earlier
        elif draft.key is None or draft.key not in first:
            fresh.append(index)
            if draft.key is not None:
                first[draft.key] = index
        elif not same_message(draft, drafts[first[draft.key]]):
            raise _other_content()
    if fresh:
        check_at(asked, found)
        over = admit(connection, asked, head)
        if over and head is not None:
            head = pass_over(connection, asked, head)
        before = create(connection, asked) if head is None else head
        head = before._replace(revision=before.revision + 1, redo=None)
        new = [drafts[index] for index in fresh]
        head, written = write(connection, head, new, asked.append_id, asked.now)
        swap(connection, before, head, asked.now)
        receipts.update(zip(fresh, written, strict=True))
    for index, draft in enumerate(drafts):
        if index not in receipts:  # its twin stands before it in the batch
            assert draft.key is not None
            receipts[index] = receipts[first[draft.key]]._replace(duplicate=True)
    return Changed(tuple(receipts[index] for index in range(len(drafts))), head)


def _append_at_known_head(
    connection: Connection, asked: Asked, draft: Draft
) -> Changed[Appended] | None:
    """Append one message at the remembered head; None, and nothing was done, if that is stale.

    The way of nearly every append, so it is written out: two statements, three with a key. The
    head moves before the row is written, so a stale one is noticed before it does harm.
    """
    known = asked.known
    if known is None or not known.at_tip or asked.pending or asked.renew_s is not None:
        return None
    session, revision, branch, position, _, opener, _, turn = known
    if turn != asked.token:
        return None
    if (asked.at is not None and asked.at != revision) or (
        asked.life is not None and asked.life != session
    ):
        return None
    if draft.key is not None and (
        messages.by_key(connection, session, draft.key) is not None
        or inbox.by_key(connection, session, draft.key) is not None
    ):
        return None
    revision += 1
    position += 1
    if draft.opens_turn:
        opener = position
    after = Head(session, revision, branch, position, True, opener, None, turn)
    if not heads.swap(connection, known, after, asked.now):
        return None
    id = messages.insert(
        connection, draft, session, branch, position, revision, opener, asked.append_id, asked.now
    )
    return Changed(Appended(id, position, revision, False, True), after)


def drain(connection: Connection, asked: Asked) -> Changed[None]:
    """Write what is pending, end what is unreleased, and nothing else; no turn refuses it."""
    head = head_of(connection, asked.id, asked.life)
    return Changed(None, catch_up(connection, asked, head))


def _duplicate(connection: Connection, head: Head, draft: Draft) -> Appended | None:
    """Return the first receipt of the draft's key, or None if the session never saw the key."""
    if draft.key is None:
        return None
    row = messages.by_key(connection, head.session, draft.key)
    if row is None:
        posted = inbox.by_key(connection, head.session, draft.key)
        if posted is not None and same_message(posted.columns, draft):
            raise Rejected("key", "waits in the inbox; the turn that takes it appends its message")
        if posted is not None:
            raise _other_content()
        return None
    if not same_message(row.columns, draft):
        raise _other_content()
    live = row.position <= head.position and row.branch == branches.locate(
        connection, head.branch, row.position
    )
    return Appended(row.id, row.position, row.revision, True, live)


def _other_content() -> Rejected:
    return Rejected("key", "came with other content before; a key names one message")
