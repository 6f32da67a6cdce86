#!/usr/bin/env python3
"""Hard days of a server with memory: crowds, clients that leave, SIGKILL, two servers on one data folder.

    python benchmarks/server_stress.py                                 all parts, some minutes on two cores
    python benchmarks/server_stress.py --parts crowd --rounds 20

`crowd`: many streams at once, each user with a secret code that the model repeats when it is asked, while
others store, change and delete; the pool holds a part of the users, and vLLM's cache a part of the streams,
which are preempted. `leavers`: clients that go in the middle of everything. `kill`: SIGKILL while facts are
stored, changed, deleted and encoded, and a start on what is left. `pair`: two servers on one data folder, one
of them with two API processes. `processes`: a crowd and leavers on a server with two API processes.

Every part says what it found that must not be, and the exit status is 1 if there was any. Appended to OUT:
for each part the problems with what happened, and its times. Starts `inferscale serve` itself, with the demo
model. The parts are in tests/e2e/stress.py and stress_folders.py, and test_server_stress.py runs most of them
in small.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "tests" / "e2e"))

from inferscale.bench.harness import BenchRun, command, environment  # noqa: E402
from inferscale.models import ensure_demo_model  # noqa: E402
from memory_server import serving  # noqa: E402
from stress import SMALL, Crowd, Outcome, crowd, leavers  # noqa: E402
from stress_folders import Ledger, check_survived, pair, serving_from_two, write_and_kill  # noqa: E402

PARTS = ("crowd", "leavers", "kill", "pair", "processes")
DATABASE = "memory/catalog.sqlite3"


def main() -> int:
    arguments = parse()
    config = {"command": f"python benchmarks/{command()}", "environment": environment(), "flags": SMALL}
    run = BenchRun("server_stress", "SmolLM2-135M-Instruct", arguments.out, config)
    num_problems = 0
    for part in arguments.parts:
        whole = Outcome()
        with tempfile.TemporaryDirectory(prefix="inferscale-stress-") as folder:
            for outcome in _part(part, ensure_demo_model(), Path(folder), arguments):
                say(part, outcome)
                whole.add(outcome)
        num_problems += len(whole.problems)
        found = {"counts": dict(sorted(whole.counts.items())), "problems": whole.problems}
        run.add(f"{part}_problems", "count", [len(whole.problems)], config=found)
        for name, values in whole.times_ms.items():
            run.add(f"{part}_{name}", "ms", values)
    return int(num_problems > 0)


def _part(part: str, model: Path, folder: Path, arguments: argparse.Namespace) -> Iterator[Outcome]:
    if part == "crowd":
        with serving(model, folder, *SMALL) as server:
            yield crowd(server, arguments.users, arguments.streams, arguments.rounds)
    elif part == "leavers":
        with serving(model, folder, *SMALL) as server:
            yield leavers(server, arguments.streams * arguments.rounds)
    elif part == "processes":
        with serving_from_two(model, folder, *SMALL) as server:
            yield crowd(server, arguments.users, arguments.streams, arguments.rounds)
            yield leavers(server, arguments.streams * arguments.rounds)
    elif part == "kill":
        yield from _kills(model, folder, arguments.kills)
    else:
        data = ("--data-dir", str(folder / "memory"))
        (folder / "other").mkdir()
        two = serving_from_two(model, folder / "other", *SMALL, *data)
        with serving(model, folder, *SMALL) as one, two as other:
            yield pair(one, other, folder / DATABASE, rounds=10 * arguments.rounds, seconds=20)


def _kills(model: Path, folder: Path, num_kills: int) -> Iterator[Outcome]:
    """Each start on what the last kill left."""
    ledgers: list[Ledger] = []
    for number in range(num_kills + 1):
        start_s = time.perf_counter()
        with serving(model, folder, *SMALL) as server:
            started_ms = (time.perf_counter() - start_s) * 1e3
            if number:
                outcome = check_survived(server, ledgers, folder / DATABASE)
                outcome.counts["kills"] = 1
                outcome.times_ms["restart"] = [started_ms]
                yield outcome
                for user in [*(ledger.user for ledger in ledgers), *Crowd(server, "survivor", 4).users]:
                    server.call("DELETE", "/v1/memories", user_id=user)
            if number < num_kills:
                ledgers = write_and_kill(server, 8, 2 + 3 * random.Random(number).random())


def say(part: str, outcome: Outcome) -> None:
    counts = ", ".join(f"{name} {count}" for name, count in sorted(outcome.counts.items()))
    print(f"{part}: {counts}", flush=True)
    for name, values in outcome.times_ms.items():
        ordered = sorted(values)
        middle, late = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
        print(f"    {name}: p50 {middle:.0f} ms, p99 {late:.0f} ms, n={len(ordered)}", flush=True)
    for problem in outcome.problems:
        print(f"    PROBLEM: {problem}", flush=True)


def parse(texts: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS))
    add("--users", type=int, default=32)
    add("--streams", type=int, default=64, help="at once")
    add("--rounds", type=int, default=5, help="times that all streams run, and so on for the other parts")
    add("--kills", type=int, default=4)
    add("--out", type=Path, default=Path("benchmarks/results/server_stress.jsonl"))
    arguments = parser.parse_args(texts)
    arguments.parts = [part.strip() for part in arguments.parts.split(",")]
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts has {', '.join(sorted(unknown))}; allowed are {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
