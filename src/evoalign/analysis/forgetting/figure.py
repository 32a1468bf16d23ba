# SPDX-License-Identifier: Apache-2.0
"""The figure of forgetting: the change from the base on each task and text, over checkpoints, beside placebos."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evoalign.report.figures import COLORS, GRID, canvas, frame, plain, save_both, series
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from evoalign.analysis.forgetting.compute import Course

LABEL = 40


def draw(courses: Sequence[Course], folder: Path) -> list[Path]:
    """PNG and SVG, a panel for each task and text."""
    probes = list(dict.fromkeys(course.probe for course in courses))
    targets = list(dict.fromkeys(course.target for course in courses))
    figure = canvas(8.0, 2.5 * len(probes) + 1.2, layout="constrained")
    panels = figure.subplots(len(probes), 1, squeeze=False)[:, 0]
    frame(panels[0], "Change from the base model", "")
    for axes, probe in zip(panels, probes, strict=True):
        plain(axes)
        axes.axhline(0, color=GRID, linewidth=1.2)
        axes.set_ylabel(shorten(visible(probe), LABEL))
        for course in courses:
            if course.probe == probe:
                _course(axes, course, targets.index(course.target))
    panels[-1].set_xlabel("generation or step: lines are 95 % over examples; x: placebos of the end")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=1, frameon=False)
    return save_both(figure, folder / "forgetting.png")


def _course(axes: Axes, course: Course, index: int) -> None:
    text, color = visible(course.target), COLORS[index % len(COLORS)]
    label = text if len(text) <= LABEL else "..." + shorten(text[-(LABEL - 3) :], LABEL)
    changes = course.changes
    axes.plot([0, *course.steps], [0.0, *(c.mean for c in changes)], label=label, markersize=4, **series(index))
    for step, change in zip(course.steps, changes, strict=True):
        if change.low is not None and change.high is not None:
            axes.plot([step, step], [change.low, change.high], color=color, linewidth=1.0)
    placebos = [float((one - course.base_E).mean()) for one in course.placebo_KE]
    axes.plot([course.steps[-1]] * len(placebos), placebos, color=color, marker="x", linestyle="", markersize=6)
