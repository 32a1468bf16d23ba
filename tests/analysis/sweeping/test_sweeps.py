# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from evoalign.analysis.sweeping import report as sweeps
from evoalign.analysis.sweeping.report import Point


def point(
    sigma: Any, alpha: float = 0.1, *, values: Any = (1.0, 2.0), hacked: Any = (0.0, 0.0), gain: float = 1.0
) -> Point:
    return Point({"es.sigma": sigma, "es.learning_rate": alpha}, values, hacked, start=0.0, gain=gain)


def pixels(path: Path) -> np.ndarray:
    return imread(path)[..., :3]


def count(image: np.ndarray, color: str) -> int:
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(image - wanted).max(axis=-1) < 0.02).sum())


def heat_map(points: list[Point], path: Path) -> np.ndarray:
    sweeps.heat_map(points, path, x="es.sigma", y="es.learning_rate", title="a $ title_with^marks")
    assert [p.name for p in path.parent.iterdir()] == [path.name], "something is left over"
    return pixels(path)


@pytest.mark.parametrize(
    ("is_safe", "changes"),
    [
        *((True, changes) for changes in ({}, {"hacked": (0.0, 0.01)})),
        *((False, {"hacked": hacked}) for hacked in ((0.0, 0.02), ())),  # one seed is enough; nobody looked
        *((False, {"gain": gain}) for gain in (0.0, -1.0)),
    ],
)
def test_is_safe_needs_gain_without_hacking(is_safe: bool, changes: dict[str, Any]) -> None:
    assert point(0.1, **changes).is_safe is is_safe


def test_heat_map_outlines_the_safe_band(tmp_path: Path) -> None:
    def band(hacked: list[float], name: str) -> int:
        places = [(s, a) for s in (0.1, 0.2) for a in (1, 2)]
        points = [point(*place, hacked=(share,)) for place, share in zip(places, hacked, strict=True)]
        return count(heat_map(points, tmp_path / name / "map.png"), sweeps.BAND)

    none, one, all_ = band([1, 1, 1, 1], "none"), band([0, 1, 1, 1], "one"), band([0, 0, 0, 0], "all")
    assert none == 0
    assert all_ > one > 0
    assert all_ < 2.5 * one, "the edges between safe cells are drawn"


def test_heat_map_hatches_cells_that_were_not_run(tmp_path: Path) -> None:
    square = [point(s, a) for s in (0.1, 0.2) for a in (1, 2)]
    whole = heat_map(square, tmp_path / "whole" / "map.png")
    gap = heat_map(square[:3], tmp_path / "gap" / "map.png")
    undone = heat_map([*square[:3], point(0.2, 2, values=(), hacked=())], tmp_path / "undone" / "map.png")
    plain = count(whole, sweeps.HATCH)  # edges of letters have the colour too
    assert count(gap, sweeps.HATCH) > plain + 500
    assert count(undone, sweeps.HATCH) > plain + 500


@pytest.mark.parametrize("points", [[point(0.1)], [point(0.1, values=(3.0,), hacked=(0.5,)), point(0.2, 0.3)]])
def test_heat_map_draws_few_cells(points: list[Point], tmp_path: Path) -> None:
    assert heat_map(points, tmp_path / "map.png").std() > 0.01


@pytest.mark.parametrize("values", [(0.001, 0.01, 0.1), (1, 2, 4), ("b", "ab"), (True, False), (None, 1)])
def test_lines_accepts_any_setting(values: tuple[Any, ...], tmp_path: Path) -> None:
    sweeps.lines([point(v) for v in values], tmp_path / "lines.png", x="es.sigma", title="t")
    image = pixels(tmp_path / "lines.png")
    assert count(image, sweeps.MEAN) > 100
    assert count(image, sweeps.TEST) > 20, "the start is missing"


def test_scatter_draws_each_setting(tmp_path: Path) -> None:
    points = [point(s, a, values=(s,)) for s, a in ((0.1, 1), (0.2, 2), (0.4, 1))]
    sweeps.scatter(points, tmp_path / "search.png", keys=["es.sigma", "es.learning_rate"])
    assert count(pixels(tmp_path / "search.png"), sweeps.TEST) > 50


def test_ordered_sorts_values() -> None:
    assert sweeps.ordered([0.1, 1e-3, "b", 0.01, "a", 0.1, None]) == [1e-3, 0.01, 0.1, "a", "b", None]
