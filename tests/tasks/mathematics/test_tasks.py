# SPDX-License-Identifier: Apache-2.0
"""GSM8K and MATH: their forms, their prompts, and their answers scored in a process that can be killed."""

import os
import re
import time
from contextlib import closing
from pathlib import Path

import pytest
from math_rows import GSM8K, MATH
from small_runs import UNCHECKED
from task_runs import jsonl, lines, train

import evoalign
from evoalign import tasks
from evoalign.analysis.sweeping.sweep import check
from evoalign.config import GraderConfig, TaskConfig, from_dict
from evoalign.errors import ConfigError, DataError, RewardError
from evoalign.tasks import answers
from evoalign.tasks.isolated.task import Isolated
from evoalign.tasks.mathematics import Gsm8k, Math
from evoalign.version import install

ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def gsm8k(**settings):
    return Gsm8k(TaskConfig(name="gsm8k", **settings))


def competition(**settings):
    return Math(TaskConfig(name="math", **settings))


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """MATH in a fresh process, as a run has it."""
    file = jsonl(tmp_path_factory.mktemp("apart") / "rows.jsonl", MATH)
    task = tasks.isolate(tasks.create(TaskConfig(name="math", train_data=file)), GraderConfig())
    task.load_data(0)
    with closing(task):
        yield task


@pytest.mark.parametrize(("task", "rows"), [(gsm8k, GSM8K), (competition, MATH)])
def test_load_data_accepts_published_rows(task, rows, tmp_path):
    made = task(train_data=jsonl(tmp_path / "rows.jsonl", rows), split="first_last", train_size=2, test_size=3)
    data = made.load_data(0)
    assert (data.train, data.test) == (rows[:2], rows[-3:])
    made.self_check(rows)
    assert [made.is_right(made.gold(row), row) for row in rows] == [True] * len(rows)


def test_compute_reward_accepts_right_answers():
    assert [gsm8k().right(row) for row in GSM8K] == ["72", "1,200", "-5", "3.5", "9", "20"]
    assert [competition().right(row) for row in MATH] == [
        "\\frac{3}{4}", "(x+1)^2", "2", "\\left( 3, \\frac{\\pi}{2} \\right)", "\\text{Evelyn}",
    ]  # fmt: skip


@pytest.mark.parametrize(("answer", "right", "wrong"), [
    (142.0, ["142", "142.0", "\\frac{284}{2}"], "143"), (0.25, ["\\frac14", ".25"], "0.3"), (7, ["7"], "8"),
    (["9.6"], ["9.6", "\\frac{48}{5}"], "9.7"), (["1", "-2"], ["-2, 1", "1,-2"], "1"), ([3, 4.0], ["3, 4"], "3"),
    ("4.5e33", ["4.5e33", "4.5 \\times 10^{33}"], "4.5e32"), (["$x^2$"], ["x^2"], "x^3"),
])  # fmt: skip
def test_math_reads_answers_that_are_numbers_or_lists(answer, right, wrong, tmp_path):
    """As in AMC, Minerva and OlympiadBench."""
    path = jsonl(tmp_path / "rows.jsonl", [{"problem": "p", "answer": answer}])
    task = competition(train_data=path, test_data=path)
    (row,) = task.load_data(0).train
    task.self_check([row])
    assert [task.compute_reward(f"\\boxed{{{text}}}", row) for text in [*right, wrong]] == [1.0] * len(right) + [0.0]


@pytest.mark.parametrize("answer", [True, [], [None], {"a": 1}, [[1]], " ", float("nan")])
def test_math_refuses_other_answers(answer, tmp_path):
    task = competition()
    with pytest.raises(DataError, match="no final answer"):
        task._check("line 1", {"problem": "p", "answer": answer})


def test_prompts_request_the_accepted_answer_format():
    assert gsm8k().prompt(GSM8K[4]) == [{"role": "user", "content": f"Add {{}} and 8, where {{}} is 1.{ASK}"}]
    assert competition(prompt="chat").prompt(MATH[2]) == [{"role": "user", "content": f"What is $1+1$?{ASK}"}]
    assert gsm8k(prompt="raw").prompt(GSM8K[3]) == (
        'Question: Half of 7 litres?\nLet\'s think step by step and output the final answer after "####".\nAnswer:'
    )
    raw = competition(prompt="raw").prompt(MATH[2])
    assert isinstance(raw, str) and raw.endswith("output the final answer within \\boxed{}.\nSolution:")


@pytest.mark.parametrize(("text", "reward"), [
    ("It is 72.", 0), ("#### 72", 1), ("so #### $72.00.\nQuestion: another", 1), ("\\boxed{72}", 1),
    ("\\boxed{72 \\text{ nuts}}", 1), ("#### 72 nuts", 1), ("\\boxed{\\$72}", 1), ("\\boxed{\\frac{144}{2}}", 1),
    ("\\boxed{71} #### 72", 1), ("#### 72 \\boxed{71}", 0), ("#### 71\n#### 72", 1), ("####", 0),
    ("\\boxed{72, 73}", 0), ("\\boxed{72", 0), ("#### 72 or 73", 0), ("", 0), ("#### -72", 0), ("#### 7 2", 0),
])  # fmt: skip
def test_gsm8k_scores_the_last_answer(text, reward):
    task = gsm8k()
    assert task.compute_reward(text, GSM8K[0]) == reward
    assert task.measures(text, GSM8K[0])["accuracy"] == reward == float(task.is_right(text, GSM8K[0]))


@pytest.mark.parametrize(("said", "number"), [
    ("6 million", "6000000"), ("\\$6 million dollars.", "6,000,000"), ("6 \\text{ thousand}", "6000"), ("$6k", "6000"),
    ("6.5K", "6500"), ("6 kg", "6"), ("6 dozen", "6"), ("6 km", "6"), ("-2 hundred thousand", "-200000"),
])  # fmt: skip
def test_gsm8k_reads_words_such_as_million(said, number):
    task, row = gsm8k(), {"question": "q", "answer": f"#### {number}"}
    bare = {"question": "q", "answer": "#### 6"}
    for text in (f"\\boxed{{{said}}}", f"#### {said}"):
        assert task.compute_reward(text, row) == 1.0
        assert task.compute_reward(text, bare) == float(number == "6")
    worded = {"question": "q", "answer": f"#### {said}"}
    assert task.compute_reward(task.gold(row), row) == 1.0
    assert task.is_right(task.gold(worded), worded) and task.is_right(task.gold(row), worded)


def test_measures_distinguish_wrong_from_missing_answers():
    assert competition().measures("\\boxed{3}", MATH[2]) == {"accuracy": 0.0, "answered": 1.0}
    assert competition().measures("It is 2.", MATH[2]) == {"accuracy": 0.0, "answered": 0.0}
    assert competition().rewards(["\\boxed{\\dfrac{6}{8}}", "\\boxed{4}"], [MATH[0], MATH[2]]) == [1.0, 0.0]


@pytest.mark.parametrize(("task", "row", "said"), [
    (gsm8k, {"question": "q", "answer": "72"}, "line 1: it has no final answer; expected .*#### 72"),
    (gsm8k, {"question": "q"}, "line 1: expected .*#### 72.*question"),
    (gsm8k, {"question": 3, "answer": "#### 1"}, "line 1: no text in question"),
    (competition, {"problem": "p", "solution": "It is 3."}, "line 1: it has no final answer; expected .*boxed"),
    (competition, {"question": "p", "answer": "3"}, "line 1: expected .*boxed.*question"),
])  # fmt: skip
def test_load_data_names_invalid_rows(task, row, said, tmp_path):
    with pytest.raises(DataError, match=said):
        task(train_data=jsonl(tmp_path / "rows.jsonl", [row, row])).load_data(0)


@pytest.mark.parametrize("task", [gsm8k, competition])
def test_default_data_come_from_the_hub(task, monkeypatch):
    asked = []

    def offline(source, *more):
        asked.append(source)
        raise DataError(f"cannot load {source}: ConnectionError")

    monkeypatch.setattr("evoalign.tasks.data._rows", offline)
    with pytest.raises(DataError, match=r"cannot load hub:.*without a network, set task\.train_data and task\.test"):
        task().load_data(0)
    assert asked == [task().source[0]]


def test_missing_math_verify_raises_config_error(monkeypatch):
    monkeypatch.setattr("evoalign.tasks.mathematics.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape(f"gsm8k compares answers by math-verify: {install('math')}")):
        tasks.create(TaskConfig(name="gsm8k"))


def test_tasks_are_isolated_and_score_bombs_as_wrong(apart):
    assert isinstance(apart, Isolated)
    nested = ["{" * 60 + "1" + "}" * 60, "\\frac{1}{x+" * 20 + "}" * 20]
    bombs = ["9^{9^{9^9}}", "99999999!", "1+" * 500_000 + "1", *nested]
    texts = ["\\boxed{2}", *(f"\\boxed{{{bomb}}}" for bomb in bombs), "\\boxed{4/2}"] * 2
    start = time.perf_counter()
    assert apart.rewards(texts, [MATH[2]] * len(texts)) == [1.0, *[0.0] * 5, 1.0] * 2, "in two calls of the worker"
    assert time.perf_counter() - start < 20
    assert list(apart.columns(texts[:1] * 9, [MATH[2]] * 9)["reward"]) == [1.0] * 9
    assert apart.is_right("\\boxed{1+1}", MATH[2]) is True
    assert apart.measures("\\boxed{1+1}", MATH[2]) == {"accuracy": 1.0, "answered": 1.0}
    apart.self_check(MATH)


def test_killed_worker_raises_an_error_naming_the_completion(monkeypatch, tmp_path):
    """The bounds taken away, the tower hangs: no reward comes of that, and none of the other answers is blamed."""
    monkeypatch.setattr(answers, "MOST_BITS", float("inf"))
    monkeypatch.setattr(answers, "MOST_CALLS", 10**12)
    monkeypatch.setattr(answers, "_is_readable", lambda text: True)
    answers.is_equal("1+1", "2")  # imported before the fork
    made = gsm8k(train_data=jsonl(tmp_path / "rows.jsonl", GSM8K))
    with closing(tasks.isolate(made, GraderConfig(timeout=1, retries=0))) as task:
        data = task.load_data(0)
        texts = ["#### 5", "#### 9^{9^{9^9}}"]
        with pytest.raises(RewardError, match=r"hung: no answer within 1 s .*'#### 9\^\{9.* causes it alone; fix it"):
            task.rewards(texts, [data.train[0]] * 2)
        assert task.rewards(texts[:1], [data.train[0]]) == [0.0]


def test_hash_seed_is_fixed_in_workers(apart):
    worker = apart
    environment = Path(f"/proc/{worker._worker._child.pid}/environ").read_bytes().split(b"\0")
    wanted = os.environ.get("PYTHONHASHSEED", "0")
    assert f"PYTHONHASHSEED={wanted}".encode() in environment


def test_check_measure_knows_measures_of_built_in_tasks(tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", GSM8K)
    config = from_dict({"es": {"sigma": 0.1}, "task": {"name": "gsm8k", "train_data": file}})
    check([config], "answered")
    with pytest.raises(ConfigError, match="task gsm8k has no such measure; it has reward"):
        check([config], "solved")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["es", "grpo"])
def test_training_reports_accuracy(method, tmp_path):
    if method == "grpo":
        pytest.importorskip("trl")
    settings = {
        "es": {"sigma": 0.1, "num_generations": 1, "population_size": 4},
        "grpo": {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2, "rollouts": "engine"},
    }
    data = {"train_data": jsonl(tmp_path / "rows", GSM8K), "test_data": jsonl(tmp_path / "test", GSM8K[:2])}
    tree = {
        "output_dir": str(tmp_path / "run"), "task": {"name": "gsm8k", "prompt": "raw", **data},
        "evaluation": {"max_tokens": 6}, "tracking": {"completions_every": 0}, method: settings[method],
        "checks": UNCHECKED if method == "es" else {"perplexity": False},
    }  # fmt: skip
    found, _ = train(tree, evoalign.train if method == "es" else evoalign.grpo)
    assert {"accuracy", "answered", "reward", "right"} <= found.after.measures.keys()
    assert found.after.measures["accuracy"] == found.after.measures["reward"]
    assert [scored.target for scored in found.after.completions] == ["#### 72", "#### 1,200"]
    assert lines(found.path / "metrics.jsonl")[0]["generation"] == 0
