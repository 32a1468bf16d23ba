# SPDX-License-Identifier: Apache-2.0
"""The settings of vLLM's server, and what follows from them. Imports no torch."""

from __future__ import annotations

from typing import Literal

from evoalign.config.base import Gib
from evoalign.engines.server.settings import ServerSettings


class VllmServerConfig(ServerSettings):
    """vLLM's OpenAI-compatible server with adapters that are loaded as it runs (VLLM_ALLOW_RUNTIME_LORA_UPDATING).

    It reads them from folders. For one GPU machine the engine `vllm`, in this process, is faster.
    """

    name: Literal["vllm-server"]  # pyright: ignore[reportIncompatibleVariableOverride]
    kv_cache_gib: Gib | None = None
    """Room for keys and values of a server that is started here. None: what `memory_fraction` leaves; 1 on the CPU."""
    enforce_eager: bool = False
    """No CUDA graphs: a faster start and slower steps."""

    path = "evoalign.engines.vllm_server.engine:VllmServerEngine"
    serves = "vLLM"
    resources = ServerSettings.resources | {"kv_cache_gib", "enforce_eager"}
