# SPDX-License-Identifier: Apache-2.0
"""Objectives: turn the named rewards of a whole group into the scores that move the mean.

A task returns columns: under each name one number per completion, or None if that reward does not apply. An objective
gets the columns of all members and prompts at once. Its `state` is what it carries from one generation to the next; the
journal records it, so that a resumed run scores as if it had not stopped.
"""

from __future__ import annotations

import inspect
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from evoalign.config import EsConfig, ObjectiveConfig
from evoalign.config.task import OBJECTIVES
from evoalign.errors import ConfigError, EvoalignError, ResumeError, RewardError
from evoalign.plugins import FAILURES, described, load_object, raised
from evoalign.rewards.functions import failure, finite, fresh, shown
from evoalign.shaping import BY_PROMPT, SHAPINGS, Scores
from evoalign.types import Example

Columns: TypeAlias = Mapping[str, Sequence[float | None]]
"""Rewards by name, one per completion; None if a reward does not apply."""
PREFIX = "fitness/"
"""Prefix of the evaluation measure that holds the value of `task.fitness`."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Group:
    """Completions and rewards of one generation: M members, P prompts.

    `columns_MP` are float64, NaN where a reward does not apply; `examples` are the P prompted rows. `mean` holds the
    completions and rewards of the unperturbed model for the same prompts, as a group of one member, if the objective
    `asks_mean`.
    """

    generation: int
    columns_MP: Mapping[str, NDArray[np.float64]]
    texts_MP: Sequence[Sequence[str]]
    examples: Sequence[Example]
    mean: Group | None = None


class Objective(ABC):
    """Computes scores from a group's columns. `task.objective` or a task's `objective()` names a custom one.

    `state` is everything that a later generation depends on: finite numbers under constant names. It is recorded after
    each generation, and passed to `restore` when a run resumes.
    """

    name: str
    per_completion: bool = False
    """Whether each score depends only on its completion's columns and the state. GRPO needs that.
    `evoalign probe` and the A/A control score members one by one and need that or `per_member`."""
    measure: str = "reward"
    """Evaluation measure that training maximises."""
    per_member: bool = False
    """Whether there is one score per member, [members, 1], which depends only on that member's completions and the
    state. Shapings that compare members prompt by prompt are then rejected."""
    asks_mean: bool = False
    """Whether `update` needs completions of the unperturbed model: each generation then sends it the same requests, and
    `group.mean` has the result. `scores` must not use it."""

    state: Mapping[str, float] = MappingProxyType({})

    @property
    def scores_alone(self) -> bool:
        """Whether completions of a single model have scores, without a population."""
        return self.per_completion or self.per_member

    @abstractmethod
    def scores(self, group: Group) -> Scores:
        """Return finite float64 [members, prompts], or with `per_member` [members, 1], without side effects."""

    def update(self, group: Group) -> None:  # noqa: B027 (most objectives have no state)
        """Update the state, once per generation and after its scores. Nothing by default."""

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the state that a run recorded. Raises ResumeError for the state of another objective."""
        if state.keys() != self.state.keys():
            raise ResumeError(
                f"objective {self.name} has the state {', '.join(self.state) or 'none'}, but the run recorded "
                f"{', '.join(state) or 'none'}; resume with the objective of the run"
            )
        self.state = dict(state)


class WeightedSum(Objective):
    """Weighted sum of the columns. A single column without a weight is returned bit for bit.

    With `weights`, only the named columns count. Raises ConfigError for a weight that is not finite.
    """

    name = "weighted_sum"
    per_completion = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        if weights is not None and not (weights and all(map(math.isfinite, weights.values()))):
            raise ConfigError(f"{self.name} needs at least one weight, all of them finite, not {dict(weights)}")
        self.weights = weights

    def scores(self, group: Group) -> Scores:
        """Return the sum of each completion. Raises RewardError as `rewards` does."""
        shape = (len(group.texts_MP), len(group.examples))
        columns = {name: column.ravel() for name, column in group.columns_MP.items()}
        texts = [text for row in group.texts_MP for text in row]
        return self._sums(columns, texts, [*group.examples] * shape[0]).reshape(shape)

    def by_name(self, names: Collection[str]) -> dict[str, float]:
        """Return the weight of each of several columns; empty for a single column."""
        weights = dict.fromkeys(names, 1.0) if self.weights is None else self.weights
        return {name: weights.get(name, 0.0) for name in names} if len(names) > 1 else {}

    def rewards(self, columns: Columns, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """Return one finite sum per completion. Raises RewardError naming the first completion without one."""
        return self._sums({name: _array(column) for name, column in columns.items()}, texts, examples).tolist()

    def _sums(
        self, columns: Mapping[str, NDArray[np.float64]], texts: Sequence[str], examples: Sequence[Example]
    ) -> NDArray[np.float64]:
        missing = [name for name in self.weights or () if name not in columns]
        if texts and missing:
            raise RewardError(
                f"there are weights for {', '.join(missing)}, but the columns are {', '.join(columns)}; "
                "name the columns as the task does"
            )
        if not texts:
            return np.zeros(0)
        weights = dict.fromkeys(columns, 1.0) if self.weights is None else self.weights
        gaps = {name: np.isnan(columns[name]) for name in weights}
        # A missing value adds -0.0, which changes no sum. Without weights the sum begins with -0.0 too, so that a
        # first term of -0.0 keeps its sign.
        sums = np.full(len(texts), -0.0 if self.weights is None else 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            for name, weight in weights.items():
                sums = sums + np.where(gaps[name], -0.0, weight * columns[name])
        absent = np.all(list(gaps.values()), axis=0)
        wrong = np.flatnonzero(absent | ~np.isfinite(sums))
        if wrong.size:
            i, names = int(wrong[0]), ", ".join(weights)
            found = [weight * float(columns[name][i]) for name, weight in weights.items() if not gaps[name][i]]
            raise RewardError(
                f"the weighted rewards {found} of the completion {texts[i][:80]!r} have no finite sum; "
                "return smaller numbers"
                if found
                else f"every reward function ({names}) returned None for the completion {texts[i][:80]!r}; "
                "at least one has to return a number",
                failure("value", names, (examples[i].get("prompt", ""), texts[i], examples[i])),
            )
        return sums


class SetObjective(Objective):
    """Scores each member by `function(completions, examples) -> float`: the objective that `task.fitness` names.

    The function gets all completions of a member and their rows, in one order; `clean` is applied to each completion.
    The member's scores are then one column, [members, 1]. Raises ConfigError if the path names no such function.
    """

    per_member = True

    def __init__(self, path: str, clean: Callable[[str], str]) -> None:
        self.function: Any = load_object(path, "task.fitness")
        short = path.rpartition(":")[2]
        self.name, self.measure = f"task.fitness {short}", measure_of(path)
        self.values: Callable[[Sequence[str], Sequence[Example], Sequence[Sequence[int]]], list[float]] = self.compute
        """Values of sets of completions, given by index. A task that scores in another process replaces it."""
        self._clean = clean
        wrong = "" if callable(self.function) else "is not a function"
        if inspect.iscoroutinefunction(self.function):
            wrong = "is async, which is not supported here"
        if not wrong:
            try:
                inspect.signature(self.function).bind([], [])
            except TypeError:
                wrong = "does not take exactly two arguments, completions and examples"
            except ValueError:  # a C function without a readable signature
                pass
        if wrong:
            raise ConfigError(f"task.fitness: {path} {wrong}; write def {short}(completions, examples) -> float")

    def compute(self, texts: Sequence[str], examples: Sequence[Example], sets: Sequence[Sequence[int]]) -> list[float]:
        """Call the function once per set, in this process. Raises RewardError."""
        values: list[float] = []
        for one in sets:
            cleaned = [self._clean(texts[i]) for i in one]
            try:
                found = self.function([*cleaned], fresh([examples[i] for i in one]))
            except FAILURES as error:
                trace = "".join(traceback.format_exception(error))
                failed = failure("raised", self.name, trace=trace, texts=cleaned)
                raise RewardError(f"{self.name} failed: {raised(error)}; fix it", failed) from error
            number = finite(found)
            if number is None:
                raise RewardError(
                    f"{self.name} returned {shown(found)} for {len(one)} completions; return one finite number",
                    failure("value", self.name, texts=cleaned),
                )
            values.append(number)
        return values

    def scores(self, group: Group) -> Scores:
        """Return [members, 1]. Raises RewardError."""
        members, prompts = len(group.texts_MP), len(group.examples)
        texts = [text for row in group.texts_MP for text in row]
        sets = [range(i, i + prompts) for i in range(0, len(texts), prompts)]
        return np.array(self.values(texts, [*group.examples] * members, sets), dtype=np.float64)[:, None]


def measure_of(fitness: str | None) -> str:
    """Return the evaluation measure that a run with this `task.fitness` maximises, without importing the function."""
    return "reward" if fitness is None else PREFIX + fitness.rpartition(":")[2]


def shared_aim(fitnesses: Iterable[str | None], asked: str | None) -> tuple[str, list[str]]:
    """Return the measure by which runs with these `task.fitness` are compared, and a note if it was chosen here.

    That is the requested one; else the measure that all runs were trained for; else the reward.
    """
    if asked is not None:
        return asked, []
    ways = list(fitnesses)
    names = sorted({measure_of(way) for way in ways})
    if len(set(ways)) == 1:
        (name,) = names
        return name, [] if name == "reward" else [f"goes by {name}, which is trained for (task.fitness)"]
    trained = " or ".join(f"{name} ({sum(measure_of(way) == name for way in ways)} of {len(ways)})" for name in names)
    return "reward", [f"goes by the reward, which all have, since task.fitness differs: trained for is {trained}"]


def aim_of(measures: Mapping[str, Any]) -> str:
    """Return the name of the measure that training maximises: that of `task.fitness`, else the reward."""
    return next((name for name in measures if name.startswith(PREFIX)), "reward")


def aim(measures: Mapping[str, float]) -> float:
    """Return the value of the measure that training maximises."""
    return measures[aim_of(measures)]


def create(config: ObjectiveConfig) -> Objective:
    """Create the objective that a config names, with its settings. Raises ConfigError."""
    name = config.name
    cls: Any = load_object(OBJECTIVES.get(name, name), "task.objective")
    if not (isinstance(cls, type) and issubclass(cls, Objective)):
        raise ConfigError(f"task.objective: {name} is not a class derived from evoalign.rewards.objective.Objective")
    try:
        objective = cls(**config.options)
        objective.state = _state(objective)
    except EvoalignError as error:
        raise ConfigError(f"task.objective: {error}") from error
    except FAILURES as error:
        raise ConfigError(
            f"task.objective: {name} cannot be created with {config.options}: {described(error)}"
        ) from error
    return objective


def refuse_whole_groups(objective: Objective, who: str) -> None:
    """Raise ConfigError for an objective that needs a population."""
    if not objective.scores_alone:
        raise ConfigError(
            f"objective {objective.name} scores a whole population at once, but {who} has none; set task.objective to "
            "another one, such as weighted_sum"
        )


def refuse_whole_members(objective: Objective, who: str) -> None:
    """Raise ConfigError for an objective without a score for each completion."""
    refuse_whole_groups(objective, who)
    if objective.per_member:
        raise ConfigError(
            f"{objective.name} is one score for all completions of a member, but {who} needs one for each completion; "
            "train with ES, or remove it"
        )


def refuse_by_prompt(objective: Objective, es: EsConfig) -> None:
    """Raise ConfigError for a shaping that needs scores by prompt, if a member has one score."""
    if objective.per_member and es.shaping in BY_PROMPT:
        others = ", ".join(name for name in SHAPINGS if name not in BY_PROMPT)
        raise ConfigError(
            f"es.shaping {es.shaping} compares members prompt by prompt, but {objective.name} is one score for all "
            f"prompts; use one of {others}"
        )


def judge(objective: Objective, group: Group) -> Scores:
    """Return the checked scores of a group. Raises RewardError unless all are finite and the shape is right."""
    scores_MP = _guarded(objective, lambda: np.asarray(objective.scores(_handed(objective, group)), dtype=np.float64))
    wanted = (len(group.texts_MP), 1 if objective.per_member else len(group.examples))
    if scores_MP.shape != wanted or not np.isfinite(scores_MP).all():
        raise RewardError(
            f"objective {objective.name} returned scores of shape {scores_MP.shape}, of which "
            f"{int((~np.isfinite(scores_MP)).sum())} are not finite; return one finite number for each of "
            f"{wanted[0]} members{'' if objective.per_member else f' x {wanted[1]} prompts'}"
        )
    return scores_MP


def score(objective: Objective, group: Group) -> Scores:
    """Return the scores of a generation, and update the objective's state. Raises RewardError."""
    scores_MP = judge(objective, group)
    move(objective, group)
    return scores_MP


def move(objective: Objective, group: Group) -> None:
    """Update the objective's state by a group that it has scored. Raises RewardError."""
    _guarded(objective, lambda: objective.update(_handed(objective, group)))
    objective.state = _state(objective)


def grouped(columns: Columns, texts: Sequence[str], examples: Sequence[Example], generation: int) -> Group:
    """Group the completions of all members, member by member, for the same `examples`."""
    prompts = len(examples)
    return Group(
        generation,
        {name: _array(values).reshape(-1, prompts) for name, values in columns.items()},
        [texts[i : i + prompts] for i in range(0, len(texts), prompts)],
        examples,
    )


def reported(objective: Objective, group: Group) -> dict[str, tuple[float, ...]]:
    """Return each column's values, member by member, or none for a single column that the scores consist of."""
    if len(group.columns_MP) < (2 if objective.measure == "reward" else 1):
        return {}
    return {name: tuple(column.ravel().tolist()) for name, column in group.columns_MP.items()}


def means(columns: Columns, fewest: int = 2) -> dict[str, float | None]:
    """Return the mean of each column, None without values; empty for fewer than `fewest` columns."""
    if len(columns) < fewest:
        return {}
    arrays = {name: _array(values) for name, values in columns.items()}
    return {name: None if np.isnan(a).all() else float(np.nanmean(a)) for name, a in arrays.items()}


def _array(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _state(objective: Objective) -> dict[str, float]:
    """Return the state as floats, which the journal preserves bit for bit. Raises RewardError for other values."""
    state: dict[str, float] = {}
    for name, value in objective.state.items():
        number = finite(value)
        if number is None:
            raise RewardError(f"the state of objective {objective.name} has {name} = {value!r}; use finite numbers")
        state[str(name)] = number
    return state


def _guarded(objective: Objective, work: Callable[[], _T]) -> _T:
    try:
        return work()
    except EvoalignError:
        raise
    except FAILURES as error:
        failed = failure("raised", f"objective {objective.name}", trace=traceback.format_exc())
        raise RewardError(f"objective {objective.name} failed: {described(error)}; fix it", failed) from error


def _handed(objective: Objective, group: Group) -> Group:
    """Return a copy for user code, which may modify it. A SetObjective copies by itself."""
    if isinstance(objective, SetObjective):
        return group
    columns_MP = {name: column.copy() for name, column in group.columns_MP.items()}
    texts_MP, examples = fresh(group.texts_MP), fresh(list(group.examples))
    mean = None if group.mean is None else _handed(objective, group.mean)
    return replace(group, columns_MP=columns_MP, texts_MP=texts_MP, examples=examples, mean=mean)
