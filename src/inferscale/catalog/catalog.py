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

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import changes as _changes
from inferscale.catalog import cursors as _cursors
from inferscale.catalog import passes as _passes
from inferscale.catalog import rows as _rows
from inferscale.catalog import vectors as _vectors
from inferscale.catalog.database import ChangeToken, Database
from inferscale.catalog.passes import EncodePass, Encoding, NewPass
from inferscale.catalog.results import Deletion, FoundFacts, ScopeDeletion, Update, VectorChanges, VectorMark
from inferscale.dates import read_time
from inferscale.errors import EmbedderMismatch, InvalidInput, UnknownFact
from inferscale.facts import Fact, HistoryEvent, Page, Scope, Turn

CATALOG_FILE = "catalog.sqlite3"


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
            embedder = _vectors.fitting_embedder(connection, vectors, len(turns))
            code = _rows.scope_code(connection, scope)
            for turn, meta, vector in zip(turns, metadata, vectors, strict=True):
                fact_id = str(uuid.uuid4())
                said = (turn.text, turn.speaker, turn.said_at)
                happened_at = read_time(turn.said_at)
                cursor = connection.execute(
                    "INSERT INTO facts (id, scope, text, speaker, said_at, created_at, metadata, "
                    "expires_at, happened_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (fact_id, code, *said, now, meta, turn.expires_at, happened_at),
                )
                seq = cursor.lastrowid
                assert seq is not None
                _vectors.store(connection, embedder, seq, vector)
                own = json.loads(meta)
                facts.append(Fact(fact_id, seq, scope, *said, now, now, own, turn.expires_at, happened_at))
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

    def page(self, filter: Scope, limit: int, cursor: str | None = None) -> Page:
        """At most `limit` facts under `filter`, in seq order, from behind those of the page with this cursor.

        Raises InvalidInput for a cursor that no page of this catalog has.
        """
        where, values = _rows.covered(filter)
        # Numbers first, from an index: else the texts of all facts that follow would be read and sorted.
        clause = (
            f"WHERE f.seq IN (SELECT seq FROM facts WHERE scope IN (SELECT id FROM scopes WHERE {where}) "
            "AND seq > ? ORDER BY seq LIMIT ?) ORDER BY f.seq"
        )
        with self._database.read() as connection:
            key = _cursors.read_key(connection)
            after = 0 if cursor is None else _cursors.seq_at(key, cursor)
            facts = _rows.select_facts(connection, clause, *values, after, limit + 1)
        has_more, facts = len(facts) > limit, facts[:limit]
        return Page(facts, _cursors.cursor_at(key, facts[-1].seq) if has_more and facts else None)

    def history(self, fact_id: str) -> list[HistoryEvent]:
        """How a fact was added and changed, oldest first. Raises UnknownFact."""
        with self._database.read() as connection:
            return _changes.history(connection, fact_id)

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
        """Memory epoch of `filter`: rises with every deletion and rewording under it and never falls."""
        with self._database.read() as connection:
            return _rows.read_epoch(connection, filter)

    def update(self, fact: Fact, turn: Turn, vector: NDArray[np.float32] | None = None) -> Update | None:
        """Change `fact`, as it was read, to say `turn`; None where it was changed meanwhile: read it again.

        vector: float32 [dim], of the new wording; needed only where that differs. The fact keeps its
        id, its place in the order and `created_at`. Where its wording changes, every encoding that has
        seen it goes as by a deletion, and the caller sends `keys` and `epochs` to the engine. Where
        nothing changes, nothing is written. Raises UnknownFact where it was deleted, InvalidInput for
        a vector of another shape or what `add_facts` refuses in a turn.
        """
        if _changes.is_same(fact, turn):
            return Update(fact, (), ())
        with self._database.write() as connection:
            return _changes.update(connection, fact, turn, vector)

    def delete(self, fact_id: str) -> Deletion:
        """Remove a fact, its vector, its history and every encoding that has seen it. Raises UnknownFact.

        The caller sends `keys` and `epochs` to the engine as an order to forget.
        """
        with self._database.write() as connection:
            deletion = _changes.delete(connection, fact_id)
        self._database.empty_log()
        return deletion

    def retire(self, fact_id: str, successor: str | None = None, reason: str | None = None) -> Deletion:
        """End a fact that is no longer so: it is removed as by `delete`, but stays in its history.

        successor: id of the fact that took its place; it goes with that one for good. Without one it goes
        when its scope is deleted. Raises UnknownFact where one of the two does not exist.
        """
        with self._database.write() as connection:
            deletion = _changes.retire(connection, fact_id, successor, reason)
        self._database.empty_log()
        return deletion

    def delete_all(self, filter: Scope) -> ScopeDeletion:
        """Remove all facts under `filter` (of everybody for an empty one) as `delete` does, all or none.

        One transaction, however many there are: nobody sees half of a user, and a crash does not leave
        it. Others that write wait for it meanwhile.
        """
        with self._database.write() as connection:
            deletion = _changes.delete_all(connection, filter)
        if deletion.num_facts:
            self._database.empty_log()
        return deletion

    # --- vectors -----------------------------------------------------------------------------

    def scope_codes(self, filter: Scope) -> list[int]:
        """Codes of the exact scopes that `filter` covers."""
        where, values = _rows.covered(filter)
        with self._database.read() as connection:
            return [row[0] for row in connection.execute(f"SELECT id FROM scopes WHERE {where}", values)]

    def vector_changes(self, since: VectorMark, limit: int = 50_000) -> VectorChanges:
        """At most `limit` vectors stored since the mark, and what `limit` changes did to older facts."""
        with self._database.read() as connection:
            return _vectors.changes_since(connection, since, limit)

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

    def record_passes(
        self, model: str, scope: Scope, passes: Sequence[NewPass], epoch: int | None = None
    ) -> list[int | None]:
        """Store many passes in one transaction, each as by `record_pass`; their ids in order.

        epoch: of `scope`, from before the facts' texts were read. None stands for a pass of which a
        fact was deleted meanwhile: the others are stored all the same. Where the epoch has risen since,
        none is stored: a fact may say something else by now, and the keys are those of its old text.
        """
        pass_ids: list[int | None] = []
        with self._database.write() as connection:
            if epoch is not None and _rows.read_epoch(connection, scope) != epoch:
                return [None] * len(passes)
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
