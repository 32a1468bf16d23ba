# SPDX-License-Identifier: Apache-2.0
"""Where the noise lives. What a shipped space does follows from its class in `evoalign.spaces`; what can be known of it
from settings alone, without torch, stands here beside its settings, and the class reads it from here."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from evoalign.config.base import Count, Layers, Modules, Positive, Section, Texts
from evoalign.config.es import EsConfig
from evoalign.config.outside import CODE, INSIDE
from evoalign.errors import shown

SPACES = {
    "lora": "evoalign.spaces.lora:Lora",
    "lowrank": "evoalign.spaces.lowrank:LowRank",
    "full": "evoalign.spaces.full:Full",
}
"""The shipped spaces and where their classes are."""


class SpaceConfig(BaseModel):
    """Where the noise lives: a built-in name, or `package.module:Class` with settings of its own."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: Annotated[str, CODE] = "lora"

    @model_validator(mode="after")
    def _known(self) -> SpaceConfig:
        if not self.names_code and self.name not in SPACES:
            raise ValueError(f"unknown space {shown(self.name)}; use {', '.join(SPACES)} or package.module:Class")
        if self.model_extra and self.name in SECTIONS:
            raise ValueError(f"{self.name} takes its settings in the section {self.name}: not under space")
        return self

    @property
    def names_code(self) -> bool:
        """Whether the space is of the user's own: to make it imports what is named."""
        return ":" in self.name

    @property
    def options(self) -> dict[str, Any]:
        """Settings of a space that has no section."""
        return dict(self.model_extra or {})


class SpaceSection(Section):
    """Settings of a space that has a section. As it is: what holds for a space of which the config knows nothing."""

    evolves_model: ClassVar[bool] = True
    """Whether the mean is the model itself; otherwise it lies beside it, as an adapter does."""
    took_library_sums: ClassVar[bool] = True
    """Whether journals that do not say so may have added their updates by a library's matrix product."""

    @property
    def has_pairs(self) -> bool:
        """Whether members of opposite sign lie opposite each other."""
        return True

    def refusal(self, es: EsConfig) -> str | None:
        """What of `es` the space cannot do, and why; None where that is nothing."""
        return None


class LoraConfig(SpaceSection):
    """Noise on the factors of a LoRA adapter, W + (alpha / rank) B A."""

    evolves_model = False
    took_library_sums = False
    rank: Count = 1
    alpha: Positive = 2.0
    target_layers: Layers | None = None
    target_modules: Annotated[Modules | None, INSIDE] = None
    """Last parts of module names, such as q_proj; None takes every linear matrix of the layers."""
    evolve: Literal["b", "ab"] = "b"
    init_scale: Positive = 1.0
    """`ab` only: the noise of generation 0 is this many times wider."""

    @property
    def has_pairs(self) -> bool:
        """Not with `evolve: ab`: from A = B = 0, (-B)(-A) = B A."""
        return self.evolve == "b"

    def refusal(self, es: EsConfig) -> str | None:
        if self.has_pairs or not es.antithetic:
            return None
        return (
            "es.antithetic with lora.evolve ab can never learn: from A = B = 0 the two members of a pair are the "
            "same model, since (-B)(-A) = B A; set es.antithetic false, or lora.evolve b"
        )


class LowrankConfig(SpaceSection):
    """Rank-r noise on the linear matrices themselves, W + (s / sqrt(r)) B A (EGGROLL, arXiv 2511.16652)."""

    rank: Count = 1
    target_layers: Layers | None = None
    target_modules: Annotated[Modules | None, INSIDE] = None
    """Last parts of module names, such as q_proj; None takes every linear matrix of the layers."""

    def refusal(self, es: EsConfig) -> str | None:
        return _too_large("lowrank", es)


class FullConfig(SpaceSection):
    """Dense Gaussian noise on all tensors (Qiu et al., arXiv 2509.24372)."""

    took_library_sums = False
    exclude: Annotated[Texts | None, INSIDE] = None
    """Tensors whose name contains one of these stay as they are. None: norm weights, where served in half precision."""

    def refusal(self, es: EsConfig) -> str | None:
        return _too_large("full", es)


SECTIONS: dict[str, type[SpaceSection]] = {"lora": LoraConfig, "lowrank": LowrankConfig, "full": FullConfig}
"""The spaces whose settings stand in a section of the config."""


def _too_large(space: str, es: EsConfig) -> str | None:
    if es.optimizer.name == "sgd":
        return None
    return (
        f"es.optimizer {es.optimizer.name} keeps state of the size of the model with space {space}; "
        "use sgd, or space lora"
    )
