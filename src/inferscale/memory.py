"""Memory: add, search, get, change and delete facts of users, agents and runs, on one data folder.

Brings catalog, embedder and index together. Knows nothing of models, tokens and KV: `MemoryLLM`
and the server take facts from here and the catalog's bookkeeping for what they encode.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from inferscale.catalog import Catalog, Deletion, RememberedReads, ScopeDeletion, Update, VectorMark
from inferscale.config import MemoryConfig
from inferscale.errors import InvalidInput, UnknownFact, UnknownScope
from inferscale.facts import KEEP, Fact, HistoryEvent, Keep, Page, Scope, SearchHit, Turn, Wording
from inferscale.turns import Content, read_query, read_scope, read_turns

if TYPE_CHECKING:
    from inferscale.catalog.database import ChangeToken
    from inferscale.retrieval import DeviceChoice, Embedder, VectorIndex

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


class Memory:
    """Long-term memory in `config.data_dir`. Safe from several threads and several processes.

    embedder: used instead of the one that `config.embedder` names. check_text: called with every
    turn before anything of a call is stored; it refuses one by raising, such as TextTooLong.

    A scope is given by user_id, agent_id and run_id, at least one of them. `add` stores under
    exactly these; everything else finds what is stored under these whatever the ids not given.
    Ids are compared exactly and have 1 to 1,000 characters. Opening is left to the first use.
    """

    def __init__(
        self,
        config: MemoryConfig | None = None,
        *,
        embedder: Embedder | None = None,
        check_text: Callable[[Turn], None] | None = None,
    ) -> None:
        self.config = config if config is not None else MemoryConfig()
        self.catalog = Catalog(self.config.data_dir)
        self._remembered = RememberedReads(self.catalog)
        self._embedder = embedder
        self.check_text = check_text
        self._lock = threading.RLock()
        self._embedder_is_recorded = False
        self._device: DeviceChoice | None = None
        self._index: VectorIndex | None = None
        self._index_mark = VectorMark()
        self._index_token: ChangeToken | None = None

    def add(
        self,
        content: Content | Sequence[Content],
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        speaker: str | None = None,
        said_at: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> list[Fact]:
        """Store text, a Turn, a chat message, or a list of these turn by turn; all of it or nothing.

        A chat message is `{"role", "content"}` with an optional `name` (else its role is the
        speaker) and `time`. `speaker`, `said_at` and `metadata` hold for items that do not say
        otherwise. In a list, system, developer and tool messages and assistant messages that only
        call tools are passed over (logged); a list with nothing to store gives []. NUL characters
        are removed from texts, halves of surrogate pairs become U+FFFD, all else is kept. Metadata is
        plain JSON of at most 50 levels, without such halves.

        Raises EmptyText for blank text, InvalidInput for anything else that cannot be stored,
        whatever `check_text` raises, EmbedderMismatch, CatalogError.
        """
        scope = read_scope(user_id, agent_id, run_id)
        turns = read_turns(content, speaker, said_at, metadata)
        if self.check_text is not None:
            for turn in turns:
                self.check_text(turn)
        if not turns:
            return []
        vectors = self._ready_embedder().embed([embedding_text(turn) for turn in turns])
        return self.catalog.add_facts(scope, turns, vectors)

    def search(
        self,
        query: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        top_k: int = 10,
    ) -> list[SearchHit]:
        """The `top_k` facts most similar to `query`, best first, equal ones newest first.

        All facts of the scope where it holds fewer than `top_k`. Raises EmptyText for a blank
        query, UnknownScope for a scope without facts, InvalidInput for a `top_k` below 0.
        """
        return list(self.recall(query, read_scope(user_id, agent_id, run_id), top_k).hits)

    def recall(self, query: str, scope: Scope, top_k: int, model: str | None = None) -> Recall:
        """What `search` finds, with the keys that `model` encoded these facts under; raises the same.

        The facts, their keys and the epoch are of one read.
        """
        text = read_query(query)
        k = _check_count(top_k, "top_k")
        self._check_known(scope)
        if k == 0:
            return Recall((), {}, self.catalog.epoch(scope), 0.0, 0.0)
        embedder = self._ready_embedder()
        start_s = time.perf_counter()
        query_vector = embedder.embed([text])[0]
        embedded_s = time.perf_counter()
        index = self._synced_index()
        hits = index.search(query_vector, k, self._remembered.scope_codes(scope))
        found = self._remembered.found_facts(scope, [hit.id for hit in hits], model)
        # A fact can have been deleted by another process since the search.
        facts = tuple(SearchHit(found.facts[hit.id], hit.score) for hit in hits if hit.id in found.facts)
        done_s = time.perf_counter()
        return Recall(
            facts, found.keys, found.epoch, (embedded_s - start_s) * 1e3, (done_s - embedded_s) * 1e3
        )

    def get(self, fact_id: str) -> Fact:
        """The fact with this id. Raises UnknownFact."""
        fact = self.catalog.get(fact_id)
        if fact is None:
            raise UnknownFact(f"no fact has the id {fact_id!r}; it may have been deleted.")
        return fact

    def get_all(
        self,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        limit: int | None = None,
    ) -> list[Fact]:
        """Facts of a scope in the order they were stored, at most the first `limit`.

        Raises UnknownScope for a scope without facts, InvalidInput for a `limit` below 0.
        """
        scope = read_scope(user_id, agent_id, run_id)
        if limit is not None:
            _check_count(limit, "limit")
        self._check_known(scope)
        return self.catalog.facts(scope, limit)

    def page(
        self,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """Facts of a scope in the order they were stored, `limit` at a time; an unknown scope has none.

        after: `next_cursor` of the page before. Facts that are added, changed or deleted meanwhile
        make no other come twice or be passed over. Raises InvalidInput for a `limit` below 1 or a
        cursor that is none of this memory.
        """
        scope = read_scope(user_id, agent_id, run_id)
        return self.catalog.page(scope, _check_count(limit, "limit", lowest=1), after)

    def update(
        self,
        fact_id: str,
        *,
        text: str | None = None,
        speaker: str | Keep | None = KEEP,
        said_at: str | Keep | None = KEEP,
        metadata: Mapping[str, Any] | None = None,
    ) -> Update:
        """Change a fact under the same id, in the same place of its scope; what is not given stays.

        `metadata` replaces all that there was. Where text, speaker or time change, the fact is
        embedded anew and, as by a deletion, every KV that has seen it is invalid: `keys` and `epochs`
        of the answer go to the engine. Where only metadata change, both are empty. An update that
        changes nothing is none: it has no place in the history.

        Two updates of one fact at a time do not undo each other where they change different things.
        Raises UnknownFact, and otherwise what `add` raises, for what is given in the same way.
        """
        update = None
        while update is None:  # until nobody else changes the fact meanwhile
            fact = self.get(fact_id)
            turn = _changed(fact, text, speaker, said_at, metadata)
            vector = None
            if Wording.of(turn) != Wording.of(fact):
                if self.check_text is not None:
                    self.check_text(turn)
                vector = self._ready_embedder().embed([embedding_text(turn)])[0]
            update = self.catalog.update(fact, turn, vector)
        self._follow_up()
        return update

    def history(self, fact_id: str) -> list[HistoryEvent]:
        """How a fact was added and changed, oldest first. Raises UnknownFact; a deleted one has none."""
        return self.catalog.history(fact_id)

    def delete(self, fact_id: str) -> Deletion:
        """Remove a fact with its history. Raises UnknownFact.

        Returns what was removed, with the keys that an engine has to forget and the new epochs;
        `MemoryLLM.delete` passes them on.
        """
        deletion = self.catalog.delete(fact_id)
        self._follow_up()
        return deletion

    def delete_all(
        self, *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> ScopeDeletion:
        """Remove every fact of a scope with its history, all at once; an unknown scope has none.

        Returns how many there were, with the keys and epochs as `delete` does.
        """
        deletion = self.catalog.delete_all(read_scope(user_id, agent_id, run_id))
        self._follow_up()
        return deletion

    def count(
        self, *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> int:
        """Number of facts of a scope, 0 for an unknown one."""
        return self.catalog.count(read_scope(user_id, agent_id, run_id))

    def epoch(
        self, *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> int:
        """Memory epoch of a scope: rises with every deletion and rewording in it; 0 for an unknown one."""
        return self.catalog.epoch(read_scope(user_id, agent_id, run_id))

    def load(self) -> None:
        """Load the embedder and read the index now instead of at first use. Raises what they raise."""
        self._ready_embedder().embed(["a first text takes longer"])
        self._synced_index()

    def close(self) -> None:
        """Close the catalog and free the index. May be called twice."""
        with self._lock:
            self._index = None
        self.catalog.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_known(self, scope: Scope) -> None:
        if self._remembered.has_facts(scope):
            return
        # Only a number: the ids of other users are not for everyone's eyes.
        raise UnknownScope(
            f"no fact is stored under {scope.describe()}; the catalog holds facts of "
            f"{self.catalog.count_scopes()} other scopes. Ids are compared exactly: check their "
            "spelling, or add a fact first."
        )

    def _ready_embedder(self) -> Embedder:
        """The embedder, made on first use and known to fit the vectors of the catalog."""
        with self._lock:
            if self._embedder is None:
                from inferscale.retrieval import open_embedder

                self._embedder = open_embedder(self.config.embedder, self._chosen_device(), _log.info)
            if not self._embedder_is_recorded:
                self.catalog.record_embedder(self._embedder.name, self._embedder.dim)
                self._embedder_is_recorded = True
            return self._embedder

    def _chosen_device(self) -> DeviceChoice:
        """One for embedder and index: where the one has to leave a GPU, so does the other."""
        with self._lock:
            if self._device is None:
                from inferscale.retrieval import DeviceChoice

                self._device = DeviceChoice(self.config.embedder_device)
            return self._device

    def _follow_up(self) -> None:
        """Take what was just changed or removed out of the index as well, where there is one."""
        with self._lock:
            if self._index is not None:
                self._synced_index()

    def _synced_index(self) -> VectorIndex:
        """The index with everything that this and other processes have stored and removed so far.

        It is fed from the catalog only, so that writes of this process need no path of their own.
        """
        with self._lock:
            if self._index is None:
                from inferscale.retrieval import VectorIndex

                self._index = VectorIndex(self._ready_embedder().dim, self._chosen_device())
                self._index_mark, self._index_token = VectorMark(), None
            # Taken before reading: what is written in between is then read again, not missed.
            token = self.catalog.change_token()
            if token == self._index_token:
                return self._index
            while True:
                changes = self.catalog.vector_changes(self._index_mark)
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
    time = f"({turn.said_at})" if turn.said_at is not None else None
    source = " ".join(part for part in (turn.speaker, time) if part is not None)
    return f"{source}: {turn.text}" if source else turn.text


def _changed(
    fact: Fact,
    text: str | None,
    speaker: str | Keep | None,
    said_at: str | Keep | None,
    metadata: Mapping[str, Any] | None,
) -> Turn:
    """What a fact says after an update. Only what is given is checked and cleaned: the rest was before."""
    [given] = read_turns(
        Turn(
            "unchanged" if text is None else text,
            None if speaker is KEEP else speaker,
            None if said_at is KEEP else said_at,
            {} if metadata is None else metadata,  # type: ignore[arg-type]  # checked there
        )
    )
    return Turn(
        fact.text if text is None else given.text,
        fact.speaker if speaker is KEEP else given.speaker,
        fact.said_at if said_at is KEEP else given.said_at,
        fact.metadata if metadata is None else given.metadata,
    )


def _check_count(value: int, name: str, lowest: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise InvalidInput(f"{name} is {value!r}; allowed are whole numbers from {lowest}.")
    return value
