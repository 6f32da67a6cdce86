#!/usr/bin/env python3
"""Time to first token where the facts' KV comes from the pool, from host memory, from disk, and as text.

    python benchmarks/tiers.py --conversation locomo10.json            the demo model, or --model FOLDER

Two users remember the same conversation. Where the pool holds everything, injected facts come from there.
With a pool that holds little more than one prompt's facts, the two ask in turn, so that each has pushed out
the other's facts and all of them are loaded again: from host memory in one engine, from disk in another.
Each engine runs in a process of its own; the times are those of the engine, `text` is of the first one.
vLLM's prefix cache is emptied before each question. Rows are appended to OUT.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from inferscale.bench.conversation import read_conversation
from inferscale.bench.harness import BenchRun, command, environment

TIERS = ("pool", "host", "disk")
USERS = ("ana", "bob")
SMALL_TOKENS_A_FACT = 110
"""Of the small pool, for each of k facts: enough for any question, too little for two users."""


def main() -> int:
    arguments = parse()
    if arguments.child:
        print(json.dumps(measure(arguments, arguments.child)))
        return 0
    series: dict[str, list[float]] = {}
    told: dict[str, dict[str, Any]] = {}
    for tier in TIERS:
        own = [sys.executable, __file__, *sys.argv[1:], "--child", tier]
        done = subprocess.run(own, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return done.returncode
        found = json.loads(done.stdout.splitlines()[-1])
        for mode, values in found["ttft_ms"].items():
            series.setdefault(mode, []).extend(values)
        told[tier] = found["stats"]
    config = {
        "command": f"python benchmarks/{command()}",
        "environment": environment(),
        "baseline": "mode pool of the same run: the KV of all facts is in the pool",
    }
    run = BenchRun("tiers", Path(arguments.model).name, arguments.out, config)
    for mode, values in series.items():
        row = run.add("ttft", "ms", values, mode=mode, k=arguments.k, config={"stats": told.get(mode, {})})
        print(f"{mode}: p50 {row['p50']:.1f}, p99 {row['p99']:.1f} ms, n={row['n']}")
    for tier in ("host", "disk"):
        row = run.add_ratio("ttft", f"{tier}/pool", series[tier], series["pool"], k=arguments.k)
        print(f"{tier}/pool: {row['p50']:.2f} ({row['ci95'][0]:.2f} to {row['ci95'][1]:.2f})")
    return 0


def measure(arguments: argparse.Namespace, tier: str) -> dict[str, Any]:
    """Times of one engine; every chat with memory must have been injected, and from this tier."""
    from inferscale.cli.engine import prepare_engine

    prepare_engine(verbose=False)
    from inferscale import MemoryConfig, MemoryLLM
    from inferscale.bench.shapes import read_config, token_size_bytes
    from inferscale.config import ConnectorConfig

    conversation = read_conversation(arguments.conversation)
    config = read_config(Path(arguments.model))
    assert config is not None
    token_bytes = token_size_bytes(config, None)
    small = arguments.k * SMALL_TOKENS_A_FACT * token_bytes
    large = len(USERS) * len(conversation.turns) * SMALL_TOKENS_A_FACT * token_bytes
    with tempfile.TemporaryDirectory(prefix="inferscale-tiers-") as folder:
        connector = ConnectorConfig(
            pool_size_bytes=large if tier == "pool" else small,
            host_size_bytes=large if tier == "host" else 0,
            disk_size_bytes=large if tier == "disk" else 0,
            disk_dir=str(Path(folder) / "kv"),
            max_share=1.0,
        )
        with MemoryLLM(
            arguments.model,
            MemoryConfig(folder, embedder_device="cpu"),
            connector=connector,
            # A step must not capture more than the small pool holds.
            engine_args={"max_model_len": 8192, "max_num_batched_tokens": 1024},
        ) as llm:
            for user in USERS:
                llm.add(list(conversation.turns), user_id=user)
            times: dict[str, list[float]] = {tier: []}
            modes = ("inject", "text") if tier == "pool" else ("inject",)
            for number in range(-1, arguments.questions):
                question = conversation.questions[number % len(conversation.questions)]
                for user in USERS:
                    for mode in modes:
                        llm.engine.reset_prefix_cache()
                        result = llm.chat(question, user_id=user, top_k=arguments.k, mode=mode, max_tokens=1)
                        if mode == "inject" and result.num_missing_tokens:
                            raise SystemExit(
                                f"{result.num_missing_tokens} tokens of facts were prefilled: {llm.stats()}"
                            )
                        if number >= 0:
                            times.setdefault("text" if mode == "text" else tier, []).append(result.ttft_ms)
            return {"ttft_ms": times, "stats": llm.stats()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", help="a folder; default: the demo model")
    add("--conversation", type=Path, help="a LoCoMo file; default: the demo's conversation")
    add("--k", type=int, default=50)
    add("--questions", type=int, default=15, help="of each of two users")
    add("--out", type=Path, default=Path("benchmarks/results/tiers.jsonl"))
    add("--child", choices=TIERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model is None:
        from inferscale.models import ensure_demo_model

        arguments.model = str(ensure_demo_model())
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
