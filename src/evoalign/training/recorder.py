# SPDX-License-Identifier: Apache-2.0
"""Outputs of a run as it trains: metrics, budget, figures, the terminal and trackers."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from evoalign import tracking
from evoalign.config import Config
from evoalign.cost import budget
from evoalign.cost.budget import Cost
from evoalign.errors import DataError
from evoalign.evaluation import Evaluation
from evoalign.report import figures
from evoalign.report.figures import ES_WORDS, Ends, Words
from evoalign.report.progress import Display
from evoalign.report.rows import DISTRIBUTION, Row, completions_due, read_distributions, write_distribution
from evoalign.report.tables import questions, shorten, tell
from evoalign.rewards.objective import Columns, aim, aim_of
from evoalign.rundir.directory import RunDir
from evoalign.rundir.method import Method
from evoalign.tasks import Split
from evoalign.training import stopping

DRAW_SHARE = 400
"""Figures are redrawn after this many times the last drawing's duration, and at the end."""
SHOWN, LONGEST = 8, 1000
"""Number of completions sent to trackers at the start and at the end, and their length in characters."""
FIRST_DRAWING = 1.5
"""Assumed seconds of the first drawing, so that it comes after 10 minutes."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Display names of a method's run. `total` counts its steps, `devices` the devices it uses.

    `still` is what rows of zero variance are called on the terminal; `note` says why FLOPs are not known; `smaller`
    names the settings that need less memory.
    """

    method: Method
    total: int
    title: str
    still: str = "generations without update"
    words: Words = ES_WORDS
    devices: int = 1
    note: str = ""
    smaller: str = ""

    @property
    def unit(self) -> str:
        """Name of one step: generation, or step."""
        return self.words.unit


class Recorder:
    """Receives each row once and passes it to the outputs. A context manager around the loop.

    `ends` are the rewards by split before and after training, as far as known. `evaluations` is the cost of all
    evaluations; None if a part of it is unknown.
    """

    def __init__(self, config: Config, run: RunDir, console: Console, labels: Labels) -> None:
        self.config, self.run, self.console, self.labels = config, run, console, labels
        self.ends: dict[Split, Ends] = {}
        self.evaluations: Cost | None = Cost()
        self.trackers: list[tracking.Tracker] = []
        self._drawn, self._drawing = time.monotonic(), FIRST_DRAWING
        self._frozen = gc.get_freeze_count() > 0  # by the caller, whose objects stay so
        stops, words = config.stopping, labels.words
        limit = math.inf if stops is None or stops.max_hours is None else 3600 * stops.max_hours
        self._display = Display(labels.total, console, unit=labels.unit, still=labels.still, aim=words.aim, limit=limit)

    def start(self, at: int | None, missed: Sequence[Mapping[str, Any]] = ()) -> None:
        """Start the trackers of a run with `at` rows (None: new) and send the rows they missed. Raises ConfigError."""
        self.trackers = tracking.create(self.config, self.run.path, at)
        for row in missed:
            self._track(row)

    def __enter__(self) -> Recorder:
        self._display.spent = stopping.seconds(self.run.rows)
        self._display.__enter__()
        if not self._frozen:  # else each full collection of garbage visits the libraries' objects, which takes 0.2 s
            gc.collect()  # what is garbage now, such as the model of an earlier run, would stay until the end
            gc.freeze()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if not self._frozen:
            gc.unfreeze()
        self._display.__exit__(kind, *raised)
        if not self.run.rows or not self.run.is_here:
            return
        with (
            suppress(OSError) if kind is not None else nullcontext()
        ):  # after a failure, such as a full disk, keep the first error
            self._draw()
            self._write_budget()

    def record(self, row: Row) -> None:
        """Write, draw, show and track one row."""
        self.run.append_metrics(row)
        if time.monotonic() - self._drawn >= DRAW_SHARE * self._drawing:
            self._draw()
        self._display.update(row)
        self._track(row)

    def distribute(self, index: int, columns: Columns) -> None:
        """Save and track the rewards of a generation's completions, if there are several and its completions are saved.

        Called before `record`: a tracker sends both together.
        """
        if not columns or not completions_due(self.config.tracking.completions_every, index, self.labels.total):
            return
        self.run.check()
        write_distribution(self.run.completions(f"{DISTRIBUTION}_{index:04d}"), columns)
        known = {
            name: [float(v) for v in values if v is not None and not math.isnan(v)] for name, values in columns.items()
        }
        for tracker in self.trackers:
            tracker.distribute(index, {name: values for name, values in known.items() if values})

    def evaluated(self, cost: Cost) -> None:
        """Add the cost of an evaluation."""
        self.evaluations = None if self.evaluations is None else self.evaluations + cost
        self._write_budget()

    def measured(self, split: Split, before: Evaluation, after: Evaluation | None = None) -> None:
        """Note the evaluation of a split before training and, at the end, after it."""
        name = aim_of(before.measures)
        self.ends[split] = Ends(before.estimate(name), None if after is None else after.estimate(name))

    def finish(self, before: Evaluation, after: Evaluation, divergence: Mapping[str, float] | None) -> None:
        """Draw the final figures and finish the trackers. `divergence`: of the final mean, if measured."""
        if self.run.rows:
            self._draw_reward()
            if divergence is not None:
                self._draw_divergence((divergence["exact"], aim(after.measures)))
        names = (figure.stem for figure in sorted(self.run.figures.glob("*.png")))
        self.show(len(self.run.rows), after, {name: self.run.figures / f"{name}.png" for name in names})
        for tracker in self.trackers:
            tracker.finish({"before": before.measures, "after": after.measures})

    def show(self, step: int, found: Evaluation, drawn: Mapping[str, Path] = MappingProxyType({})) -> None:
        """Send completions of an evaluation to the trackers, of the same examples at every call."""
        if self.trackers:
            all_ = found.completions
            some = [all_[i * len(all_) // SHOWN] for i in range(SHOWN)] if len(all_) > SHOWN else all_
            asked = questions([c.prompt for c in some], LONGEST)
            answers = [
                tracking.Answer(prompt, shorten(c.text, LONGEST), c.reward)
                for prompt, c in zip(asked, some, strict=True)
            ]
            for tracker in self.trackers:
                tracker.show(step, answers, drawn)

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self.trackers:
            tracker.close()

    def tell(self, line: str) -> None:
        """Print lines on the console."""
        tell(self.console, *line.split("\n"))

    def tell_lost(self, last: int, total: int) -> None:
        """Report the table of completions that a run was killed before writing: it is not made again."""
        file = self.run.completions(f"generation_{last:04d}")
        if last >= 0 and completions_due(self.config.tracking.completions_every, last, total) and not file.is_file():
            self.tell(f"warning: the run ended before it wrote {file}; the completions of that generation are lost")

    def _track(self, row: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(row)

    def _write_budget(self) -> None:
        self.run.check()  # a removed folder is not made again
        self.run.results.mkdir(exist_ok=True)
        labels = self.labels
        budget.write(self.run.budget, labels.method, labels.devices, self.run.rows, self.evaluations, labels.note)

    def _draw(self) -> None:
        """Draw the figures of the rows so far."""
        self.run.check()
        start = time.monotonic()
        rows, folder, title, words = self.run.rows, self.run.figures, self.labels.title, self.labels.words
        self._draw_reward()
        figures.time_breakdown(rows, folder / "time_breakdown.png", title=title, words=words)
        for field, label in (("rewards", "mean reward"), ("objective", "state of the objective")):
            figures.named(rows, folder / f"{field}.png", field, label, title=title, words=words)
        with suppress(DataError):  # a damaged table costs this figure alone
            found = read_distributions(self.run.completions(DISTRIBUTION).parent, len(rows))
            figures.distribution(found, folder / "distribution.png", title=title, words=words)
        self._draw_divergence()
        self._drawn = time.monotonic()
        self._drawing = self._drawn - start

    def _draw_reward(self) -> None:
        rows, labels = self.run.rows, self.labels
        found = {split: self.ends.get(split, Ends()) for split in ("test", "validation")}
        figures.evolution(rows, self.run.figures / "evolution.png", title=labels.title, words=labels.words, **found)

    def _draw_divergence(self, final: tuple[float, float] | None = None) -> None:
        """Draw the KL figure. `final` is the KL and test reward of the finished mean."""
        before = self.ends.get("test", Ends()).before
        baseline, file = None if before is None else before.mean, self.run.figures / "divergence.png"
        figures.divergence(self.run.rows, file, title=self.labels.title, baseline=baseline, final=final)
