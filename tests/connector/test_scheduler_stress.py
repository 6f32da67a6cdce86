"""Random work on vLLM's real scheduler: nothing leaks, and no request ever reads wrong KV."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from symbolic_engine import SymbolicEngine, key_of

from inferscale.plan import Order

FACTS = [
    list(range(100 + 20 * i, 100 + 20 * i + n)) for i, n in enumerate([1, 3, 4, 5, 9, 15, 16, 17, 18, 19])
]
SYSTEM = list(range(400, 421))
NEVER = [777, 778]


@pytest.fixture
def engine(make_engine: Callable[..., SymbolicEngine], runner: str, depth: int) -> SymbolicEngine:
    return make_engine(
        runner=runner,
        depth=depth,
        num_blocks=24,
        max_batched_tokens=40,
        pool_pages=24,
        reports_without_forward=False,
    )


def add_something(engine: SymbolicEngine, rng: random.Random, number: int, epochs: list[int]) -> None:
    name = f"r{number}"
    epoch = epochs[0] if rng.random() < 0.9 else max(0, epochs[0] - 1)
    what = rng.random()
    facts = rng.sample(FACTS, rng.randint(1, 6))
    if what < 0.35:
        prompt = list(SYSTEM[: rng.randint(1, 21)]) if rng.random() < 0.5 else [rng.randint(1, 9)]
        spans = []
        for fact in facts:
            spans.append((len(prompt), len(prompt) + len(fact)))
            prompt += fact
        if rng.random() < 0.3:
            prompt.append(5)
        engine.encode(name, prompt, *spans, epoch=epoch, part=rng.choice((0, 0, 1, 2)))
    elif what < 0.9:
        start = SYSTEM if rng.random() < 0.5 else []
        prompt = list(start)
        for fact in facts:
            prompt += fact
        prompt += [rng.randint(1, 9) for _ in range(rng.randint(0, 20))]
        segments = [start, *facts, NEVER] if start else [*facts, NEVER]
        engine.chat(name, prompt, *segments, max_tokens=rng.randint(1, 60), epoch=epoch)
    elif what < 0.95:
        epochs[0] += rng.random() < 0.5
        engine.order(name, Order("forget", tuple(key_of(fact) for fact in facts), (("scope", epochs[0]),)))
    else:
        engine.add(
            name, [rng.randint(1, 9) for _ in range(rng.randint(1, 70))], max_tokens=rng.randint(1, 50)
        )


@pytest.mark.parametrize("seed", range(6))
def test_random_work(engine: SymbolicEngine, seed: int) -> None:
    rng = random.Random(seed)
    engine.worker.captures_are_exact = False  # encode and chat requests share prefix-cache blocks here
    epochs = [0]
    names: list[str] = []
    for number in range(150):
        if engine.scheduler.get_num_unfinished_requests() < 12:
            add_something(engine, rng, number, epochs)
            names.append(f"r{number}")
        if rng.random() < 0.08:
            engine.abort(rng.choice(names))
        engine.worker.failing_captures = rng.random() < 0.05
        for _ in range(rng.randint(0, 3)):
            engine.step()
    engine.run(2000)
    engine.check_idle()
    stats = engine.side.stats()
    assert stats["tokens_injected"] > 0
    assert stats["captures"] > 0
    assert stats["evictions"] > 0
    assert stats["preemptions"] > 0
