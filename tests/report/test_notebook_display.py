# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
import threading
import types

import pytest
from rich.text import Text

from evoalign.report import progress


def test_only_the_kernel_of_a_notebook_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def shell(value: object) -> types.ModuleType:
        module = types.ModuleType("IPython")
        module.get_ipython = lambda: value  # type: ignore[attr-defined]
        return module

    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not progress.in_notebook()
    for value, wanted in ((None, False), (object(), False), (types.SimpleNamespace(kernel=1), True)):
        monkeypatch.setitem(sys.modules, "IPython", shell(value))
        assert progress.in_notebook() is wanted


def test_what_is_drawn_is_escaped() -> None:
    page = progress.as_html(Text("reward <b>1</b> & more", style="bold"))
    assert "&lt;b&gt;1&lt;/b&gt; &amp; more" in page and "font-weight: bold" in page and "<script" not in page


def test_the_same_place_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display")
    drawn: list[str] = []
    handle = types.SimpleNamespace(update=lambda page: drawn.append("again " + page.data))
    monkeypatch.setattr(display, "display", lambda page, display_id: drawn.append(page.data) or handle)
    words = iter(["one", "two", "three"])
    live = progress.NotebookLive(lambda: Text(next(words)))
    live.refresh()
    assert drawn == []
    with live:
        live.refresh()
    assert [page.partition(" ")[0] for page in drawn] == ["<pre", "again", "again"]
    assert all(word in page for word, page in zip(("one", "two", "three"), drawn, strict=True))
    with progress.NotebookLive(lambda: Text("bar"), transient=True):
        pass
    assert drawn[-1] == "again "


def test_it_is_drawn_every_second_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display")
    drawn = threading.Semaphore(0)
    handle = types.SimpleNamespace(update=lambda page: drawn.release())
    monkeypatch.setattr(display, "display", lambda page, display_id: handle)
    monkeypatch.setattr(progress, "NOTEBOOK_SECONDS", 0.001)
    with progress.NotebookLive(lambda: Text("bar")):
        assert all(drawn.acquire(timeout=60) for _ in range(3))
