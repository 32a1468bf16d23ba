# SPDX-License-Identifier: Apache-2.0
"""Figures of docs/results/real.md, from the rows of real.py; used by real_tables.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoalign.report.figures import COLORS, MARKERS, canvas, frame, save
from real_rows import Run, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRAY = "#999999"
METHODS = ("es", "grpo", "random")
Point = tuple[float, float]


def _once(seen: set[str], label: str) -> str | None:
    """Return a label for the legend the first time, then None."""
    if label in seen:
        return None
    seen.add(label)
    return label


def _lines(axes: Axes, runs: Sequence[Run], across: str) -> None:
    """Draw the exact share of every run at its evaluations over one of the fields of `Run.curve`."""
    seen: set[str] = set()
    for run in runs:
        curve = [(p[across], 100 * p["exact"]) for p in run.curve() if p[across] is not None]
        at = METHODS.index(run.arm)
        style: dict[str, Any] = {"color": COLORS[at], "marker": MARKERS[at], "markersize": 3, "linewidth": 1}
        axes.plot(*zip(*curve, strict=True), label=_once(seen, run.called), **style)


def budget(study: Study, task: str, to: Path) -> None:
    """Draw the exact share of every run of R over the seconds of training, and over completions."""
    figure = canvas(9, 4, layout="constrained")
    for axes, across in zip(figure.subplots(1, 2, sharey=True), ("seconds", "completions"), strict=True):
        _lines(axes, study.find("r", task=task), across)
        frame(axes, f"Exact, %, over {across}", f"{across} of training")
    figure.axes[0].legend(frameon=False, fontsize=8)
    save(figure, to)


def over_kl(runs: Sequence[Run], to: Path) -> None:
    """Draw the exact share of every run over its KL from the base: points on a logarithmic axis if one went far."""
    figure = canvas(7, 4, layout="constrained")
    axes = figure.subplots()
    _lines(axes, runs, "kl")
    if axes.get_xlim()[1] > 1:
        axes.set_xscale("symlog", linthresh=0.001)
        axes.set_xlim(left=0)
        for line in axes.lines:
            line.set_linestyle("none")
    frame(axes, "Exact share, %, over the KL from the base", "nats per token")
    axes.legend(frameon=False, fontsize=8)
    save(figure, to)


def step_size(study: Study, to: Path) -> None:
    """Draw gain, mean placebo and loss on the other task over the length of the random walk."""
    figure = canvas(7, 4, layout="constrained")
    axes = figure.subplots()
    runs = sorted(study.find("step"), key=lambda run: run.walk)
    shown: dict[str, Callable[[Run], float | None]] = {
        "gain": lambda run: run.gain.mean,
        "mean gain of the placebos": lambda run: run.drift,
        "change on the other task": lambda run: (
            None if (own := run.other("run")) is None else own - (run.other("base") or 0.0)
        ),
    }
    for i, (label, of) in enumerate(shown.items()):
        points = [(run.walk, 100 * value) for run in runs if (value := of(run)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), MARKERS[i], color=COLORS[i], label=label)
    axes.axhline(0, color=GRAY, linewidth=0.8)
    axes.set_xscale("log")
    frame(axes, "Change of the exact share, points", "walk in units of sigma, eta sqrt(T / N)")
    axes.legend(frameon=False, fontsize=8)
    save(figure, to)


def long(study: Study, to: Path) -> None:
    """Draw the exact share of the runs of Countdown before and after, with their placebos."""
    figure = canvas(7, 4, layout="constrained")
    axes, runs = figure.subplots(), study.find("long")
    for i, run in enumerate(runs):
        first = i == 0
        placebos = [100 * float(right.mean()) for right in run.placebos]
        axes.plot([i] * len(placebos), placebos, ".", color=GRAY, label="placebos" if first else None)
        for color, marker, label, right in ((COLORS[6], "_", "base", run.before), (COLORS[0], "o", "run", run.after)):
            axes.plot(i, 100 * float(right.mean()), marker, color=color, markersize=9, label=label if first else None)
    axes.set_xticks(range(len(runs)), [f"weights {run.value}" for run in runs])
    axes.set_xlim(-0.6, len(runs) - 0.4)
    axes.set_ylim(bottom=0)
    frame(axes, "Countdown, exact share, %", "")
    axes.legend(frameon=False, fontsize=8)
    save(figure, to)


def figures(study: Study) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield the name of each figure that has rows, and a function that draws it."""
    for task in dict.fromkeys(run.task for run in study.find("r")):
        yield f"real_budget_{task}", lambda to, task=task: budget(study, task, to)
        yield f"real_kl_{task}", lambda to, task=task: over_kl(study.find("r", task=task), to)
    if study.find("hack"):
        yield "real_hack", lambda to: over_kl(study.find("hack"), to)
    if study.find("step"):
        yield "real_step", lambda to: step_size(study, to)
    if study.find("long"):
        yield "real_long", lambda to: long(study, to)


def draw(study: Study, to: Path) -> None:
    """Draw the figures that have rows."""
    for name, paint in figures(study):
        paint(to / f"{name}.png")
