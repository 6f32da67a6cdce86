"""Models with several KV cache groups: windows, chunks and full attention on vLLM's hybrid cache manager."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from symbolic_engine import BLOCK_SIZE, FULL, SCOPE, SymbolicEngine, key_of, segment
from test_scheduler_stress import add_something

from inferscale.connector.groups import CacheGroup, held_from
from inferscale.plan import Order, Span

Make = Callable[..., SymbolicEngine]

WINDOW = CacheGroup(BLOCK_SIZE, window=40)
NARROW = CacheGroup(BLOCK_SIZE, window=5)
CHUNKED = CacheGroup(BLOCK_SIZE, chunk=48)
SMALL_BLOCKS = CacheGroup(BLOCK_SIZE // 2, window=40)

GROUPS = {
    "window": (WINDOW,),
    "full and window": (FULL, WINDOW),
    "window, full, window": (WINDOW, FULL, WINDOW),
    "full and narrow": (FULL, NARROW),
    "full and chunked": (FULL, CHUNKED),
    "other blocks": (FULL, SMALL_BLOCKS),
}

FACT = list(range(100, 130))
OTHER = list(range(200, 217))
LONG = list(range(300, 400))
QUESTION = [7, 8, 9]


@pytest.fixture(params=GROUPS)
def groups(request: pytest.FixtureRequest) -> tuple[CacheGroup, ...]:
    return GROUPS[request.param]


def test_what_a_group_holds() -> None:
    assert [WINDOW.held_from(n) for n in (0, 39, 40, 54, 55, 56, 71)] == [0, 0, 0, 0, 16, 16, 32]
    assert [CHUNKED.held_from(n) for n in (0, 47, 48, 95, 96)] == [0, 0, 48, 48, 96]
    assert FULL.held_from(1000) == 0
    assert held_from((FULL, WINDOW, CHUNKED), 95) == 48
    assert WINDOW.holds([0, 0, 5], 32, 48)
    assert not WINDOW.holds([0, 0, 5], 31, 48)
    assert not WINDOW.holds([0, 0, 5], 32, 49)
    assert FULL.holds([0, 4], 0, 32), "a full group is not asked for the null block"


def test_only_what_is_seen_is_injected(
    make_engine: Make, runner: str, groups: tuple[CacheGroup, ...]
) -> None:
    """Behind a run of 147 tokens; the worker compares every token that a step reads."""
    engine = make_engine(runner=runner, groups=groups, max_batched_tokens=256)
    engine.encode("e", [3, *FACT, *OTHER, *LONG], (1, 31), (31, 48), (48, 148))
    engine.run()
    assert engine.outcomes["e"]["captured"] == 3
    engine.chat("c", [*OTHER, *LONG, *FACT, *QUESTION], OTHER, LONG, FACT, max_tokens=70)
    moves = engine.step().kv_connector_metadata.orders.injection
    engine.run()
    assert (engine.outcomes["c"]["injected_tokens"], engine.outcomes["c"]["prefilled_tokens"]) == (147, 3)
    for group, of_group in zip(groups, moves, strict=True):
        positions = of_group.expand(group.block_size).positions.tolist()
        assert positions == list(range(group.held_from(147), 147))
    engine.check_idle()


def test_a_chunked_prefill_captures_piece_by_piece(
    make_engine: Make, runner: str, depth: int, groups: tuple[CacheGroup, ...]
) -> None:
    """A span of 100 tokens over steps of 20, whose window has left its beginning long before its end."""
    engine = make_engine(runner=runner, depth=depth, groups=groups, max_batched_tokens=20)
    engine.encode("e", [3, *FACT, *LONG, *OTHER], (1, 31), (31, 131), (131, 148))
    seen = []
    while engine.scheduler.has_requests():
        orders = engine.step().kv_connector_metadata.orders
        seen.append(len(orders.capture[0].expand(groups[0].block_size).rows) if orders.capture else 0)
    engine.drain()
    assert sum(seen) == 147
    assert len([n for n in seen if n]) > 3
    assert engine.outcomes["e"]["captured"] == 3
    assert engine.side.counters.captures == 3
    engine.check_idle()
    engine.chat("c", [*LONG, *OTHER, *FACT, *QUESTION], LONG, OTHER, FACT, max_tokens=20)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 147
    engine.check_idle()


def test_a_segment_is_not_used_before_its_last_piece(make_engine: Make, runner: str) -> None:
    engine = make_engine(runner=runner, groups=(FULL, NARROW), max_batched_tokens=40)
    engine.encode("e", LONG, (0, 100))
    for _ in range(2):
        engine.step()
        assert engine.side.table.holds(key_of(LONG))
        assert not engine.side.table.is_resident(key_of(LONG))
    engine.run()
    assert engine.side.table.is_resident(key_of(LONG))
    engine.check_idle()


@pytest.mark.parametrize("how", ["abort", "failure", "forgotten", "stale"])
def test_pages_of_a_span_that_is_not_finished_come_back(
    make_engine: Make, runner: str, depth: int, how: str
) -> None:
    engine = make_engine(runner=runner, depth=depth, groups=(FULL, WINDOW), max_batched_tokens=40)
    engine.encode("e", [3, *LONG, *OTHER], (1, 101), (101, 118))
    engine.step()
    engine.step()
    assert engine.side.table.holds(key_of(LONG))
    if how == "abort":
        engine.abort("e")
    elif how == "failure":
        engine.worker.failing_captures = True
        engine.step()
        engine.worker.failing_captures = False
    else:
        keys = (key_of(LONG),) if how == "forgotten" else ()
        engine.order("o", Order("forget", keys, () if how == "forgotten" else ((SCOPE, 1),)))
    engine.run()
    table = engine.side.table
    assert not table.holds(key_of(LONG))
    if how != "failure":  # whose step may have been that of the other span too
        assert table.is_resident(key_of(OTHER)) == (how == "forgotten")
    assert table.num_free_pages == table.num_pages - (5 if table.is_resident(key_of(OTHER)) else 0)
    engine.check_idle()


def test_another_request_captures_what_one_gave_up(make_engine: Make, runner: str, depth: int) -> None:
    """A piece of the first one is still on its way when the second takes the same key."""
    engine = make_engine(runner=runner, depth=depth, groups=(FULL, WINDOW), max_batched_tokens=40)
    engine.encode("first", [3, *LONG], (1, 101))
    engine.step()
    engine.abort("first")
    engine.encode("second", [4, *LONG], (1, 101))
    engine.run()
    assert engine.outcomes["second"]["captured"] == 1
    assert engine.side.table.is_resident(key_of(LONG))
    engine.chat("c", LONG + QUESTION, LONG)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 100
    engine.check_idle()


def test_what_the_prefix_cache_has_is_computed_anew(
    make_engine: Make, runner: str, depth: int, groups: tuple[CacheGroup, ...]
) -> None:
    """Its blocks are of use to the next token only; a pass that is run again captures all the same."""
    engine = make_engine(runner=runner, depth=depth, groups=groups, max_batched_tokens=64)
    prompt = [3, *FACT, *OTHER, *LONG]
    spans = ((1, 31), (31, 48), (48, 148))
    engine.encode("e", prompt, *spans)
    engine.run()
    engine.side.reset()  # the pool alone
    engine.encode("again", prompt, *spans)
    engine.run()
    assert engine.outcomes["again"]["captured"] == 3
    assert engine.side.counters.captures_out_of_reach == 0
    engine.chat("c", [*LONG, *FACT, *OTHER, *QUESTION], LONG, FACT, OTHER)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 147
    engine.check_idle()


def test_a_pass_in_parts_uses_the_prefix_cache(make_engine: Make, runner: str) -> None:
    """Each part finds the one before, and what reaches back into it is within the window."""
    engine = make_engine(runner=runner, groups=(FULL, WINDOW), max_batched_tokens=64)
    prompt = [*OTHER, *FACT, *LONG]
    for number, end in enumerate((32, 64, 147)):
        spans = [span for span in ((0, 17), (17, 47), (47, 147)) if span[1] <= end]
        engine.encode(f"e{number}", prompt[:end], *spans)
        engine.run()
        cached = engine.outcomes[f"e{number}"]["cached_tokens"]
        assert cached == (0, 32, 64)[number]
    assert engine.side.counters.captures == 3
    engine.check_idle()


def test_a_chat_leaves_what_is_out_of_reach_as_text(make_engine: Make, runner: str) -> None:
    """A conversation whose earlier turns are in the prefix cache: only a pass is computed anew for them."""
    engine = make_engine(runner=runner, groups=(FULL, WINDOW), max_batched_tokens=256)
    engine.encode("e", OTHER, (0, 17))
    engine.run()

    def turn(name: str, prompt: list[int], max_tokens: int) -> None:
        captures = (Span(key_of(LONG), 17, 117),)
        plan = engine.plan(segments=(segment(OTHER),), captures=captures)
        engine.add(name, prompt, plan, max_tokens=max_tokens)
        engine.run()

    engine.chat("first", [*OTHER, *LONG, *QUESTION], OTHER)
    engine.run()
    turn("second", [*OTHER, *LONG, *QUESTION, 5], 2)
    assert engine.outcomes["second"]["cached_tokens"] + engine.outcomes["second"]["injected_tokens"] == 112
    assert engine.side.counters.captures_out_of_reach == 1
    assert engine.outcomes["second"]["captured"] == 0
    turn("a pass", [*OTHER, *LONG], 1)
    assert engine.outcomes["a pass"]["captured"] == 1
    assert engine.outcomes["a pass"]["injected_tokens"] == 0
    assert "reason" not in engine.outcomes["a pass"]
    engine.check_idle()


def test_two_captures_of_one_segment(make_engine: Make, runner: str, depth: int) -> None:
    engine = make_engine(runner=runner, depth=depth, groups=(FULL, WINDOW), max_batched_tokens=40)
    engine.encode("first", [3, *LONG, *FACT], (1, 101), (101, 131), part=1)
    engine.run()
    assert not engine.side.table.is_resident(key_of(LONG))
    engine.encode("second", [*FACT, 4, *LONG], (31, 131), (0, 30), part=2)
    engine.run()
    assert engine.side.counters.captures == 2
    engine.chat("c", [*LONG, *FACT, *QUESTION], LONG, FACT)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 130
    engine.check_idle()


def test_the_second_capture_waits_for_all_of_the_first(make_engine: Make, runner: str) -> None:
    """While only a piece of the first is there, the second is not taken."""
    engine = make_engine(runner=runner, groups=(FULL, NARROW), max_batched_tokens=60)
    engine.encode("first", [3, *LONG], (1, 101), part=1)
    engine.step()
    first = engine.scheduler.running.pop()  # as if the budget were gone
    engine.encode("second", [4, *LONG], (1, 101), part=2)
    engine.step()
    engine.scheduler.running.append(first)
    engine.run()
    assert engine.side.counters.captures_without_first == 1
    assert not engine.side.table.is_resident(key_of(LONG))
    engine.check_idle()


def test_preempted_in_the_middle_of_a_span(make_engine: Make, runner: str, depth: int) -> None:
    engine = make_engine(
        runner=runner, depth=depth, groups=(FULL, WINDOW), max_batched_tokens=24, num_blocks=20
    )
    engine.add("other", [5] * 20, max_tokens=150)
    engine.encode("e", [3, *LONG, *FACT], (1, 101), (101, 131))
    engine.run()
    assert engine.outcomes["e"]["captured"] == 2
    engine.chat("c", [*FACT, *LONG, *QUESTION], FACT, LONG)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 130
    engine.check_idle()


def test_a_claim_without_blocks_is_failed(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should vLLM keep less than its own layers see: nothing is written into the null block."""
    engine = make_engine(groups=(FULL, WINDOW))
    engine.encode("e", LONG, (0, 100))
    engine.run()
    engine.chat("c", LONG + QUESTION, LONG)
    monkeypatch.setattr(engine.side, "groups", (FULL, FULL))
    monkeypatch.setattr(CacheGroup, "sees_all", property(lambda self: False))
    output = engine.schedule()
    orders = output.kv_connector_metadata.orders
    assert orders.injection == ()
    assert orders.failed_blocks
    assert 0 not in orders.failed_blocks
    assert engine.side.counters.internal_errors == 1
    with pytest.raises(RuntimeError, match="multiple KV cache groups"):  # vLLM ends rather than answer
        engine.report()


@pytest.mark.parametrize("seed", range(2))
def test_random_work_with_windows(
    make_engine: Make, runner: str, depth: int, groups: tuple[CacheGroup, ...], seed: int
) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        runner=runner,
        depth=depth,
        groups=groups,
        num_blocks=12 + sum(16 * BLOCK_SIZE // group.block_size for group in groups),
        max_batched_tokens=40,
        pool_pages=24,
        reports_without_forward=False,
    )
    engine.worker.captures_are_exact = False  # encode and chat requests share prefix-cache blocks here
    epochs = [0]
    names: list[str] = []
    for number in range(60):
        if engine.scheduler.get_num_unfinished_requests() < 12:
            add_something(engine, rng, number, epochs)
            names.append(f"r{number}")
        if rng.random() < 0.08:
            engine.abort(rng.choice(names))
        engine.worker.failing_captures = rng.random() < 0.05
        for _ in range(rng.randint(0, 3)):
            engine.step()
    engine.run(2000)
    engine.check_idle()
    assert engine.side.counters.captures > 0


def test_pieces_are_saved_below_the_pool_with_the_last_one(
    make_engine: Make, runner: str, depth: int
) -> None:
    """Host memory has the whole segment, from its first token on, once its last piece is captured."""
    engine = make_engine(
        runner=runner,
        depth=depth,
        groups=(FULL, NARROW),
        max_batched_tokens=40,
        pool_pages=30,
        host_size_bytes=2**18,
    )
    for name, text in (("e", LONG), ("others", list(range(500, 600)))):
        engine.encode(name, [3, *text], (1, 101))
        engine.run()
    assert not engine.side.table.is_resident(key_of(LONG))
    engine.chat("c", LONG + QUESTION, LONG)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 100
    assert engine.side.stats()["host_hits"] == 1
    engine.check_idle()


def test_a_copy_without_its_first_piece_is_never_used(make_engine: Make, runner: str) -> None:
    """Its capture fails, which is told only after the copy was ordered with the last piece."""
    engine = make_engine(
        runner=runner, depth=2, groups=(FULL, NARROW), max_batched_tokens=60, host_size_bytes=2**18
    )
    engine.encode("e", [3, *LONG], (1, 101))
    engine.schedule()
    engine.schedule()
    engine.worker.failing_captures = True
    engine.report()
    engine.worker.failing_captures = False
    engine.drain()
    engine.run()
    assert engine.side.counters.captures_failed == 1
    assert engine.side.answer({"op": "residency", "keys": [key_of(LONG)]})["resident"] == [False]
    engine.chat("c", LONG + QUESTION, LONG)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 0
    engine.check_idle()


def test_files_tell_in_which_order_rows_hold_the_layers(make_engine: Make) -> None:
    """With the hybrid manager on and off rows are of one size, but not the same."""
    connector = make_engine(groups=(FULL, WINDOW), disk_dir="/tmp").connector
    folders = set()
    for layers in ((("a", "c"), ("b",)), (("a", "b"), ("c",))):
        connector._cache = connector._cache._replace(layers=layers)
        folders.add(connector._store("model", 0).folder)
    connector._cache = connector._cache._replace(groups=(FULL,), layers=(("a", "b", "c"),))
    folders.add(connector._store("model", 0).folder)
    assert len(folders) == 3
