#!/usr/bin/env python3
"""Where the time to first token goes: host stages of vLLM and of the connector, and the device's kernels.

    python benchmarks/timeline.py --random-weights llama-3.1-8b --k 50,200
    python benchmarks/timeline.py --random-weights llama-3.1-8b --engine-arg block_size=128

The engine runs in this process, so that its functions can be timed where they are; they are timed by
the host's clock, one inside the other: `match`, `claim` and `orders` are part of `schedule`, `inject` and
`capture` of `execute`, `finish` (the connector's account of a request that is done) and
`report` (its reading of what the worker did in a step) of `update`. Device times are those of torch's
profiler, in a run of their own, since it slows the host. Rows are appended to OUT; the table is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from inferscale.bench.modes import MODES

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
    "finish",
    "report",
)
WARM_UPS = 2
SHOWN_KERNELS = 7
STORED_KERNELS = 12


def main() -> None:
    arguments = parse()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from inferscale.bench.arms import new_run
    from inferscale.bench.encode import encode_users
    from inferscale.bench.options import RandomTokens
    from inferscale.bench.source import Need, RandomSource, encoding_for, sized
    from inferscale.windows import sliding

    source, need = RandomSource(RandomTokens()), Need(max(arguments.k))
    with sized(spec_of(arguments), source, [need]).open() as engine:
        encoding = encoding_for(engine, source, need, sliding(20, 20))
        encode_users(engine, encoding, [0])
        run = new_run("timeline", engine, encoding, arguments.out)
        clock = Clock()
        watch_engine(clock, engine.offline)
        cases = [(k, mode) for k in arguments.k for mode in MODES]
        for k, mode in cases:
            measure_host(engine, encoding, mode, k, arguments.questions, clock, run)
        for k, mode in cases if not arguments.no_device else ():
            measure_device(engine, encoding, mode, k, clock, run)


def spec_of(arguments: argparse.Namespace) -> Any:
    from inferscale.bench.engine import random_weights
    from inferscale.cli.bench_options import read_engine_args

    return random_weights(
        arguments.random_weights,
        enforce_eager=arguments.enforce_eager,
        injection_path=arguments.injection_path,
        extra=read_engine_args(arguments.engine_arg),
    )


def measure_host(
    engine: Any, encoding: Any, mode: str, k: int, num_questions: int, clock: Clock, run: Any
) -> None:
    """A row for each stage, one value a request: a stage may be called again for the step behind it."""
    micros: dict[str, list[float]] = defaultdict(list)
    for number in range(num_questions + WARM_UPS):
        clock.stages.clear()
        ask(engine, encoding, mode, k, number, clock)
        for stage, seconds in clock.stages.items() if number >= WARM_UPS else ():
            micros[stage].append(sum(seconds) * 1e6)
    for stage in ("total", *STAGES):
        if micros[stage]:
            run.add("host_stage", "us", micros[stage], mode=mode, k=k, config={"stage": stage})
    medians = {stage: round(statistics.median(times)) for stage, times in micros.items() if times}
    print(k, mode, medians, flush=True)


def measure_device(engine: Any, encoding: Any, mode: str, k: int, clock: Clock, run: Any) -> None:
    """A row for each of the kernels that take longest, of one request."""
    kernels = device_times(partial(ask, engine, encoding, mode, k, 99, clock))
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])
    for name, (micros, count) in longest[:STORED_KERNELS]:
        config = {"kernel": name, "launches": count}
        run.add("device_time", "us", [micros], mode=mode, k=k, config=config)
    print(k, mode, "device busy", round(sum(micros for micros, _ in kernels.values())), "us", flush=True)
    for name, (micros, count) in longest[:SHOWN_KERNELS]:
        print(f"      {micros:9.1f} us {count:5d} x {name}", flush=True)


def ask(engine: Any, encoding: Any, mode: str, k: int, number: int, clock: Clock) -> None:
    from inferscale.bench.arms import checked_counts, prime_of, request_of

    asked = encoding.workload.ask(0, number, k)
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
    """Wraps functions and notes how long each call took. stages: name → seconds of each call."""

    def __init__(self) -> None:
        self.stages: dict[str, list[float]] = defaultdict(list)
        self._is_paused = False

    def note(self, stage: str, seconds: float) -> None:
        if not self._is_paused:
            self.stages[stage].append(seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is called inside is not noted."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Note each call of `owner.name` as `stage`."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            self.note(stage, time.perf_counter() - start)
            return result

        setattr(owner, name, timed)


def watch_engine(clock: Clock, offline: Any) -> None:
    """The stages of an engine that runs in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = offline.llm.llm_engine
    core = engine.engine_core.engine_core
    scheduler, worker = core.scheduler.connector, get_kv_transfer_group()
    clock.watch(engine, "add_request", "submit")
    clock.watch(core.scheduler, "schedule", "schedule")
    clock.watch(core.scheduler, "update_from_output", "update")
    clock.watch(core.model_executor, "execute_model", "execute")
    clock.watch(core.model_executor, "sample_tokens", "sample")
    clock.watch(scheduler, "get_num_new_matched_tokens", "match")
    clock.watch(scheduler, "update_state_after_alloc", "claim")
    clock.watch(scheduler, "build_connector_meta", "orders")
    clock.watch(scheduler, "request_finished", "finish")
    clock.watch(scheduler, "update_connector_output", "report")
    clock.watch(worker, "start_load_kv", "inject")
    clock.watch(worker, "wait_for_save", "capture")


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


def parse(texts: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--random-weights", default="llama-3.1-8b", help="a shape, or the path of a config.json")
    add("--k", default="50,200", help="numbers of facts")
    add("--questions", type=int, default=20)
    add("--out", type=Path, default=Path("benchmarks/results/timeline.jsonl"))
    add("--enforce-eager", action="store_true")
    add("--injection-path", default="auto", choices=("auto", "fused", "portable"))
    add("--engine-arg", action="append", default=[], metavar="NAME=JSON")
    add("--no-device", action="store_true", help="host stages only")
    arguments = parser.parse_args(texts)
    arguments.k = tuple(int(k) for k in arguments.k.split(","))
    return arguments


if __name__ == "__main__":
    main()
