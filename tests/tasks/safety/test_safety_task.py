# SPDX-License-Identifier: Apache-2.0
"""The task: its prompts, what of a completion is scored and by whom, what an evaluation says, and a run of it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import rule_scorer
import task_runs
import torch
from command_line import caller
from pyarrow import parquet
from rule_scorer import RuleScorer
from small_runs import UNCHECKED
from task_runs import jsonl, lines

import evoalign
from evoalign import models, setup
from evoalign.baselines import planning
from evoalign.config import ScorerConfig, TaskConfig, from_dict
from evoalign.errors import ConfigError, DataError, ModelError, RewardError
from evoalign.rewards import scorer
from evoalign.rollouts import columns_of
from evoalign.rundir import checksums
from evoalign.tasks import create, isolate, with_sources
from evoalign.tasks.safety import COLUMNS, LABELS, Lagrangian, Safety
from evoalign.training.resolve import check_parted
from evoalign.training.train import dry_run

ROWS = [{"prompt": f"Is it fine to {verb} a {noun}?"} for verb in ("move", "mend") for noun in ("lock", "road", "wire")]


def task(scorer=None, **settings):
    return Safety(TaskConfig.model_validate({"name": "safety", **settings}), scorer)


@pytest.fixture
def files(tmp_path):
    return {"train_data": jsonl(tmp_path / "train", ROWS[:4]), "test_data": jsonl(tmp_path / "test", ROWS[4:])}


def test_the_forms_of_the_prompt():
    row = {"prompt": "How {is} it?"}
    text = "BEGINNING OF CONVERSATION: USER: How {is} it? ASSISTANT:"
    assert task().prompt(row) == task(prompt="conversation").prompt(row) == text
    assert task(prompt="raw").prompt(row) == "How {is} it?"
    assert task(prompt="chat").prompt(row) == [{"role": "user", "content": "How {is} it?"}]
    system = task(prompt="chat", system_prompt="Be kind.").prompt(row)
    assert system[0] == {"role": "system", "content": "Be kind."}


def test_cut_text_is_not_scored():
    said = " Sure. USER: And now? ASSISTANT: No."
    for settings, scored in [
        ({}, "Sure."), ({"cut": []}, said.strip()), ({"prompt": "chat"}, said.strip()),
        ({"prompt": "chat", "cut": ["?"]}, "Sure. USER: And now"),
    ]:  # fmt: skip
        scorer = RuleScorer()
        made = task(scorer, **settings)
        columns = made.columns([said, "BEGINNING OF CONVERSATION: USER"], ROWS[:2])
        ((first, second),) = scorer.calls
        assert first == (ROWS[0]["prompt"], scored)
        assert columns["reward"][0] == rule_scorer.reward(*first) and columns["cost"][1] == rule_scorer.cost(*second)
    assert task(RuleScorer()).measures(said, ROWS[0])["invented_turns_share"] == 1.0
    assert task(RuleScorer()).measures("Users: all", ROWS[0])["invented_turns_share"] == 0.0


def test_reward_is_reward_minus_cost_from_one_scorer_call():
    scorer = RuleScorer()
    made, texts = task(scorer), ["a e i", "oo", ""]
    pairs = [(row["prompt"], text) for text, row in zip(texts, ROWS, strict=False)]
    assert made.rewards(texts, ROWS[:3]) == [rule_scorer.reward(*pair) - rule_scorer.cost(*pair) for pair in pairs]
    assert len(scorer.calls) == 1
    assert made.columns([], []) == {"reward": [], "cost": []} and len(scorer.calls) == 1
    made.close()
    made.close()
    assert scorer.closed == 1


@pytest.mark.parametrize(("reward", "cost", "label"), [
    (0.1, 0.0, "helpful_safe"), (0.1, 0.1, "helpful_unsafe"), (0.0, -1.0, "unhelpful_safe"),
    (-3.0, 1e-9, "unhelpful_unsafe"),
])  # fmt: skip
def test_the_four_labels(reward, cost, label):
    found = task().judged({"reward": reward, "cost": cost})
    assert found == {"safe_share": float("_safe" in label), **{f"{n}_share": float(n == label) for n in LABELS}}


def test_default_objective_is_the_lagrangian():
    found = task().objective()
    assert isinstance(found, Lagrangian) and found.state == {"lambda": 1.0, "cost_average": 0.0}
    named = task(objective={"name": "lagrangian", "safe_first": "product", "standardize": True}).objective()
    assert isinstance(named, Lagrangian) and named.standardize and named.safe_first == "product"
    assert task(objective="weighted_sum").objective().name == "weighted_sum"


class Broken(RuleScorer):
    def __init__(self, answer, columns=COLUMNS):
        super().__init__()
        self.answer, self.columns = answer, columns

    def score(self, prompts, responses):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(("scorer", "error", "told"), [
    (Broken({"reward": [1.0]}), RewardError, "the scorer returned no cost"),
    (Broken({"reward": [1.0], "cost": [0.0, 0.0]}), RewardError, "returned 2 rewards for 1 texts"),
    (Broken({"reward": [1.0], "cost": [float("nan")]}), RewardError, "returned nan as the reward"),
    (Broken({"reward": [None], "cost": [0.0]}), RewardError, "returned None as the reward"),
    (Broken(RewardError("the service is gone")), RewardError, "the service is gone"),
    (Broken(ConnectionError("refused")), RewardError, "failed to score: ConnectionError: refused"),
    (Broken({}, ("reward",)), ConfigError, "needs cost, but the scorer has reward; set scorer.reward and"),
    (None, ConfigError, "is scored by models; set the section scorer"),
])  # fmt: skip
def test_scorer_failures_raise_errors(scorer, error, told):
    with pytest.raises(error, match=told):
        columns_of(task(scorer), ["x"], ROWS[:1])


def test_safety_is_not_isolated_and_has_no_gold(files):
    made = create(TaskConfig.model_validate({"name": "safety", **files}))
    assert isolate(made, from_dict({}).grader) is made
    assert made.gold(ROWS[0]) is None and made.is_right("x", ROWS[0]) is None

    own = type("Own", (Safety,), {})(TaskConfig.model_validate({"name": "safety", **files}), RuleScorer())
    assert isolate(own, from_dict({}).grader) is own


def test_unreachable_hub_error_names_the_settings():
    with pytest.raises(DataError, match=r"PKU-SafeRLHF:test: without a network, set task\.train_data"):
        task().load_data(0)


def test_default_data_are_those_of_shipped():
    """Anonymous in the run, and by name in the requests."""
    train, test = Safety.shipped
    made = TaskConfig(name="safety")
    named = TaskConfig(name="safety", train_data=train, test_data=test)
    assert with_sources(made) == with_sources(named) == named
    for one, other in ((made, named), (named, made)):
        check_parted("a run", one, other, "test")
        with pytest.raises(ConfigError, match=r"task\.validation_size is None in the run and 3 now"):
            check_parted("a run", one, other.model_copy(update={"validation_size": 3}), "validation")


def test_the_section_scorer_reaches_the_task(files, monkeypatch):
    """It is made once, when it is first asked."""
    made = []
    monkeypatch.setattr(scorer, "create", lambda section: (made.append(section), RuleScorer())[1])
    config = from_dict({"es": {"sigma": 0.1}, "task": {"name": "safety", **files}})
    with pytest.raises(ConfigError, match="task safety is scored by models; set the section scorer, such as"):
        setup.task_and_data(config, None, None)
    section = ScorerConfig(name="local", reward="a", cost="b")
    found, data = setup.task_and_data(config.model_copy(update={"scorer": section}), None, None)
    assert made == [] and len(data.train) == 4
    for _ in range(2):
        found.columns(["a"], data.train[:1])
    assert made == [section]
    own, _ = setup.task_and_data(config.model_copy(update={"scorer": section}), task(RuleScorer(), **files), None)
    own.columns(["a"], data.train[:1])
    assert len(made) == 1


def config(output, files, **settings):
    return {
        "output_dir": str(output), "seed": 5, "deterministic": True,
        "es": {"sigma": 0.02, "learning_rate": 0.02, "num_generations": 4, "population_size": 4},
        "task": {"name": "safety", **files, "batch_size": 2, "objective": {"name": "lagrangian", "rate": 2.0}},
        "evaluation": {"max_tokens": 8, "temperature": 0.8, "seeds": [0, 1]}, "checkpoint": {"every": 1},
        "checks": UNCHECKED, "tracking": {"completions_every": 1}, **settings,
    }  # fmt: skip


def train(tree, scorer, **arguments):
    return task_runs.train(tree, task=Safety(from_dict(tree).task, scorer), **arguments)


@pytest.mark.slow
def test_a_run_trains_evaluates_and_resumes_after_its_scorer_died(files, tmp_path):
    scorer = RuleScorer()
    result, _ = train(config(tmp_path / "run", files), scorer)
    sizes = [len(call) for call in scorer.calls]
    # Members and the mean of each generation, and the evaluations before and after: each is one call.
    assert sorted(sizes) == sorted([8, 2] * 4 + [4, 4]) and scorer.closed == 1
    states = [row["objective"] for row in lines(tmp_path / "run/metrics.jsonl")]
    assert states == [line["objective"] for line in lines(tmp_path / "run/journal.jsonl") if "objective" in line]
    assert len({state["lambda"] for state in states}) == 4
    for name in ("lambda", "cost_average"):
        caption = f"<figcaption>Kept by the objective: {name}, by generation<"
        assert caption in (tmp_path / "run/report.html").read_text()
    table = parquet.read_table(tmp_path / "run/results/completions/after.parquet").to_pylist()
    rewards, costs = (np.array([row[f"reward/{name}"] for row in table]) for name in COLUMNS)
    points = lines(tmp_path / "run/results/points.jsonl")
    assert [list(point) for point in points] == [["prompt", "response", "reward", "cost", "invented_turn"]] * 4
    assert [point["prompt"] for point in points] == [row["prompt"] for row in ROWS[4:] for _ in range(2)]
    assert [[point[name] for name in COLUMNS] for point in points] == list(map(list, zip(rewards, costs, strict=True)))
    assert len(lines(tmp_path / "run/results/points_before.jsonl")) == 4
    assert checksums.verify(tmp_path / "run", "results/points.jsonl")
    measures = result.after.measures
    assert measures["reward"] == pytest.approx((rewards - costs).mean())
    assert measures["reward/reward"] == pytest.approx(rewards.mean())
    assert measures["safe_share"] == pytest.approx((costs <= 0).mean())
    assert measures["helpful_safe_share"] == pytest.approx(((costs <= 0) & (rewards > 0)).mean())
    assert sum(measures[f"{label}_share"] for label in LABELS) == pytest.approx(1.0)
    assert {"refusal_template_share", "refusal_with_help_share", "refusal_citing_share"} <= measures.keys()

    tree = config(tmp_path / "again", files)
    with pytest.raises(RewardError, match="the scorer is gone"):
        train(tree, Dies(after=6))
    train(tree, RuleScorer(), resume=True)
    ours, theirs = (lines(tmp_path / name / "journal.jsonl") for name in ("run", "again"))
    assert [line.get("objective") for line in ours[1:]] == [line.get("objective") for line in theirs[1:]]
    assert ours[-1]["weights_hash"] == theirs[-1]["weights_hash"]


class Dies(RuleScorer):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def score(self, prompts, responses):
        if len(self.calls) == self.after:
            raise RewardError("the scorer is gone; start it again")
        return super().score(prompts, responses)


def test_run_prints_notes_about_rows(files, tmp_path):
    with Path(files["train_data"]).open("a") as file:
        file.write(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[5]) + "\n")
    tree = config(tmp_path / "run", files)
    tree["es"]["num_generations"] = 1
    _, output = train(tree, RuleScorer())
    assert "1 training rows are left out: their prompts are also those of another split" in output
    assert "5 training rows have 4 different prompts: some repeat" in output


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_invalid_point_raises_reward_error(value, files, tmp_path, monkeypatch):
    monkeypatch.setattr(Safety, "point", lambda *_: {"odd": value})
    tree = {"task": {"name": "safety", **files}, "evaluation": {"max_tokens": 4}}
    with pytest.raises(RewardError, match=r"task safety: its point \{'odd': .*is not JSON.*finite numbers"):
        evoalign.evaluate("tiny", config=tree, task=task(RuleScorer(), **files))


def test_eval_command_writes_points(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scorer, "create", lambda _: RuleScorer())
    section = {"name": "local", "reward": "a", "cost": "b"}
    tree = {"task": {"name": "safety", **files}, "scorer": section, "evaluation": {"max_tokens": 4}}
    (tmp_path / "asked.yaml").write_text(json.dumps(tree))
    run, asked = caller(monkeypatch, capsys), ["--config", tmp_path / "asked.yaml"]
    done = run("eval", "tiny", *asked, "--output", tmp_path / "one.json")
    assert done.code == 0, done.err
    points, found = lines(tmp_path / "one_points.jsonl"), json.loads((tmp_path / "one.json").read_text())
    assert [list(point) for point in points] == [["prompt", "response", "reward", "cost", "invented_turn"]] * 2
    assert [point["prompt"] for point in points] == [row["prompt"] for row in ROWS[4:]]
    assert [{name: p[name] for name in COLUMNS} for p in points] == [one["rewards"] for one in found["completions"]]
    assert "points" not in found
    done = run("eval", "tiny", models.tiny(), *asked, "--split", "train", "--output", tmp_path / "two.json")
    assert done.code == 0, done.err
    both = [lines(tmp_path / f"two_points_{place}.jsonl") for place in (0, 1)]
    assert both[0] == both[1] and [point["prompt"] for point in both[0]] == [row["prompt"] for row in ROWS[:4]]
    assert not (tmp_path / "points.jsonl").exists()


def test_dry_run_rejects_a_scorer_that_cannot_load(files, tmp_path):
    """As the run would, and before a model is loaded; a service may start later."""

    def told(**section):
        tree = {**config(tmp_path / "run", files), "scorer": {"name": "local", **section}}
        found = dry_run(tree), planning.dry_run(tree)
        one, other = ([line for line in lines if line.startswith("would be refused")] for lines in found)
        assert one == other
        return one

    models_of = Path(__file__).parents[3] / "data/tasks/safety/models"
    right = {"reward": f"{models_of}/reward", "cost": f"{models_of}/cost"}
    assert told(**right) == []
    assert told(**{**right, "cost": "./nowhere"}) == ["would be refused: scorer.cost: no folder ./nowhere"]
    (tmp_path / "empty").mkdir()
    for wrong in (str(tmp_path / "empty"), "tiny"):
        with pytest.raises(ModelError) as run_says:
            scorer.create(ScorerConfig(name="local", reward=wrong))
        assert told(**{**right, "reward": wrong}) == [f"would be refused: {run_says.value}"]
    folders = [shutil.copytree(right["reward"], tmp_path / name) for name in ("kind", "zero")]
    about = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps({**about, "model_type": "no_such"}))
    (folders[1] / "model.safetensors").write_bytes(b"")
    sections = [*({"reward": str(folder)} for folder in folders), {"template": "chat"}]
    for section in (*sections, *([] if torch.cuda.is_available() else [{"device": "cuda"}])):
        with pytest.raises((ConfigError, ModelError)) as run_says:
            scorer.create(ScorerConfig.model_validate({"name": "local", **right, **section}))
        assert told(**{**right, **section}) == [f"would be refused: {run_says.value}"]
    with pytest.raises(ConfigError, match=r"task safety is scored by reward and cost; set scorer\.cost"):
        told(reward=right["reward"])
    assert not (tmp_path / "run").exists()
    service = {**config(tmp_path / "run", files), "scorer": {"name": "service", "url": "http://127.0.0.1:9"}}
    assert not [line for line in dry_run(service) if "refused" in line]
