# SPDX-License-Identifier: Apache-2.0
"""What an analysis drew, for tests of its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from evoalign.report.figures import save_both


def figures_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that a module of an analysis draws from now on, by their names."""
    drawn: dict[str, Figure] = {}

    def keep(figure: Figure, path: Path) -> list[Path]:
        drawn[path.stem] = figure
        return save_both(figure, path)

    monkeypatch.setattr(module, "save_both", keep)
    return drawn


def words_of(figure: Figure) -> str:
    return "\n".join(found.get_text() for found in figure.findobj(Text))
