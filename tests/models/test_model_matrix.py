"""A part of the support matrix, and that docs/models.md says what it says. All of it: `matrix.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, Architecture
from matrix import BEGIN, END, line_of, lines_in, with_lines
from model_checks import Row, check, check_text, refusal_in

from harness.engine import EngineCache

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCache]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other are slow where other processes run
    engines = EngineCache(tmp_path_factory.mktemp("engines"), limit=1)
    yield engines
    engines.close()
    torch.set_num_threads(num_threads)


@pytest.mark.engine
@pytest.mark.parametrize(
    "architecture", [one for one in ARCHITECTURES if one.tested_by_default], ids=lambda one: one.name
)
def test_the_row_of_the_page_is_what_the_run_says(
    architecture: Architecture, engines: EngineCache, tmp_path: Path
) -> None:
    row = check(architecture, architecture.write(tmp_path), engines)
    assert row.is_allowed, (row.result, row.notes)
    assert line_of(architecture, row.result) == lines_in(PAGE.read_text(encoding="utf-8"))[architecture.name]


@pytest.mark.engine
def test_without_injection_the_engine_answers_as_stock_vllm_does(
    engines: EngineCache, tmp_path: Path
) -> None:
    architecture = next(one for one in ARCHITECTURES if one.name == "Llama 3")
    check_text(architecture.write(tmp_path), {}, engines)


def test_every_architecture_has_a_row_that_is_allowed() -> None:
    lines = lines_in(PAGE.read_text(encoding="utf-8"))
    assert list(lines) == [one.name for one in ARCHITECTURES]
    for architecture in ARCHITECTURES:
        start = line_of(architecture, "")[:-2]
        assert lines[architecture.name].startswith(start)
        result = lines[architecture.name].removeprefix(start).removesuffix(" |").strip()
        assert Row(architecture, result).is_allowed, result


def test_what_is_neither_exact_nor_refused_is_a_failure() -> None:
    for result in ("not exact: …", "failed to start: …", "exactly", "refused", ""):
        assert not Row(ARCHITECTURES[0], result).is_allowed


def test_the_reason_of_a_refusal() -> None:
    told = (
        "start:\nTraceback (most recent call last):\n  File …\ninferscale.errors.UnsupportedLayout: The "
        "model keeps MambaSpec state, which is not full attention; InferScale cannot inject into it.\n"
    )
    assert refusal_in(told) == "The model keeps MambaSpec state, which is not full attention"
    assert refusal_in("Traceback\nValueError: something else") is None


def test_some_rows_can_be_written_alone() -> None:
    first, second = ARCHITECTURES[:2]
    page = f"before\n{BEGIN}\nold\n{END}\nbehind"
    written = with_lines(
        page, {second.name: line_of(second, "exact"), first.name: "| " + first.name}, "Made."
    )
    assert written.startswith(f"before\n{BEGIN}\n\n| architecture |")
    assert written.endswith(f"Made.\n\n{END}\nbehind")
    assert list(lines_in(written)) == [first.name, second.name], "in the order of the matrix"
    assert with_lines(written, lines_in(written), "Made.") == written
