# SPDX-License-Identifier: Apache-2.0
"""What a config asks of vLLM's adapters: how many, of which rank and in which form. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from evoalign import spaces
from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.spaces.targets import module_of
from evoalign.types import Layout, TensorSpec

if TYPE_CHECKING:
    from evoalign.engines.vllm.settings import VllmConfig

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has slots for."""
KERNEL_RANK = 16
"""Highest rank of the population kernels."""


def settings(config: Config) -> VllmConfig:
    """The config's engine section."""
    return cast("VllmConfig", config.engine)


def slots(config: Config) -> int:
    """Adapters on the GPU at once: the population and, where its mean is one as well, that of the mean."""
    population = config.es.population_size if config.es_ is not None else 1
    return (settings(config).members or population) + spaces.create(config).has_mean_adapter


def room(config: Config) -> int:
    """Slots that vLLM makes: on a CPU its own kernels give rows of the base model the last one, which stays zero."""
    return slots(config) + (form(config) == "stock")


def rank(config: Config) -> int:
    """Rank of the adapters."""
    return spaces.create(config).rank


def slot_rank(wanted: int) -> int:
    """The smallest rank of vLLM's that holds an adapter. Raises ConfigError above the largest."""
    for size in RANKS:
        if wanted <= size:
            return size
    raise ConfigError(f"rank {wanted}: engine vllm takes adapters of rank {RANKS[-1]} at most; lower it")


def scaling(config: Config) -> float:
    """What the population kernels multiply a member's term with; elsewhere it is folded into B."""
    return spaces.create(config).scaling


def form(config: Config) -> str:
    """How rows get their members' terms: `deep` (where the model allows), `generic` or `stock`. Raises ConfigError."""
    wanted = settings(config).population
    if rank(config) <= KERNEL_RANK:
        return "deep" if wanted == "auto" else wanted
    if wanted in ("auto", "stock"):
        return "stock"
    raise ConfigError(
        f"engine.population {wanted} takes ranks up to {KERNEL_RANK}, not {rank(config)}; lower the rank or use stock"
    )


def slot_bytes(config: Config, layout: Layout, specs: Sequence[TensorSpec], dtype: torch.dtype) -> int:
    """vLLM keeps room for every member's factors, at a rank of its own choice and on every layer."""
    if not layout.rank:
        return 0
    modules = {module_of(t.module) for t in layout.tensors}
    sides = sum(sum(s.shape) for s in specs if s.kind == "linear" and module_of(s.name) in modules)
    return room(config) * slot_rank(layout.rank) * sides * dtype.itemsize
