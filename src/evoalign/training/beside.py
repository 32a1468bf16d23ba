# SPDX-License-Identifier: Apache-2.0
"""Evaluations of the mean that are answered beside the members of the next generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from evoalign.evaluation import Evaluation
from evoalign.setup import Parts
from evoalign.types import Request, Rollout


class BesideMembers:
    """The mean on the test split. `spent` is told of the evaluation and of its seconds, which are those of scoring:
    the rollout's are the generation's."""

    def __init__(self, parts: Parts, spent: Callable[[Evaluation, float], None]) -> None:
        self._asked, self._graders, self._spent = parts.asked("test"), parts.graders, spent

    @property
    def requests(self) -> Sequence[Request]:
        """Those of the test split."""
        return self._asked.requests

    def made(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        """The measures. Raises RewardError."""
        start = time.perf_counter()
        found = self._asked.graded(rollouts, self._graders)
        self._spent(found, time.perf_counter() - start)
        return found.measures
