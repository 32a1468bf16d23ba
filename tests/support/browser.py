# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium, the one that is installed, and tabs that keep what went wrong in them and what they asked for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips where there is none, unless EVOALIGN_NEEDS_BROWSER is set."""
    api = pytest.importorskip("playwright.sync_api")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if "EVOALIGN_NEEDS_BROWSER" in os.environ:
            pytest.fail("no chromium; apt-get install chromium")
        pytest.skip("no chromium here")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


class Visit:
    def __init__(self, browser: Any, **settings: Any) -> None:
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("requestfailed", self._failed)

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page was left before it was there
            self.errors.append(f"{request.url}: {request.failure}")
