"""The files of the page at /memory as HTTP answers. The page in a browser: tests/page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from inferscale.server import page

FILES = sorted(path.name for path in page.FOLDER.iterdir())


def test_the_page_and_its_files_are_found_under_memory() -> None:
    index = page.page_file("/memory")
    assert index is not None and index == page.page_file("/memory/index.html")
    assert index.content_type == "text/html; charset=utf-8"
    types = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
    for name in FILES:
        file = page.page_file(f"/memory/{name}")
        assert file is not None, f"{name} has no content type"
        assert file.body == (page.FOLDER / name).read_bytes()
        assert file.content_type == types.get(name.rpartition(".")[2], index.content_type)


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "/memories", "/memory.js", "/memory/nothing.js", "/memory//page.js", "/memory/../page.py",
        "/memory/../page/page.js", "/memory/./page.js", "/memory/page.js/", "/memory/page.js\x00",
        "/memory/%2e%2e/page.py", "/memory//etc/passwd", "/memory/..\\page.py", "/v1/memories",
    ],
)  # fmt: skip
def test_other_paths_are_not_the_pages(path: str) -> None:
    assert page.page_file(path) is None
    assert page.page_answer("GET", path) is None


def test_answers_are_revalidated_and_locked_down() -> None:
    answer = page.page_answer("GET", "/memory")
    assert answer is not None and answer.status == 200
    assert answer.headers["content-length"] == str(len(answer.body))
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"} <= set(
        policy
    )
    assert not any(word in part for part in policy for word in ("unsafe", "*", "http", "data:"))

    etag = answer.headers["etag"]
    for header in (etag, f'"other", W/{etag}', "*"):
        again = page.page_answer("GET", "/memory", header)
        assert again is not None and (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
    changed = page.page_answer("GET", "/memory", '"other"')
    assert changed is not None and changed.status == 200


def test_other_methods_and_the_trailing_slash() -> None:
    head, post = page.page_answer("HEAD", "/memory"), page.page_answer("POST", "/memory")
    get, slash = page.page_answer("GET", "/memory"), page.page_answer("GET", "/memory/")
    assert head is not None and get is not None and post is not None and slash is not None
    assert head == get._replace(body=b"")
    assert (post.status, post.headers["allow"]) == (405, "GET, HEAD")
    assert (slash.status, slash.headers["location"]) == (308, "../memory")


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and value is not None and not value.startswith("#"):
                self.targets.append(value)
            if name == "style" or name.startswith("on"):
                self.inline.append(f"{tag} {name}")


def test_everything_is_packaged_and_nothing_inline() -> None:
    links = Links()
    links.feed((page.FOLDER / "index.html").read_text(encoding="utf-8"))
    assert len(links.targets) == 3 and links.inline == []
    for target in links.targets:
        assert page.page_file(f"/{target}") is not None, f"{target} is not packaged"
    for path in page.FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        for word in (
            "http:",
            "https:",
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ):
            assert word not in text, f"{path.name} has {word}"
        assert len(text.splitlines()) <= 400


def test_the_screenshot_is_small_enough_for_the_readme() -> None:
    image = Path(__file__).parent.parent / "docs" / "images" / "memory-page.png"
    assert image.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert image.stat().st_size < 300_000
