# SPDX-License-Identifier: Apache-2.0
"""Results of similarity: cosines and overlaps of pairs, agreement of seeds, size, rank and sparsity of each change."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evoalign.analysis import weights as reading
from evoalign.analysis.base import Finding
from evoalign.analysis.similarity import chance, report
from evoalign.analysis.similarity.chance import Across
from evoalign.analysis.similarity.kept import GainKept, gains_kept
from evoalign.analysis.similarity.measures import (
    SIDES,
    TOPS,
    Floats,
    Measured,
    Overlaps,
    Sums,
    measure,
    p_of,
    together,
    total,
)
from evoalign.analysis.similarity.report import Cosine, Pair
from evoalign.analysis.targets import Target, locate
from evoalign.analysis.weights import ALL, UNEMBEDDING, Weights
from evoalign.config import Config
from evoalign.errors import ModelError
from evoalign.report import watching
from evoalign.rundir.method import method_of


def similarity(
    names: Sequence[str],
    config: Config | None,
    *,
    base: str | None,
    placebos: int,
    spectrum: bool,
    absolute: Sequence[float],
    relative: Sequence[float],
    ranks: Sequence[int],
) -> Finding:
    """Measure the changes of all targets and their placebos; see `Settings`. Raises EvoalignError."""
    targets = [locate(name, config, base) for name in names]
    with TemporaryDirectory(prefix="evoalign-placebos-") as folder:
        columns: dict[int, list[int]] = {}
        all_ = list(targets)
        for k, target in enumerate(targets):
            seeds = range(k * placebos, (k + 1) * placebos)  # different shuffles for each target
            watching.stage(f"{target.name}, placebos")
            made = chance.placebos_of(target, seeds, Path(folder) / str(k))
            if made:
                columns[k] = list(range(len(all_), len(all_) + len(made)))
                all_ += made
        weights = reading.read(all_)
        found = measure(weights, absolute, relative, spectra=spectrum)
        kept = [
            gains_kept(weights[k], [weights[i] for i in columns.get(k, ())], ranks)
            for k in range(len(targets))
            if ranks
        ]
    return _finding(weights[: len(targets)], found, columns, kept, {"absolute": absolute, "relative": relative})


def _finding(
    weights: Sequence[Weights],
    found: Sequence[Measured],
    columns: Mapping[int, Sequence[int]],
    kept: Sequence[Sequence[GainKept]],
    limits: Mapping[str, Sequence[float]],
) -> Finding:
    targets, first = [one.target for one in weights], weights[0]
    names = [target.name for target in targets]
    parts: Mapping[str, Collection[str]] = {**first.parts, UNEMBEDDING: {first.unembedding}}
    sums = {name: total(found, tensors) for name, tensors in parts.items()}
    still = [name for k, name in enumerate(names) if sums[ALL].norms[k] == 0]
    if len(still) == len(targets):
        raise ModelError(f"{still[0]} has the weights of its base model {targets[0].config.model.name}: no change")
    overlaps = {
        name: together([(one.spec.shape, one.overlaps) for one in found if one.spec.name in tensors])
        for name, tensors in parts.items()
    }
    pairs = [_pair(targets, i, j, sums, overlaps, columns) for i, j in combinations(range(len(targets)), 2)]
    agreements = [chance.agreement(g, sums[ALL].products_KK, columns) for g in chance.groups_of(targets)]
    agreements = [one for one in agreements if one is not None]
    alike = {(pair.a, pair.b) for pair in pairs if pair.same_noise}
    across: list[Across] = []
    for a, b in combinations([one.group for one in agreements], 2):
        same = any((min(i, j), max(i, j)) in alike for i in a.members for j in b.members)
        across.append(chance.between(a, b, sums[ALL].cosines, columns, same_noise=same))
    described = [_described(k, target, found, sums, parts, columns, limits) for k, target in enumerate(targets)]
    for one, own in zip(described, kept, strict=False):
        gain, *placebos = (asdict(each) for each in own)
        one["gain_kept"] = {**gain, "placebos": placebos}
    numbers = {
        "base": first.target.config.model.name,
        "unembedding": {"tensor": first.unembedding, "tied": first.tied},
        "targets": described,
        "pairs": [_pair_tree(pair, names) for pair in pairs],
        "groups": [
            {
                "label": one.group.label,
                "targets": [names[k] for k in one.group.members],
                "seeds": list(one.group.seeds),
                "cosine": asdict(one.cosine),
                "halves": asdict(one.halves),
                "reliability": one.reliability,
                "placebos": list(one.placebos),
                "p": one.p,
            }
            for one in agreements
        ],
        "between_groups": [
            {
                "a": one.a.label,
                "b": one.b.label,
                "cosine": asdict(one.cosine),
                "placebos": list(one.placebos),
                "p": one.p,
            }
            for one in across
        ],
        "tensors": [_tensor_tree(one, first.part_of(one.spec.name), len(targets)) for one in found],
    }
    lines = [*report.pair_lines(names, pairs), *report.overlap_lines(names, pairs)]
    lines += report.seed_lines(agreements, across)
    lines += [report.target_line(one, tied=first.tied) for one in described]
    lines += [report.gain_line(name, *one) for name, one in zip(names, kept, strict=False)]
    if alone := [one["target"] for k, one in enumerate(described) if one["method"] == "es" and k not in columns]:
        which = ", ".join(alone)
        lines.append(f"{which}: without placebos signal and random walk cannot be distinguished; set placebos=20")
    shares = {name: [one["where"][name]["share"] for one in described] for name in sums}
    return Finding(numbers, lines, figures=partial(report.draw, names, pairs, shares))


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
        cosines_KK = own.cosines
        value = number(cosines_KK[i, j])
        placebos = tuple(float(cosines_KK[a, b]) for a, b in at if not np.isnan(cosines_KK[a, b]))
        p = None if value is None else p_of(value, placebos)
        cosines[name] = Cosine(value, number(own.spread[i, j]), placebos, p)
    common = {name: {k: o for k, one in own.items() if (o := one.pair(i, j, at))} for name, own in overlaps.items()}
    return Pair(i, j, cosines, chance.draws_noise_of(targets[i], targets[j]), common)


def number(value: float) -> float | None:
    """Return the value, or None for NaN, which JSON does not have."""
    return None if math.isnan(value) else float(value)


# --- numbers ----------------------------------------------------------------------------------------------------------


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
        below = [int(n) / own.numbers for n in own.below_KT[k]]
        count = len(limits["absolute"])
        shares = {"absolute": below[:count], "relative": below[count:]}
        where[name] = {
            "share_of_numbers": own.numbers / whole.numbers,
            **_size(k, own, whole),
            "at_most": {
                kind: {f"{limit:g}": share for limit, share in zip(limits[kind], own_shares, strict=True)}
                for kind, own_shares in shares.items()
            },
            **_ranks(k, inside),
            "placebos": [{**_size(i, own, whole), **_ranks(i, inside)} for i in columns.get(k, ())],
        }
    method = None if target.run is None else method_of(target.run)
    return {**target.described(), "method": method, "where": where}


def _size(k: int, own: Sums, whole: Sums) -> dict[str, Any]:
    square, all_ = float(own.products_KK[k, k]), float(whole.products_KK[k, k])
    return {
        "norm": math.sqrt(square),
        "share": square / all_ if all_ else 0.0,
        "relative": math.sqrt(square / own.base) if own.base else None,
    }


def _ranks(k: int, inside: Sequence[Measured]) -> dict[str, Any]:
    """Return medians over matrices."""
    spectra = [s for one in inside if (s := one.spectra[k]) is not None]

    def median(values: Sequence[float]) -> float | None:
        return float(np.median(values)) if values else None

    return {
        "matrices": len(spectra),
        "entropy_rank": median([s.entropy for s in spectra]),
        "participation_rank": median([s.participation for s in spectra]),
        "participation_rank_of_noise": median([s.of_noise for s in spectra]),
        "energy": {str(top): median([s.energy[top] for s in spectra if top in s.energy]) for top in TOPS},
    }


def _pair_tree(pair: Pair, names: Sequence[str]) -> dict[str, Any]:
    return {
        "a": names[pair.a],
        "b": names[pair.b],
        "same_noise": pair.same_noise,
        "cosines": {name: {**asdict(c), "placebos": list(c.placebos)} for name, c in pair.cosines.items()},
        "overlaps": {
            name: {
                str(k): {s: {**asdict(o), "placebos": list(o.placebos)} for s, o in zip(SIDES, both, strict=True)}
                for k, both in by_k.items()
            }
            for name, by_k in pair.overlaps.items()
        },
    }


def _tensor_tree(one: Measured, part: str, count: int) -> dict[str, Any]:
    """Return the measures of a tensor for the first `count` targets."""

    def matrix(values_KK: Floats) -> list[list[float | None]]:
        return [[number(value) for value in line] for line in values_KK[:count, :count]]

    return {
        "name": one.spec.name,
        "shape": list(one.spec.shape),
        "part": part,
        "layer": one.spec.layer,
        "norms": [float(norm) for norm in one.sums.norms[:count]],
        "base_norm": math.sqrt(one.sums.base),
        "cosines": matrix(one.sums.cosines),
        "spectra": [None if s is None else asdict(s) for s in one.spectra[:count]],
        "overlaps": {
            str(k): {side: matrix(own_KK) for side, own_KK in zip(SIDES, own_SKK, strict=True)}
            for k, own_SKK in one.overlaps.items()
        },
    }
