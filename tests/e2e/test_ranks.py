"""Two tensor-parallel ranks: the answers of one rank, and one opinion of what lies where.

One engine with few blocks, a small pool and both lower tiers, so that requests are preempted, segments are
evicted, and what is asked for comes back from below. Losing a worker ends it, so that test is the last.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.engine import EngineCache, EngineFailed
from harness.mixes import Author, Part, Stored, ids_of, segments_of
from harness.offline import OfflineOptions, OfflineProcess
from harness.reference import Reference
from inferscale.plan import Span
from inferscale.windows import sliding, window

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PAGE = 16
NUM_STEPS = 60
FAMILIES = ["llama", *(pytest.param(name, marks=pytest.mark.wide) for name in ("llama3", "qwen2", "qwen3"))]
FAMILIES.append(pytest.param("mistral", marks=pytest.mark.wide))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def ranks(
    family: str, checkpoint: Callable[[str], Path], disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OfflineProcess]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    options = OfflineOptions(
        str(checkpoint(family)),
        block_size=32,
        num_blocks=24,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=160,
        pool_tokens=49 * PAGE,
        page_size_tokens=PAGE,
        host_tokens=20 * PAGE,
        disk=str(disk),
        tensor_parallel_size=2,
        environment=(("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}"),),
    )
    running = OfflineProcess(options, tmp_path_factory.mktemp("ranks") / "engine.log")
    yield running
    running.close()


@pytest.fixture
def a(
    request: pytest.FixtureRequest,
    family: str,
    ranks: OfflineProcess,
    reference: Callable[[str], Reference],
) -> Author:
    ranks.forget_everything()
    return Author(ranks, reference(family), zlib.crc32(request.function.__name__.encode()))


def step_on(a: Author) -> None:
    while True:
        a.engine.step()


def push_out(a: Author) -> None:
    """Fill the pool with other facts."""
    a.store_facts([16] * 49, sliding(2, 60))


def test_answers_equal_those_of_one_rank(
    a: Author, family: str, engine: EngineCache, checkpoint: Callable[[str], Path]
) -> None:
    one = engine(checkpoint(family), block_size=32)
    one.forget_everything()
    assert one.facts.model == a.engine.facts.model
    ids = a.text(170)
    spans = [(0, 31), (31, 64), (64, 69), (69, 130), (130, 170)]
    facts = a.store([(ids, spans)])
    parts: list[Part] = [facts[3], facts[0], facts[4], facts[1], facts[2], a.text(11)]
    tolerance = 2 * a.baseline([181] * 4, 3)
    two = a.ask(parts, num_steps=3)
    a.check(parts, two, tolerance)
    twin = Author(one, a.reference, 0)
    twin.store([(ids, spans)])
    alone = twin.ask(parts, num_steps=3)
    assert alone.token_ids == two.token_ids
    assert np.abs(alone.logits - two.logits).max() <= tolerance


def test_the_mean_of_two_captures(a: Author) -> None:
    """Behind two windows of different lengths, injected at a third place."""
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
    stored = Stored(key, tuple(fact), len(windows[1]), mean)
    parts: list[Part] = [stored, a.text(9)]
    a.check(parts, a.ask(parts), 2 * a.baseline([60, 200]))


def test_preempted_requests(a: Author) -> None:
    facts = a.store_facts([20, 33, 5, 64], sliding(2, 4))
    prompts: list[list[Part]] = [[*a.shuffled(facts), a.text(5 + 7 * i)] for i in range(6)]
    before = a.engine.stats()["preemptions"]
    answers = a.engine.generate(
        [
            a.engine.request(
                ids_of(parts), a.engine.plan(f"scope {i}", segments=segments_of(parts)), max_tokens=NUM_STEPS
            )
            for i, parts in enumerate(prompts)
        ]
    )
    assert a.engine.stats()["preemptions"] > before
    tolerance = 2 * a.baseline([150] * 4, NUM_STEPS)
    for parts, answer in zip(prompts, answers, strict=True):
        assert answer.outcome is not None
        assert answer.outcome["injected_tokens"] == 122
        assert a.difference(parts, answer, 122) <= tolerance
    stats = a.engine.order_stats()
    assert (stats["open_steps"], stats["captures_failed"], stats["internal_errors"]) == (0, 0, 0)


def test_what_left_the_pool_comes_back_on_both_ranks(a: Author, disk: Path) -> None:
    facts = a.store_facts([40] * 6, window(2))
    keys = [fact.key for fact in facts]
    parts: list[Part] = [*facts, a.text(20)]
    first = a.ask(parts, num_steps=2)
    a.check(parts, first, 2 * a.baseline([260] * 4, 2))
    before = a.engine.stats()
    push_out(a)
    assert a.engine.stats()["evictions"] >= before["evictions"] + 6
    assert a.engine.resident(keys) == [True] * 6
    again = a.ask(parts, num_steps=2, scope="another scope's salt")
    assert again.outcome is not None
    assert again.outcome["injected_tokens"] == 240
    assert np.array_equal(again.logits, first.logits)
    stats = a.engine.stats()
    hits = sum(stats[name] - before[name] for name in ("host_hits", "disk_hits"))
    assert hits >= 6
    assert stats["tier_loads_failed"] == before["tier_loads_failed"]
    names = [sorted(path.name for path in disk.glob(f"*/rank-{rank}/*/*")) for rank in range(2)]
    assert names[0] == names[1]
    assert set(keys) <= set(names[0])


def test_a_copy_that_one_rank_cannot_read_is_text_on_both(a: Author, disk: Path) -> None:
    facts = a.store_facts([40] * 6, window(2))
    parts: list[Part] = [*facts, a.text(20)]
    push_out(a)
    [damaged] = disk.glob(f"*/rank-1/*/{facts[2].key}")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    before = a.engine.stats()["tier_loads_failed"]
    answer = a.ask(parts, num_steps=2)
    assert answer.outcome is not None
    assert answer.outcome["injected_tokens"] == 80
    assert a.engine.stats()["tier_loads_failed"] == before + 1
    assert a.difference(parts, answer, 80) <= 2 * a.baseline([260] * 4, 2)


def test_a_lost_worker_is_reported_as_vllm_reports_it(a: Author) -> None:
    """By its own error, soon, and nothing of ours keeps the engine from ending."""
    facts = a.store_facts([20, 33], sliding(2, 5))
    parts: list[Part] = [*facts, a.text(9)]
    request = a.engine.request(ids_of(parts), a.engine.plan(segments=segments_of(parts)), max_tokens=400)
    a.engine.add(request)
    a.engine.step()
    os.kill(a.engine.processes()["workers"][1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineFailed, match="EngineDeadError"):
        step_on(a)
    assert time.monotonic() - start < 60
    a.engine.close()
    assert not a.engine.is_alive
