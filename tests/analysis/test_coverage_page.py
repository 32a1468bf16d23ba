# SPDX-License-Identifier: Apache-2.0
"""The page of who solves which problem, in headless Chromium: its filters work, and what models said runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Visit, chromium

from evoalign.analysis.coverage.estimators import Problem, Tries, Way
from evoalign.analysis.coverage.figures import page

HOSTILE = "</pre></script><script>document.title='run'</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"


@pytest.fixture
def tab() -> Iterator[Visit]:
    """It runs an event loop, which no other module may meet."""
    with chromium() as browser:
        yield Visit(browser)


@pytest.mark.slow
def test_filters_work_and_no_completion_is_executed(tmp_path: Path, tab: Visit) -> None:
    """Four problems: solved by both, by the base alone, by the other alone, by nobody."""
    base, other = np.array([[1, 1, 0, 0]] * 2, dtype=bool), np.array([[1, 0, 1, 0]] * 2, dtype=bool)
    way, texts = Way("temperature", 1.0), [[HOSTILE] * 2] * 4
    tries = {"base": {way: Tries(base, texts)}, HOSTILE: {way: Tries(other, texts)}}
    problems = [Problem(f"{HOSTILE} number {i}", HOSTILE) for i in range(4)]
    (tmp_path / "coverage.html").write_text(page(tries, problems, "right by gold", [HOSTILE]), encoding="utf-8")
    opened = tab.page
    opened.goto((tmp_path / "coverage.html").as_uri())

    def shown(**values: str) -> list[int]:
        for name, value in values.items():
            opened.fill(f"#{name}", value) if name == "text" else opened.select_option(f"#{name}", value)
        rows = opened.locator("tbody tr")
        found = [i for i in range(4) if rows.nth(i).is_visible()]
        assert opened.inner_text("#count") == f"{len(found)} of 4 problems"
        return found

    assert shown() == [0, 1, 2, 3]
    assert shown(by="0") == [0, 1] and shown(**{"not": "1"}) == [1]
    assert shown(by="1") == [] and shown(**{"not": "any"}) == [0, 2]
    assert shown(by="none") == [3] and shown(by="any", text="NUMBER 2") == [2]
    opened.click("tbody tr:nth-child(3) summary")
    assert opened.inner_text("tbody tr:nth-child(3) pre >> nth=0") == f"{HOSTILE} number 2"
    assert (opened.title(), opened.locator("img").count()) == ("Solved problems", 0)
    assert (tab.errors, len(tab.asked)) == ([], 1)
