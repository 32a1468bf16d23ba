# SPDX-License-Identifier: Apache-2.0
"""The points of a way, and how the weights of each differ from the base model's, a block of one tensor at a time.

A run of ES is followed from its journal, tensor by tensor: tensors evolve apart from each other, so that of all means
no more than a block is held. Array suffixes: P points, and as many as a tensor has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from evoalign import optimizer, spaces
from evoalign.analysis.targets import Target
from evoalign.checks.distance import Base, changes_of
from evoalign.config import Config
from evoalign.engines.hash import tensor_sum, weights_hash_of_sums
from evoalign.errors import ConfigError, ModelError, ResumeError
from evoalign.placebos.counterfactual import Counterfactual
from evoalign.placebos.estimates import expected_distance
from evoalign.rundir.directory import RunDir, generation_of, saved_folders
from evoalign.rundir.journal import Log, Recorded
from evoalign.setup import layout_of
from evoalign.types import MEAN, MEAN_PLAN, Layout, Plan, Slices, TensorSpec, Update

Kind = Literal["mean", "placebo", "member", "saved"]
Weights = Mapping[str, torch.Tensor]
"""Of the base model, as it is served, by their names in checkpoints."""


@dataclass(frozen=True, slots=True)
class Point:
    """`step`: after how many generations (ES) or optimizer steps (GRPO). `reward`: on the training examples, there.

    Of a mean that is the population's around it, of a member its own. `number` is a member's, or a placebo's seed.
    """

    target: str
    kind: Kind
    step: int
    number: int | None = None
    reward: float | None = None


class Walk(Protocol):
    """The points of one target, those of the way itself in its order."""

    points: tuple[Point, ...]

    def names(self) -> Iterable[str]:
        """The weights that differ from the base model's, by their names in checkpoints."""
        ...

    def change(self, name: str, slices: Slices) -> torch.Tensor:
        """float32 [P, *block]: what each point has in a block of a weight, less what the base model has."""
        ...


class Journey:
    """A run of ES: its means at `steps` (the first is 0), placebos at the same, members of some generations.

    `placebos` of its seeds are on the map; more of them are followed by `evolved`. Raises JournalError, ConfigError,
    and ModelError for another base model than the run's.
    """

    def __init__(
        self, name: str, log: Log, config: Config, base: Weights, specs: Sequence[TensorSpec], steps: Sequence[int],
        members: Mapping[int, Sequence[int]], placebos: Sequence[int],
    ) -> None:  # fmt: skip
        self.name, self.log, self.config, self.base = name, log, config, base
        self.steps, self.members, self.placebos = tuple(steps), members, tuple(placebos)
        self.space = spaces.create(config)
        self.layout: Layout = layout_of(self.space, specs, getattr(torch, log.header.dtype))
        if self.space.carrier != "adapter" and not self.space.evolves_model:
            raise ModelError(f"{name}: space {self.space.name} evolves tensors beside the model that are no adapter")
        self._sums: dict[tuple[str, tuple[int, ...]], int] = {}
        self._of_module: tuple[str, list[dict[str, torch.Tensor]]] = ("", [])
        self.points = (
            *(Point(name, "mean", step, None, self._fitness(step)) for step in steps),
            *(Point(name, "placebo", step, seed) for seed in placebos for step in steps),
            *(
                Point(name, "member", g, i, log.generations[g].fitness_M[i])
                for g, some in members.items()
                for i in some
            ),
        )

    def expected(self) -> list[float] | None:
        """By formula, how far shuffled coefficients take the mean up to each step; None with Adam."""
        updates = [recorded.update for recorded in self.log.generations]
        found = [expected_distance(updates[:step], self.layout, self.config.es) for step in self.steps]
        return None if None in found else [float(d) for d in found if d is not None]

    def names(self) -> Iterable[str]:
        return dict.fromkeys(t.module for t in self.layout.tensors)

    def blocks(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Name and shape of each tensor that evolves."""
        return [(t.name, t.shape) for t in self.layout.tensors]

    def change(self, name: str, slices: Slices) -> torch.Tensor:
        ways: list[Counterfactual | None] = [None, *map(self._shuffle, self.placebos)]
        if self.space.evolves_model:
            start = self._start(name, slices)
            found = [self._follow(name, slices, way) for way in ways]
            return torch.cat([*(f[: len(self.steps)] for f in found), found[0][len(self.steps) :]]) - start
        if self._of_module[0] != name:
            self._of_module = name, self._factors(name, ways)
        return torch.stack([self._product(name, state, slices) for state in self._of_module[1]])

    def evolved(self, name: str, slices: Slices, seed: int | None) -> torch.Tensor:
        """float32 [P, *block] at the steps: the change of a tensor that evolves; `seed` is that of a placebo."""
        way = None if seed is None else self._shuffle(seed)
        found = self._follow(name, slices, way, hashed=seed is None)[: len(self.steps)]
        return found - self._start(name, slices)

    def check(self) -> None:
        """Raise ResumeError where the last mean, all of which was `evolved`, is not that of the journal.

        Where the sums of the run depended on the machine, their last bits may differ, and nothing is known.
        """
        found, last = dict(self._sums), self.steps[-1]
        for t in self.layout.frozen:
            found[t.name, t.shape] = tensor_sum(self._start(t.name, tuple(slice(0, n) for n in t.shape)))
        wanted = self.log.generations[last - 1].weights_hash if last else self.log.header.weights_hash
        here = weights_hash_of_sums((name, shape, total) for (name, shape), total in found.items())
        if here != wanted and self.log.header.sums == "ordered":
            raise ResumeError(
                f"{self.name}: after {last} generations the mean comes out as {here[:12]} and was {str(wanted)[:12]}; "
                f"is {self.config.model.name} the base model that it was made with?"
            )

    def _fitness(self, step: int) -> float | None:
        found = self.log.generations
        return float(np.mean(found[step].fitness_M)) if step < len(found) else None

    def _shuffle(self, seed: int) -> Counterfactual:
        return Counterfactual("shuffle", str(self.log.header.config["es"]["shaping"]), seed)

    def _start(self, name: str, slices: Slices) -> torch.Tensor:
        if self.space.evolves_model:
            return self.base[name][slices].to(torch.float32, copy=True)
        return self.space.start(self.layout, name, "cpu")[slices]

    def _follow(self, name: str, slices: Slices, way: Counterfactual | None, *, hashed: bool = False) -> torch.Tensor:
        """float32: a tensor's block at the steps, and of the run's own way the members of its generations."""
        start = self._start(name, slices)
        master, mover = start.clone(), optimizer.create(self.config.es.optimizer)
        kept, drawn = [], list[torch.Tensor]()
        last = max(self.steps[-1], *self.members) if way is None and self.members else self.steps[-1]
        for done in range(last + 1):
            if done in self.steps:
                kept.append(master.clone())
            if way is None:
                drawn += self._members(name, slices, master, done)
            if done < last:
                update = _update(self.log.generations[done], way)
                anchor = start if update.decay else None  # as the run had it: no term that adds 0 to what is -0
                self.space.accumulate(self.layout, master, name, slices, update, anchor, mover)
        if hashed:
            key = name, self.layout[name].shape
            self._sums[key] = self._sums.get(key, 0) + tensor_sum(kept[-1], key[1], slices)
        return torch.stack([*kept, *drawn])

    def _members(self, name: str, slices: Slices, master: torch.Tensor, generation: int) -> list[torch.Tensor]:
        some = self.members.get(generation, ())
        if not some:
            return []
        update = self.log.generations[generation].update
        plan = Plan(update.generation, update.sigma, update.members)
        return [self.space.perturbed(self.layout, name, master, plan, update.members[i], slices).clone() for i in some]

    def _factors(self, module: str, ways: Sequence[Counterfactual | None]) -> list[dict[str, torch.Tensor]]:
        """Of each point, the tensors beside a weight."""
        own = [t for t in (*self.layout.tensors, *self.layout.frozen) if t.module == module]
        states: list[dict[str, torch.Tensor]] = [{} for _ in self.points]
        for t in own:
            whole = tuple(slice(0, n) for n in t.shape)
            if t in self.layout.frozen:
                found = self._start(t.name, whole).expand(len(self.points), *t.shape)
            else:
                each = [self._follow(t.name, whole, way) for way in ways]
                found = torch.cat([*(e[: len(self.steps)] for e in each), each[0][len(self.steps) :]])
            for state, value in zip(states, found, strict=True):
                state[t.name] = value
        return states

    def _product(self, module: str, state: dict[str, torch.Tensor], slices: Slices) -> torch.Tensor:
        exact = replace(self.layout, dtype="float32")
        adapter = self.space.adapter(exact, module, state.__getitem__, MEAN_PLAN, (MEAN,), slices)
        if adapter is None:
            raise ModelError(f"{self.name}: space {self.space.name} has no adapter of its mean for {module}")
        return adapter.scaling * (adapter.b[0] @ adapter.a[0])


class Saved:
    """Means that were saved, of GRPO or of anyone: each a PEFT adapter or a Hugging Face checkpoint.

    Raises ModelError, which names a tensor that the base model has not, or in another shape.
    """

    def __init__(self, name: str, folders: Sequence[tuple[Path, Point]], base: Base, *, from_base: bool) -> None:
        self.name, self.base = name, base
        start = [Point(name, "saved", 0)] if from_base else []
        self.points = (*start, *(point for _, point in folders))
        self._from_base = from_base
        self._read = [changes_of(folder, base) for folder, _ in folders]

    def names(self) -> Iterable[str]:
        return dict.fromkeys(name for changes in self._read for name in changes)

    def change(self, name: str, slices: Slices) -> torch.Tensor:
        rows, rest = slices[0], (slice(None), *slices[1:])
        found = [changes[name].rows(rows)[rest].float() if name in changes else None for changes in self._read]
        still = torch.zeros(self.base.specs[name].shape)[slices]
        return torch.stack([*([still] if self._from_base else []), *(still if f is None else f for f in found)])


def saved(target: Target, base: Base) -> Saved:
    """All that a run of GRPO saved, from its start, or the one mean that a target is."""
    if target.run is None or Path(target.name).resolve() != target.run.resolve():
        return Saved(target.name, [(target.weights, Point(target.name, "saved", 0))], base, from_base=False)
    folders = saved_folders(target.run)
    if not folders:
        raise ConfigError(f"{target.name} saved no weights yet; its trajectory is of those that it saved")
    rows = RunDir(target.run).read_metrics()
    places = [(folder, generation_of(folder)) for folder in folders]
    points = [(f, Point(target.name, "saved", step, None, _mean_reward(rows.get(step - 1)))) for f, step in places]
    return Saved(target.name, points, base, from_base=True)


def _mean_reward(row: Mapping[str, Any] | None) -> float | None:
    found = None if row is None else row.get("mean")
    return float(found) if isinstance(found, int | float) else None


def _update(recorded: Recorded, way: Counterfactual | None) -> Update:
    return recorded.update if way is None else way.update(recorded)
