# SPDX-License-Identifier: Apache-2.0
"""Rank-r noise on the model's linear matrices, W + (s / sqrt(r)) B_i A_i (EGGROLL, arXiv 2511.16652, section 4).

The update sums the very products that were served and goes to W itself: averaging A and B apart would add N^2 - N
cross terms and is not the same direction. Deviations from the paper: the noise is regenerated from a counter, B is
served with s / sqrt(r) and the sign folded in (so any LoRA engine can carry it), and the update regenerates the same
rounded factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from evoalign import kernels
from evoalign import noise as noise_source
from evoalign.spaces.base import (
    Adapter,
    Factors,
    Master,
    Space,
    batched,
    check_rank,
    evolved,
    factor_slices,
    pair_weights,
    scales,
    targets,
)
from evoalign.types import Layout, Member, Plan, Slices, TensorSpec, Update

_Factor: TypeAlias = tuple[tuple[int, int], tuple[int, int]]


class LowRank(Space):
    """Members are adapters beside shared weights; the mean is the weights."""

    name = "lowrank"
    carrier = "adapter"
    evolves_model = True

    def layout(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
        """The target matrices."""
        section = self.config.lowrank
        matrices = targets(specs, section.target_layers, section.target_modules, "lowrank")
        check_rank(section.rank, matrices, "lowrank")
        scale = scales(self.config, matrices)
        return Layout(
            tensors=tuple(evolved(s, scale[s.layer]) for s in matrices),
            seed=self.config.seed,
            dtype=str(dtype).removeprefix("torch."),
            rank=section.rank,
        )

    def noise(
        self,
        layout: Layout,
        name: str,
        generation: int,
        members: Sequence[int],
        slices: Slices | None = None,
        device: torch.device | str = "cpu",
    ) -> Factors:
        """The two factors; row slices cut B, column slices cut A."""
        a, b = self._factors(layout, name)
        of_a, of_b = factor_slices(slices)
        return Factors(
            noise_source.normals(*a, generation, members, of_a, device),
            noise_source.normals(*b, generation, members, of_b, device),
        )

    def _factors(self, layout: Layout, name: str) -> tuple[_Factor, _Factor]:
        """Key and shape of each factor's noise."""
        out, in_ = layout[name].shape
        a, b = (noise_source.key(layout.seed, "noise", name, factor) for factor in "AB")
        return (a, (layout.rank, in_)), (b, (out, layout.rank))

    def adapter(
        self,
        layout: Layout,
        module: str,
        master: Master,
        plan: Plan,
        members: Sequence[Member],
        slices: Slices | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Adapter | None:
        """Served factors; the mean has none, and zeros in `out`."""
        if all(m.is_mean for m in members):
            for factor in out or ():
                factor.zero_()
            return None
        device = (master(module) if out is None else out[0]).device
        streams, signs = [m.noise for m in members], [m.sign for m in members]
        return self._served(layout, module, plan.generation, plan.sigma, streams, signs, slices, device, out)

    def gradient(self, layout: Layout, name: str, update: Update, slices: Slices, device: torch.device) -> torch.Tensor:
        """(1/N) sum_i c_i sign_i B_i A_i over the served factors, in units of the served width: one GEMM over N * r.

        Rounding is symmetric, so the members of an antithetic pair share one product and cancel exactly.
        """
        rows, columns = (s.stop - s.start for s in slices)
        total = torch.zeros(rows, columns, dtype=torch.float32, device=device)
        weights = self._weights(layout, name, update)
        for streams in batched(list(weights), 256):
            factors = self._of_streams(layout, name, update, streams, slices, device)
            weight = kernels.factors(tuple(weights[s] for s in streams), factors.b.device)
            b = factors.b.to(torch.float32).mul_(weight[:, None, None])
            left = b.permute(1, 0, 2).reshape(rows, -1)
            right = factors.a.to(torch.float32).reshape(-1, columns)
            total.addmm_(left, right)
        return total.mul_(1 / len(update.members))

    def _weights(self, layout: Layout, name: str, update: Update) -> dict[int, float]:
        """Of each stream's product of served factors, which carry the width; none where noise has no width."""
        width = update.sigma * layout[name].scale
        return {stream: weight / width for stream, weight in pair_weights(update).items()} if width else {}

    def _of_streams(
        self, layout: Layout, name: str, update: Update, streams: Sequence[int], slices: Slices, device: torch.device
    ) -> Adapter:
        return self._served(layout, name, update.generation, update.sigma, streams, [1] * len(streams), slices, device)

    def fused(self, device: torch.device | str) -> bool:
        """On GPUs: products of the factors are added in order there, so a shard gets the bits of the whole."""
        return kernels.available(device) and type(self).gradient is LowRank.gradient

    def _accumulate_fused(
        self,
        layout: Layout,
        master: torch.Tensor,
        name: str,
        slices: Slices,
        update: Update,
        start: torch.Tensor | None,
        served: torch.Tensor | None,
    ) -> None:
        from evoalign.kernels.update import product

        weights = self._weights(layout, name, update)
        factors = self._of_streams(layout, name, update, list(weights), slices, master.device)
        step, size = update.step * layout[name].scale, len(update.members)
        product(master, served, start, factors.a, factors.b, tuple(weights.values()), size, step, update.decay)

    def _served(
        self,
        layout: Layout,
        name: str,
        generation: int,
        sigma: float,
        streams: Sequence[int],
        signs: Sequence[int],
        slices: Slices | None,
        device: torch.device,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Adapter:
        width, dtype = sigma * layout[name].scale / math.sqrt(layout.rank), layout.torch_dtype
        widths = [sign * width for sign in signs]
        if type(self).noise is not LowRank.noise:  # a space derived from this one, with noise of its own
            own, into = self.noise(layout, name, generation, streams, slices, device), out or (None, None)
            factor = kernels.factors(tuple(widths), own.b.device)
            drawn = own.a.to(dtype), own.b.mul_(factor[:, None, None]).to(dtype)
            a, b = (d if o is None else o.copy_(d) for d, o in zip(drawn, into, strict=True))
            return Adapter(a, b, 1.0)
        (a_key, a_shape), (b_key, b_shape) = self._factors(layout, name)
        of_a, of_b = factor_slices(slices)
        into_a, into_b = out or (None, None)
        ones = [1.0] * len(streams)
        a = noise_source.scaled(
            a_key, a_shape, generation, streams, ones, dtype=dtype, slices=of_a, device=device, out=into_a
        )
        b = noise_source.scaled(
            b_key, b_shape, generation, streams, widths, dtype=dtype, slices=of_b, device=device, out=into_b
        )
        return Adapter(a, b, 1.0)
