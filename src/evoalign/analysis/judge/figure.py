# SPDX-License-Identifier: Apache-2.0
"""What judgments come to, shown: a table on the console, and a figure with a panel for each dimension."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from evoalign.report.figures import COLORS, INK, canvas, frame, save_both
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from evoalign.analysis.judge.ratings import Ratings, Row

WIDTH, ROW, LABEL = 8.5, 0.34, 40
"""Inches across, inches of a model, letters of its name."""


def table(found: Ratings) -> Table:
    """A row a dimension and model, the strongest first."""
    by_elo = found.settings.method == "elo"
    shown = Table("dimension", "model", title="ratings", title_justify="left", title_style="bold")
    more = ["mean over orders", "sd", "95 % of orders"] if by_elo else ["95 % interval"]
    for heading in ("rating", *more, "won", "lost", "tied"):
        shown.add_column(heading, justify="right", overflow="fold")
    for dimension in found.dimensions:
        for row in dimension.rows:
            names = (Text(visible(dimension.name)), Text(visible(row.model)))
            cells = [_rating(row), *(_orders(row) if by_elo else [_interval(row)])]
            shown.add_row(*names, *cells, *map(str, (row.won, row.lost, row.tied)))
    return shown


def _rating(row: Row) -> str:
    return "none" if row.rated.rating is None else f"{row.rated.rating:.0f}"


def _interval(row: Row) -> str:
    low, high = row.rated.low, row.rated.high
    if low is None and high is None:
        return row.rated.why or "-"
    ends = ["no end" if end is None else f"{end:.0f}" for end in (low, high)]
    return f"{' to '.join(ends)}{f' ({row.rated.why})' if row.rated.why else ''}"


def _orders(row: Row) -> list[str]:
    if row.elo is None:
        return [row.rated.why or "-", "", ""]
    return [f"{row.elo.mean:.0f}", f"{row.elo.sd:.0f}", f"{row.elo.low:.0f} to {row.elo.high:.0f}"]


def draw(found: Ratings, folder: Path) -> list[Path]:
    """`ratings.png` and `ratings.svg`: each model's rating with its bar. Of Elo the dot is the mean over orders."""
    heights = [ROW * len(dimension.rows) + 0.9 for dimension in found.dimensions]
    figure = canvas(WIDTH, sum(heights) + 0.8, layout="constrained")
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, dimension in zip(grid[:, 0], found.dimensions, strict=True):
        frame(
            axes,
            f"{shorten(visible(dimension.name), LABEL)}, {shorten(visible(dimension.reference), LABEL)} = 1000",
            "",
        )
        for place, row in enumerate(dimension.rows):
            middle = row.rated.rating if row.elo is None else row.elo.mean
            if middle is None:
                continue
            low, high = (middle if end is None else end for end in (row.rated.low, row.rated.high))
            halves = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
            axes.errorbar([middle], [place], xerr=halves, fmt="o", color=COLORS[0], markersize=5, capsize=3)
        axes.axvline(1000.0, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_yticks(range(len(dimension.rows)), [_label(row) for row in dimension.rows])
        axes.set_ylim(len(dimension.rows) - 0.5, -0.5)
    over = "95 % of orders of the judgments" if found.settings.method == "elo" else "95 % for new questions"
    grid[-1][0].set_xlabel(f"rating, Elo scale; bars: {over}")
    return save_both(figure, folder / "ratings.png")


def _label(row: Row) -> str:
    name = shorten(visible(row.model), LABEL)
    return f"{name} (no rating)" if row.rated.rating is None else name
