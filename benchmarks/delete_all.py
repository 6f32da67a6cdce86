#!/usr/bin/env python3
"""How long a server takes to forget a user with thousands of facts, whose KV lies in all tiers.

    python benchmarks/delete_all.py                     10,000 facts of one user, 500 of another, a tiny model
    python benchmarks/delete_all.py --facts 1000

Starts `inferscale serve` with a random model of two layers, stores the facts over HTTP, waits until all are
encoded, and deletes one user with a single request. Afterwards that user must have nothing, `inferscale
audit` must find nothing, and the other user's facts must all be there and injectable; else it exits with 1.
Appended to OUT: times of the deletion, of a chat that was sent while it ran, and of the audit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "tests" / "e2e"))

from inferscale.bench.harness import BenchRun, command, environment  # noqa: E402
from inferscale.models import ensure_demo_model  # noqa: E402
from memory_server import MemoryServer, serving  # noqa: E402

_BATCH = 500
_OTHERS = 500
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="inferscale-delete-") as name:
        folder = Path(name)
        flags = ("--load-format", "dummy", "--pool-size", "512MiB", "--host-size", "512MiB")
        flags += ("--disk-size", "1GiB", "--embedder", "static")
        with serving(tiny_model(folder / "tiny"), folder, *flags) as server:
            return measure(server, folder, arguments)


def tiny_model(folder: Path) -> Path:
    """The demo model's tokenizer, and a shape that is encoded in no time. Has no weights."""
    folder.mkdir()
    for path in ensure_demo_model().iterdir():
        if path.suffix in (".json", ".jinja", ".txt"):
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **_TINY}), encoding="utf-8")
    return folder


def measure(server: MemoryServer, folder: Path, arguments: argparse.Namespace) -> int:
    texts = store(server, "ana", arguments.facts)
    store(server, "bob", _OTHERS)
    before = encoded(server)
    chat_ms: list[float] = []
    chat = threading.Thread(target=lambda: chat_ms.append(asked(server)))
    start_s = time.perf_counter()
    chat.start()
    status, answer = server.call("DELETE", "/v1/memories", user_id="ana")
    delete_s = time.perf_counter() - start_s
    chat.join()
    assert status == 200, answer
    problems = []
    if answer["deleted"] != arguments.facts:
        problems.append(f"{answer['deleted']} facts were deleted")
    _, page = server.call("GET", "/v1/memories", user_id="ana", limit=10)
    if page["data"]:
        problems.append(f"{len(page['data'])} facts or more are still listed")
    _, others = server.call("GET", "/v1/memories", user_id="bob", limit=1000)
    if sum(fact["injectable"] for fact in others["data"]) != _OTHERS:
        problems.append("facts of the other user cannot be injected any more")
    (folder / "texts").write_text("\n".join(texts), encoding="utf-8")
    audit_s, found = audited(server, folder)
    if found:
        problems.append(f"the audit found: {found}")
    config: dict[str, Any] = {
        "command": f"python benchmarks/{command()}",
        "environment": environment(),
        "baseline": None,
        "facts": arguments.facts,
        "facts_of_others": _OTHERS,
        "segments_before": before,
        "problems": problems,
    }
    run = BenchRun("delete_all", "tiny Llama (random weights)", arguments.out, config)
    for metric, seconds in (("delete", delete_s), ("audit", audit_s)):
        run.add(metric, "ms", [seconds * 1e3])
    run.add("chat_meanwhile", "ms", chat_ms)
    print(f"deleted {arguments.facts} facts in {delete_s:.2f} s; a chat meanwhile took {chat_ms[0]:.0f} ms")
    print("\n".join(problems) or f"nothing left of them (audit: {audit_s:.1f} s)")
    return int(bool(problems))


def store(server: MemoryServer, user: str, count: int) -> list[str]:
    """Facts of a user; returns their texts, which name no other user."""
    texts = [f"Secret {user}-{number:05d} lies in box {number * 7919 % 100003}." for number in range(count)]
    for start in range(0, count, _BATCH):
        items = [{"text": text} for text in texts[start : start + _BATCH]]
        status, answer = server.call("POST", "/v1/memories", {"user_id": user, "items": items})
        assert status == 201, answer
    return texts


def encoded(server: MemoryServer) -> dict[str, int]:
    """Wait until everything is; how many segments each tier has."""
    while True:
        _, stats = server.call("GET", "/v1/memories/stats")
        if not stats["pending"]:
            break
        time.sleep(0.5)
    there = {**stats["pool"], **stats["counters"]}
    return {name: there[name] for name in ("resident_segments", "host_segments", "disk_segments")}


def asked(server: MemoryServer) -> float:
    """Time of a chat of the other user, in ms."""
    start_s = time.perf_counter()
    server.chat("Where is it?", {"user_id": "bob", "top_k": 20}, max_tokens=1)
    return (time.perf_counter() - start_s) * 1e3


def audited(server: MemoryServer, folder: Path) -> tuple[float, str]:
    """Seconds, and what `inferscale audit` says where it found anything."""
    start_s = time.perf_counter()
    audit = [sys.executable, "-m", "inferscale.cli", "audit", "--user-id", "ana", "--url", server.url]
    audit += ["--texts", str(folder / "texts"), "--data-dir", str(folder / "memory")]
    done = subprocess.run(audit, capture_output=True, text=True, check=False)
    return time.perf_counter() - start_s, "" if done.returncode == 0 else done.stdout + done.stderr


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--facts", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/delete_all.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
