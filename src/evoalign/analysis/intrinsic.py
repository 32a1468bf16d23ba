# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze intrinsic`: the intrinsic dimension d90 of a task, from runs of space `subspace`.

It is the least number of dimensions that reaches 90 % of the whole space's result (Li et al., arXiv 1804.08838; of
language models: Aghajanyan et al., arXiv 2012.13255). Deviation: results are gains over the model before training,
since a reward has no natural zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoalign.analysis.base import Analysis, Finding, check_unique, error_bars
from evoalign.errors import ConfigError

if TYPE_CHECKING:
    from evoalign.config import Config

Gains = Mapping[int, Sequence[float]]
"""Gains of the runs with each dimension."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Settings:
    """`share`: share of the reference's gain that counts as reached. `measure`: measure of the evaluation."""

    share: float = 0.9
    measure: str = "reward"


class Intrinsic(Analysis[Settings]):
    """Runs with several `space.dimension`, and the reference: runs of a whole space, else the largest dimension."""

    name = "intrinsic"
    help = "The intrinsic dimension (d90) of a task, from runs of space subspace."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Reads files only. Raises EvoalignError for runs that cannot be compared, or without a gain."""
        from evoalign.analysis.compare.runs import read
        from evoalign.statistics import mean

        check_unique(targets)
        if not 0 < settings.share <= 1:
            raise ConfigError(f"share: {settings.share:g} is no share; set a number above 0, at most 1")
        gains, full = dict[int, list[float]](), list[float]()
        questions, spaces = set[str | None](), set[str]()
        for name in targets:
            run = read(Path(name))
            first, last = (run.points[i].measures.get(settings.measure) for i in (0, -1))
            if not run.finished or first is None or last is None:
                raise ConfigError(
                    f"{name}: no {settings.measure} before and after training; finish the run, or leave it out"
                )
            dimension = run.config.space.options.get("dimension")
            spaces |= {run.config.space.name} if dimension is None else set()
            (full if dimension is None else gains.setdefault(int(dimension), [])).append(last - first)
            questions.add(run.questions)
        if len(spaces) > 1:
            raise ConfigError(f"the runs without space.dimension are of {', '.join(sorted(spaces))}; name those of one")
        if len(gains) < 2 or len(questions) > 1:
            raise ConfigError(
                f"runs with {len(gains)} values of space.dimension and {len(questions)} test splits; name runs with "
                "several dimensions and one test split"
            )
        reference = full or gains[max(gains)]
        if sum(reference) <= 0:
            raise ConfigError(
                f"the reference gains {sum(reference) / len(reference):.3g} in {settings.measure}, so no share of it "
                "can be reached; train the runs longer"
            )
        found, low, high = d90(gains, reference, settings.share)
        by_dimension = {d: mean(own) for d, own in sorted(gains.items())}
        against = f"space {min(spaces)}" if full else f"dimension {max(gains)}"
        numbers = {
            **asdict(settings), "dimension": found, "low": low, "high": high,
            "reference": against, "reference_gain": mean(reference), "gains": by_dimension,
        }  # fmt: skip
        text = f"{settings.share:.0%} of the gain of {against} ({mean(reference)}) is reached with "
        text += f"{_text(found, gains)} dimensions" + (
            " (no interval: fewer than 3 runs)" if math.isnan(low) else f" (95 %: {low:g} to {_text(high, gains)})"
        )
        rows = [f"dimension {d}: gain {one}" for d, one in by_dimension.items()]
        return Finding(numbers, [*rows, text], figures=partial(draw, numbers))


def d90(gains: Gains, reference: Sequence[float], share: float = 0.9) -> tuple[float, float, float]:
    """Return the least dimension whose mean gain is `share` of the reference's, and its 95 % interval over seeds.

    Infinity: no dimension reaches it. The interval is a bootstrap of the runs of each dimension and of the reference;
    NaN with fewer than three runs of one of them.
    """
    import numpy as np

    def least(means: Mapping[int, float], full: float) -> float:
        return min((d for d, gain in means.items() if gain >= share * full), default=math.inf)

    found = least({d: sum(own) / len(own) for d, own in gains.items()}, sum(reference) / len(reference))
    if min(map(len, (*gains.values(), reference))) < 3:
        return found, math.nan, math.nan
    draws = np.random.Generator(np.random.Philox(0))
    is_own = next((d for d, own in gains.items() if own is reference), None)
    again: list[float] = []
    for _ in range(RESAMPLES):
        means = {d: float(draws.choice(own, len(own)).mean()) for d, own in gains.items()}
        full = means[is_own] if is_own is not None else float(draws.choice(reference, len(reference)).mean())
        again.append(least(means, full))
    again.sort()
    return found, again[int(0.025 * RESAMPLES)], again[math.ceil(0.975 * RESAMPLES) - 1]


def _text(value: float, gains: Gains) -> str:
    if value == min(gains):
        return f"at most {value:g}"
    return f"{value:g}" if math.isfinite(value) else f"more than {max(gains)}"


def draw(numbers: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the gain by dimension, with intervals, and the share that counts as reached."""
    from evoalign.report.figures import canvas, frame, save_both, series

    figure, found = canvas(5.0, 4.0, layout="constrained"), numbers["gains"]
    axes = figure.subplots()
    frame(axes, f"gain in {numbers['measure']}", "dimensions")
    axes.errorbar(list(found), [one.mean for one in found.values()], error_bars(list(found.values())), **series(0))
    axes.axhline(numbers["share"] * numbers["reference_gain"].mean, linestyle="--", color="0.5")
    axes.set_xscale("log")
    return save_both(figure, folder / "intrinsic.png")
