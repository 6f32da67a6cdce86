"""Room for facts' KV: arithmetic, the table of docs/capacity.md, and `inferscale kv plan`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from inferscale.bench.shapes import SHAPES, token_size_bytes
from inferscale.capacity import (
    _DISK_HEADER_BYTES,
    COMMON,
    FactSize,
    fact_size,
    facts_per_gib,
    plan,
    size_text,
    token_bytes_of,
)
from inferscale.cli.app import main
from inferscale.errors import InvalidInput
from inferscale.pool.disk import DiskStore

PAGE = Path(__file__).parent.parent / "docs" / "capacity.md"
NAMES = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "mistral-7b-v0.3": "Mistral-7B",
    "qwen2.5-7b": "Qwen2.5-7B",
    "qwen3-14b": "Qwen3-14B",
}


def test_a_fact_takes_whole_pages_tokens_and_blocks() -> None:
    assert fact_size(1000, 30, page_tokens=4) == FactSize(30, 32_000, 30_000, 32_768)
    assert fact_size(1000, 32, page_tokens=4).pool == 32_000
    assert fact_size(4096, 1, page_tokens=1) == FactSize(1, 4096, 4096, 8192)
    assert facts_per_gib(2**20, 4) == 256
    assert [size_text(n) for n in (5, 2048, 3 * 2**29, 2**40)] == ["5 B", "2 KiB", "1.5 GiB", "1 TiB"]


def test_the_header_of_a_file_is_that_of_the_disk_tier(tmp_path: Path) -> None:
    assert DiskStore(tmp_path, "format", 0, 100).size_of(7) - 700 == _DISK_HEADER_BYTES


def test_shapes_are_those_that_benchmarks_run() -> None:
    for shape, name in NAMES.items():
        assert COMMON[name].elements * 2 == token_size_bytes(SHAPES[shape])


@pytest.mark.parametrize("shape", NAMES)
def test_a_config_says_the_same_as_the_name(tmp_path: Path, shape: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    for model in (str(tmp_path), str(tmp_path / "config.json")):
        assert token_bytes_of(model, None) == token_bytes_of(NAMES[shape].upper(), None)
        assert token_bytes_of(model, "float32") == 2 * token_bytes_of(NAMES[shape], "bfloat16")


@pytest.mark.parametrize(("dtype", "scales"), [("int8", 2 * 2 * 32 * 8 * 4), ("fp8", 2 * 2 * 32 * 8)])
def test_a_quantized_pool_takes_a_byte_an_element_and_scales(tmp_path: Path, dtype: str, scales: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"]))
    assert token_bytes_of("Llama-3.1-8B", dtype) == 65_536 + scales
    assert token_bytes_of(str(tmp_path), dtype) == 65_536 + scales
    assert plan("Llama-3.1-8B", 10, 10, dtype=dtype).dtype == dtype


def test_a_plan_by_hand() -> None:
    planned = plan("Llama-3.1-8B", 10_000, 100, talking=50)
    assert (planned.token_bytes, planned.facts_per_gib, planned.dtype) == (131_072, 256, "bfloat16")
    assert [(t.tier, t.users, t.facts, t.size_bytes) for t in planned.tiers] == [
        ("GPU pool", 50, 5_000, 5_000 * 32 * 131_072),
        ("host memory", 1_000, 100_000, 100_000 * 30 * 131_072),
        ("disk", 10_000, 1_000_000, 1_000_000 * (30 * 131_072 + 4096)),
    ]
    assert [tier.users for tier in plan("Qwen3-14B", 7, 1).tiers] == [1, 1, 7]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="talking is 11; allowed are 1 to 10"):
        plan("Qwen3-14B", 10, 1, talking=11)
    with pytest.raises(InvalidInput, match="facts is 0; allowed are 1 or more"):
        plan("Qwen3-14B", 10, 0)
    with pytest.raises(InvalidInput, match="dtype is 'int3'; allowed are bfloat16"):
        plan("Qwen3-14B", 10, 1, dtype="int3")
    with pytest.raises(InvalidInput, match="whose shape cannot be read"):
        plan(str(tmp_path), 10, 1)


def test_the_table_of_the_page_is_true() -> None:
    rows = re.findall(
        r"^\| ([\w.-]+) \| (\d+) KiB \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$",
        PAGE.read_text(),
        re.M,
    )
    assert {row[0] for row in rows} == set(COMMON)
    for name, token_kib, *per_gib, int8 in rows:
        token_bytes = token_bytes_of(name, None)
        assert int(token_kib) == round(token_bytes / 1024)
        expected = [facts_per_gib(token_bytes, tokens) for tokens in (15, 30, 60)]
        assert [int(number.replace(",", "")) for number in per_gib] == expected
        assert int(int8.replace(",", "")) == facts_per_gib(token_bytes_of(name, "int8"), 30)


def test_on_the_command_line() -> None:
    asked = ["kv", "plan", "--model", "qwen2.5-7b", "--users", "100", "--facts", "50"]
    shown = CliRunner().invoke(main, asked)
    assert shown.exit_code == 0, shown.output
    assert "585 facts a GiB" in shown.output
    assert re.search(r"^disk +100 +5000 +8.03\d* GiB$", shown.output, re.M), shown.output
    read = json.loads(CliRunner().invoke(main, [*asked, "--json", "--tokens-per-fact", "60"]).stdout)
    assert read["facts_per_gib"] == 312
    assert [tier["tier"] for tier in read["tiers"]] == ["GPU pool", "host memory", "disk"]


def test_kv_plan_names_its_options() -> None:
    asked = ["kv", "plan", "--model", "qwen2.5-7b", "--users", "10", "--facts", "5", "--talking", "50"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code
    assert "--talking is 50; allowed are 1 to 10, the number of users" in result.output
