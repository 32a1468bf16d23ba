# SPDX-License-Identifier: Apache-2.0
"""What an SGLang server is asked: its native `generate` or OpenAI's chat completions, adapters from folders or tensors.

A request that names an adapter as its model is answered by the base model without a word, so `lora_path` is what names
it here. An unload is soft: a request for an old name would load it again from its folder, so no name comes twice.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch

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
from evoalign.types import Request

Api: TypeAlias = Literal["generate", "chat"]
HEALTH, LOADING = 10.0, 300.0
"""Seconds within which a server that is well says so, and has taken an adapter."""
DTYPES = {"half": "float16", "float": "float32"}
"""SGLang's other words."""
MEASURED = {
    "num_running_reqs": "running",
    "num_queue_reqs": "queue",
    "token_usage": "cache_used",
    "cache_hit_rate": "cache_hits",
    "gen_throughput": "tokens_per_second",
}
"""Of the server's metrics those that are kept, and what they are called here."""
_METRIC = re.compile(r"^sglang:(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


class SglangDialect:
    """See `evoalign.engines.server.dialect.Dialect`. `api` is the route that completions take."""

    def __init__(self, api: Api = "generate") -> None:
        self._api = api

    async def is_ready(self, client: Client) -> bool:
        try:
            await client.get("/health_generate", seconds=HEALTH)
        except RefusedError as error:
            if error.status in (401, 403):
                raise
            return False
        return True

    async def about(self, client: Client) -> Server:
        """The device and the attention of a server decide whether it has seeds: deterministic inference alone has."""
        try:
            said = await client.get("/server_info")
        except RefusedError as error:
            if error.status != 404:
                raise
            said = await client.get("/get_server_info")
        if not isinstance(said, dict):
            raise LostError(f"{client.url} does not say what it is: is it SGLang?")
        tree = cast(dict[str, Any], said)
        if not tree.get("enable_lora", True):  # null where it was not asked for
            raise RefusedError(f"the server at {client.url} takes no adapters; start it with --enable-lora")
        modules = tree.get("lora_target_modules")
        every = modules is None or "all" in modules
        return Server(
            version=str(tree.get("version", "of an unknown version")),
            model=_text(tree.get("model_path")),
            dtype=DTYPES.get(str(tree.get("dtype")), _text(tree.get("dtype"))),
            device=_text(tree.get("device")),
            rank=_count(tree.get("max_lora_rank")),
            modules=None if every else tuple(sorted(map(str, cast(list[Any], modules)))),
            longest=_count(tree.get("context_length")),
            ranks=_count(tree.get("tp_size")) or 1,
            has_seeds=bool(tree.get("enable_deterministic_inference")),
        )

    async def load(self, client: Client, name: str, adapter: PeftAdapter, folder: Path | None, ranks: int) -> None:
        if folder is not None:
            body: dict[str, Any] = {"lora_name": name, "lora_path": str(folder)}
            path = "/load_lora_adapter"
        else:
            body = await asyncio.to_thread(_sent, name, adapter, ranks)
            path = "/load_lora_adapter_from_tensors"
        said = await client.post(path, body, seconds=LOADING)
        if not isinstance(said, dict) or said.get("success") is not True:
            raise LostError(f"{client.url}{path} does not say that it has the adapter: {str(said)[:80]!r}")

    async def unload(self, client: Client, name: str) -> None:
        await client.post("/unload_lora_adapter", {"lora_name": name})

    async def generate(
        self, client: Client, requests: Sequence[Request], adapter: str | None, stop_ids: Sequence[int]
    ) -> list[Said]:
        """By either route the server gets token ids and gives token ids: no template of its own comes between."""
        if self._api == "chat":
            return await together(_chat(client, r, adapter, stop_ids) for r in requests)
        where = f"{client.url}/generate"
        body: dict[str, Any] = {
            "input_ids": [list(r.prompt_ids) for r in requests],
            "sampling_params": [_sampling(r, stop_ids) for r in requests],
            "return_logprob": [r.logprobs for r in requests],
        }
        if adapter is not None:
            body["lora_path"] = [adapter] * len(requests)
        said = await client.post("/generate", body, seconds=None)
        if not isinstance(said, list) or len(cast(list[Any], said)) != len(requests):
            raise LostError(f"{where} answers no {len(requests)} completions: {str(said)[:80]!r}")
        return [_said(one, request, where) for one, request in zip(cast(list[Any], said), requests, strict=True)]

    def naming(self, adapter: str | None, base: str) -> Mapping[str, Any]:
        return {"model": base, **({} if adapter is None else {"lora_path": adapter})}

    async def metrics(self, client: Client) -> Mapping[str, float]:
        """Of a server with --enable-metrics."""
        return measured(await client.text("/metrics"), _METRIC, MEASURED)


def _sent(name: str, adapter: PeftAdapter, ranks: int) -> dict[str, Any]:
    """An adapter within a request."""
    return {
        "lora_name": name,
        "config_dict": dict(adapter.config),
        "serialized_named_tensors": [packed(dict(adapter.tensors))] * ranks,
        "expected_checksums": {n: checksum(t) for n, t in adapter.tensors.items()},
    }


async def _chat(client: Client, request: Request, adapter: str | None, stop_ids: Sequence[int]) -> Said:
    """One by OpenAI's route, with SGLang's own words for ids; what a model's generation_config says is overruled."""
    path, sampling = "/v1/chat/completions", request.sampling
    where = f"{client.url}{path}"
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": ""}],  # of which nothing is used where there are `input_ids`
        "input_ids": list(request.prompt_ids),
        "return_token_ids": True,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": request.seed % 2**31,
        "stop": list(sampling.stop),
        "stop_token_ids": list(stop_ids),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "logprobs": request.logprobs,
        **({} if adapter is None else {"lora_path": adapter}),
    }
    said = await client.post(path, body, seconds=None)
    rows = cast(dict[str, Any], said).get("choices") if isinstance(said, dict) else None
    if not isinstance(rows, list) or len(cast(list[Any], rows)) != 1 or not isinstance(rows[0], dict):
        raise LostError(f"{where} answers no completion: {str(said)[:80]!r}")
    row = cast(dict[str, Any], rows[0])
    reason = checked_reason(row.get("finish_reason"), where)
    ids = row.get("response_token_ids", row.get("token_ids"))  # of 0.5.23, of 0.5.17
    if ids is None and reason == "stop" and _is_empty(row, cast(dict[str, Any], said)):
        return Said((), reason, () if request.logprobs else None)
    ids = checked_ids(ids, request, where)
    if not request.logprobs:
        return Said(ids, reason, None)
    told = row.get("logprobs")
    content = cast(dict[str, Any], told).get("content") if isinstance(told, dict) else None
    values = [one.get("logprob") if isinstance(one, dict) else None for one in cast(list[Any], content or [])]
    return Said(ids, reason, checked_logprobs(values, len(ids), where))


def _is_empty(row: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Whether nothing was said, not even to a parser of reasoning or of tools: the content is null, and one token is
    all that came."""
    message, usage = row.get("message"), said.get("usage")
    count = cast(dict[str, Any], usage).get("completion_tokens") if isinstance(usage, dict) else None
    return isinstance(message, dict) and not cast(dict[str, Any], message).get("content") and count in (0, 1)


def _sampling(request: Request, stop_ids: Sequence[int]) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "sampling_seed": request.seed % 2**31,
        "stop_token_ids": list(stop_ids),
        "stop": list(sampling.stop),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }


def _said(one: Any, request: Request, where: str) -> Said:
    """One completion, checked: a server that answers anything else is not scored. Raises LostError."""
    if not isinstance(one, dict) or not isinstance(one.get("meta_info"), dict):
        raise LostError(f"{where} answers no completion: {str(one)[:80]!r}")
    meta = cast(dict[str, Any], one["meta_info"])
    ids = checked_ids(one.get("output_ids"), request, where)
    reason = meta.get("finish_reason")
    kind = checked_reason(cast(dict[str, Any], reason).get("type") if isinstance(reason, dict) else reason, where)
    if not request.logprobs:
        return Said(ids, kind, None)
    rows = meta.get("output_token_logprobs")
    values = [row[0] if isinstance(row, list) and row else None for row in cast(list[Any], rows or [])]
    return Said(ids, kind, checked_logprobs(values, len(ids), where))


def packed(tensors: Any) -> str:
    """As SGLang unpickles it: plain tensors, with their numbers in them."""
    return base64.b64encode(pickle.dumps(tensors)).decode("ascii")


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, as SGLang compares it."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
