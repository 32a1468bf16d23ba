# SPDX-License-Identifier: Apache-2.0
"""Targets of an analysis: a run, a saved mean of a run, a model folder, or a PEFT adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evoalign.config import Config, from_dict
from evoalign.errors import ConfigError
from evoalign.rundir import checkpoint
from evoalign.rundir.method import method_of
from evoalign.tasks import Split
from evoalign.training.resolve import check_saved, last_saved, refuse_lost_task, to_ask


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
    def is_whole_run(self) -> bool:
        """Whether the run itself was named, instead of a saved mean."""
        return self.run is not None and Path(self.name).resolve() == self.run.resolve()

    def described(self) -> dict[str, str]:
        """Return the fields that identify it in JSON."""
        return {"target": self.name, "weights": str(self.weights), "base": self.config.model.name}

    def check_task(self) -> None:
        """Raise ConfigError where the run's task was a Python object, which its config cannot recreate."""
        if self.run is not None:
            refuse_lost_task(self.run)


def locate(name: str, config: Config | None, base: str | None = None, split: Split = "test") -> Target:
    """Return a target. `config` replaces a run's own, and is required where there is no run.

    `base` names the base model of targets without a run; with it no config is needed unless a task is evaluated. Raises
    ConfigError, also where with `config` examples of `split` may be training examples of the run.
    """
    path = Path(name)
    run = next((p for p in (path, path.parent.parent) if _is_run(p)), None)
    if run is None:
        if not path.exists():
            raise ConfigError(f"{name} does not exist; give a run, a saved mean of a run, a model folder or an adapter")
        if config is None and base is None:
            raise ConfigError(f"{name} is of no run; set its base model and task with --config")
        if not path.is_dir():
            raise ConfigError(f"{name} is not a folder")
        own = config if base is None else with_base(base, config)
        assert own is not None
        return Target(name, path, own, None)
    weights = last_saved(run) if run == path else path
    own = to_ask(run, config, split)
    check_saved(run, weights, own)
    if method_of(run) == "grpo":
        own = own.as_policy(adapter=weights.parent.name == "loras", own_engine=config is None)
    return Target(name, weights, own, run)


def with_base(base: str, config: Config | None = None) -> Config:
    """Return a config whose model is `base`, a folder or a hub name."""
    if config is None:
        return from_dict({"model": {"name": base}})
    return config.model_copy(update={"model": config.model.model_copy(update={"name": base, "revision": None})})


def placebo_hint(targets: Mapping[str, Target]) -> list[str]:
    """Return a sentence that names the runs of ES, unless a placebo is among the targets or there is no such run.

    Shuffled coefficients move the weights too: compare a run with its placebo.
    """
    marks = [checkpoint.mark_of(target.weights) for target in targets.values()]
    if any(mark is not None and mark.counterfactual for mark in marks):
        return []
    runs = [name for name, target in targets.items() if target.run is not None and method_of(target.run) == "es"]
    if not runs:
        return []
    return [
        f"{', '.join(runs)}: no placebo is among the targets, so signal and random walk cannot be distinguished; "
        "`evoalign replay RUN --counterfactual shuffle --to FOLDER` makes one."
    ]


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and method_of(path) is not None
