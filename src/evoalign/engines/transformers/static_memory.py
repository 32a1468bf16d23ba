# SPDX-License-Identifier: Apache-2.0
"""The fixed memory of the static decoder: keys and values, members' factors, the state of each row, and prefill.

Prefill reads what all prompts begin with once per member, and the rest once per member and prompt. Layers below the
first that evolves are the same for all members, so they read each prompt once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TypeAlias

import torch

from evoalign import kernels
from evoalign.engines.transformers import decode
from evoalign.engines.transformers.blocks import Blocks, Factors, Hidden, Places, Store
from evoalign.engines.transformers.prefill import shared_prefix
from evoalign.engines.transformers.settings import Footprint
from evoalign.types import Member, Plan, Request

LEAST = 8
"""Smallest batch size. The others are multiples of it, or all rows."""
PREFILL_AT_ONCE = (1024, 32768)
"""Most prompt tokens per forward, on a CPU and on a GPU. They bound the activations."""
Write = Callable[[Plan, Sequence[Member]], None]
"""Writes members' factors into their slots: `Space.writer`."""
Rows = Sequence[tuple[int, int, int]]
"""Slot in the store, slot of the member or -1, and number of the text, per row."""


def size_for(rows: int, most: int) -> int:
    """Return the batch size for a number of rows: that of `decode`, in multiples of LEAST, at most `most`."""
    return min(most, -(-decode.size_for(rows) // LEAST) * LEAST)


def upload(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return integers as an int64 tensor on a device. The host does not wait for what a GPU computes meanwhile."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the memory: rows of `room` columns and at most `tokens` new ones, and slots for members."""

    rows: int
    room: int
    tokens: int
    slots: int

    def union(self, other: Shape) -> Shape:
        """Return the shape that holds both."""
        return Shape(*(max(a, b) for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Draws:
    """How a graph draws tokens, and whether it stores their log-probabilities."""

    temperature: float
    top_p: float
    logprobs: bool


class State:
    """The state of each row of a batch at fixed addresses: B rows, and C places in the store.

    Per row: the last `token` and its `position`, the `place` in the store, the slot of the `member` or -1, the seed
    `stream`, the number of tokens (`step`), and whether the row is `done`. Its first `begun` columns are also in the
    place `origin`, where they are read. Padding rows use the last place. Per place:
    `ids` and `logprobs` [C, tokens + 1], and `length` [C], which is 0 until the completion has ended, or -1 if its
    logits were not finite. `most` is the maximum length.
    """

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token, self.position, self.place = zeros(rows), zeros(rows), zeros(rows)
        self.member, self.stream = zeros(rows, dtype=torch.int32), zeros(rows)
        self.step, self.done = zeros(rows), zeros(rows, dtype=torch.bool)
        self.origin, self.begun = zeros(rows), zeros(rows)
        self.ids = zeros(rows + 1, tokens + 1)
        self.logprobs = zeros(rows + 1, tokens + 1, dtype=torch.float32)
        self.length, self.most = zeros(rows + 1), zeros()

    def begin(self, tokens: int) -> None:
        """Start an empty batch whose completions have at most `tokens` tokens."""
        self.most.fill_(tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Move these rows to the front, in this order."""
        if list(rows) != list(range(len(rows))):
            index = upload(rows, self.place.device)
            past = (self.position, self.place, self.origin, self.begun)
            for tensor in (self.token, *past, self.member, self.stream, self.step, self.done):
                tensor[: len(rows)] = tensor[index]

    def enter(
        self,
        first: int,
        places: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[int],
        streams: Sequence[int],
        origins: Sequence[Begun],
    ) -> None:
        """Add rows from `first` on, whose prompts of these `lengths` have been read."""
        at, begun = [origin.place for origin in origins], [origin.columns for origin in origins]
        rows, numbers = slice(first, first + len(places)), [places, lengths, streams, slots, at, begun]
        numbers = upload(numbers, self.place.device)
        self.place[rows], self.position[rows], self.stream[rows], self.member[rows] = numbers[:4]
        self.origin[rows], self.begun[rows] = numbers[4:]
        self.position[rows] -= 1  # drawing the first token advances it
        self.step[rows], self.done[rows] = 0, False
        self.length[numbers[0]] = 0

    def part(self, rows: Sequence[int]) -> None:
        """Let these rows read their whole past in their own places."""
        if rows:
            self.begun[upload(rows, self.begun.device)] = 0

    def pad(self, first: int, end: int) -> None:
        """Make rows from `first` to `end` padding: copies of the row before them at the last place, and done."""
        rows = slice(first, end)
        self.place[rows], self.done[rows], self.begun[rows] = len(self.length) - 1, True, 0
        for tensor in (self.token, self.position, self.step, self.member):
            tensor[rows] = tensor[first - 1]


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens whose keys and values a place still holds after its row has ended: of a (session, member's index)."""

    owner: tuple[int, int]
    ids: tuple[int, ...]


Held: TypeAlias = tuple[Store, dict[int, Kept]]
"""A store, and what its places hold."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A place that holds the first `columns` tokens of a prompt."""

    place: int
    columns: int


class Memory:
    """The memory of a shape and its graphs. `write` puts members' factors into the slots, if there are members.

    `kept` is what the places of ended rows hold. It is taken over from `before`, the store and places of another
    memory, as far as it fits.
    """

    def __init__(
        self, shape: Shape, blocks: Blocks, factors: Factors, write: Write | None, before: Held | None = None
    ) -> None:
        self.shape, self.factors, self.write = shape, factors, write
        store, kept = before or (None, {})
        places = sorted(kept)[: shape.rows]
        owners = [Kept(kept[place].owner, kept[place].ids[: shape.room]) for place in places]
        self.kept: dict[int, Kept] = dict(enumerate(owners))
        self.store: Store = blocks.store(shape.rows + 1, shape.room, store, places)
        self.rotations = blocks.rotations(shape.room)
        self.state = State(shape.rows, shape.tokens, self.rotations.device)
        self.graphs: dict[tuple[int, Draws], torch.cuda.CUDAGraph] = {}

    def begun(self, prompts: Sequence[Kept | None]) -> dict[int, Begun]:
        """Return the places that hold at least half of a prompt, by its position in `prompts`. None is a prompt that
        is read whole."""
        held: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        for place, kept in self.kept.items():
            held.setdefault(kept.owner, {})[place] = kept.ids
        found: dict[int, Begun] = {}
        for i, prompt in enumerate(prompts):
            places = {} if prompt is None else held.get(prompt.owner, {})
            if not places or prompt is None:
                continue
            likely = [p for p, ids in places.items() if prompt.ids[len(ids) - 1 : len(ids)] == ids[-1:]] or places
            columns, place = max((_common(prompt.ids, places[place]), place) for place in likely)
            columns = min(columns, len(prompt.ids) - 1)  # the last token's logits are computed
            if 2 * columns >= len(prompt.ids):
                found[i] = Begun(place, columns)
                del places[place]
        return found

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture `work` as a CUDA graph. All graphs share one pool, since one runs at a time."""
        graph, other = torch.cuda.CUDAGraph(), next(iter(self.graphs.values()), None)
        pool = None if other is None else other.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may use the device
            work()
        return graph


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return how many tokens both begin with."""
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        return shorter
    return next(i for i in range(shorter) if first[i] != second[i])


class Reader:
    """Reads prompts into `memory`. `spare` is the room for activations in bytes; `fixed` uses the same tiles always."""

    def __init__(
        self, blocks: Blocks, footprint: Footprint, memory: Memory, spare: float, *, pad: int, fixed: bool
    ) -> None:
        self._blocks, self._footprint, self._memory, self._spare = blocks, footprint, memory, spare
        self._pad, self._fixed, self._device = pad, fixed, memory.rotations.device

    def read(self, pairs: Sequence[tuple[int, Request]], places: Sequence[int]) -> tuple[torch.Tensor, list[Begun]]:
        """Return logits [B, V] after the prompts of (slot, request) pairs, whose keys and values are stored.

        The second are places that hold the beginning of each, or all of it.
        """
        numbers: dict[tuple[int, ...], int] = {}
        of_request = {id(r): numbers.setdefault(r.prompt_ids, len(numbers)) for _, r in pairs}
        heads: dict[tuple[int, int], int] = {}  # place of the first row of each (slot, text)
        of_slot: dict[int, int] = {}  # place of the first row of each slot
        owners = list[int]()
        for place, (slot, request) in zip(places, pairs, strict=True):
            of_slot.setdefault(slot, place)
            owners.append(heads.setdefault((slot, of_request[id(request)]), place))
        prompts = list(numbers)
        shared = shared_prefix(prompts) if len(prompts) > 1 else 0
        if shared:
            rows = [(place, slot, 0) for slot, place in of_slot.items()]
            self._read_texts(rows, [prompts[0][:shared]], 0, answers=False)
            self._copy([(of_slot[slot], place) for (slot, _), place in heads.items()], 0, shared)
        rest = [(place, slot, text) for (slot, text), place in heads.items()]
        logits = self._read_texts(rest, [prompt[shared:] for prompt in prompts], shared)
        assert logits is not None
        self._copy(list(zip(owners, places, strict=True)), 0, max(map(len, prompts)))
        origins = [
            Begun(owner, len(request.prompt_ids)) if owner != place else Begun(of_slot[slot], shared)
            for place, owner, (slot, request) in zip(places, owners, pairs, strict=True)
        ]
        if len(heads) == len(pairs):
            return logits, origins
        order = {place: i for i, (place, _, _) in enumerate(rest)}
        return logits[torch.tensor([order[place] for place in owners], device=self._device)], origins

    def read_on(self, pairs: Sequence[tuple[int, Request]], begun: Sequence[Begun]) -> torch.Tensor:
        """Return logits [B, V] after prompts whose places hold a beginning, and store the keys and values of the rest.

        Rows of similar length are read together.
        """
        rests = [r.prompt_ids[at.columns :] for (_, r), at in zip(pairs, begun, strict=True)]
        order = sorted(range(len(rests)), key=lambda i: -len(rests[i]))
        most, found, done = max(at.columns for at in begun), list[torch.Tensor](), 0
        while done < len(order):
            width = len(rests[order[done]])
            some = order[done : done + self._rows(width, most, self._spare)]
            done += len(some)
            each = [(begun[i].place, begun[i].columns, len(rests[i]), pairs[i][0]) for i in some]
            flat = [(token, text) for text, i in enumerate(some) for token in rests[i]]
            places, starts, lengths, slots = torch.tensor(each).T.to(self._device)
            bounds = width, max(start + length for _, start, length, _ in each)
            tokens, texts = torch.tensor(flat).T.to(self._device)
            where = (tokens, texts, starts, lengths, bounds, places, slots.int())
            memory = self._memory
            with kernels.on(self._device):
                found.append(self._blocks.read_on(*where, memory.store, memory.rotations, memory.factors))
        return torch.cat(found)[torch.tensor(order, device=self._device).argsort()]

    def _read_texts(
        self, rows: Rows, texts: Sequence[Sequence[int]], start: int, *, answers: bool = True
    ) -> torch.Tensor | None:
        """Return logits [B, V] after rows that continue at column `start`, read in pieces that fit the room."""
        width, found = max(map(len, texts)), list[torch.Tensor]()
        filled = torch.tensor([[*ids, *[self._pad] * (width - len(ids))] for ids in texts], device=self._device)
        last = torch.tensor([len(ids) - 1 for ids in texts], device=self._device)
        below, begun = self._memory.factors.below, None
        if below and len(texts) < len(rows):
            begun = self._read_below(rows, filled, start)
        for places, slots, chosen in self._pieces(rows, width, start, 0 if begun is None else len(texts)):
            ends = last[chosen] if answers else None
            layers = slice(0 if begun is None else below, None)
            entered = None if begun is None else begun.rows(chosen)
            got = self._forward(filled[chosen], start, places, slots, layers, entered, ends)
            found += [got] if isinstance(got, torch.Tensor) else []
        return (found[0] if len(found) == 1 else torch.cat(found)) if answers else None

    def _read_below(self, rows: Rows, filled: torch.Tensor, start: int) -> Hidden:
        """Run the layers below the first that evolves once per text. All rows of a text get its keys and values."""
        first: dict[int, int] = {}
        for place, _, text in rows:
            first.setdefault(text, place)
        below, found = slice(0, self._memory.factors.below), list[Hidden]()
        each = [(first[text], -1, text) for text in range(len(filled))]
        for places, slots, chosen in self._pieces(each, filled.shape[1], start, len(filled)):
            got = self._forward(filled[chosen], start, places, slots, below, None, None)
            assert isinstance(got, Hidden)
            found.append(got)
        self._copy([(first[text], place) for place, _, text in rows], start, start + filled.shape[1], below)
        return Hidden(*(torch.cat(parts) for parts in zip(*((e.hidden, e.residual) for e in found), strict=True)))

    def _pieces(
        self, rows: Rows, width: int, start: int, texts: int
    ) -> Iterator[tuple[Places, torch.Tensor, torch.Tensor]]:
        """Yield rows that are read together: places, slots [B] and texts [B]."""
        # at least the output of the layers below
        size = self._rows(width, start, self._spare - texts * width * self._footprint.activations)
        for i in range(0, len(rows), size):
            places, slots, chosen = upload(list(zip(*rows[i : i + size], strict=True)), self._device)
            first, end = rows[i][0], rows[i][0] + len(places)
            following = [place for place, *_ in rows[i : i + size]] == list(range(first, end))
            yield slice(first, end) if following else places, slots, chosen

    def _rows(self, width: int, start: int, spare: float) -> int:
        """Return how many rows of `width` tokens after `start` columns are read together."""
        row = self._footprint.prefill(width, start + width)
        row += self._footprint.cache * (start + width) if start else 0  # at least one layer's cache, gathered
        return max(1, int(min(PREFILL_AT_ONCE[self._device.type == "cuda"] // width, spare / row)))

    def _forward(
        self,
        tokens: torch.Tensor,
        start: int,
        places: Places,
        slots: torch.Tensor,
        layers: slice,
        entered: Hidden | None,
        last: torch.Tensor | None,
    ) -> torch.Tensor | Hidden:
        memory, fixed = self._memory, self._fixed
        kept = (memory.store, memory.rotations, memory.factors)
        with kernels.on(self._device):
            return self._blocks.read(
                tokens, start, places, last, slots.int(), *kept, layers=layers, entered=entered, fixed=fixed
            )

    def _copy(self, moves: Sequence[tuple[int, int]], first: int, end: int, layers: slice = slice(None)) -> None:
        """Copy columns from `first` to `end` between (source, target) places of the store."""
        moves = [(source, to) for source, to in moves if source != to]
        if not moves:
            return
        source, to = torch.tensor(moves, device=self._device).T
        store = self._memory.store
        for kept in (*store.keys[layers], *store.values[layers]):
            kept[to, :, first:end] = kept[source, :, first:end]
