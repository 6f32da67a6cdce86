"""Context-Window Encoding: what the pool holds is what the reference computes behind the same window.

Criterion: the largest difference of any key or value element is at most twice that between the
engine's own pages and the reference for prompts without capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from harness.mixes import Author, Stored
from harness.reference import largest_difference
from inferscale.plan import Span
from inferscale.windows import WindowPolicy, alone, sliding, window

pytestmark = pytest.mark.engine

LENGTHS = [1, 15, 16, 17, 127, 129]


POLICIES = [alone(), window(2), sliding(2, 3), sliding(20, 20)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "mistral"])
def test_policies(author: Callable[..., Author], model: str, policy: WindowPolicy) -> None:
    a = author(model)
    facts = a.store_facts([30, *LENGTHS, 12], policy)
    check(a, facts, [60, 200, 360])


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_policies_on_a_real_model(author: Callable[..., Author], policy: WindowPolicy) -> None:
    a = author("smollm2", block_size=32)
    facts = a.store_facts([9, 1, 15, 17, 33, 12], policy)
    check(a, facts, [40, 90])


@pytest.mark.parametrize("budget", [48, 64])
def test_every_start_in_a_block_across_chunks(author: Callable[..., Author], budget: int) -> None:
    """Each length starts at each slot of a block; prompts are computed in chunks of odd sizes."""
    a = author("llama", block_size=32, max_num_batched_tokens=budget, max_num_seqs=16, pool_tokens=32768)
    offsets = range(1, 33) if budget == 48 else range(1, 33, 5)
    passes = []
    for offset in offsets:
        ends = np.cumsum([offset, *LENGTHS]).tolist()
        passes.append((a.text(ends[-1]), list(zip(ends, ends[1:], strict=False))))
    facts = a.store(passes)
    starts = {(len(f.ids), f.origin % 32) for f in facts}
    assert budget != 48 or len(starts) == len(LENGTHS) * 32
    check(a, facts, [60, 200, 360])


def test_every_start_in_a_default_block(author: Callable[..., Author]) -> None:
    """The same with the CPU's blocks of 128 tokens."""
    a = author("llama", max_num_batched_tokens=512, pool_tokens=32768)
    passes = []
    for offset in range(1, 129):
        length = LENGTHS[offset % len(LENGTHS)]
        passes.append((a.text(offset + length), [(offset, offset + length)]))
    check(a, a.store(passes), [60, 200, 360])


def check(a: Author, facts: Sequence[Stored], baseline_lengths: Sequence[int]) -> None:
    tolerance = 2 * a.kv_baseline(baseline_lengths)
    largest = 0.0
    for fact in facts:
        pooled = a.engine.pooled(fact.key)
        assert pooled is not None, f"a fact of {len(fact.ids)} tokens at {fact.origin} was not captured"
        largest = max(largest, largest_difference(pooled, fact.kv.numpy()))
    assert largest <= tolerance
    alone_kv = a.reference.encode(facts[-1].ids).numpy()
    assert largest_difference(alone_kv, facts[-1].kv.numpy()) > 1000 * tolerance  # the window matters


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_a_segment_of_two_passes_is_the_mean_of_them(author: Callable[..., Author], model: str) -> None:
    """Behind two windows of different lengths; then it is injected at a third place."""
    a = author(model)
    tolerance = 2 * a.kv_baseline([60, 200])
    fact, windows = a.text(17), (a.text(30), a.text(131))
    key = a.engine.key(windows[0], fact)
    encoded = []
    for part, before in enumerate(windows, start=1):
        span = Span(key, len(before), len(before) + len(fact), part=part)
        a.engine.ask([*before, *fact], a.engine.plan("encode", captures=(span,)))
        assert a.engine.resident([key]) == [part == 2]
        encoded.append(a.reference.encode([*before, *fact]).span(span.start, span.end))
    moved = a.reference.relocate(encoded[0], len(windows[1]) - len(windows[0]))
    mean = moved.mean(encoded[1])
    pooled = a.engine.pooled(key)
    assert largest_difference(pooled, mean.numpy()) <= tolerance
    assert largest_difference(pooled, encoded[1].numpy()) > 1000 * tolerance
    stored = Stored(key, tuple(fact), len(windows[1]), mean)
    parts = [stored, a.text(9)]
    a.check(parts, a.ask(parts), 2 * a.baseline([60, 200]))
