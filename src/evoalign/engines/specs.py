# SPDX-License-Identifier: Apache-2.0
"""A model's tensors under their Hugging Face names: from the model, or from its configuration alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn

from evoalign.config import Config
from evoalign.errors import ModelError
from evoalign.models import tensors
from evoalign.models.origin import empty_model
from evoalign.types import TensorKind, TensorSpec

_LAYER = re.compile(r"\.(\d+)\.")


def on_gpu(config: Config) -> bool:
    """Whether the engine will serve from a GPU."""
    where = config.engine.where
    return where.startswith("cuda") or (where == "auto" and torch.cuda.is_available())


def specs_of_config(config: Config) -> list[TensorSpec]:
    """The model's tensors from its configuration alone, no weight loaded (`mean_abs` is NaN). Raises ModelError."""
    model = empty_model(config.model)
    specs = specs_of(model, lambda _: math.nan)
    if not config.engine.takes_mixtures and any(s.kind == "expert" for s in specs):
        raise ModelError(
            f"model {config.model.name} ({model.config.model_type}) is a mixture of experts, which engine "
            f"{config.engine.name} does not serve to a population; use engine transformers"
        )
    return specs if config.engine.carries_experts else without_experts(specs)


def without_experts(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The tensors as an engine has them that cannot give members experts of their own."""
    return [replace(s, kind="other") if s.kind == "expert" else s for s in specs]


def mean_abs(tensor: torch.Tensor) -> float:
    """Mean of |W| in float64, by a sum: vLLM's batch-invariant mode has a mean of its own, which refuses float64."""
    return float(tensor.abs().sum(dtype=torch.float64)) / tensor.numel()


def specs_of(model: nn.Module, mean_abs: Callable[[torch.Tensor], float]) -> list[TensorSpec]:
    """Name, shape, kind and layer of each parameter, tied ones once; of fused experts of each expert's matrices."""
    kinds, in_peft = _kinds(model), tensors.model_type(model) in tensors.PEFT_TYPES
    found = list(tensors.named(model))
    # PEFT takes a name that experts have for theirs alone, and passes over an nn.Linear of that name elsewhere.
    fused = {_module_name(name) for name, expert, _ in found if expert is not None and in_peft}
    return [
        TensorSpec(
            name=name,
            shape=tuple(p.shape),
            kind=kinds.get(name, "other") if expert is None else "expert",
            layer=int(found[1]) if (found := _LAYER.search(name)) else None,
            mean_abs=mean_abs(p),
            peft=_module_name(name) not in fused if expert is None else in_peft,
        )
        for name, expert, p in found
    ]


def _module_name(name: str) -> str:
    """`gate_proj` of `model.layers.0.mlp.gate_proj.weight`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _kinds(model: nn.Module) -> dict[str, TensorKind]:
    """What each parameter is, from the module that holds it."""
    kinds: dict[str, TensorKind] = {}
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            kind: TensorKind = "other"
            if name.endswith("bias"):
                kind = "bias"
            elif isinstance(module, nn.Linear) and "router" not in type(module).__name__.lower():  # it returns more
                kind = "linear"
            elif isinstance(module, nn.Embedding):
                kind = "embedding"
            elif "norm" in type(module).__name__.lower():
                kind = "norm"
            kinds.setdefault(f"{path}.{name}" if path else name, kind)
    return kinds
