# SPDX-License-Identifier: Apache-2.0
"""The third split: what is chosen on the way is chosen on it, and on no other."""

import hashlib
import json
from dataclasses import replace

import pytest
from small_runs import read_rows, told_by, write_rows

import evoalign
from evoalign.config import TaskConfig, from_dict
from evoalign.errors import ConfigError, DataError
from evoalign.preflight import plan
from evoalign.preflight.plan import Case
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import RunDir, saved_folders
from evoalign.rundir.identity import config_hash, identity
from evoalign.setup import task_and_data
from evoalign.tasks import Data, Task
from evoalign.tasks.conciseness import Conciseness
from evoalign.training import heading, saving
from evoalign.training.result import gold_lines
from evoalign.training.train import dry_run

ASKED = ["What is 3 plus 4?", "Name a colour:", "Capital of France:"]


def length(completions, sign, **_):
    """The same answers earn the opposite where the sign is."""
    return [float(s * len(text)) for text, s in zip(completions, sign, strict=True)]


def rows(folder, name, sign, asked=ASKED):
    return write_rows(folder / name, ({"prompt": p, "sign": sign} for p in asked))


def config(folder, generations, **task):
    """The test split asks what validation asks, and rewards the opposite: the best on one is the worst on the other."""
    data = {"train_data": rows(folder, "train", 1), "test_data": rows(folder, "test", -1)}
    return {
        "output_dir": str(folder / "run"), "task": {"name": "custom", **data, **task}, "grader": {"isolated": False},
        "es": {"sigma": 0.1, "learning_rate": 0.1, "num_generations": generations, "population_size": 4},
        "sampling": {"max_tokens": 8}, "evaluation": {"max_tokens": 8, "every": 1},
        "checkpoint": {"every": 0, "keep_last": 1}, "checks": {"control_every": 0, "canary_every": 0},
        "tracking": {"completions_every": 0, "backends": []}, "report": False,
    }  # fmt: skip


def train(tree, **options):
    return told_by(tree, reward=length, **options)


def kept(run):
    return [int(f.name.removeprefix("generation_")) for f in saved_folders(run)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("validated")
    tree = config(folder, 5, validation_data=rows(folder, "validation", 1))
    return folder / "run", train(tree), tree


def metrics(run):
    return read_rows(run / "metrics.jsonl")


def test_the_best_on_validation_stays_though_it_is_the_worst_on_the_test_split(trained):
    run, told, _ = trained
    found = {row["generation"] + 1: row["validation"]["reward"] for row in metrics(run) if row["evaluation"]}
    test = {row["generation"] + 1: row["evaluation"]["reward"] for row in metrics(run) if row["evaluation"]}
    assert test == {generation: -reward for generation, reward in found.items()} and len(found) == 4
    best = max(found, key=lambda g: (found[g], -g))
    assert found[best] > min(found.values()), "else nothing is chosen here"
    assert kept(run) == sorted({best, 5})
    mark = checkpoint.verify(saved_folders(run)[0])
    assert (mark.validation, mark.reward) == (found[best], None)
    (told_best,) = [line for line in told.splitlines() if line.startswith(f"best         {saved_folders(run)[0]} ")]
    assert best != 5, "it is not the one that the run ends with"
    assert told_best.endswith(f" on the validation split: reward {found[best]:.4g})")
    assert "validation 3 examples, evaluated at the start and at the end, and after every 1; the best mean" in told


def test_the_split_is_measured_paid_for_and_asked_for_by_name(trained):
    run, told, tree = trained
    written = json.loads((run / "results/evaluation.json").read_text())["validation"]
    assert written["examples"] == 3 and written["before"]["reward"] != written["after"]["reward"]
    again = evoalign.evaluate(run, reward=length, split="validation")
    assert again.measures == written["after"]
    cost = json.loads((run / "results/budget.json").read_text())["evaluation"]
    placebos = len(json.loads((run / "results/evaluation.json").read_text())["placebo"]["seeds"])
    assert cost["completions"] == 6 * (3 + 3) + 3 * placebos, "the start, four on the way and the end, on both splits"
    assert "on the 3 validation examples the reward went from" in told
    for way in ({}, {"validation_size": 2}):
        task = {**tree["task"], **way, "rewards": [f"{__file__}:length"]}
        lines = dry_run({**tree, "task": task, "output_dir": str(run.parent / "another")})
        assert any(line.startswith(f"validation {way.get('validation_size', 3)} examples") for line in lines)


def test_shared_prompts_are_counted(trained, tmp_path):
    _, told, _ = trained
    for pair in ("test prompts are training", "validation prompts are training", "test prompts are validation"):
        assert f"warning: 3 of 3 {pair} prompts too; " in told
    own = rows(tmp_path, "own", 1, [*ASKED[:1], "another?", "a third?", "a fourth?"])
    tree = config(tmp_path, 1, validation_data=own, rewards=[f"{__file__}:length"])
    case = Case(from_dict(tree))
    found = plan.check_task(case)
    assert (found.status, "3 training, 4 validation and 3 test examples" in found.detail) == ("warning", True)
    assert "1 of 4 validation prompts are training prompts too" in found.fix
    assert "1 of 3 test prompts are validation prompts too" in found.fix
    assert case.task is not None and case.data is not None
    alone = Data([{"prompt": "a"}], [{"prompt": "b"}], [{"prompt": "c"}])
    assert heading.shared_lines(case.task, alone) == []


def test_without_the_split_the_last_mean_alone_is_kept_and_that_is_said(tmp_path):
    tree = config(tmp_path, 3)
    told = train(tree)
    assert kept(tmp_path / "run") == [3] and "validation" not in metrics(tmp_path / "run")[0]
    assert "checkpoint.keep_best has no effect and the last mean is kept" in told
    record = json.loads((saved_folders(tmp_path / "run")[0] / checkpoint.RECORD).read_text())
    assert "validation" not in record and record["reward"] is None
    with pytest.raises(ConfigError, match=r"has no validation split; set task\.validation_size"):
        evoalign.evaluate(tmp_path / "run", reward=length, split="validation")


def test_a_mean_that_an_earlier_release_kept_stays_and_is_no_measure_for_new_ones(tmp_path):
    marks = [(0.9, None), (0.1, None), (None, 0.2), (None, 0.3), (None, 0.1), (None, None)]
    for number, (reward, validation) in enumerate(marks, 1):
        folder = tmp_path / f"loras/generation_{number:04d}"
        folder.mkdir(parents=True)
        mark = checkpoint.Mark(number, "a" * 64, "b" * 64, reward, validation=validation)
        checkpoint.seal(folder, mark)
        assert checkpoint.verify(folder) == mark
        assert checkpoint.holds(folder, replace(mark, reward=None)), "a run that is resumed does not save it again"
    run = RunDir(tmp_path)
    assert saving.best_saved(run).name == "generation_0004", "0.9 is of another split"
    for settings, left in (({}, [1, 4, 6]), ({"keep_best": False}, [6])):
        saving.retain(run, from_dict({"es": {"sigma": 0.1}, "checkpoint": {"keep_last": 1, **settings}}))
        assert kept(tmp_path) == left


def test_hashes_of_two_splits_are_what_they_were():
    train, test, more = [{"a": 1}], [{"a": 2}], [{"a": 3}]
    lines = b'{"a": 1}\n\0{"a": 2}\n\0'
    assert saving.data_hash(Data(train, test)) == hashlib.sha256(lines).hexdigest()
    assert saving.data_hash(Data(train, test, more)) == hashlib.sha256(lines + b'{"a": 3}\n\0').hexdigest()
    tree = {"es": {"sigma": 0.1}, "task": {"name": "conciseness"}}
    plain = from_dict(tree)
    assert not [name for name in plain.task.model_dump() if name.startswith("validation")]
    held = from_dict({**tree, "task": {"name": "conciseness", "validation_size": 1}})
    assert identity(held)["task"]["validation_size"] == 1 and config_hash(held) != config_hash(plain)


class Own(Task):
    """A task of two splits, as they were before there was a third."""

    name = "own"

    def load_data(self, seed):
        return Data([{"n": i} for i in range(5)], [{"n": 9}])

    def prompt(self, example):
        return f"say {example['n']}"

    def compute_reward(self, text, example):
        return 0.0


class Three(Own):
    """Of three, one of whose rows JSON would change."""

    def load_data(self, seed):
        return Data([{"n": 0}], [{"n": 1}], [{"n": 2, "pair": (1, 2)}])

    def compute_reward(self, text, example):
        return float(example["pair"] == (1, 2)) if "pair" in example else 0.5


def own_config(**task):
    return from_dict({"es": {"sigma": 0.1}, "task": {"name": "own:Task", **task}})


def test_a_task_of_two_splits_gives_its_last_training_rows():
    task = Own(TaskConfig(name="own"))
    for found, given in ((own_config(validation_size=2), task), (own_config(), Own(TaskConfig(validation_size=2)))):
        chosen, data = task_and_data(found, given, None)
        chosen.close()
        assert [row["n"] for row in data.train] == [0, 1, 2] and [row["n"] for row in data.validation] == [3, 4]
    with pytest.raises(DataError, match=r"task\.validation_size is 5, but the training split of task own has 5 rows"):
        task_and_data(own_config(validation_size=5), task, None)
    with pytest.raises(ConfigError, match=r"task\.validation_data: load_data of task own returns no validation split"):
        task_and_data(own_config(validation_data="rows.json"), task, None)


def test_a_task_of_three_splits_is_scored_in_its_own_process():
    chosen, data = task_and_data(own_config(), Three(TaskConfig(name="own")), None)
    try:
        assert chosen.rewards(["a", "b"], [data.validation[0], data.test[0]]) == [1.0, 0.5]
    finally:
        chosen.close()


def test_columns_and_gold_answers_of_validation_are_checked(tmp_path):
    tree = config(tmp_path, 1, validation_data=write_rows(tmp_path / "bare.jsonl", [{"prompt": "a"}]))

    def strict(completions, sign):
        return [0.0 for _ in completions]

    with pytest.raises(DataError, match="strict takes sign, which the validation data does not have"):
        task_and_data(from_dict(tree), None, strict)

    class Wrong(Conciseness):
        def gold(self, example):
            return "wrong" if example["target"] == "odd" else str(example["target"])

    rows = ([{"prompt": p, "target": t}] for p, t in (("a", "b"), ("c", "d"), ("e", "odd")))
    (line,) = gold_lines(Wrong(TaskConfig()), Data(*rows))
    assert "1 of 3 gold answers do not earn 0.0" in line
