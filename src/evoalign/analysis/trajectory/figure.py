# SPDX-License-Identifier: Apache-2.0
"""The figures of trajectory: the map of all ways, and of each run of ES distance and alignment beside its placebos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign.report.figures import COLORS, GRID, INK, LINES, MARKERS, SURFACE, canvas, frame, plain, save_both
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from evoalign.analysis.trajectory.compute import Followed
    from evoalign.analysis.trajectory.measures import Map
    from evoalign.analysis.trajectory.walks import Point

LABEL = 40
REWARD = "reward in training at that step: of the members around a mean,\nof a member its own; white: not known"


def draw(points: Sequence[Point], places: Map, paths: Sequence[Followed], folder: Path) -> list[Path]:
    """PNG and SVG of the map, and of each run of ES, in their order."""
    found = _map(points, places, {path.target: len(path.placebos) for path in paths}, folder / "trajectory_map.png")
    return found + [f for i, path in enumerate(paths, 1) for f in _path(path, folder / f"trajectory_{i}.png")]


def _map(points: Sequence[Point], places: Map, placebos: Mapping[str, int], path: Path) -> list[Path]:
    """`placebos`: how many of each target were followed, of which few are on the map."""
    figure = canvas(8.0, 6.4, layout="constrained")
    axes = figure.subplots()
    rewards = [p.reward for p in points if p.reward is not None]
    low, high = (min(rewards), max(rewards)) if rewards else (0.0, 1.0)
    scale: dict[str, Any] = {"cmap": SURFACE, "vmin": low, "vmax": high if high > low else low + 1}
    shown = None
    for index, target in enumerate(dict.fromkeys(p.target for p in points)):
        for kind in ("placebo", "mean", "saved", "member"):
            own = [i for i, p in enumerate(points) if p.target == target and p.kind == kind]
            if own:
                label = f"{_name(target)}{_what(kind, [points[i] for i in own], placebos.get(target, 0))}"
                shown = _way(axes, label, kind, index, [points[i] for i in own], places.places_PC[own], scale) or shown
    frame(axes, "The ways through the weights", f"first component ({places.shares_C[0]:.0%} of the spread)")
    axes.set_ylabel(f"second component ({places.shares_C[1]:.0%})")
    axes.set_aspect("equal", adjustable="datalim")
    if shown is not None and high > low:
        figure.colorbar(shown, ax=axes, label=REWARD)
    figure.legend(loc="outside lower left", ncols=1, frameon=False)
    return save_both(figure, path)


def _what(kind: str, points: Sequence[Point], placebos: int) -> str:
    """What the legend says of points behind the name of their target."""
    if kind == "member":
        return f": {len(points)} members, small signs, of {len({point.step for point in points})} generations"
    if kind == "placebo":
        drawn = len({point.number for point in points})
        return f": placebo, a random walk ({drawn} of {max(drawn, placebos)} that were followed; x: its end)"
    return ""


def _way(
    axes: Axes, label: str, kind: str, index: int, points: Sequence[Point], places: Any, scale: dict[str, Any]
) -> Any:
    color = COLORS[index % len(COLORS)]
    x, y = places[:, 0], places[:, 1]
    if kind == "placebo":
        axes.plot(x, y, color=color, linestyle=":", linewidth=1.2, label=label)
        axes.plot(x[-1:], y[-1:], color=color, marker="x", linestyle="")
        return None
    if kind != "member":
        line = LINES[index % len(LINES)]
        axes.plot(x, y, color=color, linestyle=line, linewidth=1.0, label=label, zorder=2)
    known = [i for i, p in enumerate(points) if p.reward is not None]
    rest = [i for i in range(len(points)) if i not in known]
    size = 10 if kind == "member" else 26
    look: dict[str, Any] = {"marker": MARKERS[index % len(MARKERS)], "s": size, "zorder": 3, "linewidths": 0.6}
    axes.scatter(x[rest], y[rest], facecolors="white", edgecolors=color, **look)
    if kind == "member":
        axes.plot([], [], color=color, linestyle="", marker=look["marker"], markersize=3, label=label)
    rewards = [p.reward for p in points if p.reward is not None]
    found = axes.scatter(x[known], y[known], c=rewards, edgecolors=color, **look, **scale)
    return found if known else None


def _path(path: Followed, file: Path) -> list[Path]:
    figure = canvas(8.0, 7.2, layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    frame(panels[0], _name(path.target), "")
    steps = np.array(path.steps)
    _panel(panels[0], steps, [p.distances_P for p in path.placebos], path.own.distances_P, "distance from\nthe start")
    if path.expected is not None:
        law: dict[str, Any] = {"color": INK, "linestyle": (0, (2, 2)), "linewidth": 1.2}
        panels[0].plot(steps, path.expected, label="random walk, by formula", **law)
    _panel(panels[1], steps[1:-1], [p.next_S for p in path.placebos], path.own.next_S, "cosine with\nthe next step")
    _panel(panels[2], steps[1:], [p.rest_S for p in path.placebos], path.own.rest_S, "cosine with\nall other steps")
    for axes in panels[1:]:
        plain(axes)
        axes.axhline(0, color=GRID, linewidth=1.0)
    panels[-1].set_xlabel("generation: bands are the range of the placebos")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, frameon=False)
    return save_both(figure, file)


def _panel(axes: Axes, steps: Any, placebos: Sequence[Any], own: Any, label: str) -> None:
    if placebos:
        low, high = np.min(placebos, axis=0), np.max(placebos, axis=0)
        look: dict[str, Any] = {"color": COLORS[1], "alpha": 0.22, "linewidth": 0}
        axes.fill_between(steps, low, high, label=f"{len(placebos)} placebos", **look)
    axes.plot(steps, own, color=COLORS[0], marker="o", markersize=3, linewidth=1.4, label="the run")
    axes.set_ylabel(label)


def _name(target: str) -> str:
    text = visible(target)
    return text if len(text) <= LABEL else "..." + shorten(text[-(LABEL - 3) :], LABEL)
