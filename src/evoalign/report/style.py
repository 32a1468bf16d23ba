# SPDX-License-Identifier: Apache-2.0
"""What all figures look like. Matplotlib is imported at the first figure: it takes a noticeable part of a second.

Matplotlib's object interface with the Agg canvas: no pyplot, so nothing global, no window system and no figure that
stays in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoalign.rundir.files import make_folder, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (9.0, 5.0)
DPI = 120
INK, GRID = "#24292f", "#d8dee4"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Those of Okabe and Ito (2008), which people with any colour vision tell apart."""
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SURFACE = "cividis"
"""The colour map of a surface: read alike with any colour vision, and in grey."""
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
    _write(figure, path, "png", {"Software": "evoalign"})


def save_both(figure: Figure, path: Path) -> list[Path]:
    """As PNG in `path`, and as SVG beside it, whose letters are drawn and so look alike everywhere; both paths."""
    save(figure, path)
    vector = path.with_suffix(".svg")
    _write(figure, vector, "svg", {"Date": None, "Creator": "evoalign"})
    return [path, vector]


def series(index: int) -> dict[str, Any]:
    """How one of several lines is drawn, told apart by its style and marker too."""
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": LINES[index % len(LINES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def _write(figure: Figure, path: Path, form: str, metadata: dict[str, str | None]) -> None:
    make_folder(path.parent)
    with replacing(path) as file:
        figure.savefig(file, format=form, metadata=metadata)
