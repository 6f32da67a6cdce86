"""Extraction by any server with OpenAI's chat completions. Knows nothing of facts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from inferscale.errors import ExtractionError, InvalidConfig
from inferscale.extraction.llm import Message, read_object, with_schema

_MAX_ANSWER_BYTES = 2**20
_REFUSED = (400, 404, 415, 422, 501)
"""What servers answer that do not know `response_format`, or not with a schema."""


class _Answer(NamedTuple):
    status: int
    content: bytes


class OpenAIModel:
    """A model behind `base_url`, such as `http://127.0.0.1:8000/v1`.

    api_key: sent as a bearer token. timeout_s: how long an answer may take, checked whenever a piece of it
    comes. http_client: sends the requests instead of one made here, and is then not closed here. called: what
    errors call it.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        http_client: httpx.Client | None = None,
        called: str = "extraction model",
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise InvalidConfig(f"base_url is {base_url!r}; give one such as 'http://127.0.0.1:8000/v1'.")
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._model = model
        self._timeout_s = timeout_s
        self._called = called
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._is_own = http_client is None
        self._http = httpx.Client(timeout=timeout_s) if http_client is None else http_client
        self._takes_schemas = True

    def complete(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        max_tokens: int,
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        """See `ExtractionModel`. A server that refuses schemas is asked without them from then on."""
        if self._takes_schemas:
            form = {"name": "answer", "schema": schema, "strict": True}
            response = self._post(
                messages,
                max_tokens,
                temperature,
                response_format={"type": "json_schema", "json_schema": form},
            )
            if response.status not in _REFUSED:
                return _read(response, self._called)
        answer = _read(self._post(with_schema(messages, schema), max_tokens, temperature), self._called)
        self._takes_schemas = (
            False  # only now: it may have been the request, not the schema, that was refused
        )
        return answer

    def close(self) -> None:
        if self._is_own:
            self._http.close()

    def _post(self, messages: Sequence[Message], max_tokens: int, temperature: float, **more: Any) -> _Answer:
        body = {
            "model": self._model,
            "messages": [dict(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": temperature,
            **more,
        }
        end_s = time.monotonic() + self._timeout_s
        content = bytearray()
        try:
            with self._http.stream("POST", self._url, json=body, headers=self._headers) as response:
                for piece in response.iter_bytes():  # httpx limits the time between two pieces only
                    content += piece
                    if time.monotonic() > end_s or len(content) > _MAX_ANSWER_BYTES:
                        raise ExtractionError(
                            f"the {self._called} at {self._url} answers too slowly or too much; allowed "
                            f"are {self._timeout_s:g} s and {_MAX_ANSWER_BYTES} bytes."
                        )
        except httpx.HTTPError as error:
            raise ExtractionError(
                f"the {self._called} at {self._url} did not answer: {type(error).__name__}."
            ) from error
        return _Answer(response.status_code, bytes(content))


def _read(response: _Answer, called: str) -> dict[str, Any]:
    if not 200 <= response.status < 300:
        # Without the body, which may quote what was sent.
        raise ExtractionError(f"the {called} answered with HTTP {response.status}.")
    try:
        text = json.loads(response.content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ExtractionError(f"the {called}'s answer is no chat completion.") from error
    if not isinstance(text, str):
        raise ExtractionError(f"the {called}'s answer holds no text.")
    return read_object(text)
