# SPDX-License-Identifier: Apache-2.0
"""Triton and C kernels. evoalign also runs without them: each has an equivalent in plain torch.

Modules that import Triton are imported only if `available` returns True.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from importlib.util import find_spec

import torch


def available(device: torch.device | str) -> bool:
    """Return whether Triton kernels run on this device: a GPU, or any device in Triton's interpreter."""
    return _installed() and (torch.device(device).type == "cuda" or interpreted())


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a tensor's GPU the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter (TRITON_INTERPRET=1): NumPy on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=1024)
def factors(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Return cached factors on a device, rounded once to float32; read only. Many tensors use the same factors."""
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).to(device)


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
