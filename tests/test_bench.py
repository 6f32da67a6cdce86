"""Benchmarks: the form of rows, paired ratios, modes in turn, tables and plots made from rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale.bench import harness, report, ttft
from inferscale.bench.conversation import BenchConversation, read_conversation
from inferscale.bench.harness import KEYS, BenchRun, commit, latest_run, read_rows
from inferscale.bench.options import TtftOptions
from inferscale.bench.report import plot_ttft, ttft_table
from inferscale.errors import InferScaleError, InvalidInput
from inferscale.facts import Turn
from inferscale.memory_llm import ChatResult, EncodeProgress


class FakeLLM:
    """Answers at once with made-up times: text 100 ms + 10 a fact, injected a tenth of it; keeps a log."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.log: list[str] = []
        model_config = SimpleNamespace(dtype="torch.bfloat16", enforce_eager=True)
        self.engine = SimpleNamespace(
            reset_prefix_cache=lambda: self.log.append("reset"),
            max_model_len=8192,
            llm=SimpleNamespace(
                llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config))
            ),
        )
        self.prompts = SimpleNamespace(anchor_ids=(1,) * 40)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, turns: list[Turn], *, user_id: str, progress: Any) -> None:
        progress(EncodeProgress(2, 2, 500, 1080, 2.0))

    def chat(self, question: str, *, top_k: int, mode: str, **settings: Any) -> ChatResult:
        self.log.append(mode)
        full = 100.0 + 10.0 * top_k
        ms = {"text": full, "inject": full / 10, "none": 50.0}[mode]
        return ChatResult("x", mode, ms, ms + 1, 40, 30, 0, 10, 0, 1, 0, ())  # type: ignore[arg-type]


class CrowdedLLM(FakeLLM):
    """More than one fact does not fit."""

    def chat(self, question: str, *, top_k: int, mode: str, **settings: Any) -> ChatResult:
        result = super().chat(question, top_k=top_k, mode=mode, **settings)
        return replace(result, num_left_out=max(0, top_k - 1))


def measure(
    out: Path | None, *ks: int, num_turns: int = 60, open_engine: Callable[..., Any] = FakeLLM
) -> list[dict[str, Any]]:
    conversation = BenchConversation("demo", (Turn("a"),) * num_turns, ("q1?", "q2?"))
    options = TtftOptions(ks=ks, num_questions=4)
    return ttft.run_ttft(open_engine, "model", conversation, options, out, lambda _: None)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(
        sys, "argv", ["/bin/inferscale", "bench", "ttft", "--k", "0,50", "--model", "my model"]
    )
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    return measure(tmp_path / "rows.jsonl", 0, 50)


def test_rows_have_the_fixed_keys_and_are_appended(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    stored = read_rows(tmp_path / "rows.jsonl")
    assert stored == json.loads(json.dumps(rows))
    assert all(row.keys() >= set(KEYS) for row in rows)
    assert len({row["run"] for row in rows}) == 1
    assert {row["mode"] for row in rows if row["metric"] == "ttft"} == {"text", "hit", "inject", "none"}
    BenchRun("ttft", "model", tmp_path / "rows.jsonl").add("ttft", "ms", [1.0], mode="text", k=1)
    again = read_rows(tmp_path / "rows.jsonl")
    assert again[: len(stored)] == stored
    assert latest_run(again, "ttft") == again[len(stored) :]


def test_a_row_says_how_it_was_made(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        config = row["config"]
        assert config["command"] == "inferscale bench ttft --k 0,50 --model 'my model'"
        assert (config["dtype"], config["execution"]) == ("bfloat16", "eager")
        assert config["num_threads"] >= 1
        assert config["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "2"
        assert "dtype=bfloat16, enforce_eager=True, max_model_len=8192" in config["baseline"]
    measured = [row for row in rows if row["metric"] in ("ttft", "e2e_ttft")]
    assert measured
    assert all(row["config"]["num_left_out"] == 0 for row in measured)


def test_latest_run_holds_all_that_it_measured(rows: list[dict[str, Any]]) -> None:
    other = {**rows[0], "run": "older"}
    run = latest_run([other, *rows], "ttft")
    assert run == rows
    assert {row["bench"] for row in run} == {"ttft", "encode"}
    assert latest_run([other], "kernels") == []


def test_a_k_above_the_turns_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    def no_engine(*arguments: Any) -> Any:
        raise AssertionError("the engine was started")

    with pytest.raises(InvalidInput, match=r"k=61 was asked for; demo has 60 turns"):
        measure(tmp_path / "rows.jsonl", 0, 61, open_engine=no_engine)


def test_a_k_that_does_not_fit_is_refused_and_the_rows_before_it_stay(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"4 of k=5 facts do not fit into max_model_len=8192"):
        measure(tmp_path / "rows.jsonl", 1, 5, open_engine=CrowdedLLM)
    assert {row["k"] for row in read_rows(tmp_path / "rows.jsonl")} == {None, 1}


def test_the_commit_is_read_once_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(harness, "commit", lambda: calls.append(1) or "abc")
    assert {row["commit"] for row in measure(None, 0, 5)} == {"abc"}
    assert len(calls) == 1


def test_commit_sees_the_whole_checkout_but_not_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    files = ["src/bench/harness.py", "src/kernel.py", "benchmarks/results/ttft.jsonl"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("old")
    monkeypatch.setattr(harness, "__file__", str(tmp_path / files[0]))
    git("init")
    git("commit", "--allow-empty", "-m", "empty")
    assert commit() == "unknown"  # it lies in a checkout, but is no part of it
    git("add", ".")
    git("commit", "-m", "all")
    clean = commit()
    assert len(clean) == 12
    (tmp_path / files[2]).write_text("new row")
    (tmp_path / "untracked").write_text("x")
    assert commit() == clean
    (tmp_path / files[1]).write_text("new")
    assert commit() == clean + "+"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"run": 1\n', "Line 1 of .* is damaged"),
        (b'\n{"run": "a"}\n', "Line 2 of .* is no row of results: it lacks bench"),
        (b"[1]\n", "Line 1 of .* is no row of results"),
        (b"\xff\xfe\n", "cannot be read as rows of results"),
    ],
)
def test_a_damaged_results_file_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        read_rows(path)


def test_a_run_that_was_cut_off_shows_what_it_finished(rows: list[dict[str, Any]]) -> None:
    cut_off = [row for row in rows if (row["k"], row["mode"]) != (50, "none")]
    assert [line[:4] for line in report.ttft_table(cut_off).splitlines()[2:4]] == ["| 0 ", ""]
    with pytest.raises(InvalidInput, match="was cut off"):
        report.ttft_table([row for row in rows if row["mode"] != "none"])


def test_missing_matplotlib_is_said_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    report.check_plotting()
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(InferScaleError, match=r"make setup.*inferscale\[bench\]"):
        report.check_plotting()


def test_ratios_are_paired_and_have_an_interval(rows: list[dict[str, Any]]) -> None:
    (row,) = [r for r in rows if r["metric"] == "ttft_ratio" and r["mode"] == "text/inject" and r["k"] == 50]
    assert row["p50"] == pytest.approx(10.0)
    assert row["ci95"] == [10.0, 10.0]
    assert row["n"] == 4


def test_paired_ratio_differs_from_ratio_of_medians() -> None:
    row = BenchRun("ttft", "m", None).add_ratio("ttft", "a/b", [1.0, 10.0, 100.0], [100.0, 10.0, 10.0])
    assert row["p50"] == pytest.approx(1.0)
    low, high = row["ci95"]
    assert low < 1.0 < high


def test_encode_cost_is_computed_over_stored_tokens(rows: list[dict[str, Any]]) -> None:
    (row,) = [r for r in rows if r["metric"] == "tokens_per_stored_token"]
    assert row["bench"] == "encode"
    assert row["p50"] == pytest.approx(1080 / 500)


def test_modes_in_turn_with_the_prefix_cache_emptied() -> None:
    llm = FakeLLM()
    orders = []
    for number in range(3):
        llm.log.clear()
        ttft._ask_in_turn(llm, "q?", 5, 0, first=number)  # type: ignore[arg-type]
        orders.append(list(llm.log))
    assert orders[0] == ["reset", "text", "text", "reset", "inject", "reset", "none"]
    assert [order[1] for order in orders] == ["text", "inject", "none"]


def test_table_and_plot_show_the_rows(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    table = ttft_table(rows)
    assert "| 50 | 40 | 600.0 ms | 600.0 ms | 60.0 ms | 50.0 ms | 10.00× (10.00 to 10.00) |" in table
    assert "2.16 tokens per stored token" in table
    plot_ttft(rows, tmp_path / "plots" / "ttft.png")
    assert (tmp_path / "plots" / "ttft.png").read_bytes().startswith(b"\x89PNG")


def test_reads_locomo(tmp_path: Path) -> None:
    sample = {
        "conversation": {
            "session_10": [{"speaker": "A", "dia_id": "D10:1", "text": "later"}],
            "session_10_date_time": "9 May",
            "session_2": [{"speaker": "B", "dia_id": "D2:1", "text": "look", "blip_caption": "a cat"}],
            "session_2_date_time": "8 May",
        },
        "qa": [
            {"question": "Who?", "answer": 1, "category": 1},
            {"question": "Trap?", "adversarial_answer": "x", "category": 5},
        ],
    }
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([sample]), encoding="utf-8")
    conversation = read_conversation(path, 1)
    assert [turn.text for turn in conversation.turns] == ["look [shares a cat]", "later"]
    assert conversation.turns[0].said_at == "8 May"
    assert conversation.questions == ("Who?",)
    with pytest.raises(InvalidInput, match="conversation 2 was asked for"):
        read_conversation(path, 2)
    path.write_text("[]x", encoding="utf-8")
    with pytest.raises(InvalidInput, match="is not a LoCoMo file"):
        read_conversation(path)


def test_demo_conversation_is_the_default() -> None:
    conversation = read_conversation(None)
    assert len(conversation.turns) >= 100
    assert conversation.questions


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"conversation": {"session_1": []}, "qa": [{"question": "Who?"}]}, "has 0 turns and 1 usable"),
        (
            {
                "conversation": {"session_1": [{"speaker": "A", "dia_id": "D1:1", "text": "hi"}]},
                "qa": [{"question": "Trap?", "category": 5}, {"question": " ", "category": 1}],
            },
            "has 1 turns and 0 usable questions",
        ),
        ({"conversation": {}, "qa": ["Who?"]}, "is not a LoCoMo file"),
        ({"conversation": {}, "qa": [{"category": 1}]}, "is not a LoCoMo file"),
    ],
)
def test_unusable_locomo_is_one_clear_error(tmp_path: Path, sample: dict[str, Any], message: str) -> None:
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([sample]), encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        read_conversation(path)
