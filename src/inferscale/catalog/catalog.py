"""The catalog: the truth about facts, from which all KV can be rebuilt.

In SQLite, in WAL mode, for the processes of one machine, or in PostgreSQL for those of several. Safe from
several threads and processes. Every public method is one transaction. Knows nothing of tokens, KV and
searching; stores text exactly as given.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import additions as _additions
from inferscale.catalog import blocks as _blocks
from inferscale.catalog import changes as _changes
from inferscale.catalog import cursors as _cursors
from inferscale.catalog import expiry as _expiry
from inferscale.catalog import imports as _imports
from inferscale.catalog import inferred as _inferred
from inferscale.catalog import listings as _listings
from inferscale.catalog import reads as _reads
from inferscale.catalog import rows as _rows
from inferscale.catalog.embedders import OwnEmbedder
from inferscale.catalog.feed import IndexFeed
from inferscale.catalog.imports import Imported, StoredFact
from inferscale.catalog.opening import open_database
from inferscale.catalog.pass_records import PassRecords
from inferscale.catalog.quotas import Quota
from inferscale.catalog.quotas import check as check_quota
from inferscale.catalog.results import (
    Applied,
    Deletion,
    FoundBlocks,
    FoundFacts,
    InferMark,
    ScopeDeletion,
    SimilarFacts,
    Update,
)
from inferscale.catalog.sql import ChangeToken, Connection
from inferscale.encryption import EncryptionKey
from inferscale.errors import InvalidInput
from inferscale.facts import Fact, HistoryEvent, Page, Scope, Turn
from inferscale.filters import Filter

NO_QUOTA = Quota()


class Catalog:
    """Facts, vectors, encodings and epochs. Opened on first use.

    feed: what an index is made of. passes: encode passes and their keys.

    quota: of each owner; what would exceed it is refused with QuotaExceeded, and nothing of it is stored.
    key: of an encrypted folder; a new one is encrypted with it. url: of a PostgreSQL database, which then
    holds the catalog instead of the folder. place: where it lies, for people.
    """

    def __init__(
        self,
        data_dir: str | Path,
        quota: Quota = NO_QUOTA,
        key: EncryptionKey | None = None,
        url: str | None = None,
    ) -> None:
        self._quota = quota
        self._database = open_database(data_dir, key, url)
        self.place = self._database.place
        self._embedder = OwnEmbedder(self._database)
        self.feed = IndexFeed(self._database, self._embedder)
        self.passes = PassRecords(self._database)

    def close(self) -> None:
        self._database.close()

    def change_token(self) -> ChangeToken:
        """Cheap to get; differs from an earlier one if any process wrote to the catalog since."""
        return self._database.change_token()

    def identity(self) -> str:
        """Tells this catalog from others, and nothing of what it holds."""
        with self._database.read() as connection:
            key = _cursors.read_key(connection)
        return hashlib.blake2b(key, person=b"identity", digest_size=16).hexdigest()

    # --- facts -------------------------------------------------------------------------------

    def record_embedder(self, name: str, dim: int) -> None:
        """State whose vectors this catalog holds. Raises EmbedderMismatch if it holds another's.

        So does, from then on, whatever reads or stores vectors, once the folder was re-embedded.
        """
        self._embedder.record(_rows.EmbedderIdentity(name, dim))

    def add_facts(self, scope: Scope, turns: Sequence[Turn], vectors: NDArray[np.float32]) -> list[Fact]:
        """Store turns with their vectors (float32 [n, dim]) in order: all of them, or on an error none.

        Needs `record_embedder` first. Raises InvalidInput for an empty scope, vectors of another
        shape, metadata that is not JSON, or text that is not valid Unicode.
        """
        if scope.is_empty():
            raise InvalidInput("a fact needs an owner: give at least one of user_id, agent_id and run_id.")
        metadata = [_rows.metadata_json(turn.metadata) for turn in turns]
        with self._write_vectors(scope) as connection:
            return _additions.add_facts(connection, scope, turns, metadata, vectors)

    def similar(self, scope: Scope, vector: NDArray[np.float32], limit: int) -> SimilarFacts:
        """The `limit` facts of exactly this scope most like `vector` (float32 [dim]); no blocks."""
        with self._database.read() as connection:
            self._embedder.check(connection)
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
        with self._database.read() as connection:
            facts = _listings.all_facts(connection, filter, limit, after)
            return _imports.with_revisions(connection, facts)

    def get(self, fact_id: str) -> Fact | None:
        """The fact with this id; None where there is none, or where it has expired."""
        found = self.facts_by_ids([fact_id])
        return found[0] if found and not found[0].has_expired(time.time()) else None

    def facts_by_ids(self, fact_ids: Iterable[str]) -> list[Fact]:
        """Facts in the order of the ids; ids that name no fact are left out."""
        with self._database.read() as connection:
            return _listings.by_ids(connection, fact_ids)

    def found_facts(self, filter: Scope, seqs: Iterable[int], model: str | None = None) -> FoundFacts:
        """Facts by sequence number, their keys for `model` (None: no keys) and the epoch of `filter`.

        Facts that do not exist (any more) are left out.
        """
        with self._database.read() as connection:
            return _listings.by_seqs(connection, filter, seqs, model)

    def facts(
        self, filter: Scope, limit: int | None = None, after: int = 0, within: Filter | None = None
    ) -> list[Fact]:
        """Facts under `filter` (all for an empty one) and above `after`, at most `limit`, in seq order.

        Core blocks and what has expired are none of them. within: only those that it passes.
        """
        with self._database.read() as connection:
            return _listings.facts(connection, filter, limit, after, within)

    def page(
        self, filter: Scope, limit: int, cursor: str | None = None, within: Filter | None = None
    ) -> Page:
        """At most `limit` of the facts that `facts` lists, from behind those of the page with this cursor.

        Raises InvalidInput for a cursor that no page of this catalog has.
        """
        with self._database.read() as connection:
            return _listings.page(connection, filter, limit, cursor, within)

    def newest_ids(self, filter: Scope, limit: int) -> list[str]:
        """Ids of at most `limit` of the facts that `facts` lists, newest first."""
        with self._database.read() as connection:
            return _listings.newest_ids(connection, filter, limit)

    def history(self, fact_id: str) -> list[HistoryEvent]:
        """How a fact was added and changed, oldest first. Raises UnknownFact."""
        with self._database.read() as connection:
            return _changes.history(connection, fact_id)

    def neighbours_before(self, fact: Fact, n: int) -> list[Fact]:
        """The last `n` facts of the same exact scope that were stored before `fact`, oldest first.

        Core blocks and what has expired are none of them.
        """
        with self._database.read() as connection:
            return _listings.neighbours_before(connection, fact, n)

    def unencoded(self, model: str, filter: Scope) -> list[Fact]:
        """Facts under `filter`, core blocks too, that have no encoding for this model, in seq order."""
        with self._database.read() as connection:
            return _listings.unencoded(connection, model, filter)

    def provisional(self, model: str, filter: Scope, *, is_exact: bool = False) -> list[Fact]:
        """Facts under `filter` that were encoded for this model, but in no pass of two directions that is
        done, in seq order; no core blocks. is_exact: only those of the very scope that `filter` names."""
        with self._database.read() as connection:
            return _listings.provisional(connection, model, filter, is_exact=is_exact)

    def count(self, filter: Scope) -> int:
        """Number of the facts that `facts` lists."""
        with self._database.read() as connection:
            return _listings.count(connection, filter)

    def has_facts(self, filter: Scope) -> bool:
        with self._database.read() as connection:
            return _listings.has_facts(connection, filter)

    def count_rows(self) -> int:
        """Number of stored facts of everybody, also of those that are not listed; quickly."""
        with self._database.read() as connection:
            return _listings.count_rows(connection)

    def count_scopes(self) -> int:
        """Number of exact scopes that hold at least one fact."""
        with self._database.read() as connection:
            return _listings.count_scopes(connection)

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

    @contextmanager
    def _write_vectors(self, owner: Scope | None = None) -> Iterator[Connection]:
        """A write transaction for vectors of this process's embedder. Raises EmbedderMismatch.

        owner: of what is added, to be held to its quota at the end. Raises QuotaExceeded.
        """
        with self._database.write() as connection:
            self._embedder.check(connection)
            yield connection
            if owner is not None:
                check_quota(connection, owner, self._quota)
