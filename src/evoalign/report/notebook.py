# SPDX-License-Identifier: Apache-2.0
"""How a run stands, live in a notebook: what rich draws on a terminal, as HTML that takes its own place again."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType

WIDTH = 100
PRE = '<pre style="line-height: normal; font-family: monospace; background: none">{code}</pre>'


def here() -> bool:
    """Whether this process is the kernel of a notebook, as IPython says it: a terminal's IPython is none."""
    ipython = sys.modules.get("IPython")
    shell: Any = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class Live:
    """As rich's Live, drawn at each `refresh`; rich's own asks for ipywidgets there."""

    def __init__(self, get_renderable: Callable[[], RenderableType]) -> None:
        self._get_renderable = get_renderable
        self._handle: Any = None

    def start(self) -> None:
        """Nothing is drawn before the first refresh."""

    def refresh(self) -> None:
        """Draw what there is to see now."""
        from IPython import display  # there wherever `here` says so

        page = display.HTML(as_html(self._get_renderable()))
        if self._handle is None:
            self._handle = display.display(page, display_id=True)
        else:
            self._handle.update(page)

    def stop(self) -> None:
        """The last picture stays."""
        if self._handle is not None:
            self.refresh()


def as_html(drawn: RenderableType) -> str:
    """What rich draws as HTML, all of its text escaped."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False, color_system="truecolor")
    console.print(drawn)
    return console.export_html(inline_styles=True, code_format=PRE)
