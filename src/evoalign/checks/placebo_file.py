# SPDX-License-Identifier: Apache-2.0
"""results/placebo.json: what `evoalign placebo` measured of a run that is done, for cards and comparisons.

It says which end of which journal was measured, and with which settings of the evaluation. Its checksum is recorded
with those of the results, see `evoalign.rundir.checksums`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from evoalign.checks.placebo import Known, Placebos, Split, Whole
from evoalign.config import FORMAT_VERSION, Config
from evoalign.config.reading import MissingError, read_object
from evoalign.errors import DataError
from evoalign.rundir import checksums
from evoalign.rundir.checkpoint import Hash
from evoalign.rundir.files import write_text
from evoalign.rundir.journal import last_hash
from evoalign.rundir.method import JOURNAL

PLACEBO = "results/placebo.json"
MEND = "delete it, and `evoalign placebo` measures it anew"


class _Kept(BaseModel):
    """What the file may hold, as far as it is read."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format_version: Literal[1]
    journal: Hash
    settings: dict[str, Any]
    reward: Split
    fitness: Whole | None = None
    measures: dict[str, float] = {}


def write(run: Path, config: Config, found: Placebos) -> None:
    """Keep what was measured of a run as it is now, all its generations; `config` is the run's own."""
    kept = {name: value for name, value in found.as_dict().items() if name != "off_task"}
    record = {
        "format_version": FORMAT_VERSION,
        "journal": last_hash(run / JOURNAL),
        "settings": _settings(config),
        **kept,
    }
    with checksums.recorded(run, PLACEBO):
        write_text(run / PLACEBO, json.dumps(record, indent=2, allow_nan=False) + "\n")


def read(run: Path, config: Config) -> Known | None:
    """What is kept of the test split; None where nothing is.

    Raises DataError naming the file where it is damaged or altered, or not of this journal or these settings.
    """
    file = run / PLACEBO
    try:
        found = read_object(file, mend=MEND)
        record = _Kept.model_validate(found)
    except MissingError:
        return None
    except ValidationError as error:
        where = ".".join(str(part)[:40] for part in error.errors()[0]["loc"])
        raise DataError(f"{file} is damaged ({where}); {MEND}") from None
    checksums.verify(run, PLACEBO, fix=MEND)
    if record.journal != last_hash(run / JOURNAL):
        raise DataError(f"{file} is not of {run / JOURNAL}; {MEND}")
    if record.settings != _settings(config):
        raise DataError(f"{file} was not evaluated with the settings of {run / 'config.yaml'}; {MEND}")
    return Known(record.reward, record.fitness, record.measures)


def with_most(*found: Known | None) -> Known | None:
    """That with the most placebos, the first of several; None where there is none."""
    known = (one for one in found if one is not None)
    return max(known, key=lambda one: len(one.reward.placebos), default=None)


def remove(run: Path) -> None:
    """The run goes on, and this is not of its end any more."""
    (run / PLACEBO).unlink(missing_ok=True)
    checksums.forget(run, PLACEBO)


def _settings(config: Config) -> dict[str, Any]:
    """How a mean is evaluated; not how often."""
    return config.evaluation.model_dump(mode="json", exclude={"every"})
