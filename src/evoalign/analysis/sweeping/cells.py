# SPDX-License-Identifier: Apache-2.0
"""What a sweep runs: cells (one combination of settings each) and, of each cell, one run a seed. Nothing is started.

A cell's folder is named by its settings as the config reads them, so `1e-3` and `0.001` are one cell.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from evoalign import engines
from evoalign.config import NO_ES, Config, from_dict, load, parse_overrides
from evoalign.config.grpo import place_of
from evoalign.config.reading import parse_yaml, read_object
from evoalign.errors import ConfigError, DataError
from evoalign.rundir.directory import MEASURING
from evoalign.rundir.identity import differences
from evoalign.rundir.method import Method

Tree = dict[str, Any]
Settings = dict[str, Any]
"""Values by dotted name, such as `es.sigma`."""
NAME_LENGTH = 120
RESERVED = {"seed": "--seeds gives the seeds", "output_dir": "--to names the folder of the sweep"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of settings."""

    name: str
    settings: Settings


@dataclass(frozen=True, slots=True)
class Run:
    """One seed of a cell: a run directory, and the config that it is made with."""

    cell: Cell
    seed: int
    path: Path
    config: Config
    method: Method

    @property
    def name(self) -> str:
        """Unique in the sweep."""
        return f"{self.cell.name}/seed_{self.seed}"

    @property
    def steps(self) -> int:
        """Generations, or optimizer steps, of the whole run."""
        return self.config.es.num_generations if self.method == "es" else self.config.grpo.max_steps

    def evaluation(self) -> Tree | None:
        """results/evaluation.json where this run is done: all its steps, with these settings, and what comes after.

        One that died while its placebos were measured is not: resumed, it has them.
        """
        tree = read_json(self.path / "results" / "evaluation.json")
        whole = tree is not None and isinstance(tree.get("after"), dict) and isinstance(tree.get("before"), dict)
        if tree is None or not whole or tree.get(MEASURING):
            return None
        ended = "ending" in tree  # before the last step, by settings that a run may be resumed with others of
        if not ended and tree.get("generation") not in (None, self.steps):
            return None
        try:
            there = load([self.path / "config.yaml"])
            odd, _ = differences(self.config, there, self.method)
        except ConfigError:
            return None
        return None if odd or (ended and there.stopping != self.config.stopping) else tree


def judged(tree: Tree) -> Tree:
    """Of what `Run.evaluation` gives, the measures of the end that may be chosen by: validation's, where there are any.

    Those of the test split otherwise, to be shown; whoever chooses refuses such a run.
    """
    return tree["validation"]["after"] if has_validation(tree) else tree["after"]


def has_validation(tree: Tree) -> bool:
    """Whether a run's evaluation.json has measures of a validation split."""
    found = tree.get("validation")
    return isinstance(found, dict) and isinstance(found.get("after"), dict)  # pyright: ignore[reportUnknownMemberType]


def axis(text: str) -> tuple[str, list[Any]]:
    """`es.sigma=0.001,0.003` as a setting and its values. Raises ConfigError."""
    key, sign, values = text.partition("=")
    try:
        found: object = parse_yaml(f"[{values}]", "--grid")
    except ConfigError:
        found = None
    if not (sign and key.strip() and isinstance(found, list) and found):
        raise ConfigError(f"--grid {text!r}: expected setting=value,value such as es.sigma=0.001,0.003")
    return key.strip(), cast(list[Any], found)


def read_cells(path: Path) -> list[Settings]:
    """A YAML list of cells, each a mapping from dotted names to values. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--cells {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--cells {path} is not YAML: {error}") from None
    found: object = parse_yaml(text, f"--cells {path}")
    if not isinstance(found, list) or not found or not all(_is_settings(cell) for cell in cast(list[object], found)):
        raise ConfigError(
            f"--cells {path}: expected a list of cells such as - {{es.sigma: 0.001, es.learning_rate: 5e-4}}"
        )
    return cast(list[Settings], found)


def product(grid: Mapping[str, Sequence[Any]], cells: Sequence[Settings] = ({},)) -> list[Settings]:
    """Each of the cells with each combination of the grid."""
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [{**cell, **combination} for cell in cells for combination in combinations]


def resolve(base: Tree, settings: Settings, method: Method, **fixed: Any) -> Config:
    """Return the config of a cell; `fixed` are seed and output_dir. Raises ConfigError naming the settings."""
    try:
        return engines.read(unread(base, settings, method, **fixed))
    except ConfigError as error:
        raise ConfigError(f"cell {name_of(settings, method)}: {error}") from None


def unread(base: Tree, settings: Settings, method: Method, **fixed: Any) -> Config:
    """As `resolve`, without importing an engine that the settings name."""
    for key in settings:
        if key in RESERVED:
            raise ConfigError(f"{key} cannot be swept: {RESERVED[key]}")
    tree = parse_overrides(base, [f"{k}={_as_yaml(v)}" for k, v in settings.items()])
    config = from_dict({**tree, **fixed})
    if method == "es" and config.es_ is None:
        raise ConfigError(f"{NO_ES}; for GRPO: --method grpo")
    return config


def make_cells(base: Tree, many: Sequence[Settings], method: Method) -> list[Cell]:
    """All cells, checked and named; one that is given twice is one. Raises ConfigError."""
    found: dict[str, Cell] = {}
    for settings in many:
        tree = resolve(base, settings, method).model_dump(mode="json")
        settings = {key: _resolved(tree, place_of(key), value) for key, value in settings.items()}
        name = name_of(settings, method)
        found.setdefault(name, Cell(name, settings))
    return list(found.values())


def make_runs(base: Tree, cells: Sequence[Cell], seeds: Sequence[int], method: Method, to: Path) -> list[Run]:
    """One run of each cell and seed, seed by seed, so that an early look has something of every cell."""
    return [make_run(base, cell, seed, method, to) for seed in seeds for cell in cells]


def make_run(base: Tree, cell: Cell, seed: int, method: Method, to: Path) -> Run:
    """The run of one cell and seed. Raises ConfigError."""
    path = to / cell.name / f"seed_{seed}"
    return Run(cell, seed, path, resolve(base, cell.settings, method, seed=seed, output_dir=str(path)), method)


def name_of(settings: Settings, method: Method) -> str:
    """Readable, and safe as the name of a folder: `sigma=0.001,lora.rank=4`."""
    parts = [f"{key.removeprefix(f'{method}.')}={_shown(value)}" for key, value in settings.items()]
    name = ",".join(parts) or "base"
    safe = re.sub(r"[^A-Za-z0-9_.,=+-]", "_", name)
    if safe == name and len(name) <= NAME_LENGTH:
        return name
    return f"{safe[: NAME_LENGTH - 9]}~{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def read_json(path: Path) -> Tree | None:
    """A JSON object; None where there is none, or half of one."""
    try:
        return read_object(path)
    except DataError:
        return None


def _is_settings(cell: object) -> bool:
    return (
        isinstance(cell, dict) and bool(cell) and all(isinstance(key, str) for key in cast(dict[object, object], cell))
    )


def _as_yaml(value: Any) -> str:
    """On one line, as `--set` reads it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def _resolved(tree: Tree, key: str, given: Any) -> Any:
    """A setting as the config reads it, where it is no whole section."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return given
        node = cast(Tree, node)[part]
    return given if isinstance(node, dict) else node


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_shown, cast(list[Any], value)))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
