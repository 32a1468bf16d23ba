# SPDX-License-Identifier: Apache-2.0
"""Heat maps of similarity: cosines of all pairs by part and layer, and where each change lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from evoalign.analysis.parts import ALL
from evoalign.report.figures import GRID, HEADING, INK, canvas, save_both
from evoalign.report.tables import visible
from evoalign.statistics import LEVEL

if TYPE_CHECKING:
    from evoalign.analysis.similarity.finding import Pair, Similarity

CELL, MARGIN = 0.42, 3.4
"""Inches of a cell, and around all cells for names."""
LONGEST = 34
MOST_PAIRS = 60
LEAST_SPAN = 0.1
"""Of the colours to either side of 0, so that what is next to nothing looks like it."""
FEW_CELLS = 240
"""Cells of a map that have their numbers in them."""


def draw(found: Similarity, folder: Path) -> list[Path]:
    """`similarity_cosines` and `similarity_pairs` where there are pairs, and `similarity_shares`: as PNG and SVG."""
    written: list[Path] = []
    names, short = found.names, [_short(name) for name in found.names]
    if found.pairs:
        whole = np.eye(len(names))
        for pair in found.pairs:
            value = pair.cosines[ALL].value
            whole[pair.a, pair.b] = whole[pair.b, pair.a] = np.nan if value is None else value
        written += _map(folder / "similarity_cosines.png", "Cosine of weight changes, all tensors", short, short, whole)
        chosen = found.pairs[:MOST_PAIRS]
        title = "Cosine by part and layer" + _first(len(chosen), len(found.pairs))
        written += _map(
            folder / "similarity_pairs.png",
            title,
            [f"{short[pair.a]} / {short[pair.b]}\n{_chance(pair)}" for pair in chosen],
            found.where,
            _grid([[pair.cosines[name].value for name in found.where] for pair in chosen]),
            f"colours to {LEAST_SPAN} at the least; grey: one did not change",
        )
    where = [name for name in found.where if name != ALL]
    shares = _grid([[found.shares[name][k] for name in where] for k in range(len(names))])
    title = "Share of the squared change, by part and by layer"
    return written + _map(folder / "similarity_shares.png", title, short, where, shares, signed=False)


def _chance(pair: Pair) -> str:
    """What a pair's cosine over all tensors is by chance."""
    spread = pair.cosines[ALL].spread
    if pair.same_noise or spread is None:
        return "chance not known"
    return f"all, by chance: within {NormalDist().inv_cdf(1 - LEVEL / 2) * spread:.2g} in 95 %"


def _grid(values: Sequence[Sequence[float | None]]) -> NDArray[np.float64]:
    return np.array([[np.nan if v is None else v for v in row] for row in values], dtype=np.float64)


def _first(shown: int, of: int) -> str:
    return "" if shown == of else f", the first {shown} of {of} pairs"


def _map(
    path: Path,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: NDArray[np.float64],
    note: str = "",
    *,
    signed: bool = True,
) -> list[Path]:
    """Numbers [rows, columns] as colours that are told apart by the colour-blind and in print; NaN is grey.

    `signed` ones go from orange over white to purple, evenly about 0; others from white to purple. `note` stands below.
    """
    figure = canvas(max(7.0, MARGIN + CELL * len(columns) + 1.2), 2.4 + CELL * len(rows), layout="constrained")
    axes = figure.add_subplot()
    known = np.abs(values[~np.isnan(values)])
    most = float(known.max()) if known.size and known.max() > 0 else 1.0
    most = max(most, LEAST_SPAN) if signed else most
    shown = axes.imshow(
        values, cmap="PuOr" if signed else "Purples", vmin=-most if signed else 0.0, vmax=most, aspect="auto"
    )
    axes.set_facecolor(GRID)
    axes.set_title(title, loc="left", pad=12, **HEADING)
    axes.set_xticks(range(len(columns)), columns, rotation=90, parse_math=False)
    axes.set_yticks(range(len(rows)), rows, parse_math=False)
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_color(GRID)
    if values.size <= FEW_CELLS:
        for (row, column), value in np.ndenumerate(values):
            color = "white" if abs(value) > 0.6 * most else INK
            said = "" if np.isnan(value) else f"{value:.2g}"
            axes.text(column, row, said, ha="center", va="center", fontsize=7, color=color)
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=9, color=INK)
    figure.colorbar(shown, ax=axes, shrink=0.9).outline.set_edgecolor(GRID)  # pyright: ignore
    return save_both(figure, path)


def _short(name: str) -> str:
    """The end of a long path, control characters written out."""
    shown = visible(name)
    return shown if len(shown) <= LONGEST else f"...{shown[-LONGEST + 3 :]}"
