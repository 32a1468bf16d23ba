# SPDX-License-Identifier: Apache-2.0
"""Figures of a comparison: a measure against each budget, and against the divergence from the base model.

Groups differ in colour (Okabe and Ito 2008, for any colour vision), line style and marker, and are labelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoalign.analysis.compare.comparison import Comparison, Curve, Match, curve
from evoalign.analysis.compare.groups import Group
from evoalign.analysis.compare.runs import Matching, Run
from evoalign.analysis.compare.tables import TITLES
from evoalign.report.figures import COLORS, INK, LINES, MARKERS, SIZE_INCHES, canvas, frame, save
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES: dict[Matching, str] = {**TITLES, "wall": f"{TITLES['wall']} (s)"}
LOG_SPAN = 30
"""Ratio of budgets above which the axis is logarithmic."""
LABEL = 34
LETTER = 0.0105
"""Width of a letter of a label at a line's end, as a fraction of the figure."""
LEGEND_COLUMNS = 3
NEAREST = 0.05
"""Minimum distance of labels at line ends, as a fraction of the axis."""


def draw(comparison: Comparison, folder: Path) -> dict[str, Path]:
    """Draw a figure for each budget with a curve, and one against the divergence; return their paths by name."""
    drawn: dict[str, Path] = {}
    for match in comparison.matches:
        assert match.by is not None
        curves = [(i, g, curve(g, match.by, comparison.measure)) for i, g in enumerate(comparison.groups)]
        known = [(i, group, found) for i, group, found in curves if found is not None]
        if known:
            drawn[match.by] = folder / f"{_file(comparison.measure)}_by_{match.by}.png"
            longest = max(len(_name(group)) for _, group, _ in known)
            right = max(0.78, 0.97 - LETTER * longest)
            _draw(drawn[match.by], _budget_painter(comparison, match, known), len(known) + 1, right)
    if any(len(_trail(run, comparison.measure)) > 1 for group in comparison.groups for run in group.runs):
        drawn["divergence"] = folder / f"{_file(comparison.measure)}_by_divergence.png"
        _draw(drawn["divergence"], lambda axes: _divergence(axes, comparison), len(comparison.groups), 0.97)
    return drawn


def _file(measure: str) -> str:
    """Return a safe file name for a measure, whose name is untrusted."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in measure)[:40] or "measure"


def _style(index: int) -> dict[str, Any]:
    return {"color": COLORS[index % len(COLORS)], "linestyle": LINES[index % len(LINES)]}


def _name(group: Group) -> str:
    return shorten(visible(group.label), LABEL)


# --- against a budget -------------------------------------------------------------------------------------------------


def _budget_painter(
    comparison: Comparison, match: Match, curves: Sequence[tuple[int, Group, Curve]]
) -> Callable[[Axes], None]:
    def paint(axes: Axes) -> None:
        handles: list[Any] = [_curve(axes, index, found) for index, _, found in curves]
        names = [f"{_name(group)} ({len(group.runs)} seed{'s'[: len(group.runs) > 1]})" for _, group, _ in curves]
        if match.limit is not None and sum(one.estimate is not None for one in match.standings) > 1:
            handles.append(axes.axvline(match.limit, color=INK, linewidth=1.0, linestyle=(0, (1, 2)), zorder=1))
            names.append("matched budget")
        _scale(axes, [found for _, _, found in curves])
        _label_ends(axes, [(found.x[-1], found.mean[-1], _name(group), index) for index, group, found in curves])
        measure = visible(comparison.measure)
        _dress(axes, f"{measure} on the test split", AXES[match.by or "wall"], measure, handles, names)

    return paint


def _curve(axes: Axes, index: int, found: Curve) -> Any:
    """Draw a group: each seed thin, the mean bold, and its interval if there is one."""
    style = _style(index)
    for steps in found.steps:
        axes.plot(*zip(*steps, strict=True), drawstyle="steps-post", color=style["color"], linewidth=0.7, alpha=0.3)
        marks: dict[str, Any] = {"marker": MARKERS[index % len(MARKERS)], "markersize": 3, "markeredgewidth": 0}
        axes.plot(*zip(*steps, strict=True), linestyle="", color=style["color"], alpha=0.45, **marks)
    if found.low != found.mean:
        axes.fill_between(found.x, found.low, found.high, step="post", color=style["color"], alpha=0.15, linewidth=0)
    (line,) = axes.plot(found.x, found.mean, drawstyle="steps-post", linewidth=2.2, zorder=4, **style)
    return line


def _scale(axes: Axes, curves: Sequence[Curve]) -> None:
    """Fit the axes to the measured values; logarithmic beyond the first evaluation if budgets differ by `LOG_SPAN`."""
    from matplotlib.ticker import EngFormatter

    ends = [found.x[-1] for found in curves]
    values = [value for found in curves for steps in found.steps for _, value in steps]
    air = 0.08 * ((max(values) - min(values)) or abs(max(values)) or 1.0)
    axes.set_ylim(min(values) - air, max(values) + air)  # not to the bands, which are wide for three seeds
    first = min((x for found in curves for steps in found.steps for x, _ in steps if x > 0), default=None)
    if first is not None and max(ends) > LOG_SPAN * min(ends):
        axes.set_xscale("symlog", linthresh=first, linscale=0.5)
        axes.set_xlim(0, max(ends) * 1.15)
    else:
        axes.set_xlim(0, max(x for found in curves for steps in found.steps for x, _ in steps) * 1.02 or 1)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, int]]) -> None:
    """Label the end of each line, moved where labels would overlap."""
    from matplotlib.patheffects import withStroke

    low, high = axes.get_ylim()
    places = _spread([(y - low) / (high - low) for _, y, _, _ in ends])
    for (x, _, name, index), place in zip(ends, places, strict=True):
        axes.annotate(
            name,
            (x, low + place * (high - low)),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold",
            color=_style(index)["color"],
            annotation_clip=False,
            zorder=6,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )


def _spread(places: Sequence[float]) -> list[float]:
    """Return the places in the same order, at least `NEAREST` apart, and at most 1 if they fit."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for below, above in pairwise(order):
        moved[above] = max(moved[above], moved[below] + NEAREST)
    top = max(1.0, NEAREST * (len(places) - 1))
    for i in reversed(order):
        moved[i] = min(moved[i], top)
        top = moved[i] - NEAREST
    return moved


# --- against the divergence -------------------------------------------------------------------------------------------


def _trail(run: Run, measure: str) -> list[tuple[float, float]]:
    """Return divergence and measure of a run's points; the start has divergence 0."""
    found: list[tuple[float, float]] = []
    for point in run.points:
        known = {"exact": 0.0} if point.step == 0 else (point.divergence or {})
        nats = known.get("exact") if known.get("exact") is not None else known.get("k3")
        if nats is not None and measure in point.measures:
            found.append((nats, point.measures[measure]))
    return found


def _divergence(axes: Axes, comparison: Comparison) -> None:
    """Draw the path of each run, with a marker at its end."""
    from matplotlib.lines import Line2D

    handles: list[Any] = []
    names: list[str] = []
    for index, group in enumerate(comparison.groups):
        style, marker = _style(index), MARKERS[index % len(MARKERS)]
        trails = [trail for trail in (_trail(run, comparison.measure) for run in group.runs) if len(trail) > 1]
        for trail in trails:
            x, y = zip(*trail, strict=True)
            axes.plot(x, y, linewidth=1.1, alpha=0.5, marker=".", markersize=4, **style)
            end: dict[str, Any] = {"marker": marker, "markersize": 8, "markeredgecolor": "white"}
            axes.plot(x[-1], y[-1], linestyle="", zorder=5, color=style["color"], **end)
        if trails:
            handles.append(Line2D([], [], marker=marker, markersize=8, linewidth=1.1, markeredgecolor="white", **style))
            names.append(f"{_name(group)} (marker: its end)")
    axes.set_xlim(left=-0.02 * axes.get_xlim()[1])
    measure = visible(comparison.measure)
    _dress(
        axes, f"{measure} against the divergence from the base model", "KL (nats per token)", measure, handles, names
    )


# --- all figures ------------------------------------------------------------------------------------------------------


def _draw(path: Path, paint: Callable[[Axes], None], entries: int, right: float) -> None:
    """Draw a figure whose height grows with the `entries` of its legend; `right` leaves room for labels."""
    width, height = SIZE_INCHES
    legend = 0.22 * -(-entries // LEGEND_COLUMNS)
    height += legend
    figure = canvas(width, height)
    figure.subplots_adjust(left=0.09, right=right, top=1 - 0.45 / height, bottom=(0.75 + legend) / height)
    paint(figure.add_subplot())
    save(figure, path)


def _dress(axes: Axes, title: str, x: str, y: str, handles: Sequence[Any], names: Sequence[str]) -> None:
    frame(axes, title, x)
    axes.set_ylabel(y)
    layout: dict[str, Any] = {"loc": "lower center", "ncols": LEGEND_COLUMNS, "frameon": False}
    axes.figure.legend(handles, names, fontsize=9, handlelength=3.2, **layout)
