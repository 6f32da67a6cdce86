"""Fixtures of the page's tests in a browser; without one they are skipped, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from page_browser import browser, missing
from page_stub import Running, Stub

if TYPE_CHECKING:
    from page_hands import Hands


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    reason = missing()
    if reason is not None:
        pytest.skip(f"the page is not tested in a browser: {reason}")
    with browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def stub() -> Stub:
    return Stub()


@pytest.fixture
def server(stub: Stub) -> Iterator[Running]:
    running = Running(stub)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def hands(driver: Any, server: Running) -> Hands:
    """A person before an empty tab; each stub has a port of its own, so nothing is left of the last test."""
    from page_hands import Hands

    return Hands(driver, server.url)
