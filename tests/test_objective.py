# SPDX-License-Identifier: Apache-2.0
"""Rewards as named columns and the objectives that make scores of them: the weighted sum, and one with a state."""

import base64
import json
import math
import re
import shutil
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import task_runs
from command_line import caller
from pyarrow import parquet
from small_runs import UNCHECKED
from task_runs import lines, resumed_after, train

import evoalign
from evoalign.analysis.page import page
from evoalign.analysis.page.run import views_of
from evoalign.config import GraderConfig, ObjectiveConfig, TaskConfig, code_of, from_dict, to_yaml
from evoalign.errors import CheckpointError, ConfigError, DataError, JournalError, ResumeError, RewardError
from evoalign.report import figures
from evoalign.report.rows import read_distributions, rebuilt_row, write_distribution
from evoalign.rewards.objective import Objective, WeightedSum, create, grouped, means, reported, score
from evoalign.rollouts import columns_of, rewards_of
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.directory import saved_folders
from evoalign.tasks import Task, isolate
from evoalign.tasks import create as create_task
from evoalign.tasks.custom import Custom
from evoalign.tracking.base import step_and_values
from evoalign.training import saving

HERE = "test_objective"
GENERATIONS, HALF = 5, 3


def helpful(text, example):
    """More vowels are better."""
    return float(sum(c in "aeiou" for c in text))


def cost(completions, **columns):
    """Share of blanks; it does not apply to the empty text."""
    return [text.count(" ") / len(text) if text else None for text in completions]


class Adaptive(Objective):
    """reward - lambda * cost: ln lambda follows a moving average of the cost above a limit."""

    name = "adaptive"
    per_completion = True

    def __init__(self, limit=0.05, rate=3.0, low=-2.0, high=2.0):
        self.limit, self.rate, self.low, self.high = limit, rate, low, high
        self.state = {"ln_lambda": 0.0, "average": 0.0}

    def scores(self, group):
        return group.columns_MP["helpful"] - math.exp(self.state["ln_lambda"]) * np.nan_to_num(group.columns_MP["cost"])

    def update(self, group):
        average = 0.5 * self.state["average"] + 0.5 * np.float32(np.nanmean(group.columns_MP["cost"]))
        moved = self.state["ln_lambda"] + self.rate * (average - self.limit)
        self.state = {"ln_lambda": min(max(moved, self.low), self.high), "average": average}


class Ranks(Objective):
    """Members against each other: fitness of a whole group, without a state."""

    name = "ranks"

    def scores(self, group):
        return group.columns_MP["helpful"].argsort(axis=0).argsort(axis=0).astype(np.float64)


class Costly(Task):
    """A task of one's own that names a cost beside its reward."""

    name = "costly"
    weighted = WeightedSum({"reward": 1.0})

    def load_data(self, seed):
        rows = [{"question": str(i)} for i in range(3)]
        return evoalign.Data(rows, rows)

    def prompt(self, example):
        return f"Question {example['question']}"

    def compute_reward(self, text, example):
        return -float(len(text))

    def columns(self, texts, examples):
        return {"reward": self.rewards(texts, examples), "blanks": np.array([t.count(" ") for t in texts])}


@pytest.fixture
def questions(tmp_path):
    return task_runs.questions(tmp_path / "questions.jsonl")


def config(output, questions, generations=GENERATIONS, **task):
    return {
        "output_dir": str(output), "seed": 5, "deterministic": True,
        "es": {"sigma": 0.02, "learning_rate": 0.02, "num_generations": generations, "population_size": 4},
        "task": {"name": "custom", "train_data": questions, "test_data": questions, "batch_size": 2,
                 "rewards": [f"{HERE}:helpful", f"{HERE}:cost"], "reward_weights": [1.0, -0.5], **task},
        "evaluation": {"max_tokens": 8, "temperature": 0.8, "every": 2}, "checkpoint": {"every": 1},
        "checks": {"control_every": 2}, "tracking": {"completions_every": 4}, "grader": {"isolated": False},
    }  # fmt: skip


def bits(values):
    return struct.pack(f"{len(values)}d", *values)


ADAPTIVE = {"objective": {"name": f"{HERE}:Adaptive", "limit": 0.05}}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run with the adaptive objective that never stopped, and its questions."""
    folder = tmp_path_factory.mktemp("adaptive")
    file = task_runs.questions(folder / "questions.jsonl")
    train(config(folder / "run", file, **ADAPTIVE))
    return folder / "run", file


@pytest.fixture
def copied(straight, tmp_path):
    return Path(shutil.copytree(straight[0], tmp_path / "run"))


def test_journal_records_the_state(straight):
    log = journal.read(straight[0] / "journal.jsonl").whole()
    states = [recorded.objective for recorded in log.generations]
    assert [list(state) for state in states] == [["average", "ln_lambda"]] * GENERATIONS
    assert len({state["ln_lambda"] for state in states}) == GENERATIONS
    rows = lines(straight[0] / "metrics.jsonl")
    assert [row["objective"] for row in rows] == states
    assert rebuilt_row(log.generations[2])["objective"] == states[2]
    for folder in saved_folders(straight[0]):
        mark = checkpoint.verify(folder)
        assert mark.objective == states[mark.generation - 1]


@pytest.mark.first("[6]")
@pytest.mark.parametrize("kept", [2, 6, 9])
def test_truncated_journal_resumes_to_the_same_bits(straight, kept, copied):
    """Also after an update's line, before its seal: the state is that of the line."""
    whole = (straight[0] / "journal.jsonl").read_bytes()
    assert resumed_after(kept, copied, config(copied, straight[1], **ADAPTIVE)) == whole


def test_state_changes_the_run(straight, copied, monkeypatch):
    kept = 1 + 2 * HALF
    monkeypatch.setattr(Adaptive, "restore", lambda self, state: None)
    resumed_after(kept, copied, config(copied, straight[1], **ADAPTIVE))
    ours, theirs = (lines(path / "journal.jsonl") for path in (copied, straight[0]))
    assert ours[:kept] == theirs[:kept] and ours[kept] != theirs[kept]


def test_the_weights_do_not_depend_on_the_state(straight, tmp_path):
    sealed = journal.read(straight[0] / "journal.jsonl").generations[-1]
    assert evoalign.replay(straight[0], to=tmp_path / "mean") == sealed.weights_hash
    assert checkpoint.verify(tmp_path / "mean").objective == sealed.objective


def test_a_state_of_another_objective_is_refused(straight, copied):
    with pytest.raises(ResumeError, match=r"objective weighted_sum has the state none, .* recorded average, ln_lambda"):
        WeightedSum().restore({"average": 0.0, "ln_lambda": 0.0})
    with pytest.raises(ResumeError, match="objective"):
        train(config(copied, straight[1]), resume=True)
    with pytest.raises(ResumeError, match=r"task.objective.limit is 0.05 in the run and 0.1 now"):
        train(config(copied, straight[1], objective={"name": f"{HERE}:Adaptive", "limit": 0.1}), resume=True)


def test_a_saved_mean_with_another_state_is_not_of_the_journal(straight, tmp_path):
    folder = Path(shutil.copytree(saved_folders(straight[0])[-1], tmp_path / "mean"))
    log = journal.read(straight[0] / "journal.jsonl")
    assert saving.checked(folder, log).objective == log.generations[-1].objective
    mark = checkpoint.verify(folder)
    (folder / checkpoint.RECORD).unlink()
    checkpoint.seal(folder, checkpoint.Mark(mark.generation, mark.weights_hash, mark.journal, mark.reward, {"a": 1.0}))
    with pytest.raises(CheckpointError, match="is not of this journal"):
        saving.checked(folder, log)


@pytest.mark.parametrize("state", [{}, {"a": "1"}, {"a": None}, 3.0])
def test_invalid_recorded_state_is_damage(straight, state, tmp_path):
    """A line that is whole and hashed, as a hostile one may be."""
    text = (straight[0] / "journal.jsonl").read_bytes().splitlines(keepends=True)
    line = json.loads(text[1])
    del line["hash"]
    line["objective"] = state
    line["hash"] = journal._digest(line)
    (tmp_path / "journal.jsonl").write_bytes(text[0] + journal._dump(line) + b"\n")
    with pytest.raises(JournalError, match=r"line 2 has an invalid objective"):
        journal.read(tmp_path / "journal.jsonl").whole()


def test_reward_means_are_reported_everywhere(straight):
    run = straight[0]
    rows = lines(run / "metrics.jsonl")
    assert all(list(row["rewards"]) == ["helpful", "cost"] for row in rows)
    _, told = step_and_values(rows[0])
    assert told["train/rewards/cost"] == rows[0]["rewards"]["cost"]
    assert told["train/objective/ln_lambda"] == rows[0]["objective"]["ln_lambda"]
    assert (run / "figures/rewards.png").is_file()
    assert (run / "figures/objective.png").is_file()
    report = json.loads((run / "results/evaluation.json").read_text())
    before, change = report["before"], report["change_mean_low_high"]
    assert list(before)[:3] == ["reward", "reward/helpful", "reward/cost"]
    assert {"reward/helpful", "reward/cost"} <= change.keys()
    table = parquet.read_table(run / "results/completions/before.parquet").to_pylist()
    assert before["reward/helpful"] == pytest.approx(np.mean([helpful(row["text"], {}) for row in table]))
    for row in table:  # the weighted sum, whatever the objective is
        assert row["reward"] == row["reward/helpful"] - 0.5 * row["reward/cost"]
    again, output = train(config(run, straight[1], **ADAPTIVE), resume=True)
    assert again.before.measures == before
    assert "reward/helpful" in output


def test_rewards_of_all_completions_are_saved_and_drawn(straight):
    """Of the first and the last generation, with the means of their rows; the page has the figure."""
    run, rows = straight[0], lines(straight[0] / "metrics.jsonl")
    files = sorted((run / "results/completions").glob("rewards_*.parquet"))
    assert [file.stem for file in files] == ["rewards_0000", f"rewards_{GENERATIONS - 1:04d}"]
    for file, row in zip(files, (rows[0], rows[-1]), strict=True):
        columns = parquet.read_table(file).to_pydict()
        assert {len(values) for values in columns.values()} == {4 * 2}, "members x prompts"
        known = {name: [v for v in values if v is not None] for name, values in columns.items()}
        assert {name: np.mean(values) for name, values in known.items()} == pytest.approx(row["rewards"])
    picture = (run / "figures/distribution.png").read_bytes()
    assert base64.b64encode(picture).decode() in page.render(views_of([run]))


def test_rewards_of_the_first_the_middle_and_the_last_saved_generation_are_read(tmp_path):
    for index in range(0, 60, 10):
        columns = {"a": [float(index), None], "b": [math.nan, 1]}
        write_distribution(tmp_path / f"rewards_{index:04d}.parquet", columns)
    (tmp_path / "rewards_of_mine.parquet").write_text("")
    assert {done: list(read_distributions(tmp_path, done)) for done in (0, 1, 11, 45, 90)} == {
        0: [], 1: [0], 11: [0, 10], 45: [0, 20, 40], 90: [0, 30, 50]
    }  # fmt: skip
    assert str(read_distributions(tmp_path, 1)[0]) == str({"a": [0.0, math.nan], "b": [math.nan, 1.0]})
    (tmp_path / "rewards_0030.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="rewards_0030"):
        read_distributions(tmp_path, 60)


def test_plain_output_names_rewards(questions, tmp_path):
    _, output = train(config(tmp_path / "run", questions, 1))
    (row,) = lines(tmp_path / "run/metrics.jsonl")
    assert f"helpful {row['rewards']['helpful']:.4g}  cost (x -0.5) {row['rewards']['cost']:.4g}" in output
    assert row["reward_weights"] == {"helpful": 1.0, "cost": -0.5}
    assert step_and_values(row)[1]["train/reward_weights/cost"] == -0.5
    assert re.search(r"reward/cost\s+\(x -0.5\)", output)
    assert json.loads((tmp_path / "run/results/evaluation.json").read_text())["reward_weights"] == row["reward_weights"]
    assert "objective" not in row
    assert not any("objective" in line for line in lines(tmp_path / "run/journal.jsonl"))
    assert row["mean"] == pytest.approx(row["rewards"]["helpful"] - 0.5 * row["rewards"]["cost"])


def test_one_reward_leaves_rows_tables_and_journals_as_they_were(questions, tmp_path):
    seen = []
    tree = config(tmp_path / "run", questions, 1, rewards=[f"{HERE}:helpful"], reward_weights=None)
    result, _ = train(tree, on_generation=seen.append)
    (row,) = lines(tmp_path / "run/metrics.jsonl")
    assert not {"rewards", "objective"} & row.keys()
    assert not any((tmp_path / f"run/figures/{n}.png").exists() for n in ("rewards", "objective", "distribution"))
    assert not list((tmp_path / "run/results/completions").glob("rewards_*"))
    assert seen[0].columns == {}
    assert seen[0].rewards == seen[0].objective == {}
    assert not any(name.startswith("reward/") for name in result.before.measures)
    header, update, _ = lines(tmp_path / "run/journal.jsonl")
    record = json.loads((saved_folders(tmp_path / "run")[-1] / "evoalign.json").read_text())
    assert not any("objective" in kept for kept in (header["config"]["task"], update, record))
    assert "rewards" not in parquet.read_schema(tmp_path / "run/results/completions/before.parquet").names


def test_means_of_reported_columns_ignore_missing_values():
    group = grouped({"a": [1.0, None, 2.0, None], "b": [None] * 4}, ["w", "x", "y", "z"], [{}, {}], 7)
    assert means(reported(WeightedSum(), group), fewest=1) == {"a": 1.5, "b": None}
    assert group.texts_MP == [["w", "x"], ["y", "z"]]
    assert group.columns_MP["a"].shape == (2, 2)
    assert np.isnan(group.columns_MP["a"][0, 1])


def test_a_figure_with_gaps(tmp_path):
    rewards = [{"rewards": {"a": 1.0, "b": None}}, {}, {"rewards": {"a": 2.0}}]
    rows = [{"generation": i, **row} for i, row in enumerate(rewards)]
    figures.named(rows, tmp_path / "rewards.png", "rewards", "mean reward")
    assert (tmp_path / "rewards.png").is_file()
    figures.named(rows[1:2], tmp_path / "none.png", "rewards", "mean reward")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("isolated", [False, True])
def test_the_weighted_sum_has_the_bits_of_the_rewards(isolated):
    functions = [helpful, cost, lambda text, example: 0.1 * len(text), helpful]
    task = create_task(TaskConfig(name="custom", reward_weights=[0.1, 1 / 3, -7.7, 1e-9]), functions)
    texts, examples = ["", "a b", "sea and sky", "x" * 50, "e e e", "aeiou"], [{"prompt": str(i)} for i in range(3)]
    with closing(isolate(task, GraderConfig(isolated=isolated))) as task:
        columns = columns_of(task, texts, examples * 2)
        assert list(columns) == ["helpful", "cost", "<lambda>", "helpful_2"]
        assert columns["cost"][0] is None
        scores_MP = score(task.objective(), grouped(columns, texts, examples, 0))
        assert scores_MP.shape == (2, 3)
        expected = [0.1 * a + (1 / 3) * b + -7.7 * c + 1e-9 * d
                    for a, b, c, d in zip(*(columns[n] for n in columns), strict=True) if b is not None]  # fmt: skip
        assert bits(scores_MP.ravel()[1:]) == bits(expected)
        assert bits(scores_MP.ravel()) == bits(task.rewards(texts, examples * 2))
        assert bits(rewards_of(task, texts, examples * 2)) == bits(scores_MP.ravel())


@pytest.mark.parametrize("weights", [None, {"a": 1.0, "b": 1.0, "c": 1.0}])
def test_the_sum_is_rounded_term_by_term_under_every_python(weights, monkeypatch):
    """As Python's own sum of floats is up to 3.11, and no more from 3.12 on."""
    monkeypatch.setattr("evoalign.rewards.objective.sum", math.fsum, raising=False)
    columns = {"a": [1e16], "b": [1.0], "c": [1.0]}
    assert WeightedSum(weights).rewards(columns, ["x"], [{}]) == [1e16]


def test_a_single_reward_keeps_its_bits_and_a_custom_one_its_own_sum():
    plain = Costly(TaskConfig())
    texts, examples = [""], [{"question": "1"}]
    assert bits(rewards_of(plain, texts, examples)) == bits([0.0])  # weighted: 0 + -0.0, as a sum gives it

    class Plain(Costly):
        weighted = Task.weighted
        columns = Task.columns

    assert bits(rewards_of(Plain(TaskConfig()), texts, examples)) == bits([-0.0])
    custom = create_task(TaskConfig(name="custom"), [lambda text, example: -0.0])
    assert bits(rewards_of(custom, texts, [{"prompt": "?"}])) == bits(custom.rewards(texts, [{"prompt": "?"}]))
    assert bits(custom.rewards(texts, [{"prompt": "?"}])) == bits([0.0])


def test_a_subclass_that_makes_its_own_sum_is_scored_by_it():
    class Clipped(Custom):
        def rewards(self, texts, examples):
            return [min(reward, 1.0) for reward in super().rewards(texts, examples)]

    task = Clipped(TaskConfig(), [helpful])
    assert columns_of(task, ["aeiou"], [{"prompt": "?"}]) == {"reward": [1.0]}
    assert rewards_of(task, ["aeiou"], [{"prompt": "?"}]) == [1.0]


def test_only_what_the_weights_name_counts():
    task = Costly(TaskConfig())
    examples = task.load_data(0).train
    group = grouped(columns_of(task, ["a b"] * 6, [*examples] * 2), ["a b"] * 6, examples, 0)
    assert score(task.objective(), group).tolist() == [[-3.0] * 3] * 2
    assert means(reported(WeightedSum(), group), fewest=1) == {"reward": -3.0, "blanks": 1.0}
    with pytest.raises(RewardError, match="weights for harm, but the columns are reward, blanks"):
        score(WeightedSum({"harm": 1.0}), group)
    with pytest.raises(ConfigError, match="finite"):
        WeightedSum({"reward": math.inf})
    both = WeightedSum()
    assert score(both, group).tolist() == [[-2.0] * 3] * 2
    nothing = grouped({"a": [None], "b": [None]}, ["text"], [{}], 0)
    with pytest.raises(RewardError, match=r"every reward function \(a, b\) returned None for the completion 'text'"):
        score(both, nothing)


@pytest.mark.parametrize(("columns", "message"), [
    ({}, r"returned columns named \[\]"), ({"a\n": [1.0]}, "use plain text"), ({3: [1.0]}, "use plain text"),
    ({"a": [1.0, 2.0]}, "returned 2 rewards for 1 texts"),
    ({"a": [1.0], "b": [math.nan]}, "returned nan as the reward of 'text'"),
    ([1.0], "task costly failed to score: TypeError"),
])  # fmt: skip
def test_invalid_columns_raise_reward_error(columns, message):
    class Wrong(Costly):
        def columns(self, texts, examples):
            return columns

    with pytest.raises(RewardError, match=message):
        columns_of(Wrong(TaskConfig()), ["text"], [{"question": "1"}])


class Odd(Objective):
    name = "odd"
    per_completion = True

    def __init__(self, answer=None, state=None):
        self.answer, self.after = answer, state

    def scores(self, group):
        return self.answer if not callable(self.answer) else self.answer()

    def update(self, group):
        self.state = self.after or {}


@pytest.mark.parametrize(("objective", "message"), [
    (Odd([[1.0], [2.0]]), r"scores of shape \(2, 1\), of which 0 are not finite"),
    (Odd([[1.0, math.inf]]), "of which 1 are not finite; .* 1 members x 2 prompts"),
    (Odd("words"), "objective odd failed: ValueError"), (Odd(lambda: 1 / 0), "objective odd failed: ZeroDivisionError"),
    (Odd([[1.0, 2.0]], {"a": math.nan}), "the state of objective odd has a = nan"),
    (Odd([[1.0, 2.0]], {"a": "b"}), "the state of objective odd has a = 'b'"),
])  # fmt: skip
def test_an_objective_that_fails_is_named_and_never_a_score(objective, message):
    group = grouped({"reward": [1.0, 2.0]}, ["a", "b"], [{}, {}], 0)
    with pytest.raises(RewardError, match=message):
        score(objective, group)


@pytest.mark.parametrize(("settings", "message"), [
    ({"name": "weighted"}, "'weighted' is not an import path"),
    ({"name": f"{HERE}:helpful"}, "is not a class derived from evoalign.rewards.objective.Objective"),
    ({"name": f"{HERE}:Adaptive", "limits": 3}, r"cannot be created with \{'limits': 3\}: TypeError"),
    ({"name": "weighted_sum", "weights": {"a": "x"}}, "cannot be created with"),
])  # fmt: skip
def test_an_objective_that_cannot_be_made_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        create(ObjectiveConfig(**settings))
    assert create(ObjectiveConfig.model_validate({"name": f"{HERE}:Odd", "answer": 1})).name == "odd"


def test_what_a_config_names_is_code_that_no_run_imports_unasked(questions, tmp_path):
    own = from_dict(config(tmp_path, questions, objective=f"{HERE}:Adaptive"))
    assert own.task.objective == ObjectiveConfig(name=f"{HERE}:Adaptive")
    assert f"{HERE}:Adaptive" in code_of(own)
    assert "\n  objective:" not in to_yaml(from_dict(config(tmp_path, questions)))
    assert code_of(from_dict({"es": {"sigma": 0.1}, "task": {"objective": "weighted_sum"}})) == []


def test_a_run_that_names_an_objective_is_not_evaluated_unasked(straight, monkeypatch, capsys):
    with pytest.raises(ConfigError, match=rf"task\.objective\.name .*{HERE}:Adaptive"):
        evoalign.evaluate(straight[0])
    rewards = f"task.rewards=[{HERE}:helpful,{HERE}:cost]"
    done = caller(monkeypatch, capsys)("eval", straight[0], "--set", rewards, "--set", "evaluation.max_tokens=4")
    assert done.code and f"task.objective.name to '{HERE}:Adaptive'" in " ".join(done.err.split())


def test_probe_needs_an_objective_without_population(questions, tmp_path):
    """Members against each other: it trains by ES, without a control; the probe and GRPO refuse it."""
    tree = config(tmp_path / "run", questions, 1, objective=f"{HERE}:Ranks")
    seen = []
    train(tree, on_generation=seen.append)
    assert np.sort(np.array(seen[0].scores_MP), axis=0).tolist() == [[float(i)] * 2 for i in range(4)]
    (row,) = lines(tmp_path / "run/metrics.jsonl")
    assert row["diagnosis"]["control"] is None
    with pytest.raises(ConfigError, match="objective ranks scores a whole population at once, but the probe has none"):
        evoalign.probe(tree, members=4, examples=1)


def test_max_reward_applies_only_to_the_default_objective(random_qwen2, tmp_path):
    """The task's is 0, and a length that costs nothing; turned around, all that is said scores more."""
    tree = {
        "output_dir": str(tmp_path / "run"), "model": {"name": str(random_qwen2)},
        "es": {"sigma": 0.05, "learning_rate": 0.05, "num_generations": 1, "population_size": 4},
        "task": {"name": "conciseness", "batch_size": 2,
                 "objective": {"name": "weighted_sum", "weights": {"reward": -1.0}}},
        "evaluation": {"max_tokens": 6}, "checks": UNCHECKED,
    }  # fmt: skip
    train(tree)
    (row,) = lines(tmp_path / "run/metrics.jsonl")
    assert row["mean"] > 0 and row["diagnosis"]["solved_share"] == 0.0
    found = evoalign.probe(tree, sigmas=[0.02, 0.05], members=6, examples=4)
    assert found.fitness > 0 and "maximum" not in found.reason
    assert not any("earns the maximum already" in warning for warning in found.warnings)


def grpo(output, questions, **task):
    method = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 4, "rollouts": "engine"}
    return config(output, questions, batch_size=None, **task) | {"grpo": method, "checks": {"perplexity": False}}


def test_grpo_refuses_what_needs_a_population(questions, tmp_path):
    pytest.importorskip("trl")
    tree = grpo(tmp_path / "run", questions, objective=f"{HERE}:Ranks")
    with pytest.raises(ConfigError, match="objective ranks scores a whole population at once, but GRPO has none"):
        train(tree, evoalign.grpo)
    assert not (tmp_path / "run").exists()
    from evoalign.baselines import planning

    assert any("would be refused: objective ranks" in line for line in planning.dry_run(tree))


@pytest.mark.first("engine", others="slow")
@pytest.mark.parametrize("rollouts", ["engine", "es"])
def test_grpo_updates_the_state_with_all_completions(rollouts, questions, tmp_path):
    """By members too, where nobody asks for what the policy itself says; `cost` does not apply to each."""
    pytest.importorskip("trl")
    tree = grpo(tmp_path / "run", questions, **ADAPTIVE)
    tree["grpo"] |= {"max_steps": 2, "rollouts": rollouts}
    train(tree, evoalign.grpo)
    price, average = 0.0, 0.0
    for row in lines(tmp_path / "run/metrics.jsonl"):
        average = 0.5 * average + 0.5 * float(np.float32(row["rewards"]["cost"]))
        price = min(max(price + 3.0 * (average - 0.05), -2.0), 2.0)
        assert row["objective"] == pytest.approx({"ln_lambda": price, "average": average})


class Halved(WeightedSum):
    """A score by completion, without a state."""

    name = "halved"

    def scores(self, group):
        return super().scores(group) / 2


def test_grpo_is_given_what_the_objective_makes(questions, tmp_path):
    pytest.importorskip("trl")
    weights = {"helpful": 1.0, "cost": -0.5}
    tree = grpo(tmp_path / "run", questions, objective={"name": f"{HERE}:Halved", "weights": weights})
    train(tree | {"tracking": {"completions_every": 1}}, evoalign.grpo)
    (row,) = lines(tmp_path / "run/metrics.jsonl")
    means = row["rewards"]
    said = parquet.read_table(tmp_path / "run/results/completions/generation_0000.parquet").to_pylist()
    assert means["helpful"] == pytest.approx(np.mean([helpful(s["text"].strip(), {}) for s in said]))
    for one in said:
        text = one["text"].strip()
        assert one["score"] == (helpful(text, {}) - 0.5 * (cost([text])[0] or 0.0)) / 2


class Spoils(WeightedSum):
    """Changes all that it is given."""

    def scores(self, group):
        found = super().scores(group).copy()
        self.update(group)
        return found

    def update(self, group):
        for column in group.columns_MP.values():
            column[:] = 0
        for row in group.examples:
            row["numbers"].clear()
        group.texts_MP[0][0] = ""


def test_objectives_get_copies():
    row = {"numbers": [1, 2]}
    group = grouped({"reward": [1.0, 2.0]}, ["a", "b"], [row], 0)
    for _ in range(2):
        assert score(Spoils(), group).tolist() == [[1.0], [2.0]]
    assert row == {"numbers": [1, 2]} and group.texts_MP[0][0] == "a"
    assert group.columns_MP["reward"].tolist() == [[1], [2]]
