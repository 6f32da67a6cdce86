"""`inferscale bench locomo`: options reach the measurement, and bad ones are one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from inferscale.bench import locomo
from inferscale.bench.harness import BenchRun
from inferscale.bench.options import JudgeOptions, LocomoOptions
from inferscale.bench.policies import Policy
from inferscale.cli.app import main
from locomo_file import write_locomo


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_locomo(tmp_path)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the measurement was called with."""
    calls: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> list[Any]:
        calls.append(arguments)
        shared = {"questions": 1, "adversarial_questions": 0, "conversations": "1", "facts": "turns"}
        rows = BenchRun("locomo", "tiny", None, {"tail": 0, **shared})
        rows.add("cut_answers", "share", [0.25], mode="text", k=5)
        return rows.rows

    monkeypatch.setattr(locomo, "run_locomo", run)
    monkeypatch.setattr("inferscale.cli.bench_options.prepare_engine", lambda *, verbose: None)
    return calls


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", "locomo", *map(str, arguments)])


def test_options_reach_the_measurement(
    called: list[tuple[Any, ...]], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCALE_JUDGE_API_KEY", "secret")
    done = bench(
        "--conversation", file, "--conversations", "2,1", "--questions", 3,
        "--categories", "4,5", "--k", "4,2",
        "--policies", "anchor; sliding(4,2)+tail1", "--facts", "extracted", "--instruction", "Briefly.",
        "--adversarial-note", "Or say no.", "--max-tokens", 7, "--in-flight", 9,
        "--judge-url", "http://there/v1", "--judge-model", "big", "--judge-styles", "strict",
        "--cache", tmp_path / "cache", "--report", tmp_path / "page", "--out", tmp_path / "rows",
        "--model", "some/model",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "| 5 | text |" in done.output
    ((spec, conversations, policies, options, files, judging, _),) = called
    assert spec.model == "some/model"
    assert [conversation.number for conversation in conversations] == [2, 1]
    assert {question.category for question in conversations[0].questions} == {4, 5}
    assert policies == (Policy.parse("alone"), Policy.parse("sliding(4,2)+tail1"))
    assert options == LocomoOptions((2, 4), 3, (4, 5), "Briefly.", "Or say no.", 7, "extracted", 9)
    assert files == (tmp_path / "rows", tmp_path / "cache", tmp_path / "page")
    assert judging == JudgeOptions("http://there/v1", "big", ("strict",), "secret")


def test_defaults_are_those_of_the_options(called: list[tuple[Any, ...]], file: Path) -> None:
    assert bench("--conversation", file, "--conversations", "1-2", "--model", "some/model").exit_code == 0
    assert called[0][2:4] == ((Policy.default(),), LocomoOptions())
    assert called[0][5] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "best"), "the window policy is 'best'"),
        (("--conversations", "1-3"), "conversation 3 was asked for"),
        (("--conversations", "one"), "--conversations is 'one'"),
        (("--categories", "6"), "4 (single-hop) and 5 (adversarial)"),
        (("--k", "0"), "--k is '0'"),
        (("--random-weights", "llama-3.1-8b"), "nothing to say about answers"),
        (("--judge-url", "http://there/v1"), "--judge-url was given without --judge-model"),
        (("--judge-model", "big"), "--judge-model was given without --judge-url"),
        (("--judge-url", "there", "--judge-model", "big"), "--judge-url is 'there'"),
        (
            ("--judge-url", "http://there", "--judge-model", "big", "--judge-styles", "fair"),
            "allowed are strict and generous",
        ),
    ],
)
def test_bad_options_start_nothing(
    called: list[tuple[Any, ...]], file: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = bench("--conversation", file, "--conversations", "1", *arguments)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
    assert called == []
