#!/usr/bin/env python3
"""Measure all that is reported, on this machine: every benchmark, every model shape, tables and plots.

    python benchmarks/reproduce.py                                  four shapes, random weights, all parts
    python benchmarks/reproduce.py --shapes llama-3.1-8b --parts ttft,throughput
    python benchmarks/reproduce.py --conversation locomo10.json --tokenizer FOLDER

All GPU rows of docs/performance.md, without a network; the folders are those of any tokenizer (SmolLM2's was
used) and of all-MiniLM-L6-v2:

    python benchmarks/reproduce.py --shapes llama-3.1-8b --injection-path fused --questions 40 \\
        --tokenizer FOLDER --embedder FOLDER --embedder-device cpu,cuda --conversation locomo10.json --tail 0

One GPU is enough. `ttft`, `throughput` and `encode` share one start of the engine for each shape; each shape
runs in a process of its own, since an engine gives back its memory only with its process. Rows are
appended to OUT/PART.jsonl; at the end the tables go to OUT/report.md and the plots to OUT/plots. `e2e`
needs --tokenizer, `recall` needs --conversation, `kernels` a CUDA GPU; a part that cannot run is said.

Rows name the commit of the checkout. On a machine that has only a copy of the files, give it in the
environment: INFERSCALE_COMMIT=$(git describe --always --dirty=+ --exclude='*' --abbrev=12) where the
history is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from inferscale.config import DEFAULT_TAIL

FOLDER = Path(__file__).parent
SHAPES = "llama-3.1-8b,mistral-7b-v0.3,qwen2.5-7b,qwen3-14b"
ENGINE_PARTS = ("ttft", "throughput", "encode")
SHAPE_PARTS = ("decode", "e2e", "kernels", "timeline")
MACHINE_PARTS = ("host_time", "recall")
PARTS = (*ENGINE_PARTS, *SHAPE_PARTS, *MACHINE_PARTS, "report")


def main() -> int:
    arguments = parse()
    if arguments.suite:
        return run_suite(arguments)
    times: list[tuple[str, float, int]] = []
    for shape in arguments.shapes:
        if set(arguments.parts) & set(ENGINE_PARTS):
            command = [sys.executable, __file__, *sys.argv[1:], "--suite", "--shapes", shape]
            times.append(timed(f"{shape}: {', '.join(ENGINE_PARTS)}", command))
        for part in SHAPE_PARTS:
            if part in arguments.parts:
                times.append(timed(f"{shape}: {part}", command_of(part, shape, arguments)))
    for part in MACHINE_PARTS:
        if part in arguments.parts:
            times.append(timed(part, command_of(part, "", arguments)))
    if "report" in arguments.parts:
        write_report(arguments.out)
    print()
    for name, seconds, status in times:
        what = {0: "", SKIPPED: "  left out"}.get(status, f"  FAILED ({status})")
        print(f"{seconds:7.0f} s  {name}{what}")
    return int(any(status not in (0, SKIPPED) for _, _, status in times))


SKIPPED = -1


def timed(name: str, command: list[str] | str) -> tuple[str, float, int]:
    """Run a command, or say why there is none."""
    print(f"=== {name}", flush=True)
    if isinstance(command, str):
        print(command, flush=True)
        return name, 0.0, SKIPPED
    start_s = time.perf_counter()
    status = subprocess.run(command).returncode
    seconds = time.perf_counter() - start_s
    print(f"=== {name}: {seconds:.0f} s, exit status {status}", flush=True)
    return name, seconds, status


def command_of(part: str, shape: str, arguments: argparse.Namespace) -> list[str] | str:
    """The command of a part, or why it is left out."""
    is_script = part in ("host_time", "timeline")
    program = [str(FOLDER / f"{part}.py")] if is_script else ["-m", "inferscale.cli", "bench", part]
    command = [sys.executable, *program, "--out", str(arguments.out / f"{part}.jsonl")]
    embedder = ["--embedder", str(arguments.embedder)] if arguments.embedder else []
    conversation = ["--conversation", str(arguments.conversation)] if arguments.conversation else []
    if part == "recall":
        if not conversation:
            return "Left out: it needs --conversation."
        return [*command, *conversation, *embedder]
    if part == "host_time":
        return [*command, "--k", str(arguments.k)]
    if part == "kernels":
        import torch

        return [*command, "--shape", shape] if torch.cuda.is_available() else "Left out: no CUDA GPU."
    command += ["--random-weights", shape, "--injection-path", arguments.injection_path]
    command += ["--enforce-eager"] if arguments.enforce_eager else []
    command += [word for text in arguments.engine_arg for word in ("--engine-arg", text)]
    if part == "decode":
        batches = ["--batches", arguments.batches, "--k", str(arguments.k)]
        return [*command, *batches, "--output-tokens", str(arguments.decode_tokens)]
    if part == "timeline":
        ks = ",".join(map(str, arguments.ks))
        return [*command, "--k", ks, "--questions", str(arguments.questions)]
    if arguments.tokenizer is None:
        return "Left out: it needs --tokenizer."
    command += ["--tokenizer", str(arguments.tokenizer), *conversation, "--k", str(arguments.k)]
    command += ["--questions", str(arguments.questions), "--tail", arguments.tail]
    return [*command, *embedder, "--embedder-device", arguments.embedder_device]


def run_suite(arguments: argparse.Namespace) -> int:
    """The parts that share an engine, for one shape, in this process."""
    from inferscale.cli.engine import prepare_engine

    prepare_engine(verbose=arguments.verbose)
    from inferscale.bench.engine import random_weights
    from inferscale.bench.options import EncodeOptions, RandomTokens, ThroughputOptions, TtftOptions
    from inferscale.bench.suite import SuiteOptions, measure_suite
    from inferscale.cli.bench_options import read_engine_args
    from inferscale.tail import Tail
    from inferscale.windows import sliding

    options = SuiteOptions(
        TtftOptions(arguments.ks, arguments.questions, Tail.parse(arguments.tail)),
        replace(
            ThroughputOptions(),
            users=arguments.users,
            k=arguments.k,
            output_tokens=arguments.output_tokens,
            rounds=arguments.rounds,
            repeats=arguments.repeats,
            tail=Tail.parse(arguments.tail),
        ),
        EncodeOptions(arguments.facts),
        RandomTokens(),
        sliding(20, 20),
    )
    spec = random_weights(
        arguments.shapes[0],
        enforce_eager=arguments.enforce_eager,
        injection_path=arguments.injection_path,
        extra=read_engine_args(arguments.engine_arg),
    )
    parts = [part for part in ENGINE_PARTS if part in arguments.parts]
    done = measure_suite(spec, parts, options, arguments.out, lambda text: print(text, flush=True))
    for part in done:
        print(f"  {part.seconds:7.1f} s  {part.name}" + (f"  FAILED: {part.error}" if part.error else ""))
    return int(any(part.error for part in done))


def write_report(folder: Path) -> None:
    """Tables and plots of everything that lies in the folder."""
    from inferscale.bench.harness import read_rows
    from inferscale.bench.plots import plot_runs
    from inferscale.bench.report import report

    rows = [row for file in sorted(folder.glob("*.jsonl")) for row in read_rows(file)]
    if rows:
        (folder / "report.md").write_text(report(rows), encoding="utf-8")
        plot_runs(rows, folder / "plots")
        print(f"Tables in {folder / 'report.md'}, plots in {folder / 'plots'}.")


def parse(texts: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--shapes", default=SHAPES, help="names, or paths of a config.json, separated by commas")
    add("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    add("--out", type=Path, default=Path("benchmarks/results"))
    add("--tokenizer", type=Path, help="a folder, for e2e")
    add("--embedder", type=Path, help="a folder, for e2e and recall; default: all-MiniLM-L6-v2, fetched")
    add("--conversation", type=Path, help="a LoCoMo file, for e2e and recall")
    add("--ks", default="50,200", help="numbers of facts of ttft and timeline")
    add("--k", type=int, default=50, help="facts of a request everywhere else")
    add("--questions", type=int, default=30, help="of ttft, e2e and timeline, each mode")
    add("--tail", default=DEFAULT_TAIL, help="facts that are recomputed in ttft, throughput and e2e")
    add("--users", type=int, default=100)
    add("--rounds", type=int, default=2)
    add("--repeats", type=int, default=3)
    add("--output-tokens", type=int, default=50, help="of throughput")
    add("--facts", type=int, default=4000, help="of encode")
    add("--batches", default="1,64", help="of decode")
    add("--decode-tokens", type=int, default=128)
    add("--embedder-device", default="cpu", help="of e2e; several with commas")
    add("--enforce-eager", action="store_true")
    add("--injection-path", default="auto", choices=("auto", "fused", "portable"))
    add(
        "--engine-arg",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="a further argument of vllm.LLM in every part that has an engine, such as block_size=64",
    )
    add("--verbose", action="store_true", help="show the engine's log")
    add("--suite", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(texts)
    arguments.shapes = [name.strip() for name in arguments.shapes.split(",")]
    arguments.parts = [name.strip() for name in arguments.parts.split(",")]
    arguments.ks = tuple(int(k) for k in arguments.ks.split(","))
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts has {', '.join(sorted(unknown))}; allowed are {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
