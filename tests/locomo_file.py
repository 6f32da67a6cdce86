"""A LoCoMo file of two small conversations, made for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SAID = (
    ("Ana", "I live in Oslo since 8 May 2023."),
    ("Ben", "My two dogs like the snow."),
    ("Ana", "It rains here all the time."),
    ("Ben", "I play the violin."),
    ("Ana", "My sister is a baker."),
    ("Ben", "I was never in Rome."),
)


def write_locomo(folder: Path) -> Path:
    path = folder / "locomo.json"
    path.write_text(json.dumps([_conversation("May"), _conversation("June")]), encoding="utf-8")
    return path


def _conversation(month: str) -> dict[str, Any]:
    turns = [
        {"speaker": speaker, "dia_id": f"D1:{number}", "text": text}
        for number, (speaker, text) in enumerate(SAID, start=1)
    ]
    return {
        "conversation": {"session_1": turns, "session_1_date_time": f"1 pm on 8 {month}, 2023"},
        "qa": [
            {"question": "Where does Ana live?", "answer": "Oslo", "category": 4},
            {"question": "How many dogs has Ben?", "answer": 2, "category": 4},
            {"question": "When did Ana move?", "answer": "8 May 2023", "category": 2},
            {"question": "When was Ben in Rome?", "adversarial_answer": "1999", "category": 5},
            {"question": "What might Ben like?", "answer": "dogs", "category": 3},
        ],
    }
