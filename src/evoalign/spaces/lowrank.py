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

import torch

from evoalign import noise as noise_source
from evoalign.spaces.base import (
    Adapter,
    Factors,
    Master,
    Space,
    batched,
    check_rank,
    evolved,
    pair_weights,
    scales,
    signed,
    targets,
)
from evoalign.types import Layout, Member, Plan, Slices, TensorSpec, Update


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
        out, in_ = layout[name].shape
        rows, columns = ((*slices, slice(None), slice(None)) if slices else (slice(None), slice(None)))[:2]
        a_key = noise_source.key(layout.seed, "noise", name, "A")
        b_key = noise_source.key(layout.seed, "noise", name, "B")
        rank = slice(0, layout.rank)
        a = noise_source.normals(a_key, (layout.rank, in_), generation, members, (rank, columns), device)
        b = noise_source.normals(b_key, (out, layout.rank), generation, members, (rows, rank), device)
        return Factors(a, b)

    def adapter(
        self, layout: Layout, module: str, master: Master, plan: Plan, members: Sequence[Member]
    ) -> Adapter | None:
        """Served factors; the mean has none."""
        if all(m.is_mean for m in members):
            return None
        return self._served(layout, module, plan.generation, plan.sigma, members, None, master(module).device)

    def gradient(self, layout: Layout, name: str, update: Update, slices: Slices, device: torch.device) -> torch.Tensor:
        """(1/N) sum_i c_i sign_i B_i A_i over the served factors, in units of the served width: one GEMM over N * r.

        Rounding is symmetric, so the members of an antithetic pair share one product and cancel exactly.
        """
        rows, columns = (s.stop - s.start for s in slices)
        total = torch.zeros(rows, columns, dtype=torch.float32, device=device)
        summed, width = pair_weights(update), update.sigma * layout[name].scale
        if not width:  # noise of no width moves nothing
            return total
        for streams in batched(list(summed), 256):
            members = [Member(-1, stream, 1) for stream in streams]
            factors = self._served(layout, name, update.generation, update.sigma, members, slices, device)
            weights = torch.tensor([summed[s] / width for s in streams], dtype=torch.float64).to(torch.float32)
            b = factors.b.to(torch.float32).mul_(weights.to(device)[:, None, None])
            left = b.permute(1, 0, 2).reshape(rows, -1)
            right = factors.a.to(torch.float32).reshape(-1, columns)
            total.addmm_(left, right)
        return total.mul_(1 / len(update.members))

    def _served(
        self,
        layout: Layout,
        name: str,
        generation: int,
        sigma: float,
        members: Sequence[Member],
        slices: Slices | None,
        device: torch.device,
    ) -> Adapter:
        factors = self.noise(layout, name, generation, [m.noise for m in members], slices, device)
        width = signed(members, sigma * layout[name].scale / math.sqrt(layout.rank), device, 2)
        dtype = layout.torch_dtype
        return Adapter(factors.a.to(dtype), factors.b.mul_(width).to(dtype), 1.0)
