# SPDX-License-Identifier: Apache-2.0
"""Final answers of the built-in tasks: the same text for equal answers, and None without one; also when isolated."""

import json
from contextlib import closing

import pytest

from evoalign import tasks, transcripts
from evoalign.config import GraderConfig, TaskConfig
from evoalign.errors import ConfigError

COUNTDOWN = {"numbers": [2, 3, 4], "target": 24, "context": "<think>"}
CALLED = [{"role": "assistant", "content": "It is"}, {"role": "user", "content": "7?"}]


@pytest.mark.parametrize(
    ("name", "example", "text", "answer"),
    [
        ("countdown", COUNTDOWN, "</think>\n<answer>2 * 3 * 4</answer>", "24"),
        ("countdown", COUNTDOWN, "</think>\n<answer>(4 * 2) * 3</answer>", "24"),
        ("countdown", COUNTDOWN, "</think>\n<answer>2 / 3 + 4</answer>", "14/3"),
        ("countdown", COUNTDOWN, "</think>\n<answer>2 * 3 * 5</answer>", None),
        ("countdown", COUNTDOWN, "</think>\n<answer>2 * 3</answer>", None),
        ("countdown", COUNTDOWN, "24", None),
        ("word_problems", {"answer": "60"}, "The answer is $1,200.00.", "1200"),
        ("word_problems", {"answer": "60"}, "It is 12 * 100 = 1200", "1200"),
        ("word_problems", {"answer": "60"}, "I do not know.", None),
        ("word_problems", {"answer": "60"}, "7 " * 20_000, None),
        ("gsm8k", {"answer": "#### 72"}, "so \\boxed{1{,}200}", "1200"),
        ("gsm8k", {"answer": "#### 72"}, "#### $1,200.0", "1200"),
        ("gsm8k", {"answer": "#### 72"}, "1200", None),
        ("math", {"answer": "2"}, "\\boxed{\\dfrac12}", "\\frac{1}{2}"),
        ("math", {"answer": "2"}, "\\boxed{0.50}", "1/2"),
        ("math", {"answer": "2"}, "\\boxed{" + "9" * 301 + "}", None),
        ("sums", {"answer": "7"}, "The answer is 7.", "7"),
        ("sums", {"answer": "7"}, transcripts.of_messages(CALLED), None),
    ],
)
def test_final_answer(name, example, text, answer):
    if name in ("gsm8k", "math"):
        pytest.importorskip("math_verify")
    assert tasks.create(TaskConfig(name=name)).final_answer(text, example) == answer


@pytest.mark.parametrize("name", ["conciseness", "constraints", "tool_calls"])
def test_final_answer_is_refused_by_tasks_without_one(name):
    with pytest.raises(ConfigError, match=f"task {name} has no final answers to vote on; leave out --vote"):
        tasks.create(TaskConfig(name=name)).final_answer("7", {})


OWN = """
from evoalign.tasks import Data, Task
class Own(Task):
    name = "own"
    def load_data(self, seed): return Data([{"prompt": "a"}], [{"prompt": "b"}])
    def prompt(self, example): return example["prompt"]
    def compute_reward(self, text, example): return 0.0
    def final_answer(self, text, example): return len(text) or None
class Without(Own):
    final_answer = Task.final_answer
"""


def test_final_answer_of_custom_task_is_computed_by_its_worker(tmp_path):
    file = tmp_path / "own_task.py"
    file.write_text(OWN)
    for name, answers in (("Own", ["3", None]), ("Without", None)):
        made = tasks.create(TaskConfig(name=f"{file}:{name}"))
        with closing(tasks.isolate(made, GraderConfig())) as task:
            example = task.load_data(0).test[0]
            if answers is None:
                with pytest.raises(ConfigError, match="define final_answer"):
                    task.final_answer("abc", example)
            else:
                assert json.dumps([task.final_answer(text, example) for text in ("abc", "")]) == json.dumps(answers)
