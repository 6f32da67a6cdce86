"""A pool smaller than the facts: what is missing is prefilled as text, and only that is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness.mixes import Author, Part, Stored, ids_of, segments_of
from inferscale.windows import sliding, window

pytestmark = pytest.mark.engine

NUM_PAGES = 49
PAGE = 16


@pytest.fixture
def model() -> str:
    """Of tests that name none."""
    return "llama"


@pytest.fixture
def a(author: Callable[..., Author], model: str) -> Author:
    return author(model, block_size=32, pool_tokens=NUM_PAGES * PAGE, page_size_tokens=PAGE)


def residency(a: Author, facts: list[Stored]) -> list[bool]:
    found: list[bool] = a.engine.resident([fact.key for fact in facts])
    return found


@pytest.mark.parametrize("model", ["llama", "qwen3", "mistral"])
def test_everything_evicted_equals_text(a: Author) -> None:
    facts = a.store_facts([40] * 6, window(2))
    before = a.engine.stats()
    a.store_facts([16] * NUM_PAGES, sliding(2, 60))
    assert residency(a, facts) == [False] * 6
    assert a.engine.stats()["evictions"] == before["evictions"] + 6
    parts: list[Part] = [*facts, a.text(20)]
    answer = a.ask(parts, num_steps=2)
    assert answer.outcome is not None
    assert (answer.outcome["injected_tokens"], answer.outcome["prefilled_tokens"]) == (0, 260)
    assert np.array_equal(answer.logits, a.ask_plain(parts, num_steps=2).logits)
    assert a.engine.stats()["segments_missing"] == before["segments_missing"] + 6


@pytest.mark.parametrize(
    ("model", "missing_at"), [("llama", 0), ("llama", 3), ("llama", 8), ("qwen3", 3), ("mistral", 3)]
)
def test_some_evicted_equals_the_mix(a: Author, missing_at: int) -> None:
    """The resident facts before the missing one are injected, it and all behind it are text."""
    missing = a.store_facts([40], window(0))[0]
    facts = a.store_facts([40] * 8, sliding(3, 4))
    a.store_facts([16] * (NUM_PAGES - 8 * 3), sliding(0, 60))
    assert residency(a, [missing, *facts]) == [False] + [True] * 8
    parts: list[Part] = [*facts[:missing_at], missing, *facts[missing_at:], a.text(20)]
    answer = a.ask(parts, num_steps=2)
    assert answer.outcome is not None
    assert answer.outcome["injected_tokens"] == 40 * missing_at
    assert a.difference(parts, answer, 40 * missing_at) <= 2 * a.baseline([380] * 4, 2)


def test_first_of_fifty_evicted_and_moved_to_the_tail(a: Author) -> None:
    lengths = [3 + i % 14 for i in range(50)]
    facts = a.store_facts(lengths[:10], sliding(20, 20))
    facts += a.store_facts(lengths[10:], sliding(20, 20))
    assert residency(a, facts) == [False] + [True] * 49
    parts: list[Part] = [*facts[1:], facts[0], a.text(12)]
    answer = a.ask(parts, num_steps=2)
    assert answer.outcome is not None
    assert answer.outcome["covered_segments"] == 49
    assert answer.outcome["injected_tokens"] == sum(lengths[1:])
    assert a.difference(parts, answer, sum(lengths[1:])) <= 2 * a.baseline([sum(lengths) + 12] * 4, 2)


def test_the_least_recently_used_goes_first(a: Author) -> None:
    facts = [a.store_facts([PAGE], window(0))[0] for _ in range(NUM_PAGES)]
    a.ask([facts[0], facts[1], a.text(5)])
    a.store_facts([PAGE] * 3, sliding(0, 3))
    assert residency(a, facts[:7]) == [True, True, False, False, False, True, True]


def test_a_step_injects_what_its_captures_push_out(a: Author) -> None:
    """One step injects 20 pages and captures 40, more than the others: what it injects is read first."""
    old = a.store_facts([PAGE] * NUM_PAGES, sliding(0, 60))
    before = a.engine.stats()
    tolerance = 2 * a.baseline([340] * 4)
    parts: list[Part] = [*old[:20], a.text(20)]
    engine = a.engine
    author = Author(engine, a.reference, 5)
    ids = author.text(40 * PAGE)
    spans = [(i * PAGE, (i + 1) * PAGE) for i in range(40)]
    request = engine.request(ids_of(parts), engine.plan(segments=segments_of(parts)))
    name = engine.add(request)
    new = author.add_capture(ids, spans)
    answers = engine.step()
    a.check(parts, answers[name], tolerance)
    after = engine.stats()
    assert after["open_steps"] == 0
    assert after["captures"] - before["captures"] == 40
    assert after["captures_without_room"] == before["captures_without_room"]
    # Those in use went last: the 29 others first, then 11 of the 20.
    assert sum(residency(a, old)[:20]) == 9
    assert residency(a, old)[20:] == [False] * 29
    assert residency(a, new) == [True] * 40
    engine.check_table()
