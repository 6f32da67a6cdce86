"""`inferscale bench throughput`: many users at once, each with a memory of its own, modes in turn.

A closed loop: every user sends its next request when its last one is done, each with another question
and another choice and order of its facts. Users are out of step, since their first answers, which do not
count, have different lengths; measured is from when all of those are done (`load.drive_steadily`).

In `hit` a user's facts and their order stay the same from request to request, and their blocks were put
into vLLM's prefix cache before: the best that exact prefix caching can do. The prefix cache is emptied
before each mode. All modes run `repeats` times in turn, so that ratios are paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from inferscale.bench.arms import (
    TokenCounts,
    check_fits,
    checked_counts,
    prime_of,
    request_of,
    summarize,
)
from inferscale.bench.encode import Encoding
from inferscale.bench.engine import BenchEngine
from inferscale.bench.harness import BenchRun, Row, Say
from inferscale.bench.load import Served, drive, drive_steadily
from inferscale.bench.modes import MODES, RATE_RATIOS, STEADY_LOOP
from inferscale.bench.options import ThroughputOptions
from inferscale.bench.workload import Asked
from inferscale.offline import GenerationRequest

_WARM_UP_TOKENS = 4
_SPARE_QUESTIONS = 6
"""Beyond `rounds`, for the first request and for users that are faster than others."""


class _Pass(NamedTuple):
    """One mode, once: the requests of its measured stretch."""

    seconds: float
    served: list[Served]
    counts: list[TokenCounts]


def measure_throughput(
    engine: BenchEngine, encoding: Encoding, options: ThroughputOptions, run: BenchRun, say: Say
) -> list[Row]:
    """Measure on an engine that holds the facts of all users; append rows and return them.

    Raises EngineError for a request that did not run as its mode says, and for a user without questions
    left (`load.drive_steadily`): nothing is written then.
    """
    first = len(run.rows)
    num_questions = options.rounds + _SPARE_QUESTIONS
    asked = [
        [encoding.workload.ask(user, number, options.k, options.tail) for number in range(num_questions)]
        for user in range(options.users)
    ]
    for one in asked:
        check_fits(one[0], options.output_tokens, engine.offline.max_model_len)
    for mode in MODES:
        _run_mode(engine, encoding, mode, asked, replace(options, rounds=1, output_tokens=_WARM_UP_TOKENS))
    passes: dict[str, list[_Pass]] = {mode: [] for mode in MODES}
    for repeat in range(options.repeats):
        for mode in _rotated(repeat):
            done = _run_mode(engine, encoding, mode, asked, options)
            passes[mode].append(done)
            say(f"  {mode}: {len(done.served) / done.seconds:.1f} requests/s")
    _add_rows(engine, options, passes, run)
    return run.rows[first:]


def _run_mode(
    engine: BenchEngine, encoding: Encoding, mode: str, asked: list[list[Asked]], options: ThroughputOptions
) -> _Pass:
    engine.reset_prefix_cache()
    if mode == "hit":
        primes = iter([prime_of(questions[0]) for questions in asked])
        drive(engine.offline, [primes] * len(asked))
        asked = [_same_facts(questions) for questions in asked]
    requests = [_requests(mode, encoding, questions, options, user) for user, questions in enumerate(asked)]
    lanes: list[Iterator[GenerationRequest]] = [iter(ones) for ones in requests]
    window = drive_steadily(engine.offline, lanes, options.users * options.rounds)
    counts = [
        checked_counts(mode, asked[user][number], one.request, one.generation, engine.block_size)
        for user, number, one in window.served
    ]
    return _Pass(window.seconds, [one for _, _, one in window.served], counts)


def _requests(
    mode: str, encoding: Encoding, questions: Sequence[Asked], options: ThroughputOptions, user: int
) -> list[GenerationRequest]:
    """A user's requests; the first one's answer has a length of its own, from 1 token to all."""
    first_tokens = 1 + user * options.output_tokens // options.users
    lengths = [first_tokens] + [options.output_tokens] * (len(questions) - 1)
    return [request_of(mode, one, encoding, num) for one, num in zip(questions, lengths, strict=True)]


def _same_facts(questions: list[Asked]) -> list[Asked]:
    """The first question's facts in its order, behind them the others' questions."""
    first = questions[0]
    recomputed = first.rest[: first.num_recomputed_tokens]
    return [
        first._replace(hit_rest=recomputed + one.hit_rest[one.num_recomputed_tokens :]) for one in questions
    ]


def _rotated(repeat: int) -> list[str]:
    turn = repeat % len(MODES)
    return [*MODES[turn:], *MODES[:turn]]


def _add_rows(
    engine: BenchEngine, options: ThroughputOptions, passes: dict[str, list[_Pass]], run: BenchRun
) -> None:
    shared: dict[str, Any] = {
        "users": options.users,
        "rounds": options.rounds,
        "output_tokens": options.output_tokens,
        "counters": engine.counters(),
        "loop": STEADY_LOOP,
    }
    rates: dict[str, list[float]] = {}
    for mode, ones in passes.items():
        config = {**shared, **summarize([counts for one in ones for counts in one.counts])}
        served = [request for one in ones for request in one.served]
        rates[mode] = [len(one.served) / one.seconds for one in ones]
        tokens = [sum(len(r.generation.token_ids) for r in one.served) / one.seconds for one in ones]
        values = {
            "requests_per_s": ("requests/s", rates[mode]),
            "output_tokens_per_s": ("tokens/s", tokens),
            "ttft": ("ms", [one.ttft_ms for one in served]),
            "tpot": ("ms", [one.tpot_ms for one in served if one.tpot_ms is not None]),
        }
        for metric, (unit, series) in values.items():
            if series:
                run.add(metric, unit, series, mode=mode, k=options.k, config=config)
    for ratio in RATE_RATIOS:
        pair = (rates[ratio.over], rates[ratio.under])
        run.add_ratio("requests_per_s", str(ratio), *pair, k=options.k)
