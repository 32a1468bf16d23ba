# SPDX-License-Identifier: Apache-2.0
"""Read runs for the report page, and write `report.html` into a run directory.

A run directory may come from anywhere. Nothing that it names is imported or opened. Missing parts are left out; damaged
or altered ones become alarms. Analyses (`evoalign analyze ... --to FOLDER`) are read by the form of their JSON, so
custom ones are shown too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from evoalign.analysis.base import short_names
from evoalign.analysis.compare.runs import Completion
from evoalign.analysis.page import page
from evoalign.analysis.page import view as views
from evoalign.analysis.page.view import Analysed, Budget, Manifest, Picture, Result, State, View
from evoalign.checks import diagnosis
from evoalign.config import Config
from evoalign.config.reading import MissingError, parse, read_bytes, read_json
from evoalign.errors import ConfigError, DataError, EvoalignError
from evoalign.placebos import estimates
from evoalign.placebos import file as placebo_file
from evoalign.placebos.estimates import PlaceboResults
from evoalign.report.figures import ES_WORDS, GRPO_WORDS
from evoalign.report.tables import shorten
from evoalign.rewards.objective import aim_of
from evoalign.rundir import checksums, parquet
from evoalign.rundir.directory import CHECKSUMS, REPORT, RunDir
from evoalign.rundir.files import ANALYSES, refuse_links, write_text
from evoalign.rundir.method import MANIFEST, NAMES, Method, is_run, method_of
from evoalign.rundir.own import read_own

DISTRIBUTION = "figures/distribution.png"
READ = ("config.yaml", "manifest.json", *checksums.RESULTS, CHECKSUMS, placebo_file.PLACEBO, DISTRIBUTION)
"""Files that the page reads, without those of analyses."""
NOT_VERIFIED = f"the results are not verified: {CHECKSUMS} has no checksums of them, so edits would go unnoticed"
_T = TypeVar("_T")


def write_report(run: Path) -> Path:
    """Write `report.html` into a run's folder and return its path. Raises EvoalignError, OSError."""
    refuse_links(run)
    file = run / REPORT
    write_text(file, page.render(views_of([run])))
    return file


def views_of(runs: Sequence[Path]) -> list[View]:
    """Read each run, with distinct names. Raises ConfigError for a folder that is no run."""
    for run in runs:
        if not is_run(run):
            raise ConfigError(f"{run} holds no run; give run directories, or a folder with some in it")
    return [_Reader(run).view(name) for run, name in zip(runs, names_of(runs), strict=True)]


def stamp(runs: Sequence[Path], analyses: Path | None = None) -> str:
    """Return a tag of all files that the page reads; it changes with any of them."""
    seen = hashlib.sha256()
    folders = [*(run / ANALYSES for run in runs), *([] if analyses is None else [analyses])]
    files = [*(run / name for run in runs for name in READ), *(file for f in folders for file in sorted(f.glob("*")))]
    for file in files:
        with suppress(OSError):
            found = file.stat()
            seen.update(f"{file}\0{found.st_mtime_ns} {found.st_size}\0".encode("utf-8", "backslashreplace"))
    return seen.hexdigest()[:32]


def names_of(runs: Sequence[Path]) -> list[str]:
    """Return the names of runs in figures; see `short_names`."""
    return list(short_names(list(map(str, runs))).values())


M = TypeVar("M", bound=BaseModel)
_COMPLETIONS = TypeAdapter(list[Completion])


class _Reader:
    """Reads one run; `alarms` and `warnings` collect what is wrong with its files."""

    def __init__(self, path: Path) -> None:
        self.path, self.run = path, RunDir(path)
        self.method: Method = method_of(path) or "es"
        self.alarms: list[str] = []
        self.warnings: list[str] = []

    def view(self, name: str) -> View:
        """Return everything that the page shows."""
        config, is_es = self._tried(lambda: read_own(self.path)), self.method == "es"
        manifest = self._read("manifest.json", Manifest) or Manifest()
        by_row = self._tried(self.run.read_metrics) or {}
        rows = [by_row[at] for at in sorted(by_row) if by_row[at].get("mean") is not None]
        result = self._read("results/evaluation.json", Result)
        before, after = self._completions("before"), self._completions("after") if result else []
        state: State = "done"
        if result is None or (result.generation is not None and result.generation < len(rows)):
            state = "unfinished"
        elif result.measuring:
            state = "measuring"
        known = self._known(config, result)
        if self._tried(lambda: checksums.verify(self.path)) is False and state == "done":
            self.warnings.append(NOT_VERIFIED)
        alarm = None if result is None else result.alarms.verdict
        if result is not None and alarm is not None:
            reasons = "; ".join(result.alarms.reasons)
            self.alarms.insert(0, f"{alarm}, judging by the test completions: {reasons}")
        diagnosis = self._diagnosis(config, rows, manifest, alarm, known)
        budget = self._read("results/budget.json", Budget) or Budget()
        settings, defaults = ({}, {}) if config is None else views.settings(config, self.method)
        drift = [views.RANDOM] if not is_es and config is not None and config.grpo.reward == "random" else list[str]()
        if is_es and result is not None and known is None:
            drift = [f"No placebo was measured, so its drift is not known: evoalign placebo {self.path}"]
        elif is_es and result is not None and known is not None:
            first = estimates.sentence(known.reward) if known.fitness is None else known.fitness.line()
            drift = [first, estimates.beyond_drift(known.reward)]
        total = None
        if config is not None:
            total = None if is_es and config.es_ is None else config.trained_by(self.method).steps
        aim = "reward" if result is None else aim_of(result.after)
        return View(
            name=name,
            path=str(self.path),
            method=NAMES[self.method] if is_es or config is None else config.grpo.title,
            about={} if config is None else views.about(config, manifest),
            made=views.made(self.path, manifest),
            state=state,
            steps=len(rows),
            total=total,
            words=dataclasses.replace(ES_WORDS, aim=aim) if is_es else GRPO_WORDS,
            headline=views.headline_of(result, before),
            beside=drift,
            alarms=self.alarms,
            warnings=self.warnings,
            diagnosis=[*views.change_line(result, followed=bool(diagnosis)), *diagnosis],
            rows=rows,
            ends=views.ends(result, before, after),
            measures=views.measures(result, before, known),
            placebos=None if known is None else views.placebos(known),
            settings=settings,
            defaults=defaults,
            budget={"training": budget.training, **({"evaluation": budget.evaluation} if budget.evaluation else {})},
            completions=views.pairs(before, after),
            analyses=analysed(self.path / ANALYSES, self.alarms),
            distribution=_picture(self.path / DISTRIBUTION),
        )

    def _tried(self, read: Callable[[], _T]) -> _T | None:
        """Return what `read` returns; None, and an alarm, if it is damaged."""
        try:
            return read()
        except MissingError:
            return None
        except (EvoalignError, OSError) as error:
            self.alarms.append(str(error))
            return None

    def _read(self, name: str, model: type[M]) -> M | None:
        def read() -> M:
            try:
                return model.model_validate(read_json(self.path / name))
            except ValidationError as error:
                where = ".".join(str(part)[:40] for part in error.errors(include_input=False)[0]["loc"])
                raise DataError(f"{self.path / name} is damaged ({where}); put it back from a copy") from None

        return self._tried(read)

    def _completions(self, name: str) -> list[Completion]:
        def read() -> list[Completion]:
            file = self.run.completions(name)
            try:
                return _COMPLETIONS.validate_python(parquet.read(file))
            except ValidationError:
                raise DataError(f"{file} has other columns than a run leaves; put it back from a copy") from None

        return self._tried(read) or []

    def _known(self, config: Config | None, result: Result | None) -> PlaceboResults | None:
        """Return the placebos of the end of training, or of `evoalign placebo` if those are more."""
        kept = None if config is None else self._tried(lambda: placebo_file.read(self.path, config))
        return estimates.largest(None if result is None else result.placebo, kept)

    def _diagnosis(
        self,
        config: Config | None,
        rows: Sequence[Mapping[str, Any]],
        manifest: Manifest,
        alarm: str | None,
        known: PlaceboResults | None,
    ) -> list[str]:
        """Return the summary, and collect its warnings. A run of GRPO has none."""
        if self.method != "es" or config is None or config.es_ is None or not rows:
            return []
        exact, given = manifest.engine.get("deterministic") is True, manifest.task.get("given_as")
        try:
            history = diagnosis.history_of(rows, config, deterministic=exact, given=given)
            beats = alarm is None and known is not None and not known.aim.reached
            lines = diagnosis.summary(history, alarm, beats_noise=beats)
        except (KeyError, TypeError, ValueError, ArithmeticError, IndexError) as error:  # rows may be damaged
            self.warnings.append(f"metrics.jsonl cannot be diagnosed ({type(error).__name__})")
            return []
        wrong = [line for line in lines if line.startswith(diagnosis.WARNING)]
        self.warnings += [line.removeprefix(diagnosis.WARNING) for line in wrong]
        return [line for line in lines if line not in wrong]


MOST_ANALYSES = 40
MOST_JSON = 2**24
MOST_NUMBERS = 120_000
"""Most characters of the numbers of one analysis."""
MOST_PICTURE, MOST_PICTURES = 400_000, 1_500_000
"""Largest figure, and all figures of a folder, in bytes."""
KINDS: dict[str, Literal["png", "svg+xml"]] = {".svg": "svg+xml", ".png": "png"}
MOST_SENTENCES, MOST_LETTERS, MOST_NAME = 400, 4_000, 200
"""Most sentences of an analysis, and longest sentence and name, of an untrusted file."""
PNG = b"\x89PNG\r\n\x1a\n"


_TREE = TypeAdapter(dict[str, Any])


class _Finding(BaseModel):
    """JSON of an analysis; a comparison calls its sentences `summary`, and has its numbers at the top level."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format_version: Literal[1]
    analysis: str | None = None
    sentences: list[str] = Field(validation_alias=AliasChoices("sentences", "summary"))
    numbers: dict[str, Any] | None = None
    figures: list[str] | None = None


def analysed(folder: Path, alarms: list[str]) -> list[Analysed]:
    """Read the analyses in a folder; appends a sentence to `alarms` for each damaged file."""
    found: list[Analysed] = []
    room = MOST_PICTURES
    files = sorted(folder.glob("*.json"))
    for file in files[:MOST_ANALYSES]:
        try:
            tree = _TREE.validate_python(parse(read_bytes(file, MOST_JSON), str(file)))
            finding = _Finding.model_validate(tree)
        except DataError as error:
            alarms.append(str(error))
            continue
        except ValidationError:
            alarms.append(f"{file} is not what evoalign analyze writes; put it back from a copy, or move it elsewhere")
            continue
        pictures, left_out = _pictures(folder, _figures(folder, file.stem, finding), room)
        room -= sum(len(picture.data) for picture in pictures)
        numbers = json.dumps(tree if finding.numbers is None else finding.numbers, indent=1, ensure_ascii=False)
        if len(numbers) > MOST_NUMBERS:
            numbers = f"{numbers[:MOST_NUMBERS]}\n[... the file has the rest]"
        more = len(finding.sentences) - MOST_SENTENCES
        lines = [shorten(line, MOST_LETTERS) for line in finding.sentences[:MOST_SENTENCES]]
        lines += [f"{more:,} more sentences are in the file"] if more > 0 else []
        found.append(Analysed(shorten(finding.analysis or file.stem, MOST_NAME), lines, numbers, pictures, left_out))
    if len(files) > MOST_ANALYSES:
        alarms.append(f"{folder} holds {len(files)} JSON files; the first {MOST_ANALYSES} are shown")
    return found


def shared(folder: Path) -> list[Analysed]:
    """Read the analyses of several runs. Raises ConfigError if there are none, DataError for damaged ones."""
    alarms: list[str] = []
    found = analysed(folder, alarms)
    if alarms:
        raise DataError(alarms[0])
    if not found:
        write = f"evoalign analyze NAME RUN... --to {folder}"
        raise ConfigError(f"--analyses {folder} holds no analysis; {write} writes one")
    return found


def not_shown(folder: Path, runs: Sequence[Path]) -> list[str]:
    """Return the runs that analyses in a folder are of, and that are not among `runs`. Their files are not opened.

    A run that was moved since is not found.
    """
    known, found = {os.path.realpath(run) for run in runs}, list[str]()
    for file in sorted(folder.glob("*.json"))[:MOST_ANALYSES]:
        for name in _named(parse(read_bytes(file, MOST_JSON), str(file))):
            path = Path(os.path.realpath(name))
            run = next((str(p) for p in (path, path.parent.parent) if os.path.isfile(p / MANIFEST)), None)  # noqa: PTH113
            if run is not None and run not in known:
                found.append(run)
    return list(dict.fromkeys(found))


def _named(tree: object) -> Iterator[str]:
    """Yield the names of targets in the JSON of an analysis, at any depth."""
    if isinstance(tree, dict):
        for key, value in cast("dict[str, object]", tree).items():
            if key in ("target", "path") and isinstance(value, str) and "\0" not in value:
                yield value
            elif key != "left_out":
                yield from _named(value)
    elif isinstance(tree, list):
        for value in cast("list[object]", tree):
            yield from _named(value)


def _figures(folder: Path, name: str, finding: _Finding) -> list[str]:
    """Return its figures without suffixes: those it names, else those whose names begin with the analysis."""
    if finding.figures is not None:
        named = [figure for figure in finding.figures if Path(figure).name == figure and "\0" not in figure]
        return list(dict.fromkeys(Path(figure).stem for figure in named if Path(figure).suffix in KINDS))
    return sorted({file.stem for ending in KINDS for file in folder.glob(f"*{ending}") if file.stem.startswith(name)})


def _pictures(folder: Path, names: list[str], room: int) -> tuple[list[Picture], list[str]]:
    """Return the SVG of each figure, or its PNG if that is too large; and the names of those that do not fit."""
    pictures: list[Picture] = []
    left_out: list[str] = []
    for name in names:
        picture = next((p for p in map(_picture, (folder / f"{name}{e}" for e in KINDS)) if p is not None), None)
        if picture is None or len(picture.data) > room:
            left_out.append(name)
            continue
        room -= len(picture.data)
        pictures.append(picture)
    return pictures, left_out


def _picture(file: Path) -> Picture | None:
    """Read a figure; None if it is missing, too large, or no picture."""
    try:
        data = read_bytes(file, MOST_PICTURE)
    except DataError:
        return None
    kind = KINDS[file.suffix]
    is_one = data.startswith(PNG) if kind == "png" else b"<svg" in data[:4096]
    return Picture(file.stem, kind, data) if is_one else None
