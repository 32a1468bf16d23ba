# SPDX-License-Identifier: Apache-2.0
"""Decoding with nothing that changes from step to step but numbers: one CUDA graph for each size of a batch.

Prompts are read as by `Decoder`. Then each row of a chunk has a row of the store for good; tokens, positions, members
and what rows have said lie on the device, and the host asks only every `EVERY` steps who has ended. Rows that have
leave by a new order of these few numbers, never by a copy of keys and values. On a CPU, without graphs, the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evoalign import noise
from evoalign.engines.transformers.adapters import Adapters
from evoalign.engines.transformers.blocks import Blocks, Factors, Store
from evoalign.engines.transformers.cache import RoomCache
from evoalign.engines.transformers.decode import TAIL_TOKENS, Completion, Decoder, draw
from evoalign.engines.transformers.prefill import Prefill
from evoalign.errors import NotFiniteError
from evoalign.kernels import population
from evoalign.types import Request, Sampling

EVERY = 8
"""Steps between two looks of the host."""
LEAST = 8
"""The smallest size of a batch."""
COLUMNS = 64
"""Columns of the store come in so many, so that prompts of another length find graphs that fit."""


def size_for(rows: int) -> int:
    """The least size of a batch that holds so many rows: 2^k or 3 * 2^(k-1)."""
    power = max(LEAST, 1 << (rows - 1).bit_length())
    return power * 3 // 4 if LEAST < power and rows <= power * 3 // 4 else power


@dataclass(slots=True)
class _State:
    """What rows of a batch are, at addresses that stay; rows beyond those of the moment are left over.

    `place` is the row of the chunk, which is also that of the store; `ids` and `logprobs` [C, max_tokens] and `length`
    [C] are of places. `finite` is False once a row's logits were not numbers.
    """

    token: torch.Tensor
    position: torch.Tensor
    place: torch.Tensor
    member: torch.Tensor
    stream: torch.Tensor
    step: torch.Tensor
    done: torch.Tensor
    ids: torch.Tensor
    logprobs: torch.Tensor
    length: torch.Tensor
    finite: torch.Tensor

    @classmethod
    def of(cls, rows: int, tokens: int, device: torch.device) -> _State:
        """For as many rows, and as many tokens of each."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token=zeros(rows), position=zeros(rows), place=zeros(rows), member=zeros(rows, dtype=torch.int32),
            stream=zeros(rows), step=zeros(rows), done=zeros(rows, dtype=torch.bool), ids=zeros(rows, tokens),
            logprobs=zeros(rows, tokens, dtype=torch.float32), length=zeros(rows),
            finite=torch.ones((), dtype=torch.bool, device=device),
        )  # fmt: skip

    def order(self, rows: torch.Tensor) -> None:
        """Put these rows first, in this order."""
        for tensor in (self.token, self.position, self.place, self.member, self.stream, self.step, self.done):
            tensor[: len(rows)] = tensor[rows]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What graphs hold on to."""

    rows: int
    room: int
    tokens: int
    slots: int
    rank: int
    scaling: float
    sampling: Sampling
    logprobs: bool


class _Made:
    """The memory of a shape, and its graphs."""

    def __init__(self, shape: _Shape, blocks: Blocks, names: Sequence[str], device: torch.device) -> None:
        self.shape = shape
        self.store: Store = blocks.store(shape.rows, shape.room)
        self.rotations = blocks.rotations(shape.room)
        self.factors = Factors(blocks.model, names, shape.slots, shape.rank)
        self.factors.scaling = shape.scaling
        self.state = _State.of(shape.rows, shape.tokens, device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def fits(self, wanted: _Shape) -> bool:
        """Whether a chunk finds room here: rows, columns, tokens and slots may be fewer."""
        own, few = self.shape, ("rows", "room", "tokens", "slots")
        same = all(getattr(own, n) == getattr(wanted, n) for n in ("rank", "scaling", "sampling", "logprobs"))
        return same and all(getattr(own, n) >= getattr(wanted, n) for n in few)


class StaticDecoder:
    """Generates as `Decoder` does, whose settings it shares, with a model of which `blocks.obstacle` says nothing.

    `names` are the weights on which members have adapters.
    """

    def __init__(self, decoder: Decoder, blocks: Blocks) -> None:
        self._plain, self._blocks, self.forward = decoder, blocks, decoder.forward
        self.footprint = decoder.footprint
        self.names: Sequence[str] = ()
        self._made: _Made | None = None
        self._pool: Any = None

    def obstacle(self, adapters: Adapters | None) -> str:
        """Why members cannot be served this way, in words; empty where they can."""
        if adapters is None:
            return ""
        factors = [a for a in adapters.factors.values() if a is not None]
        if len({a.scaling for a in factors}) > 1:
            return "adapters have different scalings"
        if max((a.b.shape[2] for a in factors), default=1) > population.MAX_RANK:
            return f"adapters of a rank above {population.MAX_RANK}"
        return ""

    def close(self) -> None:
        """Free the memory and the graphs."""
        self._made = self._pool = None

    @torch.inference_mode()
    def generate(
        self, asked: Sequence[tuple[int, Request]], adapters: Adapters | None, spare: float = math.inf
    ) -> Iterator[tuple[int, Completion]]:
        """See `Decoder.generate`."""
        sampling, wants_logprobs = asked[0][1].sampling, any(r.logprobs for _, r in asked)
        if adapters is not None and self.obstacle(adapters):
            yield from self._plain.generate(asked, adapters, spare)
            return
        made = self._ready(asked, adapters, wants_logprobs)
        state = made.state
        logits = self._read(asked, adapters, made, spare)
        self._begin(asked, adapters, state)
        size = rows = len(asked)
        self._choose(logits, state, rows, made.shape)
        del logits
        told, looked = [False] * rows, 0
        for step in range(1, sampling.max_tokens + 1):
            last = step == sampling.max_tokens
            if last or step % EVERY == 0 or step == 1:
                done, ids, length = self._look(state, size, asked, looked, step, sampling)
                looked = step
                for row, place in enumerate(state.place[:size].tolist()):
                    if (done[row] or last) and not told[place]:
                        told[place] = True
                        yield place, self._completion(state, ids[row], length[row], step, wants_logprobs, place)
                left = size - sum(done)
                if last or not left:
                    break
                if size_for(left) < size:
                    size = size_for(left)
                    state.order(state.done[: len(done)].argsort(stable=True)[:size].sort().values)
            self._step(made, size)

    def _ready(self, asked: Sequence[tuple[int, Request]], adapters: Adapters | None, logprobs: bool) -> _Made:
        """Memory for a chunk, that of the last one where it fits; with the members' factors."""
        sampling = asked[0][1].sampling
        factors = {} if adapters is None else {n: a for n, a in adapters.factors.items() if a is not None}
        room = max(len(r.prompt_ids) for _, r in asked) + sampling.max_tokens
        some = next(iter(factors.values()), None)
        wanted = _Shape(
            rows=len(asked), room=-(-room // COLUMNS) * COLUMNS, tokens=sampling.max_tokens,
            slots=1 + max(slot for slot, _ in asked), rank=1 if some is None else some.b.shape[2],
            scaling=1.0 if some is None else some.scaling, sampling=sampling, logprobs=logprobs,
        )  # fmt: skip
        if self._made is None or not self._made.fits(wanted):
            self._made = None  # before there is another
            self._made = _Made(wanted, self._blocks, self.names, self.forward.device)
        self._made.factors.put(factors)
        return self._made

    def _read(
        self, asked: Sequence[tuple[int, Request]], adapters: Adapters | None, made: _Made, spare: float
    ) -> torch.Tensor:
        """Prompts into the store; logits [B, V] after each."""
        room = max(len(r.prompt_ids) for _, r in asked)
        cache = RoomCache(self.forward.layers, room)
        found = Prefill(self.forward, self.footprint, cache, adapters, spare).run(asked, room, self._plain.pad_id)
        rows, columns = len(asked), None
        if found.mask is not None:  # what counts comes first
            columns = (~found.mask[:, :room].bool()).argsort(dim=1, stable=True)[:, None, :, None]
        for layer, keys, values in zip(cache.layers, made.store.keys, made.store.values, strict=True):
            for new, kept in ((layer.keys, keys), (layer.values, values)):
                assert new is not None
                part = new[:, :, :room]
                if columns is not None:
                    part = part.gather(2, columns.expand(-1, part.shape[1], -1, part.shape[3]))
                kept[:rows, :, :room] = part
            layer.keys = layer.values = None
        return found.logits

    def _begin(self, asked: Sequence[tuple[int, Request]], adapters: Adapters | None, state: _State) -> None:
        rows, device = len(asked), self.forward.device
        served = adapters is not None and any(a is not None for a in adapters.factors.values())
        for tensor, numbers in (
            (state.position, [len(r.prompt_ids) for _, r in asked]),
            (state.place, range(rows)),
            (state.member, [slot if served else -1 for slot, _ in asked]),
            (state.stream, [r.seed for _, r in asked]),
        ):
            tensor[:rows] = torch.tensor(list(numbers), dtype=tensor.dtype, device=device)
        for tensor in (state.step, state.done, state.length):
            tensor.zero_()
        state.finite.fill_(True)

    def _step(self, made: _Made, size: int) -> None:
        """One more token of the first `size` rows."""
        if self.forward.device.type != "cuda":
            self._compute(made, size)
        elif size in made.graphs:
            made.graphs[size].replay()
        else:
            self._compute(made, size)  # kernels are compiled and libraries load; then what comes next is written down
            made.graphs[size] = self._captured(lambda: self._compute(made, size))

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of that work; all share their memory, since one runs at a time."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        self._pool = graph.pool()
        return graph

    def _compute(self, made: _Made, size: int) -> None:
        state = made.state
        logits = self._blocks.step(
            state.token[:size], state.position[:size], state.place[:size], state.member[:size], made.store,
            made.rotations, made.factors, fixed=self._plain.deterministic,
        )  # fmt: skip
        state.position[:size].add_(1)
        self._choose(logits, state, size, made.shape)

    def _choose(self, logits: torch.Tensor, state: _State, size: int, shape: _Shape) -> None:
        """Draw a token of each row, and write it down."""
        place, step, sampling = state.place[:size], state.step[:size], shape.sampling
        if sampling.temperature == 0:
            token = logits.argmax(-1)
        else:
            token = draw(logits, noise.uniforms(self._plain.key, step, state.stream[:size]), sampling)
        own = logits.gather(1, token[:, None])[:, 0].float()
        # Of logits of which one is not a number the highest is none either.
        state.finite.logical_and_(~(own if sampling.temperature == 0 else logits).isnan().any())
        state.ids[place, step] = token
        if shape.logprobs:
            state.logprobs[place, step] = own - logits.float().logsumexp(-1)
        state.token[:size] = token
        step.add_(1)
        ends = torch.isin(token, self._plain.stop) & ~state.done[:size]
        state.length[place] = torch.where(ends, step, state.length[place])
        state.done[:size].logical_or_(ends)

    def _look(
        self, state: _State, size: int, asked: Sequence[tuple[int, Request]], looked: int, step: int, sampling: Sampling
    ) -> tuple[list[bool], list[list[int]], list[int]]:
        """Of each row: whether it has ended, its tokens so far, and how many of them count, 0 where it goes on."""
        place = state.place[:size]
        ids, length = state.ids[place, :step].tolist(), state.length[place].tolist()
        if not bool(state.finite):
            raise NotFiniteError(
                "the model's logits are not numbers; lower es.sigma (GRPO: grpo.learning_rate), or use model.dtype "
                "bfloat16 or float32"
            )
        if sampling.stop:
            for row, said in enumerate(ids):
                if not length[row] or length[row] > looked:
                    length[row] = self._stopped(said, looked, length[row] or step, sampling.stop) or length[row]
            state.length[place] = torch.tensor(length, device=place.device)
            state.done[:size] = state.length[place] > 0
        return [n > 0 for n in length], ids, length

    def _stopped(self, ids: list[int], looked: int, end: int, stop: Sequence[str]) -> int:
        """Tokens up to the first after `looked` with which a text of `stop` is there; 0 where none is."""
        tail = TAIL_TOKENS * (1 + max(map(len, stop)))
        decode = self._plain.decode
        if not any(s in decode(ids[max(0, looked + 1 - tail) : end]) for s in stop):
            return 0
        for count in range(looked + 1, end + 1):
            if any(s in decode(ids[max(0, count - tail) : count]) for s in stop):
                return count
        return 0

    @staticmethod
    def _completion(state: _State, ids: list[int], length: int, step: int, logprobs: bool, place: int) -> Completion:
        count = length or step
        said = state.logprobs[place, :count].tolist() if logprobs else []
        return Completion(ids[:count], said, "stop" if length else "length")
