# SPDX-License-Identifier: Apache-2.0
"""Names to tasks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, DataError, RewardError
from evoalign.tasks import TASKS, Data, Task, create
from evoalign.types import Example, Prompt

OWN = """
from evoalign.tasks import Data, Task

class Echo(Task):
    name = "echo"
    def load_data(self, seed): return Data([{"word": "a"}], [{"word": "b"}])
    def prompt(self, example): return example["word"]
    def compute_reward(self, text, example): return float(text == example["word"])

something = 3
"""


def test_registry_contains_the_built_in_tasks() -> None:
    assert list(TASKS) == ["conciseness", "countdown", "custom", "gsm8k", "math", "safety"]
    for name, task in TASKS.items():
        assert task.name == name
    assert isinstance(create(TaskConfig()), TASKS["conciseness"])
    assert isinstance(create(TaskConfig(name="countdown")), TASKS["countdown"])


def test_unknown_task_names_raise_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown task 'countdwon'; did you mean countdown\\? Known: conciseness, "):
        create(TaskConfig(name="countdwon"))
    with pytest.raises(
        ConfigError, match="unknown task 'zzz'; known: conciseness, countdown, custom, gsm8k, math, safety, or"
    ):
        create(TaskConfig(name="zzz"))


def test_create_loads_a_custom_task(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN, encoding="utf-8")
    task = create(TaskConfig(name=f"{path}:Echo"))
    assert task.name == "echo"
    assert task.rewards([" a "], task.load_data(0).train) == [1.0]
    for attribute, message in [("something", "not a subclass"), ("none", "has no 'none'")]:
        with pytest.raises(ConfigError, match=message):
            create(TaskConfig(name=f"{path}:{attribute}"))


class Odd(Task):
    """Gives back what its examples say."""

    name = "odd"
    max_reward = 1.0

    def load_data(self, seed: int) -> Data:
        return Data([], [])

    def prompt(self, example: Example) -> Prompt:
        return "?"

    def compute_reward(self, text: str, example: Example) -> Any:
        return example["reward"]

    def gold(self, example: Example) -> str | None:
        return example["gold"]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1", True])
def test_non_finite_rewards_raise_reward_error(reward: Any) -> None:
    with pytest.raises(RewardError, match="task odd returned"):
        Odd(TaskConfig()).rewards(["a"], [{"reward": reward}])


def test_self_check() -> None:
    task = Odd(TaskConfig())
    task.self_check([{"reward": 1, "gold": "x"}, {"reward": 0, "gold": None}])
    with pytest.raises(DataError, match=r"1 of 2 gold answers do not earn 1\.0: 'x' of row 1 earns 0\.5"):
        task.self_check([{"reward": 1, "gold": "x"}, {"reward": 0.5, "gold": "x"}])


def test_importing_tasks_is_fast() -> None:
    """A grader's process starts at once."""
    slow = ("torch", "scipy", "transformers", "datasets", "pyarrow")
    code = f"import sys, evoalign.tasks, evoalign.tasks.isolated.worker; print([m for m in {slow} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
