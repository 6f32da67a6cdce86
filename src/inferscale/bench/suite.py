"""Several benchmarks of one model on one engine: starting it takes longer than most of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from inferscale.bench.arms import new_run
from inferscale.bench.encode import encode_users, measure_encode
from inferscale.bench.engine import BenchEngine, EngineSpec
from inferscale.bench.harness import Say
from inferscale.bench.options import EncodeOptions, RandomTokens, ThroughputOptions, TtftOptions
from inferscale.bench.source import Need, RandomSource, encoding_for, sized
from inferscale.bench.throughput import measure_throughput
from inferscale.bench.ttft import measure_ttft
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


def measure_suite(
    spec: EngineSpec, parts: Sequence[str], options: SuiteOptions, out: Path, say: Say
) -> list[PartDone]:
    """Run `parts` of PARTS one after the other; rows go to `out`/PART.jsonl.

    A part that fails does not keep the others from running; what the engine's start raises comes out.
    """
    source = RandomSource(options.tokens)
    needs = {part: _need(part, options) for part in parts}
    start_s = time.perf_counter()
    done: list[PartDone] = []
    with sized(spec, source, list(needs.values())).open() as engine:
        done.append(PartDone("start", time.perf_counter() - start_s))
        for part in parts:
            start_s = time.perf_counter()
            error = None
            try:
                _MEASURE[part](engine, source, needs[part], options, out / f"{part}.jsonl", say)
            except InferScaleError as failure:
                error = str(failure)
            done.append(PartDone(part, time.perf_counter() - start_s, error))
            say(f"{spec.name}, {part}: {done[-1].seconds:.0f} s" + (f", failed: {error}" if error else ""))
    return done


def _need(part: str, options: SuiteOptions) -> Need:
    if part == "ttft":
        return Need(max(options.ttft.ks))
    if part == "throughput":
        load = options.throughput
        return Need(load.k, num_users=load.users, output_tokens=load.output_tokens)
    num_facts = options.encode.num_facts
    return Need(min(options.policy.window + options.policy.stride, num_facts), num_facts=num_facts)


def _ttft(
    engine: BenchEngine, source: RandomSource, need: Need, options: SuiteOptions, out: Path, say: Say
) -> None:
    encoding = encoding_for(engine, source, need, options.policy)
    run = new_run("ttft", engine, encoding, out, options.ttft.tail)
    encode_users(engine, encoding, [0])
    measure_ttft(engine, encoding, options.ttft, run, say)


def _throughput(
    engine: BenchEngine, source: RandomSource, need: Need, options: SuiteOptions, out: Path, say: Say
) -> None:
    encoding = encoding_for(engine, source, need, options.policy)
    run = new_run("throughput", engine, encoding, out, options.throughput.tail)
    encode_users(engine, encoding, range(need.num_users))
    measure_throughput(engine, encoding, options.throughput, run, say)


def _encode(
    engine: BenchEngine, source: RandomSource, need: Need, options: SuiteOptions, out: Path, say: Say
) -> None:
    encoding = encoding_for(engine, source, need, options.policy)
    run = new_run("encode", engine, encoding, out)
    measure_encode(engine, encoding, options.encode, run, say)


_MEASURE: dict[str, Callable[[BenchEngine, RandomSource, Need, SuiteOptions, Path, Say], None]] = {
    "ttft": _ttft,
    "throughput": _throughput,
    "encode": _encode,
}
