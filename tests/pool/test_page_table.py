"""Page table against a model that keeps everything in plain lists."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inferscale.pool.table import Entry, PageTable

NUM_PAGES, PAGE = 7, 4
SHARE = 0.5
KEYS = [f"k{i}" for i in range(6)]


class Model:
    """One segment of the model: what the table's entry must look like."""

    def __init__(self, num_tokens: int, owner: str) -> None:
        self.num_tokens = num_tokens
        self.owner = owner
        self.num_pages = -(-num_tokens // PAGE)
        self.is_half = False
        self.is_half_written = False
        self.is_resident = False
        self.is_dropped = False

    @property
    def is_evictable(self) -> bool:
        return self.is_resident or (self.is_half and self.is_half_written)


class PageTableMachine(RuleBasedStateMachine):
    """`self.model` is in order of use, least recent first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(NUM_PAGES, PAGE, SHARE)
        self.model: dict[str, Model] = {}
        self.freed: list[int] = []
        self.num_evicted = 0

    def free_pages(self) -> int:
        return NUM_PAGES - sum(entry.num_pages for entry in self.model.values())

    def forget(self, key: str) -> None:
        self.freed.append(self.model.pop(key).num_pages)

    @rule(
        key=st.sampled_from(KEYS),
        num_tokens=st.integers(1, NUM_PAGES * PAGE + 5),
        owner=st.sampled_from("xy"),
        is_half=st.booleans(),
    )
    def reserve(self, key: str, num_tokens: int, owner: str, is_half: bool) -> None:
        if key in self.model:
            assert self.table.holds(key)
            return
        needed = -(-num_tokens // PAGE)
        evictable = sum(entry.num_pages for entry in self.model.values() if entry.is_evictable)
        fits = needed <= self.free_pages() + evictable
        before = {key: held(self.table, key).pages.tolist() for key in self.model}
        assert self.table.can_reserve(num_tokens) == fits
        entry = self.table.reserve(key, num_tokens, owner=owner, is_half=is_half)
        if not fits:
            assert entry is None
            assert before == {key: held(self.table, key).pages.tolist() for key in self.model}
            return
        assert entry is not None
        own = [entry for entry in self.model.values() if entry.owner == owner]
        is_greedy = sum(entry.num_pages for entry in own) + needed > SHARE * NUM_PAGES and (
            self.free_pages() + sum(entry.num_pages for entry in own if entry.is_evictable) >= needed
        )
        while self.free_pages() < needed:
            victim = next(
                key
                for key, entry in self.model.items()
                if entry.is_evictable and (not is_greedy or entry.owner == owner)
            )
            self.forget(victim)
            self.num_evicted += 1
        self.model[key] = Model(num_tokens, owner)
        self.model[key].is_half = is_half
        assert (entry.num_tokens, entry.num_pages, len(entry.pages)) == (num_tokens, needed, needed)

    @rule(key=st.sampled_from(KEYS))
    def commit(self, key: str) -> None:
        self.table.commit(key)
        if key in self.model and not self.model[key].is_half:
            self.model[key].is_resident = True
            if self.model[key].is_dropped:
                self.forget(key)

    @rule(key=st.sampled_from(KEYS))
    def commit_half(self, key: str) -> None:
        self.table.commit_half(key)
        if key in self.model and self.model[key].is_half:
            self.model[key].is_half_written = True
            if self.model[key].is_dropped:
                self.forget(key)

    @rule(key=st.sampled_from(KEYS))
    def resume(self, key: str) -> None:
        entry = self.table.get(key)
        if entry is not None and entry.is_half:
            self.table.resume(entry)
            self.model[key].is_half = False

    @rule(key=st.sampled_from(KEYS))
    def abandon(self, key: str) -> None:
        self.table.abandon(key)
        if key in self.model and not self.model[key].is_resident:
            self.forget(key)

    @rule(key=st.sampled_from(KEYS))
    def touch(self, key: str) -> None:
        if key in self.model and self.model[key].is_resident:
            self.table.touch([held(self.table, key)])
            self.model[key] = self.model.pop(key)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def drop(self, keys: list[str]) -> None:
        known = {key for key in keys if key in self.model and not self.model[key].is_dropped}
        assert self.table.drop(keys) == len(known)
        for key in known:
            self.model[key].is_dropped = True
            if self.model[key].is_evictable:
                self.forget(key)

    @rule()
    def take_freed_pages(self) -> None:
        pages = self.table.take_freed_pages()
        assert (0 if pages is None else len(pages)) == sum(self.freed)
        assert pages is None or all(0 <= page < NUM_PAGES for page in pages.tolist())
        self.freed = []

    @invariant()
    def agrees(self) -> None:
        table = self.table
        table.check()
        if not table._used:  # uses are put in order when that is asked for
            assert list(table._entries) == list(self.model)
        assert len(table) == len(self.model)
        assert table.num_free_pages == self.free_pages()
        assert table.num_evicted == self.num_evicted
        evictable = sum(entry.num_pages for entry in self.model.values() if entry.is_evictable)
        assert table._num_evictable_pages == evictable
        live = {key for key, entry in self.model.items() if entry.is_resident and not entry.is_dropped}
        assert table.num_resident == len(live)
        for key in KEYS:
            assert table.is_resident(key) == (key in live)
            assert (table.get(key) is not None) == (key in self.model and not self.model[key].is_dropped)
            assert table.holds(key) == (key in self.model)


PageTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPageTable = PageTableMachine.TestCase


def held(table: PageTable, key: str) -> Entry:
    """The entry of `key`, even if it was dropped while it is written; KeyError if its pages are free."""
    return table._entries[key]


def freed(table: PageTable) -> list[int]:
    pages = table.take_freed_pages()
    return [] if pages is None else pages.tolist()


def resident(table: PageTable, key: str, num_tokens: int) -> None:
    assert table.reserve(key, num_tokens) is not None
    table.commit(key)


def test_the_least_recently_used_goes_first() -> None:
    table = PageTable(3, 4)
    for key in "abc":
        resident(table, key, 4)
    table.touch([held(table, "a")])
    table.touch([held(table, "b")])
    resident(table, "d", 4)
    assert [table.holds(key) for key in "abcd"] == [True, True, False, True]
    resident(table, "e", 8)
    assert [table.holds(key) for key in "abde"] == [False, False, True, True]
    assert table.num_evicted == 3


def test_who_has_its_share_makes_room_of_its_own() -> None:
    table = PageTable(4, 4, max_share=0.5)
    for key, owner in ("a", "ana"), ("b", "bob"), ("c", "bob"), ("d", "bob"):  # there was room
        assert table.reserve(key, 4, owner=owner) is not None
        table.commit(key)
    assert table.reserve("e", 4, owner="bob") is not None
    table.commit("e")
    assert [key for key in "abcde" if table.holds(key)] == ["a", "c", "d", "e"]
    assert table.reserve("f", 4, owner="ana") is not None, "the least recently used of all"
    assert [key for key in "acdef" if table.holds(key)] == ["c", "d", "e", "f"]
    assert table.reserve("g", 16, owner="bob") is None, "one is being written"
    assert table.reserve("h", 12, owner="bob") is not None
    assert [key for key in "cdefh" if table.holds(key)] == ["f", "h"]


def test_where_its_own_are_not_enough_others_make_room() -> None:
    table = PageTable(4, 4, max_share=0.5)
    for key, owner in ("a", "ana"), ("b", "bob"), ("c", "ana"), ("d", "ana"):
        table.reserve(key, 4, owner=owner)
        table.commit(key)
    assert table.reserve("e", 12, owner="bob") is not None
    assert [key for key in "abcde" if table.holds(key)] == ["d", "e"]


def test_an_entry_being_written_is_never_evicted() -> None:
    table = PageTable(2, 4)
    table.reserve("writing", 4)
    resident(table, "there", 4)
    assert table.reserve("new", 5) is None, "only one page can be had"
    assert table.is_resident("there"), "nothing is evicted for a segment that does not fit anyway"
    assert table.reserve("new", 4) is not None
    assert table.reserve("newer", 1) is None


def test_a_segment_dropped_while_written_is_freed_when_the_step_is_reported() -> None:
    for end in (PageTable.commit, PageTable.abandon):
        table = PageTable(1, 4)
        table.reserve("a", 4)
        table.drop(["a"])
        assert table.reserve("b", 1) is None
        end(table, "a")
        assert not table.holds("a")
        assert table.num_resident == 0
        assert freed(table) == [0]


def test_evicted_and_abandoned_pages_are_zeroed_too() -> None:
    table = PageTable(1, 4)
    resident(table, "a", 1)
    resident(table, "b", 1)
    table.reserve("c", 1)
    table.abandon("c")
    assert freed(table) == [0, 0, 0]


def test_rows_run_across_pages_that_are_no_neighbours() -> None:
    table = PageTable(5, 4)
    for key in "abcde":
        resident(table, key, 4)
    table.drop(["b", "d", "e"])
    entry = table.reserve("x", 10)
    assert entry is not None
    expected = np.array([page * 4 + offset for page in entry.pages.tolist() for offset in range(4)])
    assert entry.rows.dtype == np.int32
    assert entry.rows.tolist() == expected[:10].tolist()


def test_rows_of_two_segments_never_meet() -> None:
    table = PageTable(8, 4)
    entries = [table.reserve(key, 7) for key in "abcd"]
    rows = [row for entry in entries if entry for row in entry.rows.tolist()]
    assert len(set(rows)) == len(rows) == 28


def test_asking_for_room_does_not_walk_the_entries() -> None:
    """A full pool of a hundred thousand segments is asked for every span of every encode pass."""

    class NotToBeWalked(OrderedDict[str, Any]):
        def values(self) -> Any:
            raise AssertionError("all entries are scanned")

    table = PageTable(2, 4)
    resident(table, "a", 4)
    table.reserve("b", 4)
    table._entries = NotToBeWalked(table._entries)
    assert table.can_reserve(4)
    assert not table.can_reserve(5)


def test_the_resident_run_ends_at_the_first_that_is_missing_or_of_another_length() -> None:
    table = PageTable(10, 4)
    for key in "abcd":
        resident(table, key, 5)
    table.reserve("w", 5)

    def run(keys: str, lengths: list[int]) -> list[str]:
        return [entry.key for entry in table.resident_run(list(keys), lengths)]

    assert run("abcd", [5] * 4) == ["a", "b", "c", "d"]
    assert run("abwd", [5] * 4) == ["a", "b"], "being written"
    assert run("axcd", [5] * 4) == ["a"], "unknown"
    assert run("abcd", [5, 4, 5, 5]) == ["a"], "another length"
    table.drop(["b"])
    assert run("abcd", [5] * 4) == ["a"], "dropped"


def test_asking_for_what_is_resident_changes_nothing() -> None:
    table = PageTable(2, 4)
    resident(table, "a", 4)
    resident(table, "b", 4)
    assert len(table.resident_run(["a"], [4])) == 1
    resident(table, "c", 4)
    assert not table.holds("a"), "it was not counted as a use"
    table.check()
