# SPDX-License-Identifier: Apache-2.0
"""One steering vector per layer, added to the residual stream (ActAdd, arXiv 2308.10248; CAA, arXiv 2312.06681).

The vector is a bias of the layer's `mlp.down_proj`, whose output is added to the residual stream as it is. There, the
vectors are contrasts of activations at some tokens; here they are evolved and added at every token. They are saved as a
PEFT adapter with `lora_bias` whose factors are zero.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from evoalign.config import LoraConfig, Section
from evoalign.errors import ConfigError
from evoalign.spaces.base import Adapter, Master, factor_slices
from evoalign.spaces.lora import Lora, bias_name
from evoalign.spaces.targets import LINEAR
from evoalign.types import EvolvedTensor, Layout, Member, Plan, Slices, TensorSpec

MODULE = "down_proj"
_NORM_AFTER = re.compile(r"\.post_(feedforward|ffn|mlp)_(layer)?norm\.")


class Settings(Section):
    """None: the layers are `lora.target_layers`."""


class Steering(Lora):
    """h + v after each layer, with members v + s eps."""

    name = "steering"
    settings = Settings
    has_bias = True
    smaller = "lower lora.target_layers"

    @property
    def section(self) -> LoraConfig:
        return LoraConfig(rank=1, alpha=1, target_layers=self.config.lora.target_layers, target_modules=[MODULE])

    def effective(self, layout: Layout) -> str:
        return f"sigma {self.widths(layout)} per number of a layer's vector"

    def adds(self, layout: Layout) -> str:
        count, size = len(layout.tensors), layout.tensors[0].shape[0]
        layers = f"each of {count} layers" if count > 1 else "one layer"
        return f"one vector of {size:,} in {layers}, added to the output of the MLP"

    def layout(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
        """Return `<module>.lora_B.bias` [out] of each layer; the factors of rank 1 are frozen.

        Raises ConfigError for target modules, and if the output of a layer's MLP is not added to the residual stream as
        it is.
        """
        if self.config.lora.target_modules is not None:
            raise ConfigError("space steering does not read lora.target_modules; remove it, or set lora.target_layers")
        chosen = self.section.target_layers
        layers = {s.layer for s in specs if s.kind in LINEAR and s.layer is not None}
        layers &= layers if chosen is None else set(chosen)
        own = [s for s in specs if s.kind == "linear" and s.name.endswith(f".mlp.{MODULE}.weight")]
        missing = sorted(layers - {s.layer for s in own}, key=str)
        if missing:
            raise ConfigError(f"space steering: layer {missing[0]} has no linear mlp.{MODULE}; use another space")
        after = [s.name for s in specs if s.layer in layers and _NORM_AFTER.search(s.name)]
        if after:
            raise ConfigError(f"space steering: {after[0]} would scale the vector of its layer; use another space")
        lora = super().layout([s for s in specs if s in own or s.kind not in LINEAR or s.layer not in layers], dtype)
        biases = [EvolvedTensor(bias_name(b.module), b.shape[:1], b.module, b.scale) for b in lora.tensors]
        return replace(lora, tensors=tuple(biases), frozen=(*lora.frozen, *lora.tensors))

    def start(self, layout: Layout, name: str, device: torch.device | str) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(layout[name].shape, device=device)

    def adapter(
        self,
        layout: Layout,
        module: str,
        master: Master,
        plan: Plan,
        members: Sequence[Member],
        slices: Slices | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Adapter:
        """Return the factors, which are zero, and each member's vector [M, out]: round(master + fl32(s * noise))."""
        found = super().adapter(layout, module, master, plan, members, slices, out)
        bias = self._factor(layout, bias_name(module), master, plan, members, factor_slices(slices)[1][:1], None)
        return replace(found, b=found.b.expand(len(members), -1, -1), bias=bias)
