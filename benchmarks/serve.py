#!/usr/bin/env python3
"""Time to first token of a server with memory, as its clients see it, over HTTP.

    inferscale serve MODEL --max-model-len 8192                                  in another terminal
    python benchmarks/serve.py --conversation locomo10.json --k 50

Three parts. `chat`: the same questions with injected memory, with the same facts as text, and without
memory, in turn. `encoding`: injected chats of one user, idle and then while facts of other users are stored
and encoded, to the last of them. `conversation`: a talk of many turns with memory that changes every turn,
injected and as text; each turn's time beside that of the first. Times are from sending a streamed request to
its first piece of text. Every run uses new users and deletes them. Rows are appended to OUT.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inferscale import Client
from inferscale.bench.conversation import BenchConversation, read_conversation
from inferscale.bench.harness import BenchRun, command, environment

PARTS = ("chat", "encoding", "conversation")
WARM_UPS = 3
ADDED_AT_ONCE = 100


def main() -> None:
    arguments = parse()
    conversation = read_conversation(arguments.conversation)
    with Client(arguments.url, api_key=arguments.api_key) as client:
        model = arguments.model or served_model(client)
        config = {
            "command": f"python benchmarks/{command()}",
            "environment": environment(),
            "baseline": "mode text of the same run: the same facts in the prompts, prefilled by this server",
            "conversation": conversation.name,
            "over": "HTTP, streamed",
            "tail": "the server's" if arguments.tail is None else arguments.tail,
        }
        run = BenchRun("serve", model, arguments.out, config)
        if "chat" in arguments.parts:
            measure_chat(client, conversation, arguments, run)
        if "encoding" in arguments.parts:
            measure_encoding(client, conversation, arguments, run)
        if "conversation" in arguments.parts:
            measure_conversation(client, conversation, arguments, run)


def measure_chat(client: Client, conversation: BenchConversation, arguments: Any, run: BenchRun) -> None:
    times: dict[str, list[float]] = {"inject": [], "text": [], "none": []}
    tokens: dict[str, int] = {}
    with user_with(client, conversation) as user:
        for number, question in enumerate(questions(conversation, arguments.questions)):
            modes = list(times)
            for mode in modes[number % 3 :] + modes[: number % 3]:
                ttft_ms, use = ask(client, user, question, mode, arguments)
                if number >= WARM_UPS:
                    times[mode].append(ttft_ms)
                    tokens[mode] = use.prompt_tokens or 0
    for mode, values in times.items():
        told = {"prompt_tokens": tokens[mode]}
        report(run.add("chat_ttft", "ms", values, mode=mode, k=arguments.k, config=told))
    for over, under in (("text", "inject"), ("inject", "none")):
        pair = (times[over], times[under])
        report(run.add_ratio("chat_ttft", f"{over}/{under}", *pair, k=arguments.k))


def measure_encoding(client: Client, conversation: BenchConversation, arguments: Any, run: BenchRun) -> None:
    """Chats while the server is idle, then from the first added fact to the last encoded."""
    with user_with(client, conversation) as user, ThreadPoolExecutor(1) as pool:
        asked = itertools.cycle(questions(conversation, arguments.questions))
        for _ in range(WARM_UPS):
            ask(client, user, next(asked), "inject", arguments)
        num_idle = arguments.questions
        idle = [ask(client, user, next(asked), "inject", arguments)[0] for _ in range(num_idle)]
        report(run.add("chat_ttft_idle", "ms", idle, mode="inject", k=arguments.k))
        others = [f"bench-{uuid.uuid4()}" for _ in range(arguments.facts // len(conversation.turns) + 1)]
        busy: list[float] = []
        start_s = time.perf_counter()
        adding = pool.submit(add_facts, arguments, conversation.turns, others)
        while not adding.done() or is_encoding(client):
            busy.append(ask(client, user, next(asked), "inject", arguments)[0])
        seconds, added = time.perf_counter() - start_s, adding.result()
        told = {"facts": added, "seconds": round(seconds, 1), "facts_per_s": round(added / seconds, 1)}
        report(run.add("chat_ttft_while_encoding", "ms", busy, mode="inject", k=arguments.k, config=told))
        for other in others:
            client.delete_all(user_id=other)


def add_facts(arguments: Any, turns: Sequence[Any], users: Sequence[str]) -> int:
    """Add --facts turns for these users, one full conversation each; how many that were."""
    num_added = 0
    with Client(arguments.url, api_key=arguments.api_key) as client:
        for user in users:
            items = turns[: arguments.facts - num_added]
            for first in range(0, len(items), ADDED_AT_ONCE):
                client.add(items=items[first : first + ADDED_AT_ONCE], user_id=user)
            num_added += len(items)
    return num_added


def measure_conversation(
    client: Client, conversation: BenchConversation, arguments: Any, run: BenchRun
) -> None:
    """The questions of a talk one after the other, each with what was said before."""
    turns: dict[str, list[list[float]]] = {}
    prefilled: dict[str, list[list[int]]] = {}
    with user_with(client, conversation) as user:
        for mode in ("inject", "text"):
            turns[mode] = [[] for _ in range(arguments.turns)]
            prefilled[mode] = [[] for _ in range(arguments.turns)]
        for repeat in range(arguments.talks):
            for mode in turns:
                talk: list[dict[str, Any]] = []
                salt = uuid.uuid4().hex  # what a talk said is found again in the same talk only
                for number in range(arguments.turns):
                    place = (repeat * arguments.turns + number) % len(conversation.questions)
                    talk.append(said(conversation.questions[place]))
                    ttft_ms, use, text = answer(
                        client, user, talk, mode, arguments.k, arguments.answer_tokens, salt
                    )
                    talk.append({"role": "assistant", "content": text})
                    turns[mode][number].append(ttft_ms)
                    prefilled[mode][number].append(use.prefilled_tokens or 0)
                    wait_until_encoded(client)  # people think before they answer
    last = arguments.turns
    for mode, values in turns.items():
        for number in (1, last // 2, last):
            told = {"turn": number, "prefilled_tokens": sorted(prefilled[mode][number - 1])[0]}
            report(run.add("turn_ttft", "ms", values[number - 1], mode=mode, k=arguments.k, config=told))
        ratio = run.add_ratio(
            "turn_ttft", f"turn {last}/turn 1, {mode}", values[last - 1], values[0], k=arguments.k
        )
        report(ratio)


@contextmanager
def user_with(client: Client, conversation: BenchConversation) -> Iterator[str]:
    """A user who remembers the conversation, all of it encoded."""
    user = f"bench-{uuid.uuid4()}"
    for first in range(0, len(conversation.turns), ADDED_AT_ONCE):
        client.add(items=conversation.turns[first : first + ADDED_AT_ONCE], user_id=user)
    end_s = time.monotonic() + 900
    while (stats := client.stats(user_id=user)).injectable != stats.facts:
        if time.monotonic() > end_s:
            sys.exit(
                f"{stats.injectable} of {stats.facts} facts are encoded; raise --pool-size of the server"
            )
        time.sleep(0.5)
    try:
        yield user
    finally:
        client.delete_all(user_id=user)


def is_encoding(client: Client) -> bool:
    return client.stats(user_id="nobody").pending > 0


def wait_until_encoded(client: Client) -> None:
    end_s = time.monotonic() + 60
    while is_encoding(client) and time.monotonic() < end_s:
        time.sleep(0.02)


def served_model(client: Client) -> str:
    return str(client.chat("Hello.", extra={"max_tokens": 1}).raw["model"])


def questions(conversation: BenchConversation, num: int) -> list[str]:
    return [conversation.questions[n % len(conversation.questions)] for n in range(num + WARM_UPS)]


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(client: Client, user: str, question: str, mode: Any, arguments: Any) -> tuple[float, Any]:
    # A salt of its own for every request: nothing is found in vLLM's prefix cache that memory did not bring.
    salt, k, tail = uuid.uuid4().hex, arguments.k, arguments.tail
    ttft_ms, use, _ = answer(client, user, [said(question)], mode, k, 1, salt, tail)
    return ttft_ms, use


def answer(
    client: Client,
    user: str,
    talk: Sequence[Any],
    mode: Any,
    k: int,
    max_tokens: int,
    salt: str,
    tail: str | None = None,
) -> tuple[float, Any, str]:
    """Milliseconds to the first piece of the answer, what memory did, and the answer."""
    extra = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
    start_s = time.perf_counter()
    first_s: float | None = None
    stream = client.stream_chat(list(talk), user_id=user, mode=mode, top_k=k, tail=tail, extra=extra)
    for piece in stream:
        if piece and first_s is None:
            first_s = time.perf_counter()
    reply = stream.reply()
    assert reply.memory is not None
    return ((first_s or time.perf_counter()) - start_s) * 1e3, reply.memory, reply.text


def report(row: dict[str, Any]) -> None:
    told = {
        name: row["config"][name]
        for name in ("turn", "prefilled_tokens", "facts_per_s")
        if name in row["config"]
    }
    interval = f" ({row['ci95'][0]:.2f} to {row['ci95'][1]:.2f})" if "ci95" in row else ""
    print(
        f"{row['metric']} {row['mode']} k={row['k']} {told or ''}: p50 {row['p50']:.2f}{interval}, "
        f"p99 {row['p99']:.2f} {row['unit']}, n={row['n']}",
        flush=True,
    )


def parse(texts: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add("--api-key")
    add("--model", help="default: the one that the server serves")
    add("--conversation", type=Path, help="a LoCoMo file; default: the demo's conversation")
    add("--parts", default=",".join(PARTS))
    add("--k", type=int, default=50)
    add("--tail", help="facts that are recomputed, of single questions; default: the server's")
    add("--questions", type=int, default=30)
    add("--facts", type=int, default=2000, help="that are encoded while chats are measured")
    add("--turns", type=int, default=20, help="of a talk")
    add("--talks", type=int, default=3)
    add("--answer-tokens", type=int, default=24, help="of each turn of a talk")
    add("--out", type=Path, default=Path("benchmarks/results/serve.jsonl"))
    arguments = parser.parse_args(texts)
    arguments.parts = [part.strip() for part in arguments.parts.split(",")]
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts has {', '.join(sorted(unknown))}; allowed are {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    main()
