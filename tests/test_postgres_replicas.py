"""Several replicas on one database: what one writes or deletes holds for all, from its answer on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fakes import ANA, DIM, WordEmbedder, add, ids
from inferscale.catalog import Catalog, NewPass, Quota, VectorMark
from inferscale.catalog.next_vectors import NextVectors
from inferscale.catalog.opening import open_database
from inferscale.catalog.rows import EmbedderIdentity
from inferscale.config import MemoryConfig
from inferscale.errors import QuotaExceeded, UnknownFact
from inferscale.facts import Scope, Turn
from inferscale.memory import Memory
from postgres_server import Replicas


def test_a_replica_sees_what_others_write(url: str, tmp_path: Path) -> None:
    one, other = (
        Memory(MemoryConfig(tmp_path / name, catalog=url), embedder=WordEmbedder()) for name in ("a", "b")
    )
    with one, other:
        assert one.add("my sister lives in oslo", user_id="ana")
        [hit] = other.search("sister", user_id="ana")
        assert hit.fact.text == "my sister lives in oslo"
        other.update(hit.fact.id, text="my sister lives in rome")
        [hit] = one.search("rome", user_id="ana")
        assert (hit.fact.text, hit.score > 0.3) == ("my sister lives in rome", True)
        epoch = other.catalog.epoch(ANA)
        one.add("a second one", user_id="ana")
        one.delete(hit.fact.id)
        assert [found.fact.text for found in other.search("sister", user_id="ana")] == ["a second one"]
        assert other.catalog.epoch(ANA) > epoch
        with pytest.raises(UnknownFact):
            other.get(hit.fact.id)


def test_a_deletion_is_never_missed_by_a_request_that_begins_later(url: str, tmp_path: Path) -> None:
    """One replica stores and deletes; the other searches all the time."""
    one, other = (
        Memory(MemoryConfig(tmp_path / name, catalog=url), embedder=WordEmbedder()) for name in ("a", "b")
    )
    gone: set[str] = set()
    wrong: list[str] = []
    done = threading.Event()

    def search() -> None:
        while not done.is_set():
            deleted = set(gone)
            found = {hit.fact.id for hit in other.search("fact", user_id="ana", top_k=99)}
            wrong.extend(found & deleted)

    with one, other:
        one.add("the fact that stays", user_id="ana")
        searching = threading.Thread(target=search)
        searching.start()
        for number in range(30):
            [fact] = one.add(f"fact {number}", user_id="ana")
            one.delete(fact.id)
            gone.add(fact.id)
        done.set()
        searching.join()
    assert not wrong


def test_a_reader_of_the_feed_misses_nothing_of_many_writers(replica: Replicas) -> None:
    """Numbers are committed in their order, so that what is above a mark is all that is new."""
    reader, writers = replica(), [replica() for _ in range(4)]
    done = threading.Event()
    seen: dict[int, bool] = {}

    def write(writer: Catalog) -> None:
        for number in range(15):
            facts = add(writer, Scope(f"u{number % 3}"), "a", "b", "c")
            writer.delete(facts[1].id)

    def read() -> None:
        mark = VectorMark()
        while True:
            was_done = done.is_set()
            changes = reader.feed.vector_changes(mark, limit=7)
            seen.update(dict.fromkeys(changes.fact_seqs, True))
            for seq in changes.removed_seqs:
                seen.pop(seq, None)
            mark = changes.mark
            if was_done and changes.is_complete:
                return

    following = threading.Thread(target=read)
    following.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, writers))
    done.set()
    following.join()
    assert sorted(seen) == [fact.seq for fact in reader.facts(Scope())]
    assert len(seen) == 4 * 15 * 2


def test_a_quota_holds_for_all_replicas_together(replica: Replicas) -> None:
    catalogs = [replica(quota=Quota(max_facts=10)) for _ in range(4)]

    def fill(catalog: Catalog) -> int:
        stored = 0
        for _ in range(6):
            try:
                stored += len(add(catalog, ANA, "one"))
            except QuotaExceeded:
                pass
        return stored

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(fill, catalogs)) == 10
    assert catalogs[0].count(ANA) == 10


def test_what_several_are_told_at_once_is_stored_once(replica: Replicas) -> None:
    catalogs = [replica() for _ in range(4)]
    vector = np.ones((1, DIM), dtype=np.float32)
    with ThreadPoolExecutor(4) as pool:
        stored = list(pool.map(lambda one: one.add_new_facts(ANA, [Turn("the same")], vector), catalogs))
    assert [applied.is_new for [applied] in stored].count(True) == 1
    assert len({applied.fact.id for [applied] in stored if applied.fact}) == 1


def test_a_decision_made_on_an_older_state_is_not_carried_out(replica: Replicas) -> None:
    one, other = replica(), replica()
    vector = np.ones(DIM, dtype=np.float32)
    mark = one.similar(ANA, vector, 5).mark
    add(other, ANA, "meanwhile")
    assert one.apply_inferred(ANA, Turn("decided before"), vector, mark=mark) is None


def test_passes_of_a_fact_that_another_deletes_are_not_recorded(replica: Replicas) -> None:
    one, other = replica(), replica()
    facts = add(one, ANA, "a", "b")
    epoch = one.epoch(ANA)
    other.delete(facts[0].id)
    with pytest.raises(UnknownFact):
        one.passes.record("m", ANA, [], ids(facts), ["a", "b"])
    assert one.passes.record_all("m", ANA, [NewPass([], ids(facts[1:]), ["b"])], epoch) == [None]


def test_the_token_tells_who_wrote(replica: Replicas) -> None:
    one, other = replica(), replica()
    before = one.change_token()
    assert one.change_token() == before
    add(one, ANA, "own")
    own = one.change_token()
    assert (own.data_version, own != before) == (before.data_version, True)
    add(other, ANA, "of another")
    assert one.change_token().data_version == own.data_version + 1


def test_a_switch_of_embedders_is_seen_whole(url: str, replica: Replicas) -> None:
    """Tables are renamed, which a snapshot does not hide: a read locks before it looks."""
    catalog = replica()
    add(catalog, ANA, *"abcde")
    vectors = NextVectors(open_database("nowhere", url=url), EmbedderIdentity("other", 2 * DIM))
    vectors.begin()
    vectors.store(vectors.missing(0, 9), np.ones((5, 2 * DIM), dtype=np.float32))
    with ThreadPoolExecutor(1) as pool:
        with catalog._database.read() as connection:
            switching = pool.submit(vectors.switch)
            time.sleep(0.2)
            assert connection.execute("SELECT DISTINCT dim FROM vectors").fetchall() == [(DIM,)]
            assert not switching.done()
        assert switching.result()
    vectors.close()
