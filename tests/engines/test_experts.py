# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: which of their matrices evolve, and that members, updates and files are plain models.

What a member is, is rebuilt from the normals alone, as in test_parity; experts are taken apart by shape, in `unfused`.
"""

import re
from collections import Counter

import pytest
import torch
from families import MIXTURES, PROMPTS, Bench, make_config, requests, unfused
from test_parity import EACH, Rebuilt, plain_logprobs, run, run_space
from transformers import AutoModelForCausalLM

from evoalign import spaces
from evoalign.cost.estimate import share_lines
from evoalign.engines.specs import specs_of_config
from evoalign.engines.transformers import adapters
from evoalign.errors import ConfigError, ModelError
from evoalign.spaces.targets import module_of
from evoalign.testing.answers import written
from evoalign.types import Sampling

EXPERTS = {"qwen3_moe": {"gate_proj", "up_proj", "down_proj"}, "mixtral": {"w1", "w3", "w2"}}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
TOKENS = 8


@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
@pytest.mark.parametrize("family", MIXTURES)
def test_every_matrix_of_every_expert_evolves(family, space, folders):
    """There are 4 experts in 2 layers. The router evolves only in space full. The dry run has the same tensors."""
    config = make_config(folders[family], space)
    with Bench(config) as bench:
        modules = Counter(module_of(t.module) for t in bench.layout.tensors if "norm" not in t.module)
        model = unfused(bench.model)
        shapes = {t.module: tuple(model[t.module].shape) for t in bench.layout.tensors}
        factors = (*bench.layout.tensors, *bench.layout.frozen)
        planned = bench.space.layout(specs_of_config(config), bench.engine.dtype)
        shares = share_lines(config, bench.engine.specs(), bench.layout)
    matrices = dict.fromkeys(ATTENTION, 2) | dict.fromkeys(EXPERTS[family], 8)
    others = {"embed_tokens": 1, "lm_head": 1, "gate": 2} if space == "full" else {}
    assert modules == matrices | others
    assert [(t.name, t.shape) for t in planned.tensors] == [(t.name, t.shape) for t in bench.layout.tensors]
    for tensor in factors if space == "lora" else ():
        out, in_ = shapes[tensor.module]
        assert tensor.shape == ((1, in_) if "lora_A" in tensor.name else (out, 1))
    for tensor in bench.layout.tensors if space != "lora" else ():
        assert tensor.shape == shapes[tensor.name]
    reached = sum(model[name].numel() for name in shapes)
    share = 100 * reached / sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folders[family]).parameters())
    assert len(shares) == 1
    assert shares[0].startswith(f"{'adapters reach' if space == 'lora' else 'evolves'} {share:.3g} % of the weights: ")
    assert ("; not: embed_tokens, gate, lm_head" in shares[0]) == (space != "full")


@pytest.mark.parametrize(
    ("space", "modules"),
    [("lowrank", {"q_proj", "v_proj"}), ("lowrank", {"up_proj"}), ("lora", {"gate_proj", "up_proj"})],
)
def test_target_modules_may_exclude_experts_or_select_one_matrix(space, modules, folders):
    config = make_config(folders["qwen3_moe"], space, **{space: {"target_modules": sorted(modules)}})
    with Bench(config) as bench:
        assert {module_of(t.module) for t in bench.layout.tensors} == modules
    if modules == {"up_proj"}:
        run(config, PROMPTS["apart"])


def test_target_modules_select_fused_matrices_together(folders):
    with pytest.raises(ConfigError, match=r"gate_proj and up_proj fused.*add up_proj, or use space lowrank"):
        Bench(make_config(folders["qwen3_moe"], lora={"target_modules": ["q_proj", "gate_proj"]}))


@pytest.mark.parametrize(
    ("family", "space", "engine", "told"),
    [
        ("qwen3_moe", "lora", "sglang", r"experts, 14.6 % .*: engine sglang .*; use engine transformers"),
        ("qwen3_moe", "lora", "vllm-server", r"experts, 14.6 % .*: engine vllm-server .*; use engine trans.*"),
        ("qwen3_moe", "lora", "vllm", r"experts, .*: engine vllm .*; set engine.population stock, or .*transformers"),
        ("qwen3_moe", "lowrank", "vllm", r"experts, .*: engine vllm moves none; use engine transformers"),
        ("qwen2_moe", "lora", "transformers", r"experts, .*: PEFT has no adapter for them; use space lowrank"),
        ("qwen2_moe", "lowrank", "transformers", None),
        ("glm4_moe", "lora", "transformers", r"gate_proj, up_proj, down_proj outside the experts, .*use space lowrank"),
        ("glm4_moe", "lowrank", "transformers", None),
        ("gpt_oss", "lora", "transformers", r"experts, .*: the model fuses them .*; use space full"),
        ("gpt_oss", "full", "transformers", None),
    ],
)
def test_left_out_names_tensors_with_the_reason(family, space, engine, told, folders):
    """Only those tensors are left out."""
    config = make_config(folders[family], space, engine={"name": engine})
    specs = specs_of_config(config)
    layout = spaces.create(config).layout(specs, torch.float32)
    line, *warnings = share_lines(config, specs, layout)
    assert [bool(re.match(f"warning: (the )?{told}$", w)) for w in warnings] == [True] * (told is not None), warnings
    assert ("experts." in line.partition("; not:")[0]) == (told is None or "outside" in told) or family == "gpt_oss"


def test_vllm_refuses_dense_members_of_a_mixture_before_it_starts(folders):
    """It must not load the model first."""
    config = make_config(folders["mixtral"], "full", engine={"name": "vllm"})
    with pytest.raises(ModelError, match=r"\(mixtral\) is a mixture of experts, .* vllm .* engine transformers"):
        specs_of_config(config)


@pytest.mark.parametrize("space", ["lora", "lowrank"])
def test_vllm_leaves_the_experts_out(space, folders):
    config = make_config(folders["mixtral"], space, engine={"name": "vllm"})
    modules = spaces.create(config).layout(specs_of_config(config), torch.bfloat16).modules
    assert modules and all(".self_attn." in module for module in modules)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.first("mixtral-lora ab", "qwen3_moe-lowrank")
def test_members_of_a_mixture_equal_plain_models(family, name, folders):
    """With a shared prefix, padding and rows that leave at stop tokens; also the mean after an update."""
    run_space(folders[family], name)


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_noise_multiplier_scales_by_experts_and_projections(family, folders):
    config = make_config(folders[family], "lowrank", es={"noise_multiplier": 0.3, "learning_rate": 0.3})
    run(config, PROMPTS["apart"])


@pytest.mark.parametrize("space", ["lora", "lowrank"])
def test_log_probabilities_of_a_mixture_equal_the_plain_model_in_any_batch(space, folders, monkeypatch):
    """Also with few rows per batch and few factors gathered at a time."""
    config, few = (
        make_config(folders["qwen3_moe"], space, es={"population_size": 5}, engine=engine)
        for engine in ({}, {"max_rows": 4})
    )
    asked = requests(PROMPTS["apart"], Sampling(TOKENS), logprobs=True)
    with Bench(config) as bench, Bench(few) as other:
        rebuilt, plan = Rebuilt(bench, bench.move()), bench.plan()
        other.move()
        whole = bench.ask(plan, asked)
        monkeypatch.setattr(adapters, "ROOM", 100)
        cut = other.ask(plan, asked)
    for member in plan.members:
        model = rebuilt.become(member, plan.generation)
        for p, prompt in enumerate(PROMPTS["apart"]):
            for got in (whole[member.index, p], cut[member.index, p]):
                want = plain_logprobs(model, prompt, got.token_ids)
                assert torch.allclose(torch.tensor(got.logprobs), want, atol=1e-4)


def test_bfloat16_members_of_a_mixture_equal_their_weights_up_to_rounding(folders):
    """The float32 mean is kept besides the served experts, which are its rounding; members differ."""
    config = make_config(folders["mixtral"], "lowrank", model={"dtype": "bfloat16"}, es={"population_size": 4})
    with Bench(config) as bench:
        bench.move()
        plan, away = bench.plan(), []
        cells = bench.ask(plan, requests(PROMPTS["apart"], Sampling(4), logprobs=True))
        served, mean = unfused(bench.model), dict(bench.engine.state())
        for name in (tensor.name for tensor in bench.layout.tensors):
            assert mean[name].dtype == torch.float32
            assert torch.equal(served[name], mean[name].bfloat16().to(served[name].device)), name
        for member in plan.members:
            # Of one rounding to bfloat16 each, and so within some hundredths of the weights written in.
            model = written(bench, plan, member)
            for p, prompt in enumerate(PROMPTS["apart"]):
                got = cells[member.index, p]
                want = plain_logprobs(model, prompt, got.token_ids)
                away.append(float((torch.tensor(got.logprobs) - want).abs().mean()))
    assert sum(away) / len(away) < 0.1
    assert len({cells[m.index, 0].logprobs for m in plan.members}) == 4
