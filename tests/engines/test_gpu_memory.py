# SPDX-License-Identifier: Apache-2.0
"""`engine.gpu_memory_gib`: what it makes of torch's limit, vLLM's arguments and the static decoder's room."""

from __future__ import annotations

import pytest
import torch

from evoalign.config import from_dict
from evoalign.engines import gpu
from evoalign.engines.specs import specs_of_config
from evoalign.engines.transformers.engine import TransformersEngine
from evoalign.engines.vllm import start
from evoalign.errors import ConfigError

GIB = 2**30


def config(space="lora", **engine):
    es = {"sigma": 0.01, "learning_rate": 0.005, "population_size": 30}
    tree = {"space": space, "model": {"name": "tiny"}, "es": es, "engine": {"name": "vllm", **engine}}
    return from_dict(tree)


@pytest.fixture
def limits(monkeypatch):
    """A GPU of 140 GiB; the limits that torch was given."""
    found = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (138 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: found.append(given))
    return found


def arguments(found, cpu=False):
    return start._memory(found, cpu, specs_of_config(found))


def test_cap_is_the_size_of_the_card_in_vllm_arguments(limits):
    mean = start._mean_bytes(config(), specs_of_config(config()))
    assert mean > 0, "the mean of lora is allocated after the cache"
    found = arguments(config(gpu_memory_gib=24))
    assert found["gpu_memory_utilization"] == pytest.approx((0.9 * 24 * GIB - mean) / (140 * GIB), abs=1e-9)
    assert found["max_num_batched_tokens"] == 8192, "vLLM's default on a card of 24 GiB"
    assert limits == [(pytest.approx((24 * GIB - gpu.OUTSIDE) / (140 * GIB)), 0)]
    assert arguments(config(gpu_memory_gib=80))["max_num_batched_tokens"] == 16384
    assert arguments(config(gpu_memory_gib=24, max_num_batched_tokens=2048))["max_num_batched_tokens"] == 2048


def test_no_cap_leaves_the_card_as_it_is(limits):
    found = arguments(config("full", master="host"))
    assert found["gpu_memory_utilization"] == 0.9 and "max_num_batched_tokens" not in found and limits == []
    gpu.limit_memory(None, torch.device("cpu"))


def test_cap_that_cannot_be_kept_is_refused(limits):
    with pytest.raises(ConfigError, match=r"leaves less than the 0\.8 GiB of the CUDA .* to at most 0\.96$"):
        arguments(config(gpu_memory_gib=20, gpu_memory_utilization=0.97))
    arguments(config(gpu_memory_gib=20, gpu_memory_utilization=0.96))
    with pytest.raises(ConfigError, match=r"gpu_memory_gib 141: the GPU has 140.0 GiB; lower it"):
        arguments(config(gpu_memory_gib=141))
    with pytest.raises(ConfigError, match=r"gpu_memory_gib 24: the engine runs on a CPU here; set it to null"):
        arguments(config(gpu_memory_gib=24), cpu=True)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"gpu_memory_gib": 1.5}, "greater than or equal to 2"),
        ({"gpu_memory_gib": float("inf")}, "finite"),
        ({"gpu_memory_gib": 24, "tensor_parallel_size": 2}, "limits one process"),
        ({"name": "transformers", "device": "cpu", "gpu_memory_gib": 24}, "limits a GPU, and device is cpu"),
        ({"name": "transformers", "gpu_memory_gib": "much"}, "number"),
        ({"name": "ray", "gpu_memory_gib": 24}, "engine.replica.gpu_memory_gib"),
    ],
)
def test_config_refuses_caps_that_mean_nothing(engine, why):
    with pytest.raises(ConfigError, match=why):
        config(**engine)


def test_out_of_memory_names_the_cap(limits):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 140")
    for explain in (start._explain, start.out_of_memory):
        line = explain(config(gpu_memory_gib=24), error)
        assert "raise engine.gpu_memory_gib 24" in line and "\n" not in line
        assert "gpu_memory_gib" not in explain(config(), error)
    transformers = config(name="transformers", gpu_memory_gib=24)
    assert transformers.engine.smaller(transformers).startswith("raise engine.gpu_memory_gib 24, or lower")


def test_cap_is_not_part_of_a_run():
    for name in ("vllm", "transformers"):
        engine = config(name=name).engine
        assert "gpu_memory_gib" in engine.resources and "gpu_memory_gib" in engine.unsaid


def test_transformers_plans_within_the_cap(limits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 6 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 4 * GIB)
    engine = object.__new__(TransformersEngine)
    engine.device, engine.deterministic, engine._static = torch.device("cuda"), False, None
    engine._settings = config(name="transformers").engine
    assert engine._room() == 0.5 * (138 + 2) * GIB
    engine._settings = config(name="transformers", gpu_memory_gib=24).engine
    assert engine._room() == 0.5 * (24 * GIB - gpu.OUTSIDE - 4 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (3 * GIB, 140 * GIB))
    assert engine._room() == 0.5 * (3 + 2) * GIB, "another process has the rest of the card"


def test_transformers_refuses_a_cap_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="the engine runs on a CPU here"):
        TransformersEngine(config(name="transformers", gpu_memory_gib=24), None)
