"""`inferscale bench fidelity`: options reach the measurement, and bad ones are one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from inferscale.bench import fidelity
from inferscale.bench.harness import BenchRun
from inferscale.bench.options import FidelityOptions
from inferscale.bench.policies import Policy
from inferscale.cli.app import main
from inferscale.cli.bench_quality import read_ranges
from inferscale.errors import InvalidInput
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
        config = {"tail": 0, "questions": 1, "conversations": "1"}
        return [BenchRun("fidelity", "tiny", None).add("nll", "", [1.5], mode="none", k=5, config=config)]

    monkeypatch.setattr(fidelity, "run_fidelity", run)
    monkeypatch.setattr("inferscale.cli.bench_options.prepare_engine", lambda *, verbose: None)
    return calls


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", "fidelity", *map(str, arguments)])


def test_options_reach_the_measurement(called: list[tuple[Any, ...]], file: Path, tmp_path: Path) -> None:
    done = bench(
        "--conversation", file, "--conversations", "2,1", "--questions", 3, "--categories", "4,2", "--k", 5,
        "--policies", "anchor; sliding(4,2)+tail1", "--instruction", "", "--timed", 0, "--reference", 2,
        "--in-flight", 9, "--cache", tmp_path / "scores", "--out", tmp_path / "rows", "--model", "some/model",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "| none |" in done.output
    ((spec, conversations, policies, options, out, cache, _),) = called
    assert spec.model == "some/model"
    assert [conversation.number for conversation in conversations] == [2, 1]
    assert {question.category for question in conversations[0].questions} == {2, 4}
    assert policies == (Policy.parse("alone"), Policy.parse("sliding(4,2)+tail1"))
    assert options == FidelityOptions(5, 3, (4, 2), "", 0, 2, 9)
    assert (out, cache) == (tmp_path / "rows", tmp_path / "scores")


def test_defaults_are_those_of_the_options(called: list[tuple[Any, ...]], file: Path) -> None:
    assert bench("--conversation", file, "--model", "some/model").exit_code == 0
    assert called[0][2:4] == ((Policy.default(),), FidelityOptions())
    assert called[0][5] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "best"), "the window policy is 'best'"),
        (("--conversations", "2-1"), "--conversations is '2-1'"),
        (("--conversations", "1-3"), "conversation 3 was asked for"),
        (("--categories", "4,5"), "no gold answer"),
        (("--random-weights", "llama-3.1-8b"), "nothing to say about answers"),
    ],
)
def test_bad_options_start_nothing(
    called: list[tuple[Any, ...]], file: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = bench("--conversation", file, *arguments)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
    assert called == []


def test_ranges() -> None:
    assert read_ranges("--x", "5, 7-9,8") == (5, 7, 8, 9)
    for text in ("", "0", "3-", "a", "1,,2", "1--2"):
        with pytest.raises(InvalidInput, match="--x is"):
            read_ranges("--x", text)
