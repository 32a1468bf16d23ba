# SPDX-License-Identifier: Apache-2.0
"""Runs on a quantised base: their records, exports and cards, and merges into the model in full precision alone."""

from __future__ import annotations

import io
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from peft import PeftModel
from quantised_models import quantise
from rich.console import Console
from safetensors.torch import load_file
from small_runs import UNCHECKED
from transformers import AutoModelForCausalLM

import evoalign
from evoalign.analysis.page.run import views_of
from evoalign.config import from_dict, load
from evoalign.errors import ConfigError, ModelError
from evoalign.exporting.export import export
from evoalign.models import origin, tiny
from evoalign.models.files import load_whole
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import saved_folders
from evoalign.setup import serve
from evoalign.types import MEAN_PLAN, Request, Sampling

QUESTIONS = ["What is 3 + 5?", "What is the capital of Japan?", "Next number: 3, 6, 9,", "Name three colours."]
TOKENS = 16
WORDS = "compressed-tensors, packed integers, 4 bits, groups of 16"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny_w4"
    quantise("pack-quantized, 4 bits", tiny(), folder)
    return folder


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two generations, of which only the last mean is kept, and its output."""
    out = io.StringIO()
    es = {"sigma": 0.1, "learning_rate": 0.2, "num_generations": 2, "population_size": 4}
    tree = {"output_dir": str(tmp_path_factory.mktemp("run") / "run"), "space": "lora", "es": es,
            "model": {"name": str(base), "dtype": "float32"}, "task": {"batch_size": 4},
            "evaluation": {"max_tokens": 8}, "checks": UNCHECKED, "checkpoint": {"keep_last": 1}}  # fmt: skip
    return evoalign.train(tree, console=Console(file=out, width=500)).path, out.getvalue()


@pytest.fixture(scope="module")
def run(trained: tuple[Path, str]) -> Path:
    return trained[0]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def merged_by_hand(run: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the tiny model plus those of an adapter, bfloat16."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    found, state = weights(tiny()), checkpoint.load_adapter(folder)
    for name in [n for n in state if ".lora_A." in n]:
        module = name.partition(".lora_A.")[0]
        change = state[f"{module}.lora_B.weight"] @ state[name] * (settings["lora_alpha"] / settings["r"])
        found[f"{module}.weight"] = (found[f"{module}.weight"].float() + change).bfloat16()
    return found


def test_a_run_records_and_prints_how_its_base_is_quantised(trained: tuple[Path, str]) -> None:
    run, printed = trained
    recorded = json.loads((run / "manifest.json").read_text())["quantised"]
    assert recorded == {"form": "pack-quantized", "bits": 4, "group_size": 16, "words": WORDS}
    assert f"base: quantised, {WORDS}" in printed
    assert views_of([run])[0].about["base"] == f"quantised, {WORDS}"


def test_the_adapter_names_the_quantised_base_and_gives_the_text_of_the_engine(
    run: Path, base: Path, tmp_path: Path
) -> None:
    out = export(run, tmp_path / "adapter")
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    card = (out / "README.md").read_text()
    assert f"quantised, {WORDS}" in card and "Warning" not in card
    assert "CompressedTensorsConfig(dequantize=True)" in card and "quantization_config=packing)" in card
    dense: Any = load_whole(str(base), None, torch.float32, "base")
    dense.save_pretrained(tmp_path / "dense")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), str(out))
    served = serve(load([run / "config.yaml"]))
    served.engine.load(checkpoint.load(saved_folders(run)[-1], served.layout)[0])
    prompts = [served.tokens.encode([{"role": "user", "content": q}]) for q in QUESTIONS]
    requests = [Request(i, prompt, Sampling(TOKENS)) for i, prompt in enumerate(prompts)]
    found = {r.request: r.token_ids for r in served.engine.rollout(MEAN_PLAN, requests)}
    served.close()
    plain = [model.generate(input_ids=torch.tensor([p]), max_new_tokens=TOKENS, do_sample=False) for p in prompts]
    assert [found[i] for i in range(len(prompts))] == [
        tuple(ids[0, len(p) :].tolist()) for ids, p in zip(plain, prompts, strict=True)
    ]


def test_a_merge_into_the_quantised_base_is_refused(run: Path, base: Path, tmp_path: Path) -> None:
    for model in (None, str(base)):
        with pytest.raises(ConfigError, match=r"quantised .*4 bits.* give --model FOLDER, the full-precision model"):
            export(run, tmp_path / "out", merge=True, model=model)
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_not_exported_over_another_quantised_base(run: Path, tmp_path: Path) -> None:
    quantise("gptq, 4 bits", tiny(), tmp_path / "other")
    with pytest.raises(ConfigError, match=r"is not the base that .* trained on"):
        export(run, tmp_path / "out", model=str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()


def test_a_merge_into_the_model_in_full_precision_warns_that_it_was_not_measured(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "evoalign.export"):
        out = export(run, tmp_path / "whole", merge=True, model=str(tiny()), dtype="bfloat16")
    wanted = merged_by_hand(run, saved_folders(run)[-1])
    found = weights(out)
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)
    card = (out / "README.md").read_text()
    assert "the merged model was not measured: its adapter was trained on a quantised base" in caplog.text
    assert "**Warning:** the merged model was not measured" in card and "eval_results" not in card
    assert "--model FOLDER_OF_THE_BASE" in card and "CompressedTensorsConfig" not in card


def test_rebuilt_means_and_members_are_merged_into_full_precision(run: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"generation": 1, "dtype": "bfloat16"}
    for name, more in {"mean": {}, "member": {"member": 2}}.items():
        kept = export(run, tmp_path / name, generation=1, **more)
        whole = export(run, tmp_path / f"{name}_whole", merge=True, model=str(tiny()), **options, **more)
        found, wanted = weights(whole), merged_by_hand(run, kept)
        assert all(torch.equal(found[n], wanted[n]) for n in wanted)
    assert not torch.equal(*(weights(tmp_path / f"{n}_whole")[WEIGHT] for n in ("mean", "member")))


WEIGHT = "model.layers.1.self_attn.q_proj.weight"


def test_models_that_do_not_fit_are_refused(run: Path, tmp_path: Path) -> None:
    other = build("llama", tmp_path / "llama")
    with pytest.raises(ModelError, match=r"has no .*weight of shape \[.*\]; set --model FOLDER to the model that"):
        export(run, tmp_path / "out", merge=True, model=str(other))
    with pytest.raises(ConfigError, match=r"is not quantised, and .* trained on a quantised base"):
        export(run, tmp_path / "out", model=str(tiny()))


def test_the_hash_of_the_base_is_compared_unless_the_run_recorded_a_quantised_one(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["quantised"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="has other weights than the base"):
        export(copy, tmp_path / "out", merge=True, model=str(tiny()))


def test_a_run_that_starts_from_the_adapter_needs_a_base_in_full_precision(run: Path, base: Path) -> None:
    name = str(saved_folders(run)[-1])
    for model in (name, str(run)):
        with pytest.raises(ModelError, match=r"over .*tiny_w4, which is quantised .* set model\.base to"):
            origin.origin(from_dict({"model": {"name": model}}).model)
