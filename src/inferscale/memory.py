"""Memory: add, search, get, change and delete facts of users, agents and runs, on one data folder.

Brings catalog and search together. Knows nothing of models, tokens and KV: `MemoryLLM`
and the server take facts from here and the catalog's bookkeeping for what they encode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from inferscale.catalog import (
    Added,
    Catalog,
    Deletion,
    FoundBlocks,
    Imported,
    Quota,
    RememberedReads,
    ScopeDeletion,
    StoredFact,
    Update,
)
from inferscale.catalog_url import find_url
from inferscale.config import MemoryConfig
from inferscale.encryption import find_key
from inferscale.errors import InvalidInput, UnknownFact
from inferscale.facts import (
    KEEP,
    ChangeEvent,
    Fact,
    HistoryEvent,
    Keep,
    Page,
    Scope,
    SearchHit,
    Turn,
    Wording,
)
from inferscale.filters import Filter, read_filter
from inferscale.search import FactSearch, Recall, embedding_text
from inferscale.turns import (
    Content,
    from_assistant,
    read_block_name,
    read_change,
    read_count,
    read_query,
    read_scope,
    read_turns,
)

if TYPE_CHECKING:
    from inferscale.extraction import ExtractionModel, Inference
    from inferscale.retrieval import Embedder
    from inferscale.retrieval.reranker import Reranker


class Memory:
    """Long-term memory in `config.data_dir`, or in the database `config.catalog`.

    Safe from several threads and several processes.

    embedder, reranker: used instead of those that `config` names. check_text: called with every
    turn before anything of a call is stored; it refuses one by raising, such as TextTooLong.
    extraction: a model, or an `Inference` with a model and how it is asked, for `add(…, infer=True)`.

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
        reranker: Reranker | None = None,
        extraction: ExtractionModel | Inference | None = None,
    ) -> None:
        self.config = config if config is not None else MemoryConfig()
        self.extraction = extraction
        quota = Quota(self.config.max_facts_per_user, self.config.max_bytes_per_user)
        self.data_dir = Path(self.config.data_dir)
        key, url = find_key(self.config.encryption_key_file), find_url(self.config.catalog)
        self.catalog = Catalog(self.data_dir, quota, key, url)
        self.check_text = check_text
        self._remembered = RememberedReads(self.catalog)
        self._search = FactSearch(self.catalog, self._remembered, self.config, embedder, reranker)
        self._lock = threading.Lock()

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
        expires_at: float | str | None = None,
        infer: bool = False,
    ) -> Added:
        """Store text, a Turn, a chat message, or a list of these turn by turn; all of it or nothing.

        A chat message is `{"role", "content"}` with an optional `name` (else its role is the speaker) and
        `time`. `speaker`, `said_at`, `metadata` and `expires_at` (Unix time or a date such as ISO 8601) hold
        for items that do not say otherwise. In a list, system, developer and tool messages and assistant
        messages that only call tools are passed over (logged); a list with nothing to store gives []. NUL
        characters are removed from texts, halves of surrogate pairs become U+FFFD, all else is kept. Metadata
        is plain JSON of at most 50 levels, without such halves.

        infer: have `extraction` make short facts of it instead, which supersede or end those of exactly this
        scope that they contradict and are not stored where they are known. What assistants say is no source.
        Turns that no fact could be made of are stored as they are, with a `warning`. The answer's `keys` and
        `epochs` go to the engine as those of a deletion.

        Raises EmptyText for blank text, InvalidInput for anything else that cannot be stored,
        whatever `check_text` raises, EmbedderMismatch, CatalogError.
        """
        scope = read_scope(user_id, agent_id, run_id)
        turns = read_turns(content, speaker, said_at, metadata, expires_at)
        self._check(turns)
        if infer:
            return self._infer(scope, turns, from_assistant(content))
        if not turns:
            return Added()
        facts = self.catalog.add_facts(scope, turns, self._search.embed(turns))
        return Added(facts, [ChangeEvent("ADD", fact.id, fact.text) for fact in facts])

    def _infer(self, scope: Scope, turns: Sequence[Turn], is_assistant: Sequence[bool]) -> Added:
        from inferscale.extraction import Inference
        from inferscale.extraction.extract import Said

        with self._lock:
            if self.extraction is None:
                raise InvalidInput(
                    "infer=True needs a model that extracts facts: give Memory one as `extraction`, use "
                    "MemoryLLM or the server, or leave infer out to store what was said."
                )
            if not isinstance(self.extraction, Inference):
                self.extraction = Inference(self.extraction)
            inference = self.extraction
        talk = [Said(turn, not assistant) for turn, assistant in zip(turns, is_assistant, strict=True)]
        embedder = self._search.ready_embedder()
        added = inference.add(self.catalog, embedder.embed, embedding_text, scope, talk)
        self._search.follow()
        return added

    def _check(self, turns: Sequence[Turn]) -> None:
        if self.check_text is not None:
            for turn in turns:
                self.check_text(turn)

    def search(
        self,
        query: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        top_k: int = 10,
        filters: Mapping[str, Any] | None = None,
    ) -> list[SearchHit]:
        """The `top_k` facts that fit `query` best, best first, equal ones newest first.

        How they are ranked says `config.retrieval`; a hit's score is its cosine similarity, whatever its
        place. filters: on metadata, times and speaker, in the form that `inferscale.filters` describes;
        `top_k` counts what passes. All facts of the scope where fewer do. What has expired is not found, nor
        are core blocks. Raises EmptyText for a blank query, UnknownScope for a scope without facts,
        InvalidInput for a `top_k` below 0 or bad filters.
        """
        scope = read_scope(user_id, agent_id, run_id)
        return list(self.recall(query, scope, top_k, within=read_filter(filters)).hits)

    def recall(
        self,
        query: str,
        scope: Scope,
        top_k: int,
        model: str | None = None,
        within: Filter | None = None,
    ) -> Recall:
        """What `search` finds, with the keys that `model` encoded these facts under; raises the same.

        within: the filter, already read. The facts, their keys and the epoch are of one read.
        """
        return self._search.recall(read_query(query), scope, read_count(top_k, "top_k"), model, within)

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
        filters: Mapping[str, Any] | None = None,
    ) -> list[Fact]:
        """Facts of a scope in the order they were stored, at most the first `limit` that pass the filters.

        What has expired and core blocks are none of them. Raises UnknownScope for a scope without facts,
        InvalidInput for a `limit` below 0 or bad filters.
        """
        scope = read_scope(user_id, agent_id, run_id)
        if limit is not None:
            read_count(limit, "limit")
        self._search.check_known(scope)
        return self.catalog.facts(scope, limit, within=read_filter(filters))

    def page(
        self,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        limit: int = 100,
        after: str | None = None,
        filters: Mapping[str, Any] | None = None,
    ) -> Page:
        """As `get_all`, `limit` facts at a time; an unknown scope has none.

        after: `next_cursor` of the page before, with the same filters. Facts that are added, changed or
        deleted meanwhile make no other come twice or be passed over. Raises InvalidInput for a `limit` below
        1 or a cursor that is none of this memory.
        """
        scope = read_scope(user_id, agent_id, run_id)
        return self.catalog.page(scope, read_count(limit, "limit", lowest=1), after, read_filter(filters))

    def import_facts(self, stored: Sequence[StoredFact], *, replaces: bool = False) -> Imported:
        """Store facts of another memory as they were there, with ids, times and history; all or none.

        They come behind those that are there. A fact whose id or core block is there already is passed
        over; replaces: it takes that one's place. Raises what `add` raises.
        """
        known = set() if replaces else self.catalog.known_ids(item.fact.id for item in stored)
        new = [item for item in stored if item.fact.id not in known]
        num_known = len(stored) - len(new)
        if not new:
            return Imported(0, 0, num_known)
        turns = [Turn(*Wording.of(item.fact)) for item in new if item.has_vector]
        self._check(turns)
        self._check([Turn(*Wording.of(item.fact)) for item in new if item.fact.block and not item.ended])
        imported = self.catalog.import_facts(new, self._search.embed(turns), replaces=replaces)
        self._search.follow()
        return imported._replace(num_skipped=imported.num_skipped + num_known)

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
            turn = read_change(fact, text, speaker, said_at, metadata)
            vector = None
            if Wording.of(turn) != Wording.of(fact):
                self._check([turn])
                vector = self._search.embed([turn])[0]
            update = self.catalog.update(fact, turn, vector)
        self._search.follow()
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
        self._search.follow()
        return deletion

    def delete_all(
        self, *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> ScopeDeletion:
        """Remove every fact of a scope with its history, all at once; an unknown scope has none.

        Returns how many there were, with the keys and epochs as `delete` does.
        """
        deletion = self.catalog.delete_all(read_scope(user_id, agent_id, run_id))
        self._search.follow()
        return deletion

    def is_purge_due(self) -> bool:
        """Whether something of anybody has expired and is not deleted yet. Cheap."""
        return self._search.is_purge_due()

    def purge_expired(self) -> ScopeDeletion:
        """Delete what has expired, of everybody, as `delete` does; it is not found since it expired.

        Returns how many there were, with the keys and epochs as `delete` does.
        """
        deletion = self.catalog.purge_expired()
        if deletion.num_facts:
            self._search.follow()
        return deletion

    def set_block(
        self,
        name: str,
        text: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
    ) -> Update:
        """Store a core block, which stands in front of the facts of every chat whose scope covers this one.

        It is a fact, of which a scope has one of each name: the one that is there is updated. It is neither
        searched nor listed, counts in no `top_k`, and is encoded alone, so a change invalidates no other
        fact. Returns what `update` returns. Raises what `add` raises for the text, InvalidInput for a name.
        """
        scope = read_scope(user_id, agent_id, run_id)
        [turn] = read_turns(Turn(text, read_block_name(name)))
        self._check([turn])
        return self.catalog.set_block(scope, name, turn.text)

    def get_blocks(
        self, *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> list[Fact]:
        """The core blocks of a chat with this scope, by name; none for an unknown one."""
        return list(self.blocks(read_scope(user_id, agent_id, run_id)).blocks)

    def blocks(self, scope: Scope, model: str | None = None) -> FoundBlocks:
        """What `get_blocks` finds, with the keys that `model` encoded it under and the scope's epoch."""
        return self._remembered.blocks(scope, model)

    def delete_block(
        self,
        name: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
    ) -> Deletion:
        """Remove the core block of this name from exactly this scope. Returns and raises as `delete`."""
        return self.catalog.delete_block(read_scope(user_id, agent_id, run_id), read_block_name(name))

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
        self._search.load()

    def close(self) -> None:
        """Close the catalog and free the index. May be called twice."""
        self._search.close()
        self.catalog.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
