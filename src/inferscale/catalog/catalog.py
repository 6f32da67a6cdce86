"""The catalog of one data folder: the truth about facts, from which all KV can be rebuilt.

SQLite in WAL mode, safe from several threads and several processes. Every public method is one
transaction. Knows nothing of tokens, KV and searching; stores text exactly as given.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import blocks as _blocks
from inferscale.catalog import changes as _changes
from inferscale.catalog import cursors as _cursors
from inferscale.catalog import expiry as _expiry
from inferscale.catalog import imports as _imports
from inferscale.catalog import inferred as _inferred
from inferscale.catalog import passes as _passes
from inferscale.catalog import reads as _reads
from inferscale.catalog import rows as _rows
from inferscale.catalog import vectors as _vectors
from inferscale.catalog.conditions import LIVE
from inferscale.catalog.database import ChangeToken, Database
from inferscale.catalog.imports import Imported, StoredFact
from inferscale.catalog.passes import EncodePass, Encoding, NewPass
from inferscale.catalog.quotas import Quota
from inferscale.catalog.quotas import check as check_quota
from inferscale.catalog.results import (
    Applied,
    Deletion,
    FoundBlocks,
    FoundFacts,
    InferMark,
    ScopeDeletion,
    ScopeMark,
    SimilarFacts,
    StoredText,
    Update,
    VectorChanges,
    VectorMark,
)
from inferscale.dates import read_time
from inferscale.errors import EmbedderMismatch, InvalidInput, UnknownFact
from inferscale.facts import Fact, HistoryEvent, Page, Scope, Turn
from inferscale.filters import Filter

CATALOG_FILE = "catalog.sqlite3"
NO_QUOTA = Quota()


class Catalog:
    """Facts, vectors, encodings and epochs of one data folder. Opened on first use.

    quota: of each owner; what would exceed it is refused with QuotaExceeded, and nothing of it is stored.
    """

    def __init__(self, data_dir: str | Path, quota: Quota = NO_QUOTA) -> None:
        self._quota = quota
        self.path = Path(data_dir) / CATALOG_FILE
        self._database = Database(self.path)
        self._embedder: _rows.EmbedderIdentity | None = None  # that makes the vectors of this process

    def close(self) -> None:
        self._database.close()

    def change_token(self) -> ChangeToken:
        """Cheap to get; differs from an earlier one if any process wrote to the catalog since."""
        return self._database.change_token()

    # --- facts -------------------------------------------------------------------------------

    def record_embedder(self, name: str, dim: int) -> None:
        """State whose vectors this catalog holds. Raises EmbedderMismatch if it holds another's.

        So does, from then on, whatever reads or stores vectors, once the folder was re-embedded.
        """
        with self._database.read() as connection:
            found = _rows.read_embedder(connection)
        if found is None:
            with self._database.write() as connection:
                connection.executemany(
                    "INSERT OR IGNORE INTO meta (name, value) VALUES (?, ?)",
                    [("embedder_name", name), ("embedder_dim", str(dim))],
                )
                found = _rows.read_embedder(connection)
        self._embedder = _rows.EmbedderIdentity(name, dim)
        self._check_embedder(found)

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
        with self._write_vectors(scope) as connection:
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

    def similar(self, scope: Scope, vector: NDArray[np.float32], limit: int) -> SimilarFacts:
        """The `limit` facts of exactly this scope most like `vector` (float32 [dim]); no blocks."""
        with self._database.read() as connection:
            self._check_embedder(_rows.read_embedder(connection))
            return _inferred.similar(connection, scope, vector, limit)

    def apply_inferred(
        self,
        scope: Scope,
        turn: Turn | None,
        vector: NDArray[np.float32] | None,
        *,
        mark: InferMark | None = None,
        retires: str | None = None,
        reason: str | None = None,
    ) -> Applied | None:
        """Store `turn` and retire the fact `retires`, which it supersedes; either may be None.

        mark: from `similar`; None is answered, and nothing written, where the scope says something else by
        now: decide anew. Where a fact of the scope has the same text and speaker already, it is taken and
        none stored. Raises UnknownFact for a `retires` that is not of exactly this scope, and what
        `add_facts` raises.
        """
        with self._write_vectors(scope) as connection:
            applied = _inferred.apply(connection, scope, turn, vector, mark, retires, reason)
            if applied is not None and applied.is_new:
                check_quota(connection, scope, self._quota)
        if applied is not None and applied.retired is not None:
            self._database.empty_log()
        return applied

    def add_new_facts(
        self, scope: Scope, turns: Sequence[Turn], vectors: NDArray[np.float32]
    ) -> list[Applied]:
        """As `add_facts`, but what the scope holds in the same words, of the same speaker and time, is not
        stored again."""
        with self._write_vectors(scope) as connection:
            stored = _inferred.add_new(connection, scope, turns, vectors)
            if any(applied.is_new for applied in stored):
                check_quota(connection, scope, self._quota)
            return stored

    def import_facts(
        self, stored: Sequence[StoredFact], vectors: NDArray[np.float32], *, replaces: bool = False
    ) -> Imported:
        """Store facts of another catalog in order, with their ids, times and former texts; all or none.

        A fact whose id or core block is there already is passed over; replaces: it takes that one's
        place. Raises what `add_facts` raises.
        """
        with self._write_vectors() as connection:
            imported = _imports.import_facts(connection, stored, vectors, replaces)
            if imported.num_added or imported.num_replaced:
                for scope in dict.fromkeys(item.fact.scope for item in stored):
                    check_quota(connection, scope, self._quota)
        if imported.num_replaced:
            self._database.empty_log()
        return imported

    def past_facts(self, filter: Scope, limit: int, after: str = "") -> list[StoredFact]:
        """At most `limit` facts under `filter` that are no longer so, by id, those above `after`."""
        with self._database.read() as connection:
            return _imports.past_facts(connection, filter, limit, after)

    def known_ids(self, fact_ids: Iterable[str]) -> set[str]:
        """Those of the ids that a fact has, or had before it was retired."""
        with self._database.read() as connection:
            return _imports.known_ids(connection, fact_ids)

    def stored_facts(self, filter: Scope, limit: int, after: int = 0) -> list[StoredFact]:
        """As `facts`, each with its former texts."""
        where, values = _rows.covered(filter)
        clause = (
            f"WHERE f.scope IN (SELECT id FROM scopes WHERE {where}) AND f.seq > ? ORDER BY f.seq LIMIT ?"
        )
        with self._database.read() as connection:
            facts = _rows.select_facts(connection, clause, *values, after, limit)
            return _imports.with_revisions(connection, facts)

    def get(self, fact_id: str) -> Fact | None:
        """The fact with this id; None where there is none, or where it has expired."""
        found = self.facts_by_ids([fact_id])
        return found[0] if found and not found[0].has_expired(time.time()) else None

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

    def facts(
        self, filter: Scope, limit: int | None = None, after: int = 0, within: Filter | None = None
    ) -> list[Fact]:
        """Facts under `filter` (all for an empty one) and above `after`, at most `limit`, in seq order.

        Core blocks and what has expired are none of them. within: only those that it passes.
        """
        with self._database.read() as connection:
            where, values = _reads.listed(connection, filter, within, time.time())
            clause = f"WHERE {where} AND f.seq > ? ORDER BY f.seq LIMIT ?"
            return _rows.select_facts(connection, clause, *values, after, -1 if limit is None else limit)

    def page(
        self, filter: Scope, limit: int, cursor: str | None = None, within: Filter | None = None
    ) -> Page:
        """At most `limit` of the facts that `facts` lists, from behind those of the page with this cursor.

        Raises InvalidInput for a cursor that no page of this catalog has.
        """
        with self._database.read() as connection:
            where, values = _reads.listed(connection, filter, within, time.time())
            # Numbers first, from an index: else the texts of all facts that follow would be read and sorted.
            clause = (
                f"WHERE f.seq IN (SELECT f.seq FROM facts f WHERE {where} AND f.seq > ? "
                "ORDER BY f.seq LIMIT ?) ORDER BY f.seq"
            )
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
        """The last `n` facts of the same exact scope that were stored before `fact`, oldest first.

        Core blocks and what has expired are none of them.
        """
        clause = (
            "WHERE f.scope = (SELECT scope FROM facts WHERE seq = ?) AND f.seq < ? AND f.block IS NULL "
            f"AND {LIVE} ORDER BY f.seq DESC LIMIT ?"
        )
        return self._facts(clause, fact.seq, fact.seq, time.time(), max(0, n))[::-1]

    def unencoded(self, model: str, filter: Scope) -> list[Fact]:
        """Facts under `filter`, core blocks too, that have no encoding for this model, in seq order."""
        where, values = _rows.covered(filter)
        clause = (
            f"WHERE f.scope IN (SELECT id FROM scopes WHERE {where}) AND {LIVE} AND NOT EXISTS "
            "(SELECT 1 FROM encodings e WHERE e.fact = f.seq AND e.model = ?) ORDER BY f.seq"
        )
        return self._facts(clause, *values, time.time(), model)

    def count(self, filter: Scope) -> int:
        """Number of the facts that `facts` lists."""
        with self._database.read() as connection:
            where, values = _reads.listed(connection, filter, None, time.time())
            found = connection.execute(f"SELECT count(*) FROM facts f WHERE {where}", values).fetchone()
            return int(found[0])

    def has_facts(self, filter: Scope) -> bool:
        where, values = _rows.covered(filter)
        sql = f"SELECT EXISTS (SELECT 1 FROM facts WHERE scope IN (SELECT id FROM scopes WHERE {where}))"
        return bool(self._number(sql, values))

    def count_rows(self) -> int:
        """Number of stored facts of everybody, also of those that are not listed; quickly."""
        return self._number("SELECT count(*) FROM facts", ())

    def count_scopes(self) -> int:
        """Number of exact scopes that hold at least one fact."""
        holds_facts = "EXISTS (SELECT 1 FROM facts WHERE facts.scope = scopes.id)"
        return self._number(f"SELECT count(*) FROM scopes WHERE {holds_facts}", ())

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
        grows = fact.scope if len(turn.text) > len(fact.text) else None
        with self._database.write() if vector is None else self._write_vectors(grows) as connection:
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

    # --- search (contracts: catalog/reads.py) -------------------------------------------------

    def matching(self, scope: Scope, within: Filter | None = None) -> list[int]:
        """Sequence numbers of the facts under `scope` that may be found and pass the filter, rising."""
        with self._database.read() as connection:
            return _reads.matching(connection, scope, within, time.time())

    def scope_marks(self, scope: Scope) -> list[ScopeMark]:
        """How far the exact scopes under `scope` are that hold facts."""
        with self._database.read() as connection:
            return _reads.scope_marks(connection, scope)

    def texts(self, code: int, after: int = 0) -> list[StoredText]:
        """What the facts of an exact scope say, those above `after`, in seq order; no core blocks."""
        with self._database.read() as connection:
            return _reads.texts(connection, code, after)

    def texts_of(self, code: int, seqs: Iterable[int]) -> list[StoredText]:
        """The same of those of the facts that the exact scope holds."""
        with self._database.read() as connection:
            return _reads.texts_of(connection, code, seqs)

    def changes_after(self, change: int) -> tuple[int, list[int]]:
        """Number of the last change, and facts of anybody that were removed or reworded behind `change`."""
        with self._database.read() as connection:
            return _reads.changes_after(connection, change)

    # --- expiry and core blocks ----------------------------------------------------------------

    def next_expiry(self) -> float | None:
        """When the next fact of anybody expires, or has; None where none ever does."""
        with self._database.read() as connection:
            return _reads.next_expiry(connection)

    def has_expired(self, scope: Scope) -> bool:
        """Whether something under `scope` has expired and is not deleted yet."""
        with self._database.read() as connection:
            return _reads.has_expired(connection, scope, time.time())

    def set_expiry(self, fact_id: str, expires_at: float | None) -> None:
        """Change from when on a fact is not found any more; None for never. Raises UnknownFact."""
        with self._database.write() as connection:
            _expiry.set_expiry(connection, fact_id, expires_at)

    def purge_expired(self) -> ScopeDeletion:
        """Delete what has expired, of everybody, as `delete` does; keys and epochs go to the engine."""
        expiry = self.next_expiry()
        if expiry is None or expiry > time.time():
            return ScopeDeletion(0, (), ())
        with self._database.write() as connection:
            deletion = _blocks.purge_expired(connection, time.time())
        self._database.empty_log()
        return deletion

    def set_block(self, scope: Scope, name: str, text: str) -> Update:
        """Store a core block under an exact scope, in place of the one of that name, if any."""
        with self._database.write() as connection:
            update = _blocks.set_block(connection, scope, name, text)
            check_quota(connection, scope, self._quota)
            return update

    def delete_block(self, scope: Scope, name: str) -> Deletion:
        """Remove a core block of an exact scope as `delete` does. Raises UnknownFact."""
        with self._database.write() as connection:
            deletion = _blocks.delete_block(connection, scope, name)
        self._database.empty_log()
        return deletion

    def blocks(self, scope: Scope, model: str | None = None) -> FoundBlocks:
        """Core blocks under `scope` by name, with their keys for `model` and the epoch of the scope."""
        with self._database.read() as connection:
            return _reads.blocks(connection, scope, model, time.time())

    # --- vectors -----------------------------------------------------------------------------

    def scope_codes(self, filter: Scope) -> list[int]:
        """Codes of the exact scopes that `filter` covers."""
        where, values = _rows.covered(filter)
        with self._database.read() as connection:
            return [row[0] for row in connection.execute(f"SELECT id FROM scopes WHERE {where}", values)]

    def vector_changes(self, since: VectorMark, limit: int = 50_000) -> VectorChanges:
        """At most `limit` vectors stored since the mark, and what `limit` changes did to older facts."""
        with self._database.read() as connection:
            self._check_embedder(_rows.read_embedder(connection))
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

    def known_keys(self, keys: Sequence[str]) -> set[str]:
        """Those of the keys that a fact has, or had before it was encoded anew."""
        with self._database.read() as connection:
            return _passes.known_keys(connection, keys)

    def attended_to(self, key: str) -> list[str]:
        """Ids of all facts that the KV under `key` has seen, its own fact included."""
        with self._database.read() as connection:
            return _passes.attended_to(connection, key)

    def keys_attending(self, fact_id: str) -> list[str]:
        """All keys, of any model, whose KV has seen this fact: its own and those captured behind it."""
        with self._database.read() as connection:
            found = connection.execute("SELECT seq FROM facts WHERE id = ?", (fact_id,)).fetchone()
            return [] if found is None else _passes.keys_attending(connection, found[0])

    @contextmanager
    def _write_vectors(self, owner: Scope | None = None) -> Iterator[sqlite3.Connection]:
        """A write transaction for vectors of this process's embedder. Raises EmbedderMismatch.

        owner: of what is added, to be held to its quota at the end. Raises QuotaExceeded.
        """
        with self._database.write() as connection:
            self._check_embedder(_rows.read_embedder(connection))
            yield connection
            if owner is not None:
                check_quota(connection, owner, self._quota)

    def _check_embedder(self, found: _rows.EmbedderIdentity | None) -> None:
        """found: whose vectors the catalog holds now."""
        own = self._embedder
        if found is None or own is None or found == own:
            return
        raise EmbedderMismatch(
            f"{self.path} holds vectors of the embedder {found.name!r} with {found.dim} dimensions, "
            f"not of {own.name!r} with {own.dim}; the two cannot be compared. Start again with embedder set "
            f"to {found.name!r}, or embed the folder anew, with the --embedder that was given here: "
            f"inferscale reembed --data-dir {self.path.parent}"
        )

    def _facts(self, clause: str, *values: object) -> list[Fact]:
        with self._database.read() as connection:
            return _rows.select_facts(connection, clause, *values)

    def _number(self, sql: str, values: Sequence[str]) -> int:
        with self._database.read() as connection:
            return int(connection.execute(sql, values).fetchone()[0])
