"""A real browser for tests of the live page, headless, with a profile of its own."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1400,1200"),
)


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Any]:
    """A selenium driver. Skips the test, by name, where no browser is installed."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("chromium and chromedriver are not installed: the page is not looked at")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=programs[1])
    )
    try:
        yield driver
    finally:
        driver.quit()


def text_of(driver: Any, selector: str) -> str:
    """What a reader sees of all that the selector finds, joined."""
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText).join()"
    return str(driver.execute_script(script, selector))
