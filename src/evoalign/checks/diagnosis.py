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
from typing import Any

import numpy as np
import torch

from evoalign.checks import hacking
from evoalign.checks.control import Control
from evoalign.config import Config
from evoalign.optimizer import reach
from evoalign.types import Generation, Layout

SAMPLE = 65536
"""Numbers of the mean that are followed: a cosine of that many is known to 1/256."""
WINDOW = 10
"""Generations that a warning looks back on: one unlucky batch is a tenth of it."""
PEAK = 5
"""Generations of the best stretch that a fall is measured from, beside the first one: a run can collapse within two."""
USELESS = 0.5
"""Share of generations that move nothing which is warned about. Published runs that learnt had 0.21 to 0.43."""
FEW_CHANGES = 0.05
"""Share of completions that differ between members. Below it a population mostly ranks one or two prompts; 1e-3 on a
Qwen3-1.7B changes 99.6 %."""
SIGNAL_TO_NOISE = 1.2
"""Spread over noise floor: at 1.2, 70 % of the variance that members are ranked by is noise."""
LOST = 0.5
"""Share of its fitness, above the lowest score seen, that the population has lost when it counts as broken."""
LOOKS = 100
"""How often at most a resume looks for what was told: each look goes over all generations before it."""
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
CUT_OFF = 0.5
"""Share of completions that end for their length."""
SOLVED = 0.95
"""Share of completions with the highest reward at which nothing is left to learn."""
USUAL_ETA = 0.5
LARGE_ETA = 2.0
Row = dict[str, Any]
SHARES = ("empty", "truncated", "repeated", "template", "role_marker")
HACKS = {
    "empty": "empty",
    "repeated": "loops",
    "template": "one template whatever the prompt",
    "role_marker": "turns that the model writes to itself",
}


class Diagnosis:
    """Follows one run. `start` is the engine's `sample` before the first update; so is every later sample of `SAMPLE`.

    `max_reward` is the task's. Memory: two samples and one small row a generation.
    """

    def __init__(self, config: Config, layout: Layout, start: torch.Tensor, max_reward: float = math.inf) -> None:
        self.config, self.max_reward = config, max_reward
        self._start = start.double()
        self._last: torch.Tensor | None = self._start
        self._step: torch.Tensor | None = None
        self._scale = math.sqrt(layout.parameters / max(1, len(start)))
        self._noise_norm = config.es.width * math.sqrt(sum(math.prod(t.shape) * t.scale**2 for t in layout.tensors))
        self._rows: list[Row] = []
        self._told: set[str] = set()

    def update(self, generation: Generation, sample: torch.Tensor, control: Control | None = None) -> Row:
        """The `diagnosis` of a generation's row. `sample` is taken after its update, `control` on its prompts.

        `spread` is the members' standard deviation and `noise_floor` the root mean square of all controls' so far;
        `mean_error` the standard error of the population's mean fitness; `cosine` that of this update and the one
        before; `distance` the L2 from the start, and `distance_sigmas` the same over the expected norm of one
        member's noise; `kept_share` the share of the unperturbed model's fitness, above the lowest score of the
        generation, that the population has. None is what is not known.
        """
        cosine, distance = self._moved(sample)
        diagnosis: Row = {
            "spread": float(np.std(generation.fitness_M)),
            "mean_error": self._mean_error(generation),
            "control": None if control is None else list(control),
            "cosine": cosine,
            "distance": distance,
            "distance_sigmas": distance / self._noise_norm,
            "changed_share": changed_share(generation),
            "solved_share": float(np.mean(np.asarray(generation.scores_MP) >= self.max_reward)),
            **_against_mean(generation, control),
            **_text_shares(generation),
        }
        mean = float(np.mean(generation.fitness_M))
        self._rows.append(
            {"generation": generation.index, "mean": mean, "zero_variance": generation.zero_variance, **diagnosis}
        )
        floor = self._noise_floor()
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
            self._rows.append({**known, **shares, **kept, **(row.get("diagnosis") or {})})
            if count % every == 0 or count == len(rows):
                self._told |= set(self._causes())
        self._step = None
        self._last = None if sample is None else sample.double()

    def warnings(self) -> list[str]:
        """What is newly wrong: one sentence each with the figure, the likely cause and the setting to change."""
        new = {name: line for name, line in self._causes().items() if name not in self._told}
        self._told |= set(new)
        return list(new.values())

    def summary(self) -> list[str]:
        """The run in plain words: is it learning and how sure is that, how it moved, and what is still wrong."""
        if not self._rows:
            return ["no generation yet"]
        lines = [self._verdict(), self._signal(), self._movement(), self._completions()]
        return [line for line in lines if line] + [f"warning: {line}" for line in self._causes().values()]

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

    def _noise_floor(self) -> float | None:
        floors = [row["control"][2] for row in self._rows if row.get("control")]
        return math.sqrt(float(np.mean(np.square(floors)))) if floors else None

    def _causes(self) -> dict[str, str]:
        """Everything that looks wrong now, by name. A population that collapsed explains what follows from it."""
        checks: dict[str, Callable[[], str | None]] = {
            "solved": self._nothing_to_learn,
            "sigma too large": self._sigma_too_large,
            "learning rate too large": self._learning_rate_too_large,
            "no signal": self._no_signal,
            "noise": self._noise,
            "hacked": self._hacked,
            "cut off": self._cut_off,
        }
        found = {name: line for name, check in checks.items() if (line := check())}
        follow = ["no signal", "noise"] if "solved" in found else []
        if "learning rate too large" in found:
            follow = ["sigma too large", "no signal", "noise", "cut off"]
        elif "sigma too large" in found:
            follow = ["no signal", "noise", "cut off"]
        return {name: line for name, line in found.items() if name not in follow}

    def _nothing_to_learn(self) -> str | None:
        solved = _mean(self._rows[:WINDOW], "solved_share")
        if solved is None or solved < SOLVED or len(self._rows) < WINDOW:
            return None
        return (
            f"{solved:.0%} of the completions earned the highest reward from the start: there is nothing to learn; "
            "use harder data (task.train_data) or a finer reward"
        )

    def _sigma_too_large(self) -> str | None:
        kept = _values(self._rows, "kept_share")[-CONTROLS:]
        share = float(np.mean(kept)) if kept else 1.0
        if share >= LOST or self._rises():
            return None
        return (
            f"members keep {max(0.0, share):.0%} of the unperturbed model's fitness above the lowest score: the "
            f"noise breaks the model; try {self._width(0.25)}"
        )

    def _learning_rate_too_large(self) -> str | None:
        cosines = _values(self._rows[-WINDOW:], "cosine")
        if len(cosines) == WINDOW:
            mean, error = float(np.mean(cosines)), float(np.std(cosines, ddof=1)) / math.sqrt(WINDOW)
            if mean < OPPOSED and mean < -SURE * error:
                return (
                    f"successive updates undo each other (cosine {mean:.2f} over {WINDOW} generations): the steps "
                    f"overshoot; try {self._slower()}"
                )
        peak = self._fall()
        if peak is None:
            return None
        now = _mean(self._rows[-WINDOW:], "mean")
        return (
            f"fitness fell from {peak:.4g} to {now:.4g} while the model moved on from the start: steps too large for "
            f"what {self.config.es.population_size} members can tell; try {self._slower()}, or a larger "
            "es.population_size"
        )

    def _no_signal(self) -> str | None:
        window = self._rows[-WINDOW:]
        if len(self._rows) <= WINDOW:  # one more, to see first whether it fell
            return None
        useless = float(np.mean([row["zero_variance"] for row in window]))
        changed, solved = _mean(window, "changed_share"), _mean(window, "solved_share")
        if solved is not None and solved >= SOLVED:  # it is done
            return None
        if changed is not None and changed < FEW_CHANGES and not self._rises():
            return (
                f"only {changed:.1%} of the completions differ between members: the noise is too narrow; try "
                f"{self._width(10 if changed < FEW_CHANGES / 10 else 3)}, or measure it with evoalign probe"
            )
        if useless < USELESS or self._at_best():
            return None
        if changed is None:
            return f"{useless:.0%} of the last {WINDOW} generations moved nothing; try {self._width(3)}"
        return (
            f"{useless:.0%} of the last {WINDOW} generations moved nothing, though {changed:.0%} of the completions "
            "differ between members: the reward gives all of them the same; give partial credit (task.rewards), "
            f"{'a larger task.batch_size' if self.config.task.batch_size else 'more training examples'} or easier ones"
        )

    def _at_best(self) -> bool:
        """The last generations are as good as any before: a run that has arrived, rather than one that is stuck."""
        means = _values(self._rows, "mean")
        return self._rises() and float(np.mean(means[-WINDOW:])) >= max(means) - MATERIAL * (max(means) - min(means))

    def _noise(self) -> str | None:
        floor, window = self._noise_floor(), self._rows[-WINDOW:]
        if not floor or len(window) < WINDOW or self._rises():
            return None
        spread = float(np.median(_values(window, "spread")))
        if spread >= SIGNAL_TO_NOISE * floor:
            return None
        seen = f"members spread by {spread:.2g}, and the unperturbed model scored twice differs by {floor:.2g}"
        if self.config.sampling.temperature == 0:
            return f"{seen}, though decoding is greedy: the engine does not repeat itself; set deterministic true"
        batch = self.config.task.batch_size
        more = f"task.batch_size {4 * batch}" if batch else "more training examples"
        return f"{seen}: they are ranked by chance; try {self._width(3)}, or {more}"

    def _hacked(self) -> str | None:
        if len(self._rows) < 2 * WINDOW or not self._rises():
            return None
        for name, words in HACKS.items():
            before, now = (_mean(rows, f"{name}_share") for rows in (self._rows[:WINDOW], self._rows[-WINDOW:]))
            if before is not None and now is not None and now - before > RISEN:
                nearer = self._slower() if self._eta() > LARGE_ETA else "es.decay 0.01"
                return (
                    f"the reward rises while completions become {words} ({before:.0%} to {now:.0%}): it is likely "
                    "hacked; read the completions, mend the reward (task.rewards), or hold the model nearer to its "
                    f"start with {nearer}"
                )
        return None

    def _cut_off(self) -> str | None:
        window = self._rows[-WINDOW:]
        share, before = _mean(window[len(window) // 2 :], "truncated_share"), _mean(window, "truncated_share")
        if len(self._rows) <= WINDOW or share is None or before is None or share < CUT_OFF:
            return None
        if share < before - 0.05 and self._rises():  # it is learning to be shorter
            return None
        tokens = self.config.sampling.max_tokens
        return (
            f"{share:.0%} of the completions are cut off at {tokens} tokens, so their ends are never scored; try "
            f"sampling.max_tokens {2 * tokens}"
        )

    def _trend(self) -> tuple[float, float, float, float] | None:
        """Mean fitness of the first and the last third, the change and its standard error."""
        third = len(self._rows) // 3
        if third < 2:
            return None
        first, last = self._rows[:third], self._rows[-third:]
        before, after = float(np.mean(_values(first, "mean"))), float(np.mean(_values(last, "mean")))
        return before, after, after - before, math.hypot(_error(first), _error(last))

    def _rises(self) -> bool:
        trend = self._trend()
        return trend is not None and trend[2] > SURE * trend[3] and trend[2] > 0

    def _fall(self) -> float | None:
        """Fitness that the last window is surely and materially below, with the model further away; None if nowhere."""
        means, last = np.array(_values(self._rows, "mean")), self._rows[-WINDOW:]
        earlier = len(means) - WINDOW
        if earlier < 1:
            return None
        alone = self.config.es.population_size >= FEW_MEMBERS
        stretches = [(self._rows[: 1 if alone else PEAK], FIRST_SURE)] if alone or earlier >= PEAK else []
        if earlier >= PEAK:
            k = int(np.convolve(means[:earlier], np.ones(PEAK), "valid").argmax())
            stretches.append((self._rows[k : k + PEAK], VERY_SURE))
        least = MATERIAL * float(means.max() - means.min())
        for rows, sure in stretches:
            peak = float(np.mean(_values(rows, "mean")))
            fall, error = peak - float(means[-WINDOW:].mean()), math.hypot(_error(rows), _error(last))
            was, now = rows[-1].get("distance"), last[-1].get("distance")
            if fall > max(least, sure * error) and (was is None or now is None or now > was):
                return peak
        return None

    def _width(self, factor: float) -> str:
        """The config's width, changed, with the learning rate that keeps eta."""
        es = self.config.es
        if es.sigma is None:
            return f"es.noise_multiplier {factor * es.width:.2g}"
        return f"es.sigma {factor * es.sigma:.2g} with es.learning_rate {factor * es.learning_rate:.2g}"

    def _eta(self) -> float:
        """The eta of plain SGD that goes as far."""
        return self.config.es.eta * reach(self.config.es)

    def _slower(self) -> str:
        es, eta = self.config.es, self._eta()
        share = USUAL_ETA / eta if eta > LARGE_ETA else 0.5
        return f"es.learning_rate {share * es.learning_rate:.2g} (eta {share * es.eta:.2g} instead of {es.eta:.2g})"

    def _verdict(self) -> str:
        trend = self._trend()
        if trend is None:
            return f"is it learning? {len(self._rows)} generations are too few to tell"
        before, after, change, error = trend
        figures = (
            f"population fitness went from {before:.4g} to {after:.4g} ({change:+.3g}, standard error {error:.2g})"
            f" between the first and the last third of {len(self._rows)} generations"
        )
        if abs(change) <= SURE * error or change == 0:
            low = " (eta is below 0.05: raise es.learning_rate)" if self._eta() < 0.05 else ""
            return f"not shown to learn: {figures}; that can be chance{low}"
        return f"{'learning' if change > 0 else 'getting worse'}: {figures}"

    def _signal(self) -> str:
        useless = float(np.mean([row["zero_variance"] for row in self._rows]))
        spread, floor = float(np.median(_values(self._rows, "spread"))), self._noise_floor()
        if floor is None:
            against = "no control was run, so the noise floor is not known (checks.control_every)"
        elif floor == 0:
            against = "the unperturbed model scored twice came out the same"
        else:
            against = f"{spread / floor:.1f} times the noise floor of {floor:.2g}"
        return f"signal: members spread by {spread:.3g}, {against}; {useless:.0%} of the generations moved nothing"

    def _movement(self) -> str:
        distance, cosine = _values(self._rows[-1:], "distance_sigmas"), _mean(self._rows, "cosine")
        if not distance:
            return ""
        how = "" if cosine is None else f"; successive updates have cosine {cosine:+.3f} on average"
        return f"movement: {distance[0]:.2g} times one member's noise away from the start{how}"

    def _completions(self) -> str:
        said: list[str] = []
        for name in SHARES:
            before, now = (_mean(rows, f"{name}_share") for rows in (self._rows[:WINDOW], self._rows[-WINDOW:]))
            if before is not None and now is not None:
                said.append(f"{name.replace('_', ' ')} {before:.0%} to {now:.0%}")
        return f"completions, first to last {WINDOW} generations: {', '.join(said)}" if said else ""


def changed_share(generation: Generation) -> float | None:
    """Share of completions that are not the commonest one of their prompt: whether members differ at all."""
    texts: dict[int, Counter[tuple[int, ...]]] = {}
    for rollout in generation.rollouts:
        texts.setdefault(rollout.request, Counter())[rollout.token_ids] += 1
    if not texts:
        return None
    return 1 - sum(max(counts.values()) for counts in texts.values()) / len(generation.rollouts)


def _text_shares(generation: Generation) -> Row:
    if not generation.rollouts:
        return {f"{name}_share": None for name in SHARES}
    shares = hacking.shares(
        [r.text for r in generation.rollouts],
        [r.finish_reason for r in generation.rollouts],
        [generation.rows[r.request] for r in generation.rollouts],
    )
    return {f"{name}_share": share for name, share in shares.items()}


def _against_mean(generation: Generation, control: Control | None) -> Row:
    """The population's mean fitness against the unperturbed model's. A drop within the spread has lost nothing."""
    if control is None:
        return {"population_minus_mean": None, "kept_share": None}
    mean, own = float(np.mean(generation.fitness_M)), (control.first + control.second) / 2
    lowest = min(min(row) for row in generation.scores_MP)
    within = own - mean <= float(np.std(generation.fitness_M)) or own <= lowest
    return {
        "population_minus_mean": mean - own,
        "kept_share": 1.0 if within else (mean - lowest) / (own - lowest),
    }


def _values(rows: Sequence[Row], name: str) -> list[float]:
    """What is known of a figure."""
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = _values(rows, name)
    return float(np.mean(values)) if values else None


def _error(rows: Sequence[Row]) -> float:
    """Standard error of a window's mean fitness: by its generations' own, or their scatter where that is more."""
    means, errors = _values(rows, "mean"), _values(rows, "mean_error")
    own = math.sqrt(sum(e * e for e in errors)) / max(1, len(errors))
    scatter = float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return max(own, scatter)
