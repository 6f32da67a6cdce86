"""Headless Chromium for tests of the page: Debian's chromium and chromium-driver, driven by selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Connections to anything but the page's server fail on closed networks, many at a time: Chromium makes none.
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--lang=en-GB",
)
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def missing() -> str | None:
    """What is not on this machine, in words; None where all is there."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (pip install selenium)"
    if _chromium() is None:
        return "no Chromium found (apt-get install chromium)"
    if shutil.which("chromedriver") is None:
        return "no chromedriver found (apt-get install chromium-driver)"
    return None


@contextmanager
def browser(profile: Path, width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A driver whose console is recorded. profile: an empty folder."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _chromium() or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def _chromium() -> str | None:
    return next((path for name in CHROMIUMS if (path := shutil.which(name))), None)
