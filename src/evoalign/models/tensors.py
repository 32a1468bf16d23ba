# SPDX-License-Identifier: Apache-2.0
"""Tensors by their names in checkpoints: those of a model in memory, and those of safetensors files.

transformers keeps the experts of a mixture's layer in two parameters, `experts.gate_up_proj` [E, 2 I, H] and
`experts.down_proj` [E, H, I]. Checkpoints, vLLM's noise rule and PEFT's adapters have 3 E matrices instead, such as
`experts.3.gate_proj.weight` [I, H], `experts.3.up_proj.weight` [I, H] and `experts.3.down_proj.weight` [H, I]. evoalign
uses these names everywhere; the matrices of a model in memory are views of the fused parameters.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from evoalign.config.reading import check_regular
from evoalign.errors import DataError, ModelError

MOST_BYTES = 2**44
MAPPED = 1 << 28
"""Bytes read from a mapped file before it is opened anew, which frees what was read."""
Part = Literal["gate", "up", "down"]
FUSED: Mapping[str, tuple[Part, ...]] = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""The parameters of a layer's experts, and the parts that are concatenated in each."""
_NAMES: Mapping[Part, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_OLD_NAMES: Mapping[Part, str] = {"gate": "w1", "up": "w3", "down": "w2"}
_OLD_TYPES = frozenset({"mixtral", "phimoe"})
"""Model types whose checkpoints have names such as `block_sparse_moe.experts.3.w1.weight`."""
PEFT_TYPES = frozenset({
    "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "hunyuan_v1_moe", "mixtral", "olmoe", "qwen3_moe",
})  # fmt: skip
"""Model types for which PEFT converts an adapter of single experts to the fused parameters. Each was tested with PEFT
0.21: the converted adapter gives the logits of the engine."""
OTHER_NAMES = ((".mlp.", ".block_sparse_moe."), ("lm_head.", "embed_out."))
"""Parts of transformers' names, and those in the files of Mixtral and Phi-MoE, and of GPT-NeoX."""
FOREIGN = {
    "_orig_mod.": "torch.compile; save the model below it (model._orig_mod)",
    "_fsdp_wrapped_module.": "FSDP; save its full state dict",
    "base_model.model.": "PEFT; merge the adapter (merge_and_unload)",
    "module.": "DataParallel; save the model below it (model.module)",
}
"""Prefixes of names that a wrapper adds, and how to save without them."""
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w[123])\.weight")
_PARTS = {name: part for names in (_NAMES, _OLD_NAMES) for part, name in names.items()}


@dataclass(frozen=True, slots=True)
class Expert:
    """One matrix of one expert: the part `part` of expert `index` of `module`, in the parameter `parameter`."""

    module: nn.Module
    parameter: str
    part: Part
    index: int

    @property
    def weight(self) -> torch.Tensor:
        """The matrix [out, in], a view of the fused parameter."""
        fused = getattr(self.module, self.parameter).data[self.index]
        parts = FUSED[self.parameter]
        return fused.chunk(len(parts))[parts.index(self.part)]


def experts_of(model: nn.Module) -> dict[str, Expert]:
    """Return all matrices of experts by name, those of one parameter together and in the order of the experts."""
    is_old = model_type(model) in _OLD_TYPES
    names = _OLD_NAMES if is_old else _NAMES
    found: dict[str, Expert] = {}
    for path, module in model.named_modules():
        if not is_experts(module):
            continue
        path = path.replace(".mlp.experts", ".block_sparse_moe.experts") if is_old else path
        for parameter, parts in FUSED.items():
            for index in range(len(getattr(module, parameter))):
                for part in parts:
                    found[f"{path}.{index}.{names[part]}.weight"] = Expert(module, parameter, part, index)
    return found


def is_experts(module: Any) -> bool:
    """Return whether a module's experts are fused in the form of `FUSED`.

    Other forms, such as that of GPT-OSS (transposed, gate and up interleaved, biases), are left as single tensors.
    """
    shapes = [getattr(getattr(module, name, None), "shape", ()) for name in FUSED]
    plain = not any(getattr(module, n, False) for n in ("is_transposed", "has_bias", "has_post_expert_norm"))
    return (
        hasattr(module, "_apply_gate")
        and getattr(module, "has_gate", True)
        and getattr(module, "is_concatenated", True)
        and plain
        and [len(shape) for shape in shapes] == [3, 3]
    )


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters by name, tied ones once, matrices of experts as views."""
    return {name: tensor for name, _, tensor in named(model)}


def named(model: nn.Module) -> Iterator[tuple[str, Expert | None, torch.Tensor]]:
    """Yield name, expert (None for other parameters) and data of each parameter, in the model's order."""
    of_fused: dict[int, list[tuple[str, Expert]]] = {}
    for name, expert in experts_of(model).items():
        of_fused.setdefault(id(getattr(expert.module, expert.parameter)), []).append((name, expert))
    for name, parameter in model.named_parameters():
        if id(parameter) in of_fused:
            yield from ((own, expert, expert.weight) for own, expert in of_fused[id(parameter)])
        else:
            yield name, None, parameter.data


def packed_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the shape [out, in] of each packed weight by name, which the parameter itself may not have."""
    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {f"{p}.weight": (m.out_features, m.in_features) for p, m in linears if not m.weight.is_floating_point()}


def model_type(model: nn.Module) -> str:
    """Return the model type of transformers; empty for a module of another library."""
    config: Any = getattr(model, "config", None)
    return str(config.get_text_config().model_type) if hasattr(config, "get_text_config") else ""


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a tensor: `key` of `file`, here called `name`; within fused experts, part `index` from row `first`."""

    file: Path
    key: str
    name: str
    shape: tuple[int, ...]
    index: int | None = None
    first: int = 0


class _Open(threading.local):
    """The file that a thread has open, and how many bytes of it were read."""

    file: Path = Path()
    opened: Any = None
    read: int = 0


class Files(Mapping[str, torch.Tensor]):
    """The tensors of several safetensors files, read on access, whole or by rows. A thread has one file open at a time.

    `prefix` is removed from all names. A name that is missing is also looked up without its first part, as in the files
    of some older models, with `OTHER_NAMES`, and in fused experts.
    """

    def __init__(self, files: Iterable[Path], prefix: str = "") -> None:
        self._at: dict[str, _Place] = {}
        self._own = _Open()
        for file in files:
            opened = open_file(file)
            for key in opened.keys():  # noqa: SIM118 (no mapping)
                name = key.removeprefix(prefix)
                self._at[name] = _Place(file, key, name, tuple(opened.get_slice(key).get_shape()))

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._found(name).shape
        return self.rows(name, slice(None)).reshape(shape)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._place(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape without reading it; None where it is missing."""
        place = self._place(name)
        return None if place is None else place.shape

    def listed(self, name: str) -> str | None:
        """Return the name in the files of a tensor, or of the fused tensor that contains it; None where it is
        missing."""
        place = self._place(name)
        return None if place is None else place.name

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor. Raises KeyError."""
        return self.rows(name, slice(0, 1)).dtype

    def rows(self, name: str, at: slice) -> torch.Tensor:
        """Return rows of a tensor in the file's dtype. Raises KeyError."""
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
        own = self._own
        if file != own.file or own.read > MAPPED:
            own.opened = None
            own.file, own.opened, own.read = file, open_file(file), 0
        own.read += size
        return own.opened

    def _place(self, name: str) -> _Place | None:
        for key in (name, name.partition(".")[2], *(name.replace(*pair) for pair in OTHER_NAMES)):
            if key in self._at:
                return self._at[key]
        return self._fused(name)

    def _fused(self, name: str) -> _Place | None:
        """Find an expert's matrix in the fused parameter, `gate_up_proj` [E, 2 I, H] or `down_proj` [E, H, I]."""
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
                shape, first = (rows, whole.shape[2]), rows * parts.index(part)
                return _Place(whole.file, whole.key, whole.name, shape, index, first)
        return None


def foreign_prefix(names: Iterable[str]) -> str | None:
    """Return which wrapper added a prefix to tensors' names, and the remedy; None if none did."""
    for name in names:
        for prefix, wrapper in FOREIGN.items():
            if name.startswith(prefix) or f".{prefix}" in name.removeprefix("base_model.model"):
                return f"the names have the prefix {prefix} of {wrapper} and write it with save_pretrained"
    return None


def open_file(file: Path, most: int = MOST_BYTES) -> Any:
    """Open a safetensors file of at most this many bytes. Raises ModelError."""
    try:
        check_regular(file, most)  # opening a pipe would wait for its other end
        return safe_open(file, framework="pt")
    except (DataError, OSError, SafetensorError) as error:
        raise ModelError(f"{file} does not load: {error}") from error
