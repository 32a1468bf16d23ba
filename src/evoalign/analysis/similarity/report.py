# SPDX-License-Identifier: Apache-2.0
"""Text and heat maps of similarity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from evoalign.analysis.base import row, short_name
from evoalign.analysis.similarity.chance import Across, Agreement
from evoalign.analysis.similarity.kept import GainKept
from evoalign.analysis.similarity.measures import Floats, Overlap
from evoalign.analysis.weights import ALL, UNEMBEDDING
from evoalign.report.figures import GRID, HEADING, INK, canvas, save_both
from evoalign.statistics import LEVEL

NONE = "no common direction is shown"
FEWEST = round(1 / LEVEL) - 1
"""Fewest placebos that allow p <= 5 %."""
DIRECTIONS = 4
"""Number of singular directions whose overlap is printed, or the most below it that are known."""
MOST_LINES, MOST_PAIRS = 10, 60
"""Pairs up to which all are printed, beyond it only those with a common direction; pairs in the figure."""
CELL, MARGIN, FEW_CELLS = 0.42, 3.4, 240
"""Size of a cell of a heat map and of its margin in inches; number of cells up to which they contain their numbers."""
LEAST_SPAN = 0.1
"""Least span of the colours to either side of 0, so that negligible values look negligible."""


@dataclass(frozen=True, slots=True)
class Cosine:
    """Cosine of a pair, None where one did not change; `spread` is its standard deviation by chance."""

    value: float | None
    spread: float | None
    placebos: tuple[float, ...]
    p: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two targets by index. `cosines` are those of all tensors, each part, each layer and the unembedding.

    `same_noise`: both are runs of ES that drew the same noise, so `spread` does not apply. `overlaps`: left and right
    by number of directions, for the same sets of tensors; empty without singular values.
    """

    a: int
    b: int
    cosines: Mapping[str, Cosine]
    same_noise: bool
    overlaps: Mapping[str, Mapping[int, tuple[Overlap, ...]]] = field(default_factory=dict[str, Any])


# --- text -------------------------------------------------------------------------------------------------------------


def pair_lines(names: Sequence[str], pairs: Sequence[Pair]) -> list[str]:
    """Return a row for each pair; of many pairs, only those with a common direction, and the number of the others."""
    lines: list[str] = []
    for pair in pairs:
        own, verdict = pair.cosines[ALL], verdict_of(pair, len(pairs))
        if len(pairs) > MOST_LINES and verdict.startswith(NONE):
            continue
        spread = None if own.spread is None or pair.same_noise else f"0 +- {own.spread:.2g}"
        value = "unknown, since one of them did not change" if own.value is None else f"{own.value:.4g}"
        cells = {"cosine of the weight changes": value, "by chance": spread, "placebos": _range(own.placebos, own.p)}
        lines.append(f"{row(f'{names[pair.a]} and {names[pair.b]}', cells)}{f': {verdict}' if verdict else ''}")
    if rest := len(pairs) - len(lines):
        lines.append(f"{rest} other pairs: {NONE} (Bonferroni over {len(pairs)})")
    return lines


def verdict_of(pair: Pair, tests: int) -> str:
    """Return whether a pair has a common direction, at 5 % over all pairs; the placebos, if any, have to agree."""
    own = pair.cosines[ALL]
    if own.value is None or own.spread is None:
        return ""
    if pair.same_noise:
        return "both drew the same noise" + ("" if own.placebos else "; set placebos=20 to see what that alone gives")
    within = abs(own.value) <= NormalDist().inv_cdf(1 - LEVEL / 2 / tests) * own.spread
    if within or (own.p is not None and own.p > LEVEL):
        return NONE if within or len(own.placebos) >= FEWEST else f"{NONE}, which takes {FEWEST} placebos"
    return "a common direction" if own.value > 0 else "opposite directions"


def overlap_lines(names: Sequence[str], pairs: Sequence[Pair]) -> list[str]:
    """Return a row for each pair whose largest singular directions overlap more than by chance on a side."""
    lines: list[str] = []
    for pair in pairs:
        by_k = pair.overlaps.get(ALL, {})
        k = max((k for k in by_k if k <= DIRECTIONS), default=None)
        if k is None:
            continue
        sides = dict(zip(("left (output)", "right (input)"), by_k[k], strict=True))
        beyond = [side for side, own in sides.items() if _is_beyond(own, 2 * len(pairs), pair.same_noise)]
        if beyond:
            cells = {
                side: f"{own.value:.3g} ({own.chance:.3g} +- {own.spread:.2g} by chance"
                + (f", placebos {placebos})" if (placebos := _range(own.placebos, own.p)) else ")")
                for side, own in sides.items()
            }
            what = f"overlap of the {k} largest singular directions over {by_k[k][0].matrices} matrices"
            label = f"{names[pair.a]} and {names[pair.b]}, {what}"
            lines.append(f"{row(label, cells)}: beyond chance, {' and '.join(beyond)}")
    return lines


def _is_beyond(own: Overlap, tests: int, same_noise: bool) -> bool:
    """Return whether an overlap is beyond chance: by the spread where it applies, and by the placebos if any."""
    if own.p is None and same_noise:
        return False
    far = same_noise or own.value - own.chance > NormalDist().inv_cdf(1 - LEVEL / tests) * own.spread
    return far and (own.p is None or own.p <= LEVEL)


def seed_lines(agreements: Sequence[Agreement], across: Sequence[Across]) -> list[str]:
    """Return a row for each group of seeds, and for each two groups."""
    lines = [
        row(
            f"{len(one.group.seeds)} seeds of {one.group.label}",
            {
                "cosine of two seeds": one.cosine,
                "of the mean changes of two halves": one.halves,
                "reliability of all": one.reliability,
                "placebos of the halves": _range(one.placebos, one.p),
            },
        )
        for one in agreements
    ]
    lines += [
        row(f"{one.a.label} and {one.b.label}", {"cosine": one.cosine, "placebos": _range(one.placebos, one.p)})
        for one in across
    ]
    return lines


def target_line(found: Mapping[str, Any], *, tied: bool) -> str:
    """Return a row with a change's size, share by part, rank and sparsity. Tied, the unembedding is in `embeddings`."""
    where: Mapping[str, Any] = found["where"]
    whole, head = where[ALL], where[UNEMBEDDING]
    parts = [name for name in where if name != ALL and not name.startswith("layer ")]
    shares = sorted(((where[n]["share"], n) for n in parts if not (tied and n == UNEMBEDDING)), reverse=True)
    layers = [(own["share"], name) for name, own in where.items() if name.startswith("layer ")]
    still, ranks = whole["at_most"]["absolute"].get("0"), whole["participation_rank"] is not None
    return row(
        found["target"],
        {
            "norm of the change": f"{whole['norm']:.4g}",
            "of the base's norm": None if whole["relative"] is None else f"{whole['relative']:.3%}",
            "norms of placebos": _range([one["norm"] for one in whole["placebos"]]),
            "shares": ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.005) or None,
            "largest share of a layer": f"{max(layers)[0]:.0%}, {max(layers)[1]}" if layers else None,
            "norm of the unembedding's change": f"{head['norm']:.4g}{' (tied to the embeddings)' if tied else ''}",
            "median participation rank": whole["participation_rank"],
            "that of noise": whole["participation_rank_of_noise"],
            "that of placebos": _range([one["participation_rank"] for one in whole["placebos"]]) if ranks else None,
            "median entropy rank": whole["entropy_rank"],
            "unchanged numbers": None if still is None else f"{still:.1%}",
        },
    )


def gain_line(name: str, found: GainKept, *placebos: GainKept) -> str:
    """Return a row with the rewards at each rank."""
    cells: dict[str, object] = {"before": found.before, "after": found.after}
    cells["after, placebos"] = _range([one.after for one in placebos])
    for cut in found.cuts:
        kept = "" if cut.share is None else f" ({cut.share.mean:.0%} of the gain)"
        cells[f"rank {cut.rank}"] = f"{cut.reward:.4g}{kept}"
    if any(cut.share is None for cut in found.cuts):
        cells["share of the gain"] = "not reported: the gain is not significantly above 0"
    else:
        low, high = ("none given" if end is None else str(end) for end in (found.low, found.high))
        cells["least rank that keeps 90 %"] = f"{found.minimal or 'none given'} (95 %: {low} to {high})"
    return row(f"{name}, reward", cells)


def _range(values: Sequence[float | None], p: float | None = None) -> str | None:
    """Return the range of the placebos and their p, or None without placebos."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return f"{min(known):.3g} to {max(known):.3g} ({len(known)}{'' if p is None else f', p {p:.2g}'})"


# --- figures ----------------------------------------------------------------------------------------------------------


def draw(
    names: Sequence[str], pairs: Sequence[Pair], shares: Mapping[str, Sequence[float]], folder: Path
) -> list[Path]:
    """Draw heat maps: cosines of all pairs, of pairs by part and layer, and the share of each change by part."""
    written: list[Path] = []
    short, where = [short_name(name, 34) for name in names], list(shares)
    if pairs:
        whole_KK = np.eye(len(names))
        for pair in pairs:
            whole_KK[pair.a, pair.b] = whole_KK[pair.b, pair.a] = _nan(pair.cosines[ALL].value)
        title = "Cosine of weight changes, all tensors"
        written += _map(folder / "similarity_cosines.png", title, short, short, whole_KK)
        chosen = pairs[:MOST_PAIRS]
        labels: list[str] = []
        for pair in chosen:
            spread = None if pair.same_noise else pair.cosines[ALL].spread
            width = NormalDist().inv_cdf(1 - LEVEL / 2) * _nan(spread)
            by_chance = "chance not known" if spread is None else f"all, by chance: within {width:.2g} in 95 %"
            labels.append(f"{short[pair.a]} / {short[pair.b]}\n{by_chance}")
        more = "" if len(chosen) == len(pairs) else f", the first {len(chosen)} of {len(pairs)} pairs"
        values = np.array([[_nan(pair.cosines[name].value) for name in where] for pair in chosen])
        note = f"the colours span at least {LEAST_SPAN}; grey: one did not change"
        title = f"Cosine by part and layer{more}"
        written += _map(folder / "similarity_pairs.png", title, labels, where, values, note)
    inside = [name for name in where if name != ALL]
    values = np.array([[shares[name][k] for name in inside] for k in range(len(names))])
    title = "Share of the squared change, by part and by layer"
    return written + _map(folder / "similarity_shares.png", title, short, inside, values, signed=False)


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _map(
    path: Path,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Floats,
    note: str = "",
    *,
    signed: bool = True,
) -> list[Path]:
    """Draw numbers [rows, columns] as colours, NaN in grey; `signed` ones from orange over white to purple."""
    figure = canvas(max(7.0, MARGIN + CELL * len(columns) + 1.2), 2.4 + CELL * len(rows), layout="constrained")
    axes = figure.add_subplot()
    known = np.abs(values[~np.isnan(values)])
    most = float(known.max()) if known.size and known.max() > 0 else 1.0
    most = max(most, LEAST_SPAN) if signed else most
    colors = {"cmap": "PuOr", "vmin": -most} if signed else {"cmap": "Purples", "vmin": 0.0}
    shown = axes.imshow(values, vmax=most, aspect="auto", **colors)  # pyright: ignore[reportArgumentType]
    axes.set_facecolor(GRID)
    axes.set_title(title, loc="left", pad=12, **HEADING)
    axes.set_xticks(range(len(columns)), columns, rotation=90, parse_math=False)
    axes.set_yticks(range(len(rows)), rows, parse_math=False)
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_color(GRID)
    if values.size <= FEW_CELLS:
        for (place, column), value in np.ndenumerate(values):
            color = "white" if abs(value) > 0.6 * most else INK
            text = "" if np.isnan(value) else f"{value:.2g}"
            axes.text(column, place, text, ha="center", va="center", fontsize=7, color=color)
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=9, color=INK)
    figure.colorbar(shown, ax=axes, shrink=0.9).outline.set_edgecolor(GRID)  # pyright: ignore
    return save_both(figure, path)
