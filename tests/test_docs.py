"""What the documents say is true: quoted messages exist, snippets compile, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import inferscale

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def source_text() -> str:
    """All of the source with strings that go on in the next line joined."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_quoted_messages_are_those_of_the_source() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    table = page[page.index("| message | what to do |") :]
    messages = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    assert len(messages) >= 4
    source = source_text()
    for message in messages:
        for part in message.split("…"):
            assert part.strip() in source, f"no error says {part.strip()!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_compile_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for snippet in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        compile(snippet, str(page), "exec")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_public_names_resolve_and_are_all_listed() -> None:
    assert sorted(inferscale.__all__) == sorted(inferscale._HOMES)
    for name in inferscale.__all__:
        assert getattr(inferscale, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        inferscale.nothing  # noqa: B018
