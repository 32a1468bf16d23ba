# SPDX-License-Identifier: Apache-2.0
"""How much of the gain is left where the change of each matrix is cut to a low rank: the model itself is asked.

The base model, the whole change and each cut are put into one model, served in float32, and scored on the test split as
the run's config says. What is no matrix (norms, biases) keeps its change in all of them. The share of the gain that is
kept has Fieller's interval over examples. The minimal rank is the least that keeps at least 90 % of the gain; its
interval goes from the least rank of which that cannot be excluded to the least of which it is sure. Placebos are cut
and scored alike: what they gain comes with any coefficients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from evoalign import statistics
from evoalign.analysis.lab import BASE, Asked, Lab
from evoalign.analysis.similarity.spectrum import cut
from evoalign.analysis.weights import Weights
from evoalign.checks.distance import Change, Product
from evoalign.statistics import Estimate

KEPT = 0.9
"""The share of the gain that the minimal rank has to keep."""
POINT = "cut"


@dataclass(frozen=True, slots=True)
class Cut:
    """With the change of each matrix cut to `rank`. `share` is None where the gain itself may be 0."""

    rank: int
    reward: float
    share: Estimate | None


@dataclass(frozen=True, slots=True)
class GainKept:
    """Rewards on the test split. `minimal` is None where no rank asked keeps so much, or there is no sure gain.

    `low` and `high` are the ends of its interval among the ranks asked: None for `high` is more than the largest.
    """

    before: float
    after: float
    gain: Estimate
    cuts: tuple[Cut, ...]
    minimal: int | None
    low: int | None
    high: int | None


def gains_kept(weights: Weights, placebos: Sequence[Weights], ranks: Sequence[int]) -> list[GainKept]:
    """Of a target, and then of its placebos. Loads the model once. Raises EvoalignError where it has no task."""
    weights.target.check_task()
    config = weights.target.config
    served = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
    with Lab([BASE], served, Asked()) as lab:
        return [_gain_kept(lab, one, ranks) for one in (weights, *placebos)]


def _gain_kept(lab: Lab, weights: Weights, ranks: Sequence[int]) -> GainKept:
    matrices = {name: change for name, change in weights.changes.items() if len(change.shape) == 2}
    factors = {name: cut(change, max(ranks)) for name, change in matrices.items()}

    def asked(changes: Mapping[str, Change]) -> list[float]:
        lab.put(POINT, _Changed(lab, {**weights.changes, **changes}))
        return lab.rewards(lab.answer({POINT: 1.0})).tolist()

    def of_rank(rank: int) -> dict[str, Change]:
        return {name: Product(found.a[:rank], found.b[:, :rank], 1.0) for name, found in factors.items()}

    before_E, after_E = lab.rewards(lab.answer({BASE: 1.0})).tolist(), asked({})
    return from_rewards(before_E, after_E, {rank: asked(of_rank(rank)) for rank in ranks})


class _Changed(Mapping[str, torch.Tensor]):
    """The base model's tensors with changes, float32, each made when it is asked for."""

    def __init__(self, lab: Lab, changes: Mapping[str, Change]) -> None:
        self._lab, self._changes = lab, changes

    def __getitem__(self, name: str) -> torch.Tensor:
        base = self._lab.mixed(name, {BASE: 1.0})
        return (base.double() + self._changes[name].rows(slice(None)).reshape(base.shape)).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._changes)

    def __len__(self) -> int:
        return len(self._changes)


def from_rewards(before_E: Sequence[float], after_E: Sequence[float], cut_E: dict[int, Sequence[float]]) -> GainKept:
    """From the rewards of E examples, of the cuts by rank."""
    gain = statistics.paired(before_E, after_E)
    sure = statistics.is_sure(gain) and gain.mean > 0
    whole_E = [after - before for before, after in zip(before_E, after_E, strict=True)]
    cuts: list[Cut] = []
    for rank, rewards_E in sorted(cut_E.items()):
        own_E = [reward - before for before, reward in zip(before_E, rewards_E, strict=True)]
        share = statistics.ratio(own_E, whole_E) if sure else None
        cuts.append(Cut(rank, _mean(rewards_E), share))
    known = [(c.rank, c.share) for c in cuts if c.share is not None]
    reaching = [rank for rank, share in known if share.mean >= KEPT]
    possible = [rank for rank, share in known if (share.mean if share.high is None else share.high) >= KEPT]
    certain = [rank for rank, share in known if (share.mean if share.low is None else share.low) >= KEPT]
    least = [min(ranks, default=None) for ranks in (reaching, possible, certain)]
    return GainKept(_mean(before_E), _mean(after_E), gain, tuple(cuts), *least)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
