#!/usr/bin/env python3
"""Where the time to first token goes: host stages of vLLM and of the connector, and the device's kernels.

    python benchmarks/timeline.py --random-weights llama-3.1-8b --k 50,200
    python benchmarks/timeline.py --random-weights llama-3.1-8b --engine-arg block_size=128

The engine runs in this process, so that its functions can be timed where they are; they are timed by
the host's clock, one inside the other (`match`, `claim` and `orders` are part of `schedule`, `inject` of
`execute`). Device times are those of torch's profiler, in a run of their own, since it slows the host.
Rows are appended to OUT; the table is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

MODES = ("text", "hit", "inject", "none")
STAGES = (
    "submit",
    "schedule",
    "match",
    "claim",
    "orders",
    "execute",
    "inject",
    "capture",
    "sample",
    "update",
)


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

    extra = read_engine_args(arguments.engine_arg)
    spec = random_weights(arguments.random_weights, enforce_eager=arguments.enforce_eager, extra=extra)
    source, need = RandomSource(RandomTokens()), Need(max(arguments.k))
    with sized(spec, source, [need]).open() as engine:
        encoding = encoding_for(engine, source, need, sliding(20, 20))
        encode_users(engine, encoding, [0])
        run = new_run("timeline", engine, encoding, arguments.out)
        clock = Clock(engine.offline)
        for k in arguments.k:
            for mode in MODES:
                clock.stages.clear()
                for number in range(arguments.questions + 2):
                    if number == 2:
                        clock.stages.clear()
                    ask(engine, encoding, mode, k, number, clock)
                for stage in ("total", *STAGES):
                    values = clock.stages.get(stage)
                    if values:
                        run.add(
                            "host_stage",
                            "us",
                            [v * 1e6 for v in values],
                            mode=mode,
                            k=k,
                            config={"stage": stage},
                        )
                print(
                    k,
                    mode,
                    {s: round(statistics.median(v) * 1e6) for s, v in clock.stages.items()},
                    flush=True,
                )
        if not arguments.no_device:
            for k in arguments.k:
                for mode in MODES:
                    kernels = device_times(partial(ask, engine, encoding, mode, k, 99, clock))
                    for name, (micros, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[:12]:
                        config = {"kernel": name, "launches": count}
                        run.add("device_time", "us", [micros], mode=mode, k=k, config=config)
                    busy = sum(micros for micros, _ in kernels.values())
                    print(k, mode, "device busy", round(busy), "us", flush=True)
                    for name, (micros, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[:7]:
                        print(f"      {micros:9.1f} us {count:5d} x {name}", flush=True)


def ask(engine: Any, encoding: Any, mode: str, k: int, number: int, clock: Clock) -> None:
    from inferscale.bench.arms import checked_counts, prime_of, request_of

    asked = encoding.workload.ask(0, number, k, 0)
    engine.reset_prefix_cache()
    if mode == "hit":
        with clock.paused():
            engine.offline.generate([prime_of(asked)])
    request = request_of(mode, asked, encoding)
    start = time.perf_counter()
    (generation,) = engine.offline.generate([request])
    clock.note("total", time.perf_counter() - start)
    checked_counts(mode, asked, request, generation, engine.block_size)


class Clock:
    """Wraps functions of the engine in this process and notes how long each call took."""

    def __init__(self, offline: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.stages: dict[str, list[float]] = defaultdict(list)
        self._is_paused = False
        engine = offline.llm.llm_engine
        core = engine.engine_core.engine_core
        scheduler, worker = core.scheduler.connector, get_kv_transfer_group()
        self._wrap(engine, "add_request", "submit")
        self._wrap(core.scheduler, "schedule", "schedule")
        self._wrap(core.scheduler, "update_from_output", "update")
        self._wrap(core.model_executor, "execute_model", "execute")
        self._wrap(core.model_executor, "sample_tokens", "sample")
        self._wrap(scheduler, "get_num_new_matched_tokens", "match")
        self._wrap(scheduler, "update_state_after_alloc", "claim")
        self._wrap(scheduler, "build_connector_meta", "orders")
        self._wrap(scheduler, "request_finished", "finish")
        self._wrap(worker, "start_load_kv", "inject")
        self._wrap(worker, "wait_for_save", "capture")

    def note(self, stage: str, seconds: float) -> None:
        if not self._is_paused:
            self.stages[stage].append(seconds)

    def paused(self) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def pause() -> Any:
            self._is_paused = True
            yield
            self._is_paused = False

        return pause()

    def _wrap(self, owner: Any, name: str, stage: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            self.note(stage, time.perf_counter() - start)
            return result

        setattr(owner, name, timed)


def device_times(call: Any) -> dict[str, tuple[float, int]]:
    """Kernel name → microseconds and launches on the device; empty without one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    kernels: dict[str, tuple[float, int]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            micros, count = kernels.get(event.name[:70], (0.0, 0))
            kernels[event.name[:70]] = (micros + event.device_time, count + 1)
    return kernels


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--random-weights", default="llama-3.1-8b", help="a shape, or the path of a config.json")
    add("--k", default="50,200", help="numbers of facts")
    add("--questions", type=int, default=20)
    add("--out", type=Path, default=Path("benchmarks/results/timeline.jsonl"))
    add("--enforce-eager", action="store_true")
    add("--engine-arg", action="append", default=[], metavar="NAME=JSON")
    add("--no-device", action="store_true", help="host stages only")
    arguments = parser.parse_args()
    arguments.k = tuple(int(k) for k in arguments.k.split(","))
    return arguments


if __name__ == "__main__":
    main()
