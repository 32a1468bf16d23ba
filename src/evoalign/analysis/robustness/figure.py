# SPDX-License-Identifier: Apache-2.0
"""The figure of robustness: reward, and KL below it, by the width of the noise; a column for each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evoalign.report.figures import canvas, frame, plain, save_both, series
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from evoalign.analysis.robustness.compute import Cell, Profile
    from evoalign.statistics import Estimate

COLUMN, ROW = 3.2, 2.8
"""Inches of a panel."""
MOST = 6
"""Columns in a figure; more parts (layers) go into further figures."""
SHIFT = 1.03
"""Targets are drawn so much apart at each sigma, so that their intervals can be told apart."""

ALONE = 2.0
"""Where there is one sigma, the axis goes from it so many times down and up."""


def draw(profiles: Mapping[str, Profile], folder: Path) -> list[Path]:
    """PNG and SVG; a further pair for each `MOST` parts."""
    parts = list(dict.fromkeys(part for profile in profiles.values() for part, _ in profile.cells))
    groups = [parts[i : i + MOST] for i in range(0, len(parts), MOST)]
    names = ["robustness.png", *(f"robustness_{i}.png" for i in range(2, len(groups) + 1))]
    return [path for name, group in zip(names, groups, strict=True) for path in _draw(profiles, group, folder / name)]


def _draw(profiles: Mapping[str, Profile], parts: Sequence[str], path: Path) -> list[Path]:
    has_kl = any(cell.nats_K for profile in profiles.values() for cell in profile.cells.values())
    rows = 2 if has_kl else 1
    width = max(COLUMN * len(parts), 2 * COLUMN) + 0.6
    figure = canvas(width, ROW * rows + 0.4 + 0.25 * len(profiles), layout="constrained")
    grid = figure.subplots(rows, len(parts), sharex=True, sharey="row", squeeze=False)
    for column, part in enumerate(parts):
        frame(grid[0][column], "whole model" if part == "all" else part, "" if has_kl else "sigma of the noise")
        _panel(grid[0][column], profiles, part, lambda cell: cell.reward)
        for index, profile in enumerate(profiles.values()):
            style = {**series(index), "marker": ""}
            grid[0][column].axhline(float(profile.rewards_E.mean()), linewidth=0.8, alpha=0.6, **style)
        if has_kl:
            plain(grid[1][column])
            grid[1][column].set_xlabel("sigma of the noise")
            _panel(grid[1][column], profiles, part, lambda cell: cell.kl)
    grid[0][0].set_ylabel("reward")
    if has_kl:
        grid[1][0].set_ylabel("KL from itself, nats a token")
    handles, labels = grid[0][0].get_legend_handles_labels()
    title = "bars: 95 % for new draws and examples; thin lines: without noise"
    figure.legend(handles, labels, loc="outside lower left", frameon=False, title=title, alignment="left")
    return save_both(figure, path)


def _panel(axes: Axes, profiles: Mapping[str, Profile], part: str, measure: Callable[[Cell], Estimate | None]) -> None:
    sigmas = sorted({sigma for profile in profiles.values() for _, sigma in profile.cells})
    axes.set_xscale("log")
    if len(sigmas) == 1:  # the axis would be as wide as the targets are drawn apart
        axes.set_xlim(sigmas[0] / ALONE, sigmas[0] * ALONE)
    axes.set_xticks(sigmas, [f"{sigma:g}" for sigma in sigmas])
    axes.set_xticks([], minor=True)
    for index, (name, profile) in enumerate(profiles.items()):
        known = {sigma: measure(cell) for (of, sigma), cell in sorted(profile.cells.items()) if of == part}
        points = [(sigma, found) for sigma, found in known.items() if found is not None]
        shift = SHIFT ** (index - (len(profiles) - 1) / 2)
        x, y = [sigma * shift for sigma, _ in points], [found.mean for _, found in points]
        halves = [
            [found.mean - (found.mean if found.low is None else found.low) for _, found in points],
            [(found.mean if found.high is None else found.high) - found.mean for _, found in points],
        ]
        label = shorten(visible(name), 60)
        axes.errorbar(x, y, yerr=halves, label=label, capsize=2.5, markersize=4, linewidth=1.4, **series(index))
