# SPDX-License-Identifier: Apache-2.0
"""What models between two others answer. Array suffixes: A alphas, K draws of noise, E examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign import statistics
from evoalign.analysis.base import Finding
from evoalign.analysis.connectivity.barrier import Barrier, barrier
from evoalign.analysis.connectivity.plane import Plane, plane
from evoalign.analysis.estimates import bounded, share, told, tree
from evoalign.analysis.lab import BASE, Asked, Floats, Lab, Nats, Perturbation, shown_placebos
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.statistics import Estimate

if TYPE_CHECKING:
    from evoalign.analysis.connectivity.command import Settings
    from evoalign.config import Config

FEWEST_POINTS = 3


@dataclass(frozen=True, slots=True)
class Line:
    """From `a`, at alpha 0, to `b`, at 1. `smooth_KAE` are the rewards with noise on the weights, where asked for."""

    a: str
    b: str
    alphas_A: Floats
    rewards_AE: Floats
    hacked_AE: Floats
    nats_A: tuple[Nats, ...]
    smooth_KAE: Floats | None

    @property
    def rewards(self) -> list[Estimate]:
        return [statistics.mean(rewards_E) for rewards_E in self.rewards_AE]

    @property
    def hacked(self) -> list[Estimate]:
        return [share(hacked_E) for hacked_E in self.hacked_AE]

    @property
    def kl(self) -> list[Estimate] | None:
        """From the base model, nats a token; None where it was not measured."""
        return [bounded(statistics.ratio(n.nats_P, n.tokens_P), high=np.inf) for n in self.nats_A] or None

    @property
    def kl_completion(self) -> list[Estimate] | None:
        """The same in nats a completion."""
        return [bounded(statistics.ratio(n.nats_P, n.draws_P), high=np.inf) for n in self.nats_A] or None

    @property
    def smooth(self) -> list[Estimate] | None:
        """The reward in the mean over the noise."""
        if self.smooth_KAE is None:
            return None
        return [statistics.crossed(self.smooth_KAE[:, a]) for a in range(len(self.alphas_A))]

    @property
    def barrier(self) -> Barrier:
        return barrier(self.alphas_A, self.rewards_AE[None])

    @property
    def smooth_barrier(self) -> Barrier | None:
        return None if self.smooth_KAE is None else barrier(self.alphas_A, self.smooth_KAE)


@dataclass(frozen=True)
class Connectivity(Finding):
    """The finding, and what its figures are drawn from."""

    lines: Sequence[Line]
    plane: Plane | None

    def draw(self, folder: Path) -> list[Path]:
        from evoalign.analysis.connectivity.figure import draw

        return draw(self.lines, self.plane, folder)


def connectivity(targets: Sequence[str], settings: Settings, config: Config | None) -> Connectivity:
    """See `Command`. Raises EvoalignError."""
    alphas_A = alphas(settings)
    if len(targets) < 2:
        raise ConfigError(f"connectivity: {targets[0]} alone has no line; give two targets, such as {BASE} and a run")
    if settings.plane and (len(targets) < 3 or settings.plane < 2):
        raise ConfigError(f"plane: {settings.plane} points a side of {len(targets)} targets; give 2 or more, of three")
    asked = Asked(
        examples=settings.examples, samples=settings.samples, max_tokens=settings.tokens,
        temperature=settings.temperature, seed=settings.seed,
    )  # fmt: skip
    with Lab(targets, config, asked) as lab:
        of_point = 1 + settings.kl + (settings.trials if settings.sigma > 0 else 0)
        points = len(list(combinations(targets, 2))) * len(alphas_A) * of_point
        watching.count(points + settings.plane**2)
        lines = [_line(lab, a, b, alphas_A, settings) for a, b in combinations(targets, 2)]
        flat = plane(lab, (targets[0], targets[1], targets[2]), settings.plane) if settings.plane else None
        known = {name: target.described() for name, target in lab.targets.items()}
        numbers = {
            **asdict(settings),
            "examples": len(lab.examples),
            "drawn": lab.config.evaluation.model_dump(mode="json", exclude={"every"}),
            "base": lab.config.model.name,
            "targets": [known.get(name, {"target": name}) for name in targets],
            "lines": [_tree(line) for line in lines],
            "plane": None if flat is None else flat.tree(),
        }
        sentences = [*_sentences(lines, flat, lab, settings), *shown_placebos(lab.targets)]
    return Connectivity(numbers, sentences, lines, flat)


def alphas(settings: Settings) -> Floats:
    """Where lines are asked, [A]: 0 and 1 exactly, and steps of one length. Raises ConfigError."""
    steps, low, high = settings.points - 1, settings.low, settings.high
    if settings.points < FEWEST_POINTS:
        raise ConfigError(f"points: {settings.points} has none between the ends; give {FEWEST_POINTS} or more")
    if not (low <= 0 and high >= 1 and np.isfinite([low, high]).all()):
        raise ConfigError(f"low, high: {low:g} to {high:g} leaves out an end; low is at most 0, high at least 1")
    if settings.sigma < 0 or (settings.sigma > 0 and settings.trials < 1):
        raise ConfigError(f"sigma, trials: {settings.sigma:g}, {settings.trials} is no noise; sigma 0 turns it off")
    return np.arange(ceil(low * steps - 1e-9), floor(high * steps + 1e-9) + 1) / steps


def _line(lab: Lab, a: str, b: str, alphas_A: Floats, settings: Settings) -> Line:
    mixes = [{a: 1 - float(alpha), b: float(alpha)} for alpha in alphas_A]
    where = f"{a} to {b}"
    answered = [lab.answer(mix) for mix in watching.each(mixes, where)]
    nats = (
        tuple(lab.divergence({BASE: 1.0}, mix) for mix in watching.each(mixes, f"{where}, KL")) if settings.kl else ()
    )
    smooth = None
    if settings.sigma > 0:
        draws = [Perturbation(settings.sigma, trial) for trial in range(settings.trials)]
        smooth = np.array(
            [[lab.rewards(lab.answer(mix, draw)) for mix in watching.each(mixes, f"{where}, noise")] for draw in draws]
        )
    rewards_AE, hacked_AE = (np.stack([of(found) for found in answered]) for of in (lab.rewards, lab.hacked))
    return Line(a, b, alphas_A, rewards_AE, hacked_AE, nats, smooth)


def _tree(line: Line) -> dict[str, Any]:
    columns: Mapping[str, list[Estimate] | None] = {
        "reward": line.rewards,
        "smooth_reward": line.smooth,
        "kl": line.kl,
        "kl_completion": line.kl_completion,
        "hacked": line.hacked,
    }
    rows = [
        {"alpha": float(alpha), **{name: tree(found[i]) for name, found in columns.items() if found is not None}}
        for i, alpha in enumerate(line.alphas_A)
    ]
    barriers = {"barrier": line.barrier, "smooth_barrier": line.smooth_barrier}
    told_ = {k: None if b is None else {**asdict(b), "corrected": b.corrected} for k, b in barriers.items()}
    return {"a": line.a, "b": line.b, **told_, "points": rows}


# --- in words ---------------------------------------------------------------------------------------------------------


def _sentences(lines: Sequence[Line], flat: Plane | None, lab: Lab, settings: Settings) -> list[str]:
    said = [
        f"{len(lab.examples)} examples of the test split. Intervals are at 95 % for new examples, of each line for "
        "itself, and for these models: others, of other seeds, may differ more."
    ]
    for line in lines:
        said.append(f"{line.a} to {line.b}: {_ends(line)}; {_dip(line.barrier, line)}.")
        if (smooth := line.smooth_barrier) is not None:
            averaged = f"in the mean over {settings.trials} draws of noise of sigma {settings.sigma:g}"
            said.append(f"{line.a} to {line.b}, {averaged}: {_dip(smooth, line)}.")
    return said if flat is None else [*said, flat.line()]


def _ends(line: Line) -> str:
    first, last = (line.rewards[int(np.flatnonzero(line.alphas_A == end)[0])] for end in (0.0, 1.0))
    return f"the reward is {told(first)} at alpha 0 and {told(last)} at alpha 1"


def _dip(found: Barrier, line: Line) -> str:
    inner = int(((line.alphas_A > 0) & (line.alphas_A < 1)).sum())
    largest = (
        f"the largest dip of {inner} inner points below the chord is {found.height:.3g}, at alpha {found.alpha:.3g}"
    )
    if found.low is None or found.high is None or found.p is None:
        return f"{largest} ({found.why})"
    whole = (
        f"{largest} (95 % for the largest: {found.low:.3g} to {found.high:.3g}; {found.by_chance:.3g} by chance alone, "
        f"p {found.p:.2g})"
    )
    return f"a barrier: {whole}" if found.is_sure else f"no barrier is shown: {whole}"
