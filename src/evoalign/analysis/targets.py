# SPDX-License-Identifier: Apache-2.0
"""Targets of an analysis: a run, a saved mean of a run, a model folder, or a PEFT adapter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from evoalign.analysis.compare.groups import labels_of, settings_of
from evoalign.analysis.compare.runs import find_in_order
from evoalign.config import Config, from_dict
from evoalign.errors import ConfigError
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import generation_of, saved_folders
from evoalign.rundir.method import Method, is_run, method_of
from evoalign.rundir.own import read_own
from evoalign.tasks import Data, Split, Task
from evoalign.tokens import Tokens
from evoalign.training.resolve import check_prompts, check_saved, last_saved, refuse_lost_task, to_ask

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """Saved weights, the config that names their base model and task, and the run that saved them, if any."""

    name: str
    weights: Path
    config: Config
    run: Path | None

    @property
    def is_adapter(self) -> bool:
        """Whether the weights are a PEFT adapter."""
        return (self.weights / "adapter_config.json").is_file()

    @property
    def method(self) -> Method | None:
        """The method that trained it; None without a run."""
        return None if self.run is None else method_of(self.run)

    @property
    def is_whole_run(self) -> bool:
        """Whether the run itself was named, instead of a saved mean."""
        return self.run is not None and Path(self.name).resolve() == self.run.resolve()

    @property
    def saved(self) -> list[tuple[Path, int | None]]:
        """The saved means of a whole run with their generations; else the weights alone, without one."""
        if self.run is None or not self.is_whole_run:
            return [(self.weights, None)]
        return [(folder, generation_of(folder)) for folder in saved_folders(self.run)]

    def settings(self, config: Config) -> dict[str, Any] | None:
        """Return the settings in `config` that identify the run apart from its seed; None without a run."""
        return None if self.method is None else settings_of(config, self.method)

    def described(self) -> dict[str, str]:
        """Return the fields that identify it in JSON."""
        return {"target": self.name, "weights": str(self.weights), "base": self.config.model.name}

    def check_task(self) -> None:
        """Raise ConfigError where the run's task was a Python object, which its config cannot recreate."""
        if self.run is not None:
            refuse_lost_task(self.run)

    def check_prompts(self, config: Config, task: Task, data: Data, known: Tokens) -> None:
        """Raise ResumeError where its run's prompts are rendered otherwise than in training."""
        if self.run is not None:
            check_prompts(self.run, config, task, data, known)


def locate(
    name: str, config: Config | None, base: str | None = None, split: Split = "test", *, reads_run: bool = False
) -> Target:
    """Return a target. `config` replaces a run's own, and is required where there is no run.

    `base` names the base model of targets without a run; with it no config is needed unless a task is evaluated. With
    `reads_run` only the files of a whole run are read, so that its config may name code, which is not run. Raises
    ConfigError, also where with `config` examples of `split` may be training examples of the run.
    """
    path = Path(name)
    places = (path, path.parent.parent)
    run = next((p for p in places if (p / "config.yaml").is_file() and method_of(p) is not None), None)
    if run is None:
        if not path.exists():
            raise ConfigError(f"{name} does not exist; give a run, a saved mean of a run, a model folder or an adapter")
        if config is None and base is None:
            raise ConfigError(f"{name} is of no run; set its base model and task with --config")
        if not path.is_dir():
            raise ConfigError(f"{name} is not a folder")
        own = from_dict({"model": {"name": base}}) if config is None else config
        if base is not None:
            own = own.model_copy(update={"model": own.model.model_copy(update={"name": base, "revision": None})})
        return Target(name, path, own, None)
    weights = last_saved(run) if run == path else path
    reads = reads_run and config is None and run == path
    own = read_own(run) if reads else to_ask(run, config, split)
    check_saved(run, weights, own)
    if method_of(run) == "grpo":
        own = own.as_policy(adapter=weights.parent.name == "loras", own_engine=config is None)
    return Target(name, weights, own, run)


def expanded(names: Sequence[str]) -> list[str]:
    """Return the targets, with each folder of runs, such as a sweep's, replaced by its runs."""
    found: list[str] = []
    for name in names:
        try:
            found += [name] if is_run(Path(name)) else map(str, find_in_order([name]))
        except ConfigError:
            found.append(name)
    return found


def alike(items: Sequence[T], settings: Callable[[T], Mapping[str, Any] | None]) -> list[tuple[str, list[T]]]:
    """Return the items grouped by equal settings, each group with a label; items without settings are left out."""
    groups: dict[str, list[T]] = {}
    for item in items:
        if (tree := settings(item)) is not None:
            groups.setdefault(json.dumps(tree, sort_keys=True), []).append(item)
    return list(zip(labels_of([json.loads(key) for key in groups]), groups.values(), strict=True))


def placebo_hint(targets: Mapping[str, Target]) -> list[str]:
    """Return a sentence on placebos, unless one is among the targets or none of them is a run of ES.

    Shuffled coefficients move the weights too: compare a run with its placebo.
    """
    marks = [checkpoint.mark_of(target.weights) for target in targets.values()]
    trained = any(target.method == "es" for target in targets.values())
    if not trained or any(mark is not None and mark.counterfactual for mark in marks):
        return []
    return [
        "No placebo is among the targets, so signal and random walk cannot be distinguished; "
        "`evoalign replay RUN --counterfactual shuffle --to FOLDER` makes one."
    ]
