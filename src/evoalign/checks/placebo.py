# SPDX-License-Identifier: Apache-2.0
"""How much of what a run changed is signal, and how much is drift, which any coefficients would have brought.

ES moves along random directions, so a part of any change comes with any coefficients. A placebo is the run's own
journal with each generation's coefficients shuffled over its members: the same noise, steps of the same size, and
nothing of what the reward said. The change of the real run less that of the placebos in the mean is signal; their mean
change is drift, and its share of the real change says how much of a result is no learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from evoalign import statistics
from evoalign.errors import DataError
from evoalign.statistics import LEVEL, Estimate

ENOUGH = 20
"""Placebos of the standard set. The least p of fewer than 19 is above 0.05."""


@dataclass(frozen=True, slots=True)
class Ends:
    """A mean `before` training, after it (`real`) and in `placebos`."""

    before: float
    real: float
    placebos: Annotated[tuple[float, ...], Field(min_length=1)]

    @property
    def mean(self) -> float:
        """Of the placebos."""
        return float(np.mean(self.placebos))

    @property
    def reached(self) -> int:
        """How many placebos come to the real run, or above it."""
        return sum(value >= self.real for value in self.placebos)

    @property
    def p(self) -> float:
        """One-sided, by permutation: (1 + placebos that reach the real run) / (1 + placebos)."""
        return (1 + self.reached) / (1 + len(self.placebos))


@dataclass(frozen=True, slots=True)
class Split(Ends):
    """What became of one set's mean reward, and with all signs flipped (`flip`, None: not done).

    `gain` is real - before, its interval over items; `drift` the mean placebo's gain and `signal` real - mean placebo,
    over items and placebos at once, since all of them answer the same items. `share` is drift / gain with Fieller's
    interval over both, None where the gain may be 0: then no share of it means anything. Intervals are those of
    `evoalign.statistics`; they speak of this run and of what other shuffles and other items would have said of it.
    """

    flip: float | None
    items: int
    gain: Estimate
    drift: Estimate
    signal: Estimate
    share: Estimate | None
    beside: Estimate | None = None
    """As `signal`, with 0 in its interval were the run one placebo more; None in files of earlier releases."""

    @property
    def sd(self) -> float | None:
        """Standard deviation between placebos; None of one."""
        return float(np.std(self.placebos, ddof=1)) if len(self.placebos) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """As it stands in results/evaluation.json."""
        return {
            "before": self.before, "real": self.real, "placebos": list(self.placebos), "flip": self.flip,
            "items": self.items, "mean": self.mean, "sd": self.sd, "low": min(self.placebos),
            "high": max(self.placebos), "reached": self.reached, "p": self.p, "gain": asdict(self.gain),
            "drift": asdict(self.drift), "signal": asdict(self.signal),
            "share": None if self.share is None else asdict(self.share),
            "beside": None if self.beside is None else asdict(self.beside),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Distances:
    """L2 norm of the change of all numbers that evolve. `expected` is that of shuffled coefficients by formula
    (`checks.drift`), None with an optimizer that has none; `flip` None: not done."""

    real: float
    expected: float | None
    placebos: tuple[float, ...]
    flip: float | None = None


@dataclass(frozen=True, slots=True)
class Whole(Ends):
    """`task.fitness` of the run and its placebos on the test split. No item has it alone: `p` is by permutation."""

    name: str

    def as_dict(self) -> dict[str, Any]:
        """As it stands in results/evaluation.json."""
        return {**asdict(self), "placebos": list(self.placebos), "reached": self.reached, "p": self.p}

    def line(self) -> str:
        """In words."""
        count = len(self.placebos)
        between = f" on average ({min(self.placebos):.4g} to {max(self.placebos):.4g})" if count > 1 else ""
        return (
            f"{self.name}, which was trained for: {_count(count)} reached {self.mean:.4g}{between}, from "
            f"{self.before:.4g}; the run itself {self.real:.4g}; {self.reached} of {count} reach the run, one-sided p "
            f"{self.p:.2g}"
        )


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the placebos of a run that is done: of its reward, and of `task.fitness`, where there is one.

    `measures` are means over the placebos, by the names of an evaluation, as far as they were written.
    """

    reward: Split
    fitness: Whole | None = None
    measures: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def aim(self) -> Ends:
        """Of what was trained for."""
        return self.reward if self.fitness is None else self.fitness


_KNOWN = TypeAdapter(Known)


@dataclass(frozen=True, slots=True)
class Placebos:
    """A run beside its placebos. `reward` is of the test split, `off_task` of another task's, where one was asked, and
    `fitness` of `task.fitness`, where there is one.

    `seeds` are those of the shuffles. `measures` are means over the placebos, by the names of an evaluation, and `each`
    has those of every placebo, in the order of the seeds.
    """

    generation: int
    seeds: tuple[int, ...]
    reward: Split
    distance: Distances
    measures: Mapping[str, float]
    off_task: Split | None = None
    fitness: Whole | None = None
    each: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])

    @property
    def reached(self) -> int:
        """How many come to the run in what it was trained for, or above it."""
        return self.reward.reached if self.fitness is None else self.fitness.reached

    def as_dict(self) -> dict[str, Any]:
        """As it stands in results/evaluation.json."""
        off = {} if self.off_task is None else {"off_task": self.off_task.as_dict()}
        off |= {} if self.fitness is None else {"fitness": self.fitness.as_dict()}
        return {
            "generation": self.generation, "seeds": list(self.seeds), "reward": self.reward.as_dict(),
            "distance": {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.distance).items()},
            "measures": dict(self.measures), "each": {name: list(v) for name, v in self.each.items()}, **off,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """In words."""
        split = self.reward
        said = [sentence(split), beyond_drift(split), *flip_line(split), distance_line(self.distance)]
        if self.fitness is not None:
            said = [self.fitness.line(), f"the reward: {said[0]}", *said[1:]]
        if self.off_task is not None:
            said += [f"off-task: {line}" for line in off_lines(self.off_task)]
        return said


def split(
    before_E: Sequence[float],
    real_E: Sequence[float],
    placebo_KE: Sequence[Sequence[float]],
    flip_E: Sequence[float] | None = None,
) -> Split:
    """From rewards by item: E items, K placebos."""
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
        signal=statistics.crossed(real - placebos),
        share=statistics.ratio(placebos - before, real - before) if statistics.is_sure(gain) else None,
        beside=statistics.beside(real, placebos),
    )


def of_file(tree: object, where: str) -> Known:
    """What `Placebos.as_dict` wrote of reward and fitness, back. Raises DataError where it cannot be that."""
    try:
        return _KNOWN.validate_python(tree)
    except ValidationError as error:
        what = ".".join(["placebo", *map(str, error.errors()[0]["loc"])])
        raise DataError(f"{where} is damaged ({what}); put it back from a copy") from None


def drift_together(drift_and_gain: Sequence[tuple[float, float]]) -> float | None:
    """Share of drift of runs together: what their placebos gained over what they gained; None where that is nothing.

    Of runs alone whose own gain is sure, it would be chosen by it.
    """
    gain = sum(gain for _, gain in drift_and_gain)
    return sum(drift for drift, _ in drift_and_gain) / gain if gain > 0 else None


def sentence(split: Split) -> str:
    """What the placebos reached, and how much of the gain that is."""
    count, low, high = len(split.placebos), min(split.placebos), max(split.placebos)
    head = f"{_count(count)} (the same noise, shuffled coefficients) reached {split.mean:.4g}"
    head += f" on average ({low:.4g} to {high:.4g})" if count > 1 else ""
    head += f", from {split.before:.4g}; the run itself {split.real:.4g}"
    return f"{head}: {_share(split)}"


def beyond_drift(split: Split, *, advise: bool = True) -> str:
    """Whether the run is more than drift, in the first words, and by what; to whom has the run, also what would show
    more. The interval is about the mean placebo; a run without signal is a placebo more, and as far from it as any.
    """
    count, reach = len(split.placebos), f"{split.reached} of {_count(len(split.placebos))} reach the run"
    by = f"{_bounds(split.signal)} above the mean placebo"
    if split.reached or split.signal.mean <= 0:
        return f"not shown to be more than drift: {reach}, one-sided p {split.p:.2g}; {by}"
    found = f"{reach}, one-sided p {split.p:.2g}, the least that so many can give; {by}"
    gain = split.gain
    if gain.mean <= 0 or (gain.low is not None and gain.low <= 0):
        return f"{_without_gain(split)}; {found}"
    if split.p > LEVEL:
        few = f"{_count(count)} cannot show whether it is more than drift"
        return f"{few}{f', {ENOUGH} can' if advise else ''}: {found}"
    return f"more than drift: {found}"


def _without_gain(split: Split) -> str:
    """What it is to be above the placebos without being above the start."""
    if split.gain.mean <= 0 and statistics.is_sure(split.gain):
        return "no gain: the run fell below the start, and the placebos further"
    fell = ": what it has above the placebos is that they fell below the start" if split.mean < split.before else ""
    return f"the run's own gain may be none{fell}"


def flip_line(split: Split) -> list[str]:
    """What the opposite coefficients came to."""
    return [] if split.flip is None else [f"all signs flipped: {split.flip:.4g}"]


def distance_line(found: Distances) -> str:
    """How far the mean went, against what shuffled coefficients make it go."""
    against = "the optimizer has no formula for drift" if found.expected is None else (
        f"{found.expected:.4g} expected of shuffled coefficients (x {_ratio(found.real, found.expected)})"
    )  # fmt: skip
    line = f"distance of the numbers that evolve from the start: {found.real:.4g}; {against}"
    if not found.placebos:
        return line
    mean = float(np.mean(found.placebos))
    return f"{line}; placebos {mean:.4g} ({min(found.placebos):.4g} to {max(found.placebos):.4g})"


def off_lines(split: Split) -> list[str]:
    """What became of a task that was not trained."""
    head = (
        f"reward {split.before:.4g} to {split.real:.4g} ({_bounds(split.gain)}), placebos {split.mean:.4g} on average"
    )
    return [f"{head}: {_share(split)}", *_off(split)]


def _off(split: Split) -> list[str]:
    """What the rewards did beside the noise, either way: a placebo is as far from the others as the run may be."""
    found, count = split.beside, len(split.placebos)
    if found is None:
        return []
    below = sum(value <= split.real for value in split.placebos)
    p = min(1.0, 2 * (1 + min(below, split.reached)) / (1 + count))
    line = (
        f"the run less the mean placebo: {_bounds(found)}, for the run and further placebos; "
        f"{split.reached} of {count} are at the run or above it, {below} at it or below, two-sided p {p:.2g}"
    )
    return [line if statistics.is_sure(found) else f"{line}; the rewards are not shown to have done anything to it"]


def _share(split: Split) -> str:
    """Which part of the change is drift, where there surely is a change, and the placebos have such a part of it."""
    found, what = split.share, "gain" if split.gain.mean > 0 else "loss"
    if found is None:
        return f"its change, {_bounds(split.gain)}, may be none, so no share of it is called drift"
    if len(split.placebos) == 1:
        return f"{_beside(split)}; one placebo tells no share of drift"
    if not 0 <= found.mean <= 1 and round(found.mean, 2) != 0:
        return f"{_beside(split)}: {_beyond(split, found)}"
    bounds = f"({found.why})"
    if found.low is not None and found.high is not None:
        bounds = f"(95 % interval {found.low:.0%} to {found.high:.0%})"
    return f"about {round(found.mean, 2) + 0.0:.0%} of the {what} is drift {bounds}"


def _beside(split: Split) -> str:
    """What the placebos and the run did to the start."""
    alone = len(split.placebos) == 1
    drift = f"the placebo{'' if alone else 's'} {_moved(split.mean - split.before)}{'' if alone else ' in the mean'}"
    return f"{drift} where the run {_moved(split.gain.mean)}"


def _moved(change: float) -> str:
    return f"{'gained' if change > 0 else 'lost'} {abs(change):.3g}" if change else "stayed as it was"


def _beyond(split: Split, share: Estimate) -> str:
    """What drift that is none of the change, or more than all of it, says: of noise at large where that is sure."""
    gain, more = split.gain.mean > 0, share.mean > 1
    what = "gain" if gain else "loss"
    if not _is_of_noise(split, share):
        return f"noise alone may have made all of the {what}" if more else f"no part of the {what} is seen to be drift"
    if more:
        return f"noise alone {'brings more' if gain else 'does more harm'} than the run did"
    return f"noise alone {'does harm' if gain else 'brings a gain'}, and all of the {what} is signal"


def _is_of_noise(split: Split, share: Estimate) -> bool:
    """Whether a share outside of 0 to 1 surely is so, and so many placebos were drawn that p could be below 5 %.

    Where noise goes the other way than the run, none of them may have come as far as the run either.
    """
    if share.low is None or share.high is None or 1 / (1 + len(split.placebos)) > LEVEL:
        return False
    as_far = [value >= split.real if split.gain.mean > 0 else value <= split.real for value in split.placebos]
    return share.low > 1 or (share.high < 0 and not any(as_far))


def _bounds(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.mean:+.4g} ({found.why})"
    return f"{found.mean:+.4g} (95 % interval {found.low:+.4g} to {found.high:+.4g})"


def _count(count: int) -> str:
    return f"{count} placebo{'' if count == 1 else 's'}"


def _ratio(value: float, of: float) -> str:
    return f"{value / of:.3g}" if of else "-"
