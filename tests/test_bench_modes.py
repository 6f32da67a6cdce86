"""ttft, throughput and encode on an engine that keeps account: rows, modes in turn, fallbacks are found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_engine import BLOCK, FakeOffline, fake_engine
from inferscale.bench.arms import new_run
from inferscale.bench.encode import Encoding, encode_users, measure_encode, num_missing
from inferscale.bench.engine import BenchEngine
from inferscale.bench.harness import KEYS, BenchRun, Row, read_rows
from inferscale.bench.load import drive
from inferscale.bench.modes import MODES
from inferscale.bench.options import EncodeOptions, RandomTokens, ThroughputOptions, TtftOptions
from inferscale.bench.source import Need, RandomSource, encoding_for
from inferscale.bench.suite import SuiteOptions, measure_suite
from inferscale.bench.throughput import measure_throughput
from inferscale.bench.ttft import measure_ttft
from inferscale.config import DEFAULT_TAIL
from inferscale.errors import EngineError, InvalidInput
from inferscale.offline import GenerationRequest
from inferscale.tail import NO_TAIL, Tail
from inferscale.windows import mixed, sliding

POLICY = sliding(4, 4)
LOAD = ThroughputOptions(users=3, k=6, output_tokens=5, rounds=2, repeats=3, tail=NO_TAIL)


def offline(engine: BenchEngine) -> FakeOffline:
    return engine.offline  # type: ignore[return-value]


def encoded(
    engine: BenchEngine, max_k: int, num_users: int = 1, out: Path | None = None, bench: str = "ttft"
) -> tuple[Encoding, BenchRun]:
    encoding = encoding_for(engine, RandomSource(RandomTokens()), Need(max_k, num_users), POLICY)
    encode_users(engine, encoding, range(num_users))
    return encoding, new_run(bench, engine, encoding, out)


def ttft_rows(engine: BenchEngine, *ks: int, out: Path | None = None, num_questions: int = 4) -> list[Row]:
    encoding, run = encoded(engine, max(ks), out=out)
    return measure_ttft(engine, encoding, TtftOptions(ks, num_questions, NO_TAIL), run, lambda _: None)


def values(rows: list[Row], metric: str) -> dict[tuple[Any, Any], float]:
    return {(row["k"], row["mode"]): row["p50"] for row in rows if row["metric"] == metric}


# encode -------------------------------------------------------------------------------------------


def test_a_user_with_enough_facts_has_mixed_passes() -> None:
    engine, source, need = fake_engine(), RandomSource(RandomTokens(facts_per_user=24)), Need(6, 1)
    encoding = encoding_for(engine, source, need, mixed(12))
    assert str(encoding.policy) == "mixed(12)"
    cost = encode_users(engine, encoding, [0])
    lengths = [len(ids) for ids in encoding.workload.facts(0)]
    assert (cost.passes, cost.facts, cost.stored_tokens) == (4, 24, sum(lengths))
    assert cost.pass_tokens == 2 * (sum(lengths) + 2 * len(encoding.workload.head))
    first, second = encoding.jobs(0)[:2]
    assert [span.key for span in first.captures[1:]] == [span.key for span in second.captures[:0:-1]]
    assert [{span.part for span in job.captures} for job in (first, second)] == [{0, 1}, {0, 2}]
    ids = encoding.workload.facts(0)
    by_key = {span.key: first.token_ids[span.start : span.end] for span in first.captures}
    assert all(ids[item] == by_key[key] for item, key in encoding.keys(0).items() if key in by_key)
    assert len(set(encoding.keys(0).values())) == 24


def test_a_user_with_few_facts_has_none() -> None:
    source, need = RandomSource(RandomTokens(facts_per_user=5)), Need(5, 1)
    encoding = encoding_for(fake_engine(), source, need, mixed(12))
    assert str(encoding.policy) == "sliding(20,20)", "the rows say what was done"
    assert {span.part for job in encoding.jobs(0) for span in job.captures} == {0}


# ttft ---------------------------------------------------------------------------------------------


def test_rows_say_how_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/inferscale", "bench", "ttft", "--model", "my model"])
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    rows = ttft_rows(fake_engine(), 0, 6, out=tmp_path / "rows.jsonl")
    assert read_rows(tmp_path / "rows.jsonl") == rows
    assert len({row["run"] for row in rows}) == 1
    for row in rows:
        assert row.keys() >= set(KEYS)
        assert row["model"] == "tiny (random weights)"
        config = row["config"]
        assert config["command"] == "inferscale bench ttft --model 'my model'"
        assert (config["dtype"], config["execution"], config["policy"]) == (
            "bfloat16",
            "eager",
            "sliding(4,4)",
        )
        assert config["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "2"
        assert config["pool_size_bytes"] == 2**20
        assert config["engine_args"]["load_format"] == "dummy"
        assert "enforce_eager=True, max_model_len=4096" in config["baseline"]
    measured = [row for row in rows if row["metric"] == "ttft"]
    assert {row["mode"] for row in measured} == set(MODES)
    assert {row["n"] for row in measured} == {4}


def test_hit_and_inject_prefill_the_same_number_of_tokens() -> None:
    rows = [row for row in ttft_rows(fake_engine(), 6) if row["metric"] == "ttft"]
    counts = {row["mode"]: row["config"] for row in rows}
    assert counts["inject"]["injected_tokens"] % BLOCK == 0
    for mode in ("hit", "inject", "none"):
        assert counts[mode]["prefilled_tokens"] == counts[mode]["max_prefilled_tokens"] == 32
    assert counts["hit"]["cached_tokens"] == counts["inject"]["injected_tokens"]
    assert counts["text"]["prefilled_tokens"] == counts["inject"]["prompt_tokens"]


def test_ratios_are_paired_and_have_an_interval() -> None:
    rows = ttft_rows(fake_engine(), 6)
    ratios = {row["mode"]: row for row in rows if row["metric"] == "ttft_ratio"}
    assert set(ratios) == {"text/inject", "text/hit", "inject/hit", "inject/none", "hit/none"}
    assert ratios["inject/hit"]["p50"] == 1.0
    assert ratios["inject/hit"]["ci95"] == [1.0, 1.0]
    assert ratios["text/inject"]["ci95"][0] > 2


def test_modes_in_turn_with_the_prefix_cache_emptied() -> None:
    engine = fake_engine()
    encoding, run = encoded(engine, 6)
    offline(engine).log.clear()
    measure_ttft(engine, encoding, TtftOptions((6,), 1, NO_TAIL), run, lambda _: None)
    groups = [["reset", "plain", "plain"], ["reset", "plan"], ["reset", "plain"]]
    turns = [groups[i:] + groups[:i] for i in (0, 1, 2)]
    assert offline(engine).log == [entry for turn in turns for group in turn for entry in group]


def test_a_k_that_does_not_fit_is_refused_and_the_rows_before_it_stay(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"max_model_len=4096\. Lower --k"):
        ttft_rows(fake_engine(), 6, 200, out=tmp_path / "rows.jsonl")
    assert {row["k"] for row in read_rows(tmp_path / "rows.jsonl")} == {6}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loses": True}, r"0 were injected .* no row is written for requests that fell back to text"),
        ({"caches": False}, r"0 were found in vLLM's prefix cache instead of"),
        ({"pool_tokens": 100}, r"spans of a pass .* were captured .*Raise --pool-size"),
    ],
)
def test_a_request_that_did_not_run_in_its_mode_writes_no_row(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        ttft_rows(fake_engine(**options), 6, out=tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_prefix_cache_that_was_not_emptied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda: None)
    encoding, run = encoded(engine, 6)
    ask = encoding.workload.ask
    monkeypatch.setattr(encoding.workload, "ask", lambda user, number, k, tail: ask(user, 0, k, tail))
    with pytest.raises(EngineError, match="was to be prefilled, but"):
        measure_ttft(engine, encoding, TtftOptions((6,), 1, NO_TAIL), run, lambda _: None)


def test_memory_that_is_not_in_the_pool_after_encoding_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    monkeypatch.setattr(engine.offline.residency, "resident", lambda keys: [False] * len(keys))
    with pytest.raises(EngineError, match="9 of 9 segments are not in the pool after encoding"):
        encoded(engine, 6)
    assert offline(engine).log[-1] == "stats"  # asked again after a step


def test_tail_facts_are_prefilled() -> None:
    engine = fake_engine()
    encoding, run = encoded(engine, 6)
    rows = measure_ttft(engine, encoding, TtftOptions((6,), 1, tail=Tail(2)), run, lambda _: None)
    (inject,) = [row for row in rows if row["mode"] == "inject"]
    assert inject["config"]["prefilled_tokens"] > 32 + 2 * 19


def test_what_chats_recompute_is_measured_by_default() -> None:
    engine = fake_engine()
    encoding, _ = encoded(engine, 6)
    options = TtftOptions((6,), 1)
    run = new_run("ttft", engine, encoding, None, options.tail)
    rows = measure_ttft(engine, encoding, options, run, lambda _: None)
    assert {row["config"]["tail"] for row in rows} == {DEFAULT_TAIL}
    (inject,) = [row for row in rows if (row["metric"], row["mode"]) == ("ttft", "inject")]
    assert 32 + 20 <= inject["config"]["prefilled_tokens"] <= 32 + 60 + BLOCK, "the best one of six"


# throughput ---------------------------------------------------------------------------------------


def test_throughput_rows() -> None:
    engine = fake_engine()
    encoding, run = encoded(engine, LOAD.k, LOAD.users, bench="throughput")
    rows = measure_throughput(engine, encoding, LOAD, run, lambda _: None)
    assert {row["bench"] for row in rows} == {"throughput"}
    for metric, num in (("requests_per_s", 3), ("output_tokens_per_s", 3), ("ttft", 18), ("tpot", 18)):
        found = [row for row in rows if row["metric"] == metric]
        assert {row["mode"] for row in found} == set(MODES)
        assert {row["n"] for row in found} == {num}
    assert values(rows, "tpot")[LOAD.k, "text"] == pytest.approx(2.0)
    ratios = {row["mode"]: row for row in rows if row["metric"] == "requests_per_s_ratio"}
    assert set(ratios) == {"inject/text", "hit/text", "inject/hit", "inject/none"}
    assert all(row["n"] == 3 and "ci95" in row for row in ratios.values())
    (inject,) = [row for row in rows if (row["metric"], row["mode"]) == ("requests_per_s", "inject")]
    assert inject["config"]["users"] == 3
    assert inject["config"]["min_injected_tokens"] > 100
    assert inject["config"]["max_prefilled_tokens"] == 32
    assert inject["config"]["counters"] == {"preemptions": 0}


def test_hit_asks_behind_the_same_facts_whatever_is_recomputed() -> None:
    engine = fake_engine()
    encoding, run = encoded(engine, LOAD.k, LOAD.users)
    measure_throughput(engine, encoding, replace(LOAD, tail=Tail(2)), run, lambda _: None)
    (hit,) = [row for row in run.rows if (row["metric"], row["mode"]) == ("requests_per_s", "hit")]
    assert hit["config"]["max_prefilled_tokens"] < 32 + BLOCK, "the recomputed facts are found as well"
    (inject,) = [row for row in run.rows if (row["metric"], row["mode"]) == ("requests_per_s", "inject")]
    assert inject["config"]["prefilled_tokens"] >= 32 + 2 * 20


def test_users_send_one_request_at_a_time_and_have_memories_of_their_own() -> None:
    engine = fake_engine()
    encoding, run = encoded(engine, LOAD.k, LOAD.users)
    keys = [key for user in range(LOAD.users) for key in encoding.keys(user).values()]
    assert len(set(keys)) == len(keys) == LOAD.users * 8
    offline(engine).most_in_flight = 0
    measure_throughput(engine, encoding, LOAD, run, lambda _: None)
    assert offline(engine).most_in_flight == LOAD.users


def test_a_pool_that_lost_a_memory_writes_no_throughput(tmp_path: Path) -> None:
    engine = fake_engine()
    encoding, run = encoded(engine, LOAD.k, LOAD.users, out=tmp_path / "rows.jsonl")
    keys = list(encoding.keys(1).values())
    for key in keys[:3]:  # a question takes six of eight facts
        del offline(engine).pool[key]
    assert num_missing(engine, keys) == 3
    with pytest.raises(EngineError, match="fell back to text"):
        measure_throughput(engine, encoding, LOAD, run, lambda _: None)
    assert not (tmp_path / "rows.jsonl").exists()


def test_lanes_may_share_their_requests() -> None:
    engine = offline(fake_engine())
    shared: Iterator[GenerationRequest] = iter([GenerationRequest([number] * 3) for number in range(7)])
    lanes = drive(engine, [shared] * 2)
    assert sorted(one.request.token_ids[0] for lane in lanes for one in lane) == list(range(7))
    assert engine.most_in_flight == 2
    assert lanes[0][0].tpot_ms is None


def test_an_error_takes_the_other_requests_out_of_the_engine() -> None:
    engine = offline(fake_engine())

    def failing() -> Iterator[GenerationRequest]:
        yield GenerationRequest([1])
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        drive(engine, [failing(), iter([GenerationRequest([2])] * 2)])
    assert not engine._waiting


# encode -------------------------------------------------------------------------------------------


def test_encode_rows() -> None:
    engine = fake_engine()
    encoding = encoding_for(engine, RandomSource(RandomTokens()), Need(8, num_facts=30), POLICY)
    run = new_run("encode", engine, encoding, None)
    cost = measure_encode(engine, encoding, EncodeOptions(30, in_flight=3), run, lambda _: None)
    assert (cost.passes, cost.facts) == (8, 30)
    assert offline(engine).most_in_flight == 3
    assert cost.stored_tokens == sum(map(len, encoding.workload.facts(0)))
    rows = {(row["metric"], row["mode"]): row for row in run.rows}
    assert set(rows) == {
        ("computed_tokens_per_s", "compute only"),
        ("computed_tokens_per_s", "encode"),
        ("stored_tokens_per_s", "encode"),
        ("encode_rate", "encode"),
        ("tokens_per_stored_token", None),
    }
    each = rows["tokens_per_stored_token", None]
    assert each["p50"] == pytest.approx(cost.pass_tokens / cost.stored_tokens, abs=1e-4)
    assert each["config"]["facts"] == 30


def test_parts_of_a_suite_share_an_engine_and_fail_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine(pool_tokens=2000)
    monkeypatch.setattr("inferscale.bench.engine.EngineSpec.open", lambda spec: engine)
    options = SuiteOptions(TtftOptions((6,), 2, NO_TAIL), LOAD, EncodeOptions(100), RandomTokens(), POLICY)
    done = measure_suite(engine.spec, ("ttft", "throughput", "encode"), options, tmp_path, lambda _: None)
    assert [part.name for part in done] == ["start", "ttft", "throughput", "encode"]
    assert [part.error is None for part in done] == [True, True, True, False]
    assert "Raise --pool-size" in str(done[-1].error)
    assert offline(engine).is_closed
    assert {row["bench"] for row in read_rows(tmp_path / "throughput.jsonl")} == {"throughput"}


def test_a_suite_goes_on_behind_users_without_questions_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine serves the newest request first, so that one user asks all and the others wait."""
    engine = fake_engine()
    monkeypatch.setattr("inferscale.bench.engine.EngineSpec.open", lambda spec: engine)
    waiting, step = offline(engine)._waiting, offline(engine).step

    def newest_first() -> list[Any]:
        name, request = waiting.popitem()
        others = dict(waiting)
        waiting.clear()
        waiting.update({name: request, **others})
        return step()

    monkeypatch.setattr(engine.offline, "step", newest_first)
    options = SuiteOptions(TtftOptions((6,), 2, NO_TAIL), LOAD, EncodeOptions(10), RandomTokens(), POLICY)
    done = measure_suite(engine.spec, ("throughput", "encode"), options, tmp_path, lambda _: None)
    assert [part.error is None for part in done] == [True, False, True]
    assert "--engine-arg max_num_seqs=3" in str(done[1].error)
    assert not waiting
