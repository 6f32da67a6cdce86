"""Requests of every shape: covered to the end, many in a step, chunked, without prefix caching, aborted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness.mixes import Author, Part, ids_of, segments_of
from inferscale.windows import sliding

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("num_tokens", [2, 63, 64, 65])
def test_prompt_that_ends_right_behind_its_memory(author: Callable[..., Author], num_tokens: int) -> None:
    """The last token is computed, for its logits, whether or not the prompt ends with a block."""
    a = author("llama", block_size=32)
    facts = a.store_facts([1, num_tokens - 1], sliding(1, 2))
    answer = a.ask(facts, num_steps=3)
    a.check(facts, answer, 2 * a.baseline([num_tokens] * 8, 3))
    assert answer.outcome is not None
    assert answer.outcome["prefilled_tokens"] == 1
    again = a.ask(facts, num_steps=3)
    assert np.array_equal(again.logits, answer.logits)


def test_many_requests_in_one_step_share_segments(author: Callable[..., Author]) -> None:
    a = author("llama", block_size=32)
    engine = a.engine
    facts = a.store_facts([20, 33, 5, 64, 40], sliding(2, 5))
    prompts: list[list[Part]] = [[*a.shuffled(facts), a.text(3 + i)] for i in range(10)]
    prompts += [prompts[0], [*prompts[0][:-1], a.text(4)]]  # the same prompt again, and the same facts
    names = [engine.add(engine.request(ids_of(p), engine.plan(segments=segments_of(p)))) for p in prompts]
    answers = engine.step()
    assert set(answers) == set(names), "all of them belong into one step"
    assert engine.stats()["open_steps"] == 0
    tolerance = 2 * a.baseline([len(ids_of(p)) for p in prompts])
    cached = []
    for name, parts in zip(names, prompts, strict=True):
        outcome = answers[name].outcome
        assert outcome is not None
        assert outcome["cached_tokens"] + outcome["injected_tokens"] == 162
        assert a.difference(parts, answers[name], 162) <= tolerance
        cached.append(outcome["cached_tokens"])
    assert cached[0] == 0
    assert cached[10:] == [160, 160]  # blocks that this same step fills
    engine.check_table()


def test_captured_in_this_step_is_injected_from_the_next(author: Callable[..., Author]) -> None:
    a = author("llama", block_size=32)
    engine = a.engine
    ids, question = a.text(60), a.text(10)
    fact = a.add_capture(ids, [(0, 60)])[0]
    name = engine.add(engine.request((*ids, *question), engine.plan(segments=(fact.segment(),))))
    early = engine.step()[name]
    assert early.outcome is not None
    assert early.outcome["injected_tokens"] == 0
    engine.reset_prefix_cache()  # the early one's blocks
    late = a.ask([fact, question])
    a.check([fact, question], late, 2 * a.baseline([70] * 4))
    assert np.array_equal(early.logits, late.logits)


def test_without_prefix_caching(author: Callable[..., Author]) -> None:
    a = author("llama", block_size=32, enable_prefix_caching=False)
    facts = a.store_facts([20, 33, 5, 64, 40], sliding(2, 5))
    parts: list[Part] = [*a.shuffled(facts), a.text(10)]
    tolerance = 2 * a.baseline([172] * 4, 2)
    first = a.ask(parts, num_steps=2)
    second = a.ask(parts, num_steps=2)
    for answer in (first, second):
        a.check(parts, answer, tolerance)
    assert np.array_equal(first.logits, second.logits)
    plain = a.ask_plain(parts)
    assert a.difference(parts, plain, 0) <= tolerance


@pytest.mark.parametrize("tail", [1, 48, 200])
def test_chunked_prefill_behind_injected_tokens(author: Callable[..., Author], tail: int) -> None:
    """48 tokens a step, external ones not counted; another request is chunked beside it."""
    a = author("llama", block_size=32, max_num_batched_tokens=48, max_num_seqs=16, pool_tokens=32768)
    engine = a.engine
    facts = a.store_facts([20, 33, 5, 64, 40], sliding(2, 5))
    parts: list[Part] = [*a.shuffled(facts), a.text(tail)]
    other = a.text(150)
    plain, answer = engine.generate(
        [
            engine.request(other, max_tokens=3),
            engine.request(ids_of(parts), engine.plan(segments=segments_of(parts)), max_tokens=3),
        ]
    )
    tolerance = 2 * a.baseline([362, 150, 150, 150], 3)
    a.check(parts, answer, tolerance)
    assert a.difference([other], plain, 0) <= tolerance


def test_decoding_goes_on_across_blocks(author: Callable[..., Author]) -> None:
    a = author("llama", block_size=32)
    facts = a.store_facts([20, 33], sliding(2, 5))
    parts: list[Part] = [*facts, a.text(9)]
    a.check(parts, a.ask(parts, num_steps=40), 2 * a.baseline([62] * 3, 40))


def test_segments_that_are_not_in_the_prompt(author: Callable[..., Author]) -> None:
    """As where vLLM tokenized the text itself and a seam came out differently."""
    a = author("llama", block_size=32)
    engine = a.engine
    facts = a.store_facts([20, 33, 40], sliding(2, 5))
    parts: list[Part] = [facts[0], facts[2], a.text(10)]
    plan = engine.plan(segments=tuple(f.segment() for f in facts))
    answer = engine.ask(ids_of(parts), plan)
    a.check(parts, answer, 2 * a.baseline([70] * 4))
    assert answer.outcome is not None
    assert answer.outcome["lost_segments"] == 1


def test_aborted_requests_leave_nothing(author: Callable[..., Author]) -> None:
    a = author("llama", block_size=32)
    engine = a.engine
    free_blocks = engine.num_free_blocks()
    facts = a.store_facts([20, 33, 40], sliding(2, 5))
    parts: list[Part] = [*facts, a.text(10)]
    request = engine.request(ids_of(parts), engine.plan(segments=segments_of(parts)), max_tokens=50)
    queued, running = engine.add(request), engine.add(request)
    engine.abort([queued])
    engine.step()
    engine.step()
    engine.abort([running])
    a.add_capture(a.text(30), [(0, 30)])
    engine.step()
    stats = engine.stats()
    assert (stats["open_steps"], stats["open_requests"]) == (0, 0)
    assert engine.num_free_blocks() == free_blocks
    engine.check_table()
    a.engine.reset_prefix_cache()
    a.check(parts, a.ask(parts), 2 * a.baseline([103] * 4))
