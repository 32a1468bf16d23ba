# SPDX-License-Identifier: Apache-2.0
"""The rules by which a run is found to go wrong: each a sentence with the figure, the cause and the setting.

A rule reads what the run has shown so far and says its sentence, or nothing. What one explains is not said beside it:
a population that collapsed has no signal either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evoalign.config import Config
from evoalign.optimizer import reach
from evoalign.rundir.method import placebo_command

Row = dict[str, Any]
WINDOW = 10
"""Generations that a warning looks back on: one unlucky batch is a tenth of it. In a run of fewer than twice as many,
what is compared with its beginning is its last third: windows that overlap show no change."""
PEAK = 5
"""Generations of the best stretch that a fall is measured from, beside the first one: a run can collapse within two."""
EARLY = 3
"""Generations in which no two members earned apart, though their completions differ, that are warned about: of a reward
that is rare, the next ones may. In a run of fewer, all of them."""
USELESS = 0.5
"""Share of generations that move nothing which is warned about. Published runs that learnt had 0.21 to 0.43."""
FEW_CHANGES = 0.05
"""Share of completions that differ between members. Below it a population mostly ranks one or two prompts; 1e-3 on a
Qwen3-1.7B changes 99.6 %."""
SIGNAL_TO_NOISE = 1.2
"""Spread over noise floor: at 1.2, 70 % of the variance that members are ranked by is noise."""
NOISE_SURE = 5.0
"""Standard errors, over members, by which these are better than the model that they are drawn around: with a dozen
members a bound of three would often be luck."""
LOST = 0.5
"""Share of its fitness, above the lowest score seen, that the population has lost when it counts as broken."""
CONTROLS = 3
"""Controls whose mean says what the population has lost: one has a generation's few prompts."""
OPPOSED = -0.1
"""Mean cosine of successive updates below which they undo each other; independent ones have 0."""
SURE = 2.0
"""Standard errors of a rise."""
VERY_SURE = 5.0
"""Standard errors of a fall from the best of many stretches, looked for again each generation: three would often be
luck."""
FIRST_SURE = 3.0
"""Standard errors of a fall from the first generation: one comparison, looked at again each generation."""
FEW_MEMBERS = 8
"""With fewer than so many, the spread of one generation is no measure of its error: a fall is measured from `PEAK`."""
MATERIAL = 0.25
"""A fall below this share of all that fitness has ranged over is none: a run that is done still jitters."""
RISEN = 0.25
"""Rise of a share of completions that, with the reward, looks like hacking."""
MOSTLY = 0.8
"""Of several shares that rise, the first of `HACKS` is named that rises so much of the highest: a loop is often a
template too."""
CUT_OFF = 0.5
"""Share of completions that end for their length."""
SOLVED = 0.95
"""Share of completions with the highest reward at which nothing is left to learn."""
USUAL_ETA = 0.5
LARGE_ETA = 2.0
NOISE_EARNS = "noise earns"
HACKS = {
    "empty": "empty",
    "repeated": "loops",
    "template": "one template whatever the prompt",
    "role_marker": "turns that the model writes to itself",
    "special_token": "tokens that steer, written out as text",
    "gibberish": "letters and figures without sense",
    "phrases": "the same phrases again and again",
    "other_script": "letters of a script that nobody asked for",
}


class History:
    """What a run has shown so far: `rows`, one a generation, of its figures by name; None is what is not known.

    `deterministic`: the engine says that it repeats itself. `given`: what the run was handed as a Python object.
    """

    def __init__(self, config: Config, *, deterministic: bool = False, given: str | None = None) -> None:
        self.config, self.deterministic = config, deterministic or bool(config.deterministic)
        self.given = given
        self.rows: list[Row] = []

    def ends(self) -> tuple[list[Row], list[Row]]:
        """The first and the last rows to be compared: they never overlap, and are none where there are too few."""
        count = min(WINDOW, len(self.rows) // (2 if len(self.rows) >= 2 * WINDOW else 3))
        return (self.rows[:count], self.rows[-count:]) if count else ([], [])

    def trend(self) -> tuple[float, float, float, float] | None:
        """Mean fitness of the first and the last third, the change and its standard error."""
        third = len(self.rows) // 3
        if third < 2:
            return None
        first, last = self.rows[:third], self.rows[-third:]
        before, after = float(np.mean(values(first, "mean"))), float(np.mean(values(last, "mean")))
        return before, after, after - before, math.hypot(error_of(first), error_of(last))

    def rises(self) -> bool:
        """Whether fitness surely does."""
        trend = self.trend()
        return trend is not None and trend[2] > SURE * trend[3] and trend[2] > 0

    def fall(self) -> float | None:
        """Fitness that the last window is surely and materially below, with the model further away; None if nowhere."""
        means, last = np.array(values(self.rows, "mean")), self.rows[-WINDOW:]
        earlier = len(means) - WINDOW
        if earlier < 1:
            return None
        alone = self.config.es.population_size >= FEW_MEMBERS
        stretches = [(self.rows[: 1 if alone else PEAK], FIRST_SURE)] if alone or earlier >= PEAK else []
        if earlier >= PEAK:
            k = int(np.convolve(means[:earlier], np.ones(PEAK), "valid").argmax())
            stretches.append((self.rows[k : k + PEAK], VERY_SURE))
        least = MATERIAL * float(means.max() - means.min())
        for rows, sure in stretches:
            peak = float(np.mean(values(rows, "mean")))
            fall, error = peak - float(means[-WINDOW:].mean()), math.hypot(error_of(rows), error_of(last))
            was, now = rows[-1].get("distance"), last[-1].get("distance")
            if fall > max(least, sure * error) and (was is None or now is None or now > was):
                return peak
        return None

    def width(self, factor: float) -> str:
        """The config's width, changed, with the learning rate that keeps eta."""
        es = self.config.es
        if es.sigma is None:
            return f"es.noise_multiplier {factor * es.width:.2g}"
        return f"es.sigma {factor * es.sigma:.2g} with es.learning_rate {factor * es.learning_rate:.2g}"

    def eta(self) -> float:
        """The eta of plain SGD that goes as far."""
        return self.config.es.eta * reach(self.config.es)

    def slower(self) -> str:
        """A smaller step, as settings."""
        es, eta = self.config.es, self.eta()
        share = USUAL_ETA / eta if eta > LARGE_ETA else 0.5
        return f"es.learning_rate {share * es.learning_rate:.2g} (eta {share * es.eta:.2g} instead of {es.eta:.2g})"

    def noise_floor(self) -> float | None:
        """Root mean square of what the controls differ by."""
        floors = [row["control"][2] for row in self.rows if row.get("control")]
        return math.sqrt(float(np.mean(np.square(floors)))) if floors else None

    def reward_noise(self) -> float:
        """Standard deviation of the score of one completion, over controls in which its text was the same twice."""
        known = values(self.rows, "reward_noise")
        return math.sqrt(float(np.mean(np.square(known)))) if known else 0.0

    def at_best(self) -> bool:
        """The last generations are as good as any before: a run that has arrived, rather than one that is stuck."""
        means = values(self.rows, "mean")
        return self.rises() and float(np.mean(means[-WINDOW:])) >= max(means) - MATERIAL * (max(means) - min(means))


@dataclass(frozen=True, slots=True)
class Rule:
    """`sentence` is None where nothing is wrong; `explains` names the rules that then follow from this one."""

    name: str
    sentence: Callable[[History], str | None]
    explains: tuple[str, ...] = ()


def causes(run: History) -> dict[str, str]:
    """Everything that looks wrong now, by the name of the rule, without what follows from something else."""
    found = {rule: line for rule in RULES if (line := rule.sentence(run)) is not None}
    explained = {name for rule in found for name in rule.explains}
    return {rule.name: line for rule, line in found.items() if rule.name not in explained}


def _nothing_to_learn(run: History) -> str | None:
    solved = mean_of(run.rows[:WINDOW], "solved_share")
    still = all(row["zero_variance"] for row in run.rows)
    least = min(EARLY, run.config.es.num_generations) if still else WINDOW
    if solved is None or solved < SOLVED or len(run.rows) < least:
        return None
    return (
        f"{solved:.0%} of the completions earned the highest reward from the start: there is nothing to learn; "
        "use harder data (task.train_data) or a finer reward"
    )


def _sigma_too_large(run: History) -> str | None:
    kept = [_kept(row) for row in run.rows if row.get("population_minus_mean") is not None][-CONTROLS:]
    share = float(np.mean(kept)) if kept else 1.0
    if share >= LOST or run.rises():
        return None
    return (
        f"members keep {max(0.0, share):.0%} of the unperturbed model's fitness above the lowest score: the "
        f"noise breaks the model; try {run.width(0.25)}"
    )


def _kept(row: Row) -> float:
    """Share of its fitness that the population keeps: all of it where the drop is within the members' spread."""
    kept = row.get("kept_share")
    return 1.0 if kept is None or -row["population_minus_mean"] <= row.get("spread", 0.0) else kept


def _noise_earns(run: History) -> str | None:
    """At the first control: pairs cancel what is linear in the noise, and so does the mean over many members."""
    first = next((row for row in run.rows if row.get("population_minus_mean") is not None), None)
    error: float | None = None if first is None else first.get("population_minus_mean_error")
    gain: float = 0.0 if first is None else first["population_minus_mean"]
    if error is None or error == 0 or gain <= NOISE_SURE * error:
        return None
    command = placebo_command(Path(run.config.output_dir), run.config, run.given)
    return (
        f"members drawn at random are better than the model that they are drawn around, by {gain:.3g} (standard error "
        f"{error:.2g}): noise alone earns some of this reward, often by breaking the text; read the completions; "
        f"placebos say how much of the gain it is, when the run is done: {command}. Where it is much, try "
        f"{run.width(0.25)}, or a reward that broken text cannot earn (task.rewards)"
    )


def _learning_rate_too_large(run: History) -> str | None:
    cosines = values(run.rows[-WINDOW:], "cosine")
    if len(cosines) == WINDOW:
        mean, error = float(np.mean(cosines)), float(np.std(cosines, ddof=1)) / math.sqrt(WINDOW)
        if mean < OPPOSED and mean < -SURE * error:
            return (
                f"successive updates undo each other (cosine {mean:.2f} over {WINDOW} generations): the steps "
                f"overshoot; try {run.slower()}"
            )
    peak = run.fall()
    if peak is None:
        return None
    now = mean_of(run.rows[-WINDOW:], "mean")
    return (
        f"fitness fell from {peak:.4g} to {now:.4g} while the model moved on from the start: steps too large for "
        f"what {run.config.es.population_size} members can tell; try {run.slower()}, or a larger "
        "es.population_size"
    )


def _no_signal(run: History) -> str | None:
    window = run.rows[-WINDOW:]
    if len(run.rows) <= WINDOW:  # one more, to see first whether it fell
        return _constant(run)
    useless = float(np.mean([row["zero_variance"] for row in window]))
    changed, solved = mean_of(window, "changed_share"), mean_of(window, "solved_share")
    if solved is not None and solved >= SOLVED:  # it is done
        return None
    if changed is not None and changed < FEW_CHANGES and not run.rises():
        return (
            f"only {changed:.1%} of the completions differ between members: the noise is too narrow; try "
            f"{run.width(10 if changed < FEW_CHANGES / 10 else 3)}, or measure it with evoalign probe"
        )
    if useless < USELESS or run.at_best():
        return None
    if changed is None:
        return f"{useless:.0%} of the last {WINDOW} generations moved nothing; try {run.width(3)}"
    return (
        f"{useless:.0%} of the last {WINDOW} generations moved nothing, though {changed:.0%} of the completions "
        "differ between members: the reward gives all of them the same; give partial credit (task.rewards), "
        f"{'a larger task.batch_size' if run.config.task.batch_size else 'more training examples'} or easier ones"
    )


def _constant(run: History) -> str | None:
    """Of a run that is young, or short: nobody has earned more than another yet."""
    changed, solved = mean_of(run.rows, "changed_share"), mean_of(run.rows, "solved_share")
    if len(run.rows) < min(EARLY, run.config.es.num_generations) or not all(row["zero_variance"] for row in run.rows):
        return None
    if changed is None or changed < FEW_CHANGES or (solved is not None and solved >= SOLVED):
        return None
    means = sorted(values(run.rows, "mean"))
    earned = f"{means[0]:.4g}" if means[0] == means[-1] else f"{means[0]:.4g} to {means[-1]:.4g} by generation"
    return (
        f"all members have earned the same so far ({earned}), though {changed:.0%} of the completions differ between "
        "members: nothing can be learned of a reward that tells none apart; look at what it gives for other texts, "
        "give partial credit (task.rewards), or take easier examples"
    )


def _noise(run: History) -> str | None:
    floor, window = run.noise_floor(), run.rows[-WINDOW:]
    if not floor or len(window) < WINDOW or run.rises():
        return None
    spread = float(np.median(values(window, "spread")))
    if spread >= SIGNAL_TO_NOISE * floor:
        return None
    seen = f"members spread by {spread:.2g}, and the unperturbed model scored twice differs by {floor:.2g}"
    batch = run.config.task.batch_size
    more = f"{run.width(3)}, or {f'task.batch_size {4 * batch}' if batch else 'more training examples'}"
    if reward := run.reward_noise():
        return (
            f"{seen}: the reward gives the same text different scores (a standard deviation of {reward:.2g} a "
            "completion), so members are ranked by its chance; let it give one text one score (no random draws, a "
            f"judge's answer kept for each text), average several calls of it, or try {more}"
        )
    if run.config.sampling.temperature > 0:
        return f"{seen}: they are ranked by chance; try {more}"
    if run.deterministic:
        return f"{seen}, though decoding is greedy: the engine says it repeats itself and does not; try {more}"
    return f"{seen}, though decoding is greedy: the engine does not repeat itself; set deterministic true"


def _hacked(run: History) -> str | None:
    if not run.rises():
        return None
    first, last = run.ends()
    shares = {name: [mean_of(rows, f"{name}_share") for rows in (first, last)] for name in HACKS}
    rises = {name: now - was for name, (was, now) in shares.items() if was is not None and now is not None}
    highest = max(rises.values(), default=0.0)
    if highest <= RISEN:
        return None
    name = next(name for name, rise in rises.items() if rise >= MOSTLY * highest)
    was, now = shares[name]
    nearer = run.slower() if run.eta() > LARGE_ETA else "es.decay 0.01"
    return (
        f"the reward rises while completions become {HACKS[name]} ({was:.0%} to {now:.0%}): it is likely hacked; read "
        f"the completions, fix the reward (task.rewards), or hold the model nearer to its start with {nearer}"
    )


def _cut_off(run: History) -> str | None:
    window = run.rows[-WINDOW:]
    share, before = mean_of(window[len(window) // 2 :], "truncated_share"), mean_of(window, "truncated_share")
    if len(run.rows) <= WINDOW or share is None or before is None or share < CUT_OFF:
        return None
    if share < before - 0.05 and run.rises():  # it is learning to be shorter
        return None
    tokens = run.config.sampling.max_tokens
    return (
        f"{share:.0%} of the completions are cut off at {tokens} tokens, so their ends are never scored; try "
        f"sampling.max_tokens {2 * tokens}"
    )


RULES = (
    Rule("solved", _nothing_to_learn, ("no signal", "noise")),
    Rule("sigma too large", _sigma_too_large, ("no signal", "noise", "cut off")),
    Rule("learning rate too large", _learning_rate_too_large, ("sigma too large", "no signal", "noise", "cut off")),
    Rule("no signal", _no_signal),
    Rule("noise", _noise),
    Rule("hacked", _hacked),
    Rule(NOISE_EARNS, _noise_earns),
    Rule("cut off", _cut_off),
)


def values(rows: Sequence[Row], name: str) -> list[float]:
    """What is known of a figure."""
    return [row[name] for row in rows if row.get(name) is not None]


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    """Of what is known of a figure."""
    known = values(rows, name)
    return float(np.mean(known)) if known else None


def error_of(rows: Sequence[Row]) -> float:
    """Standard error of a window's mean fitness: by its generations' own, or their scatter where that is more."""
    means, errors = values(rows, "mean"), values(rows, "mean_error")
    own = math.sqrt(sum(e * e for e in errors)) / max(1, len(errors))
    scatter = float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return max(own, scatter)
