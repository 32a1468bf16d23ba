# SPDX-License-Identifier: Apache-2.0
"""The figures of efficiency: what each run took, and where it ended, by group."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoalign.analysis.compare.comparison import MATCHINGS
from evoalign.analysis.efficiency.measures import median
from evoalign.report.figures import COLORS, INK, MARKERS, canvas, frame, plain, save_both
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from evoalign.analysis.compare.comparison import Matching
    from evoalign.analysis.efficiency.compute import Timed

NAMES = {"wall": "seconds", "completions": "completions", "tokens": "tokens", "flops": "FLOPs"}
LABEL = 36
WORDS: dict[str, Any] = {
    "va": "bottom", "fontsize": 9, "color": INK, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0},
}  # fmt: skip
"""How it is said that a row has no sign."""


def draw(measure: str, threshold: float, groups: Sequence[Timed], folder: Path) -> list[Path]:
    """PNG and SVG of what runs took to the threshold, and of their ends."""
    known: list[Matching] = [by for by in MATCHINGS if any(group.times[by] for group in groups)]
    found: list[Path] = []
    if known:
        figure = canvas(9.0, (0.5 * len(groups) + 1.1) * len(known) + 0.6, layout="constrained")
        panels = figure.subplots(len(known), 1, squeeze=False)[:, 0]
        for axes, by in zip(panels, known, strict=True):
            _times(axes, by, groups)
        what = f"To {visible(measure)} {threshold:.4g} (>: it was not reached; line: 95 % of the median)"
        frame(panels[0], what, NAMES[known[0]])
        found += save_both(figure, folder / "efficiency_times.png")
    figure = canvas(9.0, 0.5 * len(groups) + 1.8, layout="constrained")
    axes = figure.subplots()
    for row, group in enumerate(groups):
        axes.plot(list(group.ends.values()), [row] * len(group.ends), **_look(row))
        if not group.ends:
            _say(axes, row, "no run has come to its end")
    axes.axvline(threshold, color=INK, linestyle=(0, (2, 2)), linewidth=1.0)
    _rows(axes, groups)
    frame(axes, "Where runs end: each mark is a seed", f"{visible(measure)} on the test split; dashed: the threshold")
    return [*found, *save_both(figure, folder / "efficiency_ends.png")]


def _times(axes: Axes, by: Matching, groups: Sequence[Timed]) -> None:
    for row, group in enumerate(groups):
        times = group.of(by)
        if not times:
            _say(axes, row, "not known")
            continue
        there, never = ([t.amount for t in times if t.reached is way] for way in (True, False))
        axes.plot(there, [row] * len(there), **_look(row))
        look: dict[str, Any] = {**_look(row), "marker": ">", "markerfacecolor": "white"}
        axes.plot(never, [row] * len(never), **look)
        middle = median(times)
        if middle.low is not None and middle.high is not None:
            most = middle.high if isfinite(middle.high) else max(t.amount for t in times)
            axes.plot([middle.low, most], [row + 0.28] * 2, color=COLORS[row % len(COLORS)], linewidth=2.0)
        if isfinite(middle.mean):
            axes.plot([middle.mean], [row + 0.28], color=COLORS[row % len(COLORS)], marker="|", markersize=9)
    plain(axes)
    _rows(axes, groups)
    axes.set_xlim(left=0)
    axes.set_xlabel(NAMES[by])


def _say(axes: Axes, row: int, words: str) -> None:
    axes.text(0.01, row - 0.05, words, transform=axes.get_yaxis_transform(), **WORDS)


def _rows(axes: Axes, groups: Sequence[Timed]) -> None:
    axes.set_yticks(range(len(groups)), [shorten(visible(group.label), LABEL) for group in groups])
    axes.set_ylim(-0.6, len(groups) - 0.4)
    axes.invert_yaxis()


def _look(row: int) -> dict[str, Any]:
    look = {"color": COLORS[row % len(COLORS)], "marker": MARKERS[row % len(MARKERS)]}
    return {**look, "linestyle": "", "markersize": 5.5, "alpha": 0.8}
