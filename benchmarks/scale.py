#!/usr/bin/env python3
"""One catalog with very many facts: how long it takes to add, find, page, delete and start.

    python benchmarks/scale.py                                     1,000,000 facts over 10,000 users
    python benchmarks/scale.py --facts 20000 --users 200           a trial

Vectors are random and texts made up, so no model is needed and no embedding is timed; everything else is what
`Memory` does, on a folder that is made anew and removed. One user has 10,000 facts, one 800, all others as
many as each other; the two, and those whose facts are deleted one by one, have encode passes, as served facts
do. `start` reads the index in a process that has just opened the folder. `mean_cpu_ms` is what a call takes
of the processor, of all threads: where other work runs beside, times are longer. Rows are appended to OUT.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from inferscale.bench.harness import BenchRun, command, environment
from inferscale.catalog import NewPass
from inferscale.catalog_url import IN_FOLDER
from inferscale.config import MemoryConfig
from inferscale.errors import UnknownScope
from inferscale.facts import Fact, Scope, Turn
from inferscale.memory import Memory
from inferscale.operations.audit import audit
from inferscale.operations.backup import backup

DIM = 384
MODEL = "made-up"
BIG, RESET = "big", "reset"
NUM_RESET = 800
NUM_TIMED = 300
STRIDE = 20
BATCH = 100
QUESTION = "Where did my cousin play the piano in winter?"
WORDS = (
    "garden", "sister", "Oslo", "walnut", "bicycle", "concert", "river", "piano", "Tuesday", "doctor",
    "train", "recipe", "blue", "winter", "cousin", "lake", "school", "market", "ticket", "letter", "window",
    "office", "puppy", "museum", "coffee", "island", "meeting", "flight", "birthday", "neighbour",
)  # fmt: skip


class RandomEmbedder:
    """Unit vectors of no meaning."""

    name, dim = "random", DIM

    def __init__(self) -> None:
        self._generator = np.random.default_rng(0)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = self._generator.standard_normal((len(texts), DIM), dtype=np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def main() -> None:
    arguments = parse()
    parent = Path(arguments.folder) if arguments.folder else None
    folder = Path(tempfile.mkdtemp(prefix="inferscale-scale-", dir=parent))
    config = {
        "command": f"python benchmarks/{command()}",
        "environment": environment(),
        "baseline": "none",
        "facts": arguments.facts,
        "users": arguments.users,
        "dim": DIM,
        "vectors": "random",
    }
    run = BenchRun("scale", MODEL, arguments.out, config)
    try:
        with opened(folder) as memory:
            fill(memory, arguments, run)
        run.add("catalog_size", "byte", [file_bytes(folder)])
        with opened(folder) as memory:
            measure(memory, arguments, run)
        run.add("audit_time", "s", [timed(lambda: audit(folder, Scope(BIG))) / 1e3])
        run.add("backup_time", "s", [timed(lambda: backup(folder, folder / "copy")) / 1e3])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fill(memory: Memory, arguments: argparse.Namespace, run: BenchRun) -> None:
    """Store all facts in batches of one user, the users in turn, as they come in a running server."""
    memory.catalog.record_embedder("random", DIM)
    counts = {BIG: arguments.big, RESET: NUM_RESET}
    rest, others = arguments.facts - sum(counts.values()), arguments.users - len(counts)
    counts |= {f"user-{i}": rest // others + (i < rest % others) for i in range(others)}
    embedder, words = RandomEmbedder(), itertools.cycle(range(10**9))
    times, num_facts, start = [], 0, time.perf_counter()
    for user, size in batches(counts):
        turns = [Turn(text_of(next(words)), "user", "3 May 2025", {"n": i}) for i in range(size)]
        vectors = embedder.embed([""] * size)
        times.append(timed(lambda u=user, t=turns, v=vectors: memory.catalog.add_facts(Scope(u), t, v)))
        num_facts += size
        if len(times) % 500 == 0:
            say(f"{num_facts} facts, {time.perf_counter() - start:.0f} s, {rss_mib():.0f} MiB")
    run.add("add_batch_time", "ms", times, config={"batch": BATCH, "includes": "catalog only"})
    for user in (BIG, RESET, *timed_users(arguments)):
        record_passes(memory, Scope(user))


def measure(memory: Memory, arguments: argparse.Namespace, run: BenchRun) -> None:
    before = rss_mib()
    run.add(
        "start_time",
        "s",
        [timed(memory.load) / 1e3],
        config={"includes": "import of torch, reading the index"},
    )
    run.add("memory", "MiB", [rss_mib() - before], config={"of": "the index"})
    run.add("memory", "MiB", [rss_mib()], config={"of": "the process"})
    random = np.random.default_rng(1)
    users = [f"user-{i}" for i in random.integers(0, arguments.users - 2, size=NUM_TIMED)]

    def measured(name: str, calls: Sequence[Callable[[], object]], **config: Any) -> None:
        cpu_s = time.process_time()
        times = [timed(call) for call in calls]
        cpu_ms = round((time.process_time() - cpu_s) * 1e3 / len(calls), 3)
        row = run.add(f"{name}_time", "ms", times, config={**config, "mean_cpu_ms": cpu_ms})
        say(f"{name} {config or ''} p50 {row['p50']} ms, p99 {row['p99']} ms, cpu {cpu_ms}, n {row['n']}")

    within = {"n": {"gte": 50}}
    third = NUM_TIMED // 3

    def find(user: str, filters: dict[str, Any] | None = None) -> Callable[[], object]:
        return lambda: memory.search(QUESTION, user_id=user, top_k=50, filters=filters)

    measured("search", [find(user) for user in users], of="one user", top_k=50)
    measured("search", [find(user, within) for user in users], of="one user", top_k=50, filters=within)
    measured("search", [find(BIG)] * third, of="user of many facts", top_k=50)
    measured("search", [find(BIG, within)] * third, of="user of many facts", top_k=50, filters=within)
    measured("search", [lambda: unknown(memory)] * (NUM_TIMED // 15 + 1), of="nobody")
    measured("page", [lambda u=user: memory.page(user_id=u, limit=100) for user in users], limit=100)
    measured(
        "page", [pages(memory, BIG, 10)] * (NUM_TIMED // 15 + 1), limit=100, pages=10, of="user of many facts"
    )
    measured("add", [lambda u=user: memory.add("one more fact", user_id=u) for user in users], num_facts=1)
    measured("add_and_search", [after_add(memory, user) for user in users[:third]], top_k=50)
    facts = [fact for user in timed_users(arguments) for fact in memory.get_all(user_id=user)][:NUM_TIMED]
    measured("delete", [lambda f=fact: memory.delete(f.id) for fact in facts], num_facts=1)
    measured("delete_all", [lambda: memory.delete_all(user_id=RESET)], num_facts=NUM_RESET)
    measured("delete_all", [lambda: memory.delete_all(user_id=BIG)], num_facts=arguments.big)
    left = memory.count(user_id=BIG) + memory.count(user_id=RESET)
    assert left == 0, left
    run.add("memory", "MiB", [rss_mib()], config={"of": "the process, at the end"})


def batches(counts: dict[str, int]) -> Iterator[tuple[str, int]]:
    """User and size of each add: in rounds, at most BATCH facts of a user in each."""
    left = dict(counts)
    while left:
        for user in list(left):
            size = min(BATCH, left[user])
            yield user, size
            left[user] -= size
            if not left[user]:
                del left[user]


def record_passes(memory: Memory, scope: Scope) -> None:
    """Passes of STRIDE facts behind a window of as many, with keys of no KV."""
    facts = memory.catalog.facts(scope)
    passes = []
    for start in range(0, len(facts), STRIDE):
        window, captured = facts[max(0, start - STRIDE) : start], facts[start : start + STRIDE]
        passes.append(NewPass(ids(window), ids(captured), [key_of(fact) for fact in captured]))
    memory.catalog.passes.record_all(MODEL, scope, passes)


def timed_users(arguments: argparse.Namespace) -> list[str]:
    """Enough of them for the single deletions, which come in the order of the facts of each."""
    return [f"user-{i}" for i in range(min(arguments.users - 2, 10))]


def pages(memory: Memory, user: str, num_pages: int) -> Callable[[], None]:
    def read() -> None:
        after = None
        for _ in range(num_pages):
            after = memory.page(user_id=user, limit=100, after=after).next_cursor

    return read


def after_add(memory: Memory, user: str) -> Callable[[], object]:
    """An add of another user, and the search after it, for which the index has to follow."""

    def search() -> None:
        memory.add("of somebody else", user_id="somebody")
        memory.search(QUESTION, user_id=user, top_k=50)

    return search


def unknown(memory: Memory) -> None:
    with suppress(UnknownScope):
        memory.search(QUESTION, user_id="nobody")


def text_of(number: int) -> str:
    picked = [WORDS[number // len(WORDS) ** place % len(WORDS)] for place in range(6)]
    return f"My {' '.join(picked)} is number {number}."


def ids(facts: Sequence[Fact]) -> list[str]:
    return [fact.id for fact in facts]


def key_of(fact: Fact) -> str:
    return fact.id.replace("-", "")


@contextmanager
def opened(folder: Path) -> Iterator[Memory]:
    config = MemoryConfig(folder, embedder_device="cpu", catalog=IN_FOLDER)
    with Memory(config, embedder=RandomEmbedder()) as memory:
        yield memory


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def rss_mib() -> float:
    return float(psutil.Process(os.getpid()).memory_info().rss / 2**20)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--facts", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--big", type=int, default=10_000, help="facts of the user of many facts")
    parser.add_argument("--folder", help="where the data folder is made; default: the system's")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scale.jsonl"))
    read = parser.parse_args(arguments)
    if read.users < 13 or read.facts < read.big + NUM_RESET + 100 * read.users // 2:
        parser.error("give at least 13 users, and 50 facts for each beside those of the two large ones")
    return read


if __name__ == "__main__":
    main()
