# SPDX-License-Identifier: Apache-2.0
"""What the sums over tensors come to: cosines beside their chance, sizes, ranks, sparsity, and agreement of seeds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign.analysis import weights as reading
from evoalign.analysis.base import Finding
from evoalign.analysis.parts import ALL, UNEMBEDDING
from evoalign.analysis.similarity import chance, figures, words
from evoalign.analysis.similarity.chance import Across, Agreement, Group
from evoalign.analysis.similarity.compute import Floats, Measured, Sums, measure, total
from evoalign.analysis.similarity.kept import GainKept, gains_kept
from evoalign.analysis.similarity.overlap import SIDES, Overlap, Overlaps, together
from evoalign.analysis.similarity.spectrum import TOPS
from evoalign.analysis.targets import Target, locate
from evoalign.analysis.weights import Weights
from evoalign.config import Config
from evoalign.errors import ModelError
from evoalign.report import watching
from evoalign.rundir.method import method_of

if TYPE_CHECKING:
    from evoalign.analysis.similarity.command import Settings


@dataclass(frozen=True, slots=True)
class Cosine:
    """Of one pair, over some tensors. `spread` is its standard deviation by chance, `placebos` what those came to.

    `value` is None where one of the two did not change there.
    """

    value: float | None
    spread: float | None
    placebos: tuple[float, ...]
    p: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two targets by their places. `cosines` are those of all, of each part, of each layer, of the unembedding.

    `same_noise`: both are runs of ES that drew the same noise, for which `spread` says nothing. `overlaps` are left and
    right by the number of directions, of each of the same sets of tensors; none where singular values are not taken.
    """

    a: int
    b: int
    cosines: Mapping[str, Cosine]
    same_noise: bool
    overlaps: Mapping[str, Mapping[int, tuple[Overlap, ...]]] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Similarity(Finding):
    """The findings; `where` names the sets of tensors in the order in which they are shown."""

    names: Sequence[str] = ()
    pairs: Sequence[Pair] = ()
    where: Sequence[str] = ()
    shares: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])

    def draw(self, folder: Path) -> list[Path]:
        """Heat maps: cosines of all pairs, and which part of each change lies where."""
        return figures.draw(self, folder)


def similarity(names: Sequence[str], settings: Settings, config: Config | None) -> Similarity:
    """See `Command.run`."""
    targets = [locate(name, config, settings.base) for name in names]
    with TemporaryDirectory(prefix="evoalign-placebos-") as folder:
        columns: dict[int, list[int]] = {}
        all_ = list(targets)
        for k, target in enumerate(targets):
            seeds = range(k * settings.placebos, (k + 1) * settings.placebos)  # of their own for each: no two alike
            watching.stage(f"{target.name}, placebos")
            made = chance.placebos_of(target, seeds, Path(folder) / str(k))
            if made:
                columns[k] = list(range(len(all_), len(all_) + len(made)))
                all_ += made
        weights = reading.read(all_)
        found = measure(weights, settings.absolute, settings.relative, spectra=settings.spectrum)
        kept = [
            gains_kept(weights[k], [weights[i] for i in columns.get(k, ())], settings.ranks)
            for k in range(len(targets))
            if settings.ranks
        ]
    return _finding(weights[: len(targets)], found, columns, kept, settings)


def _finding(
    weights: Sequence[Weights],
    found: Sequence[Measured],
    columns: Mapping[int, Sequence[int]],
    kept: Sequence[Sequence[GainKept]],
    settings: Settings,
) -> Similarity:
    targets, first = [one.target for one in weights], weights[0]
    parts = {**first.parts, UNEMBEDDING: {first.unembedding}}
    sums = {name: total(found, names) for name, names in parts.items()}
    whole = sums[ALL]
    still = [t.name for k, t in enumerate(targets) if whole.norms[k] == 0]
    if len(still) == len(targets):
        raise ModelError(f"{still[0]} has the weights of its base model {targets[0].config.model.name}: no change")
    overlaps = {
        name: together([(one.spec.shape, one.overlaps) for one in found if one.spec.name in names])
        for name, names in parts.items()
    }
    pairs = [_pair(targets, i, j, sums, overlaps, columns) for i, j in combinations(range(len(targets)), 2)]
    groups = chance.groups_of(targets)
    agreements = [one for g in groups if (one := chance.agreement(g, whole.products_KK, columns)) is not None]
    alike = {(pair.a, pair.b) for pair in pairs if pair.same_noise}

    def across_of(a: Group, b: Group) -> Across:
        same = any((min(i, j), max(i, j)) in alike for i in a.members for j in b.members)
        return chance.between(a, b, whole.cosines, columns, same_noise=same)

    across = [across_of(a.group, b.group) for a, b in combinations(agreements, 2)]
    described = [_described(k, target, found, sums, parts, columns, settings) for k, target in enumerate(targets)]
    numbers = {
        "base": first.target.config.model.name,
        "unembedding": {"tensor": first.unembedding, "tied": first.tied},
        "targets": [{**one, **(_gain_tree(kept[k]) if kept else {})} for k, one in enumerate(described)],
        "pairs": [_pair_tree(pair, targets) for pair in pairs],
        "groups": [_group_tree(one, targets) for one in agreements],
        "between_groups": [_across_tree(one) for one in across],
        "tensors": [_tensor_tree(one, first.part_of(one.spec.name), len(targets)) for one in found],
    }
    labels = [target.name for target in targets]
    said = [
        *words.pairs(labels, pairs),
        *words.overlaps(labels, pairs),
        *(words.agreement(one) for one in agreements),
        *(words.across(one) for one in across),
        *(words.target(one, tied=first.tied) for one in described),
        *words.unembedding(first.unembedding, described, tied=first.tied),
        *(words.gain(name, *one) for name, one in zip(labels, kept, strict=False)),
        *words.without_placebos([one["target"] for k, one in enumerate(described)
                                 if one["method"] == "es" and k not in columns]),
    ]  # fmt: skip
    shares = {name: [one["where"][name]["share"] for one in described] for name in sums}
    return Similarity(numbers, said, labels, pairs, list(sums), shares)


def _pair(
    targets: Sequence[Target],
    i: int,
    j: int,
    sums: Mapping[str, Sums],
    overlaps: Mapping[str, Mapping[int, Overlaps]],
    columns: Mapping[int, Sequence[int]],
) -> Pair:
    at = chance.stand_ins((i, j), columns)
    cosines = {name: _cosine(own, i, j, at) for name, own in sums.items()}
    common = {name: {k: o for k, one in own.items() if (o := one.pair(i, j, at))} for name, own in overlaps.items()}
    return Pair(i, j, cosines, chance.draws_noise_of(targets[i], targets[j]), common)


def _cosine(sums: Sums, i: int, j: int, at: Sequence[tuple[int, ...]]) -> Cosine:
    cosines_KK = sums.cosines
    value, spread = number(cosines_KK[i, j]), number(sums.spread[i, j])
    placebos = tuple(float(cosines_KK[a, b]) for a, b in at if not np.isnan(cosines_KK[a, b]))
    return Cosine(value, spread, placebos, None if value is None else chance.p_of(value, placebos))


def number(value: float) -> float | None:
    """None of NaN, which JSON has not."""
    return None if math.isnan(value) else float(value)


# --- as plain data ----------------------------------------------------------------------------------------------------


def _described(
    k: int,
    target: Target,
    found: Sequence[Measured],
    sums: Mapping[str, Sums],
    parts: Mapping[str, Collection[str]],
    columns: Mapping[int, Sequence[int]],
    settings: Settings,
) -> dict[str, Any]:
    """One target: what it is, and its size, sparsity and ranks in each set of tensors, beside those of its placebos."""
    whole = sums[ALL]
    where: dict[str, Any] = {}
    for name, own in sums.items():
        inside = [one for one in found if one.spec.name in parts[name]]
        where[name] = {
            "share_of_numbers": own.numbers / whole.numbers,
            **_size_tree(k, own, whole),
            **_sparsity_tree(k, own, settings),
            **_rank_tree(k, inside),
            "placebos": [{**_size_tree(i, own, whole), **_rank_tree(i, inside)} for i in columns.get(k, ())],
        }
    method = None if target.run is None else method_of(target.run)
    return {**target.described(), "method": method, "where": where}


def _size_tree(k: int, own: Sums, whole: Sums) -> dict[str, Any]:
    square, all_ = float(own.products_KK[k, k]), float(whole.products_KK[k, k])
    return {
        "norm": math.sqrt(square),
        "share": square / all_ if all_ else 0.0,
        "relative": math.sqrt(square / own.base) if own.base else None,
    }


def _sparsity_tree(k: int, own: Sums, settings: Settings) -> dict[str, Any]:
    below = [int(count) / own.numbers for count in own.below_KT[k]]
    count = len(settings.absolute)
    thresholds = {"absolute": (settings.absolute, below[:count]), "relative": (settings.relative, below[count:])}
    return {
        "at_most": {
            kind: {f"{limit:g}": share for limit, share in zip(limits, shares, strict=True)}
            for kind, (limits, shares) in thresholds.items()
        }
    }


def _rank_tree(k: int, inside: Sequence[Measured]) -> dict[str, Any]:
    """Medians over matrices."""
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


def _pair_tree(pair: Pair, targets: Sequence[Target]) -> dict[str, Any]:
    return {
        "a": targets[pair.a].name,
        "b": targets[pair.b].name,
        "same_noise": pair.same_noise,
        "cosines": {name: {**asdict(c), "placebos": list(c.placebos)} for name, c in pair.cosines.items()},
        "overlaps": {
            name: {
                str(k): {side: _overlap_tree(o) for side, o in zip(SIDES, both, strict=True)}
                for k, both in by_k.items()
            }
            for name, by_k in pair.overlaps.items()
        },
    }


def _overlap_tree(found: Overlap) -> dict[str, Any]:
    return {**asdict(found), "placebos": list(found.placebos)}


def _gain_tree(kept: Sequence[GainKept]) -> dict[str, Any]:
    own, *placebos = (asdict(one) for one in kept)
    return {"gain_kept": {**own, "placebos": placebos}}


def _group_tree(found: Agreement, targets: Sequence[Target]) -> dict[str, Any]:
    group: Group = found.group
    return {
        "label": group.label,
        "targets": [targets[k].name for k in group.members],
        "seeds": list(group.seeds),
        "cosine": asdict(found.cosine),
        "halves": asdict(found.halves),
        "reliability": found.reliability,
        "placebos": list(found.placebos),
        "p": found.p,
    }


def _across_tree(found: Across) -> dict[str, Any]:
    return {
        "a": found.a.label,
        "b": found.b.label,
        "cosine": asdict(found.cosine),
        "placebos": list(found.placebos),
        "p": found.p,
    }


def _tensor_tree(one: Measured, part: str, count: int) -> dict[str, Any]:
    """Of the first so many targets."""
    return {
        "name": one.spec.name,
        "shape": list(one.spec.shape),
        "part": part,
        "layer": one.spec.layer,
        "norms": [float(norm) for norm in one.sums.norms[:count]],
        "base_norm": math.sqrt(one.sums.base),
        "cosines": _matrix_tree(one.sums.cosines[:count, :count]),
        "spectra": [None if s is None else asdict(s) for s in one.spectra[:count]],
        "overlaps": {
            str(k): {side: _matrix_tree(own_KK[:count, :count]) for side, own_KK in zip(SIDES, own_SKK, strict=True)}
            for k, own_SKK in one.overlaps.items()
        },
    }


def _matrix_tree(values_KK: Floats) -> list[list[float | None]]:
    return [[number(value) for value in row] for row in values_KK]
