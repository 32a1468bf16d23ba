# SPDX-License-Identifier: Apache-2.0
"""Scores in this process: pairs of about the same length go through a model together."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

from evoalign.config.scorer import ScorerConfig
from evoalign.errors import RewardError
from evoalign.rewards.scorer.models import ScoreModel


class Local:
    """`scorer.name: local`. The scores of a pair depend on its batch in the last bits of a float alone."""

    def __init__(self, config: ScorerConfig) -> None:
        """Raises ModelError, ConfigError."""
        self._config, self.template = config, config.template
        self.columns = config.columns
        self.models = {column: ScoreModel(column, config) for column in self.columns}
        self.cut = {"prompt": 0, "response": 0}
        """Pairs so far of which a part was left out, for the model that left out more of them."""
        self._cut = {column: {"prompt": 0, "response": 0} for column in self.columns}

    @property
    def digest(self) -> str:
        """SHA-256 of all that a score depends on: files of the models, template, tokens, dtype."""
        models = [(name, m.digest, m.dtype, m.pairs.max_tokens) for name, m in self.models.items()]
        said = [self._config.template, models]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Mapping[str, list[float]]:
        """One finite number of each column for each pair. Raises RewardError for a score that is none."""
        if len(prompts) != len(responses):
            raise RewardError(f"{len(prompts)} prompts and {len(responses)} responses: a score takes one of each")
        found = {column: self._scores(column, prompts, responses) for column in self.models}
        self.cut = {part: max(cut[part] for cut in self._cut.values()) for part in self.cut}
        return found

    def _scores(self, column: str, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        model, size = self.models[column], self._config.batch_size
        rows = [model.pairs.encode(*pair) for pair in zip(prompts, responses, strict=True)]
        self._cut[column]["prompt"] += sum(row.prompt_cut > 0 for row in rows)
        self._cut[column]["response"] += sum(row.response_cut > 0 for row in rows)
        said: dict[tuple[int, ...], list[int]] = {}  # members often give the same answer: each is scored once
        for at, row in enumerate(rows):
            said.setdefault(tuple(row.ids), []).append(at)
        order = sorted(said, key=len)
        scores = [0.0] * len(rows)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            for ids, score in zip(batch, model.scores(batch), strict=True):
                if not math.isfinite(score):
                    raise RewardError(
                        f"scorer.{column} {model.name} gives {score} for pair {said[ids][0]} of {len(rows)}, which is "
                        "no score; set scorer.dtype: float32, or take another model"
                    )
                for at in said[ids]:
                    scores[at] = score
        return scores

    def close(self) -> None:
        """Let go of the models."""
        self.models = {}
