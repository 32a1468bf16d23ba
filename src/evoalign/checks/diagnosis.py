# SPDX-License-Identifier: Apache-2.0
"""Is it learning? Figures of each generation that tell, warnings that name a cause and a setting, and a summary.

Fitness jumps from one generation to the next because the prompts change, so nothing is concluded from one of them:
windows are compared by the standard error of their means. The A/A control scores the unperturbed model twice on a
generation's prompts; what the two scores differ by is noise, and a population that spreads no wider cannot be ranked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from evoalign.checks import hacking, summary
from evoalign.checks.control import Control
from evoalign.checks.rules import History, Row, causes
from evoalign.config import Config
from evoalign.types import Generation, Layout

SAMPLE = 65536
"""Numbers of the mean that are followed: a cosine of that many is known to 1/256."""
LOOKS = 100
"""How often at most a resume looks for what was reported: each look goes over all generations before it."""


class Diagnosis:
    """Follows one run. `start` is the engine's `sample` before the first update; so is every later sample of `SAMPLE`.

    `max_score` is the highest that a completion can earn, `gold` the gold answer to a row of the training split, and
    `known` the scripts of its prompts; `deterministic` is what the engine says of itself; `given` is what
    the run was handed as a Python object. Memory: two samples and one small row a generation.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        start: torch.Tensor,
        max_score: float = math.inf,
        *,
        gold: Callable[[int], str | None] = lambda row: None,
        known: frozenset[str] = frozenset(),
        deterministic: bool = False,
        given: str | None = None,
    ) -> None:
        self.config, self.max_score = config, max_score
        self._gold, self._known = cache(gold), known
        self._start = start.double()
        self._last: torch.Tensor | None = self._start
        self._step: torch.Tensor | None = None
        self._scale = math.sqrt(layout.parameters / max(1, len(start)))
        self._noise_norm = config.es.width * math.sqrt(sum(math.prod(t.shape) * t.scale**2 for t in layout.tensors))
        self.history = History(config, deterministic=deterministic, given=given)
        self._told: set[str] = set()

    def update(self, generation: Generation, sample: torch.Tensor, control: Control | None = None) -> Row:
        """The `diagnosis` of a generation's row. `sample` is taken after its update, `control` on its prompts.

        `spread` is the members' standard deviation and `noise_floor` the root mean square of all controls' so far;
        `reward_noise` what of that the reward alone makes, of one completion;
        `mean_error` the standard error of the population's mean fitness; `cosine` that of this update and the one
        before; `distance` the L2 from the start, and `distance_sigmas` the same over the expected norm of one
        member's noise; `population_minus_mean` what the population's mean fitness is above the unperturbed model's on
        the same prompts, and `population_minus_mean_error` its standard error over members, of pairs where they are
        in pairs, and over the control's draws; `kept_share` the share of the unperturbed model's fitness, above the
        lowest score of the generation, that the population has: above 1 where members are better than it. None is
        what is not known.
        """
        cosine, distance = self._moved(sample)
        diagnosis: Row = {
            "spread": float(np.std(generation.fitness_M)),
            "mean_error": self._mean_error(generation),
            "control": None if control is None else [control.first, control.second, control.floor],
            "reward_noise": None if control is None else control.of_reward,
            "cosine": cosine,
            "distance": distance,
            "distance_sigmas": distance / self._noise_norm,
            "changed_share": changed_share(generation),
            "solved_share": float(np.mean(np.asarray(generation.scores_MP) >= self.max_score)),
            **_against_mean(generation, control, paired=self.config.es.antithetic),
            **self._text_shares(generation),
        }
        mean = float(np.mean(generation.fitness_M))
        self.history.rows.append(
            {"generation": generation.index, "mean": mean, "zero_variance": generation.zero_variance, **diagnosis}
        )
        floor = self.history.noise_floor()
        diagnosis["noise_floor"] = floor
        diagnosis["signal_to_noise"] = diagnosis["spread"] / floor if floor else None
        return diagnosis

    def restore(self, rows: Sequence[Mapping[str, Any]], sample: torch.Tensor | None = None) -> None:
        """Go on after a resume, from the rows of metrics.jsonl and the engine's sample now.

        Old warnings stay told, unless what one was of lasted less than a hundredth of the run.
        """
        every = 1 + len(rows) // LOOKS
        for count, row in enumerate(rows, 1):
            self.history.rows.append(summary.recorded(row, self.config))
            if count % every == 0 or count == len(rows):
                self._told |= set(self._causes())
        self._step = None
        self._last = None if sample is None else sample.double()

    def warnings(self) -> list[str]:
        """What is newly wrong: one sentence each with the figure, the likely cause and the setting to change."""
        new = {name: line for name, line in self._causes().items() if name not in self._told}
        self._told |= set(new)
        return list(new.values())

    def summary(self, alarm: str | None = None, *, beats_noise: bool = False) -> list[str]:
        """The run in plain words: is it learning and how sure is that, how it moved, and what is still wrong.

        `alarm`: what the completions of the test split say of it, which then comes first. `beats_noise`: it is above
        all its placebos, which have told what noise alone earns.
        """
        return summary.told(self.history, alarm, beats_noise=beats_noise)

    def _causes(self) -> dict[str, str]:
        """Everything that looks wrong now, by name."""
        return causes(self.history)

    def _moved(self, sample: torch.Tensor) -> tuple[float | None, float]:
        """Cosine of the last two updates and the distance from the start, scaled up from the sample."""
        now = sample.double()
        step = None if self._last is None else now - self._last
        cosine = None
        if step is not None and self._step is not None and bool(step.any()) and bool(self._step.any()):
            cosine = float(torch.dot(step, self._step) / (step.norm() * self._step.norm()))
        self._last, self._step = now, step
        return cosine, float((now - self._start).norm()) * self._scale

    def _mean_error(self, generation: Generation) -> float:
        """Standard error of the population's mean fitness: over members, and over prompts where these change."""
        scores_MP = np.asarray(generation.scores_MP, dtype=np.float64)
        members, prompts = scores_MP.shape
        error = float(np.std(generation.fitness_M, ddof=1)) / math.sqrt(members)
        if self.config.task.batch_size is None or prompts < 2:
            return error
        return math.hypot(error, float(scores_MP.mean(axis=0).std(ddof=1)) / math.sqrt(prompts))

    def _text_shares(self, generation: Generation) -> Row:
        rollouts = generation.rollouts
        if not rollouts:
            return {f"{name}_share": None for name in hacking.SHARES}
        rows = [generation.rows[r.request] for r in rollouts]
        texts, reasons = [r.text for r in rollouts], [r.finish_reason for r in rollouts]
        shares = hacking.shares(texts, reasons, rows, list(map(self._gold, rows)), self._known)
        return {f"{name}_share": share for name, share in shares.items()}


def changed_share(generation: Generation) -> float | None:
    """Share of completions that are not the commonest one of their prompt: whether members differ at all."""
    texts: dict[int, Counter[tuple[int, ...]]] = {}
    for rollout in generation.rollouts:
        texts.setdefault(rollout.request, Counter())[rollout.token_ids] += 1
    if not texts:
        return None
    return 1 - sum(max(counts.values()) for counts in texts.values()) / len(generation.rollouts)


def _against_mean(generation: Generation, control: Control | None, *, paired: bool) -> Row:
    """The population's mean fitness against the unperturbed model's, on the same prompts."""
    if control is None:
        return dict.fromkeys(("population_minus_mean", "population_minus_mean_error", "kept_share"))
    fitness_M = np.asarray(generation.fitness_M, dtype=np.float64)
    mean, own = float(fitness_M.mean()), (control.first + control.second) / 2
    lowest = min(min(row) for row in generation.scores_MP)
    alone = (fitness_M[0::2] + fitness_M[1::2]) / 2 if paired else fitness_M
    error = float(alone.std(ddof=1)) / math.sqrt(len(alone)) if len(alone) > 1 else None
    return {
        "population_minus_mean": mean - own,
        "population_minus_mean_error": None if error is None else math.hypot(error, control.floor / math.sqrt(2)),
        "kept_share": float((mean - lowest) / (own - lowest)) if own > lowest else None,
    }
