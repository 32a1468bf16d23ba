# SPDX-License-Identifier: Apache-2.0
"""`task.fitness`: one number for all completions of a member. With their mean, a run equals that of the rewards."""

import itertools
import json
import math
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import task_runs
from own_fitness import seen
from pyarrow import parquet
from task_runs import lines, resumed_after, train

import evoalign
from evoalign import evaluation, tasks
from evoalign.analysis.sweeping.sweep import check
from evoalign.config import Config, GraderConfig, TaskConfig, code_of, from_dict, to_yaml
from evoalign.errors import ConfigError, RewardError
from evoalign.evaluation import Scored
from evoalign.exporting.source import private_paths, public
from evoalign.placebos.counterfactual import parse
from evoalign.rewards.objective import Objective, SetObjective, aim, aim_of, grouped, judge
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.directory import saved_folders

HERE = "own_fitness"
GENERATIONS = 3


def config(output, questions, fitness=None, **sections):
    tree = {
        "output_dir": str(output), "seed": 5, "deterministic": True,
        "es": {"sigma": 0.02, "learning_rate": 0.02, "num_generations": GENERATIONS, "population_size": 4},
        "task": {"name": "custom", "train_data": questions, "test_data": questions, "batch_size": 3,
                 "rewards": [f"{HERE}:helpful"]},
        "evaluation": {"max_tokens": 6, "temperature": 0.8}, "checkpoint": {"every": 1},
        "checks": {"control_every": 2, "placebo": 1}, "tracking": {"completions_every": 2},
        "grader": {"isolated": False},
    }  # fmt: skip
    tree["task"] |= {} if fitness is None else {"fitness": f"{HERE}:{fitness}"}
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return tree


def made(fitness, **settings):
    return tasks.create(TaskConfig(name="custom", rewards=[f"{HERE}:helpful"], fitness=f"{HERE}:{fitness}", **settings))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`plain`, a run of the rewards, and `mean`, an isolated run of their mean as fitness; and its output.

    The questions are in questions.jsonl.
    """
    folder = tmp_path_factory.mktemp("fitness")
    questions = task_runs.questions(folder / "questions.jsonl")
    train(config(folder / "plain", questions, checks={"placebo": 0}))
    _, said = train(config(folder / "mean", questions, "mean_helpful", grader={"isolated": True}))
    return folder, said


def test_the_mean_as_fitness_has_the_same_scores_and_coefficients_to_the_bit(runs):
    plain, mean = (lines(runs[0] / name / "journal.jsonl") for name in ("plain", "mean"))
    assert len(plain) == len(mean) == 1 + 2 * GENERATIONS
    ours, theirs = ([line | {"hash": 0, "previous": 0} for line in journal[1:]] for journal in (mean, plain))
    assert ours == theirs
    assert any(line["coefficients"] != [0.0] * 4 for line in mean[1::2])
    assert mean[0]["config"]["task"]["fitness"] == f"{HERE}:mean_helpful"
    assert "fitness" not in plain[0]["config"]["task"]


def test_fitness_is_reported_everywhere(runs):
    (folder, said), name = runs, "fitness/mean_helpful"
    rows, plain = (lines(folder / run / "metrics.jsonl") for run in ("mean", "plain"))
    for row, other in zip(rows, plain, strict=True):
        assert row["rewards"]["helpful"] == pytest.approx(row["mean"])
        assert "rewards" not in other
    first, second, floor = rows[0]["diagnosis"]["control"]
    assert [first, second] == pytest.approx(plain[0]["diagnosis"]["control"][:2])
    assert floor == pytest.approx(abs(first - second) / math.sqrt(2)) and floor > 0
    assert f"mean {name} {rows[0]['mean']:.4g}" in said and f"helpful {rows[0]['rewards']['helpful']:.4g}" in said
    report = json.loads((folder / "mean/results/evaluation.json").read_text())
    assert list(report["before"])[:2] == [name, "reward"]
    for which in ("before", "after"):
        assert report[which][name] == pytest.approx(report[which]["reward"])
    change, low, high = report["change_mean_low_high"][name]
    assert change == pytest.approx(report["after"][name] - report["before"][name])
    assert low < change < high
    assert "of task.fitness, percentiles of 200" in report["intervals"]
    assert report["placebo"]["measures"][name] == pytest.approx(report["placebo"]["reward"]["placebos"][0])
    whole, own = report["placebo"]["fitness"], report["placebo"]["reward"]
    assert whole["name"] == name and whole["p"] == own["p"] and whole["reached"] == own["reached"]
    ours, theirs = ([kept["before"], kept["real"], *kept["placebos"]] for kept in (whole, own))
    assert ours == pytest.approx(theirs)
    assert f"{name}, the trained measure: 1 placebo" in said
    said_of = parquet.read_table(folder / "mean/results/completions/generation_0000.parquet").to_pylist()
    assert len(said_of) == 9 and all(row["score"] == row["fitness"] for row in said_of)


def test_resumed_run_ends_with_the_same_bits_and_rejects_another_fitness(runs, tmp_path):
    """Resumes between an update and its seal."""
    whole = (runs[0] / "mean/journal.jsonl").read_bytes()
    copy = Path(shutil.copytree(runs[0] / "mean", tmp_path / "run"))
    tree = config(copy, str(runs[0] / "questions.jsonl"), "mean_helpful", checks={"placebo": 0})
    assert resumed_after(4, copy, tree) == whole
    before = json.loads((copy / "results/evaluation.json").read_text())["before"]
    assert before["fitness/mean_helpful"] == pytest.approx(before["reward"])
    for fitness in (None, "letters"):
        with pytest.raises(evoalign.EvoalignError, match=r"task\.fitness is 'own_fitness:mean_helpful' in the run"):
            train(config(copy, str(runs[0] / "questions.jsonl"), fitness), resume=True)


def test_replay_and_counterfactuals_use_the_journal(runs):
    log = journal.read(runs[0] / "mean/journal.jsonl").whole()
    assert evoalign.replay(runs[0] / "mean") == log.generations[-1].weights_hash
    assert len(parse("half", log).update(log.generations[0]).members) == 2
    assert sorted(parse("shaping ranks", log).update(log.generations[0]).coefficients)[0] == -0.5
    with pytest.raises(ConfigError, match=r"shaping centered needs .*scores by prompt"):
        parse("shaping centered", log)


def test_best_checkpoint_is_selected_by_fitness(runs, tmp_path):
    tree = config(
        tmp_path / "run", str(runs[0] / "questions.jsonl"), "letters", sampling={"temperature": 0.8},
        task={"validation_size": 2, "batch_size": None, "samples": 2},
        evaluation={"every": 1}, es={"num_generations": 2}, checks={"placebo": 0}, tracking={"completions_every": 0},
        stopping={"patience": 9},
    )  # fmt: skip
    told = [line for line in evoalign.dry_run(tree) if "(4 members x 2 prompts" in line]
    assert len(told) == 2 and all("x 2 samples)" in line for line in told) and "of 16 completions" in told[0]
    seen.clear()
    train(tree)
    asked = [texts for texts, rows in seen if [row["prompt"][14:17] for row in rows] == ["sea", "sea", "sky", "sky"]]
    assert len(asked) >= 2 * 4 and any(texts[0] != texts[1] for texts in asked)
    log = journal.read(tmp_path / "run/journal.jsonl")
    assert set(log.generations[0].fitness_M) <= {float(len(set("".join(texts)))) for texts in asked}
    rows = lines(tmp_path / "run/metrics.jsonl")
    marks = {mark.generation: mark for mark in map(checkpoint.verify, saved_folders(tmp_path / "run"))}
    assert rows[0]["validation"]["fitness/letters"] > 3 > rows[0]["validation"]["reward"]
    assert marks[1].validation == rows[0]["validation"]["fitness/letters"] == log.validated[0]


def test_fitness_gets_all_samples_of_a_seed():
    rows = [{"prompt": "p"}, {"prompt": "q"}]
    scored = [
        Scored(e, seed, k, "p", None, f" {'ab'[e]}{seed}{'xy'[k]} ", 0.0, "stop", 1)
        for e in range(2) for seed in (3, 4) for k in range(2)
    ]  # fmt: skip
    seen.clear()
    task = made("letters")
    found = evaluation.summarise(task, rows, scored)
    assert [texts for texts, _ in seen] == [["a3x", "a3y", "b3x", "b3y"], ["a4x", "a4y", "b4x", "b4y"]]
    assert [row["prompt"] for row in seen[0][1]] == ["p", "p", "q", "q"] and seen[0][1][0] is not rows[0]
    assert found.measures["fitness/letters"] == 5.0 and "fitness/letters" not in found.measures_E
    assert aim_of(found.measures) == "fitness/letters" and aim(found.measures) == 5.0
    assert aim({"reward": 2.0, "fitness": 3.0}) == 2.0


def test_resampled_draws_are_paired():
    rows = [{"prompt": str(i % 2)} for i in range(6)]

    def found(fitness, texts):
        scored = [Scored(e, 0, 0, "", None, text, 0.0, "stop", 1) for e, text in enumerate(texts)]
        task = made(fitness)
        return evaluation.with_resampled(task, rows, evaluation.summarise(task, rows, scored))

    before, after = found("letters", "abcdef"), found("letters", ["az", "bz", "cz", "dz", "ez", "fz"])
    assert len(set(before.resampled["fitness/letters"])) > 2
    assert evaluation.resampled_interval(before, after) == {"fitness/letters": (1.0, 1.0, 1.0)}  # in each draw one more
    same = np.random.Generator(np.random.Philox(key=[0, 6])).integers(6, size=(200, 6))
    assert before.resampled["fitness/letters"] == tuple(float(len(set(draw))) for draw in same)
    assert found("needs_both", "abcdef").resampled == {}
    assert evaluation.with_resampled(made("letters"), rows[:2], before) is before


@pytest.mark.parametrize(("long", "count"), [(2, 200), (200, 0)])
def test_no_resamples_of_a_slow_fitness_but_one_pause_costs_none(long, count, monkeypatch):
    clock, calls = [0.0], itertools.count()

    def value(*_):
        clock[0] += 1.0 if next(calls) < long else 0.01
        return 0.5

    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    rows = [{"prompt": str(i)} for i in range(6)]
    scored = [Scored(e, 0, 0, "", None, "a", 0.0, "stop", 1) for e in range(6)]
    found = evaluation.summarise(made("letters"), rows, scored)
    monkeypatch.setattr(evaluation, "_fitness", value)
    assert len(evaluation.with_resampled(made("letters"), rows, found).resampled.get("fitness/letters", ())) == count


def test_per_member_objective_returns_one_column():
    class Longest(Objective):
        name, per_member = "longest", True

        def scores(self, group):
            return np.array([[max(map(len, texts))] for texts in group.texts_MP], dtype=np.float64)

    group = grouped({"reward": [0.0] * 4}, ["a", "bbb", "cc", "c"], [{}, {}], 0)
    assert judge(Longest(), group).tolist() == [[3.0], [2.0]]
    with pytest.raises(RewardError, match=r"returned scores of shape \(2, 1\).* 2 members x 2 prompts"):
        judge(type("Wrong", (Longest,), {"per_member": False})(), group)


@pytest.mark.parametrize(("fitness", "said", "reason"), [
    ("fails", r"task\.fitness fails failed: KeyError: 'label' in own_fitness.py line \d+.*; fix it", "raised"),
    ("broken", r"task\.fitness broken returned nan for 2 completions", "value"),
    ("sleeps", r"task\.fitness sleeps hung: no answer within 0.3 s", "hung"),
])  # fmt: skip
@pytest.mark.parametrize("isolated", [True, False])
def test_failing_fitness_raises_reward_error(fitness, said, reason, isolated):
    if fitness == "sleeps" and not isolated:
        pytest.skip("in place there is no limit of time")
    grader = GraderConfig(retries=0, timeout=0.3 if fitness == "sleeps" else 20, isolated=isolated)
    with closing(tasks.isolate(made(fitness), grader)) as task, pytest.raises(RewardError, match=said) as error:
        assert task.set_objective is not None
        task.set_objective.values(["a", "b"], [{"prompt": "p"}, {"prompt": "q"}], [[0, 1]])
    assert error.value.failed is not None and error.value.failed["reason"] == reason


@pytest.mark.parametrize(("fitness", "said"), [
    ("later", "is async"), ("one_at_a_time", "does not take exactly two arguments"), ("NUMBER", "is not a func"),
    ("nowhere", "has no 'nowhere'"),
])  # fmt: skip
def test_invalid_fitness_functions_are_rejected(fitness, said):
    with pytest.raises(ConfigError, match=rf"task\.fitness: .*{said}"):
        SetObjective(f"{HERE}:{fitness}", str)


def test_incompatible_settings_are_rejected(runs, tmp_path):
    pytest.importorskip("trl")
    questions, run = str(runs[0] / "questions.jsonl"), tmp_path / "run"
    plain = tasks.create(TaskConfig(name="custom", rewards=[f"{HERE}:helpful"]))
    own = config(run, questions, "letters")
    grpo = {"max_steps": 1, "num_generations": 2}
    refused = [
        (lambda: evoalign.dry_run(config(run, questions, "letters", es={"shaping": "centered"})),
         r"es\.shaping centered compares .* use one of zscore, ranks, truncation, identity"),
        (lambda: from_dict(config(run, questions, "letters", task={"objective": "weighted_sum"})),
         r"task\.fitness and task\.objective both"),
        (lambda: from_dict({"es": {"sigma": 0.1}, "task": {"samples": 2}}), r"task\.samples 2 only repeats"),
        (lambda: from_dict(config(run, questions, task={"fitness": "macro_f1"})), "task\\.fitness 'macro_f1': write p"),
        (lambda: evoalign.train(own, task=plain), r"task\.fitness own_fitness:letters .* task custom"),
        (lambda: evoalign.grpo(own | {"grpo": grpo}), r"task\.fitness letters is one score for all .* but GRPO needs"),
    ]  # fmt: skip
    for ask, message in refused:
        with pytest.raises(ConfigError, match=message):
            ask()
    assert not run.exists()


def test_fitness_is_code_and_cards_hide_its_path(tmp_path):
    own = from_dict({"es": {"sigma": 0.1}, "task": {"name": "conciseness", "fitness": f"{tmp_path}/f.py:f1"}})
    assert code_of(own) == [f"{tmp_path}/f.py:f1"] == private_paths(own)
    assert public(own).task.fitness == "f.py:f1" and str(tmp_path) not in to_yaml(public(own))
    assert "fitness" not in to_yaml(Config.model_validate({"es": {"sigma": 0.1}}))


def test_probe_uses_fitness_with_a_built_in_task():
    tree = {
        "es": {"sigma": 0.02, "learning_rate": 0.02, "num_generations": 1, "population_size": 4, "antithetic": True},
        "task": {"name": "conciseness", "fitness": f"{HERE}:letters"}, "evaluation": {"max_tokens": 4},
    }  # fmt: skip
    found = evoalign.probe(tree, sigmas=[0.02, 0.2], members=4, examples=2)
    assert found.fitness == int(found.fitness) > 2 and len(found.rungs) == 2
    check([from_dict(tree)], "fitness/letters")
    with pytest.raises(ConfigError, match=r"no such measure; it has .*fitness/letters"):
        check([from_dict(tree)], "fitness/others")
