"""`Database` in PostgreSQL: transactions, the change token, errors in plain words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg

from inferscale.catalog.postgres.dialect import PostgresConnection
from inferscale.catalog.postgres.sessions import BUSY_TIMEOUT_S, Sessions
from inferscale.catalog.sql import ChangeToken
from inferscale.errors import CatalogError, CatalogUnreachable, InvalidInput

_READ = (
    # The lock comes before the snapshot: no switch to other vectors (`next_vectors`) falls between the two.
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; LOCK TABLE vectors IN ACCESS SHARE MODE"
)
_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; UPDATE catalog_state SET writes = writes + 1"

_ADVICE = {
    "53100": "The disk of the server is full; nothing of this call was stored.",
    "53300": "The server has no session left; raise its max_connections.",
    "55P03": f"Another process has been writing for more than {BUSY_TIMEOUT_S} s; try again.",
    "42501": "Let the role own the database, or GRANT it CREATE and USAGE on the schema.",
    "25006": "It is read-only, as a standby is; name the primary.",
    "3D000": "Create the database first: createdb NAME.",
}
_UNREACHABLE = ("08", "57P", "53300", "25P03", "25006")
"""Of SQLSTATEs that pass: the connection broke, the server starts, stops or is full, ended a transaction that
was idle, or is a standby."""


class PostgresDatabase:
    """`Database` under a URL such as postgresql://user@host:5432/name, or any other of libpq's forms."""

    def __init__(self, url: str) -> None:
        self._sessions = Sessions(url)
        self._lock = threading.Lock()
        self._own_writes = 0

    @property
    def place(self) -> str:
        return self._sessions.place

    @property
    def option(self) -> str:
        return f"--catalog {self.place}"

    @contextmanager
    def read(self) -> Iterator[PostgresConnection]:
        with self._transaction(_READ) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[PostgresConnection]:
        with self._transaction(_WRITE) as connection:
            yield connection
        with self._lock:
            self._own_writes += 1

    def change_token(self) -> ChangeToken:
        """The sum of both numbers says which state it is."""
        with self._lock:
            own = self._own_writes
        with self._explained():
            session, answer = self._sessions.take("SELECT writes FROM catalog_state")
            found = answer.fetchone()
            self._sessions.give_back(session)
        assert found is not None
        return ChangeToken(int(found[0]) - own, own)

    def empty_log(self) -> None:
        """What was deleted leaves the tables' files by VACUUM, and the server's log as its operator says."""

    def close(self) -> None:
        self._sessions.close()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[PostgresConnection]:
        with self._explained():
            session, _ = self._sessions.take(begin)
            try:
                yield PostgresConnection(session)
                session.execute("COMMIT")
            except BaseException:
                with suppress(psycopg.Error):
                    if session.info.transaction_status in _IN_TRANSACTION:
                        session.execute("ROLLBACK")
                raise
            finally:
                self._sessions.give_back(session)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """psycopg's errors as ours, with advice; those of texts that cannot be stored as InvalidInput.

        Details, which may hold a user's text, are left out.
        """
        try:
            yield
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"the text {error.object[max(0, error.start - 20) : error.end + 20]!r} holds half of a "
                "surrogate pair, which is not valid Unicode and cannot be stored. Repair or remove it."
            ) from error
        except psycopg.DataError as error:
            raise InvalidInput(
                f"a text or number cannot be stored in PostgreSQL: {_said(error)}. NUL characters and halves "
                "of surrogate pairs are not allowed there; remove them."
            ) from None
        except psycopg.Error as error:
            raise self._explanation(error) from None

    def _explanation(self, error: psycopg.Error) -> CatalogError:
        state = error.sqlstate or ""
        is_lost = not state and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        advice = _ADVICE.get(state, "")
        if is_lost or state.startswith(_UNREACHABLE):
            return CatalogUnreachable(
                f"{self.place} cannot be reached: {_said(error)}. {advice or 'Try again when it can.'}"
            )
        return CatalogError(f"{self.place}: {_said(error)}. {advice}".rstrip())


_IN_TRANSACTION = (psycopg.pq.TransactionStatus.INTRANS, psycopg.pq.TransactionStatus.INERROR)


def _said(error: psycopg.Error) -> str:
    """One line, without DETAIL."""
    said = error.diag.message_primary or str(error).strip()
    return " ".join(said.split()).rstrip(".") or type(error).__name__
