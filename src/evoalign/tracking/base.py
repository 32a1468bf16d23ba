# SPDX-License-Identifier: Apache-2.0
"""The interface of trackers, a wrapper that drops one that fails, and what trackers share."""

from __future__ import annotations

import logging
import numbers
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from evoalign.config import Config
from evoalign.config.reading import read_object
from evoalign.errors import DataError
from evoalign.plugins import FAILURES, described
from evoalign.rundir.method import method_of

logger = logging.getLogger("evoalign.tracking")


class Ready(NamedTuple):
    """Whether a tracker can start: `detail` for `evoalign doctor`, and `fix` if something is wrong."""

    status: Literal["ok", "warning", "failed"] = "ok"
    detail: str = ""
    fix: str = ""


class Answer(NamedTuple):
    """One of a few completions that a tracker shows. A model's text is data: it is never rendered as markup."""

    prompt: str
    completion: str
    reward: float


class Tracker(ABC):
    """Receives metrics during a run. If a method raises, the run continues without the tracker."""

    @abstractmethod
    def __init__(self, config: Config, run: Path, resumed_at: int | None) -> None:
        """Start for the run directory `run`; write files below `run / "logs"`. `resumed_at` is the first generation of
        a resumed run. If this raises, the run does not start."""

    @abstractmethod
    def log(self, row: Mapping[str, Any]) -> None:
        """Record a row of metrics.jsonl; its step is `row["generation"]`."""

    def distribute(self, step: int, columns: Mapping[str, Sequence[float]]) -> None:  # noqa: B027
        """Record the rewards of a generation's completions, by name, before the row of that step."""

    def show(self, step: int, answers: Sequence[Answer], figures: Mapping[str, Path]) -> None:  # noqa: B027
        """Show completions of some test examples, before the first row and after the last. `figures` are PNG files by
        name, after the last row."""

    def finish(self, summary: Mapping[str, Any]) -> None:  # noqa: B027  (optional)
        """Record the measures before and after training of a complete run."""

    def close(self) -> None:  # noqa: B027
        """Flush and close. Without an earlier `finish`, the run was interrupted."""

    @classmethod
    def ready(cls) -> Ready:
        """Return whether the tracker can start. Called before a run; must send nothing."""
        return Ready()


class Guarded(Tracker):
    """Wraps a tracker and drops it at its first failure, with a warning, so that it never stops a run."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self._tracker: Tracker | None = tracker

    def log(self, row: Mapping[str, Any]) -> None:
        """Call the tracker, unless it failed before."""
        self._attempt(lambda tracker: tracker.log(row))

    def distribute(self, step: int, columns: Mapping[str, Sequence[float]]) -> None:
        """Call the tracker, unless it failed before."""
        self._attempt(lambda tracker: tracker.distribute(step, columns))

    def show(self, step: int, answers: Sequence[Answer], figures: Mapping[str, Path]) -> None:
        """Call the tracker, unless it failed before."""
        self._attempt(lambda tracker: tracker.show(step, answers, figures))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Call the tracker, unless it failed before."""
        self._attempt(lambda tracker: tracker.finish(summary))

    def close(self) -> None:
        """Close the tracker, unless it failed or was closed before."""
        self._attempt(lambda tracker: tracker.close())
        self._tracker = None

    def _attempt(self, call: Callable[[Tracker], None]) -> None:
        tracker = self._tracker
        if tracker is None:
            return
        try:
            call(tracker)
        except FAILURES as error:  # a full disk, a lost connection, a bug of the library
            self._tracker = None
            logger.warning("%s failed and is left out; metrics.jsonl has every row (%s)", self.name, described(error))
            with suppress(*FAILURES):
                tracker.close()


def values(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of nested mappings by slash-joined names. Booleans are 0 or 1; null and text are omitted."""
    found: dict[str, float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= values(cast("Mapping[str, Any]", value), f"{prefix}{key}/")
        elif isinstance(value, numbers.Real):
            found[f"{prefix}{key}"] = float(value)
    return found


GROUPS = {
    "evaluation": "eval", "validation": "eval/validation",
    "diagnosis": "diagnosis", "divergence": "diagnosis/divergence",
}  # fmt: skip
"""Prefixes of parts of a row, which trackers show as sections; all other values have the prefix `train`."""
COMPLETIONS = "eval/completions"
DISTRIBUTION = "train/distribution"
"""Prefix of histograms: `train/rewards` has the means."""


def step_and_values(row: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Return the step of a metrics row, and its numbers as `train/mean`, `eval/reward`, `diagnosis/spread`."""
    named = {GROUPS.get(key, f"train/{key}"): value for key, value in row.items() if key != "generation"}
    return row["generation"], values(named)


def final_values(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures before and after training; the latter are also the last points of the curves."""
    return values({"eval": {**summary.get("after", {}), **summary}})


def run_name(config: Config, run: Path) -> str:
    """Return the name of the run in a tracker."""
    return config.tracking.name or run.resolve().name


def last_step(config: Config, run: Path) -> int:
    """Return the step after the last row of a complete run: its number of generations, or of GRPO steps.

    If the run stopped early, this is read from its results.
    """
    with suppress(DataError):
        done = read_object(run / "results" / "evaluation.json")
        if "ending" in done:
            return int(done["generation"])
    return config.trained_by(method_of(run) or "es").steps


@contextmanager
def environment(name: str, value: str | None) -> Generator[None]:
    """Set an environment variable while a library reads it; None removes it."""
    old = os.environ.pop(name, None)
    os.environ |= {} if value is None else {name: value}
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ |= {} if old is None else {name: old}
