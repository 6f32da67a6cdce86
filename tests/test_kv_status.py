"""`inferscale kv status` on the numbers of a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner

from inferscale.cli import main
from inferscale.cli.kv_status import tiers_of
from inferscale.client.results import Stats

STATS = {
    "pages": 100,
    "free_pages": 25,
    "resident_segments": 30,
    "segments_injected": 50,
    "segments_missing": 10,
    "evictions": 4,
    "host_segments": 40,
    "host_bytes": 2**20,
    "host_capacity_bytes": 2**22,
    "host_hits": 10,
    "host_evictions": 1,
    "host_load_ms": 25,
    "host_prefetched": 3,
}


class FakeClient:
    def __init__(self, stats: dict[str, Any]) -> None:
        self._stats = stats

    def stats(self) -> Stats:
        return Stats(facts=7, pending=2, counters=self._stats)


def run(monkeypatch: pytest.MonkeyPatch, stats: dict[str, Any], *arguments: str) -> str:
    asked: list[Any] = []

    @contextmanager
    def client(url: str, api_key: str | None = None) -> Iterator[FakeClient]:
        asked.append((url, api_key))
        yield FakeClient(stats)

    monkeypatch.setattr("inferscale.client.Client", client)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    result = CliRunner().invoke(main, ["kv", "status", "--url", "http://server", *arguments])
    assert result.exit_code == 0, result.output
    assert asked == [("http://server", "secret")]
    return result.stdout


def test_what_was_loaded_is_no_hit_of_the_pool() -> None:
    pool, host = tiers_of(STATS)
    assert (pool.hits, pool.used_share) == (40, 0.75)
    assert (host.hits, host.used_share, host.hit_ms) == (10, 0.25, 2.5)
    assert (pool.prefetched, host.prefetched) == (0, 3)


def test_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(monkeypatch, STATS).splitlines()
    assert lines[0] == "7 facts, 2 encode passes waiting"
    assert [line.split()[0] for line in lines[1:]] == ["tier", "pool", "host", "prefilled"]
    assert "2.5 ms" in lines[3]
    assert lines[1].split()[-2:] == ["prefetched", "evicted"]
    assert lines[3].split()[-2:] == ["3", "1"]
    assert lines[4].split()[-2:] == ["10", "17%"]


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(run(monkeypatch, STATS, "--json"))
    assert [tier["tier"] for tier in found["tiers"]] == ["pool", "host"]
    assert found["missing"] == 10


def test_a_server_that_has_done_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "prefilled" in run(monkeypatch, {})
