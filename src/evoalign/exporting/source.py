# SPDX-License-Identifier: Apache-2.0
"""Source of an export: a saved mean, checked against the journal, or weights rebuilt in a temporary folder."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from evoalign.config import Config, ModelConfig, load, outside, reading
from evoalign.config.secrets import is_private, public_path
from evoalign.errors import CheckpointError, ConfigError, ModelError
from evoalign.models.origin import elsewhere
from evoalign.models.quantised import quantised_of
from evoalign.rundir import checkpoint, files, journal
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.directory import generation_of, saved_folders
from evoalign.rundir.journal import Log
from evoalign.rundir.method import method_of
from evoalign.rundir.own import refuse_edited
from evoalign.training import weights
from evoalign.training.replay import replay, save_member

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Member:
    """Member `index` of a population of `size`; `fitness` is from the journal, `mean` over the population."""

    index: int
    size: int
    fitness: float
    mean: float
    sigma: float


@dataclass(frozen=True, slots=True)
class Source:
    """Weights to export: `config` of the run, its base `model`, the saved mean in `folder`; `log` is None for GRPO."""

    run: Path
    config: Config
    model: ModelConfig
    log: Log | None
    folder: Path
    mark: Mark
    manifest: Mapping[str, Any]
    member: int | None = None
    """Index of a member of generation `mark.generation`; None for a mean."""

    @property
    def dtype(self) -> str:
        """Dtype in which the weights were served or trained."""
        return self.log.header.dtype if self.log is not None else self.config.model.trained_dtype

    @property
    def population_member(self) -> Member | None:
        """The exported member; None for a mean."""
        if self.member is None or self.log is None:
            return None
        update, fitness_M = (found := self.log.generations[self.mark.generation]).update, found.fitness_M
        return Member(self.member, len(fitness_M), fitness_M[self.member], float(np.mean(fitness_M)), update.sigma)

    @property
    def model_hash(self) -> str | None:
        """Hash of the base model; None if a GRPO run did not record it."""
        if self.log is not None:
            return self.log.header.model_hash
        return (self.manifest.get("engine") or {}).get("model_hash")

    @property
    def quantised(self) -> str:
        """The quantisation of the base that was trained on, in words; empty for a base in full precision."""
        return quantised_in(self.manifest)

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).is_file()


def quantised_in(manifest: Mapping[str, Any]) -> str:
    """Return the quantisation of the base that a manifest records, in words; empty for a base in full precision."""
    found: Any = manifest.get("quantised")
    words = found.get("words") if isinstance(found, Mapping) else None
    return words if isinstance(words, str) else ""


@contextmanager
def opened(
    run: Path, to: Path, generation: int | None, model: str | None, member: int | None = None
) -> Generator[Source]:
    """Open a saved mean, checked, or one rebuilt in a temporary folder next to `to`, as a `member` always is.

    Raises a subclass of EvoalignError.
    """
    temporary = to.with_name(f".{to.name}.rebuilt.tmp")
    if temporary.is_dir():
        with files.scratch(temporary):  # delete what a killed export left
            pass
    own, manifest = load([run / "config.yaml"]), read_json(run / "manifest.json") or {}
    base = own.model if model is None else elsewhere(own.model, model)
    is_merge_elsewhere = bool(quantised_in(manifest)) and quantised_of(base) is None
    trained_on = None if is_merge_elsewhere else model  # a rebuild needs the base that was trained on
    if model is None:
        outside.refuse(own, run, "say where its model is with --model", skip=(*outside.REPLAY_SKIPS, "space"))
    refuse_edited(run, own)
    is_grpo, saved = method_of(run) == "grpo", saved_folders(run)
    if member is not None:
        if is_grpo:
            raise ConfigError(f"{run} is a run of GRPO, which has no members; leave out --member {member}")
        if generation is None:
            raise ConfigError(f"--member {member} needs --generation")
        log = journal.read(run / "journal.jsonl").whole(generation)
        with files.scratch(temporary):
            mark = save_member(log, temporary / "member", generation, member, trained_on)
            yield Source(run, own, base, log, temporary / "member", mark, manifest, member)
        return
    folder = next((f for f in reversed(saved) if generation is None or generation_of(f) == generation), None)
    if is_grpo:
        if folder is None:
            steps = ", ".join(str(generation_of(found)) for found in saved)
            which = f"after step {generation}" if saved else "yet"
            raise ModelError(
                f"{run} saved no weights {which}, and a run of GRPO has no journal to rebuild them from"
                + (f"; --generation takes {steps}" if saved else "")
            )
        mark = weights.without_code(folder, checkpoint.verify_policy(folder), own)
        yield Source(run, own, base, None, folder, mark, manifest)
        return
    if generation is None and folder is None:
        raise ModelError(f"{run} saved no weights yet; name a generation of its journal with --generation")
    log = journal.read(run / "journal.jsonl").whole(generation if folder is None else generation_of(folder))
    if folder is not None:
        mark = weights.without_code(folder, _verified(folder, log), own)
        yield Source(run, own, base, log, folder, mark, manifest)
        return
    with files.scratch(temporary):
        rebuilt = temporary / "mean"
        replay(run, generation=generation, to=rebuilt, model=trained_on)
        yield Source(run, own, base, log, rebuilt, _verified(rebuilt, log), manifest)


def _verified(folder: Path, log: Log) -> Mark:
    """Return the record of a saved mean. Raises CheckpointError if it is damaged or not the mean of this journal."""
    mark = checkpoint.verify(folder)
    start = mark.generation == 0
    if mark.generation <= log.sealed:
        recorded = log.header.weights_hash if start else log.generations[mark.generation - 1].weights_hash
        if mark.weights_hash == recorded:
            return mark
    raise CheckpointError(f"{folder} is not the mean that {log.path} records for generation {mark.generation}")


def shown_name(model: ModelConfig) -> str:
    """Return a hub name, or the last part of a folder's path."""
    return Path(model.name).name if Path(model.name).expanduser().is_dir() else model.name


def read_json(file: Path) -> dict[str, Any] | None:
    """Read a JSON object of the run; None if there is no file. Raises DataError."""
    try:
        return reading.read_object(file, mend="delete it to export without it")
    except reading.MissingError:
        return None


def rounding(served: str, saved: str, *, merged: bool) -> str:
    """Say how the exported weights were rounded after the run's results were measured; empty if they were not.

    A checkpoint in the served dtype was measured as it is; a merge rounds base and adapter together.
    """
    if saved == "float32" or (saved == served and not merged):
        return ""
    most = 50 * torch.finfo(getattr(torch, saved)).eps
    return f"rounded to {saved}, each by up to about {most:.1g} %, after the run's results were measured"


def _path_settings(config: Config) -> dict[str, dict[str, Any]]:
    """Return, by section, the settings that can be paths of this machine."""
    task, space = config.task, config.space
    files_ = {"train_data": task.train_data, "test_data": task.test_data, "validation_data": task.validation_data}
    return {
        "model": {"name": config.model.name, "base": config.model.base},
        "task": {"name": task.name, **files_, "rewards": task.rewards, "fitness": task.fitness, **task.options},
        "space": {"name": space.name, **space.options},
        "grpo": {"trl": config.grpo.trl},
        "engine": config.engine.model_dump(),
        "tracking": {"backends": config.tracking.backends},
    }


def private_paths(config: Config) -> list[str]:
    """Return the settings that are absolute paths of this machine."""
    objective = config.task.objective.model_dump() if config.task.objective else {}
    return [path for path in _strings([objective, _path_settings(config)]) if is_private(path)]


def public(config: Config) -> Config:
    """Return the config with every absolute path cut to its last part."""
    cut = {name: _public(settings) for name, settings in _path_settings(config).items()}
    if config.task.objective is not None:
        objective = config.task.objective
        cut["task"]["objective"] = objective.model_copy(update=_public(objective.model_dump()))
    sections = {name: getattr(config, name).model_copy(update=settings) for name, settings in cut.items()}
    return config.model_copy(update={**sections, "output_dir": public_path(config.output_dir)})


def _strings(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        return _strings(list(cast("dict[str, Any]", tree).values()))
    if isinstance(tree, list):
        return [text for value in cast("list[Any]", tree) for text in _strings(value)]
    return [tree] if isinstance(tree, str) else []


def _public(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _public(value) for key, value in cast("dict[str, Any]", tree).items()}
    if isinstance(tree, list):
        return [_public(value) for value in cast("list[Any]", tree)]
    return public_path(tree) if isinstance(tree, str) else tree
