# SPDX-License-Identifier: Apache-2.0
"""Settings that only one task has reach it, also in the worker, and other tasks reject them."""

import os
from contextlib import closing

import pytest
from small_runs import UNCHECKED
from task_runs import lines, train

import evoalign
from evoalign import tasks
from evoalign.config import GraderConfig, TaskConfig, from_dict, load, to_yaml
from evoalign.config.task import WITH_SETTINGS
from evoalign.errors import ConfigError
from evoalign.exporting.source import private_paths, public
from evoalign.rundir.identity import differences
from evoalign.tasks import TASKS

OWN = '''
import os
from pydantic import PositiveFloat
from evoalign.config import Section
from evoalign.tasks import Data, Task


class Settings(Section):
    letter: str = "e"
    worth: PositiveFloat = 1.0


class Letters(Task):
    """Counts a letter; `worth` each."""

    name = "letters"
    settings = Settings

    def load_data(self, seed):
        return Data([{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "c"}])

    def prompt(self, example):
        return example["prompt"]

    def compute_reward(self, text, example):
        return self.options.worth * text.count(self.options.letter)

    def measures(self, text, example):
        return {"process": float(os.getpid()), "worth": self.options.worth}


class Loose(Letters):
    settings = None

    def compute_reward(self, text, example):
        return float(self.options.get("worth", 1.0)) + self.config.options.get("bonus", 0.0)
'''


@pytest.fixture
def own(tmp_path):
    (tmp_path / "letters.py").write_text(OWN)
    return str(tmp_path / "letters.py")


def test_options_is_an_instance_of_the_settings_model(own):
    task = tasks.create(TaskConfig.model_validate({"name": f"{own}:Letters", "letter": "x", "worth": "2.5"}))
    assert (task.options.letter, task.options.worth) == ("x", 2.5)
    assert task.rewards(["xxe"], [{"prompt": "a"}]) == [5.0]
    assert tasks.create(TaskConfig(name=f"{own}:Letters")).options.letter == "e"


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("Letters", {"lettr": "x"}, r"unknown setting task\.lettr; did you mean task\.letter\?"),
    ("Letters", {"trian_data": "x"}, r"unknown setting task\.trian_data; did you mean task\.train_data\?"),
    ("Letters", {"qqq": 1}, r"unknown setting task\.qqq; known here: batch_size, .*grading, letter, "),
    ("Letters", {"worth": 0}, r"task\.worth: Input should be greater than 0"),
    ("Loose", {"batchsize": 2}, r"unknown setting task\.batchsize; did you mean task\.batch_size\?"),
])  # fmt: skip
def test_unknown_settings_are_rejected(own, name, settings, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create(TaskConfig.model_validate({"name": f"{own}:{name}", **settings}))


def test_options_is_a_dict_without_settings_model(own):
    task = tasks.create(TaskConfig.model_validate({"name": f"{own}:Loose", "worth": 2, "bonus": 0.5}))
    assert task.options == {"worth": 2, "bonus": 0.5} and task.compute_reward("", {}) == 2.5


def test_options_reach_the_worker(own):
    config = TaskConfig.model_validate({"name": f"{own}:Letters", "letter": "x", "worth": 3.0})
    with closing(tasks.isolate(tasks.create(config), GraderConfig())) as task:
        data = task.load_data(0)
        found = task.measures("xx", data.train[0])
        assert found["worth"] == 3.0 and found["process"] != float(os.getpid())
        assert task.rewards(["xx", "e"], [data.train[0], data.test[0]]) == [6.0, 0.0]
        assert task.options.worth == 3.0


@pytest.mark.parametrize("name", sorted(TASKS.keys() - WITH_SETTINGS))
def test_built_in_tasks_reject_unknown_settings(name):
    with pytest.raises(ConfigError) as refused:
        from_dict({"es": {"sigma": 0.1}, "task": {"name": name, "letter": "x", "btch_size": 3}})
    shown = str(refused.value)
    assert "unknown setting task.btch_size; did you mean task.batch_size?" in shown
    assert "unknown setting task.letter; known here: batch_size, " in shown


def test_a_shipped_task_with_settings_checks_them_itself():
    config = from_dict({"es": {"sigma": 0.1}, "task": {"name": "safety", "shares": {"TT": 3}, "cut": []}})
    assert tasks.create(config.task).options.shares == {"TT": 3}
    with pytest.raises(ConfigError, match=r"unknown setting task\.btch_size; did you mean task\.batch_size\?"):
        tasks.create(TaskConfig.model_validate({"name": "safety", "btch_size": 3}))


SYSTEM = {"system_prompt": "Be brief."}
CHATS = {"environment", "guess", "harness", "shopping", "sums"}
"""Tasks of several turns, whose prompts are messages."""


@pytest.mark.parametrize(("name", "settings", "said"), [
    ("conciseness", {"rewards": ["a.py:b"]}, r"task conciseness .*task\.name: custom"),
    ("countdown", {"rewards": ["a.py:b"]}, r"task countdown .* task\.name: custom"),
    ("conciseness", {"gold": "answer"}, r"task\.gold: answer is not for task conciseness"),
    ("conciseness", {"grading": "lenient"}, r"task\.grading: lenient is not for task conciseness"),
    *((name, {"prompt": "short"}, rf"task\.prompt: {name} has .*raw.*, not short")
      for name in sorted(TASKS.keys() - {"countdown"} - CHATS)),
    *((name, {"prompt": "raw"}, rf"task\.prompt: {name} has chat, not raw")
      for name in sorted(CHATS - {"environment"})),
    ("countdown", {"prompt": "conversation"}, r"task\.prompt: countdown has raw, short, chat, chat_opened, not"),
    *((name, {"prompt": "raw", **SYSTEM}, "task.prompt: raw are plain text") for name in TASKS if name not in CHATS),
    ("countdown", {"prompt": "short", **SYSTEM}, "task.prompt: short are plain text"),
    ("safety", {"prompt": "conversation", **SYSTEM}, "without messages"),
    ("countdown", SYSTEM, r"set task\.prompt: chat"), ("safety", SYSTEM, r"set task\.prompt: chat"),
    ("own_parts:Outside", SYSTEM, r"task\.system_prompt is not for task own_parts:Outside"),
])  # fmt: skip
def test_settings_of_other_tasks_are_rejected(name, settings, said):
    with pytest.raises(ConfigError, match=said):
        tasks.create(TaskConfig(name=name, **settings), [len] if name == "custom" else None)


@pytest.mark.parametrize("name", ["conciseness", "safety"])
def test_weights_of_a_built_in_task_are_ignored_with_a_warning(name):
    with pytest.warns(UserWarning, match=rf"{name} .*task\.reward_weights"):
        tasks.create(TaskConfig(name=name, reward_weights=[1.0]))


def test_options_are_recorded_and_part_of_the_run(own, tmp_path):
    tree = {"es": {"sigma": 0.1}, "task": {"name": f"{own}:Letters", "letter": "/home/somebody/letters.txt"}}
    config = from_dict(tree)
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    assert load([tmp_path / "saved.yaml"]) == config
    other = load([tmp_path / "saved.yaml"], ["task.letter=y"])
    assert other.task.options == {"letter": "y"}
    assert differences(other, config)[0] == ["task.letter is '/home/somebody/letters.txt' in the run and 'y' now"]
    assert "/home/somebody/letters.txt" in private_paths(config)
    assert public(config).task.options == {"letter": "letters.txt"}


def test_run_and_evaluation_use_options(own, tmp_path):
    config = {
        "output_dir": str(tmp_path / "run"), "model": {"name": "tiny", "dtype": "float32"}, "engine": {"device": "cpu"},
        "es": {"sigma": 0.1, "learning_rate": 0.1, "num_generations": 1, "population_size": 4},
        "evaluation": {"max_tokens": 8}, "task": {"name": f"{own}:Letters", "letter": " ", "worth": 0.5},
        "checks": UNCHECKED,
    }  # fmt: skip
    run, _ = train(config)
    assert evoalign.evaluate(run.path, config=run.path / "config.yaml").measures["worth"] == 0.5
    assert lines(run.path / "journal.jsonl")[0]["config"]["task"]["worth"] == 0.5
