# SPDX-License-Identifier: Apache-2.0
"""How far weights have moved, against dense differences in numpy: runs, saved folders, live models."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make_config
from rich.console import Console
from safetensors.torch import load_file, save_file
from small_runs import UNCHECKED

import evoalign
from evoalign.checks import distance
from evoalign.checks.distance import Distance, Product, distance_of, distance_of_mean
from evoalign.config import load
from evoalign.errors import ModelError
from evoalign.models import tiny
from evoalign.setup import serve

WIDTHS = {"lora": 0.02, "lowrank": 0.02, "full": 0.01}
CASES = [("lora", "float32"), ("lowrank", "float32"), ("full", "float32"), ("full", "bfloat16"), ("lora", "bfloat16")]


def norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return float(np.sqrt(sum((t.float().numpy().astype(np.float64) ** 2).sum() for t in tensors.values())))


def base() -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(tiny() / "model.safetensors").items()}


def train(output: Path, space: str, dtype: str = "float32") -> tuple[Path, Any, str]:
    es = {"sigma": WIDTHS[space], "learning_rate": WIDTHS[space], "num_generations": 2, "population_size": 6}
    told, config = io.StringIO(), {"output_dir": str(output), "seed": 1, "space": space, "es": es}
    more = {"model": {"name": "tiny", "dtype": dtype}, "checks": UNCHECKED, "evaluation": {"max_tokens": 12}}
    result = evoalign.train({**config, **more}, console=Console(file=told, width=200))
    return result.saved, json.loads((output / "results/evaluation.json").read_text())["distance"], told.getvalue()


@pytest.mark.first("lora-float32", "full-bfloat16")
@pytest.mark.parametrize(("space", "dtype"), CASES)
def test_a_run_reports_the_distance_of_what_it_saved(space: str, dtype: str, tmp_path: Path) -> None:
    """The dense change of each tensor of the float32 mean; nothing else of the package is used."""
    saved, found, told = train(tmp_path / "run", space, dtype)
    assert "unknown" not in told
    if space == "lora":
        state = load_file(saved / "adapter_model.safetensors")
        settings = json.loads((saved / "adapter_config.json").read_text())
        scale = settings["lora_alpha"] / settings["r"]
        change = {n: scale * (state[n.replace(".lora_A.", ".lora_B.")] @ state[n]) for n in state if ".lora_A." in n}
    else:
        files = list(saved.glob("mean-*.safetensors")) or list(saved.glob("model*.safetensors"))
        mean = {name: tensor for file in files for name, tensor in load_file(file).items()}
        change = {name: tensor.float() - base()[name] for name, tensor in mean.items()}
        assert bool(list(saved.glob("mean-*.safetensors"))) == (dtype == "bfloat16")
    assert found["l2"] == pytest.approx(norm(change), rel=1e-5) and found["l2"] > 0.1
    assert found["relative"] == pytest.approx(norm(change) / norm(base()), rel=1e-5)
    again = distance_of(saved, load([tmp_path / "run/config.yaml"]))
    assert (again.l2, again.relative) == pytest.approx((found["l2"], found["relative"]), rel=1e-9)


def test_distance_is_0_at_the_start_as_the_base_is_served(random_qwen2: Path) -> None:
    """Files in float32, served in bfloat16: the run starts from the rounded weights."""
    for space, dtype, model in (*((*case, tiny()) for case in CASES), ("full", "bfloat16", random_qwen2)):
        with closing(serve(make_config(model, space, model={"name": str(model), "dtype": dtype}))) as served:
            assert distance_of_mean(served) == Distance(0, 0)


def test_the_norm_of_a_product_needs_no_product() -> None:
    a, b = (torch.randn(size, generator=torch.Generator().manual_seed(0)) for size in ((3, 40), (50, 3)))
    dense = 0.5 * (b.double() @ a.double())
    assert Product(a, b, 0.5).square() == pytest.approx(float(dense.square().sum()), rel=1e-12)
    assert Product(a, torch.zeros(50, 3), 1.0).square() == 0


def live(dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny(), dtype=dtype).requires_grad_(False)


def move(model: Any, change: float) -> Any:
    model.model.embed_tokens.weight[0, 0] += change
    return model


def adapted(**settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    own = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(live(), LoraConfig(**own))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_live_model(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece and in small ones."""
    model, config = live(dtype), make_config("tiny", "full")
    assert distance_of(model, config) == Distance(0, 0)
    model.model.layers[1].mlp.up_proj.weight[3, 4] += 0.5
    move(model, -1.0)
    moved = {name: p.float() - base()[name] for name, p in model.named_parameters()}
    found = distance_of(model, config)
    assert found.l2 == pytest.approx(norm(moved), rel=1e-9) and 1 < found.l2 < 1.3
    assert found.relative == pytest.approx(norm(moved) / norm(base()), rel=1e-6)
    monkeypatch.setattr(distance, "BLOCK", 1000)
    assert distance_of(model, config).l2 == pytest.approx(found.l2, rel=1e-12)


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}], ids=["lora", "rslora"])
def test_a_live_model_with_an_adapter(settings: dict[str, Any], tmp_path: Path) -> None:
    model, config = adapted(**settings), make_config("tiny", "lora")
    found = distance_of(model, config)
    model.save_pretrained(tmp_path)
    assert distance_of(tmp_path, config).l2 == pytest.approx(found.l2, rel=1e-12)
    whole = model.merge_and_unload()
    moved = {name: p.detach().float() - base()[name] for name, p in whole.named_parameters()}
    assert found.l2 == pytest.approx(norm(moved), rel=1e-5) and found.l2 > 0.1
    assert distance_of(whole, config).l2 == pytest.approx(found.l2, rel=1e-5)


MORE = [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"rank_pattern": {"q_proj": 2}}]


@pytest.mark.parametrize("settings", MORE)
def test_an_adapter_that_does_more_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    model, config = adapted(**settings), make_config("tiny", "lora")
    model.save_pretrained(tmp_path)
    for of in (model, tmp_path):
        with pytest.raises(ModelError, match=f"more than plain LoRA .*{next(iter(settings))}"):
            distance_of(of, config)


def renamed(folder: Path, change: Mapping[str, str] | None = None) -> Path:
    """The tiny model with other names in its file: by `change`, or without their first part."""
    shutil.copytree(tiny(), folder)
    tensors = load_file(folder / "model.safetensors")
    own = {n: change.get(n, n) if change else n.removeprefix("model.") for n in tensors}
    save_file({own[n]: t for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("form", ["several files", "names without their first part"])
def test_base_files_of_any_form_are_read(form: str, tmp_path: Path) -> None:
    if form == "several files":
        live().save_pretrained(tmp_path / "base", max_shard_size="500KB")
        assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    else:
        renamed(tmp_path / "base")
    found = distance_of(move(live(), 2.0), make_config(tmp_path / "base", "full"))
    assert found.l2 == pytest.approx(2) and found.relative == pytest.approx(2 / norm(base()), rel=1e-6)


def test_models_of_another_base_are_refused(tmp_path: Path, random_qwen2: Path) -> None:
    config, damaged = make_config("tiny", "full"), tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "adapter_config.json").write_text('{"r": 0, "lora_alpha": 1, "peft_type": "LORA"}')
    broken = renamed(tmp_path / "base", {"model.norm.weight": "model.other.weight"})
    other, norm_ = "no checkpoint of model tiny", r"have no model.norm.weight of shape \[96\]"
    for model, own, said in ((tmp_path, config, other), (live(), make_config(broken, "full"), norm_),
                             (random_qwen2, config, rf"model tiny has no .* of shape|{other}"),
                             (damaged, config, r"adapter_config\.json is missing or damaged")):  # fmt: skip
        with pytest.raises(ModelError, match=said):
            distance_of(model, own)


def test_a_run_goes_to_its_end_where_the_distance_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> Any:
        raise ModelError("the files of model tiny have other names")

    monkeypatch.setattr("evoalign.training.mean.distance_of_mean", unknown)
    saved, found, told = train(tmp_path / "run", "lora")
    assert saved.is_dir() and found is None
    assert "distance could not be measured (the files of model tiny have other names)" in " ".join(told.split())
