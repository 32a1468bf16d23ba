# SPDX-License-Identifier: Apache-2.0
"""Signal and drift: what of a run's gain the reward brought, and what any coefficients would have brought.

ES moves along random directions, so some change comes with any coefficients. A placebo is the run's own journal with
each generation's coefficients shuffled over its noises: the same noise, steps of the same length, and no information
from the reward. The mean change of the placebos is drift; the change of the run minus drift is signal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from evoalign import statistics
from evoalign.config import EsConfig
from evoalign.errors import DataError
from evoalign.statistics import LEVEL, Estimate
from evoalign.types import Layout, Update

ENOUGH = 20
"""Placebos of the standard set: with fewer than 19, the smallest possible p is above 0.05."""


@dataclass(frozen=True, slots=True)
class Ends:
    """A measure `before` training, after it (`real`) and in `placebos`."""

    before: float
    real: float
    placebos: Annotated[tuple[float, ...], Field(min_length=1)]

    @property
    def mean(self) -> float:
        """Mean of the placebos."""
        return float(np.mean(self.placebos))

    @property
    def reached(self) -> int:
        """Number of placebos with a value of at least `real`, the trained model's."""
        return sum(value >= self.real for value in self.placebos)

    @property
    def p(self) -> float:
        """One-sided p of the permutation test: (1 + placebos that reach the run) / (1 + placebos)."""
        return (1 + self.reached) / (1 + len(self.placebos))

    def as_dict(self) -> dict[str, Any]:
        """Return the object for results/evaluation.json."""
        return {**asdict(self), "placebos": list(self.placebos), "reached": self.reached, "p": self.p}


@dataclass(frozen=True, slots=True)
class Split(Ends):
    """Mean reward of one test set, split into drift and signal; `flip` is with all signs flipped (None: not done).

    `gain` is real - before, with an interval over items. `drift` is the placebos' mean gain, with an interval over
    items and placebos. `share` is drift / gain with Fieller's interval, None if the interval of the gain includes 0;
    it is conditional on the run. Intervals are those of `evoalign.statistics`, for other shuffles and other items.
    """

    flip: float | None
    items: int
    gain: Estimate
    drift: Estimate
    share: Estimate | None
    beside: Estimate | None = None
    """real - mean placebo; the interval includes 0 in 95 % of cases where the run is a further placebo. None in files
    of earlier releases."""

    @property
    def sd(self) -> float | None:
        """Standard deviation between placebos; None of one."""
        return float(np.std(self.placebos, ddof=1)) if len(self.placebos) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """Return the object for results/evaluation.json."""
        bounds = {"low": min(self.placebos), "high": max(self.placebos)}
        return {**Ends.as_dict(self), "mean": self.mean, "sd": self.sd, **bounds}


@dataclass(frozen=True, slots=True)
class Distances:
    """L2 norm of the change of all evolved numbers; None: not known.

    `expected`: of a random walk with the run's step lengths, by `expected_distance`.
    """

    real: float
    expected: float | None
    placebos: tuple[float, ...]
    flip: float | None = None


@dataclass(frozen=True, slots=True)
class Whole(Ends):
    """`task.fitness` of the run and its placebos on the test split. It has no values per item, so only `p`."""

    name: str

    def line(self) -> str:
        """Return the comparison in a sentence."""
        return (
            f"{self.name}, the trained measure: {_count(self)} reached {_average(self)}, from {self.before:.4g}; the "
            f"run reached {self.real:.4g}; {self.reached} of {len(self.placebos)} reach the run, one-sided p "
            f"{self.p:.2g}"
        )


@dataclass(frozen=True, slots=True)
class PlaceboResults:
    """Results of placebo models (the run's steps with shuffled scores); `measures` are means over them, if recorded."""

    reward: Split
    fitness: Whole | None = None
    measures: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def aim(self) -> Ends:
        """The trained measure."""
        return self.reward if self.fitness is None else self.fitness


_RESULTS = TypeAdapter(PlaceboResults)


@dataclass(frozen=True, slots=True)
class Placebos:
    """A run compared with its placebos: the reward of the test split, `off_task` that of another task's test split.

    `seeds` are those of the shuffles. `measures` are means over the placebos, and `columns` all measures of the test
    split, `off_columns` of the other task's.
    """

    generation: int
    seeds: tuple[int, ...]
    reward: Split
    distance: Distances
    measures: Mapping[str, float]
    off_task: Split | None = None
    fitness: Whole | None = None
    columns: Mapping[str, Ends] = field(default_factory=dict[str, Ends])
    off_columns: Mapping[str, Ends] = field(default_factory=dict[str, Ends])
    note: str | None = None
    """Sentence on choices that the run made by its own rewards, such as its end, and their effect on the comparison."""

    @property
    def reached(self) -> int:
        """Number of placebos that reach the run in the trained measure."""
        return self.reward.reached if self.fitness is None else self.fitness.reached

    def as_dict(self) -> dict[str, Any]:
        """Return the object for results/evaluation.json."""
        found: dict[str, Any] = {
            "generation": self.generation,
            "seeds": list(self.seeds),
            "reward": self.reward.as_dict(),
            "distance": {**asdict(self.distance), "placebos": list(self.distance.placebos)},
            "measures": dict(self.measures),
            "each": {name: list(ends.placebos) for name, ends in self.columns.items()},
            "columns": {name: ends.as_dict() for name, ends in self.columns.items()},
        }
        if self.note is not None:
            found["note"] = self.note
        if self.off_task is not None:
            columns = {name: ends.as_dict() for name, ends in self.off_columns.items()}
            found |= {"off_task": self.off_task.as_dict(), "off_task_columns": columns}
        return found if self.fitness is None else {**found, "fitness": self.fitness.as_dict()}

    def lines(self) -> list[str]:
        """Return all of it in sentences."""
        lines = [*reward_lines(self.reward, self.fitness), distance_line(self.distance)]
        lines += [] if self.note is None else [self.note]
        if self.off_task is not None:
            lines += [f"off-task: {line}" for line in off_task_lines(self.off_task)]
        return lines


def split(
    before_E: Sequence[float],
    real_E: Sequence[float],
    placebo_KE: Sequence[Sequence[float]],
    flip_E: Sequence[float] | None = None,
) -> Split:
    """Split the gain from rewards by item: E items, K placebos."""
    before, real, placebos = (np.asarray(v, dtype=np.float64) for v in (before_E, real_E, placebo_KE))
    gain = statistics.paired(before, real)
    return Split(
        before=float(before.mean()),
        real=float(real.mean()),
        placebos=tuple(map(float, placebos.mean(axis=1))),
        flip=None if flip_E is None else float(np.mean(flip_E)),
        items=len(before),
        gain=gain,
        drift=statistics.crossed(placebos - before),
        share=statistics.ratio(placebos - before, real - before) if statistics.is_sure(gain) else None,
        beside=statistics.beside(real, placebos),
    )


def parse(tree: object, where: str) -> PlaceboResults:
    """Read what `Placebos.as_dict` wrote. Raises DataError."""
    try:
        return _RESULTS.validate_python(tree)
    except ValidationError as error:
        field = ".".join(["placebo", *map(str, error.errors()[0]["loc"])])
        raise DataError(f"{where} is damaged ({field}); put it back from a copy") from None


def largest(*found: PlaceboResults | None) -> PlaceboResults | None:
    """Return the results with the most placebos, the first of equals; None if there are none."""
    known = (one for one in found if one is not None)
    return max(known, key=lambda one: len(one.reward.placebos), default=None)


def drift_together(drift_and_gain: Sequence[tuple[float, float]]) -> float | None:
    """Return the share of drift of several runs: the sum of drifts over the sum of gains; None if that is not positive.

    Averaging the shares of runs with a significant gain would select by the gain.
    """
    gain = sum(gain for _, gain in drift_and_gain)
    return sum(drift for drift, _ in drift_and_gain) / gain if gain > 0 else None


def is_gain_together(gains: Sequence[Estimate]) -> bool:
    """Return whether the mean gain of several runs is significantly above 0, for these runs and new items.

    The ends of the intervals are averaged, which is exact for one run and conservative for several: their errors may
    have any correlation, as runs are evaluated on the same items.
    """
    lows = [found.low for found in gains if found.low is not None]
    return len(lows) == len(gains) > 0 and float(np.mean(lows)) > 0


def expected_distance(updates: Sequence[Update], layout: Layout, es: EsConfig) -> float | None:
    """Return the root mean square L2 distance from the start, over fresh noise with the recorded weights.

    It is also that of placebos, which keep the sum of squared weights. It is that of all evolved numbers, as
    `checks.distance.moved` measures it; None with Adam, which divides by the size of gradients. One update moves tensor
    t by step * scale_t * (1/N) * sum_n w_n eps_nt, where w_n is the sum of sign * coefficient over the members of noise
    n: c, or c(+) - c(-) of an antithetic pair. Normals of another noise, tensor, element or generation are independent,
    so the squares add up:

        E |move|^2 = sum_g (step_g m_g / N_g)^2 * sum_n w_n^2 * sum_t numbers_t scale_t^2

    m_g is 1 for plain SGD: with momentum a gradient keeps moving the mean, and decay undoes a share. With one step
    size, z-scores (rms 1) and no pairs this is alpha sqrt(d T / N): d numbers, T generations, N members.
    """
    from evoalign.spaces.base import pair_weights  # imports torch, which tables do without

    if es.optimizer.name == "adam" or es.optimizer.adapts_noise:
        return None
    moving = [update for update in updates if any(update.coefficients)]  # others move nothing, and no velocity
    momentum = es.optimizer.momentum if es.optimizer.name == "momentum" else 0.0
    reach, kept, squares = 0.0, 1.0, list[float]()
    for update in reversed(moving):
        # What one unit of this gradient moves the mean by in the end: its own step, and those of its velocity.
        reach = update.step * kept + momentum * reach
        kept *= 1 - update.decay
        squares.append((reach / len(update.members)) ** 2 * math.fsum(w * w for w in pair_weights(update).values()))
    numbers = math.fsum(math.prod(t.shape) * t.scale**2 for t in layout.tensors)
    return math.sqrt(math.fsum(squares) * numbers)


def reward_lines(reward: Split, fitness: Whole | None = None) -> list[str]:
    """Return the sentences about the trained measure and the reward."""
    lines = [sentence(reward), beyond_drift(reward)]
    lines += [] if reward.flip is None else [f"all signs flipped: {reward.flip:.4g}"]
    return lines if fitness is None else [fitness.line(), f"the reward: {lines[0]}", *lines[1:]]


def sentence(split: Split) -> str:
    """Say what the placebos reached, and how much of the gain that is."""
    return (
        f"{_count(split)} (the same noise, shuffled coefficients) reached {_average(split)}, from {split.before:.4g}; "
        f"the run reached {split.real:.4g}: {_share(split)}"
    )


def beyond_drift(split: Split, *, advise: bool = True) -> str:
    """Say whether the run is more than drift, and by what test; with `advise`, also how many placebos are enough.

    The interval includes 0 in 95 % of cases where the run is a further placebo, if placebos are normal.
    """
    reach = f"{split.reached} of {_count(split)} reach the run, one-sided p {split.p:.2g}"
    above = split.real - split.mean
    by = f"{f'{above:+.4g}' if split.beside is None else _interval(split.beside)} above the mean placebo"
    if split.reached or above <= 0:
        return f"not shown to be more than drift: {reach}; {by}"
    found, gain = f"{reach}, the smallest possible with this many; {by}", split.gain
    if gain.mean <= 0 and statistics.is_sure(gain):
        return f"no gain: the run fell below the start, and the placebos further; {found}"
    if gain.mean <= 0 or (gain.low is not None and gain.low <= 0):
        fell = ": it is above the placebos because they fell below the start" if split.mean < split.before else ""
        return f"the gain of the run is not significant{fell}; {found}"
    if split.p > LEVEL:
        few = f"{_count(split)} cannot show whether it is more than drift"
        return f"{few}{f', {ENOUGH} can' if advise else ''}: {found}"
    return f"more than drift: {found}"


def distance_line(found: Distances) -> str:
    """Say how far the mean moved, compared with shuffled coefficients."""
    line = f"distance of the evolved numbers from the start: {found.real:.4g}; "
    if found.expected is None:
        line += "there is no formula for drift with this optimizer"
    else:
        ratio = f"{found.real / found.expected:.3g}" if found.expected else "-"
        line += f"{found.expected:.4g} expected of a random walk of the same steps (x {ratio})"
    if not found.placebos:
        return line
    mean = float(np.mean(found.placebos))
    return f"{line}; placebos {mean:.4g} ({min(found.placebos):.4g} to {max(found.placebos):.4g})"


def off_task_lines(split: Split) -> list[str]:
    """Say what happened to a task that was not trained, and whether the rewards did it, in either direction."""
    lines = [
        f"reward {split.before:.4g} before, {split.real:.4g} after the run: {_interval(split.gain)}",
        f"{_count(split)} reached {_average(split)}",
    ]
    if split.beside is None:
        return lines
    below = sum(value <= split.real for value in split.placebos)
    p = min(1.0, 2 * (1 + min(below, split.reached)) / (1 + len(split.placebos)))
    line = f"the run minus the mean placebo: {_interval(split.beside)}, two-sided p {p:.2g}"
    return [*lines, line + ("" if statistics.is_sure(split.beside) else "; no effect of the rewards is shown")]


def _share(split: Split) -> str:
    """Return the share of drift if the change is significant; else what the placebos and the run gained or lost."""
    found, count = split.share, len(split.placebos)
    gained, what = split.gain.mean > 0, "gain" if split.gain.mean > 0 else "loss"
    if found is None:
        return f"its change, {_interval(split.gain)}, is not significant, so no drift share is reported"
    drift = f"{_changed(split.mean - split.before)}{' on average' if count > 1 else ''}"
    both = f"the placebo{'s' if count > 1 else ''} {drift}, the run {_changed(split.gain.mean)}"
    if count == 1:
        return f"{both}; one placebo gives no drift share"
    if 0 <= found.mean <= 1 or round(found.mean, 2) == 0:
        bounds = f"({found.why})"
        if found.low is not None and found.high is not None:
            bounds = f"(95 % interval {found.low:.0%} to {found.high:.0%})"
        return f"about {round(found.mean, 2) + 0.0:.0%} of the {what} would have come without signal {bounds}"
    more, significant = found.mean > 1, False
    if found.low is not None and found.high is not None and 1 / (1 + count) <= LEVEL:
        # Where noise moves the other way than the run, no placebo may have come as far as the run either.
        as_far = any(value >= split.real if gained else value <= split.real for value in split.placebos)
        significant = found.low > 1 or (found.high < 0 and not as_far)
    if not significant:
        return f"{both}: " + (
            f"noise alone may explain all of the {what}"
            if more
            else f"no part of the {what} is shown to come without signal"
        )
    if more:
        return f"{both}: noise alone {'gains more' if gained else 'does more harm'} than the run"
    return f"{both}: noise alone {'does harm' if gained else 'brings a gain'}, and all of the {what} is signal"


def _changed(change: float) -> str:
    return f"{'gained' if change > 0 else 'lost'} {abs(change):.3g}" if change else "did not change"


def _interval(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.mean:+.4g} ({found.why})"
    return f"{found.mean:+.4g} (95 % interval {found.low:+.4g} to {found.high:+.4g})"


def _count(found: Ends) -> str:
    return f"{len(found.placebos)} placebo{'' if len(found.placebos) == 1 else 's'}"


def _average(found: Ends) -> str:
    if len(found.placebos) == 1:
        return f"{found.mean:.4g}"
    return f"{found.mean:.4g} on average ({min(found.placebos):.4g} to {max(found.placebos):.4g})"
