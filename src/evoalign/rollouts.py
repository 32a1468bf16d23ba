# SPDX-License-Identifier: Apache-2.0
"""What is asked in a generation, and the rewards of the answers: batches, requests, seeds, groups of columns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from evoalign.config import Config, SamplingConfig
from evoalign.engines.base import Answering, pairs_of
from evoalign.errors import EvoalignError
from evoalign.report import watching
from evoalign.rewards.objective import Columns, Group, Objective, grouped, judge
from evoalign.tasks.base import Task
from evoalign.tasks.grading import Answers, scored
from evoalign.tokens import Tokens
from evoalign.types import Example, Member, Plan, Request, Rollout, Sampling


def sampling_of(settings: SamplingConfig) -> Sampling:
    """How tokens are drawn, as a section of a config has it."""
    return Sampling(
        settings.max_tokens, settings.temperature, settings.top_p, tuple(settings.stop), bool(settings.keep_stop)
    )


class LostError(EvoalignError):
    """An engine returned no completion of a member, or one of nobody who was asked."""

    def __init__(self, message: str, member: Member) -> None:
        super().__init__(message)
        self.member = member


def collect(
    engine: Answering, plan: Plan, requests: Sequence[Request], take: Callable[[int, Rollout], None] | None = None
) -> list[Rollout]:
    """All completions of a plan, member by member and each in the order of the requests: the one door to an engine.

    `take` is called with each as it comes, and its place in that order. Raises LostError where a completion is missing
    or was not asked for; no score counts then.
    """
    asked = {(m.index, r.index): m for m, r in pairs_of(plan.members, requests)}
    places = {key: place for place, key in enumerate(asked)}
    found: dict[tuple[int, int], Rollout] = {}
    with watching.phase("answering", len(asked)) as work:
        for rollout in engine.rollout(plan, requests):
            key = (rollout.member.index, rollout.request)
            if key not in asked or key in found:
                raise LostError(f"the engine returned {key} (member, request), which nobody asked for", rollout.member)
            found[key] = rollout
            work.done += 1
            work.tokens += len(rollout.token_ids)
            if take is not None:
                take(places[key], rollout)
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


def columns_of(task: Task, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
    """`task.columns` of completions that are there already. Raises RewardError."""
    with watching.phase("scoring"):
        return scored(task, texts, examples)


def columns_taken(answers: Answers) -> Columns:
    """The columns of completions that were taken as they came, once all of them are scored. Raises RewardError."""
    with watching.phase("scoring"):
        return answers.columns()


def rewards_of(task: Task, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
    """The weighted sum of the columns, one a completion. Raises RewardError."""
    return task.weighted.rewards(columns_of(task, texts, examples), texts, examples)


def scores_of(objective: Objective, columns: Columns, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
    """What an objective makes of the completions of one policy, each alone, at its state of now."""
    return judge(objective, alone(objective, columns, texts, examples))[0].tolist() if texts else []


def alone(
    objective: Objective, columns: Columns, texts: Sequence[str], examples: Sequence[Example], generation: int = 0
) -> Group:
    """The completions of one policy that nobody perturbs, as a group of one member, whose `mean` is itself."""
    group = grouped(columns, texts, examples, generation)
    return replace(group, mean=group) if objective.asks_mean else group


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


EARLY = 10_000
"""Prompts of a split that are all encoded before the first is asked, so that one which cannot be is told at once."""


class Encoded(dict[int, tuple[int, ...]]):
    """Token ids of the prompts of a split, by row. Of many rows those alone that are asked for. Raises ModelError."""

    def __init__(self, task: Task, tokens: Tokens, examples: Sequence[Example]) -> None:
        super().__init__()
        self._task, self._tokens, self._examples = task, tokens, examples
        if len(examples) <= EARLY:
            self.update((row, self[row]) for row in range(len(examples)))

    def __missing__(self, row: int) -> tuple[int, ...]:
        found = self._tokens.encode(self._task.prompt(self._examples[row]))
        self[row] = found
        return found


def lengths_of(task: Task, tokens: Tokens, examples: Sequence[Example]) -> list[int]:
    """Tokens of the prompts. Of many, one in every so many stands for those that follow: a million take minutes."""
    step = -(-len(examples) // EARLY)
    known = [len(tokens.encode(task.prompt(example))) for example in examples[::step]]
    return [known[row // step] for row in range(len(examples))]


def rows_of(config: Config, total: int, generation: int) -> list[int]:
    """Rows of a generation, one a request: those of its batch, each `task.samples` times in a row."""
    chosen = batch(total, config.task.batch_size, config.seed, generation)
    return [row for row in chosen for _ in range(config.task.samples or 1)]


def group_of(
    task: Task,
    examples: Sequence[Example],
    rollouts: Sequence[Rollout],
    members: int,
    generation: int = 0,
    answers: Answers | None = None,
) -> Group:
    """What all members said and earned, of all the completions that `collect` gave, in its order.

    `answers` took them as they came. Raises RewardError.
    """
    texts, asked = [r.text for r in rollouts], [*examples] * members
    columns = columns_of(task, texts, asked) if answers is None else columns_taken(answers)
    return grouped(columns, texts, examples, generation)


def with_mean(task: Task, group: Group, rollouts: Sequence[Rollout], answers: Answers | None = None) -> Group:
    """The group with what the unperturbed model said and earned, of its completions in the order of the prompts."""
    return replace(group, mean=group_of(task, group.examples, rollouts, 1, group.generation, answers))


def requests_of(
    config: Config,
    rows: Sequence[int],
    prompts: Mapping[int, tuple[int, ...]] | Sequence[tuple[int, ...]],
    generation: int,
) -> list[Request]:
    """One request for each row of the training examples; all members draw with its seed."""
    sampling = sampling_of(config.sampling)
    return [
        Request(i, prompts[row], sampling, derive_seed(config.seed, "training", generation, i))
        for i, row in enumerate(rows)
    ]
