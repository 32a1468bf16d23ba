# SPDX-License-Identifier: Apache-2.0
"""The trial configs of a sweep, their runs (one per seed), and the sweep's folder. Starts nothing.

A trial config (a cell of the grid) is named by its settings as parsed, so `1e-3` and `0.001` are the same.

sweep.json              base config, method, cells and their seeds: a later command resumes them, or adds cells
CELL/seed_K/            the runs, each a run directory
configs/, logs/         config and output of each run
results.json, table.md  the results; figures/
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from evoalign import engines
from evoalign.config import Config, from_dict, outside, parse_overrides
from evoalign.config.grpo import place_of
from evoalign.config.reading import object_of, parse_yaml
from evoalign.errors import ConfigError, RunExistsError, shown
from evoalign.rundir.directory import LOCK, MEASURING, RunDir
from evoalign.rundir.files import refuse_links, write_text
from evoalign.rundir.identity import differences
from evoalign.rundir.method import Method
from evoalign.rundir.own import read_own

Tree = dict[str, Any]
Settings = dict[str, Any]
"""Values by dotted name, such as `es.sigma`."""
NAME_LENGTH = 120
RESERVED = {"seed": "use --seeds", "output_dir": "use --to"}
FORMAT_VERSION = 1
SWEEP = "sweep.json"
STUDY = "study.jsonl"
"""Optuna's journal of a search."""
NAMES = re.compile(r"(?!\.+$)[A-Za-z0-9_.,=+~-]+")


@dataclass(frozen=True, slots=True)
class TrialConfig:
    """One combination of settings."""

    name: str
    settings: Settings


@dataclass(frozen=True, slots=True)
class Run:
    """One seed of a trial config, its run directory and its resolved config."""

    cell: TrialConfig
    seed: int
    path: Path
    config: Config
    method: Method

    @property
    def name(self) -> str:
        """Unique name within the sweep."""
        return f"{self.cell.name}/seed_{self.seed}"

    @property
    def steps(self) -> int:
        """Number of generations or optimizer steps of the whole run."""
        return self.config.trained_by(self.method).steps

    def evaluation(self) -> Tree | None:
        """Return results/evaluation.json if the run is finished with these settings, else None.

        A run that was killed while it measured placebos is not finished; resuming measures them.
        """
        tree = object_of(self.path / "results" / "evaluation.json") or {}
        if not all(isinstance(tree.get(name), dict) for name in ("before", "after")) or tree.get(MEASURING):
            return None
        ended = "ending" in tree  # stopped early, by `stopping`
        if not ended and tree.get("generation") not in (None, self.steps):
            return None
        try:
            there = read_own(self.path)
            odd, _ = differences(self.config, there, self.method)
        except ConfigError:
            return None
        return None if odd or (ended and there.stopping != self.config.stopping) else tree


def has_validation(tree: Tree) -> bool:
    """Return whether an evaluation.json has measures of a validation split."""
    found = tree.get("validation")
    return isinstance(found, dict) and isinstance(found.get("after"), dict)  # pyright: ignore[reportUnknownMemberType]


def chosen_on(tree: Tree) -> Tree:
    """Return the final measures on the validation split, or on the test split if there is none."""
    return tree["validation"]["after"] if has_validation(tree) else tree["after"]


def axis(text: str) -> tuple[str, list[Any]]:
    """Parse `es.sigma=0.001,0.003` into a setting and its values. Raises ConfigError."""
    key, sign, values = text.partition("=")
    try:
        found: object = parse_yaml(f"[{values}]", "--grid")
    except ConfigError:
        found = None
    if not (sign and key.strip() and isinstance(found, list) and found):
        raise ConfigError(f"--grid {text!r}: expected setting=value,value such as es.sigma=0.001,0.003")
    return key.strip(), cast(list[Any], found)


def read_cells(path: Path) -> list[Settings]:
    """Read a YAML list of cells, each a mapping from dotted names to values. Raises ConfigError."""
    try:
        found: object = parse_yaml(path.read_text(encoding="utf-8"), f"--cells {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--cells {path} cannot be read: {error}") from None
    rows = cast(list[Any], found) if isinstance(found, list) else []
    if not rows or not all(isinstance(row, dict) and row and all(isinstance(k, str) for k in row) for row in rows):
        example = "- {es.sigma: 0.001, es.learning_rate: 5e-4}"
        raise ConfigError(f"--cells {path}: expected a list of cells such as {example}")
    return rows


def product(grid: Mapping[str, Sequence[Any]], cells: Sequence[Settings] = ({},)) -> list[Settings]:
    """Combine each cell with each combination of the grid."""
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return [{**cell, **combination} for cell in cells for combination in combinations]


def resolve(base: Tree, settings: Settings, method: Method, **fixed: Any) -> Config:
    """Return the config of a cell; `fixed` are seed and output_dir. Raises ConfigError that names the cell."""
    try:
        return engines.read(unread(base, settings, method, **fixed))
    except ConfigError as error:
        raise ConfigError(f"cell {name_of(settings, method)}: {error}") from None


def unread(base: Tree, settings: Settings, method: Method, **fixed: Any) -> Config:
    """Return the config without importing the engine it names."""
    for key in settings:
        if key in RESERVED:
            raise ConfigError(f"{key} cannot be swept; {RESERVED[key]}")
    texts = {
        key: yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
        for key, value in settings.items()
    }
    tree = parse_overrides(base, [f"{k}={text.strip().removesuffix('...').strip()}" for k, text in texts.items()])
    config = from_dict({**tree, **fixed})
    config.trained_by(method)  # raises ConfigError if the section is missing
    return config


def make_cells(base: Tree, many: Sequence[Settings], method: Method) -> list[TrialConfig]:
    """Validate and name the cells, each once. Raises ConfigError."""
    found: dict[str, TrialConfig] = {}
    for settings in many:
        tree, parsed = resolve(base, settings, method).model_dump(mode="json"), dict[str, Any]()
        for key, given in settings.items():
            node: Any = tree
            for part in place_of(key).split("."):
                node = cast(Tree, node).get(part, given) if isinstance(node, dict) else given
            parsed[key] = given if isinstance(node, dict) else node  # a whole section stays as given
        name = name_of(parsed, method)
        found.setdefault(name, TrialConfig(name, parsed))
    return list(found.values())


def make_run(base: Tree, cell: TrialConfig, seed: int, method: Method, to: Path) -> Run:
    """Return the run of one cell and seed. Raises ConfigError."""
    path = to / cell.name / f"seed_{seed}"
    return Run(cell, seed, path, resolve(base, cell.settings, method, seed=seed, output_dir=str(path)), method)


def name_of(settings: Settings, method: Method) -> str:
    """Return a readable name that is safe as a folder: `sigma=0.001,lora.rank=4`."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return "+".join(map(text, cast(list[Any], value)))
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)

    name = ",".join(f"{key.removeprefix(f'{method}.')}={text(value)}" for key, value in settings.items()) or "base"
    safe = re.sub(r"[^A-Za-z0-9_.,=+-]", "_", name)
    if safe == name and len(name) <= NAME_LENGTH:
        return name
    return f"{safe[: NAME_LENGTH - 9]}~{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


# --- folder -----------------------------------------------------------------------------------------------------------


class Folder:
    """A sweep's folder, used inside of `locked`."""

    def __init__(self, path: Path, base: Tree, method: Method) -> None:
        self.path, self.base = path, base
        self.method: Method = method
        self.header: Tree = {"method": method}
        """Fields of results.json besides the cells."""
        self.outcomes: dict[str, Tree] = {}
        """Results of finished runs by name, cached."""
        self.search: Tree | None = None
        """Space, seeds and measure of a search; None for a grid."""
        self.cells: dict[str, TrialConfig] = {}
        self.seeds: dict[str, list[int]] = {}

    @contextmanager
    def locked(self, search: Tree | None = None, cells: Sequence[TrialConfig] = ()) -> Generator[None]:
        """Lock the folder and read sweep.json, which must have the same base config and search.

        The folder is untrusted: a cell in it that is not in `cells`, those of the command, may not contain settings
        that reach outside its runs (`evoalign.config.outside`). Raises RunExistsError, ConfigError.
        """
        self.search, lock = search, RunDir(self.path)
        file = self.path / SWEEP
        ours = (LOCK, f".{SWEEP}.tmp")  # left by a sweep that was killed before sweep.json was complete
        others = [e for e in self.path.iterdir() if e.name not in ours] if self.path.is_dir() else self.path.exists()
        if others and not file.is_file():
            raise RunExistsError(f"--to {self.path} exists and is not a sweep; choose another folder")
        try:
            lock.lock()
        except RunExistsError as error:
            raise RunExistsError(str(error).replace("output_dir", "--to").replace("training", "running")) from None
        try:
            refuse_links(self.path, (STUDY, "configs"))
            if file.is_file():
                self._read(file, cells)
            yield
        finally:
            lock.release()

    def add(self, cells: Sequence[TrialConfig], seeds: Sequence[int]) -> None:
        """Add cells and seeds to sweep.json. Raises RunExistsError if a folder of theirs is a link."""
        for name in (cell.name for cell in cells):
            refuse_links(self.path, (name, f"configs/{name}", *(f"{name}/seed_{seed}" for seed in seeds)))
        for cell in cells:
            self.cells.setdefault(cell.name, cell)
            known = self.seeds.setdefault(cell.name, [])
            known += [seed for seed in seeds if seed not in known]
        kept = [{**asdict(cell), "seeds": self.seeds[cell.name]} for cell in self.cells.values()]
        head = {"format_version": FORMAT_VERSION, "method": self.method, "base": self.base, "search": self.search}
        tree = {**head, "cells": kept}
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / SWEEP, json.dumps(tree, indent=2) + "\n")

    @property
    def searched(self) -> list[str]:
        """The settings that a search chooses; empty for a grid."""
        return list((self.search or {}).get("space", ()))

    def runs(self) -> list[Run]:
        """Return all runs of the sweep, without those that the base config no longer accepts."""
        found: list[Run] = []
        for cell in self.cells.values():
            with suppress(ConfigError):
                found += [make_run(self.base, cell, seed, self.method, self.path) for seed in self.seeds[cell.name]]
        return found

    def _read(self, file: Path, cells: Sequence[TrialConfig]) -> None:
        tree = object_of(file)
        try:
            whole = tree is not None and tree["format_version"] == FORMAT_VERSION
            if tree is None or not whole or not all(NAMES.fullmatch(c["name"]) for c in tree["cells"]):
                raise ValueError
            self.cells = {c["name"]: TrialConfig(c["name"], dict(c["settings"])) for c in tree["cells"]}
            self.seeds = {c["name"]: [int(seed) for seed in c["seeds"]] for c in tree["cells"]}
            method, base, search = tree["method"], dict(tree["base"]), tree["search"]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{file} is damaged or of another version; choose another folder with --to") from None
        odd = [f"method is {method!r} in the folder and {self.method!r} now"] if method != self.method else []
        for cell in list(self.cells.values())[: 0 if odd else 1]:
            ours, theirs = (unread(tree, cell.settings, self.method, seed=0) for tree in (self.base, base))
            odd = differences(ours, theirs, self.method)[0]
            if self.search is not None and ours.stopping != theirs.stopping:  # a grid may mix them, a search not
                odd.append("stopping differs")
        if search != self.search:
            odd.append(f"search is {search} in the folder and {self.search} now")
        if odd:
            raise ConfigError(
                f"{self.path} has a sweep of another config: {'; '.join(odd)}; choose another folder with --to"
            )
        known = [place for cell in (TrialConfig("", {}), *cells) for place in self._outside(cell)]
        for cell in self.cells.values():
            for place, value in self._outside(cell):
                if (place, value) not in known:
                    raise ConfigError(
                        f"{self.path} has the cell {cell.name}, which sets {place} to {shown(value)}. Such settings "
                        "are not taken from a folder: give the cell in the command, or choose another --to"
                    )

    def _outside(self, cell: TrialConfig) -> list[tuple[str, object]]:
        """Return the settings of a cell that reach outside its runs; none if the base config refuses the cell."""
        try:
            config = unread(self.base, cell.settings, self.method)
        except ConfigError:
            return []
        return [(place, value) for place, value, _ in outside.marked(config)]
