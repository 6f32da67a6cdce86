"""vLLM's own prefix cache beside injected KV: neither side ever finds the other's blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from harness.mixes import Author, Stored, ids_of, segments_of
from harness.protocol import Answer
from harness.reference import largest_difference
from inferscale.plan import Span
from inferscale.windows import alone

pytestmark = pytest.mark.engine

BLOCK = 32
MODELS = ["llama", "qwen3", "mistral"]


class Case(NamedTuple):
    """A prompt with facts (120 tokens, then 40) and how far from right is right."""

    a: Author
    first: list[Stored]
    more: Stored
    question: tuple[int, ...]
    tolerance: float

    @property
    def parts(self) -> list[Stored | tuple[int, ...]]:
        return [*self.first, self.question]


@pytest.fixture
def model() -> str:
    """Of tests that name none."""
    return "llama"


@pytest.fixture
def case(author: Callable[..., Author], model: str) -> Case:
    a = author(model, block_size=BLOCK)
    facts = a.store_facts([50, 70, 40], alone())
    return Case(a, facts[:2], facts[2], a.text(40), 2 * a.baseline([160] * 4, 2))


@pytest.fixture
def clean(author: Callable[..., Author], model: str, case: Case) -> Answer:
    """The answer of stock vLLM without the connector to the tokens of `case`."""
    stock = author(model, block_size=BLOCK, pool_tokens=0)
    return stock.engine.ask(ids_of(case.parts), max_tokens=2)


@pytest.mark.parametrize("model", MODELS)
def test_plain_after_injected_equals_stock(case: Case, clean: Answer) -> None:
    injected = case.a.ask(case.parts, num_steps=2)
    case.a.check(case.parts, injected, case.tolerance)
    plain = case.a.ask_plain(case.parts, num_steps=2)
    assert np.array_equal(plain.logits, clean.logits)
    assert plain.num_cached_tokens == 0
    assert np.abs(plain.logits[0] - injected.logits[0]).max() > 1000 * case.tolerance


@pytest.mark.parametrize("model", MODELS)
def test_injected_after_plain_equals_the_reference(case: Case, clean: Answer) -> None:
    plain = case.a.ask_plain(case.parts, num_steps=2)
    assert np.array_equal(plain.logits, clean.logits)
    case.a.check(case.parts, case.a.ask(case.parts, num_steps=2), case.tolerance)
    again = case.a.ask_plain(case.parts, num_steps=2)
    assert np.array_equal(again.logits, clean.logits)
    assert again.num_cached_tokens == 128  # the plain one's own blocks are found


def test_plain_and_injected_in_one_step(case: Case, clean: Answer) -> None:
    engine = case.a.engine
    ids = ids_of(case.parts)
    plan = engine.plan(segments=segments_of(case.parts))
    plain, injected = engine.request(ids, max_tokens=2), engine.request(ids, plan, max_tokens=2)
    answers = engine.generate([plain, injected, plain])
    for exact in (answers[0], answers[2]):
        assert np.array_equal(exact.logits[0], clean.logits[0])
        assert largest_difference(exact.logits, clean.logits) <= case.tolerance  # decoded as three rows
    case.a.check(case.parts, answers[1], case.tolerance)


def test_repeated_request_hits_its_own_blocks(case: Case) -> None:
    first = case.a.ask(case.parts, num_steps=2)
    second = case.a.ask(case.parts, num_steps=2)
    assert second.outcome is not None
    assert (second.outcome["cached_tokens"], second.outcome["injected_tokens"]) == (128, 0)
    assert np.array_equal(second.logits, first.logits)


def test_partial_hit_in_the_middle_of_a_segment(case: Case) -> None:
    """96 of the first 120 tokens come from the prefix cache; injection goes on inside the second fact."""
    case.a.ask([*case.first, case.a.text(5)])
    parts = [*case.first, case.more, case.a.text(9)]
    case.a.check(parts, case.a.ask(parts, num_steps=2), case.tolerance, cached=96)
    assert [n for _, n in case.a.engine.claims()] == [120, 64]


def test_cached_text_in_front_of_the_facts(case: Case) -> None:
    """Text that is no segment: injected behind it once its blocks are cached, and never before."""
    head = case.a.text(2 * BLOCK)
    parts = [head, *case.parts]
    cold = case.a.ask(parts)
    assert cold.outcome is not None
    assert cold.outcome["injected_tokens"] == 0
    assert np.array_equal(cold.logits, case.a.ask_plain(parts).logits)
    case.a.engine.reset_prefix_cache()
    case.a.ask([head, case.a.text(1)])
    warm = case.a.ask(parts)
    assert warm.outcome is not None
    assert (warm.outcome["cached_tokens"], warm.outcome["injected_tokens"]) == (64, 120)
    assert case.a.difference(parts, warm, 120, start=64) <= case.tolerance


@pytest.mark.parametrize("other", ["scope", "epoch"])
def test_other_scope_and_epoch_share_nothing(case: Case, other: str) -> None:
    case.a.ask(case.parts)
    engine = case.a.engine
    plan = engine.plan(segments=segments_of(case.parts))
    plan = replace(plan, scope="someone else") if other == "scope" else replace(plan, epoch=1)
    case.a.check(case.parts, engine.ask(ids_of(case.parts), plan), case.tolerance)


def test_captured_after_an_injected_request_of_the_same_scope(case: Case) -> None:
    """An encode pass that opens with the tokens of a served prompt attends to nothing injected."""
    engine = case.a.engine
    case.a.ask(case.parts)
    ids = ids_of(case.first)
    key = engine.key(ids[:50], ids[50:])
    engine.ask(ids, engine.plan(captures=(Span(key, 50, 120),)))
    right = case.a.reference.encode(ids).span(50, 120).numpy()
    assert largest_difference(engine.pooled(key), right) <= 4 * case.tolerance  # pages, not logits
