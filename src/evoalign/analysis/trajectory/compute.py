# SPDX-License-Identifier: Apache-2.0
"""The ways of all targets: followed, measured, put into words. Array suffixes: P points, C components."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from evoalign.analysis.base import Finding
from evoalign.analysis.estimates import told, tree
from evoalign.analysis.targets import Target, locate
from evoalign.analysis.trajectory.measures import Beside, Map, Way, beside, gram, principal, signal_share, way
from evoalign.analysis.trajectory.walks import Journey, Point, Saved, Walk, Weights, saved
from evoalign.checks.distance import Base
from evoalign.config import Config, ModelConfig
from evoalign.engines import weights_hash
from evoalign.engines.specs import mean_abs, specs_of
from evoalign.engines.transformers.engine import dtype_on, load_model
from evoalign.errors import ConfigError, JournalError, ResumeError
from evoalign.models.tensors import tensors_of
from evoalign.report import watching
from evoalign.rundir.method import method_of
from evoalign.statistics import Estimate
from evoalign.training.replay import config_of, log_of
from evoalign.types import TensorSpec

if TYPE_CHECKING:
    from evoalign.analysis.trajectory.command import Settings


@dataclass(frozen=True, slots=True)
class Followed:
    """A run of ES along the numbers that evolve. `expected` by formula, None with Adam; `placebos` in their order."""

    target: str
    steps: tuple[int, ...]
    own: Way
    placebos: tuple[Way, ...]
    expected: tuple[float, ...] | None
    share: Estimate
    along: Beside
    onward: Beside


@dataclass(frozen=True)
class Trajectory(Finding):
    """The finding, and what its figures are drawn from: `places` of all `points` on the map."""

    points: Sequence[Point]
    places: Map
    paths: Sequence[Followed]

    def draw(self, folder: Path) -> list[Path]:
        from evoalign.analysis.trajectory.figure import draw

        return draw(self.points, self.places, self.paths, folder)


def trajectory(targets: Sequence[str], settings: Settings, config: Config | None) -> Trajectory:
    """See `Command`. Raises EvoalignError."""
    _check(targets, settings)
    found = [locate(name, config) if _is_single(name) else None for name in targets]
    model_config = _model_of(targets, found, config)
    model = load_model(model_config.model, dtype_on(model_config.model, torch.device("cpu")))
    base, specs = tensors_of(model), specs_of(model, mean_abs)
    digest = weights_hash((n, p.data) for n, p in model.named_parameters())
    walks: list[Walk] = []
    for name, target in zip(targets, found, strict=True):
        if target is None:
            walks.append(_journey(name, model_config.model, base, specs, digest, settings))
        else:
            walks.append(saved(target, Base(model_config)))
    journeys = [walk for walk in walks if isinstance(walk, Journey)]
    watching.count(len(journeys) * (1 + settings.placebos) + 1)
    paths = [_path(walk, settings) for walk in journeys]
    watching.begin("the map")
    points = [point for walk in walks for point in walk.points]
    places = principal(_gram(walks, base), [i for i, p in enumerate(points) if p.kind != "member"])
    numbers = {
        **asdict(settings),
        "base": model_config.model.name,
        "shares": [float(s) for s in places.shares_C],
        "points": [
            {**asdict(p), "x": float(x), "y": float(y)} for p, (x, y) in zip(points, places.places_PC, strict=True)
        ],
        "paths": [_tree(path) for path in paths],
    }
    return Trajectory(numbers, _sentences(paths, walks, places, settings), points, places, paths)


def _check(targets: Sequence[str], settings: Settings) -> None:
    if twice := sorted({name for name in targets if list(targets).count(name) > 1}):
        raise ConfigError(f"{twice[0]} is given twice; name each target once")
    for name in ("points", "placebos", "members", "drawn"):
        if getattr(settings, name) < 0:
            raise ConfigError(f"{name}: {getattr(settings, name)} is less than none; give 0 or more")


def _is_single(name: str) -> bool:
    """Whether a target has no journal to be followed by."""
    return method_of(Path(name)) != "es" or not (Path(name) / "config.yaml").is_file()


def _model_of(targets: Sequence[str], found: Sequence[Target | None], config: Config | None) -> Config:
    """The config that names the base model of all, whose dtype is that of the first run of ES. Raises ConfigError."""
    if config is not None:
        return config
    known = [
        config_of(log_of(name)) if target is None else target.config
        for name, target in zip(targets, found, strict=True)
    ]
    ordered = sorted(zip(known, found, targets, strict=True), key=lambda one: one[1] is not None)
    first = ordered[0][0]
    for other, _, name in ordered[1:]:
        if Path(other.model.name).name != Path(first.model.name).name:
            raise ConfigError(
                f"{name} started from {other.model.name}, and {ordered[0][2]} from {first.model.name}: two paths are "
                "on one map where they have one start"
            )
    return first


def _journey(
    name: str, model: ModelConfig, base: Weights, specs: Sequence[TensorSpec], digest: str, settings: Settings
) -> Journey:
    log = log_of(name).whole()
    if not log.sealed:
        raise JournalError(f"{log.path} has no whole generation yet; there is no path to follow")
    if log.header.model_hash != digest:
        raise ResumeError(
            f"{name} was made with other base weights, or in another dtype ({log.header.dtype}), than the model that "
            "is loaded here; compare runs of one base model and dtype"
        )
    count = log.sealed
    parts = min(settings.points or count, count)
    steps = sorted({round(count * i / parts) for i in range(parts + 1)})
    drawn = sorted({round((count - 1) * i / max(1, settings.drawn - 1)) for i in range(settings.drawn)})
    members = {g: range(min(settings.members, len(log.generations[g].update.members))) for g in drawn}
    return Journey(
        name, log, config_of(log, model), base, specs, steps, members if settings.members else {},
        [0] if settings.placebos else [],
    )  # fmt: skip


def _path(journey: Journey, settings: Settings) -> Followed:
    def of(seed: int | None) -> Way:
        watching.begin(journey.name if seed is None else f"{journey.name}, placebos")
        count = len(journey.steps)
        return way(gram(journey.blocks(), count, lambda name, at: journey.evolved(name, at, seed)))

    own = of(None)
    journey.check()
    placebos, expected = tuple(of(seed) for seed in range(settings.placebos)), journey.expected()
    return Followed(
        journey.name, journey.steps, own, placebos, None if expected is None else tuple(expected),
        signal_share(own.distances_P[-1], [p.distances_P[-1] for p in placebos]),
        beside(own.along, [p.along for p in placebos]), beside(own.onward, [p.onward for p in placebos]),
    )  # fmt: skip


def _gram(walks: Sequence[Walk], base: Weights) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of the points of all walks, in the weights of the model, whatever it is that evolves."""
    count = sum(len(walk.points) for walk in walks)
    names = dict.fromkeys(name for walk in walks for name in walk.names())
    moving = [frozenset(walk.names()) for walk in walks]

    def change(name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        shape = base[name][slices].shape
        return torch.cat([
            walk.change(name, slices) if name in own else torch.zeros(len(walk.points), *shape)
            for walk, own in zip(walks, moving, strict=True)
        ])  # fmt: skip

    return gram([(name, tuple(base[name].shape)) for name in names], count, change)


def _tree(path: Followed) -> dict[str, Any]:
    def plain(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float | None]:
        return [float(v) if math.isfinite(v) else None for v in values]

    def ways(one: Way) -> dict[str, Any]:
        return {"distance": plain(one.distances_P), "next": plain(one.next_S), "rest": plain(one.rest_S),
                "own_components": plain(one.shares_C)}  # fmt: skip

    def compared(one: Beside) -> dict[str, Any]:
        value = one.value if math.isfinite(one.value) else None
        return {**asdict(one), "value": value, "placebos": list(one.placebos), "excess": tree(one.excess)}

    return {
        "target": path.target, "steps": list(path.steps), **ways(path.own),
        "expected_distance": None if path.expected is None else list(path.expected),
        "placebos": [ways(one) for one in path.placebos], "signal_share": tree(path.share),
        "next_step": compared(path.along), "other_steps": compared(path.onward),
    }  # fmt: skip


# --- in words ---------------------------------------------------------------------------------------------------------


def _sentences(paths: Sequence[Followed], walks: Sequence[Walk], places: Map, settings: Settings) -> list[str]:
    shares = " and ".join(f"{share:.0%}" for share in places.shares_C)
    said = [
        f"The map's two components hold {shares} of the spread of all means and placebos in the weights. Principal "
        "components draw smooth curves of random walks, too (Antognini and Sohl-Dickstein 2018): a curve is no "
        "finding; hold it against the placebo's."
    ]
    for path in paths:
        said += _of_path(path)
    if paths and not settings.placebos:
        said.append("No placebo was asked for, so that signal and random walk are not told apart; set placebos=20.")
    if paths and settings.placebos:
        said.append(
            "Each statement is for itself, of this run and its placebos (the same noise, shuffled coefficients): of "
            "twenty such, one is beyond drift by chance. Other seeds may differ."
        )
    alone = [walk.points[0].target for walk in walks if isinstance(walk, Saved)]
    if alone:
        said.append(f"{', '.join(alone)}: no journal, and so no placebo; only where it stands on the map is told.")
    return said


def _of_path(path: Followed) -> list[str]:
    generations, steps = path.steps[-1], len(path.steps) - 1
    far = f"{path.target}: after {generations} generations it is {path.own.distances_P[-1]:.4g} from its start"
    if path.expected is not None and path.expected[-1]:
        far += f"; a random walk of its steps comes to {path.expected[-1]:.4g} by formula"
    if not path.placebos:
        return [f"{far}."]
    far += f", its {len(path.placebos)} placebos to {np.mean([p.distances_P[-1] for p in path.placebos]):.4g}"
    own, theirs = float(path.own.shares_C.sum()), [float(p.shares_C.sum()) for p in path.placebos]
    curve = (
        f"{path.target}: its own two components hold {own:.0%} of its path, those of each placebo {min(theirs):.0%} to "
        f"{max(theirs):.0%} of the placebo's."
    )
    return [
        f"{far}. {_share(path.share)}.",
        f"{path.target}: {_aligned(path.along, 'the next one', steps)}; {_aligned(path.onward, 'all others', steps)}.",
        curve,
    ]


def _share(found: Estimate) -> str:
    if found.low is None or found.high is None or not math.isfinite(found.mean):
        return f"Which share of its squared distance is signal is not told ({found.why})"
    if found.low <= 0:
        return (
            f"No movement beyond a random walk is shown: {told(found, '.0%')} of its squared distance would be signal"
        )
    return f"Of its squared distance {told(found, '.0%')} is signal, more than its placebos have"


def _aligned(found: Beside, what: str, steps: int) -> str:
    head = f"the cosine of a step (of {steps}) with {what} is {found.value:.3g} in the mean"
    if not math.isfinite(found.value) or not found.placebos:
        return f"{head}, of placebos not known"
    beyond = f"{head}, of placebos {np.mean(found.placebos):.3g}: {told(found.excess)} more, one-sided p {found.p:.2g}"
    return beyond if found.is_beyond else f"{beyond}, not shown to be more than a random walk has"
