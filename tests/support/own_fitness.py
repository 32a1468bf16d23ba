# SPDX-License-Identifier: Apache-2.0
"""Rewards and fitness functions of the tests, right and wrong; they import nothing that takes a process long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Example = Mapping[str, Any]
seen: list[tuple[list[str], list[Any]]] = []
"""What `letters` was asked in this process."""


def helpful(text: str, example: Example) -> float:
    return sum(c in "aeiou" for c in text) / (1 + len(text))


def mean_helpful(completions: Sequence[str], examples: Sequence[Example]) -> float:
    return math.fsum(map(helpful, completions, examples)) / len(completions)


def letters(completions: Sequence[str], examples: Sequence[Example]) -> float:
    """Different characters in all answers together, which no answer has alone."""
    seen.append((list(completions), list(examples)))
    return float(len(set("".join(completions))))


def fails(completions: Sequence[str], examples: Sequence[Example]) -> float:
    raise KeyError("label")


def broken(completions: Sequence[str], examples: Sequence[Example]) -> Any:
    return math.nan


def sleeps(completions: Sequence[str], examples: Sequence[Example]) -> float:
    import time

    time.sleep(100)
    return 0.0


def needs_both(completions: Sequence[str], examples: Sequence[Example]) -> float:
    """As a score that is not defined without an example of each class."""
    return 1.0 / (len({example["prompt"] for example in examples}) > 1)


async def later(completions: Sequence[str], examples: Sequence[Example]) -> float:
    return 0.0


def one_at_a_time(text: str) -> float:
    return 0.0


NUMBER = 3.0
