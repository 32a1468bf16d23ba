# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the mean on a split, by the same engine path as training."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign import transcripts
from evoalign.config import EvaluationConfig
from evoalign.engines import Engine
from evoalign.errors import EvoalignError, RewardError, cut, plain
from evoalign.plugins import FAILURES, raised
from evoalign.rewards.objective import Columns, SetObjective
from evoalign.rollouts import Encoded, collect, columns_taken, derive_seed, sampling_of
from evoalign.statistics import FEWEST, LEVEL, Estimate, mean, paired
from evoalign.tasks.base import Task
from evoalign.tasks.grading import Grading
from evoalign.tokens import Tokens
from evoalign.types import MEAN_PLAN, Example, Plan, Request, Rollout, text_of

PREFIX = "reward/"
"""Prefix of the measure, and of the table column, of one of several rewards."""

RESAMPLES, RESAMPLE_SECONDS = 200, 30.0
"""Number of bootstrap resamples for a set-level fitness, and the seconds they may take per evaluation."""

RIGHT = "right"
"""Measure: share of completions that are right by the gold answer, whatever the reward."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One completion of one example, scored."""

    example: int
    seed: int
    sample: int
    prompt: str
    target: str | None
    text: str
    reward: float
    finish_reason: str
    tokens: int
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Reward by column, if there are several."""
    right: bool | None = None
    """Whether it is right by the gold answer (`Task.is_right`); None if unknown."""
    rendered: str | None = None
    """The text that the model read, if the prompt is of messages; `prompt` joins their contents."""
    later: Sequence[tuple[int, int]] = ()
    """Prompt tokens and generated tokens of each turn after the first; not in a table."""

    def flat(self) -> dict[str, Any]:
        """Return a table row, with each reward column as `reward/NAME`."""
        row = asdict(self)
        del row["later"]
        return row | {f"{PREFIX}{name}": value for name, value in row.pop("rewards").items()}

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Scored:
        """Make one from a row of `flat`. Raises TypeError for other columns."""
        rewards = {name.removeprefix(PREFIX): value for name, value in row.items() if name.startswith(PREFIX)}
        return cls(**{name: value for name, value in row.items() if not name.startswith(PREFIX)}, rewards=rewards)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Measures of a model on a split: `measures` are means over examples, samples and seeds, `measures_E` per example.

    `reward` is the weighted sum of the task's columns, whatever the training objective. `reward/NAME` is one of several
    columns, over the completions that it applies to; NaN for an example if it applies to none. `right` is the share
    that is right by the gold answer, if known. `fitness/NAME` is the mean over seeds of `task.fitness` for all samples
    of a seed. It has no value per example, so it is not in `measures_E`; `resampled` has it for bootstrap resamples.
    """

    measures: dict[str, float]
    measures_E: dict[str, tuple[float, ...]]
    completions: tuple[Scored, ...]
    resampled: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    points: tuple[Mapping[str, Any], ...] = ()
    """Values of `Task.point` for the completions: see `with_points`."""

    def estimate(self, name: str) -> Estimate:
        """Return a measure with its 95 % interval over examples: Student's t, or the percentiles of `resampled`."""
        if name in self.measures_E:
            return mean([value for value in self.measures_E[name] if not math.isnan(value)])
        value, count = self.measures[name], len(next(iter(self.measures_E.values())))
        if name not in self.resampled:
            return Estimate(
                value, count, why="no interval: the function takes too long, or fails, on resampled examples"
            )
        return Estimate(value, count, *_percentiles(self.resampled[name]))

    def __repr__(self) -> str:
        values = ", ".join(f"{name} {value:.4g}" for name, value in self.measures.items())
        return f"Evaluation({values}; {len(self.completions):,} completions)"


def evaluate(
    engine: Engine,
    tokens: Tokens,
    task: Task,
    examples: Sequence[Example],
    settings: EvaluationConfig,
) -> Evaluation:
    """Score the unperturbed model on every example, `samples` times for each of `seeds` (greedy: once)."""
    prompts = Encoded(task, tokens, examples)
    return evaluate_together(engine, task, [(examples, prompts)], settings)[0][0]


def evaluate_together(
    engine: Engine,
    task: Task,
    splits: Sequence[tuple[Sequence[Example], Encoded]],
    settings: EvaluationConfig,
    others: Sequence[Request] = (),
    plan: Plan = MEAN_PLAN,
) -> tuple[list[Evaluation], list[Rollout]]:
    """Evaluate several splits as `evaluate` does, and complete `others`, in one rollout of the unperturbed model.

    Each split has its examples and their prompts. A GPU takes about as long for a few rows as
    for hundreds. `others` have the indices 0, 1, ...; their completions are returned in this order. With another
    `plan`, each of its members is evaluated on all splits in turn.
    """
    sampling, draws = sampling_of(settings), _draws(settings)
    with Grading(task, [example for examples, _ in splits for example in examples]) as begun:
        keys, requests, rows, first = list[list[_Key]](), list[Request](), list[list[int]](), 0
        for examples, prompts in splits:
            keys.append([(e, seed, k) for e in range(len(examples)) for seed, k in draws])
            rows.append([first + e for e, _, _ in keys[-1]])
            first += len(examples)
            for e, seed, k in keys[-1]:
                requests.append(prompts.request(len(requests), e, sampling, derive_seed("evaluation", seed, e, k)))
        asked = [*requests, *(replace(request, index=len(requests) + request.index) for request in others)]
        taken = [[begun.of(some) for some in rows] for _ in plan.members]
        places = [(split, place) for split, some in enumerate(rows) for place in range(len(some))]

        def take(at: int, rollout: Rollout) -> None:
            member, request = divmod(at, len(asked))
            if request < len(places):
                split, place = places[request]
                taken[member][split].take(place, rollout)

        rollouts = collect(engine, plan, asked, take)
        columns = [[columns_taken(answers) for answers in of_member] for of_member in taken]
    found, left = list[Evaluation](), iter([r for r in rollouts if r.request < len(requests)])
    for of_member in columns:
        for (examples, prompts), of_split, some in zip(splits, keys, of_member, strict=True):
            found.append(_evaluation(task, examples, prompts, of_split, [next(left) for _ in of_split], some))
    return found, [r for r in rollouts if r.request >= len(requests)]


def _draws(settings: EvaluationConfig) -> list[tuple[int, int]]:
    """Return the seed and sample of each completion of an example."""
    if settings.temperature == 0:
        return [(0, 0)]
    return [(seed, k) for seed in settings.seeds for k in range(settings.samples)]


_Key: TypeAlias = tuple[int, int, int]
"""Example, seed and sample of a completion."""


def _evaluation(
    task: Task,
    examples: Sequence[Example],
    prompts: Encoded,
    keys: Sequence[_Key],
    rollouts: Sequence[Rollout],
    columns: Columns,
) -> Evaluation:
    texts, asked = [r.text for r in rollouts], [examples[e] for e, _, _ in keys]
    rewards = task.weighted.rewards(columns, texts, asked)
    several = columns if len(columns) > 1 else {}
    scored = [
        Scored(
            example=e,
            seed=seed,
            sample=k,
            prompt=text_of(task.prompt(examples[e])),
            target=task.gold(task.handed(examples[e])),
            text=rollout.text,
            reward=reward,
            finish_reason=rollout.finish_reason,
            tokens=len(rollout.token_ids),
            rewards={name: of[i] for name, of in several.items()},
            right=task.is_right(task.clean(rollout.text), task.handed(examples[e])),
            rendered=prompts.rendered.get(e),
            later=rollout.later,
        )
        for i, ((e, seed, k), rollout, reward) in enumerate(zip(keys, rollouts, rewards, strict=True))
    ]
    return summarise(task, examples, scored)


def summarise(task: Task, examples: Sequence[Example], scored: Sequence[Scored]) -> Evaluation:
    """Return the means of the reward, of the task's own measures and of the shares that every task has."""
    rows: list[dict[str, float | None]] = []
    for s in scored:
        own = task.measures(task.clean(s.text), task.handed(examples[s.example]))
        own = {"turns": float(len(transcripts.turns(s.text))), **own} if task.player not in ("", "given") else own
        generated = {
            "empty_share": float(not transcripts.spoken(s.text).strip()),
            "truncated_share": float(s.finish_reason == "length"),
        }
        shares = {**(generated if task.player != "given" else {}), "tokens": float(s.tokens)}
        columns = {f"{PREFIX}{name}": value for name, value in s.rewards.items()}
        right = None if s.right is None else float(s.right)
        rows.append({"reward": s.reward, **columns, RIGHT: right, **task.judged(s.rewards), **own, **shares})
    of_example: list[list[dict[str, float | None]]] = [[] for _ in examples]
    for row, s in zip(rows, scored, strict=True):
        of_example[s.example].append(row)
    per_example = {name: tuple(_mean([r[name] for r in group]) for group in of_example) for name in rows[0]}
    measures = {name: _mean([v for v in values if not math.isnan(v)]) for name, values in per_example.items()}
    known = {name: value for name, value in measures.items() if not math.isnan(value)}
    aim = task.set_objective
    whole = {} if aim is None else {aim.measure: _fitness(aim, examples, scored, None)}
    return Evaluation(whole | known, {name: per_example[name] for name in known}, tuple(scored))


def with_resampled(task: Task, examples: Sequence[Example], found: Evaluation) -> Evaluation:
    """Add `task.fitness` of `RESAMPLES` bootstrap resamples of the examples.

    Resamples depend on the number of examples only, so those of two evaluations of a split are paired. Nothing is added
    if that takes more than `RESAMPLE_SECONDS`, or if the function fails on a resample (it may need an example of each
    class).
    """
    aim = task.set_objective
    if aim is None or len(examples) < FEWEST:
        return found
    drawn = np.random.Generator(np.random.Philox(key=[0, len(examples)])).integers(
        len(examples), size=(RESAMPLES, len(examples))
    )
    values: list[float] = []
    start = last = time.monotonic()
    fastest = float("inf")
    for done, draw_E in enumerate(drawn, 1):
        try:
            values.append(_fitness(aim, examples, found.completions, draw_E.tolist()))
        except RewardError:
            return found
        now = time.monotonic()
        fastest, last = min(fastest, now - last), now
        if done > 2 and now - start + fastest * (RESAMPLES - done) > RESAMPLE_SECONDS:  # not after a single pause
            return found
    return replace(found, resampled={aim.measure: tuple(values)})


def with_points(task: Task, examples: Sequence[Example], found: Evaluation) -> Evaluation:
    """Add the task's points (`Task.point`) of the completions, in order. Raises RewardError if one is not JSON."""
    points = [task.point(s.text, task.handed(examples[s.example]), s.rewards) for s in found.completions]
    kept = tuple(point for point in points if point is not None)
    for point in kept:
        try:
            json.dumps(point, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"task {task.name}: its point {cut(plain(repr(point)), 200)} is not JSON ({error}); return finite "
                "numbers, strings, and lists and dicts of these"
            ) from None
    return replace(found, points=kept)


def _fitness(
    objective: SetObjective, examples: Sequence[Example], scored: Sequence[Scored], drawn: Sequence[int] | None
) -> float:
    """Return the mean over seeds of the value of all samples of these examples (None: all). Raises RewardError."""
    places: dict[int, dict[int, list[int]]] = {}
    for place, one in enumerate(scored):
        places.setdefault(one.seed, {}).setdefault(one.example, []).append(place)
    chosen = range(len(examples)) if drawn is None else drawn
    sets = [[place for e in chosen for place in of_example[e]] for of_example in places.values()]
    texts, asked = [s.text for s in scored], [examples[s.example] for s in scored]
    try:
        return float(np.mean(objective.values(texts, asked, sets)))
    except EvoalignError:
        raise
    except FAILURES as error:
        raise RewardError(f"{objective.name} failed: {raised(error)}; fix it") from error


def resampled_interval(before: Evaluation, after: Evaluation) -> dict[str, tuple[float, float, float]]:
    """Return the change of each resampled measure, with the 95 % percentile interval of its paired resamples."""
    return {
        name: (after.measures[name] - before.measures[name], *_percentiles(np.subtract(after.resampled[name], values)))
        for name, values in before.resampled.items()
        if name in after.resampled
    }


def _percentiles(values_B: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(values_B, [100 * LEVEL / 2, 100 * (1 - LEVEL / 2)])
    return float(low), float(high)


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean of the values that are not None; NaN if there is none."""
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else math.nan


def paired_interval(
    before_E: Sequence[float], after_E: Sequence[float], *, shares: bool = False
) -> tuple[float, float, float]:
    """Return the mean per-example difference and its 95 % interval over examples: `evoalign.statistics.paired`.

    Both ends are the mean if there is no interval: with fewer than three examples, or equal differences. Examples with
    NaN on either side do not count; NaN if none is left.
    """
    found = paired(before_E, after_E, shares=shares)
    low, high = (found.mean if end is None else end for end in (found.low, found.high))
    return found.mean, low, high
