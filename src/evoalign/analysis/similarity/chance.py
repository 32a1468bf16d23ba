# SPDX-License-Identifier: Apache-2.0
"""Cosines by chance: placebos, the agreement of seeds with each other; and the gain that a low rank keeps.

In many dimensions two random directions are nearly orthogonal, so a cosine near 0 means nothing by itself. It is
compared with the cosines of placebos, whose coefficients are shuffled; a run without a journal, such as a GRPO run,
is its own placebo. For seeds of one setting, the mean changes of two halves are compared.

To see how much of a gain is left when the change of each matrix is cut to a low rank, the base model, the whole change
and each cut are put into one model, served in float32, and scored on the test split as the run's config says. Norms and
biases keep their change. The share of the gain has Fieller's interval over examples. The minimal rank is the least that
keeps at least 90 % of the gain; its interval goes from the least rank that may keep it to the least that surely does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.base import BASE
from evoalign.analysis.mixer import EvalSettings, ModelMixer
from evoalign.analysis.similarity.measures import cut, p_of
from evoalign.analysis.targets import Target, alike
from evoalign.analysis.weights import Weights
from evoalign.checks.distance import Change, Product
from evoalign.placebos.counterfactual import Follower, parse
from evoalign.rundir import checkpoint
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.own import read_own
from evoalign.statistics import Estimate
from evoalign.training import saving
from evoalign.training.replay import log_of, rebuilt

Floats: TypeAlias = NDArray[np.float64]
MOST_SPLITS = 200
KEPT = 0.9
"""Share of the gain that the minimal rank has to keep."""
FEWEST_SEEDS = 4
"""Fewest seeds for an interval of the reliability: leaving one out leaves two halves."""


def placebos_of(target: Target, seeds: Sequence[int], folder: Path) -> list[Target]:
    """Save placebos of a run of ES in `folder`, from its journal with shuffled coefficients; none of another target.

    Raises ModelError, ResumeError or JournalError where the run cannot be followed.
    """
    if target.run is None or target.method != "es" or not seeds:
        return []
    log, marked = log_of(target.run), checkpoint.mark_of(target.weights)
    count = log.sealed if marked is None else marked.generation
    found: list[Target] = []
    with rebuilt(log, generation=0, model=target.config.model) as (served, _):
        follower = Follower(served, log, count)
        for seed in seeds:
            other, place = parse("shuffle", log, seed), folder / f"placebo_{seed}"
            mark = Mark(count, follower.follow(other), log.generations[count - 1].hash, counterfactual=str(other))
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
    if target.method != "es":
        return frozenset()
    lines = (generation.hash for generation in log_of(target.run).generations)
    return frozenset(((target.config.seed, target.config.space.name), *lines))


def placebo_columns(members: Sequence[int], placebos: Mapping[int, Sequence[int]]) -> list[tuple[int, ...]]:
    """Return one selection of columns per placebo number n, in which each model is replaced by its n-th placebo.

    `placebos` maps a model's column to those of its placebos; a model without placebos keeps its own column.
    """
    known = [placebos[k] for k in members if k in placebos]
    count = min(map(len, known), default=0)
    return [tuple(placebos[k][n] if k in placebos else k for k in members) for n in range(count)]


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
    runs = {k: target.run for k, target in enumerate(targets) if target.run is not None and target.method is not None}
    configs = {k: read_own(run) for k, run in runs.items()}  # code that they name is not run

    def settings(k: int) -> dict[str, object]:
        marked = checkpoint.mark_of(targets[k].weights)
        return {**(targets[k].settings(configs[k]) or {}), "generation": None if marked is None else marked.generation}

    groups = [(label, same, tuple(configs[k].seed for k in same)) for label, same in alike(list(runs), settings)]
    return [Group(label, tuple(same), seeds) for label, same, seeds in groups if len(set(seeds)) == len(seeds) > 1]


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


@dataclass(frozen=True, slots=True)
class Cut:
    """Reward with the change of each matrix cut to `rank`; `share` is None where the gain may be 0."""

    rank: int
    reward: float
    share: Estimate | None


@dataclass(frozen=True, slots=True)
class GainKept:
    """Rewards on the test split. `minimal` is None where no given rank keeps enough, or the gain is not significant.

    `low` and `high` are the ends of its interval among the given ranks; `high` None: more than the largest.
    """

    before: float
    after: float
    gain: Estimate
    cuts: tuple[Cut, ...]
    minimal: int | None
    low: int | None
    high: int | None


def gains_kept(weights: Sequence[Weights], ranks: Sequence[int]) -> list[GainKept]:
    """Return the gain kept of a target, then of its placebos. Loads the model once. Raises EvoalignError."""
    weights[0].target.check_task()
    config = weights[0].target.config
    served = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
    with ModelMixer([BASE], served, EvalSettings()) as mixer:
        return [_gain_kept(mixer, one.changes, ranks) for one in weights]


def _gain_kept(mixer: ModelMixer, changes: Mapping[str, Change], ranks: Sequence[int]) -> GainKept:
    factors = {name: cut(change, max(ranks)) for name, change in changes.items() if len(change.shape) == 2}

    def rewards(rank: int | None) -> Floats:
        own = {} if rank is None else {n: Product(f.a[:rank], f.b[:, :rank], 1.0) for n, f in factors.items()}
        mixer.put("cut", _Changed(mixer, {**changes, **own}))
        return mixer.rewards(mixer.evaluate({"cut": 1.0}))

    before_E = mixer.rewards(mixer.evaluate({BASE: 1.0}))
    return from_rewards(before_E, rewards(None), {rank: rewards(rank) for rank in ranks})


class _Changed(Mapping[str, torch.Tensor]):
    """The base model's tensors with changes, float32, each computed on access."""

    def __init__(self, mixer: ModelMixer, changes: Mapping[str, Change]) -> None:
        self._mixer, self._changes = mixer, changes

    def __getitem__(self, name: str) -> torch.Tensor:
        base = self._mixer.mixed(name, {BASE: 1.0})
        return (base.double() + self._changes[name].rows(slice(None)).reshape(base.shape)).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._changes)

    def __len__(self) -> int:
        return len(self._changes)


def from_rewards(before_E: Floats, after_E: Floats, cut_E: Mapping[int, Floats]) -> GainKept:
    """Return the gain kept from the rewards of E examples; `cut_E` has those of the cuts by rank."""
    gain, whole_E = statistics.paired(before_E, after_E), after_E - before_E
    sure = statistics.is_sure(gain) and gain.mean > 0
    cuts = [
        Cut(rank, float(own_E.mean()), statistics.ratio(own_E - before_E, whole_E) if sure else None)
        for rank, own_E in sorted(cut_E.items())
    ]
    known = [(one.rank, one.share) for one in cuts if one.share is not None]
    ends = [
        (rank, (s.mean, s.mean if s.high is None else s.high, s.mean if s.low is None else s.low)) for rank, s in known
    ]
    least = [min((rank for rank, own in ends if own[i] >= KEPT), default=None) for i in range(3)]
    return GainKept(float(before_E.mean()), float(after_E.mean()), gain, tuple(cuts), *least)
