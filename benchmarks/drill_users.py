"""The users of the drill: what each one does, what has to be there afterwards, and what may have failed."""

from __future__ import annotations

import random
import re
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

MODEL = "tiny"
REPLICA = "x-inferscale-replica"
STORES = "add"
CODE = re.compile(r"C[0-9a-f]{16}")
REQUEST_S = 120.0


class Call(NamedTuple):
    """One request. status: None where no answer came. replica: that answered it."""

    start_s: float
    end_s: float
    user: str
    op: str
    status: int | None
    replica: str | None
    detail: str = ""


class Outage(NamedTuple):
    """ops: those that may fail while it lasts; None for all."""

    what: str
    start_s: float
    end_s: float
    ops: tuple[str, ...] | None


@dataclass
class User:
    """What one user did, and what has to be there. unsure: texts of stores without an answer."""

    name: str
    code: str = field(default_factory=lambda: f"C{secrets.token_hex(8)}")
    kept: dict[str, str] = field(default_factory=dict)
    deleted: dict[str, str] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    count: int = 0

    def check(self, op: str, raw: str) -> None:
        """An answer holds nothing of others, and nothing that was deleted."""
        foreign = set(CODE.findall(raw)) - {self.code}
        if foreign:
            self.problems.append(f"{self.name}: the answer to {op} holds {len(foreign)} codes of others")
        again = [id for id, text in self.deleted.items() if id in raw or text in raw]
        if again:
            self.problems.append(f"{self.name}: the answer to {op} holds {len(again)} deleted facts")


class Client:
    """Requests of one user, one after the other."""

    def __init__(self, url: str, user: User) -> None:
        self.user = user
        self._http = httpx.Client(base_url=url, timeout=REQUEST_S, trust_env=False)
        self._random = random.Random(user.name)

    def step(self) -> None:
        kept = list(self.user.kept)
        weights = {"add": 4, "chat": 4, "search": 2, "delete": 1 if len(kept) > 3 else 0}
        op = self._random.choices(list(weights), list(weights.values()))[0]
        if op == "add":
            self.add()
        elif op == "delete":
            self.delete(self._random.choice(kept))
        elif op == "chat":
            self.chat()
        else:
            body = {"user_id": self.user.name, "query": "What is the code?", "top_k": 50}
            self._ask("search", "POST", "/v1/memories/search", body)

    def add(self) -> None:
        user = self.user
        user.count += 1
        text = f"Note {user.count} of {user.name}: the code is {user.code}."
        answer = self._ask(STORES, "POST", "/v1/memories", {"user_id": user.name, "text": text})
        if answer is not None and answer.status_code == 201:
            user.kept[answer.json()["data"][0]["id"]] = text
        else:
            user.unsure.add(text)

    def delete(self, id: str) -> None:
        answer = self._ask("delete", "DELETE", f"/v1/memories/{id}")
        text = self.user.kept.pop(id)
        # 404: it was carried out by the replica that ended before it said so, and sent once more
        if answer is not None and answer.status_code in (200, 404):
            self.user.deleted[id] = text
        else:
            self.user.unsure.add(text)

    def chat(self) -> None:
        memory = {"user_id": self.user.name, "top_k": 50}
        messages = [{"role": "user", "content": "What is my code?"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0, "memory": memory}
        answer = self._ask("chat", "POST", "/v1/chat/completions", body)
        if answer is not None and answer.status_code == 200 and not answer.json()["memory"]["facts"]:
            self.user.problems.append(f"{self.user.name}: a chat had no memory")

    def all_facts(self) -> dict[str, str]:
        found: dict[str, str] = {}
        after: str | None = None
        while True:
            query = {"user_id": self.user.name, "limit": "1000"} | ({"after": after} if after else {})
            page = self._http.get("/v1/memories", params=query).raise_for_status().json()
            found |= {fact["id"]: fact["text"] for fact in page["data"]}
            after = page["next_cursor"]
            if after is None:
                return found

    def statuses_of_all(self, id: str, replicas: int) -> set[int]:
        """Of a fact by its id, which any replica answers: until so many have."""
        seen: dict[str, int] = {}
        for _ in range(200):
            answer = self._http.get(f"/v1/memories/{id}")
            seen[answer.headers.get(REPLICA, "")] = answer.status_code
            if len(seen) >= replicas:
                break
        return set(seen.values())

    def _ask(self, op: str, method: str, path: str, body: Any = None) -> httpx.Response | None:
        start, answer, detail = time.monotonic(), None, ""
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            detail = repr(error)
        status = None if answer is None else answer.status_code
        if answer is not None:
            # what names an id in its path may name it again: that it is unknown
            self.user.check(op, answer.text if op != "delete" else "")
            if answer.status_code >= 400:
                detail = answer.text[:200]
        replica = None if answer is None else answer.headers.get(REPLICA)
        self.user.calls.append(Call(start, time.monotonic(), self.user.name, op, status, replica, detail))
        return answer


# --- what came of it ------------------------------------------------------------------------------


def errors_of(calls: Iterable[Call]) -> list[Call]:
    """A deletion that was sent twice may find nothing."""
    good = (200, 201)
    return [c for c in calls if not (c.status in good or (c.op == "delete" and c.status == 404))]


def is_excused(call: Call, outages: Iterable[Outage]) -> bool:
    return any(
        call.start_s <= outage.end_s
        and call.end_s >= outage.start_s
        and (outage.ops is None or (call.op in outage.ops and call.status == 503))
        for outage in outages
    )


def affinity(calls: Iterable[Call], start_s: float, end_s: float) -> float:
    """The share of requests that went to the replica that most of their user's did. A deletion by id names no
    user."""
    of_user: dict[str, Counter[str]] = defaultdict(Counter)
    for call in calls:
        if start_s <= call.start_s and call.end_s <= end_s and call.replica and call.op != "delete":
            of_user[call.user][call.replica] += 1
    total = sum(counts.total() for counts in of_user.values())
    return sum(max(counts.values()) for counts in of_user.values()) / total if total else 0.0


def lost(user: User, found: dict[str, str]) -> list[str]:
    """Of what was acknowledged: ids that are not there, or not as they were, and deleted ones that are."""
    missing = [id for id, text in user.kept.items() if found.get(id) != text]
    return missing + [id for id in user.deleted if id in found]


def strangers(user: User, found: dict[str, str]) -> list[str]:
    """What is there although nobody stored it, or twice."""
    known = Counter(user.kept.values()) + Counter(user.unsure)
    return [text for text, count in Counter(found.values()).items() if count > known[text]]
