"""Which passes to run: for what is new, for what a chat missed, for its turns, or for all that is missing.

Reads the catalog through the encoder and asks the engine what its pool holds; runs nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from inferscale.conversation import Conversation
from inferscale.encoder import EncodeJob, Encoder
from inferscale.facts import Scope
from inferscale.plan import Span
from inferscale.pool.shared_store import PARTS
from inferscale.runtime.residency import ResidencyClient

logger = logging.getLogger(__name__)

_KEYS_AT_ONCE = 10_000
_MAX_WAITING = 64
"""Conversations that wait for a pass."""
_MAX_KEYS = 2**18
"""Keys of turns that are known; more than any pool has pages."""


class JobChooser:
    """Chooses jobs of one encoder for one engine. As safe from several threads as these two are."""

    def __init__(self, encoder: Encoder, residency: ResidencyClient) -> None:
        self.encoder = encoder
        self._residency = residency

    def resident(self, keys: Sequence[str]) -> set[str]:
        """Which of the keys are in the pool. Raises EngineError where the engine does not answer."""
        there: set[str] = set()
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            asked = list(keys[start : start + _KEYS_AT_ONCE])
            answers = self._residency.resident(asked)
            there.update(key for key, yes in zip(asked, answers, strict=True) if yes)
        return there

    def strays(self) -> list[str]:
        """Keys of segments on disk that no fact has: it was deleted while the engine did not run, or they
        were turns of a talk. Raises EngineError where the engine does not answer."""
        return self._unknown(self._residency.keys("disk"))

    def shared_strays(self) -> Iterator[list[str]]:
        """The same of the store that servers share, a part at a time; none, and a warning, where it is of
        another catalog. Raises EngineError."""
        if not self._residency.owns_shared(self.encoder.catalog.identity()):
            logger.warning(
                "The shared KV is of servers with another catalog, so what belongs to no fact is not "
                "removed. Give servers that share KV one catalog, or others another location."
            )
            return
        for part in PARTS:
            strays = self._unknown(self._residency.shared_keys(part))
            if strays:
                yield strays

    def _unknown(self, found: Sequence[str]) -> list[str]:
        """Those of the keys that no fact has."""
        strays: list[str] = []
        for start in range(0, len(found), _KEYS_AT_ONCE):
            asked = found[start : start + _KEYS_AT_ONCE]
            known = self.encoder.catalog.passes.known_keys(asked) | {self.encoder.anchor_key}
            strays += [key for key in asked if key not in known]
        return strays

    def for_repair(self, scope: Scope, fact_ids: Set[str]) -> list[EncodeJob]:
        """The passes that hold those of these facts that are still missing, new ones where a fact was never
        encoded. Where the pool has no free pages for all facts of a mixed pass, of that one only these are
        captured: else passes of many groups push out what is asked for. Raises EngineError where the engine
        does not answer."""
        jobs = self.encoder.new_jobs(scope, fact_ids)
        keys = self.encoder.keys(fact_ids)
        there = self.resident(list(keys.values()))
        missing = [id for id, key in keys.items() if key not in there]
        jobs += self._rebuilds(missing, jobs)
        kept = self._trimmed(jobs, self.encoder.keys(fact_ids))
        # The new pass of a fact that has other KV counts only once it is whole: such are not among the kept.
        return without_repetitions([*kept, *self._rebuilds(missing, kept)])

    def to_warm(self, scope: Scope) -> list[EncodeJob]:
        """Passes of every fact of the scope that is not resident, as far as the pool has free pages."""
        jobs = self.encoder.new_jobs(scope)
        catalog = self.encoder.catalog
        facts = [*catalog.facts(scope), *catalog.blocks(scope).blocks]
        keys = self.encoder.keys(fact.id for fact in facts)
        there = self.resident(list(keys.values()))
        jobs += self._rebuilds((id for id, key in keys.items() if key not in there), jobs)
        return without_repetitions(self._fitting(jobs))

    def for_turns(self, conversation: Conversation) -> list[EncodeJob]:
        """The pass that brings what the pool lacks of a conversation into it, as far as it fits the model.

        It runs behind the head and the turns that are there already, so it computes the new turn's tokens
        only, and without facts: what it captures is then the same whatever facts a chat finds. Its blocks
        in vLLM's prefix cache are under the scope's salt for injecting requests; those begin with the same
        head and go on with facts, and what is injected here is what the keys say. It does not run where
        something of the scope was deleted since the chat was planned: what was said may be just that. Raises
        EngineError where the engine does not answer.
        """
        there = self.resident([segment.key for segment in conversation.segments])
        ids: list[int] = []
        captures: list[Span] = []
        num_leading = num_computed = 0
        for place, segment in enumerate(conversation.segments):
            start = len(ids)
            ids += segment.token_ids
            if len(ids) > self.encoder.max_tokens:
                break
            if segment.key not in there:
                captures.append(Span(segment.key, start, len(ids)))
                num_computed = len(ids)
            elif num_leading == place:
                num_leading += 1
        if not captures:
            return []
        job = EncodeJob(
            conversation.scope,
            tuple(ids[:num_computed]),
            tuple(captures),
            conversation.epoch,
            conversation.segments[:num_leading],
            of_facts=False,
        )
        return [job]

    def note_done(self, jobs: Iterable[EncodeJob]) -> None:
        """All of these jobs was captured: mixed passes of which these are both directions, with all facts,
        count from now on."""
        spans = [span for job in jobs for span in job.captures]
        first, second = ({span.key for span in spans if span.part == part} for part in (1, 2))
        if keys := first & second:
            self.encoder.catalog.passes.mark_done(self.encoder.encodings_of, list(keys))

    def superseded(self, jobs: Iterable[EncodeJob]) -> list[str]:
        """Keys in the pool that nobody asks for any more, since mixed passes among these jobs are done and
        have new ones. Raises EngineError where the engine does not answer."""
        keys = [span.key for job in jobs for span in job.captures if span.part == 2]
        if not keys:
            return []
        old = self.encoder.catalog.passes.superseded_keys(self.encoder.encodings_of, keys)
        there = self.resident(old) if old else set()
        return [key for key in old if key in there]

    def _rebuilds(self, fact_ids: Iterable[str], jobs: Sequence[EncodeJob]) -> list[EncodeJob]:
        planned = {fact_id for job in jobs for fact_id in job.fact_ids}
        return self.encoder.rebuild_jobs(fact_id for fact_id in fact_ids if fact_id not in planned)

    def _trimmed(self, jobs: list[EncodeJob], keys: Mapping[str, str]) -> list[EncodeJob]:
        """Mixed passes capture only what `keys` (fact id → key) name, but for those all of whose facts find
        free pages beside that; all other jobs as they are."""
        if not any(job.part for job in jobs):
            return jobs
        wanted = {key: fact_id for fact_id, key in keys.items()}
        stats = self._residency.stats()
        lengths = {span.key: span.end - span.start for job in jobs for span in job.captures}
        there = self.resident(list(lengths))
        size = stats["page_size_tokens"]
        pages = {key: -(-length // size) for key, length in lengths.items() if key not in there}
        extra = {span.key for job in jobs for span in job.captures[1:] if job.part}.difference(wanted)
        free = stats["free_pages"] - sum(num for key, num in pages.items() if key not in extra)
        kept: list[EncodeJob] = []
        for together in in_pairs(jobs):
            needed = sum(pages.get(span.key, 0) for span in together[0].captures if span.key in extra)
            if needed <= max(free, 0):
                kept += together
                free -= needed
            else:
                kept += [part for job in together if (part := _only(job, wanted)).fact_ids]
        return kept

    def _fitting(self, jobs: list[EncodeJob]) -> list[EncodeJob]:
        """The newest jobs that fit into the pool's free pages, in their order; of a mixed pass both."""
        stats = self._residency.stats()
        pages, size = stats["free_pages"], stats["page_size_tokens"]
        there = self.resident(list({span.key for job in jobs for span in job.captures}))
        kept: list[tuple[EncodeJob, ...]] = []
        for together in reversed(in_pairs(jobs)):
            spans = (span for job in together for span in job.captures)
            new = {span.key: span.end - span.start for span in spans if span.key not in there}
            pages -= sum(-(-num_tokens // size) for num_tokens in new.values())
            there.update(new)
            if pages < 0:
                break
            kept.append(together)
        return [job for together in reversed(kept) for job in together]


class TurnBook:
    """Which conversations wait to be encoded, and which keys a deletion has to take back. One thread only.

    A turn is worth its pass only until the next question, and passes give way to chats: the latest is encoded
    first, and where more come than run, the oldest are left out and their turns prefilled. A later turn takes
    its conversation's place. The keys of a scope are known until so many others came that the pool, which
    drops what was not used for longest, holds them no more.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Conversation] = OrderedDict()
        self._keys: OrderedDict[Scope, set[str]] = OrderedDict()  # the scope that spoke last is the last
        self._num_keys = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def put(self, conversation: Conversation) -> None:
        for segment in conversation.segments:
            self._waiting.pop(segment.key, None)
        self._waiting[conversation.name] = conversation
        while len(self._waiting) > _MAX_WAITING:
            self._waiting.popitem(last=False)

    def take(self) -> Conversation | None:
        """The next one to encode; its keys are known from now on."""
        if not self._waiting:
            return None
        conversation = self._waiting.popitem()[1]
        keys = self._keys.setdefault(conversation.scope, set())
        self._keys.move_to_end(conversation.scope)
        self._num_keys -= len(keys)
        keys.update(segment.key for segment in conversation.segments if segment.kind == "turn")
        self._num_keys += len(keys)
        while self._num_keys > _MAX_KEYS and len(self._keys) > 1:
            self._num_keys -= len(self._keys.popitem(last=False)[1])
        return conversation

    def forget(self, scopes: Iterable[Scope]) -> list[str]:
        """Keys of all turns of these scopes that may be in the pool. What waits is older than the deletion
        that this is for, and does not run."""
        found = [self._keys.pop(scope, set()) for scope in scopes]
        self._num_keys -= sum(map(len, found))
        return [key for keys in found for key in keys]


def _only(job: EncodeJob, wanted: Mapping[str, str]) -> EncodeJob:
    """The job, capturing nothing but the anchor and these facts. wanted: key → fact id."""
    anchor, *spans = job.captures
    spans = [span for span in spans if span.key in wanted]
    return job._replace(captures=(anchor, *spans), fact_ids=tuple(wanted[span.key] for span in spans))


def without_repetitions(jobs: Iterable[EncodeJob]) -> list[EncodeJob]:
    """Jobs without those all of whose spans earlier ones capture, as where a fact is asked for twice."""
    kept: list[EncodeJob] = []
    captured: set[tuple[str, int]] = set()
    for job in jobs:
        spans = [(span.key, span.part) for span in job.captures]
        if not captured.issuperset(spans):
            kept.append(job)
            captured.update(spans)
    return kept


def in_pairs(jobs: Iterable[EncodeJob]) -> list[tuple[EncodeJob, ...]]:
    """The two jobs of a mixed pass together, the second behind the first; each other job by itself."""
    pairs: list[tuple[EncodeJob, ...]] = []
    for job in jobs:
        if job.part == 2 and pairs and len(pairs[-1]) == 1 and pairs[-1][0].part == 1:
            pairs[-1] += (job,)
        else:
            pairs.append((job,))
    return pairs
