"""Verdicts outlive the engine, under all that could change them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy_engine import SUBJECT, ToyEngine

from inferscale.self_check import Verdict, remembered
from inferscale.self_check.remembered import FILE, all_of, key_of, recall, remember
from inferscale.self_check.starting import at_start

CONDITIONS: dict[str, Any] = {"model": "m", "vllm": "0.32.0", "pool_dtype": "auto", "dtype": "float32"}


def start(folder: Path, engine: ToyEngine, setting: Any = "auto", **changes: Any) -> Verdict:
    verdict = engine.run(at_start(setting, SUBJECT, folder, {**CONDITIONS, **changes}))
    assert isinstance(verdict, Verdict)
    return verdict


def test_only_the_first_start_checks(tmp_path: Path) -> None:
    first = start(tmp_path, ToyEngine())
    engine = ToyEngine()
    second = start(tmp_path, engine)
    assert not engine.log
    assert (first.state, first.is_new, second.state, second.is_new) == ("exact", True, "exact", False)
    assert second.moved == first.moved
    assert first.seconds > 0


def test_a_new_folder_is_its_owners(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    for name in ("empty", "new"):
        start(tmp_path / name, ToyEngine())
        modes = [path.stat().st_mode & 0o777 for path in (tmp_path / name, tmp_path / name / FILE)]
        assert modes == [0o700, 0o600]


def test_a_refusal_is_remembered_too(tmp_path: Path) -> None:
    assert start(tmp_path, ToyEngine(turn=lambda delta: 0.0)).is_refusal
    assert start(tmp_path, ToyEngine()).is_refusal
    assert not start(tmp_path, ToyEngine(), "always").is_refusal
    assert not start(tmp_path, ToyEngine()).is_refusal, "the latest counts"


def test_other_conditions_are_checked_anew(tmp_path: Path) -> None:
    start(tmp_path, ToyEngine())
    engine = ToyEngine()
    start(tmp_path, engine, pool_dtype="int8")
    assert engine.log
    assert len({key_of({**CONDITIONS, name: "another"}) for name in CONDITIONS}) == len(CONDITIONS)


def test_another_release_of_ours_is_checked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(CONDITIONS)
    monkeypatch.setattr(remembered, "_code", lambda: "changed")
    assert key_of(CONDITIONS) != before


def test_never_asks_nothing(tmp_path: Path) -> None:
    engine = ToyEngine()
    assert start(tmp_path, engine, "never").state == "unknown"
    assert not engine.log
    assert not list(tmp_path.iterdir())


def test_without_injection_there_is_nothing_to_ask(tmp_path: Path) -> None:
    engine = ToyEngine()
    assert start(tmp_path, engine, "always", injection_path="none").state == "off"
    assert not engine.log
    assert not list(tmp_path.iterdir())


def test_what_was_not_carried_out_is_tried_again(tmp_path: Path) -> None:
    assert start(tmp_path, ToyEngine(loses=True)).state == "unknown"
    assert start(tmp_path, ToyEngine()).is_new


@pytest.mark.parametrize("content", ["", "[1]", '{"KEY": 3}', '{"KEY": {"state": "perhaps"}}', "\udc80"])
def test_a_damaged_file_costs_a_check(tmp_path: Path, content: str) -> None:
    key = key_of(CONDITIONS)
    raw = content.replace("KEY", key).encode(errors="surrogateescape")
    (tmp_path / FILE).write_bytes(raw)
    assert recall(tmp_path, key) is None
    assert all_of(tmp_path) == []
    assert start(tmp_path, ToyEngine()).is_new
    assert recall(tmp_path, key) is not None


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).mkdir()
    assert start(tmp_path, ToyEngine()).state == "exact"
    assert "is not kept" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_the_file_is_for_people_too_and_does_not_grow_for_ever(tmp_path: Path) -> None:
    for number in range(80):
        remember(tmp_path, str(number), Verdict("exact", moved=0.001), CONDITIONS)
    written = json.loads((tmp_path / FILE).read_text())
    assert len(written) == 64
    assert written["79"]["vllm"] == "0.32.0"
    assert "0" not in written
    assert len(all_of(tmp_path)) == 64
