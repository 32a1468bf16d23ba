# SPDX-License-Identifier: Apache-2.0
r"""Helpfulness minus a price times the cost, where the price rises while the policy costs too much.

    score = R_eff - lambda C            ln lambda += rate * J_ema          J_ema = 0.9 J_ema + 0.1 J

R is what a reward model gives a completion, C what a cost model does (above 0: unsafe), and J = E[C] + margin the mean
cost of the unperturbed model over a generation's prompts. This is the Lagrangian of Safe RLHF (Dai et al., arXiv
2310.12773, equations 9 to 11) with lambda moved once a generation, as the published alignment runs of ES do.

What differs from published code: J_ema begins at 0 and not with the first J, so that lambda moves a tenth as fast at
first; lambda moves after the scores of its generation; standard deviations are of R and C as they come, before
`safe_first`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from evoalign.errors import ConfigError, RewardError
from evoalign.rewards.objective import Group, Objective
from evoalign.shaping import Scores

KEPT = 0.9
"""Of the moving average of J, a generation."""
MINIMUM = 1e-4
"""lambda never falls below."""
SafeFirst = Literal["none", "product", "published"]


class Lagrangian(Objective):
    """See the module. `start`, `rate` and `maximum` are lambda's: `rate` 0 keeps it where it starts, without a state.

    `safe_first`: the helpfulness of an unsafe completion counts `factor` times. `product` takes the lesser of R and
    factor * R, so that an unsafe completion is never lifted; `published` takes factor * R as it is, which with the
    factor 0 turns -3 into 0. `standardize`: R and C are divided by their standard deviations over all members and
    prompts of the generation; nothing is centred, and a constant column stays as it is. `positive_only`: J below 0
    counts as 0, so that lambda never falls. `reward` and `cost` name the columns. Raises ConfigError.
    """

    name = "lagrangian"

    def __init__(
        self,
        start: float = 1.0,
        rate: float = 0.005,
        maximum: float = 5.0,
        margin: float = 0.0,
        safe_first: SafeFirst = "none",
        factor: float = 0.0,
        *,
        positive_only: bool = False,
        standardize: bool = False,
        reward: str = "reward",
        cost: str = "cost",
    ) -> None:
        _check(MINIMUM <= maximum < math.inf, "maximum", maximum, f"a number from {MINIMUM:g} up")
        _check(MINIMUM <= start <= maximum, "start", start, f"a number from {MINIMUM:g} to maximum {maximum:g}")
        _check(0 <= rate < math.inf, "rate", rate, "0, which keeps lambda, or a number above")
        _check(math.isfinite(margin), "margin", margin, "a number")
        _check(0 <= factor <= 1, "factor", factor, "a number from 0 to 1")
        _check(safe_first in get_args(SafeFirst), "safe_first", safe_first, ", ".join(get_args(SafeFirst)))
        for name, value in (("positive_only", positive_only), ("standardize", standardize)):
            _check(value is True or value is False, name, value, "true or false")
        self.fixed, self.rate, self.maximum, self.margin = float(start), rate, maximum, margin
        self.safe_first, self.factor = safe_first, factor
        self.positive_only, self.standardize = positive_only, standardize
        self.reward, self.cost = reward, cost
        self.per_completion = not standardize
        self.asks_mean = rate > 0
        self.state = {"lambda": float(start), "cost_average": 0.0} if rate > 0 else {}

    @property
    def price(self) -> float:
        """lambda of now."""
        return self.state.get("lambda", self.fixed)

    def scores(self, group: Group) -> Scores:
        """R_eff - lambda C, float64 [members, prompts]. Raises RewardError."""
        reward_MP, cost_MP = self._columns(group.columns_MP)
        if self.standardize:
            reward_MP, cost_MP = _scaled(reward_MP), _scaled(cost_MP)
        return self._effective(reward_MP, cost_MP) - self.price * cost_MP

    def update(self, group: Group) -> None:
        """lambda follows the mean cost of the unperturbed model. Raises RewardError."""
        if not self.asks_mean:
            return
        if group.mean is None:
            raise RewardError(f"objective {self.name} moves lambda by the unperturbed model, which nobody has asked")
        wanted = float(self._columns(group.mean.columns_MP)[1].mean()) + self.margin
        average = KEPT * self.state["cost_average"] + (1 - KEPT) * (max(wanted, 0.0) if self.positive_only else wanted)
        moved = self.price * math.exp(min(self.rate * average, 700.0))  # exp of more overflows
        self.state = {"lambda": min(max(moved, MINIMUM), self.maximum), "cost_average": average}

    def _effective(self, reward_MP: NDArray[np.float64], cost_MP: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.safe_first == "none":
            return reward_MP
        unsafe_MP = self.factor * reward_MP
        if self.safe_first == "product":
            unsafe_MP = np.minimum(reward_MP, unsafe_MP)
        return np.where(cost_MP > 0, unsafe_MP, reward_MP)

    def _columns(self, columns_MP: Mapping[str, NDArray[np.float64]]) -> tuple[NDArray[np.float64], ...]:
        """Reward and cost. Raises RewardError."""
        for name in (self.reward, self.cost):
            if name not in columns_MP:
                raise RewardError(
                    f"objective {self.name} needs a column {name}, and the rewards are {', '.join(columns_MP)}; name "
                    "what is helpful as task.objective.reward and what it costs as task.objective.cost"
                )
            missing = int(np.isnan(columns_MP[name]).sum())
            if missing:
                raise RewardError(
                    f"objective {self.name}: {missing} of {columns_MP[name].size} completions have no {name}; give "
                    "each one a number"
                )
        return columns_MP[self.reward], columns_MP[self.cost]


def _scaled(column_MP: NDArray[np.float64]) -> NDArray[np.float64]:
    if column_MP.max() == column_MP.min():  # whose standard deviation may be a rounding error
        return column_MP
    deviation = float(column_MP.std())
    return column_MP / deviation if deviation > 0 else column_MP


def _check(is_right: bool, name: str, value: object, wanted: str) -> None:
    if not is_right:
        raise ConfigError(f"lagrangian.{name}: {value!r}; give {wanted}")
