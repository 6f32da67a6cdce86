"""`inferscale bench recall`: how many of the turns that answer a question are among the k best found.

On LoCoMo (Maharana et al. 2024), whose questions name the turns that hold their answer. Every turn of
a conversation is a fact of one scope, embedded and searched as `Memory` does it. Recall of a question
is the share of its evidence among the k best facts; the rows hold the mean over all questions, for each
way of ranking (`mode`: semantic, or hybrid with the settings in `config`). Also the time of one query: for
its vector, and for the search, alone and among 100,000 facts of others.

Left out: category 5 (the conversation does not answer them), questions without evidence, and
evidence that names no turn; some strings name several. All of it is counted in `config`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.bench.conversation import read_conversation
from inferscale.bench.harness import BenchRun, Row, Say, command, environment
from inferscale.config import RetrievalConfig
from inferscale.errors import InvalidInput
from inferscale.facts import Turn
from inferscale.retrieval import Embedder, HybridSearch, LexicalIndex, Query, VectorIndex, open_embedder
from inferscale.search import embedding_text

SEMANTIC = RetrievalConfig(lexical_weight=0.0, recency_weight=0.0, duplicate_similarity=None)
"""Ranking by meaning alone."""
NUM_OTHERS = 100_000
"""Facts of other scopes in the index, for the time of a search in a large catalog."""
_NUM_TIMED = 100
_OTHERS = 0  # scope code of the others; conversations have 1, 2, …
_TRAP = 5
_RESAMPLES = 1000


class Question(NamedTuple):
    """A question about one conversation. evidence: places of the turns that answer it."""

    conversation: int
    text: str
    category: int
    evidence: frozenset[int]


@dataclass
class RecallSet:
    """Conversations and their questions; what was left out, by reason."""

    conversations: list[tuple[Turn, ...]] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    num_without_evidence: int = 0
    num_unknown_evidence: int = 0

    @property
    def num_turns(self) -> int:
        return sum(len(turns) for turns in self.conversations)


def run_recall(
    conversation_path: Path,
    embedders: Sequence[str | Embedder],
    ks: Sequence[int],
    out: Path | None,
    say: Say,
    retrievals: Sequence[RetrievalConfig] = (SEMANTIC, RetrievalConfig()),
) -> list[Row]:
    """Measure each embedder on all conversations of a LoCoMo file; append rows to `out`, return them.

    embedders: as in `MemoryConfig.embedder` ("default" for its default), or open ones. retrievals: ways of
    ranking. Raises InvalidInput for a file that is none, or for a k below 1.
    """
    if not ks or min(ks) < 1 or not embedders:
        raise InvalidInput(
            f"ks is {list(ks)} and embedders {list(embedders)}; one of each is needed, k from 1."
        )
    data = read_questions(conversation_path)
    say(f"{len(data.questions)} questions about {data.num_turns} turns")
    rows: list[Row] = []
    run_id = BenchRun("recall", "", None).id
    for given in embedders:
        embedder = _opened(given, say)
        config = {
            "command": command(),
            "baseline": "mode semantic: exact search over the vectors of the embedder in `model`, top k of "
            "one conversation",
            "file": conversation_path.name,
            "turns": data.num_turns,
            "left_out": {
                "questions_without_evidence": data.num_without_evidence,
                "evidence_without_turn": data.num_unknown_evidence,
            },
            "dim": embedder.dim,
            "environment": environment(),
        }
        run = BenchRun("recall", embedder.name, out, config, id=run_id)
        _measure(run, embedder, data, sorted(ks), retrievals, say)
        rows += run.rows
    return rows


def read_questions(path: Path) -> RecallSet:
    """Questions of categories 1 to 4 whose evidence names turns. Raises InvalidInput."""
    read_conversation(path, 1)  # refuses what is no LoCoMo file
    data = RecallSet()
    for number, sample in enumerate(json.loads(path.read_text(encoding="utf-8")), start=1):
        turns = read_conversation(path, number).turns
        places = {turn.metadata["dia_id"]: place for place, turn in enumerate(turns)}
        data.conversations.append(turns)
        for qa in sample["qa"]:
            if qa.get("category") != _TRAP:
                _add_question(data, qa, places)
    if not data.questions:
        raise InvalidInput(f"{path} has no question whose evidence names a turn; give locomo10.json.")
    return data


def _add_question(data: RecallSet, qa: dict[str, Any], places: dict[str, int]) -> None:
    found: set[int] = set()
    for text in qa.get("evidence") or []:
        known = {places[name] for name in turn_ids(str(text)) if name in places}
        data.num_unknown_evidence += not known
        found |= known
    if found:
        question = Question(
            len(data.conversations), str(qa["question"]), int(qa["category"]), frozenset(found)
        )
        data.questions.append(question)
    else:
        data.num_without_evidence += 1


def turn_ids(evidence: str) -> list[str]:
    """`"D8:6; D9:17"` → D8:6 and D9:17. Slips such as `D:11:26` and `D30:05` are read as meant."""
    return [f"D{int(session)}:{int(turn)}" for session, turn in re.findall(r"D:?(\d+):(\d+)", evidence)]


def _opened(embedder: str | Embedder, say: Say) -> Embedder:
    if not isinstance(embedder, str):
        return embedder
    return open_embedder(None if embedder == "default" else embedder, progress=say)


def _measure(
    run: BenchRun,
    embedder: Embedder,
    data: RecallSet,
    ks: Sequence[int],
    retrievals: Sequence[RetrievalConfig],
    say: Say,
) -> None:
    index, words = VectorIndex(embedder.dim), LexicalIndex(partial(_texts, data))
    first = 1
    start_s = time.perf_counter()
    for code, turns in enumerate(data.conversations, start=1):
        vectors = embedder.embed([embedding_text(turn) for turn in turns])
        index.add(range(first, first + len(turns)), [code] * len(turns), vectors)
        first += len(turns)
    rate = data.num_turns / (time.perf_counter() - start_s)
    queries = embedder.embed([question.text for question in data.questions])
    run.add("embed_rate", "facts/s", [rate])
    embed_ms = [_timed_ms(embedder.embed, [q.text]) for q in data.questions[:_NUM_TIMED]]
    run.add("embed_query", "ms", embed_ms)
    searches = [HybridSearch(index, words, retrieval) for retrieval in retrievals]
    for search in searches:
        _add_recall(run, search, data, _found(search, data, queries, ks), ks, say)
    alone = [_add_search_ms(run, search, data, queries, ks[-1], 0) for search in searches]
    others = np.random.default_rng(0).standard_normal((NUM_OTHERS, embedder.dim), dtype=np.float32)
    index.add(range(first, first + NUM_OTHERS), [_OTHERS] * NUM_OTHERS, others)
    among = [_add_search_ms(run, search, data, queries, ks[-1], NUM_OTHERS) for search in searches]
    say(f"{embedder.name}: one query embedded in {np.median(embed_ms):.2f} ms")
    for search, lone_ms, among_ms in zip(searches, alone, among, strict=True):
        say(f"{_named(search)}: searched in {lone_ms:.2f} ms, among {NUM_OTHERS} others in {among_ms:.2f} ms")


def _texts(data: RecallSet, code: int, after: int) -> list[tuple[int, str]]:
    """What the turns of a conversation say, as `lexical.ReadTexts`."""
    first = _first_of(data, code)
    texts = [embedding_text(turn) for turn in data.conversations[code - 1]]
    return [(seq, text) for seq, text in enumerate(texts, start=first) if seq > after]


def _first_of(data: RecallSet, code: int) -> int:
    """Number of the first turn of a conversation."""
    return 1 + sum(len(turns) for turns in data.conversations[: code - 1])


def _query(data: RecallSet, question: Question, vector: NDArray[np.float32]) -> Query:
    code, num_turns = question.conversation, len(data.conversations[question.conversation - 1])
    return Query(question.text, vector, [(code, 0, _first_of(data, code) + num_turns - 1, num_turns)])


def _found(
    search: HybridSearch, data: RecallSet, queries: NDArray[np.float32], ks: Sequence[int]
) -> dict[int, list[list[int]]]:
    """k → places in its conversation of the k best turns for each question, best first."""
    asked = [_query(data, *item) for item in zip(data.questions, queries, strict=True)]
    firsts = [_first_of(data, question.conversation) for question in data.questions]
    return {
        k: [
            [hit.id - first for hit in search.search(query, k)]
            for query, first in zip(asked, firsts, strict=True)
        ]
        for k in ks
    }


def _mode(search: HybridSearch) -> str:
    return "hybrid" if search.config.lexical_weight or search.config.recency_weight else "semantic"


def _named(search: HybridSearch) -> str:
    config = search.config
    weights = (
        f"words {config.lexical_weight:g}, age {config.recency_weight:g}, constant {config.rank_constant}"
    )
    return f"{_mode(search)} ({weights}, repetitions {config.duplicate_similarity})"


def _add_recall(
    run: BenchRun,
    search: HybridSearch,
    data: RecallSet,
    found: dict[int, list[list[int]]],
    ks: Sequence[int],
    say: Say,
) -> None:
    categories = np.array([question.category for question in data.questions])
    means = []
    for k in ks:
        recalls = np.array(
            [
                len(question.evidence.intersection(places[:k])) / len(question.evidence)
                for question, places in zip(data.questions, found[k], strict=True)
            ]
        )
        by_category = {
            str(category): round(float(recalls[categories == category].mean()), 4)
            for category in sorted(set(categories.tolist()))
        }
        shares = {"questions": len(recalls), "any": round(float((recalls > 0).mean()), 4)}
        mean = float(recalls.mean())
        run.add(
            "recall",
            "share",
            [mean],
            k=k,
            mode=_mode(search),
            ci95=mean_interval(recalls),
            config={**shares, "by_category": by_category, "retrieval": asdict(search.config)},
        )
        means.append(f"@{k} {mean:.4f}")
    say(f"{run.model}, {_named(search)}: recall {', '.join(means)}")


def mean_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean; deterministic."""
    generator = np.random.default_rng(0)
    means = [values[generator.integers(0, len(values), len(values))].mean() for _ in range(_RESAMPLES)]
    return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


def _add_search_ms(
    run: BenchRun,
    search: HybridSearch,
    data: RecallSet,
    queries: NDArray[np.float32],
    k: int,
    num_others: int,
) -> float:
    """Time searches and return their median."""
    timed = zip(data.questions[:_NUM_TIMED], queries[:_NUM_TIMED], strict=True)
    times = [_timed_ms(search.search, _query(data, *item), k) for item in timed]
    config = {"other_facts": num_others, "retrieval": asdict(search.config)}
    run.add("search", "ms", times, k=k, mode=_mode(search), config=config)
    return float(np.median(times))


def _timed_ms(call: Any, *arguments: Any) -> float:
    start_s = time.perf_counter()
    call(*arguments)
    return (time.perf_counter() - start_s) * 1e3
