# SPDX-License-Identifier: Apache-2.0
"""`sweep`: train all cells of a grid with all seeds, each run in its own process."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from evoalign import tracking
from evoalign.analysis.sweeping import results
from evoalign.analysis.sweeping.cells import Folder, Run, Settings, Tree, chosen_on, make_cells, make_run, product
from evoalign.analysis.sweeping.children import Children, Display, Ended, is_busy, visible_gpus
from evoalign.config import Config, read
from evoalign.errors import ConfigError, StoppedError
from evoalign.evaluation import RIGHT
from evoalign.report.terminal import print_line
from evoalign.rewards.objective import aim, shared_aim
from evoalign.rundir.identity import command_line
from evoalign.rundir.method import Method
from evoalign.setup import ConfigLike, task_and_data
from evoalign.tasks import PLAIN
from evoalign.training.stopping import Stop
from evoalign.version import install

TICK_SECONDS = 0.2
SHARED_MEASURES = ("reward", "empty_share", "truncated_share", "tokens")
"""Measures that every task has."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The results. `cells` are those of results.json: name, settings, runs, mean and std over seeds.

    `best` is the config of the best trial of a search, as in best.yaml.
    """

    path: Path
    cells: tuple[Tree, ...]
    failed: tuple[Ended, ...] = ()
    best: Config | None = None


class Source:
    """Provides the runs of a sweep: here the unfinished ones of a grid, in order."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.waiting = [run for run in runs if run.evaluation() is None]

    def next(self) -> Run | None:
        """Return a run to start now; None if there is none at the moment."""
        for run in self.waiting:
            if not is_busy(run.path):  # a process of a killed sweep may still be saving there
                self.waiting.remove(run)
                return run
        return None

    def is_exhausted(self) -> bool:
        """Return whether `next` will give no more runs once those that run have ended."""
        return not self.waiting

    def look(self, children: Children) -> None:
        """Check on the running runs."""

    def done(self, run: Run) -> None:
        """Record a finished run."""

    def broken_off(self, end: Ended) -> str:
        """Record a run that ended unfinished; return its state, failed or pruned."""
        return "failed"


def sweep(
    config: ConfigLike,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    cells: Sequence[Settings] = (),
    seeds: Sequence[int] | None = None,
    method: Method = "es",
    jobs: int | None = None,
    gpus: Sequence[str] | None = None,
    to: str | Path | None = None,
    axes: Sequence[str] | None = None,
    measure: str | None = None,
    console: Console | None = None,
) -> Sweep:
    """Train every cell of `grid` once per seed; with explicit `cells`, each of them with each of the grid.

    `grid` maps dotted settings to values. Finished runs are not repeated; stopped or failed ones are resumed.
    `jobs` is the number of parallel runs (None: one per GPU, or one), on `gpus` in turn (None: all visible ones). `to`
    is the sweep's folder (None: output_dir with `_sweep`). `axes` are the settings of the heat map. `measure` is shown
    in figures (None: the training objective). A failed run is reported in `failed` and does not stop the others.
    Raises ConfigError that names the cell before anything runs; StoppedError after a signal, once the runs have saved.
    """
    base, seeds, folder = prepare(config, seeds, method, to)
    chosen = make_cells(base, product(grid or {}, cells or ({},)), method)
    # Ordered by seed, so that early results cover every cell.
    runs = [make_run(base, cell, seed, method, folder.path) for seed in seeds for cell in chosen]
    measure, why = check([run.config for run in runs], measure, results.COLUMNS)
    console = console or Console()
    with folder.locked(cells=chosen):
        results.check_axes(axes, [cell.settings for cell in (*folder.cells.values(), *chosen)])
        folder.add(chosen, seeds)
        source, children = Source(runs), make_children(folder, jobs, gpus)
        finished = len(runs) - len(source.waiting)
        with Display(children, len(runs), finished, console) as display:
            counts = f"{len(chosen)} cells, {len(seeds)} seeds: {len(runs)} runs in {folder.path}"
            display.print("\n".join([f"{counts}, {finished} finished already; {children.jobs} at once", *why]))
            failed = drive(source, children, display, folder, measure, axes)
        return conclude(folder, failed, measure, axes, console)


def prepare(
    config: ConfigLike, seeds: Sequence[int] | None, method: Method, to: str | Path | None
) -> tuple[Tree, list[int], Folder]:
    """Return the base config as a tree, the seeds, and the folder, which is not created. Raises ConfigError."""
    if method == "grpo" and not tracking.is_installed("trl"):  # otherwise every run would fail
        raise ConfigError(f"GRPO needs the extra grpo: {install('grpo')}")
    if isinstance(config, Config):
        base = config.model_dump(mode="json")
    else:
        base = read([config]) if isinstance(config, str | Path) else dict(config)
    seeds = [int(base.get("seed", 0))] if seeds is None else list(seeds)
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"seeds {seeds}: give one or more non-negative integers, each once")
    path = Path(to) if to is not None else Path(f"{base.get('output_dir', 'runs/evoalign')}_sweep")
    fixed = {key: value for key, value in base.items() if key not in ("seed", "output_dir")}
    return fixed, seeds, Folder(path, fixed, method)


def check(configs: Sequence[Config], measure: str | None, more: Iterable[str] = ()) -> tuple[str, list[str]]:
    """Check trackers and measure; return the measure (None: the training objective) and lines on its choice.

    `more` are further names of measures. Raises ConfigError for one that a built-in task lacks, instead of failing
    after the first run; those of a custom task are known only when it is evaluated.
    """
    for config in configs:
        tracking.check(config)
    measure, why = shared_aim([config.task.fitness for config in configs], measure)
    if measure in (*SHARED_MEASURES, *more):
        return measure, why
    for name, config in {config.task.name: config for config in configs}.items():
        if name not in PLAIN:
            continue
        task, data = task_and_data(config, None, None)
        with closing(task):
            right = [] if task.is_right("", data.test[0]) is None else [RIGHT]
            whole = [] if task.set_objective is None else [task.set_objective.measure]
            known = [*SHARED_MEASURES, *whole, *right, *more, *task.measures("", data.test[0])]
        if measure not in known:
            raise ConfigError(f"--measure {measure}: task {name} has no such measure; it has {', '.join(known)}")
    return measure, why


def make_children(folder: Folder, jobs: int | None, gpus: Sequence[str] | None) -> Children:
    """Return the process pool. Raises ConfigError."""
    found = visible_gpus(gpus)
    jobs = max(1, len(found)) if jobs is None else jobs
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: give 1 or more")
    return Children(folder.path, jobs, found)


def drive(
    source: Source,
    children: Children,
    display: Display,
    folder: Folder,
    measure: str,
    axes: Sequence[str] | None = None,
) -> list[Ended]:
    """Start, watch and record runs until none is left; return the failed ones. Raises StoppedError after a signal."""
    failed: dict[str, Ended] = {}
    signalled = False
    try:
        with Stop() as stop:
            while children.running or not (source.is_exhausted() or stop.asked is not None):
                while stop.asked is None and children.has_room and (run := source.next()) is not None:
                    display.started(run.name)
                    children.start(run)
                time.sleep(TICK_SECONDS)
                source.look(children)
                for end in children.ended():
                    evaluation, state, reward = end.run.evaluation(), "done", None
                    if evaluation is not None:  # done, even if a signal ended it afterwards
                        source.done(end.run)
                        reward = aim(chosen_on(evaluation))
                    else:
                        state = "stopped" if stop.asked is not None else source.broken_off(end)
                    if state == "failed":
                        failed[end.run.name] = end
                    display.ended(end, state, reward)
                    record(folder, failed.values(), measure)
                if stop.asked is not None and not signalled:
                    children.stop()
                    signalled = True
    finally:
        children.kill()  # only after an exception, such as a second Ctrl-C, is any left
    if stop.asked is not None:
        conclude(folder, list(failed.values()), measure, axes, None)
        program, *words = command_line()
        again = shlex.join(["evoalign", *words]) if program in ("evoalign", "cli.py") else "the same call"
        raise StoppedError(f"the sweep was stopped and its runs have saved; resume with: {again}", stop.asked)
    return list(failed.values())


def record(folder: Folder, failed: Iterable[Ended], measure: str) -> list[Tree]:
    """Write results.json and table.md of the whole folder; return its cells."""
    cells = results.collect(folder.runs(), {end.run.name: end for end in failed}, folder.outcomes)
    results.write(folder.path, folder.header, cells, measure, folder.searched)
    return cells


def conclude(
    folder: Folder,
    failed: Sequence[Ended],
    measure: str,
    axes: Sequence[str] | None,
    console: Console | None,
) -> Sweep:
    """Write results and figures of the whole folder, and print the table."""
    cells, keys = record(folder, failed, measure), folder.searched
    if keys:
        drawn = results.draw_search(folder.path, cells, measure, keys)
    else:
        drawn = results.draw(folder.path, cells, measure, axes)
    if console is not None:
        lines = [results.table(cells, measure, keys), *(f"figure   {path}" for path in drawn)]
        lines.append(f"sweep    {folder.path}")
        if failed:
            lines.append(f"failed   {len(failed)} runs; rerun the command to retry them")
        for line in lines:
            print_line(console, line)
    return Sweep(folder.path, tuple(cells), tuple(failed))
