"""What a new fact does to those that are there: ADD, UPDATE, DELETE or NONE, and carrying it out.

A fact is compared with the most similar ones of exactly its scope, and a model sees and can name no others.
What says the same in the same words, or in others with the same numbers, names and negations, is not asked
about.
A model that gives no usable answer ends nothing: the fact is stored beside the others.

Each decision is made under the lock of its scope and written in one transaction, and only where the scope
says what it said when it was decided: so threads and processes that are told the same at a time store it
once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import Added, Catalog, Deletion, ScopeEpoch
from inferscale.catalog.expiry import ends_before
from inferscale.catalog.results import SimilarFacts
from inferscale.config import ExtractionConfig
from inferscale.errors import ExtractionError, InferScaleError, UnknownFact
from inferscale.extraction.llm import ExtractionModel, asked
from inferscale.extraction.prompts import (
    DECISION_TOKENS,
    MAX_FACT_CHARS,
    MAX_REASON_CHARS,
    Prompts,
    ShownFact,
)
from inferscale.extraction.wording import differ_in_detail, is_merged, plain
from inferscale.facts import ChangeEvent, Fact, Scope, Turn
from inferscale.turns import clean_text

_log = logging.getLogger(__name__)

_WARMER = 0.5
_MAX_ROUNDS = 8
"""Decisions about one fact while other processes write to its scope."""
_NO_ANSWER = "the model did not say what it changes"

Embed = Callable[[Sequence[str]], NDArray[np.float32]]
"""Texts → float32 [n, dim], of length 1."""


class _Decision(NamedTuple):
    """place: of the stored fact that is meant, from 0; None for ADD. text: another wording to store."""

    event: str
    place: int | None = None
    text: str | None = None
    reason: str | None = None


class _Outcome(NamedTuple):
    event: ChangeEvent
    fact: Fact | None
    retired: Deletion | None


class _ScopeLock:
    """A lock that can be kept for as long as somebody uses it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class ScopeLocks:
    """One lock for each exact scope that is in use."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: weakref.WeakValueDictionary[Scope, _ScopeLock] = weakref.WeakValueDictionary()

    def of(self, scope: Scope) -> _ScopeLock:
        with self._guard:
            found = self._locks.get(scope)
            if found is None:
                found = self._locks[scope] = _ScopeLock()
            return found


@dataclass(frozen=True)
class Changer:
    """label: what is embedded of a turn (`search.embedding_text`)."""

    catalog: Catalog
    model: ExtractionModel
    embed: Embed
    label: Callable[[Turn], str]
    locks: ScopeLocks
    config: ExtractionConfig
    prompts: Prompts

    def store(self, scope: Scope, facts: Sequence[Turn], raw: Sequence[Turn], warning: str | None) -> Added:
        """Decide on each fact in order and carry it out; store `raw` as it is, but not twice.

        raw goes first: should a fact fail, everything that was said without one is there. Where facts before
        it changed anything, the rest is left out with a warning: their keys have to be told.
        """
        outcomes = self._store_raw(scope, raw, warning) if raw else []
        for place, turn in enumerate(facts):
            lock = self.locks.of(scope)
            try:
                with lock.lock:
                    outcomes.append(self._remember(scope, turn))
            except InferScaleError as error:
                if all(outcome.fact is None and outcome.retired is None for outcome in outcomes):
                    raise
                left = f"{len(facts) - place} of {len(facts)} facts were not stored: {error}"
                warning = left if warning is None else f"{warning} {left}"
                break
        retired = [outcome.retired for outcome in outcomes if outcome.retired is not None]
        keys = dict.fromkeys(key for deletion in retired for key in deletion.keys)
        epochs: dict[Scope, ScopeEpoch] = {
            epoch.scope: epoch for deletion in retired for epoch in deletion.epochs
        }  # of each scope the newest, which is the highest
        ended = {deletion.fact.id for deletion in retired}
        new = [outcome.fact for outcome in outcomes if outcome.fact is not None]
        return Added(
            [fact for fact in new if fact.id not in ended],
            [outcome.event for outcome in outcomes],
            keys,
            epochs.values(),
            warning,
        )

    def _store_raw(self, scope: Scope, raw: Sequence[Turn], reason: str | None) -> list[_Outcome]:
        vectors = self.embed([self.label(turn) for turn in raw])
        outcomes = []
        for applied in self.catalog.add_new_facts(scope, raw, vectors):
            assert applied.fact is not None
            event = ChangeEvent(
                "ADD" if applied.is_new else "NONE", applied.fact.id, applied.fact.text, None, reason
            )
            outcomes.append(_Outcome(event, applied.fact if applied.is_new else None, None))
        return outcomes

    def _remember(self, scope: Scope, turn: Turn) -> _Outcome:
        """Decide and write, anew where another process was faster."""
        vector = self.embed([self.label(turn)])[0]
        for _ in range(_MAX_ROUNDS):
            similar = self.catalog.similar(scope, vector, self.config.max_similar)
            decision = self._decide(turn, similar)
            outcome = self._carry_out(scope, turn, vector, similar, decision)
            if outcome is not None:
                return outcome
        _log.warning("Others keep writing to one scope; a fact is stored without being compared once more")
        applied = self.catalog.apply_inferred(scope, turn, vector)
        assert applied is not None and applied.fact is not None
        return _added(applied.fact, applied.is_new, None)

    def _carry_out(
        self,
        scope: Scope,
        turn: Turn,
        vector: NDArray[np.float32],
        similar: SimilarFacts,
        decision: _Decision,
    ) -> _Outcome | None:
        """None where the scope has changed since it was read."""
        meant = None if decision.place is None else similar.hits[decision.place].fact
        if decision.event == "NONE":
            assert meant is not None
            if not self._outlives(meant, turn):
                return None
            return _Outcome(ChangeEvent("NONE", meant.id, meant.text, None, decision.reason), None, None)
        stored: Turn | None = turn
        if decision.event == "DELETE":
            stored = None
        elif decision.text is not None:
            stored = replace(turn, text=decision.text)
            vector = self.embed([self.label(stored)])[0]
        applied = self.catalog.apply_inferred(
            scope,
            stored,
            None if stored is None else vector,
            mark=similar.mark,
            retires=None if meant is None else meant.id,
            reason=decision.reason,
        )
        if applied is None:
            return None
        if applied.retired is None:  # an addition, or an update to what the fact says already
            assert applied.fact is not None
            return _added(applied.fact, applied.is_new, decision.reason)
        old = applied.retired.fact
        if applied.fact is None:
            event = ChangeEvent("DELETE", old.id, old.text, old.text, decision.reason)
        else:
            event = ChangeEvent(
                "UPDATE", applied.fact.id, applied.fact.text, old.text, decision.reason, old.id
            )
        return _Outcome(event, applied.fact if applied.is_new else None, applied.retired)

    def _outlives(self, fact: Fact, turn: Turn) -> bool:
        """Let a stored fact that says the same expire no sooner; False where it is not there any more."""
        if not ends_before(fact, turn):
            return True
        with suppress(UnknownFact):
            self.catalog.set_expiry(fact.id, turn.expires_at)
            return True
        return False

    def _decide(self, turn: Turn, similar: SimilarFacts) -> _Decision:
        if not similar.hits:
            return _Decision("ADD")
        texts = [hit.fact.text for hit in similar.hits]
        # Without speaker and time: a fact that was said again on another day is the same fact.
        vectors = self.embed([turn.text, *texts])
        scores = [float(score) for score in vectors[1:] @ vectors[0]]
        for place, (text, score) in enumerate(zip(texts, scores, strict=True)):
            if plain(text) == plain(turn.text):
                return _Decision("NONE", place, reason="it is stored already")
            if score >= self.config.same_above and not differ_in_detail(text, turn.text):
                return _Decision("NONE", place, reason="a fact that says the same is stored already")
        asked = [place for place, score in enumerate(scores) if score >= self.config.ask_above]
        if not asked:
            return _Decision("ADD")
        decision = self._ask(turn, [similar.hits[place].fact for place in asked])
        return decision if decision.place is None else decision._replace(place=asked[decision.place])

    def _ask(self, turn: Turn, stored: Sequence[Fact]) -> _Decision:
        """The model's decision; ADD where it gives none that can be used."""
        messages = self.prompts.to_decide(
            ShownFact(turn.text, turn.said_at), [ShownFact(fact.text, fact.said_at) for fact in stored]
        )
        schema = self.prompts.decision_schema(len(stored))
        for attempt in range(self.config.retries + 1):
            try:
                answer = asked(self.model, messages, schema, DECISION_TOKENS, _WARMER if attempt else 0.0)
                return _read_decision(answer, turn, [fact.text for fact in stored])
            except ExtractionError as error:
                _log.info(
                    "attempt %d of %d to compare a fact: %s", attempt + 1, self.config.retries + 1, error
                )
        _log.warning("A fact is stored beside %d similar ones: %s", len(stored), _NO_ANSWER)
        return _Decision("ADD", reason=_NO_ANSWER)


def _added(fact: Fact, is_new: bool, reason: str | None) -> _Outcome:
    event = ChangeEvent("ADD" if is_new else "NONE", fact.id, fact.text, None, reason)
    return _Outcome(event, fact if is_new else None, None)


def _read_decision(answer: Mapping[str, Any], turn: Turn, stored: Sequence[str]) -> _Decision:
    """Raises ExtractionError for an answer that names no event or no fact that was shown."""
    event, number, text, reason = (answer.get(name) for name in ("event", "id", "text", "reason"))
    why = " ".join(clean_text(reason).split())[:MAX_REASON_CHARS] if isinstance(reason, str) else ""
    if event == "ADD":
        return _Decision("ADD", reason=why or None)
    if event not in ("UPDATE", "DELETE", "NONE"):
        raise ExtractionError("the model's answer names no event.")
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= len(stored):
        raise ExtractionError("the model's answer names a fact that it was not shown.")
    merged = None
    if event == "UPDATE" and isinstance(text, str) and len(text) <= MAX_FACT_CHARS:
        cleaned = " ".join(clean_text(text).split())
        merged = cleaned if is_merged(cleaned, stored[number - 1], turn.text) else None
    return _Decision(str(event), number - 1, merged, why or None)
