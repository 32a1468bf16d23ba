# SPDX-License-Identifier: Apache-2.0
"""The figures of coverage: pass@k by k with its interval at the last, and what becomes of what the base solves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evoalign.analysis.coverage import estimators as of
from evoalign.analysis.lab import BASE
from evoalign.report.figures import COLORS, GRID, canvas, frame, plain, save_both, series
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from evoalign.analysis.coverage.compute import Tries, Way

    All = Mapping[str, Mapping[Way, Tries]]

COLUMN, ROW = 4.6, 2.9
"""Inches of a panel."""
MOST = 6
"""Targets in a figure; more go into further figures."""
LABEL = 28
"""Letters of a target's name."""
APART = 1.06
"""Intervals, of the largest k, stand so much apart beyond it."""
PARTS = (("preserved", COLORS[0]), ("shrunk", COLORS[1]), ("expanded", COLORS[2]), ("neither", GRID))
"""Of the problems, and their colours."""


def draw(tries: All, ks: Sequence[int], folder: Path) -> list[Path]:
    """PNG and SVG of both figures; a further pair for each `MOST` targets, and no bars of the base alone."""
    names = list(tries)
    drawn: list[Path] = []
    for number, start in enumerate(range(0, len(names), MOST), 1):
        end = "" if number == 1 else f"_{number}"
        drawn += _curves(tries, names[start : start + MOST], ks, folder / f"coverage{end}.png")
    others = [name for name in names if name != BASE]
    for number, start in enumerate(range(0, len(others), MOST), 1):
        end = "" if number == 1 else f"_{number}"
        drawn += _bars(tries, others[start : start + MOST], folder / f"coverage_support{end}.png")
    return drawn


def _curves(tries: All, names: Sequence[str], ks: Sequence[int], path: Path) -> list[Path]:
    kinds = list(dict.fromkeys(way.kind for way in tries[names[0]]))
    figure = canvas(COLUMN * len(kinds) + 1.4, ROW * len(names) + 0.6, layout="constrained")
    grid = figure.subplots(len(names), len(kinds), sharex=True, sharey=True, squeeze=False)
    for row, name in enumerate(names):
        for column, kind in enumerate(kinds):
            axes, last = grid[row][column], row == len(names) - 1
            how = "by temperature" if kind == "temperature" else "by noise on the weights"
            frame(axes, how if column else f"{shorten(visible(name), LABEL)}, {how}", "k" if last else "")
            _panel(axes, {way: one for way, one in tries[name].items() if way.kind == kind}, ks)
            if last:
                title = kind if kind == "temperature" else "sigma"
                axes.legend(frameon=False, fontsize=7, title=title, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        grid[row][0].set_ylabel("pass@k")
    return save_both(figure, path)


def _panel(axes: Axes, ways: Mapping[Way, Tries], ks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ks), [str(k) for k in ks])
    axes.set_xticks([], minor=True)
    for index, (way, one) in enumerate(ways.items()):
        found = [of.estimate(one.solved_NP, k, shared=way.shared) for k in ks]
        style, last = series(index), found[-1]
        axes.plot(list(ks), [e.mean for e in found], label=f"{way.value:g}", markersize=3, linewidth=1.3, **style)
        if last.low is not None and last.high is not None:
            halves = [[last.mean - last.low], [last.high - last.mean]]
            axes.errorbar(
                [ks[-1] * APART ** (index + 1)], [last.mean], yerr=halves, fmt="none", capsize=2, color=style["color"]
            )


def _bars(tries: All, names: Sequence[str], path: Path) -> list[Path]:
    """Beside each bar, hatched, that of the base against itself: what chance alone shows."""
    ways = list(tries[BASE])
    figure = canvas(max(6.0, 0.62 * len(ways) + 2.6), ROW * len(names) + 0.5, layout="constrained")
    grid = figure.subplots(len(names), 1, sharex=True, squeeze=False)
    for row, name in enumerate(names):
        axes = grid[row][0]
        frame(axes, f"{shorten(visible(name), LABEL)} beside the base", "")
        plain(axes)
        for place, way in enumerate(ways):
            base = tries[BASE][way].solved_NP
            for shift, other, hatch in ((-0.2, tries[name][way].solved_NP, None), (0.2, base, "///")):
                found, bottom = of.support(base, other), 0.0
                for part, color in PARTS:
                    height = float(getattr(found, f"{part}_P").mean())
                    label = part if place == 0 and hatch is None else None
                    axes.bar(place + shift, height, 0.36, bottom=bottom, color=color, hatch=hatch, edgecolor="white",
                             linewidth=0.4, label=label)  # fmt: skip
                    bottom += height
        axes.set_ylabel("share of the problems")
        axes.set_ylim(0, 1)
    grid[-1][0].set_xticks(range(len(ways)), [way.short for way in ways], rotation=45, ha="right", fontsize=8)
    title = "hatched: the base against itself"
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, title=title, alignment="left")
    return save_both(figure, path)
