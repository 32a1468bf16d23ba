# SPDX-License-Identifier: Apache-2.0
"""The folder of a sweep. sweep.json says what belongs to it: the same command goes on, another one adds cells.

sweep.json              base config, method, cells and their seeds
CELL/seed_K/            the runs, each a run directory as ever
configs/, logs/         config and output of each run
results.json, table.md  what they came to; figures/
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from evoalign.analysis.sweeping.cells import Cell, Run, Tree, make_run, read_json, unread
from evoalign.config import outside
from evoalign.errors import ConfigError, RunExistsError, shown
from evoalign.rundir.directory import LOCK, RunDir
from evoalign.rundir.files import refuse_links, write_text
from evoalign.rundir.identity import differences
from evoalign.rundir.method import Method

FORMAT_VERSION = 1
SWEEP = "sweep.json"
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9_.,=+~-]+")
STUDY = "study.jsonl"
"""The trials of a search."""


class Folder:
    """A sweep's folder, and who is in it. `lock` it first; `release` it in the end."""

    def __init__(self, path: Path, base: Tree, method: Method) -> None:
        self.path, self.base = path, base
        self.method: Method = method
        self.told: Tree = {"method": method}
        """What results.json says beside the cells."""
        self.outcomes: dict[str, Tree] = {}
        """Of runs that are done, by name: read once."""
        self.search: Tree | None = None
        """What is searched, where this is no grid."""
        self.cells: dict[str, Cell] = {}
        self.seeds: dict[str, list[int]] = {}
        self._lock = RunDir(path)

    def lock(self, search: Tree | None = None, cells: Sequence[Cell] = ()) -> None:
        """Keep other sweeps out, and read what is there, which has to be of the same base config and search.

        The folder may come from elsewhere: a cell in it that is none of `cells`, those of the command, may not lead out
        of its runs (`evoalign.config.outside`).

        Raises RunExistsError, ConfigError.
        """
        self.search = search
        file = self.path / SWEEP
        if not file.is_file() and self._holds_something():
            raise RunExistsError(f"--to {self.path} holds something else than a sweep; choose another folder")
        try:
            self._lock.lock()
        except RunExistsError as error:
            raise RunExistsError(str(error).replace("output_dir", "--to").replace("training", "at work")) from None
        try:
            refuse_links(self.path, (STUDY, "configs"))
            if file.is_file():
                self._read(file, cells)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let others in."""
        self._lock.release()

    def add(self, cells: Sequence[Cell], seeds: Sequence[int]) -> None:
        """Write down that these cells and seeds belong to the sweep. Raises RunExistsError for links in their place."""
        for name in (cell.name for cell in cells):
            refuse_links(self.path, (name, f"configs/{name}", *(f"{name}/seed_{seed}" for seed in seeds)))
        for cell in cells:
            self.cells.setdefault(cell.name, cell)
            known = self.seeds.setdefault(cell.name, [])
            known += [seed for seed in seeds if seed not in known]
        tree = {
            "format_version": FORMAT_VERSION,
            "method": self.method,
            "base": self.base,
            "search": self.search,
            "cells": [
                {"name": cell.name, "settings": cell.settings, "seeds": self.seeds[cell.name]}
                for cell in self.cells.values()
            ],
        }
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / SWEEP, json.dumps(tree, indent=2) + "\n")

    @property
    def searched(self) -> list[str]:
        """The settings that a search chooses; none of a grid, whose cells are named by theirs."""
        return list((self.search or {}).get("space", ()))

    def runs(self) -> list[Run]:
        """All runs that belong to the sweep. One that a later base config refuses is left out."""
        found: list[Run] = []
        for cell in self.cells.values():
            with suppress(ConfigError):
                found += [make_run(self.base, cell, seed, self.method, self.path) for seed in self.seeds[cell.name]]
        return found

    def _holds_something(self) -> bool:
        """Besides what a sweep leaves that died before its first file was whole."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(entry.name not in (LOCK, f".{SWEEP}.tmp") for entry in self.path.iterdir())

    def _read(self, file: Path, cells: Sequence[Cell]) -> None:
        tree = read_json(file)
        try:
            if tree is None or tree["format_version"] != FORMAT_VERSION:
                raise ValueError
            if not all(_NAME.fullmatch(c["name"]) for c in tree["cells"]):
                raise ValueError
            self.cells = {c["name"]: Cell(c["name"], dict(c["settings"])) for c in tree["cells"]}
            self.seeds = {c["name"]: [int(seed) for seed in c["seeds"]] for c in tree["cells"]}
            method, base, search = tree["method"], dict(tree["base"]), tree["search"]
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{file} is damaged, or of another version; choose another folder with --to") from None
        odd = [f"method is {method!r} there and {self.method!r} now"] if method != self.method else []
        for cell in list(self.cells.values())[: 0 if odd else 1]:
            ours, theirs = (unread(tree, cell.settings, self.method, seed=0) for tree in (self.base, base))
            odd = differences(ours, theirs, self.method)[0]
            if self.search is not None and ours.stopping != theirs.stopping:  # trials would not be of one kind
                odd.append("stopping is another there than now")
        if search != self.search:
            odd.append(f"search is {search} there and {self.search} now")
        if odd:
            raise ConfigError(
                f"{self.path} holds a sweep of another config: {'; '.join(odd)}; choose another folder with --to"
            )
        self._refuse_outside(cells)

    def _refuse_outside(self, given: Sequence[Cell]) -> None:
        known = [place for cell in (Cell("", {}), *given) for place in self._outside(cell)]
        for cell in self.cells.values():
            for place, value in self._outside(cell):
                if (place, value) not in known:
                    raise ConfigError(
                        f"{self.path} has the cell {cell.name}, which sets {place} to {shown(value)}. Settings like "
                        "this are not taken from a sweep: give the cell in the command, or choose another --to"
                    )

    def _outside(self, cell: Cell) -> list[tuple[str, object]]:
        """Return the settings of a cell that lead out of its runs; none of a cell that the base config refuses."""
        try:
            config = unread(self.base, cell.settings, self.method)
        except ConfigError:
            return []
        return [(place, value) for place, value, _ in outside.marked(config)]
