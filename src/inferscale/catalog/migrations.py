"""Numbered migrations of the catalog; `PRAGMA user_version` is the number of those applied.

A migration is never changed once released: append a new one. Each runs in a transaction of its
own, together with the new version number, so a catalog is always at a whole version. Knows the
tables only, not what they are for at run time.
"""

from __future__ import annotations

import sqlite3

from inferscale.errors import CatalogError, NewerCatalog

APPLICATION_ID = 0x49465343
"""`IFSC` in the header of the SQLite file: tells our catalog from another program's database."""

_FIRST = (
    # An id is never '', so '' can stand for NULL in the index: SQLite holds NULLs to be distinct.
    """CREATE TABLE scopes (
        id INTEGER PRIMARY KEY,
        user_id TEXT CHECK (user_id <> ''),
        agent_id TEXT CHECK (agent_id <> ''),
        run_id TEXT CHECK (run_id <> ''),
        epoch INTEGER NOT NULL DEFAULT 0,
        CHECK (coalesce(user_id, agent_id, run_id) IS NOT NULL)
    )""",
    """CREATE UNIQUE INDEX scopes_exact
        ON scopes (ifnull(user_id, ''), ifnull(agent_id, ''), ifnull(run_id, ''))""",
    "CREATE INDEX scopes_agent ON scopes (agent_id) WHERE agent_id IS NOT NULL",
    "CREATE INDEX scopes_user ON scopes (user_id) WHERE user_id IS NOT NULL",
    "CREATE INDEX scopes_run ON scopes (run_id) WHERE run_id IS NOT NULL",
    """CREATE TABLE facts (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        scope INTEGER NOT NULL REFERENCES scopes (id),
        text TEXT NOT NULL,
        speaker TEXT,
        said_at TEXT,
        created_at REAL NOT NULL,
        metadata TEXT NOT NULL
    )""",
    "CREATE INDEX facts_scope ON facts (scope, seq)",
    """CREATE TABLE vectors (
        fact INTEGER PRIMARY KEY REFERENCES facts (seq) ON DELETE CASCADE,
        embedder TEXT NOT NULL,
        dim INTEGER NOT NULL,
        data BLOB NOT NULL CHECK (length(data) = 4 * dim)
    )""",
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE passes (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        model TEXT NOT NULL,
        scope INTEGER NOT NULL REFERENCES scopes (id),
        num_window INTEGER NOT NULL CHECK (num_window >= 0)
    )""",
    # No ON DELETE for the fact: a fact that still stands in a pass cannot be removed by mistake.
    """CREATE TABLE pass_facts (
        pass INTEGER NOT NULL REFERENCES passes (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        fact INTEGER NOT NULL REFERENCES facts (seq),
        PRIMARY KEY (pass, position)
    ) WITHOUT ROWID""",
    "CREATE UNIQUE INDEX pass_facts_fact ON pass_facts (fact, pass)",
    """CREATE TABLE encodings (
        model TEXT NOT NULL,
        fact INTEGER NOT NULL REFERENCES facts (seq),
        key TEXT NOT NULL,
        pass INTEGER NOT NULL,
        position INTEGER NOT NULL,
        PRIMARY KEY (pass, position),
        FOREIGN KEY (pass, position) REFERENCES pass_facts (pass, position) ON DELETE CASCADE
    ) WITHOUT ROWID""",
    "CREATE INDEX encodings_fact ON encodings (fact, model, pass)",
    "CREATE INDEX encodings_key ON encodings (key)",
    # Numbers only, nothing of a fact's content: how other processes learn of a deletion.
    "CREATE TABLE deletions (id INTEGER PRIMARY KEY AUTOINCREMENT, fact INTEGER NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
)

_SECOND = (
    # NULL for a fact that was never changed: nothing of an existing catalog has to be written anew.
    "ALTER TABLE facts ADD COLUMN updated_at REAL",
    # One row an update, with the text that it replaced. The newest text stands in `facts`, so a fact
    # that was never changed, as most, needs no row and its text stands in the file once.
    """CREATE TABLE revisions (
        fact INTEGER NOT NULL REFERENCES facts (seq) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        text TEXT NOT NULL,
        replaced_at REAL NOT NULL,
        PRIMARY KEY (fact, number)
    ) WITHOUT ROWID""",
    # From now on a number stands there too when the vector of its fact was replaced.
    "ALTER TABLE deletions RENAME TO changes",
    "INSERT INTO meta (name, value) VALUES ('cursor_key', lower(hex(randomblob(16))))",
)

VECTORS_NEXT = """CREATE TABLE vectors_next (
        fact INTEGER PRIMARY KEY REFERENCES facts (seq) ON DELETE CASCADE,
        embedder TEXT NOT NULL,
        dim INTEGER NOT NULL,
        data BLOB NOT NULL CHECK (length(data) = 4 * dim)
    )"""
"""Vectors of the next embedder, as in `vectors`, whose place it takes (`catalog/next_vectors.py`)."""

_THIRD = (
    "ALTER TABLE facts ADD COLUMN expires_at REAL",
    # What `said_at` means, where it can be read as a time; facts of older catalogs have none.
    "ALTER TABLE facts ADD COLUMN happened_at REAL",
    "ALTER TABLE facts ADD COLUMN block TEXT CHECK (block <> '')",
    "CREATE INDEX facts_expiry ON facts (expires_at) WHERE expires_at IS NOT NULL",
    "CREATE UNIQUE INDEX facts_block ON facts (scope, block) WHERE block IS NOT NULL",
    # Facts that are no longer so. None of them is found, encoded or shown but in a history, so they stand
    # apart: whatever reads `facts` need not know of them. revisions: JSON, [text, replaced_at] each.
    """CREATE TABLE past (
        id TEXT PRIMARY KEY,
        scope INTEGER NOT NULL REFERENCES scopes (id),
        text TEXT NOT NULL,
        speaker TEXT,
        said_at TEXT,
        created_at REAL NOT NULL,
        revisions TEXT NOT NULL,
        until REAL NOT NULL,
        successor TEXT,
        reason TEXT
    ) WITHOUT ROWID""",
    "CREATE INDEX past_scope ON past (scope)",
    "CREATE INDEX past_successor ON past (successor) WHERE successor IS NOT NULL",
    VECTORS_NEXT,
    """CREATE TRIGGER vectors_next_stale AFTER UPDATE OF text, speaker, said_at ON facts
        WHEN old.text IS NOT new.text OR old.speaker IS NOT new.speaker OR old.said_at IS NOT new.said_at
        BEGIN DELETE FROM vectors_next WHERE fact = new.seq; END""",
)

# Existing passes saw what stands before each fact only. is_done: 0 for one of two directions until all of its
# KV was in a pool; what its facts had before counts so long.
_FOURTH = (
    "ALTER TABLE passes ADD COLUMN directions INTEGER NOT NULL DEFAULT 1 CHECK (directions IN (1, 2))",
    "ALTER TABLE passes ADD COLUMN is_done INTEGER NOT NULL DEFAULT 1 CHECK (is_done IN (0, 1))",
)

# Existing passes of two directions kept no facts together.
_FIFTH = ("ALTER TABLE passes ADD COLUMN neighbours INTEGER NOT NULL DEFAULT 1 CHECK (neighbours >= 1)",)

MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST, _SECOND, _THIRD, _FOURTH, _FIFTH)


def check_version(connection: sqlite3.Connection, path: str) -> int:
    """The number of migrations applied. Writes nothing.

    Raises NewerCatalog for a catalog of a newer version, CatalogError for another program's database.
    """
    # In this order: a migration by another process between two of these reads is then seen whole.
    has_tables = connection.execute("SELECT 1 FROM sqlite_master").fetchone() is not None
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    if (has_tables or version) and application != APPLICATION_ID:
        raise CatalogError(f"{path} is the database of another program. Choose another data folder.")
    if version > len(MIGRATIONS):
        raise NewerCatalog(
            f"{path} has catalog version {version}; this InferScale reads up to {len(MIGRATIONS)}. "
            "Install the newer InferScale that wrote it, or choose another data folder. Nothing was changed."
        )
    return version


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Bring an open catalog (autocommit mode) to the newest version, one transaction a migration."""
    while check_version(connection, path) < len(MIGRATIONS):
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Read again under the write lock: another process may have been faster.
            version = check_version(connection, path)
            if version < len(MIGRATIONS):
                for statement in MIGRATIONS[version]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
