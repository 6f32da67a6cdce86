"""A deletion through a server leaves nothing in any tier, and an audit beside it says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferscale import Client
from inferscale.catalog import CatalogTraces
from inferscale.catalog.opening import open_database
from inferscale.facts import Scope
from inferscale.operations.audit import KV_FOLDER, Audit, audit
from memory_server import MemoryServer, serving

pytestmark = pytest.mark.engine

ANA, BOB = Scope("ana"), Scope("bob")
TEXTS = [f"My friend number {i} was born in the year {1950 + i}." for i in range(45)]
SHARED = TEXTS[7]


@pytest.fixture
def server(checkpoint: Callable[[str], Path], tmp_path: Path) -> Iterator[MemoryServer]:
    flags = ("--pool-size", "256MiB", "--host-size", "64MiB", "--disk-size", "256MiB")
    with serving(checkpoint("smollm2"), tmp_path, *flags) as running:
        yield running


def look(server: MemoryServer, folder: Path, scope: Scope) -> Audit:
    with Client(server.url) as client:
        return audit(folder, scope, TEXTS, client.stats(user_id=scope.user_id))


def found_in(result: Audit) -> set[str]:
    return {finding.place for finding in result.findings if finding.num_found}


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / KV_FOLDER).rglob("*") if path.is_file()}


def test_nothing_is_left_in_any_tier(server: MemoryServer, tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    server.add("ana", *TEXTS)
    server.add("bob", SHARED, "Bob has a boat.")
    traces = CatalogTraces(open_database(folder))
    keys, others = traces.keys(ANA), traces.keys(BOB)
    traces.close()
    assert len(keys) == len(TEXTS)
    assert not keys & others
    end = time.monotonic() + 60
    while not files(folder) >= keys | others and time.monotonic() < end:
        time.sleep(0.1)  # files are written behind the capture
    assert found_in(look(server, folder, ANA)) >= {"table facts", "table encodings", KV_FOLDER, "server"}

    status, answer = server.call("DELETE", "/v1/memories", user_id="ana")
    assert (status, answer["deleted"]) == (200, len(TEXTS))
    while files(folder) & keys and time.monotonic() < end:
        time.sleep(0.1)  # removed behind the answer, in the order of what was ordered
    assert not files(folder) & keys
    result = look(server, folder, ANA)
    assert result.is_clean, result
    assert files(folder) >= others
    server.wait_encoded("bob")
    assert found_in(look(server, folder, BOB)) >= {"table facts", KV_FOLDER, "server"}
