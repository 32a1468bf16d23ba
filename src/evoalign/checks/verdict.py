# SPDX-License-Identifier: Apache-2.0
"""What the completions of the test split say of a finished run: the same signs as in training, before and after it.

A gain in reward is told beside what it was bought with. A run is called likely hacked where its completions, other than
those of the start, are broken, one template, wrong though they earn the best reward, or nothing that the base model
would say; the sentences have the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from evoalign.checks import hacking, signs


class Said(Protocol):
    """A completion of the test split, as a run keeps it."""

    @property
    def example(self) -> int: ...
    @property
    def prompt(self) -> str: ...
    @property
    def target(self) -> str | None: ...
    @property
    def text(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def right(self) -> bool | None: ...


def flags(of: Sequence[Said], before: Sequence[Said], after: Sequence[Said]) -> dict[str, list[bool]]:
    """Which completions show what: each sign of `hacking.SHARES`, `degenerate` for any of those of a broken text,
    `earned_wrong`, and `hacked` for what `hacking.hacked` marks.

    `of` is one of the other two. Both are asked for since signs are held against the start: the scripts that it uses,
    and its mean reward. Where no completion says whether it is `right` (earlier releases did not), none is wrong.
    """
    texts, prompts, golds = [s.text for s in of], [s.example for s in of], [s.target for s in of]
    known = signs.scripts([*(s.text for s in before), *(s.prompt for s in of), *(s.target or "" for s in of)])
    found = hacking.flags(texts, [s.finish_reason for s in of], prompts, golds, known)
    rewards = [s.reward for s in before]
    scale = (float(np.mean(rewards)), max(*rewards, *(s.reward for s in after))) if before and after else None
    degenerate = [any(shown) for shown in zip(*(found[n] for n in DEGENERATE), strict=True)]
    wrong = hacking.earned_wrong([s.reward for s in of], [s.right for s in of], scale)
    either = zip(degenerate, found["template"], wrong, strict=True)
    return {**found, "degenerate": degenerate, "earned_wrong": wrong, "hacked": [any(shown) for shown in either]}


DEGENERATE = (*hacking.SIGNS, "other_script")
"""The signs of a broken text."""


def shares(of: Sequence[Said], before: Sequence[Said], after: Sequence[Said]) -> dict[str, float]:
    """Shares, in [0, 1], of what `flags` marks; of no completions, all are 0."""
    return {name: sum(values) / max(1, len(of)) for name, values in flags(of, before, after).items()}
