"""The answer of a chat with memory as it passes: whole, or event by event.

Of a stream only the last chunk changes. Which one is the last is known only when `[DONE]` follows, so those
that may be (with a finish reason, or with the usage) wait for the next; all others go through as they come.
An answer that cannot be read, or whose memory cannot be told, goes out as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from inferscale.server import chat
from inferscale.server.http import Message, Send, log_fault
from inferscale.server.service import MemoryService

_DONE = re.compile(rb"data: ?\[DONE\]")
_END = re.compile(rb"\r?\n\r?\n")
_ENDS_A_CHOICE = re.compile(rb'"finish_reason": ?"')  # in a text the quotation marks would have backslashes
_HAS_NO_CHOICE = re.compile(rb'"choices": ?\[\]')
_ERROR = b'"error"'


class AnswerWithMemory:
    """A `send` for one chat. is_complete: the answer went out whole and was no error.

    may_retry: an error of the server that comes before anything of an answer is kept back, with all that
    follows it; wants_retry tells of it. Until then a stream has not begun for the client.
    """

    def __init__(
        self, service: MemoryService, turn: chat.Turn, send: Send, *, may_retry: bool = False
    ) -> None:
        self._may_retry = may_retry  # nothing has gone out yet
        self._opening: tuple[Message | None, bytes] = (None, b"")  # kept back until the answer begins
        self.wants_retry = False
        self._service = service
        self._turn = turn
        self._send = send
        self._start: Message | None = None
        self._is_stream = False
        self._buffer = bytearray()
        self._held: bytes | None = None
        self._usage: dict[str, Any] | None = None
        self._has_failed = False
        self.is_complete = False

    async def __call__(self, message: Message) -> None:
        if self.wants_retry:
            return
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and (self._is_stream or self._start is not None):
            await self._body(message)
        else:
            await self._send(message)

    async def _begin(self, message: Message) -> None:
        kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
        kind = kinds[0].split(b";")[0].strip().lower() if kinds else b""
        if message["status"] == 200 and kind == b"text/event-stream":
            self._is_stream = True
            if self._may_retry:
                self._opening = (_without_length(message), b"")
            else:
                await self._send(_without_length(message))
        elif message["status"] == 200 and kind == b"application/json":
            self._start = message
        elif self._may_retry and message["status"] >= 500:
            self.wants_retry = True
        else:
            await self._send(message)

    async def _body(self, message: Message) -> None:
        self._buffer += message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self._is_stream:
            out = await self._events(is_last)
            if self.wants_retry:
                return
            start, before = self._opening
            if self._may_retry and not is_last:
                self._opening = (start, before + out)
                return
            if start is not None:
                await self._send(start)
            self._opening = (None, b"")
            if before or out or is_last:
                await self._send({**message, "body": before + out})
        elif is_last:
            assert self._start is not None
            await self._whole(self._start)

    async def _whole(self, start: Message) -> None:
        raw = bytes(self._buffer)
        try:
            body = json.loads(raw)
            if _is_answer(body):
                use = await chat.use_of(self._service, self._turn, body.get("usage"))
                raw = json.dumps(chat.finished_answer(self._turn, body, use)).encode()
                self.is_complete = True
        except Exception as error:  # noqa: BLE001 - the HTTP edge: the engine has answered
            log_fault("The memory of an answer could not be told", error)
        start = _without_length(start)
        start["headers"].append((b"content-length", str(len(raw)).encode()))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": raw, "more_body": False})

    async def _events(self, is_last: bool) -> bytes:
        """What of the buffer can go out. An event keeps the line breaks that end it."""
        out = b""
        start = 0
        for end in _END.finditer(self._buffer):
            out += await self._event(bytes(self._buffer[start : end.end()]))
            start = end.end()
        del self._buffer[:start]
        if is_last:
            out += self._take_held() + bytes(self._buffer)
            self._buffer.clear()
        return out

    async def _event(self, event: bytes) -> bytes:
        """What can go out now that this event is here."""
        if self._may_retry:
            found = chat.event_of(event)
            if found is not None and "error" in found:
                self.wants_retry = True
                return b""
            self._may_retry = found is not None and _only_opens(found)
        if _DONE.match(event):
            return await self._with_memory(self._take_held()) + event
        out = self._take_held()
        if _ERROR in event and "error" in (chat.event_of(event) or {}):
            self._has_failed = True
            return out + event
        if self._turn.wants_answer or b'"usage"' in event:
            self._note(event)
        if _ENDS_A_CHOICE.search(event) or _HAS_NO_CHOICE.search(event):
            self._held = event
            return out
        return out + event

    def _note(self, event: bytes) -> None:
        """Collect the text of the answer, and the last usage."""
        found = chat.event_of(event)
        if found is None:
            return
        try:
            chat.note_delta(self._turn, found)
        except (AttributeError, TypeError) as error:
            log_fault("An event of an answer could not be read", error)
        self._usage = found.get("usage") or self._usage

    def _take_held(self) -> bytes:
        held, self._held = self._held, None
        return held or b""

    async def _with_memory(self, held: bytes) -> bytes:
        """The last chunk with `memory` in it, now that it is known to be the last."""
        event = chat.event_of(held)
        if not _is_answer(event) or self._has_failed:
            return held
        self.is_complete = True
        try:
            event["memory"] = await chat.use_of(self._service, self._turn, self._usage)
            chat.hide_params(event)
        except Exception as error:  # noqa: BLE001 - the HTTP edge: the engine has answered
            log_fault("The memory of an answer could not be told", error)
            return held
        return b"data: " + json.dumps(event).encode() + b"\n\n"


def _only_opens(event: Mapping[str, Any]) -> bool:
    """Whether an event is the chunk that only names the role: it comes with the first token, or the error."""
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return all(
        isinstance(choice, dict)
        and choice.get("finish_reason") is None
        and isinstance(choice.get("delta"), dict)
        and not any(value for name, value in choice["delta"].items() if name != "role")
        for choice in choices
    )


def _is_answer(body: Any) -> TypeGuard[dict[str, Any]]:
    """Whether this is an answer or a chunk of one, and no error."""
    return isinstance(body, dict) and isinstance(body.get("choices"), list) and not body.get("error")


def _without_length(start: Message) -> Message:
    headers = [(name, value) for name, value in start.get("headers", ()) if name.lower() != b"content-length"]
    return {**start, "headers": headers}
