# SPDX-License-Identifier: Apache-2.0
"""A mean in pinned host memory has the bits of one on the device. Skipped without a GPU or vLLM."""

import importlib.util

import pytest
import torch

from evoalign.config import from_dict
from evoalign.engines.transformers import TransformersEngine
from evoalign.testing import engines as contract
from evoalign.types import Request, Sampling, population

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM"),
]


def seen(engine_class, tree):
    with contract.started(engine_class, from_dict(tree)) as bench:
        engine, found = bench.engine, [bench.engine.fingerprint()]
        requests = [Request(0, bench.requests[0].prompt_ids, Sampling(8))]
        list(engine.rollout(bench.plan(population(3)), requests))
        for _ in range(2):
            engine.apply(bench.update())
            found.append(engine.fingerprint())
        state = dict(engine.state())
        engine.load({name: tensor * 0.5 for name, tensor in state.items()})
        return [*found, engine.fingerprint(), engine.probe_weights(300).tolist()]


@pytest.mark.parametrize("space", ["lowrank", "full"])
def test_host_and_device_agree(space):
    from evoalign.engines.vllm.engine import VllmEngine

    tree = {
        "seed": 5, "space": space, "model": {"name": "tiny", "dtype": "bfloat16"}, "deterministic": False,
        "es": {"sigma": 0.02, "learning_rate": 0.01, "population_size": 8, "decay": 0.01},
    }  # fmt: skip
    engine = {"name": "vllm", "kv_cache_gib": 0.5, "gpu_memory_utilization": 0.3, "max_num_seqs": 16,
              "max_model_len": 128}  # fmt: skip
    want = seen(TransformersEngine, tree | {"engine": {"device": "cuda"}})
    assert seen(VllmEngine, tree | {"engine": engine}) == want
    assert len(set(map(str, want))) == 5
