# SPDX-License-Identifier: Apache-2.0
"""Reward under noise on the weights, with intervals for new draws of noise and new examples at once.

Array suffixes: K draws of noise, E examples, P prompts (examples with the same prompt are one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evoalign import statistics
from evoalign.analysis.base import Finding
from evoalign.analysis.estimates import bounded, share, told, tree
from evoalign.analysis.lab import Asked, Floats, Lab, Nats, Perturbation, shown_placebos
from evoalign.analysis.parts import chosen
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.statistics import Estimate

if TYPE_CHECKING:
    from evoalign.analysis.robustness.command import Settings
    from evoalign.config import Config


@dataclass(frozen=True, slots=True)
class Cell:
    """A target with noise of one width on one part."""

    rewards_KE: Floats
    hacked_KE: Floats
    nats_K: tuple[Nats, ...]

    @property
    def reward(self) -> Estimate:
        return statistics.crossed(self.rewards_KE)

    @property
    def hacked(self) -> Estimate:
        return bounded(statistics.crossed(self.hacked_KE))

    @property
    def kl(self) -> Estimate | None:
        """KL to the unperturbed self, nats a token; None where it was not measured."""
        return self._kl("tokens_P")

    @property
    def kl_completion(self) -> Estimate | None:
        """The same in nats a completion."""
        return self._kl("draws_P")

    def _kl(self, per: str) -> Estimate | None:
        if not self.nats_K:
            return None
        found = statistics.ratio([n.nats_P for n in self.nats_K], [getattr(n, per) for n in self.nats_K])
        return bounded(found, high=np.inf)


Place = tuple[str, float]
"""A part and a sigma."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A target by itself, and what noise makes of it."""

    rewards_E: Floats
    hacked_E: Floats
    cells: Mapping[Place, Cell]

    def changes(self, place: Place) -> Floats:
        """What the noise does to the reward of each example, [K, E]."""
        return self.cells[place].rewards_KE - self.rewards_E


@dataclass(frozen=True)
class Robustness(Finding):
    """The finding, and what its figure is drawn from."""

    profiles: Mapping[str, Profile]

    def draw(self, folder: Path) -> list[Path]:
        from evoalign.analysis.robustness.figure import draw

        return draw(self.profiles, folder)


def robustness(targets: Sequence[str], settings: Settings, config: Config | None) -> Robustness:
    """See `Command`. Raises EvoalignError."""
    _check(settings)
    asked = Asked(
        examples=settings.examples, samples=settings.samples, max_tokens=settings.tokens,
        temperature=settings.temperature, seed=settings.seed,
    )  # fmt: skip
    with Lab(targets, config, asked) as lab:
        parts = chosen(lab.parts, settings.parts)
        places = [(part, sigma) for part in parts for sigma in settings.sigma]
        draws = settings.trials * (2 if settings.kl else 1)
        watching.count(len(targets) * (1 + len(places) * draws))
        profiles = {name: _profile(lab, name, places, settings) for name in targets}
        numbers = {
            **asdict(settings),
            "parts": parts,
            "tied_head": lab.tied,
            "examples": len(lab.examples),
            "drawn": lab.config.evaluation.model_dump(mode="json", exclude={"every"}),
            "targets": [_target(lab, name, profiles[name]) for name in targets],
            "differences": _differences(profiles, places),
        }
        sentences = [*_sentences(profiles, parts, settings, lab), *shown_placebos(lab.targets)]
    return Robustness(numbers, sentences, profiles)


def _check(settings: Settings) -> None:
    wrong = [s for s in settings.sigma if not 0 < s < np.inf]
    if wrong or not settings.sigma:
        raise ConfigError(f"sigma: {wrong[0] if wrong else 'none'} is no width of noise; give numbers above 0")
    if len({*settings.sigma}) < len(settings.sigma):
        raise ConfigError(f"sigma: {list(settings.sigma)} has a width twice; give each once")
    if settings.trials < 1:
        raise ConfigError(f"trials: {settings.trials} draws no noise; give 1 or more (3 for intervals)")


def _profile(lab: Lab, name: str, places: Sequence[Place], settings: Settings) -> Profile:
    watching.begin(f"{name}, without noise")
    own = lab.answer({name: 1.0})
    cells = {(part, sigma): _cell(lab, name, part, sigma, settings) for part, sigma in places}
    return Profile(lab.rewards(own), lab.hacked(own), cells)


def _cell(lab: Lab, name: str, part: str, sigma: float, settings: Settings) -> Cell:
    mix, draws = {name: 1.0}, [Perturbation(sigma, trial, part) for trial in range(settings.trials)]
    where = f"{name}, {_named(part)}, sigma {sigma:g}"
    answered = [lab.answer(mix, draw) for draw in watching.each(draws, where)]
    return Cell(
        np.stack([lab.rewards(found) for found in answered]),
        np.stack([lab.hacked(found) for found in answered]),
        tuple(lab.divergence(mix, mix, draw) for draw in watching.each(draws, f"{where}, KL")) if settings.kl else (),
    )


def _target(lab: Lab, name: str, profile: Profile) -> dict[str, Any]:
    known = lab.targets[name].described() if name in lab.targets else {"target": name}
    own = {"reward": statistics.mean(profile.rewards_E), "hacked": share(profile.hacked_E)}
    rows: list[dict[str, Any]] = []
    for (part, sigma), cell in profile.cells.items():
        found = {
            "reward": cell.reward,
            "change": statistics.crossed(profile.changes((part, sigma))),
            "hacked": cell.hacked,
            "kl": cell.kl,
            "kl_completion": cell.kl_completion,
        }
        estimates = {key: None if value is None else tree(value) for key, value in found.items()}
        rows.append(
            {"part": part, "sigma": sigma, **estimates, "reward_of_each_draw": cell.rewards_KE.mean(1).tolist()}
        )
    return {**known, "unperturbed": {key: tree(value) for key, value in own.items()}, "perturbed": rows}


def _differences(profiles: Mapping[str, Profile], places: Sequence[Place]) -> list[dict[str, Any]]:
    """Of what the same noise does to two targets."""
    return [
        {"a": a, "b": b, "part": place[0], "sigma": place[1], "change": tree(_difference(profiles, a, b, place))}
        for a, b in combinations(profiles, 2)
        for place in places
    ]


def _difference(profiles: Mapping[str, Profile], a: str, b: str, place: Place) -> Estimate:
    return statistics.crossed_difference(profiles[a].changes(place), profiles[b].changes(place), paired=True)


# --- in words ---------------------------------------------------------------------------------------------------------


def _sentences(profiles: Mapping[str, Profile], parts: Sequence[str], settings: Settings, lab: Lab) -> list[str]:
    lines = [
        f"{len(lab.examples)} examples of the test split, {settings.trials} draws of noise, the same for every target. "
        "Intervals are at 95 % for new draws and new examples, each for itself; models of other seeds may differ more."
    ]
    if lab.tied:
        lines.append("The head is the embedding matrix (tied): noise on the embeddings is on the unembedding too.")
    for name, profile in profiles.items():
        own = statistics.mean(profile.rewards_E)
        lines.append(
            f"{name}: the reward without noise is {told(own)}, the hacked share {profile.hacked_E.mean():.1%}."
        )
        lines += [f"{name}, {_named(part)}: {_told(profile, part, settings.sigma)}." for part in parts]
    pairs = list(combinations(profiles, 2))
    if pairs:
        count = len(pairs) * len(parts) * len(settings.sigma)
        lines.append(
            f"{count} comparisons of two targets under the same noise follow: one in twenty has an interval without 0 "
            "by chance alone."
        )
    return [*lines, *(_compared(profiles, a, b) for a, b in pairs)]


def _named(part: str) -> str:
    return "the whole model" if part == "all" else part


def _told(profile: Profile, part: str, sigmas: Sequence[float]) -> str:
    said: list[str] = []
    for sigma in sigmas:
        cell = profile.cells[part, sigma]
        kl = "" if cell.kl is None else f", KL from itself {told(cell.kl)} nats a token"
        change = told(statistics.crossed(profile.changes((part, sigma))), "+.3g")
        said.append(f"at sigma {sigma:g} the reward changes by {change}{kl}")
    return "; ".join(said)


def _compared(profiles: Mapping[str, Profile], a: str, b: str) -> str:
    found = {place: _difference(profiles, a, b, place) for place in profiles[a].cells}
    sure = [
        f"sigma {sigma:g} on {_named(part)}: {b if e.mean < 0 else a} keeps {told(_size(e))} more of its reward than "
        f"{a if e.mean < 0 else b}"
        for (part, sigma), e in found.items() if statistics.is_sure(e)
    ]  # fmt: skip
    unsure = [place for place, e in found.items() if not statistics.is_sure(e)]
    rest = [f"not sure which keeps more ({len(unsure)} of {len(found)}): {_places(unsure)}"] if unsure else []
    return f"{a} and {b}: {'; '.join([*sure, *rest])}."


def _places(places: Sequence[Place]) -> str:
    parts = dict.fromkeys(part for part, _ in places)
    sigmas = {part: ", ".join(f"{sigma:g}" for of, sigma in places if of == part) for part in parts}
    return "; ".join(f"{_named(part)} at sigma {own}" for part, own in sigmas.items())


def _size(found: Estimate) -> Estimate:
    """Of a difference whose sign is said in words."""
    assert found.low is not None and found.high is not None
    return found if found.mean >= 0 else replace(found, mean=-found.mean, low=-found.high, high=-found.low)
