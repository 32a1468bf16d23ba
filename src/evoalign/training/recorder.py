# SPDX-License-Identifier: Apache-2.0
"""What a run reports as it goes, whatever the method: metrics, budget, figures, the terminal and trackers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from evoalign import tracking
from evoalign.config import Config
from evoalign.cost import budget
from evoalign.cost.budget import Cost
from evoalign.evaluation import Evaluation
from evoalign.report import figures
from evoalign.report.figures import ES_WORDS, Words
from evoalign.report.progress import Display
from evoalign.report.rows import Row
from evoalign.report.tables import visible
from evoalign.rundir.directory import RunDir
from evoalign.rundir.method import Method

DRAW_SHARE = 10
"""Figures are drawn again once so many times the last drawing's duration has passed, and at the end."""
FIRST_DRAWING = 1.0
"""Seconds that the first one is taken to last, since it imports what draws."""


@dataclass(frozen=True, slots=True)
class Labels:
    """What a method's run is called where it is shown. `total` counts its steps, `devices` what it keeps busy.

    `still` is what rows of zero variance are called on the terminal; `note` says why FLOPs are not known.
    """

    method: Method
    total: int
    title: str
    still: str = "generations without update"
    words: Words = ES_WORDS
    devices: int = 1
    note: str = ""

    @property
    def unit(self) -> str:
        """What a run counts: generation, or step."""
        return self.words.unit


class Recorder:
    """Given each row once, and passes it on; a context manager around the loop. It measures and asks nothing.

    `baseline` is the reward of the start on the test split, `validated` that on the validation split, if there is one;
    `evaluations` is what all of its evaluations took, None where a part of that is not known.
    """

    def __init__(self, config: Config, run: RunDir, console: Console, labels: Labels) -> None:
        self.config, self.run, self.console, self.labels = config, run, console, labels
        self.baseline: float | None = None
        self.validated: float | None = None
        self.evaluations: Cost | None = Cost()
        self.trackers: list[tracking.Tracker] = []
        self._drawn, self._drawing = time.monotonic(), FIRST_DRAWING
        self._display = Display(labels.total, console, unit=labels.unit, still=labels.still)

    def start(self, at: int | None, missed: Sequence[Mapping[str, Any]] = ()) -> None:
        """Start the trackers, of a run that resumes `at` so many rows, and report the rows they missed.

        Raises ConfigError.
        """
        self.trackers = tracking.create(self.config, self.run.path, at)
        for row in missed:
            self._track(row)

    def __enter__(self) -> Recorder:
        self._display.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._display.__exit__(kind, *raised)
        if not self.run.rows or not self.run.is_here:
            return
        with suppress(OSError) if kind is not None else nullcontext():  # of a full disk the first error tells
            self._draw()
            self._write_budget()

    def record(self, row: Row) -> None:
        """Write, draw, show and pass on one row."""
        self.run.append_metrics(row)
        if time.monotonic() - self._drawn >= DRAW_SHARE * self._drawing:
            self._draw()
        self._display.update(row)
        self._track(row)

    def evaluated(self, cost: Cost) -> None:
        """Add what an evaluation took."""
        self.evaluations = None if self.evaluations is None else self.evaluations + cost
        self._write_budget()

    def finish(self, before: Evaluation, after: Evaluation, divergence: Mapping[str, float] | None) -> None:
        """The run is complete. `divergence` is that of the final mean, where it was measured."""
        if divergence is not None and self.run.rows:
            self._draw((divergence["exact"], after.measures["reward"]))
        for tracker in self.trackers:
            tracker.finish({"before": before.measures, "after": after.measures})

    def close(self) -> None:
        """Let the trackers go."""
        for tracker in self.trackers:
            tracker.close()

    def tell(self, line: str) -> None:
        """Plain lines on the console."""
        tell(self.console, line)

    def _track(self, row: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(row)

    def _write_budget(self) -> None:
        self.run.check()  # where the folder went away, it is not made again
        self.run.results.mkdir(exist_ok=True)
        labels = self.labels
        budget.write(self.run.budget, labels.method, labels.devices, self.run.rows, self.evaluations, labels.note)

    def _draw(self, final: tuple[float, float] | None = None) -> None:
        """The figures of the rows so far; `final` is the KL and test reward of the finished mean."""
        self.run.check()
        start = time.monotonic()
        rows, folder, title, words = self.run.rows, self.run.figures, self.labels.title, self.labels.words
        start_of = {"baseline": self.baseline, "validated": self.validated}
        figures.evolution(rows, folder / "evolution.png", title=title, words=words, **start_of)
        figures.time_breakdown(rows, folder / "time_breakdown.png", title=title, words=words)
        figures.rewards(rows, folder / "rewards.png", title=title, words=words)
        figures.divergence(rows, folder / "divergence.png", title=title, baseline=self.baseline, final=final)
        self._drawn = time.monotonic()
        self._drawing = self._drawn - start


def tell(console: Console, line: str) -> None:
    """Plain lines on a console."""
    ascii_only = not console.encoding.startswith("utf")
    line = "\n".join(visible(part, ascii_only=ascii_only) for part in line.split("\n"))
    console.print(line, markup=False, highlight=False, soft_wrap=True)
