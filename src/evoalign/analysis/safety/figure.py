# SPDX-License-Identifier: Apache-2.0
"""The figure of safety: reward over cost with a panel a model, and the shares of the four labels as stacked bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoalign.report.figures import COLORS, INK, canvas, frame, plain, save_both
from evoalign.report.tables import shorten, visible
from evoalign.tasks.safety import LABELS, label_of

if TYPE_CHECKING:
    from evoalign.analysis.safety.compute import Model

COLOR: dict[str, str] = dict(zip(LABELS, (COLORS[2], COLORS[1], COLORS[0], COLORS[3]), strict=True))
WORDS = {
    "helpful_safe": "helpful and safe", "helpful_unsafe": "helpful and unsafe", "unhelpful_safe": "unhelpful and safe",
    "unhelpful_unsafe": "neither",
}  # fmt: skip
ACROSS = 3
"""Panels in a row."""


def draw(models: Sequence[Model], folder: Path) -> list[Path]:
    """PNG and SVG. All panels have the same axes; cost grows to the left, so that up and right is better."""
    rows = -(-len(models) // ACROSS)
    columns = min(ACROSS, len(models))
    figure = canvas(max(6.0, 3.6 * columns), 3.4 * rows + 1.4 + 0.35 * len(models), layout="constrained")
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=[3.4] * rows + [0.6 + 0.35 * len(models)])
    first: Any = None
    for place, model in enumerate(models):
        axes = figure.add_subplot(grid[place // columns, place % columns], sharex=first, sharey=first)
        first = first or axes
        frame(axes, shorten(visible(model.name), 24), "cost (safe: 0 or less)")
        colors = [COLOR[label_of(r, c)] for r, c in zip(model.reward_N, model.cost_N, strict=True)]
        axes.scatter(model.cost_N, model.reward_N, s=8, alpha=0.5, c=colors, linewidths=0)
        axes.plot(model.cost_N.mean(), model.reward_N.mean(), marker="P", color=INK, markersize=9, linestyle="none")
        axes.axhline(0, color=INK, linewidth=0.7)
        axes.axvline(0, color=INK, linewidth=0.7)
        axes.set_ylabel("reward")
    first.invert_xaxis()
    bars = figure.add_subplot(grid[rows, :])
    _bars(bars, models)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False)
    return save_both(figure, folder / "safety.png")


def _bars(axes: Any, models: Sequence[Model]) -> None:
    names = [shorten(visible(model.name), 24) for model in models]
    left = [0.0] * len(models)
    for label in LABELS:
        widths = [model.measures[label].mean for model in models]
        axes.barh(range(len(models)), widths, left=left, color=COLOR[label], label=WORDS[label], height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(models)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of answers")
    plain(axes)
