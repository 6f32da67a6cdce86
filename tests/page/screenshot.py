"""Writes docs/images/memory-page.png: the page with a conversation's facts, from the stub.

The numbers in it are the stub's, not measurements. Run: `python tests/page/screenshot.py`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from page_browser import browser, missing
from page_stub import Running, Stub

ROOT = Path(__file__).parent.parent.parent
IMAGE = ROOT / "docs" / "images" / "memory-page.png"
FACTS = [
    ("Ana", "3 May 2025", "My sister Ingrid lives in Oslo, near the harbour."),
    ("Ana", "3 May 2025", "I am allergic to hazelnuts, so no praline for me."),
    ("assistant", "3 May 2025", "Oslo is lovely in May: pack a rain jacket for the ferry."),
    ("Ana", "11 May 2025", "We adopted a grey cat. His name is Pickle."),
    ("Ana", "11 May 2025", "I moved from Porto to Ghent for my new job at the hospital."),
    ("Ana", "2 June 2025", "On Thursdays I play the cello in the town orchestra."),
    ("Ana", "2 June 2025", "My door is painted orange, so that visitors find where to ring."),
    ("Ana", "9 June 2025", "Ingrid and my brother-in-law Bo run a bicycle repair shop."),
    ("Ana", "9 June 2025", "I read mostly on the train, science fiction if I can choose."),
    ("Ana", "21 June 2025", "Where we go in August is settled: two weeks on Gotland."),
]
NOT_ENCODED_YET = 2


def fill(stub: Stub) -> None:
    for number, (speaker, said_at, text) in enumerate(FACTS):
        stub.injectable = number < len(FACTS) - NOT_ENCODED_YET
        stub.store(text, user_id="ana", speaker=speaker, said_at=said_at)


def take(path: Path) -> None:
    from page_hands import Hands  # needs selenium

    stub = Stub(
        model="stand-in for a model",
        answer="Your sister Ingrid lives in Oslo, near the harbour.",
        ttft_s={"inject": 0.028, "text": 0.31},
    )
    fill(stub)
    server = Running(stub)
    try:
        with tempfile.TemporaryDirectory() as profile, browser(Path(profile), 1280, 1240) as driver:
            hands = Hands(driver, server.url).open()
            hands.sees_memories(*[text for _, _, text in FACTS])
            driver.execute_script("document.getElementById('add-details').open = false")
            hands.type("#top-k", "5")
            hands.type("#question", "Where does my sister live?\n")
            hands.sees(".verdict", "sooner")
            hands.click("[data-mode=inject] .numbers summary")
            driver.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(driver.get_screenshot_as_png())
    finally:
        server.stop()


if __name__ == "__main__":
    reason = missing()
    if reason is not None:
        sys.exit(f"No screenshot: {reason}.")
    take(IMAGE)
    print(f"{IMAGE.relative_to(ROOT)}: {IMAGE.stat().st_size / 1000:.0f} kB")
