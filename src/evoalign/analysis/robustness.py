# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze robustness`: reward under Gaussian noise on the weights, of all of them or of one part.

Intervals are for new draws of noise and new examples at once. Array suffixes: K draws of noise, E examples, P prompts
(examples with the same prompt are one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.base import Analysis, Finding, as_json, below, error_bars, files, row, short_names
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.report.figures import canvas, frame, plain, save_both, series
from evoalign.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from evoalign.analysis.mixer import KlSums, ModelMixer
    from evoalign.config import Config

Floats: TypeAlias = NDArray[np.float64]
Place: TypeAlias = tuple[str, float]
"""A part and a sigma."""
MOST = 6
"""Columns per figure."""


@dataclass(frozen=True)
class Settings:
    """The defaults are the published ones: three widths, 8 draws of noise, 20 completions of at most 128 tokens.

    `sigma`: standard deviations of the noise, whatever the size of the weights. `trials`: draws of noise. `examples`
    of the test split are completed `samples` times (with a temperature) in at most `tokens` tokens; `temperature` None:
    as the config's evaluation. `parts`: all, unembedding, embeddings, attention, mlp, "layer 3", or layers for
    each layer. `kl`: whether to measure the divergence, which samples each example once more. `seed` seeds the
    noise.
    """

    sigma: tuple[float, ...] = (0.005, 0.01, 0.05)
    trials: int = 8
    examples: int = 20
    samples: int = 1
    tokens: int = 128
    temperature: float | None = None
    parts: tuple[str, ...] = ("all", "unembedding", "embeddings", "attention", "mlp")
    kl: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Perturbed:
    """One model under K draws of noise of one width; `nats` is the KL [K, P] to the model without noise, if wanted."""

    rewards_KE: Floats
    hacked_KE: Floats
    nats: KlSums | None

    @property
    def reward(self) -> Estimate:
        return statistics.crossed(self.rewards_KE)

    @property
    def kl(self) -> Estimate | None:
        return self.nats and self.nats.per_token


@dataclass(frozen=True, slots=True)
class Profile:
    """Results of one model: rewards and signs of hacking without weight noise, and under each noise width and draw."""

    rewards_E: Floats
    hacked_E: Floats
    perturbed: Mapping[Place, Perturbed]

    def changes(self, place: Place) -> Floats:
        """Return the change of each example's reward by the noise, [K, E]."""
        return self.perturbed[place].rewards_KE - self.rewards_E

    def tree(self) -> dict[str, Any]:
        """Return the estimates for JSON."""
        rows: list[dict[str, Any]] = []
        for place, one in self.perturbed.items():
            found = {
                "part": place[0],
                "sigma": place[1],
                "reward": one.reward,
                "change": statistics.crossed(self.changes(place)),
                "hacked": statistics.bounded(statistics.crossed(one.hacked_KE)),
                "kl": one.kl,
                "kl_completion": one.nats and one.nats.per_completion,
                "reward_of_each_draw": one.rewards_KE.mean(1),
            }
            rows.append(as_json(found))
        own = {"reward": statistics.mean(self.rewards_E), "hacked": statistics.share(self.hacked_E)}
        return {"unperturbed": as_json(own), "perturbed": rows}


class Robustness(Analysis[Settings]):
    """Reward, hacked share and KL to the unperturbed target under Gaussian noise on all weights or a part of them.

    Every target gets the same noise, so that their differences are paired; `base` is the model they started from.
    """

    name = "robustness"
    help = "Reward under random noise on the weights: of the whole model, and of one part at a time."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads one model, which takes the weights of every target; raises EvoalignError for one that does not fit."""
        from evoalign.analysis.mixer import EvalSettings, ModelMixer
        from evoalign.analysis.targets import placebo_hint
        from evoalign.analysis.weights import chosen

        s = settings
        if wrong := [sigma for sigma in s.sigma or (0.0,) if not 0 < sigma < np.inf]:
            raise ConfigError(f"sigma: {wrong[0] if s.sigma else 'none'} is no width of noise; set numbers above 0")
        if len({*s.sigma}) < len(s.sigma):
            raise ConfigError(f"sigma: {list(s.sigma)} has a width twice; give each once")
        if s.trials < 1:
            raise ConfigError(f"trials: {s.trials} draws no noise; set 1 or more (3 for intervals)")
        wanted = EvalSettings(s.examples, s.samples, s.tokens, s.temperature, seed=s.seed)
        with ModelMixer(targets, config, wanted) as mixer:
            parts = chosen(mixer.parts, s.parts)
            places = [(part, sigma) for part in parts for sigma in s.sigma]
            watching.count(len(targets) * (1 + len(places) * s.trials * (2 if s.kl else 1)))
            profiles = {name: measure(mixer, name, places, s) for name in targets}
            gaps = {
                (a, b, place): difference(profiles[a], profiles[b], place)
                for a, b in combinations(profiles, 2)
                for place in places
            }
            numbers = {
                **asdict(s),
                "parts": parts,
                "tied_head": mixer.tied,
                "examples": len(mixer.examples),
                "drawn": mixer.config.evaluation.model_dump(mode="json", exclude={"every"}),
                "targets": [{**mixer.described(name), **profiles[name].tree()} for name in targets],
                "differences": [
                    {"a": a, "b": b, "part": place[0], "sigma": place[1], "change": gap}
                    for (a, b, place), gap in gaps.items()
                ],
            }
            tied = (
                ["The head is the embedding matrix (tied): noise on the embeddings is on both."] if mixer.tied else []
            )
            lines = [*tied, *sentences(profiles, gaps), *placebo_hint(mixer.targets)]
        return Finding(numbers, lines, figures=partial(draw, profiles))


def measure(mixer: ModelMixer, name: str, places: Sequence[Place], settings: Settings) -> Profile:
    """Evaluate a target without noise, and under every noise."""
    from evoalign.analysis.mixer import KlSums, Perturbation

    watching.begin(f"{name}, without noise")
    mix = {name: 1.0}
    own = mixer.evaluate(mix)
    perturbed: dict[Place, Perturbed] = {}
    for part, sigma in places:
        draws = [Perturbation(sigma, trial, part) for trial in range(settings.trials)]
        where = f"{name}, {_named(part)}, sigma {sigma:g}"
        found = [mixer.evaluate(mix, draw) for draw in watching.each(draws, where)]
        kl = watching.each(draws, f"{where}, KL") if settings.kl else ()
        nats = [astuple(mixer.divergence(mix, mix, draw)) for draw in kl]
        rewards_KE, hacked_KE = (np.stack([of(one) for one in found]) for of in (mixer.rewards, mixer.hacked))
        sums = KlSums(*map(np.array, zip(*nats, strict=True))) if nats else None
        perturbed[part, sigma] = Perturbed(rewards_KE, hacked_KE, sums)
    return Profile(mixer.rewards(own), mixer.hacked(own), perturbed)


def difference(a: Profile, b: Profile, place: Place) -> Estimate:
    """Estimate what the same noise changes in the reward of `a` minus what it changes in that of `b`."""
    return statistics.crossed_difference(a.changes(place), b.changes(place), paired=True)


def sentences(profiles: Mapping[str, Profile], gaps: Mapping[tuple[str, str, Place], Estimate]) -> list[str]:
    """Return a row for each target and noise, and for each significant difference of two targets."""
    lines: list[str] = []
    for name, profile in profiles.items():
        own = {"reward": statistics.mean(profile.rewards_E), "hacked": f"{profile.hacked_E.mean():.1%}"}
        lines.append(row(f"{name}, without noise", own))
        for place, one in profile.perturbed.items():
            change = f"{statistics.crossed(profile.changes(place)):+.3g}"
            cells = {"change of the reward": change, "KL in nats per token": one.kl}
            lines.append(row(f"{name}, {_named(place[0])}, sigma {place[1]:g}", cells))
    sure = {key: gap for key, gap in gaps.items() if statistics.is_sure(gap)}
    for (a, b, (part, sigma)), gap in sure.items():
        cells = {"difference": f"{gap:+.3g}", "keeps more of its reward": b if gap.mean < 0 else a}
        lines.append(row(f"{a} and {b}, {_named(part)}, sigma {sigma:g}", cells))
    count = f"{len(sure)} of {len(gaps)} differences under the same noise are significant"
    return [*lines, f"{count}; 1 in 20 is a false positive."] if gaps else lines


def _named(part: str) -> str:
    return "the whole model" if part == "all" else part


def draw(profiles: Mapping[str, Profile], folder: Path) -> list[Path]:
    """Draw reward and KL by the width of the noise, a column per part; a file for each `MOST` parts."""
    parts = list(dict.fromkeys(part for profile in profiles.values() for part, _ in profile.perturbed))
    has_kl = any(one.nats for profile in profiles.values() for one in profile.perturbed.values())
    drawn: list[Path] = []
    for path, shown in files(folder, "robustness", parts, MOST):
        rows = 1 + has_kl
        size = 3.2 * max(len(shown), 2) + 0.6, 2.8 * rows + 0.4 + 0.25 * len(profiles)
        figure = canvas(*size, layout="constrained")
        grid = figure.subplots(rows, len(shown), sharex=True, sharey="row", squeeze=False)
        for column, part in enumerate(shown):
            frame(grid[0][column], "whole model" if part == "all" else part, "")
            _panel(grid[0][column], profiles, part, lambda one: one.reward)
            for index, profile in enumerate(profiles.values()):
                style = {**series(index), "marker": ""}
                grid[0][column].axhline(float(profile.rewards_E.mean()), linewidth=0.8, alpha=0.6, **style)
            if has_kl:
                plain(grid[1][column])
                _panel(grid[1][column], profiles, part, lambda one: one.kl)
            grid[-1][column].set_xlabel("sigma of the noise")
        for axes, label in zip(grid[:, 0], ("reward", "KL to no noise, nats per token"), strict=False):
            axes.set_ylabel(label)
        below(figure, grid[0][0], 1, "bars: 95 % for new draws and examples; thin lines: without noise")
        drawn += save_both(figure, path)
    return drawn


def _panel(
    axes: Axes, profiles: Mapping[str, Profile], part: str, measured: Callable[[Perturbed], Estimate | None]
) -> None:
    sigmas = sorted({sigma for profile in profiles.values() for _, sigma in profile.perturbed})
    axes.set_xscale("log")
    if len(sigmas) == 1:  # else the axis would span only the shift between the targets
        axes.set_xlim(sigmas[0] / 2, sigmas[0] * 2)
    axes.set_xticks(sigmas, [f"{sigma:g}" for sigma in sigmas])
    axes.set_xticks([], minor=True)
    for index, (name, profile) in enumerate(profiles.items()):
        known = {sigma: measured(one) for (of, sigma), one in sorted(profile.perturbed.items()) if of == part}
        points = {sigma: found for sigma, found in known.items() if found is not None}
        shift, found = 1.03 ** (index - (len(profiles) - 1) / 2), list(points.values())
        x, y = [sigma * shift for sigma in points], [one.mean for one in found]
        style: dict[str, Any] = {**series(index), "label": short_names(list(profiles))[name]}
        axes.errorbar(x, y, yerr=error_bars(found), capsize=2.5, markersize=4, linewidth=1.4, **style)
