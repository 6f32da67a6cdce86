"""benchmarks/scaling.py: its arithmetic, its rows, and that docs/scaling.md says what it prints."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "scaling.py"


@pytest.fixture(scope="module")
def scaling() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("benchmarks_scaling", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_page_says_what_the_command_prints(scaling: ModuleType) -> None:
    text = scaling.DOC.read_text(encoding="utf-8")
    block = scaling.rendered(scaling.Assumed(), scaling.read_measured())
    assert scaling.written(text, block) == text, "run: python benchmarks/scaling.py --write"


def test_every_measured_number_is_a_row(scaling: ModuleType) -> None:
    rows = scaling.read_measured()
    for found in vars(rows).values():
        if isinstance(found, scaling.Measured):
            name, run = found.where.replace("`", "").split()
            lines = (scaling.RESULTS / name).read_text(encoding="utf-8").splitlines()
            medians = [float(row["p50"]) for row in map(json.loads, lines) if row["run"] == run]
            assert found.value in medians


def test_a_missing_row_is_said(scaling: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    for path in scaling.RESULTS.glob("**/*.jsonl"):
        (tmp_path / path.relative_to(scaling.RESULTS)).write_text("")
    with pytest.raises(SystemExit, match="has no row of requests_per_s"):
        scaling.read_measured(tmp_path)


def test_the_load(scaling: ModuleType) -> None:
    load = scaling.load_of(
        scaling.Assumed(users=86_400, sessions_per_day=1, peak=2, requests_per_session=5, session_minutes=1)
    )
    assert (load.sessions_per_s, load.requests_per_s, load.talking) == (2, 10, 120)


def test_time_or_room_decides(scaling: ModuleType) -> None:
    rows = scaling.read_measured()
    assumed = scaling.Assumed(host_gib=1e6, pool_gib=1e6)
    ways = {way.name: way for way in scaling.ways_of(assumed, rows)}
    kept = ways["int8, KV kept"]
    busy = kept.gpu_s * scaling.load_of(assumed).sessions_per_s / assumed.busy_share
    assert scaling.gpus_of(kept, assumed) == math.ceil(busy)
    small = replace(assumed, host_gib=1, pool_gib=1)
    users = scaling.load_of(small).talking
    assert scaling.gpus_of(kept, small) == math.ceil(users * kept.kv_bytes / 2**30)
    assert scaling.gpus_of(ways["text"], small) == scaling.gpus_of(ways["text"], assumed)
    assert ways["int8, KV nowhere"].gpu_s > kept.gpu_s
    assert ways["bfloat16, KV kept"].kv_bytes > kept.kv_bytes


def test_what_the_page_says_of_other_options(scaling: ModuleType) -> None:
    rows, text = scaling.read_measured(), scaling.DOC.read_text(encoding="utf-8")

    def gpus(**changed: float) -> dict[str, int]:
        assumed = scaling.Assumed(**changed)
        return {way.name: scaling.gpus_of(way, assumed) for way in scaling.ways_of(assumed, rows)}

    def share(name: str, **changed: float) -> str:
        assumed = scaling.Assumed(**changed)
        ways = {way.name: way for way in scaling.ways_of(assumed, rows)}
        return f"{scaling.cost_of(ways[name], assumed) / scaling.cost_of(ways['text'], assumed):.2f}"

    few = gpus(requests_per_session=3)
    assert f"text needs {few['text']}\n  GPUs and `int8` {few['int8, KV kept']}:" in text
    assert f"`int8` has {share('int8, KV kept')} of text's cost" in text
    roomy = {share(f"{dtype}, KV kept", host_gib=1000) for dtype in scaling.POOLS}
    assert roomy == {"0.19"} and "both formats have 0.19" in text
    assert f"{share('int8, KV nowhere', host_gib=1000)} where KV is not kept" in text


def test_the_cost_is_of_the_gpus_all_day(scaling: ModuleType) -> None:
    rows, assumed = scaling.read_measured(), scaling.Assumed()
    way = scaling.ways_of(assumed, rows)[0]
    a_day = assumed.users * assumed.sessions_per_day * assumed.requests_per_session
    spent = scaling.gpus_of(way, assumed) * 24 * assumed.gpu_dollars_per_hour
    assert scaling.cost_of(way, assumed) == pytest.approx(spent / a_day * 1000)


@pytest.mark.parametrize("option", ["--peak 0.5", "--users 0", "--busy-share 1.5", "--session-minutes x"])
def test_what_makes_no_sense_is_refused(scaling: ModuleType, option: str) -> None:
    with pytest.raises(SystemExit):
        scaling.parse(option.split())
