"""Benchmarks: the form of rows, paired ratios, modes in turn, tables and plots made from rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale.bench import ttft
from inferscale.bench.conversation import BenchConversation, read_conversation
from inferscale.bench.harness import BenchRun, latest_run, read_rows
from inferscale.bench.report import plot_ttft, ttft_table
from inferscale.errors import InvalidInput
from inferscale.facts import Turn
from inferscale.memory_llm import ChatResult, EncodeProgress

KEYS = {
    "run", "bench", "metric", "unit", "mode", "k", "model", "hardware", "engine", "commit", "config", "n",
    "p50", "p90", "p99",
}  # fmt: skip


class FakeLLM:
    """Answers at once with made-up times: text 100 ms + 10 a fact, injected a tenth of it; keeps a log."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.log: list[str] = []
        self.engine = SimpleNamespace(reset_prefix_cache=lambda: self.log.append("reset"))
        self.prompts = SimpleNamespace(anchor_ids=(1,) * 40)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, turns: list[Turn], *, user_id: str, progress: Any) -> None:
        progress(EncodeProgress(2, 2, 2 * 40 + 500, 1080, 2.0))

    def chat(self, question: str, *, top_k: int, mode: str, **settings: Any) -> ChatResult:
        self.log.append(mode)
        full = 100.0 + 10.0 * top_k
        ms = {"text": full, "inject": full / 10, "none": 50.0}[mode]
        return ChatResult("x", mode, ms, ms + 1, 40, 30, 0, 10, 0, 1, 0, ())  # type: ignore[arg-type]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(ttft, "MemoryLLM", FakeLLM)
    conversation = BenchConversation("demo", (Turn("a"), Turn("b")), ("q1?", "q2?"))
    options = ttft.TtftOptions(ks=(0, 50), num_questions=4)
    return ttft.run_ttft("model", conversation, options, tmp_path / "rows.jsonl", lambda _: None)


def test_rows_have_the_fixed_keys_and_are_appended(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    stored = read_rows(tmp_path / "rows.jsonl")
    assert stored == json.loads(json.dumps(rows))
    assert all(set(row) >= KEYS for row in rows)
    assert len({row["run"] for row in rows}) == 1
    assert {row["mode"] for row in rows if row["metric"] == "ttft"} == {"text", "hit", "inject", "none"}
    BenchRun("ttft", "model", tmp_path / "rows.jsonl").add("ttft", "ms", [1.0], mode="text", k=1)
    again = read_rows(tmp_path / "rows.jsonl")
    assert again[: len(stored)] == stored
    assert latest_run(again, "ttft") == again[len(stored) :]


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


def test_encode_cost_leaves_the_anchor_out(rows: list[dict[str, Any]]) -> None:
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
