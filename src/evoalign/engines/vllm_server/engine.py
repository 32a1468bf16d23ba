# SPDX-License-Identifier: Apache-2.0
"""vLLM's server as an engine: how it is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from evoalign import spaces
from evoalign.config import Config
from evoalign.engines.server.engine import ServerEngine
from evoalign.engines.server.process import Command
from evoalign.engines.specs import on_gpu
from evoalign.engines.vllm.adapters import slot_rank
from evoalign.engines.vllm_server.dialect import VllmDialect
from evoalign.engines.vllm_server.settings import VllmServerConfig
from evoalign.errors import ConfigError
from evoalign.models.origin import model_path
from evoalign.spaces.targets import module_of
from evoalign.tokens import Tokens
from evoalign.types import TensorSpec

CPU_CACHE = 1.0
"""GiB of keys and values on a CPU, where vLLM would take its share of all memory."""


class VllmServerEngine(ServerEngine):
    """See `evoalign.engines.base.Engine` for what each method promises."""

    name = "vllm-server"
    module = "vllm"

    def __init__(self, config: Config, tokens: Tokens) -> None:
        self.dialect = VllmDialect()
        super().__init__(config, tokens)
        if not self._link.sees_files:
            self.close()
            raise ConfigError(
                f"vLLM at {self._settings.url} reads adapters from folders alone; set engine.adapter_folder to one "
                "that it sees, too"
            )

    def command(self, port: int, key: str, specs: Sequence[TensorSpec]) -> Command:
        config, on_cpu = self._config, not on_gpu(self._config)
        own = cast(VllmServerConfig, self._settings)
        words: list[Any] = [
            "--model", model_path(config.model), "--host", "127.0.0.1", "--port", port,
            "--dtype", str(self.dtype).removeprefix("torch."), "--seed", config.seed % 2**31,
            "--tensor-parallel-size", own.tensor_parallel_size, "--generation-config", "vllm",
        ]  # fmt: skip
        cache = own.kv_cache_gib or (CPU_CACHE if on_cpu else None)
        given = {
            "--revision": config.model.revision,
            "--gpu-memory-utilization": own.memory_fraction,
            "--max-model-len": own.context_length,
            "--max-num-seqs": own.max_running,
            "--kv-cache-memory-bytes": None if cache is None else int(cache * 2**30),
        }
        for name, value in given.items():
            words += [name, value] if value is not None else []
        words += ["--enforce-eager"] if on_cpu or own.enforce_eager else []
        space = spaces.create(config)
        if space.carrier == "adapter":
            modules = sorted({module_of(t.module) for t in space.layout(specs, self.dtype).tensors})
            slots = own.slots(config) + 1  # rows of the base model have one
            words += ["--enable-lora", "--max-loras", slots, "--max-cpu-loras", slots, "--max-lora-rank",
                      slot_rank(space.rank), "--lora-target-modules", *modules]  # fmt: skip
        environment = {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1", **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if on_cpu else {}),
        }  # fmt: skip
        python = {"python": own.python} if own.python else {}
        module = "vllm.entrypoints.openai.api_server"
        return Command(module, [*map(str, words), *own.arguments], environment=environment, hidden=[key], **python)
