# SPDX-License-Identifier: Apache-2.0
"""Code of rewards that ends the process as it is imported, or whose exceptions hold the text of a completion."""

import logging
import subprocess
import sys

import pytest
from small_runs import write_rows

from evoalign.config import TaskConfig
from evoalign.config.task import GraderConfig
from evoalign.errors import ConfigError, RewardError
from evoalign.plugins import described, load_object
from evoalign.tasks import create, isolate

EVIL = "\x1b]0;owned\x07\x9b2J\u202egnp.exe\u2066"
REWARD = "def reward(prompts, completions, **columns):\n    raise ValueError(f'bad {completions}')\n"
CHILD = """
import os
pid = os.fork()
if not pid:
    os._exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def test_exceptions_of_rewards_are_logged_without_control_characters(tmp_path, caplog):
    (tmp_path / "own.py").write_text(REWARD.replace("{completions}", "{completions[0]}"))
    rows = write_rows(tmp_path / "rows.jsonl", ({"prompt": f"question {i}"} for i in range(12)))
    rewards = [f"{tmp_path / 'own.py'}:reward"]
    config = TaskConfig(name="custom", train_data=rows, rewards=rewards, test_size=2)
    task = isolate(create(config), GraderConfig(retries=1))
    try:
        examples = task.load_data(0).train[:2]
        with caplog.at_level(logging.WARNING), pytest.raises(RewardError) as error:
            task.rewards([EVIL, EVIL], examples)
    finally:
        task.close()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("bad " in line for line in lines) >= 2, "both the retry and the search quote the exception"
    assert all(line.isprintable() for line in (*lines, str(error.value), described(ValueError(EVIL))))


@pytest.mark.parametrize("name", ["own_exit.py:reward", "own_exit:reward"])
def test_code_that_ends_the_process_as_it_is_imported_is_an_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_exit.py").write_text("import os\nos._exit(0)\n")
    program = (
        "import sys\nsys.path.insert(0, '')\nfrom evoalign.errors import ConfigError\n"
        f"from evoalign.plugins import load_object\ntry:\n    load_object({name!r}, 'task.rewards')\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "task.rewards" in done.stdout and "os._exit(0)" in done.stdout


def test_child_processes_of_imported_code_still_end(tmp_path):
    (tmp_path / "own_child.py").write_text(CHILD)
    assert load_object(f"{tmp_path / 'own_child.py'}:status", "task.rewards") == 7
    with pytest.raises(ConfigError, match="has no 'other'"):
        load_object(f"{tmp_path / 'own_child.py'}:other", "task.rewards")
