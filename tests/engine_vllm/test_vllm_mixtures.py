# SPDX-License-Identifier: Apache-2.0
"""Members with experts of their own on engine vllm, in the stock form."""

import json

import plain_experts
import pytest
from families import build
from served import answers, config

import evoalign
from evoalign import engines
from evoalign.config import from_dict
from evoalign.engines.vllm import start
from evoalign.engines.vllm.engine import VllmEngine
from evoalign.errors import ModelError
from evoalign.testing import engines as contract
from evoalign.types import MEAN, population


@pytest.fixture
def experts(monkeypatch):
    monkeypatch.setattr(start, "EXPERTS_ON_CPU", True)
    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.experts.triton_moe.TritonExperts.apply", plain_experts.product)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return build("qwen3_moe", tmp_path_factory.mktemp("mixture") / "model", head_dim=32)


def over(folder, engine, **more):
    own = {"population": "stock"} if engine == "vllm" else {}
    tree = config("lora", engine).model_dump(mode="json") | {"model": {"name": str(folder), "dtype": "float32"}} | more
    return from_dict(tree | {"engine": tree["engine"] | own})


def test_a_mixture_on_a_cpu_is_refused(mixture):
    with pytest.raises(ModelError, match=r"mixture of experts, .* GPU"), contract.started(VllmEngine, over(mixture, "vllm")):
        pass


def test_a_run_has_the_journal_of_the_same_run_in_process(mixture, experts, tmp_path):
    found = []
    for name in ("vllm", "transformers"):
        length = {"max_tokens": 12}
        tree = over(mixture, name).model_dump(mode="json")
        tree |= {"output_dir": str(tmp_path / name), "sampling": length, "evaluation": length}
        tree |= {"task": {"name": "conciseness"}}
        tree["es"] |= {"num_generations": 3, "population_size": 8}
        evoalign.train(tree)
        lines = [json.loads(line) for line in (tmp_path / name / "journal.jsonl").read_text().splitlines()]
        found.append([{k: v for k, v in line.items() if k not in ("hash", "previous", "chain")} for line in lines[1:]])
    assert any(any(line.get("coefficients", ())) for line in found[0])
    assert found[0] == found[1]
