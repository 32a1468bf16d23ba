# SPDX-License-Identifier: Apache-2.0
"""The tile sizes of the Triton kernels of `population`: measured choices (studies/population_kernels.py)."""

from __future__ import annotations

from dataclasses import dataclass

_FEW_ROWS, _MANY_ROWS = 128, 512


@dataclass(frozen=True, slots=True)
class Tiles:
    """Columns per tile and warps per program; for `add` also the columns per step of the dots, and groups of tiles."""

    columns: int
    warps: int
    depth: int = 0
    groups: int = 1


def row_sizes() -> tuple[int, ...]:
    """Return one number of rows per choice of tiles."""
    return (1, _FEW_ROWS + 1, _MANY_ROWS + 1)


def norm_tiles(width: int, rank: int, itemsize: int) -> Tiles:
    """Return tiles of whole rows; `width` is the larger of input and output.

    Few warps are faster at half precision; in float32 a thread would need more registers than there are.
    """
    columns = power(width)
    few = rank <= 1 and itemsize <= 2
    return Tiles(columns, min(16, max(1, columns // 1024)) if few else _warps(columns * power(rank)))


def rotate_tiles(heads: int, half: int, rank: int) -> Tiles:
    """Return tiles of whole rows."""
    columns = power(heads) * power(half)
    return Tiles(columns, _warps(columns * power(rank)))


def gate_tiles(width: int, rank: int) -> Tiles:
    """Return tiles; the best choice does not depend on the number of rows."""
    if rank <= 1:
        return Tiles(min(power(width), 512), 2)
    columns = min(power(width), 1024 if rank > 8 else 2048)
    return Tiles(columns, _warps(columns * power(rank)))


def add_tiles(inner: int, outer: int, rows: int, rank: int, fixed: bool) -> Tiles:
    """Return tiles for layers whose widest output is `outer`.

    With few rows, several programs share a wide output, and each recomputes the dots. With many rows, programs are
    small.
    """
    wide, few, many = outer > 8192, rows <= _FEW_ROWS and not fixed, rows > _MANY_ROWS and not fixed
    groups = 1 if not wide else 5 if few else 1 if rank == 1 else 2
    depth = min(power(inner), 4096 // power(rank))
    if rank == 1:
        return Tiles(min(power(outer), 4096), 4 if many and not wide else 16, depth, groups)
    return Tiles(min(power(outer), 2048 if wide else 4096, 16384 // power(rank)), 16, depth, groups)


def power(value: int) -> int:
    """Return the smallest power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


def _warps(elements: int) -> int:
    """Return warps for about 16 elements of each operand per thread: two 16-byte loads at half precision."""
    return max(4, min(16, elements // 512))
