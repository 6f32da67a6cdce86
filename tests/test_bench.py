"""Benchmarks: the form of rows, paired ratios, what is read and what is told apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inferscale.bench import harness
from inferscale.bench.conversation import read_conversation
from inferscale.bench.harness import KEYS, BenchRun, command, commit, middle, read_rows
from inferscale.errors import InvalidInput


def test_rows_have_the_fixed_keys_and_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.jsonl"
    run = BenchRun("ttft", "model", path, {"shared": 1})
    run.add("ttft", "ms", [3.0, 1.0, 2.0], mode="text", k=5, config={"own": 2})
    run.add("rate", "facts/s", [7.0], bench="encode")
    stored = read_rows(path)
    assert stored == run.rows
    assert all(row.keys() >= set(KEYS) for row in stored)
    assert (stored[0]["p50"], stored[0]["n"], stored[0]["k"]) == (2.0, 3, 5)
    assert stored[0]["config"] == {"shared": 1, "own": 2}
    assert [row["bench"] for row in stored] == ["ttft", "encode"]
    BenchRun("ttft", "model", path).add("ttft", "ms", [1.0], mode="text", k=1)
    again = read_rows(path)
    assert again[:2] == stored
    assert len(again) == 3


def test_the_middle_is_a_value_that_was_measured() -> None:
    assert middle([3, 1, 2]) == 2
    assert middle([4.0, 1.0]) == 4.0


def test_the_commit_is_read_once_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(harness, "commit", lambda: calls.append(1) or "abc")
    run = BenchRun("ttft", "model", None)
    assert {run.add("ttft", "ms", [1.0])["commit"] for _ in range(3)} == {"abc"}
    assert len(calls) == 1


@pytest.mark.parametrize("program", ["/usr/bin/inferscale", "/x/inferscale/cli/__main__.py"])
def test_the_command_can_be_repeated(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(sys, "argv", [program, "bench", "ttft", "--model", "my model"])
    assert command() == "inferscale bench ttft --model 'my model'"


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
    monkeypatch.delenv("INFERSCALE_COMMIT", raising=False)
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


def test_a_copy_without_history_is_told_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "__file__", str(tmp_path / "harness.py"))
    monkeypatch.setenv("INFERSCALE_COMMIT", "abc+ copied")
    assert BenchRun("ttft", "model", None).add("ttft", "ms", [1.0])["commit"] == "abc+ copied"
    monkeypatch.setenv("INFERSCALE_COMMIT", " ")
    assert commit() == "unknown"


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


def test_paired_ratio_differs_from_ratio_of_medians() -> None:
    row = BenchRun("ttft", "m", None).add_ratio("ttft", "a/b", [1.0, 10.0, 100.0], [100.0, 10.0, 10.0])
    assert row["p50"] == pytest.approx(1.0)
    low, high = row["ci95"]
    assert low < 1.0 < high


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
