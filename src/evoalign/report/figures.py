# SPDX-License-Identifier: Apache-2.0
"""Figures of a run, drawn again after every generation, and the style of all figures.

Matplotlib is imported with the first figure: it takes a noticeable part of a second. Its object interface with the Agg
canvas is used: no pyplot, so no global state, no window system and no figure that stays in memory.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from evoalign.report.rows import WEIGHTS
from evoalign.report.tables import visible, weighed
from evoalign.rewards.objective import aim
from evoalign.rundir.files import make_folder, replacing
from evoalign.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

SIZE_INCHES = (9.0, 5.0)
DPI = 120
INK, GRID = "#24292f", "#d8dee4"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Colours of Okabe and Ito (2008), distinct with any colour vision."""
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LETTER = 0.1
"""Width of a letter of a title, in inches."""
BINS, MOST_HISTOGRAMS, MOST_POINTS = 30, 8, 1000
"""Bins of a histogram, histograms in a figure, and points of a generation in a scatter."""
HEADING: dict[str, Any] = {"fontsize": 12, "fontweight": "bold", "color": INK}


def canvas(width: float, height: float, **options: Any) -> Figure:
    """Return an empty figure; sizes are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", **options)
    FigureCanvasAgg(figure)
    return figure


def frame(axes: Axes, title: str, across: str) -> None:
    """Set the title, the label of the x axis, and a plain frame."""
    head(axes, title)
    axes.set_xlabel(across)
    plain(axes)


def head(axes: Axes, title: str) -> None:
    """Set the title, on as many lines as it needs above these axes."""
    axes.set_title(wrapped(title, axes.bbox.width / axes.figure.dpi), loc="left", pad=12, **HEADING)


def wrapped(title: str, inches: float) -> str:
    """Return a title in lines that fit this width."""
    return textwrap.fill(title, max(20, int(inches / LETTER)), break_on_hyphens=False)


def plain(axes: Axes) -> None:
    """Draw a plain frame with lines at the ticks of the y axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(color=GRID, labelcolor=INK)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> None:
    """Save as PNG in one step, so that a viewer never reads half a file."""
    _write(figure, path, "png", {"Software": "evoalign"})


def save_both(figure: Figure, path: Path) -> list[Path]:
    """Save as PNG in `path` and as SVG next to it, with text as paths; return both paths."""
    save(figure, path)
    vector = path.with_suffix(".svg")
    _write(figure, vector, "svg", {"Date": None, "Creator": "evoalign"})
    return [path, vector]


def series(index: int) -> dict[str, Any]:
    """Return the style of one of several lines: colour, line style and marker."""
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": LINES[index % len(LINES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def _write(figure: Figure, path: Path, form: str, metadata: dict[str, str | None]) -> None:
    _disable_math(figure)
    make_folder(path.parent)
    with replacing(path) as file:
        figure.savefig(file, format=form, metadata=metadata)


def _disable_math(figure: Figure) -> None:
    """Show the `$` of names as it is, in all texts but the powers at logarithmic axes, which matplotlib writes so."""
    from matplotlib.text import Text
    from matplotlib.ticker import LogFormatter

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), LogFormatter):
                for text in axis.get_ticklabels(which="both"):
                    text.set_parse_math(True)


MEAN, BEST, TEST, ZERO, VALIDATION = "#0b5cad", "#5aa469", "#c2410c", "#7a3e9d", "#e0a100"
PHASES = {"rollout": "#0b5cad", "score": "#e0a100", "update": "#5aa469", "other": "#b8bec5"}
EXTRA = ("#7a3e9d", "#c2410c", "#2a9d8f", "#6c757d")
"""Colours of phases that a custom engine may add."""


@dataclass(frozen=True, slots=True)
class Words:
    """Labels of a method."""

    unit: str = "generation"
    mean: str = "mean of the members"
    best: str = "best member"
    still: str = "members alike, no update"
    tested: str = "test split, trained model"
    aim: str = "reward"


class Ends(NamedTuple):
    """Reward of a split before and after training, if known."""

    before: Estimate | None = None
    after: Estimate | None = None


NOT_MEASURED = Ends()
ES_WORDS = Words()
GRPO_WORDS = Words("step", "mean of the completions", "best completion", "rewards equal in each group", "test split")


def evolution(
    rows: Rows,
    path: str | Path,
    *,
    title: str = "",
    test: Ends = NOT_MEASURED,
    validation: Ends = NOT_MEASURED,
    words: Words = ES_WORDS,
) -> None:
    """Draw the reward by generation: mean, best, 20th to 80th percentile, and validation and test split.

    A row's evaluation is of the mean after its update, and is drawn at the next generation. `test` and `validation` are
    the rewards before the first and after the last row, with their 95 % intervals over examples.
    """
    ends = {"validation": validation, "evaluation": test}
    with _panel(path, title, words.unit) as axes:
        x = [int(row["generation"]) for row in rows]
        _limit(axes, x, right=1)
        marker = "o" if len(rows) < 3 else ""  # a line through one point is invisible
        band = ([row["p20"] for row in rows], [row["p80"] for row in rows])
        axes.fill_between(x, *band, color=MEAN, alpha=0.18, linewidth=0, label="20th to 80th percentile")
        axes.plot(x, [row["best"] for row in rows], color=BEST, linewidth=1.3, marker=marker, label=words.best)
        axes.plot(x, [row["mean"] for row in rows], color=MEAN, linewidth=2.2, marker=marker, label=words.mean)
        validated = words.tested.replace("test", "validation", 1)
        _measured(axes, rows, "validation", ends["validation"], color=VALIDATION, marker="s", label=validated)
        _measured(axes, rows, "evaluation", ends["evaluation"], color=TEST, marker="D", label=words.tested)
        if any(e is not None and e.low is not None for pair in ends.values() for e in pair):
            axes.plot([], [], color=INK, linestyle="", marker="|", markersize=9, label="95 % interval over examples")
        still = [row["generation"] for row in rows if row["zero_variance"]]
        if still:
            style: dict[str, Any] = {"linestyle": "", "marker": "|", "markersize": 9, "markeredgewidth": 1.5}
            label, low = f"{words.still} ({len(still)} of {len(rows)})", [0.012] * len(still)
            axes.plot(still, low, color=ZERO, transform=axes.get_xaxis_transform(), label=label, **style)
        axes.set_ylabel(words.aim)


def time_breakdown(rows: Rows, path: str | Path, *, title: str = "", words: Words = ES_WORDS) -> None:
    """Draw the seconds of each generation by phase, stacked."""
    with _panel(path, title, words.unit) as axes:
        x = [int(row["generation"]) for row in rows]
        _limit(axes, x)
        edges = [x[0] - 0.5, *(generation + 0.5 for generation in x)] if x else []
        bottom = [0.0] * len(rows)
        total = sum(sum(row["seconds"].values()) for row in rows)
        known = dict.fromkeys(phase for row in rows for phase in row["seconds"])
        own = [phase for phase in known if phase not in PHASES]
        colors = PHASES | {phase: EXTRA[i % len(EXTRA)] for i, phase in enumerate(own)}
        for phase, color in ((phase, color) for phase, color in colors.items() if phase in known):
            seconds = [row["seconds"].get(phase, 0.0) for row in rows]
            top = [low + height for low, height in zip(bottom, seconds, strict=True)]
            label = f"{phase} ({sum(seconds) / total:.0%})" if total else phase
            axes.stairs(top, edges, baseline=bottom, fill=True, color=color, linewidth=0, label=label)
            bottom = top
        axes.set_ylim(bottom=0)
        axes.set_ylabel("seconds")


def divergence(
    rows: Rows,
    path: str | Path,
    *,
    title: str = "",
    baseline: float | None = None,
    final: tuple[float, float] | None = None,
) -> None:
    """Draw test reward against exact KL from the base model; no figure if no row has both.

    `baseline` is the test reward of the base model (at KL 0), `final` the KL and test reward of the final mean.
    """
    from matplotlib.patheffects import withStroke

    points = _along(rows, baseline, final)
    if len(points) <= (baseline is not None):
        return
    with _panel(path, title, "KL from the base model, nats per token") as axes:
        x, y = [kl for _, kl, _ in points], [reward for _, _, reward in points]
        axes.plot(x, y, color=TEST, linewidth=0.9, alpha=0.5)
        label = "test split, trained model; the numbers are generations done"
        axes.plot(x, y, color=TEST, linestyle="", marker="D", markersize=6, markeredgecolor="white", label=label)
        wide, high = 0.04 * (max(x) - min(x)), 0.08 * (max(y) - min(y))
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "color": INK, "fontsize": 9}
        labelled: list[int] = []
        for i in (len(x) - 1, *range(len(x) - 1)):  # the last, the first, and others whose labels do not overlap
            if all(abs(x[i] - x[j]) > wide or abs(y[i] - y[j]) > high for j in labelled):
                labelled.append(i)
                stroke = withStroke(linewidth=3, foreground="white")
                axes.annotate(str(points[i][0]), (x[i], y[i]), xytext=(0, 7), path_effects=[stroke], **style)
        axes.margins(0.06, 0.1)
        axes.set_ylabel("reward")


def named(rows: Rows, path: str | Path, field: str, label: str, *, title: str = "", words: Words = ES_WORDS) -> None:
    """Draw each number in a field of the rows by generation: the mean of each of several rewards, or the state of the
    objective, such as the price of a cost. Rows without a value leave a gap; no figure if no row has one.
    """
    if not any(row.get(field) for row in rows):
        return
    with _panel(path, title, words.unit) as axes:
        x = [int(row["generation"]) for row in rows]
        _limit(axes, x)
        colors = (MEAN, BEST, *EXTRA)
        weights = next((row[WEIGHTS] for row in rows if row.get(WEIGHTS)), {}) if field == "rewards" else {}
        for i, name in enumerate(dict.fromkeys(name for row in rows for name in row.get(field, ()))):
            found = [row.get(field, {}).get(name) for row in rows]
            y = [math.nan if value is None else value for value in found]
            marker = "o" if sum(value is not None for value in found) < 3 else ""
            shown = visible(weighed(name, weights.get(name, 1.0)))
            axes.plot(x, y, color=colors[i % len(colors)], linewidth=1.8, marker=marker, label=shown)
        axes.set_ylabel(label)


def distribution(
    found: Mapping[int, Mapping[str, Sequence[float]]],
    path: str | Path,
    *,
    title: str = "",
    words: Words = ES_WORDS,
) -> None:
    """Draw a histogram of each reward, and the first reward over the second, of the given generations' completions.

    `found` has the rewards by generation and name, NaN where one does not apply. No figure without rewards.
    """
    names = list(dict.fromkeys(name for columns in found.values() for name in columns))
    if not names:
        return
    shown, panels = names[:MOST_HISTOGRAMS], min(len(names), MOST_HISTOGRAMS) + (len(names) > 1)
    down, wide = math.ceil(panels / 3), min(panels, 3)
    figure = canvas(SIZE_INCHES[0] * max(wide, 2) / 3, 3.4 * down + 1, layout="constrained")
    places = figure.subplots(down, wide, squeeze=False).ravel().tolist()
    for axes, name in zip(places, shown, strict=False):
        _histogram(axes, [columns.get(name, ()) for columns in found.values()])
        frame(axes, visible(name), visible(name))
        axes.set_ylabel("share of completions")
    if len(names) > 1:
        axes = places[len(shown)]
        _scatter(axes, [(columns.get(names[1], ()), columns.get(names[0], ())) for columns in found.values()])
        frame(axes, visible(f"{names[0]} over {names[1]}"), visible(names[1]))
        axes.set_ylabel(visible(names[0]))
    for axes in places[panels:]:
        axes.remove()
    for i, index in enumerate(found):
        places[0].plot([], [], color=COLORS[i % len(COLORS)], linewidth=3, label=f"completions of {words.unit} {index}")
    figure.suptitle(title, x=0.02, ha="left", **HEADING)
    figure.legend(loc="outside lower center", ncols=wide, frameon=False, fontsize=9)
    save(figure, Path(path))


def _histogram(axes: Axes, columns: Sequence[Sequence[float]]) -> None:
    """Draw the outline of a histogram per generation, with the same bins."""
    finite = [[value for value in values if math.isfinite(value)] for values in columns]
    edges = np.histogram_bin_edges([value for values in finite for value in values] or [0.0], bins=BINS)
    for i, values in enumerate(finite):
        counts, _ = np.histogram(values, bins=edges)
        shares = counts / max(1, len(values))
        axes.stairs(shares, edges, color=COLORS[i % len(COLORS)], linewidth=1.6)
    axes.set_ylim(bottom=0)


def _scatter(axes: Axes, columns: Sequence[tuple[Sequence[float], Sequence[float]]]) -> None:
    """Draw a point per completion, at most `MOST_POINTS` of a generation, and lines at 0."""
    for i, (x, y) in enumerate(columns):
        step = max(1, math.ceil(len(x) / MOST_POINTS))
        style: dict[str, Any] = {"linestyle": "", "marker": ".", "markersize": 4, "alpha": 0.5}
        axes.plot(x[::step], y[::step], color=COLORS[i % len(COLORS)], **style)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.axvline(0, color=INK, linewidth=0.8)


def _along(rows: Rows, baseline: float | None, final: tuple[float, float] | None) -> list[tuple[int, float, float]]:
    """Return generations done, KL and test reward of each point."""
    points = [
        (int(row["generation"]) + 1, row["divergence"]["exact"], aim(row["evaluation"]))
        for row in rows
        if row.get("divergence") and row.get("evaluation")
    ]
    if baseline is not None:
        points.insert(0, (0, 0.0, baseline))
    if final is not None:
        points.append((int(rows[-1]["generation"]) + 1 if rows else 0, *final))
    return points


def _measured(axes: Axes, rows: Rows, key: str, ends: Ends, *, color: str, marker: str, label: str) -> None:
    """Draw the reward of the mean before and after training, and of rows that have this evaluation."""
    last = rows[-1]["generation"] + 1 if rows else 0
    known = [(x, found) for x, found in ((0, ends.before), (last, ends.after)) if found is not None]
    inside = [(row["generation"] + 1, aim(row[key])) for row in rows if row.get(key)]
    # The last row may have an evaluation of the final mean: draw it once.
    own = [(x, reward) for x, reward in inside if x not in dict(known)]
    points = sorted([*own, *((x, found.mean) for x, found in known)])
    bars = [(x, e.mean, e.mean - e.low, e.high - e.mean) for x, e in known if e.low is not None and e.high is not None]
    if bars:
        x, y, *reach = zip(*bars, strict=True)
        axes.errorbar(x, y, reach, fmt="none", ecolor=color, elinewidth=1.6, capsize=4, zorder=4)
    if points:
        style: dict[str, Any] = {"linewidth": 1.0, "linestyle": ":", "markersize": 6, "markeredgecolor": "white"}
        axes.plot(*zip(*points, strict=True), color=color, marker=marker, label=label, zorder=5, **style)


def _limit(axes: Axes, x: Sequence[int], right: int = 0) -> None:
    """Set the x limits to whole generations; a single generation is drawn as wide as two."""
    first, last = (x[0], max(x[-1] + right, x[0] + 1)) if x else (0, 1)
    air = 0.5 + 0.01 * (last - first)
    axes.set_xlim(first - air, last + air)


@contextmanager
def _panel(path: str | Path, title: str, across: str) -> Generator[Axes]:
    """Yield the axes of a figure to draw on, and save it with its title, legend and the label of the x axis."""
    from matplotlib.ticker import MaxNLocator

    figure = canvas(*SIZE_INCHES)
    figure.subplots_adjust(left=0.09, right=0.98, top=0.91, bottom=0.2)  # fixed: a layout engine draws everything twice
    axes = figure.add_subplot()
    yield axes
    frame(axes, title, across)
    if more := axes.get_title("left").count("\n"):
        figure.subplots_adjust(top=0.91 - 0.04 * more)
    if across in (ES_WORDS.unit, GRPO_WORDS.unit):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    _, labels = axes.get_legend_handles_labels()
    if labels:
        columns = 3 if len(labels) > 4 else 4
        if len(labels) > 2 * columns:  # a third row
            figure.subplots_adjust(bottom=0.235)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=columns, frameon=False, fontsize=9)
    save(figure, Path(path))
