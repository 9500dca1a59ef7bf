"""Tables of the database and the steps from one schema version to the next.

`PRAGMA user_version` counts the steps of `_STEPS` that were taken; each step runs in one transaction with its count.
A step is never changed once it was released: a change is a new step. Times are Unix seconds, JSON columns hold JSON.

    episodes      what was sampled, one row a choice; ids are never used twice
    unscored      episodes with tokens that the trainer has not scored; a table, since a flag would rewrite the episode
    scores        what the trainer said of an episode
    feedback      what people said; `seq` is the order, `id` is what callers see
    ratings       one row for each choice with feedback: the newest row with a rating, else the newest, and what became:
                  fresh (waits for an update) -> used (by a finished update; for good) or dropped (cannot be used);
                  unrated while no row has a rating. A fresh row is the input of planning.
    drops         why a feedback row was dropped
    stored        completions that who asked wanted to find again, by the episode that was recorded first
    shown         of those, how choices that call tools were shown
    preferences   pairs
    written       what people wrote, by preference or by feedback with a correction: its tokens once the serving engine
                  has given them, and what became of it: fresh -> used or dropped. Ids are never used twice.
    updates       plan and outcome
    adapters      lineage; live_history: what was served when, the newest row is live
    practice      episodes that the box asked of itself, and what became of them: sampled -> judged -> used (by a
                  finished update; for good) or skipped (nothing to learn from it), or failed (no reward)
    anchors       versions that the reference of the KL penalty moved to; the newest row counts
    counters      numbers that only rise
    api_keys      hashes of secrets
    audit         who did what
"""

from __future__ import annotations

import apsw

from edged.store.errors import StoreError

APPLICATION_ID = 0x65646764  # "edgd": tells our files from other SQLite files

_STEPS = (
    """
    CREATE TABLE episodes (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        completion_id TEXT NOT NULL,
        choice INTEGER NOT NULL,
        created_at REAL NOT NULL,
        kind TEXT NOT NULL,
        model TEXT NOT NULL,
        base_sha256 TEXT NOT NULL,
        version INTEGER NOT NULL,
        n_tokens INTEGER NOT NULL,
        logprobs_complete INTEGER NOT NULL,
        finish_reason TEXT NOT NULL,
        temperature REAL NOT NULL,
        top_p REAL NOT NULL,
        top_k INTEGER NOT NULL,
        seed INTEGER NOT NULL,
        max_tokens INTEGER,
        user TEXT,
        caller TEXT NOT NULL,
        metadata TEXT NOT NULL,
        messages TEXT, -- the long columns stand last, so that planning reads no overflow pages
        prompt TEXT,
        text TEXT NOT NULL,
        prompt_ids BLOB NOT NULL,
        completion_ids BLOB NOT NULL,
        logprobs BLOB NOT NULL,
        raw_logprobs BLOB NOT NULL,
        UNIQUE (completion_id, choice)
    ) STRICT;
    CREATE INDEX episodes_by_user ON episodes (user) WHERE user IS NOT NULL;

    CREATE TABLE unscored (
        episode_id INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE,
        version INTEGER NOT NULL
    ) STRICT;

    CREATE TABLE scores (
        episode_id INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE,
        reference_version INTEGER NOT NULL,
        reference_logprob REAL,
        kl REAL NOT NULL,
        engine_gap REAL
    ) STRICT;

    CREATE TABLE feedback (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        episode_id INTEGER NOT NULL REFERENCES episodes (id) ON DELETE CASCADE,
        rating REAL CHECK (rating BETWEEN -1 AND 1),
        correction TEXT,
        reason TEXT,
        user TEXT,
        tags TEXT NOT NULL,
        source TEXT NOT NULL,
        caller TEXT NOT NULL,
        created_at REAL NOT NULL,
        replaces TEXT,
        idempotency_key TEXT
    ) STRICT;
    CREATE INDEX feedback_by_episode ON feedback (episode_id);
    CREATE INDEX feedback_by_user ON feedback (user) WHERE user IS NOT NULL;
    CREATE UNIQUE INDEX feedback_by_key ON feedback (caller, idempotency_key) WHERE idempotency_key IS NOT NULL;

    CREATE TABLE updates (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        state TEXT NOT NULL CHECK (state IN ('planned', 'training', 'gating', 'finished')),
        version INTEGER NOT NULL UNIQUE REFERENCES adapters (version),
        parent_version INTEGER NOT NULL REFERENCES adapters (version),
        seed INTEGER NOT NULL,
        attempts INTEGER NOT NULL,
        created_at REAL NOT NULL,
        finished_at REAL,
        verdict TEXT CHECK (verdict IN ('published', 'refused', 'skipped', 'failed')),
        reason TEXT,
        seconds TEXT NOT NULL,
        metrics TEXT NOT NULL,
        new_episode_ids TEXT NOT NULL,
        replay_episode_ids TEXT NOT NULL,
        new_feedback_ids TEXT NOT NULL,
        CHECK ((state = 'finished') = (verdict IS NOT NULL))
    ) STRICT;
    CREATE INDEX updates_unfinished ON updates (id) WHERE state <> 'finished';

    CREATE TABLE ratings (
        episode_id INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE,
        feedback_seq INTEGER NOT NULL REFERENCES feedback (seq),
        version INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('fresh', 'used', 'dropped', 'unrated')),
        used_by INTEGER REFERENCES updates (id),
        CHECK ((state = 'used') = (used_by IS NOT NULL))
    ) STRICT;
    CREATE INDEX ratings_by_feedback ON ratings (feedback_seq);
    CREATE INDEX ratings_fresh ON ratings (feedback_seq) WHERE state = 'fresh';
    CREATE INDEX ratings_used ON ratings (version) WHERE state = 'used';

    CREATE TABLE drops (
        feedback_seq INTEGER PRIMARY KEY REFERENCES feedback (seq) ON DELETE CASCADE,
        reason TEXT NOT NULL
    ) STRICT;

    CREATE TABLE preferences (
        id TEXT PRIMARY KEY,
        messages TEXT NOT NULL,
        chosen TEXT NOT NULL,
        rejected TEXT NOT NULL,
        user TEXT,
        caller TEXT NOT NULL,
        created_at REAL NOT NULL
    ) STRICT;
    CREATE INDEX preferences_by_user ON preferences (user) WHERE user IS NOT NULL;

    CREATE TABLE adapters (
        version INTEGER PRIMARY KEY,
        parent_version INTEGER REFERENCES adapters (version),
        origin TEXT NOT NULL CHECK (origin IN ('base', 'trained', 'imported', 'fleet')),
        state TEXT NOT NULL CHECK (state IN ('candidate', 'published', 'refused')),
        created_at REAL NOT NULL,
        sha256 TEXT,
        folder TEXT,
        reason TEXT,
        kept INTEGER NOT NULL,
        metrics TEXT NOT NULL
    ) STRICT;

    CREATE TABLE live_history (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        version INTEGER NOT NULL REFERENCES adapters (version),
        since REAL NOT NULL,
        why TEXT NOT NULL CHECK (why IN ('base', 'published', 'promoted', 'rolled_back')),
        caller TEXT NOT NULL,
        pinned INTEGER NOT NULL
    ) STRICT;

    CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;

    CREATE TABLE api_keys (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        scopes TEXT NOT NULL,
        secret_sha256 BLOB NOT NULL UNIQUE,
        created_at REAL NOT NULL,
        revoked_at REAL
    ) STRICT;

    CREATE TABLE audit (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        caller TEXT NOT NULL,
        action TEXT NOT NULL,
        detail TEXT NOT NULL
    ) STRICT;

    INSERT INTO counters (name, value) VALUES ('version', 0);
    INSERT INTO adapters (version, origin, state, created_at, kept, metrics)
        VALUES (0, 'base', 'published', unixepoch('subsec'), 1, '{}');
    INSERT INTO live_history (version, since, why, caller, pinned)
        VALUES (0, unixepoch('subsec'), 'base', 'edged', 0);
    """,
    """
    CREATE TABLE written (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL CHECK (kind IN ('pair', 'correction')),
        preference_id TEXT UNIQUE REFERENCES preferences (id) ON DELETE CASCADE,
        feedback_seq INTEGER UNIQUE REFERENCES feedback (seq) ON DELETE CASCADE,
        state TEXT NOT NULL DEFAULT 'fresh' CHECK (state IN ('fresh', 'used', 'dropped')),
        used_by INTEGER REFERENCES updates (id),
        reason TEXT, -- why it was dropped
        base_sha256 TEXT, -- of the model whose tokens these are
        prompt_ids BLOB,
        chosen_ids BLOB,
        rejected_ids BLOB,
        CHECK ((kind = 'pair') = (preference_id IS NOT NULL)),
        CHECK ((kind = 'correction') = (feedback_seq IS NOT NULL)),
        CHECK ((state = 'used') = (used_by IS NOT NULL)),
        CHECK ((state = 'dropped') = (reason IS NOT NULL)),
        CHECK ((base_sha256 IS NULL) = (chosen_ids IS NULL))
    ) STRICT;
    CREATE INDEX written_by_state ON written (state, kind, reason);
    INSERT INTO written (kind, preference_id) SELECT 'pair', id FROM preferences ORDER BY created_at;
    INSERT INTO written (kind, feedback_seq)
        SELECT 'correction', seq FROM feedback WHERE correction IS NOT NULL ORDER BY seq;
    ALTER TABLE updates ADD COLUMN new_written_ids TEXT NOT NULL DEFAULT '[]';
    """,
    """
    CREATE TABLE practice (
        episode_id INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE,
        prompt_of INTEGER REFERENCES episodes (id), -- whose prompt it answers; NULL: a prompt of the operator's file
        answers_to TEXT NOT NULL, -- the same for answers to one prompt by one version
        state TEXT NOT NULL DEFAULT 'sampled' CHECK (state IN ('sampled', 'judged', 'used', 'skipped', 'failed')),
        reward REAL,
        judged_at REAL,
        used_by INTEGER REFERENCES updates (id),
        CHECK ((state IN ('judged', 'used', 'skipped')) = (reward IS NOT NULL)),
        CHECK ((reward IS NULL) = (judged_at IS NULL)),
        CHECK ((state = 'used') = (used_by IS NOT NULL))
    ) STRICT;
    CREATE INDEX practice_by_prompt ON practice (prompt_of) WHERE prompt_of IS NOT NULL;
    CREATE INDEX practice_by_state ON practice (state);
    ALTER TABLE updates ADD COLUMN practice_after INTEGER; -- the newest feedback then; NULL: an update of ratings

    CREATE TABLE anchors (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        version INTEGER NOT NULL REFERENCES adapters (version),
        since REAL NOT NULL,
        ratings INTEGER NOT NULL,
        mean_rating REAL NOT NULL,
        before INTEGER NOT NULL, -- the reference that it took the place of
        configured INTEGER NOT NULL, -- learn.reference at that time
        base_sha256 TEXT NOT NULL
    ) STRICT;
    CREATE INDEX ratings_by_version ON ratings (version);
    """,
    """
    CREATE TABLE shaped ( -- apart from `episodes`, whose last columns planning must not read
        episode_id INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE,
        by TEXT NOT NULL -- what else changed the distribution
    ) STRICT;
    """,
    # A correction used to take the place of the rating before it.
    """
    UPDATE ratings SET feedback_seq = rated.seq, state = CASE
        WHEN state = 'used' THEN 'used'
        WHEN EXISTS (SELECT 1 FROM drops WHERE drops.feedback_seq = rated.seq) THEN 'dropped'
        ELSE 'fresh' END
    FROM (SELECT episode_id, max(seq) AS seq FROM feedback WHERE rating IS NOT NULL GROUP BY episode_id) AS rated
    WHERE rated.episode_id = ratings.episode_id AND rated.seq <> ratings.feedback_seq;
    """,
    """
    ALTER TABLE live_history ADD COLUMN reason TEXT; -- what spoke against the version before, if it was rolled back
    ALTER TABLE adapters ADD COLUMN verdict TEXT CHECK (verdict IN ('kept', 'rolled_back')); -- of the latest watch
    ALTER TABLE adapters ADD COLUMN verdict_reason TEXT;
    ALTER TABLE adapters ADD COLUMN collected_at REAL; -- when its files were removed; it has no folder since
    """,
    """
    CREATE TABLE stored (
        episode_id INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE
    ) STRICT;
    """,
    """
    CREATE TABLE shown (
        episode_id INTEGER PRIMARY KEY REFERENCES episodes (id) ON DELETE CASCADE,
        text TEXT NOT NULL,
        calls TEXT NOT NULL
    ) STRICT;
    """,
    """
    ALTER TABLE adapters ADD COLUMN deep TEXT; -- what the deep gate found, as JSON
    """,
)

SCHEMA_VERSION = len(_STEPS)


def check(connection: apsw.Connection) -> None:
    """Raise StoreError if the file is another program's, or of a newer edged. Changes nothing."""
    found = int(connection.pragma("user_version"))
    is_ours = connection.pragma("application_id") == APPLICATION_ID
    if not is_ours and connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()[0][0]:
        raise StoreError(f"{connection.db_filename('main')} is a database of another program; choose another folder")
    if found > SCHEMA_VERSION:
        raise StoreError(
            f"{connection.db_filename('main')} has schema {found}, this edged knows {SCHEMA_VERSION}: "
            "it was written by a newer edged; run that one, or restore a backup"
        )


def migrate(connection: apsw.Connection) -> None:
    """Bring the schema up to date, from nothing too."""
    for number in range(int(connection.pragma("user_version")), SCHEMA_VERSION):
        with connection:
            connection.execute(_STEPS[number])
            connection.pragma("application_id", APPLICATION_ID)
            connection.pragma("user_version", number + 1)
