# SPDX-License-Identifier: Apache-2.0
"""Rows of a generation: metrics.jsonl, and the completions of the best, median and worst member."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign.rewards.objective import Columns
from evoalign.rundir import parquet
from evoalign.rundir.journal import Recorded
from evoalign.tasks.base import Task
from evoalign.tokens import Tokens
from evoalign.types import Example, Generation, Update, text_of

Row = dict[str, Any]
WEIGHTS = "reward_weights"
"""Field of the weights of several rewards, in a row and in results/evaluation.json."""
DISTRIBUTION = "rewards"
"""Beginning of the names of files with the rewards of a whole generation."""
LATER = ("budget", "divergence")
"""Fields that rows of the first release do not have."""


def metrics_row(generation: Generation, weights: Mapping[str, float] | None = None) -> Row:
    """Return statistics of the raw fitness over the population, with rms(c), tokens and seconds by phase.

    `weights` are those of several rewards.
    """
    return {
        **_fitness(generation.update, generation.fitness_M),
        "tokens": generation.tokens,
        "seconds": {phase: float(seconds) for phase, seconds in generation.seconds.items()},
        "empty_share": float(generation.empty_share),
        "truncated_share": float(generation.truncated_share),
        "evaluation": None if generation.evaluation is None else dict(generation.evaluation),
        **_where_any(rewards=generation.rewards, **{WEIGHTS: weights or {}}, objective=generation.objective),
    }


def rebuilt_row(recorded: Recorded) -> Row:
    """Return a row from the journal alone: what needs completions or clocks is null, and there are no reward means."""
    unknown = dict.fromkeys(("tokens", "empty_share", "truncated_share", "evaluation", "diagnosis", *LATER))
    known = {**_fitness(recorded.update, recorded.fitness_M), **_where_any(objective=recorded.objective)}
    return {**known, **unknown, "seconds": {}}


def is_whole(row: Row, again: Row) -> bool:
    """Whether a row is complete and of the generation whose rebuilt row is `again`."""
    return row.keys() >= again.keys() - set(LATER) and row["mean"] == again["mean"]


def spread(values: Sequence[float] | NDArray[np.float64]) -> Row:
    """Return mean, extremes, the 20th and 80th percentile and the standard deviation, in float64."""
    found = np.asarray(values, dtype=np.float64)
    p20, p80 = np.percentile(found, [20, 80])
    return {
        "mean": float(found.mean()),
        "best": float(found.max()),
        "worst": float(found.min()),
        "p20": float(p20),
        "p80": float(p80),
        "std": float(found.std()),
    }


def _where_any(**found: Mapping[str, float | None]) -> Row:
    """Return the mappings that are not empty."""
    return {name: dict(values) for name, values in found.items() if values}


def _fitness(update: Update, fitness: Sequence[float]) -> Row:
    coefficients_M = np.asarray(update.coefficients, dtype=np.float64)
    return {
        "generation": update.generation,
        **spread(fitness),
        "zero_variance": not any(update.coefficients),
        "rms_c": float(np.sqrt(np.mean(coefficients_M**2))),
    }


def completions_due(every: int, index: int, total: int) -> bool:
    """Whether a generation's completions are saved: every `every`-th from the first, and the last; 0: none."""
    return every > 0 and (index % every == 0 or index + 1 == total)


def write_completions(
    path: Path, generation: Generation, examples: Sequence[Example], task: Task, tokens: Tokens
) -> None:
    """Write one row per role and prompt. `examples` are those of `generation.rows`, in order; with settings, those of
    each member in turn.

    Columns: generation, role (best, median or worst), member, sign, fitness, `settings/NAME` of each of the member's
    settings, those of `prompt_columns`, text, score, finish_reason, tokens.
    """
    shown, count = dict[int, list[Row]](), len(generation.rows)
    for member in roles(generation.fitness_M).values():
        some = examples[member * count : (member + 1) * count] if generation.settings else examples
        known = prompt_columns(task, tokens, dict(zip(generation.rows, some, strict=True)))
        shown[member] = [known[row] for row in generation.rows]
    parquet.write(path, list(_completion_rows(generation, shown)))


def prompt_columns(task: Task, tokens: Tokens, examples: Mapping[int, Example]) -> dict[int, Row]:
    """Return prompt, target (None if the task has none) and rendered (None for text prompts) of examples by row."""
    prompts = {row: task.prompt(example) for row, example in examples.items()}
    return {
        row: {
            "prompt": text_of(prompts[row]),
            "target": task.gold(task.handed(example)),
            "rendered": tokens.read_of(prompts[row]),
        }
        for row, example in examples.items()
    }


def write_distribution(path: Path, columns: Columns) -> None:
    """Write one row per completion, with a column per reward: null where it does not apply."""
    known = {name: [None if v is None or math.isnan(v) else float(v) for v in c] for name, c in columns.items()}
    parquet.write(path, [dict(zip(known, row, strict=True)) for row in zip(*known.values(), strict=True)])


def read_distributions(folder: Path, done: int) -> dict[int, dict[str, list[float]]]:
    """Return the rewards of the first, the middle and the last saved generation of `done`, NaN for null.

    Raises DataError.
    """
    numbers = {file.stem.rpartition("_")[2]: file for file in folder.glob(f"{DISTRIBUTION}_*.parquet")}
    every = {int(number): file for number, file in numbers.items() if number.isdecimal()}
    saved = sorted(index for index in every if index < done)
    found: dict[int, dict[str, list[float]]] = {}
    for index in dict.fromkeys([saved[0], saved[len(saved) // 2], saved[-1]] if saved else []):
        rows = parquet.read(every[index])
        names = list(rows[0]) if rows else []
        found[index] = {n: [row[n] if isinstance(row[n], float) else math.nan for row in rows] for n in names}
    return found


def roles(fitness_M: Sequence[float]) -> dict[str, int]:
    """Return the best, the (lower) median and the worst member; of equal members the one with the lowest index."""
    ordered = sorted(fitness_M)
    ranks = {"best": -1, "median": (len(ordered) - 1) // 2, "worst": 0}
    return {role: fitness_M.index(ordered[rank]) for role, rank in ranks.items()}


def _completion_rows(generation: Generation, shown: Mapping[int, Sequence[Row]]) -> Iterator[dict[str, Any]]:
    by_member = {(r.member.index, r.request): r for r in generation.rollouts}
    for role, member in roles(generation.fitness_M).items():
        scores_P = generation.scores_MP[member]
        chosen = generation.settings[member] if generation.settings else {}
        for request, question in enumerate(shown[member]):
            rollout = by_member[member, request]
            yield {
                "generation": generation.index,
                "role": role,
                "member": member,
                "sign": rollout.member.sign,
                "fitness": generation.fitness_M[member],
                **{f"settings/{name}": str(option) for name, option in chosen.items()},
                **question,
                "text": rollout.text,
                "score": scores_P[request if len(scores_P) > 1 else 0],  # a single score is of all completions together
                "finish_reason": rollout.finish_reason,
                "tokens": len(rollout.token_ids),
            }
