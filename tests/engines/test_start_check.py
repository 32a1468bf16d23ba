# SPDX-License-Identifier: Apache-2.0
"""The check of the mean at the start: every family is computed correctly or refused, and planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import all_families
import pytest
import torch
from families import build, make_config
from torch.nn import functional

from evoalign import engines, setup, tokens
from evoalign.engines.transformers import TransformersEngine, adapters
from evoalign.engines.transformers.settings import Footprint
from evoalign.errors import DataError, EvoalignError, ModelError
from evoalign.types import MEAN_PLAN, Request, Sampling

RIGHT = (  # noqa: SIM905
    "apertus arcee biogpt bitnet bloom codegen cohere cohere2 ctrl dbrx deepseek_v2 deepseek_v3 diffllama doge "
    "dots1 ernie4_5 ernie4_5_moe exaone4 falcon flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm "
    "glm4 glm4_moe gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe helium hunyuan_v1_dense hunyuan_v1_moe "
    "hyperclovax internlm3 jais2 jetmoe llama llama4_text longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 "
    "ministral mistral mixtral modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi "
    "phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 vaultgemma xglm youtu "
    "hrm_text"
).split()
DIFFERENT = (  # noqa: SIM905
    "bitnet bloom codegen cohere2 ctrl dbrx deepseek_v3 diffllama exaone4 falcon gemma2 gemma3n_text gemma4_text glm4 "
    "gpt_bigcode gpt_neox gpt_oss gptj granitemoe hunyuan_v1_moe jetmoe llama llama4_text longcat_flash minicpm3 "
    "mistral mixtral mpt nemotron olmo2 opt phi3 qwen2 qwen2_moe qwen3 stablelm starcoder2 xglm"
).split()
"""Families of `RIGHT` that CI starts; the others are in `make test-long`."""
REFUSED = (  # noqa: SIM905
    "bamba falcon_h1 zamba2 recurrent_gemma nemotron_h mamba2 lfm2_moe blt reformer bart bert cpmant marian mbart "
    "pegasus roberta xlm xlnet"
).split()


def start(folder: Path, space: str = "lora", damage: Callable[[Any], object] | None = None, **tree: Any) -> Any:
    """Start an engine as a run does, with a model that `damage` changes; returns it."""
    config = make_config(folder, space, **tree)
    engine = engines.create(config, tokens.load(config.model))
    assert isinstance(engine, TransformersEngine)
    if damage is not None:
        damage(engine.model)
    setup.start(config, engine)
    return engine


@pytest.mark.slow
@pytest.mark.first(*(f"[{kind}-float32" for kind in DIFFERENT))
@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(d, marks=pytest.mark.long) for d in ("bfloat16", "float16"))]
)
@pytest.mark.parametrize("kind", RIGHT)
def test_start_accepts_families_that_are_computed_correctly(kind, dtype, tmp_path):
    start(all_families.build(kind, tmp_path), model={"dtype": dtype}).close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_start_refuses_families_that_are_computed_wrongly(kind, tmp_path):
    with pytest.raises(ModelError) as refused:
        start(all_families.build(kind, tmp_path))
    assert "\n" not in str(refused.value) and kind in str(refused.value)


@pytest.mark.parametrize("kind", ["openai-gpt", "bart"])
def test_start_refuses_models_without_cache_or_positions(kind, tmp_path):
    with pytest.raises(ModelError, match=kind):
        start(all_families.build(kind, tmp_path), "full")


def bypassed(model: Any) -> None:
    """Use a matrix of each layer without calling its module."""
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda x, m=mlp: m.down_proj(m.act_fn(functional.linear(x, m.gate_proj.weight)) * m.up_proj(x))


def unused(model: Any) -> None:
    """Leave a matrix of each layer out."""
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda x, m=mlp: m.down_proj(m.up_proj(x))


def not_a_number(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = torch.nan


def overflowing(model: Any) -> None:
    model.lm_head.weight.data *= 1e38


def without_mask(model: Any) -> None:
    own = model.forward
    model.forward = lambda *args, attention_mask=None, **kwargs: own(*args, **kwargs)


def without_cache(model: Any) -> None:
    own = model.forward
    model.forward = lambda *args, past_key_values=None, **kwargs: own(*args, **kwargs)


FAULTS = {
    "bypassed": (bypassed, "gate_proj.*lora.target_modules: .down_proj, k_proj, o_proj, q_proj, up_proj"),
    "unused": (unused, "gate_proj.*lora.target_modules"),
    "not a number": (not_a_number, "model.layers.1.mlp.up_proj.weight"),
    "overflowing": (overflowing, "float32.*model.dtype"),
    "without mask": (without_mask, "left-padded"),
    "without cache": (without_cache, "cache"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return build("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("fault", FAULTS)
def test_start_finds_planted_faults(fault, llama):
    damage, words = FAULTS[fault]
    with pytest.raises(ModelError, match=words) as refused:
        start(llama, damage=damage, engine={"decoder": "library"})
    assert "es.sigma" not in str(refused.value)


@pytest.mark.parametrize("decoder", ["static", "library"])
def test_start_accepts_a_model_and_leaves_no_hooks(decoder, llama):
    engine = start(llama, engine={"decoder": decoder})
    hooks = [hook for module in engine.model.modules() for hook in module._forward_hooks.values()]
    assert all(isinstance(hook, adapters._Layer) for hook in hooks)
    engine.close()


def test_longcat_routers_are_no_targets(tmp_path):
    engine = start(all_families.build("longcat_flash", tmp_path))
    assert not [t.module for t in engine.mean.layout.tensors if "classifier" in t.module]
    engine.close()


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def test_longrope_is_refused_above_its_original_length(tmp_path):
    rope = LONGROPE | {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    folder = all_families.build("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=64)
    engine = start(folder)
    short, sampling = tuple(range(20, 40)), Sampling(8)
    assert len(list(engine.rollout(MEAN_PLAN, [Request(0, short, sampling)]))) == 1
    for length in (57, 100):
        with pytest.raises(DataError, match=r"64 positions.*max_tokens"):
            list(engine.rollout(MEAN_PLAN, [Request(0, short, sampling), Request(1, (30,) * length, sampling)]))
    engine.close()


def test_dynamic_rope_is_refused_above_its_positions(tmp_path):
    folder = all_families.build("llama", tmp_path, rope_parameters={
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, max_position_embeddings=64)  # fmt: skip
    engine = start(folder)
    with pytest.raises(EvoalignError, match="64 positions"):
        list(engine.rollout(MEAN_PLAN, [Request(0, (30,) * 60, Sampling(8))]))
    engine.close()


@pytest.mark.parametrize(("kind", "numbers"), {
    "llama": 4 * 2 * 2 * 16,
    "gemma4_text": 2 * 2 * 2 * 16 + 2 * 2 * 2 * 32,
}.items())  # fmt: skip
def test_footprint_counts_keys_and_values_of_each_layer(kind, numbers, tmp_path):
    engine = start(all_families.build(kind, tmp_path), engine={"decoder": "library"})
    cache = engine.model(input_ids=torch.arange(20, 26)[None], use_cache=True).past_key_values
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) // 6
    assert Footprint.of(engine.model).cache == 4 * numbers == 4 * kept
    engine.close()
