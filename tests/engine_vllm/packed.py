# SPDX-License-Identifier: Apache-2.0
"""The tiny model packed in forms that vLLM serves on a CPU, and vLLM's product for them in plain torch.

vLLM's own product for packed weights on a CPU is compiled for AVX-512 alone, so it is replaced on every CPU.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import vllm._custom_ops
from quantised_models import compressed_config, words
from safetensors.torch import load_file, save_file

from evoalign.engines.server.settings import ServerSettings
from evoalign.engines.vllm.settings import VllmConfig
from evoalign.models import tiny

GROUP = 32
INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
BY_ROW = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
BY_TOKEN = {"input_activations": {**BY_ROW, "strategy": "token", "dynamic": True}}
CONFIGS = {
    "pack-quantized": compressed_config("pack-quantized", INTEGERS),
    "float-quantized": compressed_config("float-quantized", BY_ROW, **BY_TOKEN),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def product(input, q_weight, scales, zeros, bias, pack_factor, isa_hint):
    """x W^T of `cpu_gemm_wna16`: blocks of 16 columns, eight in a word, lowest bits first; scales [groups, out]."""
    rows, blocks, shifts = q_weight.shape[1] // 2, len(q_weight), torch.arange(8) * 4
    q = (q_weight.view(blocks, rows, 2, 1) >> shifts & 15).reshape(blocks, rows, 16).permute(1, 0, 2).flatten(1)
    each = rows // len(scales)
    z = 8 if zeros is None else (zeros[..., None] >> shifts & 15).flatten(1).repeat_interleave(each, 0)
    weight = ((q - z).float() * scales.float().repeat_interleave(each, 0)).to(input.dtype)
    return torch.nn.functional.linear(input, weight.T, bias)


def use() -> None:
    """Put the plain product in the place of vLLM's, in this process."""
    vllm._custom_ops.cpu_gemm_wna16 = product


use()
VllmConfig.packed_in_float32 = ServerSettings.packed_in_float32 = True  # which the plain product takes


def quantise(form: str, to: Path, config: dict | None = None) -> Path:
    """Write the tiny model with its layers in 4 bits, rounded to nearest; `config` is another quantization_config."""
    shutil.copytree(tiny(), to)
    tensors = load_file(to / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight, module = tensors.pop(name), name.removesuffix("weight")
        if form == "float-quantized":
            scale = weight.float().abs().amax(1, keepdim=True) / 448
            tensors |= {name: (weight.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
            continue
        groups = weight.float().view(len(weight), -1, GROUP)
        scale = (groups.abs().amax(-1) / 7).to(torch.bfloat16 if form == "pack-quantized" else torch.float16)
        q = ((groups / scale.float()[..., None]).round().clamp(-8, 7) + 8).flatten(1).int().numpy()
        parts = {"weight_packed": words(q, 4), "weight_scale": scale, "weight_shape": torch.tensor(q.shape)}
        if form == "gptq":
            ones_less = np.full((scale.shape[1], len(q)), 7)
            parts = {"qweight": words(q, 4).T, "qzeros": words(ones_less, 4), "scales": scale.T}
            parts["g_idx"] = torch.arange(q.shape[1], dtype=torch.int32) // GROUP
        if form == "awq":
            parts = {
                "qweight": columns(q.T),
                "qzeros": columns(np.full((scale.shape[1], len(q)), 8)),
                "scales": scale.T,
            }
        tensors |= {f"{module}{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    tree = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**tree, "quantization_config": config or CONFIGS[form]}))
    return to


def columns(values: np.ndarray) -> torch.Tensor:
    """Pack as AWQ does: eight columns in a word, 0, 2, 4, 6, 1, 3, 5, 7."""
    eights = values.reshape(len(values), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    return words(eights.reshape(values.shape), 4)
