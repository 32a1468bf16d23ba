# SPDX-License-Identifier: Apache-2.0
"""`sweep`: all cells of a grid with all seeds, each run a process of its own, until none is left."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from evoalign import tracking
from evoalign.analysis.sweeping import results
from evoalign.analysis.sweeping.cells import Run, Settings, Tree, judged, make_cells, make_runs, product
from evoalign.analysis.sweeping.children import Children, Ended, is_busy, visible_gpus
from evoalign.analysis.sweeping.folder import Folder
from evoalign.analysis.sweeping.progress import Display
from evoalign.config import Config, read
from evoalign.errors import ConfigError, StoppedError
from evoalign.evaluation import RIGHT
from evoalign.report.terminal import print_line
from evoalign.rewards.objective import aim, shared_aim
from evoalign.rundir.identity import command_line
from evoalign.rundir.method import Method
from evoalign.setup import ConfigLike, task_and_data
from evoalign.tasks import PLAIN
from evoalign.training.stop import Stop
from evoalign.version import install

TICK_SECONDS = 0.2
SHARED_MEASURES = ("reward", "empty_share", "truncated_share", "tokens")
"""Of a test split, whatever the task."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep came to. `cells` are those of results.json: name, settings, runs, mean and std over seeds.

    `best` is the config of the best cell of a search, as best.yaml has it.
    """

    path: Path
    cells: tuple[Tree, ...]
    failed: tuple[Ended, ...] = ()
    best: Config | None = None


class Source(Protocol):
    """Where the next run comes from."""

    def next(self) -> Run | None:
        """A run to start now; None where there is none at the moment."""
        ...

    def is_exhausted(self) -> bool:
        """Whether none will come any more, once those under way have ended."""
        ...

    def look(self, children: Children) -> None:
        """See how those under way are doing."""
        ...

    def done(self, run: Run) -> None:
        """Take in a run that is done."""
        ...

    def broken_off(self, end: Ended) -> str:
        """Take in a run that has ended and is not done: failed or pruned."""
        ...


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
    """Train every cell of `grid` (or of the explicit `cells`; of both: each with each) once a seed.

    `grid` maps dotted settings to values. A run that is done is not run again; one that was stopped or failed goes on.
    `jobs` runs at once (None: one a GPU, or one), each on one of `gpus` in turn (None: all visible ones). `to` is the
    sweep's folder (None: the config's output_dir with `_sweep`). `axes` names what the heat map lies over.
    `measure` is what figures show (None: what is trained for, the reward or that of `task.fitness`).
    A run that fails is reported in `failed` and the others go on. Raises ConfigError before anything runs, naming the
    cell; StoppedError after a signal, when the runs under way have saved.
    """
    base, seeds, folder = prepare(config, seeds, method, to)
    chosen = make_cells(base, product(grid or {}, cells or ({},)), method)
    runs = make_runs(base, chosen, seeds, method, folder.path)
    for run in runs:
        tracking.check(run.config)
    measure, why = shared_aim([run.config.task.fitness for run in runs], measure)
    check_measure([run.config for run in runs], measure, results.COLUMNS)
    console = console or Console()
    folder.lock(cells=chosen)
    try:
        results.check_axes(axes, [cell.settings for cell in (*folder.cells.values(), *chosen)])
        folder.add(chosen, seeds)
        source = _Grid(runs)
        children = make_children(folder, jobs, gpus)
        with Display(children, len(runs), len(runs) - len(source.waiting), console) as display:
            display.tell(
                f"{len(chosen)} cells, {len(seeds)} seeds: {len(runs)} runs in {folder.path}, "
                f"{len(runs) - len(source.waiting)} of them done already; {children.jobs} at once"
            )
            for line in why:
                display.tell(line)
            failed = drive(source, children, display, folder, measure, axes)
        return conclude(folder, failed, measure, axes, console)
    finally:
        folder.release()


def prepare(
    config: ConfigLike, seeds: Sequence[int] | None, method: Method, to: str | Path | None
) -> tuple[Tree, list[int], Folder]:
    """The base config as a tree, the seeds, and the folder, which is not touched. Raises ConfigError."""
    if method == "grpo" and not tracking.is_installed("trl"):  # else every run would start and fail
        raise ConfigError(f"GRPO needs the extra grpo: {install('grpo')}")
    if isinstance(config, Config):
        base = config.model_dump(mode="json")
    else:
        base = read([config]) if isinstance(config, str | Path) else dict(config)
    seeds = [int(base.get("seed", 0))] if seeds is None else list(seeds)
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"seeds {seeds}: give one or more, each once, and none below 0")
    path = Path(to) if to is not None else Path(f"{base.get('output_dir', 'runs/evoalign')}_sweep")
    fixed = {key: value for key, value in base.items() if key not in ("seed", "output_dir")}
    return fixed, seeds, Folder(path, fixed, method)


def check_measure(configs: Iterable[Config], measure: str, more: Iterable[str] = ()) -> None:
    """Raise ConfigError where a built-in task has no such measure: else the first run would tell, at its end.

    `more` are names beside those of the task. What a task of the user's own measures is known when it does.
    """
    if measure in (*SHARED_MEASURES, *more):
        return
    for name, config in {config.task.name: config for config in configs}.items():
        if name in PLAIN:
            task, data = task_and_data(config, None, None)
            with closing(task):
                right = [] if task.is_right("", data.test[0]) is None else [RIGHT]
                whole = [] if task.set_objective is None else [task.set_objective.measure]
                known = [*SHARED_MEASURES, *whole, *right, *more, *task.measures("", data.test[0])]
            if measure not in known:
                raise ConfigError(f"--measure {measure}: task {name} has no such measure; it has {', '.join(known)}")


def check_validation(configs: Iterable[Config], what: str) -> None:
    """Raise ConfigError where `what`, which chooses settings, would have no validation split to choose by.

    Loads the data of each task, so that a size that does not fit is told before the first run, too.
    """
    for config in {config.task.model_dump_json(): config for config in configs}.values():
        task, data = task_and_data(config, None, None)
        task.close()
        if not data.validation:
            raise ConfigError(
                f"{what} chooses by a validation split, and task {config.task.name} has none: set task.validation_size"
                ", such as --set task.validation_size=20, or task.validation_data; the test split is for what is told"
            )


def make_children(folder: Folder, jobs: int | None, gpus: Sequence[str] | None) -> Children:
    """Raises ConfigError."""
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
    """Start, watch and take in runs until none is left; those that failed. Raises StoppedError after a signal."""
    failed: dict[str, Ended] = {}
    told = False
    try:
        with Stop() as stop:
            while children.running or not (source.is_exhausted() or stop.asked is not None):
                _start(source, children, display, stop)
                time.sleep(TICK_SECONDS)
                source.look(children)
                for end in children.ended():
                    _take_in(end, source, display, stop, failed)
                    record(folder, failed, measure)
                if stop.asked is not None and not told:
                    children.stop()
                    told = True
    finally:
        children.kill()  # none is left unless this ends by an exception, such as a second Ctrl-C
    if stop.asked is not None:
        conclude(folder, list(failed.values()), measure, axes, None)
        raise StoppedError(f"the sweep has stopped and its runs have saved; resume with: {_again()}", stop.asked)
    return list(failed.values())


def conclude(
    folder: Folder,
    failed: Sequence[Ended],
    measure: str,
    axes: Sequence[str] | None,
    console: Console | None,
) -> Sweep:
    """Write results and figures of all that belongs to the folder, and show the table."""
    cells = record(folder, {end.run.name: end for end in failed}, measure)
    keys = folder.searched
    if keys:
        drawn = results.draw_search(folder.path, cells, measure, keys)
    else:
        drawn = results.draw(folder.path, cells, measure, axes)
    if console is not None:
        lines = [
            results.table(cells, measure, keys),
            *(f"figure   {path}" for path in drawn),
            f"sweep    {folder.path}",
        ]
        if failed:
            lines.append(f"failed   {len(failed)} of its runs; the same command tries again")
        for line in lines:
            print_line(console, line)
    return Sweep(folder.path, tuple(cells), tuple(failed))


def record(folder: Folder, failed: Mapping[str, Ended], measure: str) -> list[Tree]:
    """Write results.json and table.md of all that belongs to the folder; its cells."""
    cells = results.collect(folder.runs(), failed, folder.outcomes)
    results.write(folder.path, folder.told, cells, measure, folder.searched)
    return cells


class _Grid:
    """The runs of a grid that are not done, in their order."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.waiting = [run for run in runs if run.evaluation() is None]

    def next(self) -> Run | None:
        for run in self.waiting:
            if not is_busy(run.path):  # a process of a sweep that was killed may still be saving there
                self.waiting.remove(run)
                return run
        return None

    def is_exhausted(self) -> bool:
        return not self.waiting

    def look(self, children: Children) -> None:
        pass

    def done(self, run: Run) -> None:
        pass

    def broken_off(self, end: Ended) -> str:
        return "failed"


def _start(source: Source, children: Children, display: Display, stop: Stop) -> None:
    while stop.asked is None and children.has_room and (run := source.next()) is not None:
        display.started(run.name)
        children.start(run)


def _take_in(end: Ended, source: Source, display: Display, stop: Stop, failed: dict[str, Ended]) -> None:
    """One with a whole result is done, also where a signal met it at its very end, and would not be run again."""
    evaluation = end.run.evaluation()
    if evaluation is not None:
        source.done(end.run)
        display.ended(end, "done", aim(judged(evaluation)))
        return
    state = "stopped" if stop.asked is not None else source.broken_off(end)
    if state == "failed":
        failed[end.run.name] = end
    display.ended(end, state, None)


def _again() -> str:
    program, *words = command_line()
    return shlex.join(["evoalign", *words]) if program in ("evoalign", "cli.py") else "the same call"
