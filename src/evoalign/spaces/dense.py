# SPDX-License-Identifier: Apache-2.0
"""Writes dense members to an engine's memory, on a GPU with one launch per memory layout of the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evoalign import kernels, noise
from evoalign.spaces.base import Space, Write, signed
from evoalign.types import Layout, Member, Plan, Slices


@dataclass(frozen=True, slots=True)
class DenseSlots:
    """Memory for members' numbers of the part `slices` of one tensor: those of member i are written to `out[i]`.

    `mean` is that part of the mean, float32. There may be more slots than members, with any strides.
    """

    name: str
    slices: Slices
    mean: torch.Tensor
    out: torch.Tensor


def dense_writer(space: Space, layout: Layout, slots: Sequence[DenseSlots]) -> Write | None:
    """Return a function that writes every member's `Space.perturbed` to slots 0, 1, ... of all tensors.

    Returns None if they are to be written one by one: without a GPU, or if the space has its own `perturbed` or
    `noise`. The function keeps addresses, so the slots and the mean must not move.
    """
    own = type(space).perturbed is not Space.perturbed or type(space).noise is not Space.noise
    if own or not slots or not all(kernels.available(t.device) for s in slots for t in (s.mean, s.out)):
        return None
    from evoalign.kernels.noise import Job, Jobs

    shapes = [layout[s.name].shape for s in slots]
    jobs = Jobs([
        Job(noise.key(layout.seed, "noise", s.name), shape, noise.bounds_of(shape, s.slices), s.out, s.mean)
        for s, shape in zip(slots, shapes, strict=True)
    ])  # fmt: skip
    table = noise.table(slots[0].out.device)

    def write(plan: Plan, members: Sequence[Member]) -> None:
        widths = signed([plan.sigma * layout[s.name].scale for s in slots], members)
        jobs.draw(table, plan.generation, [m.noise for m in members], widths)
        for i in (i for i, m in enumerate(members) if m.is_mean):
            for s in slots:
                s.out[i].copy_(s.mean)

    return write
