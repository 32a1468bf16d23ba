# SPDX-License-Identifier: Apache-2.0
"""Trackers: who else is told what metrics.jsonl records. No tracking library is imported unless the config names it.

One of one's own is named `package.module:Class` in `tracking.backends`: a subclass of `Tracker`.
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
    """Whether a library is there, without importing it. A mere folder of its name is not: wandb leaves `./wandb`."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


def missing(config: Config) -> list[str]:
    """The chosen trackers whose library is not installed."""
    return [name for name in config.tracking.backends if name in TRACKERS and not is_installed(name)]


def check(config: Config) -> None:
    """Raises ConfigError where a chosen tracker is not installed, or is none. Imports no library; the user's code."""
    if lacking := missing(config):
        raise ConfigError(f"tracking.backends: {', '.join(lacking)} not installed; {install(*lacking)}")
    for name in config.tracking.backends:
        load(name)


def load(name: str) -> type[Tracker]:
    """The class of a tracker. Imports what an import path names. Raises ConfigError."""
    cls = load_object(TRACKERS.get(name, name), "tracking.backends")
    if not (isinstance(cls, type) and issubclass(cls, Tracker)):
        raise ConfigError(f"tracking.backends: {name} is no class derived from evoalign.tracking.Tracker")
    return cls


def create(config: Config, run: Path, resumed_at: int | None = None) -> list[Tracker]:
    """The chosen trackers of the run directory `run`, started; they write below `<run>/logs`.

    `resumed_at` is the generation at which a resumed run starts again. A tracker that fails later on is left out with a
    warning. Raises ConfigError where one is missing or cannot start; then none is left open.
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
    except FAILURES as error:  # each library has its own kinds: no login, no server, a name it does not like
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"tracking.backends: {name} does not start: {reason}; fix that or take it out") from error
