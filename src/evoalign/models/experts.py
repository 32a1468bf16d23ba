# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: each expert's matrices under the names that checkpoints have, as views of the fused parameters.

transformers keeps the experts of a layer in two parameters, `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj`
[E, H, I]. Checkpoints, vLLM's noise rule and PEFT's adapters know 3 E matrices instead: `experts.3.gate_proj.weight`
[I, H], `experts.3.up_proj.weight` [I, H] and `experts.3.down_proj.weight` [H, I], and so does everything here: an
expert's matrix is a linear matrix of its own, whatever it is fused with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Part = Literal["gate", "up", "down"]
FUSED: Mapping[str, tuple[Part, ...]] = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""The parameters of a layer's experts, and the parts that lie below each other in each."""
_NAMES: Mapping[Part, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_OLD_NAMES: Mapping[Part, str] = {"gate": "w1", "up": "w3", "down": "w2"}
_OF_OLD = frozenset({"mixtral", "phimoe"})
"""Model types whose checkpoints say `block_sparse_moe.experts.3.w1.weight`."""
PEFT_TYPES = frozenset({
    "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "hunyuan_v1_moe", "mixtral", "olmoe", "qwen3_moe",
})  # fmt: skip
"""Model types of which PEFT turns an adapter of single experts into one of the fused parameters as it loads it; each
tried with PEFT 0.21: the adapter that it loads gives the logits of the engine."""


@dataclass(frozen=True, slots=True)
class Expert:
    """One matrix of one expert: the part `part` of expert `index` of `module`, in the parameter `parameter`."""

    module: nn.Module
    parameter: str
    part: Part
    index: int

    @property
    def weight(self) -> torch.Tensor:
        """The matrix [out, in], a view of the fused parameter."""
        fused = getattr(self.module, self.parameter).data[self.index]
        parts = FUSED[self.parameter]
        return fused.chunk(len(parts))[parts.index(self.part)]


def experts_of(model: nn.Module) -> dict[str, Expert]:
    """Every expert's matrices by their names in checkpoints: of each fused parameter those of expert 0 first."""
    kind = model_type(model)
    return {
        _name(kind, path, index, part): Expert(module, parameter, part, index)
        for path, module in model.named_modules() if is_experts(module)
        for parameter, parts in FUSED.items()
        for index in range(len(getattr(module, parameter)))
        for part in parts
    }  # fmt: skip


def is_experts(module: Any) -> bool:
    """Whether a module's experts are fused in the one form that is taken apart here.

    The other forms (GPT-OSS: transposed, gate and up interleaved, with biases) stay as they are: one tensor each.
    """
    shapes = [getattr(getattr(module, name, None), "shape", ()) for name in FUSED]
    plain = not any(getattr(module, n, False) for n in ("is_transposed", "has_bias", "has_post_expert_norm"))
    return (
        hasattr(module, "_apply_gate")
        and getattr(module, "has_gate", True)
        and getattr(module, "is_concatenated", True)
        and plain
        and [len(shape) for shape in shapes] == [3, 3]
    )


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters by their names in checkpoints, tied ones once; those of experts as views, one a matrix."""
    return {name: tensor for name, _, tensor in named(model)}


def named(model: nn.Module) -> Iterator[tuple[str, Expert | None, torch.Tensor]]:
    """Of each parameter name, expert (None: it is no expert's) and data, in the model's own order."""
    of_fused: dict[int, list[tuple[str, Expert]]] = {}
    for name, expert in experts_of(model).items():
        of_fused.setdefault(id(getattr(expert.module, expert.parameter)), []).append((name, expert))
    for name, parameter in model.named_parameters():
        if id(parameter) in of_fused:
            yield from ((own, expert, expert.weight) for own, expert in of_fused[id(parameter)])
        else:
            yield name, None, parameter.data


def model_type(model: nn.Module) -> str:
    """As transformers names it; empty for a module of another library."""
    config: Any = getattr(model, "config", None)
    return str(config.get_text_config().model_type) if hasattr(config, "get_text_config") else ""


def _name(kind: str, path: str, index: int, part: Part) -> str:
    names = _OLD_NAMES if kind in _OF_OLD else _NAMES
    if kind in _OF_OLD:
        path = path.replace(".mlp.experts", ".block_sparse_moe.experts")
    return f"{path}.{index}.{names[part]}.weight"
