# SPDX-License-Identifier: Apache-2.0
"""The figure of the front: reward over KL from the base model, a line a target, a colour a group of seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from evoalign.report.figures import INK, canvas, frame, save_both, series
from evoalign.report.tables import shorten, visible

if TYPE_CHECKING:
    from evoalign.analysis.front.compute import Front
    from evoalign.statistics import Estimate


def draw(found: Front, folder: Path) -> list[Path]:
    """PNG and SVG. KL goes by its square root, by which small steps lie on a line (Gao et al., section 3)."""
    groups = list(dict.fromkeys(point.group for point in found.points))
    figure = canvas(8.0, 5.0 + 0.22 * len(groups), layout="constrained")
    axes = figure.subplots()
    frame(axes, "reward and distance from the base model", "KL(model || base), nats a token (square root)")
    axes.set_xscale("function", functions=(_root, _square))
    axes.set_ylabel("reward, test split")
    axes.axhline(found.base.mean, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), label="base")
    for line in dict.fromkeys(point.line for point in found.points):
        points = [point for point in found.points if point.line == line]
        group = points[0].group
        label = shorten(visible(group), 60) if line == _first(found, group) else "_"
        x, y = [[0.0, *(p.kl.mean for p in points)], [found.base.mean, *(p.reward.mean for p in points)]]
        style = series(groups.index(group))
        axes.plot(x, y, label=label, markersize=4, linewidth=1.2, markevery=range(1, len(x)), **style)
        for point in points:
            axes.errorbar(
                [point.kl.mean], [point.reward.mean], xerr=_half(point.kl), yerr=_half(point.reward), fmt="none",
                ecolor=style["color"], elinewidth=0.8, alpha=0.6,
            )  # fmt: skip
    axes.set_xlim(left=0)
    best = [(0.0, found.base.mean), *sorted((p.kl.mean, p.reward.mean) for p in found.points if p.name in found.best)]
    x, y = zip(*best, strict=True)
    axes.plot(x, y, drawstyle="steps-post", color=INK, linewidth=0.8, alpha=0.5, label="front of the means")
    title = "bars: 95 % for new examples"
    figure.legend(loc="outside lower left", frameon=False, title=title, alignment="left")
    return save_both(figure, folder / "front.png")


def _first(found: Front, group: str) -> str:
    return next(point.line for point in found.points if point.group == group)


def _half(found: Estimate) -> list[list[float]] | None:
    if found.low is None or found.high is None:
        return None
    return [[max(0.0, found.mean - found.low)], [max(0.0, found.high - found.mean)]]


def _root(x: object) -> object:
    import numpy as np

    return np.sqrt(np.maximum(np.asarray(x, dtype=float), 0.0))


def _square(x: object) -> object:
    import numpy as np

    return np.square(np.asarray(x, dtype=float))
