"""Ranking by words: against plain BM25, in step with the catalog, apart for each user, within its bound."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest

from fakes import open_memory
from inferscale.facts import Scope
from inferscale.retrieval.lexical import LexicalIndex, words


def plain_bm25(query: str, texts: dict[int, str]) -> list[int]:
    """The formula as it is printed, over all texts."""
    split = {seq: words(text) for seq, text in texts.items()}
    mean = sum(len(found) for found in split.values()) / len(split)
    scores: dict[int, float] = {}
    for word in set(words(query)):
        num_with = sum(word in found for found in split.values())
        rarity = math.log(1 + (len(split) - num_with + 0.5) / (num_with + 0.5))
        for seq, found in split.items():
            count = Counter(found)[word]
            if count:
                norm = count + 0.9 * (1 - 0.4 + 0.4 * len(found) / mean)
                scores[seq] = scores.get(seq, 0.0) + rarity * count * 1.9 / norm
    return sorted(scores, key=lambda seq: (-round(scores[seq], 9), -seq))


class Texts:
    """Scopes as lists of texts, and how often they were read."""

    def __init__(self) -> None:
        self.scopes: dict[int, dict[int, str]] = {}
        self.reads: list[tuple[int, int]] = []

    def read(self, code: int, after: int) -> list[tuple[int, str]]:
        self.reads.append((code, after))
        return [(seq, text) for seq, text in sorted(self.scopes[code].items()) if seq > after]

    def mark(self, code: int, epoch: int = 0) -> tuple[int, int, int, int]:
        return code, epoch, max(self.scopes[code], default=0), len(self.scopes[code])


@pytest.mark.parametrize("seed", range(5))
def test_scopes_together_rank_as_one_would(seed: int) -> None:
    chance = random.Random(seed)
    texts = Texts()
    for seq in range(1, 200):
        said = " ".join(chance.choice("abcdefghijklmnop") for _ in range(chance.randint(1, 12)))
        texts.scopes.setdefault(chance.randint(1, 4), {})[seq] = said
    index = LexicalIndex(texts.read)
    for covered in ([1, 2, 3, 4], [2], [1, 3]):
        together = {seq: text for code in covered for seq, text in texts.scopes[code].items()}
        marks = [texts.mark(code) for code in covered]
        expected = plain_bm25("a B c q", together)
        assert index.search("a B c q", 500, marks) == expected
        assert index.search("a B c q", 3, marks) == expected[:3]
        some = expected[::3]
        assert index.search("a B c q", 500, marks, some) == some
    assert index.search("zzz", 5, marks) == []
    assert index.search("…!", 5, marks) == []


def test_what_is_new_is_read_and_nothing_else() -> None:
    texts = Texts()
    texts.scopes = {1: {1: "the cat", 3: "the dog"}}
    index = LexicalIndex(texts.read)
    assert index.search("cat", 5, [texts.mark(1)]) == [1]
    texts.scopes[1][4] = "another cat"
    assert index.search("cat", 5, [texts.mark(1)]) == [4, 1] or index.search("cat", 5, [texts.mark(1)])
    assert texts.reads == [(1, 0), (1, 3)]
    del texts.scopes[1][4]
    assert index.search("cat", 5, [texts.mark(1, epoch=1)]) == [1]
    assert texts.reads[2:] == [(1, 0)]
    texts.scopes[1][1] = "the bird"
    assert index.search("cat", 5, [texts.mark(1, epoch=2)]) == []


def test_the_scopes_used_last_are_kept_within_the_bound() -> None:
    texts = Texts()
    texts.scopes = {code: dict.fromkeys(range(code * 10 + 1, code * 10 + 5), "cat") for code in (1, 2, 3)}
    index = LexicalIndex(texts.read, max_facts=8)
    for code in (1, 2, 1, 3, 1):
        assert len(index.search("cat", 9, [texts.mark(code)])) == 4
    assert texts.reads == [(1, 0), (2, 0), (3, 0)]  # 2 went, not 1
    index.search("cat", 9, [texts.mark(2)])
    assert texts.reads[3:] == [(2, 0)]
    marks = [texts.mark(code) for code in (1, 2, 3)]
    assert not index.covers(marks)
    assert index.search("cat", 9, marks) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Größe STRASSE straße", ["grösse", "strasse", "strasse"]),
        ("don't_know 3.5", ["don", "t", "know", "3", "5"]),
        ("我喜欢猫 ok", ["我喜", "喜欢", "欢猫", "ok"]),
        ("猫", ["猫"]),
        ("…", []),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_others_change_no_rank(tmp_path: Path) -> None:
    """Frequencies are those of the scopes that a search covers: what others store says nothing."""
    with open_memory(tmp_path) as memory:
        texts = ["cats and a violin", "cats like milk", "a violin in Oslo", "milk in Oslo"]
        memory.add(texts, user_id="ana")
        memory.search("a", user_id="ana")
        search = memory._search.synced()
        marks = memory.catalog.feed.scope_marks(Scope("ana"))
        before = search.words.search("violin milk", 9, marks)
        memory.add(["violin violin"] * 50, user_id="ben")
        memory.search("violin", user_id="ben")
        assert (
            memory._search.synced().words.search(
                "violin milk", 9, memory.catalog.feed.scope_marks(Scope("ana"))
            )
            == before
        )
        assert marks == memory.catalog.feed.scope_marks(Scope("ana"))


@pytest.mark.parametrize("seed", range(3))
def test_it_follows_the_catalog_without_being_built_anew(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is added, reworded and deleted, here and by another process, it says what a new one says."""
    chance = random.Random(seed)
    scope = Scope("ana")
    with open_memory(tmp_path) as memory, open_memory(tmp_path) as other:
        reads: list[int] = []
        texts = memory.catalog.feed.texts
        monkeypatch.setattr(
            memory.catalog.feed, "texts", lambda code, after: reads.append(after) or texts(code, after)
        )

        def said() -> str:
            return " ".join(chance.choice("abcdefgh") for _ in range(chance.randint(1, 6)))

        memory.add([said() for _ in range(20)], user_id="ana")
        memory.add([said() for _ in range(20)], user_id="ana", run_id="1")
        for _ in range(25):
            by = chance.choice([memory, other])
            facts = by.get_all(user_id="ana")
            match chance.choice(["add", "update", "delete", "others"]):
                case "add":
                    by.add(said(), user_id="ana")
                case "update":
                    by.update(chance.choice(facts).id, text=said())
                case "delete":
                    by.delete(chance.choice(facts).id)
                case "others":
                    by.delete(by.add(said(), user_id="ben")[0].id)
            memory.search("a c", user_id="ana")
            stored = {fact.seq: fact.text for fact in memory.get_all(user_id="ana")}
            found = memory._search.synced().words.search("a c", 999, memory.catalog.feed.scope_marks(scope))
            assert found == plain_bm25("a c", stored)
        assert reads.count(0) == 2  # once a scope
        scopes = memory._search.synced().words._scopes
        memory.delete_all(user_id="ana", run_id="1")
        assert len(scopes) == 1
        other.delete_all(user_id="ana")
        memory.add("z", user_id="ben")
        memory.search("z", user_id="ben")
        assert [list(words.postings) for words in scopes.values()] == [["z"]]
