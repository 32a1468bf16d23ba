# SPDX-License-Identifier: Apache-2.0
"""Results of similarity: cosines and overlaps of pairs, agreement of seeds, size, rank and sparsity of each change."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from evoalign.analysis.base import Finding, as_json, row, short_names
from evoalign.analysis.similarity import chance, measures
from evoalign.analysis.similarity.chance import Across, Agreement, GainKept
from evoalign.analysis.similarity.measures import SIDES, TOPS, Measured, Overlap, Overlaps, Sums, together, total
from evoalign.analysis.targets import Target
from evoalign.analysis.weights import ALL, UNEMBEDDING, Weights
from evoalign.errors import ModelError
from evoalign.report.figures import GRID, INK, canvas, head, save_both
from evoalign.statistics import FEWEST_PLACEBOS, LEVEL

NONE = "no common direction is shown"
DIRECTIONS = 4
"""Number of singular directions whose overlap is printed, or the most below it that are known."""
MOST_LINES, MOST_PAIRS = 10, 60
"""Pairs up to which all are printed, beyond it only those with a common direction; pairs in the figure."""
FEW_CELLS = 240
"""Number of cells up to which a heat map contains its numbers."""
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
    """Two targets. `cosines` are those of all tensors, each part, each layer and the unembedding.

    `same_noise`: both are runs of ES that drew the same noise, so `spread` does not apply. `overlaps`: by number of
    directions and side, for the same sets of tensors; empty without singular values.
    """

    a: str
    b: str
    same_noise: bool
    cosines: Mapping[str, Cosine]
    overlaps: Mapping[str, Mapping[int, Mapping[str, Overlap]]] = field(default_factory=dict[str, Any])


def finding(
    weights: Sequence[Weights],
    found: Sequence[Measured],
    columns: Mapping[int, Sequence[int]],
    kept: Sequence[Sequence[GainKept]],
    limits: Mapping[str, Sequence[float]],
) -> Finding:
    """Return the finding from the measures of targets and their placebos, whose columns are given by target.

    Raises ModelError where no target changed.
    """
    targets, first = [one.target for one in weights], weights[0]
    names = [target.name for target in targets]
    parts: Mapping[str, Collection[str]] = {**first.parts, UNEMBEDDING: {first.unembedding}}
    sums = {name: total(found, tensors) for name, tensors in parts.items()}
    if not any(sums[ALL].norms[: len(targets)]):
        raise ModelError(f"{names[0]} has the weights of its base model {targets[0].config.model.name}: no change")
    overlaps = {
        name: together([(one.spec.shape, one.overlaps) for one in found if one.spec.name in tensors])
        for name, tensors in parts.items()
    }
    pairs = [_pair(targets, i, j, sums, overlaps, columns) for i, j in combinations(range(len(targets)), 2)]
    agreements = [chance.agreement(g, sums[ALL].products_KK, columns) for g in chance.groups_of(targets)]
    agreements = [one for one in agreements if one is not None]
    same_noise = {frozenset((pair.a, pair.b)) for pair in pairs if pair.same_noise}
    across: list[Across] = []
    for a, b in combinations([one.group for one in agreements], 2):
        same = any(frozenset((names[i], names[j])) in same_noise for i in a.members for j in b.members)
        across.append(chance.between(a, b, sums[ALL].cosines, columns, same_noise=same))
    described = [_described(k, target, found, sums, parts, columns, limits) for k, target in enumerate(targets)]
    for one, (gain, *placebos) in zip(described, kept, strict=False):
        one["gain_kept"] = {**as_json(gain), "placebos": placebos}
    numbers = {
        "base": first.target.config.model.name,
        "unembedding": {"tensor": first.unembedding, "tied": first.tied},
        "targets": described,
        "pairs": pairs,
        "groups": [
            {
                "label": one.group.label,
                "targets": [names[k] for k in one.group.members],
                "seeds": one.group.seeds,
                **{key: value for key, value in as_json(one).items() if key != "group"},
            }
            for one in agreements
        ],
        "between_groups": [{**as_json(one), "a": one.a.label, "b": one.b.label} for one in across],
        "tensors": [_tensor(one, first.part_of(one.spec.name), len(targets)) for one in found],
    }
    lines = [*pair_lines(pairs), *overlap_lines(pairs), *seed_lines(agreements, across)]
    lines += [target_line(one, tied=first.tied) for one in described]
    lines += [gain_line(name, *one) for name, one in zip(names, kept, strict=False)]
    if alone := [one["target"] for k, one in enumerate(described) if one["method"] == "es" and k not in columns]:
        which = ", ".join(alone)
        lines.append(f"{which}: without placebos signal and random walk cannot be distinguished; set placebos=20")
    shares = {name: [one["where"][name]["share"] for one in described] for name in sums}
    return Finding(numbers, lines, figures=partial(draw, names, pairs, shares))


def _pair(
    targets: Sequence[Target],
    i: int,
    j: int,
    sums: Mapping[str, Sums],
    overlaps: Mapping[str, Mapping[int, Overlaps]],
    columns: Mapping[int, Sequence[int]],
) -> Pair:
    at = chance.placebo_columns((i, j), columns)
    cosines: dict[str, Cosine] = {}
    for name, own in sums.items():
        value, spread = as_json(own.cosines[i, j]), as_json(own.spread[i, j])
        placebos = tuple(float(own.cosines[a, b]) for a, b in at if not np.isnan(own.cosines[a, b]))
        cosines[name] = Cosine(value, spread, placebos, None if value is None else measures.p_of(value, placebos))
    common = {name: {k: o for k, one in own.items() if (o := one.pair(i, j, at))} for name, own in overlaps.items()}
    a, b = targets[i], targets[j]
    return Pair(a.name, b.name, chance.draws_noise_of(a, b), cosines, common)


def _described(
    k: int,
    target: Target,
    found: Sequence[Measured],
    sums: Mapping[str, Sums],
    parts: Mapping[str, Collection[str]],
    columns: Mapping[int, Sequence[int]],
    limits: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return one target's size, sparsity and ranks in each set of tensors, with those of its placebos."""
    whole = sums[ALL]
    where: dict[str, Any] = {}
    for name, own in sums.items():
        inside = [one for one in found if one.spec.name in parts[name]]
        below = iter(own.below_KT[k])
        where[name] = {
            "share_of_numbers": own.numbers / whole.numbers,
            **_size(k, own, whole),
            "at_most": {
                kind: {f"{limit:g}": int(next(below)) / own.numbers for limit in values}
                for kind, values in limits.items()
            },
            **_ranks(k, inside),
            "placebos": [{**_size(i, own, whole), **_ranks(i, inside)} for i in columns.get(k, ())],
        }
    return {**target.described(), "method": target.method, "where": where}


def _size(k: int, own: Sums, whole: Sums) -> dict[str, Any]:
    square, all_ = float(own.products_KK[k, k]), float(whole.products_KK[k, k])
    relative = math.sqrt(square / own.base) if own.base else None
    return {"norm": math.sqrt(square), "share": square / all_ if all_ else 0.0, "relative": relative}


def _ranks(k: int, inside: Sequence[Measured]) -> dict[str, Any]:
    """Return medians over matrices."""
    spectra = [s for one in inside if (s := one.spectra[k]) is not None]

    def median(values: Sequence[float]) -> float | None:
        return float(np.median(values)) if values else None

    names = {"entropy_rank": "entropy", "participation_rank": "participation"}
    found = {key: median([getattr(s, name) for s in spectra]) for key, name in names.items()}
    noise = median([s.of_noise for s in spectra])
    energy = {str(top): median([s.energy[top] for s in spectra if top in s.energy]) for top in TOPS}
    return {"matrices": len(spectra), **found, "participation_rank_of_noise": noise, "energy": energy}


def _tensor(one: Measured, part: str, count: int) -> dict[str, Any]:
    """Return the measures of a tensor for the first `count` targets."""
    return {
        "name": one.spec.name,
        "shape": one.spec.shape,
        "part": part,
        "layer": one.spec.layer,
        "norms": one.sums.norms[:count],
        "base_norm": math.sqrt(one.sums.base),
        "cosines": one.sums.cosines[:count, :count],
        "spectra": one.spectra[:count],
        "overlaps": {k: dict(zip(SIDES, own[:, :count, :count], strict=True)) for k, own in one.overlaps.items()},
    }


def pair_lines(pairs: Sequence[Pair]) -> list[str]:
    """Return a row for each pair; of many pairs, only those with a common direction, and the number of the others."""
    lines: list[str] = []
    for pair in pairs:
        own, verdict = pair.cosines[ALL], verdict_of(pair, len(pairs))
        if len(pairs) > MOST_LINES and verdict.startswith(NONE):
            continue
        spread = None if own.spread is None or pair.same_noise else f"0 +- {own.spread:.2g}"
        value = "unknown, since one of them did not change" if own.value is None else f"{own.value:.4g}"
        cells = {"cosine of the weight changes": value, "by chance": spread, "placebos": _range(own.placebos, own.p)}
        lines.append(f"{row(f'{pair.a} and {pair.b}', cells)}{f': {verdict}' if verdict else ''}")
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
        return (
            NONE
            if within or len(own.placebos) >= FEWEST_PLACEBOS
            else f"{NONE}, which takes {FEWEST_PLACEBOS} placebos"
        )
    return "a common direction" if own.value > 0 else "opposite directions"


def overlap_lines(pairs: Sequence[Pair]) -> list[str]:
    """Return a row for each side of a pair where the largest singular directions overlap more than by chance."""
    lines: list[str] = []
    for pair in pairs:
        by_k = pair.overlaps.get(ALL, {})
        k = max((k for k in by_k if k <= DIRECTIONS), default=None)
        for side, own in by_k[k].items() if k is not None else ():
            far = own.value - own.chance > NormalDist().inv_cdf(1 - LEVEL / (2 * len(pairs))) * own.spread
            known = own.p is not None or not pair.same_noise  # of the same noise only placebos tell
            if known and (far or pair.same_noise) and (own.p is None or own.p <= LEVEL):
                cells = {
                    f"overlap of the {k} largest {side} singular directions beyond chance": own.value,
                    "by chance": f"{own.chance:.3g} +- {own.spread:.2g}",
                    "placebos": _range(own.placebos, own.p),
                    "matrices": own.matrices,
                }
                lines.append(row(f"{pair.a} and {pair.b}", cells))
    return lines


def seed_lines(agreements: Sequence[Agreement], across: Sequence[Across]) -> list[str]:
    """Return a row for each group of seeds, and for each two groups."""
    lines: list[str] = []
    for one in agreements:
        cells: dict[str, object] = {"cosine of two seeds": one.cosine, "of mean changes of halves": one.halves}
        cells |= {"reliability of all": one.reliability, "placebos of the halves": _range(one.placebos, one.p)}
        lines.append(row(f"{len(one.group.seeds)} seeds of {one.group.label}", cells))
    for two in across:
        cells = {"cosine": two.cosine, "placebos": _range(two.placebos, two.p)}
        lines.append(row(f"{two.a.label} and {two.b.label}", cells))
    return lines


def target_line(found: Mapping[str, Any], *, tied: bool) -> str:
    """Return a row with a change's size, share by part, rank and sparsity. Tied, the unembedding is in `embeddings`."""
    where: Mapping[str, Any] = found["where"]
    whole, head, placebos = where[ALL], where[UNEMBEDDING], where[ALL]["placebos"]
    shares = {name: own["share"] for name, own in where.items() if name != ALL and not (tied and name == UNEMBEDDING)}
    most = max((name for name in shares if name.startswith("layer ")), key=shares.__getitem__, default=None)
    parts = sorted(((share, name) for name, share in shares.items() if not name.startswith("layer ")), reverse=True)
    still = whole["at_most"]["absolute"].get("0")
    cells = {
        "norm of the change": f"{whole['norm']:.4g}",
        "of the base's norm": None if whole["relative"] is None else f"{whole['relative']:.3%}",
        "norms of placebos": _range([one["norm"] for one in placebos]),
        "shares": ", ".join(f"{name} {share:.0%}" for share, name in parts if share >= 0.005) or None,
        "largest share of a layer": f"{shares[most]:.0%}, {most}" if most else None,
        "norm of the unembedding's change": f"{head['norm']:.4g}{' (tied to the embeddings)' if tied else ''}",
        "median participation rank": whole["participation_rank"],
        "that of noise": whole["participation_rank_of_noise"],
        "that of placebos": _range([one["participation_rank"] for one in placebos]),
        "median entropy rank": whole["entropy_rank"],
        "unchanged numbers": None if still is None else f"{still:.1%}",
    }
    return row(found["target"], cells)


def gain_line(name: str, found: GainKept, *placebos: GainKept) -> str:
    """Return a row with the rewards at each rank."""
    cells: dict[str, object] = {"before": found.before, "after": found.after, "gain": found.gain}
    cells["after, placebos"] = _range([one.after for one in placebos])
    for cut in found.cuts:
        cells[f"rank {cut.rank}"] = f"{cut.reward:.4g}{f' ({cut.share.mean:.0%} of the gain)' if cut.share else ''}"
    least = f"{found.minimal} (95 %: {found.low} to {found.high})" if found.cuts[0].share else None
    return row(f"{name}, reward", {**cells, "least rank that keeps 90 %": least})


def _range(values: Sequence[float | None], p: float | None = None) -> str | None:
    """Return the range of the placebos and their p, or None without placebos."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return f"{min(known):.3g} to {max(known):.3g} ({len(known)}{'' if p is None else f', p {p:.2g}'})"


def draw(
    names: Sequence[str], pairs: Sequence[Pair], shares: Mapping[str, Sequence[float]], folder: Path
) -> list[Path]:
    """Draw heat maps: cosines of all pairs, of pairs by part and layer, and the share of each change by part."""
    written: list[Path] = []
    named, where = short_names(names, 40), list(shares)
    short = [named[name] for name in names]
    if pairs:
        whole_KK = np.eye(len(names))
        for (i, j), pair in zip(combinations(range(len(names)), 2), pairs, strict=False):
            whole_KK[i, j] = whole_KK[j, i] = _nan(pair.cosines[ALL].value)
        title = "Cosine of weight changes, all tensors"
        written += _map(folder / "similarity_cosines.png", title, short, short, whole_KK)
        chosen = pairs[:MOST_PAIRS]
        labels: list[str] = []
        for pair in chosen:
            spread = None if pair.same_noise else pair.cosines[ALL].spread
            width = NormalDist().inv_cdf(1 - LEVEL / 2) * _nan(spread)
            by_chance = "chance not known" if spread is None else f"all, by chance: within {width:.2g} in 95 %"
            labels.append(f"{named[pair.a]} / {named[pair.b]}\n{by_chance}")
        more = "" if len(chosen) == len(pairs) else f", the first {len(chosen)} of {len(pairs)} pairs"
        values = np.array([[_nan(pair.cosines[name].value) for name in where] for pair in chosen])
        note = f"the colours span at least {LEAST_SPAN}; grey: one did not change"
        title = f"Cosine by part and layer{more}"
        written += _map(folder / "similarity_pairs.png", title, labels, where, values, note)
    inside = [name for name in where if name != ALL]
    title = "Share of the squared change, by part and by layer"
    values = np.array([shares[name] for name in inside]).T
    return written + _map(folder / "similarity_shares.png", title, short, inside, values, signed=False)


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _map(
    path: Path,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: measures.Floats,
    note: str = "",
    *,
    signed: bool = True,
) -> list[Path]:
    """Draw numbers [rows, columns] as colours, NaN in grey; `signed` ones from orange over white to purple."""
    figure = canvas(max(7.0, 4.6 + 0.42 * len(columns)), 2.4 + 0.42 * len(rows), layout="constrained")
    axes = figure.add_subplot()
    known = np.abs(values[~np.isnan(values)])
    most = float(known.max()) if known.size and known.max() > 0 else 1.0
    most = max(most, LEAST_SPAN) if signed else most
    colors = {"cmap": "PuOr", "vmin": -most} if signed else {"cmap": "Purples", "vmin": 0.0}
    shown = axes.imshow(values, vmax=most, aspect="auto", **colors)  # pyright: ignore[reportArgumentType]
    axes.set_facecolor(GRID)
    head(axes, title)
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(rows)), rows)
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
