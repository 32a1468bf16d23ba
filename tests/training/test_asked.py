# SPDX-License-Identifier: Apache-2.0
"""A run that is evaluated with a config that is not its own keeps apart the rows that it was trained on."""

import json

import pytest
from command_line import caller
from small_runs import UNCHECKED, write_rows

import evoalign
from evoalign.config import TaskConfig, to_yaml
from evoalign.errors import ConfigError
from evoalign.setup import as_config, task_and_data
from evoalign.tasks.data import parted_otherwise
from evoalign.training.resolve import check_parted, to_ask

CODE = "def brief(text, example):\n    return -float(len(text))\n"


def tree(folder, seed, **task):
    """13 rows without a file for the test split, so that each seed has a fifth of its own; a reward in code."""
    return {
        "output_dir": str(folder / f"runs/{seed}"), "seed": seed, "lora": {"rank": 1, "target_layers": [3]},
        "task": {"name": "custom", "train_data": str(folder / "rows.jsonl"), "rewards": [f"{folder}/own.py:brief"],
                 **task},
        "grader": {"isolated": False}, "evaluation": {"max_tokens": 4}, "checks": UNCHECKED, "report": False,
        "es": {"sigma": 0.05 + seed, "num_generations": 1, "population_size": 2},
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs with the seeds 0 and 1, and the config of seed 0 beside them."""
    folder = tmp_path_factory.mktemp("asked")
    rows = [{"prompt": f"What is {a} + 1?"} for a in range(13)]
    write_rows(folder / "rows.jsonl", rows)
    (folder / "own.py").write_text(CODE)
    for seed in (0, 1):
        evoalign.train(tree(folder, seed))
    (folder / "given.yaml").write_text(to_yaml(as_config(tree(folder, 0))))
    return folder


def asked(found):
    return {said.prompt for said in found.completions}


def test_a_run_of_another_seed_is_asked_its_own_test_rows(folder):
    task, data = task_and_data(as_config(tree(folder, 1)), None, None)
    task.close()
    trained, held = ({row["prompt"] for row in rows} for rows in (data.train, data.test))
    found = evoalign.evaluate(folder / "runs/1", config=folder / "given.yaml")
    assert asked(found) == held and not asked(found) & trained
    other, apart = task_and_data(as_config(tree(folder, 0)), None, None)
    other.close()
    assert {row["prompt"] for row in apart.test} != held, "else this test shows nothing"
    made = to_ask(folder / "runs/1", tree(folder, 0) | {"evaluation": {"max_tokens": 3}, "grpo": {"max_steps": 7}})
    assert (made.seed, made.es.sigma, made.evaluation.max_tokens) == (1, 1.05, 3) and made.grpo.max_steps != 7


def test_runs_that_name_code_have_a_mean_over_seeds_by_one_config(folder, monkeypatch, capsys, tmp_path):
    run = caller(monkeypatch, capsys, columns=200)
    refused = run("eval", folder / "runs/0", folder / "runs/1")
    assert refused.code == 2 and "task.rewards" in refused.err
    for given in (folder / "given.yaml", folder / "runs/0/config.yaml"):
        done = run("eval", folder / "runs", "--config", given, "--output", tmp_path / "all.json")
        assert done.code == 0, done.err
        found = json.loads((tmp_path / "all.json").read_text())
        assert [target["seed"] for target in found["targets"]] == [0, 1]
        assert found["means"] == [], "runs of another sigma are no seeds of each other, whatever the config says"
        own = [{s["prompt"] for s in target["completions"]} for target in found["targets"]]
        assert own[0] != own[1] and all(len(prompts) == 3 for prompts in own)
    seeded = run("eval", folder / "runs/1", "--config", folder / "given.yaml", "--set", "seed=0")
    assert seeded.code == 2 and "--set seed=0: a run keeps its training seed" in seeded.err


@pytest.mark.parametrize(
    ("split", "task", "setting"),
    [
        ("test", {"split": "first_last", "train_size": 9, "test_size": 4}, "task.split is 'seeded' in the run and"),
        ("validation", {"validation_size": 3}, "task.validation_size is None in the run and 3 now"),
        ("train", {"train_size": 4}, "task.train_size is None in the run and 4 now"),
    ],
)  # fmt: skip
def test_rows_that_are_parted_otherwise_are_refused(folder, split, task, setting):
    with pytest.raises(ConfigError, match=setting):
        evoalign.evaluate(folder / "runs/1", config=tree(folder, 1, **task), split=split)


def test_the_same_rows_are_refused_by_whatever_path_and_task(folder, monkeypatch):
    monkeypatch.chdir(folder)
    parted = {"split": "first_last", "train_size": 9, "test_size": 4}
    write_rows(folder / "new.jsonl", [{"prompt": "What is new?"}])
    made = as_config(tree(folder, 1)).task
    for task, odd in (({**parted, "train_data": "rows.jsonl"}, "split"), ({"test_data": "./rows.jsonl"}, "test_data"),
                      ({**parted, "train_data": f"{folder}/runs/../rows.jsonl", "name": "conciseness"},
                       "split")):  # fmt: skip
        assert odd in parted_otherwise(made, as_config(tree(folder, 1, **task)).task, "test")
    apart = as_config(tree(folder, 1, test_data="new.jsonl")).task  # a run of this trained on all rows
    assert list(parted_otherwise(apart, made, "test")) == ["test_data"] and not parted_otherwise(apart, apart, "test")
    with pytest.raises(ConfigError, match=r"task\.test_data is None in the run and './rows.jsonl' now"):
        evoalign.evaluate(folder / "runs/1", config=tree(folder, 1, test_data="./rows.jsonl"))


@pytest.mark.parametrize(("task", "file"), [("countdown", "countdown"), ("conciseness", "conciseness_train")])
def test_data_that_a_task_brings_are_those_of_its_file(task, file):
    """Named by nobody in the run, and by its path in what it is asked with."""
    named = {"train_data": f"data/tasks/{task}/{file}.json", "split": "first_last", "train_size": 9, "test_size": 4}
    made, given = TaskConfig(name=task), TaskConfig(name=task, **named)
    own = TaskConfig(name=task, train_data="elsewhere.json")
    with pytest.raises(ConfigError, match=r"a run split the same data .*: task\.\w+ is .* in the run and .* now"):
        check_parted("a run", made, given, "test")
    if task == "countdown":  # Conciseness brings test rows, too, which no run of its other file was trained on
        with pytest.raises(ConfigError, match=r"task\.split is 'first_last' in the run and 'seeded' now"):
            check_parted("a run", given, made, "test")
    for one in (made, given):
        check_parted("a run", one, one, "test")
        check_parted("a run", one, own, "test")


def test_settings_count_by_the_split_and_by_how_it_is_made(folder):
    """First rows depend on the sizes, those drawn by a seed do not; a file of test rows on nothing."""

    def odd(made, given):
        one, other = (as_config(tree(folder, 0, **task)).task for task in (made, given))
        return parted_otherwise(one, other, "test")

    first = {"split": "first_last", "test_size": 4}
    assert odd(first | {"train_size": 9}, first | {"train_size": 8}) == {"train_size": (9, 8)}
    assert odd({"train_size": 9}, {"train_size": 8}) == {}
    own = {"test_data": str(folder / "of_tests.jsonl")}
    assert odd({"split": "seeded"}, first | own | {"train_size": 9}) == {}


def test_other_data_and_rows_of_their_own_are_asked_as_they_are(folder):
    write_rows(folder / "new.jsonl", [{"prompt": "What is new?"}])
    for task in ({"test_data": str(folder / "new.jsonl"), "train_size": 4},
                 {"train_data": str(folder / "new.jsonl"), "test_data": str(folder / "new.jsonl")}):  # fmt: skip
        assert asked(evoalign.evaluate(folder / "runs/1", config=tree(folder, 0, **task))) == {"What is new?"}
