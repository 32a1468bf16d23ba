# SPDX-License-Identifier: Apache-2.0
"""Evaluations of several targets on one split, and means over runs that differ in their seed alone.

In the published protocol of Conciseness (Qiu et al., arXiv 2509.24372, section 4.2) the model is trained greedily with
several seeds, and 20 completions of each of 8 questions are drawn from each trained model at temperature 0.7. Intervals
are over seeds and questions: more draws from one trained model do not replace another seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evoalign import statistics
from evoalign.analysis.base import as_json
from evoalign.analysis.compare.groups import settings_of
from evoalign.analysis.compare.runs import find
from evoalign.analysis.targets import alike
from evoalign.config import Config, EvaluationConfig
from evoalign.errors import ConfigError, EvoalignError
from evoalign.evaluation import Evaluation
from evoalign.report.tables import is_share
from evoalign.rundir.directory import generation_of, saved_folders
from evoalign.rundir.method import Method, method_of
from evoalign.setup import ConfigLike, as_config
from evoalign.statistics import Estimate
from evoalign.tasks import Split
from evoalign.training import resolve

IS_MODEL = ("config.json", "adapter_config.json")


@dataclass(frozen=True, slots=True)
class TargetEvaluation:
    """Evaluation of one target on a split. `config` is the run's own or the given one; `model` names the base model.

    `method` and `generation`, of the weights, are None for a target without a run.
    """

    target: str
    split: str
    model: str
    config: Config
    drawn: EvaluationConfig
    method: Method | None
    generation: int | None
    evaluation: Evaluation

    @property
    def intervals(self) -> dict[str, Estimate]:
        """Intervals of the measures, for new examples of the split with this trained model."""
        return {name: _bounded(name, self.evaluation.estimate(name)) for name in self.evaluation.measures}

    @property
    def decoding(self) -> str:
        """The numbers of examples and completions, and the decoding settings, as text."""
        examples, drawn = len(next(iter(self.evaluation.measures_E.values()))), self.drawn
        if "empty_share" not in self.evaluation.measures:
            return f"{examples:,} examples, whose given targets are scored"
        if drawn.temperature == 0:
            return f"{examples:,} examples, greedy, at most {drawn.max_tokens:,} tokens"
        seeds = f" x {len(drawn.seeds)} seeds of sampling" if len(drawn.seeds) > 1 else ""
        count = len(self.evaluation.completions)
        return (
            f"{examples:,} examples x {drawn.samples} samples{seeds} = {count:,} completions, temperature "
            f"{drawn.temperature:g}, top_p {drawn.top_p:g}, at most {drawn.max_tokens:,} tokens"
        )

    def tree(self) -> dict[str, Any]:
        """Return the JSON fields: those of `Evaluation` except its points, and the target's."""
        found = asdict(self.evaluation)
        del found["points"]
        return {
            **found,
            "target": self.target,
            "split": self.split,
            "model": self.model,
            "task": self.config.task.name,
            "method": self.method,
            "seed": self.config.seed if self.method else None,
            "generation": self.generation,
            "drawn": self.drawn.model_dump(mode="json", exclude={"every"}),
            "intervals": {name: asdict(found) for name, found in self.intervals.items()},
        }


@dataclass(frozen=True, slots=True)
class SeedMean:
    """Mean of each measure over runs that differ in their seed alone.

    `over` names what the intervals are for: new seeds and new examples, or new seeds alone.
    """

    label: str
    runs: tuple[TargetEvaluation, ...]
    measures: Mapping[str, Estimate]
    over: str

    def tree(self) -> dict[str, Any]:
        """Return the JSON fields."""
        seeds, targets = [run.config.seed for run in self.runs], [run.target for run in self.runs]
        known = {"label": self.label, "targets": targets, "seeds": seeds, "over": self.over}
        return {**known, "measures": {name: asdict(found) for name, found in self.measures.items()}}


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Evaluations in the order of the targets, the errors of those that `failed`, and the `means` over seeds."""

    judged: tuple[TargetEvaluation, ...]
    failed: Mapping[str, str]
    means: tuple[SeedMean, ...]

    def tree(self) -> dict[str, Any]:
        """Return the JSON fields."""
        return as_json({"targets": self.judged, "means": self.means, "failed": self.failed})


def evaluate_many(
    targets: Sequence[str | Path],
    *,
    config: ConfigLike | None = None,
    split: Split = "test",
    overrides: Mapping[str, Any] | None = None,
    on_done: Callable[[TargetEvaluation], None] | None = None,
) -> Evaluations:
    """Score targets one after another, each as `evoalign.evaluate` does; a folder stands for the runs below it.

    A target that cannot be evaluated is in `failed`, and the others are still evaluated. `on_done` is called with each
    evaluation as soon as it is done. Raises a subclass of EvoalignError where no target can be evaluated.
    """
    found = expand(targets)
    return evaluate_each(found, lambda target: evaluate_one(target, config, split, overrides), on_done)


def expand(targets: Sequence[str | Path]) -> list[str]:
    """Return the targets, each once; a folder that is neither run nor model is replaced by the runs below it.

    Raises ConfigError.
    """
    if not targets:
        raise ConfigError("no target; give runs, a folder with runs, models or adapters")
    found: dict[str, str] = {}
    for target in map(str, targets):
        path = Path(target)
        holds_runs = os.path.isdir(target) and method_of(path) is None  # noqa: PTH112 (which raises nothing)
        holds_runs = holds_runs and not any((path / name).exists() for name in IS_MODEL)
        inside = list[Path]()
        if holds_runs:
            with suppress(ConfigError):  # no run: evaluating the folder raises the error
                inside = find([path])
        for one in map(str, inside or [target]):
            found.setdefault(os.path.realpath(one) if os.path.isdir(one) else one, one)  # noqa: PTH112
    return list(found.values())


def evaluate_each(
    targets: Sequence[str],
    evaluate: Callable[[str], TargetEvaluation],
    on_done: Callable[[TargetEvaluation], None] | None = None,
) -> Evaluations:
    """Evaluate all targets. Raises the error of the only target, or ConfigError where all failed."""
    done: list[TargetEvaluation] = []
    failed: dict[str, str] = {}
    for target in targets:
        try:
            done.append(evaluate(target))
        except EvoalignError as error:
            if len(targets) == 1:
                raise
            failed[target] = str(error)
            continue
        if on_done is not None:
            on_done(done[-1])
    if not done:
        raise ConfigError("\n".join(dict.fromkeys(failed.values())))
    return Evaluations(tuple(done), failed, tuple(seed_means(done)))


def evaluate_one(
    target: str | Path, config: ConfigLike | None, split: Split = "test", overrides: Mapping[str, Any] | None = None
) -> TargetEvaluation:
    """Evaluate one target. Raises the errors of `evoalign.evaluate`."""
    path = Path(target)
    method = method_of(path) if (path / "config.yaml").is_file() else None
    evaluation, drawn = resolve.evaluated(target, config, None, None, split, overrides)
    own = as_config(config) if method is None and config is not None else resolve.to_ask(path, config, split)
    saved = saved_folders(path)
    return TargetEvaluation(
        target=str(target),
        split=split,
        model=own.model.name if method else str(target),
        config=own,
        drawn=drawn,
        method=method,
        generation=generation_of(saved[-1]) if method and saved else None,
        evaluation=evaluation,
    )


def seed_means(judged: Sequence[TargetEvaluation]) -> list[SeedMean]:
    """Return the mean over the runs of each setting that was trained with several seeds."""

    def settings(found: TargetEvaluation) -> dict[str, Any] | None:
        if found.method is None:
            return None
        drawn = found.config.model_copy(update={"evaluation": found.drawn})
        return {**settings_of(drawn, found.method), "generation": found.generation}

    several = [(label, sorted(same, key=lambda run: run.config.seed)) for label, same in alike(judged, settings)]
    return [_seed_mean(label, same) for label, same in several if len(same) > 1]


def _seed_mean(label: str, runs: Sequence[TargetEvaluation]) -> SeedMean:
    seeds = [run.config.seed for run in runs]
    asked = {tuple((s.example, s.prompt, s.target) for s in run.evaluation.completions) for run in runs}
    crossed = len(asked) == 1
    names = [n for n in runs[0].evaluation.measures if all(n in run.evaluation.measures for run in runs)]
    measures: dict[str, Estimate] = {}
    for name in names:
        values_SI = [run.evaluation.measures_E.get(name, ()) for run in runs]
        if crossed and all(values_SI) and not np.isnan(values_SI).any():
            found = statistics.crossed(values_SI)
        else:  # examples differ by seed, or a reward is missing
            found = statistics.mean([run.evaluation.measures[name] for run in runs])
        measures[name] = _bounded(name, found)
    if len(set(seeds)) < len(seeds):
        why = f"seeds {', '.join(map(str, seeds))}: a seed occurs twice, so no interval"
        measures = {name: Estimate(found.mean, found.n, why=why) for name, found in measures.items()}
    return SeedMean(label, tuple(runs), measures, "new seeds and new examples" if crossed else "new seeds")


def _bounded(name: str, found: Estimate) -> Estimate:
    """Clip the interval of a share to 0 to 1."""
    return statistics.bounded(found) if is_share(name) else found
