# SPDX-License-Identifier: Apache-2.0
"""The tiny model with other weights, for tests of analyses of weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from evoalign.analysis import weights
from evoalign.analysis.similarity.measures import Measured, measure
from evoalign.analysis.targets import locate
from evoalign.models import tiny

MODEL = "model.safetensors"


def base() -> dict[str, torch.Tensor]:
    return load_file(tiny() / MODEL)


def changed(folder: Path, seed: int, rank: int | None = None, width: float = 0.01) -> Path:
    """The tiny model with noise on every tensor, or with noise of a rank on its matrices in the layers."""
    generator = torch.Generator().manual_seed(seed)
    shutil.copytree(tiny(), folder)
    state = {name: tensor.float() for name, tensor in base().items()}
    for name, tensor in state.items():
        if rank is None:
            state[name] = tensor + width * torch.randn(tensor.shape, generator=generator)
        elif tensor.ndim == 2 and ".layers." in name:
            b, a = (torch.randn(s, generator=generator) for s in ((len(tensor), rank), (rank, tensor.shape[1])))
            state[name] = tensor + width * b @ a
    save_file(state, folder / MODEL, metadata={"format": "pt"})
    return folder


def measured(folders: list[Path], base_: str = "tiny") -> list[Measured]:
    """The changes of checkpoints from a base model, with ranks, and one threshold, of 0."""
    own = weights.read([locate(str(folder), None, base_) for folder in folders])
    return measure(own, (0.0,), (), spectra=True)
