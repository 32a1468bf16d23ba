# SPDX-License-Identifier: Apache-2.0
"""Ratings as a table, as sentences, and as a figure with a panel for each dimension."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from evoalign.analysis.judge.judgments import TIE
from evoalign.analysis.judge.ratings import ABOVE, BASE, BELOW, OPEN, Dimension, Rating, Ratings
from evoalign.report.figures import COLORS, INK, canvas, frame, save_both
from evoalign.report.tables import shorten, visible
from evoalign.statistics import Estimate

MOST = 12
"""Number of dimensions in a figure; all are in the table and in ratings.json."""
PLANE = ("harmlessness", "helpfulness")
"""Dimensions of the horizontal and the vertical axis of `plane.png`."""
WIDTH, ROW, LABEL = 8.5, 0.34, 40
"""Width in inches, height of a row in inches, and characters of a model's name."""
MEND = "judge more questions, or add a weak prior with `evoalign judge rate --prior 1`"
TIES = {"davidson": "Davidson's ties", "half": "a tie as half a win for either"}
REASONS = {
    ABOVE: "no judgment limits its distance above {reference}",
    BELOW: "no judgment limits its distance below {reference}",
    OPEN: "no chain of judgments connects it with {reference}, or all judgments are ties",
}


def table(found: Ratings) -> Table:
    """Return a table with a row for each dimension and model, strongest first."""
    shown = Table("dimension", "model", title="ratings", title_justify="left", title_style="bold")
    for heading in ("rating", "95 % interval", "won", "lost", "tied"):
        shown.add_column(heading, justify="right", overflow="fold")
    for dimension in found.dimensions:
        for row in dimension.rows:
            rating = "none" if row.rated.rating is None else f"{row.rated.rating:.0f}"
            names = (Text(visible(dimension.name)), Text(visible(row.model)))
            shown.add_row(*names, rating, _interval(row.rated), str(row.won), str(row.lost), str(row.tied))
    return shown


def _interval(rated: Rating) -> str:
    if rated.low is None and rated.high is None:
        return rated.why or "-"
    ends = ["unbounded" if end is None else f"{end:.0f}" for end in (rated.low, rated.high)]
    return " to ".join(ends) + (f" ({rated.why})" if rated.why else "")


def sentences(found: Ratings) -> list[str]:
    """Return how the judgments were rated, then the results and warnings of each dimension."""
    settings = found.settings
    reference = "the weakest model" if settings.anchor is None else f"the model {settings.anchor}"
    prior = f"with a prior of {settings.prior:g} judgments per pair of models" if settings.prior else "without a prior"
    unparsed = "count as ties" if settings.unparsed == "tie" else "are left out"
    method = (
        f"Bradley-Terry ratings with {TIES[settings.ties]}, by maximum likelihood {prior}, on the Elo scale with "
        f"{reference} at {BASE:g}. Intervals are 95 % for the difference to that model on new questions "
        f"({settings.draws} bootstrap draws, seed {settings.seed}). Judgments without scores {unparsed}; scores that "
        f"differ by at most {TIE} are a tie."
    )
    if settings.elo is not None:
        method += (
            f" Elo ratings are of one pass in an order shuffled by seed {settings.elo}; they change with the seed and "
            "have no interval."
        )
    return [method, *(line for dimension in found.dimensions for line in _dimension(dimension))]


def _dimension(found: Dimension) -> list[str]:
    trust, name = found.trust, found.name
    lines = [
        f"{name}: {trust.judgments} judgments of {trust.questions} questions; "
        f"{_share(trust.unparsed, trust.judgments)} without scores; "
        f"{_share(trust.ties, trust.parsed)} of the others are ties."
    ]
    if found.nu is None:
        return [*lines, f"{name}: no ratings: no judgment has scores; see the field `raw` of each."]
    lines.append(
        f"{name}: both orders agree in {_percent(trust.agreement)} of {trust.both} pairs of answers judged in both; "
        f"the answer shown first has {_percent(trust.first_wins)} of the wins{_bias(trust.first_wins)}."
        if trust.both
        else f"{name}: each pair of answers was judged in one order only, so a bias to a position cannot be measured."
    )
    if found.elo is not None:
        strongest = sorted(found.elo.items(), key=lambda pair: -pair[1])
        lines.append(
            f"{name}: Elo in this order: " + ", ".join(f"{model} {points:.0f}" for model, points in strongest) + "."
        )
    for pair in trust.pairs:
        line = f"{name}: {' against '.join(pair.models)}: won {pair.won}, lost {pair.lost}, tied {pair.tied}"
        line += f", {pair.unparsed} without scores" if pair.unparsed else ""
        gap = found.differences[pair.models]
        if gap.rating is not None:
            known = gap.low is not None and gap.high is not None
            line += f"; {gap.rating:+.0f} points ({f'95 %: {gap.low:+.0f} to {gap.high:+.0f}' if known else gap.why})"
        lines.append(f"{line}.")
    for why, reason in REASONS.items():
        models = [row.model for row in found.rows if row.rated.why == why]
        if models:
            said = reason.format(reference=found.reference)
            lines.append(f"{name}: no finite rating of {', '.join(models)}: {said}; {MEND}.")
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.1%})" if whole else f"{part}"


def _percent(found: Estimate) -> str:
    if math.isnan(found.mean):
        return f"no share ({found.why})"
    if found.low is None or found.high is None:
        return f"{found.mean:.1%} ({found.why})"
    return f"{found.mean:.1%} (95 %: {found.low:.1%} to {found.high:.1%})"


def _bias(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return ""
    if found.low <= 0.5 <= found.high:
        return ", which shows no bias"
    return ": a bias to the first" if found.low > 0.5 else ": a bias to the second"


def draw(found: Ratings, folder: Path) -> list[Path]:
    """Draw `ratings.png` and `.svg`, each model's rating with its interval in the first `MOST` dimensions, and the
    plane of helpfulness and harmlessness.
    """
    drawn = found.dimensions[:MOST]
    heights = [ROW * len(dimension.rows) + 0.9 for dimension in drawn]
    figure = canvas(WIDTH, sum(heights) + 0.8, layout="constrained")
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, dimension in zip(grid[:, 0], drawn, strict=True):
        name, reference = (shorten(visible(text), LABEL) for text in (dimension.name, dimension.reference))
        frame(axes, f"{name}, {reference} = {BASE:.0f}", "")
        labels: list[str] = []
        for place, row in enumerate(dimension.rows):
            middle, label = row.rated.rating, shorten(visible(row.model), LABEL)
            labels.append(f"{label} (no rating)" if middle is None else label)
            if middle is not None:
                axes.errorbar(
                    [middle], [place], xerr=_bars(row.rated)[1], fmt="o", color=COLORS[0], markersize=5, capsize=3
                )
        axes.axvline(BASE, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
    grid[-1][0].set_xlabel("rating, Elo scale; bars: 95 % for new questions")
    return [*save_both(figure, folder / "ratings.png"), *_plane(found, folder)]


def _plane(found: Ratings, folder: Path) -> list[Path]:
    """Draw `plane.png` and `plane.svg`, helpfulness over harmlessness, if both are rated for some model."""
    rated = [
        {row.model: row.rated for row in one.rows} for name in PLANE for one in found.dimensions if one.name == name
    ]
    if len(rated) < len(PLANE):
        return []
    models = [m for m in rated[0] if all(m in one and one[m].rating is not None for one in rated)]
    if not models:
        return []
    figure = canvas(6.0, 4.5, layout="constrained")
    axes = figure.subplots()
    frame(axes, "ratings, Elo scale; bars: 95 % for new questions", PLANE[0])
    axes.set_ylabel(PLANE[1])
    for place, model in enumerate(models):
        (x, x_bars), (y, y_bars) = (_bars(one[model]) for one in rated)
        color = COLORS[place % len(COLORS)]
        axes.errorbar([x], [y], xerr=x_bars, yerr=y_bars, fmt="o", color=color, markersize=5, capsize=3)
        style: dict[str, Any] = {"textcoords": "offset points", "xytext": (6, 6), "color": color}
        axes.annotate(shorten(visible(model), LABEL), (x, y), **style)
    return save_both(figure, folder / "plane.png")


def _bars(rated: Rating) -> tuple[float, list[list[float]]]:
    """Return a rating, and the lengths of its interval below and above for `errorbar`."""
    middle = 0.0 if rated.rating is None else rated.rating
    low, high = (middle if end is None else end for end in (rated.low, rated.high))
    return middle, [[max(0.0, middle - low)], [max(0.0, high - middle)]]
