#!/usr/bin/env python3
"""From how many tokens on it pays to inject later layers while earlier ones are computed.

    python benchmarks/overlap.py --random-weights llama-3.1-8b --k 25,50,100,200,400

Time to first token of the same injected prompts, each injected before the forward pass (`together`) and
beside it (`overlapped`, connector/layerwise.py), with `hit` of the same run for comparison. The engine runs
in this process, so that the threshold can be moved between two requests. Rows are appended to OUT.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

WARM_UPS = 3
OVERLAPPED, TOGETHER = 0, 2**31
"""Thresholds: every step overlaps, none does."""


def main() -> None:
    arguments = parse()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from inferscale.bench.arms import new_run
    from inferscale.bench.encode import encode_users
    from inferscale.bench.engine import random_weights
    from inferscale.bench.options import RandomTokens
    from inferscale.bench.source import Need, RandomSource, encoding_for, sized
    from inferscale.cli.bench_options import read_engine_args
    from inferscale.windows import sliding

    source, need = RandomSource(RandomTokens()), Need(max(arguments.k))
    spec = random_weights(
        arguments.random_weights, injection_path="fused", extra=read_engine_args(arguments.engine_arg)
    )
    with sized(spec, source, [need]).open() as engine:
        encoding = encoding_for(engine, source, need, sliding(20, 20))
        encode_users(engine, encoding, [0])
        run = new_run("overlap", engine, encoding, arguments.out)
        for k in arguments.k:
            measure(engine, encoding, k, arguments.questions, run)


def measure(engine: Any, encoding: Any, k: int, num_questions: int, run: Any) -> None:
    """Rows of one k. Exits where a step did not run as it was meant to."""
    from inferscale.bench.arms import checked_counts, prime_of, request_of
    from inferscale.connector import layerwise

    overlapped = OverlapCount()
    times: dict[str, list[float]] = {"together": [], "overlapped": [], "hit": []}
    tokens: list[int] = []
    least = layerwise.LEAST_TOKENS
    try:
        for number in range(num_questions + WARM_UPS):
            asked = encoding.workload.ask(0, number, k, 0)
            names = list(times)
            for name in names[number % 3 :] + names[: number % 3]:
                engine.reset_prefix_cache()
                layerwise.LEAST_TOKENS = OVERLAPPED if name == "overlapped" else TOGETHER
                if name == "hit":
                    engine.offline.generate([prime_of(asked)])
                mode = "hit" if name == "hit" else "inject"
                request = request_of(mode, asked, encoding)
                before = overlapped.count
                (generation,) = engine.offline.generate([request])
                counts = checked_counts(mode, asked, request, generation, engine.block_size)
                if number < WARM_UPS:  # the first steps of a mode are watched, and do not overlap
                    continue
                if overlapped.count - before != (name == "overlapped"):
                    sys.exit(f"{name}: {overlapped.count - before} steps overlapped their injection")
                times[name].append(generation.ttft_s * 1e3)
                if name == "overlapped":
                    tokens.append(counts.injected)
    finally:
        layerwise.LEAST_TOKENS = least
        overlapped.stop()
    config = {"injected_tokens": sorted(tokens)[len(tokens) // 2]}
    rows = [run.add("ttft", "ms", values, mode=mode, k=k, config=config) for mode, values in times.items()]
    for over, under in (("overlapped", "together"), ("together", "hit"), ("overlapped", "hit")):
        name = f"{over}/{under}"
        rows.append(run.add_ratio("ttft", name, times[over], times[under], k=k, config=config))
    told = ", ".join(f"{row['mode']} {row['p50']:.3f} {row['unit']}" for row in rows)
    print(f"k={k}, {config['injected_tokens']} tokens: {told}", flush=True)


class OverlapCount:
    """Counts the injections in two parts of the engine in this process."""

    def __init__(self) -> None:
        from inferscale.kernels.fused import FusedMover

        self.count = 0
        self._mover = FusedMover
        self._original = original = FusedMover.inject_in_two

        def counted(mover: Any, moves: Any) -> Any:
            self.count += 1
            return original(mover, moves)

        FusedMover.inject_in_two = counted  # type: ignore[method-assign]

    def stop(self) -> None:
        self._mover.inject_in_two = self._original  # type: ignore[method-assign]


def parse(texts: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--random-weights", default="llama-3.1-8b", help="a shape, or the path of a config.json")
    add("--k", default="25,50,100,200,400", help="numbers of facts")
    add("--questions", type=int, default=20)
    add("--out", type=Path, default=Path("benchmarks/results/overlap.jsonl"))
    add("--engine-arg", action="append", default=[], metavar="NAME=JSON")
    arguments = parser.parse_args(texts)
    arguments.k = tuple(int(k) for k in arguments.k.split(","))
    return arguments


if __name__ == "__main__":
    main()
