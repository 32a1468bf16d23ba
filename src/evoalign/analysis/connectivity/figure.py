# SPDX-License-Identifier: Apache-2.0
"""The figures of connectivity: of each line reward, KL and hacked share by alpha; the plane as a contour plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign.report.figures import COLORS, GRID, INK, MARKERS, SURFACE, canvas, frame, plain, save_both
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from evoalign.analysis.connectivity.compute import Line
    from evoalign.analysis.connectivity.plane import Plane
    from evoalign.statistics import Estimate

WIDTH, ROW = 8.0, 2.4
"""Inches."""
LABEL = 40
LEVELS = 12


def draw(lines: Sequence[Line], plane: Plane | None, folder: Path) -> list[Path]:
    """PNG and SVG of each line, in their order, and of the plane."""
    found = [path for i, line in enumerate(lines, 1) for path in _line(line, folder / f"connectivity_{i}.png")]
    return found if plane is None else [*found, *_plane(plane, folder / "connectivity_plane.png")]


def _line(line: Line, path: Path) -> list[Path]:
    hacked = line.hacked if any(one.mean for one in line.hacked) else None
    rows = [("reward", line.rewards), ("KL from the base,\nnats a token", line.kl), ("hacked share", hacked)]
    known = [(name, found) for name, found in rows if found is not None]
    figure = canvas(WIDTH, ROW * len(known) + 1.0, layout="constrained")
    panels = figure.subplots(len(known), 1, sharex=True, squeeze=False)[:, 0]
    frame(panels[0], f"{_name(line.a)} (0) to {_name(line.b)} (1)", "")
    for axes, (name, found) in zip(panels, known, strict=True):
        plain(axes)
        axes.axvspan(0, 1, color=GRID, alpha=0.35, linewidth=0)
        axes.set_ylabel(name)
        _band(axes, line, found, 0, "plain" if name == "reward" else "")
    if line.smooth is not None:
        _band(panels[0], line, line.smooth, 1, "mean over noise on the weights")
    ends = [line.rewards[int(np.flatnonzero(line.alphas_A == end)[0])].mean for end in (0.0, 1.0)]
    panels[0].plot([0, 1], ends, color=INK, linestyle=(0, (2, 2)), linewidth=1.0, label="chord")
    none = "" if hacked else f"\nno answer to the {line.rewards[0].n} examples is hacked at any of the points"
    panels[-1].set_xlabel(f"alpha: bands are 95 % at each point alone, for new examples{none}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, frameon=False)
    return save_both(figure, path)


def _band(axes: Axes, line: Line, found: Sequence[Estimate], index: int, label: str) -> None:
    style: dict[str, Any] = {"color": COLORS[index], "linestyle": ("-", "--")[index]}
    means = [one.mean for one in found]
    low = [one.mean if one.low is None else one.low for one in found]
    high = [one.mean if one.high is None else one.high for one in found]
    axes.fill_between(line.alphas_A, low, high, color=COLORS[index], alpha=0.18, linewidth=0)
    axes.plot(line.alphas_A, means, label=label, marker=MARKERS[index], markersize=3.5, linewidth=1.5, **style)


def _plane(plane: Plane, path: Path) -> list[Path]:
    from matplotlib.ticker import MaxNLocator

    tall = float(np.ptp(plane.ys) / np.ptp(plane.xs))
    figure = canvas(7.5, min(9.0, max(3.0, 5.6 * tall)) + 1.4, layout="constrained")
    axes = figure.subplots()
    means = np.array([[found.mean for found in row] for row in plane.rewards])
    own = [found.mean for found in plane.own]
    low, high = float(min(means.min(), *own)), float(max(means.max(), *own))
    levels = None if low == high else MaxNLocator(LEVELS).tick_values(low, high)
    surface = axes.contourf(plane.xs, plane.ys, means, levels=levels, cmap=SURFACE)
    if np.ptp(means) > 0:
        axes.contour(plane.xs, plane.ys, means, levels=levels, colors="white", linewidths=0.4, alpha=0.6)
    if levels is not None:
        figure.colorbar(surface, ax=axes, label="mean reward")
    for index, (name, (x, y), value) in enumerate(zip(plane.names, plane.corners, own, strict=True)):
        look: dict[str, Any] = {"marker": MARKERS[index], "s": 110, "edgecolors": INK, "linewidths": 1.4, "zorder": 3}
        scale: dict[str, Any] = {"cmap": surface.cmap, "norm": surface.norm}
        axes.scatter([x], [y], c=[value], label=f"{_name(name)}: {value:.3g}", **look, **scale)
    frame(axes, "Reward on the plane through three models", "distance in weights (L2)")
    axes.grid(visible=False)
    axes.set_ylabel("distance in weights (L2)")
    axes.set_aspect("equal", adjustable="box")
    count, asked = means.size, plane.own[0].n
    title = f"{count} points, colours between them interpolated; {asked} examples, no error shown; signs: own rewards"
    figure.legend(loc="outside lower left", ncols=3, frameon=False, title=title, alignment="left")
    return save_both(figure, path)


def _name(target: str) -> str:
    text = visible(target)
    return text if len(text) <= LABEL else "..." + shorten(text[-(LABEL - 3) :], LABEL)
