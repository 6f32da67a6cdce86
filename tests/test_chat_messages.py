"""Parts of messages that memory cannot read are left to vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from inferscale.chat_messages import read_messages, without_media

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}


def test_media_are_left_out_and_counted() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [IMAGE, {"type": "text", "text": "What is this?"}, SOUND], "name": "ana"},
    ]
    before = str(messages)
    shown, num_media = without_media(messages)
    assert num_media == 2
    assert shown == [messages[0], {**messages[1], "content": [{"type": "text", "text": "What is this?"}]}]
    assert str(messages) == before
    assert [message["content"] for message in read_messages(shown)] == [["Be brief."], ["What is this?"]]


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user", "content": "hi"}], [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}],
     [], None, "text", 5, [5, None], [{"role": "user"}], [{"content": [{"no": "type"}, {"type": 5}]}]],
)  # fmt: skip
def test_others_stay_as_they_are(messages: Any) -> None:
    assert without_media(messages) == (messages, 0)
