"""Runs encode jobs through the offline engine: after an add, after a chat, or all at once (`warm`).

KV is a cache of the text: a job that fails costs time later, never the caller's facts or answer,
so failures are logged and counted here and do not come out as errors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from inferscale.encoder import EncodeJob, Encoder
from inferscale.facts import Fact, Scope
from inferscale.offline import Generation, GenerationRequest, OfflineEngine

logger = logging.getLogger(__name__)

_JOBS_AT_ONCE = 8


class EncodeProgress(NamedTuple):
    """How far encoding is.

    stored_tokens: of facts whose KV is in the pool now, the anchor not counted. computed_tokens: of
    all passes, so computed / stored is the cost of the window policy. num_failed: spans that found
    no room in the pool, or whose pass failed; their facts stay text.
    """

    done_jobs: int
    jobs: int
    stored_tokens: int
    computed_tokens: int
    seconds: float
    num_failed: int = 0


Progress = Callable[[EncodeProgress], None]


class EncodeRunner:
    """Jobs of one encoder on one engine. Not thread-safe; `MemoryLLM` holds its lock."""

    def __init__(self, engine: OfflineEngine, encoder: Encoder) -> None:
        self.engine = engine
        self.encoder = encoder

    def resident(self, keys: Sequence[str]) -> set[str]:
        """Which of the keys are in the pool. Raises EngineError where the engine does not answer."""
        return {key for key, yes in zip(keys, self.engine.residency.resident(keys), strict=True) if yes}

    def encode_new(self, scope: Scope, progress: Progress | None = None) -> EncodeProgress:
        """Encode what was never encoded in this scope."""
        return self.run(self.encoder.new_jobs(scope), progress)

    def repair(self, scope: Scope, missing: Sequence[Fact]) -> EncodeProgress:
        """Run the passes that hold the missing facts, new ones where a fact was never encoded."""
        ids = {fact.id for fact in missing}
        jobs = self.encoder.new_jobs(scope, ids)
        return self.run([*jobs, *self._rebuilds(ids, jobs)])

    def warm(self, scope: Scope, progress: Progress | None = None) -> EncodeProgress:
        """Encode every fact of the scope that is not resident, as far as the pool has free pages."""
        jobs = self.encoder.new_jobs(scope)
        facts = self.encoder.catalog.facts(scope)
        keys = self.encoder.keys(fact.id for fact in facts)
        there = self.resident(list(keys.values()))
        jobs += self._rebuilds((id for id, key in keys.items() if key not in there), jobs)
        return self.run(self._fitting(jobs), progress)

    def _rebuilds(self, fact_ids: Iterable[str], jobs: Sequence[EncodeJob]) -> list[EncodeJob]:
        planned = {span.key for job in jobs for span in job.captures}
        keys = self.encoder.keys(fact_ids)
        return self.encoder.rebuild_jobs(id for id, key in keys.items() if key not in planned)

    def _fitting(self, jobs: list[EncodeJob]) -> list[EncodeJob]:
        """The newest jobs that fit into the pool's free pages, in their order."""
        stats = self.engine.residency.stats()
        pages, size = stats["free_pages"], stats["page_size_tokens"]
        there = self.resident(list({span.key for job in jobs for span in job.captures}))
        kept = []
        for job in reversed(jobs):
            new = {span.key: span.end - span.start for span in job.captures if span.key not in there}
            pages -= sum(-(-num_tokens // size) for num_tokens in new.values())
            there.update(new)
            if pages < 0:
                break
            kept.append(job)
        return kept[::-1]

    def run(self, jobs: Sequence[EncodeJob], progress: Progress | None = None) -> EncodeProgress:
        """Run jobs, several in one batch of the engine; `progress` is called after each batch."""
        start_s = time.perf_counter()
        state = EncodeProgress(0, len(jobs), 0, 0, 0.0)
        for start in range(0, len(jobs), _JOBS_AT_ONCE):
            batch = jobs[start : start + _JOBS_AT_ONCE]
            requests = [GenerationRequest(job.token_ids, plan=self.encoder.plan_of(job)) for job in batch]
            results = self.engine.generate(requests)
            failed = [_num_failed(job, result) for job, result in zip(batch, results, strict=True)]
            state = EncodeProgress(
                start + len(batch),
                len(jobs),
                state.stored_tokens
                + sum(job.num_fact_tokens for job, lost in zip(batch, failed, strict=True) if not lost),
                state.computed_tokens + sum(len(job.token_ids) for job in batch),
                time.perf_counter() - start_s,
                state.num_failed + sum(failed),
            )
            if progress is not None:
                progress(state)
        if state.num_failed:
            logger.warning(
                "%d of %d segments were not captured and stay text; is the pool too small?",
                state.num_failed,
                sum(len(job.captures) for job in jobs),
            )
        return state


def _num_failed(job: EncodeJob, result: Generation) -> int:
    """Spans of a job that are not in the pool after its pass."""
    captured = int((result.outcome or {}).get("captured", 0))
    return len(job.captures) - captured if result.finish_reason != "error" else len(job.captures)
