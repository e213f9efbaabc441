"""Opens pages in a headless Chromium, where one is installed (``apt-get install chromium``)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WAYS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def window(colours: str = "light") -> Iterator[Any]:
    """An empty page of 1200 x 900. The test is skipped without playwright and a browser."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
    chromium = next(filter(None, map(shutil.which, WAYS)), None)
    if chromium is None:
        pytest.skip(f"needs a browser: none of {', '.join(WAYS)} is installed")
    with api.sync_playwright() as playwright:
        options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        try:
            yield browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme=colours)
        finally:
            browser.close()


@contextmanager
def opened(path: Path, *, colours: str = "light") -> Iterator[Any]:
    """The page of a file, without a network. An error or a request of its own fails the test."""
    with window(colours) as page:
        told: list[str] = []
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("request", lambda request: told.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        yield page
        assert told == []
