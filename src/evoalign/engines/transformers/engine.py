# SPDX-License-Identifier: Apache-2.0
"""The in-process engine: any Hugging Face causal language model of `nn.Linear` and fused experts, on CPU or one GPU.

Adapter members (`lora`, `lowrank`) answer together in one batch; dense members (`full`) one at a time, each written
over the served weights from the float32 master. The mean is that master: restoring is a copy and never a subtraction.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from evoalign import kernels, noise
from evoalign.config import Config, ModelConfig
from evoalign.engines.base import check_members, pairs_of
from evoalign.engines.hash import weights_hash
from evoalign.engines.master import KeepsMean, Master, whole
from evoalign.engines.specs import mean_abs, specs_of
from evoalign.engines.transformers.adapters import Adapters
from evoalign.engines.transformers.blocks import Blocks, obstacle
from evoalign.engines.transformers.decode import Completion, Decoder
from evoalign.engines.transformers.settings import DEFAULT_MEMORY_GIB, TransformersConfig
from evoalign.engines.transformers.static import StaticDecoder
from evoalign.errors import ConfigError, DataError, ModelError
from evoalign.kernels import compiled
from evoalign.models.files import load_whole
from evoalign.models.origin import check_layers, model_path
from evoalign.models.tensors import tensors_of
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space, check_adapted
from evoalign.tokens import Tokens, before_stop
from evoalign.types import MEAN, Facts, Layout, Member, Plan, Request, Rollout, Sampling, TensorSpec

Asked: TypeAlias = Sequence[tuple[Member, Request]]
T = TypeVar("T")
CACHED_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layer whose whole past is keys and values."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """At most so many `rows` and `members` at once, and the `room` for all that they take, in bytes."""

    rows: int
    members: int
    room: float


class TransformersEngine(KeepsMean):
    """See `evoalign.engines.base.Engine` for what each method promises.

    `model` is one that is loaded already, such as one that is being trained: it answers as it is at each rollout.
    """

    def __init__(self, config: Config, tokens: Tokens, model: Any = None) -> None:
        assert isinstance(config.engine, TransformersConfig)
        self._tokens, self._settings = tokens, config.engine
        if config.engine.threads:
            torch.set_num_threads(config.engine.threads)
        self.device = torch.device(_device(config.engine.device)) if model is None else model.device
        on_cpu = self.device.type == "cpu"
        self.deterministic = on_cpu if config.deterministic is None else config.deterministic
        if self.deterministic and not on_cpu:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which torch reads at the first product
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.model: Any = _load_model(config, self.device) if model is None else model
        self._decoder = Decoder(
            self.model,
            tokens.stop_ids,
            tokens.pad_id,
            tokens.decode,
            noise.key(config.seed, "sampling", ""),
            deterministic=self.deterministic,
        )
        self._static: StaticDecoder | None = None
        self._why_library = ""
        if model is None and config.engine.decoder != "library":
            self._use_static(self._obstacle())
        self._parameters: dict[str, torch.Tensor] = tensors_of(self.model)  # which may be views by now
        self._adapters: Adapters | None = None
        self._planned = 0.0

    def _obstacle(self) -> str:
        """Why steps over fixed memory are not for this model here, in words; empty where they are."""
        if self.device.type == "cuda" and not kernels.available(self.device):
            return "Triton is not installed"
        if self._settings.decoder == "auto" and self.device.type == "cpu":  # else it is the slower one
            if not compiled.here():
                return "evoalign has no compiled numbers here (evoalign doctor says why)"
            if self.model.dtype != torch.float32:
                return f"on a CPU it is for float32, and the model's dtype is {self.model.dtype}"
        return obstacle(self.model)

    def _use_static(self, why_not: str) -> None:
        """Decode so, where nothing stands against it. Raises ConfigError where it does and that was asked by name."""
        if why_not and self._settings.decoder == "static":
            raise ConfigError(f"engine.decoder: static cannot decode this: {why_not}; set auto or library")
        if why_not:
            self._static, self._why_library = None, why_not
        elif self._static is None:
            self._static = StaticDecoder(self._decoder, Blocks(self.model))

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def specs(self) -> list[TensorSpec]:
        return specs_of(self.model, mean_abs)

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        """Make the master and, for adapters, hook the target layers."""
        self.mean = Master(space, layout, optimizer, keep_start, whole(self._parameters), self.device)
        self._planned = 0.0
        if space.carrier == "adapter":
            if self._static is not None:
                self._use_static(self._static.begin(space, layout, self.mean.__getitem__))
            if self._static is None:
                self._adapters = Adapters(self.model, dict.fromkeys(t.module for t in layout.tensors))
                self._decoder.forward.share(self._adapters.modules)
        return Facts(
            engine="transformers",
            device=str(self.device),
            dtype=layout.dtype,
            deterministic=self.deterministic,
            model_hash=weights_hash((n, p.data) for n, p in self.model.named_parameters()),
            master_bytes=self.mean.bytes,
            note=self._note(),
            library="" if self._static is None else "static decoder",
        )

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """One completion of each request for each member, or the one it names; before `start`, of the mean alone.

        Requests that differ in their sampling, and those that name their member, are answered in batches of their own.
        """
        check_members(plan, requests)
        self._check_length(requests)
        for batch in _alike(requests):
            if self._mean is None or self.mean.space.carrier == "dense":
                yield from self._dense(plan, batch)
            else:
                yield from self._adapted(plan, batch)

    def _dense(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """One member after the other, each straight from the mean."""
        chunk = self._chunk(requests, 1)
        try:
            for member in plan.members:
                asked = pairs_of([member], requests)
                if asked:
                    self._serve(plan, member)
                for part in _pieces(asked, chunk.rows if self._static is None else max(1, len(asked))):
                    yield from self._answer(plan, [member], part, chunk)
        finally:  # also where the rollout fails or is left half-way
            self._serve(plan, None)

    def _adapted(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Chunks of members with all their requests, or of requests where one member's alone fill a chunk."""
        present = list(dict.fromkeys(m for m, _ in pairs_of(plan.members, requests)))
        chunk = self._chunk(requests, len(present))
        if self._static is not None:  # which lets rows wait
            for members in _pieces(present, chunk.members):
                yield from self._answer(plan, members, pairs_of(members, requests), chunk)
            return
        for members, parts in _chunks(plan.members, requests, chunk.rows):
            self._put_adapters(plan, members)
            try:
                for part in parts:
                    yield from self._answer(plan, members, part, chunk)
            finally:  # whoever else calls the model gets the model
                self._clear_adapters()

    def _check_length(self, requests: Sequence[Request]) -> None:
        """Beyond its positions a model writes nonsense, or reads past a table. Raises DataError."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for request in requests:
            length, room = len(request.prompt_ids), request.sampling.max_tokens
            if limit is not None and length + room > limit:
                raise DataError(
                    f"a prompt of {length} tokens and a completion of {room} exceed the model's {limit} positions; "
                    "shorten the prompt, or lower max_tokens (sampling, evaluation)"
                )

    def _note(self) -> str:
        if self._static is not None:
            return "steps over fixed memory (decoder static)"
        if self._settings.decoder == "library":
            return "the library decodes, for engine.decoder says so"
        return f"the library decodes, for the static decoder cannot: {self._why_library}" if self._why_library else ""

    def _chunk(self, requests: Sequence[Request], members: int) -> _Chunk:
        """Rows whose cache and logits fit, with room for the activations of a prefill of few at a time: from the
        config and the prompts alone when `deterministic`."""
        room = self._room()
        if self._static is None:
            rows = self._decoder.rows(requests, room)
        else:
            rows, members = self._static.fits(requests, members, room)
        return _Chunk(min(rows, self._settings.max_rows or rows), members, room)

    def _room(self) -> float:
        """Bytes for the cache, the logits and the activations of one chunk."""
        room = self._settings.memory_gib
        if room is not None:
            return room * 2**30
        if self.device.type != "cuda" or self.deterministic:
            return DEFAULT_MEMORY_GIB * 2**30
        if self._static is None:
            return 0.5 * _free(self.device)  # the rest is the library's
        self._planned = self._planned or 0.5 * _free(self.device)  # once, for it keeps what it takes
        return self._planned

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.remove()
        if self._static is not None:
            self._static.close()
        self._adapters, self._parameters, self.model = None, {}, None
        super().close()

    def _serve(self, plan: Plan, member: Member | None) -> None:
        """Write a dense member over the served weights; None puts the mean back."""
        if plan.members == (MEAN,):
            return
        self.mean.write(plan, member)

    def _put_adapters(self, plan: Plan, members: Sequence[Member]) -> None:
        assert self._adapters is not None
        space, layout = self.mean.space, self.mean.layout
        found = False
        for module in dict.fromkeys(t.module for t in layout.tensors):
            adapter = space.adapter(layout, module, self.mean.__getitem__, plan, members)
            self._adapters.set(module, adapter)
            found |= adapter is not None
        check_adapted(space, found, members)

    def _clear_adapters(self) -> None:
        assert self._adapters is not None
        for module in dict.fromkeys(t.module for t in self.mean.layout.tensors):
            self._adapters.set(module, None)

    def _answer(self, plan: Plan, members: Sequence[Member], asked: Asked, chunk: _Chunk) -> Iterator[Rollout]:
        """One batch of these members."""
        sampling = asked[0][1].sampling
        for ended in self._generated(plan, members, asked, chunk):
            said = [tuple(completion.ids) for _, completion in ended]
            distinct = list(dict.fromkeys(said))  # members say the same more often than not
            texts = dict(zip(distinct, self._tokens.decode_all(distinct), strict=True))
            for ids, (place, completion) in zip(said, ended, strict=True):
                member, request = asked[place]
                yield Rollout(
                    member=member,
                    request=request.index,
                    token_ids=ids,
                    text=before_stop(texts[ids], sampling.stop, sampling.keep_stop),
                    finish_reason=completion.finish_reason,
                    logprobs=tuple(completion.logprobs) if request.logprobs else None,
                )

    def _generated(
        self, plan: Plan, members: Sequence[Member], asked: Asked, chunk: _Chunk
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Completions with their places in `asked`; members have slots for their adapters, in order."""
        static = self._static
        slotted = () if static is not None and all(map(static.bare, members)) else members
        slots = {member: i for i, member in enumerate(slotted)}
        pairs = [(slots.get(m, -1), r) for m, r in asked]
        if static is None:
            return self._decoder.generate(pairs, self._adapters, chunk.room)
        return static.generate(pairs, (plan, slotted) if slotted else None, chunk.rows, chunk.room)


def _free(device: torch.device) -> float:
    """Bytes that a device has for tensors, those among them that torch keeps for the next ones."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _alike(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests of the same sampling, and those of all members apart from those that name theirs."""
    found: dict[tuple[Sampling, bool], list[Request]] = {}
    for request in requests:
        found.setdefault((request.sampling, request.member is None), []).append(request)
    return list(found.values())


def _chunks(
    members: Sequence[Member], requests: Sequence[Request], most: int
) -> Iterator[tuple[Sequence[Member], Iterator[Asked]]]:
    """Members that are served together, and their batches of at most `most` rows.

    What all members answer is cut into as many whole members as fit, or the requests of one; what names its member
    into rows, wherever that falls. Either follows from the population, the requests and `most` alone.
    """
    if requests[0].member is None:
        size = max(1, most // len(requests))
        for group in _pieces(members, size):
            parts = (pairs_of(group, part) for part in _pieces(requests, max(1, most // len(group))))
            yield group, parts
        return
    for part in _pieces(pairs_of(members, requests), most):
        yield list(dict.fromkeys(m for m, _ in part)), iter([part])


def _pieces(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Consecutive pieces of at most `most` items."""
    return (items[i : i + most] for i in range(0, len(items), most))


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
        raise ModelError(f"engine.device: {wanted!r} is none of auto, cpu, cuda and cuda:K")
    if wanted.startswith("cuda") and int(wanted[5:] or 0) >= torch.cuda.device_count():
        raise ModelError(f"engine.device: {wanted} is not there; use cpu or auto")
    return wanted


def _load_model(config: Config, device: torch.device) -> nn.Module:
    model = load_model(config.model, dtype_on(config.model, device))
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or kinds - CACHED_KINDS:
        raise ModelError(
            f"model {config.model.name} ({model.config.model_type}) keeps a recurrent state, which engine transformers "
            "does not batch; choose a model of attention layers alone"
        )
    return model.to(device)


def dtype_on(config: ModelConfig, device: torch.device) -> torch.dtype:
    """What a model is served in on a device."""
    return getattr(torch, config.served_dtype(on_gpu=device.type != "cpu"))


def load_model(config: ModelConfig, dtype: torch.dtype) -> Any:
    """A whole model on the CPU, for inference: from safetensors alone, without code of others. Raises ModelError."""
    model = load_whole(model_path(config), config.revision, dtype, config.name)
    check_layers(config.name, model.config)
    return model
