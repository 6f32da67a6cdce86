"""Who may and can use the page: keys, outages, the keyboard, screen readers, small and dark screens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from page_stub import Running, Stub

if TYPE_CHECKING:
    from page_hands import Hands


def test_a_key_is_asked_for_and_kept_by_the_tab(stub: Stub, hands: Hands) -> None:
    stub.keys = {"right": False, "tenant": True}
    stub.store("My sister lives in Oslo.", user_id="ana")
    hands.open()
    hands.sees("#key-note", "The server wants an API key.")
    hands.sees("#connection", "An API key is needed")
    assert hands.focused().get_attribute("id") == "key"
    num_polls = len(stub.paths)
    hands.press("wrong", "\n")
    hands.sees("#key-note", "does not accept this key")
    assert hands.findings() == []
    hands.type("#key", "right\n")
    hands.sees_memories("My sister lives in Oslo.")
    hands.sees("#connection", "Connected")
    assert len(stub.paths) > num_polls
    kept = hands.driver.execute_script("return [{...sessionStorage}, localStorage.length, document.cookie]")
    assert kept == [{"inferscale.key": "right"}, 0, ""]

    hands.click("#injection")
    hands.sees("#status", "Injection is off")
    assert stub.injection is False and hands.one("#injection").get_attribute("aria-checked") == "false"
    hands.type("#key", "tenant\n")
    hands.wait("on", lambda: hands.text("#injection-state") == "off")
    hands.click("#injection")
    hands.sees("#injection-note", "This key may not switch injection.")
    assert stub.injection is False and not hands.one("#injection").is_enabled()
    hands.type("#user_id", "")
    hands.click("#scope-form button")
    hands.sees("#stat-facts", "–")  # of all tenants: not for this key
    hands.sees("#connection", "Connected")
    hands.click("#forget-key")
    hands.sees("#key-note", "The server wants an API key.")
    assert hands.driver.execute_script("return sessionStorage.length") == 0


def test_what_the_self_check_refused_cannot_be_switched_on(stub: Stub, hands: Hands) -> None:
    stub.self_check, stub.injection = "refused", False
    hands.open()
    hands.sees("#injection-note", "The server's self-check refused injection for this model.")
    assert not hands.one("#injection").is_enabled()
    stub.self_check, stub.injection = "exact", True
    hands.wait("the switch", lambda: hands.one("#injection").is_enabled())
    assert hands.text("#injection-note") == ""


def test_an_outage_is_told_and_its_end_noticed(stub: Stub, server: Running, hands: Hands) -> None:
    stub.store("My sister lives in Oslo.", user_id="ana")
    hands.open()
    hands.sees_memories("My sister lives in Oslo.")
    server.stop()
    hands.click("#list [data-action=history]")
    hands.sees("#alert", "The server cannot be reached.")
    hands.sees("#connection", "Server not reachable")
    server.start_again()
    hands.sees("#connection", "Connected")
    hands.sees("#status", "The server is reachable again.")
    hands.sees_memories("My sister lives in Oslo.")
    assert hands.text("#alert") == ""


def test_the_keyboard_alone_adds_and_deletes(stub: Stub, hands: Hands) -> None:
    from selenium.webdriver.common.keys import Keys

    hands.open()
    hands.sees("#list-note", "Nothing is stored")
    hands.press(Keys.TAB)
    assert hands.focused().accessible_name == "Skip to the memories"
    hands.press(Keys.ENTER)
    assert hands.focused().get_attribute("id") == "memories-heading"
    hands.tab_to("#add-text", 3)
    hands.press("Typed without a mouse.")
    hands.tab_to("#add-form [type=submit]", 6)
    hands.press(Keys.ENTER)
    hands.sees_memories("Typed without a mouse.")
    hands.tab_to("#list [data-action=delete]", 12)
    hands.press(Keys.ENTER)
    hands.wait("dialog", lambda: hands.focused().accessible_name == "Cancel")
    hands.press(Keys.ESCAPE)
    hands.wait("back", lambda: hands.focused().get_attribute("data-action") == "delete")
    assert len(stub.memories) == 1
    hands.press(" ")
    hands.wait("dialog", lambda: hands.focused().accessible_name == "Cancel")
    hands.press(Keys.TAB)
    assert hands.focused().accessible_name == "Delete"
    hands.press(Keys.ENTER)
    hands.sees("#list-note", "Nothing is stored")
    assert stub.memories == {} and hands.focused().get_attribute("id") == "list-heading"
    assert hands.driver.current_url.endswith("#user_id=ana")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_is_accessible_on_wide_and_narrow_screens(
    stub: Stub, hands: Hands, scheme: str, width: int
) -> None:
    stub.injectable = False
    for number in range(25):
        stub.store(f"Fact {number} " + "x" * 300, user_id="ana", speaker="Ana")
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    command = hands.driver.execute_cdp_cmd
    command("Emulation.setEmulatedMedia", {"features": features})
    command(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False},
    )
    try:
        hands.open()
        hands.sees("#range", "1 to 20")
        hands.sees("#stat-pending", "25")
        hands.type("#question", "Fact 3?\n")
        hands.sees(".verdict", "times")
        for details in hands.all(".answer details"):
            hands.driver.execute_script("arguments[0].open = true", details)
        assert hands.findings() == []
        hands.type("#query", "Fact\n")
        hands.sees("#list .badge", "score")
        for action, dialog in (("edit", "edit"), ("delete", "confirm")):
            hands.click(f"#list li:first-child [data-action={action}]")
            hands.wait("dialog", lambda dialog=dialog: hands.one(f"#{dialog}-dialog").is_displayed())
            assert hands.findings() == []
            hands.click(f"#{dialog}-dialog [data-close=no]")
        running = hands.driver.execute_script("return document.getAnimations().length")
        assert running == 0
    finally:
        command("Emulation.setEmulatedMedia", {"features": []})
        command("Emulation.clearDeviceMetricsOverride", {})


def test_a_hidden_page_does_not_ask(stub: Stub, hands: Hands) -> None:
    hands.open()
    hands.sees("#connection", "Connected")
    hands.driver.execute_script(
        "Object.defineProperty(document, 'visibilityState', {get: () => window.seen ?? 'hidden'});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    num_asked = len(stub.paths)
    time.sleep(3.3)
    assert len(stub.paths) == num_asked
    hands.driver.execute_script(
        "window.seen = 'visible'; document.dispatchEvent(new Event('visibilitychange'))"
    )
    hands.wait("asked again", lambda: stub.paths[num_asked:] == ["GET /v1/memories/stats"])


def test_it_works_below_a_path_of_a_proxy(stub: Stub, server: Running, hands: Hands) -> None:
    stub.prefix = "/llm"
    stub.store("My sister lives in Oslo.", user_id="ana")
    for url in (server.url, f"{server.url}/"):
        hands.url = url
        hands.open()
        hands.sees_memories("My sister lives in Oslo.")
        assert hands.driver.current_url == f"{server.url}#user_id=ana"
    assert hands.complaints() == []


def test_the_checks_find_what_is_wrong(hands: Hands) -> None:
    hands.open()
    hands.sees("#connection", "Connected")
    hands.driver.execute_script(
        "document.querySelector('h1').style.color = '#aaa';"
        "const b = document.createElement('button'); b.id = 'bare'; document.querySelector('main').append(b);"
        "try { document.body.innerHTML = '<p>'; } catch (error) { console.error(error.name); }"
    )
    found = "\n".join(hands.findings())
    assert "button#bare has no name" in found
    assert "h1 “Memory” has a contrast of 2." in found
    assert "TypeError" in "\n".join(hands.complaints())  # the policy does not let text become markup
