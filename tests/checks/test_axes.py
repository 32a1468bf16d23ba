# SPDX-License-Identifier: Apache-2.0
"""The axis report on planted rewards, its warning on simulated runs, and the columns of tasks."""

import json
import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from evoalign import shaping
from evoalign.checks import axes
from evoalign.checks.axes import Axes, Measurement
from evoalign.checks.diagnosis import Diagnosis, history_of, summary
from evoalign.checks.rules import RULES, causes
from evoalign.config import from_dict
from evoalign.errors import ConfigError
from evoalign.rewards.objective import grouped, reported
from evoalign.tasks import create, isolate
from evoalign.tasks.joint import Settings
from evoalign.types import EvolvedTensor, Generation, Layout, Member, Rollout, Update, population

LAYOUT = Layout((EvolvedTensor("a", (100,), "a", 1.0),), 0, "float32")
MEMBERS, PROMPTS = 64, 16


def generation(scores_MP, index=0, coefficients=None, **fields):
    """A generation with these scores, and the coefficients of their z-scores."""
    scores_MP = np.asarray(scores_MP, dtype=float)
    made = shaping.zscore(scores_MP) if coefficients is None else coefficients
    update = Update(index, index, population(len(scores_MP)), tuple(map(float, made)), 0.01, 0.005)
    rows = fields.pop("rows", tuple(range(scores_MP.shape[1])))
    fitness_M = tuple(shaping.fitness(scores_MP))
    return Generation(index, 100, fitness_M, tuple(map(tuple, scores_MP)), update, "", 1, 0, 0, {}, rows=rows, **fields)


def planted(rng, reward, shape="zscore", named=(), members=MEMBERS):
    """The axis report of ten generations of random columns: right a fifth of the time, formed, and long if wrong."""
    rows = []
    for _ in range(10):
        skill, form, length = rng.standard_normal((3, members, 1))
        right = (rng.random((members, PROMPTS)) < 0.2 + 0.1 * np.tanh(skill)).astype(float)
        formed = (rng.random((members, PROMPTS)) < 0.5 + 0.2 * np.tanh(form)).astype(float)
        tokens = np.clip(100 + 30 * length - 60 * right + 10 * rng.standard_normal(right.shape), 1, 190)
        known = {"right": right, "formed": formed, "brief": -tokens / 50, "tokens": tokens, "truncated": tokens > 170}
        columns = {name: np.array(known[name], dtype=float) for name in (*named, "tokens", "truncated")}
        scores = sum(weight * known[name] for name, weight in reward.items())
        made = generation(scores, coefficients=getattr(shaping, shape)(scores))
        rows.append((axes.row_of(made, Measurement(columns, "right" if "right" in named else None)), known))
    return Axes.of([row for row, _ in rows], members), [known for _, known in rows]


BOTH = ("right", "formed")
PLANTED = {
    "format alone": ({"formed": 1.0}, BOTH, {"formed": 1.0}),
    "correctness alone, with which length is correlated": ({"right": 1.0}, BOTH, {"right": 1.0}),
    "correctness as the only column": ({"right": 0.5}, ("right",), {"right": 1.0}),
    "length alone, without a column": ({"brief": 1.0}, (), {"tokens": 1.0}),
    "length alone, as a column": ({"brief": 1.0}, ("right", "brief"), {"brief": 1.0}),
    "a mixture": ({"right": 1.0, "formed": 0.5}, BOTH, None),
    "a mixture of three": ({"right": 1.0, "formed": 1.0, "brief": 0.3}, (*BOTH, "brief"), None),
    "length that no column has": ({"formed": 1.0, "brief": 0.2}, BOTH, {"formed": 0.4, "tokens": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("shape", ["zscore", "centered", "ranks"])
@pytest.mark.parametrize("name", PLANTED)
def test_shares_are_recovered_within_ten_points(name, shape):
    reward, named, expected = PLANTED[name]
    found, known = planted(np.random.default_rng(3), reward, shape, named)
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-5)
    if name == "length that no column has":
        part = [[np.var(k["formed"].mean(1)), 0.04 * np.var(k["brief"].mean(1))] for k in known]
        form, length = np.mean([np.divide(p, sum(p)) for p in part], axis=0)
        expected = {"formed": form, "tokens": length}
    elif expected is None:  # weight x covariance with the score, by numpy
        each = []
        for k in known:
            score_M = sum(weight * k[n] for n, weight in reward.items()).mean(1)
            each.append([weight * np.cov(k[n].mean(1), score_M)[0, 1] / score_M.var(ddof=1)
                         for n, weight in reward.items()])  # fmt: skip
        expected = dict(zip(reward, np.mean(each, axis=0), strict=True))
    for column in (*found.names, "unexplained"):
        assert found.shares[column] == pytest.approx(expected.get(column, 0.0), abs=0.1), found.shares


def test_independent_columns_have_the_squares_of_their_weights_times_their_variances():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 20_000, 1))
    still = np.zeros((20_000, 1))
    columns = {"a": a, "b": b, "constant": still + 0.1, "tokens": a + b, "truncated": still}
    found = Axes.of([axes.row_of(generation(3 * a + b), Measurement(columns))], 20_000)
    assert found.shares["a"] == pytest.approx(0.9, abs=0.01) and found.shares["b"] == pytest.approx(0.1, abs=0.01)
    assert [found.shares[name] for name in ("constant", "tokens", "truncated", "unexplained")] == pytest.approx(
        [0] * 4, abs=1e-5
    )
    assert found.lasting is None  # one prompt


def test_a_column_that_the_reward_does_not_pay_for_has_no_share_though_it_is_correlated():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((400, 4))
    columns = {"a": a, "alike": a + 0.2 * rng.standard_normal(a.shape), "tokens": a, "truncated": a > 1}
    found = Axes.of([axes.row_of(generation(a), Measurement({n: np.array(c, float) for n, c in columns.items()}))], 400)
    assert found.shares == pytest.approx({"a": 1, "alike": 0, "tokens": 0, "truncated": 0, "unexplained": 0}, abs=1e-4)


@pytest.mark.parametrize("skill", [0.0, 0.3])
def test_what_lasts_is_the_variance_of_the_members_and_not_their_luck(skill):
    """Format differs between members by 0.2 for all prompts; what is right is luck, with `skill` of each member."""
    rng, members, rows = np.random.default_rng(1), 512, []
    for _ in range(10):
        able = skill * rng.standard_normal((members, 1))
        right = (rng.random((members, PROMPTS)) < np.clip(0.5 + able, 0, 1)).astype(float)
        formed = 0.5 + 0.2 * rng.standard_normal((members, 1)) + 0.3 * rng.standard_normal((members, PROMPTS))
        columns = {"right": right, "formed": formed, "tokens": 0 * right, "truncated": 0 * right}
        rows.append(axes.row_of(generation(right + 0.5 * formed), Measurement(columns, "right")))
    found = Axes.of(rows, members)
    of_right, of_form = np.var(np.clip(0.5 + skill * rng.standard_normal(10**6), 0, 1)), 0.25 * 0.2**2
    luck = (0.25 - of_right + 0.25 * 0.09) / PROMPTS
    assert found.lasting["right"] == pytest.approx(of_right / (of_right + of_form), abs=0.05)
    whole = of_right + of_form
    assert found.lasting_share == pytest.approx(whole / (whole + luck), abs=0.05)
    with_luck = of_right + (0.25 - of_right) / PROMPTS
    assert found.shares["right"] == pytest.approx(with_luck / (whole + luck), abs=0.05)
    assert found.predicted(["formed", "tokens", "truncated"]) == pytest.approx(1 - found.lasting["right"], abs=0.06)


def simulated(rng, generations=20, members=128, prompts=16, *, right=0.04, skill=0.0, finish=0.0, spread=0.8, form=0.1):
    """Rows of a run on Countdown. A completion ends in time or not, which differs by member and prompt and is what
    earns the format; of those that end, the share `right` is right, which differs between members by `skill`."""
    config = from_dict({
        "es": {"num_generations": 100, "population_size": members, "sigma": 0.01, "learning_rate": 0.005},
        "task": {"name": "countdown"}, "sampling": {"max_tokens": 256},
    })  # fmt: skip
    made = {}
    diagnosis = Diagnosis(config, LAYOUT, torch.zeros(100), columns=lambda generation: made["columns"])
    rows, warnings = [], []
    for index in range(generations):
        ends = finish + 0.1 * index + spread * rng.standard_normal((members, 1)) + 0.7 * rng.standard_normal(prompts)
        done = rng.random((members, prompts)) < 1 / (1 + np.exp(-ends))
        formed = np.where(done, rng.choice([0.6, 1.0], done.shape, p=[0.2, 0.8]), 0.1 * (rng.random(done.shape) < 0.3))
        able = right * np.exp(skill * rng.standard_normal((members, 1)) + rng.standard_normal(prompts) - 0.5)
        correct = (done & (rng.random(done.shape) < able)).astype(float)
        columns = {"format": formed} if form else {}
        columns |= {"accuracy": correct, "tokens": np.where(done, rng.uniform(60, 255, done.shape), 256.0)}
        made["columns"] = Measurement({**columns, "truncated": 1.0 - done}, "accuracy")
        row = diagnosis.update(generation(form * formed + correct, index), torch.zeros(100))
        rows.append({"generation": index, "mean": 0.0, "std": 0.1, "zero_variance": False, "diagnosis": row})
        warnings += [(index + 1, line) for line in diagnosis.warnings() if "coefficients follow" in line]
    return config, json.loads(json.dumps(rows, allow_nan=False)), warnings


WARNED = {
    "as in the trial on a real model": {"members": 256}, "half as many members": {}, "never right": {"right": 0.0},
    "a tenth of what ends is right": {"members": 256, "right": 0.1}, "few members": {"members": 64},
    "little between members": {"members": 256, "spread": 0.6},
}  # fmt: skip
HEALTHY = {
    "correctness only, though most are cut off": {"form": 0.0}, "skill, with all formed": {"finish": 4, "right": 0.3,
    "skill": 0.4, "spread": 0.3}, "format and skill": {"right": 0.4, "skill": 0.4}, "few and hardly any skill":
    {"members": 32, "prompts": 8, "finish": 4, "right": 0.3, "spread": 0.3}, "both from little": {"right": 0.15,
    "skill": 0.5, "spread": 0.5}, "luck alone": {"finish": 9, "spread": 0.0, "right": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WARNED)
def test_a_run_that_learns_format_and_length_is_warned_within_twenty_generations(name, seed):
    config, rows, warnings = simulated(np.random.default_rng(seed), **WARNED[name])
    ((at, line),) = warnings
    assert 10 <= at <= 20
    for part in ("follow format and length, not accuracy", "task.reward_weights [0.0, 1.0]", "sampling.max_tokens 512"):
        assert part in line
    again = history_of(rows[:at], config)
    assert line in causes(again).values() and any(line in text for text in summary(again))
    assert any("what selects, last 10 generations" in text for text in summary(again))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_not_warned(name, seed):
    assert simulated(np.random.default_rng(seed), 30, **HEALTHY[name])[2] == []


def partly_right(rng, task, skill, generations=20, members=64):
    """Wrong-axis warnings of a run in which one skill of a member makes all columns of the task's reward."""
    config = from_dict(
        {"es": {"num_generations": 20, "population_size": members, "sigma": 0.01}, "task": {"name": task}}
    )
    rows, warnings = [], []
    for index in range(generations):
        able = skill * rng.standard_normal((members, 1))
        met = lambda chance, able=able, size=(members, PROMPTS): (  # noqa: E731
            rng.random(size) < 1 / (1 + np.exp(-math.log(chance / (1 - chance)) - able))
        )
        if task == "constraints":
            asked = np.arange(3) < rng.integers(1, 4, size=(1, PROMPTS, 1))
            kept = met(0.4, able[:, :, None], (members, PROMPTS, 3))
            columns, right = {"share": (kept & asked).sum(2) / asked.sum(2), "all": (kept | ~asked).all(2)}, "all"
            reward = 0.5 * columns["share"] + 0.5 * columns["all"]
        else:
            parsed, named, same = met(0.9), met(0.75), met(0.3)
            columns, right = {"json": parsed, "keys": parsed & named, "exact": parsed & named & same}, "exact"
            reward = 0.25 * columns["json"] + 0.25 * columns["keys"] + 0.5 * columns["exact"]
        columns |= {"tokens": 150 + 40 * rng.standard_normal((members, PROMPTS)), "truncated": np.zeros(reward.shape)}
        measured = Measurement({name: np.array(c, dtype=float) for name, c in columns.items()}, right)
        row = {"mean": 0.0, "std": 0.1, "zero_variance": False}
        rows.append({**row, "generation": index, "diagnosis": {"axes": axes.row_of(generation(reward), measured)}})
        warnings += [line for name, line in causes(history_of(rows, config)).items() if name == "wrong axis"]
    return warnings


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("skill", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("task", ["constraints", "tool_calls"])
def test_partial_credit_is_not_warned(task, skill, seed):
    assert partly_right(np.random.default_rng(seed), task, skill) == []


@pytest.mark.parametrize("seed", range(12))
def test_runs_in_which_nothing_generalises_are_not_warned(seed):
    """Format and accuracy are luck; the warning is tested 140 times."""
    rng, config, rows = (
        np.random.default_rng(seed),
        from_dict({"es": {"sigma": 0.01}, "task": {"name": "countdown"}}),
        [],
    )
    for _ in range(150):
        right, formed = (rng.random((30, PROMPTS)) < 0.1, rng.random((30, PROMPTS)) < 0.5)
        columns = {
            "format": formed,
            "accuracy": right,
            "tokens": rng.normal(150, 50, right.shape),
            "truncated": 0 * right,
        }
        measured = Measurement({name: np.array(c, dtype=float) for name, c in columns.items()}, "accuracy")
        rows.append({"axes": axes.row_of(generation(0.5 * formed + 0.5 * right), measured)})
        history = history_of([], config)
        history.rows += rows
        assert next(rule for rule in RULES if rule.name == "wrong axis").sentence(history) is None


@pytest.mark.parametrize("antithetic", [True, False])
def test_what_both_members_of_a_pair_share_selects_nothing(antithetic):
    """Accuracy is linear in the noise, and format is even: it moves the mean only with members that are no pairs."""
    rng, rows, members = np.random.default_rng(0), [], population(MEMBERS, antithetic=antithetic)
    for _ in range(10):
        linear, even = np.repeat(rng.standard_normal((2, MEMBERS // 2)), 2, axis=1)
        linear *= np.tile([1.0, -1.0], MEMBERS // 2)
        accuracy, form = (0.1 * linear[:, None], 0.3 * even[:, None]) + 0.05 * rng.standard_normal(
            (2, MEMBERS, PROMPTS)
        )
        columns = {"format": form, "accuracy": accuracy, "tokens": 0 * form, "truncated": 0 * form}
        made = generation(accuracy + form)
        made = replace(made, update=replace(made.update, members=members))
        rows.append(axes.row_of(made, Measurement(columns, "accuracy")))
    found = Axes.of(rows, MEMBERS)
    assert found.members == (MEMBERS // 2 if antithetic else MEMBERS)
    assert found.lasting["accuracy"] == pytest.approx(1.0 if antithetic else 0.1, abs=0.05)
    assert found.shares["accuracy"] == pytest.approx(1.0 if antithetic else 0.1, abs=0.05)


@pytest.mark.parametrize(("size", "rewarded"), [(1e120, False), (1e200, False), (1e200, True), (1e308, True)])
def test_columns_too_large_for_their_covariances_are_left_out(size, rewarded):
    rng = np.random.default_rng(0)
    right, huge = rng.random((2, 8, 4))
    columns = {"right": right, "huge": size * huge, "tokens": 0 * right, "truncated": 0 * right}
    scores = size * huge / 8 if rewarded else right
    made = replace(generation(right), fitness_M=tuple(scores.mean(axis=1).tolist()))
    assert axes.row_of(made, Measurement(columns, "right")) is None


def test_a_resumed_run_reports_the_same_shares_and_does_not_warn_twice():
    config, rows, warnings = simulated(np.random.default_rng(0))
    assert warnings
    resumed = Diagnosis(config, LAYOUT, torch.zeros(100))
    resumed.restore(rows)
    assert resumed.warnings() == []
    pooled = resumed.history.axes()
    assert (pooled.lasting, pooled.lasting_share) == (
        rows[-1]["diagnosis"]["axes"]["lasting"], rows[-1]["diagnosis"]["axes"]["lasting_share"])  # fmt: skip


def test_rows_without_axes_and_generations_without_update_are_left_out():
    config, rows, _ = simulated(np.random.default_rng(0), 12)
    for row in rows:
        row["diagnosis"].pop("axes")
    assert history_of(rows, config).axes() is None
    assert not any("what selects" in line for line in summary(history_of(rows, config)))
    still = {"a": np.ones((4, 2)), "tokens": np.ones((4, 2)), "truncated": np.zeros((4, 2))}
    assert axes.row_of(generation(np.ones((4, 2)), coefficients=[0.0] * 4), Measurement(still)) is None
    few = generation(np.arange(4.0).reshape(2, 2))
    assert Axes.of([axes.row_of(few, Measurement({n: c[:2] for n, c in still.items()}))], 2).shares is None


RIGHT = "</think>\n<answer>1 + 2</answer>"


def answered(task, texts, data, **fields):
    """A generation of two members whose completions are these texts, scored by the task."""
    prompts = len(texts) // 2
    rollouts = tuple(Rollout(Member(i // prompts, i // prompts, 1), i % prompts, (1,) * len(text), text,
                             "length" if text.endswith("...") else "stop") for i, text in enumerate(texts))  # fmt: skip
    examples = [data.train[p] for p in range(prompts)]
    group = grouped(task.columns(texts, [task.handed(e) for e in examples * 2]), texts, examples, 0)
    columns = reported(task.objective(), group)
    return generation(task.objective().scores(group), rollouts=rollouts, columns=columns, **fields)


def written(folder, rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_the_columns_of_countdown_are_format_and_accuracy(tmp_path):
    rows = [{"numbers": [1, 2], "target": str(t)} for t in (3, 3, 2, 1, 2)]
    settings = {"name": "countdown", "train_data": written(tmp_path, rows), "prompt": "short", "split": "first_last",
                "train_size": 4, "test_size": 1}  # fmt: skip
    task = create(from_dict({"es": {"sigma": 0.01}, "task": settings}).task)
    data = task.load_data(0)
    found = axes.reader(task, data.train, Settings())(answered(task, [RIGHT, "no...", RIGHT, RIGHT], data))
    assert list(found.columns_MP) == ["format", "accuracy", "tokens", "truncated"] and found.correctness == "accuracy"
    assert found.columns_MP["accuracy"].tolist() == [[1, 0], [1, 1]]
    assert found.columns_MP["format"].tolist() == [[1, 0], [1, 1]]
    assert found.columns_MP["truncated"].tolist() == [[0, 1], [0, 0]]
    assert found.columns_MP["tokens"].tolist() == [[len(RIGHT), 5], [len(RIGHT), len(RIGHT)]]


REWARDS = """
def accuracy(completions, **columns): return [float(c == "yes") for c in completions]
def brevity(completions, **columns): return [None if c == "none" else -len(c) for c in completions]
"""


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(
    ("names", "columns", "correctness"),
    [(["accuracy", "brevity"], {"accuracy": [[1, 0], [0, 0]], "brevity": [[-3, 0], [-2, -2]]}, "accuracy"),
     (["accuracy"], {"accuracy": [[1, 0], [0, 0]]}, "accuracy"), (["brevity"], {}, None)],
)  # fmt: skip
def test_the_columns_of_a_custom_task_are_its_functions(names, columns, correctness, isolated, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = written(tmp_path, [{"prompt": str(i)} for i in range(5)])
    config = from_dict(
        {
            "es": {"sigma": 0.01},
            "task": {
                "name": "custom",
                "train_data": rows,
                "prompt": "raw",
                "rewards": [f"{tmp_path}/rewards.py:{n}" for n in names],
            },
        }
    )
    task = create(config.task)
    task = isolate(task, config.grader) if isolated else task
    try:
        data = task.load_data(0)
        second = "none" if len(names) > 1 else "nope"
        found = axes.reader(task, data.train, Settings())(answered(task, ["yes", second, "no", "no"], data))
    finally:
        task.close()
    assert {n: c.tolist() for n, c in found.columns_MP.items() if n not in axes.EFFECTS} == columns
    assert found.correctness == correctness


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0], [-0.1, 1.0], [0.1, 1.0, 1.0]])
def test_countdown_refuses_weights_that_are_not_two_parts(weights):
    config = from_dict({"es": {"sigma": 0.01}, "task": {"name": "countdown", "reward_weights": weights}})
    with pytest.raises(ConfigError, match=r"task\.reward_weights") as refused:
        create(config.task)
    assert str(weights) in str(refused.value)


@pytest.mark.parametrize("weights", [None, [0.0, 1.0], [0.5, 2.0]])
def test_countdown_weighs_format_and_accuracy(weights):
    config = from_dict(
        {"es": {"sigma": 0.01}, "task": {"name": "countdown", "prompt": "short", "reward_weights": weights}}
    )
    task, example = create(config.task), {"numbers": [1, 2], "target": "3", "solution": "1 + 2"}
    form, answer = weights or (0.1, 1.0)
    assert task.max_reward == form + answer == task.compute_reward(task.gold(example), example)
    assert task.compute_reward("</think>\n<answer>2</answer>", example) == form
    assert math.isclose(task.measures(task.gold(example), example)["high_reward"], 1.0)
    task.self_check([example])


@pytest.mark.parametrize("isolated", [False, True])
def test_reserved_names_and_many_columns_are_kept(isolated, tmp_path):
    task = made_task(
        "{'tokens': n, 'unexplained': n, 'reward/unexplained': n, **{str(i): n for i in range(40)}}", isolated, tmp_path
    )
    with closing(task):
        data = task.load_data(0)
        found = axes.reader(task, data.train, Settings())(answered(task, ["yes", "nope", "no", "no"], data))
    names = list(found.columns_MP)
    assert names[:3] == ["reward/tokens", "reward/reward/unexplained", "reward/unexplained"]
    assert names[-2:] == list(axes.EFFECTS)
    assert len(names) == axes.MOST + 2 and found.columns_MP["reward/tokens"].tolist() == [[3, 4], [2, 2]]
    assert found.columns_MP["tokens"].tolist() == [[3, 4], [2, 2]]


PART = """
from evoalign.rewards.objective import WeightedSum
from evoalign.tasks import Data, Task
class Parted(Task):
    name, correctness, weighted = "parted", "right", WeightedSum({{"right": 1.0}})
    def load_data(self, seed): return Data([{{"prompt": str(i)}} for i in range(4)], [{{"prompt": "test"}}])
    def prompt(self, example): return example["prompt"]
    def compute_reward(self, text, example): return float(text == "yes")
    def columns(self, texts, examples): return {{"right": self.rewards(texts, examples)}}
    def parts(self, texts, examples):
        n = [float(len(t)) for t in texts]
        assert len(n) <= 2, "more than a piece"
        return {body}
"""


def made_task(body, isolated, folder, **grader):
    (folder / "parted.py").write_text(PART.format(body=body))
    settings = {"isolated": isolated, "batch": 2, **grader}
    config = from_dict({"es": {"sigma": 0.01}, "task": {"name": f"{folder}/parted.py:Parted"}, "grader": settings})
    return isolate(create(config.task), config.grader)


@pytest.mark.parametrize("isolated", [False, True])
def test_parts_that_are_empty_leave_the_columns(isolated, tmp_path):
    with closing(made_task("{}", isolated, tmp_path)) as task:
        data = task.load_data(0)
        found = axes.reader(task, data.train, Settings())(answered(task, ["yes", "nope", "no", "no"], data))
    assert list(found.columns_MP) == ["right", *axes.EFFECTS]


FAILING = {"raises": "1 / 0", "the wrong length": "{'a': n[1:]}", "not finite": "{'a': [x * 1e999 for x in n]}",
           "no columns": "[1.0]", "other columns for some": "{str(n): n}", "exits": "exit()",
           "hangs": "__import__('time').sleep(60)", "dies": "__import__('os')._exit(3)"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "isolated"), [(n, own) for n in FAILING for own in (True, False) if own or n not in ("hangs", "dies")]
)
def test_parts_that_fail_are_not_called_again(name, isolated, tmp_path, caplog, monkeypatch):
    calls, inner = [], axes._parts
    monkeypatch.setattr(axes, "_parts", lambda *given: calls.append(given) or inner(*given))
    with closing(made_task(FAILING[name], isolated, tmp_path, timeout=1.0 if name == "hangs" else 20.0)) as task:
        data = task.load_data(0)
        read, made = axes.reader(task, data.train, Settings()), answered(task, ["yes", "nope", "no", "no"], data)
        assert [read(made), read(made)] == [None, None]
    (warning,) = [record.getMessage() for record in caplog.records if "axis report" in record.getMessage()]
    assert "parts" in warning and len(calls) == 1
