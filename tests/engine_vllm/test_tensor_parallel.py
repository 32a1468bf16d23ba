# SPDX-License-Identifier: Apache-2.0
"""Two workers with half of each matrix have the same mean, hashes, samples and tokens as one engine."""

import multiprocessing
import shutil

import pytest
import replicated
import torch
from vllm.v1.executor import multiproc_executor

from evoalign.config import from_dict
from evoalign.engines.transformers import TransformersEngine
from evoalign.engines.vllm.engine import VllmEngine
from evoalign.models import tiny
from evoalign.testing import engines as contract
from evoalign.types import MEAN, Request, Sampling, population

SPACES = {
    "lora": {"lora": {"rank": 2, "alpha": 4}, "es": {"optimizer": "adam", "decay": 0.01}},
    "lowrank": {"es": {"decay": 0.01}},
    "full": {"es": {"noise_multiplier": 0.3, "sigma": None}},
    "subspace, cma": {"space": {"name": "subspace", "dimension": 8}, "es": {"optimizer": "cma", "learning_rate": None}},
}


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    """Fork workers from a process that has only imported vLLM, which each would do for eight seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["evoalign.engines.vllm.worker", "vllm.model_executor.models.qwen2"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "get_mp_context", lambda: context)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with biases, one key-value head for two workers, and a tied vocabulary that needs padding."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("qwen2")
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=1031, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=2,
            pad_token_id=0, bos_token_id=None,
        )
    )  # fmt: skip
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15)
    made.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny() / file, folder / file)
    return folder


def config(model, space, workers):
    engine = {"name": "vllm", "kv_cache_gib": 0.125, "max_num_seqs": 32, "max_model_len": 128}
    es = {"sigma": 0.05, "learning_rate": 0.02, "population_size": 4, **SPACES[space].get("es", {})}
    tree = {
        "seed": 5, "space": space.partition(",")[0], "model": {"name": str(model), "dtype": "float32"}, **SPACES[space],
        "es": {k: v for k, v in es.items() if v is not None},
        "engine": {**engine, "tensor_parallel_size": workers} if workers else {"device": "cpu"},
    }  # fmt: skip
    return from_dict(tree)


def seen(engine_class, settings):
    """Return an engine's hashes, samples and texts before and after an update, and after loading its state."""
    with contract.started(engine_class, settings) as bench:
        engine, found = bench.engine, {}
        requests = [Request(i, tuple(range(20 + i, 35 + i)), Sampling(12)) for i in range(3)]
        plan = bench.plan((*population(4), MEAN))

        def texts():
            return {(r.member.index, r.request): r.token_ids for r in engine.rollout(plan, requests)}

        if settings.engine.name == "vllm" and bench.space.carrier == "adapter":
            assert "the deep form" in bench.facts.note
        found["specs"] = [(s.name, s.shape, round(s.mean_abs, 12)) for s in engine.specs()]
        found["start"] = engine.fingerprint(), bench.facts.model_hash, texts()
        engine.apply(bench.update())
        found["moved"] = engine.fingerprint(), engine.probe_weights(500).tolist(), texts()
        state, slots = dict(engine.state()), dict(engine.optimizer_state())
        found["slots"] = {name: tensor.double().sum().item() for name, tensor in slots.items()}
        engine.load({name: tensor * 0.5 for name, tensor in state.items()}, slots)
        found["halved"] = engine.fingerprint(), texts()
        engine.load(state, slots)
        found["back"] = engine.fingerprint(), texts()
        return found


@pytest.mark.parametrize(
    "space",
    [
        "lora",  # members in slots
        pytest.param("lowrank", marks=pytest.mark.long),  # slots, and a mean in parts
        "full",  # a mean in parts
        pytest.param("subspace, cma", marks=pytest.mark.long),  # each worker draws from its own copy of the covariance
    ],
)
def test_two_workers_match_one_engine(model, space):
    want = seen(TransformersEngine, config(model, space, 0))
    got = seen(VllmEngine, config(model, space, 2))
    assert want["start"][0] != want["moved"][0] != want["halved"][0]
    assert len(set(want["start"][2].values())) > 10
    assert got == want


@pytest.mark.long
def test_workers_belong_to_their_replica_and_end_with_it(model):
    replicated.check_life(config(model, "lora", 2), replicated.equal, lose=True)
