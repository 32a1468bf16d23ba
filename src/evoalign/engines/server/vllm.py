# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI-compatible server: the requests it takes, and the command that starts it.

An adapter's name is sent as the `model`; an unknown one is refused. The prefix cache is keyed by that name, so no name
is used twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from evoalign import spaces
from evoalign.config import Config
from evoalign.engines.base import Completion
from evoalign.engines.server.adapters import PeftAdapter
from evoalign.engines.server.client import SHORT, Client, LostError, RefusedError
from evoalign.engines.server.connection import Command
from evoalign.engines.server.dialect import (
    LOADING,
    Dialect,
    ServerInfo,
    as_list,
    as_object,
    checked_ids,
    checked_logprobs,
    checked_reason,
    gather,
)
from evoalign.engines.server.engine import ServerEngine
from evoalign.engines.server.settings import VllmServerConfig
from evoalign.engines.specs import on_gpu
from evoalign.engines.vllm.settings import slot_rank
from evoalign.errors import ConfigError
from evoalign.models.origin import model_path
from evoalign.tokens import Tokens
from evoalign.types import Request, TensorSpec

CPU_CACHE = 1.0
"""GiB of keys and values on a CPU, where vLLM would take its share of all memory."""


class VllmDialect(Dialect):
    """The requests of vLLM's server."""

    health = ("/health", SHORT)
    metric = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
    measured = MappingProxyType(
        {
            "num_requests_running": "running",
            "num_requests_waiting": "queue",
            "kv_cache_usage_perc": "cache_used",
            "generation_tokens_total": "tokens",
        }
    )

    def __init__(self) -> None:
        self._base = ""

    async def about(self, client: Client) -> ServerInfo:
        """Return the server's description. The base model is the first that is not an adapter."""
        reply = await client.get("/v1/models")
        models = [as_object(row) for row in as_list(as_object(reply).get("data")) if not as_object(row).get("parent")]
        if not models or not isinstance(models[0].get("id"), str):
            raise LostError(f"{client.url}/v1/models names no model: {str(reply)[:80]!r}")
        self._base = models[0]["id"]
        try:
            version = as_object(await client.get("/version")).get("version")
        except RefusedError:
            version = None
        longest = models[0].get("max_model_len")
        return ServerInfo(
            version=str(version or "of an unknown version"),
            model=models[0].get("root") or self._base,
            longest=longest if type(longest) is int else None,
        )

    async def load(self, client: Client, name: str, adapter: PeftAdapter, folder: Path | None, ranks: int) -> None:
        if folder is None:
            raise ConfigError("vLLM's server reads adapters from folders; set engine.adapter_folder to one it sees")
        try:  # it replies with a line of text
            await client.text("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, seconds=LOADING)
        except RefusedError as error:
            if error.status in (404, 405) and "adapter" not in str(error).lower().partition("refuses")[2]:
                raise RefusedError(
                    f"the server at {client.url} loads no adapters; start it with --enable-lora and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment",
                    error.status,
                ) from error
            raise

    async def unload(self, client: Client, name: str) -> None:
        await client.text("/v1/unload_lora_adapter", {"lora_name": name})

    async def generate(
        self, client: Client, requests: Sequence[Request], adapter: str | None, stop_ids: Sequence[int]
    ) -> list[Completion]:
        """Return completions. Sampled requests have a seed each, and so an HTTP request each; equal greedy ones share
        one."""
        groups: dict[object, list[Request]] = {}
        for r in requests:
            own = (r.seed, r.index) if r.sampling.temperature > 0 else None
            groups.setdefault((r.sampling, r.logprobs, own), []).append(r)
        model = adapter or self._base
        found = await gather(_complete(client, group, model, stop_ids) for group in groups.values())
        by_index = {index: completion for part in found for index, completion in part.items()}
        return [by_index[r.index] for r in requests]

    def naming(self, adapter: str | None, base: str) -> Mapping[str, Any]:
        return {"model": adapter or base}


async def _complete(
    client: Client, requests: Sequence[Request], model: str, stop_ids: Sequence[int]
) -> dict[int, Completion]:
    """Return completions of requests with the same settings, by the requests' indices."""
    first, where = requests[0], f"{client.url}/v1/completions"
    sampling = first.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": [list(r.prompt_ids) for r in requests],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": list(stop_ids),
        "ignore_eos": True,  # the task defines the stop tokens, whatever the model
        "return_token_ids": True,
        "skip_special_tokens": False,
        **({"seed": first.seed} if sampling.temperature > 0 else {}),
        **({"logprobs": 0} if first.logprobs else {}),
    }
    reply = await client.post("/v1/completions", body, seconds=None)
    choices = [as_object(row) for row in as_list(as_object(reply).get("choices"))]
    rows = {row["index"]: row for row in choices if type(row.get("index")) is int}
    if set(rows) != set(range(len(requests))):
        raise LostError(f"{where} does not return {len(requests)} completions: {str(reply)[:80]!r}")
    found: dict[int, Completion] = {}
    for place, request in enumerate(requests):
        ids = checked_ids(rows[place].get("token_ids"), request, where)
        reason, logprobs = checked_reason(rows[place].get("finish_reason"), where), None
        if request.logprobs:
            values = as_object(rows[place].get("logprobs")).get("token_logprobs")
            logprobs = checked_logprobs(values, len(ids), where)
        found[request.index] = Completion(ids, reason, logprobs)
    return found


class VllmServerEngine(ServerEngine):
    """The engine over vLLM's server."""

    name = "vllm-server"
    module = "vllm"

    def __init__(self, config: Config, tokens: Tokens) -> None:
        self.dialect = VllmDialect()
        super().__init__(config, tokens)
        if not self.connection.sees_files:
            self.close()
            raise ConfigError(
                f"vLLM at {self._settings.url} reads adapters from folders; set engine.adapter_folder to one that it "
                "sees too"
            )

    def command(self, port: int, key: str, specs: Sequence[TensorSpec]) -> Command:
        config, on_cpu = self._config, not on_gpu(self._config)
        own, space = cast(VllmServerConfig, self._settings), spaces.create(config)
        cache = own.kv_cache_gib or (CPU_CACHE if on_cpu else None)
        options: dict[str, Any] = {
            "--model": model_path(config.model),
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": str(self.dtype).removeprefix("torch."),
            "--seed": config.seed % 2**31,
            "--tensor-parallel-size": own.tensor_parallel_size,
            "--generation-config": "vllm",
            "--revision": config.model.revision,
            "--gpu-memory-utilization": own.memory_fraction,
            "--max-model-len": own.context_length,
            "--max-num-seqs": own.max_running,
            "--kv-cache-memory-bytes": None if cache is None else int(cache * 2**30),
            "--enforce-eager": on_cpu or own.enforce_eager,
        }
        if space.carrier == "adapter":
            slots = own.slots(config) + 1  # one for rows of the base model
            options |= {
                "--enable-lora": True,
                "--max-loras": slots,
                "--max-cpu-loras": slots,
                "--max-lora-rank": slot_rank(space.rank),
                "--lora-target-modules": self._modules(space, specs),
            }
        environment = {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_API_KEY": key,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if on_cpu else {}),
        }
        return self._command("vllm.entrypoints.openai.api_server", options, environment, key)
