"""What can go wrong, whose fault it is, and what to do next.

One base, `TurnkeeperError`; below it the class decides the next step: correct the call
(`Rejected`), look again (`Conflict`), wait and retry (`StorageBusy`, `StorageFull`), tell
the operator (`StorageFailed`, `StorageDamaged`), stop using the handle (`Closed`). Each
error carries its facts as attributes; its text is made from them and never holds the
content of a message.
"""

from __future__ import annotations

__all__ = [
    "Closed",
    "Conflict",
    "Rejected",
    "StorageBusy",
    "StorageDamaged",
    "StorageError",
    "StorageFailed",
    "StorageFull",
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
    where the message is held in memory, in order, and will be written by itself as soon as
    storage takes it: do not send it again. `unknown` is true where the outcome could not be
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
            advice = "the message is kept and will be written; do not send it again"
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
