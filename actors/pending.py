"""Pending: appends that storage could not take; kept, in order, and written before anything newer.

Pure: what may be kept, and how what is kept reads. Who retries, and when, is `recovery`.
"""

from __future__ import annotations

from attrs import evolve

from ..storage import Draft, Kept, Rejected, StoredMessage, Transcript, decode_message, same_message

__all__ = ["keep", "number_of", "with_pending"]


def number_of(pending: tuple[Kept, ...]) -> int:
    """Return how many messages are pending."""
    return sum(len(kept.drafts) for kept in pending)


def keep(pending: tuple[Kept, ...], more: Kept, most: int) -> tuple[Kept, ...] | None:
    """Return `pending` with `more` behind it; None if that would be more than `most` messages.

    A draft whose key is pending already is not kept twice. Raises `Rejected` if that key is
    pending with other content.
    """
    known = {draft.key: draft for kept in pending for draft in kept.drafts}
    fresh: list[Draft] = []
    for draft in more.drafts:
        twin = known.get(draft.key) if draft.key is not None else None
        if twin is None:
            fresh.append(draft)
            known[draft.key] = draft
        elif not same_message(draft, twin):
            raise Rejected("key", "came with other content before; a key names one message")
    if not fresh:
        return pending
    if number_of(pending) + len(fresh) > most:
        return None
    return (*pending, evolve(more, drafts=tuple(fresh)))


def with_pending(
    transcript: Transcript,
    pending: tuple[Kept, ...],
    *,
    last: int | None,
    after: int,
    hidden: bool,
) -> Transcript:
    """Return `transcript` with what is pending behind it, as `Session.transcript` was asked."""
    messages = list(transcript.messages)
    position = transcript.position
    there = {message.append_id for message in messages}
    for kept in pending:
        if kept.attempt is not None and kept.append_id in there:
            continue  # the commit that seemed to fail was done
        for draft in kept.drafts:
            position += 1
            if position <= after or (draft.hidden and not hidden):
                continue
            messages.append(
                StoredMessage(
                    decode_message(draft.role, draft.content, draft.extra),
                    None,
                    position,
                    None,
                    draft.hidden,
                    draft.opens_turn,
                    draft.key,
                    kept.now,
                    kept.append_id,
                    "live",
                    True,
                    draft.synthetic,
                )
            )
    if last is not None:
        messages = messages[max(0, len(messages) - last) :]
    return Transcript(transcript.session, transcript.revision, position, tuple(messages))
