# SPDX-License-Identifier: Apache-2.0
"""Bytes of a base model's weights as an engine serves them: dense, or packed as in the files of a quantised model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from evoalign.config import Config, ModelConfig
from evoalign.errors import ModelError
from evoalign.models.files import refuse_pickles, weight_files
from evoalign.models.origin import described, model_config
from evoalign.models.quantised import Quantised, quantised_of
from evoalign.models.tensors import open_file
from evoalign.types import TensorSpec


def weight_bytes(config: Config, specs: Sequence[TensorSpec], dtype: torch.dtype) -> int:
    """Return the bytes of the base model's weights on the engine: those of its files if it keeps them packed."""
    found = quantised_of(config.model)
    if found is None or config.engine.unpacks(found.form, found.bits):
        return sum(math.prod(spec.shape) for spec in specs) * dtype.itemsize
    try:
        return _of_files(config.model)
    except ModelError:  # not here, as with random weights; a run reports damage
        return _of_bits(found, specs, dtype)


def _of_files(config: ModelConfig) -> int:
    """Return the bytes of the tensors in the model's files, by their headers; each name, and tied weights, once."""
    path, revision = described(config)
    sizes: dict[str, int] = {}
    if not Path(path).is_dir():
        raise ModelError(f"model {config.name} would be downloaded to look at its files")
    refuse_pickles(path, revision)
    for file in weight_files(path, revision, config.name):
        tensors = open_file(file)
        for name in tensors.keys():  # noqa: SIM118  # not a mapping
            tensor = tensors.get_slice(name)
            bits = re.search(r"\d+", tensor.get_dtype())  # of BF16, I32, F8_E4M3; a BOOL takes a byte
            sizes[name] = math.prod(tensor.get_shape()) * (int(bits[0]) if bits else 8) // 8
    if model_config(config).get_text_config().tie_word_embeddings:
        sizes = {name: size for name, size in sizes.items() if not name.startswith("lm_head.")}
    return sum(sizes.values())


def _of_bits(found: Quantised, specs: Sequence[TensorSpec], dtype: torch.dtype) -> int:
    """Return the bytes of a model whose layers have packed matrices, with a scale per group or row."""
    bits, size = found.bits or (4 if "fp4" in found.form else 8), 0.0
    for spec in specs:
        count = math.prod(spec.shape)
        if spec.layer is not None and len(spec.shape) > 1:
            size += count * bits / 8 + count / (found.group or spec.shape[-1]) * dtype.itemsize
        else:
            size += count * dtype.itemsize
    return math.ceil(size)
