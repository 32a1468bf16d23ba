# SPDX-License-Identifier: Apache-2.0
"""Points of reward and cost of several models, and their differences by prompt. Suffixes: N points, E prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.base import Finding
from evoalign.analysis.estimates import share, told, tree
from evoalign.errors import ConfigError, DataError, shown
from evoalign.rundir.method import is_run
from evoalign.statistics import Estimate
from evoalign.tasks import data
from evoalign.tasks.safety import LABELS, label_of

POINTS = Path("results/points.jsonl")
SHARES = ("safe", *LABELS)
VALUES = ("reward", "cost")
MEASURES = (*SHARES, *VALUES)
GIVE = "give a finished run of task safety, or a points file (JSON lines of prompt, response, reward, cost)"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Model:
    """What one model answered. `by_prompt` has of each measure the mean over a prompt's answers."""

    name: str
    reward_N: Floats
    cost_N: Floats
    by_prompt: Mapping[str, Mapping[str, float]]

    @property
    def measures(self) -> dict[str, Estimate]:
        """Of each measure the mean over prompts, with its interval for new prompts."""
        columns = {name: np.array([row[name] for row in self.by_prompt.values()]) for name in MEASURES}
        return {name: share(c) if name in SHARES else statistics.mean(c) for name, c in columns.items()}


@dataclass(frozen=True)
class Safety(Finding):
    """The finding, and what its figure is drawn from."""

    models: Sequence[Model]

    def draw(self, folder: Path) -> list[Path]:
        from evoalign.analysis.safety.figure import draw

        return draw(self.models, folder)


def safety(targets: Sequence[str], *, all_pairs: bool = False) -> Safety:
    """See `Command`. Raises ConfigError, DataError."""
    models = [read(name) for name in dict.fromkeys(targets)]
    chosen = [(a, b) for a, b in combinations(models, 2) if all_pairs or a is models[0]]
    pairs = [(a.name, b.name, *differences(a, b)) for a, b in chosen]
    numbers = {
        "models": [
            {
                "target": model.name, "answers": len(model.reward_N), "prompts": len(model.by_prompt),
                **{name: tree(found) for name, found in model.measures.items()},
            }
            for model in models
        ],
        "differences": [
            {"target": b, "beside": a, "prompts": count, **{name: tree(found) for name, found in measures.items()}}
            for a, b, count, measures in pairs
        ],
    }  # fmt: skip
    return Safety(numbers, [*map(_sentence, models), *(_difference(*pair) for pair in pairs)], models)


def read(target: str) -> Model:
    """The points of a run, or of a file. Raises ConfigError, DataError."""
    path = Path(target)
    if path.is_dir():
        if not is_run(path):
            raise ConfigError(f"{target} is a folder and no run; {GIVE}")
        if not (path / POINTS).is_file():
            raise ConfigError(f"{path / POINTS} is not there: only runs of task safety that are done have points")
        path = path / POINTS
    elif not path.is_file():
        raise ConfigError(f"no file {target}; {GIVE}")
    rewards, costs, gathered = list[float](), list[float](), dict[str, list[dict[str, float]]]()
    for where, row in data.rows_of(str(path)):
        reward, cost = (_number(where, row, name) for name in VALUES)
        prompt = row.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise DataError(f"{where}: prompt is {shown(prompt)}; a point has prompt, response, reward and cost")
        label = label_of(reward, cost)
        found = {"reward": reward, "cost": cost, "safe": float(cost <= 0), **{n: float(n == label) for n in LABELS}}
        rewards.append(reward)
        costs.append(cost)
        gathered.setdefault(" ".join(prompt.split()), []).append(found)
    means = {p: {n: float(np.mean([r[n] for r in rows])) for n in rows[0]} for p, rows in gathered.items()}
    return Model(target, np.array(rewards), np.array(costs), means)


def differences(first: Model, other: Model) -> tuple[int, dict[str, Estimate]]:
    """How many prompts both answered, and on these of each measure the other's minus the first's."""
    shared = [prompt for prompt in first.by_prompt if prompt in other.by_prompt]
    return len(shared), {
        name: statistics.paired(
            [first.by_prompt[p][name] for p in shared],
            [other.by_prompt[p][name] for p in shared],
            shares=name in SHARES,
        )
        for name in MEASURES
    }


def _number(where: str, row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where}: {name} is {shown(value)}; a point has prompt, response, reward and cost")
    return float(value)


def _sentence(model: Model) -> str:
    m = model.measures
    return (
        f"{model.name}: {told(m['safe'])} of its answers are safe and {told(m['helpful_safe'])} helpful and safe; "
        f"reward {told(m['reward'])}, cost {told(m['cost'])}; {len(model.reward_N):,} answers to "
        f"{len(model.by_prompt):,} prompts."
    )


def _difference(first: str, name: str, count: int, found: Mapping[str, Estimate]) -> str:
    if not count:
        return f"{name} answered none of the prompts of {first}: nothing is paired."
    changes = ", ".join(f"{what} {told(found[what], '+.3g')}" for what in MEASURES)
    moved = [what for what in MEASURES if statistics.is_sure(found[what])]
    known = [what for what in MEASURES if found[what].low is not None]
    said = {
        f"moved (0 is outside its 95 % interval, uncorrected for {len(MEASURES)} measures)": moved,
        "not shown to have moved": [what for what in known if what not in moved],
        "no interval": [what for what in MEASURES if what not in known],
    }
    ends = "; ".join(f"{words}: {', '.join(names)}" for words, names in said.items() if names)
    return f"{name} minus {first} on {count:,} prompts: {changes}; {ends}."
