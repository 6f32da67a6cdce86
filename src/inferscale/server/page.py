"""The page at /memory: the files of the folder `page`, as HTTP answers.

Knows neither a web framework nor the memory: the page's scripts talk to the memory API themselves. Files
are read once and looked up by name, so no path can lead out of the folder.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = "/memory"
FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing inline, nothing from elsewhere, and strings never become markup or code: memory texts come
# from anywhere.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


class PageFile(NamedTuple):
    """One file of the page. etag: quoted, as it stands in the header."""

    body: bytes
    content_type: str
    etag: str

    def headers(self) -> dict[str, str]:
        """All headers of an answer with this file but its length."""
        return {
            "content-type": self.content_type,
            "etag": self.etag,
            "cache-control": "no-cache",
            "content-security-policy": CONTENT_SECURITY_POLICY,
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }


class PageAnswer(NamedTuple):
    """What to send: header names are lower case, and `content-length` is among them."""

    status: int
    headers: dict[str, str]
    body: bytes


def page_file(path: str) -> PageFile | None:
    """The file at a decoded URL path below the application's root; None where the page has none."""
    if path == ROOT:
        return _files()[INDEX]
    prefix, name = path[: len(ROOT) + 1], path[len(ROOT) + 1 :]
    return _files().get(name) if prefix == f"{ROOT}/" else None


def page_answer(method: str, path: str, if_none_match: str | None = None) -> PageAnswer | None:
    """The whole answer to a request; None where the page has nothing at this path.

    method: of the request. if_none_match: that header, where the client sent it.
    """
    if path == f"{ROOT}/":  # the page's own links are relative to /memory, so that a prefix of a proxy works
        return _answer(308, {"location": f"..{ROOT}"}, b"")
    file = page_file(path)
    if file is None:
        return None
    if method not in ("GET", "HEAD"):
        return _answer(405, {"allow": "GET, HEAD"}, b"")
    if if_none_match is not None and _names(if_none_match, file.etag):
        return PageAnswer(304, file.headers(), b"")
    answer = _answer(200, file.headers(), file.body)
    return answer if method == "GET" else answer._replace(body=b"")


def _answer(status: int, headers: dict[str, str], body: bytes) -> PageAnswer:
    return PageAnswer(status, headers | {"content-length": str(len(body))}, body)


def _names(if_none_match: str, etag: str) -> bool:
    """Whether the header names this tag; proxies that compress mark it as weak."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or "*" in tags


@lru_cache(maxsize=1)
def _files() -> dict[str, PageFile]:
    """All files of the page by name."""
    files = {}
    for path in FOLDER.iterdir():
        content_type = CONTENT_TYPES.get(path.suffix)
        if content_type is not None:
            body = path.read_bytes()
            files[path.name] = PageFile(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return files
