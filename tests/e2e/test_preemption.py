"""Requests that lose their blocks on the way: what they inject and capture afterwards is right too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.mixes import Author, Part, Stored, ids_of, segments_of
from harness.protocol import Answer
from harness.reference import largest_difference
from inferscale.windows import sliding

pytestmark = pytest.mark.e2e


def finish(a: Author, names: list[str]) -> dict[str, Answer]:
    """Step until these requests are done."""
    answers: dict[str, Answer] = {}
    while not set(names) <= set(answers):
        answers.update(a.engine.step())
    return answers


@pytest.mark.parametrize("num_steps_before", [1, 2, 5])
def test_injected_again_after_preemption(author: Callable[..., Author], num_steps_before: int) -> None:
    a = author("llama", block_size=32)
    engine = a.engine
    facts = a.store_facts([20, 33, 5, 64, 40], sliding(2, 5))
    parts: list[Part] = [*a.shuffled(facts), a.text(10)]
    before = engine.stats()["preemptions"]
    name = engine.add(engine.request(ids_of(parts), engine.plan(segments=segments_of(parts)), max_tokens=8))
    for _ in range(num_steps_before):
        engine.step()
    engine.preempt_all()
    answer = finish(a, [name])[name]
    assert [num_tokens for _, num_tokens in engine.claims()] == [162, 162]
    assert engine.stats()["preemptions"] == before + 1
    assert engine.stats()["pins"] == 0
    a.check(parts, answer, 2 * a.baseline([172] * 4, 8))


def test_evicted_between_preemption_and_resume(author: Callable[..., Author]) -> None:
    """What is gone by then is text: the answer changes over to that mix at the step that resumes."""
    a = author("llama", block_size=32)
    engine = a.engine
    facts = a.store_facts([20, 33, 5, 64, 40], sliding(2, 5))
    parts: list[Part] = [*facts, a.text(10)]
    name = engine.add(engine.request(ids_of(parts), engine.plan(segments=segments_of(parts)), max_tokens=6))
    engine.step()
    engine.step()
    engine.preempt_all()
    engine.forget([facts[2].key])
    answer = finish(a, [name])[name]
    assert [num_tokens for _, num_tokens in engine.claims()] == [162, 53]
    tolerance = 2 * a.baseline([172] * 4, 6)
    assert largest_difference(answer.logits[:2], a.expected(parts, answer, 162)[:2]) <= tolerance
    assert largest_difference(answer.logits[2:], a.expected(parts, answer, 53)[2:]) <= tolerance
    engine.check_table()


@pytest.mark.parametrize("num_steps_before", [1, 3, 6])
def test_captured_after_preemption_in_the_middle_of_a_pass(
    author: Callable[..., Author], num_steps_before: int
) -> None:
    a = author("llama", block_size=32, max_num_batched_tokens=48, max_num_seqs=16, pool_tokens=32768)
    engine = a.engine
    ids = a.text(330)
    cuts = [(20, 35), (35, 164), (164, 291), (291, 330)]
    before = engine.stats()["preemptions"]
    stored = a.add_capture(ids, cuts)
    for _ in range(num_steps_before):
        engine.step()
    engine.preempt_all()
    while engine.has_unfinished():
        engine.step()
    assert engine.stats()["preemptions"] == before + 1
    tolerance = 2 * a.kv_baseline([330, 200])
    for segment in stored:
        assert largest_difference(engine.pooled(segment.key), segment.kv.numpy()) <= tolerance
    engine.check_table()


def test_preempted_because_blocks_run_out(author: Callable[..., Author]) -> None:
    """Four requests grow until they no longer fit; vLLM throws some out and resumes them by itself."""
    a = author(
        "llama", block_size=32, num_blocks=24, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=160,
        pool_tokens=640,
    )  # fmt: skip
    engine = a.engine
    facts: list[Stored] = a.store_facts([20, 33, 5, 64], sliding(2, 5))
    prompts: list[list[Part]] = [[*a.shuffled(facts), a.text(10 + i)] for i in range(4)]  # 5 blocks each
    before = engine.stats()["preemptions"]
    names = [
        engine.add(engine.request(ids_of(p), engine.plan(f"scope {i}", segments=segments_of(p)), max_tokens=64))
        for i, p in enumerate(prompts)
    ]
    answers = finish(a, names)
    assert engine.stats()["preemptions"] > before
    assert len(engine.claims()) > 4
    tolerance = 2 * a.baseline([132] * 2, 64)
    for name, parts in zip(names, prompts, strict=True):
        assert a.difference(parts, answers[name], 122) <= tolerance
    stats = engine.stats()
    assert (stats["pins"], stats["open_steps"], stats["open_requests"]) == (0, 0, 0)
