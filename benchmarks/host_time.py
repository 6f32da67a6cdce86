#!/usr/bin/env python3
"""Host time that the connector adds to a step, apart from vLLM: its scheduler side, and the worker's launch.

    python benchmarks/host_time.py

Scheduler side: reading a signed plan, finding its segments, claiming them and building the orders, for one
request and for 256 in one step, and for steps with no memory beside 0 and 256 running requests. Worker
side (with a CUDA GPU): copying the table of such a step and starting the kernel. Facts of 30 tokens, k of
them a request; every request has facts of its own. There is nothing to compare with: without the
connector these functions are not there, so each time is what it adds. Rows are appended to OUT.
"""

from __future__ import annotations

import argparse
import secrets
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from inferscale.bench.harness import BenchRun, command, environment
from inferscale.bench.kernels import BLOCK_TOKENS as BLOCK
from inferscale.connector.groups import CacheGroup
from inferscale.connector.messages import StepReport
from inferscale.connector.scheduler import SchedulerSide
from inferscale.plan import Plan, Segment, salt_of, to_wire
from inferscale.pool.moves import Moves
from inferscale.pool.table import PageTable

SECRET = b"s" * 32
PAGE, FACT_TOKENS, QUESTION_TOKENS = 4, 30, 32


def scheduler_side(num_pages: int) -> SchedulerSide:
    return SchedulerSide(
        PageTable(num_pages, PAGE), groups=[CacheGroup(BLOCK)], row_bytes=131_072, model="m", secret=SECRET
    )


def main(texts: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--k", type=int, default=50, help="facts of a request")
    parser.add_argument("--requests", type=int, default=256, help="in the large step")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/host_time.jsonl"))
    arguments = parser.parse_args(texts)
    config = {
        "command": f"python benchmarks/{command()}",
        "environment": environment(),
        "baseline": "no connector: none of the timed functions is there, 0 µs",
        "fact_tokens": FACT_TOKENS,
    }
    run = BenchRun("host_time", "none", arguments.out, config)
    for num_requests in (1, arguments.requests):
        repeats = arguments.repeats * (10 if num_requests == 1 else 1)
        times, moves = scheduler_times(num_requests, arguments.k, repeats)
        report(run, "scheduler_per_request", times, num_requests, arguments.k)
        if torch.cuda.is_available():
            report(run, "worker_per_request", worker_times(moves, repeats), num_requests, arguments.k)
    for num_running in (0, 256):
        report(run, "step_without_memory", idle_times(num_running, 1000), 1, 0, {"running": num_running})


def report(
    run: BenchRun, metric: str, seconds: list[float], num_requests: int, k: int, config: Any = None
) -> None:
    micros = [value * 1e6 / num_requests for value in seconds]
    told = {"requests": num_requests, **(config or {})}
    row = run.add(metric, "us", micros, k=k, config=told)
    print(f"{metric}, {told}: {row['p50']:.1f} µs (p90 {row['p90']:.1f})", flush=True)


def scheduler_times(num_requests: int, k: int, repeats: int) -> tuple[list[float], Moves]:
    """Seconds of all hooks of one step, and the orders of the last one."""
    rng = np.random.default_rng(0)
    side = scheduler_side(num_requests * k * 9)
    memories = [[fact(rng) for _ in range(k)] for _ in range(num_requests)]
    for segments in memories:
        for segment in segments:
            side.table.reserve(segment.key, FACT_TOKENS)
            side.table.commit(segment.key)
    seconds: list[float] = []
    for number in range(repeats + 2):
        requests = [request(f"{number}-{i}", segments, rng) for i, segments in enumerate(memories)]
        start = time.perf_counter()
        for one in requests:
            side.claim(one, None, side.num_matched_tokens(one, 0))  # its blocks are told in the output
        spent = time.perf_counter() - start
        output = output_of(requests, k)
        start = time.perf_counter()
        orders = side.build_orders(output)
        side.complete(StepReport({orders.step}))
        spent += time.perf_counter() - start
        for one in requests:
            side.finish(one)
        if number >= 2:
            seconds.append(spent)
    (moves,) = orders.injection
    assert moves is not None
    assert len(moves.expand(BLOCK).rows) == num_requests * k * FACT_TOKENS
    return seconds, moves


def fact(rng: np.random.Generator) -> Segment:
    ids = tuple(int(token) for token in rng.integers(300, 120_000, FACT_TOKENS))
    return Segment(secrets.token_hex(16), ids)


def request(name: str, segments: list[Segment], rng: np.random.Generator) -> Any:
    plan = Plan("m", name, segments=segments)
    ids = [token for segment in segments for token in segment.token_ids]
    ids += [int(token) for token in rng.integers(300, 120_000, QUESTION_TOKENS)]
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=ids,
        num_prompt_tokens=len(ids),
        num_tokens=len(ids),
        kv_transfer_params=to_wire(plan, SECRET),
        cache_salt=salt_of(plan, SECRET),
    )


def output_of(requests: list[Any], k: int) -> Any:
    """What vLLM's scheduler hands to `build_connector_meta`."""
    num_blocks = -(-(k * FACT_TOKENS + QUESTION_TOKENS) // BLOCK)
    new = [
        SimpleNamespace(
            req_id=one.request_id,
            block_ids=(list(range(i * num_blocks, (i + 1) * num_blocks)),),
            num_computed_tokens=k * FACT_TOKENS,
        )
        for i, one in enumerate(requests)
    ]
    return SimpleNamespace(
        preempted_req_ids=None,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=running(0),
        num_scheduled_tokens={one.request_id: QUESTION_TOKENS for one in requests},
    )


def running(num: int) -> Any:
    return SimpleNamespace(
        req_ids=[f"running {i}" for i in range(num)],
        new_block_ids=[None] * num,
        resumed_req_ids=set(),
        num_computed_tokens=[100] * num,
    )


def idle_times(num_running: int, repeats: int) -> list[float]:
    side = scheduler_side(100)
    output = SimpleNamespace(
        preempted_req_ids=None,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=running(num_running),
        num_scheduled_tokens={f"running {i}": 1 for i in range(num_running)},
    )
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        side.build_orders(output)
        seconds.append(time.perf_counter() - start)
    return seconds


def worker_times(moves: Moves, repeats: int) -> list[float]:
    """Host seconds until the copy and the kernel are on the device's queue; a small shape, since the
    host does not see it."""
    from inferscale.bench.kernels import KernelShape, make_mover, make_scene

    num_tokens = len(moves.expand(BLOCK).rows)
    shape = KernelShape(2, 1, 64)
    scene = make_scene(shape, PAGE, slab_bytes=2 * num_tokens * shape.token_bytes)
    mover = make_mover(scene, 2 * num_tokens)
    seconds = []
    for number in range(repeats + 2):
        torch.cuda.synchronize()
        torch.zeros(8, device="cuda").add_(1)  # as in a step, the device has been spoken to just before
        start = time.perf_counter()
        mover.inject(moves)
        if number >= 2:
            seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
