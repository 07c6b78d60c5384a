"""Which version a file is, and the way from there to this one.

The schema is the sum of its migrations, `sql/NNNN_name.sql`, numbered from 1 without gaps;
`user_version` counts those that were run. A migration that was released never changes. A file
that has seen more of them than we know is from the future and is refused untouched.
"""

from __future__ import annotations

from importlib import resources

import apsw

from .errors import StorageDamaged

__all__ = ["VERSION", "define_guard", "migrate", "version_of"]

_SCRIPTS = sorted(
    (
        (int(entry.name[:4]), entry.read_text("utf-8"))
        for entry in resources.files(__package__).joinpath("sql").iterdir()
        if entry.name.endswith(".sql")
    ),
)

VERSION = _SCRIPTS[-1][0]
"""The version that this library writes."""


def version_of(connection: apsw.Connection) -> int:
    """Return the number of migrations that the file has seen."""
    version = connection.pragma("user_version")
    assert isinstance(version, int)
    return version


def migrate(connection: apsw.Connection) -> None:
    """Bring the file to `VERSION` in one transaction; nothing happens if it is there.

    Raises `StorageDamaged` if the file is newer than this library. Several processes may call
    this at once: whoever gets the write lock first does the work, SQLite's busy error is the
    caller's to wait on.
    """
    if version_of(connection) == VERSION:
        return
    define_guard(connection, allowed=False)
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = version_of(connection)
        if found > VERSION:
            raise StorageDamaged(
                "opening the store",
                f"its schema is version {found}, newer than version {VERSION}, which this library "
                "knows: use a newer Turnkeeper",
            )
        for number, script in _SCRIPTS[found:]:
            connection.execute(script)
            connection.pragma("user_version", number)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def define_guard(connection: apsw.Connection, *, allowed: bool) -> None:
    """Define the function that the guard triggers ask before anything is deleted."""

    def removal_allowed(*_: apsw.SQLiteValue) -> int:
        return int(allowed)

    connection.create_scalar_function(
        "removal_allowed", removal_allowed, 0, flags=apsw.SQLITE_INNOCUOUS
    )
