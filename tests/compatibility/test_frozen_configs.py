# SPDX-License-Identifier: Apache-2.0
"""The config files of release 0.1.0 load, and every setting in them has the value that it names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from evoalign.analysis.sweeping.cells import read_cells, resolve
from evoalign.config import load

HERE = Path(__file__).parent
CONFIGS = sorted(p for p in (HERE / "configs").rglob("*.yaml") if p.parent.name != "sweeps")
AXES = sorted((HERE / "configs" / "sweeps").glob("*.yaml"))
RESOLVED = sorted((HERE / "half_done").glob("*/config.yaml"))
"""As a run writes it: every setting, with all defaults."""


def settings(tree: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each leaf with its place."""
    if isinstance(tree, dict):
        for name, below in tree.items():
            yield from settings(below, (*place, name))
    else:
        yield place, tree


def at(tree: Any, place: tuple[str, ...]) -> Any:
    for name in place:
        tree = tree[name]
    return tree


def test_there_are_old_files() -> None:
    assert (len(CONFIGS), len(AXES), len(RESOLVED)) == (31, 6, 4)


@pytest.mark.parametrize("path", [*CONFIGS, *RESOLVED], ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_setting_keeps_its_value(path: Path) -> None:
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load([path])
    resolved = config.model_dump(mode="json", by_alias=True)
    resolved["grpo"] |= config.grpo.by_name  # settings of TRL stood in the section itself
    resolved["model"]["trust_remote_code"] = False  # the only value it ever took, and still taken
    for place, value in settings(tree):
        got = at(resolved, place)
        assert (at(got, ("name",)) if isinstance(got, dict) else got) == value, f"{'.'.join(place)} is {got}"


@pytest.mark.parametrize("path", AXES, ids=lambda p: p.stem)
def test_every_cell_of_an_old_grid_is_a_config(path: Path) -> None:
    base = yaml.safe_load((HERE / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    base["es"]["antithetic"] = False  # ab takes no pairs
    cells = read_cells(path)
    assert [list(cell) for cell in cells] == [list(cell) for cell in yaml.safe_load(path.read_text(encoding="utf-8"))]
    for cell in cells:
        resolved = resolve(base, cell, "es").model_dump(mode="json", by_alias=True)
        assert {name: at(resolved, tuple(name.split("."))) for name in cell} == cell
