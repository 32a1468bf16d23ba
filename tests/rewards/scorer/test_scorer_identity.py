# SPDX-License-Identifier: Apache-2.0
"""A run records its scoring models and does not resume with others. test_scorer_in_a_run.py does so with a service."""

import json
import shutil
import socket

import pytest
from planted_scorers import safe_rlhf
from rule_scorer import RuleScorer
from small_runs import UNCHECKED
from task_runs import jsonl, lines, train

import evoalign
from evoalign.config import GraderConfig, ScorerConfig, TaskConfig, from_dict
from evoalign.errors import ResumeError, ScorerAwayError
from evoalign.placebos.run import placebo
from evoalign.rewards.scorer import create
from evoalign.rewards.scorer.models import Local
from evoalign.tasks.isolated.task import Isolated
from evoalign.tasks.safety import Safety

ROWS = [{"prompt": f"Is it fine to {verb} a lock?"} for verb in ("move", "mend", "wash", "pick")]
OTHER = "was scored by other models than .*, or with another template, max_tokens or dtype"


def config(folder, scorer, **settings):
    data = {"train_data": jsonl(folder / "train", ROWS[:2]), "test_data": jsonl(folder / "test", ROWS[2:])}
    return {
        "output_dir": str(folder / "run"), "deterministic": True, "evaluation": {"max_tokens": 4},
        "es": {"sigma": 0.02, "learning_rate": 0.02, "num_generations": 1, "population_size": 2},
        "task": {"name": "safety", **data, "objective": {"name": "lagrangian", "rate": 0.0}},
        "checks": UNCHECKED, **({} if scorer is None else {"scorer": scorer}), **settings,
    }  # fmt: skip


def models(folder, seed=0):
    """Two models of one seed, in the same folders whatever it is."""
    names = {column: folder / column for column in ("reward", "cost")}
    for place, (column, found) in enumerate(names.items()):
        shutil.rmtree(found, ignore_errors=True)
        safe_rlhf(found, seed=seed + place, said={"score_type": column})
    return {column: str(found) for column, found in names.items()}


def local(folder):
    return {"name": "local", "device": "cpu", **models(folder)}


def digest_of(scorer):
    found = create(ScorerConfig.model_validate(scorer))
    assert isinstance(found, Local)
    return found.digest


def longer(tree):
    return {**tree, "es": {**tree["es"], "num_generations": 2}}


def head(folder):
    return lines(folder / "run/journal.jsonl")[0]


def manifest(folder):
    return json.loads((folder / "run/manifest.json").read_text())


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_scoring_models(tmp_path, caplog):
    """An evaluation only says so: the models may have been chosen. `auto` is the dtype that it was."""
    scorer = local(tmp_path)
    tree = config(tmp_path, scorer)
    train(tree)
    digest = digest_of(scorer)
    assert head(tmp_path)["scorer_digest"] == manifest(tmp_path)["scorer_digest"] == digest
    evoalign.evaluate(tmp_path / "run")
    assert caplog.messages == []
    models(tmp_path, seed=7)
    before = (tmp_path / "run/journal.jsonl").read_bytes()
    with pytest.raises(ResumeError, match=f"{OTHER} .digest {digest[:12]}..., and now {digest_of(scorer)[:12]}"):
        train(longer(tree), resume=True)
    with pytest.raises(ResumeError, match=OTHER):
        placebo(tmp_path / "run", shuffles=1)
    assert (tmp_path / "run/journal.jsonl").read_bytes() == before
    caplog.clear()
    evoalign.evaluate(tmp_path / "run")
    (said,) = caplog.messages
    assert said.startswith(f"warning: {tmp_path / 'run'} was scored by other models than ")
    assert f"(digest {digest[:12]}..., and now {digest_of(scorer)[:12]}...)" in said
    models(tmp_path)
    with pytest.raises(ResumeError, match=r"set scorer\.dtype \(auto is bfloat16 on a GPU and float32 on a CPU\)"):
        train(longer(config(tmp_path, {**scorer, "dtype": "bfloat16"})), resume=True)
    train(longer(config(tmp_path, {**scorer, "dtype": "float32"})), resume=True)
    assert len(lines(tmp_path / "run/journal.jsonl")) == 5


def test_missing_service_starts_no_run(tmp_path):
    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ScorerAwayError) as error:
            train(config(tmp_path, {"name": "service", "url": url, "deadline": 0.3}))
    assert url in str(error.value) and str(error.value).endswith("; start the service")
    assert error.value.__notes__ == ["nothing was begun: then give the same command again"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_of_grpo_is_not_resumed_with_other_weights_of_its_scorer(tmp_path):
    pytest.importorskip("trl")
    grpo = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-4}
    grpo |= {"trl": {"lr_scheduler_type": "constant"}}
    tree = config(tmp_path, local(tmp_path), grpo=grpo, checkpoint={"every": 1})
    train(tree, evoalign.grpo)
    assert manifest(tmp_path)["scorer_digest"] == digest_of(tree["scorer"])
    models(tmp_path, seed=7)
    tree["grpo"] = {**grpo, "max_steps": 2}
    with pytest.raises(ResumeError, match=OTHER):
        train(tree, evoalign.grpo, resume=True)
    models(tmp_path)
    train(tree, evoalign.grpo, resume=True)


@pytest.mark.slow
def test_custom_scorer_needs_no_digest(tmp_path):
    tree = config(tmp_path, None)

    def given(digest=None):
        scorer = RuleScorer()
        scorer.digest = digest
        return Safety(from_dict(tree).task, scorer)

    train(tree, task=given())
    assert "scorer_digest" not in head(tmp_path) and "scorer_digest" not in manifest(tmp_path)
    train(longer(tree), task=given("a" * 64), resume=True)  # nothing is known of the one before
    train(tree, task=given("a" * 64), overwrite=True)
    assert head(tmp_path)["scorer_digest"] == "a" * 64
    for digest in ("b" * 64, "no digest", None):
        with pytest.raises(ResumeError, match=f"and now {'bbbbbbbbbbbb' if digest == 'b' * 64 else 'none'}"):
            train(longer(tree), task=given(digest), resume=True)


def test_isolated_task_has_the_scorer_digest():
    class Known(RuleScorer):
        digest = "a" * 64

    task = Safety(TaskConfig(name="safety"), Known())
    assert Isolated(task, GraderConfig()).scorer_digest() == task.scorer_digest() == "a" * 64
    assert Safety(TaskConfig(name="safety")).scorer_digest() is None, "scores without models"
