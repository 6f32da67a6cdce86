"""Benchmarks on an engine that runs, and several of one model on one: starting it takes longer than most.

`ttft_need` and `run_ttft` and their like are what `inferscale bench ttft` and its like do, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from inferscale.bench.arms import new_run
from inferscale.bench.encode import encode_users, measure_encode
from inferscale.bench.engine import BenchEngine, EngineSpec
from inferscale.bench.harness import BenchRun, Say
from inferscale.bench.options import EncodeOptions, RandomTokens, ThroughputOptions, TtftOptions
from inferscale.bench.source import Need, RandomSource, Source, encoding_for, sized
from inferscale.bench.throughput import measure_throughput
from inferscale.bench.ttft import WARM_UPS, measure_ttft
from inferscale.errors import InferScaleError
from inferscale.windows import WindowPolicy

PARTS = ("ttft", "throughput", "encode")


@dataclass(frozen=True)
class SuiteOptions:
    """What each part measures, with random token ids."""

    ttft: TtftOptions
    throughput: ThroughputOptions
    encode: EncodeOptions
    tokens: RandomTokens
    policy: WindowPolicy


class PartDone(NamedTuple):
    """How long a part took, and why it failed where it did; the start of the engine is a part too."""

    name: str
    seconds: float
    error: str | None = None


class _Part(NamedTuple):
    """What the engine must have room for, and the measurement: (engine, file of rows) → run."""

    need: Need
    measure: Callable[[BenchEngine, Path], BenchRun]


def measure_suite(
    spec: EngineSpec, parts: Sequence[str], options: SuiteOptions, out: Path, say: Say
) -> list[PartDone]:
    """Run `parts` of PARTS one after the other; rows go to `out`/PART.jsonl.

    A part that fails does not keep the others from running; what the engine's start raises comes out.
    """
    source = RandomSource(options.tokens)
    all_parts = _parts(source, options, say)
    start_s = time.perf_counter()
    done: list[PartDone] = []
    with sized(spec, source, [all_parts[part].need for part in parts]).open() as engine:
        done.append(PartDone("start", time.perf_counter() - start_s))
        for part in parts:
            start_s = time.perf_counter()
            error = None
            try:
                all_parts[part].measure(engine, out / f"{part}.jsonl")
            except InferScaleError as failure:
                error = str(failure)
            done.append(PartDone(part, time.perf_counter() - start_s, error))
            say(f"{spec.name}, {part}: {done[-1].seconds:.0f} s" + (f", failed: {error}" if error else ""))
    return done


def _parts(source: Source, options: SuiteOptions, say: Say) -> dict[str, _Part]:
    policy = options.policy
    return {
        "ttft": _Part(
            ttft_need(options.ttft),
            lambda engine, out: run_ttft(engine, source, options.ttft, policy, out, say),
        ),
        "throughput": _Part(
            throughput_need(options.throughput),
            lambda engine, out: run_throughput(engine, source, options.throughput, policy, out, say),
        ),
        "encode": _Part(
            encode_need(options.encode, policy),
            lambda engine, out: run_encode(engine, source, options.encode, policy, out, say),
        ),
    }


def ttft_need(options: TtftOptions) -> Need:
    return Need(max(options.ks), num_questions=options.num_questions + WARM_UPS)


def run_ttft(
    engine: BenchEngine, source: Source, options: TtftOptions, policy: WindowPolicy, out: Path, say: Say
) -> BenchRun:
    """Encode user 0's facts, with rows of that, and measure the time to first token."""
    encoding = encoding_for(engine, source, ttft_need(options), policy)
    run = new_run("ttft", engine, encoding, out, options.tail)
    measure_encode(engine, encoding, EncodeOptions(baseline=False), run, say)
    measure_ttft(engine, encoding, options, run, say)
    return run


def throughput_need(options: ThroughputOptions) -> Need:
    return Need(options.k, num_users=options.users, output_tokens=options.output_tokens)


def run_throughput(
    engine: BenchEngine, source: Source, options: ThroughputOptions, policy: WindowPolicy, out: Path, say: Say
) -> BenchRun:
    """Encode the facts of all users and measure requests a second."""
    encoding = encoding_for(engine, source, throughput_need(options), policy)
    run = new_run("throughput", engine, encoding, out, options.tail)
    cost = encode_users(engine, encoding, range(options.users))
    say(f"Encoded {cost.facts} facts of {options.users} users in {cost.seconds:.1f} s.")
    measure_throughput(engine, encoding, options, run, say)
    return run


def encode_need(options: EncodeOptions, policy: WindowPolicy) -> Need:
    num_facts = options.num_facts
    in_a_pass = max(policy.window + policy.stride, 3 * policy.mixed // 2)
    return Need(min(in_a_pass, num_facts), num_facts=num_facts)


def run_encode(
    engine: BenchEngine, source: Source, options: EncodeOptions, policy: WindowPolicy, out: Path, say: Say
) -> BenchRun:
    """Measure how fast user 0's facts are encoded."""
    encoding = encoding_for(engine, source, encode_need(options, policy), policy)
    run = new_run("encode", engine, encoding, out)
    measure_encode(engine, encoding, options, run, say)
    return run
