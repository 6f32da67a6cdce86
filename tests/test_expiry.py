"""What has expired is found, listed, encoded and injected by nobody, and a purge deletes it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import ANA, ids, open_memory
from inferscale.errors import InvalidInput, UnknownFact
from inferscale.facts import Scope, Turn
from inferscale.memory import Memory

pytestmark = pytest.mark.usefixtures("both_databases")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.time()
        monkeypatch.setattr(time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as opened:
        yield opened


def test_it_is_gone_from_one_moment_to_the_next(memory: Memory, clock: Clock) -> None:
    [stays] = memory.add("ana likes tea", user_id="ana")
    [goes] = memory.add("ana is in rome", user_id="ana", expires_at=clock.now + 60)
    assert goes.expires_at == clock.now + 60
    assert memory.get(goes.id) == goes
    assert len(memory.search("rome", user_id="ana")) == 2
    assert not memory.is_purge_due()
    clock.now += 60
    assert [hit.fact for hit in memory.search("rome", user_id="ana")] == [stays]
    assert memory.get_all(user_id="ana") == [stays]
    assert memory.page(user_id="ana").facts == [stays]
    assert memory.count(user_id="ana") == 1
    assert memory.search("rome", user_id="ana", filters={"speaker": None})[0].fact == stays
    with pytest.raises(UnknownFact):
        memory.get(goes.id)
    with pytest.raises(UnknownFact):
        memory.update(goes.id, text="ana is in oslo")
    assert memory.is_purge_due()


def test_nobody_is_encoded_behind_it(memory: Memory, clock: Clock) -> None:
    [first] = memory.add("one", user_id="ana", expires_at=clock.now + 1)
    [second] = memory.add("two", user_id="ana")
    catalog = memory.catalog
    assert ids(catalog.unencoded("m", ANA)) == [first.id, second.id]
    assert ids(catalog.neighbours_before(second, 5)) == [first.id]
    clock.now += 1
    assert ids(catalog.unencoded("m", ANA)) == [second.id]
    assert catalog.neighbours_before(second, 5) == []


def test_a_purge_deletes_it_with_all_that_has_seen_it(memory: Memory, clock: Clock, tmp_path: Path) -> None:
    [one, two, three] = memory.add(
        [Turn("one secret", expires_at=clock.now + 5), Turn("two"), Turn("three", expires_at=clock.now + 50)],
        user_id="ana",
        run_id="7",
    )
    [other] = memory.add("of ben", user_id="ben", expires_at="1999-12-31T23:59:59Z")
    catalog = memory.catalog
    scope = Scope("ana", run_id="7")
    catalog.passes.record("m", scope, [], [one.id, two.id, three.id], ["k1", "k2", "k3"])
    clock.now += 5
    purged = memory.purge_expired()
    assert purged.num_facts == 2
    assert purged.keys == ("k1", "k2", "k3")
    epochs = {item.scope: item.epoch for item in purged.epochs}
    assert epochs[ANA] == epochs[scope] == memory.epoch(user_id="ana") == 1
    assert epochs[Scope("ben")] == 1
    with pytest.raises(UnknownFact):
        memory.history(other.id)
    assert catalog.passes.encodings("m", [one.id, two.id, three.id]) == {}
    assert memory.purge_expired().num_facts == 0
    assert not memory.is_purge_due()
    assert memory.get_all(user_id="ana") == [two, three]
    memory.close()
    assert b"one secret" not in b"".join(path.read_bytes() for path in tmp_path.glob("catalog*"))


def test_times_as_people_write_them(memory: Memory) -> None:
    content = [Turn("a", expires_at=4e9), "b", {"role": "user", "content": "c"}]
    facts = memory.add(content, user_id="ana", expires_at="2100-01-01")
    assert [fact.expires_at for fact in facts] == [4e9, 4102444800.0, 4102444800.0]
    for bad in ("tomorrow", "7 May", "", True, float("nan"), float("inf"), [1], 10**30, 3e11):
        with pytest.raises(InvalidInput, match="expires_at"):  # years behind 9999 cannot be shown
            memory.add("x", user_id="ana", expires_at=bad)  # type: ignore[arg-type]
    assert memory.count(user_id="ana") == 3
