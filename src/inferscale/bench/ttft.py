"""`inferscale bench ttft`: time to first token with k facts, four modes in turn in one run.

The modes are those of `modes`. Before each measured request (but `hit`, which follows `text` and finds
its blocks) the engine's prefix cache is emptied, so that nothing is found that the mode did not bring
itself. Measured at the engine: from the submission of token ids to the first token.
"""

from __future__ import annotations

from typing import NamedTuple

from inferscale.bench.arms import TokenCounts, check_fits, checked_counts, request_of, summarize
from inferscale.bench.encode import Encoding
from inferscale.bench.engine import BenchEngine
from inferscale.bench.harness import BenchRun, Row, Say, middle
from inferscale.bench.modes import MODES, TTFT_RATIOS
from inferscale.bench.options import TtftOptions
from inferscale.bench.workload import Asked

WARM_UPS = 2
"""Questions of each k that do not count."""


class _Timed(NamedTuple):
    ttft_ms: float
    counts: TokenCounts


def measure_ttft(
    engine: BenchEngine, encoding: Encoding, options: TtftOptions, run: BenchRun, say: Say
) -> list[Row]:
    """Measure each k on an engine that holds user 0's facts; append rows and return them.

    Raises InvalidInput for a k that does not fit into the model's context, before it is measured, and
    EngineError for a request that did not run as its mode says; the rows of k before it stay.
    """
    first = len(run.rows)
    for k in options.ks:
        _measure_k(engine, encoding, k, options, run, say)
    return run.rows[first:]


def _measure_k(
    engine: BenchEngine, encoding: Encoding, k: int, options: TtftOptions, run: BenchRun, say: Say
) -> None:
    timed: dict[str, list[_Timed]] = {mode: [] for mode in MODES}
    for number in range(options.num_questions + WARM_UPS):
        asked = encoding.workload.ask(0, number, k, options.tail)
        check_fits(asked, 1, engine.offline.max_model_len)
        in_turn = _ask_in_turn(engine, encoding, asked, first=number)
        if number >= WARM_UPS:
            for mode, one in in_turn.items():
                timed[mode].append(one)
    for mode, ones in timed.items():
        config = summarize([one.counts for one in ones])
        run.add("ttft", "ms", [one.ttft_ms for one in ones], mode=mode, k=k, config=config)
    for ratio in TTFT_RATIOS:
        pair = [[one.ttft_ms for one in timed[mode]] for mode in ratio]
        run.add_ratio("ttft", str(ratio), pair[0], pair[1], k=k)
    medians = {mode: middle([one.ttft_ms for one in ones]) for mode, ones in timed.items()}
    say(f"k={k}: " + ", ".join(f"{mode} {value:.1f} ms" for mode, value in medians.items()))


def _ask_in_turn(engine: BenchEngine, encoding: Encoding, asked: Asked, first: int) -> dict[str, _Timed]:
    """Each mode once; which one begins changes from question to question, `hit` always follows `text`."""
    groups: list[tuple[str, ...]] = [("text", "hit"), ("inject",), ("none",)]
    first %= len(groups)
    timed: dict[str, _Timed] = {}
    for group in groups[first:] + groups[:first]:
        engine.reset_prefix_cache()
        for mode in group:
            request = request_of(mode, asked, encoding)
            (generation,) = engine.offline.generate([request])
            counts = checked_counts(mode, asked, request, generation, engine.block_size)
            timed[mode] = _Timed(generation.ttft_s * 1e3, counts)
    return timed
