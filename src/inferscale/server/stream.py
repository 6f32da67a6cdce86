"""The answer of a chat with memory as it passes: whole, or event by event.

Of a stream only the last chunk changes. Which one is the last is known only when `[DONE]` follows, so those
that may be (with a finish reason, or with the usage) wait for the next; all others go through as they come.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from inferscale.server import chat
from inferscale.server.http import Message, Send
from inferscale.server.service import MemoryService

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]"
_END = b"\n\n"


class AnswerWithMemory:
    """A `send` for one chat. is_complete: the answer went out whole and was no error."""

    def __init__(self, service: MemoryService, turn: chat.Turn, send: Send) -> None:
        self._service = service
        self._turn = turn
        self._send = send
        self._start: Message | None = None
        self._is_stream = False
        self._buffer = b""
        self._held: bytes | None = None
        self._usage: dict[str, Any] | None = None
        self.is_complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and (self._is_stream or self._start is not None):
            await self._body(message)
        else:
            await self._send(message)

    async def _begin(self, message: Message) -> None:
        kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
        kind = kinds[0] if kinds else b""
        if message["status"] == 200 and kind.startswith(b"text/event-stream"):
            self._is_stream = True
            await self._send(message)
        elif message["status"] == 200 and kind.startswith(b"application/json"):
            self._start = message
        else:
            await self._send(message)

    async def _body(self, message: Message) -> None:
        self._buffer += message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self._is_stream:
            out = await self._events(is_last)
            if out or is_last:
                await self._send({**message, "body": out})
        elif is_last:
            assert self._start is not None
            await self._whole(self._start)

    async def _whole(self, start: Message) -> None:
        raw = self._buffer
        try:
            body = json.loads(raw)
            use = await chat.use_of(self._service, self._turn, body.get("usage"))
            raw = json.dumps(chat.finished_answer(self._turn, body, use)).encode()
            self.is_complete = True
        except (ValueError, AttributeError):
            logger.warning("An answer was no JSON object; it goes out as it is")
        headers = [(k, v) for k, v in start.get("headers", ()) if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(raw)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": raw, "more_body": False})

    async def _events(self, is_last: bool) -> bytes:
        """What of the buffer can go out."""
        out = b""
        while _END in self._buffer:
            event, self._buffer = self._buffer.split(_END, 1)
            if event.startswith(_DONE):
                out += await self._with_memory() + event + _END
                self.is_complete = True
                continue
            out += self._take_held()
            found = None
            if self._turn.ask.store or b'"usage"' in event:
                found = chat.event_of(event)
            if found is not None:
                chat.note_delta(self._turn, found)
                self._usage = found.get("usage") or self._usage
            if b'"finish_reason":"' in event or b'"choices":[]' in event or b'"error"' in event:
                self._held = event  # in a text these quotation marks would have backslashes
            else:
                out += event + _END
        if is_last:
            out += self._take_held() + self._buffer
            self._buffer = b""
        return out

    def _take_held(self) -> bytes:
        held, self._held = self._held, None
        return b"" if held is None else held + _END

    async def _with_memory(self) -> bytes:
        """The last chunk with `memory` in it."""
        held, self._held = self._held, None
        event = None if held is None else chat.event_of(held)
        if event is None or "choices" not in event:  # an error: not an answer
            return b"" if held is None else held + _END
        event["memory"] = await chat.use_of(self._service, self._turn, self._usage)
        chat.hide_params(event)
        return b"data: " + json.dumps(event).encode() + _END
