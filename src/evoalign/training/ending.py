# SPDX-License-Identifier: Apache-2.0
"""What is measured of a run once its last step is done, of which some may fail and the run is whole all the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from evoalign.checks.distance import Distance
from evoalign.checks.divergence import Divergence
from evoalign.errors import EvoalignError, RunGoneError, StoppedError
from evoalign.evaluation import Evaluation, with_points
from evoalign.placebos import file as placebo_file
from evoalign.report.rows import WEIGHTS, Row
from evoalign.rundir.directory import REPORT, RunDir
from evoalign.rundir.files import write_rows
from evoalign.tasks import Task
from evoalign.training.result import Tell
from evoalign.types import Example

Found = TypeVar("Found")


def moved(
    rows: Sequence[Row], divergence: Callable[[], Divergence] | None, distance: Callable[[], Distance], tell: Tell
) -> Mapping[str, Any]:
    """How far the mean is from the base model: by KL, and by its weights; None where not measured, or unknown."""
    kl, found = rows[-1]["divergence"] if rows else None, None
    if kl is None and divergence is not None:
        kl = dataclasses.asdict(divergence())
    try:
        found = dataclasses.asdict(distance())
    except EvoalignError as error:
        tell(f"distance of the effective weights from the base model: unknown; {error}")
    return {"divergence": kl, "distance": found}


def weights_of(task: Task, found: Evaluation) -> Mapping[str, Any]:
    """What several rewards count times, as results/evaluation.json has it; nothing of a single one."""
    weights = task.weighted.by_name(list(found.completions[0].rewards))
    return {WEIGHTS: weights} if weights else {}


def write_points(run: RunDir, task: Task, examples: Sequence[Example], **evaluations: Evaluation) -> None:
    """results/NAME.jsonl of each evaluation, one completion a line, where the task has points to keep."""
    for name, found in evaluations.items():
        write_rows(run.results / f"{name}.jsonl", with_points(task, examples, found).points)


def beside(what: str, measure: Callable[[], Found], tell: Tell, mend: str) -> Found | None:
    """What a run is whole without; None where that was stopped, or does not work: of the model, the device or the task.

    `mend` says how to measure it after all. A mistake of the code itself is raised: it is not to be taken for these.
    """
    try:
        return measure()
    except RunGoneError:
        raise
    except StoppedError:
        why = "stopped"
    except (EvoalignError, OSError, RuntimeError, MemoryError) as error:  # torch's are RuntimeErrors
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    tell(f"warning: {what} were not measured ({why}); the run is whole without them; to measure them, {mend}")
    return None


def forget(run: Path) -> None:
    """What lies beside the results of a run that goes on, and is not of its end any more."""
    placebo_file.remove(run)
    (run / REPORT).unlink(missing_ok=True)
