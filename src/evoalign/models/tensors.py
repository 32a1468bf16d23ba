# SPDX-License-Identifier: Apache-2.0
"""Tensors in safetensors files, read one at a time, in whole or by rows, under the names that checkpoints have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evoalign.config.reading import check_regular, read_object
from evoalign.errors import DataError, ModelError
from evoalign.models.experts import FUSED
from evoalign.models.files import INDEX, MODEL, find
from evoalign.rundir.checkpoint import MOST_BYTES

MAPPED = 1 << 28
"""Bytes that are read of a file before it is opened anew: what was read of a mapped file is memory until then."""
OTHER_NAMES = ((".mlp.", ".block_sparse_moe."), ("lm_head.", "embed_out."))
"""Parts of the library's names, and what the files of some models say: Mixtral and Phi-MoE, GPT-NeoX."""
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w[123])\.weight")
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: `key` of `file`, here called `name`; of fused experts part `index`, from row `first` on."""

    file: Path
    key: str
    name: str
    shape: tuple[int, ...]
    index: int | None = None
    first: int = 0


class Files(Mapping[str, torch.Tensor]):
    """The tensors of several safetensors files, each read when it is asked for, in whole or by rows.

    One file is open at a time. `prefix` is what all names begin with and what is left out. A name that is not there is
    looked for without its first part, which the files of some older models leave out, by the other names that
    some files have, and among fused experts.
    """

    def __init__(self, files: Iterable[Path], prefix: str = "") -> None:
        self._at: dict[str, _Place] = {}
        self._file, self._opened, self._read = Path(), None, 0
        for file in files:
            opened = _open(file)
            for key in opened.keys():  # noqa: SIM118 (no mapping)
                shape = tuple(opened.get_slice(key).get_shape())
                name = key.removeprefix(prefix)
                self._at[name] = _Place(file, key, name, shape)

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._found(name)
        return self.rows(name, slice(None)).reshape(place.shape)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._place(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Without reading it; None where it is not there."""
        place = self._place(name)
        return None if place is None else place.shape

    def listed(self, name: str) -> str | None:
        """Under which of the names here a tensor, or the fused one that it is a part of, lies."""
        place = self._place(name)
        return None if place is None else place.name

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor that is there."""
        return self.rows(name, slice(0, 1)).dtype

    def rows(self, name: str, at: slice) -> torch.Tensor:
        """Rows of a tensor that is there, in the file's dtype. Raises KeyError."""
        place = self._found(name)
        start, stop, _ = at.indices(place.shape[0] if place.shape else 1)
        opened = self._ready(place.file, max(1, stop - start) * math.prod(place.shape[1:]) * 4)
        if not place.shape:
            return opened.get_tensor(place.key).reshape(1)[at]
        own = slice(place.first + start, place.first + stop)
        part = opened.get_slice(place.key)
        return part[own] if place.index is None else part[place.index : place.index + 1, own][0]

    def _found(self, name: str) -> _Place:
        place = self._place(name)
        if place is None:
            raise KeyError(name)
        return place

    def _ready(self, file: Path, size: int) -> Any:
        if file != self._file or self._read > MAPPED:
            self._opened = None
            self._file, self._opened, self._read = file, _open(file), 0
        self._read += size
        return self._opened

    def _place(self, name: str) -> _Place | None:
        for key in (name, name.partition(".")[2], *(name.replace(*pair) for pair in OTHER_NAMES)):
            if key in self._at:
                return self._at[key]
        return self._fused(name)

    def _fused(self, name: str) -> _Place | None:
        """One expert's matrix in the fused parameter: `gate_up_proj` [E, 2 I, H] or `down_proj` [E, H, I]."""
        found = _EXPERT.fullmatch(name)
        if found is None:
            return None
        part, index = _PARTS[found["part"]], int(found["index"])
        parameter, parts = next((p, parts) for p, parts in FUSED.items() if part in parts)
        where = found["experts"]
        for path in (where, *(where.replace(other, own) for own, other in OTHER_NAMES)):
            whole = self._at.get(f"{path}.{parameter}")
            if whole is not None and len(whole.shape) == 3 and index < whole.shape[0]:
                rows = whole.shape[1] // len(parts)
                first = rows * [str(p) for p in parts].index(part)
                return _Place(whole.file, whole.key, whole.name, (rows, whole.shape[2]), index, first)
        return None


def files_of(path: str, revision: str | None) -> list[Path]:
    """The safetensors of a model, in a folder or in the hub's cache. Raises ModelError."""
    single, index = find(path, MODEL, revision), find(path, INDEX, revision)
    if single is not None:
        return [single]
    try:
        names = set(map(str, read_object(index)["weight_map"].values())) if index is not None else set[str]()
    except (DataError, KeyError, AttributeError) as error:
        raise ModelError(f"model {path}: {index} is damaged ({type(error).__name__}); fetch it again") from error
    found = [file for name in sorted(names) if (file := find(path, name, revision)) is not None]
    if not found or len(found) < len(names):
        raise ModelError(f"model {path} has no safetensors that are whole")
    return found


def _open(file: Path) -> Any:
    """A safetensors file. Raises ModelError."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(file, MOST_BYTES)  # a pipe would be waited for
        return safe_open(file, framework="pt")
    except (DataError, OSError, SafetensorError) as error:
        raise ModelError(f"{file} does not load: {error}") from error
