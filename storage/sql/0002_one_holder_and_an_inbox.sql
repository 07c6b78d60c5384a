-- One holder of a session anywhere, and messages that wait for a turn.

-- 1: written by the store to close a tool call whose turn ended without its result.
ALTER TABLE messages ADD COLUMN synthetic INTEGER NOT NULL DEFAULT 0 CHECK (synthetic IN (0, 1));

-- The token of the turn that holds the session; NULL: nobody does. It stands in the head, so that
-- the statement that moves the head compares it as well.
ALTER TABLE heads ADD COLUMN turn INTEGER;

-- What becomes of a message that is posted mid-turn, where the post does not say; NULL: the store's.
ALTER TABLE sessions ADD COLUMN policy TEXT;

-- A row as long as the turn is held. AUTOINCREMENT: a token is never used twice, and each is larger
-- than all before it.
CREATE TABLE turns (
    token   INTEGER PRIMARY KEY AUTOINCREMENT,
    session INTEGER NOT NULL UNIQUE,
    owner   INTEGER NOT NULL,   -- the open store that holds it
    holder  TEXT    NOT NULL,   -- what it calls itself, to be shown
    opener  INTEGER NOT NULL,   -- position of the message that had opened the exchange, or 0
    seen    INTEGER NOT NULL,   -- the last place in any inbox then: only what comes later interrupts
    since   REAL    NOT NULL,   -- seconds since the epoch, to be shown
    boot    TEXT    NOT NULL,   -- on the clock of this boot of the machine ...
    expires REAL    NOT NULL    -- ... it lasts until so many seconds
) STRICT;

-- What was accepted and not acted on yet.
CREATE TABLE inbox (
    place       INTEGER PRIMARY KEY AUTOINCREMENT,   -- the order; requeueing gives a new one
    id          INTEGER NOT NULL UNIQUE,             -- what the receipt says; the message's append_id
    session     INTEGER NOT NULL,
    policy      TEXT    NOT NULL,
    opens_turn  INTEGER NOT NULL CHECK (opens_turn IN (0, 1)),
    accepted_at REAL    NOT NULL,
    attempts    INTEGER NOT NULL,
    token       INTEGER,            -- the turn that took it last
    message     INTEGER,            -- the message that it became when a turn first took it
    set_aside   TEXT,               -- why it is not delivered any more; NULL: it waits, or is acted on
    retry_boot  TEXT,               -- on the clock of this boot ...
    retry_at    REAL,               -- ... it is not tried again before so many seconds
    caller_key  TEXT,
    role        TEXT    NOT NULL,
    content     ANY,
    extra       ANY
) STRICT;
CREATE INDEX inbox_waiting ON inbox (session, place) WHERE set_aside IS NULL;
CREATE INDEX inbox_interrupting ON inbox (session, place)
    WHERE set_aside IS NULL AND policy = 'interrupt';
CREATE INDEX inbox_set_aside ON inbox (place) WHERE set_aside IS NOT NULL;
CREATE UNIQUE INDEX inbox_by_key ON inbox (session, caller_key) WHERE caller_key IS NOT NULL;
