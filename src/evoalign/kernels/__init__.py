# SPDX-License-Identifier: Apache-2.0
"""Triton kernels. evoalign runs without them, and without Triton: each has a twin in plain torch.

Modules here import Triton, so they are imported only where `available` says yes.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from importlib.util import find_spec

import torch


def available(device: torch.device | str) -> bool:
    """Whether Triton kernels run on this device: a GPU, or anything in Triton's interpreter (TRITON_INTERPRET=1)."""
    return _installed() and (torch.device(device).type == "cuda" or interpreted())


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: numpy on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=1024)
def factors(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Factors on a device, rounded once to float32; read only. The same ones are wanted tensor after tensor."""
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).to(device)


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
