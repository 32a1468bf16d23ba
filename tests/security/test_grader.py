# SPDX-License-Identifier: Apache-2.0
"""No text that a model may write hangs, crashes, cheats or escapes the Countdown grader."""

import ast
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evoalign.config import TaskConfig
from evoalign.tasks import create

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "grader.py"))
BOMBS: dict[str, str] = BENCHMARK["BOMBS"]
ROW: dict[str, Any] = BENCHMARK["ROW"]
TASK = create(TaskConfig(name="countdown"))
REWARDS = {0.0, 0.01, 0.05, 0.06, 0.1, 1.0, 1.01, 1.05, 1.06, 1.1}
HANG = 1.0
"""Seconds of this process. A guard against hangs, not a measurement: benchmarks/grader.py has the times."""


def graded(text: str) -> float:
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a grader that prints a warning for each odd answer drowns the log
        reward = TASK.rewards([text], [ROW])[0]
    assert time.process_time() - started < HANG
    return reward


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_earn_nothing_for_their_answer(name):
    assert graded(BOMBS[name]) <= 0.1
    assert TASK.measures(BOMBS[name], ROW)["accuracy"] == 0.0


def test_the_bomb_list_is_whole():
    """A right answer beside the bombs does score, so that the refusals above mean something."""
    assert len(BOMBS) >= 40
    assert graded(BENCHMARK["GOLD"]) == 1.1


@pytest.mark.slow
def test_ten_thousand_fuzzed_completions():
    rewards = [graded(text) for text in BENCHMARK["completions"](10_000, seed=1)]
    assert {round(reward, 9) for reward in rewards} <= REWARDS
    assert 0 < sum(reward > 1 for reward in rewards) < 4_000  # the fuzz reaches right answers and wrong ones


@pytest.mark.slow
@settings(max_examples=300)
@given(st.text(max_size=300))
def test_any_text(text: str) -> None:
    for completion in (text, BENCHMARK["answer"](text)):
        assert round(graded(completion), 9) in REWARDS


@given(st.text(alphabet="957863+-*/() ", max_size=60))
def test_full_marks_only_for_the_numbers_and_the_target(text: str) -> None:
    """Whatever scores is checked by a walk of its own over the parsed text, in floating point."""
    if graded(BENCHMARK["answer"](text)) < 1:
        return
    tree = ast.parse(text.strip(), mode="eval")
    assert sorted(n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)) == [75, 87, 95]
    assert not any(isinstance(n, ast.Pow | ast.FloorDiv | ast.UnaryOp | ast.Call) for n in ast.walk(tree))


def test_conciseness_takes_any_text_too():
    task = create(TaskConfig(name="conciseness"))
    row = {"prompt": "?", "target": "No"}
    for text in BENCHMARK["completions"](2_000, seed=2):
        assert task.rewards([text], [row])[0] == -abs(len(text.strip()) - 2)


def test_the_tasks_never_run_text_as_code():
    """No call of eval, exec or compile, and no pickle or shell, anywhere in the tasks."""
    banned = {"eval", "exec", "compile", "__import__", "pickle", "marshal", "subprocess", "os"}
    starting = {"connection.py": {"os", "subprocess"}, "isolation.py": {"os"}, "worker.py": {"os"}}  # of workers
    for path in (ROOT / "src" / "evoalign" / "tasks").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        processes = starting.get(path.name, set())
        assert not (banned - processes) & (called | imported), path
