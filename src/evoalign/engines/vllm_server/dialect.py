# SPDX-License-Identifier: Apache-2.0
"""What vLLM's OpenAI-compatible server is asked: completions of token ids, and adapters from folders.

Adapters go by the name of a model; one that it does not know is refused. The cache of prefixes is kept by that name, so
no name comes twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from evoalign.engines.server.adapters import PeftAdapter
from evoalign.engines.server.client import Client
from evoalign.engines.server.dialect import (
    Said,
    Server,
    checked_ids,
    checked_logprobs,
    checked_reason,
    measured,
    together,
)
from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.errors import ConfigError
from evoalign.types import Request

LOADING = 300.0
"""Seconds within which a server has taken an adapter."""
MEASURED = {
    "num_requests_running": "running",
    "num_requests_waiting": "queue",
    "kv_cache_usage_perc": "cache_used",
    "generation_tokens_total": "tokens",
}
"""Of the server's metrics those that are kept, and what they are called here."""
_METRIC = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


class VllmDialect:
    """See `evoalign.engines.server.dialect.Dialect`."""

    def __init__(self) -> None:
        self._base = ""

    async def is_ready(self, client: Client) -> bool:
        try:
            await client.get("/health")
        except RefusedError as error:
            if error.status in (401, 403):
                raise
            return False
        return True

    async def about(self, client: Client) -> Server:
        """The base model is the first that is no adapter of another."""
        said = await client.get("/v1/models")
        rows = cast(dict[str, Any], said).get("data") if isinstance(said, dict) else None
        models = [row for row in cast(list[Any], rows or []) if isinstance(row, dict) and not row.get("parent")]
        if not models or not isinstance(models[0].get("id"), str):
            raise LostError(f"{client.url}/v1/models names no model: {str(said)[:80]!r}")
        self._base = models[0]["id"]
        try:
            version = cast(dict[str, Any], await client.get("/version") or {}).get("version")
        except RefusedError:
            version = None
        longest = models[0].get("max_model_len")
        return Server(
            version=str(version or "of an unknown version"),
            model=models[0].get("root") or self._base,
            longest=longest if type(longest) is int else None,
        )

    async def load(self, client: Client, name: str, adapter: PeftAdapter, folder: Path | None, ranks: int) -> None:
        if folder is None:
            raise ConfigError(
                "vLLM's server reads adapters from folders alone; set engine.adapter_folder to one it sees"
            )
        try:  # it answers with a line of text
            await client.text("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, seconds=LOADING)
        except RefusedError as error:
            if error.status in (404, 405) and "adapter" not in str(error).lower().partition("refuses")[2]:
                raise RefusedError(
                    f"the server at {client.url} takes no adapters as it runs; start it with --enable-lora and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment", error.status
                ) from error  # fmt: skip
            raise

    async def unload(self, client: Client, name: str) -> None:
        await client.text("/v1/unload_lora_adapter", {"lora_name": name})

    async def generate(
        self, client: Client, requests: Sequence[Request], adapter: str | None, stop_ids: Sequence[int]
    ) -> list[Said]:
        """Requests that draw have seeds of their own, and so an HTTP request each; greedy ones of alike go together."""
        model = adapter or self._base
        found = await together(self._one(client, group, model, stop_ids) for group in _alike(requests))
        by_index = {index: said for part in found for index, said in part.items()}
        return [by_index[r.index] for r in requests]

    async def _one(
        self, client: Client, requests: Sequence[Request], model: str, stop_ids: Sequence[int]
    ) -> dict[int, Said]:
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
            "ignore_eos": True,  # the stop tokens are the task's, of whatever model
            "return_token_ids": True,
            "skip_special_tokens": False,
            **({"seed": first.seed} if sampling.temperature > 0 else {}),
            **({"logprobs": 0} if first.logprobs else {}),
        }
        said = await client.post("/v1/completions", body, seconds=None)
        rows = cast(dict[str, Any], said).get("choices") if isinstance(said, dict) else None
        by_index = {row.get("index"): row for row in cast(list[Any], rows or []) if isinstance(row, dict)}
        if len(by_index) != len(requests) or set(by_index) != set(range(len(requests))):
            raise LostError(f"{where} answers no {len(requests)} completions: {str(said)[:80]!r}")
        return {r.index: _said(by_index[i], r, where) for i, r in enumerate(requests)}

    def naming(self, adapter: str | None, base: str) -> Mapping[str, Any]:
        return {"model": adapter or base}

    async def metrics(self, client: Client) -> Mapping[str, float]:
        return measured(await client.text("/metrics"), _METRIC, MEASURED)


def _alike(requests: Sequence[Request]) -> list[list[Request]]:
    groups: dict[object, list[Request]] = {}
    for r in requests:
        drawn = r.sampling.temperature > 0
        groups.setdefault((r.sampling, r.logprobs, (r.seed, r.index) if drawn else None), []).append(r)
    return list(groups.values())


def _said(row: Mapping[str, Any], request: Request, where: str) -> Said:
    ids = checked_ids(row.get("token_ids"), request, where)
    reason = checked_reason(row.get("finish_reason"), where)
    if not request.logprobs:
        return Said(ids, reason, None)
    logprobs = row.get("logprobs")
    values = cast(dict[str, Any], logprobs).get("token_logprobs") if isinstance(logprobs, dict) else None
    return Said(ids, reason, checked_logprobs(values, len(ids), where))
