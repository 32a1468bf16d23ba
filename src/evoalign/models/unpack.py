# SPDX-License-Identifier: Apache-2.0
"""Dense weights of quantised safetensors, under their Hugging Face names.

A packed number q with scale s and zero point z is the weight (q - z) s, formed in float32 and rounded once to the dtype
of the model. Layouts: AWQ (Lin et al. 2024, the gemm packing of AutoAWQ), GPTQ (Frantar et al. 2023, the packing of
AutoGPTQ and GPTQModel), `pack-quantized`, `int-quantized` and `float-quantized` of compressed-tensors, and FP8 in
blocks (DeepSeek-AI 2024) or with one scale per tensor.

Activations stay unquantised. So do those of bitsandbytes' 8 bits, whose own product sets columns with large activations
aside for all rows of a batch: the score of a member would depend on the members that share its batch. Weights of
bitsandbytes' 4 bits stay packed, and its library multiplies them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, cast

import torch

from evoalign.errors import ModelError, shown
from evoalign.models import four_bits
from evoalign.models.forms import FULL_PRECISION, Quantised, groups_of, not_packed
from evoalign.models.tensors import open_file

FORMS = frozenset({"awq", "fp8", "gptq", "bitsandbytes", "float-quantized", "int-quantized", "pack-quantized"})
"""Forms that `load` reads."""
_RUNTIME = frozenset({"input_scale", "input_zero_point", "output_scale", "q_scale", "k_scale", "v_scale"})
"""Names of scales of activations, which stay unquantised here."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each of the eight integers in a word of AWQ, lowest bits first."""
_LAYOUT = ("checkpoint_format", "format")
"""Settings that name the order of integers in words: older programs write the first, newer ones the second or both."""
_FLOATS, _FLOATS8 = ("F16", "BF16", "F32"), ("F8_E4M3", "F8_E5M2")
_PLAIN = (*_FLOATS, "F64", "I64", "BOOL")
"""Dtypes of tensors that are taken as they are."""
_ODD = re.compile(r"(.*proj|weight)_(scale|scale_inv|scales|blocks|packed|zero_point)|qweight|qzeros|scales|SCB")
"""Names of parts of packed weights that no layout took."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight that is unpacked when it is indexed, as transformers indexes the tensors of files."""

    unpack: Callable[[], torch.Tensor]

    def __getitem__(self, _: object) -> torch.Tensor:
        return self.unpack()


def load(
    name: str,
    path: str,
    revision: str | None,
    dtype: torch.dtype | str,
    found: Quantised,
    files: Sequence[Path],
    **how: Any,
) -> Any:
    """Load a quantised model on the CPU by `from_pretrained`, with the arguments `how`, dense if its form can be read.

    Raises ModelError.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    served = dtype if isinstance(dtype, torch.dtype) else config.dtype or torch.bfloat16
    if found.form not in FORMS:
        raise ModelError(
            f"model {name} is quantised ({found.words}), which is not read in this process; use engine vllm, or "
            f"{FULL_PRECISION}"
        )
    if found.form == "bitsandbytes" and found.bits == 4:
        return four_bits.load(name, path, revision, served, found, files, how)
    tensors = unpacked(name, files, found, served)
    if isinstance(tensors.get("lm_head.weight"), Packed) and config.get_text_config().tie_word_embeddings:
        raise ModelError(
            f"model {name} has a packed lm_head.weight, and tie_word_embeddings in its config.json takes the embedding "
            "in its place; set it to false in the file if the head has its own weights"
        )
    for key in ("quantization_config", "compression_config"):
        if hasattr(config, key):
            delattr(config, key)
    return _load_dense(path, revision, served, config, tensors, how)


def _load_dense(
    path: str, revision: str | None, dtype: torch.dtype, config: Any, tensors: Mapping[str, Any], how: Mapping[str, Any]
) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        kind: Any = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    # Without a path, transformers takes the tensors that it is given.
    loaded = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, **how)
    loaded[0].config.name_or_path = path
    settings: Any = GenerationConfig
    with suppress(OSError):  # it has none
        loaded[0].generation_config = settings.from_pretrained(path, revision=revision)
    return loaded


def refuse_unexpected(name: str, found: Quantised, keys: Iterable[str], files: Iterable[Path], layers: int) -> None:
    """Raise ModelError for a tensor of a quantised model that transformers leaves out, as AutoAWQ's scales of an
    activation are. Biases of zeros, tables of rotations and layers above the last are left out rightly."""
    at = {key: opened for opened in map(open_file, files) for key in opened.keys()}  # noqa: SIM118
    for key in sorted(keys):
        layer = re.search(r"\.layers\.(\d+)\.", key)
        if key.endswith("rotary_emb.inv_freq") or (layer and int(layer[1]) >= layers):
            continue
        if not (key.endswith(".bias") and key in at and not bool(at[key].get_tensor(key).any())):
            raise ModelError(
                f"model {name} is quantised ({found.words}), and its files have {shown(key)}, which transformers "
                f"leaves out; use engine vllm, or {FULL_PRECISION}"
            )


def check(name: str, found: Quantised) -> None:
    """Raise ModelError for settings of a quantised model that `load` does not read. No file is opened."""
    _Reader(name, (), found, torch.float32).check_settings()


def unpacked(name: str, files: Iterable[Path], found: Quantised, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tensors of a quantised model, for `from_pretrained(state_dict=...)`, packed ones in `dtype`.

    Headers are checked now; tensors are read when they are indexed. Raises ModelError.
    """
    reader = _Reader(name, files, found, dtype)
    reader.check_settings()
    modules: dict[str, set[str]] = {}
    for key in reader.at:
        module, _, part = key.rpartition(".")
        modules.setdefault(module, set()).add(part)
    if not any(part in _LAYOUTS for parts in modules.values() for part in parts):
        raise not_packed(name, found)
    tensors: dict[str, Any] = {}
    for module, parts in modules.items():
        prefix = f"{module}." if module else ""
        marker = next((part for part in _LAYOUTS if part in parts), None)
        if marker is not None:
            used, check = _LAYOUTS[marker]
            tensors[f"{prefix}weight"] = Packed(check(reader, prefix))
            parts = parts.difference(used)
            if "weight" in parts:
                raise reader.damaged(f"{prefix}weight", f"beside {prefix}{marker}")
        for part in parts - _RUNTIME:
            reader.shape(f"{prefix}{part}", _PLAIN)
            if _ODD.fullmatch(part):
                raise reader.damaged(f"{prefix}{part}", "of a weight that is not packed in a known way")
            tensors[f"{prefix}{part}"] = reader.at[f"{prefix}{part}"].get_slice(f"{prefix}{part}")
    return tensors


class _Reader:
    """The tensors of a quantised model's files; raises errors that name the model."""

    def __init__(self, name: str, files: Iterable[Path], found: Quantised, dtype: torch.dtype) -> None:
        self.name, self.found, self.settings, self.dtype = name, found, found.settings, dtype
        self.at: dict[str, Any] = {key: opened for opened in map(open_file, files) for key in opened.keys()}  # noqa: SIM118

    def get(self, key: str) -> torch.Tensor:
        return self.at[key].get_tensor(key)

    def shape(self, key: str, dtypes: Iterable[str]) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ModelError if it is missing or has none of these dtypes."""
        if key not in self.at:
            raise ModelError(f"model {self.name} does not load: its files lack {key}; fetch it again")
        part = self.at[key].get_slice(key)
        if part.get_dtype() not in dtypes:
            raise self.damaged(key, f"in {part.get_dtype()}")
        return tuple(part.get_shape())

    def matrix(self, key: str, dtypes: Iterable[str]) -> tuple[int, int]:
        """Return the shape of a matrix. Raises ModelError."""
        shape = self.shape(key, dtypes)
        if len(shape) != 2 or 0 in shape:
            raise self.damaged(key, f"of shape {shape}")
        return shape

    def fit(self, key: str, dtypes: Iterable[str], *shapes: tuple[int, ...]) -> None:
        """Raise ModelError where a tensor has none of these shapes."""
        if (shape := self.shape(key, dtypes)) not in shapes:
            raise self.damaged(key, f"of shape {shape} instead of {shapes[0]}")

    def damaged(self, key: str, why: str) -> ModelError:
        return ModelError(
            f"model {self.name} does not load: its files have {shown(key)} {why}, which does not fit its "
            f"quantization_config ({self.found.words}); fetch it again"
        )

    def refused(self, setting: str, value: object) -> ModelError:
        return ModelError(
            f"model {self.name} is quantised ({self.found.words}) with {setting} {shown(value)}, which is not read "
            f"here; use engine vllm, or {FULL_PRECISION}"
        )

    def order(self, key: str, columns: int, groups: int) -> torch.Tensor | None:
        """Return the group of each column that an act order gives; None if there is none. Raises ModelError."""
        if key not in self.at:
            return None
        self.fit(key, ("I32", "I64"), (columns,))
        order = self.get(key).long()
        if int(order.max()) == -1:  # not set
            return None
        if int(order.min()) < 0 or int(order.max()) >= groups:
            raise self.damaged(key, f"with groups that are none of its {groups}")
        return order

    def check_group(self, key: str, columns: int, groups: int, sizes: Iterable[object]) -> None:
        """Raise ModelError where a row of scales does not cover the columns in groups of a size of the settings."""
        if groups != 1 and (columns % groups or columns // groups not in sizes):
            raise self.damaged(key, f"with {groups} groups for {columns} columns")

    def check_settings(self) -> None:
        """Raise ModelError for packings that are not read here."""
        form, settings = self.found.form, self.settings
        wanted: list[tuple[str, object, Iterable[object]]] = []
        if form == "awq":
            wanted += [("bits", settings.get("bits", settings.get("w_bit")), (4,))]
            wanted += [(key, str(settings.get(key) or "gemm").lower(), ("gemm",)) for key in ("version", *_LAYOUT)]
        elif form == "gptq":
            wanted += [("bits", settings.get("bits"), (2, 4, 8))]
            wanted += [("is_marlin_format", settings.get("is_marlin_format") or False, (False,))]
            wanted += [(key, settings.get(key) or "gptq", ("gptq", "gptq_v2")) for key in _LAYOUT]
            wanted += [("dynamic", settings.get("dynamic") or None, (None,))]
        elif form not in ("fp8", "bitsandbytes"):
            sparsity: object = settings.get("sparsity_config") or "dense"
            if isinstance(sparsity, Mapping):
                sparsity = cast("Mapping[str, Any]", sparsity).get("format") or "dense"
            wanted += [("sparsity_config", sparsity, ("dense",))]
            wanted += [("transform_config", settings.get("transform_config") or None, (None,))]
            for weights in self.schemes():
                kind = weights.get("type") or "int"
                wanted += [("weights of type", kind, ("float" if form == "float-quantized" else "int",))]
                wanted += [("num_bits", weights.get("num_bits"), (4, 8) if form == "pack-quantized" else (8,))]
                strategy = weights.get("strategy") or "tensor"
                wanted += [("strategy", strategy, ("tensor", "channel", "group", "block"))]
        for setting, value, known in wanted:
            if not any(value == one for one in known):
                raise self.refused(setting, value)

    def schemes(self) -> list[Mapping[str, Any]]:
        """Return how the groups of compressed-tensors pack weights."""
        return [group["weights"] for group in groups_of(self.settings) if isinstance(group.get("weights"), Mapping)]

    def weight(
        self, q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | int, order: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (q - zero) scale of q [out, in]. `zero` and `scale` [out or 1, groups] have consecutive groups of
        columns, or those of `order`."""
        columns = q.shape[1]

        def spread(part: torch.Tensor) -> torch.Tensor:
            part = part.to(torch.float32)
            if order is not None:
                return part[:, order]
            return part if part.shape[1] in (1, columns) else part.repeat_interleave(columns // part.shape[1], 1)

        weight = q.to(torch.float32)
        weight.sub_(zero if isinstance(zero, int) else spread(zero)).mul_(spread(scale))
        return weight.to(self.dtype)


def _integers(words: torch.Tensor, bits: int, places: Iterable[int] = ()) -> torch.Tensor:
    """Return the unsigned integers in the words of each row, lowest bits first or at these places: uint8."""
    places = list(places) or list(range(32 // bits))
    found = torch.empty(*words.shape, len(places), dtype=torch.uint8)
    for i, place in enumerate(places):
        found[..., place] = words.bitwise_right_shift(bits * i).bitwise_and_((1 << bits) - 1)
    return found.flatten(-2)


def _packed(reader: _Reader, module: str) -> Callable[[], torch.Tensor]:
    """Read `pack-quantized`: integers along rows, from -2^(bits - 1), zero points along columns."""
    key = f"{module}weight_packed"
    words = reader.matrix(key, ("I32",))
    reader.fit(f"{module}weight_shape", ("I32", "I64"), (2,))
    rows, columns = (int(n) for n in reader.get(f"{module}weight_shape"))
    bits = next((b for b in (4, 8) if words == (rows, ceil(columns * b / 32))), None)
    schemes = [scheme for scheme in reader.schemes() if scheme.get("num_bits") == bits]
    if bits is None or not schemes:
        raise reader.damaged(key, f"of shape {words} for a weight of {(rows, columns)}")
    shape = reader.shape(f"{module}weight_scale", _FLOATS)
    groups = shape[-1] if len(shape) == 2 else 1
    reader.fit(f"{module}weight_scale", _FLOATS, (rows, groups), (1,), (1, 1))
    order = reader.order(f"{module}weight_g_idx", columns, groups)
    if order is None:
        if any(s.get("actorder") in (True, "group") for s in schemes) and groups > 1:
            reader.shape(f"{module}weight_g_idx", ("I32",))
        reader.check_group(f"{module}weight_scale", columns, groups, [s.get("group_size") for s in schemes])
    has_zero = f"{module}weight_zero_point" in reader.at or not any(s.get("symmetric", True) for s in schemes)
    if has_zero:
        reader.fit(f"{module}weight_zero_point", ("I32",), (ceil(rows * bits / 32), groups))

    def unpack() -> torch.Tensor:
        q = _integers(reader.get(key), bits)[:, :columns]
        zero: torch.Tensor | int = 1 << bits - 1
        if has_zero:
            zero = _integers(reader.get(f"{module}weight_zero_point").T, bits)[:, :rows].T
        return reader.weight(q, reader.get(f"{module}weight_scale").reshape(-1, groups), zero, order)

    return unpack


def _by_columns(reader: _Reader, module: str) -> Callable[[], torch.Tensor]:
    """Read AWQ, with integers along columns [in, out / 8], or GPTQ, with integers along rows [in bits / 32, out]."""
    settings, is_awq = reader.settings, reader.found.form == "awq"
    bits: int = 4 if is_awq else settings["bits"]
    each, places = 32 // bits, _AWQ_ORDER if is_awq else ()
    high, wide = reader.matrix(f"{module}qweight", ("I32",))
    columns, rows = (high, wide * each) if is_awq else (high * each, wide)
    groups, _ = reader.matrix(f"{module}scales", _FLOATS)
    reader.fit(f"{module}scales", _FLOATS, (groups, rows))
    reader.fit(f"{module}qzeros", ("I32",), (groups, ceil(rows / each)))
    order = None if is_awq else reader.order(f"{module}g_idx", columns, groups)
    if order is None:
        if settings.get("desc_act"):
            reader.shape(f"{module}g_idx", ("I32",))
        size = settings.get("group_size", settings.get("q_group_size"))
        reader.check_group(f"{module}scales", columns, groups, (size,))
    is_v2 = next((settings[key] for key in _LAYOUT if settings.get(key)), "") == "gptq_v2"
    minus = 0 if is_awq or is_v2 else 1
    if minus and int(_integers(reader.get(f"{module}qzeros"), bits)[:, :rows].max()) == (1 << bits) - 1:
        # Stored zero points are one less, so that programs read 0 or 2^bits here.
        raise reader.refused("a zero point of", 1 << bits)

    def unpack() -> torch.Tensor:
        words = reader.get(f"{module}qweight")
        q = _integers(words, bits, places).T.contiguous() if is_awq else _integers(words.T, bits)
        zero = _integers(reader.get(f"{module}qzeros"), bits, places)[:, :rows].T + minus
        return reader.weight(q, reader.get(f"{module}scales").T, zero, order)

    return unpack


def _scaled(scale: str) -> Callable[[_Reader, str], Callable[[], torch.Tensor]]:
    """Return what reads numbers of 8 bits with a scale per tensor, row, group or block."""

    def read(reader: _Reader, module: str) -> Callable[[], torch.Tensor]:
        kinds = ("I8",) if reader.found.form == "int-quantized" else _FLOATS8
        rows, columns = reader.matrix(f"{module}weight", kinds)
        blocks: list[Any] = [reader.settings.get("weight_block_size")]
        for scheme in reader.schemes():
            blocks += [scheme.get("block_structure"), [1, scheme.get("group_size")]]
        pairs = [tuple(b) for b in blocks if isinstance(b, list | tuple) and len(cast("list[Any]", b)) == 2]
        sizes: list[tuple[int, int]] = [p for p in pairs if all(type(n) is int and n > 0 for n in p)]
        by_shape: dict[tuple[int, ...], tuple[int, int]] = {
            (ceil(rows / high), ceil(columns / wide)): (high, wide) for high, wide in sizes
        }
        by_shape |= {
            (rows, 1): (1, columns),
            (rows,): (1, columns),
            **dict.fromkeys([(), (1,), (1, 1)], (rows, columns)),
        }
        dtypes = (*_FLOATS, "F8_E8M0")
        reader.fit(f"{module}{scale}", dtypes, *by_shape)
        high, wide = by_shape[reader.shape(f"{module}{scale}", dtypes)]
        zero = f"{module}weight_zero_point"
        has_zero = zero in reader.at
        if has_zero:
            reader.fit(zero, ("I8",), reader.shape(f"{module}{scale}", dtypes))

        def spread(key: str) -> torch.Tensor:
            part = reader.get(key).to(torch.float32).reshape(ceil(rows / high), ceil(columns / wide))
            part = part if part.shape[0] == 1 else part.repeat_interleave(high, 0)[:rows]
            return part if part.shape[1] == 1 else part.repeat_interleave(wide, 1)[:, :columns]

        def unpack() -> torch.Tensor:
            return reader.weight(
                reader.get(f"{module}weight"), spread(f"{module}{scale}"), spread(zero) if has_zero else 0
            )

        return unpack

    return read


def _int8(reader: _Reader, module: str) -> Callable[[], torch.Tensor]:
    """Read 8 bits of bitsandbytes (Dettmers et al. 2022), with the largest |W| of each row."""
    rows, _ = reader.matrix(f"{module}weight", ("I8",))
    reader.fit(f"{module}SCB", ("F32",), (rows,))
    if f"{module}weight_format" in reader.at and int(reader.get(f"{module}weight_format")) != 0:
        raise reader.refused("weight_format", int(reader.get(f"{module}weight_format")))

    def unpack() -> torch.Tensor:
        return reader.weight(reader.get(f"{module}weight"), reader.get(f"{module}SCB")[:, None] * (1 / 127), 0)

    return unpack


_LAYOUTS: Mapping[str, tuple[frozenset[str], Callable[[_Reader, str], Callable[[], torch.Tensor]]]] = {
    "weight_packed": (
        frozenset({"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"}),
        _packed,
    ),
    "qweight": (frozenset({"qweight", "qzeros", "scales", "g_idx"}), _by_columns),
    "SCB": (frozenset({"weight", "SCB", "weight_format"}), _int8),
    "weight_scale_inv": (frozenset({"weight", "weight_scale_inv"}), _scaled("weight_scale_inv")),
    "weight_scale": (frozenset({"weight", "weight_scale", "weight_zero_point"}), _scaled("weight_scale")),
}
"""Readers by the part that tells how a weight is packed: names of all its parts, and a function that checks the parts
and returns one that unpacks them."""
