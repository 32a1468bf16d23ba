# SPDX-License-Identifier: Apache-2.0
"""What the best, the median and the worst member of a generation said, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evoalign.rundir import parquet
from evoalign.tasks.base import Task
from evoalign.types import Example, Generation, text_of


def is_due(every: int, generation: Generation) -> bool:
    """Whether a generation's completions are kept: each `every`-th from the first on, and the last; 0 is none."""
    return every > 0 and (generation.index % every == 0 or generation.index + 1 == generation.total)


def write(path: Path, generation: Generation, examples: Sequence[Example], task: Task) -> None:
    """One row for each role and prompt, by role, then prompt. `examples` are those of `generation.rows`, in order.

    Columns: generation, role (best, median or worst), member, sign, fitness, prompt, target (null where the task
    knows none), text, score, finish_reason, tokens.
    """
    shown = [
        {"prompt": text_of(task.prompt(example)), "target": task.gold(task.handed(example))} for example in examples
    ]
    parquet.write(path, list(_rows(generation, shown)))


def roles(fitness_M: Sequence[float]) -> dict[str, int]:
    """The best, the (lower) median and the worst member; of members alike, the one with the lowest index."""
    ordered = sorted(fitness_M)
    ranks = {"best": -1, "median": (len(ordered) - 1) // 2, "worst": 0}
    return {role: fitness_M.index(ordered[rank]) for role, rank in ranks.items()}


def _rows(generation: Generation, shown: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    said = {(r.member.index, r.request): r for r in generation.rollouts}
    for role, member in roles(generation.fitness_M).items():
        scores_P = generation.scores_MP[member]
        for request, question in enumerate(shown):
            rollout = said[member, request]
            yield {
                "generation": generation.index,
                "role": role,
                "member": member,
                "sign": rollout.member.sign,
                "fitness": generation.fitness_M[member],
                **question,
                "text": rollout.text,
                "score": scores_P[request if len(scores_P) > 1 else 0],  # one alone is of all answers together
                "finish_reason": rollout.finish_reason,
                "tokens": len(rollout.token_ids),
            }
