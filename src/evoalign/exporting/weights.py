# SPDX-License-Identifier: Apache-2.0
"""A mean as a whole Hugging Face model: an adapter put into its base, or a checkpoint, in the dtype that is asked for.

Each weight is formed in float32 and rounded once: W + (alpha / r) B A, or the float32 mean beside a checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch

from evoalign.config import reading
from evoalign.engines import weights_hash
from evoalign.errors import ModelError
from evoalign.exporting.source import ADAPTER_CONFIG, Source
from evoalign.models.adapters import add
from evoalign.models.files import load_whole
from evoalign.models.origin import model_path, own_dtype
from evoalign.models.tensors import tensors_of
from evoalign.rundir import checkpoint


def dtype_of(source: Source, wanted: str | None, *, merge: bool) -> str:
    """Of the exported weights. A merge keeps the base's own, or what the run served where that is narrower.

    Of an adapter float32, in which it evolved.
    """
    if source.is_adapter and not merge:
        return "float32"
    served = source.dtype
    if wanted is not None or not merge:
        return wanted or served
    own = own_dtype(source.model)
    return own if own is not None and _bytes(own) <= _bytes(served) else served


def rounding(served: str, saved: str, *, merged: bool) -> str:
    """What the weights of an export lost after the run's figures were measured, in words; empty where that is nothing.

    A checkpoint in the served dtype is what was measured; a merge is not, which rounds base and adapter as one.
    """
    if saved == "float32" or (saved == served and not merged):
        return ""
    most = 50 * torch.finfo(getattr(torch, saved)).eps
    return f"rounded to {saved}, each by up to about {most:.1g} %, after the run's figures were measured"


def _bytes(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


@torch.no_grad()
def whole(source: Source, dtype: str, *, merge: bool) -> Any:
    """The model in host memory. Raises ModelError."""
    served, asked = getattr(torch, source.dtype), getattr(torch, dtype)
    if not merge:
        model = load_whole(str(source.folder), None, served, str(source.folder))
        if asked != served:
            model.to(asked)
            parameters = tensors_of(model)
            for name, tensor in checkpoint.mean_of(source.folder).items():
                parameters[name].copy_(tensor)
        return model
    base = model_path(source.model)
    model = load_whole(base, source.model.revision, served, source.model.name)
    _check_base(model, source)
    settings = reading.read_object(source.folder / ADAPTER_CONFIG)
    add(model.float(), checkpoint.load_adapter(source.folder), settings["lora_alpha"] / settings["r"])
    return model.to(asked)


def _check_base(model: Any, source: Source) -> None:
    """Raise ModelError where the base is not the one that was trained: a merge with another gives nonsense."""
    known = source.model_hash
    if known is not None and weights_hash(model.named_parameters()) != known:
        raise ModelError(
            f"model.name {source.model.name} has other weights than the base of {source.run}; say where that is with "
            "--model FOLDER"
        )
