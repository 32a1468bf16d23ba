# SPDX-License-Identifier: Apache-2.0
"""Models in each form of quantisation, packed by plain code, and the weights that must be read from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

GROUP = 16
Parts = dict[str, torch.Tensor]
Case = tuple[dict[str, Any], Callable[[tuple[int, int], np.random.Generator], tuple[torch.Tensor, Parts]]]
"""A quantization_config, and what makes a weight and its parts of a shape."""


def words(values: np.ndarray, bits: int) -> torch.Tensor:
    """Pack unsigned integers along the last axis into int32, the first in the lowest bits."""
    found = np.zeros((*values.shape[:-1], values.shape[-1] * bits // 32), dtype=np.uint32)
    for place in range(32 // bits):
        found |= values[..., place :: 32 // bits].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(found.view(np.int32).copy())


def drawn(
    shape: tuple[int, int], groups: int, bits: int, random: np.random.Generator, dtype: torch.dtype, *, asymmetric: bool
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Draw integers [out, in], zero points and scales [out, groups]."""
    q = random.integers(0, 1 << bits, shape)
    zero = (
        random.integers(1, 1 << bits, (shape[0], groups)) if asymmetric else np.full((shape[0], groups), 1 << bits - 1)
    )
    scale = torch.from_numpy(random.uniform(0.5, 1.5, (shape[0], groups)) / (1 << bits)).to(dtype)
    return q, zero, scale


def dense(q: np.ndarray, zero: np.ndarray, scale: torch.Tensor, group_of: np.ndarray) -> torch.Tensor:
    """Return (q - zero) scale, number by number in float32."""
    own, zeros = scale.float().numpy(), zero.astype(np.float32)
    columns = [(q[:, i].astype(np.float32) - zeros[:, g]) * own[:, g] for i, g in enumerate(group_of)]
    return torch.from_numpy(np.stack(columns, 1))


def order_of(columns: int, groups: int, random: np.random.Generator, *, acts: bool) -> np.ndarray:
    found = np.arange(columns) // (columns // groups)
    return random.permutation(found) if acts else found


def compressed(bits: int, *, asymmetric: bool = False, channel: bool = False, acts: bool = False) -> Case:
    how = {
        "num_bits": bits, "type": "int", "symmetric": not asymmetric, "strategy": "channel" if channel else "group",
        "group_size": None if channel else GROUP, "actorder": "group" if acts else None,
    }  # fmt: skip

    def make(shape: tuple[int, int], random: np.random.Generator) -> tuple[torch.Tensor, Parts]:
        groups = 1 if channel else shape[1] // GROUP
        q, zero, scale = drawn(shape, groups, bits, random, torch.bfloat16, asymmetric=asymmetric)
        order = order_of(shape[1], groups, random, acts=acts)
        parts = {"weight_packed": words(q, bits), "weight_scale": scale, "weight_shape": torch.tensor(shape)}
        parts |= {"weight_zero_point": words(zero.T, bits).T} if asymmetric else {}
        parts |= {"weight_g_idx": torch.from_numpy(order).int()} if acts else {}
        return dense(q, zero, scale, order), parts

    return compressed_config("pack-quantized", how), make


def compressed_config(form: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None, "format": form, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def gptq(bits: int, *, acts: bool = False, version: str = "gptq") -> Case:
    def make(shape: tuple[int, int], random: np.random.Generator) -> tuple[torch.Tensor, Parts]:
        groups = shape[1] // GROUP
        q, zero, scale = drawn(shape, groups, bits, random, torch.float16, asymmetric=True)
        order = order_of(shape[1], groups, random, acts=acts)
        stored = zero if version == "gptq_v2" else zero - 1
        parts = {"qweight": words(q, bits).T, "qzeros": words(stored.T, bits), "scales": scale.T}
        return dense(q, zero, scale, order), parts | {"g_idx": torch.from_numpy(order).int()}

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": acts, "checkpoint_format": version}
    return config, make


def awq() -> Case:
    def make(shape: tuple[int, int], random: np.random.Generator) -> tuple[torch.Tensor, Parts]:
        groups = shape[1] // GROUP
        q, zero, scale = drawn(shape, groups, 4, random, torch.float16, asymmetric=True)

        def columns(values: np.ndarray) -> torch.Tensor:
            """Pack rows of `values`, eight columns in a word: 0, 2, 4, 6, 1, 3, 5, 7."""
            eights = values.reshape(len(values), -1, 8)
            return words(np.stack([eights[..., c] for c in (0, 2, 4, 6, 1, 3, 5, 7)], -1).reshape(values.shape), 4)

        parts = {"qweight": columns(q.T), "qzeros": columns(zero.T), "scales": scale.T}
        return dense(q, zero, scale, order_of(shape[1], groups, random, acts=False)), parts

    return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, make


def eight_bits(kind: torch.dtype, config: Mapping[str, Any], part: str, block: tuple[int, int] | None = None) -> Case:
    """Numbers of 8 bits, with the scale `part` of each block, or of the tensor."""

    def make(shape: tuple[int, int], random: np.random.Generator) -> tuple[torch.Tensor, Parts]:
        numbers = torch.from_numpy(random.uniform(-100, 100, shape)).float().to(kind)
        high, wide = (min(size, most) for size, most in zip(block or shape, shape, strict=True))
        scale = torch.from_numpy(random.uniform(0.002, 0.006, (-(-shape[0] // high), -(-shape[1] // wide)))).float()
        whole = numbers.float()
        for (i, j), own in np.ndenumerate(scale.numpy()):
            whole[i * high : (i + 1) * high, j * wide : (j + 1) * wide] *= own
        return whole, {"weight": numbers, part: scale if block else scale.reshape(1)}

    return dict(config), make


def bitsandbytes() -> Case:
    def make(shape: tuple[int, int], random: np.random.Generator) -> tuple[torch.Tensor, Parts]:
        numbers = torch.from_numpy(random.integers(-127, 128, shape)).to(torch.int8)
        most = torch.from_numpy(random.uniform(0.4, 0.6, shape[0])).float()
        whole = torch.stack([row.float() * (top * np.float32(1 / 127)) for row, top in zip(numbers, most, strict=True)])
        return whole, {"weight": numbers, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}

    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, make


FP8, ROW = torch.float8_e4m3fn, (1, 1 << 20)
BY_ROW = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
CASES: dict[str, Case] = {
    "pack-quantized, 4 bits": compressed(4),
    "pack-quantized, 4 bits, asymmetric": compressed(4, asymmetric=True),
    "pack-quantized, 4 bits, act order": compressed(4, acts=True),
    "pack-quantized, 8 bits": compressed(8, channel=True),
    **{f"gptq, {bits} bits": gptq(bits) for bits in (2, 4, 8)},
    "gptq, act order": gptq(4, acts=True),
    "gptq, v2": gptq(4, version="gptq_v2"),
    "awq": awq(),
    "float-quantized, tensor": eight_bits(
        FP8, compressed_config("float-quantized", {**BY_ROW, "type": "float", "strategy": "tensor"}), "weight_scale"
    ),
    "float-quantized, channel": eight_bits(
        FP8, compressed_config("float-quantized", {**BY_ROW, "type": "float"}), "weight_scale", ROW
    ),
    "int-quantized": eight_bits(
        torch.int8, compressed_config("int-quantized", {**BY_ROW, "type": "int"}), "weight_scale", ROW
    ),
    "fp8, blocks": eight_bits(
        FP8, {"quant_method": "fp8", "weight_block_size": [20, 32]}, "weight_scale_inv", (20, 32)
    ),
    "fp8, tensor": eight_bits(FP8, {"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale"),
    "bitsandbytes, 8 bits": bitsandbytes(),
}
"""By name: all that is read without a library of its own."""


def quantise(case: str, source: Path, to: Path) -> Parts:
    """Write the model `source` with other, packed weights in its layers; return the weights in float32."""
    config, make = CASES[case]
    shutil.copytree(source, to)
    tensors, random = load_file(source / "model.safetensors"), np.random.default_rng(7)
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        found[name], parts = make(tuple(tensors.pop(name).shape), random)
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in parts.items()}
        tensors[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    tree = json.loads((source / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**tree, "quantization_config": config}))
    return found
