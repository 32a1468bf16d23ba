# SPDX-License-Identifier: Apache-2.0
"""results/placebo.json: what `evoalign placebo` measured of a finished run, for cards and comparisons.

It records the journal and the evaluation settings that it belongs to. Its checksum is recorded with those of the
results, see `evoalign.rundir.checksums`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from evoalign.config import FORMAT_VERSION, Config
from evoalign.config.reading import MissingError, parse, read_bytes, read_object
from evoalign.errors import DataError
from evoalign.placebos.estimates import PlaceboResults, Placebos, Split, Whole
from evoalign.rundir import checksums
from evoalign.rundir.checkpoint import NO_JOURNAL, Hash
from evoalign.rundir.files import write_json
from evoalign.rundir.method import JOURNAL

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


def write(run: Path, config: Config, found: Placebos) -> None:
    """Write the placebos of a whole run; `config` is the run's own."""
    kept = {name: value for name, value in found.as_dict().items() if name != "off_task"}
    journal, settings = _last_hash(run / JOURNAL), _settings(config)
    record = {"format_version": FORMAT_VERSION, "journal": journal, "settings": settings, **kept}
    with checksums.recorded(run, PLACEBO):
        write_json(run / PLACEBO, record)


def read(run: Path, config: Config) -> PlaceboResults | None:
    """Return the placebos of the test split; None if there is no file.

    Raises DataError if the file is damaged or altered, or of another journal or other settings.
    """
    file = run / PLACEBO
    try:
        record = _File.model_validate(read_object(file, mend=_MEND))
    except MissingError:
        return None
    except ValidationError as error:
        where = ".".join(str(part)[:40] for part in error.errors()[0]["loc"])
        raise DataError(f"{file} is damaged ({where}); {_MEND}") from None
    checksums.verify(run, PLACEBO, fix=_MEND)
    for is_wrong, why in (
        (record.journal != _last_hash(run / JOURNAL), f"does not belong to {run / JOURNAL}"),
        (record.settings != _settings(config), f"has other evaluation settings than {run / 'config.yaml'}"),
    ):
        if is_wrong:
            raise DataError(f"{file} {why}; {_MEND}")
    return PlaceboResults(record.reward, record.fitness, record.measures)


def remove(run: Path) -> None:
    """Delete the file of a run that continues."""
    (run / PLACEBO).unlink(missing_ok=True)
    checksums.forget(run, PLACEBO)


def _settings(config: Config) -> dict[str, Any]:
    """Return how a mean is evaluated, without how often."""
    return config.evaluation.model_dump(mode="json", exclude={"every"})


def _last_hash(journal: Path) -> str:
    """Return the hash of a journal's last line, which depends on all before it; zeros without a journal."""
    try:
        lines = read_bytes(journal, 2**36).splitlines()
        found: Any = parse(lines[-1], str(journal)) if lines else {}
    except DataError:
        return NO_JOURNAL
    return str(found.get("hash")) if isinstance(found, dict) else NO_JOURNAL  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
