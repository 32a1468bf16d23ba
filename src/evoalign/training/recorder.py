# SPDX-License-Identifier: Apache-2.0
"""What a run tells of itself as it goes: metrics, figures, the terminal, trackers, completions, diagnosis, the hook."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from rich.console import Console

from evoalign import evolve, tracking
from evoalign.checks import control, divergence
from evoalign.checks.diagnosis import SAMPLE, Diagnosis
from evoalign.checks.divergence import Divergence, Reference
from evoalign.cost import budget
from evoalign.cost.budget import Cost, Meter
from evoalign.evaluation import Evaluation
from evoalign.report import completions, figures
from evoalign.report.progress import Display
from evoalign.report.rows import metrics_row
from evoalign.report.tables import visible
from evoalign.rundir.directory import RunDir
from evoalign.setup import Parts
from evoalign.types import Generation

DRAW_SHARE = 10
"""Figures are drawn again once so many times the last drawing's duration has passed, and at the end."""
Hook = Callable[[Generation], None]


class Recorder:
    """Takes in each generation once; a context manager around the loop. All readers are given the same row.

    Make it while the engine's mean is still the start. `baseline` is the reward of the start on the test split,
    `evaluations` what all of its evaluations took; None where a part of that is not known.
    """

    def __init__(self, parts: Parts, run: RunDir, console: Console, hook: Hook | None) -> None:
        self.parts, self.config, self.run, self.console, self.hook = parts, parts.config, run, console, hook
        self.baseline: float | None = None
        self.evaluations: Cost | None = Cost()
        self._meter = Meter(parts.config, parts.engine.specs(), parts.space, parts.layout, parts.facts.device)
        self.diagnosis = Diagnosis(
            parts.config, parts.layout, parts.engine.probe_weights(SAMPLE), parts.task.max_reward
        )
        self.trackers: list[tracking.Tracker] = []
        self._control: control.Control | None = None
        self._reference = Reference.of(parts)
        self._final: tuple[float, float] | None = None
        self._drawing = self._drawn = 0.0
        self._display = Display(parts.config.es.num_generations, console)

    def start(self, rebuilt: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Start the trackers. Raises ConfigError.

        `rebuilt` says that a run goes on, whose rows are those of metrics.jsonl, the engine's mean being where they
        end, and which of them no tracker was given.
        """
        self.trackers = tracking.create(self.config, self.run.path, None if rebuilt is None else len(self.run.rows))
        self._control = self._control_of(len(self.run.rows))
        if rebuilt is None:
            self._measure_start()
            return
        self.diagnosis.restore(self.run.rows, self.parts.engine.probe_weights(SAMPLE))
        for row in rebuilt:
            for tracker in self.trackers:
                tracker.log(row)

    def __enter__(self) -> Recorder:
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.__exit__(kind, error, trace)
        if self.run.rows:
            self._draw()
            self._write_budget()

    def generation(self, generation: Generation) -> None:
        """Write, draw, show and tell one generation."""
        row = metrics_row(generation)
        row["diagnosis"] = self.diagnosis.update(generation, self.parts.engine.probe_weights(SAMPLE), self._control)
        row["budget"] = self._meter.generation(generation).as_dict()
        due = divergence.is_due(self.config, generation.index + 1)
        row["divergence"] = asdict(self.divergence()) if due else None
        self.run.append_metrics(row)
        if time.monotonic() - self._drawn >= DRAW_SHARE * self._drawing:
            self._draw()
        self._display.update(row)
        for line in self.diagnosis.warnings():
            self.tell(f"warning, generation {generation.index + 1}: {line}")
        for tracker in self.trackers:
            tracker.log(row)
        if completions.is_due(self.config.tracking.completions_every, generation):
            examples = [self.parts.data.train[i] for i in generation.rows]
            file = self.run.completions(f"generation_{generation.index:04d}")
            completions.write(file, generation, examples, self.parts.task)
        self._control = self._control_of(generation.index + 1)
        if self.hook is not None:
            self.hook(generation)

    def divergence(self) -> Divergence:
        """KL of the engine's mean from the base model, a second copy of which is loaded the first time."""
        return divergence.measure(self.parts, self._reference)

    def evaluated(self, result: Evaluation, seconds: float) -> None:
        """Add what an evaluation of the test split took."""
        parts = self.parts
        prompts = [parts.tokens.encode(parts.task.prompt(example)) for example in parts.data.test]
        cost = self._meter.evaluation(
            [prompts[c.example] for c in result.completions], [c.tokens for c in result.completions], seconds
        )
        self.evaluations = None if self.evaluations is None else self.evaluations + cost
        self._write_budget()

    def _write_budget(self) -> None:
        self.run.results.mkdir(parents=True, exist_ok=True)
        meter = self._meter
        budget.write(self.run.budget, "es", meter.devices, self.run.rows, self.evaluations, meter.note)

    def finish(self, summary: Mapping[str, Any], divergence: Mapping[str, float] | None = None) -> None:
        """The run is complete: say in words what it came to. `divergence` is that of the final mean."""
        if divergence is not None:
            self._final = (divergence["exact"], summary["after"]["reward"])
            self._draw()
        for line in self.diagnosis.summary():
            self.tell(line)
        for tracker in self.trackers:
            tracker.finish(summary)

    def close(self) -> None:
        """Let the trackers go, and the copy of the base model."""
        self._reference.close()
        for tracker in self.trackers:
            tracker.close()

    def tell(self, line: str) -> None:
        """Plain lines on the console."""
        ascii_only = not self.console.encoding.startswith("utf")
        line = "\n".join(visible(part, ascii_only=ascii_only) for part in line.split("\n"))
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _measure_start(self) -> None:
        """What cannot be measured, or does not fit, is reported before the first generation."""
        if self.config.checks.kl_every:
            start = time.monotonic()
            kl, seconds = self.divergence().exact, time.monotonic() - start
            self.tell(f"KL of the start from the base model: {kl:.3g} nats a token, measured in {seconds:.1f} s")

    def _control_of(self, index: int) -> control.Control | None:
        """The control of a generation that comes next: the mean is still the one that its members are drawn around."""
        every, total = self.config.checks.control_every, self.config.es.num_generations
        parts = self.parts
        if not every or index % every or index >= total or not parts.objective.per_completion:
            return None
        rows = evolve.batch(len(parts.data.train), self.config.task.batch_size, self.config.seed, index)
        examples = [parts.data.train[i] for i in rows]
        return control.control(
            self.config, parts.engine, parts.task, parts.tokens, examples, index, objective=parts.objective
        )

    def _draw(self) -> None:
        start = time.monotonic()
        title = f"{self.parts.task.name}, {self.parts.space.name}, N {self.config.es.population_size}"
        figures.evolution(self.run.rows, self.run.figures / "evolution.png", title=title, baseline=self.baseline)
        figures.time_breakdown(self.run.rows, self.run.figures / "time_breakdown.png", title=title)
        figures.rewards(self.run.rows, self.run.figures / "rewards.png", title=title)
        figures.divergence(
            self.run.rows, self.run.figures / "divergence.png", title=title, baseline=self.baseline, final=self._final
        )
        self._drawn = time.monotonic()
        self._drawing = self._drawn - start
