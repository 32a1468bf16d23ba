# SPDX-License-Identifier: Apache-2.0
"""SGLang as an engine: how its server is started, and how the mean's weights reach it."""

from __future__ import annotations

import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from safetensors.torch import save_file

from evoalign import spaces
from evoalign.config import Config
from evoalign.engines.server.adapters import Shelf
from evoalign.engines.server.client import Client
from evoalign.engines.server.engine import ServerEngine
from evoalign.engines.server.errors import LostError, RefusedError
from evoalign.engines.server.process import Command
from evoalign.engines.sglang.dialect import SglangDialect, packed
from evoalign.engines.sglang.settings import SglangConfig
from evoalign.engines.specs import on_gpu
from evoalign.errors import ModelError
from evoalign.models.origin import model_path
from evoalign.optimizer import Optimizer
from evoalign.rundir.files import as_os_errors
from evoalign.spaces.base import Space
from evoalign.spaces.targets import module_of
from evoalign.tokens import Tokens
from evoalign.types import Facts, Layout, TensorSpec

CPU_TOKENS = 65_536
"""Tokens in the cache on a CPU, where SGLang would take its share of all memory."""
PROBED = 4
"""Tensors by which it is seen whether weights arrive, or a few more."""
SHARD, SENT = 2**31, 2**28
"""Bytes of weights in one file, and in one request."""
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
          "up_proj": "gate_up_proj"}  # fmt: skip
_LAST = re.compile(r"(\w+)(?=\.weight$)")


class SglangEngine(ServerEngine):
    """See `evoalign.engines.base.Engine` for what each method promises."""

    name = "sglang"
    module = "sglang"
    moves_weights = True
    elsewhere = f"{ServerEngine.elsewhere}, or engine.transport tensors"
    _sums: Mapping[str, str] | None = None
    """What the server's weights came to after the last push, by its own names."""
    _base: Mapping[str, int] = MappingProxyType({})
    _sent: Mapping[str, int] = MappingProxyType({})
    """What some of the weights come to that it began with, and that were sent last."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        self.dialect = SglangDialect(cast(SglangConfig, config.engine).api)
        super().__init__(config, tokens)

    @property
    def own(self) -> SglangConfig:
        """The config's engine section."""
        return cast(SglangConfig, self._settings)

    @property
    def _by_files(self) -> bool:
        transport = self.own.transport
        return self._link.sees_files if transport == "auto" else transport == "files"

    def command(self, port: int, key: str, specs: Sequence[TensorSpec]) -> Command:
        config, own, on_cpu = self._config, self.own, not on_gpu(self._config)
        words: list[Any] = [
            "--model-path", model_path(config.model), "--host", "127.0.0.1", "--port", port,
            "--api-key", key, "--admin-api-key", key,
            "--device", "cpu" if on_cpu else "cuda", "--dtype", str(self.dtype).removeprefix("torch."),
            "--tp-size", own.tensor_parallel_size, "--random-seed", config.seed % 2**31,
            "--grammar-backend", "none", "--enable-metrics", "--log-level", "info", "--log-level-http", "warning",
        ]  # fmt: skip
        given = {
            "--revision": config.model.revision,
            "--mem-fraction-static": own.memory_fraction or (0.3 if on_cpu else None),
            "--context-length": own.context_length,
            "--max-running-requests": own.max_running or (256 if on_cpu else None),
            "--max-total-tokens": own.max_total_tokens or (CPU_TOKENS if on_cpu else None),
            "--attention-backend": own.attention_backend or ("torch_native" if on_cpu else None),
            "--sampling-backend": own.sampling_backend or ("pytorch" if on_cpu else None),
            "--load-format": "dummy" if own.load_format == "dummy" else None,
        }
        for name, value in given.items():
            words += [name, value] if value is not None else []
        words += ["--disable-cuda-graph"] if on_cpu or not own.cuda_graph else []
        words += ["--disable-overlap-schedule", "--sleep-on-idle"] if on_cpu else []
        words += ["--enable-deterministic-inference"] if own.deterministic_inference else []
        words += self._adapter_words(specs, on_cpu) + list(own.arguments)
        environment = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"SGLANG_USE_CPU_ENGINE": "1"} if on_cpu else {}
        python = {"python": own.python} if own.python else {}
        return Command(
            "sglang.launch_server", [str(word) for word in words], environment=environment, hidden=[key], **python
        )

    def _adapter_words(self, specs: Sequence[TensorSpec], on_cpu: bool) -> list[Any]:
        """Room for the population on the modules that evolve. Rows of the base model count as one adapter."""
        space = spaces.create(self._config)
        if space.carrier != "adapter":
            return []
        modules = sorted({module_of(t.module) for t in space.layout(specs, self.dtype).tensors})
        backend = self.own.lora_backend or ("torch_native" if on_cpu else None)
        return [
            "--enable-lora", "--max-lora-rank", space.rank, "--max-loras-per-batch", self.own.slots(self._config) + 1,
            *(["--lora-backend", backend] if backend else []), "--lora-target-modules", *modules,
        ]  # fmt: skip

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        facts = super().start(space, layout, optimizer, keep_start)
        if space.evolves_model:
            self._base = self._sent = _crcs({t.name: self._parameters[t.name] for t in layout.tensors})
        return facts

    async def push(self, client: Client, weights: Mapping[str, torch.Tensor], shelf: Shelf) -> None:
        """From files in memory where the server sees them, else within requests; what was cached is flushed.

        SGLang says that all is well of names that it does not have, too, so that its checksums are compared.
        """
        before = self._sums if self._sums is not None else await self._checksums(client)
        ours = _crcs(weights)
        await self._send(client, weights, shelf)
        after = await self._checksums(client)
        if before is not None and after is not None:
            for name in [name for name, crc in ours.items() if self._sent[name] != crc]:
                there = _served(name)
                if there not in before or (
                    before[there] == after.get(there) and not await self._takes(client, name, weights[name], shelf)
                ):
                    raise ModelError(
                        f"SGLang at {client.url} says that it took the mean's weights, and {there} is as it was before:"
                        " it cannot carry this model's weights; use engine vllm, or space lora"
                    )
        self._sums, self._sent = after, ours

    async def has_weights(self, client: Client) -> bool:
        if self._sums is None or await self._checksums(client) == self._sums:
            return True
        self._forget()
        return False

    def _recover(self, error: LostError) -> None:
        self._forget()
        super()._recover(error)

    def _forget(self) -> None:
        """What the server has: the base model, or, where it is the same server as before, the mean."""
        self._sums, self._sent = None, self._base

    async def _takes(self, client: Client, name: str, tensor: torch.Tensor, shelf: Shelf) -> bool:
        """Whether a tensor that is as it was had been there already: then another moves it, and it moves back."""
        sums: list[Mapping[str, str]] = []
        for sent in (-tensor, tensor):
            await self._send(client, {name: sent}, shelf)
            sums.append(await self._checksums(client) or {})
        other, again = (found.get(_served(name)) for found in sums)
        return other != again

    async def _send(self, client: Client, weights: Mapping[str, torch.Tensor], shelf: Shelf) -> None:
        """Within a session of weights, where the server has such: from 0.5.23 on."""
        seconds = self.own.timeout
        opened = await _begin(client, seconds)
        try:
            for part in _parts(weights, SHARD if self._by_files else SENT):
                if self._by_files:
                    await _from_files(client, part, shelf, Path(model_path(self._config.model)), seconds)
                else:
                    await _from_tensors(client, part, self._link.about.ranks, seconds)
        finally:
            if opened:
                await client.post("/end_weight_update", {}, seconds=seconds)

    async def _checksums(self, client: Client) -> dict[str, str] | None:
        """Of each tensor of the first rank; None of a server that has no such call."""
        try:
            said = await client.post("/weights_checker", {"action": "checksum"}, seconds=self.own.timeout)
        except RefusedError as error:
            if error.status in (400, 404, 405, 422):
                return None
            raise
        ranks = said.get("ranks") if isinstance(said, dict) else None
        sums = ranks[0].get("checksums") if isinstance(ranks, list) and ranks and isinstance(ranks[0], dict) else None
        return cast(dict[str, str], sums) if isinstance(sums, dict) and sums else None


async def _begin(client: Client, seconds: float) -> bool:
    """Whether the server wants to be told that weights come. A session that somebody left open is ended."""
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


async def _from_files(
    client: Client, weights: Mapping[str, torch.Tensor], shelf: Shelf, base: Path, seconds: float
) -> None:
    folder, path = shelf.folder("weights"), "/update_weights_from_disk"
    try:
        try:
            with as_os_errors(folder):
                file = folder / "model.safetensors"
                save_file({n: t.detach().to("cpu").contiguous() for n, t in weights.items()}, file)
                file.chmod(0o644)
                if (base / "config.json").is_file():
                    shutil.copyfile(base / "config.json", folder / "config.json")
                    (folder / "config.json").chmod(0o644)
        except OSError as error:
            raise ModelError(
                f"{folder} does not hold the mean's weights ({error.strerror}); set engine.adapter_folder to one with "
                "more room"
            ) from error
        body = {"model_path": str(folder), "flush_cache": True}
        _check_success(client, path, await client.post(path, body, seconds=seconds))
    finally:
        shelf.drop("weights")


async def _from_tensors(client: Client, weights: Mapping[str, torch.Tensor], ranks: int, seconds: float) -> None:
    tensors = [(name, t.detach().to("cpu").contiguous()) for name, t in weights.items()]
    path = "/update_weights_from_tensor"
    body = {"serialized_named_tensors": [packed(tensors)] * ranks, "flush_cache": True}
    _check_success(client, path, await client.post(path, body, seconds=seconds))


def _check_success(client: Client, path: str, said: Any) -> None:
    if not isinstance(said, dict) or said.get("success") is not True:
        raise LostError(f"{client.url}{path} does not say that it has the weights: {str(said)[:80]!r}")


def _crcs(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Of some tensors, evenly spaced: enough to see whether weights arrive."""
    names = list(weights)[:: max(1, len(weights) // PROBED)]
    return {
        n: zlib.crc32(weights[n].detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for n in names
    }


def _served(name: str) -> str:
    """The name of the tensor of SGLang's that a tensor of Hugging Face's is a part of."""
    return _LAST.sub(lambda found: _FUSED.get(found[1], found[1]), name)


def _parts(weights: Mapping[str, torch.Tensor], most: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of at most so many bytes, or one tensor."""
    parts: list[dict[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights.items():
        own = tensor.numel() * tensor.element_size()
        if not parts or size + own > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += own
    return parts
