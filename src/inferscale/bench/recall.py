"""`inferscale bench recall`: how many of the turns that answer a question are among the k best found.

On LoCoMo (Maharana et al. 2024), whose questions name the turns that hold their answer. Every turn of
a conversation is a fact of one scope, embedded and searched as `Memory` does it. Recall of a question
is the share of its evidence among the k best facts; the rows hold the mean over all questions. Also
the time of one query: for its vector, and for the search, alone and among 100,000 facts of others.

Left out: category 5 (the conversation does not answer them), questions without evidence, and
evidence that names no turn; some strings name several. All of it is counted in `config`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.bench.conversation import read_conversation
from inferscale.bench.harness import BenchRun, Row, Say, command, environment
from inferscale.errors import InvalidInput
from inferscale.facts import Turn
from inferscale.memory import embedding_text
from inferscale.retrieval import Embedder, VectorIndex, open_embedder

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
) -> list[Row]:
    """Measure each embedder on all conversations of a LoCoMo file; append rows to `out`, return them.

    embedders: as in `MemoryConfig.embedder` ("default" for its default), or open ones. Raises
    InvalidInput for a file that is none, or for a k below 1.
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
            "baseline": "exact search over the vectors of the embedder in `model`, top k of one conversation",
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
        _measure(run, embedder, data, sorted(ks), say)
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


def _measure(run: BenchRun, embedder: Embedder, data: RecallSet, ks: Sequence[int], say: Say) -> None:
    index = VectorIndex(embedder.dim)
    first = 1
    start_s = time.perf_counter()
    for code, turns in enumerate(data.conversations, start=1):
        vectors = embedder.embed([embedding_text(turn) for turn in turns])
        index.add(range(first, first + len(turns)), [code] * len(turns), vectors)
        first += len(turns)
    rate = data.num_turns / (time.perf_counter() - start_s)
    queries = embedder.embed([question.text for question in data.questions])
    _add_recall(run, data, _found(index, data, queries, ks[-1]), ks, say)
    run.add("embed_rate", "facts/s", [rate])
    embed_ms = [_timed_ms(embedder.embed, [q.text]) for q in data.questions[:_NUM_TIMED]]
    run.add("embed_query", "ms", embed_ms)
    alone = _search_ms(index, data, queries, ks[-1])
    run.add("search", "ms", alone, k=ks[-1], config={"other_facts": 0})
    others = np.random.default_rng(0).standard_normal((NUM_OTHERS, embedder.dim), dtype=np.float32)
    index.add(range(first, first + NUM_OTHERS), [_OTHERS] * NUM_OTHERS, others)
    among = _search_ms(index, data, queries, ks[-1])
    run.add("search", "ms", among, k=ks[-1], config={"other_facts": NUM_OTHERS})
    say(
        f"{embedder.name}: one query embedded in {np.median(embed_ms):.2f} ms, searched in "
        f"{np.median(alone):.2f} ms, among {NUM_OTHERS} facts of others in {np.median(among):.2f} ms"
    )


def _found(index: VectorIndex, data: RecallSet, queries: NDArray[np.float32], k: int) -> list[list[int]]:
    """Places in its conversation of the k best turns for each question, best first."""
    starts = np.cumsum([1, *(len(turns) for turns in data.conversations)])
    return [
        [
            hit.id - int(starts[question.conversation - 1])
            for hit in index.search(vector, k, [question.conversation])
        ]
        for question, vector in zip(data.questions, queries, strict=True)
    ]


def _add_recall(
    run: BenchRun, data: RecallSet, found: Sequence[Sequence[int]], ks: Sequence[int], say: Say
) -> None:
    categories = np.array([question.category for question in data.questions])
    means = []
    for k in ks:
        recalls = np.array(
            [
                len(question.evidence.intersection(places[:k])) / len(question.evidence)
                for question, places in zip(data.questions, found, strict=True)
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
            ci95=mean_interval(recalls),
            config={**shares, "by_category": by_category},
        )
        means.append(f"@{k} {mean:.3f}")
    say(f"{run.model}: recall {', '.join(means)}")


def mean_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean; deterministic."""
    generator = np.random.default_rng(0)
    means = [values[generator.integers(0, len(values), len(values))].mean() for _ in range(_RESAMPLES)]
    return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


def _search_ms(index: VectorIndex, data: RecallSet, queries: NDArray[np.float32], k: int) -> list[float]:
    return [
        _timed_ms(index.search, vector, k, [question.conversation])
        for question, vector in zip(data.questions[:_NUM_TIMED], queries[:_NUM_TIMED], strict=True)
    ]


def _timed_ms(call: Any, *arguments: Any) -> float:
    start_s = time.perf_counter()
    call(*arguments)
    return (time.perf_counter() - start_s) * 1e3
