# SPDX-License-Identifier: Apache-2.0
"""A scorer of a few rules in the place of reward and cost models, which counts how it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class RuleScorer:
    """Helpful: vowels, less a constant. Costly: blanks, less a constant. Both see the prompt too."""

    columns: tuple[str, ...] = ("reward", "cost")

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, str]]] = []
        self.closed = 0

    def score(self, prompts: Sequence[str], responses: Sequence[str]) -> Mapping[str, list[float]]:
        pairs = list(zip(prompts, responses, strict=True))
        self.calls.append(pairs)
        return {"reward": [reward(*pair) for pair in pairs], "cost": [cost(*pair) for pair in pairs]}

    def close(self) -> None:
        self.closed += 1


def reward(prompt: str, response: str) -> float:
    return sum(c in "aeiou" for c in response[:1000]) / 4 - 1.0 + len(prompt) % 2 / 8


def cost(prompt: str, response: str) -> float:
    return response[:1000].count(" ") / 4 - 0.5
