-- A session is a movable head in a tree of branches; messages never change.

CREATE TABLE sessions (
    key        INTEGER PRIMARY KEY AUTOINCREMENT,
    id         TEXT    NOT NULL,
    born       INTEGER NOT NULL,   -- the first revision that restore can go back to
    buried     INTEGER,            -- a tombstone keeps the last revision: a later life starts above it
    created_at REAL    NOT NULL,
    meta       BLOB
) STRICT;
CREATE UNIQUE INDEX sessions_alive ON sessions (id) WHERE buried IS NULL;
CREATE INDEX sessions_dead ON sessions (id) WHERE buried IS NOT NULL;

-- Apart from the sessions, for every append writes a head, and a meta may be large.
CREATE TABLE heads (
    session    INTEGER PRIMARY KEY,
    revision   INTEGER NOT NULL,
    branch     INTEGER NOT NULL,   -- the head: this branch ...
    position   INTEGER NOT NULL,   -- ... up to this position
    at_tip     INTEGER NOT NULL CHECK (at_tip IN (0, 1)),   -- 1: the next append extends the branch; 0: it starts a new one
    opener     INTEGER NOT NULL,   -- position of the message that opened the head's turn, or 0
    redo       INTEGER,            -- revision of the undo that a redo takes back
    updated_at REAL    NOT NULL
) STRICT;

CREATE TABLE branches (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    session         INTEGER NOT NULL,
    parent          INTEGER,           -- NULL: it starts at the root
    parent_position INTEGER NOT NULL   -- its own messages stand after this position
) STRICT;
CREATE INDEX branches_by_session ON branches (session);
CREATE INDEX branches_by_parent ON branches (parent, parent_position) WHERE parent IS NOT NULL;

-- The small columns come first: a walk over them then never reads a long content's pages.
CREATE TABLE messages (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    session    INTEGER NOT NULL,
    branch     INTEGER NOT NULL,
    position   INTEGER NOT NULL CHECK (position >= 1),
    revision   INTEGER NOT NULL,
    opener     INTEGER NOT NULL,   -- position of the message that opened this turn; its own if it did
    hidden     INTEGER NOT NULL CHECK (hidden IN (0, 1)),
    append_id  INTEGER NOT NULL,
    created_at REAL    NOT NULL,
    caller_key TEXT,
    role       TEXT    NOT NULL,
    content    ANY,
    extra      ANY,
    UNIQUE (branch, position)
) STRICT;
CREATE UNIQUE INDEX messages_by_key ON messages (session, caller_key) WHERE caller_key IS NOT NULL;

CREATE TABLE moves (
    session       INTEGER NOT NULL,
    revision      INTEGER NOT NULL,
    kind          TEXT    NOT NULL,
    from_branch   INTEGER NOT NULL,
    from_position INTEGER NOT NULL,
    to_branch     INTEGER NOT NULL,
    to_position   INTEGER NOT NULL,
    redo_below    INTEGER,           -- the redo that is next once this undo has been taken back
    at            REAL    NOT NULL,
    PRIMARY KEY (session, revision)
) STRICT, WITHOUT ROWID;

-- One row for each open writer: the number of its last batch. It is written in the batch's own
-- transaction, so after a COMMIT of unknown outcome it tells whether the batch is there.
CREATE TABLE batches (
    writer INTEGER PRIMARY KEY,
    last   INTEGER NOT NULL
) STRICT;

-- Nothing is lost. `removal_allowed()` is a function of the store's writing connection; it is
-- true only inside delete and purge. Another program does not have it, and gets an error.
-- A replacing INSERT deletes first, so with recursive_triggers on, as every connection of a store
-- has it, it is refused as well.
CREATE TRIGGER messages_keep BEFORE DELETE ON messages WHEN NOT removal_allowed()
BEGIN SELECT RAISE(ABORT, 'messages are never deleted, except by delete and purge'); END;
CREATE TRIGGER messages_stay BEFORE UPDATE ON messages
BEGIN SELECT RAISE(ABORT, 'messages never change'); END;
CREATE TRIGGER branches_keep BEFORE DELETE ON branches WHEN NOT removal_allowed()
BEGIN SELECT RAISE(ABORT, 'branches are never deleted, except by delete and purge'); END;
CREATE TRIGGER branches_stay BEFORE UPDATE ON branches
BEGIN SELECT RAISE(ABORT, 'branches never change'); END;
CREATE TRIGGER moves_keep BEFORE DELETE ON moves WHEN NOT removal_allowed()
BEGIN SELECT RAISE(ABORT, 'moves are never deleted, except by delete and purge'); END;
CREATE TRIGGER moves_stay BEFORE UPDATE ON moves
BEGIN SELECT RAISE(ABORT, 'moves never change'); END;
CREATE TRIGGER heads_keep BEFORE DELETE ON heads
BEGIN SELECT RAISE(ABORT, 'heads are never deleted: they only move'); END;
CREATE TRIGGER sessions_keep BEFORE DELETE ON sessions
BEGIN SELECT RAISE(ABORT, 'sessions are never deleted: a tombstone keeps the revision'); END;
