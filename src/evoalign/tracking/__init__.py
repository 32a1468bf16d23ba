# SPDX-License-Identifier: Apache-2.0
"""Trackers, which receive the rows of metrics.jsonl. No tracking library is imported unless the config names it.

A custom tracker is a subclass of `Tracker`, named `package.module:Class` in `tracking.backends`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from evoalign.config import Config
from evoalign.config.run import TRACKERS
from evoalign.errors import ConfigError
from evoalign.plugins import FAILURES, load_object
from evoalign.rundir.files import make_folder
from evoalign.tracking.base import Answer, Guarded, Ready, Tracker
from evoalign.version import install

__all__ = ["Answer", "Ready", "Tracker", "check", "create", "is_installed", "load", "missing"]


def is_installed(library: str) -> bool:
    """Return whether a library is installed, without importing it. A mere folder, as `./wandb`, does not count."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


def missing(config: Config) -> list[str]:
    """Return the chosen trackers whose library is not installed."""
    return [name for name in config.tracking.backends if name in TRACKERS and not is_installed(name)]


def check(config: Config) -> None:
    """Raise ConfigError if a chosen tracker is not installed or no Tracker. Imports custom trackers, but no library."""
    if lacking := missing(config):
        raise ConfigError(f"tracking.backends: {', '.join(lacking)} not installed; {install(*lacking)}")
    for name in config.tracking.backends:
        load(name)


def load(name: str) -> type[Tracker]:
    """Import and return the class of a tracker. Raises ConfigError."""
    cls = load_object(TRACKERS.get(name, name), "tracking.backends")
    if not (isinstance(cls, type) and issubclass(cls, Tracker)):
        raise ConfigError(f"tracking.backends: {name} is no class derived from evoalign.tracking.Tracker")
    return cls


def create(config: Config, run: Path, resumed_at: int | None = None) -> list[Tracker]:
    """Start the chosen trackers of the run directory `run`; they write to `<run>/logs`.

    `resumed_at` is the first generation of a resumed run. A tracker that fails later is dropped with a warning. Raises
    ConfigError if one is missing or cannot start, and closes the others.
    """
    check(config)
    make_folder(run / "logs")
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
        return load(name)(config, run, resumed_at)
    except FAILURES as error:  # each library has its own errors: no login, no server, an invalid name
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"tracking.backends: {name} does not start: {reason}; fix that or take it out") from error
