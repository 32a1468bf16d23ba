# SPDX-License-Identifier: Apache-2.0
"""What all figures look like. Matplotlib is imported at the first figure: it takes a noticeable part of a second.

Matplotlib's object interface with the Agg canvas: no pyplot, so nothing global, no window system and no figure that
stays in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoalign.rundir.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (9.0, 5.0)
DPI = 120
INK, GRID = "#24292f", "#d8dee4"
HEADING: dict[str, Any] = {"fontsize": 12, "fontweight": "bold", "color": INK, "parse_math": False}


def canvas(width: float, height: float, **options: Any) -> Figure:
    """An empty figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", **options)
    FigureCanvasAgg(figure)
    return figure


def frame(axes: Axes, title: str, across: str) -> None:
    """The heading, the name of the x axis, and a quiet frame."""
    axes.set_title(title, loc="left", pad=12, **HEADING)
    axes.set_xlabel(across)
    plain(axes)


def plain(axes: Axes) -> None:
    """A quiet frame with lines at the ticks of the y axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(color=GRID, labelcolor=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> None:
    """As PNG, in one step, so that a viewer never finds half a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, format="png", metadata={"Software": "evoalign"})
