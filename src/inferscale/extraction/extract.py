"""A conversation → short facts, each with the line that said it. Knows no storage.

What a user says can become a fact. What an assistant says is shown, so that a "yes" can be understood, but
is no source; memories that this product wrote into a prompt are taken out. Who said a fact and when is not
left to the model: it names the line, and the rest is that line's.

An answer is refused where it cannot be true: no JSON, a line that is none, a year that nobody said. A refused
or empty answer is asked for again at a higher temperature; then the turns themselves are kept.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, NamedTuple

from inferscale.catalog.rows import metadata_json
from inferscale.config import ExtractionConfig
from inferscale.dates import read_date
from inferscale.errors import ExtractionError, InvalidInput
from inferscale.extraction.dates import day_text, resolve
from inferscale.extraction.llm import ExtractionModel, asked
from inferscale.extraction.prompts import (
    EXTRACTION_TOKENS,
    MAX_FACT_CHARS,
    MAX_FACTS,
    MAX_METADATA_CHARS,
    Line,
    Prompts,
)
from inferscale.extraction.wording import plain, years
from inferscale.facts import Turn
from inferscale.prompt import HEADING, TAIL_HEADING
from inferscale.turns import clean_text, read_turns

_log = logging.getLogger(__name__)

_WARMER = 0.5
"""Temperature of a second attempt: at 0 a model would answer the same again."""
_READ_FIELDS = ("line", "text")
_RECALLED = re.compile(
    "(?:"
    + "|".join(map(re.escape, (HEADING, TAIL_HEADING)))
    + r")[^\S\n]*(?:\r?\n(?:- |    )[^\n]*)*(?:\r?\n)*"
)


class Said(NamedTuple):
    """One turn of a conversation. is_source: whether facts may come from it."""

    turn: Turn
    is_source: bool


class Extraction(NamedTuple):
    """facts: in the order in which they were said. raw: turns that no facts could be made of, to be stored as
    they are. warning: why, where there are any."""

    facts: list[Turn]
    raw: list[Turn]
    warning: str | None = None


@dataclass(frozen=True)
class Extractor:
    """today: the day of what has no `said_at`."""

    model: ExtractionModel
    config: ExtractionConfig
    prompts: Prompts
    today: Callable[[], date] = date.today

    def extract(self, talk: Sequence[Said]) -> Extraction:
        """The facts of a conversation. Never raises for what the model does."""
        facts: list[Turn] = []
        raw: list[Turn] = []
        problems: list[str] = []
        for part in self._parts(_without_recalled(talk)):
            try:
                facts += self._facts_of(part)
            except ExtractionError as error:
                raw += [said.turn for said in part]
                problems.append(str(error))
        if not raw:
            return Extraction(facts, raw)
        warning = (
            f"{len(raw)} turns are stored as they were said, since no facts could be extracted: {problems[0]}"
        )
        _log.warning("%s", warning)
        return Extraction(facts, raw, warning)

    def _parts(self, talk: Sequence[Said]) -> Iterator[list[Said]]:
        """The conversation in parts that fit into one prompt; those without a source are passed over."""
        part: list[Said] = []
        num_chars = 0
        for said in talk:
            if part and num_chars + len(said.turn.text) > self.config.max_chars:
                if any(each.is_source for each in part):
                    yield part
                part, num_chars = [], 0
            part.append(said)
            num_chars += len(said.turn.text)
        if any(said.is_source for said in part):
            yield part

    def _facts_of(self, part: Sequence[Said]) -> list[Turn]:
        """Raises ExtractionError once every attempt has failed."""
        days = [self._day(said.turn) for said in part]
        texts = [
            said.turn.text if day is None else resolve(said.turn.text, day)
            for said, day in zip(part, days, strict=True)
        ]
        sources = [place for place, said in enumerate(part) if said.is_source]
        numbers = {place: number for number, place in enumerate(sources, start=1)}
        lines = [
            Line(numbers.get(place), said.turn.speaker, text)
            for place, (said, text) in enumerate(zip(part, texts, strict=True))
        ]
        known = [day for day in days if day is not None]
        day = day_text(known[0]) if known else None
        messages = self.prompts.to_extract(lines, day)
        schema = self.prompts.extraction_schema(list(numbers.values()))
        told = " ".join([*texts, *map(str, known), *(said.turn.said_at or "" for said in part)])
        failure = ExtractionError("it was not asked.")
        for attempt in range(self.config.retries + 1):
            try:
                answer = asked(self.model, messages, schema, EXTRACTION_TOKENS, _WARMER if attempt else 0.0)
                found = _read_facts(answer, len(sources), years(told))
            except ExtractionError as error:
                _log.info(
                    "attempt %d of %d to extract facts: %s", attempt + 1, self.config.retries + 1, error
                )
                failure = error
                continue
            return [
                _turn_of(item, part[sources[item.line - 1]].turn, days[sources[item.line - 1]])
                for item in found
            ]
        raise failure

    def _day(self, turn: Turn) -> date | None:
        return self.today() if turn.said_at is None else read_date(turn.said_at)


class _Item(NamedTuple):
    line: int
    text: str
    metadata: dict[str, Any]


def _read_facts(answer: Mapping[str, Any], num_lines: int, known_years: frozenset[str]) -> list[_Item]:
    """Raises ExtractionError for an answer that has another shape, or that cannot be true."""
    facts = answer.get("facts")
    if not isinstance(facts, list) or len(facts) > 4 * MAX_FACTS:
        raise ExtractionError("the model's answer has no list of facts.")
    if not facts and answer.get("nothing") is not True:
        raise ExtractionError("the model found no fact, and did not say that there is none.")
    items: dict[str, _Item] = {}
    for fact in facts:
        text, line = (fact.get("text"), fact.get("line")) if isinstance(fact, dict) else (None, None)
        if not isinstance(text, str) or not plain(clean_text(text)) or len(text) > MAX_FACT_CHARS:
            raise ExtractionError("the model's answer holds a fact without a text that can be stored.")
        if isinstance(line, bool) or not isinstance(line, int) or not 1 <= line <= num_lines:
            raise ExtractionError("the model's answer names a line that is none.")
        text = " ".join(clean_text(text).split())
        if not years(text) <= known_years:
            raise ExtractionError("the model's answer names a year that nobody said.")
        more = {name: value for name, value in fact.items() if name not in _READ_FIELDS}
        _check_metadata(more)
        items.setdefault(plain(text), _Item(line, text, more))
    return sorted(items.values(), key=lambda item: item.line)


def _check_metadata(metadata: dict[str, Any]) -> None:
    """What a model says beside a fact is stored with it. Raises ExtractionError for what cannot be."""
    try:
        [turn] = read_turns(Turn("a fact", metadata=metadata))
        if len(metadata_json(turn.metadata)) > MAX_METADATA_CHARS:
            raise ExtractionError("the model's answer says too much beside a fact.")
    except InvalidInput as error:
        raise ExtractionError("the model's answer says something beside a fact that is no JSON.") from error


def _turn_of(item: _Item, source: Turn, day: date | None) -> Turn:
    """Metadata that the caller gave are not the model's to change."""
    text = item.text if day is None else resolve(item.text, day)
    return replace(source, text=text, metadata={**item.metadata, **source.metadata})


def _without_recalled(talk: Sequence[Said]) -> list[Said]:
    """The conversation without memories that were written into it; turns that say nothing else go."""
    kept = [
        said if _RECALLED.search(said.turn.text) is None
        else said._replace(turn=replace(said.turn, text=_RECALLED.sub("", said.turn.text)))
        for said in talk
    ]  # fmt: skip
    return [said for said in kept if said.turn.text.strip()]
