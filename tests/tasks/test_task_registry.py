# SPDX-License-Identifier: Apache-2.0
"""Names to tasks."""

import subprocess
import sys

import pytest

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError
from evoalign.tasks import TASKS, create

OWN = """
from evoalign.tasks import Data, Task

class Echo(Task):
    name = "echo"
    def load_data(self, seed): return Data([{"word": "a"}], [{"word": "b"}])
    def prompt(self, example): return example["word"]
    def compute_reward(self, text, example): return float(text == example["word"])

something = 3
"""


def test_registry_contains_the_built_in_tasks():
    assert list(TASKS) == [
        "conciseness", "constraints", "countdown", "custom", "environment", "harness", "gsm8k", "guess", "likelihood",
        "math", "safety", "shopping", "sums", "tool_calls", "word_problems",
    ]  # fmt: skip
    for name, task in TASKS.items():
        assert task.name == name
    assert isinstance(create(TaskConfig()), TASKS["conciseness"])
    assert isinstance(create(TaskConfig(name="countdown")), TASKS["countdown"])


@pytest.mark.parametrize(("name", "message"), [
    ("countdwon", "unknown task 'countdwon'; did you mean countdown\\? Known: conciseness, "),
    ("zzz", "unknown task 'zzz'; known: conciseness, .*countdown, custom, .*gsm8k, guess, .*math, safety, .*, or"),
    ("OWN:something", "not a subclass"), ("OWN:none", "has no 'none'"),
])  # fmt: skip
def test_create_loads_a_custom_task_and_rejects_other_names(name, message, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN, encoding="utf-8")
    task = create(TaskConfig(name=f"{path}:Echo"))
    assert task.name == "echo"
    assert task.rewards([" a "], task.load_data(0).train) == [1.0]
    with pytest.raises(ConfigError, match=message):
        create(TaskConfig(name=name.replace("OWN", str(path))))


def test_importing_tasks_is_fast():
    """A grader's process starts at once."""
    slow = ("torch", "scipy", "transformers", "datasets", "pyarrow")
    code = f"import sys, evoalign.tasks, evoalign.tasks.isolated.worker; print([m for m in {slow} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
