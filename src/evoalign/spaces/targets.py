# SPDX-License-Identifier: Apache-2.0
"""Select the tensors of a model that a space evolves, and the scale of their noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.types import EvolvedTensor, TensorSpec

LINEAR = ("linear", "expert")
"""Kinds of tensors that take an adapter."""


def targets(
    specs: Sequence[TensorSpec], layers: Sequence[int] | None, modules: Sequence[str] | None, section: str
) -> list[TensorSpec]:
    """Return the linear weights, including experts, of the configured layers and modules.

    Raises ConfigError with the layers or modules of the model.
    """
    linear = [s for s in specs if s.kind in LINEAR and s.layer is not None]
    has_layers = sorted({s.layer for s in linear if s.layer is not None})
    has_modules = sorted({module_of(s.name) for s in linear})
    for layer in layers or ():
        if layer not in has_layers:
            raise ConfigError(f"{section}.target_layers: no layer {layer}; the model has {_span(has_layers)}")
    for module in modules or ():
        if module not in has_modules:
            found = (
                f"the model has {', '.join(has_modules)}"
                if has_modules
                else ("the model has no nn.Linear matrix in its layers (GPT-2 has Conv1D); use space full")
            )
            raise ConfigError(f"{section}.target_modules: no module {module!r}; {found}")
    return [
        s for s in linear if (layers is None or s.layer in layers) and (modules is None or module_of(s.name) in modules)
    ]


def check_rank(rank: int, matrices: Sequence[TensorSpec], section: str) -> None:
    """Raise ConfigError for a rank above the rank of every matrix."""
    most = max((min(s.shape) for s in matrices), default=rank)
    if rank > most:
        raise ConfigError(f"{section}.rank: {rank} exceeds the rank of every chosen matrix, {most} at most; lower it")


def module_of(name: str) -> str:
    """Return `q_proj` for `model.layers.0.self_attn.q_proj.weight`."""
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


def scales(config: Config, matrices: Sequence[TensorSpec]) -> dict[int | None, float]:
    """Return the scale of each layer's noise: 1, or the mean over the layer's target matrices of their mean |W|.

    It is NaN before the weights are loaded.
    """
    layers = {s.layer for s in matrices}
    if not by_layer(config):
        return dict.fromkeys(layers, 1.0)
    of_layer = {layer: [size_of(s) for s in matrices if s.layer == layer] for layer in layers}
    return {layer: sum(values) / len(values) for layer, values in of_layer.items()}


def size_of(spec: TensorSpec) -> float:
    """Return the mean |W| of a tensor, NaN before its weights are loaded."""
    return math.nan if spec.mean_abs is None else spec.mean_abs


def by_layer(config: Config) -> bool:
    """Return whether the noise is scaled by the size of each layer's weights (`es.noise_multiplier`)."""
    return config.es_ is not None and config.es.noise_multiplier is not None


def evolved(spec: TensorSpec, scale: float) -> EvolvedTensor:
    """Return the evolved form of one of the model's own tensors."""
    return EvolvedTensor(name=spec.name, shape=spec.shape, module=spec.name, scale=scale)


def _span(layers: Sequence[int]) -> str:
    if list(layers) == list(range(len(layers))) and len(layers) > 1:
        return f"layers 0 to {len(layers) - 1}"
    return "layers " + ", ".join(map(str, layers))
