# SPDX-License-Identifier: Apache-2.0
"""The in-process engine: Hugging Face causal language models of `nn.Linear` and fused experts, on a CPU or one GPU.

Members with adapters (`lora`, `lowrank`) generate together in one batch. So do dense members that differ only in gains
of norms and biases of q, k and v (`norms`), in the static decoder. Other dense members (`full`) generate one at a time:
each is written over the served weights from the float32 master. The mean is that master, so restoring is a copy and
never a subtraction.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from evoalign import kernels, noise
from evoalign.config import Config, ModelConfig
from evoalign.engines.base import Completion, check_lengths, check_members, pairs_of, rollouts_of
from evoalign.engines.gpu import for_tensors, limit_memory
from evoalign.engines.hash import weights_hash
from evoalign.engines.master import KeepsMean, Master, whole
from evoalign.engines.specs import mean_abs, refuse_quantised, specs_of
from evoalign.engines.transformers.adapters import Adapters, modules_of
from evoalign.engines.transformers.blocks import Blocks, obstacle
from evoalign.engines.transformers.check import check
from evoalign.engines.transformers.decode import Decoder
from evoalign.engines.transformers.settings import DEFAULT_MEMORY_GIB, FREE_PART, TransformersConfig
from evoalign.engines.transformers.static import StaticDecoder
from evoalign.errors import ConfigError, ModelError
from evoalign.kernels import compiled
from evoalign.models.files import load_whole
from evoalign.models.layers import positions
from evoalign.models.origin import check_layers, described, model_path
from evoalign.models.quantised import files_hash, quantised_of
from evoalign.models.tensors import experts_of, packed_shapes, tensors_of
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Space, check_adapted
from evoalign.tokens import Tokens
from evoalign.types import MEAN, MEAN_PLAN, Facts, Layout, Member, Plan, Request, Rollout, Sampling, TensorSpec

Pairs: TypeAlias = Sequence[tuple[Member, Request]]
T = TypeVar("T")
CACHED_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers whose only state is keys and values."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Limits on the `rows` and `members` of a batch, and the `room` for it in bytes."""

    rows: int
    members: int
    room: float


class TransformersEngine(KeepsMean):
    """See `evoalign.engines.base.Engine` for the methods.

    `model` is an already loaded model, for example in training: each rollout uses its current weights.
    """

    def __init__(self, config: Config, tokens: Tokens, model: Any = None) -> None:
        assert isinstance(config.engine, TransformersConfig)
        self._tokens, self._settings, self._name = tokens, config.engine, config.model.name
        self.device = torch.device(_device(config.engine.device)) if model is None else model.device
        on_cpu = self.device.type == "cpu"
        limit_memory(config.engine.gpu_memory_gib, self.device)
        self.deterministic = on_cpu if config.deterministic is None else config.deterministic
        if self.deterministic and not on_cpu:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by torch at the first matrix product
            torch.use_deterministic_algorithms(True, warn_only=True)
        self._loads = config.model if model is None else None
        self._quantised = refuse_quantised(config) if model is None else None
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
        self._parameters: dict[str, torch.Tensor] = tensors_of(self.model)  # views, with the static decoder
        self._adapters: Adapters | None = None
        self._planned = 0.0
        self._alone = True
        """Whether members are served one at a time."""
        self._threads = ExitStack()
        if config.engine.threads:
            self._threads.enter_context(_computing_with(config.engine.threads))

    def _obstacle(self) -> str:
        """Return why the static decoder cannot decode this model here, or an empty string."""
        if self.device.type == "cuda" and not kernels.available(self.device):
            return "Triton is not installed"
        if self._settings.decoder == "auto" and self.device.type == "cpu":
            # Without C, or in other dtypes, the static decoder is slower.
            if not compiled.here():
                return "the compiled C library is missing (evoalign doctor says why)"
            if self.model.dtype != torch.float32:
                return f"on a CPU it needs float32, and the model's dtype is {self.model.dtype}"
        return obstacle(self.model)

    def _use_static(self, why_not: str) -> None:
        """Enable the static decoder unless `why_not` is set. Raises ConfigError if the config requires it."""
        if why_not and self._settings.decoder == "static":
            raise ConfigError(f"engine.decoder: static cannot decode this model: {why_not}; set auto or library")
        if why_not:
            self._static, self._why_library = None, why_not
        elif self._static is None:
            self._static = StaticDecoder(self._decoder, Blocks(self.model))

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def is_static(self) -> bool:
        """Whether the static decoder completes."""
        return self._static is not None

    def specs(self) -> list[TensorSpec]:
        return specs_of(self.model, mean_abs)

    def start(self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool) -> Facts:
        """Create the mean and, for adapters, prepare the decoder or hook the target layers."""
        carried = layout.modules if space.carrier == "adapter" else ()
        self.check_mean(modules_of(self.model, carried), space.name)
        self.mean = Master(space, layout, optimizer, keep_start, whole(self._parameters), self.device)
        self._planned = 0.0
        why_not = "" if self._static is None else self._static.begin(space, layout, self.mean.__getitem__)
        self._alone = space.carrier == "dense" and (self._static is None or bool(why_not))
        if space.carrier == "adapter":
            if why_not:
                self._use_static(why_not)
            if self._static is None:
                self._adapters = Adapters(self.model, layout.modules)
                self._decoder.forward.share(self._adapters.modules)
        return Facts(
            engine="transformers",
            device=str(self.device),
            dtype=layout.dtype,
            deterministic=self.deterministic,
            model_hash=model_hash(self._loads, self.model),
            master_bytes=self.mean.bytes,
            note=self._note() + (f"; members one at a time: {why_not}" if self._alone and why_not else ""),
            library="" if self._static is None else "static decoder",
        )

    def check_mean(self, modules: Mapping[str, nn.Module] = MappingProxyType({}), section: str = "") -> None:
        """Raise ModelError if the model, with its own weights, is not computed as by a plain forward; see `check`."""
        ask = partial(TransformersEngine.rollout, self, MEAN_PLAN)  # a subclass may add faults, which the canary finds
        mean, self._mean = self._mean, None  # all rows by the model's own weights
        try:
            check(self._name, self.model, self._tokens, ask, modules, section)
        finally:
            self._mean, self._planned = mean, 0.0

    def context(self) -> int | None:
        return positions(self.model.config)[0]

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Generate one completion of each request for each member, or for the one it names.

        Before `start`, only the mean can be sampled. Requests with other sampling settings, and those that name their
        member, are in separate batches.
        """
        check_members(plan, requests)
        check_lengths(requests, self.context(), positions(self.model.config)[1])
        alike: dict[tuple[Sampling, bool, bool], list[Request]] = {}
        for request in requests:
            if request.given and self._static is not None:
                raise ConfigError("the static decoder scores no given completion; set engine.decoder library")
            alike.setdefault((request.sampling, request.member is None, bool(request.given)), []).append(request)
        for batch in alike.values():
            if self._mean is None or self._alone:
                yield from self._dense(plan, batch)
            else:
                yield from self._adapted(plan, batch)

    def _dense(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Serve one member after the other, each computed from the mean."""
        chunk = self._chunk(requests, 1)
        try:
            for member in plan.members:
                pairs = pairs_of([member], requests)
                if pairs:
                    self._serve(plan, member)
                for part in _pieces(pairs, chunk.rows if self._static is None else max(1, len(pairs))):
                    yield from self._generate(plan, [member], part, chunk)
        finally:  # also if the rollout fails or is abandoned
            self._serve(plan, None)

    def _serve(self, plan: Plan, member: Member | None) -> None:
        """Write a dense member over the served weights; None restores the mean."""
        if plan.members != (MEAN,):
            self.mean.write(plan, member)

    def _adapted(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Serve batches of members with all their requests, or of requests if those of one member fill a batch."""
        present = list(dict.fromkeys(m for m, _ in pairs_of(plan.members, requests)))
        chunk = self._chunk(requests, len(present))
        if self._static is not None:  # rows that do not fit wait
            for members in _pieces(present, chunk.members):
                yield from self._generate(plan, members, pairs_of(members, requests), chunk)
            return
        for members, parts in _chunks(plan.members, requests, chunk.rows):
            self._put_adapters(plan, members)
            try:
                for part in parts:
                    yield from self._generate(plan, members, part, chunk)
            finally:  # other callers of the model get it without adapters
                assert self._adapters is not None
                for module in self.mean.layout.modules:
                    self._adapters.set(module, None)

    def _note(self) -> str:
        if self._quantised is None:
            return self._decoding()
        dtype = str(self.dtype).removeprefix("torch.")
        weights = "stay packed" if packed_shapes(self.model) else f"dequantised: they take the memory of {dtype}"
        return f"{self._decoding()}; base: {self._quantised.words}, its weights {weights}; activations unquantised"

    def _decoding(self) -> str:
        if self._static is not None:
            return "decoder: static"
        if self._settings.decoder == "library":
            return "decoder: library, set by engine.decoder"
        why = self._why_library
        return f"decoder: library, because static cannot decode this model: {why}" if why else ""

    def _chunk(self, requests: Sequence[Request], members: int) -> _Chunk:
        """Return the limits of a batch. If `deterministic`, they depend only on the config and the prompts."""
        room = self._room()
        if self._static is None:
            rows = self._decoder.rows(requests, room)
        else:
            rows, members = self._static.fits(requests, members, room)
        return _Chunk(min(rows, self._settings.max_rows or rows), members, room)

    def _room(self) -> float:
        """Return the bytes for the cache, the logits and the activations of one batch."""
        room = self._settings.memory_gib
        if room is not None:
            return room * 2**30
        if self.device.type != "cuda" or self.deterministic:
            return DEFAULT_MEMORY_GIB * 2**30
        if self._static is None:
            return FREE_PART * self._free()
        self._planned = self._planned or FREE_PART * self._free()  # once: the static decoder keeps its memory
        return self._planned

    def _free(self) -> float:
        """Return the bytes available for tensors on the GPU, including memory that torch has reserved."""
        reserved, cap = torch.cuda.memory_reserved(self.device), self._settings.gpu_memory_gib
        free = torch.cuda.mem_get_info(self.device)[0]
        if cap is not None:
            free = min(free, for_tensors(cap) - reserved)
        return max(0.0, free + reserved - torch.cuda.memory_allocated(self.device))

    def release(self) -> None:
        """Free the static decoder's memory; the next rollout allocates it again."""
        if self._static is not None:
            self._static.release()
        self._planned = 0.0

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.remove()
        if self._static is not None:
            self._static.close()
        self._adapters, self._parameters, self.model = None, {}, None
        self._threads.close()
        super().close()

    def _put_adapters(self, plan: Plan, members: Sequence[Member]) -> None:
        assert self._adapters is not None
        space, layout = self.mean.space, self.mean.layout
        found = False
        for module in layout.modules:
            adapter = space.adapter(layout, module, self.mean.__getitem__, plan, members)
            self._adapters.set(module, adapter)
            found |= adapter is not None
        check_adapted(space, found, members)

    def _generate(self, plan: Plan, members: Sequence[Member], pairs: Pairs, chunk: _Chunk) -> Iterator[Rollout]:
        """Generate one batch of these members, whose slots for adapters are in this order."""
        static = self._static
        slotted = () if static is not None and all(map(static.is_plain, members)) else members
        slots = {member: i for i, member in enumerate(slotted)}
        by_slot = [(slots.get(m, -1), r) for m, r in pairs]
        if static is None:
            completions = self._decoder.generate(by_slot, self._adapters, chunk.room)
        else:
            owners, serve = [m.index for m, _ in pairs], (plan, slotted) if slotted else None
            completions = static.generate(by_slot, owners, serve, chunk.rows, chunk.room)
        for ended in completions:
            yield from rollouts_of(
                self._tokens,
                [(*pairs[i], Completion(tuple(c.ids), c.finish_reason, tuple(c.logprobs))) for i, c in ended],
            )


_asked: dict[object, int] = {}
"""CPU threads of the process: outside of all engines, and those that open engines asked for, in this order."""


@contextmanager
def _computing_with(threads: int) -> Generator[None]:
    """Compute with this many CPU threads, or with those of the youngest engine that is open."""
    _asked.setdefault(None, torch.get_num_threads())
    key = object()
    _asked[key] = threads
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        del _asked[key]
        torch.set_num_threads(next(reversed(_asked.values())))
        if len(_asked) == 1:
            _asked.clear()


def _chunks(
    members: Sequence[Member], requests: Sequence[Request], most: int
) -> Iterator[tuple[Sequence[Member], Iterator[Pairs]]]:
    """Yield members that are served together, and their batches of at most `most` rows.

    Requests for all members are divided into as many whole members as fit, or else the requests of one member. Requests
    that name their member are divided by rows. Batches depend only on the members, the requests and `most`.
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
    """Return consecutive pieces of at most `most` items."""
    return (items[i : i + most] for i in range(0, len(items), most))


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
        raise ModelError(f"engine.device: {wanted!r} is none of auto, cpu, cuda and cuda:K")
    if wanted.startswith("cuda") and int(wanted[5:] or 0) >= torch.cuda.device_count():
        raise ModelError(f"engine.device: {wanted} does not exist; set cpu or auto")
    return wanted


def _load_model(config: Config, device: torch.device) -> nn.Module:
    model = load_model(config.model, dtype_on(config.model, device))
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or kinds - CACHED_KINDS:
        raise ModelError(
            f"model {config.model.name} ({model.config.model_type}) has a recurrent state, which engine transformers "
            "does not support; choose a model with attention layers only"
        )
    return model.to(device)


def dtype_on(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype in which a model is served on a device."""
    return getattr(torch, config.served_dtype(on_gpu=device.type != "cpu"))


def model_hash(config: ModelConfig | None, model: nn.Module) -> str:
    """Return the hash of a base: of the files of a quantised one, otherwise of its weights in memory.

    `config` is None for a model that is not as it was loaded.
    """
    if config is not None and quantised_of(config) is not None:
        return files_hash(*described(config), config.name)
    return weights_hash((n, p.data) for n, p in model.named_parameters())


def is_base(known: str, config: ModelConfig, model: nn.Module) -> bool:
    """Return whether a run that recorded this hash had a model's weights; vLLM hashes the files of a mixture."""
    if known == model_hash(config, model):
        return True
    return bool(experts_of(model)) and known == files_hash(*described(config), config.name)


def load_model(config: ModelConfig, dtype: torch.dtype) -> Any:
    """Load a model on the CPU for inference, from safetensors and without custom code. Raises ModelError."""
    model = load_whole(model_path(config), config.revision, dtype, config.name)
    check_layers(config.name, model.config)
    return model
