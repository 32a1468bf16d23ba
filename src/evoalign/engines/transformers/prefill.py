# SPDX-License-Identifier: Apache-2.0
"""Prompts into the cache: what all begin with once a member, the rest of each once a member, in pieces that fit.

Where the first layers are the same for all members, these are computed once a prompt and not once a member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from evoalign.engines.transformers.adapters import Adapters
from evoalign.engines.transformers.cache import RoomCache
from evoalign.engines.transformers.forward import Forward, joined, rows_of
from evoalign.engines.transformers.memory import Footprint
from evoalign.types import Request

MIN_SHARED_PREFIX = 4
Head = tuple[int, tuple[int, ...]]
"""A slot and a prompt of it."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Of each pair, in order: logits [B, V] after its prompt, and which columns of the cache count, None: all."""

    logits: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of one stage: row i is of slot `slots[i]` and reads text `texts[i]`, numbered as they first appear.

    `ids` and `positions` [B, T]; `mask` [B, columns] or None.
    """

    slots: Sequence[int]
    texts: Sequence[int]
    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None

    def take(self, rows: Sequence[int]) -> _Batch:
        """Some rows."""
        if len(rows) == len(self.slots):
            return self
        index = torch.tensor(rows, device=self.ids.device)
        mask = None if self.mask is None else self.mask[index]
        slots, texts = ([of[i] for i in rows] for of in (self.slots, self.texts))
        return _Batch(slots, texts, self.ids[index], self.positions[index], mask)


class Prefill:
    """Reads the prompts of one chunk into `cache`; `spare` is the room in bytes beside the cache and the logits."""

    def __init__(
        self, forward: Forward, footprint: Footprint, cache: RoomCache, adapters: Adapters | None, spare: float
    ) -> None:
        self._forward, self._footprint, self._cache = forward, footprint, cache
        self._adapters, self._spare, self._device = adapters, spare, forward.device

    def run(self, asked: Sequence[tuple[int, Request]], room: int, pad_id: int) -> Prefilled:
        """Logits and mask of each pair; the adapters know its rows then."""
        count = asked[-1][0] + 1
        heads: list[Head] = list(dict.fromkeys((slot, r.prompt_ids) for slot, r in asked))
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
        self._arrange([slot for slot, _ in asked])
        place = {head: i for i, head in enumerate(heads)}
        if len(asked) != len(heads):
            index = self._index([place[slot, r.prompt_ids] for slot, r in asked])
            self._cache.select(index)
            logits, mask = logits[index], None if mask is None else mask[index]
        return Prefilled(logits, mask)

    def _rest(
        self, heads: Sequence[Head], prompts: Sequence[tuple[int, ...]], shared: int, room: int, pad_id: int
    ) -> _Batch:
        """A left-padded row a head, of what follows the shared beginning."""
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
        """One stage: all rows through the layers, behind the columns that the cache has."""
        start, total = self._cache.get_seq_length(), len(batch.slots)
        hidden = self._read_trunk(batch, start) if self._forward.trunk and len(set(batch.texts)) < total else None
        logits: list[torch.Tensor] = []
        for rows in self._pieces(batch, start):
            part = batch.take(rows)
            self._arrange(part.slots, whole=len(rows) == total)
            self._cache.open(rows, total, start)
            above = nullcontext() if hidden is None else self._forward.crown_alone(rows_of(hidden, part.texts))
            with above:
                logits.append(self._forward(part.ids, part.mask, part.positions, self._cache, answers=answers))
        self._cache.close(start + batch.ids.shape[1])
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _read_trunk(self, batch: _Batch, start: int) -> Any:
        """The layers that are the same for all members: a row a text, then their cache a row a row again."""
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
        return joined(found)

    def _pieces(self, batch: _Batch, start: int) -> Iterator[range]:
        """Consecutive rows whose activations fit beside the cache: all of them, where there is room."""
        total, width = batch.ids.shape
        most = max(1, int(self._spare / self._footprint.prefill(width, start + width)))
        return (range(i, min(i + most, total)) for i in range(0, total, most))

    def _arrange(self, slots: Sequence[int], *, whole: bool = True) -> None:
        """Tell the adapters whose the rows of the next batches are: equal groups where they are of all slots."""
        if self._adapters is None:
            return
        if whole and len(set(Counter(slots).values())) == 1:
            self._adapters.group()
        else:
            self._adapters.scatter(self._index(slots))

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._device)


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all prompts begin with, at least one left over for each; 0 where too few to be worth a pass."""
    shared = min(map(len, prompts)) - 1
    first = prompts[0]
    for prompt in prompts[1:]:
        shared = next((i for i in range(shared) if prompt[i] != first[i]), shared)
    return shared if shared >= MIN_SHARED_PREFIX else 0
