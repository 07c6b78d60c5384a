"""What happens to an inbox besides the turns that take from it, each as the body of one transaction."""

from __future__ import annotations

from typing import cast

from . import inbox, messages, sessions
from .admission import catch_up, find, is_held
from .asked import Asked, Changed
from .codec import Columns, same_message
from .connect import Connection
from .errors import Rejected
from .messages import Draft
from .receipts import Posted
from .records import Head, Policy
from .steps import create

__all__ = ["dismiss", "post", "requeue"]


def post(
    connection: Connection,
    asked: Asked,
    draft: Draft,
    policy: Policy | None,
    usual: Policy,
    most: int,
) -> Changed[Posted]:
    """Put `draft` into the session's inbox, which holds `most`; the session is made if need be.

    `policy` decides if it is given, else the session's, else the `usual` one. No turn refuses it.
    Raises `Closed`, and `Rejected` for a key that came with other content before.
    """
    head = catch_up(connection, asked, find(connection, asked))
    if policy is None and head is not None:
        policy = cast(Policy | None, sessions.policy(connection, head.session))
    policy = policy or usual
    waiting = 0 if head is None else inbox.count(connection, head.session, most)
    if head is not None and draft.key is not None:
        first = _first_receipt(connection, head, draft, draft.key, policy, waiting)
        if first is not None:
            return Changed(first, head)
    if waiting >= most:
        return Changed(Posted("full", None, None, policy, waiting), head)
    if policy == "refuse" and head is not None and (waiting or _is_busy(connection, asked, head)):
        return Changed(Posted("refused", None, None, policy, waiting), head)
    if head is None:
        head = create(connection, asked)
    inbox.add(
        connection,
        asked.append_id,
        head.session,
        policy,
        draft.opens_turn,
        asked.now,
        draft.key,
        Columns(draft.role, draft.content, draft.extra),
    )
    return Changed(Posted("accepted", asked.append_id, asked.now, policy, waiting + 1), head)


def requeue(connection: Connection, asked: Asked, id: int) -> Changed[bool]:
    """Let a message that was set aside wait again, behind all others; False if there is none."""
    head = catch_up(connection, asked, find(connection, asked))
    row = None if head is None else inbox.get(connection, head.session, id)
    if row is None or row.set_aside is None:
        return Changed(False, head)
    inbox.move_to_the_end(connection, row)
    return Changed(True, head)


def dismiss(connection: Connection, asked: Asked, id: int) -> Changed[bool]:
    """Remove a message that was set aside from the inbox; False if there is none.

    If a turn has appended it, it stays in the transcript.
    """
    head = catch_up(connection, asked, find(connection, asked))
    row = None if head is None else inbox.get(connection, head.session, id)
    if row is None or row.set_aside is None:
        return Changed(False, head)
    inbox.remove(connection, row.place)
    return Changed(True, head)


def _is_busy(connection: Connection, asked: Asked, head: Head) -> bool:
    return head.turn is not None and is_held(connection, asked, head.turn)


def _first_receipt(
    connection: Connection, head: Head, draft: Draft, key: str, policy: Policy, waiting: int
) -> Posted | None:
    """Return the receipt of the message that came under `key` first; None if none did."""
    stored = messages.by_key(connection, head.session, key)
    if stored is not None:
        columns, id, accepted_at = stored.columns, stored.append_id, stored.created_at
    else:
        posted = inbox.by_key(connection, head.session, key)
        if posted is None:
            return None
        columns, id, accepted_at = posted.columns, posted.id, posted.accepted_at
    if not same_message(columns, draft):
        raise Rejected("key", "came with other content before; a key names one message")
    return Posted("duplicate", id, accepted_at, policy, waiting)
