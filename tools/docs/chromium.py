"""A headless Chromium for tests of pages and for their screenshots: what a page shows, says and asks for.

screen      width and height in CSS pixels, light or dark, with or without touch: LAPTOP, PHONE or another
complaints  lines of the page's console that are errors or warnings, and exceptions that nothing catches
requests    addresses that the page asks for beside itself: files, hosts; our pages ask for none

Chromium is started without a network: no name is resolved. Nothing is downloaded: the browser and its driver are those
of the machine, and `make setup-browser` installs them.
"""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
INLINE = ("data:", "blob:", "about:")
"""Addresses that carry their own content."""


@dataclass(frozen=True)
class Screen:
    """`width` and `height` in CSS pixels; `dark` and `still` are the preferences of the user for color and motion."""

    width: int
    height: int
    dark: bool = False
    touch: bool = False
    still: bool = False


LAPTOP = Screen(1280, 800)
PHONE = Screen(390, 844, touch=True)


def missing() -> str:
    """Returns words on what is not installed; empty if all is."""
    absent = [] if find_spec("selenium") else ["the Python package selenium"]
    absent += [] if any(map(shutil.which, BROWSERS)) else [f"a browser ({', '.join(BROWSERS)})"]
    absent += [] if shutil.which(DRIVER) else [DRIVER]
    words = "not installed; `make setup-browser` installs what pages are tested in"
    return f"{' and '.join(absent)} {words}" if absent else ""


class Chromium:
    """A browser with one page. `driver`: selenium's, for clicks and keys."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._screen: Screen | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def open(self, page: Path, screen: Screen = LAPTOP) -> None:
        """Opens a file from the disk; what was heard of the page before is forgotten."""
        self.resize(screen)
        self.driver.get("about:blank")
        self.listen()
        self.complaints, self.requests = [], []
        self.driver.get(page.resolve().as_uri())

    def resize(self, screen: Screen) -> None:
        size = {"width": screen.width, "height": screen.height, "deviceScaleFactor": 1, "mobile": screen.touch}
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if screen.dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if screen.still else "no-preference"},
        ]
        self.tell("Emulation.setDeviceMetricsOverride", **size)
        self.tell("Emulation.setTouchEmulationEnabled", enabled=screen.touch)
        self.tell("Emulation.setEmulatedMedia", media="", features=features)

    def tell(self, command: str, **values: Any) -> Any:
        """Sends a command of the DevTools protocol and returns its answer."""
        return self.driver.execute_cdp_cmd(command, values)

    def run(self, script: str, *values: Any) -> Any:
        """Runs JavaScript in the page: the body of a function of `arguments`. Returns what that returns."""
        return self.driver.execute_script(script, *values)

    def wait_for(self, condition: str) -> None:
        """Waits until a JavaScript expression is true, for 20 seconds at most."""
        self.driver.set_script_timeout(20)
        words = f"const done = arguments[0], look = () => {condition} ? done() : setTimeout(look, 20); look()"
        self.driver.execute_async_script(words)

    def listen(self) -> None:
        """Takes up what the page has complained of and asked for since it was opened."""
        for entry in self.driver.get_log("browser"):
            if entry["level"] in ("SEVERE", "WARNING"):
                self.complaints.append(entry["message"])
        for entry in self.driver.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                request = event["params"]
                address = request["request"]["url"]
                is_the_page = request.get("type") == "Document" and request["documentURL"].startswith(address)
                if not is_the_page and not address.startswith(INLINE):
                    self.requests.append(address)

    def screenshot(self, to: Path, whole: bool = False) -> None:
        """Writes the screen, or the `whole` page, as PNG."""
        answer = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(base64.b64decode(answer["data"]))

    def print(self, to: Path) -> None:
        """Writes the page as PDF, as its user would print it."""
        to.write_bytes(base64.b64decode(self.tell("Page.printToPDF", printBackground=True)["data"]))


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Starts the browser, with a profile of its own that goes with it. Raises FileNotFoundError if it is missing."""
    if absent := missing():
        raise FileNotFoundError(absent)
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    with tempfile.TemporaryDirectory(prefix="zerobench-browser-", ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
        for flag in (
            "headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking",
            "disable-component-update", "no-first-run", "hide-scrollbars", "force-color-profile=srgb",
            "host-resolver-rules=MAP * ~NOTFOUND", f"user-data-dir={profile}",
        ):  # fmt: skip
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = Chrome(options=options, service=ChromeService(shutil.which(DRIVER)))
        try:
            yield Chromium(driver)
        finally:
            driver.quit()
