# SPDX-License-Identifier: Apache-2.0
"""What the tests of noise, hashes and updates share: parts of tensors, a small space and its moves, plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from evoalign import kernels, spaces
from evoalign.config import from_dict
from evoalign.optimizer import create
from evoalign.types import TensorSpec, Update, population

LAST = 2**32 - 1
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
MODULE = "layers.0.w.weight"
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
"""Marks of tests that need a GPU."""


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether dtype and bits are the same, whatever the devices."""
    got, want = (t.cpu().contiguous() for t in (got, want))
    return got.dtype == want.dtype and torch.equal(got.view(BITS[got.dtype]), want.view(BITS[want.dtype]))


def random(shape: Any, seed: int = 0) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(0, 0.02, shape), dtype=torch.float32)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def call(function: Callable[..., Any], *args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "available", lambda device: False)
            patch.setenv("EVOALIGN_COMPILED", "0")
            return function(*args)

    return call


def update(size: int, *, antithetic: bool = False, sigma: float = 0.01, decay: float = 0.0) -> Update:
    coefficients = tuple(map(float, np.random.default_rng(size).normal(size=size)))
    return Update(0, LAST, population(size, antithetic=antithetic), coefficients, sigma, 0.005, decay)


def make(space: str, rank: int = 2, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, int] = (41, 300)) -> Any:
    tree = {"seed": 7, "space": space, "lora": {"rank": rank, "evolve": "ab"}, "lowrank": {"rank": rank}}
    made = spaces.create(from_dict(tree | {"es": {"sigma": 0.01}}))
    return made, made.layout([TensorSpec(MODULE, shape, "linear", 0, 0.1)], dtype)


def moved(
    space: str, rank: int, dtype: torch.dtype, up: Update, part: Any = None, *, shape: tuple[int, int] = (41, 300),
    factor: str = "B", optimizer: str = "sgd", device: str = "cpu", served: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the mean and the served weights after an update of a part of one tensor."""
    made, layout = make(space, rank, dtype, shape)
    name = MODULE.replace(".weight", f".lora_{factor}.weight") if space == "lora" else MODULE
    shape = layout[name].shape
    part = tuple(slice(0, n) for n in shape) if part is None else part
    master, start = random(shape).to(device), random(shape, 1).to(device)[part]
    weights = torch.zeros(shape, dtype=served or dtype, device=device)
    how = create(from_dict({"es": {"sigma": 0.01, "optimizer": optimizer}}).es, layout)
    made.accumulate(layout, master[part], name, part, up, start, how, weights[part])
    return master, weights


def ordered(made: Any, layout: Any, name: str, up: Update, master: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return a matrix after an update of `lowrank` in plain operations: each product rounded and added in order."""
    whole = tuple(slice(0, n) for n in master.shape)
    weights = made._weights(layout, name, up)
    factors = made._served(layout, name, up, list(weights), [1] * len(weights), whole, torch.device("cpu"))
    total = torch.zeros(master.shape)
    for weight, b, a in zip(weights.values(), factors.b.float(), factors.a.float(), strict=True):
        for k in range(layout.rank):
            total += (b[:, k, None] * torch.tensor(weight, dtype=torch.float32)) * a[None, k]
    mean = master - (master - start) * up.decay if up.decay else master.clone()
    return mean + total * torch.tensor(1 / len(up.members)) * torch.tensor(up.step * layout[name].scale)


def count_launches(monkeypatch: pytest.MonkeyPatch, module: Any, kernel: str) -> list[Any]:
    """Return a list to which each launch of a kernel is added."""
    launches, inner = [], getattr(module, kernel)

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return inner[grid]

    monkeypatch.setattr(module, kernel, Counted())
    return launches


def cases(cpu: list[tuple[Any, ...]], cuda: list[tuple[Any, ...]]) -> list[Any]:
    """Parametrise over cases of the CPU and, if there is one, of a GPU; the device is the first argument."""
    marked = [pytest.param("cuda", *case, marks=CUDA) for case in cuda]
    return [pytest.param("cpu", *case) for case in cpu] + marked
