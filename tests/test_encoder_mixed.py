"""Mixed passes: when facts are encoded in them, with which tokens and keys, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from fakes import add, open_catalog
from inferscale.catalog import Catalog
from inferscale.encode_jobs import in_pairs
from inferscale.encoder import EncodeJob, Encoder, owned_by
from inferscale.facts import Fact, Scope
from inferscale.pass_runs import pass_runs
from inferscale.prompt import PromptBuilder
from inferscale.windows import WindowPolicy, mixed_groups
from test_prompt import CHATML, tokenizer_with

ANA, BOB = Scope("ana"), Scope("bob")
ANA_RUN = Scope("ana", run_id="1")
SIZE = 8


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder(tokenizer_with(CHATML))


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = open_catalog(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def encoder(catalog: Catalog, prompts: PromptBuilder) -> Encoder:
    return Encoder(catalog, prompts, "m", WindowPolicy(2, 3, SIZE), 4000)


def say(catalog: Catalog, scope: Scope, number: int, start: int = 0) -> list[Fact]:
    return add(catalog, scope, *(f"{scope.user_id} said thing {start + i}" for i in range(number)))


def directions(catalog: Catalog, encoder: Encoder, facts: Iterable[Fact]) -> list[int]:
    """Of the pass of each fact's KV; 0 where it has none."""
    found = catalog.passes.encodings(encoder.encodings_of, [fact.id for fact in facts])
    passes = catalog.passes.by_ids({encoding.pass_id for encoding in found.values()})
    return [passes[found[fact.id].pass_id].directions if fact.id in found else 0 for fact in facts]


def members(catalog: Catalog, encoder: Encoder, fact: Fact) -> set[str]:
    """Ids of the facts of the pass that a fact's KV is from."""
    encoding = catalog.passes.encodings(encoder.encodings_of, [fact.id])[fact.id]
    return set(catalog.passes.by_ids([encoding.pass_id])[encoding.pass_id].fact_ids)


def keys_of(jobs: Iterable[EncodeJob]) -> set[str]:
    return {span.key for job in jobs for span in job.captures}


def run(encoder: Encoder, jobs: Sequence[EncodeJob]) -> None:
    """All of these mixed passes is captured."""
    check_pairs(jobs)
    encoder.catalog.passes.mark_done(encoder.encodings_of, list(keys_of(jobs)))


def check_pairs(jobs: Sequence[EncodeJob]) -> None:
    """All are mixed passes, the two jobs of each one behind the other, with the same keys."""
    for pair in in_pairs(jobs):
        first, second = pair
        assert (first.part, second.part) == (1, 2)
        assert (first.scope, first.epoch) == (second.scope, second.epoch)
        assert first.captures[0] == second.captures[0], "the anchor, whole"
        assert first.captures[0].part == 0
        keys = [span.key for span in first.captures[1:]]
        assert [span.key for span in second.captures[1:]] == keys[::-1]
        for span in first.captures[1:]:
            other = next(each for each in second.captures if each.key == span.key)
            ids = first.token_ids[span.start : span.end]
            assert second.token_ids[other.start : other.end] == ids


def test_many_facts_are_encoded_in_both_directions(
    catalog: Catalog, prompts: PromptBuilder, encoder: Encoder
) -> None:
    facts = say(catalog, ANA, 20)
    jobs = encoder.new_jobs(ANA)
    assert len(jobs) == 2 * len(mixed_groups([fact.text for fact in facts], SIZE)) == 6
    check_pairs(jobs)
    assert directions(catalog, encoder, facts) == [2] * 20
    keys = encoder.keys(fact.id for fact in facts)
    assert len(set(keys.values())) == 20
    assert set(keys.values()) == {span.key for job in jobs for span in job.captures[1:]}
    encoding = catalog.passes.encodings(encoder.encodings_of, [facts[0].id])[facts[0].id]
    recorded = catalog.passes.by_ids([encoding.pass_id])[encoding.pass_id]
    by_id = {fact.id: prompts.fact_ids(fact) for fact in facts}
    runs = pass_runs(
        owned_by("m", ANA), prompts.anchor_ids, [by_id[id] for id in recorded.fact_ids], directions=2
    )
    [pair] = [pair for pair in in_pairs(jobs) if pair[0].captures[1].key == runs[0].captures[0].key]
    assert [(job.token_ids, job.captures[1:]) for job in pair] == runs
    assert {job.fact_ids for job in pair} == {recorded.fact_ids}
    run(encoder, jobs)
    assert encoder.new_jobs(ANA) == []


def test_neighbours_stay_together_in_both_directions(catalog: Catalog, prompts: PromptBuilder) -> None:
    encoder = Encoder(catalog, prompts, "m", WindowPolicy(2, 2, 8, 2), 4000)
    facts = say(catalog, ANA, 7)
    said = {fact.id: fact.seq for fact in facts}
    first, second = encoder.new_jobs(ANA)
    pairs = [tuple(said[fact_id] for fact_id in first.fact_ids[i : i + 2]) for i in range(0, 7, 2)]
    assert sorted(pairs) == [(1, 2), (3, 4), (5, 6), (7,)]
    assert pairs[-1] == (7,), "a whole pair stands where its other direction begins"
    by_key = dict(zip([span.key for span in first.captures[1:]], first.fact_ids, strict=True))
    order = [said[by_key[span.key]] for span in second.captures[1:]]
    assert order == [seq for pair in reversed(pairs) for seq in pair]
    catalog.passes.mark_done(encoder.encodings_of, list(keys_of([first, second])))
    again = encoder.rebuild_jobs([facts[3].id])
    assert [(job.token_ids, job.captures) for job in again] == [
        (job.token_ids, job.captures) for job in (first, second)
    ]
    # What was recorded counts, whatever is set now.
    other = Encoder(catalog, prompts, "m", WindowPolicy(2, 2, 8, 3), 4000)
    assert [job.token_ids for job in other.rebuild_jobs([facts[3].id])] == [first.token_ids, second.token_ids]


def test_stored_facts_are_counted_once(catalog: Catalog, prompts: PromptBuilder, encoder: Encoder) -> None:
    facts = say(catalog, ANA, 6)
    first, second = encoder.new_jobs(ANA)
    assert (first.num_facts, first.num_fact_tokens) == (0, 0)
    assert second.num_facts == 6
    assert second.num_fact_tokens == sum(len(prompts.fact_ids(fact)) for fact in facts)


def test_the_order_is_not_that_of_time_and_always_the_same(
    catalog: Catalog, prompts: PromptBuilder, encoder: Encoder
) -> None:
    say(catalog, ANA, 6)
    first, _ = encoder.new_jobs(ANA)
    other = Encoder(catalog, prompts, "m", encoder.policy, 4000)
    other.encodings_of += "+again"
    assert other.new_jobs(ANA)[0].token_ids == first.token_ids
    told = [prompts.fact_ids(fact) for fact in catalog.facts(ANA)]
    assert first.token_ids != (*prompts.anchor_ids, *(token for ids in told for token in ids))


def test_few_new_facts_are_encoded_as_without_mixed_passes(
    catalog: Catalog, prompts: PromptBuilder, encoder: Encoder
) -> None:
    facts = say(catalog, ANA, SIZE // 2 - 1)
    jobs = encoder.new_jobs(ANA)
    assert directions(catalog, encoder, facts) == [1] * len(facts)
    sliding = Encoder(catalog, prompts, "m", WindowPolicy(2, 3), 4000)
    sliding.encodings_of += "+sliding"
    assert sliding.new_jobs(ANA) == jobs


@pytest.mark.parametrize("only_new", [True, False])
def test_facts_of_sliding_passes_are_mixed_once_there_are_enough(
    catalog: Catalog, encoder: Encoder, only_new: bool
) -> None:
    facts: list[Fact] = []
    for number in range(SIZE - 1):
        facts += say(catalog, ANA, 1, number)
        [job] = encoder.new_jobs(ANA, {facts[-1].id} if only_new else None, with_followers=only_new)
        assert job.part == 0
    assert directions(catalog, encoder, facts) == [1] * (SIZE - 1)
    before = encoder.keys(fact.id for fact in facts)
    facts += say(catalog, ANA, 1, SIZE)
    jobs = encoder.new_jobs(ANA, {facts[-1].id} if only_new else None, with_followers=only_new)
    assert directions(catalog, encoder, facts) == [1] * (SIZE - 1) + [2], "as long as it has not run"
    assert encoder.keys(fact.id for fact in facts[:-1]) == before
    run(encoder, jobs)
    assert directions(catalog, encoder, facts) == [2] * SIZE
    after = encoder.keys(fact.id for fact in facts)
    assert set(before.values()).isdisjoint(after.values())
    superseded = catalog.passes.superseded_keys(encoder.encodings_of, after.values())
    assert set(superseded) == set(before.values())
    deleted = catalog.delete(facts[0].id).keys
    assert set(deleted) >= {*after.values(), before[facts[0].id]}, "also what saw it before it was mixed"


def test_many_new_facts_take_the_few_before_along(catalog: Catalog, encoder: Encoder) -> None:
    few = say(catalog, ANA, 2)
    encoder.new_jobs(ANA)
    facts = say(catalog, ANA, SIZE // 2, 2)
    jobs = encoder.new_jobs(ANA, {fact.id for fact in facts}, with_followers=True)
    run(encoder, jobs)
    assert directions(catalog, encoder, [*few, *facts]) == [2] * 6


def test_all_of_a_scope_that_was_never_mixed_is_with_the_next_warm(
    catalog: Catalog, prompts: PromptBuilder, encoder: Encoder
) -> None:
    """As after an upgrade."""
    facts, few = say(catalog, ANA, 20), say(catalog, BOB, 3)
    sliding = Encoder(catalog, prompts, "m", WindowPolicy(2, 3), 4000)
    sliding.new_jobs(Scope())
    assert directions(catalog, encoder, facts) == [1] * 20
    before = encoder.keys(fact.id for fact in facts)
    jobs = encoder.new_jobs(Scope())
    assert encoder.keys(fact.id for fact in facts) == before, "no pass has run, their KV may be there"
    assert encoder.new_jobs(Scope()) == jobs, "planned again"
    passes = catalog.passes.by_ids(range(1, 100)).values()
    assert sum(2 * (recorded.directions == 2) for recorded in passes) == len(jobs), "and recorded once"
    run(encoder, jobs)
    assert directions(catalog, encoder, facts) == [2] * 20
    assert directions(catalog, encoder, few) == [1] * 3
    assert encoder.new_jobs(Scope()) == []


def test_scopes_are_never_mixed(catalog: Catalog, encoder: Encoder) -> None:
    by_scope: dict[Scope, list[Fact]] = {ANA: [], BOB: [], ANA_RUN: []}
    for start in range(5):
        for scope, facts in by_scope.items():
            facts += say(catalog, scope, 1, start)
    jobs = encoder.new_jobs(Scope())
    check_pairs(jobs)
    assert len(jobs) == 6
    for facts in by_scope.values():
        assert members(catalog, encoder, facts[0]) == {fact.id for fact in facts}


def test_few_facts_of_a_scope_are_not_counted_with_those_of_its_runs(
    catalog: Catalog, encoder: Encoder
) -> None:
    say(catalog, ANA_RUN, 3)
    encoder.new_jobs(ANA_RUN)
    say(catalog, ANA, 3)
    encoder.new_jobs(ANA)
    facts = [*say(catalog, ANA, 2, 3), *catalog.facts(ANA)]
    encoder.new_jobs(ANA, {facts[0].id, facts[1].id})
    assert directions(catalog, encoder, facts) == [1] * len(facts)


def test_only_groups_of_wanted_facts_are_planned(
    catalog: Catalog, encoder: Encoder, prompts: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = say(catalog, ANA, 80)
    told: list[int] = []
    fact_ids = prompts.fact_ids
    monkeypatch.setattr(prompts, "fact_ids", lambda fact: told.append(fact.seq) or fact_ids(fact))
    assert encoder.new_jobs(ANA, {"unknown"}) == []
    jobs = encoder.new_jobs(ANA, {facts[40].id})
    assert len(jobs) == 2
    assert facts[40].id in members(catalog, encoder, facts[40])
    assert len(told) <= SIZE * 3 // 2, "the others were not even tokenized"
    assert directions(catalog, encoder, facts).count(2) == len(told)
    assert encoder.new_jobs(ANA, {facts[40].id}) == []


def test_rebuilding_repeats_both_directions(
    catalog: Catalog, prompts: PromptBuilder, encoder: Encoder
) -> None:
    facts = say(catalog, ANA, 16)
    jobs = encoder.new_jobs(ANA)
    later = Encoder(catalog, prompts, "m", WindowPolicy(0, 1), 4000)  # what counts is what was recorded
    assert later.rebuild_jobs(fact.id for fact in facts) == jobs
    [pair] = [pair for pair in in_pairs(jobs) if encoder.keys([facts[3].id])[facts[3].id] in keys_of(pair)]
    assert later.rebuild_jobs([facts[3].id]) == list(pair)


def test_a_mixed_pass_that_gives_other_keys_now_is_filed_anew(
    catalog: Catalog, encoder: Encoder, prompts: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = say(catalog, ANA, 6)
    encoder.new_jobs(ANA)
    before = encoder.keys(fact.id for fact in facts)
    line = prompts.fact_ids
    monkeypatch.setattr(prompts, "fact_ids", lambda fact: (*line(fact), 1))
    check_pairs(encoder.rebuild_jobs([facts[1].id]))
    after = encoder.keys(fact.id for fact in facts)
    assert set(after.values()).isdisjoint(before.values())
    assert directions(catalog, encoder, facts) == [2] * 6


def test_a_deleted_fact_takes_its_whole_group(catalog: Catalog, encoder: Encoder) -> None:
    facts = say(catalog, ANA, 20)
    encoder.new_jobs(ANA)
    gone, keys = members(catalog, encoder, facts[7]), encoder.keys(fact.id for fact in facts)
    deletion = catalog.delete(facts[7].id)
    assert set(deletion.keys) == {keys[id] for id in gone}
    left = [fact for fact in facts if fact is not facts[7]]
    assert directions(catalog, encoder, left) == [0 if fact.id in gone else 2 for fact in left]
    check_pairs(encoder.new_jobs(ANA))
    assert directions(catalog, encoder, left) == [2] * 19


def test_a_sliding_pass_takes_no_fact_from_a_mixed_one(catalog: Catalog, encoder: Encoder) -> None:
    """Those between its own are captured by it as well; the mixed KV stays theirs."""
    facts = say(catalog, ANA, 4)
    run(encoder, encoder.new_jobs(ANA))
    keys = encoder.keys(fact.id for fact in facts)
    catalog.passes.record(encoder.encodings_of, ANA, [], [facts[1].id], ["sliding, and newer"])
    assert encoder.keys(fact.id for fact in facts) == keys


def test_groups_fit_into_the_model(catalog: Catalog, prompts: PromptBuilder) -> None:
    facts = say(catalog, ANA, 12)
    room = len(prompts.anchor_ids) + 5 * max(len(prompts.fact_ids(fact)) for fact in facts)
    small = Encoder(catalog, prompts, "m", WindowPolicy(2, 3, 12), room)
    jobs = small.new_jobs(ANA)
    check_pairs(jobs)
    assert max(len(job.token_ids) for job in jobs) <= room
    assert len(jobs) == 6
    assert directions(catalog, small, facts) == [2] * 12


def test_where_long_texts_leave_few_for_one_pass_it_slides(catalog: Catalog, prompts: PromptBuilder) -> None:
    facts = say(catalog, ANA, 6)
    [long] = add(catalog, ANA, "long " * 400)
    room = len(prompts.anchor_ids) + 2 * max(len(prompts.fact_ids(fact)) for fact in facts)
    small = Encoder(catalog, prompts, "m", WindowPolicy(1, 1, 7), room)
    jobs = small.new_jobs(ANA)
    assert max(len(job.token_ids) for job in jobs) <= room
    assert directions(catalog, small, facts) == [1] * 6
    assert small.keys([long.id]) == {}, "it stays text"
    assert small.new_jobs(ANA) == []


def test_what_expires_or_is_too_long_slides_beside_mixed_facts(
    catalog: Catalog, prompts: PromptBuilder, encoder: Encoder
) -> None:
    """What expires would take the KV of its group along."""
    facts = say(catalog, ANA, 20)
    [passing, later] = facts[4], facts[13]
    for fact in (passing, later):
        catalog.set_expiry(fact.id, time.time() + 3600)
    [long] = add(catalog, ANA, "long " * 4000)
    jobs = encoder.new_jobs(ANA)
    run(encoder, [job for job in jobs if job.part])
    kinds = directions(catalog, encoder, facts)
    assert [fact for fact, kind in zip(facts, kinds, strict=True) if kind == 1] == [passing, later]
    assert kinds.count(2) == 18
    assert encoder.keys([long.id]) == {}, "it stays text"
    [new] = say(catalog, ANA, 1, 20)
    encoder.new_jobs(ANA, {new.id}, with_followers=True)
    assert directions(catalog, encoder, [new]) == [1]


@pytest.mark.parametrize("expires", [False, True], ids=["too long", "expiring"])
@pytest.mark.parametrize("only_new", [True, False])
def test_what_is_not_mixed_does_not_count(
    catalog: Catalog, prompts: PromptBuilder, expires: bool, only_new: bool
) -> None:
    encoder = Encoder(catalog, prompts, "m", WindowPolicy(2, 3, size := 12), 4000)
    others = say(catalog, ANA, size, 100) if expires else add(catalog, ANA, *["long " * 4000] * size)
    for fact in others if expires else []:
        catalog.set_expiry(fact.id, time.time() + 3600)
    encoder.new_jobs(ANA)
    assert directions(catalog, encoder, others) == [int(expires)] * size
    facts = say(catalog, ANA, size // 2 - 1)
    encoder.new_jobs(ANA, {fact.id for fact in facts} if only_new else None, with_followers=only_new)
    assert directions(catalog, encoder, [*facts, *others]) == [1] * len(facts) + [int(expires)] * size


def test_core_blocks_stay_alone(catalog: Catalog, encoder: Encoder) -> None:
    say(catalog, ANA, 6)
    block = catalog.set_block(ANA, "persona", "Be kind.").fact
    *mixed, alone = encoder.new_jobs(ANA)
    check_pairs(mixed)
    assert members(catalog, encoder, block) == {block.id}
    assert (alone.part, len(alone.captures)) == (0, 2)


def test_parts_of_both_directions_keep_their_order(catalog: Catalog, encoder: Encoder) -> None:
    say(catalog, ANA, 8)
    pair = encoder.new_jobs(ANA)
    for job in pair:
        parts = job.in_parts(32)
        assert len(parts) > 2
        assert {part.part for part in parts if len(part.captures) > 1} == {job.part}
        assert [span for part in parts for span in part.captures[1:]] == list(job.captures[1:])
        assert sum(part.num_facts for part in parts) == job.num_facts
