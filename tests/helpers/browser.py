"""Headless Chromium: drives a page as a user does, and records its network requests and console messages."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
)
PATIENCE_SECONDS = 10.0
DESKTOP, PHONE, SMALL_PHONE = (1280, 800), (390, 844), (320, 640)


def programs() -> tuple[str, str] | None:
    """Chromium and its driver; None where one of them is missing."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One window with one page."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver
        self._requests: list[str] = []

    @classmethod
    @contextlib.contextmanager
    def start(cls, directory: Path, *flags: str) -> Iterator["Browser"]:
        """A browser with its profile in this empty directory, and more flags, until the block ends."""
        found = programs()
        assert found is not None
        options = Options()
        options.binary_location = found[0]
        for flag in [*FLAGS.split(), f"--user-data-dir={directory}", *flags]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        driver = webdriver.Chrome(options, Service(found[1]))
        try:
            yield cls(driver)
        finally:
            driver.quit()

    # What a person does

    def open(self, url: str, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
        """Show a page with no stored data, in a window of this size, with light or dark colours."""
        self.resize(size)
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.command("Storage.clearDataForOrigin", origin=url.rstrip("/"), storageTypes="all")
        self.driver.get("about:blank")
        self.driver.get(url)
        if self.run("return sessionStorage.length > 0"):
            self.run("sessionStorage.clear()")
            self.driver.refresh()

    def resize(self, size: tuple[int, int]) -> None:
        is_phone = size[0] < 600
        self.command("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=is_phone)

    def press(self, *keys: str) -> None:
        """Press keys where the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def write(self, selector: str, text: str) -> None:
        """Put a text into a field in the place of what it has."""
        field = self.find(selector)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(Keys.DELETE)
        self.command("Input.insertText", text=text)

    # What there is to see

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "body") -> str:
        """The visible text of the last element of this kind; nothing if there is none."""
        return str(self.run("return [...document.querySelectorAll(arguments[0])].at(-1)?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        """The visible texts of all elements of this kind."""
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText)", selector))

    def shows(self, selector: str) -> bool:
        """Whether there is such an element that can be seen."""
        return bool(self.run("return !!document.querySelector(arguments[0])?.checkVisibility()", selector))

    @property
    def focus(self) -> str:
        """The id of the element with the focus."""
        return str(self.run("return document.activeElement.id"))

    def wait(self, condition: Callable[[], Any], message: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{message}; the page shows:\n{self.text()}"
            time.sleep(0.02)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def command(self, name: str, **arguments: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, arguments)

    # What went on behind it

    def requests(self) -> list[str]:
        """The addresses that pages have asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if url.startswith(("http", "ws"))]

    def complaints(self) -> list[str]:
        """Errors and warnings on the console since the last call; replies with an error status are none."""
        entries = self.driver.get_log("browser")
        return [
            entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING") and entry["source"] != "network"
        ]
