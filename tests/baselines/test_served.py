# SPDX-License-Identifier: Apache-2.0
"""The copy of the policy that completes for GRPO with the static decoder."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_runs import completions
from test_grpo import config, run

from evoalign import tokens
from evoalign.baselines.planning import dry_run
from evoalign.baselines.policy import EngineRollouts, Policy
from evoalign.baselines.served import engine_of, served
from evoalign.config import from_dict
from evoalign.engines.transformers.blocks import Blocks
from evoalign.engines.transformers.engine import TransformersEngine, load_model
from evoalign.errors import ConfigError, ModelError, NotFiniteError
from evoalign.rundir.directory import RunDir
from evoalign.setup import task_and_data

pytest.importorskip("trl")


def settings(output: Path, **engine: Any) -> Any:
    return from_dict(config(output, engine={"name": "transformers", **engine}))


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_refresh_gives_the_copy_the_logits_of_the_policy(tune: str, tmp_path: Path) -> None:
    own = settings(tmp_path / "run", decoder="static")
    model = load_model(own.model, torch.float32)
    if tune == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    copy = served(own, tokens.load(own.model), model)
    assert copy is not None
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        assert not torch.allclose(copy.engine.model(ids).logits, wanted, atol=0.1)
        copy.refresh()
        assert torch.allclose(copy.engine.model(ids).logits, wanted, atol=1e-4)


def test_refresh_refuses_weights_that_are_not_finite(tmp_path: Path) -> None:
    own = settings(tmp_path / "run", decoder="static")
    model = load_model(own.model, torch.float32)
    copy = served(own, tokens.load(own.model), model)
    assert copy is not None
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(NotFiniteError, match=r"layers\.1\.mlp\.up_proj.*learning_rate"):
        copy.refresh()


def test_copy_keeps_a_small_adapter_in_mixed_precision(tmp_path: Path) -> None:
    """A step of 1e-5 is below half the distance of two bfloat16 numbers at most weights."""
    from peft import LoraConfig, get_peft_model

    tree = config(tmp_path / "run", engine={"name": "transformers", "decoder": "static"})
    own = from_dict(tree | {"grpo": {**tree["grpo"], "tune": "lora", "trl": {"bf16": True}}})
    model = load_model(own.model, torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model: Any = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.lora_B["default"].weight.data.fill_(1e-5)
    copy = served(own, tokens.load(own.model), model)
    assert copy is not None
    copy.refresh()
    moved = copy.engine.model.model.layers[0].self_attn.q_proj.weight.float() - layer.base_layer.weight
    wanted = layer.get_delta_weight("default")
    assert (moved - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("mixed", [True, False])
def test_mixed_precision_evaluates_and_saves_what_it_trains_with(mixed: bool, tmp_path: Path) -> None:
    """A step of 1e-7 does not show in weights rounded to bfloat16, but is kept for the next one."""
    tree = config(tmp_path / "run", engine={"name": "transformers", "decoder": "static"})
    own = from_dict(tree | {"grpo": {**tree["grpo"], "trl": {"bf16": mixed}}})
    model = load_model(own.model, torch.float32)
    grid = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float() + (parameter.abs() > 1e-3) * 1e-7
    kept = [parameter.data.clone() for parameter in model.parameters()]
    task, data = task_and_data(own, None, None)
    policy = Policy(own, tokens.load(own.model), task, data, model)
    policy.evaluate()
    evaluator = policy._evaluator
    assert evaluator is not None
    used = [p.data for p in evaluator.engine.model.parameters()]
    folder = policy.save(RunDir(tmp_path / "run"), 1, None, lambda: None)
    saved = load_model(own.model.model_copy(update={"name": str(folder)}), torch.float32)
    wanted = [data.bfloat16().float() if mixed else data for data in kept]
    for found in (used, [p.data for p in saved.parameters()]):
        assert all(map(torch.equal, found, wanted))
    with policy._as_served():  # as for the KL, and for evaluations without a copy
        assert all(map(torch.equal, [p.data for p in model.parameters()], wanted))
    assert all(map(torch.equal, [p.data for p in model.parameters()], kept))
    change = [(data - base).square().sum() for data, base in zip(wanted, grid, strict=True)]
    assert policy.distance().l2 == pytest.approx(float(torch.stack(change).sum().sqrt()), rel=1e-3)
    policy.close()


def test_adapter_of_a_tied_head_is_left_to_the_policy(tmp_path: Path) -> None:
    """The copy has one weight for the head and the embedding, and only the head has an adapter."""
    from peft import LoraConfig, get_peft_model

    own = settings(tmp_path / "run", decoder="static")
    model = load_model(own.model, torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match=r"lm_head.*tied"):
        served(own, tokens.load(own.model), model)


def test_close_frees_the_copy_and_restores_the_threads(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    own = settings(tmp_path / "run", decoder="static", threads=threads + 1)
    own_tokens = tokens.load(own.model)
    task, data = task_and_data(own, None, None)
    policy = Policy(own, own_tokens, task, data, load_model(own.model, torch.float32))
    assert isinstance(policy.source, EngineRollouts) and policy.source.copy is not None
    weight = weakref.ref(next(policy.source.copy.engine.model.parameters()))
    policy.close()
    gc.collect()
    assert weight() is None
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("rollouts", "mixed"), [("engine", False), ("es", True)])
def test_evaluation_by_the_copy_is_that_of_the_policy(
    rollouts: str, mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mixed precision the copy for completions is bfloat16, and evaluations come from another one."""
    found, used = dict[str, Any](), list[tuple[bool, torch.dtype]]()
    of_engine = TransformersEngine.rollout

    def seen(self: TransformersEngine, *arguments: Any) -> Any:
        used.append((self.is_static, self.dtype))
        return of_engine(self, *arguments)

    monkeypatch.setattr(TransformersEngine, "rollout", seen)
    for decoder in ("library", "static"):
        engine = {"name": "transformers", "decoder": decoder}
        tree = config(tmp_path / decoder, engine=engine, space="lowrank", checks={"kl_tokens": 200})
        own = from_dict(
            tree | {"grpo": {**tree["grpo"], "rollouts": rollouts, "trl": {"bf16": mixed}}, "es": {"sigma": 0.05}}
        )
        torch.manual_seed(0)
        model = load_model(own.model, torch.float32)
        task, data = task_and_data(own, None, None)
        policy = Policy(own, tokens.load(own.model), task, data, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        used.clear()
        found[decoder] = [c.text for c in policy.evaluate()[0].completions], policy.divergence().exact
        assert {*used} == {(decoder == "static", torch.float32)}
        policy.close()
    assert found["static"][0] == found["library"][0]
    assert found["static"][1] == pytest.approx(found["library"][1], rel=1e-3)


def test_evaluations_between_two_steps_share_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = config(tmp_path / "run", engine={"name": "transformers", "decoder": "static"})
    own = from_dict(tree | {"grpo": {**tree["grpo"], "trl": {"bf16": True}}})
    task, data = task_and_data(own, None, None)
    policy = Policy(own, tokens.load(own.model), task, data, load_model(own.model, torch.float32))
    made: list[str] = []

    def loaded(model: Any, dtype: torch.dtype) -> Any:
        made.append(str(dtype))
        return load_model(model, dtype)

    monkeypatch.setattr("evoalign.engines.transformers.engine.load_model", loaded)
    for _ in range(2):
        policy.evaluate()
        policy.evaluate("validation")
        policy.before_step()
    policy.close()
    assert made == ["torch.float32"] * 2


def test_copy_that_computes_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = settings(tmp_path / "run", decoder="static")
    task, data = task_and_data(own, None, None)
    policy = Policy(own, tokens.load(own.model), task, data, load_model(own.model, torch.float32))
    policy.check_mean()
    own_step = Blocks.step
    monkeypatch.setattr(Blocks, "step", lambda *given, **named: own_step(*given, **named).roll(1, -1))
    with pytest.raises(ModelError):
        policy.check_mean()


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", ["engine", "es"])
def test_completions_of_the_copy_follow_the_training(rollouts: str, tmp_path: Path) -> None:
    """A copy that kept the first weights would complete otherwise from step 1 on."""
    more: dict[str, Any] = {"es": {"sigma": 0.05}, "space": "lowrank"} if rollouts == "es" else {}
    grpo = {"rollouts": rollouts, "max_steps": 3, "learning_rate": 1e-2}
    for decoder in ("library", "static"):
        run(tmp_path / decoder, grpo=grpo, engine={"name": "transformers", "decoder": decoder}, **more)
    texts = [[[c["text"] for c in completions(tmp_path / d, step)] for step in range(3)] for d in ("library", "static")]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][2]


def test_copy_is_made_in_mixed_precision_on_a_gpu_or_on_request(tmp_path: Path) -> None:
    made = {
        (decoder, on_cpu)
        for decoder in ("auto", "static", "library")
        for on_cpu in (True, False)
        if engine_of(settings(tmp_path, decoder=decoder), on_cpu=on_cpu) is not None
    }
    assert made == {("auto", False), ("static", True), ("static", False)}
    assert engine_of(from_dict(config(tmp_path, model={"dtype": "bfloat16"})), on_cpu=False) is None
    server = from_dict(config(tmp_path, engine="vllm"))
    found = [engine_of(server, on_cpu=on_cpu) for on_cpu in (False, True)]
    assert [engine is None or engine.name for engine in found] == ["transformers", True]


def test_static_is_refused_for_an_unsupported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evoalign.engines.transformers.engine.obstacle", lambda _: "its head is of another kind")
    own = settings(tmp_path, decoder="static")
    with pytest.raises(ConfigError, match=r"engine\.decoder"):
        served(own, tokens.load(own.model), load_model(own.model, torch.float32))


def test_dry_run_counts_the_copy(tmp_path: Path) -> None:
    lines = [
        "\n".join(dry_run(config(tmp_path / "run", engine={"name": "transformers", "decoder": d})))
        for d in ("static", "library")
    ]
    assert ["copy for completions" in text for text in lines] == [True, False]
    size = re.search(r"float32 weights ([\d.]+ \w+)", lines[0])
    assert size is not None and f"copy for completions {size[1]}" in lines[0]
