"""A model that reads an answer beside the gold one and says whether it is right.

Two styles, as both are in use, in words of our own: `strict` wants all of the gold answer, and nothing that
contradicts it; `generous` wants the same thing to be meant. Any server with OpenAI's chat completions will
do. An answer is judged once for each style: the same words get the same verdict in every mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from typing import Any, NamedTuple

import httpx

from inferscale.bench.options import JudgeOptions
from inferscale.bench.record_cache import RecordCache, record_key
from inferscale.errors import ExtractionError, InvalidInput
from inferscale.extraction import OpenAIModel

STYLES = {
    "strict": "Mark it correct only if it states everything that the expected answer states, and nothing "
    "that contradicts it. A date, a number, a name or a place must be the same; the form in which it is "
    "written does not matter. An answer that is vaguer than the expected one, incomplete or evasive is "
    "incorrect.",
    "generous": "Mark it correct if it means the same thing as the expected answer or names the main point "
    "of it. It may be longer, shorter or in other words. A date or a period counts if it means about the "
    "same time, whether it is written as a date or relative to another. Mark it incorrect only if it means "
    "something else or says nothing of use.",
}
_TASK = (
    "You mark answers to questions about a conversation between two people. You see a question, the expected "
    "answer, and the answer to be marked. Judge by the expected answer alone, even where you know better. "
    "{}\n"
    "Give your reason in one sentence, then the mark."
)
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "correct": {"type": "boolean"}},
    "required": ["reason", "correct"],
    "additionalProperties": False,
}
_MAX_TOKENS = 256
_ATTEMPTS = 4
_VERSION = 1

Progress = Callable[[int, int], None]
"""(verdicts that are there, of how many)"""


class Judged(NamedTuple):
    """What is to be marked; gold and answer as they are."""

    question: str
    gold: str
    answer: str


class Judge:
    """Marks answers. cache: keeps every verdict. http_client, wait: instead of real ones."""

    def __init__(
        self,
        options: JudgeOptions,
        cache: RecordCache,
        *,
        http_client: httpx.Client | None = None,
        wait: Callable[[float], None] | None = None,
    ) -> None:
        check_styles(options.styles)
        self.options = options
        self._cache = cache
        self._http = http_client
        self._wait = time.sleep if wait is None else wait

    def verdicts(
        self, style: str, judged: Iterable[Judged], progress: Progress | None = None
    ) -> dict[Judged, bool]:
        """Whether each is right. A blank answer is wrong without being asked for.

        Raises ExtractionError where the model gives no verdict; those that it gave are in the cache.
        """
        options = self.options
        wanted = list(dict.fromkeys(judged))
        found = {one: False for one in wanted if not one.answer.strip()}
        for one in wanted:
            record = self._cache.get(self._key(style, one))
            if record is not None:
                found[one] = bool(record["correct"])
        left = [one for one in wanted if one not in found]
        if not left:
            return found
        model = OpenAIModel(
            options.url, options.model, api_key=options.api_key, http_client=self._http, called="judge"
        )
        with closing(model), ThreadPoolExecutor(options.in_flight) as pool:
            asked = {pool.submit(self._ask, model, style, one): one for one in left}
            try:
                for future in as_completed(asked):
                    one, correct = asked[future], future.result()
                    found[one] = correct
                    record = {"judge": options.model, "style": style, **one._asdict(), "correct": correct}
                    self._cache.put(self._key(style, one), record)
                    if progress is not None:
                        progress(len(found), len(wanted))
            finally:
                pool.shutdown(cancel_futures=True)
        return found

    def _key(self, style: str, one: Judged) -> str:
        parts = {"judge": self.options.model, "task": _TASK.format(STYLES[style]), **one._asdict()}
        return record_key(_VERSION, parts)

    def _ask(self, model: OpenAIModel, style: str, one: Judged) -> bool:
        said = f"Question: {one.question}\nExpected answer: {one.gold}\nAnswer to be marked: {one.answer}"
        messages = [
            {"role": "system", "content": _TASK.format(STYLES[style])},
            {"role": "user", "content": said},
        ]
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._wait(2.0 ** (attempt - 1))  # servers that are busy say so
            try:
                answer = model.complete(messages, _SCHEMA, _MAX_TOKENS, 0.5 if attempt > 1 else 0.0)
                if isinstance(answer.get("correct"), bool):
                    return bool(answer["correct"])
                failure = ExtractionError("the judge's answer has no mark.")
            except ExtractionError as error:
                failure = error
        raise failure


def check_styles(styles: Iterable[str]) -> None:
    """Raise InvalidInput for styles that are none."""
    unknown = [style for style in styles if style not in STYLES]
    if unknown or not list(styles):
        raise InvalidInput(
            f"the judge's styles are {', '.join(map(repr, styles)) or 'none'}; allowed are "
            f"{' and '.join(STYLES)}, separated by commas."
        )
