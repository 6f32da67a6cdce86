#!/usr/bin/env python3
"""What two replicas lose when one is killed, and when their database is out of reach for ten seconds.

    python benchmarks/drill.py             the catalog in a PostgreSQL server that it starts, where one is
                                           installed, or in that of $INFERSCALE_CATALOG
    python benchmarks/drill.py --sqlite    in the data folder; nothing can be cut off then

Starts `inferscale deploy ray` with a random model of two layers and 20 users who store, chat, search and
delete all the time. One replica is killed (SIGKILL) and comes back; then, where the catalog is a server,
nothing passes between it and the replicas for ten seconds. At the end it ends with 1 unless

- every fact that was acknowledged and not deleted is there, and what was deleted is in no answer since, and
  is unknown to both replicas;
- no answer of any kind held the secret code of another user: a fact in a prompt is in the answer's `memory`;
- errors were only those of requests that stored and were on the killed replica (503, which says so), and of
  requests while the database was out of reach, and in the ten seconds after;
- 95 % of each user's requests went to one replica, before the kill and after both failures.

No time decides. Needs `pip install "inferscale[ray]"`. Appended to OUT: counts, shares, and what went wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "tests"), str(FOLDER.parent / "tests" / "e2e")]

from delete_all import tiny_model  # noqa: E402
from drill_proxy import Proxy, through  # noqa: E402
from drill_users import (  # noqa: E402
    MODEL,
    REPLICA,
    REQUEST_S,
    STORES,
    Call,
    Client,
    Outage,
    User,
    affinity,
    errors_of,
    is_excused,
    lost,
    strangers,
)

from inferscale.bench.harness import BenchRun, command, environment  # noqa: E402
from memory_server import free_port  # noqa: E402
from postgres_server import MISSING, find_binaries, running  # noqa: E402

CATALOG = "INFERSCALE_CATALOG"
WANTED_AFFINITY = 0.95
_START_S, _RECOVERY_S = 600.0, 10.0


class Deployment:
    """`inferscale deploy ray` in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
        self.process = process
        self.url = url
        self.log_path = log_path
        self._http = httpx.Client(base_url=url, timeout=REQUEST_S, trust_env=False)

    def wait_ready(self, replicas: int) -> set[str]:
        """The names of the replicas, once so many answer."""
        end, seen = time.monotonic() + _START_S, set[str]()
        while time.monotonic() < end and self.process.poll() is None:
            try:
                answer = self._http.get("/health")
            except httpx.HTTPError:
                time.sleep(0.5)
                continue
            if answer.status_code == 200 and REPLICA in answer.headers:
                seen.add(answer.headers[REPLICA])
            if len(seen) >= replicas:
                return seen
            time.sleep(0.05)
        tail = self.log_path.read_text(errors="replace")[-3000:]
        raise SystemExit(f"{replicas} replicas do not answer; {len(seen)} did.\n{tail}")

    def close(self) -> None:
        self._http.close()

    def kill_one(self) -> None:
        """The process of a replica, which its engine does not outlive."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if " ".join(child.cmdline()).startswith("ray::ServeReplica:inferscale:Replica"):
                child.kill()
                return
        raise SystemExit("no process of a replica was found")


@contextmanager
def deployed(folder: Path, catalog: str | None, *options: str) -> Iterator[Deployment]:
    """options: further ones of the command."""
    port = free_port()
    start = [sys.executable, "-m", "inferscale.cli", "deploy", "ray", str(tiny_model(folder / "model"))]
    start += [
        "--replicas",
        "2",
        "--cpus-per-replica",
        "0.5",
        "--port",
        str(port),
        "--served-model-name",
        MODEL,
    ]
    start += ["--load-format", "dummy", "--max-model-len", "4096", "--pool-size", "256MiB", "--tail", "0"]
    start += [
        "--embedder",
        "static",
        "--embedder-device",
        "cpu",
        "--data-dir",
        str(folder / "memory"),
        *options,
    ]
    variables = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    variables.pop(CATALOG, None)
    variables |= {CATALOG: catalog} if catalog else {}
    log_path = folder / "deploy.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            start, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
    running = Deployment(process, f"http://127.0.0.1:{port}", log_path)
    try:
        yield running
    finally:
        running.close()
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
        for child in alive:
            child.kill()


@contextmanager
def under_load(clients: list[Client], pause_s: float) -> Iterator[None]:
    stop = threading.Event()

    def work(client: Client) -> None:
        while not stop.wait(pause_s):
            client.step()

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@dataclass
class Findings:
    """Of one drill."""

    users: list[User]
    outages: list[Outage] = field(default_factory=list)
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)
    restart_s: float = 0.0
    lost: int = 0
    strangers: int = 0
    known_after_deletion: int = 0

    @property
    def calls(self) -> list[Call]:
        return [call for user in self.users for call in user.calls]

    def affinity(self, phase: str) -> float:
        return affinity(self.calls, *self.phases[phase])

    def unexcused(self) -> list[Call]:
        return [call for call in errors_of(self.calls) if not is_excused(call, self.outages)]

    def problems(self) -> list[str]:
        found = [problem for user in self.users for problem in user.problems]
        counts = {
            "acknowledged facts are lost, or deleted ones are there": self.lost,
            "facts are there that nobody stored, or twice": self.strangers,
            "deleted facts are known to a replica": self.known_after_deletion,
        }
        found += [f"{count} {what}" for what, count in counts.items() if count]
        found += [f"{call.op} of {call.user}: {call.status} {call.detail}" for call in self.unexcused()]
        for phase in ("before", "after"):
            if self.affinity(phase) < WANTED_AFFINITY:
                found.append(f"affinity {phase}: {self.affinity(phase):.3f}, wanted is {WANTED_AFFINITY}")
        return found


def drill(deployment: Deployment, proxy: Proxy | None, arguments: argparse.Namespace) -> Findings:
    say("waiting for two replicas")
    deployment.wait_ready(2)
    found = Findings([User(f"user-{number:02d}") for number in range(arguments.users)])
    clients = [Client(deployment.url, user) for user in found.users]
    for client in clients:
        for _ in range(3):
            client.add()
    with under_load(clients, arguments.pause_s):
        phase(found, "before", lambda: time.sleep(arguments.phase_s))
        phase(found, "kill", lambda: _kill(deployment, found))
        if proxy is None:
            say("the catalog is a file: the partition of the database is SKIPPED")
        else:
            phase(found, "partition", lambda: _cut_off(proxy, found, arguments.partition_s))
        time.sleep(_RECOVERY_S)
        phase(found, "after", lambda: time.sleep(arguments.phase_s))
    say("looking for what was lost")
    for client in clients:
        there = client.all_facts()
        found.lost += len(lost(client.user, there))
        found.strangers += len(strangers(client.user, there))
        for id in list(client.user.deleted)[-3:]:
            found.known_after_deletion += client.statuses_of_all(id, 2) != {404}
    return found


def phase(found: Findings, name: str, act: Callable[[], None]) -> None:
    say(name)
    start = time.monotonic()
    act()
    found.phases[name] = (start, time.monotonic())


def _kill(deployment: Deployment, found: Findings) -> None:
    """What was to be stored on it may have failed; over when two replicas answer, one of them new."""
    start = time.monotonic()
    before = deployment.wait_ready(2)
    start = time.monotonic()
    deployment.kill_one()
    found.outages.append(Outage("kill", start, time.monotonic() + 1.0, (STORES,)))
    while len(deployment.wait_ready(2) - before) < 1:
        time.sleep(1)
    found.restart_s = time.monotonic() - start


def _cut_off(proxy: Proxy, found: Findings, seconds: float) -> None:
    start = time.monotonic()
    with proxy.cut_off():
        time.sleep(seconds)
    found.outages.append(Outage("partition", start, time.monotonic() + _RECOVERY_S, None))


def write(found: Findings, proxy: Proxy | None, out: Path) -> None:
    problems = found.problems()
    errors = Counter(f"{call.op} {call.status}" for call in errors_of(found.calls))
    config: dict[str, Any] = {
        "command": f"python benchmarks/{command()}",
        "environment": environment(),
        "baseline": None,
        "users": len(found.users),
        "replicas": 2,
        "catalog": "SQLite" if proxy is None else "PostgreSQL",
        "partition": "skipped: the catalog is a file" if proxy is None else "done",
        "errors": dict(errors),
        "problems": problems[:20],
    }
    run = BenchRun("drill", "tiny Llama (random weights)", out, config)
    run.add("requests", "count", [len(found.calls)])
    run.add("acknowledged", "count", [sum(len(u.kept) + len(u.deleted) for u in found.users)])
    run.add("deleted", "count", [sum(len(u.deleted) for u in found.users)])
    run.add("lost", "count", [found.lost])
    run.add("foreign_or_deleted_in_answers", "count", [sum(len(u.problems) for u in found.users)])
    run.add("deleted_but_known", "count", [found.known_after_deletion])
    run.add("errors_excused", "count", [len(errors_of(found.calls)) - len(found.unexcused())])
    run.add("errors_unexcused", "count", [len(found.unexcused())])
    for name in ("before", "after"):
        run.add("affinity", "share", [found.affinity(name)], mode=name)
    run.add("restart", "s", [found.restart_s])
    for row in run.rows:
        print(f"{row['metric']:32} {row['mode'] or '':8} {row['p50']:g} {row['unit']}")
    print("\n".join(problems) or "nothing was lost, mixed up or wrongly refused")


def find_catalog(stack: ExitStack) -> str | None:
    """The URL of a PostgreSQL database; None where there is none."""
    given, binaries = os.environ.get(CATALOG), find_binaries()
    if given or binaries is None:
        say("" if given else f"{MISSING}; the catalog is a file")
        return given
    return stack.enter_context(running(binaries)).schema_url("drill")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--sqlite", action="store_true")
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--phase-s", type=float, default=30, help="of the load before and after")
    parser.add_argument("--pause-s", type=float, default=0.5, help="of a user between two requests")
    parser.add_argument("--partition-s", type=float, default=10)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/drill.jsonl"))
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    with ExitStack() as stack:
        catalog = None if arguments.sqlite else find_catalog(stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inferscale-drill-")))
        proxy, url = (None, None) if catalog is None else through(stack, catalog)
        deployment = stack.enter_context(deployed(folder, url))
        found = drill(deployment, proxy, arguments)
    write(found, proxy, arguments.out)
    return int(bool(found.problems()))


if __name__ == "__main__":
    raise SystemExit(main())
