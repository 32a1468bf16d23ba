# SPDX-License-Identifier: Apache-2.0
"""`search`: Optuna chooses the settings, trial by trial; a trial is a cell with all its seeds.

TPE (Bergstra et al., NeurIPS 2011), seeded anew for each trial, so that a search that was stopped asks for the same as
one that was not (with one job: with more, what a trial knows of the others depends on which ended first).
The study is a file in the sweep's folder. The median pruner looks at the first seed alone, whose run is stopped where
its evaluations lag; the other seeds of that trial are then never started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import yaml
from rich.console import Console

from evoalign import tracking
from evoalign.analysis.sweeping import results
from evoalign.analysis.sweeping.cells import (
    Cell,
    Run,
    Settings,
    Tree,
    has_validation,
    judged,
    make_cells,
    make_run,
    product,
)
from evoalign.analysis.sweeping.children import Children, Ended, is_busy, last_rows
from evoalign.analysis.sweeping.folder import STUDY, Folder
from evoalign.analysis.sweeping.progress import Display
from evoalign.analysis.sweeping.sweep import (
    Sweep,
    check_measure,
    check_validation,
    conclude,
    drive,
    make_children,
    prepare,
)
from evoalign.config import Config, to_yaml
from evoalign.errors import ConfigError
from evoalign.rewards.objective import shared_aim
from evoalign.rundir.files import write_text
from evoalign.rundir.method import Method
from evoalign.setup import ConfigLike
from evoalign.version import install

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

SAMPLER_SEED = 0
STARTUP_TRIALS = 5
"""Trials that the median is taken over at the least, before any is pruned."""
CHECKED_CORNERS = 256


@dataclass(frozen=True, slots=True)
class Domain:
    """The values a setting may take: a range, or choices."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    def suggest(self, trial: Trial, key: str) -> Any:
        """The trial's value."""
        if self.choices:
            return trial.suggest_categorical(key, self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(key, self.low, self.high, log=self.log)
        return trial.suggest_float(key, self.low, self.high, log=self.log)

    @property
    def corners(self) -> list[Any]:
        """What has to be a good value for the rest to be."""
        return list(self.choices) or [self.low, self.high]


def domain(text: str) -> tuple[str, Domain]:
    """`es.sigma=0.001..0.03:log`, `es.population_size=8..64` or `space.name=lora,lowrank`. Raises ConfigError."""
    key, sign, values = (part.strip() for part in text.partition("="))
    try:
        return key, _range(values, key) if ".." in values else Domain(choices=_choices(values, key and sign))
    except (ValueError, yaml.YAMLError):
        raise ConfigError(
            f"--search {text!r}: expected setting=low..high, setting=low..high:log or setting=value,value"
        ) from None


def search(
    config: ConfigLike,
    space: Mapping[str, Domain],
    *,
    trials: int = 20,
    seeds: Sequence[int] | None = None,
    method: Method = "es",
    measure: str | None = None,
    prune: bool = False,
    jobs: int | None = None,
    gpus: Sequence[str] | None = None,
    to: str | Path | None = None,
    console: Console | None = None,
) -> Sweep:
    """Look for the settings with the highest mean of `measure` over the seeds, on the validation split; None: of what
    is trained for, the reward or that of `task.fitness`.

    The pruner reads that too, and neither reads the test split, on which the best is reported. `trials` counts those
    of earlier commands too. Raises ConfigError before anything runs, also where there is no validation split;
    StoppedError after a signal.
    """
    base, seeds, folder = prepare(config, seeds, method, to)
    corners = product({key: found.corners for key, found in space.items()})[:CHECKED_CORNERS]
    configs = [make_run(base, cell, 0, method, folder.path).config for cell in make_cells(base, corners, method)]
    for checked in configs:
        tracking.check(checked)
        if prune and not checked.evaluation.every:
            raise ConfigError(
                "--prune needs evaluations on the way: set evaluation.every, such as --set evaluation.every=5"
            )
    measure, why = shared_aim([found.task.fitness for found in configs], measure)
    check_measure(configs, measure)
    check_validation(configs, "--search")
    study_of = _optuna()
    console = console or Console()
    spec = {"space": {key: repr(found) for key, found in space.items()}, "seeds": seeds, "measure": measure}
    folder.lock({**spec, "prune": prune})
    try:
        folder.add([], seeds)
        children = make_children(folder, jobs, gpus)
        source = _Search(study_of(folder.path), space, folder, seeds, trials, measure, prune)
        with Display(children, trials * len(seeds), source.runs_ended, console) as display:
            display.tell(f"{trials} trials, {len(seeds)} seeds, in {folder.path}; {children.jobs} runs at once")
            display.tell(f"chooses by {measure} on {_judge(base)}; the test split is left for what is reported")
            for line in why:
                display.tell(line)
            failed = drive(source, children, display, folder, measure, ())
        best = source.conclude()
        found = conclude(folder, failed, measure, (), console)
        for line in source.lines():
            display.tell(line)
        return Sweep(found.path, found.cells, found.failed, best)
    finally:
        folder.release()


@dataclass(slots=True)
class _Trial:
    """A trial that is not told yet."""

    trial: Trial
    cell: Cell
    waiting: list[Run]
    running: set[str] = field(default_factory=set[str])
    values: list[float] = field(default_factory=list[float])
    reported: set[int] = field(default_factory=set[int])
    pruned: bool = False


class _Search:
    """Asks for trials, hands out their runs, and tells what came of them."""

    def __init__(
        self,
        study: Study,
        space: Mapping[str, Domain],
        folder: Folder,
        seeds: Sequence[int],
        trials: int,
        measure: str,
        prune: bool,
    ) -> None:
        from optuna.trial import Trial, TrialState

        self.study, self.space, self.folder, self.seeds = study, space, folder, seeds
        self.limit, self.measure, self.prune = trials, measure, prune
        self.open: dict[str, _Trial] = {}
        self._failed_before = len(study.get_trials(deepcopy=False, states=(TrialState.FAIL,)))
        for frozen in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):  # of a search that was killed
            self._take(Trial(study, frozen._trial_id), set(frozen.intermediate_values))  # pyright: ignore[reportPrivateUsage]

    @property
    def runs_ended(self) -> int:
        """Runs of trials that earlier commands told."""
        told = self._asked() - len(self.open) - self._failed_before
        return told * len(self.seeds)

    def next(self) -> Run | None:
        while True:
            for trial in list(self.open.values()):
                for run in list(trial.waiting):
                    if (self.prune and trial.running) or is_busy(run.path):
                        continue  # a trial whose first seed may be pruned has one run at a time
                    trial.waiting.remove(run)
                    trial.running.add(run.name)
                    if run.evaluation() is None:
                        return run
                    self._finished(trial, run)
            if self.is_asked():
                return None
            self._ask()

    def is_asked(self) -> bool:
        """Whether all trials have been asked for. Another takes the place of one that failed in an earlier command."""
        return self._asked() - self._failed_before >= self.limit

    def is_exhausted(self) -> bool:
        return self.is_asked() and not self.open

    def look(self, children: Children) -> None:
        if not self.prune:
            return
        for trial in self.open.values():
            first = f"{trial.cell.name}/seed_{self.seeds[0]}"
            child = children.running.get(first)
            if child is None or trial.pruned:
                continue
            for row in last_rows(child.run.path / "metrics.jsonl"):
                step = int(row["generation"]) + 1
                if row.get("validation") and step not in trial.reported:
                    trial.reported.add(step)
                    trial.trial.report(self._value(row["validation"]), step)
                    trial.pruned = trial.pruned or trial.trial.should_prune()
            if trial.pruned:
                children.stop(first)

    def done(self, run: Run) -> None:
        if (trial := self.open.get(run.cell.name)) is not None:  # else another seed of it has failed
            self._finished(trial, run)

    def broken_off(self, end: Ended) -> str:
        from optuna.trial import TrialState

        trial = self.open.get(end.run.cell.name)
        if trial is None:
            return "failed"
        self._tell(trial, None, TrialState.PRUNED if trial.pruned else TrialState.FAIL)
        return "pruned" if trial.pruned else "failed"

    def conclude(self) -> Config | None:
        """Write best.yaml, and what the search has cost to results.json."""
        from optuna.trial import TrialState

        told = self.study.get_trials(deepcopy=False)
        count = {state: sum(t.state == state for t in told) for state in TrialState}
        costs = [results.cost_of(run) for run in self.folder.runs()]
        totals = {name: sum(cost.get(name) or 0 for cost in costs) for name in ("completions", "wall_seconds")}
        tree: Tree = {
            "trials": len(told),
            "complete": count[TrialState.COMPLETE],
            "pruned": count[TrialState.PRUNED],
            "failed": count[TrialState.FAIL],
            "training": totals if all("completions" in cost for cost in costs) else {**totals, "completions": None},
            "chosen_on": _judge(self.folder.base),
        }
        self.folder.told["search"] = tree
        if not tree["complete"]:
            return None
        best = self.study.best_trial
        cell = self.folder.cells[_name(best.number)]
        run = make_run(self.folder.base, cell, self.seeds[0], self.folder.method, self.folder.path)
        config = run.config.model_copy(update={"output_dir": str(self.folder.path / "best")})
        tree["best"] = {"cell": cell.name, "settings": cell.settings, self.measure: best.value}
        note = f"# {cell.name}: mean {self.measure} {best.value:.6g} over seeds {', '.join(map(str, self.seeds))}"
        where = f"# on {_judge(self.folder.base)}, by which it was chosen"
        write_text(self.folder.path / "best.yaml", f"{note},\n{where}\n{to_yaml(config)}")
        return config

    def lines(self) -> list[str]:
        """The search in words."""
        tree = self.folder.told["search"]
        completions = tree["training"]["completions"]
        cost = "" if completions is None else f", {completions:,} training completions"
        lines = [
            f"cost     {tree['trials']} trials ({tree['pruned']} pruned, {tree['failed']} failed){cost}, "
            f"{tree['training']['wall_seconds']:,.0f} seconds of training"
        ]
        if "best" in tree:
            best = tree["best"]
            settings = ", ".join(f"{key} {value}" for key, value in best["settings"].items())
            value = f"{self.measure} {best[self.measure]:.4g} on validation"
            lines.append(f"best     {best['cell']}: {value}, with {settings}; best.yaml")
        return lines

    def _asked(self) -> int:
        """Trials, without those that somebody has put into the study's queue."""
        from optuna.trial import TrialState

        return sum(t.state != TrialState.WAITING for t in self.study.get_trials(deepcopy=False))

    def _ask(self) -> None:
        """A new trial. One with the settings of another that is complete has that one's value."""
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState

        self.study.sampler = TPESampler(seed=SAMPLER_SEED + self._asked())
        trial = self._take(self.study.ask(), set())
        for other in self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            if other.params == trial.trial.params:
                self._tell(trial, cast(float, other.value), TrialState.COMPLETE)
                return

    def _take(self, trial: Trial, reported: set[int]) -> _Trial:
        """Open a trial, new or of a search that was killed."""
        from optuna.trial import TrialState

        settings: Settings = {key: found.suggest(trial, key) for key, found in self.space.items()}
        cell = Cell(_name(trial.number), settings)
        try:
            runs = [make_run(self.folder.base, cell, s, self.folder.method, self.folder.path) for s in self.seeds]
        except ConfigError:  # values that are good alone and not together
            self.study.tell(trial.number, state=TrialState.FAIL)
            raise
        self.folder.add([cell], self.seeds)
        self.open[cell.name] = _Trial(trial, cell, runs, reported=reported)
        return self.open[cell.name]

    def _finished(self, trial: _Trial, run: Run) -> None:
        from optuna.trial import TrialState

        tree = run.evaluation()
        assert tree is not None
        trial.running.discard(run.name)
        if not has_validation(tree):  # of an earlier release, or changed since: never taken from the test split
            raise ConfigError(f"{run.path} has no validation measures to choose by; move it aside to run it again")
        trial.values.append(self._value(judged(tree)))
        if len(trial.values) == len(self.seeds):
            self._tell(trial, float(np.mean(trial.values)), TrialState.COMPLETE)

    def _value(self, measures: Tree) -> float:
        value = measures.get(self.measure)
        if value is None or not math.isfinite(value):
            known = ", ".join(measures)
            raise ConfigError(f"--measure {self.measure}: the validation split has no such measure; it has {known}")
        return float(value)

    def _tell(self, trial: _Trial, value: float | None, state: Any) -> None:
        self.study.tell(trial.trial.number, value, state)
        del self.open[trial.cell.name]


def _optuna() -> Any:
    """What opens the study of a folder. Raises ConfigError where Optuna is not installed."""
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise ConfigError(f"--search needs Optuna: {install('sweep')}") from None

    def open_study(folder: Path) -> Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        file = folder / STUDY
        Path(f"{file}.lock").unlink(missing_ok=True)  # of a search that was killed: the folder is ours
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(file)))
        pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS)
        return optuna.create_study(
            storage=storage, study_name="sweep", direction="maximize", pruner=pruner, load_if_exists=True
        )

    return open_study


def _range(text: str, named: str) -> Domain:
    ends, _, kind = text.partition(":")
    low, _, high = ends.partition("..")
    if kind not in ("", "log"):
        raise ValueError
    whole = not any(mark in ends.replace("..", "") for mark in ".eE")
    found = Domain(*((int(low), int(high)) if whole else (float(low), float(high))), log=kind == "log")
    if found.low > found.high:
        raise ConfigError(f"--search {named}={text}: the low end is above the high end")
    if not (math.isfinite(found.low) and math.isfinite(found.high) and found.low < found.high):
        raise ValueError
    if found.log and found.low <= 0:
        raise ValueError
    return found


def _choices(text: str, named: str) -> tuple[Any, ...]:
    found: object = yaml.safe_load(f"[{text}]")
    values = tuple(cast(list[Any], found)) if isinstance(found, list) else ()
    if not named or not values or any(isinstance(value, list | dict) for value in values):
        raise ValueError
    return values


def _name(number: int) -> str:
    return f"trial_{number:04d}"


def _judge(base: Tree) -> str:
    task = base.get("task") or {}
    named = task.get("validation_data") or f"the validation split of task {task.get('name', 'conciseness')}"
    size = task.get("validation_size")
    return f"{named} ({size} examples)" if size else str(named)
