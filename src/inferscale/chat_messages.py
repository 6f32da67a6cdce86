"""Chat messages in OpenAI's form → checked copies, in the form in which vLLM hands them to a chat template.

Knows nothing of facts, templates and tokenizers. Raises InvalidInput for messages that cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inferscale.errors import EmptyText, InvalidInput

_TEXT_PARTS = ("text", "input_text", "output_text")


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked copies in the form vLLM hands to a template, but content as a list of texts."""
    if isinstance(messages, (str, Mapping)) or not messages:
        raise InvalidInput("there are no messages; give a list with at least one message from the user.")
    read = [_read_message(message) for message in messages]
    if read[-1]["role"] not in ("user", "tool"):
        raise InvalidInput(
            f"the last message is from {read[-1]['role']!r}; it must be from the user, or a tool's result."
        )
    question = last_user(read)
    if question < 0:
        raise InvalidInput("there is no message from the user.")
    if not text_of(read[question]).replace("\0", "").strip():
        raise EmptyText("the question (the last user message) is blank.")
    return read


def without_media(messages: Any) -> tuple[Any, int]:
    """Messages without the parts that are no text (images, audio, video), and how many those were.

    The messages themselves where they have none, or are none: `read_messages` says what is wrong with them.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return messages, 0
    shown, num_media = [], 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, Sequence) and not isinstance(content, str):
            kept = [part for part in content if not _is_media(part)]
            num_media += len(content) - len(kept)
            message = {**message, "content": kept}
        shown.append(message)
    return (shown, num_media) if num_media else (messages, 0)


def _is_media(part: object) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind not in _TEXT_PARTS


def last_user(messages: Sequence[Mapping[str, Any]]) -> int:
    """Index of the last message from the user, which is the question; -1 where there is none."""
    roles = [message["role"] for message in messages]
    return len(roles) - 1 - roles[::-1].index("user") if "user" in roles else -1


def _read_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidInput(f"a message is {message!r:.100}; it must be an object with 'role' and 'content'.")
    read: dict[str, Any] = {"role": message["role"], "content": _parts(message.get("content"))}
    if isinstance(message.get("name"), str):
        read["name"] = message["name"]
    if message["role"] == "assistant":
        if message.get("tool_calls"):
            read["tool_calls"] = [_read_tool_call(call) for call in message["tool_calls"]]
        if message.get("reasoning") is not None:
            read["reasoning"] = read["reasoning_content"] = message["reasoning"]
    if message["role"] == "tool" and "tool_call_id" in message:
        read["tool_call_id"] = message["tool_call_id"]
    return read


def _parts(content: object) -> list[str]:
    if content is None or isinstance(content, str):
        content = [content or ""]
    if not isinstance(content, Sequence):
        raise InvalidInput(
            f"a message's content is a {type(content).__name__}; allowed are text and text parts."
        )
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidInput(
                f"a message has a content part of type {kind!r}; memory takes text parts only."
            )
        texts.append(text)
    return [text for text in texts if text]


def _read_tool_call(call: Any) -> dict[str, Any]:
    """A copy with the arguments as an object, {} where they are none; as in vLLM."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidInput("an entry of tool_calls is no function call; it must have an object 'function'.")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = None
    function = {**call["function"], "arguments": arguments if isinstance(arguments, Mapping) else {}}
    return {**call, "function": function}


def developer_to_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What vLLM does for templates that do not know the developer role: merged system messages."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    texts = (text_of(m) for m in messages if m["role"] in ("system", "developer"))
    merged = "\n\n".join(text for text in texts if text)
    rest = [m for m in messages if m["role"] not in ("system", "developer")]
    return [{"role": "system", "content": [merged]}, *rest]


def text_of(message: Mapping[str, Any]) -> str:
    return "\n".join(message["content"])


def prepend(message: dict[str, Any], text: str) -> None:
    """Put `text` in front of a message's content; the parts of the original are left alone."""
    first, *others = message["content"] or [""]
    message["content"] = [text + first, *others]
