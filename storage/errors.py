"""What can go wrong, whose fault it is, and what to do next.

One base, `TurnkeeperError`; below it the class decides the next step: correct the call
(`Rejected`), look again (`Conflict`), wait for the holder (`TurnActive`), stop acting in the
session (`TurnLost`), wait and retry (`StorageBusy`, `StorageFull`), tell the operator
(`StorageFailed`, `StorageDamaged`), stop using the handle (`Closed`). Each error carries its
facts as attributes; its text is made from them and never holds the content of a message.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = [
    "Closed",
    "Conflict",
    "LossReason",
    "Rejected",
    "StorageBusy",
    "StorageDamaged",
    "StorageError",
    "StorageFailed",
    "StorageFull",
    "TurnActive",
    "TurnLost",
    "TurnkeeperError",
]


class TurnkeeperError(Exception):
    """Base of every error that Turnkeeper raises on purpose."""


class Rejected(TurnkeeperError):
    """The call is wrong; certain: nothing was written. Correct the call, do not repeat it.

    One case is nobody's fault: field ``store``, for what a store that closes does not begin any
    more. Send that again when it is open.

    `field` names the argument at fault, with a path into it where there is one
    (``message.tool_calls[0].id``); `problem` says what is wrong with it.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class Conflict(TurnkeeperError):
    """Somebody else moved the session on; nothing was written. Read it again and decide anew.

    `at` is the revision that the caller had read, `revision` the one that is there.
    """

    def __init__(self, session: str, at: int, revision: int) -> None:
        super().__init__(session, at, revision)
        self.session = session
        self.at = at
        self.revision = revision

    def __str__(self) -> str:
        return (
            f"session {self.session!r} is at revision {self.revision}, not {self.at}: "
            "read it again and decide anew"
        )


class TurnActive(TurnkeeperError):
    """Somebody else holds the session's turn; nothing was written. Wait, or take it over.

    `holder` is what the holder calls itself, `since` when it took the turn (seconds since the
    epoch), `expires_in` for how many seconds it lasts if it is not renewed; a holder that lives
    renews it.
    """

    def __init__(self, session: str, holder: str, since: float, expires_in: float) -> None:
        super().__init__(session, holder, since, expires_in)
        self.session = session
        self.holder = holder
        self.since = since
        self.expires_in = expires_in

    def __str__(self) -> str:
        return (
            f"session {self.session!r} is held by {self.holder!r}, for {self.expires_in:.1f} s more "
            "if it does not renew: wait for its turn to end, or take it over; code that holds the "
            "turn itself writes through the turn object"
        )


LossReason: TypeAlias = Literal["taken", "interrupted", "overdue", "closed", "ended"]
"""How a turn was lost. ``taken``: somebody else took it over, or wrote past it when it had expired.
``interrupted``: a message was posted that was to interrupt it. ``overdue``: it was held for longer
than it may be. ``closed``: the store was closed. ``ended``: its block has ended."""


class TurnLost(TurnkeeperError):
    """The turn is not ours any more. What was written under it before stands; nothing else was.

    Do not act in the session again: whoever holds it now does.
    """

    def __init__(self, session: str, reason: LossReason = "taken") -> None:
        super().__init__(session, reason)
        self.session = session
        self.reason = reason

    def __str__(self) -> str:
        why = {
            "taken": "somebody else has taken it",
            "interrupted": "a newer message interrupted it",
            "overdue": "it was held for too long",
            "closed": "the store was closed",
            "ended": "its block has ended",
        }
        return f"the turn in session {self.session!r} was lost: {why[self.reason]}"


class Closed(TurnkeeperError):
    """The store is closed, or the session was deleted: this handle is of no more use.

    `what` is ``"store"`` or ``"session"``; nothing was written. For a deleted session,
    `sessions[id]` gives a handle on a new one of the same name.
    """

    def __init__(self, what: str, name: str) -> None:
        super().__init__(what, name)
        self.what = what
        self.name = name

    def __str__(self) -> str:
        if self.what == "store":
            return f"the store {self.name!r} is closed: open it again"
        return f"session {self.name!r} was deleted: take a new handle to begin a new one"


class StorageError(TurnkeeperError):
    """Storage could not do it; the call itself was right.

    `doing` says what was tried, `detail` what SQLite or the system answered. `kept` is true
    where the message (or the end of the turn) is held in memory, in order, and will be written by
    itself as soon as storage takes it: do not send it again. `unknown` is true where the outcome could not be
    found out, because storage did not come back after a failed commit: read before you
    repeat. With neither, nothing was written.
    """

    advice = "try again later"

    def __init__(
        self, doing: str, detail: str = "", *, kept: bool = False, unknown: bool = False
    ) -> None:
        super().__init__(doing, detail)
        self.doing = doing
        self.detail = detail
        self.kept = kept
        self.unknown = unknown

    def __str__(self) -> str:
        if self.kept:
            advice = "it is kept and will be written; do not send it again"
        elif self.unknown:
            advice = "whether it was written is not known; read before you repeat it"
        else:
            advice = self.advice
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.doing}{detail}: {advice}"


class StorageBusy(StorageError):
    """Another process held the file's write lock for the whole time limit. Try again."""

    advice = "another process holds the file; try again"


class StorageFull(StorageError):
    """The disk, or the file's allowed size, is full. Free space, then try again."""

    advice = "free some space, then try again"


class StorageFailed(StorageError):
    """The disk or the system refused (I/O error, permissions). Tell the operator."""

    advice = "check the disk and the permissions of the file and its folder"


class StorageDamaged(StorageError):
    """The file is not a sound store: garbage, empty, damaged, foreign or from the future.

    It was left as it is. Restore a backup, or open the right file.
    """

    advice = "nothing was changed; restore a backup or open another file"
