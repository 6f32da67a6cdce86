"""A server in a crowd, and with clients that leave: parts that tests and benchmarks/server_stress.py run.

A part does its work on a server of `SMALL` and gives an `Outcome`; it raises where not even that can be had.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import httpx

from inferscale.models import ensure_demo_model
from memory_server import MODEL, MemoryServer, events

SMALL = (
    *("--disk-size", "1GiB", "--pool-size", "40MiB"),  # 1,820 tokens of SmolLM2: about half of 32 users
    *("--block-size", "32", "--num-gpu-blocks-override", "20", "--max-model-len", "512"),
)
"""Flags of a server that evicts and preempts all the time."""
FACTS = 6
QUESTIONS = ("What is my secret code?", "Tell me: what is my secret code?", "My secret code is which one?")


@dataclass
class Outcome:
    """What a part found. problems: what must not be, in words. counts: what happened. times_ms: by metric."""

    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    times_ms: dict[str, list[float]] = field(default_factory=dict)

    def check(self, is_right: bool, problem: str) -> None:
        if not is_right:
            self.problems.append(problem)

    def add(self, other: Outcome) -> None:
        self.problems += other.problems
        self.counts.update(other.counts)
        for name, values in other.times_ms.items():
            self.times_ms.setdefault(name, []).extend(values)


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
        "model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 20,
        "ignore_eos": True,  # streams grow beyond the blocks that they began with
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
    of_vllm = {"preemptions_in_vllm": int(metric(server, "vllm:num_preemptions_total"))}
    return {
        **stats["pool"],
        **stats["counters"],
        **of_vllm,
        "pending": stats["pending"],
        "facts": stats["facts"],
    }


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
    for name in ("evictions", "preemptions", "preemptions_in_vllm", "tokens_injected", "captures"):
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
        check_answer(outcome, people, user, answer)
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


def check_answer(outcome: Outcome, people: Crowd, user: str, answer: Streamed) -> None:
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
        body["max_tokens"] = 60
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
        check_answer(outcome, people, user, answer)
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
