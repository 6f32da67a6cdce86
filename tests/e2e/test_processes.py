"""The engine in processes of its own, with one rank and with two: the sides share messages only.

One small pool for all tests of a file's engine, so that eviction goes on all the time.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.engine import EngineCache, EngineFailed
from harness.mixes import Author, Part, Stored, ids_of, segments_of
from harness.offline import OfflineOptions, OfflineProcess
from harness.protocol import Answer
from harness.reference import Reference
from inferscale.plan import Order, Plan, Segment
from inferscale.windows import sliding

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]  # starting means importing vLLM up to three times

POOL_TOKENS = 512


@pytest.fixture(scope="module", params=["one_rank", "two_ranks"])
def process(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OfflineProcess]:
    """The engine core in one process, its workers in others."""
    ranks = ["one_rank", "two_ranks"].index(request.param) + 1
    cores = sorted(os.sched_getaffinity(0))
    if ranks > len(cores):
        pytest.skip(f"tensor parallelism {ranks} needs as many cores; there are {len(cores)}")
    bind = "|".join(str(core) for core in cores[:ranks]) if ranks > 1 else "auto"
    options = OfflineOptions(
        str(checkpoint("llama")),
        block_size=32,
        max_num_batched_tokens=128,
        max_num_seqs=16,
        pool_tokens=POOL_TOKENS,
        tensor_parallel_size=ranks,
        environment=(("VLLM_CPU_OMP_THREADS_BIND", bind),),
    )
    running = OfflineProcess(options, tmp_path_factory.mktemp("processes") / "engine.log")
    yield running
    running.close()


@pytest.fixture
def a(
    request: pytest.FixtureRequest, process: OfflineProcess, reference: Callable[[str], Reference]
) -> Author:
    """An author for `process`, with an empty pool."""
    process.forget_everything()
    return Author(process, reference("llama"), zlib.crc32(request.function.__name__.encode()))


def restored(a: Author, facts: list[Stored], engine: EngineCache, checkpoint: Path) -> Author:
    """An author with the same texts stored in an engine within one process."""
    within = engine(checkpoint, block_size=32)
    within.forget_everything()
    assert within.facts.model == a.engine.facts.model
    ids = ids_of(facts)
    starts = np.cumsum([0, *(len(fact.ids) for fact in facts)]).tolist()
    twin = Author(within, a.reference, 0)
    twin.store([(ids, list(zip(starts, starts[1:], strict=False)))])
    return twin


def idle(a: Author) -> dict[str, int]:
    """Statistics after one more step, in which the last reports have arrived."""
    a.engine.ask(a.text(3))
    stats: dict[str, int] = a.engine.stats()
    return stats


def test_sides_are_different_processes(process: OfflineProcess) -> None:
    found = process.processes()
    pids = {found["front_end"], os.getpid(), *found["workers"]}
    assert len(pids) == 2 + process.options.tensor_parallel_size
    folder = Path(process.runtime_dir())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600


def test_answers_equal_those_within_one_process(
    a: Author, engine: EngineCache, checkpoint: Callable[[str], Path]
) -> None:
    """Captured, relocated, injected: the same logits, and those of the reference."""
    facts = a.store([((ids := a.text(170)), [(0, 31), (31, 64), (64, 69), (69, 130), (130, 170)])])
    parts: list[Part] = [facts[3], facts[0], facts[4], facts[1], facts[2], a.text(11)]
    tolerance = 2 * a.baseline([181] * 4, 3)
    moved = a.ask(parts, num_steps=3)
    a.check(parts, moved, tolerance)
    in_place = a.ask([*facts, a.text(7)], num_steps=3, scope="in place")
    within = restored(a, facts, engine, checkpoint("llama"))
    twin = within.ask(parts, num_steps=3)
    assert twin.token_ids == moved.token_ids
    assert np.abs(twin.logits - moved.logits).max() <= tolerance
    assert in_place.outcome is not None
    assert in_place.outcome["injected_tokens"] == 170
    again = a.ask_plain([ids, (5,)])
    assert a.difference([ids, (5,)], again, 0) <= tolerance


def test_many_requests_in_a_step(a: Author) -> None:
    """Shared segments, a plain request and an encode pass beside them, chunked prefill."""
    facts = a.store_facts([20, 33, 5, 64, 40], sliding(2, 5))
    prompts: list[list[Part]] = [[*a.shuffled(facts), a.text(n)] for n in (1, 40, 150)]
    other = a.text(150)
    tolerance = 2 * a.baseline([312] * 6, 2)
    requests = [
        a.engine.request(
            ids_of(parts), a.engine.plan(f"scope {i}", segments=segments_of(parts)), max_tokens=2
        )
        for i, parts in enumerate(prompts)
    ]
    *answers, plain = a.engine.generate([*requests, a.engine.request(other, max_tokens=2)])
    for parts, answer in zip(prompts, answers, strict=True):
        a.check(parts, answer, tolerance)
    assert a.difference([other], plain, 0) <= tolerance


def test_residency_and_outcomes_over_the_socket(a: Author) -> None:
    """An outcome can be had while its request still runs, as a stream needs it."""
    facts = a.store_facts([20, 33], sliding(2, 5))
    keys = [fact.key for fact in facts]
    assert a.engine.resident([*keys, "unknown"]) == [True, True, False]
    parts: list[Part] = [*facts, a.text(9)]
    plan = a.engine.plan(segments=segments_of(parts))
    assert a.engine.outcome(plan.id) is None
    name = a.engine.add(a.engine.request(ids_of(parts), plan, max_tokens=30))
    a.engine.step()
    outcome = a.engine.outcome(plan.id)
    assert outcome is not None
    assert (outcome["injected_tokens"], outcome["cached_tokens"], outcome["prefilled_tokens"]) == (53, 0, 9)
    answers = {}
    while not answers:
        answers = a.engine.step()
    assert answers[name].outcome == a.engine.outcome(plan.id)


def test_order_for_statistics_agrees_with_the_socket(a: Author) -> None:
    a.store_facts([20, 33], sliding(2, 5))
    answer = a.engine.order(Order("stats"))
    assert answer["resident_segments"] == 2
    assert answer["internal_errors"] == 0
    counted = a.engine.stats()
    for name in ("captures", "segments_injected", "resident_segments", "free_pages"):
        assert answer[name] == counted[name]


def test_order_to_forget_drops_keys_and_stale_plans(a: Author) -> None:
    facts = a.store_facts([20, 33, 40], sliding(2, 5))
    parts: list[Part] = [*facts, a.text(9)]
    before = a.ask(parts, scope="ana")
    assert before.outcome is not None
    assert before.outcome["injected_tokens"] == 93
    answer = a.engine.order(Order("forget", (facts[2].key, "unknown"), (("ana", 1),)))
    assert answer == {"dropped": 1}
    assert a.engine.resident([fact.key for fact in facts]) == [True, True, False]
    tolerance = 2 * a.baseline([102] * 4)
    stale = a.ask([*facts, a.text(9)], scope="ana")
    assert stale.outcome is not None
    assert stale.outcome["injected_tokens"] == 0
    assert "changed" in stale.outcome["reason"]
    fresh = ask_at(a, parts, "ana", epoch=1)
    assert fresh.outcome is not None
    assert (fresh.outcome["injected_tokens"], fresh.outcome["cached_tokens"]) == (53, 0)
    assert a.difference(parts, fresh, 53) <= tolerance
    # Other scopes know nothing of it.
    assert (a.ask([facts[0], a.text(9)], scope="bob").outcome or {})["injected_tokens"] == 20


def ask_at(a: Author, parts: list[Part], scope: str, epoch: int) -> Answer:
    plan = Plan(a.engine.facts.model, scope, epoch, segments_of(parts))
    return a.engine.ask(ids_of(parts), plan)


def test_eviction_agrees_on_all_ranks(a: Author) -> None:
    """More is stored than fits: what is said to be resident is right on every rank, the rest is text."""
    before = a.engine.stats()
    facts = [fact for _ in range(4) for fact in a.store_facts([40, 25, 60, 33], sliding(4, 4))]
    there = a.engine.resident([fact.key for fact in facts])
    assert any(there) and not all(there)
    assert a.engine.stats()["evictions"] > before["evictions"]
    lost = [fact for fact, is_there in zip(facts, there, strict=True) if not is_there]
    kept = [fact for fact, is_there in zip(facts, there, strict=True) if is_there]
    parts: list[Part] = [*a.shuffled(kept)[:6], lost[0].ids, a.text(9)]
    segments = tuple(
        part.segment() if isinstance(part, Stored) else Segment(lost[0].key, part)
        for part in parts[:-1]
        if part
    )
    answer = a.engine.ask(ids_of(parts), a.engine.plan(segments=segments))
    num_kept = sum(len(part.ids) for part in parts if isinstance(part, Stored))
    assert answer.outcome is not None
    assert answer.outcome["injected_tokens"] == num_kept
    assert a.difference(parts, answer, num_kept) <= 2 * a.baseline([350] * 4)


def test_aborted_requests_leave_nothing(a: Author) -> None:
    """Before their first step, in the middle of their prefill, and while they decode."""
    facts = a.store_facts([20, 33, 40], sliding(2, 5))
    long: list[Part] = [*facts, a.text(300)]
    short: list[Part] = [*facts, a.text(9)]
    queued, prefilling, decoding = (
        a.engine.add(a.engine.request(ids_of(p), a.engine.plan(segments=segments_of(p)), max_tokens=50))
        for p in (short, long, short)
    )
    encoding = a.add_capture(a.text(300), [(0, 30), (200, 290)])
    a.engine.abort([queued])
    a.engine.step()
    a.engine.abort([prefilling])
    a.engine.step()
    a.engine.step()
    a.engine.abort([decoding])
    while a.engine.has_unfinished():
        a.engine.step()
    assert a.engine.resident([fact.key for fact in encoding]) == [True, True]
    stats = idle(a)
    assert (stats["open_steps"], stats["open_requests"]) == (0, 0)
    assert stats["internal_errors"] == 0
    a.check(short, a.ask(short, scope="later"), 2 * a.baseline([102] * 4))


def test_a_pass_does_not_attend_to_injected_blocks(a: Author) -> None:
    """In the same scope, prefix cache on: what is captured saw the exact KV that its key names."""
    prefix, first, second = a.text(20), a.text(64), a.text(30)
    moved = a.store([((*prefix, *first), [(20, 84)])])[0]
    parts: list[Part] = [moved, a.text(9)]
    tolerance = 2 * a.baseline([103] * 4)
    a.check(parts, a.ask(parts, scope="encode"), tolerance)  # its blocks hold KV that saw `prefix`
    behind = a.store([((*first, *second), [(64, 94)])])[0]
    parts = [behind, a.text(9)]
    a.check(parts, a.ask(parts), tolerance)


def test_capture_that_fails_on_one_rank_is_resident_on_none(a: Author) -> None:
    rank = a.engine.options.tensor_parallel_size - 1
    before = a.engine.stats()
    a.engine.break_rank(rank, "capture")
    lost = a.store_facts([20, 33], sliding(2, 5))
    a.engine.mend()
    assert a.engine.resident([fact.key for fact in lost]) == [False, False]
    stats = idle(a)
    assert stats["captures_failed"] == before["captures_failed"] + 2
    assert stats["free_pages"] == stats["pages"]
    parts: list[Part] = [*lost, a.text(9)]
    answer = a.ask(parts)
    assert (answer.outcome or {})["injected_tokens"] == 0
    tolerance = 2 * a.baseline([62] * 4)
    assert a.difference(parts, answer, 0) <= tolerance
    again = a.store([(ids_of(lost), [(0, 20), (20, 53)])])
    parts = [*again, parts[-1]]
    a.check(parts, a.ask(parts, scope="again"), tolerance)


def test_injection_that_fails_on_one_rank_fails_the_request(a: Author) -> None:
    """Never an answer from blocks that one rank did not write; the others' requests go on."""
    facts = a.store_facts([20, 33], sliding(2, 5))
    parts: list[Part] = [*facts, a.text(9)]
    a.engine.break_rank(a.engine.options.tensor_parallel_size - 1, "inject")
    request = a.engine.request(ids_of(parts), a.engine.plan(segments=segments_of(parts)), max_tokens=3)
    other = a.text(40)
    failed, plain = a.engine.generate([request, a.engine.request(other, max_tokens=3)])
    a.engine.mend()
    assert (failed.finish_reason, failed.token_ids) == ("error", ())
    tolerance = 2 * a.baseline([62] * 4, 3)
    assert a.difference([other], plain, 0) <= tolerance
    stats = idle(a)
    assert (stats["open_steps"], stats["open_requests"]) == (0, 0)
    a.check(parts, a.ask(parts), tolerance)


def test_a_refusal_in_the_engine_process_comes_out_by_name(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM itself only says that its engine process failed; the reason must not be lost."""
    options = OfflineOptions(str(checkpoint("llama")), pool_tokens=10**12)
    with pytest.raises(EngineFailed) as failure:
        OfflineProcess(options, tmp_path / "engine.log")
    last = str(failure.value).strip().splitlines()[-1]
    assert last.startswith("inferscale.errors.PoolTooLarge: pool_size_bytes is ")
    assert "are free on cpu" in last
