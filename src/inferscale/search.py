"""Finds the facts of a scope that fit a query, with embedder, index and words in step with the catalog.

The index is fed from the catalog only, so writes of this process and of others come into it the same way.
Knows nothing of tokens and KV, but for the keys that the catalog names.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import Catalog, RememberedReads, VectorMark
from inferscale.config import MemoryConfig
from inferscale.errors import EmbedderMismatch, UnknownScope
from inferscale.facts import Scope, SearchHit, Turn, Wording
from inferscale.filters import Filter

if TYPE_CHECKING:
    from inferscale.catalog.results import StoredText
    from inferscale.catalog.sql import ChangeToken
    from inferscale.retrieval import DeviceChoice, Embedder, HybridSearch, VectorIndex
    from inferscale.retrieval.reranker import Reranker

_log = logging.getLogger(__name__)


class Recall(NamedTuple):
    """Facts found for a query.

    keys: fact id → key of its KV, where it was encoded. epoch: of the scope. embed_ms, search_ms:
    time for the query's vector, and for all else.
    """

    hits: tuple[SearchHit, ...]
    keys: dict[str, str]
    epoch: int
    embed_ms: float
    search_ms: float


class FactSearch:
    """Over one data folder. Safe from several threads; all is loaded and read on first use.

    embedder, reranker: used instead of those that `config` names.
    """

    def __init__(
        self,
        catalog: Catalog,
        remembered: RememberedReads,
        config: MemoryConfig,
        embedder: Embedder | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self._catalog = catalog
        self._remembered = remembered
        self._config = config
        self._embedder = embedder
        self._reranker = reranker
        self._lock = threading.RLock()
        self._embedder_is_recorded = False
        self._device: DeviceChoice | None = None
        self._index: VectorIndex | None = None
        self._index_mark = VectorMark()
        self._index_token: ChangeToken | None = None
        self._hybrid: HybridSearch | None = None
        self._words_token: ChangeToken | None = None

    def recall(self, text: str, scope: Scope, top_k: int, model: str | None, within: Filter | None) -> Recall:
        """The `top_k` best facts of the scope, best first; what the call of `Memory` says, its input read."""
        self.check_known(scope)
        if top_k == 0:
            return Recall((), {}, self._catalog.epoch(scope), 0.0, 0.0)
        from inferscale.retrieval import Query

        embedder = self.ready_embedder()
        start_s = time.perf_counter()
        query_vector = embedder.embed([text])[0]
        embedded_s = time.perf_counter()
        marks = self._remembered.scope_marks(scope)
        asked = Query(text, query_vector, marks, self._findable(scope, within))
        reranker = self._ready_reranker()
        num_hits = top_k if reranker is None else max(top_k, self._config.retrieval.reranked)
        hits = self.synced().search(asked, num_hits)
        found = self._remembered.found_facts(scope, [hit.id for hit in hits], model)
        # A fact can have been deleted by another process since the search.
        facts = tuple(SearchHit(found.facts[hit.id], hit.score) for hit in hits if hit.id in found.facts)
        if reranker is not None:
            facts = _reranked(reranker, text, facts)[:top_k]
        done_s = time.perf_counter()
        return Recall(
            facts, found.keys, found.epoch, (embedded_s - start_s) * 1e3, (done_s - embedded_s) * 1e3
        )

    def check_known(self, scope: Scope) -> None:
        """Raise UnknownScope for a scope without facts."""
        if self._remembered.has_facts(scope):
            return
        # Only a number: the ids of other users are not for everyone's eyes.
        raise UnknownScope(
            f"no fact is stored under {scope.describe()}; the catalog holds facts of "
            f"{self._catalog.count_scopes()} other scopes. Ids are compared exactly: check their "
            "spelling, or add a fact first."
        )

    def is_purge_due(self) -> bool:
        """Whether something of anybody has expired and is not deleted yet. Cheap."""
        expiry = self._remembered.next_expiry()
        return expiry is not None and expiry <= time.time()

    def _findable(self, scope: Scope, within: Filter | None) -> list[int] | None:
        """Numbers of the facts that may be found; None for all of the scope, as nearly always."""
        if within is None and not (self.is_purge_due() and self._catalog.has_expired(scope)):
            return None
        return self._catalog.feed.matching(scope, within)

    # --- embedder and reranker ---------------------------------------------------------------

    def embed(self, turns: Sequence[Turn]) -> NDArray[np.float32]:
        """What the turns are found by: float32 [n, dim]."""
        embedder = self.ready_embedder()
        texts = [embedding_text(turn) for turn in turns]
        return embedder.embed(texts) if texts else np.zeros((0, embedder.dim), np.float32)

    def ready_embedder(self) -> Embedder:
        """The embedder, made on first use and known to fit the vectors of the catalog."""
        with self._lock:
            if self._embedder is None:
                from inferscale.retrieval import open_embedder

                self._embedder = open_embedder(self._config.embedder, self._chosen_device(), _log.info)
            if not self._embedder_is_recorded:
                self._catalog.record_embedder(self._embedder.name, self._embedder.dim)
                self._embedder_is_recorded = True
            return self._embedder

    def _ready_reranker(self) -> Reranker | None:
        with self._lock:
            if self._reranker is None and self._config.reranker is not None:
                from inferscale.retrieval.reranker import CrossEncoder

                self._reranker = CrossEncoder(self._config.reranker)
            return self._reranker

    def _chosen_device(self) -> DeviceChoice:
        """One for embedder and index: where the one has to leave a GPU, so does the other."""
        with self._lock:
            if self._device is None:
                from inferscale.retrieval import DeviceChoice

                self._device = DeviceChoice(self._config.embedder_device)
            return self._device

    # --- in step with the catalog ------------------------------------------------------------

    def load(self) -> None:
        """Load the embedder and read the index now instead of at first use. Raises what they raise."""
        self.ready_embedder().embed(["a first text takes longer"])
        self._synced_index()

    def close(self) -> None:
        """Free the index. What is asked afterwards reads it again."""
        with self._lock:
            self._index = self._hybrid = None

    def follow(self) -> None:
        """Take what was just changed or removed out of the index as well, where there is one."""
        with self._lock, suppress(EmbedderMismatch):  # then the next search is refused
            if self._hybrid is not None:
                self.synced()
            elif self._index is not None:
                self._synced_index()

    def synced(self) -> HybridSearch:
        """Meaning and words, with everything that any process has stored and removed so far."""
        with self._lock:
            vectors = self._synced_index()
            if self._hybrid is None or self._hybrid.vectors is not vectors:
                from inferscale.retrieval import HybridSearch, LexicalIndex
                from inferscale.retrieval.lexical import Changes

                feed = self._catalog.feed
                changes = Changes(feed.changes_after, lambda *asked: _words_of(feed.texts_of(*asked)))
                words = LexicalIndex(lambda *asked: _words_of(feed.texts(*asked)), changes=changes)
                self._hybrid = HybridSearch(vectors, words, self._config.retrieval)
            elif self._words_token != self._index_token:
                self._hybrid.words.follow()
            self._words_token = self._index_token
            return self._hybrid

    def _synced_index(self) -> VectorIndex:
        with self._lock:
            if self._index is None:
                from inferscale.retrieval import VectorIndex

                self._index = VectorIndex(self.ready_embedder().dim, self._chosen_device())
                self._index_mark, self._index_token = VectorMark(), None
                num_rows = self._catalog.count_rows()
                self._index.reserve(num_rows + num_rows // 8)  # the next adds need no larger table
            # Taken before reading: what is written in between is then read again, not missed.
            token = self._catalog.change_token()
            if token == self._index_token:
                return self._index
            while True:
                changes = self._catalog.feed.vector_changes(self._index_mark)
                self._index.add(changes.fact_seqs, changes.scope_codes, changes.vectors)
                self._index.remove(changes.removed_seqs)
                self._index_mark = changes.mark
                if changes.is_complete:
                    self._index_token = token
                    return self._index


def embedding_text(turn: Turn) -> str:
    """What is embedded of a turn: `speaker (time): text`, since people ask for who and when as well.

    A change here needs the facts of existing folders to be embedded anew.
    """
    when = f"({turn.said_at})" if turn.said_at is not None else None
    source = " ".join(part for part in (turn.speaker, when) if part is not None)
    return f"{source}: {turn.text}" if source else turn.text


def _words_of(found: Iterable[StoredText]) -> list[tuple[int, str]]:
    """Numbers, and what a fact can be found by: the same as is embedded."""
    return [(item.seq, embedding_text(Turn(item.text, item.speaker, item.said_at))) for item in found]


def _reranked(reranker: Reranker, query: str, hits: Sequence[SearchHit]) -> tuple[SearchHit, ...]:
    """In the reranker's order; what it finds equal stays as it is."""
    texts = [embedding_text(Turn(*Wording.of(hit.fact))) for hit in hits]
    scores = reranker.scores(query, texts)
    order = sorted(range(len(hits)), key=lambda place: -scores[place])
    return tuple(hits[place] for place in order)
