# SPDX-License-Identifier: Apache-2.0
"""GRPO on TRL's trainer: files of a run, sources of completions, costs, resuming, adapters, invalid settings."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_runs import CLOCKS, completions, grpo, killed_when, launched, rows, told_by, with_sections
from rich.console import Console
from safetensors.torch import load_file, save_file
from small_runs import UNCHECKED, hashes_of
from typer.testing import CliRunner

import evoalign
from evoalign import cli, engines, tokens
from evoalign.analysis.compare.comparison import compare
from evoalign.analysis.divergence import divergence_of
from evoalign.analysis.page.run import views_of
from evoalign.analysis.page.view import RANDOM
from evoalign.analysis.targets import locate
from evoalign.baselines import planning, trainer_state
from evoalign.baselines.policy import Policy
from evoalign.baselines.steps import Steps
from evoalign.baselines.train import _Grpo
from evoalign.checks.divergence import ESTIMATORS
from evoalign.config import from_dict
from evoalign.cost import budget
from evoalign.engines.transformers.engine import TransformersEngine
from evoalign.errors import ConfigError, EvoalignError, JournalError, ResumeError, RewardError, StoppedError
from evoalign.models import tiny
from evoalign.report import figures
from evoalign.rollouts import rewards_of
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import RunDir, saved_folders
from evoalign.rundir.identity import differences
from evoalign.rundir.own import read_own
from evoalign.setup import start, task_and_data
from evoalign.types import Plan, Request, Sampling, population, text_of

pytest.importorskip("trl")

VALIDATION = {"validation_data": "data/tasks/conciseness/conciseness_test.json", "validation_size": 2}


def config(output: Path, **sections: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "output_dir": str(output),
        "seed": 3,
        "task": {"name": "conciseness", **VALIDATION},
        "evaluation": {"max_tokens": 8, "every": 2},
        "checkpoint": {"every": 1},
        "tracking": {"completions_every": 1},
        "checks": UNCHECKED,
        "grpo": {
            "max_steps": 4, "num_generations": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3,
            "lr_scheduler_type": "constant", "rollouts": "engine",
        },
    }  # fmt: skip
    return with_sections(tree, sections)


def run(output: Path, *, resume: bool = False, **sections: Any) -> evoalign.Result:
    return grpo(config(output, **sections), resume=resume)


def traces(path: Path, but: Sequence[str] = ()) -> tuple[Any, ...]:
    """Return what equal runs share: rows without times, the last weights, the completions."""
    told = [{key: value for key, value in row.items() if key not in (*CLOCKS, *but)} for row in rows(path)]
    saved = sorted(path.glob("*/generation_*"))[-1]
    return told, load_file(next(saved.glob("*model.safetensors"))), completions(path, "after")


def test_training_never_uses_the_attention_of_cudnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass is wrong for some lengths on some GPUs. On a CPU only torch's switch can be seen."""
    own, seen = Steps.on_step_begin, list[bool]()

    def begins(self: Steps, *arguments: Any, **named: Any) -> None:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        own(self, *arguments, **named)

    monkeypatch.setattr(Steps, "on_step_begin", begins)
    run(tmp_path / "run", grpo={"max_steps": 2}, evaluation={"every": 0})
    assert seen == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def assert_equal(ours: Path, theirs: Path, but: Sequence[str] = ()) -> None:
    """Assert that two runs are equal except for times and the columns `but`."""
    (a, weights_a, texts_a), (b, weights_b, texts_b) = traces(ours, but), traces(theirs, but)
    assert a == b
    assert weights_a.keys() == weights_b.keys()
    assert all(torch.equal(weights_a[name], weights_b[name]) for name in weights_a)
    assert texts_a == texts_b


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("straight") / "run").path


def test_grpo_prompts_are_those_of_the_task_and_made_per_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system prompt is included, and no prompts are made for rows outside the batches."""
    from evoalign.baselines.trainer import Trainer

    asked: list[Any] = []
    inner = Trainer._generate

    def generated(trainer: Any, prompts: Sequence[Any]) -> Any:
        asked.extend(prompts)
        assert trainer.train_dataset.column_names == ["row"]
        return inner(trainer, prompts)

    monkeypatch.setattr(Trainer, "_generate", generated)
    path = run(
        tmp_path / "run", task={"system_prompt": "Be brief."}, grpo={"max_steps": 1}, evaluation={"every": 0}
    ).path
    assert asked and all([m["role"] for m in prompt] == ["system", "user"] for prompt in asked)
    assert {prompt[0]["content"] for prompt in asked} == {"Be brief."}
    assert {c["prompt"] for c in completions(path, 0)} == {f"Be brief.\n{prompt[1]['content']}" for prompt in asked}
    assert all(c["rendered"].startswith("<|im_start|>system\nBe brief.<|im_end|>") for c in completions(path, 0))


def test_grpo_writes_the_files_of_an_es_run(straight: Path, tmp_path: Path) -> None:
    tree = config(tmp_path / "es", es={"sigma": 0.01, "num_generations": 2, "population_size": 4})
    evoalign.train(tree, console=Console(quiet=True))
    ours, theirs = rows(straight)[0], rows(tmp_path / "es")[0]
    assert ours.keys() - theirs.keys() == {"grpo"}
    assert theirs.keys() <= ours.keys()
    there = {str(p.relative_to(tmp_path / "es")) for p in (tmp_path / "es").glob("*")} | {"results/evaluation.json"}
    assert there - {"journal.jsonl", "loras", "logs"} <= {str(p.relative_to(straight)) for p in straight.rglob("*")}
    results = [json.loads((p / "results/evaluation.json").read_text()) for p in (straight, tmp_path / "es")]
    assert results[0].keys() == results[1].keys()
    manifest = json.loads((straight / "manifest.json").read_text())
    assert manifest["method"] == "grpo"
    assert results[0]["generation"] == 4
    assert results[0]["distance"]["l2"] > 0


def test_rows_have_the_rewards_of_the_saved_completions(straight: Path) -> None:
    for step, row in enumerate(rows(straight)):
        scores = [c["score"] for c in completions(straight, step)]
        assert len(scores) == 8
        assert row["mean"] == pytest.approx(sum(scores) / 8)
        assert (row["best"], row["worst"]) == (max(scores), min(scores))
        assert row["tokens"] == sum(c["tokens"] for c in completions(straight, step))
        assert row["budget"]["completions"] == 8
        assert row["budget"]["prompts"] == 2
        assert row["budget"]["generated_tokens"] == row["tokens"]
        assert row["budget"]["backward_flops"] > row["budget"]["forward_flops"] > 0
        assert all(isinstance(row["grpo"][name], float) for name in ("loss", "grad_norm", "learning_rate", "entropy"))
    assert [row["evaluation"] is not None for row in rows(straight)] == [False, True, False, False]
    assert [row["validation"]["reward"] for row in rows(straight) if "validation" in row] == [
        checkpoint.verify(straight / "checkpoints/generation_0002").validation
    ]


def test_steps_per_generation_reuses_completions(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = run(tmp_path / "run", grpo={"num_iterations": 2, "max_steps": 2}).path
    assert not [str(w.message) for w in recwarn if "gradient_checkpointing" in str(w.message)]
    first, second = rows(path)
    assert (first["budget"]["completions"], second["budget"]["completions"]) == (8, 0)
    assert second["mean"] == first["mean"]
    assert second["budget"]["backward_flops"] == first["budget"]["backward_flops"]


def test_divergence_leaves_training_unchanged_and_its_figure_ends_with_the_final_evaluation(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "divergence", lambda rows, path, **words: drawn.append(words["final"]))
    path = run(tmp_path / "run", checks={"kl_every": 2, "kl_prompts": 4, "kl_tokens": 1}).path
    found = [row["divergence"] for row in rows(path)]
    assert [f is not None for f in found] == [False, True, False, True]
    assert found[3]["exact"] > found[1]["exact"] > 0
    ended = json.loads((path / "results/evaluation.json").read_text())
    assert ended["divergence"] == found[3] and drawn[-1] == (found[3]["exact"], ended["after"]["reward"])
    bare = [{k: v for k, v in row.items() if k not in CLOCKS} | {"divergence": None} for row in rows(path)]
    assert bare == traces(straight)[0]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Record the policies whose cost was computed, and the completions of each pass."""
    from evoalign.baselines.trainer import Trainer

    found = SimpleNamespace(policies=[], passes=[])
    inner, loss = Policy.cost_of_update, Trainer.compute_loss

    def cost(policy: Policy, *arguments: Any) -> Any:
        found.policies.append(policy)
        return inner(policy, *arguments)

    def counted(trainer: Any, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        found.passes.append(len(inputs["completion_ids"]))
        return loss(trainer, model, inputs, *arguments, **named)

    monkeypatch.setattr(Policy, "cost_of_update", cost)
    monkeypatch.setattr(Trainer, "compute_loss", counted)
    return found


def backward(path: Path, step: int, times: int, policy: Policy) -> float | None:
    """Return the FLOPs of training `times` times on each completion of a step, with those of AdamW."""
    lengths = {text_of(policy.task.prompt(policy.data.train[row])): len(ids) for row, ids in policy.lengths.items()}
    prompts, drawn = ([c[key] for c in completions(path, step)] for key in ("prompt", "tokens"))
    ids = [lengths[p] for p in prompts]
    return budget.grpo_update(
        policy.shape, ids * times, drawn * times, checkpointing=False, all_logits=True
    ).backward_flops


def test_cost_doubles_when_a_step_uses_completions_twice(tmp_path: Path, trained: SimpleNamespace) -> None:
    own = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2,
           "num_iterations": 2, "max_steps": 1}  # fmt: skip
    path = run(tmp_path / "run", grpo=own, evaluation={"every": 0}).path
    assert (len(completions(path, 0)), sum(trained.passes)) == (8, 16)
    assert rows(path)[0]["budget"]["backward_flops"] == backward(path, 0, 2, trained.policies[0])
    told = "\n".join(planning.work_lines(from_dict(config(path, grpo={**own, "max_steps": 5}))))
    assert "completions 8 per step (2 prompts x 4), 40 in total" in told


def test_step_uses_several_rounds(tmp_path: Path, trained: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 prompts, 2 per round and 3 rounds per step, the second step is the epoch's last and has one round."""
    seeds: list[int] = []
    rollout = TransformersEngine.rollout

    def asked(engine: TransformersEngine, plan: Plan, requests: Sequence[Request]) -> Any:
        seeds.extend(r.seed for r in requests if r.sampling.temperature > 0)
        return rollout(engine, plan, requests)

    monkeypatch.setattr(TransformersEngine, "rollout", asked)
    monkeypatch.setattr(TransformersEngine, "check_mean", lambda engine: None)
    own = {"gradient_accumulation_steps": 3, "steps_per_generation": 1, "max_steps": 2}
    task = {"name": "custom", "train_data": str(_prompts(tmp_path))}
    tree = config(tmp_path / "run", grpo=own, task=task, evaluation={"every": 0}, grader={"isolated": False})
    path = grpo(tree, reward=_length).path
    assert [row["budget"]["completions"] for row in rows(path)] == [24, 8]
    assert trained.passes == [8] * 4
    assert len(seeds) == len(set(seeds)) == 32
    for step, row in enumerate(rows(path)):
        assert row["budget"]["backward_flops"] == backward(path, step, 1, trained.policies[0])
    assert "completions 24 per step (6 prompts x 4), 48 in total" in planning.work_lines(from_dict(tree))[0]


@pytest.mark.slow
@pytest.mark.parametrize("tune", ["full", "lora"])
def test_mixed_precision_keeps_the_model_at_learning_rate_zero(tune: str, tmp_path: Path) -> None:
    """Evaluations before and after the step and the KL from the base model compute in the same dtype."""
    told = told_by(config(
        path := tmp_path / "run", grpo={"bf16": True, "tune": tune, "learning_rate": 1e-30, "max_steps": 1},
        evaluation={"temperature": 1.0, "max_tokens": 32}, checks={"kl_every": 1, "kl_prompts": 8, "kl_tokens": 1},
    ))  # fmt: skip
    found = json.loads((path / "results/evaluation.json").read_text())
    tokens_ = found["divergence"].pop("tokens")
    assert [found["divergence"][name] for name in ("k1", "k2", "k3", "exact")] == [0] * 4 and tokens_ > 8
    assert completions(path, "before") == completions(path, "after")
    assert "KL of the start from the base model: 0 nats per token" in told


MIXED = {"bf16": True, "max_steps": 2}


@pytest.mark.slow
@pytest.mark.parametrize("tune", ["full", "lora"])
def test_evaluation_uses_the_served_dtype_after_mixed_precision(tune: str, tmp_path: Path) -> None:
    """Evaluations before, between and after the steps equal those of `evaluate` and `analyze divergence`.

    At temperature 2 rounding changes most completions, so another dtype would be noticed.
    """
    tree = config(
        tmp_path / "run", grpo={**MIXED, "tune": tune, "learning_rate": {"full": 1e-3, "lora": 0.1}[tune]},
        evaluation={"max_tokens": 12, "every": 1, "temperature": 2.0, "samples": 2}, checkpoint={"keep_last": 2},
        checks={"kl_every": 1, "kl_prompts": 4, "kl_tokens": 32},
    )  # fmt: skip
    found = grpo(tree)
    es = {"num_generations": 1, "population_size": 2, "sigma": 0.01, "learning_rate": 0.01}
    beside = {**tree, "output_dir": str(tmp_path / "es"), "space": "lora", "es": es, "checks": UNCHECKED}
    assert found.before == evoalign.train(beside, console=Console(quiet=True)).before
    assert found.after == evoalign.evaluate(found.path)
    middle, last = saved_folders(found.path)[-2:]
    assert rows(found.path)[0]["evaluation"] == evoalign.evaluate(middle, config=tree).measures
    assert found.before != found.after, "two steps change what it answers"
    end = json.loads((found.path / "results/evaluation.json").read_text())
    for folder, kl in ((middle, rows(found.path)[0]["divergence"]), (last, end["divergence"])):
        again = asdict(divergence_of(locate(str(folder), None), 4, 32)[0])
        assert kl["tokens"] == again["tokens"]
        assert [kl[name] for name in ESTIMATORS] == pytest.approx([again[name] for name in ESTIMATORS], rel=1e-3)


@pytest.mark.slow
def test_evaluation_leaves_mixed_precision_training_unchanged(tmp_path: Path) -> None:
    """Evaluations between steps do not change generation and training, which stay in bfloat16."""
    made: list[list[Any]] = []
    for name, mixed, every in (("asked", True, 1), ("unasked", True, 0), ("plain", False, 0)):
        grpo = {**MIXED, "bf16": mixed, "rollouts": "trl", "temperature": 2.0}
        found = run(tmp_path / name, grpo=grpo, evaluation={"every": every})
        moved = load_file(found.saved / "model.safetensors")
        made.append([completions(found.path, 1), {tensor: value.tolist() for tensor, value in moved.items()}])
    assert made[0] == made[1]
    assert made[1][0] != made[2][0] and made[1][1] != made[2][1]


def test_trl_has_evoaligns_tokens_and_completions(tmp_path: Path) -> None:
    """With top_k 1 TRL's generation is greedy: at step 0 it equals the engine's greedy decoding."""
    data = tmp_path / "prompts.jsonl"
    opened = [{"role": "user", "content": "What is 3 + 5?"}, {"role": "assistant", "content": "The answer is"}]
    prompts = [opened, [{"role": "user", "content": "Is a penguin a fish?"}]]
    data.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    task = {"name": "custom", "train_data": str(data), "test_data": str(data)}
    own = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 4, "rollouts": "trl", "top_k": 1}
    tree = config(tmp_path / "run", task=task, grpo=own)
    path = grpo(tree, reward=_length).path
    greedy = {r["prompt"]: r["text"] for r in completions(path, "before")}
    asked = completions(path, 0)
    assert len(asked) == 4
    assert {c["prompt"]: c["text"] for c in asked} == greedy


def _length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """Return minus the length of each completion, given as messages or as text."""
    return [-float(len(c[0]["content"] if isinstance(c, list) else c)) for c in completions]


@pytest.mark.slow
def test_member_rollouts_equal_those_of_es_and_leave_the_model_unchanged(tmp_path: Path) -> None:
    es = {"sigma": 0.05, "learning_rate": 0.01}
    tree = config(tmp_path / "run", es=es, space="lowrank", grpo={"rollouts": "es", "max_steps": 2})
    path = grpo(tree).path
    assert _members(from_dict(tree)) == [(c["prompt"], c["text"]) for c in completions(path, 0)]
    assert len({c["text"] for c in completions(path, 0)}) > 2, "members differ"
    straight = run(tmp_path / "other", grpo={"max_steps": 1}).path
    before = [completions(p, "before") for p in (path, straight)]
    assert before[0] == before[1]


def _members(settings: evoalign.Config) -> list[tuple[str, str]]:
    """Return the completions of the members of generation 0 for both training prompts, by the engine of ES."""
    task, data = task_and_data(settings, None, None)
    tokens_ = tokens.load(settings.model)
    engine = engines.create(settings, tokens_)
    start(settings, engine)
    plan = Plan(0, 0.05, population(4))
    prompts = [task.prompt(example) for example in data.train]
    requests = [Request(i, tokens_.encode(p), Sampling(8)) for i, p in enumerate(prompts)]
    found = sorted(engine.rollout(plan, requests), key=lambda r: (r.request, r.member.index))
    engine.close()
    order = _order(settings.seed, 0, 2)
    shown = [p if isinstance(p, str) else "\n".join(m["content"] for m in p) for p in prompts]
    return [(shown[i], r.text) for i in order for r in found if r.request == i]


def _order(seed: int, epoch: int, count: int) -> list[int]:
    from evoalign.baselines.trainer import EpochSampler

    sampler = EpochSampler(range(count), mini_repeat_count=4, batch_size=2, repeat_count=1, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)
    return list(dict.fromkeys(sampler))


def test_prompt_orders_differ_between_seeds() -> None:
    orders = [tuple(_order(seed, epoch, 20)) for seed in range(6) for epoch in range(6)]
    assert len(set(orders)) == 36
    assert all(sorted(order) == list(range(20)) for order in orders)


@pytest.mark.slow
def test_the_correction_for_members_changes_the_step(tmp_path: Path) -> None:
    es, grpo = {"sigma": 0.05}, {"rollouts": "es", "max_steps": 1}
    weights = [
        traces(run(tmp_path / kind, es=es, space="lowrank", grpo={**grpo, "off_policy": kind}).path)[1]
        for kind in ("clip", "none")
    ]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert rows(tmp_path / "clip")[0]["grpo"]["clipped_share"] > 0
    assert rows(tmp_path / "none")[0]["grpo"]["clipped_share"] == 0


def test_the_reference_of_beta_is_of_the_revision_that_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has two revisions with different weights; the KL along the policy's own tokens is 0."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    home = tmp_path / "models--our--model"
    (home / "refs").mkdir(parents=True)
    for name, commit, factor in (("main", "a" * 40, 0.5), ("v1", "b" * 40, 1.0)):
        folder = shutil.copytree(tiny(), home / "snapshots" / commit)
        (home / "refs" / name).write_text(commit)
        (file,) = folder.glob("*.safetensors")
        scaled = {key: (factor * tensor).contiguous() for key, tensor in load_file(file).items()}
        save_file(scaled, file, metadata={"format": "pt"})
    model, grpo = {"name": "our/model", "revision": "v1"}, {"beta": 0.1, "max_steps": 1}
    path = run(tmp_path / "run", model=model, grpo=grpo, evaluation={"every": 0}).path
    assert rows(path)[0]["grpo"]["kl"] == 0
    saved = json.loads((path / "checkpoints/generation_0001/config.json").read_text())
    assert str(tmp_path) not in json.dumps(saved)


REWARD = """
def shortness(prompts, completions, answer, **kwargs):
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [None if len(text) < 6 else 1 / (1 + abs(len(text) - len(a))) for text, a in zip(texts, answer)]


async def digits(completions, **kwargs):
    return [0.1 * sum(ch.isdigit() for ch in (c[0]["content"] if isinstance(c, list) else c)) for c in completions]
"""


@pytest.mark.slow
def test_reward_file_scores_equally_in_es_and_grpo(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    questions = [{"prompt": f"Solve: {i} + 5 =", "answer": str(i + 5)} for i in range(32)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    file = tmp_path / "prompts.jsonl"
    task = {
        "name": "custom", "train_data": str(file), "test_data": str(file), "validation_data": str(file),
        "rewards": [f"{tmp_path}/reward.py:shortness", f"{tmp_path}/reward.py:digits"], "reward_weights": [1.0, 0.5],
    }  # fmt: skip
    grpo = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 128, "temperature": 1.5}
    path = run(tmp_path / "run", task=task, grpo=grpo, evaluation={"every": 0}).path
    kept = [c for step in range(2) for c in completions(path, step)]
    assert len(kept) == 256
    assert len({c["score"] for c in kept}) > 20 and any(len(c["text"]) < 6 for c in kept)
    chosen, data = task_and_data(from_dict(config(path, task=task)), None, None)
    by_prompt = {q["prompt"]: example for q, example in zip(questions, data.train, strict=True)}
    scored = rewards_of(chosen, [c["text"] for c in kept], [by_prompt[c["prompt"]] for c in kept])
    chosen.close()
    assert scored == [c["score"] for c in kept]


@pytest.mark.slow
@pytest.mark.last("trl", "engine")
@pytest.mark.parametrize("rollouts", ["trl", "engine", "es"])
def test_longer_run_starts_with_the_steps_of_a_shorter_one(rollouts: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"es": {"sigma": 0.05}, "space": "lowrank"} if rollouts == "es" else {}
    run(tmp_path / "straight", grpo={"rollouts": rollouts, "max_steps": 2}, **more)
    run(tmp_path / "run", grpo={"rollouts": rollouts, "max_steps": 1}, **more)
    run(tmp_path / "run", resume=True, grpo={"rollouts": rollouts, "max_steps": 2}, **more)
    # The shorter run's last step was not evaluated as one on the way.
    assert_equal(tmp_path / "run", tmp_path / "straight", but=("evaluation", "validation"))


@pytest.mark.slow
@pytest.mark.last("[0]")
@pytest.mark.parametrize("every", [1, 0])
def test_killed_run_resumes_to_the_same_bits(every: int, straight: Path, tmp_path: Path) -> None:
    """With `every` 0 there is no state to resume from: the run begins again, and the old folder is kept."""
    metrics, count = tmp_path / "run/metrics.jsonl", 2 if every else 1
    tree = config(tmp_path / "run", checkpoint={"every": every})
    killed_when(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= count, tree)
    if not every:
        for other, message in (({"learning_rate": 2e-3}, "other settings"), ({}, "begins again")):
            told = planning_or_error(tmp_path / "run", other)
            assert message in told, told
    told = told_by(config(tmp_path / "run"), resume=True)
    assert_equal(tmp_path / "run", straight)
    aside = list(tmp_path.glob("run.2*"))
    assert len(aside) == (not every)
    if not every:
        assert "ended before its first trainer state was saved" in told
        assert f"the previous run is now {aside[0]}" in told
        assert len(rows(aside[0])) >= 1


def planning_or_error(output: Path, grpo: dict[str, Any]) -> str:
    """Return the first line of a dry run of a resume, or its error."""
    try:
        return planning.dry_run(config(output, grpo=grpo), resume=True)[0]
    except ResumeError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.last("[0]", "[1]")
@pytest.mark.parametrize("every", [0, 1, 2, None])
def test_resume_of_a_finished_run_changes_no_file(every: int | None, tmp_path: Path) -> None:
    """The run has a state of its last step (1), of an earlier step (2), or none."""
    sections: dict[str, Any] = {"checkpoint": {"every": every}, "grpo": {"max_steps": 3}}
    first = run(tmp_path / "run", **sections)
    kept = hashes_of(first.path)
    again = run(first.path, resume=True, **sections)
    assert "run is done: it has all 3 steps" in told_by(config(first.path, **sections), resume=True)
    assert (again.path, again.saved) == (first.path, first.saved)
    assert (again.before.measures, again.after.measures) == (first.before.measures, first.after.measures)
    assert "is done" in planning.dry_run(config(first.path, **sections), resume=True)[0]
    assert hashes_of(first.path) == kept
    assert not list(tmp_path.glob("run.2*"))


@pytest.mark.parametrize(("every", "saved"), [(0, "0"), (None, "unset, which means 50")])
def test_grpo_raises_when_a_finished_run_has_no_state(every: int | None, saved: str, tmp_path: Path) -> None:
    path = run(tmp_path / "run", checkpoint={"every": every}, grpo={"max_steps": 1}).path
    with pytest.raises(ResumeError, match=rf"checkpoint\.every is {saved}:"):
        run(path, resume=True, checkpoint={"every": every}, grpo={"max_steps": 2})
    (next(path.glob("checkpoints/*/model.safetensors"))).write_bytes(b"")
    with pytest.raises(ResumeError, match=r"checkpoint\.every"):
        run(path, resume=True, checkpoint={"every": every}, grpo={"max_steps": 1})
    assert not list(tmp_path.glob("run.2*"))


@pytest.mark.slow
def test_older_state_is_kept_until_the_new_one_is_complete(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [p.name for p in (straight / "trainer").iterdir()] == ["checkpoint-4"]
    mark = trainer_state.mark

    def die(directory: RunDir, done: int) -> None:
        if done == 2:
            raise OSError("the machine died")
        mark(directory, done)

    monkeypatch.setattr(trainer_state, "mark", die)
    with pytest.raises(EvoalignError, match="the machine died; kept up to step 1; resume with"):
        run(tmp_path / "run")
    monkeypatch.undo()
    run(tmp_path / "run", resume=True)
    assert_equal(tmp_path / "run", straight)


class Touches:
    """Pickled code that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.slow
@pytest.mark.last("scheduler", "rng_state", "trainer_state")
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_a_state_that_cannot_be_read_is_refused_and_runs_no_code(name: str, straight: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", grpo={"max_steps": 2})
    file = tmp_path / "run" / "trainer" / "checkpoint-2" / name
    whole, marker = file.read_bytes(), (file.parent / "whole.json").read_text()
    (file.parent / "whole.json").write_text('{"step": 2}')  # else it is refused unread
    torch.save(Touches(tmp_path / "it_ran"), file)
    for damage in (file.read_bytes(), whole[: len(whole) // 2], b""):
        file.write_bytes(damage)
        with pytest.raises(ResumeError, match=r"checkpoint-2 cannot be read .*--overwrite") as told:
            run(tmp_path / "run", resume=True)
        assert not {"\n", "\x1b"} & set(str(told.value))  # torch's own advice is in colour
    assert not (tmp_path / "it_ran").exists()
    file.write_bytes(whole)
    assert "checkpoint-2 was not verified" in told_by(config(tmp_path / "run"), resume=True)
    assert marker != (tmp_path / "run/trainer/checkpoint-4/whole.json").read_text()
    assert_equal(tmp_path / "run", straight, but=("evaluation", "validation"))


@pytest.mark.parametrize("last", [2, 4])
def test_signal_stops_grpo_after_a_complete_step(last: int, tmp_path: Path) -> None:
    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        if len(completions) == 8 and len(rows_so_far(tmp_path / "run")) == last - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return _length(prompts, completions)

    tree = config(
        tmp_path / "run", grader={"isolated": False}, task={"name": "custom", "train_data": str(_prompts(tmp_path))}
    )
    with pytest.raises(StoppedError, match=f"stopped after step {last} of 4; resume with grpo") as error:
        grpo(tree, reward=reward)
    assert error.value.signal == signal.SIGTERM
    assert len(rows(tmp_path / "run")) == last
    assert json.loads((tmp_path / "run/results/budget.json").read_text())["training"]["completions"] == 8 * last
    assert not (tmp_path / "run/results/evaluation.json").exists()
    found = grpo(tree, reward=_length, resume=True)
    assert len(rows(found.path)) == 4 and (found.path / "results/evaluation.json").is_file()


def rows_so_far(path: Path) -> list[dict[str, Any]]:
    return rows(path) if (path / "metrics.jsonl").is_file() else []


def _prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    questions = [[{"role": "user", "content": f"What is {i} + 5?"}] for i in range(10)]
    file.write_text("".join(json.dumps({"prompt": q}) + "\n" for q in questions))
    return file


@pytest.mark.long
@pytest.mark.parametrize("rollouts", ["engine", "trl"])
def test_two_processes_share_a_step_and_resume_to_the_same_bits(rollouts: str, straight: Path, tmp_path: Path) -> None:
    """Data parallel over gloo: each process has one of two prompts, one process writes, and both resume."""
    grpo = {"rollouts": rollouts, "per_device_train_batch_size": 4, "learning_rate": 1e-4}
    launched(config(tmp_path / "straight", grpo={**grpo, "max_steps": 3}))
    launched(config(tmp_path / "run", grpo={**grpo, "max_steps": 2}))
    launched(config(tmp_path / "run", grpo={**grpo, "max_steps": 3}))
    assert_equal(tmp_path / "run", tmp_path / "straight", but=("evaluation", "validation"))
    for number, row in enumerate(rows(tmp_path / "straight")):
        spent, alone = row["budget"], rows(straight)[0]["budget"]
        assert spent["completions"] == 8
        assert spent["backward_flops"] == pytest.approx(alone["backward_flops"], rel=0.2)  # other lengths
        assert spent["device_seconds"] == 2 * spent["wall_seconds"]
        kept = completions(tmp_path / "straight", number)
        told: dict[str, list[str]] = {}
        for completion in kept:
            told.setdefault(completion["prompt"], []).append(completion["text"])
        assert sorted(map(len, told.values())) == [4, 4]
        assert row["mean"] == pytest.approx(sum(c["score"] for c in kept) / 8)


def test_resume_raises_when_settings_differ(straight: Path) -> None:
    with pytest.raises(ResumeError, match=r"grpo.learning_rate is 0.001 in the run and 0.002 now"):
        run(straight, resume=True, grpo={"learning_rate": 2e-3})


def test_resume_reads_the_rows_once(straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, calls = RunDir.read_metrics, list[RunDir]()
    monkeypatch.setattr(RunDir, "read_metrics", lambda run: calls.append(run) or read(run))
    settings = from_dict(config(straight))
    task, data = task_and_data(settings, None, None)
    known = SimpleNamespace(tokens=tokens.load(settings.model))
    algorithm: Any = SimpleNamespace(task=task, data=data, policy=known)
    for done, whole in ((4, True), (5, False)):
        with nullcontext() if whole else pytest.raises(ResumeError, match="lacks rows before step 5"):
            _Grpo._check_resume(algorithm, RunDir(straight), done)
    assert len(calls) == 2


@pytest.mark.slow
def test_adapter_is_saved_so_that_peft_loads_it(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = run(tmp_path / "run", lora={"rank": 2, "alpha": 4.0}, grpo={"tune": "lora", "learning_rate": 1e-2}).path
    saved = path / "loras" / "generation_0004"
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny()), saved).merge_and_unload()
    text = tokens.load(from_dict(config(path)).model)
    after = completions(path, "after")
    task, data = task_and_data(from_dict(config(path)), None, None)
    for row in after:
        ids = torch.tensor([text.encode(task.prompt(data.test[row["example"]]))])
        out = loaded.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=list(text.stop_ids), pad_token_id=0)
        assert text.decode(out[0, ids.shape[1] :].tolist()) == row["text"]
    before = completions(path, "before")
    assert [r["text"] for r in before] != [r["text"] for r in after]
    cost = rows(path)[0]["budget"]
    assert 0 < cost["backward_flops"] < cost["forward_flops"] * 3
    assert math.isclose(
        json.loads((path / "results/evaluation.json").read_text())["distance"]["l2"], _moved(loaded), rel_tol=1e-3
    )


def _moved(model: Any) -> float:
    from transformers import AutoModelForCausalLM

    base = dict(AutoModelForCausalLM.from_pretrained(tiny()).named_parameters())
    return math.sqrt(sum(float((p - base[n]).double().square().sum()) for n, p in model.named_parameters()))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"grpo": {"num_generations": 3}}, "8 x 1 passes is not a multiple of grpo.num_generations 3"),
        ({"grpo": {"per_device_train_batch_size": 16}}, "needs 4 prompts, and the training split has 2"),
        ({"grpo": {"trl": {"bta": 0.1}}}, r"grpo\.trl\.bta: .*did you mean beta\?"),
        ({"grpo": {"trl": {"beta": 0.1}}}, r"grpo\.trl\.beta .*set grpo\.beta"),
        ({"grpo": {"trl": {"output_dir": "/"}}}, r"grpo\.trl\.output_dir .*\(output_dir\)"),
        ({"grpo": {"rollouts": "es"}}, "missing setting es"),
        ({"grpo": {"num_generations": 1}}, r"grpo\.num_generations: .*given: 1"),
        ({"grpo": {"rollouts": "es"}, "es": {"sigma": 0.1}, "space": "full"}, "set space: lora or lowrank"),
        ({"grpo": {"rollouts": "es", "tune": "lora"}}, "needs grpo.tune full"),
        ({"grpo": {"use_vllm": True}}, r"grpo\.rollouts trl, not engine"),
        ({"grpo": {"use_vllm": True, "rollouts": "trl"}}, "vLLM is not available"),
        ({"grpo": {"trl": {"save_only_model": True}}}, r"grpo\.trl\.save_only_model .*remove it"),
        ({"grpo": {"trl": {"generation_batch_size": 8}}}, r"\(grpo\.steps_per_generation\); remove it"),
        ({"grpo": {"trl": {"fsdp": "full_shard"}}}, "use ZeRO stage 1 or 2"),
        ({"grpo": {"trl": {"deepspeed": {"zero_optimization": {"stage": 3}}}}}, "use ZeRO stage 1 or 2"),
        ({"grpo": {"top_k": 5}}, "grpo.trl.top_k is only .*set grpo.rollouts trl"),
        ({"grpo": {"trl": {"min_p": 0.1}}}, "grpo.trl.min_p is only"),
        ({"grpo": {"gradient_accumulation_steps": 3, "steps_per_generation": 2}},
         "lasts for 2 passes .* a step for 3 .* one must be a multiple of the other"),
        ({"grpo": {"rollouts": "es", "num_generations": 3, "per_device_train_batch_size": 3},
          "es": {"sigma": 0.1, "antithetic": True}, "space": "lowrank"},
         "es.antithetic needs an even grpo.num_generations, not 3"),
        ({"engine": {"device": "banana"}}, "'banana'.*auto, cpu or cuda"),
        ({"engine": {"device": "cuda:3"}}, "CUDA_VISIBLE_DEVICES=3"),
        pytest.param({"engine": {"device": "cuda"}}, r"engine\.device: cuda",
                     marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)  # fmt: skip
def test_grpo_raises_on_invalid_settings_and_writes_no_files(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        run(tmp_path / "run", **sections)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_grpo_raises_when_a_reward_is_not_finite(tmp_path: Path) -> None:
    def broken(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [float("nan")] * len(completions)

    tree = config(
        tmp_path / "run", task={"name": "custom", "train_data": str(_prompts(tmp_path))}, grader={"isolated": False}
    )
    with pytest.raises(RewardError, match="nan"):
        grpo(tree, reward=broken)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_differences_name_every_setting(tmp_path: Path) -> None:
    own = {"max_steps": 4, "lr_scheduler_type": "constant"}
    with_members = config(tmp_path, grpo={**own, "rollouts": "es"}, es={"sigma": 0.01, "learning_rate": 0.01})
    without = config(tmp_path, grpo=own)
    named = " ".join(differences(from_dict(with_members), from_dict(without), "grpo")[0])
    assert "es is None in the run" in named and "grpo.rollouts is 'engine' in the run" in named
    shorter = config(tmp_path, grpo={"max_steps": 3, "lr_scheduler_type": "linear"})
    named = " ".join(differences(from_dict(shorter), from_dict(without), "grpo")[0])
    assert "grpo.max_steps is 4 in the run and 3 now" in named and "lr_scheduler_type is 'constant'" in named


def test_random_rewards_follow_seed_step_prompt_and_place_and_no_text() -> None:
    """Half of them are 1, in each group and at each place; rounds of a step and processes draw others."""
    from evoalign.baselines.steps import Steps

    def drawn(seed: int, step: int, process: int = 0, earlier: int = 0, first: int = 0) -> list[float]:
        steps: Any = Steps.__new__(Steps)
        steps.config = from_dict({"seed": seed, "grpo": {"reward": "random"}})
        steps.trainer = SimpleNamespace(
            state=SimpleNamespace(global_step=step), accelerator=SimpleNamespace(process_index=process)
        )
        steps._pending = [None] * earlier
        return steps._random([first + i // 4 for i in range(64)])

    found = [value for step in range(40) for value in drawn(3, step)]
    assert set(found) == {0.0, 1.0} and abs(sum(found) / len(found) - 0.5) < 0.04  # 4 standard errors of 2,560
    assert drawn(3, 7) == drawn(3, 7)
    others = [drawn(4, 7), drawn(3, 8), drawn(3, 7, process=1), drawn(3, 7, earlier=64), drawn(3, 7, first=9)]
    for other in others:
        assert 16 < sum(a == b for a, b in zip(drawn(3, 7), other, strict=True)) < 48  # of 64, 4 standard errors


def test_a_run_with_random_rewards_resumes_to_the_same_bits_and_is_evaluated_by_the_task(
    straight: Path, tmp_path: Path
) -> None:
    path = run(tmp_path / "run", grpo={"reward": "random"}).path
    before, ours = (json.loads((p / "results/evaluation.json").read_text())["before"] for p in (straight, path))
    assert ours == before, "evaluations keep the task's reward"
    for step, (row, own) in enumerate(zip(rows(path), rows(straight), strict=True)):
        scores = [c["score"] for c in completions(path, step)]
        assert set(scores) <= {0.0, 1.0} and row["mean"] == pytest.approx(sum(scores) / 8)
        if not step:  # the same completions, as the model is the same
            texts = [[c["text"] for c in completions(p, 0)] for p in (path, straight)]
            assert texts[0] == texts[1] and row["mean"] != own["mean"]
    again = tmp_path / "again"
    run(again, grpo={"reward": "random", "max_steps": 2})
    run(again, grpo={"reward": "random"}, resume=True)
    assert_equal(again, path, but=("evaluation", "validation"))  # those of step 2 ended the shorter run
    with pytest.raises(ResumeError, match=r"grpo\.reward"):
        run(again, resume=True)


def test_placebo_of_grpo_names_the_command_of_a_run_with_random_rewards(straight: Path, tmp_path: Path) -> None:
    """The command is given whole, and makes a run that the comparison and the report call random."""
    path = shutil.copytree(straight, tmp_path / "run")
    with pytest.raises(JournalError) as refused:
        evoalign.placebo(path)
    words = shlex.split(str(refused.value).partition("rewards: ")[2])
    assert words[:2] == ["evoalign", "grpo"]
    done = CliRunner().invoke(cli.app, words[1:])
    assert done.exit_code == 0 and "note: trains on random rewards" in done.output, done.output
    other = tmp_path / "run_random"
    assert read_own(other).grpo.reward == "random" and read_own(path).grpo.reward == "task"
    found = compare([path, other])
    assert sorted(group.settings.get("grpo.reward", "task") for group in found.groups) == ["random", "task"]
    (named,) = [group.label for group in found.groups if "reward random" in group.label]
    assert [note for note in found.notes if "random rewards" in note and named in note]
    assert "None" not in " ".join(group.label for group in found.groups)
    evoalign.export(other, tmp_path / "card")
    assert "trained on random rewards and not on the task's." in (tmp_path / "card/README.md").read_text()
    assert [RANDOM in view.beside for view in views_of([other, path])] == [True, False]
