"""`inferscale bench encode`: how fast facts become KV in the pool, and the passes of a workload.

A pass is *head · window · facts*, or a mixed one (see `windows`); all are handed to the engine with many in
flight, so that its scheduler fills every step. The baseline computes the same passes and keeps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from inferscale.bench.engine import BenchEngine
from inferscale.bench.harness import BenchRun, Say
from inferscale.bench.load import SAMPLING, drive
from inferscale.bench.options import EncodeOptions
from inferscale.bench.workload import Asked, Ids, Workload
from inferscale.errors import EngineError
from inferscale.offline import GenerationRequest
from inferscale.pass_runs import pass_runs
from inferscale.plan import Order, Plan, Segment, Span, scope_digest, segment_key
from inferscale.windows import EncodePass, WindowPolicy, mixed_groups, plan_passes, split_group

_IN_FLIGHT = 256
_KEYS_AT_ONCE = 2000


class EncodeJob(NamedTuple):
    """One pass of a user. captures: the head, then the facts."""

    user: int
    token_ids: Ids
    captures: tuple[Span, ...]

    @property
    def stored(self) -> list[Span]:
        """The facts that can be used once it has run: not those of a mixed pass's first direction."""
        return [span for span in self.captures[1:] if span.part != 1]

    @property
    def num_fact_tokens(self) -> int:
        return sum(span.end - span.start for span in self.stored)


class EncodeCost(NamedTuple):
    """What encoding took. stored_tokens: of facts; pass_tokens: of all passes; computed_tokens: those of
    them that vLLM's prefix cache did not supply."""

    passes: int
    facts: int
    stored_tokens: int
    pass_tokens: int
    computed_tokens: int
    seconds: float


class Encoding:
    """Passes, keys and plans of a workload's facts on one engine; pure but for what it remembers.

    model: the engine's fingerprint. max_tokens: of one pass.
    """

    def __init__(self, workload: Workload, model: str, policy: WindowPolicy, max_tokens: int) -> None:
        self.workload = workload
        self.model = model
        # As the memory does: for mixed passes there are enough facts, or it makes none.
        is_mixed = 0 < policy.mixed <= 2 * workload.num_facts
        self.policy = policy if is_mixed else replace(policy, mixed=0)
        self.max_tokens = max_tokens
        self.head_key = segment_key(model, (), workload.head)
        self._keys: dict[int, dict[int, str]] = {}

    def jobs(self, user: int) -> list[EncodeJob]:
        """The passes that capture all facts of a user, and the head."""
        head, facts = self.workload.head, self.workload.facts(user)
        jobs = []
        keys = self._keys.setdefault(user, {})
        for encode_pass in self._passes([len(ids) for ids in facts], facts):
            items = encode_pass.items
            num_window, directions = len(encode_pass.window), 2 if self.policy.mixed else 1
            items_ids = [facts[item] for item in items]
            runs = pass_runs(self.model, head, items_ids, num_window, directions, self.policy.neighbours)
            for item, span in zip(items[num_window:], runs[0].captures, strict=True):
                keys[item] = span.key
            for run in runs:
                captures = (Span(self.head_key, 0, len(head)), *run.captures)
                jobs.append(EncodeJob(user, run.token_ids, captures))
        return jobs

    def _passes(self, lengths: Sequence[int], facts: Sequence[Ids]) -> list[EncodePass]:
        anchor = len(self.workload.head)
        if not self.policy.mixed:
            needs = [True] * len(facts)
            return plan_passes(lengths, needs, self.policy, anchor_tokens=anchor, max_tokens=self.max_tokens)
        names = [" ".join(map(str, ids)) for ids in facts]
        passes = []
        for group in mixed_groups(names, self.policy.mixed, self.policy.neighbours):
            room, together = self.max_tokens - anchor, self.policy.neighbours
            for part in split_group([lengths[item] for item in group], room, together):
                items = group[part.start : part.stop]
                passes.append(EncodePass(items, items))
        return passes

    def keys(self, user: int) -> dict[int, str]:
        """Fact → key; planned on first use."""
        if user not in self._keys:
            self.jobs(user)
        return self._keys[user]

    def plan(self, asked: Asked) -> Plan:
        """The plan that injects head and front facts."""
        keys = self.keys(asked.user)
        segments = [Segment(self.head_key, asked.head, "text")]
        segments += [
            Segment(keys[item], ids, "fact") for item, ids in zip(asked.items, asked.facts, strict=True)
        ]
        return Plan(self.model, _scope(asked.user), segments=tuple(segments))

    def request(self, job: EncodeJob, *, captures: bool = True) -> GenerationRequest:
        plan = Plan(self.model, _scope(job.user), captures=job.captures) if captures else None
        return GenerationRequest(job.token_ids, 1, plan, sampling=SAMPLING)


def encode_users(
    engine: BenchEngine, encoding: Encoding, users: Iterable[int], in_flight: int = _IN_FLIGHT
) -> EncodeCost:
    """Encode all facts of these users. Raises EngineError where the pool does not hold all of it then."""
    users = list(users)
    jobs = [job for user in users for job in encoding.jobs(user)]
    cost = _run(engine, encoding, jobs, in_flight, captures=True)
    keys = [encoding.head_key, *(key for user in users for key in encoding.keys(user).values())]
    missing = num_missing(engine, keys)
    if missing:  # a worker's last report may come with the next step
        engine.offline.order(Order("stats"))
        missing = num_missing(engine, keys)
    if missing:
        raise EngineError(
            f"{missing} of {len(keys)} segments are not in the pool after encoding; raise --pool-size."
        )
    return cost


def num_missing(engine: BenchEngine, keys: Sequence[str]) -> int:
    """How many of these keys the pool does not hold."""
    missing = 0
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        there = engine.offline.residency.resident(keys[start : start + _KEYS_AT_ONCE])
        missing += sum(1 for is_there in there if not is_there)
    return missing


def measure_encode(
    engine: BenchEngine, encoding: Encoding, options: EncodeOptions, run: BenchRun, say: Say
) -> EncodeCost:
    """Encode user 0's facts and append rows; the bench of the rows is `encode`, whatever the run's is."""
    config: dict[str, Any] = {
        "in_flight": options.in_flight,
        "facts": encoding.workload.num_facts,
    }
    engine.reset_prefix_cache()
    warm_up = encoding.jobs(0)[:2]
    _run(engine, encoding, warm_up, 2, captures=False)
    costs: dict[str, EncodeCost] = {}
    if options.baseline:
        engine.reset_prefix_cache()
        costs["compute only"] = _run(engine, encoding, encoding.jobs(0), options.in_flight, captures=False)
    engine.reset_prefix_cache()
    costs["encode"] = encode_users(engine, encoding, [0], options.in_flight)
    for mode, cost in costs.items():
        told = {**config, "passes": cost.passes, "computed_tokens": cost.computed_tokens}
        told |= {"stored_tokens": cost.stored_tokens, "seconds": round(cost.seconds, 3)}
        values = {"computed_tokens_per_s": (cost.computed_tokens, "tokens/s")}
        if mode == "encode":
            values["stored_tokens_per_s"] = (cost.stored_tokens, "tokens/s")
            values["encode_rate"] = (cost.facts, "facts/s")
        for metric, (amount, unit) in values.items():
            run.add(metric, unit, [amount / cost.seconds], mode=mode, config=told, bench="encode")
    cost = costs["encode"]
    told = {**config, "passes": cost.passes}
    each = cost.pass_tokens / cost.stored_tokens
    run.add("tokens_per_stored_token", "tokens", [each], config=told, bench="encode")
    stored, computed = (num / cost.seconds for num in (cost.stored_tokens, cost.computed_tokens))
    say(
        f"Encoded {cost.facts} facts in {cost.seconds:.1f} s: {stored:,.0f} stored and {computed:,.0f} "
        f"computed tokens/s, {each:.2f} computed for one stored."
    )
    return cost


def _run(
    engine: BenchEngine, encoding: Encoding, jobs: Sequence[EncodeJob], in_flight: int, *, captures: bool
) -> EncodeCost:
    requests: Iterator[GenerationRequest] = (encoding.request(job, captures=captures) for job in jobs)
    start_s = time.perf_counter()
    lanes = drive(engine.offline, [requests] * min(in_flight, len(jobs)))
    seconds = time.perf_counter() - start_s
    served = [one for lane in lanes for one in lane]
    for one in served:
        outcome, plan = one.generation.outcome or {}, one.request.plan
        if plan is not None and outcome.get("captured") != len(plan.captures):
            raise EngineError(
                f"Of {len(plan.captures)} spans of a pass {outcome.get('captured', 0)} were captured "
                f"({outcome.get('reason') or 'the pool is too small'}). Raise --pool-size."
            )
    return EncodeCost(
        len(jobs),
        sum(len(job.stored) for job in jobs),
        sum(job.num_fact_tokens for job in jobs),
        sum(len(job.token_ids) for job in jobs),
        sum(len(one.request.token_ids) - one.generation.num_cached_tokens for one in served),
        seconds,
    )


def _scope(user: int) -> str:
    return scope_digest(f"bench-{user}", None, None)
