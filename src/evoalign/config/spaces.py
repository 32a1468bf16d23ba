# SPDX-License-Identifier: Apache-2.0
"""Settings of the spaces, and the facts about a space that follow from its settings alone, without torch.

The classes in `evoalign.spaces` read these facts from here.
"""

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
    "norms": "evoalign.spaces.norms:Norms",
    "singular": "evoalign.spaces.singular:Singular",
    "subspace": "evoalign.spaces.subspace:Subspace",
    "steering": "evoalign.spaces.steering:Steering",
}
"""The shipped spaces and where their classes are. Those without a section have their settings next to `name`."""


class SpaceConfig(BaseModel):
    """The space in which the noise is drawn: a built-in name, or `package.module:Class` with custom settings."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: Annotated[str, CODE] = "lora"
    """`lora` (factors of a LoRA adapter), `lowrank` (low-rank noise on matrices), `full` (dense noise on all tensors),
    `norms` (gains and attention biases), `singular` (singular values of an adapter, with `share`), `subspace` (few
    numbers, with `dimension`), `steering` (a vector per layer), or a custom `package.module:Class`; settings of the
    last five are next to `name`.
    `space: lora` is short for `space: {name: lora}`."""

    @model_validator(mode="after")
    def _check_name(self) -> SpaceConfig:
        if not self.names_code and self.name not in SPACES:
            raise ValueError(f"unknown space {shown(self.name)}; use {', '.join(SPACES)} or package.module:Class")
        if self.model_extra and self.name in SECTIONS:
            raise ValueError(f"{self.name} has its settings in the section {self.name}, not under space")
        return self

    @property
    def names_code(self) -> bool:
        """Whether the space is a custom class, whose code is imported."""
        return ":" in self.name

    @property
    def options(self) -> dict[str, Any]:
        """Settings of a custom space."""
        return dict(self.model_extra or {})


class SpaceSection(Section):
    """Base of the sections of spaces; its defaults hold for a custom space."""

    evolves_model: ClassVar[bool] = True
    """Whether the mean is the model itself, and not an adapter."""
    took_library_sums: ClassVar[bool] = True
    """Whether earlier releases may have added its updates with a library's matrix product."""

    @property
    def has_pairs(self) -> bool:
        """Whether members of opposite sign have opposite perturbations."""
        return True

    def refusal(self, es: EsConfig) -> str | None:
        """Return why the space cannot use these settings; None where it can."""
        return None


class LoraConfig(SpaceSection):
    """Noise on the factors of a LoRA adapter, W + (alpha / rank) B A."""

    evolves_model = False
    took_library_sums = False
    rank: Count = 1
    """Rank of the adapter. A higher rank searches more directions with the same noise in each weight."""
    alpha: Positive = 2.0
    """The adapter is scaled by alpha / rank, as in PEFT."""
    target_layers: Layers | None = None
    """Layers to adapt, counted from 0. None: all."""
    target_modules: Annotated[Modules | None, INSIDE] = None
    """Last parts of module names, such as q_proj. None: all linear matrices of the layers."""
    evolve: Literal["b", "ab"] = "b"
    """`b` freezes A and evolves B from zero. `ab` evolves both, as published LoRA-population code does; kept for
    study."""
    init_scale: Positive = 1.0
    """For `evolve: ab`: factor of the noise width in generation 0."""

    @property
    def has_pairs(self) -> bool:
        """False with `evolve: ab`: from A = B = 0, (-B)(-A) = B A."""
        return self.evolve == "b"

    def refusal(self, es: EsConfig) -> str | None:
        if es.optimizer.adapts_noise and self.evolve == "ab" and self.init_scale != 1:
            return f"es.optimizer {es.optimizer.name} adapts the width from generation 0 on; set lora.init_scale 1"
        if self.has_pairs or not es.antithetic:
            return None
        return (
            "es.antithetic with lora.evolve ab can never learn: from A = B = 0 the two members of a pair are the "
            "same model, since (-B)(-A) = B A; set es.antithetic false, or lora.evolve b"
        )


class LowrankConfig(SpaceSection):
    """Rank-r noise on the linear matrices themselves, W + (s / sqrt(r)) B A (EGGROLL, arXiv 2511.16652)."""

    rank: Count = 1
    """Rank of each member's noise."""
    target_layers: Layers | None = None
    """Layers that get noise, counted from 0. None: all."""
    target_modules: Annotated[Modules | None, INSIDE] = None
    """Last parts of module names, such as q_proj. None: all linear matrices of the layers."""

    def refusal(self, es: EsConfig) -> str | None:
        return _too_large("lowrank", es)


class FullConfig(SpaceSection):
    """Dense Gaussian noise on all tensors (Qiu et al., arXiv 2509.24372)."""

    took_library_sums = False
    exclude: Annotated[Texts | None, INSIDE] = None
    """Tensors whose names contain one of these texts are not evolved. None: norm weights if served in half precision,
    where small noise would be rounded away."""

    def refusal(self, es: EsConfig) -> str | None:
        return _too_large("full", es)


class AdapterSection(SpaceSection):
    """The facts about a shipped space without a section whose mean is an adapter."""

    evolves_model = False


FACTS: dict[str, type[SpaceSection]] = dict.fromkeys(("singular", "subspace", "steering"), AdapterSection)
"""Facts about shipped spaces without a section, where they are not those of a custom space."""
SECTIONS: dict[str, type[SpaceSection]] = {"lora": LoraConfig, "lowrank": LowrankConfig, "full": FullConfig}
"""The sections of the spaces that come with the package."""


def _too_large(space: str, es: EsConfig) -> str | None:
    if es.optimizer.name == "sgd":
        return None
    return (
        f"es.optimizer {es.optimizer.name} keeps state of the size of the model with space {space}; "
        f"use sgd, or space {'subspace' if es.optimizer.adapts_noise else 'lora or norms'}"
    )
