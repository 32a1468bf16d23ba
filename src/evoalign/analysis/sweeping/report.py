# SPDX-License-Identifier: Apache-2.0
"""The figures of a sweep: a heat map over two settings, lines over one, and a scatter plot of a search.

A heat map shows the measure and the share of completions with signs of reward hacking. Its axes have the values that
were run, evenly spaced, so that values that differ by factors appear as on a log axis. A cell that was not run is
hatched.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign.report.figures import BEST, HEADING, INK, MEAN, TEST, canvas, plain, save, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAFE_HACKED = 0.01
"""No hack is seen in a cell if at most this share of the final test completions is hacked in every seed (none at all
for a hundred completions or fewer), and the mean reward is above that before training."""
BAND = "#0a7d33"
HATCH = "#b8bec5"
LOG_RATIO = 8.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class Point:
    """A cell: its settings, and the measure and hacked share of each finished seed.

    `start` is the measure before training, `gain` the mean change of the reward.
    """

    settings: Mapping[str, Any]
    values: Sequence[float]
    hacked: Sequence[float]
    start: float | None = None
    gain: float | None = None

    @property
    def is_safe(self) -> bool:
        """Whether no hack is seen in any seed and the reward rose, see `SAFE_HACKED`."""
        return bool(self.hacked) and max(self.hacked) <= SAFE_HACKED and self.gain is not None and self.gain > 0


def heat_map(
    points: Sequence[Point], path: str | Path, *, x: str, y: str, measure: str = "reward", title: str = ""
) -> None:
    """Draw the measure and the hacked share over two settings, and outline the cells in which no hack is seen."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    xs, ys = (ordered([point.settings.get(key) for point in points]) for key in (x, y))
    figure = canvas(max(9.0, 2 * (1.5 + 0.95 * len(xs))), max(3.6, 1.9 + 0.72 * len(ys)), layout="constrained")
    left, right = figure.subplots(1, 2)
    at = {(xs.index(p.settings.get(x)), ys.index(p.settings.get(y))): p for p in points}
    for axes, name, kind in ((left, measure, "values"), (right, "hacked share", "hacked")):
        _tiles(axes, {place: getattr(p, kind) for place, p in at.items()}, len(xs), len(ys), kind == "hacked")
        _outline(axes, {place for place, p in at.items() if p.is_safe})
        axes.set_xticks(range(len(xs)), [shown(v) for v in xs])
        axes.set_yticks(range(len(ys)), [shown(v) for v in ys])
        axes.set_xlabel(x, color=INK)
        axes.set_title(name, loc="left", fontsize=10, color=INK)
        axes.tick_params(length=0, labelcolor=INK)
        axes.spines[:].set_visible(False)
    left.set_ylabel(y, color=INK)
    handles: list[Any] = []
    if any(p.is_safe for p in points):
        least = min(len(p.hacked) for p in points if p.is_safe)
        rule = f"no hack seen: at most {SAFE_HACKED:.0%} in each of {least} or more seeds, reward above the start"
        handles.append(Line2D([], [], color=BAND, linewidth=3, label=rule))
    if len(at) < len(xs) * len(ys) or any(not p.values for p in points):
        gap: dict[str, Any] = {"facecolor": "white", "edgecolor": HATCH, "hatch": "///", "linewidth": 0}
        handles.append(Patch(label="not run, or not done", **gap))
    if handles:
        figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    _finish(figure, title, path)


def lines(points: Sequence[Point], path: str | Path, *, x: str, measure: str = "reward", title: str = "") -> None:
    """Draw the measure over one setting: seeds, mean and standard deviation; below, the hacked share."""
    by_value = {shown(point.settings.get(x)): point for point in points}
    values = ordered([point.settings.get(x) for point in points])
    ran = [by_value[shown(value)] for value in values]
    numeric = _is_number(values)
    places = [float(v) for v in values] if numeric else [float(i) for i in range(len(values))]
    figure = canvas(9.0, 5.6, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.2])
    _spread(top, places, [point.values for point in ran], MEAN)
    starts = [point.start for point in ran if point.start is not None]
    if starts:
        top.axhline(float(np.mean(starts)), color=TEST, linestyle=":", linewidth=1.3, label="before training")
    _spread(bottom, places, [point.hacked for point in ran], BEST)
    bottom.set_ylim(-0.06, 1.06)
    _scale(bottom, values)
    bottom.set_xticks(places, [shown(v) for v in values], minor=False)
    bottom.set_xticks([], minor=True)
    for axes, name in ((top, measure), (bottom, "hacked share")):
        axes.set_ylabel(name, color=INK)
        plain(axes)
    bottom.set_xlabel(x, color=INK)
    top.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.04), ncols=4)
    _finish(figure, title, path)


def scatter(
    points: Sequence[Point], path: str | Path, *, keys: Sequence[str], measure: str = "reward", title: str = ""
) -> None:
    """Draw the trials of a search over each setting: the mean over seeds, with the best marked."""
    columns = min(3, len(keys))
    rows = -(-len(keys) // columns)
    figure = canvas(max(5.0, 3.6 * columns), 0.6 + 3.0 * rows, layout="constrained")
    means = [float(np.mean(point.values)) for point in points]
    best = int(np.argmax(means))
    for place, key in enumerate(keys):
        axes = figure.add_subplot(rows, columns, place + 1)
        given = [point.settings[key] for point in points]
        values = given if _is_number(given) else [shown(value) for value in given]
        axes.scatter(values, means, s=26, color=MEAN, alpha=0.6, linewidths=0)
        axes.scatter([values[best]], [means[best]], s=90, facecolors="none", edgecolors=TEST, linewidths=2)
        _scale(axes, given)
        axes.margins(x=0.05 if _is_number(given) else 0.25)
        axes.set_xlabel(key, color=INK)
        axes.set_ylabel("" if place % columns else measure, color=INK)
        plain(axes)
    _finish(figure, title, path)


def ordered(values: Sequence[Any]) -> list[Any]:
    """Return the distinct values: sorted numbers, then the rest sorted by name."""
    unique = {shown(value): value for value in values}
    numbers = [value for value in unique.values() if _is_number([value])]
    return [*sorted(numbers), *(unique[name] for name in sorted(unique) if not _is_number([unique[name]]))]


def shown(value: Any) -> str:
    """Return a setting's value as text on an axis."""
    return f"{value:g}" if isinstance(value, float) else "default" if value is None else str(value)


def _is_number(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _tiles(axes: Axes, seeds: Mapping[tuple[int, int], Sequence[float]], width: int, height: int, share: bool) -> None:
    """Colour each cell by its mean over seeds, and write the mean into it."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    means = {place: float(np.mean(values)) for place, values in seeds.items() if values}
    low, high = (0.0, 1.0) if share else (min(means.values(), default=0.0), max(means.values(), default=1.0))
    colours, scale = colormaps["Oranges" if share else "Blues"], Normalize(low, high if high > low else low + 1)
    axes.set(xlim=(-0.5, width - 0.5), ylim=(-0.5, height - 0.5))
    for place in itertools.product(range(width), range(height)):
        corner = (place[0] - 0.5, place[1] - 0.5)
        if place not in means:
            axes.add_patch(Rectangle(corner, 1, 1, facecolor="white", edgecolor=HATCH, hatch="///", linewidth=0))
            continue
        depth = 0.08 + 0.8 * float(scale(means[place]))
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=colours(depth), edgecolor="white", linewidth=1.5))
        values = seeds[place]
        text = f"{means[place]:.0%}" if share else f"{means[place]:.3g}"
        if len(values) > 1 and not share:
            text += f"\n± {np.std(values, ddof=1):.2g}"
        ink = "white" if depth > 0.6 else INK
        axes.text(*place, text, ha="center", va="center", fontsize=9, color=ink, linespacing=1.1)
        axes.text(place[0] + 0.45, place[1] - 0.46, f"n {len(values)}", ha="right", va="bottom", fontsize=6, color=ink)


def _outline(axes: Axes, safe: set[tuple[int, int]]) -> None:
    """Draw the edges between cells in which no hack is seen and others."""
    for i, j in safe:
        for di, dj in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            if (i + di, j + dj) not in safe:
                xs, ys = ([c + (d - e) / 2, c + (d + e) / 2] for c, d, e in ((i, di, dj), (j, dj, di)))
                axes.plot(xs, ys, color=BAND, linewidth=3, solid_capstyle="projecting", clip_on=False, zorder=5)


def _spread(axes: Axes, x: Sequence[float], seeds: Sequence[Sequence[float]], color: str) -> None:
    """Draw each seed as a dot, the mean as a line, and one standard deviation from two seeds on."""
    ran = {place: values for place, values in zip(x, seeds, strict=True) if values}
    if not ran:
        return
    places = list(ran)
    means = np.array([np.mean(values) for values in ran.values()])
    widths = np.array([np.std(values, ddof=1) if len(values) > 1 else 0.0 for values in ran.values()])
    if widths.any():
        label = "one standard deviation over seeds"
        axes.fill_between(places, means - widths, means + widths, color=color, alpha=0.15, linewidth=0, label=label)
    axes.plot(places, means, color=color, linewidth=2, marker="o", markersize=4, label="mean over seeds")
    dots = [(place, value) for place, values in ran.items() for value in values]
    style: dict[str, Any] = {"markersize": 5, "markerfacecolor": "none", "markeredgecolor": color, "alpha": 0.7}
    axes.plot(*zip(*dots, strict=True), linestyle="", marker="o", label="a seed", **style)


def _scale(axes: Axes, values: Sequence[Any]) -> None:
    if _is_number(values) and min(values) > 0 and max(values) / min(values) >= LOG_RATIO:
        axes.set_xscale("log")


def _finish(figure: Figure, title: str, path: str | Path) -> None:
    figure.suptitle(wrapped(title, 0.98 * figure.get_figwidth()), x=0.01, ha="left", **HEADING)
    save(figure, Path(path))
