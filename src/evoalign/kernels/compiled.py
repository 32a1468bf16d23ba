# SPDX-License-Identifier: Apache-2.0
"""Kernels for a CPU in compiled C (`compiled.c`), with the same bits as plain torch, which is the fallback.

Only the steps of a model's layer (`rows`) have other last bits than their fallback.

The library is built next to this file when evoalign is installed, if there is a C compiler (`hatch_build.py`).
EVOALIGN_COMPILED=0 disables it. Work is divided among `torch.get_num_threads()` threads; the bits do not depend on
their number.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evoalign.kernels.lines import Lines, lines

LIBRARY, SOURCE = Path(__file__).with_name("_compiled.so"), Path(__file__).with_name("compiled.c")
_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_PIECE = 1 << 18
"""Smallest work, in numbers times members, for which a thread is started."""
_SHARED = 64 * _PIECE
"""The same for steps of a layer. They run between torch's products, whose idle threads spin and would slow ours."""
_CHUNK = 256
"""Normals that the library draws at once (`CHUNK` in compiled.c)."""
_KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_LAYER = {
    "add": "pippppiifii",
    "norm": "pppifpiifippipippppipp",
    "rotate": "pppipppppiifiiipipipf",
    "gate": "ppppppiifipp",
    "decode": "pppppppiiiifp",
}
"""Argument types of each step of a layer (p: pointer, i: integer, f: float), without the first and last row."""


def available(device: torch.device | str) -> bool:
    """Return whether the library is used on this device."""
    return torch.device(device).type == "cpu" and here()


def here() -> bool:
    """Return whether there is a library and it is enabled."""
    return os.environ.get("EVOALIGN_COMPILED") != "0" and _library() is not None


@cache
def _library() -> Any:
    """Return the library, or None if it is missing, built from another source, or built for another machine."""
    try:
        found, source = ctypes.CDLL(str(LIBRARY)), SOURCE.read_bytes()
        found.evoalign_source.restype = ctypes.c_uint32
        ours = found.evoalign_source() == int(hashlib.sha256(source).hexdigest()[:8], 16)
        return _declared(found) if ours else None
    except (OSError, AttributeError):
        return None


def _declared(library: Any) -> Any:
    number, word, pointer, kind = ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int
    key = (pointer, word, word, word, pointer, pointer)
    library.evoalign_scaled.argtypes = (*key, *[number] * 5, pointer, *[number] * 2, pointer, *[number] * 3, kind)
    library.evoalign_dense.argtypes = (*key, *[number] * 5, pointer)
    library.evoalign_product.argtypes = (pointer, pointer, *[number] * 5, pointer)
    library.evoalign_sum.argtypes = (pointer, *[number] * 6)
    library.evoalign_scaled.restype = library.evoalign_dense.restype = library.evoalign_product.restype = None
    library.evoalign_sum.restype = ctypes.c_uint64
    for name, kinds in _LAYER.items():
        getattr(library, f"evoalign_{name}").argtypes = [_KINDS[kind] for kind in kinds + "ii"]
        getattr(library, f"evoalign_{name}").restype = None
    return library


class _Mean(ctypes.Structure):
    """The struct `Mean` of compiled.c."""

    _pointer, _stride = ctypes.c_void_p, ctypes.c_int64
    _fields_ = (
        *(("master", _pointer), ("master_row", _stride), ("master_column", _stride)),
        *(("served", _pointer), ("served_row", _stride), ("served_column", _stride)),
        *(("start", _pointer), ("start_row", _stride), ("start_column", _stride)),
        *(("share", ctypes.c_float), ("step", ctypes.c_float), ("decay", ctypes.c_float), ("dtype", ctypes.c_int)),
    )


def takes(part: Sequence[int], members: int, mean: Tensor | None, out: Tensor | None) -> bool:
    """Return whether `scaled` supports these tensors: on the CPU, of these shapes, and without shared memory."""
    if mean is not None and not _is_plain(mean, part):
        return False
    if out is None:
        return True
    apart = mean is None or mean.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
    return apart and out.device.type == "cpu" and list(out.shape) == [members, *part] and not out.is_neg()


def _is_plain(tensor: Tensor, shape: Sequence[int], *dtypes: torch.dtype) -> bool:
    """Return whether C can read a tensor's memory: float32 (or `dtypes`) on the CPU, of this shape."""
    known = tensor.dtype in (dtypes or (torch.float32,)) and tensor.device.type == "cpu" and not tensor.is_neg()
    return known and list(tensor.shape) == list(shape)


def _check(shape: Sequence[int], *tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor that is not float32, not of this shape, or not on the CPU."""
    for t in tensors:
        if t is not None and not _is_plain(t, shape):
            raise ValueError(
                f"a tensor {list(t.shape)} of {t.dtype} on {t.device} is not float32 {list(shape)} on the CPU"
            )


def scaled(
    key: tuple[int, int],
    table: Tensor,
    shape: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    generation: int,
    members: Sequence[int],
    widths: Sequence[float],
    mean: Tensor | None,
    out: Tensor,
) -> None:
    """Write out[m] = round(fl32(width_m * normal) + mean) for a part of a tensor; see `evoalign.noise.scaled`.

    Consecutive members of the same stream are drawn once.
    """
    if out.dtype not in _TYPES:
        drawn = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        scaled(key, table, shape, bounds, generation, members, widths, mean, drawn)
        out.copy_(drawn)
        return
    streams, factors = _words(members), _floats(widths)

    def draw(part: Lines, base: int, runs: int, length: int, row: int, column: int) -> None:
        into, centre = part.views[0], part.views[1] if mean is not None else None
        drawn = (table.data_ptr(), *key, generation, streams, factors, len(streams), base, part.pitch, runs, length)
        around = (None, 0, 0) if centre is None else (_at(centre, row, column), *centre.stride()[-2:])
        place = (_at(into, row, column), into.stride(0), *into.stride()[-2:], _TYPES[into.dtype])
        _library().evoalign_scaled(*drawn, *around, *place)

    for part in lines(shape, bounds, (out,) if mean is None else (out, mean)):
        if not part.flat and part.joined and part.columns < _CHUNK:  # rows shorter than one draw
            dense = torch.empty(part.views[0].shape, dtype=torch.float32, device=out.device)
            views = (dense, *(view.contiguous() for view in part.views[1:]))
            _share(draw, Lines(part.base, part.pitch, views), len(streams))
            part.views[0].copy_(dense)
        else:
            _share(draw, part, len(streams))


def dense(
    master: Tensor,
    served: Tensor | None,
    start: Tensor | None,
    key: tuple[int, int],
    table: Tensor,
    shape: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    generation: int,
    weights: dict[int, float],
    count: int,
    step: float,
    decay: float,
) -> None:
    """Move a part of the mean by dense noise; see `evoalign.kernels.update.dense`."""
    size = [b - a for a, b in bounds]
    _check(size, master, start)
    direct = served if served is not None and _is_plain(served, size, *_TYPES) else None
    streams, factors, numbers = _words(list(weights)), _floats(list(weights.values())), (1 / count, step, decay)

    def move(part: Lines, base: int, runs: int, length: int, row: int, column: int) -> None:
        views = iter(part.views)
        mean, out = next(views), None if direct is None else next(views)
        moved = _mean(mean, out, None if start is None else next(views), numbers, row, column)
        drawn = (table.data_ptr(), *key, generation, streams, factors, len(streams), base, part.pitch, runs, length)
        _library().evoalign_dense(*drawn, ctypes.byref(moved))

    for part in lines(shape, bounds, [t for t in (master, direct, start) if t is not None]):
        _share(move, part, len(streams))
    if served is not direct and served is not None:
        served.copy_(master)


def product(
    master: Tensor,
    served: Tensor | None,
    start: Tensor | None,
    left: Tensor,
    right: Tensor,
    count: int,
    step: float,
    decay: float,
) -> None:
    """Move a matrix by step / count times sum_k left[k] right[k], added in order, and decay.

    `left` [K, rows] and `right` [K, columns] are float32. See `evoalign.kernels.update.Products.move`.
    """
    left, right = left.contiguous(), right.contiguous()
    (terms, rows), columns = left.shape, right.shape[1]
    _check((rows, columns), master, start)
    _check((terms, rows), left)
    _check((terms, columns), right)
    direct = served if served is not None and _is_plain(served, (rows, columns), *_TYPES) else None
    mean = _mean(master, direct, start, (1 / count, step, decay), 0, 0)

    def move(first: int, last: int, alive: object = (master, direct, start)) -> None:
        """Move some rows. `alive` keeps the tensors in memory while a thread writes to them."""
        _library().evoalign_product(
            left.data_ptr(), right.data_ptr(), terms, rows, columns, first, last, ctypes.byref(mean)
        )

    _run(move, list(_pieces(rows, columns * max(1, terms // 8), 4)))
    if served is not direct and served is not None:
        served.copy_(master)


def tensor_sum(tensor: Tensor, shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> int:
    """Return `evoalign.engines.hash.tensor_sum` of a part of a tensor of `shape`, modulo 2^64 and signed."""

    def add(part: Lines, base: int, runs: int, length: int, row: int, column: int) -> int:
        view = part.views[0]
        return _library().evoalign_sum(_at(view, row, column), *view.stride(), base, part.pitch, runs, length)

    total = sum(sum(_share(add, part, 1)) for part in lines(shape, bounds, [tensor]))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def rows(name: str, count: int, cost: int, *given: Tensor | float | None) -> None:
    """Run a function of `_LAYER` over `count` rows of `cost` numbers each. The caller has checked the tensors."""
    function = getattr(_library(), f"evoalign_{name}")
    words = [one.data_ptr() if isinstance(one, Tensor) else one for one in given]

    def do(first: int, last: int, alive: object = given) -> None:
        """Run some rows. `alive` keeps the tensors in memory while a thread writes to them."""
        function(*words, first, last)

    if count * cost < _SHARED:
        do(0, count)
    else:
        _run(do, list(_pieces(count, cost, 1)))


def _mean(
    master: Tensor,
    served: Tensor | None,
    start: Tensor | None,
    numbers: tuple[float, float, float],
    row: int,
    column: int,
) -> _Mean:
    """Return the struct for a part that begins at this row and column. `start` is used only with a decay."""
    anchor = start if numbers[2] else None
    fields: list[Any] = []
    for tensor in (master, served, anchor):
        fields += [None, 0, 0] if tensor is None else [_at(tensor, row, column), *tensor.stride()]
    return _Mean(*fields, *numbers, 0 if served is None else _TYPES[served.dtype])


def _at(tensor: Tensor, row: int, column: int) -> int:
    """Return the address of an element of a matrix, or of the first of several matrices."""
    return tensor.data_ptr() + (row * tensor.stride(-2) + column * tensor.stride(-1)) * tensor.element_size()


def _share(work: Callable[..., Any], part: Lines, members: int) -> list[Any]:
    """Run a part in pieces `(part, base, runs, length, row, column)`: of its rows, or of its single run."""
    if part.flat:
        pieces = _pieces(part.rows * part.columns, members, _CHUNK)
        return _run(work, [(part, part.base + a, 1, b - a, 0, a) for a, b in pieces])
    pieces = _pieces(part.rows, part.columns * members, 1)
    return _run(work, [(part, part.base + a * part.pitch, b - a, part.columns, a, 0) for a, b in pieces])


def _pieces(total: int, cost: int, grain: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of `total` items, each of `cost`: at most one per thread, and none below `_PIECE`."""
    count = max(1, min(torch.get_num_threads(), total * cost // _PIECE))
    step = -(-total // count // grain) * grain
    yield from ((a, min(a + step, total)) for a in range(0, total, max(1, step)))


def _run(work: Callable[..., Any], pieces: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run each piece once: in a new thread if one can be started, else in this thread."""
    found: list[Any] = [None] * len(pieces)
    failed: list[BaseException] = []

    def do(place: int) -> None:
        try:
            found[place] = work(*pieces[place])
        except BaseException as error:  # in a thread it would only be printed, and a piece would be missing
            failed.append(error)

    threads = [threading.Thread(target=do, args=(place,)) for place in range(1, len(pieces))]
    here = [0] if pieces else []
    for place, thread in enumerate(threads, 1):
        try:
            thread.start()  # new for each call: a kept thread would not survive a fork
        except RuntimeError:  # no thread available, or the interpreter is exiting
            here.append(place)
    for place in here:
        do(place)
    for place, thread in enumerate(threads, 1):
        if place not in here:
            thread.join()
    if failed:
        raise failed[0]
    return found


def _words(members: Sequence[int]) -> Any:
    return (ctypes.c_uint32 * len(members))(*members)


def _floats(values: Sequence[float]) -> Any:
    """Return C floats, rounded once to float32 as torch does."""
    return (ctypes.c_float * len(values))(*values)
