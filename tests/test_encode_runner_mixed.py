"""Mixed passes on a stand-in for the engine: both directions run, and what they replace leaves the pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fakes import open_catalog
from inferscale import encode_jobs, encode_runner
from inferscale.catalog import Catalog
from inferscale.encode_runner import EncodeProgress, EncodeRunner
from inferscale.encoder import Encoder
from inferscale.facts import Fact, Scope
from inferscale.prompt import PromptBuilder
from inferscale.windows import WindowPolicy
from test_encode_runner import FakeEngine, said
from test_prompt import CHATML, tokenizer_with

ANA = Scope("ana")


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(tokenizer_with(CHATML))


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = open_catalog(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def mixing(catalog: Catalog, prompts: PromptBuilder, engine: FakeEngine) -> EncodeRunner:
    encoder = Encoder(catalog, prompts, "m", WindowPolicy(2, 3, 8), 4000)
    return EncodeRunner(engine, encoder)  # type: ignore[arg-type]


def test_mixed_passes_run_in_both_directions_and_count_once(
    catalog: Catalog, mixing: EncodeRunner, engine: FakeEngine, prompts: PromptBuilder
) -> None:
    facts = said(catalog, ANA, 24)
    state = mixing.encode_new(ANA)
    assert (state.done_jobs, state.jobs, state.num_failed, state.stored_facts) == (6, 6, 0, 24)
    tokens = sum(len(prompts.fact_ids(fact)) for fact in facts)
    assert state.stored_tokens == tokens
    assert state.computed_tokens == 2 * (tokens + 3 * len(prompts.anchor_ids))
    assert set(mixing.encoder.keys(fact.id for fact in facts).values()) <= engine.pool
    assert engine.forgotten == []


def test_a_repaired_fact_brings_both_directions_of_its_pass(
    catalog: Catalog, mixing: EncodeRunner, engine: FakeEngine
) -> None:
    facts = said(catalog, ANA, 24)
    mixing.encode_new(ANA)
    keys = mixing.encoder.keys(fact.id for fact in facts)
    engine.pool.clear()
    engine.half.clear()
    state = mixing.repair(ANA, facts[:1])
    assert (state.done_jobs, state.num_failed, state.stored_facts) == (2, 0, 8)
    assert keys[facts[0].id] in engine.pool


def test_what_mixed_passes_replace_leaves_the_pool(
    catalog: Catalog, mixing: EncodeRunner, engine: FakeEngine
) -> None:
    facts = said(catalog, ANA, 3)
    mixing.encode_new(ANA)
    before = mixing.encoder.keys(fact.id for fact in facts)
    assert set(before.values()) <= engine.pool
    engine.pool.discard(gone := before[facts[2].id])
    facts += said(catalog, ANA, 5, start=3)
    mixing.encode_new(ANA, only={facts[-1].id})
    assert set(engine.forgotten) == set(before.values()) - {gone}, "no order names what is not there"
    after = mixing.encoder.keys(fact.id for fact in facts)
    assert engine.pool == {mixing.encoder.anchor_key, *after.values()}


def test_what_is_in_the_pool_is_used_until_its_mixed_passes_have_run(
    catalog: Catalog, mixing: EncodeRunner, engine: FakeEngine
) -> None:
    """As after an upgrade: the pool is full of what sliding passes captured."""
    facts = said(catalog, ANA, 3)
    mixing.encode_new(ANA)
    before = mixing.encoder.keys(fact.id for fact in facts)
    facts += said(catalog, ANA, 13, start=3)
    engine.free_pages = 0
    assert mixing.warm(ANA).jobs == 0
    after = mixing.encoder.keys(fact.id for fact in facts)
    assert {id: after[id] for id in before} == before
    engine.full = {key for id, key in after.items() if id not in before}
    assert mixing.run(mixing.encoder.new_jobs(ANA)).num_failed > 0
    assert mixing.encoder.keys(before) == before, "a part of their pass was lost"
    assert engine.forgotten == []
    engine.full = set()
    engine.free_pages = 10_000
    state = mixing.warm(ANA)
    assert (state.jobs, state.num_failed) == (4, 0), "the sliding passes are not repeated"
    assert set(engine.forgotten) == set(before.values())
    assert set(mixing.encoder.keys(fact.id for fact in facts).values()) <= engine.pool
    assert len(catalog.passes.by_ids(range(1, 100))) == 3, "each was recorded once"
    assert mixing.warm(ANA).jobs == 0


def test_passes_that_ran_before_an_error_are_done(
    catalog: Catalog, mixing: EncodeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_runner, "_PROGRESS_EVERY_S", 0.0)
    said(catalog, ANA, 24)

    def fail(state: EncodeProgress) -> None:
        if state.done_jobs == 3:  # both of one pass, one of the next
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mixing.encode_new(ANA, fail)
    assert len(catalog.provisional(mixing.encoder.encodings_of, ANA)) == 16


def captured(engine: FakeEngine) -> list[set[str]]:
    """Keys of each request that ran."""
    return [{span.key for span in request.plan.captures} for request in engine.run if request.plan]


def test_repair_in_a_full_pool_captures_what_is_asked_for(
    catalog: Catalog, mixing: EncodeRunner, engine: FakeEngine, prompts: PromptBuilder
) -> None:
    facts = said(catalog, ANA, 24)
    mixing.encode_new(ANA)
    keys = mixing.encoder.keys(fact.id for fact in facts)
    anchor = mixing.encoder.anchor_key
    groups = [set(pair[0].fact_ids) for pair in encode_jobs.in_pairs(mixing.encoder.rebuild_jobs(keys))]
    wanted = [next(fact for fact in facts if fact.id in group) for group in groups]

    def pages(chosen: Iterable[Fact]) -> int:
        return sum(-(-len(prompts.fact_ids(fact)) // engine.page_size) for fact in chosen)

    def repaired(spare: int) -> list[set[str]]:
        engine.pool.clear()
        engine.half.clear()
        engine.run.clear()
        engine.free_pages = -(-len(prompts.anchor_ids) // engine.page_size) + pages(wanted) + spare
        assert mixing.repair(ANA, wanted).num_failed == 0
        assert {keys[fact.id] for fact in wanted} <= engine.pool
        return captured(engine)

    only = [{anchor, keys[fact.id]} for fact in wanted]
    assert sorted(map(sorted, repaired(0))) == sorted(map(sorted, only * 2)), "in both directions"
    one_whole = pages(fact for fact in facts if fact.id in groups[0]) - pages(wanted[:1])
    assert sorted(map(len, repaired(one_whole))) == [2, 2, 2, 2, 9, 9]
    assert sorted(map(len, repaired(one_whole - 1)))[:4] == [2, 2, 2, 2]
    assert mixing.encoder.keys(keys) == keys
    assert catalog.provisional(mixing.encoder.encodings_of, ANA) == [], "they stay done"


def test_new_passes_of_a_repair_in_a_full_pool_are_done_later(
    catalog: Catalog, mixing: EncodeRunner, engine: FakeEngine
) -> None:
    facts = said(catalog, ANA, 8)
    engine.free_pages = 0
    for wanted in ([facts[0], facts[5]], [facts[3]]):
        engine.run.clear()
        state = mixing.repair(ANA, wanted)
        keys = mixing.encoder.keys(fact.id for fact in facts)
        assert (state.jobs, state.num_failed, state.stored_facts) == (2, 0, len(wanted))
        assert captured(engine) == [{mixing.encoder.anchor_key, *(keys[fact.id] for fact in wanted)}] * 2
    assert len(catalog.provisional(mixing.encoder.encodings_of, ANA)) == 8
    engine.free_pages = 100
    mixing.warm(ANA)
    assert catalog.provisional(mixing.encoder.encodings_of, ANA) == []
    assert mixing.encoder.keys(keys) == keys
    assert set(keys.values()) <= engine.pool


def test_what_slid_before_is_repaired_by_its_own_pass_where_the_new_one_is_not_whole(
    catalog: Catalog, mixing: EncodeRunner, engine: FakeEngine
) -> None:
    facts = said(catalog, ANA, 3)
    mixing.encode_new(ANA)
    before = mixing.encoder.keys(fact.id for fact in facts)
    engine.pool.clear()
    engine.free_pages = 0
    facts += said(catalog, ANA, 5, start=3)
    assert mixing.repair(ANA, [facts[0], facts[7]]).num_failed == 0
    keys = mixing.encoder.keys(fact.id for fact in facts)
    assert keys[facts[0].id] == before[facts[0].id]
    assert engine.pool == {mixing.encoder.anchor_key, *before.values(), keys[facts[7].id]}


def test_warm_takes_both_directions_or_none(
    catalog: Catalog, mixing: EncodeRunner, engine: FakeEngine, prompts: PromptBuilder
) -> None:
    said(catalog, ANA, 24)
    *_, last = encode_jobs.in_pairs(mixing.encoder.new_jobs(ANA))
    spans = [span for job in last[:1] for span in job.captures]
    needed = sum(-(-(span.end - span.start) // engine.page_size) for span in spans)
    engine.free_pages = needed - 1
    assert mixing.warm(ANA).jobs == 0
    engine.free_pages = needed + 1
    state = mixing.warm(ANA)
    assert (state.jobs, state.num_failed, state.stored_facts) == (2, 0, 8)
