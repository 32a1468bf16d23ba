# SPDX-License-Identifier: Apache-2.0
"""Rank-r noise on the model's linear matrices, W + (s / sqrt(r)) B_i A_i (EGGROLL, arXiv 2511.16652, section 4).

The update sums the served products and moves W itself: averaging A and B separately would add N^2 - N cross terms and
has another direction. Deviations from the paper: the noise is regenerated from a counter, B is
served with s / sqrt(r) and the sign folded in (so any LoRA engine can carry it), and the update regenerates the same
rounded factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from evoalign import kernels
from evoalign import noise as noise_source
from evoalign.config import LowrankConfig
from evoalign.kernels import products
from evoalign.spaces.base import (
    Adapter,
    Factors,
    Master,
    MeanPart,
    Slots,
    Space,
    Write,
    batched,
    factor_slices,
    moves,
    pair_weights,
    signed,
)
from evoalign.spaces.targets import check_rank, evolved, scales, targets
from evoalign.types import Layout, Member, Plan, Slices, TensorSpec, Update

if TYPE_CHECKING:
    from evoalign.kernels.noise import Job, Jobs
    from evoalign.kernels.update import Products

_Factor: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
_ROOM = 1 << 25
"""Maximum count of factor elements of all members in memory during an update (128 MiB), for more than one matrix."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Matrices of the mean whose factors are drawn and multiplied together."""

    names: tuple[str, ...]
    device: torch.device
    factors: Jobs
    products: Products


class LowRank(Space):
    """Members are adapters on shared weights; the mean is the weights."""

    name = "lowrank"
    carrier = "adapter"
    evolves_model = LowrankConfig.evolves_model
    smaller = "lower lowrank.rank or lowrank.target_layers"

    @property
    def section(self) -> LowrankConfig:
        return self.config.lowrank

    @property
    def rank(self) -> int:
        return self.section.rank

    @property
    def has_mean_adapter(self) -> bool:
        return False

    def layout(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
        section = self.section
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
        """Return the two factors. Row slices select rows of B, column slices columns of A."""
        a, b = self._factors(layout, name)
        of_a, of_b = factor_slices(slices)
        return Factors(
            noise_source.normals(*a, generation, members, of_a, device),
            noise_source.normals(*b, generation, members, of_b, device),
        )

    def _factors(self, layout: Layout, name: str) -> tuple[_Factor, _Factor]:
        """Return the key and shape of the noise of A and of B."""
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
        """Return the served factors. The mean has none: `out` is set to zero."""
        if all(m.is_mean for m in members):
            for factor in out or ():
                factor.zero_()
            return None
        device = (master(module) if out is None else out[0]).device
        streams, signs = [m.noise for m in members], [m.sign for m in members]
        return self._served(layout, module, plan, streams, signs, slices, device, out)

    def perturbed(
        self,
        layout: Layout,
        name: str,
        master: torch.Tensor,
        plan: Plan,
        member: Member,
        slices: Slices | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a merged member: master + B A of its served factors, in float32. Engines serve members unmerged."""
        total = master.clone()
        if not member.is_mean:
            own = self._served(layout, name, plan, [member.noise], [member.sign], slices, master.device)
            rows, columns = total.shape
            left, right = products.factors(layout.rank, rows, columns, total.device)
            left.copy_(own.b[0].to(torch.float32).mT)
            right.copy_(own.a[0])
            products.move(total, None, None, left, right, 1, 1.0, 0.0)
        return total if out is None else out.copy_(total)

    def gradient(self, layout: Layout, name: str, update: Update, slices: Slices, device: torch.device) -> torch.Tensor:
        """Return (1/N) sum_i c_i sign_i B_i A_i over the served factors, in units of the served width.

        Rounding is symmetric, so the members of an antithetic pair share one product and cancel exactly.
        """
        total = torch.zeros([s.stop - s.start for s in slices], dtype=torch.float32, device=device)
        if update.summation == "library":
            return self._library_sum(layout, name, update, slices, total).mul_(1 / len(update.members))
        self._add_products(layout, MeanPart(name, slices, total), update, 1.0, 0.0)
        return total

    def _library_sum(
        self, layout: Layout, name: str, update: Update, slices: Slices, total: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum by torch's matrix product, for old journals. Its bits depend on the machine."""
        rows, columns = total.shape
        weights = self._weights(layout, name, update)
        for streams in batched(list(weights), 256):
            factors = self._served(layout, name, update, streams, [1] * len(streams), slices, total.device)
            weight = kernels.factors(tuple(weights[s] for s in streams), factors.b.device)
            b = factors.b.to(torch.float32).mul_(weight[:, None, None])
            left = b.permute(1, 0, 2).reshape(rows, -1)
            right = factors.a.to(torch.float32).reshape(-1, columns)
            total.addmm_(left, right)
        return total

    def _weights(self, layout: Layout, name: str, update: Update) -> dict[int, float]:
        """Return each stream's weight on its product of served factors, which carry the width; none for width 0."""
        width = update.sigma * layout[name].scale
        return {stream: weight / width for stream, weight in pair_weights(update).items()} if width else {}

    def fused(self, device: torch.device | str) -> bool:
        """Return True on all devices: products are added in order, so a part gets the same bits as the whole."""
        return type(self).gradient is LowRank.gradient

    def _accumulate_fused(self, layout: Layout, part: MeanPart, update: Update) -> None:
        self._add_products(layout, part, update, update.step * layout[part.name].scale, update.decay)

    def _add_products(self, layout: Layout, part: MeanPart, update: Update, step: float, decay: float) -> None:
        """Move a part of a matrix by step / N times the ordered sum of weighted products of served factors.

        If the factors of all members would take too much memory, the part is halved. The bits are the same.
        """
        weights = self._weights(layout, part.name, update)
        device, (rows, columns) = part.master.device, part.master.shape
        if len(weights) * layout.rank * (rows + columns) > _ROOM and max(rows, columns) > 1:
            dim = 0 if rows >= columns else 1
            for here, whole in _halves(part.slices, dim):
                start, served = (None if t is None else t[here] for t in (part.start, part.served))
                half = MeanPart(part.name, whole, part.master[here], start, served)
                self._add_products(layout, half, update, step, decay)
            return
        factors = self._served(layout, part.name, update, list(weights), [1] * len(weights), part.slices, device)
        weight = kernels.factors(tuple(weights.values()), device)[:, None, None]
        terms, count = len(weights) * layout.rank, len(update.members)
        left, right = products.factors(terms, rows, columns, device)
        torch.mul(factors.b.to(torch.float32).mT, weight, out=left.view(-1, layout.rank, rows))
        right.view_as(factors.a).copy_(factors.a)
        products.move(part.master, part.served, part.start, left, right, count, step, decay)

    def _launch(self, layout: Layout, master: Master, slots: Sequence[Slots]) -> Write:
        from evoalign.kernels.noise import Jobs

        jobs = Jobs([job for s in slots for job in self._jobs(layout, s.module, s.slices, s.a, s.b)])
        table, names = noise_source.table(slots[0].a.device), [s.module for s in slots]

        def write(plan: Plan, members: Sequence[Member]) -> None:
            widths = signed([plan.sigma * layout[n].scale / math.sqrt(layout.rank) for n in names], members)
            jobs.draw(table, plan.generation, [m.noise for m in members], _after_ones(widths))

        return write

    def mover(self, layout: Layout, parts: Sequence[MeanPart]) -> Callable[[Update], None] | None:
        """Return a function that moves all parts; on a GPU with one launch per shape. It keeps the factors' memory."""
        fused = all(kernels.available(p.master.device) and self.fused(p.master.device) for p in parts)
        if not (parts and fused and self._keeps("accumulate", "noise")):
            return None
        made: dict[int, list[_Batch]] = {}

        def move(update: Update) -> None:
            if not all(moves(update, p.start) for p in parts):
                return
            if len(update.members) not in made:
                made.clear()
                made[len(update.members)] = self._batches(layout, parts, len(update.members))
            for batch in made[len(update.members)]:
                self._move(layout, batch, update)

        return move

    def _batches(self, layout: Layout, parts: Sequence[MeanPart], members: int) -> list[_Batch]:
        """Group the parts, in order, so that the factors of each group fit in one shared buffer."""
        from evoalign.kernels.noise import Jobs
        from evoalign.kernels.update import Matrix, Products, room, split

        def shapes(some: Sequence[MeanPart]) -> list[tuple[int, int]]:
            return [(p.master.shape[0], p.master.shape[1]) for p in some]

        terms = members * layout.rank
        beyond = room(terms, ())
        groups, rooms = list[list[MeanPart]](), list[int]()
        for part in parts:
            own = room(terms, shapes([part])) - beyond
            if not rooms or rooms[-1] + own > _ROOM:
                groups.append([])
                rooms.append(beyond)
            groups[-1].append(part)
            rooms[-1] += own
        memory = torch.empty(max(rooms), dtype=torch.float32, device=parts[0].master.device)
        batches: list[_Batch] = []
        for group, size in zip(groups, rooms, strict=True):
            factors = split(memory[:size], terms, shapes(group))
            each = [tuple(t.view(members, layout.rank, -1) for t in pair) for pair in factors]
            jobs = [
                job
                for p, (left, right) in zip(group, each, strict=True)
                for job in self._jobs(layout, p.name, p.slices, right, left.mT)
            ]
            matrices = [Matrix(p.master, p.served, p.start, *places) for p, places in zip(group, factors, strict=True)]
            batches.append(_Batch(tuple(p.name for p in group), memory.device, Jobs(jobs), Products(matrices)))
        return batches

    def _move(self, layout: Layout, batch: _Batch, update: Update) -> None:
        """Draw the served factors of a batch, with weights on those of B, and add their products in order."""
        pairs, scale = pair_weights(update), [layout[n].scale for n in batch.names]
        coefficient = torch.tensor([*pairs.values()], dtype=torch.float64)
        width = torch.tensor([update.sigma * s for s in scale], dtype=torch.float64)[:, None]
        batch.factors.draw(
            noise_source.table(batch.device),
            update.generation,
            list(pairs),
            _after_ones((width / math.sqrt(layout.rank)).expand(-1, len(pairs))),
            _after_ones(torch.where(width != 0, coefficient / width, 0.0)),  # weight 0 where the width is 0
            layout.torch_dtype,
        )
        steps = [update.step * s for s in scale]
        batch.products.move(len(pairs) * layout.rank, len(update.members), steps, update.decay)

    def _jobs(self, layout: Layout, name: str, slices: Slices, a: torch.Tensor, b: torch.Tensor) -> list[Job]:
        """Return the jobs that draw a matrix's part of A to `a` [S, R, in] and of B to `b` [S, out, R]."""
        from evoalign.kernels.noise import Job

        factors, parts = self._factors(layout, name), factor_slices(slices)
        return [
            Job(key, shape, noise_source.bounds_of(shape, part), out)
            for (key, shape), part, out in zip(factors, parts, (a, b), strict=True)
        ]

    def _served(
        self,
        layout: Layout,
        name: str,
        source: Plan | Update,
        streams: Sequence[int],
        signs: Sequence[int],
        slices: Slices | None,
        device: torch.device,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Adapter:
        """Return the served factors of some streams, with the generation and sigma of a plan or an update."""
        width = source.sigma * layout[name].scale / math.sqrt(layout.rank)
        widths, dtype, into = [sign * width for sign in signs], layout.torch_dtype, out or (None, None)
        if type(self).noise is not LowRank.noise:  # a subclass overrides `noise`
            own = self.noise(layout, name, source.generation, streams, slices, device)
            factor = kernels.factors(tuple(widths), own.b.device)
            drawn = own.a.to(dtype), own.b.mul_(factor[:, None, None]).to(dtype)
            a, b = (d if o is None else o.copy_(d) for d, o in zip(drawn, into, strict=True))
            return Adapter(a, b, 1.0)
        factors, parts, scale = self._factors(layout, name), factor_slices(slices), ([1.0] * len(streams), widths)
        a, b = (
            noise_source.scaled(key, shape, source.generation, streams, w, dtype=dtype, slices=p, device=device, out=o)
            for (key, shape), w, p, o in zip(factors, scale, parts, into, strict=True)
        )
        return Adapter(a, b, 1.0)


def _halves(slices: Slices, dim: int) -> Iterator[tuple[Slices, Slices]]:
    """Yield the slices of two halves of a part along a dimension: within the part, and within the whole matrix."""
    first, size = slices[dim].start, slices[dim].stop - slices[dim].start
    for a, b in ((0, size // 2), (size // 2, size)):
        here, whole = [slice(None)] * 2, list(slices)
        here[dim], whole[dim] = slice(a, b), slice(first + a, first + b)
        yield tuple(here), tuple(whole)


def _after_ones(of_b: torch.Tensor) -> torch.Tensor:
    """Interleave ones for A with these values for B of each matrix: [K, M] -> [2 K, M]."""
    return torch.stack((torch.ones_like(of_b), of_b), dim=1).flatten(0, 1)
