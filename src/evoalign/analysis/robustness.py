# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze robustness`: reward under Gaussian noise on the weights, of all of them or of one part.

Intervals are for new draws of noise and new examples at once. Array suffixes: K draws of noise, E examples, P prompts
(examples with the same prompt are one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.base import Analysis, Finding, error_bars, row
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.report.figures import canvas, frame, plain, save_both, series
from evoalign.report.tables import shorten, visible
from evoalign.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from evoalign.analysis.mixer import KlSums, ModelMixer
    from evoalign.config import Config

Floats: TypeAlias = NDArray[np.float64]
Place: TypeAlias = tuple[str, float]
"""A part and a sigma."""
COLUMN, ROW, MOST = 3.2, 2.8, 6
"""Width and height of a panel in inches; columns per figure."""
SHIFT, ALONE = 1.03, 2.0
"""Factor between the targets at one sigma; factor from a single sigma to the ends of the axis."""


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
    """A target under noise of one width on one part."""

    rewards_KE: Floats
    hacked_KE: Floats
    nats_K: tuple[KlSums, ...]

    @property
    def reward(self) -> Estimate:
        return statistics.crossed(self.rewards_KE)

    @property
    def hacked(self) -> Estimate:
        return statistics.bounded(statistics.crossed(self.hacked_KE))

    @property
    def kl(self) -> Estimate | None:
        """KL to the unperturbed target in nats per token; None where it was not measured."""
        return self._kl("tokens_P")

    @property
    def kl_completion(self) -> Estimate | None:
        """The same in nats per completion."""
        return self._kl("draws_P")

    def _kl(self, per: str) -> Estimate | None:
        if not self.nats_K:
            return None
        found = statistics.ratio([n.nats_P for n in self.nats_K], [getattr(n, per) for n in self.nats_K])
        return statistics.bounded(found, high=np.inf)


@dataclass(frozen=True, slots=True)
class Profile:
    """A target without noise, and under each noise."""

    rewards_E: Floats
    hacked_E: Floats
    perturbed: Mapping[Place, Perturbed]

    def changes(self, place: Place) -> Floats:
        """Return the change of each example's reward by the noise, [K, E]."""
        return self.perturbed[place].rewards_KE - self.rewards_E


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

        _check(settings)
        s = settings
        wanted = EvalSettings(s.examples, s.samples, s.tokens, s.temperature, seed=s.seed)
        with ModelMixer(targets, config, wanted) as mixer:
            parts = chosen(mixer.parts, s.parts)
            places = [(part, sigma) for part in parts for sigma in s.sigma]
            watching.count(len(targets) * (1 + len(places) * s.trials * (2 if s.kl else 1)))
            profiles = {name: measure(mixer, name, places, s) for name in targets}
            numbers = {
                **asdict(s),
                "parts": parts,
                "tied_head": mixer.tied,
                "examples": len(mixer.examples),
                "drawn": mixer.config.evaluation.model_dump(mode="json", exclude={"every"}),
                "targets": [_tree(mixer, name, profiles[name]) for name in targets],
                "differences": [
                    {
                        "a": a,
                        "b": b,
                        "part": place[0],
                        "sigma": place[1],
                        "change": difference(profiles[a], profiles[b], place).tree(),
                    }
                    for a, b in combinations(profiles, 2)
                    for place in places
                ],
            }
            lines = sentences(profiles)
            if mixer.tied:
                lines.insert(0, "The head is the embedding matrix (tied): noise on the embeddings is on both.")
            lines += placebo_hint(mixer.targets)
        return Finding(numbers, lines, figures=partial(draw, profiles))


def _check(settings: Settings) -> None:
    wrong = [s for s in settings.sigma if not 0 < s < np.inf]
    if wrong or not settings.sigma:
        raise ConfigError(f"sigma: {wrong[0] if wrong else 'none'} is no width of noise; set numbers above 0")
    if len({*settings.sigma}) < len(settings.sigma):
        raise ConfigError(f"sigma: {list(settings.sigma)} has a width twice; give each once")
    if settings.trials < 1:
        raise ConfigError(f"trials: {settings.trials} draws no noise; set 1 or more (3 for intervals)")


def measure(mixer: ModelMixer, name: str, places: Sequence[Place], settings: Settings) -> Profile:
    """Evaluate a target without noise, and under every noise."""
    from evoalign.analysis.mixer import Perturbation

    watching.begin(f"{name}, without noise")
    mix = {name: 1.0}
    own = mixer.evaluate(mix)
    perturbed: dict[Place, Perturbed] = {}
    for part, sigma in places:
        draws = [Perturbation(sigma, trial, part) for trial in range(settings.trials)]
        where = f"{name}, {_named(part)}, sigma {sigma:g}"
        found = [mixer.evaluate(mix, draw) for draw in watching.each(draws, where)]
        kl = watching.each(draws, f"{where}, KL") if settings.kl else ()
        nats = tuple(mixer.divergence(mix, mix, draw) for draw in kl)
        rewards_KE, hacked_KE = (np.stack([of(one) for one in found]) for of in (mixer.rewards, mixer.hacked))
        perturbed[part, sigma] = Perturbed(rewards_KE, hacked_KE, nats)
    return Profile(mixer.rewards(own), mixer.hacked(own), perturbed)


def difference(a: Profile, b: Profile, place: Place) -> Estimate:
    """Estimate what the same noise changes in the reward of `a` minus what it changes in that of `b`."""
    return statistics.crossed_difference(a.changes(place), b.changes(place), paired=True)


def _tree(mixer: ModelMixer, name: str, profile: Profile) -> dict[str, Any]:
    known = mixer.targets[name].described() if name in mixer.targets else {"target": name}
    rows: list[dict[str, Any]] = []
    for place, one in profile.perturbed.items():
        found = {
            "reward": one.reward,
            "change": statistics.crossed(profile.changes(place)),
            "hacked": one.hacked,
            "kl": one.kl,
            "kl_completion": one.kl_completion,
        }
        estimates = {key: None if value is None else value.tree() for key, value in found.items()}
        means = one.rewards_KE.mean(1).tolist()
        rows.append({"part": place[0], "sigma": place[1], **estimates, "reward_of_each_draw": means})
    own = {
        "reward": statistics.mean(profile.rewards_E).tree(),
        "hacked": statistics.share(profile.hacked_E).tree(),
    }
    return {**known, "unperturbed": own, "perturbed": rows}


def sentences(profiles: Mapping[str, Profile]) -> list[str]:
    """Return a row for each target and noise, and a verdict for each pair of targets."""
    lines: list[str] = []
    for name, profile in profiles.items():
        own = {"reward": statistics.mean(profile.rewards_E), "hacked": f"{profile.hacked_E.mean():.1%}"}
        lines.append(row(f"{name}, without noise", own))
        for place, one in profile.perturbed.items():
            change = f"{statistics.crossed(profile.changes(place)):+.3g}"
            cells = {"change of the reward": change, "KL in nats per token": one.kl}
            lines.append(row(f"{name}, {_named(place[0])}, sigma {place[1]:g}", cells))
    pairs = list(combinations(profiles, 2))
    for a, b in pairs:
        found = {place: difference(profiles[a], profiles[b], place) for place in profiles[a].perturbed}
        sure = {place: e for place, e in found.items() if statistics.is_sure(e)}
        for place, e in sure.items():
            keeps, other = (b, a) if e.mean < 0 else (a, b)
            lines.append(
                f"{a} and {b}: {_named(place[0])}, sigma {place[1]:g}: {keeps} keeps more of its reward than {other}: "
                f"difference {e:+.3g}."
            )
        lines.append(f"{a} and {b}: {len(sure)} of {len(found)} differences under the same noise are significant.")
    if pairs:
        lines.append("Differences are not corrected for their number: 1 in 20 is a false positive.")
    return lines


def _named(part: str) -> str:
    return "the whole model" if part == "all" else part


def draw(profiles: Mapping[str, Profile], folder: Path) -> list[Path]:
    """Draw reward and KL by the width of the noise, a column per part; a file for each `MOST` parts."""
    parts = list(dict.fromkeys(part for profile in profiles.values() for part, _ in profile.perturbed))
    drawn: list[Path] = []
    for number, start in enumerate(range(0, len(parts), MOST), 1):
        file = "robustness.png" if number == 1 else f"robustness_{number}.png"
        drawn += _draw(profiles, parts[start : start + MOST], folder / file)
    return drawn


def _draw(profiles: Mapping[str, Profile], parts: Sequence[str], path: Path) -> list[Path]:
    has_kl = any(one.nats_K for profile in profiles.values() for one in profile.perturbed.values())
    rows = 2 if has_kl else 1
    width = max(COLUMN * len(parts), 2 * COLUMN) + 0.6
    figure = canvas(width, ROW * rows + 0.4 + 0.25 * len(profiles), layout="constrained")
    grid = figure.subplots(rows, len(parts), sharex=True, sharey="row", squeeze=False)
    for column, part in enumerate(parts):
        frame(grid[0][column], "whole model" if part == "all" else part, "" if has_kl else "sigma of the noise")
        _panel(grid[0][column], profiles, part, lambda one: one.reward)
        for index, profile in enumerate(profiles.values()):
            style = {**series(index), "marker": ""}
            grid[0][column].axhline(float(profile.rewards_E.mean()), linewidth=0.8, alpha=0.6, **style)
        if has_kl:
            plain(grid[1][column])
            grid[1][column].set_xlabel("sigma of the noise")
            _panel(grid[1][column], profiles, part, lambda one: one.kl)
    grid[0][0].set_ylabel("reward")
    if has_kl:
        grid[1][0].set_ylabel("KL to no noise, nats per token")
    handles, labels = grid[0][0].get_legend_handles_labels()
    title = "bars: 95 % for new draws and examples; thin lines: without noise"
    figure.legend(handles, labels, loc="outside lower left", frameon=False, title=title, alignment="left")
    return save_both(figure, path)


def _panel(
    axes: Axes, profiles: Mapping[str, Profile], part: str, measured: Callable[[Perturbed], Estimate | None]
) -> None:
    sigmas = sorted({sigma for profile in profiles.values() for _, sigma in profile.perturbed})
    axes.set_xscale("log")
    if len(sigmas) == 1:  # else the axis would span only the shift between the targets
        axes.set_xlim(sigmas[0] / ALONE, sigmas[0] * ALONE)
    axes.set_xticks(sigmas, [f"{sigma:g}" for sigma in sigmas])
    axes.set_xticks([], minor=True)
    for index, (name, profile) in enumerate(profiles.items()):
        known = {sigma: measured(one) for (of, sigma), one in sorted(profile.perturbed.items()) if of == part}
        points = [(sigma, found) for sigma, found in known.items() if found is not None]
        shift = SHIFT ** (index - (len(profiles) - 1) / 2)
        x, y = [sigma * shift for sigma, _ in points], [found.mean for _, found in points]
        halves = error_bars([found for _, found in points])
        label = shorten(visible(name), 60)
        axes.errorbar(x, y, yerr=halves, label=label, capsize=2.5, markersize=4, linewidth=1.4, **series(index))
