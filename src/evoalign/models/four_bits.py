# SPDX-License-Identifier: Apache-2.0
"""Models in 4 bits of bitsandbytes (Dettmers et al. 2023): weights stay packed, and its library multiplies them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

import torch

from evoalign.errors import ModelError, shown
from evoalign.models.forms import Quantised, not_packed
from evoalign.models.tensors import open_file


def load(
    name: str, path: str, revision: str | None, dtype: torch.dtype, found: Quantised, files: Sequence[Path], how: Any
) -> Any:
    """Load a model of bitsandbytes whose weights stay packed, and are products in `dtype`. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"model {name} is quantised ({found.words}), and that library is not installed: "
            'pip install "evoalign[bitsandbytes]"'
        )
    if not any(".quant_state.bitsandbytes__" in key for file in files for key in open_file(file).keys()):  # noqa: SIM118
        raise not_packed(name, found)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        revision=revision,
        dtype=dtype,
        trust_remote_code=False,
        use_safetensors=True,
        device_map={"": "cpu"},
        **how,
    )
    for key, module in loaded[0].named_modules():
        if hasattr(module, "compute_type_is_set"):  # Linear4bit
            _check(name, key, module)
            module.compute_dtype, module.compute_type_is_set = dtype, True
            module.weight.quant_state.dtype = dtype  # that of its weights when they are multiplied
            module.support_avx512bf16_for_cpu = False  # another layout, in bfloat16
    for parameter in loaded[0].parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return loaded


def _check(name: str, key: str, module: Any) -> None:
    """Raise ModelError where the parts of a weight do not have the sizes that the library reads without a look."""
    weight, state = module.weight, module.weight.quant_state
    count, blocks = module.out_features * module.in_features, state.absmax.numel()
    sound = (
        tuple(state.shape) == (module.out_features, module.in_features)
        and weight.numel() * weight.element_size() == ceil(count / 2)
        and blocks == ceil(count / max(1, state.blocksize))
        and state.code.numel() == 16
    )
    if sound and state.nested:
        inner = state.state2
        sound = inner.absmax.numel() == ceil(blocks / max(1, inner.blocksize)) and inner.code.numel() == 256
    if not sound:
        raise ModelError(
            f"model {name} does not load: the parts of {shown(key)} in its files do not fit; fetch it again"
        )
