"""What a person does with the page, in words of the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

CHECKS = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")
CONTROLS = "button, input, select, textarea, summary, a[href], [role=switch], [tabindex='0']"


class Hands:
    """Of one open page. Selectors are CSS; every look waits until it sees what it was told to expect."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, scope: str = "user_id=ana") -> Hands:
        self.driver.get("about:blank")  # another fragment alone would not load the page again
        self.driver.get_log("browser")
        self.driver.get(f"{self.url}#{scope}" if scope else self.url)
        return self

    def wait(self, what: str, condition: Callable[[], Any], timeout_s: float = 10) -> Any:
        def attempt(_: Any) -> Any:
            try:
                return condition()
            except StaleElementReferenceException:
                return False

        return WebDriverWait(self.driver, timeout_s, 0.03).until(attempt, what)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        return self.wait(f"{selector} is not there", lambda: next(iter(self.all(selector)), None))

    def text(self, selector: str) -> str:
        """All of its text, shown or not."""
        return str(self.one(selector).get_property("textContent")).strip()

    def sees(self, selector: str, text: str, timeout_s: float = 10) -> None:
        try:
            self.wait("", lambda: text in self.text(selector), timeout_s)
        except Exception as error:
            raise AssertionError(f"{selector} says {self.text(selector)!r} and not {text!r}") from error

    def click(self, selector: str) -> None:
        button = self.one(selector)
        self.wait(f"{selector} is disabled", button.is_enabled)
        button.click()

    def type(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def press(self, *keys: str) -> None:
        """Into whatever has the focus."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> Any:
        return self.driver.switch_to.active_element

    def tab_to(self, selector: str, limit: int = 60) -> None:
        """Press Tab until this has the focus."""
        for _ in range(limit):
            self.press(Keys.TAB)
            if self.focused() == next(iter(self.all(selector)), None):
                return
        raise AssertionError(f"{selector} cannot be reached with {limit} presses of Tab")

    def texts(self) -> list[str]:
        """Of the memories in the list."""
        return [str(item.get_property("textContent")) for item in self.all("#list > li > .text")]

    def sees_memories(self, *texts: str) -> None:
        try:
            self.wait("", lambda: self.texts() == list(texts))
        except Exception as error:
            raise AssertionError(f"the list has {self.texts()}") from error

    def findings(self) -> list[str]:
        """What is wrong with the page's accessibility as it stands."""
        within = "dialog[open]" if self.all("dialog[open]") else "body"  # what is behind a dialog is inert
        nameless = [
            f"{control.tag_name}#{control.get_attribute('id')} has no name"
            for control in self.one(within).find_elements("css selector", CONTROLS)
            if control.is_displayed() and not control.accessible_name
        ]
        return nameless + list(self.driver.execute_script(CHECKS))

    def complaints(self) -> list[str]:
        """Warnings and errors in the console since the page was opened."""
        return [
            f"{e['level']}: {e['message']}" for e in self.driver.get_log("browser") if e["level"] != "DEBUG"
        ]
