# SPDX-License-Identifier: Apache-2.0
"""Cosines by chance: placebos, and the agreement of seeds with each other.

In many dimensions two random directions are nearly orthogonal, so a cosine near 0 means nothing by itself. It is
compared with the cosines of placebos, whose coefficients are shuffled; a run without a journal, such as a GRPO run,
is its own placebo. For seeds of one setting, the mean changes of two halves are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.compare.groups import labels_of, settings_of
from evoalign.analysis.similarity.measures import p_of
from evoalign.analysis.targets import Target
from evoalign.config import Config, load
from evoalign.placebos.counterfactual import Follower, parse
from evoalign.rundir import checkpoint
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.method import method_of
from evoalign.statistics import Estimate
from evoalign.training import saving
from evoalign.training.replay import log_of, rebuilt

Floats: TypeAlias = NDArray[np.float64]
MOST_SPLITS = 200
FEWEST_SEEDS = 4
"""Fewest seeds for an interval of the reliability: leaving one out leaves two halves."""


# --- placebos ---------------------------------------------------------------------------------------------------------


def placebos_of(target: Target, seeds: Sequence[int], folder: Path) -> list[Target]:
    """Save placebos of a run of ES in `folder`, from its journal with shuffled coefficients; none of another target.

    Raises ModelError, ResumeError or JournalError where the run cannot be followed.
    """
    run = target.run
    if run is None or method_of(run) != "es" or not seeds:
        return []
    log = log_of(run)
    marked = checkpoint.mark_of(target.weights)
    count = log.sealed if marked is None else marked.generation
    found: list[Target] = []
    with rebuilt(log, generation=0, model=target.config.model) as (served, _):
        follower = Follower(served, log, count)
        for seed in seeds:
            other = parse("shuffle", log, seed)
            mark = Mark(count, follower.follow(other), log.generations[count - 1].hash, counterfactual=str(other))
            place = folder / f"placebo_{seed}"
            saving.save(served, place, mark, replace=False)
            found.append(replace(target, name=f"{target.name}, {other}", weights=place, run=None))
    return found


def draws_noise_of(one: Target, other: Target) -> bool:
    """Return whether two means of ES drew the same noise, so that their changes are not independent.

    Runs of one seed did. A mean that replay saved, such as a placebo, drew the noise of its journal.
    """
    return not _noise_of(one).isdisjoint(_noise_of(other))


def _noise_of(target: Target) -> frozenset[object]:
    """Return what identifies the noise: a run's seed, space and journal hashes; the hash in a saved mean."""
    if target.run is None:
        mark = checkpoint.mark_of(target.weights)
        return frozenset() if mark is None else frozenset((mark.journal,)) - {checkpoint.NO_JOURNAL}
    if method_of(target.run) != "es":
        return frozenset()
    lines = (generation.hash for generation in log_of(target.run).generations)
    return frozenset(((target.config.seed, target.config.space.name), *lines))


def placebo_columns(members: Sequence[int], placebos: Mapping[int, Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the columns that replace some targets: the first placebo of each, the second of each, ...

    `placebos` has the columns of each target that has any; a target without keeps its own column.
    """
    known = [placebos[k] for k in members if k in placebos]
    count = min(map(len, known), default=0)
    return [tuple(placebos[k][n] if k in placebos else k for k in members) for n in range(count)]


# --- seeds of one setting ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in their seed alone; `members` are their indices among the targets."""

    label: str
    members: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the seeds of a group agree. `cosine`: mean over pairs of seeds. `halves`: mean cosine of two halves' mean
    changes, over all splits (at most 200).

    `reliability`: the Spearman-Brown formula for all seeds, 2 h / (1 + h). Intervals are for new seeds, by the
    jackknife. `placebos`: `halves` of the first placebo of each seed, of the second of each, and so on; `p` is that of
    `halves` among them.
    """

    group: Group
    cosine: Estimate
    halves: Estimate
    reliability: float | None
    placebos: tuple[float, ...]
    p: float | None


@dataclass(frozen=True, slots=True)
class Across:
    """Mean `cosine` of a run of one group with one of another, and of their placebos.

    It has no interval where runs of both groups drew the same noise.
    """

    a: Group
    b: Group
    cosine: Estimate
    placebos: tuple[float, ...]
    p: float | None


def groups_of(targets: Sequence[Target]) -> list[Group]:
    """Return the groups of two or more runs that differ in their seed alone."""
    found: dict[str, list[tuple[int, Config]]] = {}
    for k, target in enumerate(targets):
        if target.run is None:
            continue
        method = method_of(target.run)
        if method is None:
            continue
        own = load([target.run / "config.yaml"])  # code that it names is not run
        marked = checkpoint.mark_of(target.weights)
        tree = {**settings_of(own, method), "generation": None if marked is None else marked.generation}
        found.setdefault(json.dumps(tree, sort_keys=True), []).append((k, own))
    labels = labels_of([json.loads(key) for key in found]) if found else []
    return [
        Group(label, tuple(k for k, _ in same), tuple(own.seed for _, own in same))
        for label, same in zip(labels, found.values(), strict=True)
        if len({own.seed for _, own in same}) == len(same) > 1
    ]


def agreement(group: Group, products_KK: Floats, placebos: Mapping[int, Sequence[int]]) -> Agreement | None:
    """Return the agreement of a group from the inner products of all changes; None where one did not change.

    `placebos` has the columns of each target's placebos.
    """
    products_SS = products_KK[np.ix_(group.members, group.members)]
    if not np.diag(products_SS).all():
        return None
    halves = jackknifed(products_SS, mean_of_halves, FEWEST_SEEDS)
    whole = 2 * halves.mean / (1 + halves.mean) if halves.mean > -1 else None
    by_chance = tuple(mean_of_halves(products_KK[np.ix_(at, at)]) for at in placebo_columns(group.members, placebos))
    p = p_of(halves.mean, by_chance)
    return Agreement(group, jackknifed(products_SS, _mean_cosine, statistics.FEWEST), halves, whole, by_chance, p)


def between(
    one: Group, other: Group, cosines_KK: Floats, placebos: Mapping[int, Sequence[int]], *, same_noise: bool = False
) -> Across:
    """Return the mean cosine of a run of one group with one of another, for new seeds of both."""
    found = statistics.crossed(cosines_KK[np.ix_(one.members, other.members)])
    if same_noise:
        found = Estimate(found.mean, found.n, why="some of the two drew the same noise: no interval")
    count = len(one.members)
    by_chance = tuple(
        float(cosines_KK[np.ix_(at[:count], at[count:])].mean())
        for at in placebo_columns((*one.members, *other.members), placebos)
    )
    return Across(one, other, found, by_chance, p_of(found.mean, by_chance))


def mean_of_halves(products_SS: Floats) -> float:
    """Return the mean cosine of two halves' mean changes, over splits; of an odd number one half is larger."""
    seeds = range(len(products_SS))
    splits = [half for half in combinations(seeds, len(seeds) // 2) if len(seeds) % 2 or 0 in half]
    chosen = [splits[i] for i in np.linspace(0, len(splits) - 1, min(len(splits), MOST_SPLITS)).round().astype(int)]
    found: list[float] = []
    for half in chosen:
        rest = [s for s in seeds if s not in half]
        inner = products_SS[np.ix_(half, rest)].sum()
        sizes = products_SS[np.ix_(half, half)].sum() * products_SS[np.ix_(rest, rest)].sum()
        found.append(float(inner / np.sqrt(sizes)) if sizes > 0 else 0.0)
    return float(np.mean(found))


def jackknifed(products_SS: Floats, statistic: Callable[[Floats], float], fewest: int) -> Estimate:
    """Return a statistic of S seeds with Student's t interval of its jackknife pseudo-values (Tukey 1958)."""
    s, whole = len(products_SS), statistic(products_SS)
    if s < fewest:
        return Estimate(whole, s, why=f"{s} seeds: no interval")
    kept = [[i for i in range(s) if i != left] for left in range(s)]
    pseudo = [s * whole - (s - 1) * statistic(products_SS[np.ix_(rest, rest)]) for rest in kept]
    found = statistics.mean(pseudo)
    shift = whole - found.mean
    if found.low is None or found.high is None:
        return Estimate(whole, s, why=found.why)
    return Estimate(whole, s, found.low + shift, found.high + shift)


def _mean_cosine(products_SS: Floats) -> float:
    norms_S = np.sqrt(np.diag(products_SS))
    cosines_SS = products_SS / np.outer(norms_S, norms_S)
    return float(cosines_SS[np.triu_indices(len(norms_S), 1)].mean())
