"""The scheduler side inside vLLM's real scheduler, with outputs in the shape of both model runners.

Every step the symbolic worker checks what attention would read, so a scenario that ends has also
shown that each slot held the right KV. See `symbolic_engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from symbolic_engine import BLOCK_SIZE, SymbolicEngine, key_of, segment

from inferscale.connector.messages import StepOrders
from inferscale.plan import Order, Span, cache_salt

Make = Callable[..., SymbolicEngine]

SYSTEM = list(range(400, 420))
FACT = list(range(100, 130))
OTHER = list(range(200, 217))
THIRD = list(range(300, 309))
QUESTION = [7, 8, 9]


def remember(engine: SymbolicEngine, *facts: list[int], name: str = "encode") -> None:
    """Capture each fact behind an opening that it does not share with any chat."""
    prompt = [3]
    spans = []
    for fact in facts:
        spans.append((len(prompt), len(prompt) + len(fact)))
        prompt = prompt + fact
    engine.encode(name, prompt, *spans)
    engine.run()


@pytest.fixture
def engine(make_engine: Make, runner: str, depth: int) -> SymbolicEngine:
    return make_engine(runner=runner, depth=depth)


# capture --------------------------------------------------------------------------------------


def test_capture_over_chunked_prefill(make_engine: Make, runner: str, depth: int) -> None:
    engine = make_engine(runner=runner, depth=depth, max_batched_tokens=16)
    prompt = [3] + FACT + OTHER + THIRD
    engine.encode("e", prompt, (1, 31), (31, 48), (48, 57))
    seen = []
    while engine.scheduler.has_requests():
        output = engine.step()
        orders = output.kv_connector_metadata.orders
        seen.append(len(orders.capture[0].expand(16).rows) if orders.capture else 0)
    engine.drain()
    assert [n for n in seen if n] == [30, 17, 9], (
        "a span is captured in the step that computes its last token"
    )
    assert seen[0] == 0
    assert engine.outcomes["e"]["captured"] == 3
    engine.check_idle()
    for fact, origin in ((FACT, 1), (OTHER, 31), (THIRD, 48)):
        entry = engine.side.table.get(key_of(fact))
        assert entry is not None
        rows = entry.rows.tolist()
        assert [engine.worker.pool[row][0][:2] for row in rows] == [
            (t, origin + i) for i, t in enumerate(fact)
        ]


@pytest.mark.parametrize("end", [19, 20, 21, 22])
def test_a_span_that_ends_beside_the_end_of_a_chunk(make_engine: Make, runner: str, end: int) -> None:
    """The block of the next token is there already, its KV is not."""
    engine = make_engine(runner=runner, max_batched_tokens=20)
    engine.encode("e", [3] + FACT, (1, end))
    first = engine.step().kv_connector_metadata.orders
    assert bool(first.capture) == (end <= 20)
    engine.run()
    assert engine.side.counters.captures == 1
    engine.check_idle()


def test_capture_of_tokens_that_the_prefix_cache_holds(engine: SymbolicEngine) -> None:
    prompt = [3] + FACT + OTHER
    engine.encode("first", prompt, (31, 48))
    engine.run()
    engine.encode("second", prompt, (1, 31))
    engine.run()
    assert engine.outcomes["second"]["cached_tokens"] == 32
    assert engine.side.table.is_resident(key_of(FACT))
    engine.check_idle()


def test_two_requests_that_capture_the_same_key_write_it_once(engine: SymbolicEngine) -> None:
    engine.encode("a", [3, *THIRD], (1, 10))
    engine.encode("b", [4, 5, *THIRD], (2, 11))
    engine.run()
    assert engine.side.counters.captures == 1
    engine.check_idle()


def test_preempted_in_the_middle_of_capture_and_resumed(make_engine: Make, runner: str, depth: int) -> None:
    engine = make_engine(runner=runner, depth=depth, max_batched_tokens=32, num_blocks=9)
    prompt = [3] + FACT + OTHER + THIRD
    engine.encode("e", prompt, (1, 31), (31, 48), (48, 57))
    engine.step()
    engine.drain()
    assert engine.side.table.is_resident(key_of(FACT))
    preempt(engine, "e")
    assert engine.scheduler.requests["e"].num_preemptions == 1
    engine.add("filler", [5] * 60, max_tokens=2)
    engine.run()
    assert engine.side.counters.preemptions == 1
    assert engine.side.counters.captures == 3
    assert engine.outcomes["e"]["captured"] == 3
    engine.check_idle()


def preempt(engine: SymbolicEngine, request_id: str) -> None:
    """As the scheduler does it when blocks run out; the next output tells."""
    request = engine.scheduler.requests[request_id]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)


def test_a_failed_capture_gives_its_pages_back(engine: SymbolicEngine) -> None:
    engine.worker.failing_captures = True
    engine.encode("e", [3, *FACT], (1, 31))
    engine.run()
    assert engine.side.counters.captures_failed == 1
    assert engine.side.table.num_free_pages == engine.side.table.num_pages
    engine.worker.failing_captures = False
    engine.encode("again", [3, *FACT], (1, 31))
    engine.run()
    assert engine.side.table.is_resident(key_of(FACT))
    engine.check_idle()


def test_no_room_is_counted_and_breaks_nothing(make_engine: Make, runner: str) -> None:
    engine = make_engine(runner=runner, pool_pages=4)
    engine.encode("e", [3] + FACT + THIRD, (1, 31), (31, 40))
    engine.run()
    assert engine.side.counters.captures_without_room == 1
    assert engine.outcomes["e"]["captured"] == 1
    engine.check_idle()


# two captures of one segment ------------------------------------------------------------------


def encode_part(engine: SymbolicEngine, name: str, part: int, before: list[int], fact: list[int]) -> None:
    """Capture `fact` behind `before` as the first or the second part of one key."""
    prompt = [3, *before, *fact]
    span = Span(key_of(fact), len(prompt) - len(fact), len(prompt), part=part)
    engine.add(name, prompt, engine.plan(captures=(span,)))


def test_a_segment_is_there_once_both_of_its_parts_are(engine: SymbolicEngine) -> None:
    encode_part(engine, "first", 1, OTHER, FACT)
    engine.run()
    table = engine.side.table
    assert engine.outcomes["first"]["captured"] == 1
    assert not table.is_resident(key_of(FACT))
    assert engine.side.counters.captures == 0
    encode_part(engine, "second", 2, THIRD, FACT)
    engine.run()
    assert engine.outcomes["second"]["captured"] == 1
    assert table.is_resident(key_of(FACT))
    assert engine.side.counters.captures == 1
    row = int(table.get(key_of(FACT)).rows[0])
    assert engine.worker.pool[row][0].position == 1 + len(THIRD), "where the second one stood"
    engine.chat("c", FACT + QUESTION, FACT)
    engine.run()
    engine.check_idle()


def test_both_parts_in_flight_at_once(make_engine: Make, runner: str, depth: int) -> None:
    engine = make_engine(runner=runner, depth=depth)
    encode_part(engine, "first", 1, OTHER, FACT)
    encode_part(engine, "second", 2, THIRD, FACT)
    engine.run()
    assert engine.side.table.is_resident(key_of(FACT))
    assert (engine.side.counters.captures, engine.side.counters.captures_without_first) == (1, 0)
    engine.check_idle()


def test_both_parts_in_one_step_whatever_their_requests_order(
    make_engine: Make, runner: str, depth: int
) -> None:
    """The first request began a step earlier, so that the step lists the second one before it."""
    engine = make_engine(runner=runner, depth=depth, max_batched_tokens=64)
    encode_part(engine, "first", 1, [5] * 50, FACT)
    encode_part(engine, "second", 2, [], FACT)
    engine.run()
    assert engine.side.counters.captures_without_first == 0
    assert engine.side.table.is_resident(key_of(FACT))
    engine.check_idle()


def test_a_second_part_alone_is_not_captured(engine: SymbolicEngine) -> None:
    encode_part(engine, "second", 2, THIRD, FACT)
    engine.run()
    assert engine.outcomes["second"]["captured"] == 0
    assert engine.side.counters.captures_without_first == 1
    assert not engine.side.table.holds(key_of(FACT))
    engine.check_idle()


def test_a_whole_segment_is_not_captured_while_only_its_first_part_is_there(engine: SymbolicEngine) -> None:
    encode_part(engine, "first", 1, OTHER, FACT)
    engine.run()
    encode_part(engine, "whole", 0, THIRD, FACT)
    engine.run()
    assert (engine.outcomes["first"]["captured"], engine.outcomes["whole"]["captured"]) == (1, 0)


def test_a_first_part_makes_room_for_others(make_engine: Make, runner: str) -> None:
    engine = make_engine(runner=runner, pool_pages=9)
    encode_part(engine, "first", 1, OTHER, FACT)
    engine.run()
    remember(engine, OTHER)
    assert engine.side.table.is_resident(key_of(OTHER))
    encode_part(engine, "second", 2, THIRD, FACT)
    engine.run()
    assert engine.outcomes["second"]["captured"] == 0
    engine.check_idle()


def test_forgotten_between_its_parts(engine: SymbolicEngine) -> None:
    encode_part(engine, "first", 1, OTHER, FACT)
    engine.run()
    engine.order("o", Order("forget", (key_of(FACT),)))
    engine.run()
    assert not engine.side.table.holds(key_of(FACT))
    encode_part(engine, "second", 2, THIRD, FACT)
    engine.run()
    assert not engine.side.table.is_resident(key_of(FACT))
    engine.check_idle()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_part_that_fails_leaves_nothing(engine: SymbolicEngine, failing: int) -> None:
    for part, before in ((1, OTHER), (2, THIRD)):
        engine.worker.failing_captures = part == failing
        encode_part(engine, f"part{part}", part, before, FACT)
        engine.run()
    assert not engine.side.table.holds(key_of(FACT))
    assert engine.side.table.num_free_pages == engine.side.table.num_pages
    engine.check_idle()


@pytest.mark.parametrize("span", [(0, 0), (5, 3), (-1, 4), (0, 99), (40, 41)])
def test_spans_outside_the_prompt_are_ignored(engine: SymbolicEngine, span: tuple[int, int]) -> None:
    plan = engine.plan(captures=(Span("key", *span),))
    engine.add("e", [3, *FACT], plan)
    engine.run()
    assert len(engine.side.table) == 0
    engine.check_idle()


def test_a_misplaced_capture_takes_its_own_slots_and_notes_a_wrong_place(
    engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the self-check. The run that is noted wrongly comes second: its tokens are the same."""
    noted = []
    build = engine.side.build_orders

    def build_orders(output: Any) -> StepOrders:
        orders = build(output)
        if orders.capture:
            noted.append(orders.capture[0].expand(BLOCK_SIZE))
            orders.capture = ()  # the engine of these tests would complain
        return orders

    monkeypatch.setattr(engine.side, "build_orders", build_orders)
    engine.add("e", [3, *FACT], engine.plan(captures=(Span("right", 1, 31), Span("wrong", 1, 31, 2))))
    engine.run()
    [(rows, slots, positions)] = noted
    assert len(set(rows.tolist())) == 60
    assert slots[:30].tolist() == slots[30:].tolist()
    assert positions[:30].tolist() == list(range(1, 31))
    assert positions[30:].tolist() == list(range(1 + 2 * BLOCK_SIZE, 31 + 2 * BLOCK_SIZE))


# injection ------------------------------------------------------------------------------------


def test_injection_at_other_positions(engine: SymbolicEngine) -> None:
    remember(engine, SYSTEM, FACT, OTHER)
    engine.chat("c", SYSTEM + OTHER + FACT + QUESTION, SYSTEM, OTHER, FACT, max_tokens=3)
    engine.run()
    assert engine.outcomes["c"] == {
        "id": engine.outcomes["c"]["id"],
        "prompt_tokens": 70,
        "injected_tokens": 67,
        "cached_tokens": 0,
        "prefilled_tokens": 3,
        "resumes": 0,
        "covered_segments": 3,
        "segments": 3,
        "lost_segments": 0,
        "captured": 0,
        "captures": 0,
    }
    assert engine.side.counters.tokens_injected == 67
    engine.check_idle()


def test_a_prompt_that_ends_right_behind_its_memory_computes_its_last_token(engine: SymbolicEngine) -> None:
    remember(engine, FACT)
    engine.chat("c", FACT, FACT)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 29
    engine.check_idle()


def test_the_run_ends_at_the_first_segment_that_is_not_resident(engine: SymbolicEngine) -> None:
    remember(engine, FACT, THIRD)
    engine.chat("c", FACT + OTHER + THIRD + QUESTION, FACT, OTHER, THIRD)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 30
    assert used(engine) == (1, 0, 2), "what stands behind the gap is prefilled, too"
    engine.check_idle()


def used(engine: SymbolicEngine) -> tuple[int, int, int]:
    """Facts injected, found in the prefix cache, and prefilled."""
    counters = engine.side.counters
    return counters.segments_injected, counters.segments_cached, counters.segments_missing


def test_only_facts_are_counted(engine: SymbolicEngine) -> None:
    """The head of the prompt is injected as well, and a turn behind the facts is computed."""
    remember(engine, SYSTEM, FACT)
    head, turn = (replace(segment(ids), kind=kind) for ids, kind in ((SYSTEM, "text"), (OTHER, "turn")))
    plan = engine.plan(segments=(head, segment(FACT), turn))
    engine.add("c", SYSTEM + FACT + OTHER + QUESTION, plan)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 50
    assert used(engine) == (1, 0, 0)


def test_what_the_prefix_cache_has_is_neither_injected_nor_missing(engine: SymbolicEngine) -> None:
    remember(engine, FACT, OTHER)
    for name in "ab":
        engine.chat(name, FACT + OTHER + QUESTION, FACT, OTHER)
        engine.run()
    assert engine.outcomes["b"]["cached_tokens"] == 48
    assert used(engine) == (2, 2, 0)


def test_a_fact_that_is_not_in_the_prompt_is_missing(engine: SymbolicEngine) -> None:
    remember(engine, FACT)
    engine.chat("c", FACT + QUESTION, OTHER, FACT)
    engine.run()
    assert used(engine) == (1, 0, 1)


def test_sizes_of_the_pool_in_bytes(engine: SymbolicEngine) -> None:
    empty = engine.side.stats()
    remember(engine, FACT)
    page_bytes = engine.side.table.page_size_tokens * engine.side.row_bytes
    stats = engine.side.stats()
    assert page_bytes > 0
    assert stats["pool_capacity_bytes"] == stats["pages"] * page_bytes
    assert (empty["pool_bytes"], stats["pool_bytes"]) == (
        0,
        (stats["pages"] - stats["free_pages"]) * page_bytes,
    )
    assert stats["pool_bytes"] > 0


def test_injection_starts_inside_a_segment_where_the_prefix_cache_ends(engine: SymbolicEngine) -> None:
    remember(engine, FACT, OTHER)
    engine.chat("a", FACT + OTHER + QUESTION, FACT, OTHER)
    engine.run()
    engine.chat("b", FACT + THIRD + QUESTION, FACT, THIRD)
    engine.run()
    assert engine.outcomes["b"]["cached_tokens"] == 16
    assert engine.outcomes["b"]["injected_tokens"] == 14
    engine.check_idle()


def test_requests_of_one_step_share_a_segment(engine: SymbolicEngine) -> None:
    remember(engine, FACT)
    for name in "abc":
        engine.chat(name, FACT + [ord(name)], FACT)
    output = engine.schedule()
    assert len(output.num_scheduled_tokens) == 3
    engine.drain()
    engine.run()
    engine.check_idle()


@pytest.mark.parametrize(("caching", "injected", "cached", "covered"), [(True, 47, 1, 2), (False, 30, 0, 1)])
def test_preempted_after_injection_and_resumed_with_another_match(
    make_engine: Make, runner: str, depth: int, caching: bool, injected: int, cached: int, covered: int
) -> None:
    """The outcome tells what holds after the resume, and is published again."""
    engine = make_engine(runner=runner, depth=depth, prefix_caching=caching)
    remember(engine, FACT, OTHER)
    engine.chat("c", FACT + OTHER + QUESTION, FACT, OTHER, max_tokens=20)
    engine.step()
    engine.step()
    plan = engine.side._requests["c"].plan
    first = engine.side.answer({"op": "outcome", "id": plan.id})["outcome"]
    assert (first["injected_tokens"], first["cached_tokens"], first["resumes"]) == (47, 0, 0)
    preempt(engine, "c")
    engine.side._execute(Order("forget", (key_of(OTHER),)))
    engine.step()
    engine.step()  # a pipelined scheduler resumes it one step later
    published = engine.side.answer({"op": "outcome", "id": plan.id})["outcome"]
    engine.run()
    outcome = engine.outcomes["c"]
    assert outcome == published
    assert (outcome["injected_tokens"], outcome["cached_tokens"]) == (injected, cached)
    assert outcome["prefilled_tokens"] == 50 - injected - cached
    assert (outcome["covered_segments"], outcome["resumes"]) == (covered, 1)
    assert engine.side.counters.preemptions == 1
    assert engine.side.counters.segments_missing == 0, "counted once, when it was first scheduled"
    engine.check_idle()


def test_an_outcome_after_many_resumes_with_generated_tokens_in_the_cache(
    make_engine: Make, runner: str
) -> None:
    """Cached blocks may reach behind the prompt; the three counts go on adding up to it."""
    engine = make_engine(runner=runner)
    remember(engine, FACT)
    engine.chat("c", FACT + QUESTION, FACT, max_tokens=60)
    for resumes in range(1, 4):
        for _ in range(18):
            engine.step()
        preempt(engine, "c")
        engine.step()
        plan_id = engine.side._requests["c"].plan.id
        outcome = engine.side.answer({"op": "outcome", "id": plan_id})["outcome"]
        assert outcome["resumes"] == resumes
        counts = [outcome[f"{name}_tokens"] for name in ("injected", "cached", "prefilled")]
        assert counts == [30, 3, 0]
    engine.run()
    engine.check_idle()


def test_preempted_before_the_step_that_injects_was_reported(make_engine: Make, runner: str) -> None:
    engine = make_engine(runner=runner, depth=2)
    remember(engine, FACT)
    engine.chat("c", FACT + QUESTION, FACT, max_tokens=5)
    engine.schedule()
    preempt(engine, "c")
    engine.schedule()
    engine.drain()
    engine.run()
    engine.check_idle()


def test_pages_given_away_while_the_step_that_injects_them_is_in_flight(
    make_engine: Make, runner: str
) -> None:
    """Workers carry out steps in order: the first one reads the pages before the second writes them."""
    engine = make_engine(runner=runner, depth=2, pool_pages=8)
    remember(engine, FACT)
    engine.chat("c", FACT + QUESTION, FACT, max_tokens=5)
    engine.schedule()
    engine.encode("e", [4, 5] + OTHER, (2, 19))
    engine.schedule()
    assert len(engine.in_flight) == 2
    assert not engine.side.table.is_resident(key_of(FACT)), "evicted for the new capture"
    assert engine.side.counters.captures_without_room == 0
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 30
    assert not engine.side.table.is_resident(key_of(FACT))
    assert engine.side.table.is_resident(key_of(OTHER))
    engine.check_idle()


def test_allocation_fails_after_the_match(make_engine: Make, runner: str) -> None:
    engine = make_engine(runner=runner, num_blocks=9)
    remember(engine, FACT)
    engine.add("hog", [5] * 70, max_tokens=30)
    engine.step()
    engine.chat("c", FACT + list(range(500, 570)), FACT)
    engine.step()
    assert "c" not in engine.worker.blocks
    state = engine.side._requests["c"]
    assert [entry.key for entry in state.match.entries] == [key_of(FACT)]
    assert (state.match.start, state.match.end) == (0, 30), "matched, and then the allocation failed"
    assert state.num_claims == 0
    engine.side.table.drop([key_of(FACT)])
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 0, "the stale match is not used"
    engine.check_idle()


def test_fewer_tokens_are_claimed_than_offered(engine: SymbolicEngine) -> None:
    """0.32 cuts an offer to whole blocks for some models, or drops it (`prefix_replay_tokens`)."""
    remember(engine, FACT, OTHER)
    request = engine.chat("c", FACT + OTHER + QUESTION, FACT, OTHER)
    side = engine.side
    for num_external, pieces in ((32, [30, 2]), (30, [30]), (16, [16]), (0, [])):
        assert side.num_matched_tokens(request, 0) == 47
        side.claim(request, None, num_external)
        runs = [run for run, _ in side._claims.values()]
        assert sum(run.num_tokens for run in runs) == num_external
        assert [len(run.entries) for run in runs] == ([len(pieces)] if pieces else [])
        side._claims.clear()
    assert side.num_matched_tokens(request, 0) == 47
    with pytest.raises(AssertionError, match="more external tokens"):
        side.claim(request, None, 48)


# aborts ---------------------------------------------------------------------------------------


def test_abort_before_it_was_ever_scheduled(engine: SymbolicEngine) -> None:
    remember(engine, FACT)
    engine.chat("c", FACT + QUESTION, FACT)
    engine.abort("c")
    engine.add("bad", [1, 2], params={"inferscale": "junk"})
    engine.abort("bad")
    engine.run()
    engine.check_idle()


def test_abort_while_the_injecting_and_capturing_steps_are_in_flight(make_engine: Make, runner: str) -> None:
    engine = make_engine(runner=runner, depth=2)
    remember(engine, FACT)
    engine.chat("c", FACT + QUESTION, FACT, max_tokens=9)
    engine.encode("e", [4] + OTHER, (1, 18))
    engine.schedule()
    engine.abort("c")
    engine.abort("e")
    engine.run()
    assert engine.side.table.is_resident(key_of(OTHER)), "the step ran, so the capture counts"
    engine.check_idle()


# orders ---------------------------------------------------------------------------------------


def test_stats_and_forget_are_answered_in_the_outcome(engine: SymbolicEngine) -> None:
    remember(engine, FACT, OTHER)
    engine.order("s", Order("stats"))
    engine.order("f", Order("forget", (key_of(FACT), "unknown")))
    engine.run()
    assert engine.outcomes["s"]["answer"]["resident_segments"] == 2
    assert engine.outcomes["f"]["answer"] == {"dropped": 1}
    assert not engine.side.table.is_resident(key_of(FACT))
    engine.check_idle()


def test_an_order_runs_once_though_its_request_is_preempted(engine: SymbolicEngine) -> None:
    remember(engine, FACT)
    engine.add("f", [1], engine.plan(order=Order("forget", (key_of(FACT),))), max_tokens=6)
    engine.step()
    engine.drain()
    preempt(engine, "f")
    engine.encode("e", [4, *FACT], (1, 31))
    engine.run()
    assert engine.outcomes["f"]["answer"] == {"dropped": 1}
    assert engine.side.table.is_resident(key_of(FACT)), "captured after the order, so it stays"
    engine.check_idle()


def test_plans_of_an_older_epoch_are_prefilled(engine: SymbolicEngine) -> None:
    remember(engine, FACT)
    engine.order("f", Order("forget", (), (("scope", 2), ("elsewhere", 9))))
    engine.run()
    for name, epoch, injected in (("old", 1, 0), ("now", 2, 30), ("newer", 3, 30)):
        engine.chat(name, FACT + QUESTION, FACT, epoch=epoch)
        engine.run()
        assert engine.outcomes[name]["injected_tokens"] == injected, name
    assert engine.side.counters.plans_stale == 1
    engine.order("lower", Order("forget", (), (("scope", 1),)))
    engine.run()
    engine.chat("old2", FACT + QUESTION, FACT, epoch=1)
    engine.run()
    assert engine.outcomes["old2"]["injected_tokens"] == 0, "an epoch never falls"
    engine.check_idle()


def test_what_was_forgotten_is_not_captured_by_a_request_in_flight(
    make_engine: Make, runner: str, depth: int
) -> None:
    engine = make_engine(runner=runner, depth=depth, max_batched_tokens=16)
    engine.encode("e", [3] + FACT + OTHER, (1, 31), (31, 48))
    engine.step()
    # Carried out here, because a request with this order would wait behind the whole prefill.
    engine.side._execute(Order("forget", (key_of(FACT), key_of(OTHER)), (("scope", 1),)))
    engine.run()
    assert len(engine.side.table) == 0, "a request of the old epoch put forgotten KV back into the pool"
    engine.check_idle()


def test_evicted_and_forgotten_in_the_very_step_that_injects_it(make_engine: Make, runner: str) -> None:
    """The step reads the pages first, then zeroes them, then captures something else into them."""
    engine = make_engine(runner=runner, pool_pages=8)
    remember(engine, FACT)
    engine.chat("c", FACT + QUESTION, FACT, max_tokens=5)
    engine.order("f", Order("forget", (key_of(FACT),)))
    engine.encode("e", [4, 5] + OTHER, (2, 19))
    output = engine.step()
    assert set(output.num_scheduled_tokens) == {"c", "f", "e"}
    orders = output.kv_connector_metadata.orders
    assert orders.injection
    assert orders.zero_pages is not None
    assert orders.capture
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 30
    assert engine.side.table.is_resident(key_of(OTHER))
    engine.check_idle()


def test_a_plan_that_turned_stale_while_it_was_preempted_injects_no_more(engine: SymbolicEngine) -> None:
    remember(engine, FACT)
    engine.chat("c", FACT + QUESTION, FACT, max_tokens=12)
    engine.step()
    engine.drain()
    preempt(engine, "c")
    engine.side._epochs["scope"] = 5
    before = engine.side.counters.tokens_injected
    engine.run()
    assert engine.side.counters.tokens_injected == before
    assert "changed" in engine.outcomes["c"]["reason"]
    engine.check_idle()


def test_forgotten_while_the_step_that_injects_it_is_in_flight(make_engine: Make, runner: str) -> None:
    engine = make_engine(runner=runner, depth=2)
    remember(engine, FACT)
    pages = engine.side.table.get(key_of(FACT)).pages.tolist()
    engine.chat("c", FACT + QUESTION, FACT, max_tokens=5)
    engine.schedule()
    engine.order("f", Order("forget", (key_of(FACT),)))
    output = engine.schedule()
    assert not engine.side.table.is_resident(key_of(FACT))
    assert sorted(output.kv_connector_metadata.orders.zero_pages.tolist()) == sorted(pages)
    engine.run()
    assert not engine.worker.pool
    engine.check_idle()


def test_dropped_while_written_is_zeroed_after_the_write(make_engine: Make, runner: str) -> None:
    engine = make_engine(runner=runner, depth=2)
    engine.encode("e", [3, *FACT], (1, 31))
    engine.schedule()
    engine.order("f", Order("forget", (key_of(FACT),)))
    engine.schedule()
    engine.run()
    engine.add("any", [1, 2])
    engine.run()
    assert len(engine.side.table) == 0
    assert not engine.worker.pool
    engine.check_idle()


def test_zeroed_in_the_step_that_writes_the_page_again(engine: SymbolicEngine) -> None:
    remember(engine, FACT)
    engine.order("f", Order("forget", (key_of(FACT),)))
    engine.encode("e", [4, *OTHER], (1, 18))
    engine.step()
    engine.run()
    engine.chat("c", OTHER + QUESTION, OTHER)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 17
    engine.check_idle()


def test_pages_freed_by_the_last_report_leave_no_open_step(make_engine: Make, runner: str) -> None:
    """The next step has no tokens, and 0.25.1 does not call `wait_for_save` in such a step."""
    engine = make_engine(runner=runner, depth=2, reports_without_forward=False)
    remember(engine, FACT)
    engine.chat("c", FACT + QUESTION, FACT)
    engine.schedule()
    engine.side.table.drop([key_of(FACT)])
    engine.drain()
    engine.schedule()
    engine.drain()
    assert not engine.worker.pool
    engine.check_idle()


def test_reset_forgets_everything(engine: SymbolicEngine) -> None:
    remember(engine, FACT, OTHER)
    assert engine.connector.reset_cache() is True
    assert engine.side.table.num_resident == 0
    engine.chat("c", FACT + QUESTION, FACT)
    engine.run()
    assert engine.outcomes["c"]["injected_tokens"] == 0
    assert not engine.worker.pool
    engine.check_idle()


# refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "salt", "reason"),
    [
        ({"model": "other"}, "plan", "another model"),
        ({}, None, "cache_salt"),
        ({}, "mine", "cache_salt"),
        ({}, "epoch", "cache_salt"),
    ],
)
def test_plans_that_cannot_be_used_are_prefilled_with_the_reason(
    engine: SymbolicEngine, fields: dict[str, Any], salt: str | None, reason: str
) -> None:
    remember(engine, FACT)
    if salt == "epoch":
        salt = cache_salt(engine.side.secret, engine.side.model, "scope", 1)
    plan = engine.plan(segments=(segment(FACT),), captures=(Span("k", 0, 5),), **fields)
    engine.add("c", FACT + QUESTION, plan, salt=salt)
    engine.run()
    outcome = engine.outcomes["c"]
    assert outcome["injected_tokens"] == 0
    assert outcome["captured"] == 0
    assert reason in outcome["reason"]
    assert engine.side.counters.plans_rejected == 1
    engine.check_idle()


def test_prompt_logprobs_are_computed_and_not_injected(engine: SymbolicEngine) -> None:
    remember(engine, FACT)
    request = engine.add("c", FACT + QUESTION, engine.plan(segments=(segment(FACT),)), prompt_logprobs=1)
    assert engine.side.num_matched_tokens(request, 0) == 0
    assert "log-prob" in str(engine.side._requests["c"].reason)


@pytest.mark.parametrize("name", ["lora_request", "mm_features", "prompt_embeds"])
def test_inputs_that_are_not_plain_text_are_not_injected(engine: SymbolicEngine, name: str) -> None:
    remember(engine, FACT)
    request = engine.chat("c", FACT + QUESTION, FACT)
    setattr(request, name, ["something"])
    assert engine.side.num_matched_tokens(request, 0) == 0
    assert engine.side._requests["c"].reason


@pytest.mark.parametrize(
    "params", ["text", ["list"], {"inferscale": 5}, {"inferscale": {"v": 1}}, {"other": 1}, {}, 7]
)
def test_foreign_params_are_harmless(engine: SymbolicEngine, params: Any) -> None:
    engine.add("c", [1, 2, 3]).kv_transfer_params = params
    engine.run()
    assert engine.finish_reasons["c"] != "error"
    engine.check_idle()


def test_outcomes_do_not_grow_without_bound(engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale.connector.scheduler.MAX_OUTCOMES", 3)
    for number in range(6):
        engine.chat(f"c{number}", [1, 2, number + 3], THIRD)
        engine.run()
    assert len(engine.side.outcomes) == 3
    assert engine.outcomes["c5"]["id"] in engine.side.outcomes


def test_an_outcome_is_published_as_soon_as_the_request_is_scheduled(engine: SymbolicEngine) -> None:
    """Streaming answers carry no params: the planner asks over the socket while the request runs."""
    remember(engine, FACT)
    engine.chat("c", FACT + QUESTION, FACT, max_tokens=30)
    engine.schedule()
    plan = engine.side._requests["c"].plan
    assert engine.side.answer({"op": "outcome", "id": plan.id})["outcome"]["injected_tokens"] == 30
    assert engine.side.answer({"op": "outcome", "id": "unknown"}) == {"outcome": None}
    engine.drain()
    engine.run()


def test_blocks_cover_what_is_injected(engine: SymbolicEngine) -> None:
    remember(engine, FACT, OTHER)
    engine.chat("c", FACT + OTHER + QUESTION, FACT, OTHER)
    orders = engine.schedule().kv_connector_metadata.orders
    blocks = engine.scheduler.kv_cache_manager.get_block_ids("c")[0]
    expected = [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(47)]
    assert orders.injection[0].expand(16).slots.tolist() == expected
    assert orders.injection[0].expand(16).positions.tolist() == list(range(47))
    engine.drain()
    engine.run()


def test_a_capture_does_not_attend_to_injected_blocks(engine: SymbolicEngine) -> None:
    """The key of a span says what it attended to; blocks with relocated KV are something else."""
    engine.encode("first", [3, 4, 5, *FACT], (3, 33))
    engine.run()
    engine.chat("chat", FACT + QUESTION, FACT)
    engine.run()
    engine.encode("second", FACT + OTHER, (30, 47))
    engine.run()
    assert engine.outcomes["second"]["cached_tokens"] == 0
