# SPDX-License-Identifier: Apache-2.0
"""How a run stands, live in a notebook: what rich draws on a terminal, as HTML that takes its own place again."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType

WIDTH = 100
SECONDS = 1.0
"""Between two pictures."""
PRE = '<pre style="line-height: normal; font-family: monospace; background: none">{code}</pre>'


def here() -> bool:
    """Whether this process is the kernel of a notebook, as IPython says it: a terminal's IPython is none."""
    ipython = sys.modules.get("IPython")
    shell: Any = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Live:
    """What rich's Live is on a terminal; rich's own asks for ipywidgets here. A context manager.

    The first picture is drawn at once, and again every second; `transient`: none is left at the end.
    """

    def __init__(self, get_renderable: Callable[[], RenderableType], *, transient: bool = False) -> None:
        self._get_renderable, self._transient = get_renderable, transient
        self._handle: Any = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evoalign-notebook", daemon=True)

    def refresh(self) -> None:
        """Draw what there is to see now."""
        if self._handle is not None:
            self._handle.update(_page(as_html(self._get_renderable())))

    def __enter__(self) -> Live:
        from IPython import display  # there wherever `here` says so

        self._handle = display.display(_page(as_html(self._get_renderable())), display_id=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._transient:
            self._handle.update(_page(""))
        else:
            self.refresh()

    def _run(self) -> None:
        while not self._ended.wait(SECONDS):
            self.refresh()


def as_html(drawn: RenderableType) -> str:
    """What rich draws as HTML, all of its text escaped."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False, color_system="truecolor")
    console.print(drawn)
    return console.export_html(inline_styles=True, code_format=PRE)


def _page(text: str) -> Any:
    from IPython import display

    return display.HTML(text)
