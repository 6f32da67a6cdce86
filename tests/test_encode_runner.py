"""Encode jobs on a stand-in for the engine: how many run at once, what is reported, what is left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from fakes import add, open_catalog
from inferscale import encode_jobs, encode_runner
from inferscale.catalog import Catalog
from inferscale.encode_runner import EncodeProgress, EncodeRunner
from inferscale.encoder import EncodeJob, Encoder
from inferscale.facts import Fact, Scope
from inferscale.offline import Finished, Generation, GenerationRequest
from inferscale.plan import Order, Span
from inferscale.prompt import PromptBuilder
from inferscale.windows import WindowPolicy
from test_prompt import CHATML, tokenizer_with

ANA, BOB = Scope("ana"), Scope("bob")


class FakeEngine:
    """Holds what is captured; draws requests as the real one does, and finishes the last drawn first.

    half: keys of which part 1 was captured. full: keys that find no room. pages, page_size: of the pool that
    `stats` describes.
    """

    def __init__(self, step_tokens: int = 1000) -> None:
        self.step_tokens = step_tokens
        self.pool: set[str] = set()
        self.half: set[str] = set()
        self.full: set[str] = set()
        self.forgotten: list[str] = []
        self.failing = False
        self.free_pages, self.page_size = 10_000, 16
        self.run: list[GenerationRequest] = []
        self.limits: dict[str, Any] = {}
        self.is_closed = False
        self.residency = self
        self.on_disk: list[str] = []

    def keys(self, tier: str) -> list[str]:
        assert tier == "disk"
        return self.on_disk

    def stream(self, requests: Iterable[GenerationRequest], **limits: Any) -> Generator[Finished, None, None]:
        self.limits = limits
        source = enumerate(requests)
        try:
            while batch := list(islice(source, 3)):
                done = [Finished(place, self._capture(request)) for place, request in batch]
                for (_, request), finished in zip(reversed(batch), reversed(done), strict=True):
                    self.run.append(request)
                    yield finished
        finally:
            self.is_closed = True

    def _capture(self, request: GenerationRequest) -> Generation:
        if self.failing:
            raise RuntimeError("gone")
        assert request.plan is not None
        spans = [span for span in request.plan.captures if span.key not in self.full]
        spans = [span for span in spans if span.part != 2 or span.key in self.half]
        self.half |= {span.key for span in spans if span.part == 1}
        self.pool |= {span.key for span in spans if span.part != 1}
        return Generation("", (1,), 0.0, 0.0, 0, {"captured": len(spans)}, "length")

    def order(self, order: Order) -> dict[str, Any]:
        assert order.op == "forget"
        self.forgotten += order.keys
        self.pool -= set(order.keys)
        return {}

    def resident(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.pool for key in keys]

    def stats(self) -> dict[str, int]:
        return {"free_pages": self.free_pages, "page_size_tokens": self.page_size}


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
def runner(catalog: Catalog, prompts: PromptBuilder, engine: FakeEngine) -> EncodeRunner:
    encoder = Encoder(catalog, prompts, "m", WindowPolicy(2, 3), 4000)
    return EncodeRunner(engine, encoder)  # type: ignore[arg-type]


def said(catalog: Catalog, scope: Scope, number: int, start: int = 0) -> list[Fact]:
    return add(catalog, scope, *(f"somebody said thing {start + i}" for i in range(number)))


def test_everything_is_encoded_and_counted(
    catalog: Catalog, runner: EncodeRunner, engine: FakeEngine, prompts: PromptBuilder
) -> None:
    facts = said(catalog, ANA, 8)
    state = runner.encode_new(ANA)
    assert (state.done_jobs, state.jobs, state.num_failed, state.stored_facts) == (3, 3, 0, 8)
    assert state.stored_tokens == sum(len(prompts.fact_ids(fact)) for fact in facts)
    assert state.computed_tokens == sum(len(request.token_ids) for request in engine.run)
    assert runner.jobs.resident(list(runner.encoder.keys(f.id for f in facts).values())) <= engine.pool
    assert len(engine.pool) == 9, "the anchor as well"
    assert runner.encode_new(ANA) == EncodeProgress(0, 0, 0, 0, 0.0)


def test_nothing_is_encoded_where_no_use_is_made_of_it(
    catalog: Catalog, runner: EncodeRunner, engine: FakeEngine
) -> None:
    facts = said(catalog, ANA, 3)
    runner.is_off = True
    done = [runner.encode_new(ANA), runner.repair(ANA, facts), runner.warm(ANA)]
    assert done == [EncodeProgress(0, 0, 0, 0, 0.0)] * 3
    assert engine.run == []
    assert runner.encoder.keys(fact.id for fact in facts) == {}, "no pass is planned either"


def test_several_steps_are_in_flight(catalog: Catalog, runner: EncodeRunner, engine: FakeEngine) -> None:
    said(catalog, ANA, 4)
    runner.encode_new(ANA)
    assert engine.limits == {"max_in_flight": 256, "max_tokens_in_flight": 3000}
    assert all(request.max_tokens == 1 for request in engine.run)
    assert all(request.sampling == {"detokenize": False} for request in engine.run)


def test_the_same_conversation_of_two_users_has_two_keys(
    catalog: Catalog, runner: EncodeRunner, engine: FakeEngine
) -> None:
    """What is in the pool already would tell one user what the other said."""
    facts = [*said(catalog, ANA, 4), *said(catalog, BOB, 4)]
    runner.warm(Scope())
    keys = runner.encoder.keys(fact.id for fact in facts)
    assert len(set(keys.values())) == 8
    assert set(keys.values()) <= engine.pool


def test_progress_is_told_at_intervals_and_at_the_end(
    catalog: Catalog, runner: EncodeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(catalog, ANA, 30)
    told: list[EncodeProgress] = []
    runner.encode_new(ANA, told.append)
    assert [state.done_jobs for state in told] == [10]
    monkeypatch.setattr(encode_runner, "_PROGRESS_EVERY_S", 0.0)
    said(catalog, ANA, 9, start=30)
    told.clear()
    final = runner.encode_new(ANA, told.append)
    assert [state.done_jobs for state in told] == [1, 2, 3]
    assert told[-1] == final
    assert final.stored_tokens_per_s > final.stored_facts_per_s > 0
    assert EncodeProgress(0, 0, 0, 0, 0.0).stored_tokens_per_s == 0.0


def test_what_found_no_room_is_counted_and_logged(
    catalog: Catalog, runner: EncodeRunner, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    said(catalog, ANA, 6)
    jobs = runner.encoder.new_jobs(ANA)
    engine.full = {jobs[1].captures[2].key}
    with caplog.at_level(logging.WARNING):
        state = runner.run(jobs)
    assert (state.num_failed, state.stored_facts) == (1, 3)
    assert "1 of 8 segments were not captured" in caplog.text


def test_an_error_comes_out_and_ends_the_stream(
    catalog: Catalog, runner: EncodeRunner, engine: FakeEngine
) -> None:
    said(catalog, ANA, 4)

    def fail(state: EncodeProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.encode_new(ANA, fail)
    assert engine.is_closed
    engine.failing = True
    said(catalog, ANA, 4, start=4)
    with pytest.raises(RuntimeError, match="gone"):
        runner.encode_new(ANA)


def test_repair_runs_the_passes_of_the_missing_facts_once(
    catalog: Catalog, runner: EncodeRunner, engine: FakeEngine
) -> None:
    facts = said(catalog, ANA, 9)
    runner.encode_new(ANA)
    [new] = said(catalog, ANA, 1, start=9)
    keys = runner.encoder.keys(fact.id for fact in facts)
    engine.pool -= {keys[facts[3].id], keys[facts[4].id]}
    engine.run.clear()
    state = runner.repair(ANA, [facts[3], facts[4], new])
    assert state.done_jobs == len(engine.run) == 2
    assert set(runner.encoder.keys(fact.id for fact in [*facts, new]).values()) <= engine.pool


def test_what_came_meanwhile_is_not_repaired(
    catalog: Catalog, runner: EncodeRunner, engine: FakeEngine
) -> None:
    facts = said(catalog, ANA, 9)
    runner.encode_new(ANA)
    engine.pool.discard(runner.encoder.keys([facts[0].id])[facts[0].id])
    engine.run.clear()
    assert runner.repair(ANA, [facts[0], facts[8]]).done_jobs == len(engine.run) == 1
    assert runner.repair(ANA, [facts[0], facts[8]]).done_jobs == 0


def test_warm_takes_the_newest_that_fit(
    catalog: Catalog, runner: EncodeRunner, engine: FakeEngine, prompts: PromptBuilder
) -> None:
    facts = said(catalog, ANA, 9)
    pages = [-(-len(prompts.fact_ids(fact)) // engine.page_size) for fact in facts]
    anchor = -(-len(prompts.anchor_ids) // engine.page_size)
    engine.free_pages = anchor + sum(pages[3:])
    state = runner.warm(ANA)
    assert (state.jobs, state.stored_facts) == (2, 6)
    keys = runner.encoder.keys(fact.id for fact in facts)
    assert {fact.id for fact in facts if keys[fact.id] in engine.pool} == {fact.id for fact in facts[3:]}


def test_many_keys_are_asked_for_in_pieces(
    runner: EncodeRunner, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_jobs, "_KEYS_AT_ONCE", 3)
    asked: list[int] = []
    resident = engine.resident

    def counted(keys: Sequence[str]) -> list[bool]:
        asked.append(len(keys))
        return resident(keys)

    monkeypatch.setattr(engine, "resident", counted)
    engine.pool = {"2", "6"}
    assert runner.jobs.resident([str(number) for number in range(7)]) == {"2", "6"}
    assert asked == [3, 3, 1]


def test_python_costs_little(catalog: Catalog, runner: EncodeRunner) -> None:
    """Planning, recording and requests of 1,000 facts; a bound that only a blow-up exceeds."""
    said(catalog, ANA, 1000)
    start_s = time.perf_counter()
    state = runner.encode_new(ANA)
    assert state.stored_facts == 1000
    assert time.perf_counter() - start_s < 4.0


def test_repetitions_keep_what_is_new_in_part() -> None:
    def job(*keys: str) -> EncodeJob:
        return EncodeJob(ANA, (1,), tuple(Span(key, 0, 1) for key in keys))

    jobs = [job("anchor", "a"), job("anchor", "a"), job("anchor", "a", "b"), job("anchor", "b")]
    assert encode_jobs.without_repetitions(jobs) == [jobs[0], jobs[2]]


def test_the_two_directions_of_a_pass_are_no_repetitions() -> None:
    def job(part: int, *keys: str) -> EncodeJob:
        facts = (Span(key, 1, 2, part=part) for key in keys)
        return EncodeJob(ANA, (1, 2), (Span("anchor", 0, 1), *facts))

    pair, other = [job(1, "a", "b"), job(2, "b", "a")], job(0, "c")
    assert encode_jobs.without_repetitions([*pair, *pair, other, *pair]) == [*pair, other]
    assert encode_jobs.in_pairs([other, *pair, *pair, other]) == [
        (other,),
        tuple(pair),
        tuple(pair),
        (other,),
    ]
    assert encode_jobs.in_pairs(pair[::-1]) == [(pair[1],), (pair[0],)], "in no other order"


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in another process"])
def test_passes_that_a_deletion_has_overtaken_do_not_run(
    catalog: Catalog,
    runner: EncodeRunner,
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: bool,
) -> None:
    """They were planned with the text of the deleted fact, and would bring its KV back into the pool."""
    monkeypatch.setattr(encode_runner, "_PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(encode_runner, "_MAX_JOBS_IN_FLIGHT", 1)
    facts = said(catalog, ANA, 30)
    deleter = Catalog(tmp_path) if elsewhere else catalog
    deleted: list[tuple[str, ...]] = []

    def progress(state: EncodeProgress) -> None:
        if not deleted:
            deleted.append(deleter.delete(facts[20].id).keys)

    state = runner.encode_new(ANA, progress)
    assert deleted[0], "its passes were planned"
    assert not engine.pool & set(deleted[0])
    assert state.done_jobs == state.jobs
    assert state.num_failed > 0
    again = runner.warm(ANA)
    assert again.num_failed == 0
    keys = runner.encoder.keys(fact.id for fact in facts)
    assert len(keys) == 29
    assert set(keys.values()) <= engine.pool
    if elsewhere:
        deleter.close()


def test_keys_on_disk_that_no_fact_has_are_strays(
    catalog: Catalog, runner: EncodeRunner, engine: FakeEngine
) -> None:
    facts = said(catalog, ANA, 4)
    runner.encode_new(ANA)
    engine.on_disk = [*engine.pool, "a turn of a talk"]
    assert runner.jobs.strays() == ["a turn of a talk"], "the anchor belongs to everybody"
    keys = catalog.delete(facts[1].id).keys
    assert len(keys) == 3
    assert set(runner.jobs.strays()) == {"a turn of a talk", *keys}
