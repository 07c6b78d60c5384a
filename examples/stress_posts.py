"""Posts: what was accepted is there once, in order, and was answered.

What is checked of one session:

* An accepted post is one message, with the id that its receipt said, its content, its key and its
  time; a post of a key that was seen before names that same one; what was refused is nowhere.
* Of two posts one of which was accepted before the other was begun, it is taken first.
* No post is taken again after a turn that ended well.
* At the end each was answered by a turn that ended well, or was interrupted by a newer one, or a
  person took it back meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stress_calls import Say
from stress_journal import Enter, Noted, Post
from stress_order import Found, Step
from stress_turns import Hold
from stress_wrong import Wrong, same

from turnkeeper.actors import Appended, Posted, StoredMessage

__all__ = ["check_posts"]


def check_posts(
    id: str,
    notes: Sequence[Noted],
    steps: Sequence[Step],
    holds: Sequence[Hold],
    found: Found,
) -> None:
    """Raise `Wrong` unless each accepted post became one message and was answered."""
    rows: dict[int, list[StoredMessage]] = {}
    bodies: dict[str, int] = {}
    for of_revision in found.rows.values():
        for row in of_revision:
            rows.setdefault(row.append_id, []).append(row)
            bodies[str(row.body)] = bodies.get(str(row.body), 0) + 1
    accepted: dict[int, Noted] = {}
    first_of_key: dict[str, int] = {}
    for note in notes:
        if not isinstance(note.operation, Post) or not isinstance(note.outcome, Posted):
            continue
        post, receipt = note.operation, note.outcome
        if receipt.id is None:
            if post.key is None and bodies.get(str(post.body)):
                raise Wrong(id, f"{note}, {receipt.status}", "nowhere", "it was stored")
            continue
        if receipt.status == "accepted" and accepted.setdefault(receipt.id, note) is not note:
            raise Wrong(id, f"receipt of {note}", "an id of its own", receipt.id)
        if post.key is not None:
            same(id, f"{note}", first_of_key.setdefault(post.key, receipt.id), receipt.id)
        _check_row(id, note, post, receipt, rows.get(receipt.id, []))
    _check_order(id, accepted, rows)
    for post_id, note in accepted.items():
        _check_answered(id, note, rows[post_id][0], steps, holds, notes)


def _check_row(
    id: str, note: Noted, post: Post, receipt: Posted, rows: Sequence[StoredMessage]
) -> None:
    if len(rows) != 1:
        raise Wrong(id, f"{note}, {receipt.status}", "one message", f"{len(rows)} of it")
    (row,) = rows
    same(id, f"{note}", (post.body, post.key), (row.body, row.key))
    same(id, f"time of {note}", receipt.accepted_at, row.created_at)


def _check_order(id: str, accepted: dict[int, Noted], rows: dict[int, list[StoredMessage]]) -> None:
    taken = sorted(accepted.items(), key=lambda item: rows[item[0]][0].id or 0)
    latest_begun: Noted | None = None
    for _, note in taken:
        if latest_begun is not None and note.ended < latest_begun.began:
            raise Wrong(id, f"{note}", f"taken before {latest_begun}", "after it")
        if latest_begun is None or note.began > latest_begun.began:
            latest_begun = note


def _check_answered(
    id: str,
    note: Noted,
    row: StoredMessage,
    steps: Sequence[Step],
    holds: Sequence[Hold],
    notes: Sequence[Noted],
) -> None:
    deliveries = [hold for hold in holds if row.append_id in hold.taken]
    for earlier, later in pairwise(deliveries):
        # What came between could have ended it before it could end itself.
        forced = any(
            hold.how == "take over" and earlier.token < hold.token < later.token for hold in holds
        )
        forced |= any(
            other.operation == Enter("take over")
            and not other.answered
            and earlier.had < other.ended
            and other.began < later.had
            for other in notes
        )
        ended = earlier.left is not None and earlier.left.how in ("well", "interrupted")
        if ended and not forced and not earlier.killed:
            raise Wrong(id, f"{note}", f"done with turn {earlier.token}", f"again in {later.token}")
    last = deliveries[-1] if deliveries else None
    if last is not None and last.left is not None:
        if last.left.how == "interrupted":
            return
        if last.left.how == "well" and _answer(last, notes):
            return
    taken_back = any(
        step.revision > (row.revision or 0) and all(there.id != row.id for there in step.path)
        for step in steps
    )
    if not taken_back:
        found = "never taken" if last is None else f"turn {last.token}, {last.left}"
        raise Wrong(id, f"{note}", "answered", found)


def _answer(hold: Hold, notes: Sequence[Noted]) -> bool:
    """Whether the turn has acknowledged its answer."""
    return any(
        note.token == hold.token
        and isinstance(note.operation, Say)
        and isinstance(note.outcome, Appended)
        and note.operation.bodies[0]["content"] == f"answered under {hold.token}"
        for note in notes
    )
