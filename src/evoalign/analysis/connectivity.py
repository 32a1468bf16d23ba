# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze connectivity`: reward, KL and hacked share along straight lines between the weights of models.

The barrier of a line is max over the inner points of d(alpha) = (1 - alpha) r(0) + alpha r(1) - r(alpha). The largest
of twenty noisy dips is above 0 even where there is none. So its interval comes from a band around all dips at once:
with S the estimated covariance of their means and s the root of its diagonal,

    d(alpha) +- c s(alpha),    c the 95 % quantile of max |T(alpha)| of a multivariate t with the correlation of S

(Hothorn, Bretz and Westfall, Biometrical Journal 50, 2008). If the band covers every true dip, then max (d - c s) and
max (d + c s) cover the largest: the interval is for the maximum itself, and conservative. S is over examples; of a
smoothed line also over the draws of noise, the two added as in `evoalign.statistics.crossed`, with the smaller of their
degrees of freedom. s is at least |d| / (E + 1), what one more example without a dip would give: a dip that all E
examples share is known only as precisely as E examples allow.

Array suffixes: A alphas, I inner alphas, K draws of noise, E examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.base import BASE, Analysis, Finding, as_json, below, row, short_names
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.report.figures import COLORS, GRID, INK, MARKERS, canvas, frame, plain, save_both
from evoalign.statistics import FEWEST, FLAT, LEVEL, Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from evoalign.analysis.mixer import KlSums, ModelMixer
    from evoalign.config import Config

Floats: TypeAlias = NDArray[np.float64]
FEWEST_POINTS = 3
DRAWS = 20_000
"""Draws of the multivariate t, which give the quantile to about 1 %."""


@dataclass(frozen=True)
class Settings:
    """`points`: number of points from end to end of a line, both included; the same steps continue beyond the ends, to
    `low` and `high`.

    `sigma` above 0: also the mean reward over noise of this width on all weights, of `trials` draws. `examples` of the
    test split are completed `samples` times (with a temperature); `tokens` and `temperature` None: those of the
    config's evaluation. `kl`: whether to measure the divergence from the base model, which samples each example once
    more. `seed` seeds the noise on weights.
    """

    points: int = 21
    low: float = -0.5
    high: float = 1.5
    sigma: float = 0.0
    trials: int = 8
    examples: int = 100
    samples: int = 1
    tokens: int | None = None
    temperature: float | None = None
    kl: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Barrier:
    """The largest dip below the chord, its alpha, and its 95 % interval; without an interval `why` has the reason.

    `p` is one-sided: the probability of as large a dip, in its standard errors, where no point dips. `by_chance` is the
    expected largest dip where all true dips are 0, and `corrected` the height less that.
    """

    height: float
    alpha: float
    n: int
    low: float | None = None
    high: float | None = None
    by_chance: float | None = None
    p: float | None = None
    why: str | None = None
    corrected: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """The line from `a`, at alpha 0, to `b`, at 1. `smooth_KAE`: rewards with noise on the weights, if requested."""

    a: str
    b: str
    alphas_A: Floats
    rewards_AE: Floats
    hacked_AE: Floats
    nats_A: tuple[KlSums, ...]
    smooth_KAE: Floats | None

    @property
    def estimates(self) -> dict[str, list[Estimate]]:
        """Estimates at each alpha by name, of what was measured. KL is from the base model."""
        found = {"reward": [statistics.mean(rewards_E) for rewards_E in self.rewards_AE]}
        if self.smooth_KAE is not None:
            found["smooth_reward"] = [statistics.crossed(self.smooth_KAE[:, a]) for a in range(len(self.alphas_A))]
        if self.nats_A:
            found["kl"] = [nats.per_token for nats in self.nats_A]
            found["kl_completion"] = [nats.per_completion for nats in self.nats_A]
        return {**found, "hacked": [statistics.share(hacked_E) for hacked_E in self.hacked_AE]}

    @property
    def barriers(self) -> dict[str, Barrier | None]:
        """The barriers of the rewards and of the smoothed rewards."""
        smooth = None if self.smooth_KAE is None else barrier(self.alphas_A, self.smooth_KAE)
        return {"barrier": barrier(self.alphas_A, self.rewards_AE[None]), "smooth_barrier": smooth}

    @property
    def ends(self) -> list[Estimate]:
        """The rewards at alpha 0 and 1."""
        return [statistics.mean(self.rewards_AE[self.alphas_A == end][0]) for end in (0.0, 1.0)]

    def tree(self) -> dict[str, Any]:
        """Return the barriers and the points for JSON."""
        columns = as_json(self.estimates)
        points = [
            {"alpha": float(alpha), **{name: found[i] for name, found in columns.items()}}
            for i, alpha in enumerate(self.alphas_A)
        ]
        return {"a": self.a, "b": self.b, **as_json(self.barriers), "points": points}


class Connectivity(Analysis[Settings]):
    """Reward, KL and hacked share along the straight lines between the weights of every two targets, and beyond.

    Adapters are merged before weights are interpolated; `base` is the model that the targets started from.
    """

    name = "connectivity"
    help = "Reward along straight lines between models, and whether there is a barrier."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads one model, which takes the weights of every point; raises EvoalignError for targets that do not fit."""
        from evoalign.analysis.mixer import EvalSettings, ModelMixer
        from evoalign.analysis.targets import placebo_hint

        s, alphas_A = settings, alphas(settings)
        if len(targets) < 2:
            raise ConfigError(f"connectivity: {targets[0]} alone has no line; give two targets")
        wanted = EvalSettings(s.examples, s.samples, s.tokens, s.temperature, seed=s.seed)
        with ModelMixer(targets, config, wanted) as mixer:
            of_point = 1 + s.kl + (s.trials if s.sigma > 0 else 0)
            watching.count(len(list(combinations(targets, 2))) * len(alphas_A) * of_point)
            lines = [measure(mixer, a, b, alphas_A, s) for a, b in combinations(targets, 2)]
            numbers = {
                **asdict(s),
                "examples": len(mixer.examples),
                "drawn": mixer.config.evaluation.model_dump(mode="json", exclude={"every"}),
                "base": mixer.config.model.name,
                "targets": [mixer.described(name) for name in targets],
                "lines": lines,
            }
            texts = [text for line in lines for text in _sentences(line)] + placebo_hint(mixer.targets)
        return Finding(numbers, texts, figures=partial(draw, lines))


def alphas(settings: Settings) -> Floats:
    """Return the points of a line, [A]: 0 and 1 exactly, in equal steps. Raises ConfigError."""
    steps, low, high = settings.points - 1, settings.low, settings.high
    if settings.points < FEWEST_POINTS:
        raise ConfigError(f"points: {settings.points} has none between the ends; set {FEWEST_POINTS} or more")
    if not (low <= 0 and high >= 1 and np.isfinite([low, high]).all()):
        raise ConfigError(f"low, high: {low:g} to {high:g} leaves out a model, at 0 or 1; set low <= 0 and high >= 1")
    if settings.sigma < 0 or (settings.sigma > 0 and settings.trials < 1):
        raise ConfigError(f"sigma, trials: {settings.sigma:g}, {settings.trials} is no noise; sigma 0 turns it off")
    return np.arange(ceil(low * steps - 1e-9), floor(high * steps + 1e-9) + 1) / steps


def measure(mixer: ModelMixer, a: str, b: str, alphas_A: Floats, settings: Settings) -> Line:
    """Evaluate the points of a line."""
    from evoalign.analysis.mixer import Perturbation

    mixes, where = [{a: 1 - float(alpha), b: float(alpha)} for alpha in alphas_A], f"{a} to {b}"
    found = [mixer.evaluate(mix) for mix in watching.each(mixes, where)]
    kl = watching.each(mixes, f"{where}, KL") if settings.kl else ()
    nats = tuple(mixer.divergence({BASE: 1.0}, mix) for mix in kl)

    def noisy(trial: int) -> list[Floats]:
        draw = Perturbation(settings.sigma, trial)
        return [mixer.rewards(mixer.evaluate(mix, draw)) for mix in watching.each(mixes, f"{where}, noise")]

    smooth = np.array([noisy(trial) for trial in range(settings.trials)]) if settings.sigma > 0 else None
    rewards_AE, hacked_AE = (np.stack([of(one) for one in found]) for of in (mixer.rewards, mixer.hacked))
    return Line(a, b, alphas_A, rewards_AE, hacked_AE, nats, smooth)


def _sentences(line: Line) -> list[str]:
    first, last = line.ends
    lines = [row(f"{line.a} to {line.b}", {"reward at alpha 0": first, "at alpha 1": last})]
    for name, found in line.barriers.items():
        if found is None:
            continue
        interval = Estimate(found.height, found.n, found.low, found.high, found.why)
        sure = found.low is not None and found.low > 0
        what = ", mean over noise on the weights" if name == "smooth_barrier" else ""
        cells = {"at alpha": found.alpha, "by chance alone": found.by_chance, "p": found.p}
        cells |= {"a barrier": None if found.low is None else "yes" if sure else "not shown"}
        lines.append(row(f"{line.a} to {line.b}{what}", {"largest dip below the chord": interval, **cells}))
    return lines


def dips(alphas_A: Floats, rewards_KAE: Floats) -> Floats:
    """Return chord minus reward, [K, I, E], at the I points between the ends; the ends have to be among the alphas."""
    first, last = (rewards_KAE[:, alphas_A == end] for end in (0.0, 1.0))
    inner = (alphas_A > 0) & (alphas_A < 1)
    share_I1 = alphas_A[inner][:, None]
    return (1 - share_I1) * first + share_I1 * last - rewards_KAE[:, inner]


def barrier(alphas_A: Floats, rewards_KAE: Floats) -> Barrier:
    """Return the barrier of the rewards of K draws of noise (1: none), A alphas with 0 and 1, and E examples."""
    dips_KIE = dips(alphas_A, rewards_KAE)
    draws, _, examples = dips_KIE.shape
    dips_I = dips_KIE.mean((0, 2))
    at = int(dips_I.argmax())
    height = float(dips_I[at])
    found: dict[str, Any] = {"height": height, "alpha": float(alphas_A[(alphas_A > 0) & (alphas_A < 1)][at])}
    found["n"] = examples
    if examples < FEWEST or 1 < draws < FEWEST:
        few = f"{examples} examples" if examples < FEWEST else f"{draws} draws of noise"
        return Barrier(**found, why=f"{few}: no interval")
    if np.abs(dips_KIE).max() <= FLAT * float(np.abs(rewards_KAE).max()):
        return Barrier(**found, why="all points lie on the chord, of every example: no interval")
    spread_II, df = np.atleast_2d(np.cov(dips_KIE.mean(0))) / examples, examples - 1
    if draws > 1:
        spread_II = spread_II + np.atleast_2d(np.cov(dips_KIE.mean(2).T)) / draws
        df = min(df, draws - 1)
    least_I = np.square(dips_I / (examples + 1))
    spread_II = spread_II + np.diag(np.maximum(0.0, least_I - np.diag(spread_II)))
    error_I = np.sqrt(np.diag(spread_II))
    known = error_I > 0  # where it is 0 no example dips, so it is never the largest by chance
    t_DI, z_DI = _drawn(spread_II[np.ix_(known, known)], df)
    width = float(np.quantile(np.abs(t_DI).max(1), 1 - LEVEL))
    largest = float((dips_I[known] / error_I[known]).max())
    by_chance = float(z_DI.max(1).mean())
    return Barrier(
        **found,
        low=float((dips_I - width * error_I).max()),
        high=float((dips_I + width * error_I).max()),
        by_chance=by_chance,
        p=(1 + int((t_DI.max(1) >= largest).sum())) / (1 + DRAWS),
        corrected=height - by_chance,
    )


def _drawn(spread_II: Floats, df: int) -> tuple[Floats, Floats]:
    """Return fixed draws of the dips' standardised errors (multivariate t), and of the errors themselves (normal)."""
    random = np.random.Generator(np.random.Philox(key=[0, 17]))
    values_I, vectors_II = np.linalg.eigh(spread_II)
    root_II = vectors_II * np.sqrt(np.maximum(values_I, 0.0))
    z_DI = random.standard_normal((DRAWS, len(spread_II))) @ root_II.T
    scale_D1 = np.sqrt(random.chisquare(df, (DRAWS, 1)) / df)
    return z_DI / np.sqrt(np.diag(spread_II)) / scale_D1, z_DI


def draw(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Draw reward, KL and hacked share by alpha, a file per line."""
    titles = {"reward": "reward", "kl": "KL from the base,\nnats per token", "hacked": "hacked share"}
    drawn, short = list[Path](), short_names([name for line in lines for name in (line.a, line.b)])
    for number, line in enumerate(lines, 1):
        found = line.estimates
        is_hacked = any(one.mean for one in found["hacked"])
        names = [name for name in titles if name in found and (name != "hacked" or is_hacked)]
        figure = canvas(8.0, 2.4 * len(names) + 1.0, layout="constrained")
        panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
        frame(panels[0], f"{short[line.a]} (0) to {short[line.b]} (1)", "")
        for axes, name in zip(panels, names, strict=True):
            plain(axes)
            axes.axvspan(0, 1, color=GRID, alpha=0.35, linewidth=0)
            axes.set_ylabel(titles[name])
            _band(axes, line.alphas_A, found[name], 0, "plain" if name == "reward" else "")
        if "smooth_reward" in found:
            _band(panels[0], line.alphas_A, found["smooth_reward"], 1, "mean over noise on the weights")
        chord: dict[str, Any] = {"color": INK, "linestyle": (0, (2, 2)), "linewidth": 1.0, "label": "chord"}
        panels[0].plot([0, 1], [one.mean for one in line.ends], **chord)
        none = "" if is_hacked else "\nno completion is hacked at any of the points"
        panels[-1].set_xlabel(f"alpha: bands are 95 % at each point alone, for new examples{none}")
        below(figure, panels[0], 3)
        drawn += save_both(figure, folder / f"connectivity_{number}.png")
    return drawn


def _band(axes: Axes, alphas_A: Floats, found: Sequence[Estimate], index: int, label: str) -> None:
    style: dict[str, Any] = {"color": COLORS[index], "linestyle": ("-", "--")[index], "marker": MARKERS[index]}
    low = [one.mean if one.low is None else one.low for one in found]
    high = [one.mean if one.high is None else one.high for one in found]
    axes.fill_between(alphas_A, low, high, color=COLORS[index], alpha=0.18, linewidth=0)
    axes.plot(alphas_A, [one.mean for one in found], label=label, markersize=3.5, linewidth=1.5, **style)
