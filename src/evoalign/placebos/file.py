# SPDX-License-Identifier: Apache-2.0
"""results/placebo.json: what `evoalign placebo` measured of a finished run, for cards and comparisons.

It is written after the run's results are sealed, so it has its own hash. It records the journal and the evaluation
settings that it belongs to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from evoalign.config import FORMAT_VERSION, Config
from evoalign.config.reading import MissingError, read_object
from evoalign.errors import DataError
from evoalign.placebos.estimates import PlaceboResults, Placebos, Split, Whole
from evoalign.rundir.checkpoint import Hash
from evoalign.rundir.files import write_text
from evoalign.rundir.method import JOURNAL
from evoalign.rundir.sealing import hash_of, last_line

PLACEBO = "results/placebo.json"
_MEND = "delete it and run `evoalign placebo` again"


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    format_version: Literal[1]
    journal: Hash
    settings: dict[str, Any]
    reward: Split
    fitness: Whole | None = None
    measures: dict[str, float] = {}
    hash: Hash


def write(run: Path, config: Config, found: Placebos) -> None:
    """Write the placebos of a whole run; `config` is the run's own."""
    kept = {name: value for name, value in found.as_dict().items() if name != "off_task"}
    record = {"format_version": FORMAT_VERSION, "journal": last_line(run), "settings": _settings(config), **kept}
    write_text(run / PLACEBO, json.dumps({**record, "hash": hash_of(record)}, indent=2, allow_nan=False) + "\n")


def read(run: Path, config: Config) -> PlaceboResults | None:
    """Return the placebos of the test split; None if there is no file.

    Raises DataError if the file is damaged or altered, or of another journal or other settings.
    """
    file = run / PLACEBO
    try:
        found = read_object(file, mend=_MEND)
        record = _File.model_validate(found)
    except MissingError:
        return None
    except ValidationError as error:
        where = ".".join(str(part)[:40] for part in error.errors()[0]["loc"])
        raise DataError(f"{file} is damaged ({where}); {_MEND}") from None
    for is_wrong, why in (
        (record.hash != hash_of({name: value for name, value in found.items() if name != "hash"}), "was altered"),
        (record.journal != last_line(run), f"does not belong to {run / JOURNAL}"),
        (record.settings != _settings(config), f"has other evaluation settings than {run / 'config.yaml'}"),
    ):
        if is_wrong:
            raise DataError(f"{file} {why}; {_MEND}")
    return PlaceboResults(record.reward, record.fitness, record.measures)


def remove(run: Path) -> None:
    """Delete the file of a run that continues."""
    (run / PLACEBO).unlink(missing_ok=True)


def _settings(config: Config) -> dict[str, Any]:
    """Return how a mean is evaluated, without how often."""
    return config.evaluation.model_dump(mode="json", exclude={"every"})
