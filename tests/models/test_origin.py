# SPDX-License-Identifier: Apache-2.0
"""Runs that start from an adapter, a run or an export: from the very weights that PEFT makes of it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM

import evoalign
from evoalign.config import ModelConfig
from evoalign.models import origin, tiny

IDS = torch.tensor([[5, 17, 200, 31, 8, 990, 44]])


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where merged models go."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVOALIGN_CACHE", str(folder))
        yield folder


def base_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)


def adapter(folder: Path, base: Path | None = None, /, **settings: Any) -> Path:
    """A LoRA adapter of random numbers over the tiny model, or another, as PEFT saves it."""
    torch.manual_seed(3)
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **settings}
    model: Any = AutoModelForCausalLM.from_pretrained(base or tiny(), dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **chosen))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.02 if "lora_" in name else 0.002))
    adapted.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


def of_peft(folder: Path, base: Path | None = None) -> torch.Tensor:
    """What PEFT makes of base and adapter, not merged."""
    model: Any = AutoModelForCausalLM.from_pretrained(base or tiny(), dtype=torch.float32)
    return logits(PeftModel.from_pretrained(model, str(folder)))


def config(output: Path, model: Mapping[str, Any] | str, space: str = "lora", **sections: Any) -> dict[str, Any]:
    es = {"sigma": 0.02, "learning_rate": 0.02, "num_generations": 2, "population_size": 4}
    named = {"name": model} if isinstance(model, str) else dict(model)
    return {
        "output_dir": str(output), "seed": 1, "space": space, "model": named, "es": es, "evaluation": {"max_tokens": 4},
        "task": {"name": "conciseness", "train_size": 1, "test_size": 2}, "checkpoint": {"every": 1, "keep_last": 2},
        "checks": {"control_every": 0, "placebos": 0}, **sections,
    }  # fmt: skip


def train(tree: Mapping[str, Any], **options: Any) -> tuple[Path, str]:
    """The run, and what it said."""
    said = io.StringIO()
    return evoalign.train(tree, console=Console(file=said, width=2000), **options).path, said.getvalue()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter(tmp_path_factory.mktemp("plain") / "adapter")


@pytest.fixture(scope="module")
def run(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of `lora` that starts from an adapter of PEFT."""
    return train(config(tmp_path_factory.mktemp("run") / "first", str(plain)))


# --- the weights ----------------------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "pattern": {"target_modules": r".*\.0\..*(q|k)_proj"},
    "saved": {"modules_to_save": ["norm", "lm_head"]},
    "words": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "parameters": {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"], "lora_dropout": 0.0},
}


@pytest.mark.parametrize("form", FORMS)
def test_what_a_run_starts_from_is_what_peft_makes_of_it(form: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", **FORMS[form])
    wanted, base = of_peft(folder), logits(base_model())
    assert (wanted - base).abs().max() > 0.05, "the adapter does nothing"
    merged = AutoModelForCausalLM.from_pretrained(origin.model_path(ModelConfig(name=str(folder))), dtype="auto")
    assert merged.dtype == torch.float32
    assert torch.allclose(logits(merged), wanted, atol=2e-4)
