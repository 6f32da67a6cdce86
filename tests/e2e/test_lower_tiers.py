"""KV that left the pool comes back from host memory and from disk as it was, or is prefilled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.engine import EngineCache
from harness.mixes import Author, Part, Stored
from inferscale.encryption import EncryptionKey
from inferscale.plan import Order
from inferscale.pool.sealing import Sealing
from inferscale.windows import sliding, window

pytestmark = pytest.mark.engine

PAGE = 16
SECRET = b"s" * 32
SMALL = {"block_size": 32, "pool_tokens": 49 * PAGE, "page_size_tokens": PAGE}


def push_out(a: Author, facts: list[Stored]) -> None:
    """Fill the pool with other facts; those of the argument are in lower tiers only."""
    before = a.engine.stats()["evictions"]
    a.store_facts([16] * 49, sliding(2, 60))
    assert a.engine.stats()["evictions"] >= before + len(facts)


@pytest.fixture
def model() -> str:
    """Of all tests here."""
    return "llama"


def test_host_memory_gives_back_the_same(author: Callable[..., Author], model: str) -> None:
    a = author(model, **SMALL, host_tokens=8192)
    facts = a.store_facts([40] * 6, window(2))
    parts: list[Part] = [*facts, a.text(20)]
    first = a.ask(parts, num_steps=2)
    push_out(a, facts)
    assert a.engine.resident([fact.key for fact in facts]) == [True] * 6
    again = a.ask(parts, num_steps=2, scope="another epoch's salt")
    assert again.outcome is not None
    assert again.outcome["injected_tokens"] == 240
    assert np.array_equal(again.logits, first.logits)
    stats = a.engine.stats()
    assert stats["host_hits"] >= 6
    assert stats["tier_loads_failed"] == stats["internal_errors"] == 0


def test_what_is_loaded_ahead_need_not_be_loaded(author: Callable[..., Author], model: str) -> None:
    a = author(model, **SMALL, host_tokens=8192)
    facts = a.store_facts([40] * 4, window(2))  # a quarter of the pool
    keys = tuple(fact.key for fact in facts)
    parts: list[Part] = [*facts, a.text(20)]
    first = a.ask(parts, num_steps=2)
    push_out(a, facts)
    before = a.engine.stats()
    answer = a.engine.ask([1], a.engine.plan(order=Order("prefetch", keys)))
    assert answer.outcome is not None
    assert answer.outcome["answer"] == {"resident": 4}
    ahead = a.engine.stats()
    assert ahead["host_prefetched"] == before["host_prefetched"] + 4
    again = a.ask(parts, num_steps=2, scope="another scope's salt")
    assert again.outcome is not None
    assert again.outcome["injected_tokens"] == 160
    assert np.array_equal(again.logits, first.logits)
    after = a.engine.stats()
    assert after["host_hits"] == before["host_hits"]
    assert after["host_prefetched"] == ahead["host_prefetched"]
    assert after["tier_loads_failed"] == before["tier_loads_failed"]
    assert after["internal_errors"] == 0


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_disk_outlives_the_engine_and_damage_costs_a_prefill(
    author: Callable[..., Author],
    engine: EngineCache,
    checkpoint: Callable[[str], Path],
    model: str,
    tmp_path: Path,
    is_encrypted: bool,
) -> None:
    options = {**SMALL, "disk": str(tmp_path / "kv")}
    if is_encrypted:
        key_file = tmp_path / "key"
        key_file.touch(0o600)
        key_file.write_text(SECRET.hex())
        options["key_file"] = str(key_file)
    a = author(model, **options)
    facts = a.store_facts([40] * 6, window(2))
    keys = [fact.key for fact in facts]
    parts: list[Part] = [*facts, a.text(20)]
    first = a.ask(parts, num_steps=2)
    a.engine.close()

    a.engine = engine(checkpoint(model), **options)
    assert a.engine.resident(keys) == [True] * 6
    again = a.ask(parts, num_steps=2)
    assert again.outcome is not None
    assert again.outcome["injected_tokens"] == 240
    assert np.array_equal(again.logits, first.logits)
    assert a.engine.stats()["disk_hits"] == 6

    push_out(a, facts)
    names = [Sealing(EncryptionKey(SECRET)).name_of(key) for key in keys] if is_encrypted else keys
    [damaged] = tmp_path.rglob(names[2])
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    answer = a.ask(parts, num_steps=2, scope="other")
    assert answer.outcome is not None
    assert answer.outcome["injected_tokens"] == 80
    assert not damaged.exists()
    assert a.engine.stats()["tier_loads_failed"] == 1
    assert a.difference(parts, answer, 80) <= 2 * a.baseline([260] * 4, 2)

    a.engine.ask([1], a.engine.plan(order=Order("forget", tuple(keys))))
    a.engine.close()
    assert [path for name in [*keys, *names] for path in tmp_path.rglob(name)] == []
    assert list(tmp_path.rglob("*/rank-0/*/*"))  # what others said is there
