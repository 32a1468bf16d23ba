# SPDX-License-Identifier: Apache-2.0
"""Represent a rectangular part of a tensor as rows of consecutive elements, for the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

NORMALS_PER_BLOCK = 8
"""Normals per Philox call."""


@dataclass(frozen=True)
class Lines:
    """A matrix in a row-major tensor: element (row, column) has index `base + row * pitch + column`.

    `views` are the corresponding parts of other tensors, [..., rows, columns] with any strides.
    """

    base: int
    pitch: int
    views: tuple[torch.Tensor, ...]

    @cached_property
    def rows(self) -> int:
        return self.views[0].shape[-2]

    @cached_property
    def columns(self) -> int:
        return self.views[0].shape[-1]

    @cached_property
    def joined(self) -> bool:
        """Whether rows are consecutive in the index, so that a Philox call may span two of them."""
        return self.rows == 1 or self.pitch == self.columns

    @cached_property
    def flat(self) -> bool:
        """Whether rows are consecutive in all tensors as well."""
        return self.rows == 1 or (self.joined and all(_follows(v, -2) for v in self.views))

    @cached_property
    def launch(self) -> tuple[int, int, bool]:
        """Number of runs of consecutive elements, their width, and whether a run spans several strided rows."""
        if self.flat or (self.joined and self.columns < 256):
            return 1, self.rows * self.columns, not self.flat
        return self.rows, self.columns, False

    @cached_property
    def aligned(self) -> bool:
        """Whether runs start at the first normal of a Philox call."""
        return self.base % NORMALS_PER_BLOCK == 0 and (self.launch[0] == 1 or self.pitch % NORMALS_PER_BLOCK == 0)

    @cached_property
    def layout(self) -> tuple[object, ...]:
        """A key: matrices of equal layout differ only in their addresses and can share a launch."""
        views = tuple((v.dtype, v.stride(), v.data_ptr() % 16 == 0) for v in self.views)
        return self.launch, self.columns, self.pitch, self.aligned, views


def lines(shape: Sequence[int], bounds: Sequence[tuple[int, int]], tensors: Sequence[torch.Tensor]) -> Iterator[Lines]:
    """Yield a rectangle as matrices: one if its dimensions can be merged. Each tensor is [..., *rectangle]."""
    if any(stop <= start for start, stop in bounds):
        return
    pending = [(0, tuple(shape), tuple(bounds), tuple(tensors))]
    while pending:
        base, shape, bounds, views = pending.pop()
        while len(shape) < 2:
            views = tuple(v.unsqueeze(v.dim() - len(shape)) for v in views)
            shape, bounds = (1, *shape), ((0, 1), *bounds)
        if len(shape) == 2:
            yield Lines(base + bounds[0][0] * shape[1] + bounds[1][0], shape[1], views)
            continue
        (first, last), inner, trailing = bounds[0], math.prod(shape[1:]), len(shape)
        if bounds[1] == (0, shape[1]) and all(_follows(v, -trailing) for v in views):
            merged = ((first * shape[1], last * shape[1]), *bounds[2:])
            views = tuple(v.flatten(-trailing, 1 - trailing) for v in views)
            pending.append((base, (shape[0] * shape[1], *shape[2:]), merged, views))
            continue
        for i in reversed(range(last - first)):
            parts = tuple(v.select(-trailing, i) for v in views)
            pending.append((base + (first + i) * inner, shape[1:], bounds[1:], parts))


def _follows(view: torch.Tensor, dim: int) -> bool:
    """Return whether `dim` and the next dimension can be merged into one."""
    return view.shape[dim] == 1 or view.stride(dim) == view.stride(dim + 1) * view.shape[dim + 1]
