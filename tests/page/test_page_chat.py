"""The chat box in the browser: facts, numbers, both times to the first token, and what goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from page_stub import Stub

if TYPE_CHECKING:
    from page_hands import Hands


def test_a_chat_shows_facts_numbers_and_both_times(stub: Stub, hands: Hands) -> None:
    stub.store("My sister lives in Oslo.", user_id="ana", speaker="Ana", said_at="8 May")
    stub.store("The door is orange.", user_id="ana")
    stub.ttft_s = {"inject": 0.03, "text": 0.4}
    hands.open()
    hands.sees("#model", "tiny-model")
    hands.click("#store")
    hands.type("#question", "Where does my sister live?\n")
    hands.sees(".verdict", "with injection")
    for mode, injected, prefilled in (("inject", "68", "21"), ("text", "0", "89")):
        card = f".answer[data-mode={mode}]"
        hands.sees(f"{card} .answer-text", "You told me this.")
        hands.sees(f"{card} [data-number=injected]", injected)
        hands.sees(f"{card} [data-number=prefilled]", prefilled)
        hands.sees(f"{card} [data-number=missing]", "0")
        hands.sees(f"{card} .numbers summary", "2 facts used")
        hands.sees(f"{card} .facts li:first-child", "Ana, 8 May: My sister lives in Oslo.")
        hands.sees(f"{card} .facts li:first-child .score", "0.40")
    ttft = {mode: hands.text(f"[data-mode={mode}] [data-number=ttft]") for mode in ("inject", "text")}
    inject_ms, text_ms = (int(words.removesuffix("\u00a0ms")) for words in (ttft["inject"], ttft["text"]))
    assert inject_ms >= 30 and text_ms >= 400
    assert [(chat["memory"]["mode"], chat["memory"]["store"]) for chat in stub.chats] == [
        ("inject", False),
        ("text", True),
    ]
    assert {chat["model"] for chat in stub.chats} == {"tiny-model"}
    hands.click(".answer .numbers summary")
    assert hands.findings() == []

    hands.click("#compare")
    hands.type("#question", "And the door?\n")
    hands.sees(".exchange:first-child [data-mode=inject] [data-number=injected]", "68")
    assert len(stub.chats) == 3 and hands.text(".exchange:first-child .verdict") == ""
    assert hands.complaints() == []


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("cut", "The stream ended before the answer was complete."),
        ("error", "The engine died."),
        ("refused", "top_k is at most 1000."),
    ],
)
def test_a_failed_stream_says_so_and_keeps_the_question(
    stub: Stub, hands: Hands, broken: str, message: str
) -> None:
    stub.broken = broken
    hands.open()
    hands.type("#question", "Where?\n")
    hands.sees(".answer .error", message)
    hands.sees("#alert", f"The question was not answered: {message}")
    assert hands.text(".answer-text") == ("" if broken == "refused" else "You told")
    assert hands.one("#question").get_property("value") == "Where?"
    assert len(hands.all(".answer")) == 1
    stub.broken = None
    hands.click("#ask")
    hands.sees(".verdict", "times")
    assert hands.text("#alert") == ""


def test_an_answer_can_be_stopped_and_needs_a_scope(stub: Stub, hands: Hands) -> None:
    hands.open("")
    hands.type("#question", "Where?\n")
    hands.sees("#alert", "Name a user, an agent or a run first")
    assert hands.focused().get_attribute("id") == "user_id"
    stub.ttft_s["inject"] = 3.0
    hands.open()
    hands.type("#question", "Where?")
    hands.click("#ask")
    assert hands.focused().get_attribute("id") == "stop"
    hands.press(" ")
    hands.sees(".answer .error", "Stopped.")
    assert hands.focused().get_attribute("id") == "question"
