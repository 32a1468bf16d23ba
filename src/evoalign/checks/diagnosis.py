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

from evoalign.checks import hacking
from evoalign.checks.control import Control
from evoalign.checks.rules import NOISE_EARNS, OPPOSED, SURE, History, Row, causes, mean_of, values
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
            known = {"spread": row["std"], "mean_error": row["std"] / math.sqrt(self.config.es.population_size - 1)}
            kept = {name: row[name] for name in ("generation", "mean", "zero_variance")}
            shares = {name: row.get(name) for name in ("empty_share", "truncated_share")}
            self.history.rows.append({**known, **shares, **kept, **(row.get("diagnosis") or {})})
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
        if not self.history.rows:
            return ["no generation yet"]
        verdict = self._verdict() if alarm is None else f"{alarm}, by what it says; {self._verdict()}"
        lines = [verdict, self._signal(), self._movement(), self._completions()]
        wrong = {name: line for name, line in self._causes().items() if not (beats_noise and name == NOISE_EARNS)}
        return [line for line in lines if line] + [f"warning: {line}" for line in wrong.values()]

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

    def _verdict(self) -> str:
        trend = self.history.trend()
        if trend is None:
            return f"is it learning? {len(self.history.rows)} generations are too few to tell"
        before, after, change, error = trend
        figures = (
            f"population fitness went from {before:.4g} to {after:.4g} ({change:+.3g}, standard error {error:.2g})"
            f" between the first and the last third of {len(self.history.rows)} generations"
        )
        if abs(change) <= SURE * error or change == 0:
            low = " (eta is below 0.05: raise es.learning_rate)" if self.history.eta() < 0.05 else ""
            return f"not shown to learn: {figures}; that can be chance{low}"
        return f"{'learning' if change > 0 else 'getting worse'}: {figures}"

    def _signal(self) -> str:
        useless = float(np.mean([row["zero_variance"] for row in self.history.rows]))
        spread, floor = float(np.median(values(self.history.rows, "spread"))), self.history.noise_floor()
        if floor is None:
            against = "no control was run, so the noise floor is not known (checks.control_every)"
        elif floor == 0:
            against = "the unperturbed model scored twice came out the same"
        else:
            whose = ", of a reward that gives the same text different scores" if self.history.reward_noise() else ""
            against = f"{spread / floor:.1f} times the noise floor of {floor:.2g}{whose}"
        return f"signal: members spread by {spread:.3g}, {against}; {useless:.0%} of the generations moved nothing"

    def _movement(self) -> str:
        distance, cosine = values(self.history.rows[-1:], "distance_sigmas"), mean_of(self.history.rows, "cosine")
        if not distance:
            return ""
        how = "" if cosine is None else f"; successive updates have cosine {cosine:+.3f} on average{_meaning(cosine)}"
        return f"movement of the numbers that evolve: {distance[0]:.2g} times one member's noise from the start{how}"

    def _completions(self) -> str:
        said: list[str] = []
        first, last = self.history.ends()
        for name in hacking.SHARES:
            before, now = (mean_of(part, f"{name}_share") for part in (first, last))
            told = None if before is None or now is None else f"{before:.0%} to {now:.0%}"
            if told is not None and told != "0% to 0%":
                said.append(f"{name.replace('_', ' ')} {told}")
        what = ", ".join(said) or "none of the signs"
        known = any(mean_of(first, f"{name}_share") is not None for name in hacking.SHARES)
        return f"completions, first to last {len(first)} generations: {what}" if known else ""


def _meaning(cosine: float) -> str:
    """Of the mean cosine of successive updates."""
    if abs(cosine) < -OPPOSED:
        return " (near 0, which is usual: each is made of noise of its own)"
    return " (they go on the same way)" if cosine > 0 else " (they undo each other)"


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
