"""Sessions with a PostgreSQL server: opened when needed, kept for the next call, replaced when they broke.

No thread of its own, and nothing that waits for a server to come back: whoever asks next tries again. One
that cannot be reached, or does not answer, is an error within seconds.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress

import psycopg
from psycopg import conninfo

from inferscale.catalog.postgres import schema
from inferscale.catalog_url import check_url
from inferscale.errors import CatalogError, InvalidConfig

MAX_SESSIONS = 8
"""Of one process; further calls wait for one."""
BUSY_TIMEOUT_S = 30
_OLDEST = 130000
_DEFAULTS = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",  # of what was sent and is not acknowledged, as by a network that is cut
    "application_name": "inferscale",
}
_SETTINGS = f"""
    SET lock_timeout = '{BUSY_TIMEOUT_S}s';
    SET idle_in_transaction_session_timeout = '10s';
    SET extra_float_digits = 1;
    SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""
"""A replica that is stopped or cut off in the middle of a write holds others up for ten seconds at most. What
was acknowledged is on the server's disk."""


class Sessions:
    """Of one database. Safe from several threads; not to be used in a process that was forked since."""

    def __init__(self, url: str) -> None:
        self._conninfo = _with_defaults(url)
        self.place = _place(url)
        self._idle: list[psycopg.Connection] = []
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(MAX_SESSIONS)
        self._is_migrated = False
        self._closed = False
        self._process = os.getpid()

    def take(self, begin: str) -> tuple[psycopg.Connection, psycopg.Cursor]:
        """A session in which `begin` was carried out, and its answer. Where one that was kept has broken
        since, a new one.

        Raises CatalogError, psycopg.Error.
        """
        if self._process != os.getpid():
            raise CatalogError(
                f"{self.place} was opened before this process was forked. Open Memory after the fork, or "
                "start processes with the 'spawn' method."
            )
        if not self._free.acquire(timeout=BUSY_TIMEOUT_S):
            raise CatalogError(
                f"all {MAX_SESSIONS} sessions with {self.place} were in use for {BUSY_TIMEOUT_S} s."
            )
        try:
            return self._begun(begin)
        except BaseException:
            self._free.release()
            raise

    def _begun(self, begin: str) -> tuple[psycopg.Connection, psycopg.Cursor]:
        while True:
            with self._lock:
                if self._closed:
                    raise CatalogError(f"{self.place} was closed; open a new Memory on it.")
                kept = self._idle.pop() if self._idle else None
            connection = self._open() if kept is None else kept
            try:
                return connection, connection.execute(begin.encode(), prepare=False)
            except psycopg.Error:
                is_broken = connection.closed
                connection.close()
                if kept is None or not is_broken:
                    raise

    def give_back(self, connection: psycopg.Connection) -> None:
        """A session that was taken, in no transaction. One that is in any, or broken, is closed."""
        is_idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        with self._lock:
            keeps = is_idle and not self._closed
            if keeps:
                self._idle.append(connection)
        if not keeps:
            with suppress(psycopg.Error):
                connection.close()
        self._free.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if self._process == os.getpid():
            for connection in idle:
                with suppress(psycopg.Error):
                    connection.close()

    def __del__(self) -> None:
        """As for a file of SQLite, nobody has to close it."""
        if hasattr(self, "_process"):  # made whole
            self.close()

    def _open(self) -> psycopg.Connection:
        connection = psycopg.connect(self._conninfo, autocommit=True)
        try:
            if connection.info.server_version < _OLDEST:
                raise CatalogError(
                    f"{self.place} is PostgreSQL {connection.info.server_version // 10000}; 13 or newer is "
                    "needed."
                )
            encoding = connection.info.parameter_status("server_encoding")
            if encoding != "UTF8":
                raise CatalogError(f"{self.place} has the encoding {encoding}; make a database with UTF8.")
            connection.execute(_SETTINGS.encode(), prepare=False)
            if not self._is_migrated:
                schema.migrate(connection, self.place)
                self._is_migrated = True
        except BaseException:
            connection.close()
            raise
        return connection


def _parameters(url: str) -> dict[str, str]:
    """Raises InvalidConfig, without a word of what was given: it may hold a password."""
    check_url(url, "the catalog's URL")
    try:
        given = {name: str(value) for name, value in conninfo.conninfo_to_dict(url).items()}
        if not re.fullmatch(r"[\d,]*", given.get("port", "")):
            raise ValueError
        return given
    except (psycopg.Error, ValueError):
        raise InvalidConfig(
            "the catalog's URL cannot be read; it has the form postgresql://USER@HOST:PORT/DATABASE, with "
            "special characters as %XX."
        ) from None


def _with_defaults(url: str) -> str:
    given = _parameters(url)
    return conninfo.make_conninfo("", **{**_DEFAULTS, **given, "client_encoding": "UTF8"})


def _place(url: str) -> str:
    """Without user and password."""
    given = _parameters(url)
    host = given.get("host") or given.get("hostaddr") or os.environ.get("PGHOST") or ""
    port = given.get("port") or os.environ.get("PGPORT") or "5432"
    name = given.get("dbname") or os.environ.get("PGDATABASE") or ""
    return (
        f"postgresql:///{name}" if not host or host.startswith("/") else f"postgresql://{host}:{port}/{name}"
    )
