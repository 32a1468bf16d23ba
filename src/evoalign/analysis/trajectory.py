# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze trajectory`: whether a run of ES went in a direction, or as far as a random walk of its steps.

The means of the run, and those with shuffled coefficients (placebos), are recomputed from the journal. Tensors evolve
independently, so only a block of one tensor is in memory at a time. Array suffixes: P steps, K placebos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign.analysis.base import Analysis, Finding, below, check_unique, row, short_names
from evoalign.errors import ConfigError, JournalError, ModelError, ResumeError
from evoalign.report import watching
from evoalign.report.figures import COLORS, INK, canvas, frame, save_both
from evoalign.statistics import FEWEST_PLACEBOS, Estimate, t_of

if TYPE_CHECKING:
    import torch

    from evoalign.config import Config
    from evoalign.placebos.counterfactual import Counterfactual
    from evoalign.rundir.journal import Log
    from evoalign.types import Slices, TensorSpec

Floats: TypeAlias = NDArray[np.float64]
NUMBERS = 1 << 25
"""Most numbers of all steps together that are held at a time, in float64: 256 MiB."""


@dataclass(frozen=True)
class Settings:
    """`points`: number of steps of equal length into which the generations of a run are divided, at most; 0: each
    generation is a step.

    `placebos`: how often the journal is followed with shuffled coefficients, with seeds 0, 1, ...
    """

    points: int = 40
    placebos: int = 20


@dataclass(frozen=True, slots=True)
class Walk:
    """Distances of a run from its start at `steps`; `expected_P` is the random-walk formula (None with Adam)."""

    target: str
    steps: tuple[int, ...]
    distances_P: Floats
    placebos_KP: Floats
    expected_P: tuple[float, ...] | None

    @property
    def signal_share(self) -> Estimate:
        return signal_share(self.distances_P[-1], self.placebos_KP[:, -1])

    def tree(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "target": self.target,
            "steps": list(self.steps),
            "distance": self.distances_P.tolist(),
            "expected_distance": self.expected_P and list(self.expected_P),
            "placebos": [{"distance": one_P.tolist()} for one_P in self.placebos_KP],
            "signal_share": self.signal_share.tree(),
        }


class Trajectory(Analysis[Settings]):
    """Distance of a run of ES from its start over generations, with its placebos and the random-walk formula.

    Targets are runs of ES of one base model. The last mean has to reproduce the hash in the journal.
    """

    name = "trajectory"
    help = "Whether a run of ES went in a direction: its distance from the start, with placebos and a random walk."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads the base model once. Raises EvoalignError."""
        walks, base = measure(targets, settings, config)
        lines: list[str] = []
        for walk in walks:
            share, placebos_K = walk.signal_share, walk.placebos_KP[:, -1]
            cells = {
                "distance from the start": f"{walk.distances_P[-1]:.4g}",
                "random walk by formula": f"{walk.expected_P[-1]:.4g}" if walk.expected_P else None,
                f"mean of {len(placebos_K)} placebos": f"{placebos_K.mean():.4g}" if len(placebos_K) else None,
                "share of the squared distance that is signal": share if isfinite(share.mean) else share.why,
            }
            lines.append(row(f"{walk.target}, {walk.steps[-1]} generations", cells))
        if not settings.placebos:
            lines.append("There are no placebos, so signal and random walk cannot be distinguished; set placebos=20.")
        return Finding({**asdict(settings), "base": base, "paths": walks}, lines, figures=partial(draw, walks))


def measure(targets: Sequence[str], settings: Settings, config: Config | None) -> tuple[list[Walk], str]:
    """Follow the journals of all targets; return their distances, and the name of the base model.

    Raises EvoalignError.
    """
    import torch

    from evoalign.engines.specs import mean_abs, specs_of
    from evoalign.engines.transformers.engine import dtype_on, is_base, load_model
    from evoalign.models.tensors import tensors_of
    from evoalign.rundir.method import method_of
    from evoalign.training.replay import config_of, log_of

    check_unique(targets)
    for name in ("points", "placebos"):
        if getattr(settings, name) < 0:
            raise ConfigError(f"{name}: {getattr(settings, name)} is negative; set 0 or more")
    for name in targets:
        if method_of(Path(name)) != "es" or not (Path(name) / "config.yaml").is_file():
            raise ConfigError(f"{name} is no run of ES, so it has no journal to follow; use `distance`")
    logs = {name: log_of(name) for name in targets}
    model_config = config_of(logs[targets[0]]).model if config is None else config.model
    for name, log in logs.items() if config is None else ():
        own = config_of(log).model
        if Path(own.name).name != Path(model_config.name).name:
            raise ConfigError(
                f"{name} started from {own.name}, and {targets[0]} from {model_config.name}; analyse them separately"
            )
    model = load_model(model_config, dtype_on(model_config, torch.device("cpu")))
    base, specs = tensors_of(model), specs_of(model, mean_abs)
    watching.count(len(targets) * (1 + settings.placebos))
    walks: list[Walk] = []
    for name, log in logs.items():
        whole = log.whole()
        if not whole.sealed:
            raise JournalError(f"{whole.path} has no complete generation yet")
        if not is_base(whole.header.model_hash, model_config, model):
            raise ResumeError(
                f"{name} was made with other base weights, or in another dtype ({whole.header.dtype}), than the loaded "
                "model; set the model and dtype of the run with --config"
            )
        replay = JournalReplay(name, whole, config_of(whole, model_config), base, specs, settings.points)
        watching.begin(name)
        own_P = replay.distances(None)
        replay.check()
        shuffled = watching.each(range(settings.placebos), f"{name}, placebos")
        placebos_KP = np.array([replay.distances(seed) for seed in shuffled]).reshape(-1, len(own_P))
        walks.append(Walk(name, replay.steps, own_P, placebos_KP, replay.expected()))
    return walks, model_config.name


class JournalReplay:
    """The means of a run of ES at `steps`, the first of which is 0, recomputed from its journal.

    Raises JournalError, ConfigError, and ModelError where the space evolves tensors outside the model.
    """

    def __init__(
        self,
        name: str,
        log: Log,
        config: Config,
        base: Mapping[str, torch.Tensor],
        specs: Sequence[TensorSpec],
        points: int,
    ) -> None:
        import torch

        from evoalign import spaces
        from evoalign.setup import layout_of

        self.name, self.log, self.config, self.base = name, log, config, base
        count = log.sealed
        parts = min(points or count, count)
        self.steps = tuple(sorted({round(count * i / parts) for i in range(parts + 1)}))
        self.space = spaces.create(config)
        self.layout = layout_of(self.space, specs, getattr(torch, log.header.dtype))
        if self.space.carrier != "adapter" and not self.space.evolves_model:
            raise ModelError(f"{name}: space {self.space.name} evolves tensors that are neither weights nor an adapter")
        self._sums: dict[tuple[str, tuple[int, ...]], int] = {}

    def distances(self, seed: int | None) -> Floats:
        """Return the L2 distance from the start at each step, [P]; `seed` selects a placebo, None: the run."""
        from evoalign.noise import row_blocks
        from evoalign.placebos.counterfactual import Counterfactual

        way = None
        if seed is not None:
            way = Counterfactual("shuffle", str(self.log.header.config["es"]["shaping"]), seed)
        squares_P = np.zeros(len(self.steps))
        for t in self.layout.tensors:
            for slices in row_blocks(t.shape, max(1, NUMBERS // len(self.steps))):
                moved = (self._means(t.name, slices, way) - self._start(t.name, slices)).reshape(len(self.steps), -1)
                squares_P += moved.double().square().sum(1).numpy()
        return np.sqrt(squares_P)

    def expected(self) -> tuple[float, ...] | None:
        """Return the expected distance with shuffled coefficients at each step by formula; None with Adam."""
        from evoalign.placebos.estimates import expected_distance

        updates = [recorded.update for recorded in self.log.generations]
        found = [expected_distance(updates[:step], self.layout, self.config.es) for step in self.steps]
        return None if None in found else tuple(float(d) for d in found if d is not None)

    def check(self) -> None:
        """Raise ResumeError where the last mean of the run, once followed, has not the hash in the journal.

        Runs whose sums depended on the machine are not checked: their last bits may differ.
        """
        from evoalign.engines.hash import tensor_sum, weights_hash_of_sums

        found, last = dict(self._sums), self.steps[-1]
        for t in self.layout.frozen:
            found[t.name, t.shape] = tensor_sum(self._start(t.name, tuple(slice(0, n) for n in t.shape)))
        wanted = self.log.generations[last - 1].weights_hash if last else self.log.header.weights_hash
        here = weights_hash_of_sums((name, shape, total) for (name, shape), total in found.items())
        if here != wanted and self.log.header.sums == "ordered":
            raise ResumeError(
                f"{self.name}: after {last} generations the mean has hash {here[:12]}, but the journal has "
                f"{str(wanted)[:12]}; is {self.config.model.name} the base model that it was made with?"
            )

    def _start(self, name: str, slices: Slices) -> torch.Tensor:
        if self.space.evolves_model:
            return self.base[name][slices].float().clone()
        return self.space.start(self.layout, name, "cpu")[slices]

    def _means(self, name: str, slices: Slices, way: Counterfactual | None) -> torch.Tensor:
        """Return a block of the mean of a tensor at each of the P generations, float32 [P, *block]."""
        import torch

        from evoalign import optimizer, spaces
        from evoalign.engines.hash import tensor_sum

        start = self._start(name, slices)
        master, mover = start.clone(), optimizer.create(self.config.es, self.layout)
        space = spaces.adapted(self.space, mover)
        kept: list[torch.Tensor] = []
        for done in range(self.steps[-1] + 1):
            if done in self.steps:
                kept.append(master.clone())
            if done < self.steps[-1]:
                recorded = self.log.generations[done]
                update = recorded.update if way is None else way.update(recorded)
                anchor = start if update.decay else None  # as in the run: adding 0 would change -0
                space.accumulate(self.layout, master, name, slices, update, anchor, mover)
        if way is None:
            key = name, self.layout[name].shape
            self._sums[key] = self._sums.get(key, 0) + tensor_sum(kept[-1], key[1], slices)
        return torch.stack(kept)


def signal_share(distance: float, placebos: Sequence[float] | Floats) -> Estimate:
    """Estimate the share of a run's squared distance that exceeds its placebos': 1 - mean(d_k^2) / d^2.

    Distances are squared because signal and noise are orthogonal, so their squares add up. The interval: the noise of
    the run has a square s^2 of the placebos' spread, and its part along the signal adds 2 |signal| times that part,
    whose variance is |noise|^2 over the number of directions of the noise, by the placebos 2 |noise|^4 / var(d_k^2).
    Negative where the run is nearer to its start than its placebos. There is no interval with fewer placebos than allow
    a p of 5 %.
    """
    squares_K, distance = np.square(np.asarray(placebos, dtype=np.float64)), float(distance)
    n = len(squares_K)
    if not distance:
        return Estimate(float("nan"), n, why="it never moved: no share")
    if not n:
        return Estimate(float("nan"), n, why="no placebo: no share")
    noise, square = float(squares_K.mean()), distance**2
    share = 1 - noise / square
    if n < FEWEST_PLACEBOS or not noise:
        few = f"{n} placebos show nothing, {FEWEST_PLACEBOS} are needed" if noise else "the placebos never moved"
        return Estimate(share, n, why=few)
    variance = float(squares_K.var(ddof=1)) * (1 + 1 / n + 2 * max(square - noise, 0.0) / noise)
    half = t_of(n - 1) * sqrt(variance) / square
    return Estimate(share, n, share - half, min(1.0, share + half))


def draw(walks: Sequence[Walk], folder: Path) -> list[Path]:
    """Draw the distance from the start by generation, a file per run."""
    drawn, names = list[Path](), short_names([walk.target for walk in walks])
    for i, walk in enumerate(walks, 1):
        figure = canvas(8.0, 4.0, layout="constrained")
        axes, steps = figure.subplots(), np.array(walk.steps)
        frame(axes, names[walk.target], "generation: the band is the range of the placebos")
        axes.set_ylabel("distance from the start")
        if len(walk.placebos_KP):
            look: dict[str, Any] = {"color": COLORS[1], "alpha": 0.22, "linewidth": 0}
            ends = walk.placebos_KP.min(0), walk.placebos_KP.max(0)
            axes.fill_between(steps, *ends, label=f"{len(walk.placebos_KP)} placebos", **look)
        axes.plot(steps, walk.distances_P, color=COLORS[0], marker="o", markersize=3, linewidth=1.4, label="the run")
        if walk.expected_P is not None:
            law: dict[str, Any] = {"color": INK, "linestyle": (0, (2, 2)), "linewidth": 1.2}
            axes.plot(steps, walk.expected_P, label="random walk, by formula", **law)
        below(figure, axes, 3)
        drawn += save_both(figure, folder / f"trajectory_{i}.png")
    return drawn
