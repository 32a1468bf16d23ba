# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from evoalign.report import figures
from evoalign.report.figures import Ends, canvas
from evoalign.statistics import Estimate

Draw = Callable[..., None]
BOTH = pytest.mark.parametrize("draw", [figures.evolution, figures.time_breakdown])
PIXELS = (600, 1080)
FITNESS = {"mean": 100.0, "best": 50.0, "worst": 150.0, "p20": 120.0, "p80": 80.0}
SECONDS = {"rollout": 1.0, "score": 0.1, "update": 0.2, "other": 0.05}


def rows(count: int, **changes: Any) -> list[dict[str, Any]]:
    return [
        {name: -value / (g + 1) for name, value in FITNESS.items()}
        | {"generation": g, "zero_variance": False, "tokens": 1000, "seconds": SECONDS, "evaluation": None, **changes}
        for g in range(count)
    ]


def pixels(path: Path) -> np.ndarray:
    return imread(path)[..., :3]


def share(image: np.ndarray, color: str) -> np.ndarray:
    """Share of the pixels of a colour in each column: [width]."""
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return (np.abs(image - wanted).max(axis=-1) < 0.02).mean(axis=0)


@BOTH
@pytest.mark.parametrize("count", [0, 1, 40])
def test_a_picture_of_the_right_size(draw: Draw, count: int, tmp_path: Path) -> None:
    path = tmp_path / "figures" / "picture.png"
    draw(rows(count), path, title="a $ title_with^marks")
    image = pixels(path)
    assert image.shape[:2] == PIXELS
    assert image.std() > 0.01, "blank"
    assert [p.name for p in path.parent.iterdir()] == ["picture.png"]


def test_everything_asked_for_is_drawn(tmp_path: Path) -> None:
    data, start = rows(20), Ends(before=Estimate(-90.0, 1))
    figures.evolution(data, tmp_path / "plain.png")
    plain = pixels(tmp_path / "plain.png")
    assert share(plain, figures.MEAN).any() and share(plain, figures.BEST).any()
    assert not any(share(plain, color).any() for color in (figures.TEST, figures.ZERO, figures.VALIDATION))
    data[9]["evaluation"] = {"reward": -20.0}
    data[5]["zero_variance"] = True
    data[7]["validation"] = {"reward": -20.0}
    figures.evolution(data, tmp_path / "full.png", test=start)
    full = pixels(tmp_path / "full.png")
    assert all(share(full, color).any() for color in (figures.TEST, figures.ZERO, figures.VALIDATION))


def test_the_test_split_before_and_after_training_are_points_with_their_intervals(tmp_path: Path) -> None:
    """The start at the left, the end at the right, and a bar as long as its interval."""
    start, end = Estimate(-110.0, 9, -115.0, -105.0), Estimate(-20.0, 9, -50.0, 10.0)
    columns: list[np.ndarray] = []
    for ends in (Ends(start), Ends(start, end)):
        figures.evolution(rows(5), tmp_path / "picture.png", test=ends)
        above = pixels(tmp_path / "picture.png")[: int(0.78 * PIXELS[0])]  # without the legend
        columns.append(len(above) * share(above, figures.TEST))
    (alone, both), middle = columns, PIXELS[1] // 2
    assert alone[:middle].max() > 5 and alone[middle:].max() == 0
    assert both[middle:].max() > 3 * both[:middle].max() > 10, "60 against 10 high"


def test_the_end_takes_the_place_of_an_evaluation_of_the_same_mean(tmp_path: Path) -> None:
    measured = rows(4, evaluation={"reward": -60.0})
    end = Ends(after=Estimate(-60.0, 2))
    figures.evolution(measured, tmp_path / "rows.png")
    figures.evolution(measured, tmp_path / "both.png", test=end)
    assert (tmp_path / "rows.png").read_bytes() == (tmp_path / "both.png").read_bytes()


def test_phases_are_as_high_as_long_and_each_has_its_colour(tmp_path: Path) -> None:
    """Also one of an engine's own. The update takes as long as the rollout, and covers as much of the figure."""
    seconds = {"rollout": 1.0, "score": 0.4, "update": 1.0, "other": 0.3, "weights sync": 0.5}
    figures.time_breakdown(rows(8, seconds=seconds), tmp_path / "figure.png")
    image = pixels(tmp_path / "figure.png")
    assert all(share(image, color).any() for color in (*figures.PHASES.values(), figures.EXTRA[0]))

    update, rollout = (share(image, figures.PHASES[name]).mean() for name in ("update", "rollout"))
    assert update == pytest.approx(rollout, rel=0.05) and update > 0.1


def test_distribution_draws_a_colour_per_generation_and_no_figure_without_rewards(tmp_path: Path) -> None:
    """Empty, constant and missing columns are drawn too; with one reward there is no scatter."""
    figures.distribution({}, tmp_path / "none.png")
    figures.distribution({0: {}}, tmp_path / "none.png")
    assert not any(tmp_path.iterdir())
    some = {"reward": [0.0, 1.0, 2.0, 5.0], "cost": [-1.0, 2.0, math.nan, 1.0]}
    for name, found, count in (
        ("one", {7: {"reward": [1.0, 1.0]}}, 1),
        ("two", {0: some, 9: {**some, "cost": [-3.0] * 4}}, 2),
        ("many", {0: {**some, **{f"${i}": [math.nan] * 4 for i in range(9)}}, 4: some, 9: some}, 3),
    ):
        figures.distribution(found, tmp_path / f"{name}.png", title="a $ title")
        image = pixels(tmp_path / f"{name}.png")
        assert [bool(share(image, color).any()) for color in figures.COLORS[:3]] == [i < count for i in range(3)]
    (axes,) = canvas(3, 3).subplots(1, 1, squeeze=False)[0]
    figures._scatter(axes, [([1.0] * 2500, [2.0] * 2500)])
    assert [len(line.get_xdata()) for line in axes.lines[:1]] == [834], "at most 1,000 points"
    assert [line.get_ydata() for line in axes.lines[1:]] == [[0, 0], [0, 1]]


def test_a_picture_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    figures.time_breakdown(rows(3), path)
    first = path.read_bytes()
    with pytest.raises(KeyError):
        figures.time_breakdown([{"generation": 0}], path)
    assert path.read_bytes() == first
    figures.time_breakdown(rows(30), path)
    assert path.read_bytes() != first
    figures.time_breakdown(rows(3), path)
    assert path.read_bytes() == first, "the same rows give the same bytes"
    assert [p.name for p in tmp_path.iterdir()] == ["picture.png"]


@pytest.mark.slow
def test_no_pyplot_and_no_matplotlib_before_the_first_figure(tmp_path: Path) -> None:
    code = (
        "import sys; from evoalign.report import figures\n"
        "assert not any(m.startswith('matplotlib') for m in sys.modules)\n"
        f"figures.time_breakdown([], {str(tmp_path / 'figure.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


LONG = "a/sigma=0.0125 (0) to b/sigma=0.025,learning_rate=0.0125 (1) "


@pytest.mark.parametrize("title", ["short", LONG * 3, "x" * 300])
def test_titles_stay_inside_the_picture(title: str) -> None:
    for columns in (1, 3):
        figure = figures.canvas(8.0, 4.0, layout="constrained")
        for axes in figure.subplots(1, columns, squeeze=False)[0]:
            figures.frame(axes, title, "")
        figure.draw_without_rendering()
        boxes = [axes._left_title.get_window_extent() for axes in figure.axes]
        for box, after in zip(boxes, [*boxes[1:], None], strict=True):
            assert box.x0 >= 0 and box.y1 <= figure.bbox.y1
            assert box.x1 <= (figure.bbox.x1 if after is None else after.x0)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_names_with_dollar_signs_are_drawn_as_they_are(scale: str, tmp_path: Path) -> None:
    """matplotlib would read `$x_{$` as mathematics and raise; the powers at a logarithmic axis stay mathematics."""
    name = "a$x_{$b"
    figure = figures.canvas(4.0, 3.0, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([1.0, 1e6], [0.0, 1.0], label=name)
    axes.set_xscale(scale)
    figures.frame(axes, name, name)
    axes.set_yticks([0.0, 1.0], [name, name])
    axes.annotate(name, (1.0, 0.5))
    axes.legend(title=name)
    figure.legend([axes.lines[0]], [name])
    figure.suptitle(name)
    figures.save_both(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.svg").is_file()
    powers = [text for text in axes.get_xticklabels() if "$" in text.get_text()]
    assert all(text.get_parse_math() for text in powers) and bool(powers) == (scale == "log")


def test_names_with_dollar_signs_as_categories_are_drawn_as_they_are(tmp_path: Path) -> None:
    figure = figures.canvas(4.0, 3.0)
    axes = figure.add_subplot()
    axes.bar(["$x_{$", "b$^{$"], [1.0, 2.0])
    figures.save(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").is_file()
