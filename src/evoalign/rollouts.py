# SPDX-License-Identifier: Apache-2.0
"""What is asked in a generation and how answers become scores: batches, requests, seeds, rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from evoalign import shaping
from evoalign.config import Config, SamplingConfig
from evoalign.engines.base import Engine, pairs_of
from evoalign.errors import EvoalignError, RewardError
from evoalign.plugins import FAILURES, described
from evoalign.tasks.base import Task
from evoalign.types import Example, Member, Plan, Request, Rollout, Sampling


def sampling_of(settings: SamplingConfig) -> Sampling:
    """How tokens are drawn, as a section of a config has it."""
    return Sampling(settings.max_tokens, settings.temperature, settings.top_p, tuple(settings.stop))


class LostError(EvoalignError):
    """An engine returned no completion of a member, or one of nobody who was asked."""

    def __init__(self, message: str, member: Member) -> None:
        super().__init__(message)
        self.member = member


def collect(engine: Engine, plan: Plan, requests: Sequence[Request]) -> list[Rollout]:
    """All completions of a plan, member by member and each in the order of the requests: the one door to an engine.

    Raises LostError where a completion is missing or was not asked for; nothing is scored then.
    """
    asked = {(m.index, r.index): m for m, r in pairs_of(plan.members, requests)}
    found: dict[tuple[int, int], Rollout] = {}
    for rollout in engine.rollout(plan, requests):
        key = (rollout.member.index, rollout.request)
        if key not in asked or key in found:
            raise LostError(f"the engine returned {key} (member, request), which nobody asked for", rollout.member)
        found[key] = rollout
    for key, member in asked.items():
        if key not in found:
            raise LostError(
                f"the engine returned no completion for (member, request) {key}; nothing was scored", member
            )
    return [found[key] for key in asked]


def derive_seed(*parts: object) -> int:
    """A 63-bit number that seeds the draws of one (run, prompt, sample)."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def rewards_of(task: Task, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
    """`task.rewards`, whatever a task of the user's own makes of it. Raises RewardError."""
    try:
        rewards: Any = task.rewards(texts, examples)
        return task.checked(rewards.tolist() if hasattr(rewards, "tolist") else rewards, texts, examples)
    except EvoalignError:
        raise
    except FAILURES as error:  # also of values that have no length
        raise RewardError(f"task {task.name} failed to score: {described(error)}; mend it") from error


def batch(total: int, size: int | None, seed: int, generation: int) -> list[int]:
    """Rows of a generation: all, or `size` of them from epochs shuffled by the seed; no row twice in an epoch."""
    if size is None or size >= total:
        return list(range(total))
    rows: list[int] = []
    position = generation * size
    while len(rows) < size:
        epoch, offset = divmod(position + len(rows), total)
        order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(total)
        rows += [int(i) for i in order[offset : offset + size - len(rows)]]
    return rows


def score(task: Task, examples: Sequence[Example], rollouts: Sequence[Rollout], members: int) -> shaping.Scores:
    """Rewards as float64 [members, prompts]. Raises EvoalignError where an engine left one out."""
    cells = {(r.member.index, r.request): r for r in rollouts}
    wanted = [(m, p) for m in range(members) for p in range(len(examples))]
    missing = [cell for cell in wanted if cell not in cells]
    if missing:
        raise EvoalignError(f"the engine returned no completion for (member, prompt) {missing[0]}; nothing was scored")
    rewards = rewards_of(task, [cells[c].text for c in wanted], [examples[p] for _, p in wanted])
    return np.asarray(rewards, dtype=np.float64).reshape(members, len(examples))


def requests_of(
    config: Config, rows: Sequence[int], prompts: Sequence[tuple[int, ...]], generation: int
) -> list[Request]:
    """One request for each row of the training examples; all members draw with its seed."""
    sampling = sampling_of(config.sampling)
    return [
        Request(i, prompts[row], sampling, derive_seed(config.seed, "training", generation, i))
        for i, row in enumerate(rows)
    ]
