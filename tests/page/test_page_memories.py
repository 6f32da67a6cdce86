"""Memories in the browser: shown, added, found, changed, deleted, and told about in words only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from page_stub import Stub

if TYPE_CHECKING:
    from page_hands import Hands


def test_it_shows_a_scope_and_the_state_without_complaints(stub: Stub, hands: Hands) -> None:
    stub.store(
        "My sister lives in Oslo.", user_id="ana", speaker="Ana", said_at="8 May", metadata={"via": "mail"}
    )
    stub.store("Bob has a dog.", user_id="bob")
    hands.open("")
    hands.sees("#connection", "Connected")
    hands.sees("#stat-facts", "2")
    hands.sees("#stat-injectable", "–")
    hands.sees("#list-note", "Name a user, an agent or a run")
    hands.type("#user_id", " ana ")
    hands.click("#scope-form button")
    hands.sees_memories("My sister lives in Oslo.")
    hands.sees("#list .meta", '{"via":"mail"}')
    hands.sees("#list [data-badge]", "injectable")
    hands.sees("#stat-facts", "1")
    hands.sees("#stat-injectable", "1")
    hands.sees("#stat-pool", "1 % of 4,096 pages")
    assert hands.driver.current_url.endswith("#user_id=ana")
    assert hands.complaints() == []

    hands.open("user_id=nobody&run_id=7")
    hands.sees("#list-note", "Nothing is stored for user nobody, run 7 yet.")
    assert hands.complaints() == []


def test_memories_are_added_found_changed_and_deleted(stub: Stub, hands: Hands) -> None:
    hands.open()
    hands.type("#add-text", "My cat is called Pickle.")
    hands.type("#add-speaker", "Ana")
    hands.type("#add-metadata", "[1]")
    hands.click("#add-form [type=submit]")
    hands.sees("#alert", "Metadata is a JSON object")
    assert stub.memories == {}
    hands.type("#add-metadata", '{"source": "mail"}')
    hands.click("#add-form [type=submit]")
    hands.sees("#status", "1 memory stored.")
    memory = next(iter(stub.memories.values()))
    assert (memory["user_id"], memory["speaker"], memory["metadata"]) == ("ana", "Ana", {"source": "mail"})
    assert hands.focused().get_attribute("id") == "add-text"

    hands.type("#add-text", "Oslo is cold.\n\nThe door is orange.")
    hands.click("#add-lines")
    hands.click("#add-form [type=submit]")
    hands.sees("#status", "2 memories stored.")
    hands.sees_memories("My cat is called Pickle.", "Oslo is cold.", "The door is orange.")

    hands.type("#query", "what is the cat called\n")
    hands.sees("#list-heading", "Found for “what is the cat called”")
    hands.sees("#list li:first-child .badge", "score 0.60")
    assert hands.texts()[0] == "My cat is called Pickle."
    hands.type("#query", "zebra\n")
    hands.sees("#list-note", "Nothing was found.")
    hands.click("#show-all")
    hands.wait("three", lambda: len(hands.texts()) == 3)

    hands.click("#list li:first-child [data-action=edit]")
    hands.type("#edit-text", "   ")
    hands.click("#edit-form [type=submit]")
    hands.sees("#edit-error", "A memory needs a text.")
    hands.type("#edit-text", "My cat is called Gherkin.")
    hands.type("#edit-metadata", "")
    hands.click("#edit-form [type=submit]")
    hands.sees("#status", "The memory was changed.")
    hands.sees_memories("My cat is called Gherkin.", "Oslo is cold.", "The door is orange.")
    assert (memory["text"], memory["metadata"], memory["speaker"]) == ("My cat is called Gherkin.", {}, "Ana")
    assert hands.focused().accessible_name == "Edit: My cat is called Gherkin."

    hands.click("#list li:first-child [data-action=history]")
    hands.sees("#history-list li:first-child", "Added")
    hands.sees("#history-list li:last-child del", "My cat is called Pickle.")
    hands.sees("#history-list li:last-child", "My cat is called Gherkin.")
    assert hands.findings() == []
    hands.click("#history-dialog [data-close]")

    hands.click("#list li:first-child [data-action=delete]")
    hands.sees("#confirm-text", "My cat is called Gherkin.")
    hands.click("#confirm-dialog [data-close=no]")
    assert len(stub.memories) == 3
    hands.click("#list li:first-child [data-action=delete]")
    hands.click("#confirm-yes")
    hands.sees("#status", "The memory was deleted.")
    hands.sees_memories("Oslo is cold.", "The door is orange.")
    hands.sees("#stat-facts", "2")
    assert hands.focused().accessible_name == "Delete: Oslo is cold."

    hands.click("#delete-all")
    hands.click("#confirm-yes")
    hands.sees("#status", "2 memories deleted.")
    assert stub.memories == {}


def test_pages_lead_on_and_back(stub: Stub, hands: Hands) -> None:
    for number in range(45):
        stub.store(f"Fact {number}", user_id="ana")
    hands.open()
    hands.sees("#range", "1 to 20")
    assert not hands.one("#previous").is_enabled()
    hands.click("#next")
    hands.sees("#range", "21 to 40")
    assert hands.focused().get_attribute("id") == "list-heading"
    hands.click("#next")
    hands.sees("#range", "41 to 45")
    assert hands.texts() == [f"Fact {number}" for number in range(40, 45)]
    assert not hands.one("#next").is_enabled()
    hands.click("#previous")
    hands.sees("#range", "21 to 40")
    hands.type("#add-text", "Added while on page two")
    hands.click("#add-form [type=submit]")
    hands.sees("#list li:first-child", "Added while on page two")  # although its place is at the end
    hands.sees("#list li:first-child .fresh", "new")


def test_what_others_do_is_noticed(stub: Stub, hands: Hands) -> None:
    stub.injectable = False
    gone = stub.store("My sister lives in Oslo.", user_id="ana")
    hands.open()
    hands.sees("#list [data-badge]", "as text only")
    hands.sees("#stat-pending", "1")
    hands.click("#warm")
    hands.sees("#status", "Waiting to be encoded: 1.")
    hands.sees("#list .injectable", "injectable")
    del stub.memories[gone["id"]]
    hands.click("#list [data-action=history]")
    hands.sees("#alert", "This memory no longer exists.")
    hands.sees("#list-note", "Nothing is stored for user ana yet.")
    stub.has_memory_api = False
    hands.sees("#connection", "No memory API at this address")


def test_memories_with_markup_are_shown_as_text(stub: Stub, hands: Hands) -> None:
    nasty = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script><b>&amp;"
    stub.answer = f"{nasty} said"
    stub.store(nasty, user_id=nasty, speaker=nasty, said_at=nasty, metadata={nasty: nasty})
    stub.events["m0001"].append(
        {"event": "UPDATE", "text": nasty, "previous_text": f"{nasty} before", "at": 1764442800}
    )
    hands.open("")
    hands.type("#user_id", nasty)
    hands.click("#scope-form button")
    hands.sees_memories(nasty)
    hands.sees("#list-heading", nasty)
    hands.type("#query", f"{nasty}\n")
    hands.sees("#list .badge", "score 1.00")
    hands.click("[data-action=history]")
    hands.sees("#history-list del", nasty)
    hands.click("#history-dialog [data-close]")
    hands.click("[data-action=delete]")
    hands.sees("#confirm-text", nasty)
    hands.click("#confirm-dialog [data-close=no]")
    hands.type("#question", f"{nasty}\n")
    hands.sees(".verdict", "times")
    hands.sees("[data-mode=inject] .facts", nasty)
    hands.sees("[data-mode=inject] .answer-text", nasty)
    assert hands.all("main img, main script, main b") == []
    assert hands.driver.title == "Memory – InferScale"
    assert hands.complaints() == []
