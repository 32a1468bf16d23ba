# SPDX-License-Identifier: Apache-2.0
"""`BaseModel.distance`: rounding is within the tolerance, and noise on the weights is not."""

import json
import math
import shutil
from contextlib import nullcontext

import pytest
import torch
from families import build
from quantised_models import quantise

from evoalign import tokens
from evoalign.config import from_dict
from evoalign.engines.base import Completion
from evoalign.engines.server.base_model import PROBE_TOKENS, PROBES, TOLERANCE, load_base
from evoalign.engines.specs import specs_of_config
from evoalign.engines.transformers.engine import load_model
from evoalign.errors import ConfigError, ModelError
from evoalign.models import tiny
from evoalign.models.files import load_whole
from evoalign.models.quantised import files_hash

CONFIG = from_dict({"model": {"name": "tiny"}})
DTYPES = list(TOLERANCE)


def greedy(model, prompt):
    """Return the completion of a server that serves a model."""
    ids, logprobs = list(prompt), []
    for _ in range(PROBE_TOKENS):
        with torch.no_grad():
            row = model(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return Completion(tuple(ids[len(prompt) :]), "length", tuple(logprobs))


def mean_distance(base, model):
    """Return the mean over all prompts."""
    prompts = [tokens.load(CONFIG.model).encode(prompt) for prompt in PROBES]
    return sum(base.distance(prompt, greedy(model, prompt)) for prompt in prompts) / len(prompts)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def base(request):
    return load_base(CONFIG, request.param, dummy=False)


def test_distance_accepts_another_attention_and_not_noise_on_the_weights(base):
    """The noise is 6 % of each matrix's mean weight."""
    from transformers import AutoModelForCausalLM

    dtype = base.model.dtype
    eager = AutoModelForCausalLM.from_pretrained(tiny(), dtype=dtype, attn_implementation="eager").eval()
    assert base.model.config._attn_implementation != "eager"
    assert 2 * mean_distance(base, eager) <= TOLERANCE[dtype]
    for seed in (1, 2):
        moved = load_model(CONFIG.model, dtype)
        generator = torch.Generator().manual_seed(seed)
        for parameter in moved.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator) * parameter.float().abs().mean()
                parameter.data.add_((0.06 * noise).to(dtype))
        assert mean_distance(base, moved) > TOLERANCE[dtype]


def test_distance_is_infinite_for_completions_the_model_cannot_generate(base):
    prompt, size = (5, 6), base.model.config.vocab_size
    assert base.distance(prompt, Completion((), "stop", ())) == math.inf
    assert base.distance(prompt, Completion((7, size), "length", (-0.5, -0.5))) == math.inf
    assert math.isfinite(base.distance(prompt, Completion((7, size - 1), "length", (-0.5, -0.5))))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "packed"
    quantise("pack-quantized, 4 bits", tiny(), folder)
    return folder


def config_of(folder, space="lora", name="sglang", engine=None, **es):
    own = {"name": name, **(engine or {})}
    return from_dict({"model": {"name": str(folder)}, "engine": own, "space": space, "es": es or {"sigma": 0.1}})


def test_a_quantised_base_is_read_as_numbers_only_to_compare_a_running_server(quantised):
    config, dtype = config_of(quantised), torch.bfloat16
    alone, compared = (load_base(config, dtype, dummy=False, compared=compared) for compared in (False, True))
    assert alone.hash == compared.hash == files_hash(str(quantised), None, "")
    assert alone.parameters == compared.parameters == {} and alone.model is None
    assert alone.specs == compared.specs == load_base(CONFIG, dtype, dummy=True).specs
    dense = load_whole(str(quantised), None, dtype, "packed")
    assert 2 * mean_distance(compared, dense) <= TOLERANCE[dtype]
    assert mean_distance(compared, load_model(CONFIG.model, dtype)) > TOLERANCE[dtype]


def test_servers_refuse_forms_and_settings_that_they_do_not_serve_on_a_quantised_base(quantised, tmp_path):
    for config, message in (
        (config_of(quantised, "lowrank"), "space lowrank: .* is quantised"),
        (config_of(quantised, noise_multiplier=0.1), "es.noise_multiplier: .* is quantised"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_base(config, torch.bfloat16, dummy=False)
    folders = {form: tmp_path / form for form in ("fp8, tensor", "bitsandbytes, 8 bits")}
    for form, folder in folders.items():
        quantise(form, tiny(), folder)
    for name in ("sglang", "vllm-server"):
        for folder in (quantised, folders["fp8, tensor"]):
            assert load_base(config_of(folder, name=name), torch.bfloat16, dummy=False, compared=False).hash
        with pytest.raises(ConfigError, match=rf"engine {name} does not serve .* in float32; set model.dtype bfloat16"):
            load_base(config_of(quantised, name=name), torch.float32, dummy=False)
        with pytest.raises(ModelError, match=rf"\(bitsandbytes, 8 bits\), which engine {name} does not serve"):
            specs_of_config(config_of(folders["bitsandbytes, 8 bits"], name=name))
        with pytest.raises(ConfigError, match="in float32"):  # a dry run, too
            specs_of_config(config_of(quantised, name=name, engine={"device": "cpu"}))
        tree = config_of(quantised, name="ray", engine={"replica": {"name": name}}).model_dump(mode="json")
        tree["model"]["dtype"] = "float32"
        with pytest.raises(ConfigError, match="in float32"):
            specs_of_config(from_dict(tree))


def test_sglang_refuses_mxfp4(quantised, tmp_path):
    shutil.copytree(quantised, tmp_path / "model")
    text = (quantised / "config.json").read_text().replace("pack-quantized", "mxfp4-pack-quantized")
    (tmp_path / "model/config.json").write_text(text)
    specs_of_config(config_of(tmp_path / "model", name="vllm-server"))
    with pytest.raises(ModelError, match="engine sglang does not serve; use engine vllm or vllm-server"):
        specs_of_config(config_of(tmp_path / "model"))


@pytest.mark.parametrize("name", ["sglang", "vllm-server"])
def test_a_running_server_is_refused_where_activations_are_rounded(name, tmp_path):
    at = {"url": "http://127.0.0.1:9", "device": "cuda"}
    token = {"num_bits": 8, "type": "int", "dynamic": True}
    for form, acts, refused in (
        ("pack-quantized, 4 bits", None, False),
        ("float-quantized, channel", None, False),
        ("pack-quantized, 4 bits", token, True),
        ("fp8, tensor", None, True),
        ("awq", None, False),
    ):
        folder = tmp_path / f"{form}, {acts is not None}"
        quantise(form, tiny(), folder)
        if acts:
            tree = json.loads((folder / "config.json").read_text())
            tree["quantization_config"]["config_groups"]["group_0"]["input_activations"] = acts
            (folder / "config.json").write_text(json.dumps(tree))
        with pytest.raises(ConfigError, match=r"^engine\.url: ") if refused else nullcontext():
            specs_of_config(config_of(folder, name=name, engine=at))
        specs_of_config(config_of(folder, name=name))


def kinds_of(family, folder, **tree):
    model = folder / family
    made = from_dict({"model": {"name": str(model if model.exists() else build(family, model))}, **tree})
    return {spec.name.removeprefix("model.layers.1."): spec.kind for spec in specs_of_config(made)}


@pytest.mark.parametrize("name", ["vllm-server", "sglang"])
def test_matrices_that_get_no_adapter_on_a_server_do_not_evolve(name, tmp_path):
    kinds = kinds_of("qwen2_moe", tmp_path, engine=name)
    assert kinds["mlp.shared_expert.gate_proj.weight"] == "linear"
    assert {kinds[f"mlp.{part}.weight"] for part in ("shared_expert_gate", "experts.0.up_proj")} == {"other"}


@pytest.mark.parametrize("name", ["vllm-server", "sglang", "vllm", "transformers"])
def test_latent_attention_decodes_with_a_copy_of_one_weight_on_servers_and_vllm(name, tmp_path):
    kinds = kinds_of("deepseek_v3", tmp_path, engine=name)
    assert kinds["self_attn.kv_b_proj.weight"] == ("linear" if name == "transformers" else "other")
    assert kinds["self_attn.o_proj.weight"] == "linear"


def test_experts_evolve_on_vllm_in_adapters_of_the_stock_form_alone(tmp_path):
    expert = "mlp.experts.0.up_proj.weight"
    stock = {"name": "vllm", "population": "stock"}
    replicas = {"name": "ray", "replica": stock}
    assert kinds_of("qwen3_moe", tmp_path, engine=stock)[expert] == "expert"
    assert kinds_of("qwen3_moe", tmp_path, engine=replicas)[expert] == "expert"
    assert kinds_of("qwen3_moe", tmp_path, engine="vllm")[expert] == "other"
    assert kinds_of("qwen3_moe", tmp_path, engine=stock, space="lowrank")[expert] == "other"
    with pytest.raises(ConfigError, match=r"es\.noise_multiplier"):
        kinds_of("qwen3_moe", tmp_path, engine=stock, es={"noise_multiplier": 0.1, "sigma": None})
