# SPDX-License-Identifier: Apache-2.0
"""The config of a run as its directory holds it: compared with the run's records, and kept inside the run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from evoalign.config import Config, from_record, load, outside, read
from evoalign.config.reading import object_of
from evoalign.errors import ConfigError, JournalError
from evoalign.rundir import journal
from evoalign.rundir.identity import config_hash, differences
from evoalign.rundir.method import JOURNAL, MANIFEST, method_of
from evoalign.version import __version__

FIX = "put the file back; change a run's settings with --set or --config"


def read_own(run: Path) -> Config:
    """Load the config.yaml of a run. Raises ConfigError as `refuse_edited` does."""
    config = load([run / "config.yaml"])
    refuse_edited(run, config)
    return config


def refuse_edited(run: Path, config: Config) -> None:
    """Raise ConfigError where config.yaml is not the config that the run was made with, or the manifest is another's.

    Its settings would be reported for results that have others. `resources` may change. Damaged records are not
    compared.
    """
    method, recorded = method_of(run), None
    with suppress(JournalError):
        recorded = journal.read_header(run / JOURNAL) if method == "es" else None
    if recorded is not None and (odd := differences(config, from_record(recorded.config))[0]):
        raise ConfigError(f"{run / 'config.yaml'} was edited since the run wrote it: {'; '.join(odd)}; {FIX}")
    releases = _releases(run)
    if method is None or not releases or config_hash(config, method) in releases:
        return
    if recorded is not None and recorded.config_hash not in releases:
        raise ConfigError(f"{run / MANIFEST} is the manifest of another run (by config_hash); put the file back")
    if recorded is None and {*releases.values()} == {__version__}:  # other releases may hash other settings
        raise ConfigError(f"{run / 'config.yaml'} was edited since the run wrote it (by config_hash); {FIX}")


def _releases(run: Path) -> dict[str, object]:
    """Return the config_hash of a run's start and of each time that it was resumed, with the release that wrote it."""
    manifest = object_of(run / MANIFEST) or {}
    resumed, found = manifest.get("resumed"), dict[str, object]()
    for entry in (manifest, *(cast("list[object]", resumed) if isinstance(resumed, list) else ())):
        made = cast("Mapping[str, Any]", entry) if isinstance(entry, Mapping) else {}
        versions = made.get("versions")
        if isinstance(value := made.get("config_hash"), str):
            found[value] = versions.get("evoalign") if isinstance(versions, dict) else None
    return found


def refuse_own(
    run: Path, config: Config, files: Sequence[Path], overrides: Sequence[str], skip: Sequence[str] = ()
) -> None:
    """Raise ConfigError for settings that lead out of a run, and that neither the files nor the overrides give."""
    own = run / "config.yaml"
    if own.resolve() not in [file.resolve() for file in files]:
        fix = f"add --config {shlex.quote(str(own))}, which accepts all that it sets"
        outside.refuse(config, run, fix, read(files, overrides), skip)


def load_own(
    run: Path, files: Sequence[Path] = (), overrides: Sequence[str] = (), *, skip: Sequence[str] = ()
) -> Config:
    """Load the config of a run, merged with the user's files and overrides, for a command that follows its settings.

    Its `output_dir` is where the run is, unless an override gives one: a file may be the run's own. Raises ConfigError
    for a setting that leads out of the run and that the user does not give, see `evoalign.config.outside`.
    """
    config = load([run / "config.yaml", *files], overrides)
    refuse_own(run, config, files, overrides, skip)
    read_own(run)
    moves = any(text.startswith("output_dir=") for text in overrides)
    return config if moves else config.model_copy(update={"output_dir": str(run)})
