# SPDX-License-Identifier: Apache-2.0
"""What is exported of a run: a saved mean, checked against the journal, or weights rebuilt for the time being."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evoalign.config import Config, ModelConfig, load, outside, reading
from evoalign.errors import CheckpointError, ConfigError, ModelError
from evoalign.models.origin import elsewhere
from evoalign.rundir import checkpoint, files, journal
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.directory import generation_of, saved_folders
from evoalign.rundir.journal import Log
from evoalign.rundir.method import method_of
from evoalign.training import weights
from evoalign.training.replay import replay, save_member

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Member:
    """Number `index` of a population of `size`; `fitness` by the journal, `mean` that of the whole population."""

    index: int
    size: int
    fitness: float
    mean: float
    sigma: float


@dataclass(frozen=True, slots=True)
class Source:
    """`config` is the run's, `model` its base, `folder` the saved mean; of GRPO, `log` is None."""

    run: Path
    config: Config
    model: ModelConfig
    log: Log | None
    folder: Path
    mark: Mark
    manifest: Mapping[str, Any]
    member: int | None = None
    """Of a member of generation `mark.generation`, its number; None of a mean."""

    @property
    def dtype(self) -> str:
        """Of the weights: served in, or trained."""
        return self.log.header.dtype if self.log is not None else self.config.model.trained_dtype

    @property
    def told(self) -> Member | None:
        """What the card says of a member; None of a mean."""
        if self.member is None or self.log is None:
            return None
        update, fitness_M = (found := self.log.generations[self.mark.generation]).update, found.fitness_M
        return Member(self.member, len(fitness_M), fitness_M[self.member], float(np.mean(fitness_M)), update.sigma)

    @property
    def model_hash(self) -> str | None:
        """Of the base; None where a run of GRPO did not write it down."""
        if self.log is not None:
            return self.log.header.model_hash
        return (self.manifest.get("engine") or {}).get("model_hash")

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).is_file()


@contextmanager
def opened(
    run: Path, to: Path, generation: int | None, model: str | None, member: int | None = None
) -> Generator[Source, None, None]:
    """The saved mean, checked, or one that is rebuilt beside `to` for the time being, as a `member` always is."""
    if scratch(to).is_dir():
        with files.scratch(scratch(to)):  # of an export that was killed
            pass
    own, manifest = load([run / "config.yaml"]), read_json(run / "manifest.json") or {}
    base = own.model if model is None else elsewhere(own.model, model)
    if model is None:
        outside.refuse(own, run, "say where its model is with --model", skip=(*outside.REPLAY_SKIPS, "space"))
    if member is not None:
        with files.scratch(scratch(to)) as temporary:
            yield _member(run, own, base, temporary / "member", generation, member, model, manifest)
        return
    saved = saved_folders(run)
    if method_of(run) == "grpo":
        folder = _saved_policy(run, saved, generation)
        yield Source(
            run, own, base, None, folder, weights.without_code(folder, checkpoint.verify_policy(folder), own), manifest
        )
        return
    if generation is None and not saved:
        raise ModelError(f"{run} saved no weights yet; name a generation of its journal with --generation")
    folder = saved[-1] if generation is None else next((f for f in saved if generation_of(f) == generation), None)
    count = generation if folder is None else generation_of(folder)
    log = journal.read(run / "journal.jsonl").whole(count)
    if folder is not None:
        yield Source(run, own, base, log, folder, weights.without_code(folder, _verified(folder, log), own), manifest)
        return
    with files.scratch(scratch(to)) as temporary:
        rebuilt = temporary / "mean"
        replay(run, generation=generation, to=rebuilt, model=model)
        yield Source(run, own, base, log, rebuilt, _verified(rebuilt, log), manifest)


def _member(
    run: Path, own: Config, base: ModelConfig, folder: Path, generation: int | None, member: int, model: str | None,
    manifest: Mapping[str, Any],
) -> Source:  # fmt: skip
    if method_of(run) == "grpo":
        raise ConfigError(f"{run} is a run of GRPO, which has no members; leave out --member {member}")
    if generation is None:
        raise ConfigError(f"--member {member}: say of which generation with --generation")
    log = journal.read(run / "journal.jsonl").whole(generation)
    mark = save_member(log, folder, generation, member, model)
    return Source(run, own, base, log, folder, mark, manifest, member)


def scratch(to: Path) -> Path:
    """Where weights are rebuilt."""
    return to.with_name(f".{to.name}.rebuilt.tmp")


def _saved_policy(run: Path, saved: Sequence[Path], generation: int | None) -> Path:
    """Of GRPO only what was saved is there: no journal rebuilds the others. Raises ModelError."""
    if not saved:
        raise ModelError(f"{run} saved no weights yet, and a run of GRPO has no journal to rebuild them from")
    found = saved[-1:] if generation is None else [f for f in saved if generation_of(f) == generation]
    if not found:
        steps = ", ".join(str(generation_of(folder)) for folder in saved)
        raise ModelError(
            f"{run} saved no weights after step {generation}, and a run of GRPO has no journal to rebuild them from; "
            f"--generation takes {steps}"
        )
    return found[0]


def _verified(folder: Path, log: Log) -> Mark:
    """A saved mean that is whole and of this journal. Raises CheckpointError."""
    mark = checkpoint.verify(folder)
    if mark.generation > log.sealed or mark.weights_hash != _recorded(log, mark.generation):
        raise CheckpointError(f"{folder} is not the mean that {log.path} records for generation {mark.generation}")
    return mark


def _recorded(log: Log, generation: int) -> str | None:
    return log.generations[generation - 1].weights_hash if generation else log.header.weights_hash


def shown_name(model: ModelConfig) -> str:
    """A hub name, or the last part of a folder's path."""
    return Path(model.name).name if Path(model.name).expanduser().is_dir() else model.name


def read_json(file: Path) -> dict[str, Any] | None:
    """An object in a file of the run; None where the file is not there. Raises DataError."""
    try:
        return reading.read_object(file, mend="delete it to export without it")
    except reading.MissingError:
        return None
