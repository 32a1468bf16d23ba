# SPDX-License-Identifier: Apache-2.0
"""SGLang: the requests it takes, the command that starts it, and how the mean's weights reach it.

SGLang answers a request that names an adapter as its `model` by the base model, silently, so requests use `lora_path`.
It reloads an unloaded adapter from its folder when a request names it, so no name is used twice.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import pickle
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

import torch
from safetensors.torch import save_file

from evoalign import spaces
from evoalign.config import Config
from evoalign.engines.base import Completion
from evoalign.engines.server.adapters import AdapterStore, PeftAdapter
from evoalign.engines.server.client import Client, LostError, RefusedError
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
from evoalign.engines.server.settings import SglangConfig
from evoalign.engines.specs import on_gpu
from evoalign.errors import ModelError
from evoalign.models.origin import model_path
from evoalign.optimizer import Optimizer
from evoalign.rundir.files import as_os_errors
from evoalign.spaces.base import Space
from evoalign.tokens import Tokens
from evoalign.types import Facts, Layout, Request, TensorSpec

Api: TypeAlias = Literal["generate", "chat"]
DTYPES = {"half": "float16", "float": "float32"}
"""SGLang's other names for dtypes."""
CPU_TOKENS = 65_536
"""Tokens in the cache on a CPU, where SGLang would take its share of all memory."""
PROBED = 4
"""Tensors, or a few more, whose checksums show whether new weights arrive."""
SHARD, SENT = 2**31, 2**28
"""Bytes of weights in one file, and in one request."""
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""SGLang's fused tensors, by their parts."""
_LAST = re.compile(r"(\w+)(?=\.weight$)")


class SglangDialect(Dialect):
    """The requests of SGLang. `api` is the route of completions; metrics need --enable-metrics."""

    health = ("/health_generate", 10.0)
    metric = re.compile(r"^sglang:(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
    measured = MappingProxyType(
        {
            "num_running_reqs": "running",
            "num_queue_reqs": "queue",
            "token_usage": "cache_used",
            "cache_hit_rate": "cache_hits",
            "gen_throughput": "tokens_per_second",
        }
    )

    def __init__(self, api: Api = "generate") -> None:
        self._api = api

    async def about(self, client: Client) -> ServerInfo:
        """Return the server's description. Only with deterministic inference does it sample with seeds."""
        try:
            reply = await client.get("/server_info")
        except RefusedError as error:
            if error.status != 404:
                raise
            reply = await client.get("/get_server_info")
        if not isinstance(reply, dict):
            raise LostError(f"{client.url} does not describe itself: is it SGLang?")
        info = as_object(reply)
        if not info.get("enable_lora", True):  # null where it was not enabled
            raise RefusedError(f"the server at {client.url} serves no adapters; start it with --enable-lora")
        modules, dtype = info.get("lora_target_modules"), info.get("dtype")
        texts = {n: v for n, v in info.items() if isinstance(v, str)}
        counts = {n: v for n, v in info.items() if type(v) is int and v > 0}
        return ServerInfo(
            version=str(info.get("version", "of an unknown version")),
            model=texts.get("model_path"),
            dtype=DTYPES.get(str(dtype), texts.get("dtype")),
            device=texts.get("device"),
            rank=counts.get("max_lora_rank"),
            modules=None if modules is None or "all" in modules else tuple(sorted(map(str, as_list(modules)))),
            longest=counts.get("context_length"),
            ranks=counts.get("tp_size", 1),
            has_seeds=bool(info.get("enable_deterministic_inference")),
        )

    async def load(self, client: Client, name: str, adapter: PeftAdapter, folder: Path | None, ranks: int) -> None:
        if folder is not None:
            path, body = "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}
        else:
            path, body = "/load_lora_adapter_from_tensors", await asyncio.to_thread(_as_tensors, name, adapter, ranks)
        reply = await client.post(path, body, seconds=LOADING)
        if as_object(reply).get("success") is not True:
            raise LostError(f"{client.url}{path} does not confirm the adapter: {str(reply)[:80]!r}")

    async def unload(self, client: Client, name: str) -> None:
        await client.post("/unload_lora_adapter", {"lora_name": name})

    async def generate(
        self, client: Client, requests: Sequence[Request], adapter: str | None, stop_ids: Sequence[int]
    ) -> list[Completion]:
        """Return completions. Both routes take and return token ids, so that no template of the server matters."""
        if self._api == "chat":
            return await gather(_chat(client, r, adapter, stop_ids) for r in requests)
        body: dict[str, Any] = {
            "input_ids": [list(r.prompt_ids) for r in requests],
            "sampling_params": [
                {
                    "max_new_tokens": r.sampling.max_tokens,
                    "temperature": r.sampling.temperature,
                    "top_p": r.sampling.top_p,
                    "sampling_seed": r.seed % 2**31,
                    "stop_token_ids": list(stop_ids),
                    "stop": list(r.sampling.stop),
                    "skip_special_tokens": False,
                    "spaces_between_special_tokens": False,
                    "no_stop_trim": True,
                }
                for r in requests
            ],
            "return_logprob": [r.logprobs for r in requests],
        }
        if adapter is not None:
            body["lora_path"] = [adapter] * len(requests)
        reply, where = await client.post("/generate", body, seconds=None), f"{client.url}/generate"
        rows = as_list(reply)
        if len(rows) != len(requests) or not all(isinstance(as_object(row).get("meta_info"), dict) for row in rows):
            raise LostError(f"{where} does not return {len(requests)} completions: {str(reply)[:80]!r}")
        completions: list[Completion] = []
        for row, request in zip(rows, requests, strict=True):
            ids, meta = checked_ids(row.get("output_ids"), request, where), as_object(row["meta_info"])
            reason = meta.get("finish_reason")
            reason = checked_reason(as_object(reason).get("type") if isinstance(reason, dict) else reason, where)
            logprobs = None
            if request.logprobs:
                values = [(as_list(one) or [None])[0] for one in as_list(meta.get("output_token_logprobs"))]
                logprobs = checked_logprobs(values, len(ids), where)
            completions.append(Completion(ids, reason, logprobs))
        return completions

    def naming(self, adapter: str | None, base: str) -> Mapping[str, Any]:
        return {"model": base, **({} if adapter is None else {"lora_path": adapter})}


async def _chat(client: Client, request: Request, adapter: str | None, stop_ids: Sequence[int]) -> Completion:
    """Return a completion by OpenAI's route, with SGLang's fields for ids, and a model's generation_config disabled."""
    path, sampling = "/v1/chat/completions", request.sampling
    where = f"{client.url}{path}"
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": ""}],  # ignored where there are `input_ids`
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
    reply = as_object(await client.post(path, body, seconds=None))
    rows = as_list(reply.get("choices"))
    if len(rows) != 1 or not isinstance(rows[0], dict):
        raise LostError(f"{where} returns no completion: {str(reply)[:80]!r}")
    row = as_object(rows[0])
    reason = checked_reason(row.get("finish_reason"), where)
    ids = row.get("response_token_ids", row.get("token_ids"))  # of 0.5.23, of 0.5.17
    # Nothing was generated, not even for a parser of reasoning or tools: null content, and only the stop token.
    count, message = as_object(reply.get("usage")).get("completion_tokens"), row.get("message")
    is_empty = isinstance(message, dict) and not as_object(message).get("content") and count in (0, 1)
    if ids is None and reason == "stop" and is_empty:
        return Completion((), reason, () if request.logprobs else None)
    ids = checked_ids(ids, request, where)
    if not request.logprobs:
        return Completion(ids, reason, None)
    values = [as_object(one).get("logprob") for one in as_list(as_object(row.get("logprobs")).get("content"))]
    return Completion(ids, reason, checked_logprobs(values, len(ids), where))


def _as_tensors(name: str, adapter: PeftAdapter, ranks: int) -> dict[str, Any]:
    """Return the request that loads an adapter as tensors, with SGLang's SHA-256 checksum of each."""
    checksums = {
        n: hashlib.sha256(t.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for n, t in adapter.tensors.items()
    }
    return {
        "lora_name": name,
        "config_dict": dict(adapter.config),
        "serialized_named_tensors": [packed(dict(adapter.tensors))] * ranks,
        "expected_checksums": checksums,
    }


def packed(tensors: Any) -> str:
    """Return plain tensors in the form that SGLang unpickles."""
    return base64.b64encode(pickle.dumps(tensors)).decode("ascii")


class SglangEngine(ServerEngine):
    """The engine over an SGLang server."""

    name = "sglang"
    module = "sglang"
    moves_weights = True
    elsewhere = f"{ServerEngine.elsewhere}, or engine.transport tensors"
    _sums: Mapping[str, str] | None = None
    """The server's checksums after the last push, by its names."""
    _base: Mapping[str, int] = MappingProxyType({})
    _sent: Mapping[str, int] = MappingProxyType({})
    """CRCs of some weights: of the base model, and of those sent last."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        self._own = cast(SglangConfig, config.engine)
        self.dialect = SglangDialect(self._own.api)
        super().__init__(config, tokens)

    @property
    def _by_files(self) -> bool:
        transport = self._own.transport
        return self.connection.sees_files if transport == "auto" else transport == "files"

    def command(self, port: int, key: str, specs: Sequence[TensorSpec]) -> Command:
        config, own, on_cpu = self._config, self._own, not on_gpu(self._config)
        options: dict[str, Any] = {
            "--model-path": model_path(config.model),
            "--host": "127.0.0.1",
            "--port": port,
            "--api-key": key,
            "--admin-api-key": key,
            "--device": "cpu" if on_cpu else "cuda",
            "--dtype": str(self.dtype).removeprefix("torch."),
            "--tp-size": own.tensor_parallel_size,
            "--random-seed": config.seed % 2**31,
            "--grammar-backend": "none",
            "--log-level": "info",
            "--log-level-http": "warning",
            "--revision": config.model.revision,
            "--mem-fraction-static": own.memory_fraction or (0.3 if on_cpu else None),
            "--context-length": own.context_length,
            "--max-running-requests": own.max_running or (256 if on_cpu else None),
            "--max-total-tokens": own.max_total_tokens or (CPU_TOKENS if on_cpu else None),
            "--attention-backend": own.attention_backend or ("torch_native" if on_cpu else None),
            "--sampling-backend": own.sampling_backend or ("pytorch" if on_cpu else None),
            "--load-format": "dummy" if own.load_format == "dummy" else None,
            "--enable-metrics": True,
            "--disable-cuda-graph": on_cpu or not own.cuda_graph,
            "--disable-overlap-schedule": on_cpu,
            "--sleep-on-idle": on_cpu,
            "--enable-deterministic-inference": own.deterministic_inference,
        }
        space = spaces.create(config)
        if space.carrier == "adapter":
            options |= {
                "--enable-lora": True,
                "--max-lora-rank": space.rank,
                "--max-loras-per-batch": own.slots(config) + 1,  # rows of the base model count as one adapter
                "--lora-backend": own.lora_backend or ("torch_native" if on_cpu else None),
                "--lora-target-modules": self._modules(space, specs),
            }
        environment = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"SGLANG_USE_CPU_ENGINE": "1"} if on_cpu else {}
        return self._command("sglang.launch_server", options, environment, key)

    # --- the mean's weights ------------------------------------------------------------------------------------------

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        facts = super().start(space, layout, optimizer, keep_start)
        if space.evolves_model:
            self._base = self._sent = _crcs({t.name: self._parameters[t.name] for t in layout.tensors})
        return facts

    async def push(self, client: Client, weights: Mapping[str, torch.Tensor], store: AdapterStore) -> None:
        """Send weights as files in memory, or within requests; SGLang then flushes its cache.

        SGLang also confirms tensors that it does not have, so its checksums before and after are compared.
        """
        before = self._sums if self._sums is not None else await self._checksums(client)
        ours = _crcs(weights)
        await self._send(client, weights, store)
        after = await self._checksums(client)
        if before is not None and after is not None:
            for name in [name for name, crc in ours.items() if self._sent[name] != crc]:
                served = _served_name(name)
                is_same = served in before and before[served] == after.get(served)
                if served not in before or (is_same and not await self._had(client, name, weights[name], store)):
                    raise ModelError(
                        f"SGLang at {client.url} confirmed the mean's weights, but {served} did not change: it cannot "
                        "serve this model's moved weights; use engine vllm, or space lora"
                    )
        self._sums, self._sent = after, ours

    async def has_weights(self, client: Client) -> bool:
        if self._sums is None or await self._checksums(client) == self._sums:
            return True
        self._sums, self._sent = None, self._base
        return False

    def _recover(self, error: LostError) -> None:
        self._sums, self._sent = None, self._base  # it has the base model, or, if it was not restarted, the mean
        super()._recover(error)

    async def _had(self, client: Client, name: str, tensor: torch.Tensor, store: AdapterStore) -> bool:
        """Return whether the server already had a tensor that did not change: then its negative changes it."""
        sums: list[Mapping[str, str]] = []
        for sent in (-tensor, tensor):
            await self._send(client, {name: sent}, store)
            sums.append(await self._checksums(client) or {})
        return sums[0].get(_served_name(name)) != sums[1].get(_served_name(name))

    async def _send(self, client: Client, weights: Mapping[str, torch.Tensor], store: AdapterStore) -> None:
        """Send weights in pieces, within a weight update session where the server has those (0.5.23 and later)."""
        seconds, most = self._own.timeout, SHARD if self._by_files else SENT
        pieces, size = list[dict[str, torch.Tensor]](), 0
        for name, tensor in weights.items():
            own = tensor.numel() * tensor.element_size()
            if not pieces or size + own > most:
                pieces.append({})
                size = 0
            pieces[-1][name] = tensor
            size += own
        opened = await begin_update(client, seconds)
        try:
            for part in pieces:
                piece = {n: t.detach().to("cpu").contiguous() for n, t in part.items()}
                body: dict[str, Any] = {"flush_cache": True}
                if self._by_files:
                    path = "/update_weights_from_disk"
                    body["model_path"] = str(_write(piece, store, Path(model_path(self._config.model))))
                else:
                    path = "/update_weights_from_tensor"
                    body["serialized_named_tensors"] = [packed(list(piece.items()))] * self.connection.about.ranks
                reply = await client.post(path, body, seconds=seconds)
                if as_object(reply).get("success") is not True:
                    raise LostError(f"{client.url}{path} does not confirm the weights: {str(reply)[:80]!r}")
                store.drop("weights")
        finally:
            store.drop("weights")
            if opened:
                await client.post("/end_weight_update", {}, seconds=seconds)

    async def _checksums(self, client: Client) -> dict[str, str] | None:
        """Return the checksum of each tensor on the first rank; None where the server has no such request."""
        try:
            reply = await client.post("/weights_checker", {"action": "checksum"}, seconds=self._own.timeout)
        except RefusedError as error:
            if error.status in (400, 404, 405, 422):
                return None
            raise
        ranks = as_list(as_object(reply).get("ranks"))
        return as_object(as_object(ranks[0]).get("checksums")) or None if ranks else None


async def begin_update(client: Client, seconds: float) -> bool:
    """Begin a weight update session, ending one that was left open. Returns whether the server has sessions."""
    try:
        await client.post("/begin_weight_update", {}, seconds=seconds)
    except RefusedError as error:
        if error.status in (404, 405):
            return False
        if "already open" not in str(error):
            raise
        await client.post("/end_weight_update", {}, seconds=seconds)
        await client.post("/begin_weight_update", {}, seconds=seconds)
    return True


def _write(weights: dict[str, torch.Tensor], store: AdapterStore, base: Path) -> Path:
    """Write weights and the model's config.json into a folder and return it. Raises ModelError."""
    folder = store.folder("weights")
    try:
        with as_os_errors(folder):
            save_file(weights, folder / "model.safetensors")
            if (base / "config.json").is_file():
                shutil.copyfile(base / "config.json", folder / "config.json")
            for file in folder.iterdir():
                file.chmod(0o644)
    except OSError as error:
        raise ModelError(
            f"{folder} does not hold the mean's weights ({error.strerror}); set engine.adapter_folder to one with "
            "more room"
        ) from error
    return folder


def _crcs(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the CRC-32 of some tensors, evenly spaced."""
    names = list(weights)[:: max(1, len(weights) // PROBED)]
    return {
        n: zlib.crc32(weights[n].detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for n in names
    }


def _served_name(name: str) -> str:
    """Return the name of SGLang's tensor that contains a Hugging Face tensor."""
    return _LAST.sub(lambda found: FUSED.get(found[1], found[1]), name)
