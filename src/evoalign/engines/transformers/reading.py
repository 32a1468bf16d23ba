# SPDX-License-Identifier: Apache-2.0
"""Prompts into fixed memory: what all begin with once a member, the rest of each once a member and prompt.

Layers below the first that evolves are the same for all members: they read each prompt once, for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evoalign import kernels
from evoalign.engines.transformers.blocks import Blocks, Entered
from evoalign.engines.transformers.fixed import Made
from evoalign.engines.transformers.memory import Footprint
from evoalign.engines.transformers.prefill import shared_prefix
from evoalign.types import Request

PASS = (1024, 32768)
"""Tokens of prompts that go through the layers at once, on a CPU and on a GPU: what bounds the activations."""
Rows = Sequence[tuple[int, int, int]]
"""Of each the place in the store, the member's slot or -1, and the number of the text."""


class Reader:
    """Reads into `made`; `spare` is room in bytes beside what is kept, `fixed` asks for the same tiles always."""

    def __init__(
        self, blocks: Blocks, footprint: Footprint, made: Made, spare: float, *, pad: int, fixed: bool
    ) -> None:
        self._blocks, self._footprint, self._made, self._spare = blocks, footprint, made, spare
        self._pad, self._fixed, self._device = pad, fixed, made.rotations.device

    def read(self, asked: Sequence[tuple[int, Request]], places: Sequence[int]) -> torch.Tensor:
        """Logits [B, V] after the prompts of pairs, whose keys and values lie at their places by then."""
        numbers: dict[tuple[int, ...], int] = {}
        of_request = {id(r): numbers.setdefault(r.prompt_ids, len(numbers)) for _, r in asked}
        heads: dict[tuple[int, int], int] = {}
        of_slot: dict[int, int] = {}
        owners = list[int]()
        for place, (slot, request) in zip(places, asked, strict=True):
            of_slot.setdefault(slot, place)
            owners.append(heads.setdefault((slot, of_request[id(request)]), place))
        prompts = list(numbers)
        shared = shared_prefix(prompts) if len(prompts) > 1 else 0
        if shared:
            self._pass([(place, slot, 0) for slot, place in of_slot.items()], [prompts[0][:shared]], 0, answers=False)
            self._copy([(of_slot[slot], place) for (slot, _), place in heads.items()], 0, shared)
        rest = [(place, slot, text) for (slot, text), place in heads.items()]
        logits = self._pass(rest, [prompt[shared:] for prompt in prompts], shared)
        assert logits is not None
        self._copy(list(zip(owners, places, strict=True)), 0, max(map(len, prompts)))
        if len(heads) == len(asked):
            return logits
        order = {place: i for i, (place, _, _) in enumerate(rest)}
        return logits[torch.tensor([order[place] for place in owners], device=self._device)]

    def _pass(
        self, rows: Rows, texts: Sequence[Sequence[int]], start: int, *, answers: bool = True
    ) -> torch.Tensor | None:
        """Logits [B, V] after rows that go on at column `start`, read so many at a time as there is room for."""
        width, found = max(map(len, texts)), list[torch.Tensor]()
        filled = torch.tensor([[*ids, *[self._pad] * (width - len(ids))] for ids in texts], device=self._device)
        last = torch.tensor([len(ids) - 1 for ids in texts], device=self._device)
        below, begun = self._made.factors.below, None
        if below and len(texts) < len(rows):
            begun = self._below(rows, filled, start)
        for places, slots, chosen in self._pieces(rows, width, start, 0 if begun is None else len(texts)):
            ends = last[chosen] if answers else None
            layers = slice(0 if begun is None else below, None)
            entered = None if begun is None else begun.rows(chosen)
            got = self._read(filled[chosen], start, places, slots, layers, entered, ends)
            found += [got] if isinstance(got, torch.Tensor) else []
        return (found[0] if len(found) == 1 else torch.cat(found)) if answers else None

    def _below(self, rows: Rows, filled: torch.Tensor, start: int) -> Entered:
        """What each text comes to below the first layer that evolves; its keys and values go to all of its rows."""
        first: dict[int, int] = {}
        for place, _, text in rows:
            first.setdefault(text, place)
        below, found = slice(0, self._made.factors.below), list[Entered]()
        each = [(first[text], -1, text) for text in range(len(filled))]
        for places, slots, chosen in self._pieces(each, filled.shape[1], start, len(filled)):
            got = self._read(filled[chosen], start, places, slots, below, None, None)
            assert isinstance(got, Entered)
            found.append(got)
        self._copy([(first[text], place) for place, _, text in rows], start, start + filled.shape[1], below)
        return Entered(*(torch.cat(parts) for parts in zip(*((e.hidden, e.residual) for e in found), strict=True)))

    def _pieces(self, rows: Rows, width: int, start: int, texts: int) -> list[torch.Tensor]:
        """Rows that are read together: [3, B] of places, slots and texts each."""
        most, row = PASS[self._device.type == "cuda"] // width, self._footprint.prefill(width, start + width)
        row += self._footprint.cache * (start + width) if start else 0  # a layer's, gathered, is less than all layers'
        spare = self._spare - texts * width * self._footprint.activations  # what layers below came to is less
        size = max(1, int(min(most, spare / row)))
        return [torch.tensor(rows[i : i + size]).T.to(self._device) for i in range(0, len(rows), size)]

    def _read(
        self, tokens: torch.Tensor, start: int, places: torch.Tensor, slots: torch.Tensor, layers: slice,
        entered: Entered | None, last: torch.Tensor | None,
    ) -> torch.Tensor | Entered:  # fmt: skip
        made = self._made
        with kernels.on(self._device):
            return self._blocks.read(
                tokens, start, places, last, slots.int(), made.store, made.rotations, made.factors,
                layers=layers, entered=entered, fixed=self._fixed,
            )  # fmt: skip

    def _copy(self, moves: Sequence[tuple[int, int]], first: int, end: int, layers: slice = slice(None)) -> None:
        """Columns of places of the store to other places."""
        moves = [(source, to) for source, to in moves if source != to]
        if not moves:
            return
        source, to = torch.tensor(moves, device=self._device).T
        store = self._made.store
        for kept in (*store.keys[layers], *store.values[layers]):
            kept[to, :, first:end] = kept[source, :, first:end]
