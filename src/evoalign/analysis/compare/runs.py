# SPDX-License-Identifier: Apache-2.0
"""Runs as they lie on disk, ES or GRPO, read as plain data: the mean model on the test split against what it cost.

A run directory may come from anywhere. Nothing it names is imported or opened, every value is checked, and a file that
is damaged is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from evoalign.checks import hacking
from evoalign.config import Config, load
from evoalign.config.reading import MEND, MissingError, parse, read_bytes, read_json
from evoalign.cost.budget import Cost
from evoalign.errors import ConfigError, DataError
from evoalign.placebos import estimates
from evoalign.placebos import file as placebo_file
from evoalign.placebos.estimates import PlaceboResults
from evoalign.rundir import parquet
from evoalign.rundir.checksums import verify
from evoalign.rundir.method import MANIFEST, Method, is_run, method_of


@dataclass(frozen=True, slots=True)
class Point:
    """The mean model on the test split after `step` generations (ES) or optimizer steps (GRPO).

    `cost` is what training took up to there, from the run's beginning; None where a row does not say it.
    """

    step: int
    cost: Cost | None
    measures: Mapping[str, float]
    divergence: Mapping[str, float | None] | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `points` are in the order of training; the first is the model before it, where that was measured.

    `shares_before` and `shares_after` are those of `hacking.shares` over the completions of the test split, with
    `hacked`; None where these are not there.
    """

    path: Path
    method: Method
    config: Config
    points: tuple[Point, ...]
    steps: int
    finished: bool
    cost: Cost | None
    distance: Mapping[str, float | None] | None
    shares_before: Mapping[str, float | None] | None
    shares_after: Mapping[str, float | None] | None
    hardware: str | None
    task: str
    """Name of the task, and what it was given as, where that was a Python object."""
    alarm: str | None
    """What the run says of its completions, such as `likely hacked`; None where nothing alarmed, or nobody saw."""
    verified: bool
    """Whether its results match the checksums of its end."""
    placebo: PlaceboResults | None
    """Of a run of ES that measured them."""
    questions: str | None
    """SHA-256 over the prompts and targets of the test split."""
    items: Mapping[str, tuple[float, ...]]
    """Of the final completions, by question: the mean `reward`, and the share that was `right` where that is known."""

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.config.seed

    @property
    def on_the_way(self) -> int:
        """How many evaluations there are between the start and the end."""
        return sum(0 < point.step < self.steps for point in self.points)


def find(paths: Iterable[str | Path]) -> list[Path]:
    """The run directories among the paths and below them, sorted, each once. Links to folders are not followed.

    Raises ConfigError for a path that neither is nor holds a run.
    """
    return sorted(find_in_order(paths))


def find_in_order(paths: Iterable[str | Path]) -> list[Path]:
    """The same in the order of the paths."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        runs = [path] if _is_readable(path) else _below(path)
        if not runs:
            raise ConfigError(f"{path} is no run and holds none; give run directories, or a folder with some in it")
        found.update({run.resolve(): run for run in runs})
    return list(found.values())


def _below(folder: Path) -> list[Path]:
    runs: list[Path] = []
    for where, names, _ in os.walk(folder):
        names.sort(key=_natural)
        if _is_readable(Path(where)):
            runs.append(Path(where))
            names.clear()  # a run holds no runs
    return runs


def _natural(name: str) -> list[int | str]:
    """By which seed_2 comes before seed_10: words and numbers in turn."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]


def _is_readable(path: Path) -> bool:
    return (path / "config.yaml").exists() and is_run(path)


def read(path: Path) -> Run:
    """Read a run directory. Raises DataError or ConfigError naming a file that is missing, damaged or not of a run."""
    verified = verify(path)
    manifest = _json(path / MANIFEST, _Manifest) or _Manifest()
    method = method_of(path)
    if method is None:
        raise DataError(f"{path / 'manifest.json'} does not say which method the run is of, and there is no journal")
    config, rows = load([path / "config.yaml"]), _rows(path / "metrics.jsonl")
    result = _json(path / "results" / "evaluation.json", _Result)
    before, after = (_completions(path / "results" / "completions" / f"{n}.parquet") for n in ("before", "after"))
    costs = _totals(rows)
    end = len(rows) if result is None or result.generation is None else result.generation
    if end > len(rows):
        raise DataError(f"{path / 'metrics.jsonl'} has {len(rows)} rows and results/evaluation.json is of step {end}")
    name = (manifest.task or {}).get("name") or config.task.name
    given = (manifest.task or {}).get("given_as")
    return Run(
        path=path,
        method=method,
        config=config,
        points=tuple(_points(rows, costs, result, end, before)),
        steps=len(rows),
        finished=result is not None and end == len(rows),
        cost=costs[-1],
        distance=result.distance if result else None,
        shares_before=_shares(before, before, after),
        shares_after=_shares(after, before, after),
        hardware=_hardware(manifest.hardware),
        task=f"{name} (a {given} object)" if given else name,
        alarm=result.alarms.verdict if result and result.alarms else None,
        verified=verified,
        placebo=_gain(path, config, result),
        questions=_questions(before or after),
        items=_items(after or ()),
    )


# --- the files ------------------------------------------------------------------------------------------------------


def _no_negative(cost: Cost) -> Cost:
    if not all(value is None or 0 <= value < float("inf") for value in asdict(cost).values()):
        raise ValueError("a cost is a finite number that is not negative")
    return cost


class _Plain(BaseModel):
    """Fields that are not known are not read."""

    model_config = ConfigDict(extra="ignore", frozen=True)


Measures = dict[str, FiniteFloat]
Quantities = dict[str, FiniteFloat | None]


class _Row(_Plain):
    generation: Annotated[int, Field(ge=0)]
    budget: Annotated[Cost, AfterValidator(_no_negative)] | None = None
    evaluation: Measures | None = None
    divergence: Quantities | None = None


class _Alarms(_Plain):
    verdict: Literal["likely hacked", "may be hacked", "broken", "may be broken"] | None = None


class _Result(_Plain):
    alarms: _Alarms | None = None
    generation: Annotated[int, Field(ge=0)] | None = None
    before: Measures
    after: Measures
    divergence: Quantities | None = None
    distance: Quantities | None = None
    placebo: PlaceboResults | None = None


class _Manifest(_Plain):
    task: dict[str, str | None] | None = None
    hardware: dict[str, str | int | list[str] | None] | None = None


class _Completion(_Plain):
    example: int
    prompt: str
    target: str | None
    text: str
    reward: FiniteFloat
    finish_reason: str
    right: bool | None = None


M = TypeVar("M", bound=_Plain)
_COMPLETIONS = TypeAdapter(list[_Completion])


def _json(path: Path, model: type[M]) -> M | None:
    """A JSON file; None where there is none."""
    try:
        return model.model_validate(read_json(path))
    except MissingError:
        return None
    except ValidationError as error:
        raise DataError(f"{path} is damaged ({_first(error)}); {MEND}") from None


def _rows(path: Path) -> list[_Row]:
    """Rows of metrics.jsonl. A last line without its end is that of a process that was stopped, and left out."""
    try:
        *lines, _ = read_bytes(path).split(b"\n")
    except MissingError:
        raise DataError(f"{path} is missing: the run has not done a generation") from None
    rows: list[_Row] = []
    for number, line in enumerate(lines):
        try:
            rows.append(_Row.model_validate(parse(line, f"{path}, line {number + 1},", finite=False)))
        except ValidationError as error:
            raise DataError(f"{path}, line {number + 1}, is damaged ({_first(error)}); {MEND}") from None
        if rows[-1].generation != number:
            raise DataError(f"{path}, line {number + 1}, is of generation {rows[-1].generation}, not {number}")
    if not rows:
        raise DataError(f"{path} has no row: the run has not done a generation")
    return rows


def _completions(path: Path) -> list[_Completion] | None:
    try:
        return _COMPLETIONS.validate_python(parquet.read(path))
    except MissingError:
        return None
    except ValidationError as error:
        raise DataError(f"{path} is damaged ({_first(error)}); {MEND}") from None


def _first(error: ValidationError) -> str:
    """Where it is wrong and how, without the value: it may be of any length and hold anything."""
    found = error.errors(include_input=False, include_url=False, include_context=False)[0]
    where = ".".join(str(part)[:40] for part in found["loc"])
    return f"{where}: {found['msg'][:80]}" if where else found["msg"][:80]


# --- what they come to ----------------------------------------------------------------------------------------------


def _totals(rows: Sequence[_Row]) -> list[Cost | None]:
    """Cost before the first row and after each; None from the first row on that does not say its own."""
    totals: list[Cost | None] = [Cost()]
    for row in rows:
        last = totals[-1]
        totals.append(None if last is None or row.budget is None else last + row.budget)
    return totals


def _points(
    rows: Sequence[_Row],
    costs: Sequence[Cost | None],
    result: _Result | None,
    end: int,
    before: Sequence[_Completion] | None,
) -> list[Point]:
    points: dict[int, Point] = {}
    if result is not None:
        points[0] = Point(0, costs[0], result.before)
    elif before:  # of a run that has not come to its end, which writes the other measures
        points[0] = Point(0, costs[0], {"reward": sum(c.reward for c in before) / len(before)})
    for step, row in enumerate(rows, start=1):
        if row.evaluation:
            points[step] = Point(step, costs[step], row.evaluation, row.divergence)
    if result is not None:
        divergence = result.divergence or (rows[end - 1].divergence if end else None)
        points[end] = Point(end, costs[end], result.after, divergence)
    return [points[step] for step in sorted(points)]


def _gain(path: Path, config: Config, result: _Result | None) -> PlaceboResults | None:
    """The placebos of the end of training, or of `evoalign placebo` where those are more."""
    own = result.placebo if result else None
    return estimates.largest(own, placebo_file.read(path, config))


def _shares(
    completions: Sequence[_Completion] | None,
    before: Sequence[_Completion] | None,
    after: Sequence[_Completion] | None,
) -> dict[str, float | None] | None:
    """Of those before or after training: shares of the signs, and the hacked ones."""
    return hacking.shares(completions, before or (), after or ()) if completions else None


def _questions(completions: Sequence[_Completion] | None) -> str | None:
    if not completions:
        return None
    asked = sorted({(c.example, c.prompt, c.target or "") for c in completions})
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _items(completions: Sequence[_Completion]) -> dict[str, tuple[float, ...]]:
    rewards: dict[int, list[float]] = {}
    right: dict[int, list[float]] = {}
    for c in completions:
        rewards.setdefault(c.example, []).append(c.reward)
        if c.right is not None:
            right.setdefault(c.example, []).append(float(c.right))
    kinds = {"reward": rewards, **({"right": right} if right.keys() == rewards.keys() else {})}
    return {name: tuple(sum(of[e]) / len(of[e]) for e in sorted(of)) for name, of in kinds.items() if of}


def _hardware(found: Mapping[str, Any] | None) -> str | None:
    """The GPUs, or the cores where there is none."""
    if not found:
        return None
    gpus = found.get("gpus")
    if isinstance(gpus, list) and gpus:
        return ", ".join(sorted(map(str, gpus)))
    return f"{found.get('cores')} CPU cores"
