# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters of plain LoRA with random factors."""

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from evoalign.config import from_dict
from evoalign.engines.specs import specs_of_config


def adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]], rank: int = 3, base: str = "tiny") -> Path:
    """Write an adapter of these weights, `model.layers.0.mlp.up_proj.weight` and so on, over a base."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, state = torch.Generator().manual_seed(3), {}
    for name, (out, in_) in shapes.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        state[f"{module}.lora_A.weight"] = torch.randn(rank, in_, generator=draw)
        state[f"{module}.lora_B.weight"] = 0.05 * torch.randn(out, rank, generator=draw)
    save_file(state, str(folder / "adapter_model.safetensors"))
    modules = sorted({name.removesuffix(".weight").rsplit(".", 1)[-1] for name in shapes})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": base}))
    return folder


@cache
def over(model: Path | str) -> Path:
    """Return an adapter of all linear weights of a model."""
    specs = specs_of_config(from_dict({"model": {"name": str(model)}}))
    shapes = {s.name: s.shape for s in specs if s.kind == "linear" and s.layer is not None}
    return adapter(Path(tempfile.mkdtemp()), shapes, base=str(model))
