# SPDX-License-Identifier: Apache-2.0
"""The figure of hacking: the share of each kind before training and after it, a panel for each target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoalign.report.figures import COLORS, canvas, frame, save_both
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from evoalign.analysis.hacking.compute import Rate

WIDTH, ROW, MOST, LABEL = 8.5, 0.28, 6, 70
"""Inches across, inches of a kind, targets in a figure, letters of a name."""
BESIDE = 0.16
"""Before and after stand so much apart."""
ALWAYS = ("hacked", "degenerate")
"""Kinds that have a row even where there is none; the others only where they were seen."""
LEAST = 0.05
"""The shortest axis: shares up to so much."""
SIDES: dict[str, dict[str, Any]] = {
    "before": {"fmt": "o", "color": COLORS[6]},
    "after": {"fmt": "s", "color": COLORS[1]},
}


def draw(rates: Mapping[str, Mapping[str, Rate]], folder: Path) -> list[Path]:
    """PNG and SVG; a further pair for each `MOST` targets."""
    names = list(rates)
    groups = [names[i : i + MOST] for i in range(0, len(names), MOST)]
    files = ["hacking.png", *(f"hacking_{i}.png" for i in range(2, len(groups) + 1))]
    drawn = [_draw({n: rates[n] for n in group}, folder / file) for file, group in zip(files, groups, strict=True)]
    return [path for pair in drawn for path in pair]


def _ends(rate: Rate) -> list[float]:
    """How far its signs and bars go."""
    return [found.mean if found.high is None else found.high for found in (rate.before, rate.after)]


def _is_there(rate: Rate) -> bool:
    return rate.before.mean > 0 or rate.after.mean > 0


def _draw(rates: Mapping[str, Mapping[str, Rate]], path: Path) -> list[Path]:
    shown = {
        name: [kind for kind in kinds if kind in ALWAYS or _is_there(kinds[kind])] for name, kinds in rates.items()
    }
    ends = [end for name, kinds in rates.items() for kind in shown[name] for end in _ends(kinds[kind])]
    top = min(1.0, max(LEAST, 1.1 * max(ends, default=0.0)))
    heights = [ROW * len(kinds) + 0.9 for kinds in shown.values()]
    figure = canvas(WIDTH, sum(heights) + 0.7, layout="constrained")
    grid = figure.subplots(len(rates), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, (name, kinds) in zip(grid[:, 0], rates.items(), strict=True):
        others = len(kinds) - len(shown[name])
        frame(axes, f"{shorten(visible(name), LABEL)}{f' ({others} other kinds: none)' if others else ''}", "")
        for place, kind in enumerate(shown[name]):
            rate = kinds[kind]
            for found, side, label in ((rate.before, -1, "before"), (rate.after, 1, "after")):
                low, high = (found.mean if end is None else end for end in (found.low, found.high))
                halves = [[found.mean - low], [high - found.mean]]
                style = SIDES[label] | {"label": None if place else label, "markersize": 4, "capsize": 2}
                axes.errorbar([found.mean], [place + side * BESIDE], xerr=halves, **style)
        axes.set_yticks(range(len(shown[name])), [kind.replace("_", " ") for kind in shown[name]])
        axes.set_ylim(len(shown[name]) - 0.5, -0.5)
        axes.set_xlim(-0.02 * top, 1.02 * top)
    grid[-1][0].set_xlabel("share of the test completions")
    handles, labels = grid[0][0].get_legend_handles_labels()
    title = "bars: 95 % for new examples"
    figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False, title=title, alignment="left")
    return save_both(figure, path)
