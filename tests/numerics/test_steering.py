# SPDX-License-Identifier: Apache-2.0
"""Steering vectors: where they are added, how they are saved, and who refuses them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from small_runs import UNCHECKED
from transformers import AutoModelForCausalLM

import evoalign
from evoalign import spaces
from evoalign.config import from_dict
from evoalign.cost import estimate
from evoalign.engines.specs import specs_of_config
from evoalign.errors import ConfigError, ModelError
from evoalign.models.origin import model_path
from evoalign.rundir import checkpoint
from evoalign.setup import serve
from evoalign.spaces.lora import Lora
from evoalign.testing.spaces import SPECS
from evoalign.training.resolve import loaded, resolve_run
from evoalign.types import MEAN_PLAN, Plan, Request, Sampling, TensorSpec, Update, population

TREE = {
    "space": "steering", "seed": 3, "model": {"name": "tiny", "dtype": "float32"}, "checks": UNCHECKED,
    "task": {"name": "conciseness"}, "sampling": {"max_tokens": 4}, "evaluation": {"max_tokens": 4},
    "es": {"sigma": 0.3, "learning_rate": 0.3, "num_generations": 2, "population_size": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steering") / "run"
    return evoalign.train(TREE | {"output_dir": str(folder)})


def plain():
    model = AutoModelForCausalLM.from_pretrained(model_path(from_dict(TREE).model), dtype=torch.float32)
    return model.eval()


def test_the_export_gives_in_peft_the_logits_that_were_served(run, tmp_path):
    out = tmp_path / "out"
    evoalign.export(run.path, to=out)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        base = plain()(ids).logits.log_softmax(-1)
        exported = PeftModel.from_pretrained(plain(), str(out)).eval()(ids).logits.log_softmax(-1)
    assert float((exported - base).abs().max()) > 0.01
    config, adapter = resolve_run(Path(run.path), from_dict(TREE), own_engine=True)
    _, _, engine = loaded(config, adapter)
    asked = Request(0, tuple(range(5, 25)), Sampling(1), logprobs=True)
    served = next(iter(engine.rollout(MEAN_PLAN, [asked])))
    engine.close()
    assert served.logprobs[0] == pytest.approx(float(exported[0, -1, served.token_ids[0]]), abs=1e-5)


def test_vectors_are_added_to_the_residual_stream_of_their_layers(run):
    """A hook on the decoder layers that adds the vectors gives the logits of the saved adapter."""
    saved, model, ids = Path(run.saved), plain(), torch.arange(5, 25)[None]
    vectors = checkpoint.load_adapter(saved)
    for i, layer in enumerate(model.model.layers):
        vector = vectors[f"model.layers.{i}.mlp.down_proj.lora_B.bias"]
        layer.register_forward_hook(lambda _m, _i, out, v=vector: out + v)
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(plain(), str(saved)).eval()
        assert torch.allclose(model(ids).logits, adapted(ids).logits, atol=1e-4)


def test_a_merge_is_refused(run, tmp_path):
    with pytest.raises(ModelError, match=r"lora_B.bias, for which the model has no tensor"):
        evoalign.export(run.path, to=tmp_path / "out", merge=True)
    with pytest.raises(ModelError, match=r"adds a bias to model.layers.0.mlp.down_proj, which has none"):
        evoalign.evaluate(run.saved, config=TREE)


@pytest.mark.parametrize("engine", ["vllm", "sglang", {"name": "ray", "replica": {"name": "vllm"}}])
def test_engines_whose_adapters_have_no_bias_refuse(engine):
    with pytest.raises(ConfigError, match=r"adds a bias per member.*set engine.name transformers"):
        spaces.create(from_dict(TREE | {"engine": engine}))
    spaces.create(from_dict(TREE | {"engine": {"name": "ray"}}))


def test_opening_says_what_is_added():
    """Not the share of the matrix whose bias the vector is."""
    for layers, words in ((None, "each of 4 layers"), ([3], "one layer")):
        config = from_dict(TREE | {"lora": {"target_layers": layers}})
        specs = specs_of_config(config)
        layout = spaces.create(config).layout(specs, torch.float32)
        line = f"one vector of 96 in {words}, added to the output of the MLP"
        assert estimate.share_lines(config, specs, layout) == [line]


def test_the_static_decoder_gives_members_and_mean_their_vectors():
    found = []
    for decoder in ("static", "library"):
        served = serve(from_dict(TREE | {"engine": {"decoder": decoder, "device": "cpu"}}))
        engine, asked = served.engine, [Request(0, tuple(range(5, 25)), Sampling(3), logprobs=True)]
        assert engine.is_static == (decoder == "static")
        plan = Plan(0, 0.3, population(4, antithetic=True))
        first = list(engine.rollout(plan, asked))
        engine.apply(Update(0, 0, plan.members, (1.0, -1.0, 0.5, 0.0), 0.3, 0.3))
        found.append([r.logprobs for r in (*first, *engine.rollout(plan, asked), *engine.rollout(MEAN_PLAN, asked))])
        engine.close()
    assert len({tuple(logprobs) for logprobs in found[0]}) == 9
    for static, library in zip(*found, strict=True):
        assert static == pytest.approx(library, abs=1e-4)


def test_the_static_decoder_says_where_it_adds_no_bias(monkeypatch):
    monkeypatch.setattr(Lora, "has_bias", True)
    served = serve(from_dict(TREE | {"space": "lora"}))
    served.engine.close()
    assert "adds a bias to model.layers.0.self_attn.q_proj.weight" in served.facts.note, served.facts.note


def test_a_setting_of_another_space_is_unknown():
    with pytest.raises(ConfigError, match=r"unknown setting space\.dimension; known here: nothing"):
        spaces.create(from_dict(TREE | {"space": {"name": "steering", "dimension": 10}}))


def test_layers_whose_vector_would_be_changed_are_refused():
    space = spaces.create(from_dict(TREE))
    norm = TensorSpec("model.layers.1.post_feedforward_layernorm.weight", (16,), "norm", 1, 1.0)
    with pytest.raises(ConfigError, match=r"post_feedforward_layernorm.weight would scale the vector"):
        space.layout([*SPECS, norm], torch.float32)
    with pytest.raises(ConfigError, match=r"does not read lora\.target_modules"):
        spaces.create(from_dict(TREE | {"lora": {"target_modules": ["q_proj"]}})).layout(SPECS, torch.float32)
    experts = [replace(s, kind="expert") if "layers.1.mlp" in s.name else s for s in SPECS]
    with pytest.raises(ConfigError, match=r"layer 1 has no linear mlp.down_proj"):
        space.layout(experts, torch.float32)
    first = spaces.create(from_dict(TREE | {"lora": {"target_layers": [0]}}))
    names = [t.name for t in first.layout([*experts, norm], torch.float32).tensors]
    assert names == ["model.layers.0.mlp.down_proj.lora_B.bias"]
