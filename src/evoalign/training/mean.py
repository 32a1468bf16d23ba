# SPDX-License-Identifier: Apache-2.0
"""The mean of an engine as a session measures and saves it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from evoalign.checks import divergence
from evoalign.checks.distance import Distance, distance_of_mean
from evoalign.checks.divergence import Divergence, Fluency, Reference
from evoalign.cost.budget import Cost, Meter
from evoalign.evaluation import Evaluation, evaluate_together
from evoalign.rollouts import Encoded
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.directory import RunDir
from evoalign.rundir.journal import Recorded
from evoalign.setup import Parts
from evoalign.tasks import Split
from evoalign.training.saver import Saver
from evoalign.types import Request, Rollout


class Mean:
    """The mean of an engine as a session measures and saves it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.meter = Meter(parts.config, parts.engine.specs(), parts.space, parts.layout, parts.facts.device)
        self.reference = Reference.of(parts)
        self.saver = Saver(parts)
        self._prompts = dict[tuple[Split, int], Encoded]()
        self.weights_hash = ""
        """Hash of the mean after the last generation."""
        self.journal_hash: Callable[[], str] = str

    def evaluate(self, split: Split = "test") -> tuple[Evaluation, Cost]:
        found, cost, _ = self.evaluate_together([split])
        return found[split], cost

    def evaluate_together(
        self, splits: Sequence[Split], others: Sequence[Request] = ()
    ) -> tuple[dict[Split, Evaluation], Cost, Sequence[Rollout]]:
        """Evaluate splits and complete other requests in one rollout; return both, and the cost of the evaluations."""
        start, parts, number = time.perf_counter(), self.parts, self.parts.settings.mode()
        for split in splits:
            if (split, number) not in self._prompts:
                self._prompts[split, number] = Encoded(parts.task, parts.tokens, parts.rows(split))
        asked = [(parts.rows(split), self._prompts[split, number]) for split in splits]
        made, rollouts = evaluate_together(parts.engine, parts.task, asked, parts.decoding.evaluation, others)
        seconds = time.perf_counter() - start
        found: dict[Split, Evaluation] = dict(zip(splits, made, strict=True))
        prompts = [self._prompts[split, number][c.example] for split in splits for c in found[split].completions]
        later = [turn for evaluated in made for c in evaluated.completions for turn in c.later]
        lengths = [c.tokens - sum(t for _, t in c.later) for evaluated in made for c in evaluated.completions]
        return found, self.meter.evaluation(prompts, lengths, seconds, later), rollouts

    def divergence(self) -> Divergence:
        return divergence.measure(self.parts, self.reference)

    def distance(self) -> Distance:
        return distance_of_mean(self.parts)

    def fluency(self, before: Evaluation, after: Evaluation) -> Fluency:
        parts, texts = self.parts, (before.completions, after.completions)
        rows = parts.data.test, parts.rows("test")
        try:
            return divergence.fluency(self.reference, parts.tokens, parts.task, rows, *texts)
        finally:
            self.reference.close()  # its memory is free for placebos

    def save(self, run: RunDir, done: int, reward: float | None, then: Callable[[], None]) -> Path:
        folder = run.saved(done, adapter=not self.parts.space.evolves_model)
        mark = Mark(done, self.weights_hash, self.journal_hash(), objective=self.parts.state, validation=reward)
        self.saver.save(folder, mark, then)
        return folder

    def save_recorded(self, run: RunDir, recorded: Recorded, reward: float) -> None:
        """Save the mean after an update of the journal, which has been applied again, unless it is saved."""
        done, found = recorded.update.generation + 1, recorded.weights_hash
        mark = Mark(done, str(found), recorded.hash, objective=recorded.objective, validation=reward)
        self.saver.save(run.saved(done, adapter=not self.parts.space.evolves_model), mark, lambda: None)

    def settle(self) -> None:
        self.saver.free()

    def fingerprint(self) -> str:
        return self.parts.engine.fingerprint()
