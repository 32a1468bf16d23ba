# SPDX-License-Identifier: Apache-2.0
"""Where the noise lives."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator

from evoalign.config.base import Layers, Modules, PositiveFloat, Section


class SpaceConfig(BaseModel):
    """Where the noise lives: a built-in name, or `package.module:Class` with settings of its own."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "lora"

    @model_validator(mode="after")
    def _own_settings_only_for_own_spaces(self) -> SpaceConfig:
        if ":" in self.name:
            return self
        if self.name not in ("lora", "lowrank", "full"):
            raise ValueError(f"unknown space {self.name!r}; use lora, lowrank, full or package.module:Class")
        if self.model_extra:
            raise ValueError(f"{self.name} takes its settings in the section {self.name}: not under space")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Settings of a space of one's own."""
        return dict(self.model_extra or {})


class LoraConfig(Section):
    """Noise on the factors of a LoRA adapter, W + (alpha / rank) B A."""

    rank: PositiveInt = 1
    alpha: PositiveFloat = 2.0
    target_layers: Layers | None = None
    target_modules: Modules | None = None
    """Last parts of module names, such as q_proj; None takes every linear matrix of the layers."""
    evolve: Literal["b", "ab"] = "b"
    init_scale: PositiveFloat = 1.0
    """`ab` only: the noise of generation 0 is this many times wider."""


class LowrankConfig(Section):
    """Rank-r noise on the linear matrices themselves, W + (s / sqrt(r)) B A (EGGROLL, arXiv 2511.16652)."""

    rank: PositiveInt = 1
    target_layers: Layers | None = None
    target_modules: Modules | None = None
    """Last parts of module names, such as q_proj; None takes every linear matrix of the layers."""


class FullConfig(Section):
    """Dense Gaussian noise on all tensors (Qiu et al., arXiv 2509.24372)."""

    exclude: list[str] | None = None
    """Tensors whose name contains one of these stay as they are. None: norm weights, where served in half precision."""
