# SPDX-License-Identifier: Apache-2.0
"""Generated Countdown data, the solver, and the file that is shipped."""

import hashlib
import itertools
import json
import runpy
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from evoalign.config import TaskConfig
from evoalign.errors import DataError
from evoalign.rewards.arithmetic import evaluate
from evoalign.tasks import create
from evoalign.tasks.countdown import context, generate, held_out, solve, write_countdown

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny_base" / "countdown.py"
SHIPPED = Path(__file__).parents[3] / "data" / "tasks" / "countdown" / "countdown.json"


def test_rows_are_of_the_published_form():
    for index, row in enumerate(generate(40, "mixed", seed=1)):
        assert list(row) == ["id", "context", "numbers", "target", "solution"]
        assert row["id"] == index
        assert len(row["numbers"]) in (3, 4)
        assert all(1 <= n <= 99 for n in row["numbers"])
        assert 10 <= int(row["target"]) <= 100
        assert held_out(row["numbers"], int(row["target"]))
        expression = evaluate(row["solution"])
        assert (expression.value, expression.numbers) == (int(row["target"]), tuple(sorted(row["numbers"])))
        assert row["solution"].count("(") == len(row["numbers"]) - 1  # every operation in its parentheses


@pytest.mark.parametrize("numbers", [[83, 78, 1, 39], [44, 19, 35], [2, 54, 17], [1, 2, 3]])
def test_numbers_are_printed_as_numpy_prints_them(numbers):
    text = context(numbers, 82)
    assert f"Using the numbers {np.array(numbers)}, create an equation that equals 82. You" in text
    assert text.startswith("You are a helpful assistant. You first think")
    assert text.endswith("the user with the answer.") is False
    assert text.endswith("example <answer> (1 + 2) / 3 </answer>.Let me solve this step by step.\n<think>")


def test_generate_is_deterministic():
    assert generate(10, seed=3) == generate(10, seed=3)
    assert generate(10, seed=3)[:5] == generate(5, seed=3)
    assert generate(10, seed=3) != generate(10, seed=4)


def test_sizes_targets_and_keep_are_options():
    for size in (3, 4):
        assert {len(row["numbers"]) for row in generate(10, size, seed=0)} == {size}
    rows = generate(30, 3, seed=0, targets=(-5, 5), keep=None)
    assert all(-5 <= int(row["target"]) <= 5 for row in rows)
    assert not all(held_out(row["numbers"], int(row["target"])) for row in rows)


def test_generate_has_no_duplicates(monkeypatch):
    monkeypatch.setattr("evoalign.tasks.countdown.MAX_NUMBER", 4)
    rows = generate(80, 3, seed=0, targets=(1, 30), keep=None)
    assert len({(tuple(sorted(row["numbers"])), row["target"]) for row in rows}) == 80


def test_generate_raises_if_there_are_too_few_problems(monkeypatch):
    monkeypatch.setattr("evoalign.tasks.countdown.MAX_MISSES", 200)
    with pytest.raises(DataError, match="found only 0 of 5 problems"):
        generate(5, keep=lambda numbers, target: False)


def test_held_out_is_pinned():
    digest = hashlib.blake2b(b"19,35,44:98", digest_size=8).digest()
    assert held_out([44, 19, 35], 98) == held_out([19, 44, 35], 98) == (int.from_bytes(digest, "big") % 10 == 0)
    share = sum(held_out([a, b, 7], 50) for a in range(100) for b in range(100)) / 10_000
    assert 0.09 < share < 0.11
    assert [t for t in range(10, 101) if held_out([44, 19, 35], t)] == [15, 23, 32, 36, 44, 52, 61, 74]


@pytest.mark.skipif(not RECIPE.exists(), reason="no recipes beside this source")
def test_the_recipe_of_the_tiny_model_holds_out_the_same_problems():
    is_held_out = runpy.run_path(str(RECIPE))["is_held_out"]
    problems = [([a, b, c], a + b - c) for a in range(1, 99, 7) for b in range(1, 99, 5) for c in range(1, 99, 11)]
    assert [is_held_out(*problem) for problem in problems] == [held_out(*problem) for problem in problems]


def test_solve_finds_existing_solutions():
    solution = solve([44, 19, 35], 98)
    assert solution is not None and evaluate(solution).value == 98
    assert solve([1, 1, 1], 50) is None
    assert solve([5], 5) == "5"
    fraction = solve([1, 3, 7], Fraction(7, 3))
    assert fraction is not None and evaluate(fraction).value == Fraction(7, 3)
    assert solve([8, 3, 8, 3], 24) is not None  # 8 / (3 - 8 / 3): needs a fraction on the way


def test_solve_is_exhaustive():
    """Against all values of all trees over three numbers, listed apart."""
    numbers, values = [3, 7, 8], set()
    for a, b, c in itertools.permutations(map(Fraction, numbers)):
        for first, second in itertools.product("+-*/", repeat=2):
            for text in (f"({a} {first} {b}) {second} {c}", f"{a} {first} ({b} {second} {c})"):
                values.add(evaluate(text).value)
    found = {t for t in range(-100, 200) if solve(numbers, t) is not None}
    assert found == {int(v) for v in values if v.denominator == 1 and -100 <= v < 200}


def test_write_countdown_writes_one_row_per_line(tmp_path):
    path = tmp_path / "deep" / "countdown.json"
    write_countdown(path, 12, 3, seed=2)
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == generate(12, 3, seed=2)
    assert len(text.splitlines()) == 14
    task = create(TaskConfig(name="countdown", train_data=str(path)))
    task.self_check(task.load_data(0).train)


def test_shipped_rows_are_of_the_generator_new_to_the_tiny_model_and_all_different():
    rows = json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert len(rows) == 2200
    assert rows[:25] == generate(25, "mixed", seed=0)
    assert all(held_out(row["numbers"], int(row["target"])) for row in rows)
    assert len({(tuple(sorted(row["numbers"])), row["target"]) for row in rows}) == 2200
    assert 1000 < sum(len(row["numbers"]) == 3 for row in rows) < 1200
