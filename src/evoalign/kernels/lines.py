# SPDX-License-Identifier: Apache-2.0
"""A rectangle out of a tensor as rows of consecutive elements, which is what kernels take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

NORMALS_PER_BLOCK = 8
"""Normals of a Philox call."""


@dataclass(frozen=True)
class Lines:
    """A matrix out of a row-major tensor: element (row, column) has index `base + row * pitch + column`.

    `views` are the tensors that go with it, [..., rows, columns] with any strides.
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
        """The rows follow one another in the index, so that a Philox call may span two of them."""
        return self.rows == 1 or self.pitch == self.columns

    @cached_property
    def flat(self) -> bool:
        """The rows follow one another in all tensors as well."""
        return self.rows == 1 or (self.joined and all(_follows(v, -2) for v in self.views))

    @cached_property
    def launch(self) -> tuple[int, int, bool]:
        """Runs of consecutive elements, their width, and whether a kernel has to tell rows from columns in them."""
        if self.flat or (self.joined and self.columns < 256):
            return 1, self.rows * self.columns, not self.flat
        return self.rows, self.columns, False

    @cached_property
    def aligned(self) -> bool:
        """Runs start where a Philox call does."""
        return self.base % NORMALS_PER_BLOCK == 0 and (self.launch[0] == 1 or self.pitch % NORMALS_PER_BLOCK == 0)

    @cached_property
    def layout(self) -> tuple[object, ...]:
        """Matrices of the same layout differ in nothing but where they begin, and so can share a launch."""
        views = tuple((v.dtype, v.stride(), v.data_ptr() % 16 == 0) for v in self.views)
        return self.launch, self.columns, self.pitch, self.aligned, views


def lines(shape: Sequence[int], bounds: Sequence[tuple[int, int]], tensors: Sequence[torch.Tensor]) -> Iterator[Lines]:
    """A rectangle as matrices. Each tensor is [..., *the rectangle]; two matrices where dimensions cannot be merged."""
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
    """Whether steps along `dim` go on where the next dimension ends."""
    return view.shape[dim] == 1 or view.stride(dim) == view.stride(dim + 1) * view.shape[dim + 1]
