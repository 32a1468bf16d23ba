# SPDX-License-Identifier: Apache-2.0
"""Read ES and GRPO run directories as plain data: test measures of the mean model, and the training cost up to them.

A run directory is untrusted. Nothing it names is imported or opened, every value is validated, and a damaged file is an
error that names it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from evoalign.checks import hacking
from evoalign.config import Config
from evoalign.config.reading import MEND, MissingError, parse, read_bytes, read_json
from evoalign.cost.budget import Cost
from evoalign.errors import ConfigError, DataError
from evoalign.placebos import estimates
from evoalign.placebos import file as placebo_file
from evoalign.placebos.estimates import PlaceboResults
from evoalign.rundir import parquet
from evoalign.rundir.checksums import verify
from evoalign.rundir.method import MANIFEST, Method, is_run, method_of
from evoalign.rundir.own import read_own

Matching = Literal["wall", "completions", "tokens", "flops"]
MATCHINGS: tuple[Matching, ...] = get_args(Matching)
AMOUNTS: Mapping[Matching, Callable[[Cost], float | None]] = {
    "wall": lambda cost: cost.wall_seconds,
    "completions": lambda cost: cost.completions,
    "tokens": lambda cost: cost.prompt_tokens + cost.generated_tokens,
    "flops": lambda cost: flops_of(cost),
}
"""The budgets: wall-clock seconds of training, completions, prompt and generated tokens, forward and backward FLOPs."""


@dataclass(frozen=True, slots=True)
class Point:
    """Test measures of the mean model after `step` generations (ES) or optimizer steps (GRPO).

    `cost` is the training cost from the start of the run; None if a row before it has none.
    """

    step: int
    cost: Cost | None
    measures: Mapping[str, float]
    divergence: Mapping[str, float | None] | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `points` are in the order of training; the first is the model before training, if that was measured.

    `shares_before` and `shares_after` are `hacking.shares` of the completions on the test split, which compare the two;
    None without either.
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
    """Name of the task, with the kind of object if it is a Python object."""
    alarm: str | None
    """The run's verdict on its completions, such as `likely hacked`; None without one."""
    verified: bool
    """Whether its results match their checksums."""
    placebo: PlaceboResults | None
    """Placebos of an ES run that measured them."""
    questions: str | None
    """SHA-256 of the prompts and targets of the test split."""
    items: Mapping[str, tuple[float, ...]]
    """Mean `reward` of the final completions by question, and the share that was `right` if known."""

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.config.seed

    @property
    def on_the_way(self) -> int:
        """Number of evaluations between start and end."""
        return sum(0 < point.step < self.steps for point in self.points)

    @property
    def divergence(self) -> Mapping[str, float | None]:
        """Divergence from the base model at the end."""
        return self.points[-1].divergence or {}

    @property
    def flops(self) -> float | None:
        """Total FLOPs."""
        return amount("flops", self.cost)

    @property
    def seconds_per_step(self) -> float | None:
        """Wall-clock seconds per generation or step."""
        return self.cost.wall_seconds / self.steps if self.cost else None


def amount(by: Matching, cost: Cost | None) -> float | None:
    """Return how much of a budget a cost is; None if unknown."""
    found = None if cost is None else AMOUNTS[by](cost)
    return None if found is None else float(found)


def flops_of(cost: Cost) -> float | None:
    """Return forward and backward FLOPs; None if the model's are unknown."""
    known = cost.forward_flops is not None and cost.backward_flops is not None
    return (cost.forward_flops or 0.0) + (cost.backward_flops or 0.0) if known else None


def find(paths: Iterable[str | Path]) -> list[Path]:
    """Return the run directories at or below the paths, sorted, each once. Links to folders are not followed.

    Raises ConfigError for a path that neither is nor contains a run.
    """
    return sorted(find_in_order(paths))


def find_in_order(paths: Iterable[str | Path]) -> list[Path]:
    """Return the same as `find`, in the order of the paths, and seed_2 before seed_10."""

    def natural(name: str) -> list[int | str]:
        return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]

    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        runs: list[Path] = []
        for where, names, _ in os.walk(path):
            names.sort(key=natural)
            if (Path(where) / "config.yaml").exists() and is_run(Path(where)):
                runs.append(Path(where))
                names.clear()  # a run holds no runs
        if not runs:
            raise ConfigError(f"{path} is not a run and contains none; give run directories, or a folder with runs")
        found.update({run.resolve(): run for run in runs})
    return list(found.values())


def read(path: Path) -> Run:
    """Read a run directory. Raises DataError or ConfigError naming a missing or damaged file."""
    verified = verify(path)
    manifest = _valid(path / MANIFEST, read_json, Manifest.model_validate) or Manifest()
    method = method_of(path)
    if method is None:
        raise DataError(f"{path / 'manifest.json'} names no method, and there is no journal")
    config, rows = read_own(path), _rows(path / "metrics.jsonl")
    config.trained_by(method)  # raises ConfigError if missing
    result = _valid(path / "results" / "evaluation.json", read_json, Result.model_validate)
    tables = [path / "results" / "completions" / f"{name}.parquet" for name in ("before", "after")]
    before, after = (_valid(table, parquet.read, _COMPLETIONS.validate_python) for table in tables)
    costs: list[Cost | None] = [Cost()]  # before the first row and after each; None after a row without a cost
    for row in rows:
        last = costs[-1]
        costs.append(None if last is None or row.budget is None else last + row.budget)
    end = len(rows) if result is None or result.generation is None else result.generation
    if end > len(rows):
        raise DataError(f"{path / 'metrics.jsonl'} has {len(rows)} rows, but results/evaluation.json is of step {end}")
    name, given = manifest.task.get("name") or config.task.name, manifest.task.get("given_as")
    asked = sorted({(c.example, c.prompt, c.target or "") for c in before or after or ()})
    return Run(
        path=path,
        method=method,
        config=config,
        points=tuple(_points(rows, costs, result, end, before)),
        steps=len(rows),
        finished=result is not None and end == len(rows),
        cost=costs[-1],
        distance=result.distance if result else None,
        shares_before=hacking.shares(before, before, after) if before and after else None,
        shares_after=hacking.shares(after, before, after) if before and after else None,
        hardware=hardware_of(manifest.hardware),
        task=f"{name} (a {given} object)" if given else name,
        alarm=result.alarms.verdict if result else None,
        verified=verified,
        placebo=estimates.largest(result.placebo if result else None, placebo_file.read(path, config)),
        questions=hashlib.sha256(json.dumps(asked).encode()).hexdigest() if asked else None,
        items=_items(after or ()),
    )


# --- the files ------------------------------------------------------------------------------------------------------


def _checked_cost(cost: Cost) -> Cost:
    if not all(value is None or 0 <= value < float("inf") for value in asdict(cost).values()):
        raise ValueError("a cost must be finite and not negative")
    return cost


class Plain(BaseModel):
    """Base of the file formats; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


Measures = dict[str, FiniteFloat]
Quantities = dict[str, FiniteFloat | None]


class _Row(Plain):
    generation: Annotated[int, Field(ge=0)]
    budget: Annotated[Cost, AfterValidator(_checked_cost)] | None = None
    evaluation: Measures | None = None
    divergence: Quantities | None = None


class Alarms(Plain):
    """Verdict on the completions in results/evaluation.json."""

    verdict: Literal["likely hacked", "may be hacked", "broken", "may be broken"] | None = None
    reasons: list[str] = []


class Result(Plain):
    """results/evaluation.json."""

    alarms: Alarms = Alarms()
    generation: Annotated[int, Field(ge=0)] | None = None
    before: Measures
    after: Measures
    divergence: Quantities | None = None
    distance: Quantities | None = None
    placebo: PlaceboResults | None = None


class Manifest(Plain):
    """manifest.json."""

    task: dict[str, str | None] = {}
    hardware: dict[str, str | int | list[str] | None] = {}


class Completion(Plain):
    """A row of results/completions/before.parquet or after.parquet."""

    example: int
    seed: int = 0
    sample: int = 0
    prompt: str
    target: str | None
    text: str
    reward: FiniteFloat
    finish_reason: str
    tokens: int = 0
    right: bool | None = None


T = TypeVar("T")
_COMPLETIONS = TypeAdapter(list[Completion])


def _valid(path: Path, read: Callable[[Path], Any], check: Callable[[Any], T]) -> T | None:
    """Read and validate a file; None if it does not exist."""
    try:
        return check(read(path))
    except MissingError:
        return None
    except ValidationError as error:
        raise DataError(f"{path} is damaged ({_first(error)}); {MEND}") from None


def _rows(path: Path) -> list[_Row]:
    """Read the rows of metrics.jsonl, without an incomplete last line."""
    try:
        *lines, _ = read_bytes(path).split(b"\n")
    except MissingError:
        raise DataError(f"{path} is missing: the run has no finished generation") from None
    rows: list[_Row] = []
    for number, line in enumerate(lines):
        try:
            rows.append(_Row.model_validate(parse(line, f"{path}, line {number + 1},", finite=False)))
        except ValidationError as error:
            raise DataError(f"{path}, line {number + 1}, is damaged ({_first(error)}); {MEND}") from None
        if rows[-1].generation != number:
            raise DataError(f"{path}, line {number + 1}, is of generation {rows[-1].generation}, not {number}")
    if not rows:
        raise DataError(f"{path} has no row: the run has no finished generation")
    return rows


def _first(error: ValidationError) -> str:
    """Return the place and kind of the first error, without the value, which is untrusted."""
    found = error.errors(include_input=False, include_url=False, include_context=False)[0]
    where = ".".join(str(part)[:40] for part in found["loc"])
    return f"{where}: {found['msg'][:80]}" if where else found["msg"][:80]


# --- derived values -------------------------------------------------------------------------------------------------


def _points(
    rows: Sequence[_Row],
    costs: Sequence[Cost | None],
    result: Result | None,
    end: int,
    before: Sequence[Completion] | None,
) -> list[Point]:
    points: dict[int, Point] = {}
    if result is not None:
        points[0] = Point(0, costs[0], result.before)
    elif before:  # an unfinished run has no other measures of the start
        points[0] = Point(0, costs[0], {"reward": sum(c.reward for c in before) / len(before)})
    for step, row in enumerate(rows, start=1):
        if row.evaluation:
            points[step] = Point(step, costs[step], row.evaluation, row.divergence)
    if result is not None:
        divergence = result.divergence or (rows[end - 1].divergence if end else None)
        points[end] = Point(end, costs[end], result.after, divergence)
    return [points[step] for step in sorted(points)]


def _items(completions: Sequence[Completion]) -> dict[str, tuple[float, ...]]:
    rewards, right = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for c in completions:
        rewards[c.example].append(c.reward)
        if c.right is not None:
            right[c.example].append(float(c.right))
    kinds = {"reward": rewards, **({"right": right} if right.keys() == rewards.keys() else {})}
    return {name: tuple(sum(of[e]) / len(of[e]) for e in sorted(of)) for name, of in kinds.items() if of}


def hardware_of(found: Mapping[str, Any]) -> str | None:
    """Return the GPUs, or else the number of CPU cores, of a manifest."""
    gpus = found.get("gpus")
    if isinstance(gpus, list) and gpus:
        return ", ".join(sorted(map(str, gpus)))
    return f"{found.get('cores')} CPU cores" if found else None
