# SPDX-License-Identifier: Apache-2.0
"""What an analysis is pointed at: a run, a mean that a run saved, a model's folder, or a PEFT adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evoalign.config import Config, from_dict
from evoalign.errors import ConfigError
from evoalign.rundir.method import method_of
from evoalign.tasks import Split
from evoalign.training.resolve import check_saved, last_saved, refuse_lost_task, to_ask


@dataclass(frozen=True, slots=True)
class Target:
    """Saved weights, the config that names their base model and task, and the run they are of, if any."""

    name: str
    weights: Path
    config: Config
    run: Path | None

    @property
    def is_adapter(self) -> bool:
        """Whether the weights lie beside those of the base model."""
        return (self.weights / "adapter_config.json").is_file()

    def described(self) -> dict[str, str]:
        """What it is, for an analysis to write down."""
        return {"target": self.name, "weights": str(self.weights), "base": self.config.model.name}

    def check_task(self) -> None:
        """Raise ConfigError where the run was made with a Python object, which its config cannot make again."""
        if self.run is not None:
            refuse_lost_task(self.run)


def locate(name: str, config: Config | None, base: str | None = None, split: Split = "test") -> Target:
    """Find a target. `config` is used in place of a run's own, and needed where there is no run.

    `base` names the base model of targets that are of no run, and is enough where no task is asked. Raises ConfigError,
    also where with `config` rows of `split` may be rows that the run was trained on.
    """
    path = Path(name)
    run = next((p for p in (path, path.parent.parent) if _is_run(p)), None)
    if run is None:
        if not path.exists():
            raise ConfigError(
                f"{name} does not exist; give a run, a mean that a run saved, a model's folder or an adapter"
            )
        if config is None and base is None:
            raise ConfigError(f"{name} is of no run; say its base model and task with --config")
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
    """A config whose model is `base`, a folder or a hub name."""
    if config is None:
        return from_dict({"model": {"name": base}}, needs_es=False)
    return config.model_copy(update={"model": config.model.model_copy(update={"name": base, "revision": None})})


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and method_of(path) is not None
