# SPDX-License-Identifier: Apache-2.0
"""Describe a model's tensors under their Hugging Face names, from the model or from its configuration alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn

from evoalign import spaces
from evoalign.config import ENGINES, Config
from evoalign.errors import ConfigError, ModelError
from evoalign.models import tensors, unpack
from evoalign.models.forms import FULL_PRECISION, Quantised
from evoalign.models.origin import empty_model
from evoalign.models.quantised import quantised_of
from evoalign.spaces.targets import module_of
from evoalign.types import TensorKind, TensorSpec

DIRECT = frozenset({"LongcatFlashTopkRouter"})
"""Classes that use the weight of their nn.Linear without calling it, so that an adapter on it has no effect."""
PIECE = 1 << 22
"""Numbers of a tensor that are looked at together."""
_LAYER = re.compile(r"\.(\d+)\.")


def on_gpu(config: Config) -> bool:
    """Return whether the engine serves from a GPU."""
    where = config.engine.where
    return where.startswith("cuda") or (where == "auto" and torch.cuda.is_available())


def specs_of_config(config: Config) -> list[TensorSpec]:
    """Return the model's tensors without loading a weight (`mean_abs` is None). Raises ModelError, ConfigError."""
    refuse_quantised(config)
    model = empty_model(config.model)
    specs = specs_of(model, lambda _: None)
    mixed = not config.engine.takes_mixtures and any(s.kind == "expert" for s in specs)
    if mixed and spaces.create(config).carrier == "dense":
        raise ModelError(
            f"model {config.model.name} ({model.config.model_type}) is a mixture of experts, whose experts engine "
            f"{config.engine.name} cannot move (space {config.space.name}); use space lora, or engine transformers"
        )
    found, by_mean = reached(config, specs), config.es_ is not None and config.es.noise_multiplier is not None
    if by_mean and not config.engine.takes_mixtures and any(s.kind == "expert" for s in found):
        raise ConfigError(
            f"es.noise_multiplier: engine {config.engine.name} does not read the mean |W| of experts, and they "
            "evolve; remove it and set es.sigma"
        )
    return found


def refuse_quantised(config: Config, dtype: torch.dtype | None = None) -> Quantised | None:
    """Return how the base is quantised, or None.

    `dtype` is what the engine serves, once that is known. Raises ModelError if it does not serve that form, and
    ConfigError if it does not serve it in float32 or at a URL, or the run would read or move the weights themselves.
    """
    found = quantised_of(config.model)
    if found is None:
        return None
    name, engine = config.model.name, config.engine
    if found.form not in engine.quantised:
        others = [other for other, section in ENGINES.items() if other != "ray" and found.form in section.quantised]
        advice = f"use engine {' or '.join(others)}, or " if others else ""
        raise ModelError(
            f"model {name} is quantised ({found.words}), which engine {engine.name} does not serve; {advice}"
            f"{FULL_PRECISION}"
        )
    if engine.unpacks(found.form, found.bits):
        unpack.check(name, found)
    served = dtype or getattr(torch, config.model.served_dtype(on_gpu=engine.where != "cpu"))
    if served is torch.float32 and not engine.packed_in_float32:
        raise ConfigError(
            f"model.dtype {config.model.dtype}: engine {engine.name} does not serve the packed weights of model {name} "
            f"({found.words}) in float32; set model.dtype bfloat16 or float16"
        )
    if getattr(engine, "url", None) and (found.rounds_activations or found.form not in unpack.FORMS):
        raise ConfigError(
            f"engine.url: model {name} is quantised ({found.words}), so that activations may be rounded and the "
            "completions of a running server do not show whether it serves these files; remove engine.url, and the run "
            "starts the server"
        )
    if spaces.create(config).evolves_model:
        raise ConfigError(
            f"space {config.space.name}: model {name} is quantised ({found.words}), and steps of ES would be rounded "
            f"away in its weights; use space lora, whose adapters stay in full precision, or {FULL_PRECISION}"
        )
    if config.es_ is not None and config.es.noise_multiplier is not None:
        raise ConfigError(
            f"es.noise_multiplier: model {name} is quantised ({found.words}), and the mean |W| of its packed weights "
            "is not read; remove it and set es.sigma"
        )
    return found


def carries_experts(config: Config) -> bool:
    """Return whether experts evolve."""
    engine = config.engine
    return engine.carries_experts and (engine.takes_mixtures or not spaces.create(config).evolves_model)


def reached(config: Config, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Mark as `other` the matrices for which members get no adapters: experts that the engine does not carry, and
    modules whose adapters it does not apply."""
    carries, unreached = carries_experts(config), config.engine.unreached
    return [
        replace(s, kind="other") if (s.kind == "expert" and not carries) or module_of(s.name) in unreached else s
        for s in specs
    ]


def mean_abs(tensor: torch.Tensor) -> float:
    """Return the mean of |W| in float64, by a sum: the mean of vLLM's batch-invariant mode refuses float64.

    In pieces, since vLLM leaves no memory for a copy of a large matrix.
    """
    pieces = tensor.split(max(1, PIECE // max(1, tensor[:1].numel()))) if tensor.dim() else (tensor,)
    return sum(float(piece.abs().sum(dtype=torch.float64)) for piece in pieces) / tensor.numel()


def refuse_not_finite(specs: Iterable[TensorSpec]) -> None:
    """Raise ModelError for a tensor that has NaN or infinity, by the mean of its |W|."""
    for spec in specs:
        if spec.mean_abs is not None and not math.isfinite(spec.mean_abs):
            raise ModelError(
                f"the model's own weights are not finite: {spec.name} has NaN or infinity, before any noise; fetch the "
                "model's files again, or use another model"
            )


def specs_of(model: nn.Module, mean_abs: Callable[[torch.Tensor], float | None]) -> list[TensorSpec]:
    """Describe each parameter, tied ones once, and each matrix of each expert where experts are fused.

    `mean_abs` of a packed weight is None.
    """
    kinds, in_peft = _kinds(model), tensors.model_type(model) in tensors.PEFT_TYPES
    found, packed = list(tensors.named(model)), tensors.packed_shapes(model)
    # PEFT reserves the module names of experts for experts: it skips an nn.Linear of such a name elsewhere.
    fused = {_module_name(name) for name, expert, _ in found if expert is not None and in_peft}
    return [
        TensorSpec(
            name=name,
            shape=packed.get(name, tuple(p.shape)),
            kind=kinds.get(name, "other") if expert is None else "expert",
            layer=int(found[1]) if (found := _LAYER.search(name)) else None,
            mean_abs=None if name in packed else mean_abs(p),
            peft=_module_name(name) not in fused if expert is None else in_peft,
        )
        for name, expert, p in found
    ]


def _module_name(name: str) -> str:
    """Return `gate_proj` for `model.layers.0.mlp.gate_proj.weight`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _kinds(model: nn.Module) -> dict[str, TensorKind]:
    """Return the kind of each parameter, from the type of its module."""
    kinds: dict[str, TensorKind] = {}
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            kind: TensorKind = "other"
            if name.endswith("bias"):
                kind = "bias"
            elif isinstance(module, nn.Linear) and "router" not in type(module).__name__.lower():
                kind = "linear"  # a router returns a tuple
                if type(parents.get(module)).__name__ in DIRECT:
                    kind = "other"
            elif isinstance(module, nn.Embedding):
                kind = "embedding"
            elif "norm" in type(module).__name__.lower():
                kind = "norm"
            kinds.setdefault(f"{path}.{name}" if path else name, kind)
    return kinds
