"""Segments that are injected elsewhere, against a reference that attends to the relocated keys.

Criterion: the largest difference of any logit is at most twice that of the engine to the reference
without injection, over prompts of the same length. What the mistakes to be found would cost is
measured beside it, and is thousands of times larger.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.checkpoints import FAMILIES
from harness.mixes import Author, Part, Stored, expected_parts, ids_of, segments_of
from harness.reference import Injected, largest_difference
from inferscale.windows import sliding, window

pytestmark = pytest.mark.engine

NUM_STEPS = 3


LENGTHS = [5, 17, 40, 33, 128, 1, 64]


@pytest.mark.parametrize("model", FAMILIES)
def test_moved_segments_equal_the_reference(author: Callable[..., Author], model: str) -> None:
    check(author(model), LENGTHS)


def test_moved_segments_equal_the_reference_on_a_real_model(author: Callable[..., Author]) -> None:
    check(author("smollm2", block_size=32), [5, 17, 1, 33, 20])


def test_compiled_injection_equals_the_reference(author: Callable[..., Author]) -> None:
    check(author("llama", compile_injection=True), LENGTHS)


def check(a: Author, lengths: list[int]) -> None:
    head = a.store_texts([31])[0]
    facts = a.store_facts(lengths, sliding(3, 3))
    prompts: list[list[Part]] = [
        [head, *a.shuffled(facts), a.text(30)],
        [head, *facts[::-1], a.text(9)],
        [*a.shuffled(facts), a.text(40)],
        [*facts[3:6], head, *facts[:3], a.text(2)],
    ]
    engine = a.engine
    requests = [
        engine.request(ids_of(p), engine.plan(f"scope {i}", segments=segments_of(p)), max_tokens=NUM_STEPS)
        for i, p in enumerate(prompts)  # a scope each: none finds another's blocks
    ]
    answers = engine.generate(requests)
    tolerance = 2 * a.baseline([len(ids_of(p)) for p in prompts], NUM_STEPS)
    for parts, answer in zip(prompts, answers, strict=True):
        stored = [part for part in parts if isinstance(part, Stored)]
        num_injected = sum(len(part.ids) for part in stored)
        assert answer.outcome is not None
        assert answer.outcome["injected_tokens"] == num_injected
        assert answer.outcome["covered_segments"] == len(stored)
        assert a.difference(parts, answer, num_injected) <= tolerance
    assert unrotated_difference(a, prompts[0]) > 1000 * tolerance
    assert a.difference(prompts[0], answers[0], 0) > 1000 * tolerance  # text sees more


def unrotated_difference(a: Author, parts: list[Part]) -> float:
    """What it would cost to inject keys as they were captured."""
    num_injected = sum(len(part.ids) for part in parts if isinstance(part, Stored))
    right = expected_parts(parts, num_injected)
    wrong = []
    at = 0
    for part in right:
        if isinstance(part, Injected):
            wrong.append(part._replace(origin=at))
            at += part.kv.keys.shape[2]
        else:
            wrong.append(part)
    return largest_difference(a.reference.logits_of(right), a.reference.logits_of(wrong))


def test_every_offset_in_a_block(author: Callable[..., Author]) -> None:
    """A fact over several blocks and one of a single token, starting at each of a block's slots."""
    a = author("llama", block_size=32)
    engine = a.engine
    short, long, single = a.store_facts([15, 129, 1], window(2))
    heads = a.store_texts(range(1, 33))
    prompts: list[list[Part]] = [[head, long, single, short, a.text(7)] for head in heads]
    requests = [engine.request(ids_of(p), engine.plan(segments=segments_of(p))) for p in prompts]
    answers = engine.generate(requests)
    tolerance = 2 * a.baseline([len(ids_of(p)) for p in prompts[::4]])
    for parts, answer in zip(prompts, answers, strict=True):
        num_injected = len(ids_of(parts)) - 7
        assert answer.outcome is not None
        assert answer.outcome["injected_tokens"] == num_injected
        assert a.difference(parts, answer, num_injected) <= tolerance


def test_far_from_where_it_was_captured(author: Callable[..., Author]) -> None:
    """Forwards and backwards by more than a thousand positions, with scaled frequencies too."""
    for model in ("llama", "llama3"):
        a = author(model)
        far = a.store([(a.text(1400), [(0, 1340), (1340, 1400)])])
        near = a.store_texts([50])
        forwards: list[Part] = [far[0], near[0], a.text(10)]
        backwards: list[Part] = [far[1], a.text(10)]
        tolerance = 2 * a.baseline([1400, 70, 70, 70], NUM_STEPS)
        for parts, num_injected in ((forwards, 1390), (backwards, 60)):
            answer = a.ask(parts, num_steps=NUM_STEPS)
            assert answer.outcome is not None
            assert answer.outcome["injected_tokens"] == num_injected
            assert a.difference(parts, answer, num_injected) <= tolerance
