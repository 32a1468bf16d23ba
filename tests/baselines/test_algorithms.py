# SPDX-License-Identifier: Apache-2.0
"""PPO and DPO: what they learn and cost, resuming, pairs, advantages, invalid settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from grpo_runs import CLOCKS, completions, grpo, rows, with_sections
from safetensors.torch import load_file
from small_runs import UNCHECKED

import evoalign
from evoalign.analysis.compare.groups import settings_of
from evoalign.analysis.page.run import views_of
from evoalign.baselines import ppo, settings
from evoalign.baselines.policy import Policy
from evoalign.config import from_dict
from evoalign.cost import budget
from evoalign.cost.flops import Matrix
from evoalign.engines.transformers.engine import load_model
from evoalign.errors import ConfigError
from evoalign.types import text_of

pytest.importorskip("trl")

STEPS = 12
BETA = {"ppo": 0.0, "dpo": 0.1}
RATE = {"ppo": 1e-3, "dpo": 3e-4}


def config(output: Path, algorithm: str, **sections: Any) -> dict[str, Any]:
    data = output.parent / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Say something about {i}."}) + "\n" for i in range(12)))
    tree: dict[str, Any] = {
        "output_dir": str(output),
        "task": {"name": "custom", "train_data": str(data), "test_data": str(data)},
        "grader": {"isolated": False},
        "evaluation": {"max_tokens": 12, "every": 0},
        "checkpoint": {"every": 4},
        "tracking": {"completions_every": 1},
        "checks": UNCHECKED,
        "report": False,
        "grpo": {
            "algorithm": algorithm, "max_steps": STEPS, "num_generations": 8, "per_device_train_batch_size": 32,
            "lr_scheduler_type": "constant", "rollouts": "engine", "beta": BETA[algorithm],
            "learning_rate": RATE[algorithm],
        },
    }  # fmt: skip
    return with_sections(tree, sections)


def share_of_e(prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
    return [text.count("e") / max(1, len(text)) for text in completions]


@pytest.fixture(scope="module", params=["ppo", "dpo"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    found, own = list[Policy](), Policy.cost_of_update

    def cost(policy: Policy, *arguments: Any) -> Any:
        found.append(policy)
        return own(policy, *arguments)

    tree = config(tmp_path_factory.mktemp(request.param) / "run", request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "cost_of_update", cost)
        result = grpo(tree, reward=share_of_e)
    start = load_model(from_dict(tree).model, torch.float32).base_model.state_dict()
    return SimpleNamespace(
        algorithm=request.param, tree=tree, result=result, path=result.path, policy=found[0], start=start
    )


def test_planted_reward_rises(straight: SimpleNamespace) -> None:
    before, after = (found.measures["reward"] for found in (straight.result.before, straight.result.after))
    assert after > before + 0.02
    means = [row["mean"] for row in rows(straight.path)]
    assert means[-1] > means[0] + 0.02
    assert evoalign.evaluate(straight.path, reward=share_of_e, config=straight.tree) == straight.result.after


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(straight: SimpleNamespace, tmp_path: Path) -> None:
    half = config(tmp_path / "run", straight.algorithm, grpo={"max_steps": 4})
    grpo(half, reward=share_of_e)
    half["grpo"]["max_steps"] = STEPS
    path = grpo(half, reward=share_of_e, resume=True).path
    told = [[{k: v for k, v in row.items() if k not in CLOCKS} for row in rows(p)] for p in (path, straight.path)]
    assert told[0] == told[1]
    saved = [load_file(p / f"checkpoints/generation_{STEPS:04d}/model.safetensors") for p in (path, straight.path)]
    assert saved[0].keys() == saved[1].keys() and all(torch.equal(saved[0][n], saved[1][n]) for n in saved[0])
    assert not [name for name in saved[0] if "critic" in name]
    if straight.algorithm == "ppo":
        critics = [load_file(file) for file in sorted(straight.path.rglob(ppo.CRITIC))]
        assert critics and all(bool(one["head.weight"].any()) for one in critics)
        assert any(not torch.equal(critics[-1][f"body.{n}"], t) for n, t in straight.start.items()), "all of it trains"


def test_cost_counts_what_is_computed(straight: SimpleNamespace) -> None:
    """PPO also trains a critic; DPO trains on its pairs alone, and its reference reads them."""
    policy: Policy = straight.policy
    shape = policy.shape
    assert shape is not None
    prompt = {text_of(policy.task.prompt(e)): len(policy.lengths[i]) for i, e in enumerate(policy.data.train)}
    found = completions(straight.path, 0)
    row = rows(straight.path)[0]["budget"]
    assert (row["completions"], row["prompts"]) == (32, 4)
    if straight.algorithm == "dpo":
        ranked = settings.pairs([c["score"] for c in found], 8)
        assert ranked
        found = [found[place] for pair in ranked for place in pair]
    lengths = [prompt[c["prompt"]] for c in found], [c["tokens"] for c in found]
    is_ppo = straight.algorithm == "ppo"
    own = budget.grpo_update(shape, *lengths, checkpointing=False, all_logits=is_ppo)
    if not is_ppo:
        assert row["backward_flops"] == own.backward_flops
        return
    critic = replace(shape, head=Matrix("head", 1, shape.head.columns, None))
    second = budget.grpo_update(critic, *lengths, checkpointing=False, all_logits=True)
    assert row["backward_flops"] == (own + second).backward_flops


def test_run_is_named_by_its_algorithm(straight: SimpleNamespace, tmp_path: Path) -> None:
    assert views_of([straight.path])[0].method == straight.algorithm.upper()
    assert settings_of(from_dict(straight.tree), "grpo")["method"] == straight.algorithm
    evoalign.export(straight.path, tmp_path / "export")
    card = (tmp_path / "export/README.md").read_text()
    assert {"ppo": "by PPO (Schulman", "dpo": "by online DPO (Rafailov"}[straight.algorithm] in card
    assert f"- {straight.algorithm}\n" in card and "- grpo\n" not in card


def test_dpo_takes_the_prompts_of_grpo(tmp_path: Path) -> None:
    """In the same steps, in the first and in a second epoch."""
    taken: list[list[list[str]]] = []
    for algorithm in ("dpo", "grpo"):
        own = {"algorithm": algorithm, "max_steps": 4, "trl": {"lr_scheduler_type": "constant"}}
        tree = config(tmp_path / algorithm, "dpo", checkpoint={"every": 0})
        tree["grpo"] = {**{k: v for k, v in tree["grpo"].items() if k != "lr_scheduler_type"}, **own}
        path = grpo(tree, reward=share_of_e).path
        taken.append([sorted(c["prompt"] for c in completions(path, step)) for step in range(4)])
    assert taken[0] == taken[1] and taken[0][0] != taken[0][1]


def test_advantages_are_those_of_the_definition() -> None:
    """Each is the sum of the later temporal differences, weighted by powers of lambda, before the whitening."""
    from evoalign.baselines.ppo import LAMBDA, advantages_of

    random, lengths = np.random.default_rng(0), [5, 1, 3, 0]
    values, scores = random.normal(size=(4, 5)), random.normal(size=4)
    mask = np.array([[t < n for t in range(5)] for n in lengths], dtype=np.float64)
    expected = np.zeros((4, 5))
    for b, n in enumerate(lengths):
        ahead = [values[b, t + 1] if t + 1 < n else scores[b] for t in range(n)]
        deltas = [ahead[t] - values[b, t] for t in range(n)]
        for t in range(n):
            expected[b, t] = sum(LAMBDA ** (k - t) * deltas[k] for k in range(t, n))
    found, targets = advantages_of(*map(torch.tensor, (values, scores, mask)))
    assert np.allclose(targets, expected + values * mask)
    kept = expected[mask > 0]
    assert np.allclose(found.numpy()[mask > 0], (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8))
    assert (found.numpy()[mask == 0] == 0).all()


def test_pairs_are_the_first_best_and_the_first_worst() -> None:
    assert settings.pairs([0, 2, 2, 1, 1, 1, 1, 1, 3, 0, 3, 0], 4) == [(1, 0), (8, 9)]


def test_a_step_without_pairs_moves_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum of the first step does not move them either."""
    from evoalign.baselines import dpo

    steps: list[int] = []

    def first_alone(*arguments: Any) -> list[tuple[int, int]]:
        steps.append(len(steps))
        return settings.pairs(*arguments) if len(steps) == 1 else []

    monkeypatch.setattr(dpo, "pairs", first_alone)
    grpo(config(tmp_path / "run", "dpo", checkpoint={"every": 1}, grpo={"max_steps": 2}), reward=share_of_e)
    first, second = (load_file(tmp_path / f"run/checkpoints/generation_{n:04d}/model.safetensors") for n in (1, 2))
    base = dict(load_model(from_dict(config(tmp_path / "none", "dpo")).model, torch.float32).named_parameters())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], base[name]) for name in first)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"algorithm": "rloo"}, "grpo.algorithm"),
        ({"algorithm": "ppo", "rollouts": "es"}, "rollouts es is for grpo.algorithm grpo, not ppo"),
        ({"algorithm": "dpo", "beta": 0.1}, "set grpo.rollouts engine"),
        ({"algorithm": "dpo", "trl": {"loss_type": "grpo"}}, "engine, not trl; grpo.beta 0 .*; .* loss is sigmoid"),
        ({"algorithm": "dpo", "rollouts": "es", "beta": 0.1}, "set grpo.rollouts engine, not es"),
        ({"algorithm": "dpo", "rollouts": "engine"}, "grpo.beta 0 leaves DPO without a loss"),
        ({"algorithm": "dpo", "rollouts": "engine", "beta": 0.1, "num_iterations": 2}, "once on each pair"),
        ({"algorithm": "dpo", "rollouts": "engine", "beta": 0.1, "steps_per_generation": 2}, "once on each pair"),
        (
            {"algorithm": "dpo", "rollouts": "engine", "beta": 0.1, "per_device_train_batch_size": 4,
             "gradient_accumulation_steps": 2},
            "per_device_train_batch_size 4 is not a multiple of grpo.num_generations 8",
        ),
        ({"algorithm": "dpo", "rollouts": "engine", "beta": 0.1, "trl": {"loss_type": "grpo"}}, "loss is sigmoid"),
    ],
)  # fmt: skip
def test_config_refuses_what_an_algorithm_cannot_do(own: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict({"grpo": own})


def test_dpo_refuses_fields_of_grpo_alone() -> None:
    from evoalign.baselines.dpo import DPOConfig

    own = {"algorithm": "dpo", "rollouts": "engine", "beta": 0.1, "per_device_train_batch_size": 16}
    known = settings.fields_of(DPOConfig)
    found = settings.arguments(from_dict({"grpo": own}), Path("run"), on_cpu=True, known=known)
    assert (found["per_device_train_batch_size"], found["beta"], found["max_length"]) == (2, 0.1, None)
    with pytest.raises(ConfigError, match=r"grpo\.trl\.epsilon: TRL's DPOConfig has no such field"):
        settings.arguments(from_dict({"grpo": {**own, "trl": {"epsilon": 0.1}}}), Path("run"), on_cpu=True, known=known)


def test_episodes_are_left_to_grpo() -> None:
    own = from_dict({"grpo": {"algorithm": "ppo"}})
    task: Any = SimpleNamespace(player=object(), name="guess")
    with pytest.raises(ConfigError, match="ppo cannot train task guess, which has several turns; set grpo"):
        settings.check_turns(own, task)


@pytest.mark.parametrize("algorithm", ["ppo", "dpo"])
def test_dry_run_names_the_algorithm(algorithm: str, tmp_path: Path) -> None:
    from evoalign.baselines.planning import dry_run

    own = {"name": "conciseness", "train_data": "data/tasks/conciseness/questions_train.json"}
    told = "\n".join(dry_run({**config(tmp_path / "run", algorithm), "task": own}))
    assert ("critic" in told, "PPO is experimental" in told) == (algorithm == "ppo",) * 2
    assert ("DPO on the best and worst" in told) == (algorithm == "dpo")
    assert "would be refused" not in told
