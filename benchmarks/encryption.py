#!/usr/bin/env python3
"""What encryption at rest costs: one catalog and one folder of KV, in plain and encrypted.

    python benchmarks/encryption.py                 50,000 facts of 500 users

Vectors are random and texts made up, so no model is needed and no embedding is timed. Both catalogs are open
at once and take turns, call by call, so that other work on the machine meets both alike; ratios are those of
the calls of one turn. `open` reads the index in a catalog that was just opened. KV is that of facts of 30
tokens, saved to disk and loaded again, the file in the page cache. Rows are appended to OUT.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale.bench.harness import BenchRun, command, environment
from inferscale.catalog_url import IN_FOLDER
from inferscale.config import MemoryConfig
from inferscale.encryption import KEY_VARIABLE, EncryptionKey
from inferscale.facts import Scope, Turn
from inferscale.memory import Memory
from inferscale.pool.disk import DiskStore, format_name
from inferscale.pool.sealing import Sealing

DIM = 384
BATCH = 100
NUM_TOKENS = 30
TOKEN_BYTES = {"SmolLM2-135M": 23_040, "Llama-3.1-8B": 131_072}
QUESTION = "Where did my cousin play the piano in winter?"
WORDS = (
    "garden", "sister", "Oslo", "walnut", "bicycle", "concert", "river", "piano", "doctor", "train",
    "recipe", "winter", "cousin", "lake",
)  # fmt: skip
SECRET = bytes(range(32))

Calls = Mapping[str, Callable[[int], object]]
"""By mode; called with the number of the turn."""


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
    os.environ.pop(KEY_VARIABLE, None)
    parent = Path(arguments.folder) if arguments.folder else None
    folder = Path(tempfile.mkdtemp(prefix="inferscale-encryption-", dir=parent))
    config = {
        "command": f"python benchmarks/{command()}",
        "environment": environment(),
        "baseline": "mode plain: the same calls in turn, without a key",
        "facts": arguments.facts,
        "users": arguments.users,
        "dim": DIM,
        "vectors": "random",
    }
    run = BenchRun("encryption", "made-up", arguments.out, config)
    try:
        measure_catalog(folder, arguments, run)
        for model, token_bytes in TOKEN_BYTES.items():
            measure_kv(folder / "kv", model, token_bytes, arguments.repeats, run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_catalog(folder: Path, arguments: argparse.Namespace, run: BenchRun) -> None:
    key_file = folder / "key"
    key_file.touch(0o600)
    key_file.write_text(SECRET.hex())
    configs = {
        mode: MemoryConfig(folder / mode, embedder_device="cpu", encryption_key_file=file, catalog=IN_FOLDER)
        for mode, file in (("plain", None), ("encrypted", key_file))
    }
    repeats = arguments.repeats
    with opened(configs) as memories:
        for memory in memories.values():
            memory.catalog.record_embedder("random", DIM)
        fill = {mode: adder(memory, arguments.users) for mode, memory in memories.items()}
        compare(run, "add_batch_time", fill, arguments.facts // BATCH, batch=BATCH, includes="catalog only")
    for mode in configs:
        run.add("catalog_size", "byte", [file_bytes(folder / mode)], mode=mode)
    compare(run, "open_time", {mode: opener(config) for mode, config in configs.items()}, 5)
    with opened(configs) as memories:
        for memory in memories.values():
            memory.load()
        first = {mode: searcher(memory) for mode, memory in memories.items()}
        searched = min(repeats, arguments.users - 1)
        compare(run, "search_time", first, searched, of="one user, the first time", top_k=50)
        compare(run, "search_time", first, searched, of="one user, again", top_k=50)
        single = {
            mode: lambda turn, m=memory: m.add("one more fact", user_id=f"user-{turn}")
            for mode, memory in memories.items()
        }
        compare(run, "add_time", single, repeats, num_facts=1)
        gone = {mode: deleter(memory, repeats) for mode, memory in memories.items()}
        compare(run, "delete_time", gone, repeats, num_facts=1)


def measure_kv(folder: Path, model: str, token_bytes: int, repeats: int, run: BenchRun) -> None:
    rows = memoryview(os.urandom(NUM_TOKENS * token_bytes))
    key = os.urandom(16).hex()
    stores = {}
    for mode, sealing in (("plain", None), ("encrypted", Sealing(EncryptionKey(SECRET)))):
        stores[mode] = DiskStore(folder, format_name(model, token_bytes, 1, sealing), 0, token_bytes, sealing)
        stores[mode].open()
    about = {"kv_of": model, "tokens": NUM_TOKENS, "bytes": len(rows)}
    saves = {mode: lambda turn, s=store: s.write(key, rows, turn) for mode, store in stores.items()}
    compare(run, "kv_save_time", saves, repeats, **about)
    loads = {mode: lambda turn, s=store: s.read(key, NUM_TOKENS) for mode, store in stores.items()}
    compare(run, "kv_load_time", loads, repeats, **about)


def compare(run: BenchRun, metric: str, calls: Calls, repeats: int, **config: Any) -> None:
    """Time the calls of all modes in turn, the first of each turn another one."""
    times: dict[str, list[float]] = {mode: [] for mode in calls}
    for turn in range(repeats):
        for mode in sorted(calls, reverse=bool(turn % 2)):
            start = time.perf_counter()
            calls[mode](turn)
            times[mode].append((time.perf_counter() - start) * 1e3)
    for mode, found in times.items():
        run.add(metric, "ms", found, mode=mode, config=config)
    ratio = run.add_ratio(metric, "encrypted/plain", times["encrypted"], times["plain"], config=config)
    shown = ", ".join(f"{mode} {np.median(found):.3f} ms" for mode, found in times.items())
    print(f"{metric} {config or ''}: {shown}, ratio {ratio['p50']}", file=sys.stderr, flush=True)


def adder(memory: Memory, users: int) -> Callable[[int], object]:
    embedder = RandomEmbedder()

    def add(turn: int) -> None:
        turns = [Turn(text_of(turn * BATCH + n), "user", "3 May 2025", {"n": n}) for n in range(BATCH)]
        memory.catalog.add_facts(Scope(f"user-{turn % users}"), turns, embedder.embed([""] * BATCH))

    return add


def opener(config: MemoryConfig) -> Callable[[int], object]:
    def open_and_load(_: int) -> None:
        with Memory(config, embedder=RandomEmbedder()) as memory:
            memory.load()

    return open_and_load


def searcher(memory: Memory) -> Callable[[int], object]:
    return lambda turn: memory.search(QUESTION, user_id=f"user-{turn}", top_k=50)


def deleter(memory: Memory, repeats: int) -> Callable[[int], object]:
    facts = memory.catalog.facts(Scope(), repeats)
    return lambda turn: memory.delete(facts[turn].id)


def text_of(number: int) -> str:
    picked = [WORDS[number // len(WORDS) ** place % len(WORDS)] for place in range(6)]
    return f"My {' '.join(picked)} is number {number}."


@contextmanager
def opened(configs: Mapping[str, MemoryConfig]) -> Iterator[dict[str, Memory]]:
    with ExitStack() as stack:
        yield {
            mode: stack.enter_context(Memory(config, embedder=RandomEmbedder()))
            for mode, config in configs.items()
        }


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--facts", type=int, default=50_000)
    parser.add_argument("--users", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=200, help="of single calls")
    parser.add_argument("--folder", help="where the data folders are made; default: the system's")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/encryption.jsonl"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
