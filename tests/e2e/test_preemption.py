"""Requests that are thrown out when blocks run out, and resumed: the same answers, nothing left behind.

The CPU platform of vLLM 0.32 turns asynchronous scheduling off (vllm/platforms/cpu.py); steps in flight
are tested against the scheduler alone, in `tests/connector`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from harness.engine import Engine
from harness.mixes import Author, Part, Stored, ids_of, segments_of
from harness.protocol import Answer, Request
from inferscale.plan import Span
from inferscale.windows import sliding

pytestmark = pytest.mark.engine

NUM_REQUESTS = 6
NUM_STEPS = 90

SMALL: dict[int, dict[str, Any]] = {
    # Room for about three of the requests at their longest.
    32: {"num_blocks": 24, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 160},
    128: {"num_blocks": 8, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 160},
}


def conversations(a: Author) -> list[list[Part]]:
    """Prompts of one scope each, which share their facts in different orders."""
    facts = a.store_facts([20, 33, 5, 64], sliding(2, 4))
    return [[*a.shuffled(facts), a.text(5 + 7 * i)] for i in range(NUM_REQUESTS)]


def requests(engine: Engine, prompts: Sequence[Sequence[Part]]) -> list[Request]:
    return [
        engine.request(
            ids_of(parts), engine.plan(f"scope {i}", segments=segments_of(parts)), max_tokens=NUM_STEPS
        )
        for i, parts in enumerate(prompts)
    ]


def assert_idle(engine: Engine, free_blocks: int) -> dict[str, int]:
    """Nothing is left behind, after one more step in which the last reports have arrived."""
    engine.ask((5, 6, 7))
    stats: dict[str, int] = engine.stats()
    assert (stats["open_steps"], stats["open_requests"]) == (0, 0)
    assert (stats["internal_errors"], stats["captures_failed"]) == (0, 0)
    assert engine.num_free_blocks() == free_blocks
    engine.check_table()
    return stats


def finish(engine: Engine) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    while engine.has_unfinished():
        answers.update(engine.step())
    return answers


@pytest.mark.parametrize("block_size", [32, 128])
def test_preempted_requests_answer_as_with_a_large_cache(
    author: Callable[..., Author], block_size: int
) -> None:
    large = author("llama", block_size=None if block_size == 128 else block_size)
    prompts = conversations(large)
    expected = large.engine.generate(requests(large.engine, prompts))
    tolerance = 2 * large.baseline([150] * 4, NUM_STEPS)

    small = author("llama", block_size=block_size, pool_tokens=640, **SMALL[block_size])
    free_blocks, before = small.engine.num_free_blocks(), small.engine.stats()
    assert [ids_of(parts) for parts in conversations(small)] == [ids_of(parts) for parts in prompts]
    answers = small.engine.generate(requests(small.engine, prompts))
    stats = assert_idle(small.engine, free_blocks)
    assert stats["preemptions"] > before["preemptions"]
    for parts, answer, other in zip(prompts, answers, expected, strict=True):
        assert answer.outcome is not None
        assert answer.outcome["injected_tokens"] == 122
        assert answer.token_ids == other.token_ids
        assert np.abs(answer.logits - other.logits).max() <= tolerance
        assert small.difference(parts, answer, 122) <= tolerance


def test_resumed_after_its_facts_were_evicted(author: Callable[..., Author]) -> None:
    """They are text then, so the answer is that of a text prompt from there on."""
    a = author("llama", block_size=32)
    engine = a.engine
    free_blocks = engine.num_free_blocks()
    facts = a.store_facts([20, 33, 40], sliding(2, 5))
    parts: list[Part] = [*facts, a.text(10)]
    request = engine.request(ids_of(parts), engine.plan(segments=segments_of(parts)), max_tokens=6)
    name = engine.add(request)
    for _ in range(3):
        engine.step()
    engine.forget([facts[1].key])
    engine.preempt_all()
    answer = finish(engine)[name]
    tolerance = 2 * a.baseline([103] * 4, 6)
    injected = a.expected(parts, answer, 93)
    mixed = a.expected(parts, answer, 20)
    done = 3
    assert np.abs(answer.logits[:done] - injected[:done]).max() <= tolerance
    assert np.abs(answer.logits[done:] - mixed[done:]).max() <= tolerance
    assert np.abs(injected - mixed).max() > 10 * tolerance  # it makes a difference
    assert engine.stats()["preemptions"] > 0
    engine.reset_prefix_cache()
    assert_idle(engine, free_blocks)


def test_preempted_encode_requests_still_capture(author: Callable[..., Author]) -> None:
    """The first chunk of a pass fits beside older requests that decode, the second does not."""
    a = author("llama", block_size=32, pool_tokens=640, **SMALL[32])
    engine = a.engine
    free_blocks, before = engine.num_free_blocks(), engine.stats()
    talkers = [engine.add(engine.request(a.text(50), max_tokens=150)) for _ in range(3)]
    for _ in range(78):
        engine.step()
    # Admitted, since all of it fits; in the next step the others take a block each.
    assert [engine.running(name).num_computed_tokens for name in talkers] == [127] * 3
    captured = a.add_capture(a.text(310), [(0, 40), (100, 190), (260, 310)])
    captured += a.add_capture(a.text(310), [(0, 40), (100, 190), (260, 310)])
    answers = finish(engine)
    assert set(talkers) <= set(answers)
    stats = assert_idle(engine, free_blocks)
    assert stats["preemptions"] > before["preemptions"]
    assert engine.resident([one.key for one in captured]) == [True] * 6
    check_captured(a, captured[:3])
    check_captured(a, captured[3:])


@pytest.mark.parametrize("num_steps", [1, 2])
def test_encode_request_preempted_between_its_chunks(author: Callable[..., Author], num_steps: int) -> None:
    """The second span starts in one step and ends in another, before and after the preemption."""
    a = author("llama", block_size=32, pool_tokens=640, **SMALL[32])
    engine = a.engine
    free_blocks = engine.num_free_blocks()
    captured = a.add_capture(a.text(400), [(0, 40), (150, 190), (300, 350)])
    for _ in range(num_steps):
        engine.step()
    engine.preempt_all()
    finish(engine)
    engine.reset_prefix_cache()
    assert_idle(engine, free_blocks)
    check_captured(a, captured)


def check_captured(a: Author, facts: Sequence[Stored]) -> None:
    """What lies in the pool is what the reference computes for the same pass."""
    for fact in facts:
        found = a.engine.pooled(fact.key)
        assert found is not None
        assert np.abs(found - fact.kv.numpy()).max() < 1e-4


def test_aborted_while_preempted_and_while_prefilling(author: Callable[..., Author]) -> None:
    """And while decoding, and before the first step: no pin, no block and no page is lost."""
    a = author("llama", block_size=32, pool_tokens=640, **SMALL[32])
    engine = a.engine
    free_blocks = engine.num_free_blocks()
    facts = a.store_facts([20, 33, 40], sliding(2, 5))
    long: list[Part] = [*facts, a.text(350)]
    short: list[Part] = [*facts, a.text(9)]

    def start(parts: list[Part]) -> str:
        plan = engine.plan("aborted", segments=segments_of(parts))
        name: str = engine.add(engine.request(ids_of(parts), plan, max_tokens=60))
        return name

    preempted = start(short)
    engine.step()
    engine.preempt_all()
    engine.abort([preempted])
    prefilling = start(long)
    engine.step()
    assert engine.running(prefilling).num_computed_tokens < len(ids_of(long))
    engine.abort([prefilling])
    decoding = start(short)
    for _ in range(4):
        engine.step()
    queued = start(short)
    engine.abort([decoding, queued])
    encoding = a.add_capture(a.text(300), [(0, 30), (200, 290)])
    engine.step()
    waiting = start(long)
    engine.step()
    engine.abort([waiting])
    finish(engine)
    engine.reset_prefix_cache()
    assert_idle(engine, free_blocks)
    check_captured(a, encoding)
    a.check(short, a.ask(short), 2 * a.baseline([102] * 4))


def test_aborted_encode_request_gives_back_what_it_did_not_capture(author: Callable[..., Author]) -> None:
    a = author("llama", block_size=32, pool_tokens=640, **SMALL[32])
    engine = a.engine
    free_blocks = engine.num_free_blocks()
    ids = a.text(400)
    captured = a.expect(ids, [(0, 40), (300, 350)])
    spans = tuple(Span(one.key, one.origin, one.origin + len(one.ids)) for one in captured)
    name = engine.add(engine.request(ids, engine.plan("encode", captures=spans)))
    engine.step()
    engine.abort([name])
    stats = assert_idle(engine, free_blocks)
    assert engine.resident([one.key for one in captured]) == [True, False]
    assert stats["free_pages"] == stats["pages"] - 3
    again = a.store([(ids, [(0, 40), (300, 350)])])
    check_captured(a, again)
