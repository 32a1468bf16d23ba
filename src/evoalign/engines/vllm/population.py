# SPDX-License-Identifier: Apache-2.0
"""The whole population in one batch of vLLM: each row gets its member's low-rank term.

The member of slot i is LoRA id i + 1, in slot i of vLLM's stacked tensors, for as long as the engine lives; the engine
rewrites the slots in place. There are three forms:
  deep     the terms are computed in the kernels of the Qwen2, Qwen3 and Llama families (see `deep`)
  generic  one launch per projection, any model: our kernel in place of vLLM's LoRA kernels
  stock    vLLM's own kernels and bookkeeping, and the only one with slots for the experts of mixtures
The first two also replace vLLM's bookkeeping at each step, which loads, evicts and sorts adapters.

The worker loads the model within `installed`, calls `register` and `deep.attach` there before vLLM's warm-up, and
writes to the slots that `stacked` returns.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.lora.layers import ColumnParallelLinearWithLoRA, FusedMoEWithLoRA, RowParallelLinearWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.model_executor.utils import get_moe_expert_mapping
from vllm.platforms import current_platform

from evoalign.engines.vllm.insides import replace
from evoalign.errors import ModelError
from evoalign.kernels import population

Form = Literal["deep", "generic", "stock"]
WRAPPED = ".base_layer"
"""Suffix that vLLM's LoRA layers add to the name of the layer they wrap."""
_RING = 4
"""Pinned buffers for the row map: with asynchronous scheduling vLLM is at most two batches ahead."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The worker's settings: R, the factor on every term, and whether tiles must not depend on the batch."""

    form: Form
    rank: int
    scaling: float
    fixed: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """All members' slots of one matrix W [out, in] on this rank: `a` [S, 1, RS, in'], `b` [S, 1, out', RS].

    This rank holds `rows` of out (and of each member's B) and `columns` of in (and of A).
    """

    a: torch.Tensor
    b: torch.Tensor
    rows: slice
    columns: slice


class Rows:
    """int32 slot of each row of the batch, -1 for rows of the base model and for padding.

    It is at a fixed address, which CUDA graphs read. A changed map is copied to the device through a ring of pinned
    buffers, so that the host waits for the device only where all of them are in use.
    """

    def __init__(self, capacity: int, slots: int, device: torch.device) -> None:
        self.any = False
        """Whether any row belongs to a member."""
        self._slots = slots
        self._members = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self._ids = np.zeros(0, dtype=np.int64)
        self._ring = [_Buffer(capacity, device) for _ in range(_RING)]
        self._turn = 0

    def view(self, count: int) -> torch.Tensor:
        """Return the slots of a batch of `count` rows, padding included: int32 [count] on the device, a view."""
        if count > len(self._members):
            raise ModelError(
                f"a batch of {count} rows exceeds the {len(self._members)} of the population path: "
                "raise max_num_batched_tokens"
            )
        return self._members[:count]

    def put(self, ids: NDArray[np.integer]) -> None:
        """Set the LoRA id of each row of the next batch. Raises ModelError for an id without a slot."""
        if np.array_equal(ids, self._ids):
            return
        count, before = len(ids), len(self._ids)
        if count and int(ids.max()) > self._slots:
            raise ModelError(f"LoRA id {int(ids.max())} has no slot: there are {self._slots}")
        self.view(count)
        buffer = self._ring[self._turn]
        self._turn = (self._turn + 1) % _RING
        host = buffer.wait()
        np.subtract(ids, 1, out=host[:count], casting="unsafe")
        host[count:before] = -1
        buffer.send(self._members, max(count, before))
        self._ids = ids.copy()
        self.any = bool(ids.any())


class _Buffer:
    """A pinned host buffer, which must not be written before its last copy has ended."""

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=cuda)
        self._array = self._host.numpy()
        self._sent = torch.cuda.Event() if cuda else None

    def wait(self) -> NDArray[np.int32]:
        """Return the buffer when it is free to write: int32 [size]."""
        if self._sent is not None and not self._sent.query():
            self._sent.synchronize()
        return self._array

    def send(self, target: torch.Tensor, count: int) -> None:
        target[:count].copy_(self._host[:count], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


_installed = Settings("stock", 1, 1.0, fixed=False)


@contextmanager
def installed(settings: Settings) -> Generator[None, None, None]:
    """Give a form to the models that are loaded within; other models of this process stay as vLLM makes them."""
    global _installed
    own = vars(current_platform).pop("get_punica_wrapper", None)
    _installed = settings
    try:
        if settings.form != "stock":
            replace(current_platform, "get_punica_wrapper", lambda: f"{__name__}.{Terms.__name__}")
        yield
    finally:
        vars(current_platform).pop("get_punica_wrapper", None)
        if own is not None:
            current_platform.get_punica_wrapper = own


class Terms:
    """Replaces vLLM's "punica wrapper": maps rows to members, and adds scaling * (x A_m^T) B_m^T to y."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, lora_config: Any, **_: Any
    ) -> None:
        self.settings = _installed
        if self.settings.rank > lora_config.max_lora_rank:
            raise ModelError(f"rank {self.settings.rank} exceeds max_lora_rank {lora_config.max_lora_rank}")
        self.rows = Rows(max_num_batched_tokens, lora_config.max_loras, torch.device(device))

    def update_metadata(self, mapping: Any, *_: Any, **__: Any) -> None:
        """Set the rows as vLLM's own wrapper does, for callers other than the runner's step."""
        self.rows.put(np.asarray(mapping.index_mapping))

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """Add the members' terms to y [T, sum N_i], in place. Launches and captures nothing without members."""
        if self.rows.any:
            settings, members = self.settings, self.rows.view(len(y))
            terms = population.Terms(members, settings.rank, settings.scaling, settings.fixed)
            population.add(y, x, lora_a_stacked, lora_b_stacked, terms)
        return y

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ModelError(
            "population kernels serve plain linear layers, not embeddings, logits, experts or fully sharded LoRA; "
            "name the linear layers in target_modules, or set engine.population to stock"
        )

    add_shrink = add_expand = add_lora_embedding = add_lora_logits = _refuse
    apply_lora_full_linear = add_lora_fused_moe = moe_lora_align_block_size = add_lora_w13 = add_lora_w2 = _refuse


def replace_step(runner: Any, rows: Rows) -> None:
    """Pass the runner's arrays to `rows`, so that no step touches vLLM's caches of adapters.

    vLLM builds two tuples of numpy integers per step, hashes every request, and orders adapters by last use. Both of
    its runners call `_set_active_loras`; the first reads the ids from the batch, the second from its own LoRA state.
    Whether graphs with or without LoRA are replayed depends on the requests of the same step: at least one has an id
    exactly when `rows.any` is set.

    Parameters are named as vLLM names them. Raises EngineError where it lacks a method.
    """
    state: Any = getattr(runner, "lora_state", None)

    def of_batch(input_batch: Any, num_scheduled_tokens: NDArray[np.integer], *_: Any, **__: Any) -> None:
        rows.put(np.repeat(input_batch.request_lora_mapping[: input_batch.num_reqs], num_scheduled_tokens))

    def of_tokens(prompt_lora_mapping: Any, token_lora_mapping: Any, *_: Any, **__: Any) -> None:
        rows.put(np.asarray(token_lora_mapping, dtype=np.int64))

    def inputs(
        req_ids: Any, idx_mapping: NDArray[np.integer], num_scheduled_tokens: NDArray[np.integer]
    ) -> tuple[Any, ...]:
        return (), np.repeat(state.lora_ids[idx_mapping], num_scheduled_tokens), ()

    def active(req_ids: Iterable[str]) -> set[str]:
        return set(islice(filter(state.lora_requests.__contains__, req_ids), 1))  # our kernels do not need the number

    replace(runner, "set_active_loras", of_batch)
    replace(runner, "_set_active_loras", of_tokens)
    if state is not None:
        replace(state, "make_lora_inputs", inputs)
        replace(state, "get_activate_loras", active)


def wrap_aliases(model: torch.nn.Module) -> None:
    """Put vLLM's LoRA layers also where the model holds the layer that they wrap under a second name.

    vLLM does so where the adapter has both names; the gate of Qwen2-MoE's shared expert is called by the other one.
    """
    wrappers = {id(m.base_layer): m for m in model.modules() if isinstance(m, BaseLinearLayerWithLoRA)}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        parent, _, name = path.rpartition(".")
        if id(module) in wrappers and not path.endswith(WRAPPED):
            setattr(model.get_submodule(parent), name, wrappers[id(module)])


def register(runner: Any) -> None:
    """Register all slots with vLLM as LoRA ids 1, 2, ..., zeroed, so that it loads and evicts none.

    Call it before vLLM's dummy runs. For each of these vLLM would make an adapter, with a pinned tensor for each
    expert's matrix, copy it to all slots, and empty them.
    """

    def nothing(*_: Any, **__: Any) -> nullcontext[None]:
        return nullcontext()

    adapters = runner.lora_manager._adapter_manager
    for lora_id in range(1, adapters.lora_slots + 1):
        # Not `add_adapter`: it reads an adapter's first tensor, and this one has none.
        adapters._registered_adapters[lora_id] = LoRAModel(lora_id, adapters.lora_config.max_lora_rank, {})
        adapters.activate_adapter(lora_id)
    for layer in adapters.modules.values():
        if isinstance(layer, FusedMoEWithLoRA):  # which leaves out adapters that were registered without experts
            layer.adapter_enabled[: adapters.lora_slots] = 1
            for views in ("lora_a_stacked", "lora_b_stacked"):  # millions, which dummy runs alone use
                replace(layer, views, ())
    replace(runner, "maybe_setup_dummy_loras", nothing)
    replace(runner, "maybe_remove_all_loras", nothing)


def stacked(model: torch.nn.Module) -> dict[str, Slot]:
    """Return the slots of each Hugging Face weight on this rank, by the weight's name.

    Fused layers are separated: `...qkv_proj` is `...q_proj.weight`, `...k_proj.weight` and so on. Where there are fewer
    key and value heads than ranks, several ranks hold the same rows.
    """
    found: dict[str, Slot] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, BaseLinearLayerWithLoRA):
            found |= _slots(model, path, layer)
        elif isinstance(layer, FusedMoEWithLoRA):
            found |= _slots_of_experts(model, path, layer)
    return found


def _slots(model: Any, path: str, layer: Any) -> Iterator[tuple[str, Slot]]:
    parent, _, last = path.rpartition(".")
    names = model.packed_modules_mapping.get(last, [last])
    if len(names) != layer.n_slices or (
        layer.tp_size > 1 and len(names) < len(getattr(layer.base_layer, "output_sizes", ()))
    ):
        raise ModelError(
            f"{path}: a layer that the checkpoint itself fuses cannot have members; leave it out of target_modules"
        )
    by_rows, by_columns = isinstance(layer, ColumnParallelLinearWithLoRA), isinstance(layer, RowParallelLinearWithLoRA)
    shards = getattr(layer, "output_ids", (layer.tp_rank if by_rows else 0,))
    for name, shard, a, b in zip(names, shards, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
        rows, columns = b.shape[2], a.shape[3]
        first = layer.tp_rank * columns if by_columns else 0
        place = (slice(shard * rows, (shard + 1) * rows), slice(first, first + columns))
        yield f"{parent}.{name}.weight", Slot(a, b, *place)


def _slots_of_experts(model: Any, path: str, layer: Any) -> Iterator[tuple[str, Slot]]:
    """Yield the slots of each matrix of a layer's experts, without padding.

    vLLM has one tensor for each of gate (w1), up (w3) and down (w2): a [S, E, RS, in'], b [S, E, out', RS]. None are
    yielded for experts whose gate and up it fuses.
    """
    a, b = layer.w13_lora_a_stacked + layer.w2_lora_a_stacked, layer.w13_lora_b_stacked + layer.w2_lora_b_stacked
    if len(a) < 3:
        return
    parts = dict(zip(("w1", "w3", "w2"), zip(a, b, strict=True), strict=True))
    hidden, inner = layer.moe_config.hidden_dim_unpadded, layer.moe_config.intermediate_size_per_partition_unpadded
    whole, split = slice(0, hidden), slice(layer.tp_rank * inner, (layer.tp_rank + 1) * inner)
    for _, name, expert, part in get_moe_expert_mapping(model):
        a, b = (factors[:, expert : expert + 1] for factors in parts[part])
        places = (whole, split) if part == "w2" else (split, whole)
        rows, columns = (place.stop - place.start for place in places)
        weight = path.removesuffix("experts") + name.rstrip(".").removesuffix(WRAPPED) + ".weight"
        yield weight, Slot(a[..., :columns], b[..., :rows, :], *places)
