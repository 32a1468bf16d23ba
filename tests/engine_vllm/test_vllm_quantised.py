# SPDX-License-Identifier: Apache-2.0
"""Bases with packed weights on engine vllm: the same answers as on their numbers, the same journals, refusals."""

import json
import os
from dataclasses import replace
from functools import cache
from statistics import median

import packed
import plugins
import pytest
from served import answers, config

import evoalign
from evoalign import engines
from evoalign.checks import canary
from evoalign.config import from_dict
from evoalign.engines.server.settings import ServerSettings
from evoalign.engines.vllm import start
from evoalign.engines.vllm.engine import VllmEngine
from evoalign.engines.vllm.settings import VllmConfig
from evoalign.errors import ConfigError, ModelError
from evoalign.models.quantised import files_hash
from evoalign.testing import engines as contract
from evoalign.types import MEAN, population


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    return cache(lambda form: packed.quantise(form, folder / form))


def over(folder, dtype, **more):
    tree = config(**more).model_dump(mode="json") | {"model": {"name": str(folder), "dtype": dtype}}
    return from_dict(tree)


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_members_answer_as_on_the_numbers_of_the_packed_weights(form, base):
    folder, found = base(form), {}
    for name in ("vllm", "transformers"):
        with contract.started(engines.create, over(folder, "bfloat16", name=name)) as bench:
            plan = bench.plan((*population(3), MEAN))
            found[name] = answers(bench.engine, plan, bench.requests)
            assert bench.facts.model_hash == files_hash(str(folder), None, form)
    alike = [one.token_ids[0] == found["transformers"][key].token_ids[0] for key, one in found["vllm"].items()]
    assert sum(alike) >= 0.9 * len(alike)  # in bfloat16, ties may fall otherwise
    assert len({one.token_ids for one in found["vllm"].values()}) > len(alike) // 4  # members differ


@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_members_answer_over_an_fp8_base_as_on_its_numbers(engine, base):
    """In process activations are not rounded, which moves log-probabilities by a tenth of a nat."""
    found = []
    for name in (engine, "transformers"):
        with contract.started(engines.create, over(base("float-quantized"), "bfloat16", name=name)) as bench:
            requests = [replace(request, logprobs=True) for request in bench.requests]
            found.append(answers(bench.engine, bench.plan((*population(6), MEAN)), requests))
    theirs, ours = found
    apart = [abs(theirs[key].logprobs[0] - ours[key].logprobs[0]) for key in ours]
    members = [abs(theirs[key].logprobs[0] - theirs[MEAN.index, key[1]].logprobs[0]) for key in theirs]
    assert median(apart) < 0.15 < median(members)


@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_a_run_has_the_journal_of_the_same_run_on_the_numbers(engine, base, tmp_path, monkeypatch):
    folder, found = base("pack-quantized"), []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(plugins.written(tmp_path, "packed")))
    for name in (engine, "transformers"):
        tree = over(folder, "float32", name=name).model_dump(mode="json")
        length = {"max_tokens": 12}
        tree |= {"output_dir": str(tmp_path / name), "sampling": length, "evaluation": length}
        tree |= {"task": {"name": "conciseness"}}
        tree["es"] |= {"num_generations": 3, "population_size": 8}
        evoalign.train(tree)
        first, *rest = [json.loads(line) for line in (tmp_path / name / "journal.jsonl").read_text().splitlines()]
        kept = [{k: v for k, v in line.items() if k not in ("hash", "previous", "chain")} for line in rest]
        found.append((first["model_hash"], kept))
    assert any(any(line.get("coefficients", ())) for line in found[0][1])
    assert found[0] == found[1]


def test_deep_form_and_canary_on_a_packed_base(base):
    with contract.started(VllmEngine, over(base("pack-quantized"), "float32")) as bench:
        assert "deep form" in bench.facts.note
        by_name = {spec.name: spec for spec in bench.engine.specs()}
        assert by_name["model.embed_tokens.weight"].mean_abs is not None
        assert by_name["model.layers.0.mlp.up_proj.weight"].mean_abs is None
        ids = bench.requests[0].prompt_ids
        canary.check(bench.engine, bench.space, bench.layout, ids, generation=0, width=0.05)


@pytest.mark.parametrize("name", ["vllm", "vllm-server"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_float32_is_refused(dtype, name, base, monkeypatch):
    monkeypatch.setattr(VllmConfig, "packed_in_float32", False)
    monkeypatch.setattr(ServerSettings, "packed_in_float32", False)
    made = over(base("awq"), dtype, name=name)
    with (
        pytest.raises(ConfigError, match=r"set model\.dtype bfloat16 or float16$"),
        contract.started(engines.create, made),
    ):
        pass


def test_a_form_that_vllm_lacks_on_this_device_is_refused_in_one_line(base, tmp_path):
    how = packed.CONFIGS["pack-quantized"] | {"format": "nvfp4-pack-quantized"}
    group = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    how["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": group}}
    made = over(packed.quantise("pack-quantized", tmp_path / "model", how), "bfloat16")
    with pytest.raises(ModelError) as error, contract.started(VllmEngine, made):
        pass
    assert "\n" not in str(error.value)


def test_deterministic_on_a_gpu_is_refused(base, monkeypatch):
    for name in ("check", "_check_split", "_check_invariance", "_set_environment"):
        monkeypatch.setattr(start, name, lambda *_: None)
    with pytest.raises(ConfigError, match="deterministic"):
        start.start(over(base("pack-quantized"), "bfloat16", deterministic=True), False, True)
