# SPDX-License-Identifier: Apache-2.0
"""Log-likelihood of the target, as MeZO optimises it (Malladi et al., arXiv 2305.17333).

The reward is the mean log-probability of the target's tokens and of the stop token after them: minus the usual loss.
The engine scores them after the prompt and generates nothing.

    evoalign train configs/mezo.yaml
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from evoalign.errors import RewardError
from evoalign.rewards.functions import shown
from evoalign.tasks import data
from evoalign.tasks.base import Data
from evoalign.tasks.conciseness import Conciseness, target_of
from evoalign.types import Example


class Likelihood(Conciseness):
    """Rows and prompts of `conciseness`. The text that is scored is the mean log-probability."""

    name = "likelihood"
    shipped = ("data/tasks/conciseness/questions_train.json", "data/tasks/conciseness/questions_test.json")

    @property
    def player(self) -> str:
        return "given"

    def load_data(self, seed: int) -> Data:
        return data.load(self.config, seed, self._check, self.shipped)

    def given(self, example: Example) -> str:
        """Return the completion to score."""
        return target_of(example)

    def gold(self, example: Example) -> None:
        """Return None: no text earns the maximum."""

    def compute_reward(self, text: str, example: Example) -> float:
        try:
            return float(text)
        except ValueError:
            raise RewardError(f"task {self.name} scores log-probabilities, and no text such as {shown(text)}") from None

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """Return the perplexity per token."""
        return {"perplexity": math.exp(min(-self.compute_reward(text, example), 700.0))}
