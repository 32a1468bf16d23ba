# SPDX-License-Identifier: Apache-2.0
"""A run on disk as the report shows it, done or still being trained, and `report.html` in its folder.

A run directory may come from anywhere. Nothing it names is imported or opened; a part that is missing is left out, and
one that is damaged or altered is an alarm of the page, which has all the rest.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from evoalign.analysis.page import page
from evoalign.analysis.page import words as said
from evoalign.analysis.page.analyses import analysed
from evoalign.analysis.page.view import State, View
from evoalign.analysis.page.words import Budget, Completion, Manifest, Result
from evoalign.checks import diagnosis
from evoalign.config import Config, load
from evoalign.config.reading import MissingError, parse, read_bytes, read_json
from evoalign.errors import ConfigError, DataError, EvoalignError
from evoalign.placebos import estimates
from evoalign.placebos import file as placebo_file
from evoalign.placebos.estimates import PlaceboResults
from evoalign.report.figures import ES_WORDS, GRPO_WORDS
from evoalign.rundir import parquet, sealing
from evoalign.rundir.directory import REPORT, RunDir
from evoalign.rundir.files import write_text
from evoalign.rundir.links import ANALYSES, refuse_links
from evoalign.rundir.method import NAMES, Method, is_run, method_of

READ = (
    "config.yaml", "manifest.json", *sealing.SEALED, sealing.SEAL, placebo_file.PLACEBO,
)  # fmt: skip
"""The files that the page is made of, beside those of analyses."""
NOT_SEALED = "the results are not sealed (results/sealed.json): nothing tells whether they are as the run wrote them"
_T = TypeVar("_T")


def write_report(run: Path) -> Path:
    """Write `report.html` into a run's folder and return its path. Raises EvoalignError, OSError."""
    refuse_links(run)
    file = run / REPORT
    write_text(file, page.render(views_of([run])))
    return file


def views_of(runs: Sequence[Path]) -> list[View]:
    """What the page shows of each run, under names that tell them apart. Raises ConfigError for what is no run."""
    for run in runs:
        if not is_run(run):
            raise ConfigError(f"{run} holds no run; give run directories, or a folder with some in it")
    return [_Reader(run).view(name) for run, name in zip(runs, names_of(runs), strict=True)]


def stamp(runs: Sequence[Path], analyses: Path | None = None) -> str:
    """Of the state of what the page is made of, with analyses of all runs: another wherever a file has changed."""
    seen = hashlib.sha256()
    folders = [*(run / ANALYSES for run in runs), *([] if analyses is None else [analyses])]
    files = [*(run / name for run in runs for name in READ), *(file for f in folders for file in sorted(f.glob("*")))]
    for file in files:
        with suppress(OSError):
            found = file.stat()
            seen.update(f"{file}\0{found.st_mtime_ns} {found.st_size}\0".encode("utf-8", "backslashreplace"))
    return seen.hexdigest()[:32]


def names_of(runs: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell all of them apart."""
    parts = [run.absolute().parts for run in runs]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run) for run in runs]


M = TypeVar("M", bound=BaseModel)
_COMPLETIONS = TypeAdapter(list[Completion])


class _Reader:
    """Reads one run; `alarms` and `warnings` gather what is wrong with its files."""

    def __init__(self, path: Path) -> None:
        self.path, self.run = path, RunDir(path)
        self.method: Method = method_of(path) or "es"
        self.alarms: list[str] = []
        self.warnings: list[str] = []

    def view(self, name: str) -> View:
        """All of it."""
        config = self._tried(lambda: load(self.path / "config.yaml", needs_es=False))
        manifest = self._read("manifest.json", Manifest) or Manifest()
        by_row = self._tried(self.run.read_metrics) or {}
        rows = [by_row[at] for at in sorted(by_row) if by_row[at].get("mean") is not None]
        result = self._read("results/evaluation.json", Result)
        before, after = self._completions("before"), self._completions("after") if result else []
        steps, state = len(rows), self._state(result, len(rows))
        known = self._known(config, result)
        self._check_seal(state)
        words = GRPO_WORDS if self.method == "grpo" else dataclasses.replace(ES_WORDS, aim=said.aim(result))
        alarm = self._say_alarms(result)
        diagnosis = self._diagnosis(config, rows, manifest, alarm, known)
        budget = self._read("results/budget.json", Budget) or Budget()
        settings, defaults = said.settings(config, self.method)
        return View(
            name=name,
            path=str(self.path),
            method=NAMES[self.method],
            about=said.about(config, manifest),
            made=said.made(self.path, manifest),
            state=state,
            steps=steps,
            total=said.total(config, self.method),
            words=words,
            headline=said.headline_of(result, before),
            beside=said.beside(self.path, self.method, result, known),
            alarms=self.alarms,
            warnings=self.warnings,
            diagnosis=[*said.change_line(result, followed=bool(diagnosis)), *diagnosis],
            rows=rows,
            ends=said.ends(result, before, after),
            measures=said.measures(result, before, known),
            placebos=said.placebos(known),
            settings=settings,
            defaults=defaults,
            budget={"training": budget.training, **({"evaluation": budget.evaluation} if budget.evaluation else {})},
            completions=said.pairs(before, after),
            analyses=analysed(self.path / ANALYSES, self.alarms),
        )

    def _tried(self, read: Callable[[], _T]) -> _T | None:
        """What is read; None, and an alarm, where it is damaged."""
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

    def _state(self, result: Result | None, steps: int) -> State:
        if result is None or (result.generation is not None and result.generation < steps):
            return "unfinished"
        return "measuring" if result.measuring else "done"

    def _check_seal(self, state: State) -> None:
        sealed = self._tried(lambda: sealing.is_sealed(self.path))
        if sealed is False and state == "done":
            self.warnings.append(NOT_SEALED)

    def _known(self, config: Config | None, result: Result | None) -> PlaceboResults | None:
        """The placebos of the end of training, or of `evoalign placebo` where those are more."""
        own = None
        if result is not None and result.placebo is not None:
            own = self._tried(self._own_placebos)
        kept = None if config is None else self._tried(lambda: placebo_file.read(self.path, config))
        return estimates.largest(own, kept)

    def _own_placebos(self) -> PlaceboResults:
        file = self.path / sealing.EVALUATION
        return estimates.parse(parse(read_bytes(file), str(file))["placebo"], str(file))

    def _say_alarms(self, result: Result | None) -> str | None:
        """The verdict of the completions, which then is the first alarm."""
        if result is None or result.alarms.verdict is None:
            return None
        reasons = "; ".join(result.alarms.reasons)
        self.alarms.insert(0, f"{result.alarms.verdict}, by what the test completions say: {reasons}")
        return result.alarms.verdict

    def _diagnosis(
        self,
        config: Config | None,
        rows: Sequence[Mapping[str, Any]],
        manifest: Manifest,
        alarm: str | None,
        known: PlaceboResults | None,
    ) -> list[str]:
        """The sentences of the summary; its warnings go to the others. A run of GRPO has none."""
        if self.method != "es" or config is None or config.es_ is None or not rows:
            return []
        exact, given = manifest.engine.get("deterministic") is True, manifest.task.get("given_as")
        try:
            history = diagnosis.history_of(rows, config, deterministic=exact, given=given)
            beats = alarm is None and known is not None and not known.aim.reached
            lines = diagnosis.summary(history, alarm, beats_noise=beats)
        except (KeyError, TypeError, ValueError, ArithmeticError, IndexError) as error:  # rows are of anybody
            self.warnings.append(f"metrics.jsonl cannot be diagnosed ({type(error).__name__})")
            return []
        wrong = [line for line in lines if line.startswith(diagnosis.WARNING)]
        self.warnings += [line.removeprefix(diagnosis.WARNING) for line in wrong]
        return [line for line in lines if line not in wrong]
