# SPDX-License-Identifier: Apache-2.0
"""Noise on the factors of a LoRA adapter: the default, and the only space that keeps no second copy of the model.

`evolve: b` freezes A ~ N(0, 1) and evolves B from zero: the model starts unchanged, the search space is linear and
the ES estimate is unbiased. `evolve: ab` is the published LoRA-population algorithm: A and B start at zero and both
move. There, the expected gain at A = B = 0 is zero (a saddle), and averaging A and B separately is not averaging B A.
It is kept for study. Effective noise on W: (alpha / r) sqrt(r) rms(A) s per element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from evoalign import noise as noise_source
from evoalign.config import LoraConfig
from evoalign.errors import ConfigError, ModelError
from evoalign.spaces.base import Adapter, Master, Slots, Space, Write, factor_slices, signed
from evoalign.spaces.targets import check_rank, module_of, scales, targets
from evoalign.types import MEAN, MEAN_PLAN, EvolvedTensor, Layout, Member, Plan, Slices, TensorSpec


class Lora(Space):
    """W + (alpha / r) B A with members B + s eps (and A + s eps with `evolve: ab`)."""

    name = "lora"
    carrier = "adapter"
    evolves_model = LoraConfig.evolves_model
    smaller = "lower lora.rank or lora.target_layers"

    @property
    def section(self) -> LoraConfig:
        return self.config.lora

    @property
    def rank(self) -> int:
        return self.section.rank

    @property
    def scaling(self) -> float:
        """`lora.alpha / lora.rank`, as in PEFT."""
        return self.section.alpha / self.section.rank

    def width_factor(self, generation: int) -> float:
        """Widen the noise of generation 0 for `evolve: ab`, as the published LoRA-population code does."""
        return self.section.init_scale if self.section.evolve == "ab" and generation == 0 else 1.0

    def effective(self, layout: Layout) -> str:
        """Describe the noise on W for `evolve: b`, where A ~ N(0, 1), so that rms(A) is 1 up to sampling error."""
        if self.section.evolve == "ab":
            width = self.widths(layout)
            return f"sigma {width} per factor element; A and B start at zero, so that of B A is its square"
        shown = self.widths(layout, layout.scaling * math.sqrt(layout.rank))
        return f"effective sigma of B A {shown} per weight: (alpha / r) sqrt(r) rms(A) s"

    def layout(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
        """Return factors `<module>.lora_A.weight` [r, in] and `<module>.lora_B.weight` [out, r] of each target."""
        section = self.section
        matrices = targets([s for s in specs if s.peft], section.target_layers, section.target_modules, "lora")
        _check_pairs({module_of(s.name) for s in matrices if s.kind == "expert"})
        check_rank(section.rank, matrices, "lora")
        scale = scales(self.config, matrices)
        tensors: list[EvolvedTensor] = []
        frozen: list[EvolvedTensor] = []
        for spec in matrices:
            out, in_ = spec.shape
            a = EvolvedTensor(factor_name(spec.name, "A"), (section.rank, in_), spec.name, scale[spec.layer])
            b = EvolvedTensor(factor_name(spec.name, "B"), (out, section.rank), spec.name, scale[spec.layer])
            (tensors if section.evolve == "ab" else frozen).append(a)
            tensors.append(b)
        return Layout(
            tensors=tuple(tensors),
            frozen=tuple(frozen),
            seed=self.config.seed,
            dtype=str(dtype).removeprefix("torch."),
            rank=section.rank,
            scaling=self.scaling,
        )

    def start(self, layout: Layout, name: str, device: torch.device | str) -> torch.Tensor:
        """Return N(0, 1) for a frozen A and zeros for an evolved factor."""
        tensor = layout[name]
        if name in layout.frozen_names:
            key = noise_source.key(layout.seed, "init", name)
            return noise_source.normals(key, tensor.shape, 0, [0], None, device)[0]
        return torch.zeros(tensor.shape, dtype=torch.float32, device=device)

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
        """Return the served factors: round(master + fl32(s * noise)). A frozen A is shared by all members."""
        of_a, of_b = factor_slices(slices)
        into_a, into_b = out or (None, None)
        a = self._factor(layout, factor_name(module, "A"), master, plan, members, of_a, into_a)
        b = self._factor(layout, factor_name(module, "B"), master, plan, members, of_b, into_b)
        return Adapter(a, b, layout.scaling)

    def _launch(self, layout: Layout, master: Master, slots: Sequence[Slots]) -> Write | None:
        from evoalign.kernels.noise import Job, Jobs

        factors = [
            (layout[factor_name(s.module, factor)], part, out)
            for s in slots
            for factor, part, out in zip("AB", factor_slices(s.slices), (s.a, s.b), strict=True)
        ]
        table, key, bounds = noise_source.table(slots[0].a.device), noise_source.key, noise_source.bounds_of
        jobs = Jobs([
            Job(key(layout.seed, "noise", t.name), t.shape, bounds(t.shape, part), out, master(t.name)[part])
            for t, part, out in factors
        ])  # fmt: skip
        # A frozen A gets noise of width 0, in the same launch: a copy is one launch each, and a mixture has thousands.
        scale = [0.0 if t.name in layout.frozen_names else t.scale for t, _, _ in factors]

        def write(plan: Plan, members: Sequence[Member]) -> None:
            widths = signed([plan.sigma * s for s in scale], members)
            jobs.draw(table, plan.generation, [m.noise for m in members], widths)

        return write

    def _factor(
        self,
        layout: Layout,
        name: str,
        master: Master,
        plan: Plan,
        members: Sequence[Member],
        slices: Slices,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        mean, dtype = master(name)[slices], layout.torch_dtype
        if name in layout.frozen_names:
            return mean[None].to(dtype) if out is None else out.copy_(mean[None].expand_as(out))
        if all(m.is_mean for m in members):
            return mean.expand(len(members), *mean.shape).to(dtype) if out is None else out.copy_(mean.expand_as(out))
        widths = [m.sign * plan.sigma * layout[name].scale for m in members]
        streams = [m.noise for m in members]
        return self._scaled(layout, name, plan.generation, streams, widths, mean, slices, dtype, out)


def factor_name(module: str, factor: str) -> str:
    """Return PEFT's name, without its prefix, of a factor of a linear weight."""
    return f"{module.removesuffix('.weight')}.lora_{factor}.weight"


def bias_name(module: str) -> str:
    """Return PEFT's name, without its prefix, of the bias that `lora_bias` adds to a linear weight's adapter."""
    return f"{module.removesuffix('.weight')}.lora_B.bias"


def factors_of(
    space: Space, layout: Layout, mean: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield A, B and the bias, float32, of each weight's adapter of a mean, by PEFT's names. Raises ModelError."""
    tensors, exact = dict(mean), replace(layout, dtype="float32")
    for module in layout.modules:
        adapter = space.adapter(exact, module, tensors.__getitem__, MEAN_PLAN, (MEAN,))
        if adapter is None:
            raise ModelError(f"space {space.name} has no adapter of its mean for {module}")
        yield factor_name(module, "A"), adapter.a[0]
        yield factor_name(module, "B"), adapter.b[0]
        if adapter.bias is not None:
            yield bias_name(module), adapter.bias[0]


def _check_pairs(modules: set[str]) -> None:
    """Raise ConfigError if the modules contain one half of a fused pair of experts: PEFT loads both or none."""
    for pair in (("gate_proj", "up_proj"), ("w1", "w3")):
        chosen = [name for name in pair if name in modules]
        if len(chosen) == 1:
            other = next(name for name in pair if name not in modules)
            raise ConfigError(
                f"lora.target_modules: experts have {chosen[0]} and {other} fused, and PEFT loads adapters of both or "
                f"of none; add {other}, or use space lowrank"
            )
