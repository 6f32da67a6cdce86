"""Runs encode jobs through the offline engine: after an add, after a chat, or all at once (`warm`).

KV is a cache of the text: a job that fails costs time later, never the caller's facts or answer,
so failures are logged and counted here and do not come out as errors.

Jobs run as one stream: several are always in flight, so that the engine's steps are full, and the next
is submitted as one finishes. Their order does not matter, but that of the two jobs of a mixed pass, which
stand one behind the other: each pass computes its own window and captures its own spans, under keys that say
what they have seen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import closing
from typing import NamedTuple

from inferscale.encode_jobs import JobChooser, without_repetitions
from inferscale.encoder import EncodeJob, Encoder
from inferscale.facts import Fact, Scope
from inferscale.offline import Generation, GenerationRequest, OfflineEngine
from inferscale.plan import Order

logger = logging.getLogger(__name__)

_STEPS_IN_FLIGHT = 3
"""Full steps of the engine that are submitted ahead: one runs, the others wait for it."""
_MAX_JOBS_IN_FLIGHT = 256
_PROGRESS_EVERY_S = 0.5
# A pass is run for its KV; the token that it generates is not even turned into text.
_SAMPLING = {"detokenize": False}


class EncodeProgress(NamedTuple):
    """How far encoding is.

    stored_tokens: of facts whose KV is in the pool now, the anchor not counted. computed_tokens: of
    all passes, so computed / stored is the cost of the window policy. num_failed: spans that found
    no room in the pool, or whose pass failed or was overtaken by a deletion; their facts stay text.
    stored_facts: those of stored_tokens.
    """

    done_jobs: int
    jobs: int
    stored_tokens: int
    computed_tokens: int
    seconds: float
    num_failed: int = 0
    stored_facts: int = 0

    @property
    def stored_tokens_per_s(self) -> float:
        return self.stored_tokens / self.seconds if self.seconds else 0.0

    @property
    def stored_facts_per_s(self) -> float:
        return self.stored_facts / self.seconds if self.seconds else 0.0


Progress = Callable[[EncodeProgress], None]
_NOTHING = EncodeProgress(0, 0, 0, 0, 0.0)


class EncodeRunner:
    """Jobs of one encoder on one engine. Not thread-safe; `MemoryLLM` holds its lock.

    is_off: nothing is encoded, since no use is made of it.
    """

    def __init__(self, engine: OfflineEngine, encoder: Encoder) -> None:
        self.engine = engine
        self.encoder = encoder
        self.jobs = JobChooser(encoder, engine.residency)
        self.is_off = False

    def encode_new(
        self, scope: Scope, progress: Progress | None = None, only: Set[str] | None = None
    ) -> EncodeProgress:
        """Encode what was never encoded in this scope. only: of these facts and those said right behind."""
        if self.is_off:
            return _NOTHING
        return self.run(self.encoder.new_jobs(scope, only, with_followers=only is not None), progress)

    def repair(self, scope: Scope, missing: Sequence[Fact]) -> EncodeProgress:
        """Run the passes that hold the missing facts, new ones where a fact was never encoded."""
        if self.is_off:
            return _NOTHING
        return self.run(self.jobs.for_repair(scope, {fact.id for fact in missing}))

    def warm(self, scope: Scope, progress: Progress | None = None) -> EncodeProgress:
        """Encode every fact of the scope that is not resident, as far as the pool has free pages."""
        if self.is_off:
            return _NOTHING
        return self.run(self.jobs.to_warm(scope), progress)

    def run(self, jobs: Sequence[EncodeJob], progress: Progress | None = None) -> EncodeProgress:
        """Run jobs; `progress` is called as they finish, at most every half second, and at the end.

        A job all of whose spans earlier ones capture, as where two scopes hold the same
        conversation, is left out. What mixed passes replace leaves the pool at the end, where all of such a
        pass was captured. An error of the engine comes out; what was captured before stays.
        """
        jobs = without_repetitions(jobs)
        start_s = told_s = time.perf_counter()
        state = EncodeProgress(0, len(jobs), 0, 0, 0.0)
        sent: list[EncodeJob] = []
        whole: list[EncodeJob] = []
        stream = self.engine.stream(
            self._requests(jobs, sent),
            max_in_flight=_MAX_JOBS_IN_FLIGHT,
            max_tokens_in_flight=_STEPS_IN_FLIGHT * self.engine.step_tokens,
        )
        try:
            with closing(stream) as finished:
                for place, result in finished:
                    now_s = time.perf_counter()
                    state = _after(state, sent[place], result, now_s - start_s)
                    if not _num_failed(sent[place], result):
                        whole.append(sent[place])
                    if progress is not None and (
                        now_s - told_s >= _PROGRESS_EVERY_S or state.done_jobs == len(jobs)
                    ):
                        progress(state)
                        told_s = now_s
        finally:
            self.jobs.note_done(whole)
        if len(sent) < len(jobs):
            lost = sum(len(job.captures) for job in jobs) - sum(len(job.captures) for job in sent)
            logger.info("%d passes were planned before a deletion and did not run", len(jobs) - len(sent))
            state = state._replace(done_jobs=len(jobs), num_failed=state.num_failed + lost)
            if progress is not None:
                progress(state)
        elif state.num_failed:
            logger.warning(
                "%d of %d segments were not captured and stay text; is the pool too small?",
                state.num_failed,
                sum(len(job.captures) for job in jobs),
            )
        if superseded := self.jobs.superseded(sent):
            self.engine.order(Order("forget", tuple(superseded)))
        return state

    def _requests(self, jobs: Iterable[EncodeJob], sent: list[EncodeJob]) -> Iterator[GenerationRequest]:
        """Made one by one and noted in `sent`, without those that a deletion of any process has overtaken."""
        for job in jobs:
            if self.encoder.is_outdated(job):
                continue
            sent.append(job)
            yield GenerationRequest(job.token_ids, plan=self.encoder.plan_of(job), sampling=_SAMPLING)


def _after(state: EncodeProgress, job: EncodeJob, result: Generation, seconds: float) -> EncodeProgress:
    num_failed = _num_failed(job, result)
    return EncodeProgress(
        state.done_jobs + 1,
        state.jobs,
        state.stored_tokens + (0 if num_failed else job.num_fact_tokens),
        state.computed_tokens + len(job.token_ids),
        seconds,
        state.num_failed + num_failed,
        state.stored_facts + (0 if num_failed else job.num_facts),
    )


def _num_failed(job: EncodeJob, result: Generation) -> int:
    """Spans of a job that are not in the pool after its pass."""
    captured = int((result.outcome or {}).get("captured", 0))
    return len(job.captures) - captured if result.finish_reason != "error" else len(job.captures)
