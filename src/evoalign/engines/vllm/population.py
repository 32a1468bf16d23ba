# SPDX-License-Identifier: Apache-2.0
"""The whole population in one batch of vLLM: each row takes the low-rank term of its own member.

Member of slot i is LoRA id i + 1, in slot i of vLLM's stacked tensors, for as long as the engine lives; the engine
rewrites the slots in place. Three forms:
  deep     the terms ride in the kernels of the Qwen2, Qwen3 and Llama families (see `deep`)
  generic  one launch a projection, any model: ours in place of vLLM's LoRA kernels
  stock    vLLM's own kernels and bookkeeping
The first two also replace vLLM's bookkeeping at each step, which loads, evicts and sorts adapters.

The worker loads the model within `installed`, calls `attach` there before graphs are captured, `register` after vLLM's
warm-up, and writes to what `stacked` names.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.lora.layers import ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.platforms import current_platform

from evoalign.engines.vllm import deep
from evoalign.engines.vllm.insides import replace
from evoalign.engines.vllm.rows import Rows
from evoalign.errors import ModelError
from evoalign.kernels import population

Form = Literal["deep", "generic", "stock"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the worker asked for: R, the factor on every term, and whether tiles must not depend on the batch."""

    form: Form
    rank: int
    scaling: float
    fixed: bool


class Active(NamedTuple):
    """The form that serves, and why it is not the one asked for (empty where it is)."""

    form: Form
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Slot:
    """All members' slots of one matrix W [out, in] on this rank: `a` [S, 1, RS, in'], `b` [S, 1, out', RS].

    This rank holds `rows` of out, and so of each member's B, and `columns` of in, and so of A.
    """

    a: torch.Tensor
    b: torch.Tensor
    rows: slice
    columns: slice


_asked = Settings("stock", 1, 1.0, fixed=False)


@contextmanager
def installed(form: Form, rank: int, scaling: float, fixed: bool) -> Generator[None, None, None]:
    """Models that load in here take a form; others of this process stay as vLLM makes them."""
    global _asked
    own = vars(current_platform).pop("get_punica_wrapper", None)
    _asked = Settings(form, rank, scaling, fixed)
    try:
        if form != "stock":
            replace(current_platform, "get_punica_wrapper", lambda: f"{__name__}.{Terms.__name__}")
        yield
    finally:
        vars(current_platform).pop("get_punica_wrapper", None)
        if own is not None:
            current_platform.get_punica_wrapper = own


class Terms:
    """Stands where vLLM has its "punica wrapper": which row is whose, and y += scaling * (x A_m^T) B_m^T."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, lora_config: Any, **_: Any
    ) -> None:
        self.settings = _asked
        if self.settings.rank > lora_config.max_lora_rank:
            raise ModelError(f"rank {self.settings.rank}, and vLLM's slots hold {lora_config.max_lora_rank}")
        self.rows = Rows(max_num_batched_tokens, lora_config.max_loras, torch.device(device))

    def update_metadata(self, mapping: Any, *_: Any, **__: Any) -> None:
        """vLLM's own way in, for callers other than the runner's step."""
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
        """y [T, sum N_i] += the members' terms, in place. Nothing is launched, or captured, without members."""
        if self.rows.any:
            asked = self.settings
            terms = population.Terms(self.rows.of(len(y)), asked.rank, asked.scaling, asked.fixed)
            population.add(y, x, lora_a_stacked, lora_b_stacked, terms)
        return y

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ModelError(
            "population kernels serve plain linear layers, not embeddings, logits, experts or fully sharded LoRA; "
            "name the linear layers in target_modules, or set engine.population to stock"
        )

    add_shrink = add_expand = add_lora_embedding = add_lora_logits = _refuse
    apply_lora_full_linear = add_lora_fused_moe = moe_lora_align_block_size = add_lora_w13 = add_lora_w2 = _refuse


def attach(model: torch.nn.Module, runner: Any) -> Active:
    """Put the form that was asked for on a loaded model, before graphs are captured. Compiles the kernels.

    Raises ModelError where vLLM put LoRA on layers that no member has, such as the embedding.
    """
    if _asked.form == "stock":
        return Active("stock")
    terms = _terms(runner)
    layers = _linear_layers(runner)
    replace_step(runner, terms.rows)
    reason = deep.obstacle(model) if _asked.form == "deep" else ""
    if _asked.form == "deep" and not reason:
        deep.put(model, terms.rows, _asked.rank, _asked.scaling, _asked.fixed)
        return Active("deep")
    _warm_up(layers, terms)
    return Active("generic", reason)


def _terms(runner: Any) -> Terms:
    wrappers = list(runner.lora_manager._adapter_manager.punica_wrapper_mapping.values())
    if len(wrappers) != 1 or not isinstance(wrappers[0], Terms):
        names = ", ".join(type(w).__name__ for w in wrappers)
        raise ModelError(f"the population path needs one set of rows, and vLLM made {names}; use population: stock")
    return wrappers[0]


def _linear_layers(runner: Any) -> list[Any]:
    modules: dict[str, Any] = runner.lora_manager._adapter_manager.modules
    for name, layer in modules.items():
        if not isinstance(layer, BaseLinearLayerWithLoRA):
            raise ModelError(f"vLLM put LoRA on {name}, which no member changes; name the linear layers only")
    return list(modules.values())


def _warm_up(layers: Iterable[Any], terms: Terms) -> None:
    """Compile the kernel for every shape of layer, for few rows and for many, so that no rollout waits for it."""
    seen: set[tuple[int, ...]] = set()
    for layer in layers:
        a, b = layer.lora_a_stacked, layer.lora_b_stacked
        shape = (a[0].shape[3], *(one.shape[2] for one in b))
        if shape not in seen:
            seen.add(shape)
            for count in population.row_sizes(a[0].device):
                members = a[0].new_full((count,), -1, dtype=torch.int32)
                y, x = a[0].new_zeros(count, sum(shape[1:])), a[0].new_zeros(count, shape[0])
                asked = terms.settings
                population.add(y, x, a, b, population.Terms(members, asked.rank, fixed=asked.fixed))


def replace_step(runner: Any, rows: Rows) -> None:
    """The runner hands over arrays, and no step touches vLLM's caches of adapters.

    vLLM builds two tuples of numpy integers a step, hashes every request, and keeps adapters by recency. Both of its
    runners end in `_set_active_loras`; the first asks the batch for its ids, the second its own LoRA state. Whether
    graphs with or without LoRA are replayed depends on the requests of the same step: at least one has an id exactly
    when `rows.any` holds.

    Parameters are named as vLLM names them. Raises EngineError where it has none of that name.
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
        return set(islice(filter(state.lora_requests.__contains__, req_ids), 1))  # our kernels do not ask how many

    def nothing(*_: Any, **__: Any) -> nullcontext[None]:
        return nullcontext()

    replace(runner, "set_active_loras", of_batch)
    replace(runner, "_set_active_loras", of_tokens)
    # vLLM would fill all slots from pinned copies for each dummy run, and empty them after it.
    replace(runner, "maybe_setup_dummy_loras", nothing)
    replace(runner, "maybe_remove_all_loras", nothing)
    if state is not None:
        replace(state, "make_lora_inputs", inputs)
        replace(state, "get_activate_loras", active)


def register(lora_manager: Any, slots: int) -> None:
    """Make slots 0 to `slots` - 1 known to vLLM as LoRA ids 1 to `slots`, zeroed: nothing is ever loaded or evicted."""
    adapters = lora_manager._adapter_manager
    if slots > adapters.lora_slots or slots > adapters.capacity:
        raise ModelError(f"{slots} members, and vLLM was given {adapters.lora_slots} LoRA slots; raise max_loras")
    adapters.remove_all_adapters()
    for lora_id in range(1, slots + 1):
        # Not `add_adapter`: it looks at the first of an adapter's tensors, and this one has none.
        adapters._registered_adapters[lora_id] = LoRAModel(lora_id, adapters.lora_config.max_lora_rank, {})
        adapters.activate_adapter(lora_id)


def stacked(model: torch.nn.Module) -> dict[str, Slot]:
    """Where the members' factors of each Hugging Face weight live on this rank, by the weight's name.

    Names are vLLM's, fused layers taken apart: `...qkv_proj` is `...q_proj.weight`, `...k_proj.weight` and so on.
    Where there are fewer key and value heads than ranks, several ranks hold the same rows.
    """
    linear = ((path, m) for path, m in model.named_modules() if isinstance(m, BaseLinearLayerWithLoRA))
    return {name: slot for path, layer in linear for name, slot in _slots(model, path, layer)}


def _slots(model: Any, path: str, layer: Any) -> Iterator[tuple[str, Slot]]:
    parent, _, last = path.rpartition(".")
    names = model.packed_modules_mapping.get(last, [last])
    if len(names) != layer.n_slices or (
        layer.tp_size > 1 and len(names) < len(getattr(layer.base_layer, "output_sizes", ()))
    ):
        raise ModelError(f"{path}: members cannot be put on a layer that the checkpoint itself fuses; leave it out")
    by_rows, by_columns = isinstance(layer, ColumnParallelLinearWithLoRA), isinstance(layer, RowParallelLinearWithLoRA)
    shards = getattr(layer, "output_ids", (layer.tp_rank if by_rows else 0,))
    for name, shard, a, b in zip(names, shards, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
        rows, columns = b.shape[2], a.shape[3]
        first = layer.tp_rank * columns if by_columns else 0
        place = (slice(shard * rows, (shard + 1) * rows), slice(first, first + columns))
        yield f"{parent}.{name}.weight", Slot(a, b, *place)
