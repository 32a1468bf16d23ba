# SPDX-License-Identifier: Apache-2.0
"""A random subspace of d numbers in the factors B of LoRA, for the intrinsic dimension of a task.

Each element of every B is plus or minus one of the d numbers, drawn once from the run's seed, as in Uni-LoRA (arXiv
2506.00799); A is frozen at N(0, 1). Li et al. (arXiv 1804.08838) call the least d whose best score is 90 % of the
score of the whole space the intrinsic dimension d90. The noise of an element of B is as wide as in space `lora`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from evoalign import noise as noise_source
from evoalign.config import EsConfig, Section
from evoalign.spaces.base import Adapter, Master, Slots, Write, factor_slices
from evoalign.spaces.lora import Lora, factor_name
from evoalign.types import EvolvedTensor, Layout, Member, Plan, Slices, TensorSpec

NAME = "subspace"
"""Name of the one tensor that evolves."""


class Settings(Section):
    """Settings next to `space.name`. Rank, alpha and targets are those of the section `lora`."""

    dimension: int = Field(ge=1, le=10**7)
    """Numbers that evolve."""


class Subspace(Lora):
    """W + (alpha / r) B A, where the elements of all B are signed copies of d numbers."""

    name = "subspace"
    settings = Settings
    smaller = "lower lora.rank or lora.target_layers"

    def refusal(self, es: EsConfig) -> str | None:
        return "space subspace evolves B alone; set lora.evolve b" if self.section.evolve == "ab" else None

    def layout(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
        """Return one vector [d]. Frozen are A and `<module>.subspace` [out, r], the number that each element copies.

        With `es.noise_multiplier` its scale is the mean over the weights of their layers' scales.
        """
        lora = super().layout(specs, dtype)
        if not lora.tensors:  # callers say that nothing evolves
            return lora
        places = [EvolvedTensor(_places(t.module), t.shape, t.module) for t in lora.tensors]
        scale = sum(t.scale for t in lora.tensors) / len(lora.tensors)
        return Layout(
            tensors=(EvolvedTensor(NAME, (self.options.dimension,), "", scale),),
            frozen=(*lora.frozen, *places),
            seed=lora.seed,
            dtype=lora.dtype,
            rank=lora.rank,
            scaling=lora.scaling,
            modules=lora.modules,
        )

    def start(self, layout: Layout, name: str, device: torch.device | str) -> torch.Tensor:
        """Return N(0, 1) for A, zeros for the vector, and for places plus or minus the number's position from 1."""
        tensor = layout[name]
        if name == NAME or name == factor_name(tensor.module, "A"):
            return super().start(layout, name, device)
        positions = torch.arange(tensor.shape[0] * tensor.shape[1], device=device)
        uniforms = noise_source.uniforms(noise_source.key(layout.seed, "init", name), positions, positions * 0)
        drawn = (uniforms * (2 * self.options.dimension)).long()
        return ((drawn // 2 + 1) * (1 - drawn % 2 * 2)).float().view(tensor.shape)

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
        """Return the frozen A [1, R, in], and B [M, out, R] gathered from each member's vector."""
        of_a, of_b = factor_slices(slices)
        into_a, into_b = out or (None, None)
        a = self._factor(layout, factor_name(module, "A"), master, plan, members, of_a, into_a)
        width = plan.sigma * layout[NAME].scale
        streams, widths = [m.noise for m in members], [m.sign * width for m in members]
        vectors = self._scaled(layout, NAME, plan.generation, streams, widths, master(NAME))
        places = master(_places(module))[of_b]
        b = vectors[:, places.abs().long() - 1] * places.sign()
        return Adapter(a, b.to(layout.torch_dtype) if into_b is None else into_b.copy_(b), layout.scaling)

    def _launch(self, layout: Layout, master: Master, slots: Sequence[Slots]) -> Write | None:
        return None


def _places(module: str) -> str:
    return f"{module.removesuffix('.weight')}.{NAME}"
