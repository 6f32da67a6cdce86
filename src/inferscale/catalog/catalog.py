"""The catalog of one data folder: the truth about facts, from which all KV can be rebuilt.

SQLite in WAL mode, safe from several threads and several processes. Every public method is one
transaction. Knows nothing of tokens, KV and searching; stores text exactly as given.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import passes as _passes
from inferscale.catalog import rows as _rows
from inferscale.catalog.database import ChangeToken, Database
from inferscale.catalog.passes import EncodePass, Encoding, NewPass
from inferscale.errors import CatalogError, EmbedderMismatch, InvalidInput, UnknownFact
from inferscale.facts import Fact, Scope, Turn

CATALOG_FILE = "catalog.sqlite3"


class ScopeEpoch(NamedTuple):
    """A scope, as a filter, and its epoch."""

    scope: Scope
    epoch: int


class Deletion(NamedTuple):
    """What a deletion took away.

    fact: as it was. keys: invalidated and to be forgotten by the engine, of all models. epochs:
    the new epoch of every filter that covered the fact.
    """

    fact: Fact
    keys: tuple[str, ...]
    epochs: tuple[ScopeEpoch, ...]


class FoundFacts(NamedTuple):
    """Facts as one read of the catalog saw them.

    facts: by sequence number. keys: fact id → key of its KV, for those encoded for the model asked
    for. epoch: of the filter.
    """

    facts: dict[int, Fact]
    keys: dict[str, str]
    epoch: int


class VectorMark(NamedTuple):
    """How far a reader of vectors has come: the last fact and the last deletion that it knows."""

    seq: int = 0
    deletion: int = 0


class VectorChanges(NamedTuple):
    """Vectors stored and facts removed since a mark, in storage order.

    vectors: float32 [n, dim]. is_complete: whether nothing newer exists; otherwise ask again.
    """

    mark: VectorMark
    fact_seqs: list[int]
    scope_codes: list[int]
    vectors: NDArray[np.float32]
    removed_seqs: list[int]
    is_complete: bool


class Catalog:
    """Facts, vectors, encodings and epochs of one data folder. Opened on first use."""

    def __init__(self, data_dir: str | Path) -> None:
        self.path = Path(data_dir) / CATALOG_FILE
        self._database = Database(self.path)

    def close(self) -> None:
        self._database.close()

    def change_token(self) -> ChangeToken:
        """Cheap to get; differs from an earlier one if any process wrote to the catalog since."""
        return self._database.change_token()

    # --- facts -------------------------------------------------------------------------------

    def record_embedder(self, name: str, dim: int) -> None:
        """State whose vectors this catalog holds. Raises EmbedderMismatch if it holds another's."""
        wanted = (name, dim)
        with self._database.read() as connection:
            found = _rows.read_embedder(connection)
        if found is None:
            with self._database.write() as connection:
                connection.executemany(
                    "INSERT OR IGNORE INTO meta (name, value) VALUES (?, ?)",
                    [("embedder_name", name), ("embedder_dim", str(dim))],
                )
                found = _rows.read_embedder(connection)
        if found is not None and found != wanted:
            raise EmbedderMismatch(
                f"{self.path} holds vectors of the embedder {found[0]!r} with {found[1]} dimensions, "
                f"not of {name!r} with {dim}; the two cannot be compared. "
                f"Set embedder back to {found[0]!r}, or add the facts anew in another data folder."
            )

    def add_facts(self, scope: Scope, turns: Sequence[Turn], vectors: NDArray[np.float32]) -> list[Fact]:
        """Store turns with their vectors (float32 [n, dim]) in order: all of them, or on an error none.

        Needs `record_embedder` first. Raises InvalidInput for an empty scope, vectors of another
        shape, metadata that is not JSON, or text that is not valid Unicode.
        """
        if scope.is_empty():
            raise InvalidInput("a fact needs an owner: give at least one of user_id, agent_id and run_id.")
        metadata = [_rows.metadata_json(turn.metadata) for turn in turns]
        now = time.time()
        facts: list[Fact] = []
        with self._database.write() as connection:
            embedder = _rows.read_embedder(connection)
            if embedder is None:
                raise CatalogError(
                    f"{self.path} knows no embedder yet; call record_embedder before add_facts."
                )
            name, dim = embedder
            if vectors.shape != (len(turns), dim):
                raise InvalidInput(f"vectors have the shape {vectors.shape}; {(len(turns), dim)} is needed.")
            code = _rows.scope_code(connection, scope)
            for turn, meta, vector in zip(turns, metadata, vectors, strict=True):
                fact_id = str(uuid.uuid4())
                cursor = connection.execute(
                    "INSERT INTO facts (id, scope, text, speaker, said_at, created_at, metadata) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (fact_id, code, turn.text, turn.speaker, turn.said_at, now, meta),
                )
                seq = cursor.lastrowid
                assert seq is not None
                connection.execute(
                    "INSERT INTO vectors (fact, embedder, dim, data) VALUES (?, ?, ?, ?)",
                    (seq, name, dim, np.asarray(vector, dtype="<f4").tobytes()),
                )
                facts.append(
                    Fact(fact_id, seq, scope, turn.text, turn.speaker, turn.said_at, now, json.loads(meta))
                )
        return facts

    def get(self, fact_id: str) -> Fact | None:
        found = self.facts_by_ids([fact_id])
        return found[0] if found else None

    def facts_by_ids(self, fact_ids: Iterable[str]) -> list[Fact]:
        """Facts in the order of the ids; ids that name no fact are left out."""
        ids = list(fact_ids)
        found = {
            fact.id: fact
            for fact in self._facts("WHERE f.id IN (SELECT value FROM json_each(?))", json.dumps(ids))
        }
        return [found[fact_id] for fact_id in ids if fact_id in found]

    def found_facts(self, filter: Scope, seqs: Iterable[int], model: str | None = None) -> FoundFacts:
        """Facts by sequence number, their keys for `model` (None: no keys) and the epoch of `filter`.

        Facts that do not exist (any more) are left out.
        """
        wanted = list(seqs)
        clause = "WHERE f.seq IN (SELECT value FROM json_each(?))"
        with self._database.read() as connection:
            facts = {fact.seq: fact for fact in _rows.select_facts(connection, clause, json.dumps(wanted))}
            keys = {} if model is None else _passes.current_keys(connection, model, wanted)
            epoch = _rows.read_epoch(connection, filter)
        return FoundFacts(facts, {facts[seq].id: key for seq, key in keys.items() if seq in facts}, epoch)

    def facts(self, filter: Scope, limit: int | None = None, after: int = 0) -> list[Fact]:
        """Facts under `filter` (all for an empty one) and above `after`, at most `limit`, in seq order."""
        where, values = _rows.covered(filter)
        clause = (
            f"WHERE f.scope IN (SELECT id FROM scopes WHERE {where}) AND f.seq > ? ORDER BY f.seq LIMIT ?"
        )
        return self._facts(clause, *values, after, -1 if limit is None else limit)

    def neighbours_before(self, fact: Fact, n: int) -> list[Fact]:
        """The last `n` facts of the same exact scope that were stored before `fact`, oldest first."""
        clause = (
            "WHERE f.scope = (SELECT scope FROM facts WHERE seq = ?) AND f.seq < ? "
            "ORDER BY f.seq DESC LIMIT ?"
        )
        return self._facts(clause, fact.seq, fact.seq, max(0, n))[::-1]

    def unencoded(self, model: str, filter: Scope) -> list[Fact]:
        """Facts under `filter` that have no encoding for this model, in seq order."""
        where, values = _rows.covered(filter)
        clause = (
            f"WHERE f.scope IN (SELECT id FROM scopes WHERE {where}) AND NOT EXISTS "
            "(SELECT 1 FROM encodings e WHERE e.fact = f.seq AND e.model = ?) ORDER BY f.seq"
        )
        return self._facts(clause, *values, model)

    def count(self, filter: Scope) -> int:
        """Number of facts under `filter` (all for an empty one)."""
        where, values = _rows.covered(filter)
        sql = f"SELECT count(*) FROM facts WHERE scope IN (SELECT id FROM scopes WHERE {where})"
        return self._number(sql, values)

    def has_facts(self, filter: Scope) -> bool:
        where, values = _rows.covered(filter)
        sql = f"SELECT EXISTS (SELECT 1 FROM facts WHERE scope IN (SELECT id FROM scopes WHERE {where}))"
        return bool(self._number(sql, values))

    def count_scopes(self) -> int:
        """Number of exact scopes that hold at least one fact."""
        return self._number("SELECT count(*) FROM scopes WHERE id IN (SELECT scope FROM facts)", ())

    def epoch(self, filter: Scope) -> int:
        """Memory epoch of `filter`: rises with every deletion under it and never falls."""
        with self._database.read() as connection:
            return _rows.read_epoch(connection, filter)

    def delete(self, fact_id: str) -> Deletion:
        """Remove a fact, its vector and every encoding that has seen it. Raises UnknownFact.

        The caller sends `keys` and `epochs` to the engine as an order to forget.
        """
        with self._database.write() as connection:
            fact = next(iter(_rows.select_facts(connection, "WHERE f.id = ?", fact_id)), None)
            if fact is None:
                raise UnknownFact(f"no fact has the id {fact_id!r}; it may have been deleted already.")
            keys = _passes.invalidate(connection, fact.seq)
            connection.execute(
                "UPDATE scopes SET epoch = epoch + 1 WHERE id = (SELECT scope FROM facts WHERE seq = ?)",
                (fact.seq,),
            )
            connection.execute("DELETE FROM facts WHERE seq = ?", (fact.seq,))
            connection.execute("INSERT INTO deletions (fact) VALUES (?)", (fact.seq,))
            epochs = tuple(
                ScopeEpoch(scope, _rows.read_epoch(connection, scope))
                for scope in _rows.filters_over(fact.scope)
            )
        return Deletion(fact, tuple(keys), epochs)

    # --- vectors -----------------------------------------------------------------------------

    def scope_codes(self, filter: Scope) -> list[int]:
        """Codes of the exact scopes that `filter` covers."""
        where, values = _rows.covered(filter)
        with self._database.read() as connection:
            return [row[0] for row in connection.execute(f"SELECT id FROM scopes WHERE {where}", values)]

    def vector_changes(self, since: VectorMark, limit: int = 50_000) -> VectorChanges:
        """At most `limit` vectors stored since the mark, and all deletions since it."""
        with self._database.read() as connection:
            embedder = _rows.read_embedder(connection)
            rows = connection.execute(
                "SELECT f.seq, f.scope, v.data FROM facts f JOIN vectors v ON v.fact = f.seq "
                "WHERE f.seq > ? ORDER BY f.seq LIMIT ?",
                (since.seq, limit),
            ).fetchall()
            if since == VectorMark():
                removed, last_deletion = [], _rows.last_deletion(connection)
            else:
                gone = connection.execute(
                    "SELECT id, fact FROM deletions WHERE id > ? ORDER BY id", (since.deletion,)
                )
                pairs = gone.fetchall()
                removed = [seq for _, seq in pairs]
                last_deletion = pairs[-1][0] if pairs else since.deletion
        dim = embedder[1] if embedder else 0
        vectors = (
            np.frombuffer(b"".join(row[2] for row in rows), dtype="<f4")
            .astype(np.float32)
            .reshape(len(rows), dim)
        )
        return VectorChanges(
            mark=VectorMark(rows[-1][0] if rows else since.seq, last_deletion),
            fact_seqs=[row[0] for row in rows],
            scope_codes=[row[1] for row in rows],
            vectors=vectors,
            removed_seqs=removed,
            is_complete=len(rows) < limit,
        )

    # --- encodings (contracts: catalog/passes.py) ----------------------------------------------

    def record_pass(
        self,
        model: str,
        scope: Scope,
        window_ids: Sequence[str],
        captured_ids: Sequence[str],
        keys: Sequence[str],
    ) -> int:
        """Store an encode pass over facts of one exact scope and return its id.

        keys: of the captured facts, in their order. Recorded before its KV is captured, so that a
        deletion in between finds the keys. Raises UnknownFact when one of the facts was deleted
        meanwhile or belongs to another scope, InvalidInput for a fact that stands there twice.
        """
        with self._database.write() as connection:
            code = _rows.scope_code(connection, scope)
            return _passes.record_pass(connection, model, code, NewPass(window_ids, captured_ids, keys))

    def record_passes(self, model: str, scope: Scope, passes: Sequence[NewPass]) -> list[int | None]:
        """Store many passes in one transaction, each as by `record_pass`; their ids in order.

        None stands for a pass of which a fact was deleted meanwhile: the others are stored all the same.
        """
        pass_ids: list[int | None] = []
        with self._database.write() as connection:
            code = _rows.scope_code(connection, scope)
            for new in passes:
                try:
                    pass_ids.append(_passes.record_pass(connection, model, code, new))
                except UnknownFact:
                    pass_ids.append(None)
        return pass_ids

    def encodings(self, model: str, fact_ids: Iterable[str]) -> dict[str, Encoding]:
        """Fact id → its newest encoding for this model; facts without one are left out."""
        with self._database.read() as connection:
            return _passes.current_encodings(connection, model, fact_ids)

    def passes(self, pass_ids: Iterable[int]) -> dict[int, EncodePass]:
        """Pass id → pass; passes that do not exist (any more) are left out."""
        with self._database.read() as connection:
            return _passes.read_passes(connection, pass_ids)

    def attended_to(self, key: str) -> list[str]:
        """Ids of all facts that the KV under `key` has seen, its own fact included."""
        with self._database.read() as connection:
            return _passes.attended_to(connection, key)

    def keys_attending(self, fact_id: str) -> list[str]:
        """All keys, of any model, whose KV has seen this fact: its own and those captured behind it."""
        with self._database.read() as connection:
            found = connection.execute("SELECT seq FROM facts WHERE id = ?", (fact_id,)).fetchone()
            return [] if found is None else _passes.keys_attending(connection, found[0])

    def _facts(self, clause: str, *values: object) -> list[Fact]:
        with self._database.read() as connection:
            return _rows.select_facts(connection, clause, *values)

    def _number(self, sql: str, values: Sequence[str]) -> int:
        with self._database.read() as connection:
            return int(connection.execute(sql, values).fetchone()[0])
