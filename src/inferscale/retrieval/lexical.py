"""Ranking by words: BM25 (Robertson and Zaragoza 2009) over the facts of the scopes that a search covers.

Not SQLite's FTS5, though the facts lie in SQLite: its document frequencies are those of the whole table, so
what other users store would change the ranks of a user's facts (and could be learned from them), and its
index keeps deleted words in the file (`secure-delete` needs SQLite 3.42). Here every exact scope has a small
inverted index in memory, built from the catalog when it is first searched; frequencies are summed over the
scopes covered and no others. Nothing is written to disk.

An index says the same as the catalog as long as the scope's epoch and its last fact are the same: new facts
are added to it, and after a deletion or rewording those facts are taken out or read again. The indexes used
least recently are dropped beyond a bound. Words are runs of letters and digits, case folded; of scripts
without spaces, pairs of characters. Knows nothing of vectors and storage.
"""

from __future__ import annotations

import math
import re
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_FACTS = 100_000
"""Facts in all indexes together. A search that covers more has no ranking by words."""

_ALL = 2**62
"""Behind every change."""
_K1 = 0.9  # both as Anserini has them; facts are short
_B = 0.4
_WORD = re.compile(
    r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
    r"|[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff_]+"
)
_DENSE = re.compile(
    r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)

ReadTexts = Callable[[int, int], Iterable[tuple[int, str]]]
"""(code of an exact scope, number) → number and text of its facts above that number, rising."""


class Changes(NamedTuple):
    """How an index learns of deletions and rewordings, so that it need not be built anew.

    since: number of a change → number of the last one, and the facts of anybody that were removed or reworded
    behind it. texts: (code, numbers) → number and text of those of the facts that the scope holds.
    """

    since: Callable[[int], tuple[int, Sequence[int]]]
    texts: Callable[[int, Sequence[int]], Iterable[tuple[int, str]]]


class Mark(NamedTuple):
    """How far a scope is; see `catalog.results.ScopeMark`."""

    code: int
    epoch: int
    last_seq: int
    num_facts: int


def words(text: str) -> list[str]:
    """The words of a text in order."""
    found: list[str] = []
    for word in _WORD.findall(text.casefold()):
        if _DENSE.match(word) and len(word) > 1:
            found.extend(word[place : place + 2] for place in range(len(word) - 1))
        else:
            found.append(word)
    return found


class _ScopeWords:
    """One exact scope. postings: word → facts with it, as number, times in the fact, words of the fact.

    facts: number → its words, each once, those of `postings`. change: the last one that it knows.
    """

    def __init__(self, epoch: int, change: int) -> None:
        self.epoch = epoch
        self.change = change
        self.last_seq = 0
        self.num_words = 0
        self.postings: dict[str, array[int]] = {}
        self.facts: dict[int, tuple[str, ...]] = {}

    @property
    def num_facts(self) -> int:
        return len(self.facts)

    def add(self, facts: Iterable[tuple[int, str]]) -> None:
        for seq, text in facts:
            counts = Counter(words(text))
            length = counts.total()
            for word, count in counts.items():
                posting = self.postings.get(word)
                if posting is None:
                    posting = self.postings[word] = array("q")
                posting.extend((seq, count, length))
            self.facts[seq] = tuple(counts)
            self.last_seq = max(self.last_seq, seq)
            self.num_words += length

    def remove(self, seq: int) -> None:
        length = 0
        for word in self.facts.pop(seq):
            posting = self.postings[word]
            place = 3 * int(np.flatnonzero(np.frombuffer(posting, dtype=np.int64)[::3] == seq)[0])
            length = posting[place + 2]
            del posting[place : place + 3]
            if not posting:
                del self.postings[word]
        self.num_words -= length


class LexicalIndex:
    """Safe from several threads. max_facts: see `MAX_FACTS`. changes: without, a scope is built anew."""

    def __init__(
        self, read_texts: ReadTexts, max_facts: int = MAX_FACTS, changes: Changes | None = None
    ) -> None:
        self._read_texts = read_texts
        self._changes = changes
        self._max_facts = max_facts
        self._lock = threading.Lock()
        self._scopes: OrderedDict[int, _ScopeWords] = OrderedDict()
        self._num_facts = 0

    def covers(self, marks: Sequence[tuple[int, int, int, int]]) -> bool:
        """Whether a search of these scopes is within the bound."""
        return sum(mark[3] for mark in marks) <= self._max_facts

    def search(
        self,
        query: str,
        k: int,
        marks: Sequence[tuple[int, int, int, int]],
        ids: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> list[int]:
        """Numbers of the k facts that fit the query's words best, best first; none without a common word.

        marks: of the exact scopes to search. ids: only these facts; frequencies are of all.
        """
        wanted = list(dict.fromkeys(words(query)))
        if not wanted or not self.covers(marks):
            return []
        with self._lock:
            scopes = [self._synced(Mark(*mark)) for mark in marks]
            self._drop({mark[0] for mark in marks})
            scored = _scored(wanted, scopes)
        if scored is None:
            return []
        found, scores = scored
        if ids is not None:
            inside = np.isin(found, np.asarray(ids, dtype=np.int64))
            found, scores = found[inside], scores[inside]
        if len(found) > 4 * k > 0:
            best = scores >= np.partition(scores, len(scores) - k)[len(scores) - k]
            found, scores = found[best], scores[best]
        ranked: list[int] = found[np.lexsort((-found, -scores))[:k]].tolist()
        return ranked

    def follow(self) -> None:
        """Take what was removed or reworded out of all scopes, also of those that nobody asks for again."""
        if self._changes is None:
            self.clear()
            return
        with self._lock:
            found: dict[int, tuple[int, Sequence[int]]] = {}
            for code, known in list(self._scopes.items()):
                if known.change not in found:
                    found[known.change] = self._changes.since(known.change)
                _apply(known, code, found[known.change], self._changes)
                if not known.facts:
                    del self._scopes[code]
            self._num_facts = sum(known.num_facts for known in self._scopes.values())

    def clear(self) -> None:
        with self._lock:
            self._scopes.clear()
            self._num_facts = 0

    def _synced(self, mark: Mark) -> _ScopeWords:
        known = self._scopes.pop(mark.code, None)  # an error below leaves none that is half done
        self._num_facts -= 0 if known is None else known.num_facts
        if known is not None and known.epoch != mark.epoch:
            known = None if self._changes is None else self._changed(known, mark, self._changes)
        if known is None:
            # Asked for before the texts: what changes in between is then read again, not missed.
            change = 0 if self._changes is None else self._changes.since(_ALL)[0]
            known = _ScopeWords(mark.epoch, change)
        if known.last_seq < mark.last_seq:
            known.add(self._read_texts(mark.code, known.last_seq))
            known.last_seq = max(known.last_seq, mark.last_seq)  # the last may be a core block
        self._num_facts += known.num_facts
        self._scopes[mark.code] = known
        return known

    def _changed(self, known: _ScopeWords, mark: Mark, changes: Changes) -> _ScopeWords:
        """The scope without what was removed, and with what was reworded as it is now."""
        _apply(known, mark.code, changes.since(known.change), changes)
        known.epoch = mark.epoch
        return known

    def _drop(self, needed: set[int]) -> None:
        """Forget scopes, the one used least recently first, until the bound holds."""
        while self._num_facts > self._max_facts:
            code = next(iter(self._scopes))
            if code in needed:
                return
            self._num_facts -= self._scopes.pop(code).num_facts


def _apply(known: _ScopeWords, code: int, found: tuple[int, Sequence[int]], changes: Changes) -> None:
    """Bring a scope up to the last change. found: as `Changes.since` gives it."""
    known.change, seqs = found
    own = [seq for seq in dict.fromkeys(seqs) if seq in known.facts]
    for seq in own:
        known.remove(seq)
    known.add(changes.texts(code, own) if own else ())


def _scored(
    wanted: Sequence[str], scopes: Sequence[_ScopeWords]
) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Numbers [n] of all facts with any of the words, and their scores [n]; None where there is none."""
    num_facts = sum(scope.num_facts for scope in scopes)
    mean_words = sum(scope.num_words for scope in scopes) / max(1, num_facts)
    all_seqs, all_values = [], []
    for word in wanted:
        postings = [scope.postings[word] for scope in scopes if word in scope.postings]
        if not postings:
            continue
        rows = np.concatenate([np.frombuffer(posting, dtype=np.int64) for posting in postings]).reshape(-1, 3)
        rarity = math.log(1 + (num_facts - len(rows) + 0.5) / (len(rows) + 0.5))
        counts = rows[:, 1]
        norms = counts + _K1 * (1 - _B + _B / mean_words * rows[:, 2])
        all_seqs.append(rows[:, 0])
        all_values.append(rarity * (_K1 + 1) * counts / norms)
    if not all_seqs:
        return None
    seqs, places = np.unique(np.concatenate(all_seqs), return_inverse=True)
    sums = np.bincount(places, weights=np.concatenate(all_values)).astype(np.float64)
    return seqs, sums.round(9)  # equal facts are equal, in whatever order their words were added up
