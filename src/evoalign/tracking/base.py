# SPDX-License-Identifier: Apache-2.0
"""What a tracker is given, and what happens to one that fails."""

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
from evoalign.plugins import FAILURES
from evoalign.rundir.method import method_of

logger = logging.getLogger("evoalign.tracking")


class Ready(NamedTuple):
    """Whether a tracker would start: `detail` as `evoalign doctor` shows it, `fix` where something is wrong."""

    status: Literal["ok", "warning", "failed"] = "ok"
    detail: str = ""
    fix: str = ""


class Answer(NamedTuple):
    """One of a handful of completions. What a model says is data: a tracker shows it as it is."""

    prompt: str
    completion: str
    reward: float


class Tracker(ABC):
    """Told of a run as it goes. `log` may raise: a run goes on without the tracker then."""

    @abstractmethod
    def __init__(self, config: Config, run: Path, resumed_at: int | None) -> None:
        """Start, for the run directory `run`; below `run / "logs"` is room. `resumed_at` is the generation at which a
        resumed run starts again. May raise: it does not start then, and neither does the run."""

    @abstractmethod
    def log(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl; its step is `row["generation"]`."""

    def show(self, step: int, answers: Sequence[Answer], figures: Mapping[str, Path]) -> None:  # noqa: B027
        """Some completions of the test split, before the first row and after the last one, the same examples each time;
        `figures` by name as PNG files, after the last one."""

    def finish(self, summary: Mapping[str, Any]) -> None:  # noqa: B027  (not all have an end)
        """The run is complete: measures before and after training."""

    def close(self) -> None:  # noqa: B027
        """Write out what is left and let go. Without `finish` before it, the run was cut short."""

    @classmethod
    def ready(cls) -> Ready:
        """Whether it would start, asked before a run; sends nothing."""
        return Ready()


class Guarded(Tracker):
    """A tracker that never stops a run: at its first failure it is left out, with one warning."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self._tracker: Tracker | None = tracker

    def log(self, row: Mapping[str, Any]) -> None:
        """As the tracker's own, or nothing once it failed."""
        self._attempt(lambda tracker: tracker.log(row))

    def show(self, step: int, answers: Sequence[Answer], figures: Mapping[str, Path]) -> None:
        """As the tracker's own, or nothing once it failed."""
        self._attempt(lambda tracker: tracker.show(step, answers, figures))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """As the tracker's own, or nothing once it failed."""
        self._attempt(lambda tracker: tracker.finish(summary))

    def close(self) -> None:
        """As the tracker's own, or nothing once it failed or was closed."""
        self._attempt(lambda tracker: tracker.close())
        self._tracker = None

    def _attempt(self, tell: Callable[[Tracker], None]) -> None:
        tracker = self._tracker
        if tracker is None:
            return
        try:
            tell(tracker)
        except FAILURES as error:  # a full disk, a lost connection, a fault of the library: none is worth the run
            self._tracker = None
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning("%s failed and is left out; metrics.jsonl has every row (%s)", self.name, reason)
            with suppress(*FAILURES):
                tracker.close()


def values(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of nested mappings under slash-joined names; booleans are 0 or 1, null and text are left out."""
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
"""What the parts of a row are called in a tracker; all else of it is of training. Trackers make a section of each."""
COMPLETIONS = "eval/completions"


def step_and_values(row: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """The step of a metrics row, and its other numbers, as `train/mean`, `eval/reward`, `diagnosis/spread`."""
    named = {GROUPS.get(key, f"train/{key}"): value for key, value in row.items() if key != "generation"}
    return row["generation"], values(named)


def final_values(summary: Mapping[str, Any]) -> dict[str, float]:
    """The measures before and after training; those after it also end the curves of those on the way."""
    return values({"eval": {**summary.get("after", {}), **summary}})


def run_name(config: Config, run: Path) -> str:
    """What the run is called in a tracker."""
    return config.tracking.name or run.resolve().name


def last_step(config: Config, run: Path) -> int:
    """The step after the last row of a run that is complete: its generations, or steps of GRPO.

    Of one that ended earlier, by its own settings, its results say where.
    """
    with suppress(DataError):
        done = read_object(run / "results" / "evaluation.json")
        if "ending" in done:
            return int(done["generation"])
    return config.grpo.max_steps if method_of(run) == "grpo" else config.es.num_generations


@contextmanager
def environment(name: str, value: str | None) -> Generator[None]:
    """An environment variable for as long as a library reads it."""
    old = os.environ.get(name)
    _set(name, value)
    try:
        yield
    finally:
        _set(name, old)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
