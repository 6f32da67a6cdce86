"""Orders that load segments ahead of requests, inside vLLM's real scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from symbolic_engine import TOKEN_BYTES, SymbolicEngine, key_of
from test_tiering import FACTS, chat, is_resident, remember, stats

from inferscale.connector import tiering as tiering_module
from inferscale.plan import Order

Make = Callable[..., SymbolicEngine]

KEYS = tuple(key_of(fact) for fact in FACTS)


@pytest.fixture
def engine(make_engine: Make, runner: str, depth: int) -> SymbolicEngine:
    """A pool of 24 pages, eight facts, of which an order may load two; and host memory for all facts."""
    return make_engine(runner=runner, depth=depth, pool_pages=24, host_size_bytes=2**16)


def prefetch(engine: SymbolicEngine, *keys: str, name: str = "ahead", epoch: int = 0) -> Any:
    """What the connector answers."""
    engine.order(name, Order("prefetch", keys, (("scope", epoch),)))
    engine.run()
    outcome = engine.outcomes[name]
    assert outcome is not None
    return outcome["answer"]


def residents(engine: SymbolicEngine) -> list[int]:
    return [number for number, fact in enumerate(FACTS) if is_resident(engine, fact)]


def test_a_request_finds_in_the_pool_what_was_loaded_ahead(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:10])
    assert residents(engine) == list(range(2, 10))
    assert prefetch(engine, *KEYS[:2]) == {"resident": 2}
    assert residents(engine) == [0, 1, *range(4, 10)]
    before = stats(engine)
    assert (before["host_hits"], before["host_prefetched"], before["tier_loads_open"]) == (0, 2, 0)
    assert before["host_load_ms"] == 0  # of what requests waited for
    assert chat(engine, "chat", FACTS[0], FACTS[1])["injected_tokens"] == 24
    assert stats(engine)["host_hits"] == 0
    engine.check_idle()


def test_in_the_given_order_and_at_most_a_quarter_of_the_pool(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:14])  # the pool holds 6 to 13
    wanted = (3, 6, 0, 5, 1)
    assert prefetch(engine, *(KEYS[n] for n in wanted)) == {"resident": 3}
    assert residents(engine) == [0, 3, 6, *range(9, 14)]  # 6 stays: it is asked for as well
    engine.check_idle()


def test_room_is_not_made_of_what_the_order_names(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:9])
    assert residents(engine) == list(range(1, 9))
    assert prefetch(engine, *KEYS[1:9], KEYS[0]) == {"resident": 8}
    assert residents(engine) == list(range(1, 9))
    engine.check_idle()


def test_others_run_and_need_not_wait(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:10])
    engine.worker.load_steps = 12
    engine.order("ahead", Order("prefetch", KEYS[:1]))
    engine.add("runs", [5] * 20, max_tokens=2)
    for _ in range(8):
        engine.step()
    assert "runs" in engine.finish_reasons
    assert "ahead" not in engine.finish_reasons
    engine.run()
    assert is_resident(engine, FACTS[0])
    engine.check_idle()


def test_a_chat_that_comes_meanwhile_has_it(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:10])
    engine.worker.load_steps = 6
    engine.order("ahead", Order("prefetch", KEYS[:1]))
    engine.step()
    assert chat(engine, "chat", FACTS[0])["injected_tokens"] == 12
    engine.check_idle()


def test_nothing_waits_for_ever(engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiering_module, "MAX_WAIT_S", 0.0)
    remember(engine, *FACTS[:10])
    engine.worker.load_steps = 20
    assert prefetch(engine, KEYS[0]) == {"resident": 0}
    engine.add("filler", [5] * 20, max_tokens=30)
    engine.run()
    assert is_resident(engine, FACTS[0])
    engine.check_idle()


def test_an_order_behind_a_deletion_finds_nothing(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:10])
    engine.order("forget", Order("forget", KEYS[:1], (("scope", 1),)))
    engine.run()
    assert prefetch(engine, KEYS[0], name="newer", epoch=1) == {"resident": 0}
    assert prefetch(engine, KEYS[1], name="older", epoch=0) == {"resident": 0}  # made before it
    assert stats(engine)["host_prefetched"] == 0
    assert prefetch(engine, KEYS[1], epoch=1) == {"resident": 1}
    engine.check_idle()


def test_a_deletion_while_it_is_loaded(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:10])
    engine.worker.load_steps = 6
    engine.order("ahead", Order("prefetch", KEYS[:2]))
    engine.step()
    engine.order("forget", Order("forget", KEYS[:1], (("scope", 1),)))
    engine.run()
    assert engine.outcomes["ahead"]["answer"] == {"resident": 1}  # type: ignore[index]
    assert not is_resident(engine, FACTS[0])
    engine.add("filler", [5] * 20, max_tokens=4)
    engine.run()
    assert all(key != KEYS[0] for _, key in engine.worker.lower)
    engine.check_idle()


def test_an_aborted_order(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:10])
    engine.worker.load_steps = 6
    engine.order("ahead", Order("prefetch", KEYS[:1]))
    engine.step()
    engine.abort("ahead")
    engine.add("filler", [5] * 20, max_tokens=12)
    engine.run()
    assert is_resident(engine, FACTS[0])
    engine.check_idle()


def test_a_load_that_fails(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:10])
    engine.worker.failing_loads = True
    assert prefetch(engine, KEYS[0]) == {"resident": 0}
    assert stats(engine)["tier_loads_failed"] == 1
    assert chat(engine, "chat", FACTS[0])["injected_tokens"] == 0
    engine.check_idle()


def test_a_forged_order_is_refused(engine: SymbolicEngine) -> None:
    remember(engine, *FACTS[:10])
    secret, engine.side.secret = engine.side.secret, b"x" * 32
    engine.order("forged", Order("prefetch", KEYS[:1]))
    engine.side.secret = secret
    engine.run()
    outcome = engine.outcomes["forged"]
    assert outcome is not None
    assert "signature" in outcome["rejected"]
    assert not is_resident(engine, FACTS[0])
    engine.check_idle()


def test_without_tiers_nothing_is_loaded(make_engine: Make) -> None:
    engine = make_engine(pool_pages=9)
    remember(engine, *FACTS[:4])
    assert engine.side.answer({"op": "below", "keys": list(KEYS[:2])}) == {"below": [False, False]}
    assert prefetch(engine, *KEYS[:4]) == {"resident": 3}
    engine.check_idle()


def test_what_is_below(engine: SymbolicEngine) -> None:
    def below(*numbers: int) -> Any:
        return engine.side.answer({"op": "below", "keys": [KEYS[n] for n in numbers]})["below"]

    remember(engine, *FACTS[:10])
    assert below(0, 1, 9, 12) == [True, True, False, False]
    engine.worker.load_steps = 6
    engine.order("ahead", Order("prefetch", KEYS[:1]))
    engine.step()
    assert below(0, 1) == [False, True]  # it is on its way
    engine.run()


def test_loaded_ahead_is_kept_less_than_asked_for(make_engine: Make) -> None:
    engine = make_engine(pool_pages=12, host_size_bytes=6 * 12 * TOKEN_BYTES, max_share=1.0)
    remember(engine, *FACTS[:6])
    assert chat(engine, "asks", FACTS[1])["injected_tokens"] == 12
    assert prefetch(engine, KEYS[0]) == {"resident": 1}
    remember(engine, *FACTS[6:10])  # the four that were neither go first
    tier = engine.side.tiering.tiers[0]  # type: ignore[union-attr]
    assert set(tier.all_keys()) == {KEYS[n] for n in (0, 1, 6, 7, 8, 9)}
    remember(engine, FACTS[10])
    assert KEYS[0] not in tier.all_keys()
    assert KEYS[1] in tier.all_keys()
    engine.check_idle()
