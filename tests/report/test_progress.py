# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io

import pytest
from rich.console import Console

from evoalign.report.progress import Display
from evoalign.report.rows import metrics_row
from evoalign.types import Generation, Update, population


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def generation(index: int, total: int, *, alike: bool = False, test: float | None = None) -> Generation:
    fitness = (-4.0, -1.0, -3.0, -2.0, 0.0)
    coefficients = (0.0,) * 5 if alike else (-1.0, 0.5, -0.5, 0.0, 1.0)
    update = Update(index, index, population(5), coefficients, 0.01, 0.005)
    scores = tuple((f,) for f in fitness)
    evaluation = None if test is None else {"reward": test}
    return Generation(index, total, fitness, scores, update, "00", 3000, 0.0, 0.0, {"rollout": 1.0}, evaluation)


def run(console: Console, seconds: float, generations: list[Generation], total: int) -> None:
    clock = Clock()
    with Display(total, console, clock=clock) as display:
        for each in generations:
            clock.now += seconds
            display.update(metrics_row(each))


def plain(seconds: float, generations: list[Generation], total: int) -> list[str]:
    output = io.StringIO()
    run(Console(file=output, width=40), seconds, generations, total)
    return output.getvalue().splitlines()


def test_without_a_terminal_each_generation_is_one_plain_line() -> None:
    lines = plain(3.0, [generation(g, 4, alike=g == 1, test=-7.5 if g == 2 else None) for g in range(4)], 4)
    same = "mean reward -2  best 0  middle 60% -3.2 to -0.8"
    still = "generations without update"
    assert lines == [
        f"generation 1/4  {same}  {still} 0%  tokens/s 1,000  elapsed 0:00:03  left 0:00:09",
        f"generation 2/4  {same}  {still} 50%  tokens/s 1,000  elapsed 0:00:06  left 0:00:06",
        f"generation 3/4  {same}  {still} 33%  tokens/s 1,000  elapsed 0:00:09  left 0:00:03  test reward -7.5",
        f"generation 4/4  {same}  {still} 25%  tokens/s 1,000  elapsed 0:00:12  left 0:00:00  test reward -7.5",
    ]


def test_fast_generations_do_not_flood_a_log_but_first_last_and_evaluations_are_there() -> None:
    lines = plain(0.1, [generation(g, 100, test=-1.0 if g == 41 else None) for g in range(100)], 100)
    shown = [int(line.split()[1].split("/")[0]) for line in lines]
    assert {1, 42, 100} <= set(shown)
    assert len(shown) < 12


def test_time_left_counts_what_is_left_of_a_run_taken_up_again() -> None:
    (line,) = plain(5.0, [generation(89, 100)], 100)
    assert line.startswith("generation 90/100")
    assert "elapsed 0:00:05  left 0:00:50" in line


def test_on_a_terminal_it_shows_the_same_figures_live() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, color_system=None)
    run(console, 3.0, [generation(g, 2, test=-7.5) for g in range(2)], 2)
    text = output.getvalue()
    for word in ("generation 1/2", "generation 2/2", "mean reward -2", "best 0", "middle 60% -3.2 to -0.8"):
        assert word in text
    for word in (
        "generations without update 0%",
        "tokens/s 1,000",
        "elapsed 0:00:06",
        "left 0:00:00",
        "test reward -7.5",
        "━",
    ):
        assert word in text
    assert "\x1b[?25h" in text, "the cursor is shown again at the end"


def test_an_error_within_leaves_the_terminal_in_order() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80)
    with pytest.raises(RuntimeError, match="broken"), Display(3, console):
        raise RuntimeError("broken")
    assert "\x1b[?25h" in output.getvalue()


def test_no_generation_at_all() -> None:
    assert plain(1.0, [], 5) == []


def test_a_method_has_its_own_word_for_rows_without_variance() -> None:
    output = io.StringIO()
    with Display(1, Console(file=output, width=40), unit="step", still="steps with equal rewards") as display:
        display.update(metrics_row(generation(0, 1, alike=True)))
    assert "step 1/1" in output.getvalue() and "steps with equal rewards 100%" in output.getvalue()
