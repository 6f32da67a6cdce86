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
    "pool_bytes": 3 * 2**20,
    "pool_capacity_bytes": 2**22,
    "segments_injected": 50,
    "segments_cached": 20,
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
        verdict = {"state": "exact", "detail": "Self-check: KV can be moved."}
        return Stats(facts=7, pending=2, counters=self._stats, self_check=verdict)


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
    assert (host.hits, host.used_share, host.wait_ms) == (10, 0.25, 2.5)
    assert (pool.size, pool.capacity) == (3 * 2**20, 2**22)
    assert (pool.prefetched, host.prefetched) == (0, 3)


def test_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(monkeypatch, STATS).splitlines()
    assert lines[0] == "7 facts, 2 encode passes waiting"
    assert lines.pop(1) == "Self-check: KV can be moved."
    assert [line.split()[0] for line in lines[1:]] == ["tier", "pool", "host", "cached", "prefilled", "hits:"]
    assert "2.5 ms" in lines[3]
    assert lines[1].split()[-2:] == ["prefetched", "evicted"]
    assert lines[3].split()[-2:] == ["3", "1"]
    assert "3 MiB of 4 MiB" in lines[2]
    assert "mean wait" in lines[1]
    assert [line.split()[-2:] for line in lines[4:6]] == [["20", "25%"], ["10", "12%"]]


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(run(monkeypatch, STATS, "--json"))
    assert [tier["tier"] for tier in found["tiers"]] == ["pool", "host"]
    assert found["self_check"]["state"] == "exact"
    assert found["planned_facts"] == {"injected": 50, "cached": 20, "prefilled": 10}


def test_a_server_that_has_done_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "prefilled" in run(monkeypatch, {})


def test_a_variable_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOPE", raising=False)
    result = CliRunner().invoke(main, ["kv", "status", "--api-key-env", "NOPE"])
    assert result.exit_code
    assert "The environment variable NOPE, named by --api-key-env, is not set." in result.output


def test_no_server(free_tcp_port: int) -> None:
    result = CliRunner().invoke(main, ["kv", "status", "--url", f"http://127.0.0.1:{free_tcp_port}"])
    assert "Check that the server runs and that the URL is right." in result.output
    assert "base_url" not in result.output
