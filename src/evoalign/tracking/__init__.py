# SPDX-License-Identifier: Apache-2.0
"""Trackers: who else is told what metrics.jsonl records. No tracking library is imported unless the config names it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.tracking.base import Guarded, Tracker
from evoalign.tracking.tensorboard import TensorBoard
from evoalign.tracking.trackio import Trackio
from evoalign.tracking.wandb import WeightsAndBiases

__all__ = ["BACKENDS", "Tracker", "check", "create", "is_installed"]

BACKENDS: dict[str, Callable[[Config, Path, int | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def is_installed(library: str) -> bool:
    """Whether a library is there, without importing it. A mere folder of its name is not: wandb leaves `./wandb`."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


def check(config: Config) -> None:
    """Raises ConfigError where a chosen tracker is not installed; imports nothing."""
    missing = [name for name in config.tracking.backends if not is_installed(name)]
    if missing:
        raise ConfigError(
            f"tracking.backends: {', '.join(missing)} not installed; pip install 'evoalign[{','.join(missing)}]'"
        )


def create(config: Config, run: Path, resumed_at: int | None = None) -> list[Tracker]:
    """The chosen trackers of the run directory `run`, started; they write below `<run>/logs`.

    `resumed_at` is the generation that a resumed run goes on with. A tracker that fails later on is left out with a
    warning. Raises ConfigError where one is missing or cannot start; then none is left open.
    """
    check(config)
    (run / "logs").mkdir(parents=True, exist_ok=True)
    trackers: list[Tracker] = []
    try:
        for name in dict.fromkeys(config.tracking.backends):
            trackers.append(Guarded(name, _start(name, config, run, resumed_at)))
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers


def _start(name: str, config: Config, run: Path, resumed_at: int | None) -> Tracker:
    try:
        return BACKENDS[name](config, run, resumed_at)
    except Exception as error:  # each library has its own kinds: no login, no server, a name it does not like
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"tracking.backends: {name} does not start: {reason}; fix that or take it out") from error
