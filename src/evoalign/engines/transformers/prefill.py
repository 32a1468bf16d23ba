# SPDX-License-Identifier: Apache-2.0
"""The forward of transformers over a preallocated cache, and prefill of many members' prompts.

Prefill reads what all prompts begin with once per member, and the rest once per member and prompt, in pieces that fit
in memory. Layers below the first that members change run once per prompt instead of once per member.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, CacheLayerMixin

from evoalign.engines.transformers.adapters import Adapters
from evoalign.engines.transformers.settings import Footprint
from evoalign.models.layers import windows
from evoalign.types import Request

MIN_SHARED_PREFIX = 4
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All backends except cuDNN, which torch prefers on recent GPUs if there is a mask: cuDNN makes a new plan for each
shape, and in decoding each step has another shape."""
Head = tuple[int, tuple[int, ...]]
"""A slot and one of its prompts."""


class RoomLayer(CacheLayerMixin):
    """Keys and values [rows, heads, room, head_dim] of a layer, of which the first `length` columns are filled.

    A decoding step writes one column instead of copying all of them. After `open`, new columns are for some rows only.
    """

    is_sliding = False

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.length = 0
        self._rows, self._total = slice(None), 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        shapes = ((self._total or s.shape[0], s.shape[1], self.room, s.shape[3]) for s in (key_states, value_states))
        self.keys, self.values = (key_states.new_empty(shape) for shape in shapes)
        self.is_initialized = True

    def open(self, rows: slice, total: int, length: int) -> None:
        """Direct new columns, after the first `length`, to these rows of `total`; `slice(None)` is all rows."""
        self._rows, self._total, self.length = rows, total, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[2]
        keys, values = self.keys[self._rows], self.values[self._rows]
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def select(self, rows: torch.Tensor) -> None:
        """Keep, drop or repeat rows. Only the filled columns are copied."""
        assert self.keys is not None and self.values is not None
        kept: list[torch.Tensor] = []
        for tensor in (self.keys, self.values):
            kept.append(tensor.new_empty(len(rows), *tensor.shape[1:]))
            torch.index_select(tensor[:, :, : self.length], 0, rows, out=kept[-1][:, :, : self.length])
        self.keys, self.values = kept

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in transformers before 5.20."""
        return -1


class RoomCache(Cache):
    """A key-value cache with one RoomLayer per layer."""

    def __init__(self, layers: int, room: int) -> None:
        super().__init__(layers=[RoomLayer(room) for _ in range(layers)])

    @property
    def _rooms(self) -> list[RoomLayer]:
        return [layer for layer in self.layers if isinstance(layer, RoomLayer)]

    def open(self, rows: range, total: int, length: int) -> None:
        """Direct new columns, after the first `length`, to these rows of `total`."""
        for layer in self._rooms:
            layer.open(slice(rows.start, rows.stop), total, length)

    def close(self, length: int) -> None:
        """Mark the first `length` columns of the cache as filled, in all rows and layers."""
        for layer in self._rooms:
            layer.open(slice(None), 0, length)

    def select(self, rows: torch.Tensor, layers: range | None = None) -> None:
        """Keep, drop or repeat rows in some layers, or in all. Layers that are still empty are skipped."""
        for index in range(len(self.layers)) if layers is None else layers:
            layer = self._rooms[index]
            if layer.is_initialized:
                layer.select(rows)


class Forward:
    """Runs the model on token ids and returns the logits of the last position.

    `trunk` are the decoder layers below the first that members change, `crown` the others; see `share`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        text = model.config.get_text_config()
        self.device: torch.device = model.device
        self.layers: int = text.num_hidden_layers
        self.reach = _reach(text)
        self._no_logits = torch.empty(0, dtype=torch.int64, device=self.device)
        # Such models pass a mask of four dimensions to the layers unchanged. Others derive positions from a 2D mask.
        self._takes_masks = (
            self.reach == math.inf
            and getattr(model.config, "_attn_implementation", None) == "sdpa"
            and getattr(model, "_supports_attention_backend", False)
        )
        self.trunk: Sequence[nn.Module] = ()
        self.crown: Sequence[nn.Module] = ()

    def __call__(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        cache: RoomCache,
        *,
        answers: bool = True,
    ) -> torch.Tensor:
        """Return logits [B, V] after the last column of `ids` [B, T], or none without `answers`.

        `mask` is [B, columns] or, for one new column, the result of `decoding_mask`.
        """
        seen = cache.get_seq_length() + ids.shape[1]
        with sdpa_kernel(ATTENTION):
            out = self._model(
                input_ids=ids,
                attention_mask=None if mask is None else mask[..., :seen],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1 if answers else self._no_logits,
            )
        return out.logits[:, -1] if answers else out.logits

    def decoding_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the mask for decoding: [B, 1, 1, columns] if the model accepts it, which saves work in each step."""
        return mask.bool()[:, None, None] if self._takes_masks else mask

    def share(self, modules: Mapping[str, nn.Module]) -> None:
        """Run the layers below all of these modules, which alone differ between members, once per prompt."""
        self.trunk, self.crown = _split(self._model, self.layers, set(modules.values()))

    @contextmanager
    def trunk_alone(self) -> Generator[Callable[[], Any]]:
        """Make forwards stop above the trunk. Yields a function that returns the trunk's output."""
        found: list[Any] = []
        handle = self.trunk[-1].register_forward_hook(lambda _module, _inputs, output: found.append(output))
        try:
            with _replaced(self.crown, lambda: found[-1]):
                yield lambda: found.pop()
        finally:
            handle.remove()

    @contextmanager
    def crown_alone(self, hidden: Any) -> Generator[None]:
        """Make forwards start above the trunk, with the trunk's output `hidden`."""
        with _replaced(self.trunk, lambda: hidden):
            yield


@contextmanager
def _replaced(blocks: Sequence[nn.Module], output: Callable[[], Any]) -> Generator[None]:
    """Replace the forward of these layers by a function that returns `output()`."""
    own = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = lambda *_args, **_kwargs: output()
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _split(model: nn.Module, layers: int, changed: set[nn.Module]) -> tuple[Sequence[nn.Module], Sequence[nn.Module]]:
    """Return the decoder layers below the first with a changed module, and the others; none if one is elsewhere."""
    text: Any = getattr(model, "config").get_text_config()  # noqa: B009 - a module's attributes are unknown
    if getattr(text, "num_kv_shared_layers", 0):
        return (), ()  # such a layer reads keys that another layer made in the same forward
    for blocks in model.modules():
        if isinstance(blocks, nn.ModuleList) and len(blocks) == layers:
            holds = [bool(changed & set(block.modules())) for block in blocks]
            if any(holds) and changed <= {m for block in blocks for m in block.modules()}:
                first = holds.index(True)
                return list(blocks)[:first], list(blocks)[first:]
    return (), ()


def _reach(config: Any) -> float:
    """Return the number of columns within which padding between columns does not change attention.

    Beyond its size a sliding window or a chunk counts columns. ALiBi over columns (MPT) counts them from the first.
    """
    if getattr(getattr(config, "attn_config", None), "alibi", False):
        return 0
    kinds = set(getattr(config, "layer_types", None) or ("unknown",))
    if kinds == {"full_attention"}:
        return math.inf
    sizes = (*windows(config), getattr(config, "attention_chunk_size", None))
    return min((size for size in sizes if size), default=math.inf)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of one stage: row i has slot `slots[i]` and reads text `texts[i]`, numbered in order of appearance.

    `ids` and `positions` [B, T]; `mask` [B, columns] or None.
    """

    slots: Sequence[int]
    texts: Sequence[int]
    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None

    def take(self, rows: Sequence[int]) -> _Batch:
        """Select some rows."""
        if len(rows) == len(self.slots):
            return self
        index = torch.tensor(rows, device=self.ids.device)
        mask = None if self.mask is None else self.mask[index]
        slots, texts = ([numbers[i] for i in rows] for numbers in (self.slots, self.texts))
        return _Batch(slots, texts, self.ids[index], self.positions[index], mask)


class Prefill:
    """Reads the prompts of one batch into `cache`. `spare` is the room for activations in bytes."""

    def __init__(
        self, forward: Forward, footprint: Footprint, cache: RoomCache, adapters: Adapters | None, spare: float
    ) -> None:
        self._forward, self._footprint, self._cache = forward, footprint, cache
        self._adapters, self._spare, self._device = adapters, spare, forward.device

    def run(
        self, pairs: Sequence[tuple[int, Request]], room: int, pad_id: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits [B, V] after each prompt, and the mask of columns of the cache (None: all columns count).

        Arranges the adapters for these rows.
        """
        count = pairs[-1][0] + 1
        heads: list[Head] = list(dict.fromkeys((slot, r.prompt_ids) for slot, r in pairs))
        prompts = list(dict.fromkeys(prompt for _, prompt in heads))
        uneven = len(set(map(len, prompts))) > 1
        apart = uneven and room > self._forward.reach
        shared = shared_prefix(prompts) if len(prompts) > 1 and not apart else 0
        if shared:
            ids = torch.tensor([prompts[0][:shared]] * count, device=self._device)
            positions = torch.arange(shared, device=self._device).expand(count, -1)
            self._read(_Batch(range(count), [0] * count, ids, positions, None), answers=False)
            self._cache.select(self._index([slot for slot, _ in heads]))
        batch = self._rest(heads, prompts, shared, room, pad_id)
        logits, mask = self._read(batch), batch.mask
        self._arrange([slot for slot, _ in pairs])
        place = {head: i for i, head in enumerate(heads)}
        if len(pairs) != len(heads):
            index = self._index([place[slot, r.prompt_ids] for slot, r in pairs])
            self._cache.select(index)
            logits, mask = logits[index], None if mask is None else mask[index]
        return logits, mask

    def _rest(
        self, heads: Sequence[Head], prompts: Sequence[tuple[int, ...]], shared: int, room: int, pad_id: int
    ) -> _Batch:
        """Return one left-padded row per (slot, prompt), without the shared prefix."""
        rest = [prompt[shared:] for _, prompt in heads]
        width = max(map(len, rest))
        ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in rest], device=self._device)
        pads = self._index([width - len(p) for p in rest])
        columns = torch.arange(width, device=self._device)
        positions = (columns - pads[:, None]).clamp_(min=0) + shared
        mask = None
        if bool(pads.any()):
            mask = torch.ones(len(heads), room, dtype=torch.int64, device=self._device)
            mask[:, shared : shared + width] = columns >= pads[:, None]
        number = {prompt: i for i, prompt in enumerate(prompts)}
        return _Batch([slot for slot, _ in heads], [number[p] for _, p in heads], ids, positions, mask)

    def _read(self, batch: _Batch, *, answers: bool = True) -> torch.Tensor:
        """Run one part of the prompts (shared or own tokens) through the layers, and append it to the cache."""
        start, total = self._cache.get_seq_length(), len(batch.slots)
        hidden = self._read_trunk(batch, start) if self._forward.trunk and len(set(batch.texts)) < total else None
        logits: list[torch.Tensor] = []
        for rows in self._pieces(batch, start):
            part = batch.take(rows)
            self._arrange(part.slots, whole=len(rows) == total)
            self._cache.open(rows, total, start)
            above = nullcontext()
            if isinstance(hidden, tuple):  # some decoder layers return a tuple that begins with the hidden states
                above = self._forward.crown_alone((hidden[0][list(part.texts)], *hidden[1:]))
            elif hidden is not None:
                above = self._forward.crown_alone(hidden[list(part.texts)])
            with above:
                logits.append(self._forward(part.ids, part.mask, part.positions, self._cache, answers=answers))
        self._cache.close(start + batch.ids.shape[1])
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _read_trunk(self, batch: _Batch, start: int) -> Any:
        """Run the trunk with one row per text, then expand its cache to one row per row. Returns the trunk's output."""
        below = range(len(self._forward.trunk))
        first = [batch.texts.index(text) for text in range(max(batch.texts) + 1)]
        self._cache.select(self._index(first), below)
        texts, found = batch.take(first), list[Any]()
        for rows in self._pieces(texts, start):
            part = texts.take(rows)
            self._cache.open(rows, len(first), start)
            with self._forward.trunk_alone() as reached:
                self._forward(part.ids, part.mask, part.positions, self._cache, answers=False)
                found.append(reached())
        self._cache.select(self._index(batch.texts), below)
        if len(found) == 1:
            return found[0]
        return (torch.cat([o[0] for o in found]), *found[0][1:]) if isinstance(found[0], tuple) else torch.cat(found)

    def _pieces(self, batch: _Batch, start: int) -> Iterator[range]:
        """Yield consecutive rows whose activations fit in the room."""
        total, width = batch.ids.shape
        most = max(1, int(self._spare / self._footprint.prefill(width, start + width)))
        return (range(i, min(i + most, total)) for i in range(0, total, most))

    def _arrange(self, slots: Sequence[int], *, whole: bool = True) -> None:
        """Set the slot of each row of the next batches in the adapters, as equal groups if the rows allow it."""
        if self._adapters is None:
            return
        if whole and len(set(Counter(slots).values())) == 1:
            self._adapters.group()
        else:
            self._adapters.scatter(self._index(slots))

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._device)


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all prompts begin with, leaving at least one for each; 0 if too few to be worth a pass."""
    shared = min(map(len, prompts)) - 1
    first = prompts[0]
    for prompt in prompts[1:]:
        shared = next((i for i in range(shared) if prompt[i] != first[i]), shared)
    return shared if shared >= MIN_SHARED_PREFIX else 0
