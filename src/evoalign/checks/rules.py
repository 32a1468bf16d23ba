# SPDX-License-Identifier: Apache-2.0
"""Rules that find what goes wrong in a run. Each returns one sentence with the figure, the cause and the setting.

A rule has its thresholds as fields. What one rule explains is not reported as well: a population that collapsed has no
signal either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evoalign.checks.axes import Axes, wrong_axis
from evoalign.checks.hacking import WORDS
from evoalign.config import Config
from evoalign.optimizer import reach
from evoalign.rundir.method import placebo_command

Row = dict[str, Any]
WINDOW = 10
"""Generations that a rule looks back on. Runs of fewer than twice as many compare their first and last third."""
SURE = 2.0
"""Standard errors from which a rise counts."""


class History:
    """Figures of a run so far: `rows`, one per generation, by name; None is not known.

    `deterministic`: the engine reports that it repeats itself. `given`: argument passed to `train` as a Python object.
    """

    large_eta = 2.0

    def __init__(self, config: Config, *, deterministic: bool = False, given: str | None = None) -> None:
        self.config, self.deterministic = config, deterministic or bool(config.deterministic)
        self.given = given
        self.rows: list[Row] = []

    def ends(self) -> tuple[list[Row], list[Row]]:
        """Return the first and the last rows to compare, without overlap; both empty if there are too few."""
        count = min(WINDOW, len(self.rows) // (2 if len(self.rows) >= 2 * WINDOW else 3))
        return (self.rows[:count], self.rows[-count:]) if count else ([], [])

    def trend(self) -> tuple[float, float, float, float] | None:
        """Return the mean fitness of the first and the last third, the change and its standard error."""
        third = len(self.rows) // 3
        if third < 2:
            return None
        first, last = self.rows[:third], self.rows[-third:]
        before, after = float(np.mean(values(first, "mean"))), float(np.mean(values(last, "mean")))
        return before, after, after - before, math.hypot(error_of(first), error_of(last))

    def axes(self, window: int = WINDOW) -> Axes | None:
        """Return the axis report of the last generations; None if not known."""
        return Axes.of([row.get("axes") for row in self.rows[-window:]], self.config.es.population_size)

    def rises(self) -> bool:
        """Whether the fitness rises significantly."""
        trend = self.trend()
        return trend is not None and trend[2] > SURE * trend[3] and trend[2] > 0

    def width(self, factor: float) -> str:
        """Return the settings that multiply the noise width by `factor` and keep eta."""
        es = self.config.es
        if es.sigma is None or es.optimizer.adapts_noise:
            return f"{'es.noise_multiplier' if es.sigma is None else 'es.sigma'} {factor * es.width:.2g}"
        return f"es.sigma {factor * es.sigma:.2g} with es.learning_rate {factor * es.learning_rate:.2g}"

    def eta(self) -> float | None:
        """Return the eta of plain SGD, z-scores and single members with steps of the same size; None is not known."""
        moved = reach(self.config.es)
        return None if moved is None else self.config.es.eta * moved

    def is_fast(self) -> bool:
        """Return whether eta is large."""
        return (self.eta() or 0.0) > self.large_eta

    def slower(self) -> str:
        """Return the setting for a smaller step: half of it, or eta 0.5 if eta is large."""
        if self.config.es.optimizer.adapts_noise:
            return self.width(0.5)
        es, eta = self.config.es, self.eta()
        share = 0.5 / eta if eta is not None and self.is_fast() else 0.5
        return f"es.learning_rate {share * es.learning_rate:.2g} (eta {share * es.eta:.2g} instead of {es.eta:.2g})"

    def noise_floor(self) -> float | None:
        """Return the root mean square of the noise floors of all controls."""
        floors = [row["control"][2] for row in self.rows if row.get("control")]
        return math.sqrt(float(np.mean(np.square(floors)))) if floors else None

    def reward_noise(self) -> float:
        """Return the standard deviation of one completion's score, from controls with the same text twice."""
        known = values(self.rows, "reward_noise")
        return math.sqrt(float(np.mean(np.square(known)))) if known else 0.0


@dataclass(frozen=True)
class Rule:
    """Base class of all rules; `explains` names the rules that are not reported with this one."""

    name: str
    explains: tuple[str, ...] = ()

    def sentence(self, run: History) -> str | None:
        """Return the warning, or None if nothing is wrong."""
        raise NotImplementedError


@dataclass(frozen=True)
class Solved(Rule):
    """Warn that there is nothing to learn."""

    share: float = 0.95
    """Smallest share of completions with the highest reward."""
    generations: int = 3
    """Generations to wait for if no update moved the model; else `WINDOW`."""

    def sentence(self, run: History) -> str | None:
        solved = mean_of(run.rows[:WINDOW], "solved_share")
        still = all(row["zero_variance"] for row in run.rows)
        least = min(self.generations, run.config.es.num_generations) if still else WINDOW
        if solved is None or solved < self.share or len(run.rows) < least:
            return None
        return (
            f"{solved:.0%} of the completions earned the highest reward from the start, so there is nothing to learn; "
            "use harder data (task.train_data) or a finer reward"
        )


@dataclass(frozen=True)
class SigmaTooLarge(Rule):
    """Warn that the noise breaks the model."""

    kept: float = 0.5
    """Share of the fitness above the lowest score that a population has to keep."""
    controls: int = 3
    """Latest controls to average over: each has the few prompts of one generation."""

    def sentence(self, run: History) -> str | None:
        rows = [row for row in run.rows if row.get("population_minus_mean") is not None]
        shares: list[float] = []
        for row in rows[-self.controls :]:
            share, within = row.get("kept_share"), -row["population_minus_mean"] <= row.get("spread", 0.0)
            shares.append(1.0 if share is None or within else share)  # a drop within the spread of members is none
        share = float(np.mean(shares)) if shares else 1.0
        if share >= self.kept or run.rises():
            return None
        return (
            f"members keep {max(0.0, share):.0%} of the unperturbed model's fitness above the lowest score: the noise "
            f"breaks the model; try {run.width(0.25)}"
        )


@dataclass(frozen=True)
class NoiseEarns(Rule):
    """Warn at the first control that random members score better than the unperturbed model.

    Pairs cancel what is linear in the noise, and so does the mean over many members.
    """

    errors: float = 5.0
    """Standard errors over members: with a dozen members, three are often chance."""

    def sentence(self, run: History) -> str | None:
        first = next((row for row in run.rows if row.get("population_minus_mean") is not None), None)
        error: float | None = None if first is None else first.get("population_minus_mean_error")
        gain: float = 0.0 if first is None else first["population_minus_mean"]
        if error is None or error == 0 or gain <= self.errors * error:
            return None
        command = placebo_command(Path(run.config.output_dir), run.config, run.given)
        return (
            f"random members score better than the unperturbed model, by {gain:.3g} (standard error {error:.2g}): "
            "noise alone earns some of this reward, often by breaking the text; read the completions; when the run is "
            f"done, measure the share of the gain: {command}. If it is large, try {run.width(0.25)}, or a reward that "
            "broken text cannot earn (task.rewards)"
        )


@dataclass(frozen=True)
class LearningRateTooLarge(Rule):
    """Warn that updates undo each other, or that the fitness fell while the model moved on."""

    opposed: float = -0.1
    """Mean cosine of successive updates below which they undo each other; independent ones have 0."""
    stretch: int = 5
    """Generations of the best stretch that a fall is measured from, next to the first generation."""
    first_errors: float = 3.0
    """Standard errors of a fall from the first generation."""
    best_errors: float = 5.0
    """Standard errors of a fall from the best of many stretches, where three are often chance."""
    few_members: int = 8
    """With fewer members one generation does not show its own error: falls are measured from `stretch`."""
    material: float = 0.25
    """Smallest fall, as a share of the range of the fitness: finished runs still fluctuate."""

    def sentence(self, run: History) -> str | None:
        cosines = values(run.rows[-WINDOW:], "cosine")
        if len(cosines) == WINDOW:
            mean, error = float(np.mean(cosines)), float(np.std(cosines, ddof=1)) / math.sqrt(WINDOW)
            if mean < self.opposed and mean < -SURE * error:
                return (
                    f"successive updates undo each other (cosine {mean:.2f} over {WINDOW} generations): the steps "
                    f"overshoot; try {run.slower()}"
                )
        peak = self._fallen_from(run)
        if peak is None:
            return None
        return (
            f"fitness fell from {peak:.4g} to {mean_of(run.rows[-WINDOW:], 'mean'):.4g} while the model moved further "
            f"from its start: the steps are too large for {run.config.es.population_size} members; try {run.slower()}, "
            "or a larger es.population_size"
        )

    def _fallen_from(self, run: History) -> float | None:
        """Return the fitness that the last window is significantly below, if the model is further away now."""
        means, last = np.array(values(run.rows, "mean")), run.rows[-WINDOW:]
        earlier = len(means) - WINDOW
        if earlier < 1:
            return None
        alone = run.config.es.population_size >= self.few_members
        stretches: list[tuple[list[Row], float]] = []
        if alone or earlier >= self.stretch:
            stretches.append((run.rows[: 1 if alone else self.stretch], self.first_errors))
        if earlier >= self.stretch:
            k = int(np.convolve(means[:earlier], np.ones(self.stretch), "valid").argmax())
            stretches.append((run.rows[k : k + self.stretch], self.best_errors))
        least = self.material * float(means.max() - means.min())
        for rows, errors in stretches:
            peak = float(np.mean(values(rows, "mean")))
            fall, error = peak - float(means[-WINDOW:].mean()), math.hypot(error_of(rows), error_of(last))
            was, now = rows[-1].get("distance"), last[-1].get("distance")
            if fall > max(least, errors * error) and (was is None or now is None or now > was):
                return peak
        return None


@dataclass(frozen=True)
class NoSignal(Rule):
    """Warn that most generations move nothing: the noise is too narrow, or the reward is the same for all members."""

    useless: float = 0.5
    """Smallest share of generations without update. Published runs that learned had 0.21 to 0.43."""
    few_changes: float = 0.05
    """Share of completions that differ between members, below which a population ranks one or two prompts. A sigma of
    1e-3 on a Qwen3-1.7B changes 99.6 %."""
    solved: float = 0.95
    """Share of completions with the highest reward from which the run is done."""
    generations: int = 3
    """Generations to wait for if all members earned the same, fewer in a shorter run: a reward may be rare."""
    jitter: float = 0.25
    """Share of the range of the fitness by which a run that is done may be below its best generation."""

    def sentence(self, run: History) -> str | None:
        window = run.rows[-WINDOW:]
        if len(run.rows) <= WINDOW:  # one more, so that a fall is seen first
            return self._constant(run)
        useless = float(np.mean([row["zero_variance"] for row in window]))
        changed, solved = mean_of(window, "changed_share"), mean_of(window, "solved_share")
        if solved is not None and solved >= self.solved:
            return None
        if changed is not None and changed < self.few_changes and not run.rises():
            return (
                f"only {changed:.1%} of the completions differ between members: the noise is too narrow; try "
                f"{run.width(10 if changed < self.few_changes / 10 else 3)}, or measure it with evoalign probe"
            )
        means = values(run.rows, "mean")
        best = max(means) - self.jitter * (max(means) - min(means))
        if useless < self.useless or (run.rises() and float(np.mean(means[-WINDOW:])) >= best):
            return None
        if changed is None:
            return f"{useless:.0%} of the last {WINDOW} generations moved nothing; try {run.width(3)}"
        return (
            f"{useless:.0%} of the last {WINDOW} generations moved nothing, though {changed:.0%} of the completions "
            "differ between members: the reward is the same for all; give partial credit (task.rewards), "
            f"{'a larger task.batch_size' if run.config.task.batch_size else 'more training examples'} or easier ones"
        )

    def _constant(self, run: History) -> str | None:
        """Return the warning for a young or short run in which all members earned the same."""
        changed, solved = mean_of(run.rows, "changed_share"), mean_of(run.rows, "solved_share")
        least = min(self.generations, run.config.es.num_generations)
        if len(run.rows) < least or not all(row["zero_variance"] for row in run.rows):
            return None
        if changed is None or changed < self.few_changes or (solved is not None and solved >= self.solved):
            return None
        means = sorted(values(run.rows, "mean"))
        earned = f"{means[0]:.4g}" if means[0] == means[-1] else f"{means[0]:.4g} to {means[-1]:.4g} by generation"
        return (
            f"all members have earned the same so far ({earned}), though {changed:.0%} of the completions differ "
            "between members: ES cannot learn from a reward that does not distinguish them; check the reward on other "
            "texts, give partial credit (task.rewards), or use easier examples"
        )


@dataclass(frozen=True)
class Noise(Rule):
    """Warn that members spread no wider than repeated scores of one model, or rank otherwise on other prompts."""

    ratio: float = 1.2
    """Smallest spread over the noise floor: at 1.2, 70 % of the variance between members is noise."""
    least: float = 0.05
    """Smallest reliability. The warning needs a mean over `long` generations two standard errors below it."""
    long: int = 30

    def sentence(self, run: History) -> str | None:
        floor, window = run.noise_floor(), run.rows[-WINDOW:]
        if len(window) < WINDOW or run.rises():
            return None
        spread = float(np.median(values(window, "spread")))
        if not floor or spread >= self.ratio * floor:
            return self._unreliable(run)
        seen = f"members spread by {spread:.2g}, and the unperturbed model scored twice differs by {floor:.2g}"
        batch = run.config.task.batch_size
        more = f"{run.width(3)}, or {f'task.batch_size {4 * batch}' if batch else 'more training examples'}"
        if reward := run.reward_noise():
            return (
                f"{seen}: the reward gives the same text different scores (a standard deviation of {reward:.2g} per "
                "completion), so members are ranked by chance; make the reward repeatable (no random draws, a "
                f"cached judgement per text), average several calls of it, or try {more}"
            )
        if run.config.sampling.temperature > 0:
            return f"{seen}: they are ranked by chance; try {more}"
        if run.deterministic:
            return f"{seen}, though decoding is greedy and the engine reports that it is deterministic; try {more}"
        return f"{seen}, though decoding is greedy: the engine does not repeat itself; set deterministic true"

    def _unreliable(self, run: History) -> str | None:
        known = np.array(values(run.rows[-self.long :], "reliability"))
        if len(known) < self.long or known.mean() + SURE * known.std(ddof=1) / math.sqrt(self.long) >= self.least:
            return None
        batch = run.config.task.batch_size
        return (
            f"the members' ranks are not shown to hold on other prompts (reliability {known.mean():.2f} over "
            f"{self.long} generations, 0 is chance); try {run.width(3)}, "
            f"{f'task.batch_size {4 * batch}' if batch else 'more training examples'} or partial credit (task.rewards)"
        )


@dataclass(frozen=True)
class Hacked(Rule):
    """Warn that a sign of hacking rises together with the reward."""

    rise: float = 0.25
    """Smallest rise of the share of completions with a sign."""
    near_highest: float = 0.8
    """Report the first sign that rises by this share of the highest rise: loops often are a template too."""

    def sentence(self, run: History) -> str | None:
        if not run.rises():
            return None
        first, last = run.ends()
        shares = {
            name: [mean_of(rows, f"{name}_share") for rows in (first, last)] for name in WORDS if name != "truncated"
        }
        rises = {name: now - was for name, (was, now) in shares.items() if was is not None and now is not None}
        highest = max(rises.values(), default=0.0)
        if highest <= self.rise:
            return None
        name = next(name for name, rise in rises.items() if rise >= self.near_highest * highest)
        was, now = shares[name]
        adapts = run.config.es.optimizer.adapts_noise
        nearer = run.slower() if run.is_fast() or adapts else "es.decay 0.01"
        return (
            f"the reward rises together with a sign of hacking, {WORDS[name]} ({was:.0%} to {now:.0%} of the "
            "completions): it is likely hacked; read the completions, fix the reward (task.rewards), or keep the model "
            f"nearer to its start with {nearer}"
        )


@dataclass(frozen=True)
class WrongAxis(Rule):
    """Warn that members are selected by other columns of the reward than the one that says what is right."""

    def sentence(self, run: History) -> str | None:
        pooled = run.axes(2 * WINDOW)
        enough = len(run.rows) >= WINDOW and run.config.task.fitness is None
        return wrong_axis(pooled, run.config) if enough and pooled is not None else None


@dataclass(frozen=True)
class CutOff(Rule):
    """Warn that completions end at `sampling.max_tokens`."""

    share: float = 0.5
    """Smallest share of completions that are cut off."""

    def sentence(self, run: History) -> str | None:
        window = run.rows[-WINDOW:]
        share, before = mean_of(window[len(window) // 2 :], "truncated_share"), mean_of(window, "truncated_share")
        if share is None or before is None or (share < before - 0.05 and run.rises()):  # they are becoming shorter
            return None
        if len(run.rows) <= WINDOW and (mean_of(run.rows[:1], "truncated_share") or 0) < self.share:
            return None  # the start was not cut off: training may have broken the model, which other rules see first
        return cut_off(share, run.config.sampling.max_tokens)


def cut_off(
    share: float, tokens: int, whose: str = "the completions", setting: str = "sampling.max_tokens"
) -> str | None:
    """Return a warning if most completions end at `tokens`, the value of a setting; else None."""
    if share < CutOff.share:
        return None
    return (
        f"{share:.0%} of {whose} are cut off at {tokens} tokens, so their ends are never scored; try "
        f"{setting} {max(128, 2 * tokens)}"  # not 8, then 16, then 32
    )


RULES = (
    Solved("solved", ("no signal", "noise")),
    SigmaTooLarge("sigma too large", ("no signal", "noise", "wrong axis", "cut off")),
    LearningRateTooLarge("learning rate too large", ("sigma too large", "no signal", "noise", "wrong axis", "cut off")),
    NoSignal("no signal"),
    Noise("noise"),
    Hacked("hacked"),
    NoiseEarns("noise earns"),
    WrongAxis("wrong axis"),
    CutOff("cut off"),
)


def causes(run: History) -> dict[str, str]:
    """Return all warnings by rule, without those that another one explains."""
    found = {rule: line for rule in RULES if (line := rule.sentence(run)) is not None}
    explained = {name for rule in found for name in rule.explains}
    return {rule.name: line for rule, line in found.items() if rule.name not in explained}


def values(rows: Sequence[Row], name: str) -> list[float]:
    """Return the known values of a figure."""
    return [row[name] for row in rows if row.get(name) is not None]


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean of the known values of a figure."""
    known = values(rows, name)
    return float(np.mean(known)) if known else None


def error_of(rows: Sequence[Row]) -> float:
    """Return the standard error of the mean fitness: from the rows' own errors, or their scatter if that is larger."""
    means, errors = values(rows, "mean"), values(rows, "mean_error")
    own = math.sqrt(sum(e * e for e in errors)) / max(1, len(errors))
    scatter = float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return max(own, scatter)
