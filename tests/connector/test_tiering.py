"""Tiers below the pool inside vLLM's real scheduler: what comes back is what was captured, or text."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from symbolic_engine import PAGE_SIZE, TOKEN_BYTES, SymbolicEngine, key_of, segment

from inferscale.config import ConnectorConfig
from inferscale.connector import tiering as tiering_module
from inferscale.connector.tiering import Tiering
from inferscale.connector.tiers_at_start import open_tiering
from inferscale.errors import InvalidConfig
from inferscale.plan import Order, Plan, Span
from inferscale.pool.disk import DiskStore
from inferscale.pool.table import PageTable
from inferscale.pool.tiers import Copy, Drop, Tier, TierAnswers

Make = Callable[..., SymbolicEngine]

FACTS = [list(range(start, start + 12)) for start in range(100, 340, 12)]
QUESTION = [7, 8, 9]
KIB = 2**10


@pytest.fixture
def engine(make_engine: Make, runner: str, depth: int) -> SymbolicEngine:
    """A pool of 9 pages, three facts, above host memory for all of them."""
    return make_engine(runner=runner, depth=depth, pool_pages=9, host_size_bytes=64 * KIB)


def remember(engine: SymbolicEngine, *facts: list[int]) -> None:
    for number, fact in enumerate(facts):
        engine.encode(f"encode {number} {fact[0]}", [3, *fact], (1, 1 + len(fact)))
        engine.run()


def chat(engine: SymbolicEngine, name: str, *facts: list[int]) -> dict[str, Any]:
    engine.chat(name, [token for fact in facts for token in fact] + QUESTION, *facts)
    engine.run()
    outcome = engine.outcomes[name]
    assert outcome is not None
    return outcome


def stats(engine: SymbolicEngine) -> dict[str, Any]:
    return engine.side.stats()


def is_resident(engine: SymbolicEngine, fact: list[int]) -> bool:
    return engine.side.table.is_resident(key_of(fact))


def test_what_was_pushed_out_comes_back(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:6])
    assert not is_resident(engine, FACTS[0])
    assert engine.side.answer({"op": "residency", "keys": [key_of(FACTS[0]), "other"]})["resident"] == [
        True,
        False,
    ]
    outcome = chat(engine, "chat", FACTS[0], FACTS[1])
    assert outcome["injected_tokens"] == 24
    assert is_resident(engine, FACTS[0])
    assert stats(engine)["host_hits"] == 2
    engine.check_idle()


def test_the_first_of_two_captures_does_not_hide_a_copy_below(engine: SymbolicEngine) -> None:
    for number, fact in enumerate(FACTS[:6]):
        for part in (1, 2):
            engine.encode(f"encode {number} {part}", [3, *fact], (1, 1 + len(fact)), part=part)
            engine.run()
    key = key_of(FACTS[0])
    assert engine.side.answer({"op": "below", "keys": [key]})["below"] == [True]
    engine.encode("again", [3, *FACTS[0]], (1, 13), part=1)  # the second never comes
    engine.run()
    assert engine.side.table.get(key).is_half
    assert engine.side.answer({"op": "below", "keys": [key]})["below"] == [True]
    assert chat(engine, "chat", FACTS[0])["injected_tokens"] == 12
    assert is_resident(engine, FACTS[0])
    engine.check_idle()


def test_a_request_waits_and_others_run(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:6])
    engine.worker.load_steps = 8
    engine.chat("waits", FACTS[0] + QUESTION, FACTS[0])
    engine.add("runs", [5] * 20, max_tokens=2)
    for _ in range(6):
        engine.step()
    assert engine.finish_reasons.get("runs") is not None
    assert "waits" not in engine.finish_reasons
    engine.run()
    outcome = engine.outcomes["waits"]
    assert outcome is not None
    assert outcome["injected_tokens"] == 12
    engine.check_idle()


def test_what_cannot_be_loaded_is_prefilled_and_forgotten(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:6])
    engine.worker.failing_loads = True
    assert chat(engine, "chat", FACTS[0])["injected_tokens"] == 0
    assert stats(engine)["tier_loads_failed"] == 1
    assert engine.side.answer({"op": "residency", "keys": [key_of(FACTS[0])]})["resident"] == [False]
    assert ("host", key_of(FACTS[0])) not in engine.worker.lower
    engine.worker.failing_loads = False
    remember(engine, FACTS[0])  # encoded anew
    assert chat(engine, "again", FACTS[0])["injected_tokens"] == 12
    engine.check_idle()


def test_nobody_waits_for_ever(engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiering_module, "MAX_WAIT_S", 0.0)
    remember(engine, *FACTS[:6])
    engine.worker.load_steps = 20
    assert chat(engine, "chat", FACTS[0])["injected_tokens"] == 0
    engine.add("filler", [5] * 20, max_tokens=30)
    engine.run()
    engine.check_idle()


@pytest.mark.parametrize("wait", ["auto", "never", "always"])
def test_who_would_be_prefilled_sooner_does_not_wait(
    make_engine: Make, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segments come all the same, for the next one."""
    engine = make_engine(pool_pages=9, host_size_bytes=64 * KIB, tier_wait=wait)
    remember(engine, *FACTS[:6])
    assert engine.side.tiering is not None
    monkeypatch.setattr(engine.side.tiering.pace, "is_worth_waiting", lambda *_: False)
    outcome = chat(engine, "first", FACTS[0])
    assert outcome["injected_tokens"] == (12 if wait == "always" else 0)
    assert stats(engine)["tier_waits_refused"] == (0 if wait == "always" else 1)
    assert stats(engine)["host_hits"] == 1
    assert is_resident(engine, FACTS[0])
    assert chat(engine, "second", FACTS[0], FACTS[1])["injected_tokens"] == (24 if wait == "always" else 12)
    engine.check_idle()


def test_waits_are_measured_by_tier(make_engine: Make) -> None:
    engine = make_engine(pool_pages=9, host_size_bytes=64 * KIB)
    remember(engine, *FACTS[:6])
    assert engine.side.tiering is not None
    pace = engine.side.tiering.pace
    for number in range(4):
        assert (pace.load_bytes_per_s("host", time.monotonic()) is not None) == (number >= 3)
        facts = FACTS[3:6] if number % 2 else FACTS[:3]  # as much as the pool holds
        chat(engine, f"chat {number}", *facts)
    assert pace.load_bytes_per_s("disk", time.monotonic()) is None


def test_a_share_of_the_pool_is_kept_for_others(make_engine: Make) -> None:
    """Facts of one scope push out its own, not those of another that came before."""
    engine = make_engine(pool_pages=9)
    for number, fact in enumerate(FACTS[:6]):
        captures = (Span(key_of(fact), 1, 13),)
        plan = Plan(engine.side.model, "bob" if number else "ana", captures=captures, id=str(number))
        engine.add(f"encode {number}", [3, *fact], plan)
        engine.run()
    assert is_resident(engine, FACTS[0])
    assert [is_resident(engine, fact) for fact in FACTS[1:6]] == [False, False, False, True, True]
    engine.check_idle()


def test_what_a_prompt_has_in_the_pool_stays_while_others_can_make_room(make_engine: Make) -> None:
    """Its last facts are there and its owner comes above its share: they are not given up for the first."""
    engine = make_engine(pool_pages=18, host_size_bytes=64 * KIB)

    def ask(name: str, owner: str, *facts: list[int], captures: bool = False) -> dict[str, Any]:
        prompt = [token for fact in facts for token in fact] + QUESTION
        spans = tuple(Span(key_of(fact), 12 * at, 12 * at + 12) for at, fact in enumerate(facts))
        segments = () if captures else tuple(segment(fact) for fact in facts)
        plan = Plan(engine.side.model, owner, segments=segments, captures=spans if captures else (), id=name)
        engine.add(name, prompt, plan)
        engine.run()
        return engine.outcomes[name] or {}

    ask("hers", "ana", *FACTS[:4], captures=True)
    ask("his", "bob", *FACTS[4:10], captures=True)
    ask("last", "ana", FACTS[2], FACTS[3])
    assert ask("all", "ana", *FACTS[:4])["injected_tokens"] == 48
    assert stats(engine)["host_hits"] == 3, "each that had left was loaded once"
    engine.check_idle()


def test_forgotten_in_every_tier(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:6])
    keys = tuple(key_of(fact) for fact in FACTS[:6])
    engine.order("forget", Order("forget", keys))
    engine.run()
    assert engine.worker.lower == {}
    assert stats(engine)["host_bytes"] == stats(engine)["host_segments"] == 0
    assert not any(engine.side.answer({"op": "residency", "keys": list(keys)})["resident"])
    engine.check_idle()


def test_forgotten_while_it_is_loaded(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:6])
    engine.worker.load_steps = 6
    engine.chat("waits", FACTS[0] + QUESTION, FACTS[0])
    engine.step()
    engine.order("forget", Order("forget", (key_of(FACTS[0]),), (("scope", 1),)))
    engine.run()
    outcome = engine.outcomes["waits"]
    assert outcome is not None
    assert outcome["injected_tokens"] == 0
    assert not is_resident(engine, FACTS[0])
    engine.add("filler", [5] * 20, max_tokens=4)
    engine.run()
    assert all(key != key_of(FACTS[0]) for _, key in engine.worker.lower)
    engine.check_idle()


def test_a_reset_empties_every_tier(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:6])
    engine.side.reset()
    engine.add("filler", [5] * 20)
    engine.run()
    assert engine.worker.lower == {}
    assert stats(engine)["host_segments"] == 0


def test_a_failed_save_leaves_nothing(engine: SymbolicEngine) -> None:
    engine.worker.failing_saves = True
    remember(engine, *FACTS[:6])
    engine.add("filler", [5] * 20)
    engine.run()
    assert stats(engine)["tier_saves_failed"] == 6
    assert stats(engine)["host_segments"] == 0
    assert chat(engine, "chat", FACTS[0])["injected_tokens"] == 0
    engine.check_idle()


def test_the_longest_unused_go_for_new_ones(make_engine: Make) -> None:
    four = 4 * 12 * TOKEN_BYTES
    engine = make_engine(pool_pages=3, host_size_bytes=four, max_share=1.0)
    remember(engine, *FACTS[:4])
    assert chat(engine, "use", FACTS[0])["injected_tokens"] == 12  # kept before those that never came back
    remember(engine, FACTS[4], FACTS[5])
    tier = engine.side.tiering.tiers[0]  # type: ignore[union-attr]
    assert set(tier.all_keys()) == {key_of(FACTS[n]) for n in (0, 3, 4, 5)}
    assert set(engine.worker.lower) == {("host", key) for key in tier.all_keys()}
    engine.check_idle()


def test_random_work_on_two_tiers(make_engine: Make, runner: str, depth: int, tmp_path: Path) -> None:
    """The symbolic worker compares every slot that is read with what belongs there."""
    size = 12 * TOKEN_BYTES
    engine = make_engine(
        runner=runner,
        depth=depth,
        pool_pages=4 * PAGE_SIZE,
        num_blocks=24,
        host_size_bytes=6 * size,
        disk_size_bytes=12 * (size + 100),
        disk_dir=str(tmp_path),
        max_share=1.0,
    )
    numbers = random.Random(5)
    for step in range(150):
        action = numbers.random()
        facts = numbers.sample(FACTS, numbers.randint(1, 4))
        engine.worker.load_steps = numbers.randint(1, 5)
        engine.worker.failing_loads = numbers.random() < 0.1
        engine.worker.failing_saves = numbers.random() < 0.1
        if action < 0.4:
            fact = facts[0]
            engine.encode(f"e{step}", [3, *fact], (1, 13))
        elif action < 0.9:
            prompt = [token for fact in facts for token in fact] + QUESTION
            engine.chat(f"c{step}", prompt, *facts, max_tokens=numbers.randint(1, 8))
        elif action < 0.95:
            engine.order(f"o{step}", Order("forget", (key_of(facts[0]),)))
        else:
            engine.order(f"o{step}", Order("prefetch", tuple(map(key_of, facts))))
        for _ in range(numbers.randint(0, 6)):
            if engine.scheduler.has_requests():
                engine.step()
    engine.worker.failing_loads = engine.worker.failing_saves = False
    engine.run()
    engine.add("filler", [5] * 20, max_tokens=12)
    engine.run()
    found = stats(engine)
    assert found["tokens_injected"] > 0
    assert found["host_hits"] > 0
    assert found["disk_hits"] > 0
    assert found["host_prefetched"] + found["disk_prefetched"] > 0
    tiering = engine.side.tiering
    assert tiering is not None
    for tier in tiering.tiers:
        assert {key for name, key in engine.worker.lower if name == tier.name} == set(tier.all_keys())
    engine.check_idle()


def test_a_copy_that_made_room_while_it_came_does_not_stay(make_engine: Make, tmp_path: Path) -> None:
    size = 12 * TOKEN_BYTES
    engine = make_engine(
        pool_pages=9,
        host_size_bytes=size,
        disk_size_bytes=64 * KIB,
        disk_dir=str(tmp_path),
        max_share=1.0,
    )
    remember(engine, *FACTS[:6])
    assert [key for tier, key in engine.worker.lower if tier == "host"] == [key_of(FACTS[5])]
    engine.worker.load_steps = 6
    engine.chat("waits", FACTS[0] + QUESTION, FACTS[0])
    engine.step()  # room in host memory is made for what comes
    engine.encode("other", [3, *FACTS[6]], (1, 13))  # and again for what is captured meanwhile
    engine.run()
    engine.add("filler", [5] * 20, max_tokens=4)
    engine.run()
    tiering = engine.side.tiering
    assert tiering is not None
    in_host = {key for tier, key in engine.worker.lower if tier == "host"}
    assert in_host == set(tiering.tiers[0].all_keys())
    engine.check_idle()


def test_what_comes_into_host_memory_makes_no_room_until_it_is_loaded() -> None:
    """It is read on its way into the pool, and what leaves host memory is overwritten."""
    table = PageTable(8, PAGE_SIZE)
    host, disk = Tier("host", 64, max_share=1.0), Tier("disk", 1024, max_share=1.0)
    tiering = Tiering(table, [host, disk], lambda _, tokens: 16 * tokens, 1)
    disk.admit(Copy("a", 4, 64, "", is_ready=True))
    assert tiering.prefetch(["a"], "x") is not None
    other = table.reserve("b", 4)
    assert other is not None
    tiering.save(other, 0, "x")
    orders = tiering.take_orders()
    assert orders is not None
    assert (orders.loads[0].keep, orders.drops, orders.saves[0].tiers) == (True, [], ("disk",))
    tiering.complete(TierAnswers(loaded=["a"]))
    third = table.reserve("c", 4)
    assert third is not None
    tiering.save(third, 0, "x")
    orders = tiering.take_orders()
    assert orders is not None
    assert orders.drops == [Drop("host", ("a",))]


def test_what_makes_room_in_the_same_step_is_not_saved(engine: SymbolicEngine) -> None:
    """Drops come before saves: a copy that is dropped and saved in one step would stay for ever."""
    tiering = engine.side.tiering
    assert tiering is not None
    tiering.tiers[0].capacity_bytes = 2 * 12 * TOKEN_BYTES
    engine.encode("three", [3, *FACTS[0], *FACTS[1], *FACTS[2]], (1, 13), (13, 25), (25, 37))
    engine.encode("one", [3, *FACTS[3]], (1, 13))
    engine.run()
    engine.add("filler", [5] * 20)
    engine.run()
    assert {key for _, key in engine.worker.lower} == set(tiering.tiers[0].all_keys())
    assert engine.worker.lower
    engine.check_idle()


def test_a_saved_copy_is_ready_when_its_own_order_is_answered() -> None:
    """A segment that is saved, pushed out and saved again is not there yet when the first save is done."""
    table = PageTable(8, PAGE_SIZE)
    tiering = Tiering(table, [Tier("host", 64, max_share=1.0)], lambda _, tokens: 16 * tokens, 1)
    entry = table.reserve("a", 4)
    assert entry is not None
    tiering.save(entry, 0, "x")
    first = tiering.take_orders()
    tiering.forget(["a"])
    tiering.save(entry, 0, "x")
    second = tiering.take_orders()
    assert first is not None
    assert second is not None
    tiering.complete(TierAnswers(saved=first.saves[0].answers()))
    assert tiering.find("a") is None
    tiering.complete(TierAnswers(saved=second.saves[0].answers()))
    assert tiering.find("a") is not None


@pytest.mark.parametrize("order", [(2, 3, 0, 1), (0, 1, 2, 3), (1, 0, 4, 2, 3)], ids=str)
def test_a_prompt_larger_than_the_pool_has_its_beginning_injected(
    engine: SymbolicEngine, order: tuple[int, ...]
) -> None:
    """What is loaded for a prompt does not push out what stands before it in the same prompt."""
    remember(engine, *FACTS[4:6], *FACTS[:4])  # the pool holds the last three
    assert chat(engine, "chat", *(FACTS[n] for n in order))["injected_tokens"] == 36
    engine.check_idle()


def test_what_only_another_rank_has_is_removed_at_the_start(tmp_path: Path) -> None:
    first = DiskStore(tmp_path, "format", 0, 8)
    second = first.of_rank(1)
    for store, keys in ((first, ["aa"]), (second, ["aa", "bb"])):
        store.open()
        for key in keys:
            store.write(key, memoryview(b"x" * 16), 0)
    config = ConnectorConfig(disk_size_bytes=KIB, disk_dir=str(tmp_path))
    tiering = open_tiering(config, PageTable(4, PAGE_SIZE), first, 2)
    assert tiering is not None
    assert tiering.tiers[0].all_keys() == ["aa"]
    assert [file.key for file in second.scan()] == ["aa"]
    tiering.close()


def test_settings_that_do_not_go_together(make_engine: Make) -> None:
    with pytest.raises(InvalidConfig, match="without disk_dir"):
        make_engine(disk_size_bytes=1000)


def test_one_engine_at_a_time_has_the_files(
    make_engine: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"pool_pages": 9, "disk_size_bytes": 64 * KIB, "disk_dir": str(tmp_path)}
    first = make_engine(**settings)
    second = make_engine(**settings)
    assert first.side.tiering is not None
    assert second.side.tiering is None
    assert "Another engine uses the KV" in caplog.text
    first.close()
    assert make_engine(**settings).side.tiering is not None


def test_a_folder_that_cannot_be_used_is_named(make_engine: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidConfig, match=r"file/kv cannot be used"):
        make_engine(disk_size_bytes=64 * KIB, disk_dir=str(tmp_path / "file" / "kv"))
