# SPDX-License-Identifier: Apache-2.0
"""`search`: Optuna chooses the settings; a trial is one trial config with all its seeds.

TPE (Bergstra et al., NeurIPS 2011), seeded anew for each trial, so that a resumed search proposes the same trials as an
uninterrupted one (with one job; with more, proposals depend on which trial ended first). The study is a file in
the sweep's folder. The median pruner reads the first seed only: if its evaluations lag, its run is stopped and the
other seeds of the trial are not started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from rich.console import Console

from evoalign.analysis.sweeping import results
from evoalign.analysis.sweeping.cells import (
    STUDY,
    Folder,
    Run,
    Tree,
    TrialConfig,
    chosen_on,
    has_validation,
    make_cells,
    make_run,
    product,
)
from evoalign.analysis.sweeping.children import Children, Display, Ended, is_busy, last_rows
from evoalign.analysis.sweeping.sweep import Source, Sweep, check, conclude, drive, make_children, prepare
from evoalign.config import Config, to_yaml
from evoalign.errors import ConfigError
from evoalign.rundir.files import write_text
from evoalign.rundir.method import Method
from evoalign.setup import ConfigLike, task_and_data
from evoalign.version import install

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

SAMPLER_SEED = 0
STARTUP_TRIALS = 5
"""Number of finished trials before any is pruned."""
CHECKED_CORNERS = 256
"""At most this many combinations of extreme values are validated before the start."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The values of a setting: a range, or choices."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    def suggest(self, trial: Trial, key: str) -> Any:
        """Return the trial's value."""
        if self.choices:
            return trial.suggest_categorical(key, self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(key, self.low, self.high, log=self.log)
        return trial.suggest_float(key, self.low, self.high, log=self.log)


def domain(text: str) -> tuple[str, Domain]:
    """Parse `es.sigma=0.001..0.03:log`, `es.population_size=8..64` or `space.name=lora,lowrank`. Raises ConfigError."""
    key, sign, values = (part.strip() for part in text.partition("="))
    wrong = ConfigError(f"--search {text!r}: expected setting=low..high, setting=low..high:log or setting=value,value")
    if not (key and sign):
        raise wrong
    try:
        if ".." not in values:
            parsed: Any = yaml.safe_load(f"[{values}]")
            if not isinstance(parsed, list) or not parsed or any(isinstance(value, list | dict) for value in parsed):
                raise wrong
            return key, Domain(choices=tuple(parsed))
        ends, _, kind = values.partition(":")
        number = float if any(mark in ends.replace("..", "") for mark in ".eE") else int
        low, high = map(number, ends.split("..", 1))
    except (ValueError, yaml.YAMLError):
        raise wrong from None
    if low > high:
        raise ConfigError(f"--search {text}: the low end is above the high end")
    if kind not in ("", "log") or not -math.inf < low < high < math.inf or (kind and low <= 0):
        raise wrong
    return key, Domain(low, high, log=kind == "log")


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
    """Search the settings with the highest mean of `measure` over the seeds on the validation split.

    `measure` None is the training objective. Neither search nor pruner reads the test split, on which the best is
    reported. `trials` includes those of earlier commands. Raises ConfigError before anything runs, also without a
    validation split; StoppedError after a signal.
    """
    base, seeds, folder = prepare(config, seeds, method, to)
    corners = product({key: found.choices or (found.low, found.high) for key, found in space.items()})
    tried = make_cells(base, corners[:CHECKED_CORNERS], method)
    configs = [make_run(base, cell, 0, method, folder.path).config for cell in tried]
    if prune and not all(checked.evaluation.every for checked in configs):
        raise ConfigError(
            "--prune needs evaluations during training: set evaluation.every, such as --set evaluation.every=5"
        )
    measure, why = check(configs, measure)
    check_validation(configs)
    study_of = _optuna()
    console = console or Console()
    spec = {"space": {key: repr(found) for key, found in space.items()}, "seeds": seeds, "measure": measure}
    with folder.locked({**spec, "prune": prune}):
        folder.add([], seeds)
        children = make_children(folder, jobs, gpus)
        source = _Search(study_of(folder.path), space, folder, seeds, trials, measure, prune)
        with Display(children, trials * len(seeds), source.runs_ended, console) as display:
            lines = [f"{trials} trials, {len(seeds)} seeds, in {folder.path}; {children.jobs} runs at once"]
            lines.append(f"chooses by {measure} on {_validation(base)}; the test split is used for reporting only")
            display.print("\n".join([*lines, *why]))
            failed = drive(source, children, display, folder, measure, ())
        best = source.conclude()
        found = conclude(folder, failed, measure, (), console)
        display.print("\n".join(source.lines()))
        return replace(found, best=best)


def check_validation(configs: Sequence[Config]) -> None:
    """Raise ConfigError if a task has no validation split. Loads the data, so that a wrong size also fails here."""
    for config in {config.task.model_dump_json(): config for config in configs}.values():
        task, data = task_and_data(config, None, None)
        task.close()
        if not data.validation:
            raise ConfigError(
                f"--search chooses settings on a validation split, and task {config.task.name} has none: set "
                "task.validation_size, such as --set task.validation_size=20, or task.validation_data"
            )


@dataclass(slots=True)
class _Trial:
    """A trial without a result yet."""

    trial: Trial
    cell: TrialConfig
    waiting: list[Run] = field(default_factory=list[Run])
    running: set[str] = field(default_factory=set[str])
    values: list[float] = field(default_factory=list[float])
    reported: set[int] = field(default_factory=set[int])
    pruned: bool = False


class _Search(Source):
    """Asks Optuna for trials, provides their runs, and reports the results to it."""

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
        from optuna.trial import Trial

        self.study, self.space, self.folder, self.seeds = study, space, folder, seeds
        self.limit, self.measure, self.prune = trials, measure, prune
        self.open: dict[str, _Trial] = {}
        self._failed_before = len(self._trials("FAIL"))
        for frozen in self._trials("RUNNING"):  # left by a killed search
            self._open(Trial(study, frozen._trial_id), set(frozen.intermediate_values))  # pyright: ignore[reportPrivateUsage]

    def _trials(self, *states: str) -> list[Any]:
        """Return the trials of these states, or all but enqueued ones."""
        states = states or ("RUNNING", "COMPLETE", "PRUNED", "FAIL")
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state.name in states]

    @property
    def _created(self) -> int:
        """Number of trials, without those that failed in an earlier command, which are replaced."""
        return len(self._trials()) - self._failed_before

    @property
    def runs_ended(self) -> int:
        """Number of runs of trials that earlier commands finished."""
        return (self._created - len(self.open)) * len(self.seeds)

    def next(self) -> Run | None:
        while True:
            for trial in list(self.open.values()):
                for run in list(trial.waiting):
                    if (self.prune and trial.running) or is_busy(run.path):
                        continue  # with pruning, a trial has one run at a time
                    trial.waiting.remove(run)
                    trial.running.add(run.name)
                    if run.evaluation() is None:
                        return run
                    self.done(run)
            if self._created >= self.limit:
                return None
            self._create()

    def is_exhausted(self) -> bool:
        return self._created >= self.limit and not self.open

    def look(self, children: Children) -> None:
        for trial in self.open.values() if self.prune else ():
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
        trial, tree = self.open.get(run.cell.name), run.evaluation()
        if trial is None:  # another seed of the trial failed
            return
        assert tree is not None
        trial.running.discard(run.name)
        if not has_validation(tree):  # never choose on the test split
            raise ConfigError(f"{run.path} has no validation measures; move it away to run it again")
        trial.values.append(self._value(chosen_on(tree)))
        if len(trial.values) == len(self.seeds):
            self._close(trial, float(np.mean(trial.values)), "COMPLETE")

    def broken_off(self, end: Ended) -> str:
        trial = self.open.get(end.run.cell.name)
        if trial is None:
            return "failed"
        self._close(trial, None, "PRUNED" if trial.pruned else "FAIL")
        return "pruned" if trial.pruned else "failed"

    def conclude(self) -> Config | None:
        """Write best.yaml, and add the outcome and cost of the search to results.json."""
        costs = [results.cost_of(run) for run in self.folder.runs()]
        totals = {name: sum(cost.get(name) or 0 for cost in costs) for name in ("completions", "wall_seconds")}
        tree: Tree = {
            "trials": len(self.study.get_trials(deepcopy=False)),
            "complete": len(self._trials("COMPLETE")),
            "pruned": len(self._trials("PRUNED")),
            "failed": len(self._trials("FAIL")),
            "training": totals if all("completions" in cost for cost in costs) else {**totals, "completions": None},
            "chosen_on": _validation(self.folder.base),
        }
        self.folder.header["search"] = tree
        if not tree["complete"]:
            return None
        best = self.study.best_trial
        cell = self.folder.cells[_name(best.number)]
        run = make_run(self.folder.base, cell, self.seeds[0], self.folder.method, self.folder.path)
        config = run.config.model_copy(update={"output_dir": str(self.folder.path / "best")})
        tree["best"] = {"cell": cell.name, "settings": cell.settings, self.measure: best.value}
        note = f"# {cell.name}: mean {self.measure} {best.value:.6g} over seeds {', '.join(map(str, self.seeds))}"
        on = f"# on {_validation(self.folder.base)}, on which it was chosen"
        write_text(self.folder.path / "best.yaml", f"{note},\n{on}\n{to_yaml(config)}")
        return config

    def lines(self) -> list[str]:
        """Return cost and best trial as lines to print."""
        tree = self.folder.header["search"]
        cost, best = tree["training"], tree.get("best")
        completions = "" if cost["completions"] is None else f", {cost['completions']:,} training completions"
        ended = f"{tree['trials']} trials ({tree['pruned']} pruned, {tree['failed']} failed)"
        lines = [f"cost     {ended}{completions}, {cost['wall_seconds']:,.0f} seconds of training"]
        if best is not None:
            settings = ", ".join(f"{key} {value}" for key, value in best["settings"].items())
            value = f"{self.measure} {best[self.measure]:.4g} on validation"
            lines.append(f"best     {best['cell']}: {value}, with {settings}; best.yaml")
        return lines

    def _create(self) -> None:
        """Create a trial. One with the settings of a completed trial gets its value."""
        from optuna.samplers import TPESampler

        self.study.sampler = TPESampler(seed=SAMPLER_SEED + len(self._trials()))
        trial = self._open(self.study.ask(), set())
        same = next((other for other in self._trials("COMPLETE") if other.params == trial.trial.params), None)
        if same is not None:
            self._close(trial, same.value, "COMPLETE")

    def _open(self, trial: Trial, reported: set[int]) -> _Trial:
        """Add the runs of a trial, new or left by a killed search."""
        settings = {key: found.suggest(trial, key) for key, found in self.space.items()}
        opened = _Trial(trial, TrialConfig(_name(trial.number), settings), reported=reported)
        folder, cell = self.folder, opened.cell
        try:
            opened.waiting += [make_run(folder.base, cell, seed, folder.method, folder.path) for seed in self.seeds]
        except ConfigError:  # values that are valid only separately
            self._close(opened, None, "FAIL")
            raise
        folder.add([cell], self.seeds)
        self.open[cell.name] = opened
        return opened

    def _value(self, measures: Tree) -> float:
        value = measures.get(self.measure)
        if value is None or not math.isfinite(value):
            known = ", ".join(measures)
            raise ConfigError(f"--measure {self.measure}: the validation split has no such measure; it has {known}")
        return float(value)

    def _close(self, trial: _Trial, value: float | None, state: str) -> None:
        from optuna.trial import TrialState

        self.study.tell(trial.trial.number, value, TrialState[state])
        self.open.pop(trial.cell.name, None)


def _optuna() -> Any:
    """Return a function that opens a folder's study. Raises ConfigError if Optuna is not installed."""
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise ConfigError(f"--search needs Optuna: {install('sweep')}") from None

    def open_study(folder: Path) -> Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        file = folder / STUDY
        Path(f"{file}.lock").unlink(missing_ok=True)  # left by a killed search: the folder is locked by us
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(file)))
        pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS)
        return optuna.create_study(
            storage=storage, study_name="sweep", direction="maximize", pruner=pruner, load_if_exists=True
        )

    return open_study


def _name(number: int) -> str:
    return f"trial_{number:04d}"


def _validation(base: Tree) -> str:
    task = base.get("task") or {}
    named = task.get("validation_data") or f"the validation split of task {task.get('name', 'conciseness')}"
    size = task.get("validation_size")
    return f"{named} ({size} examples)" if size else str(named)
