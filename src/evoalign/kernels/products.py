# SPDX-License-Identifier: Apache-2.0
"""Move a matrix by a sum of products of a column and a row, added in order: the same bits on every device.

    total = 0;  total = fl32(total + fl32(left[k] * right[k])) for k = 0, 1, ...
    master = fl32(master + fl32(fl32(total * fl32(1 / count)) * fl32(step)))

A BLAS matrix product has no fixed order: its bits differ between instruction sets, numbers of threads, devices and
shapes, so a run that used it could be repeated only on the same machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evoalign import kernels
from evoalign.kernels import compiled

_TILE = 1 << 16
"""Numbers per tile of plain torch on a CPU, so that the total and the product stay in a core's cache."""


def factors(terms: int, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for the factors of `move`: float32 [terms, rows] and [terms, columns]."""
    if kernels.available(device):
        from evoalign.kernels.update import room, split

        shapes = [(rows, columns)]
        return split(torch.empty(room(terms, shapes), dtype=torch.float32, device=device), terms, shapes)[0]
    left, right = (torch.empty(terms, n, dtype=torch.float32, device=device) for n in (rows, columns))
    return left, right


def move(
    master: Tensor,
    served: Tensor | None,
    start: Tensor | None,
    left: Tensor,
    right: Tensor,
    count: int,
    step: float,
    decay: float,
) -> None:
    """Move `master` [rows, columns] by step / count times sum_k left[k] right[k], after its decay towards `start`.

    `left` [terms, rows] and `right` [terms, columns] come from `factors`. `served` receives the result, rounded.
    """
    if kernels.available(master.device):
        from evoalign.kernels.update import Matrix, Products

        Products([Matrix(master, served, start, left, right)]).move(len(left), count, [step], decay)
        return
    if compiled.available(master.device):
        compiled.product(master, served, start, left, right, count, step, decay)
        return
    # In plain torch, tile by tile. No operation fuses a product with a sum.
    rows, columns = master.shape
    tile = max(1, (_TILE if master.device.type == "cpu" else 1 << 24) // max(1, columns))
    for first in range(0, rows, tile):
        part = slice(first, first + tile)
        total = torch.zeros_like(master[part], memory_format=torch.contiguous_format)
        term = torch.empty_like(total)
        for column, row in zip(left[:, part], right, strict=True):
            total.add_(torch.mul(column[:, None], row[None], out=term))
        if start is not None and decay:
            master[part].sub_((master[part] - start[part]).mul_(decay))
        master[part].add_(total.mul_(1 / count).mul_(step))
    if served is not None:
        served.copy_(master)
