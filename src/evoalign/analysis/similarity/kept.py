# SPDX-License-Identifier: Apache-2.0
"""How much of the gain is left when the change of each matrix is cut to a low rank, by evaluating the model.

The base model, the whole change and each cut are put into one model, served in float32, and scored on the test split
as the run's config says. Norms and biases keep their change. The share of the gain that is kept has Fieller's interval
over examples. The minimal rank is the least that keeps at least 90 % of the gain; its interval goes from the least rank
that may keep it to the least that surely does. Placebos are cut and scored likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from evoalign import statistics
from evoalign.analysis.base import BASE
from evoalign.analysis.mixer import EvalSettings, ModelMixer
from evoalign.analysis.similarity.measures import cut
from evoalign.analysis.weights import Weights
from evoalign.checks.distance import Change, Product
from evoalign.statistics import Estimate

KEPT = 0.9
"""Share of the gain that the minimal rank has to keep."""
POINT = "cut"


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


def gains_kept(weights: Weights, placebos: Sequence[Weights], ranks: Sequence[int]) -> list[GainKept]:
    """Return the gain kept of a target, then of its placebos. Loads the model once. Raises EvoalignError."""
    weights.target.check_task()
    config = weights.target.config
    served = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
    with ModelMixer([BASE], served, EvalSettings()) as mixer:
        return [_gain_kept(mixer, one, ranks) for one in (weights, *placebos)]


def _gain_kept(mixer: ModelMixer, weights: Weights, ranks: Sequence[int]) -> GainKept:
    matrices = {name: change for name, change in weights.changes.items() if len(change.shape) == 2}
    factors = {name: cut(change, max(ranks)) for name, change in matrices.items()}

    def rewards(changes: Mapping[str, Change]) -> list[float]:
        mixer.put(POINT, _Changed(mixer, {**weights.changes, **changes}))
        return mixer.rewards(mixer.evaluate({POINT: 1.0})).tolist()

    def of_rank(rank: int) -> dict[str, Change]:
        return {name: Product(found.a[:rank], found.b[:, :rank], 1.0) for name, found in factors.items()}

    before_E, after_E = mixer.rewards(mixer.evaluate({BASE: 1.0})).tolist(), rewards({})
    return from_rewards(before_E, after_E, {rank: rewards(of_rank(rank)) for rank in ranks})


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


def from_rewards(before_E: Sequence[float], after_E: Sequence[float], cut_E: dict[int, Sequence[float]]) -> GainKept:
    """Return the gain kept from the rewards of E examples; `cut_E` has those of the cuts by rank."""
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
