# SPDX-License-Identifier: Apache-2.0
"""Decoding with nothing that changes from step to step but numbers: one CUDA graph for each size of a batch.

Each row of a chunk has a row of the store for good, into which its prompt is read; tokens, positions, members
and what rows have said lie on the device, and the host asks only every `EVERY` steps who has ended. Rows that have
leave by a new order of these few numbers, never by a copy of keys and values. On a CPU, without graphs, the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch

from evoalign import kernels, noise
from evoalign.engines.transformers.adapters import Adapters
from evoalign.engines.transformers.blocks import Blocks, Factors, Store
from evoalign.engines.transformers.decode import TAIL_TOKENS, Completion, Decoder, draw
from evoalign.engines.transformers.memory import WRITTEN, columns
from evoalign.engines.transformers.prefill import shared_prefix
from evoalign.errors import ConfigError, EvoalignError, NotFiniteError
from evoalign.kernels import population
from evoalign.types import Request, Sampling

EVERY = 8
"""Steps between two looks of the host."""
LEAST = 8
"""The smallest size of a batch."""
UNREADABLE = "\ufffd"
"""Of a character of which some bytes are not there yet; some tokenizers make it of whole tokens before it."""
PASS = (1024, 32768)
"""Tokens of prompts that go through the layers at once, on a CPU and on a GPU: what bounds the activations."""


def size_for(rows: int) -> int:
    """The least size of a batch that holds so many rows: 2^k or 3 * 2^(k-1)."""
    power = max(LEAST, 1 << (rows - 1).bit_length())
    return power * 3 // 4 if power > LEAST and rows <= power * 3 // 4 else power


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
    """How much memory there is: rows of `room` columns and at most `tokens` new ones, and members' slots."""

    rows: int
    room: int
    tokens: int
    slots: int

    def beside(self, other: _Shape) -> _Shape:
        """What holds both."""
        return _Shape(*(max(a, b) for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What else a graph holds on to: how tokens are drawn, and whether with their log-probabilities."""

    temperature: float
    top_p: float
    logprobs: bool


class _Made:
    """The memory of a shape, and its graphs."""

    def __init__(
        self, shape: _Shape, blocks: Blocks, names: Sequence[str], rank: int, scaling: float, device: torch.device
    ) -> None:
        self.shape = shape
        self.store: Store = blocks.store(shape.rows, shape.room)
        self.rotations = blocks.rotations(shape.room)
        self.factors = Factors(blocks.model, names, shape.slots, rank, scaling)
        self.state = _State.of(shape.rows, shape.tokens, device)
        self.graphs: dict[tuple[int, _Drawn], torch.cuda.CUDAGraph] = {}


class StaticDecoder:
    """Generates as `Decoder` does, whose settings it shares, with a model of which `blocks.obstacle` says nothing."""

    def __init__(self, decoder: Decoder, blocks: Blocks) -> None:
        self._plain, self._blocks, self.forward = decoder, blocks, decoder.forward
        self._footprint = decoder.footprint
        self._names: Sequence[str] = ()
        self._rank, self._scaling, self._member = 1, 1.0, 0
        self._made: _Made | None = None
        self._turn = object()
        """Of the chunk that is being answered: there is memory for one."""

    def begin(self, names: Sequence[str], rank: int, scaling: float) -> str:
        """Make ready for members with adapters on these weights. Why that cannot be, in words; empty where it can."""
        self._names, self._made = names, None  # whose factors, before there were members, are none
        if rank > population.MAX_RANK:
            return f"the adapters' rank {rank} is above {population.MAX_RANK}"
        strange = self._blocks.strange(names)
        if strange:
            return f"{strange[0]} is no projection of a layer"
        self._rank, self._scaling = rank, scaling
        self._member = 2 * self._blocks.factor_bytes(names, rank)  # as the space gives them, and as kernels take them
        return ""

    def close(self) -> None:
        """Free the memory and the graphs."""
        self._made = None

    def rows(self, requests: Sequence[Request], room: float) -> int:
        """See `Decoder.rows`; a member's factors are shared by all that it answers."""
        sampling, longest = requests[0].sampling, max(len(r.prompt_ids) for r in requests)
        shape = _Shape(1, columns(longest + sampling.max_tokens), sampling.max_tokens, 0)
        each = self._kept(shape) + self._footprint.logits(greedy=sampling.temperature == 0)
        each += self._member / (len(requests) if requests[0].member is None else 1)
        return max(1, int((room - self._footprint.least(longest)) / each))

    def _kept(self, shape: _Shape) -> int:
        """Bytes of what stays from one chunk to the next, beside the graphs' own."""
        return shape.rows * (self._footprint.cache * shape.room + WRITTEN * shape.tokens) + shape.slots * self._member

    @torch.inference_mode()
    def generate(
        self, asked: Sequence[tuple[int, Request]], adapters: Adapters | None, room: float = math.inf
    ) -> Iterator[list[tuple[int, Completion]]]:
        """See `Decoder.generate`."""
        sampling = asked[0][1].sampling
        drawn = _Drawn(sampling.temperature, sampling.top_p, any(r.logprobs for _, r in asked))
        logits = len(asked) * self._footprint.logits(greedy=sampling.temperature == 0)
        served = adapters is not None and any(a is not None for a in adapters.factors.values())
        turn = self._turn = object()
        made = self._ready(asked, adapters, room - logits)
        state = made.state
        self._begin(asked, served, state)
        size, places, told, there, looked = len(asked), list(range(len(asked))), set[int](), 1, 0
        said: list[tuple[int, Completion]] = []
        spare = room - logits - self._kept(made.shape)
        self._choose(self._read(asked, made, served, spare), state, size, drawn)
        while True:
            step = min(sampling.max_tokens, (there // EVERY + 1) * EVERY)
            for _ in range(step - there):
                self._step(made, size, drawn)
            if said:  # what ended by the last look is dealt with while the device goes on
                yield said
                if self._turn is not turn:
                    raise EvoalignError("a rollout was gone on with after another had begun; take all of one first")
            length, last = self._look(state, size, looked, step, sampling), step == sampling.max_tokens
            ended = {p: n for p, n in zip(places, length, strict=True) if (n or last) and p not in told}
            told |= ended.keys()
            there = looked = step
            said = self._said(state, ended, step, drawn.logprobs)
            going = [row for row, n in enumerate(length) if not n]
            if last or not going:
                break
            if size_for(len(going)) < size:
                size = size_for(len(going))
                over = [row for row, n in enumerate(length) if n]
                stay = sorted(going + over[: size - len(going)])
                places = [places[row] for row in stay]
                state.order(torch.tensor(stay, device=self.forward.device))
        if said:
            yield said

    def _ready(self, asked: Sequence[tuple[int, Request]], adapters: Adapters | None, room: float) -> _Made:
        """Memory for a chunk, that of the last one where it fits; with the members' factors."""
        tokens = asked[0][1].sampling.max_tokens
        factors = {} if adapters is None else {n: a for n, a in adapters.factors.items() if a is not None}
        strange = {adapter.scaling for adapter in factors.values()} - {self._scaling}
        if strange:
            raise ConfigError(
                f"an adapter's scaling is {strange.pop()} where its space says {self._scaling}; mend it, or set "
                "engine.decoder: library"
            )
        longest = max(len(r.prompt_ids) for _, r in asked)
        wanted = _Shape(len(asked), columns(longest + tokens), tokens, 1 + max(slot for slot, _ in asked))
        whole = wanted if self._made is None else self._made.shape.beside(wanted)
        if self._made is None or self._made.shape != whole:
            if self._kept(whole) + self._footprint.least(longest) > room:
                whole = wanted
            self._made = None  # before there is another
            self._made = _Made(whole, self._blocks, self._names, self._rank, self._scaling, self.forward.device)
        self._made.factors.put(factors)
        return self._made

    def _read(self, asked: Sequence[tuple[int, Request]], made: _Made, served: bool, spare: float) -> torch.Tensor:
        """Prompts into the store: what all begin with once a slot, the rest once a slot and prompt; logits [B, V]."""
        numbers: dict[tuple[int, ...], int] = {}
        of_request = {id(r): numbers.setdefault(r.prompt_ids, len(numbers)) for _, r in asked}
        heads: dict[tuple[int, int], int] = {}
        of_slot: dict[int, int] = {}
        owners = list[int]()
        for row, (slot, request) in enumerate(asked):
            of_slot.setdefault(slot, row)
            owners.append(heads.setdefault((slot, of_request[id(request)]), row))
        prompts = list(numbers)
        shared = shared_prefix(prompts) if len(prompts) > 1 else 0
        if shared:
            begun = [(row, slot, 0) for slot, row in of_slot.items()]
            self._pass(made, begun, [prompts[0][:shared]], 0, served, spare)
            self._copy(made, [(of_slot[slot], row) for (slot, _), row in heads.items()], shared)
        rest = [(row, slot, text) for (slot, text), row in heads.items()]
        logits = self._pass(made, rest, [prompt[shared:] for prompt in prompts], shared, served, spare)
        self._copy(made, list(zip(owners, range(len(asked)), strict=True)), max(map(len, prompts)))
        if len(heads) == len(asked):
            return logits
        place = {row: i for i, (row, _, _) in enumerate(rest)}
        return logits[torch.tensor([place[row] for row in owners], device=logits.device)]

    def _pass(
        self, made: _Made, read: Sequence[tuple[int, int, int]], texts: Sequence[Sequence[int]], start: int,
        served: bool, spare: float,
    ) -> torch.Tensor:  # fmt: skip
        """Logits [B, V] after rows, each (row, slot, text) by number, read so many at a time as there is room for."""
        device, width = self.forward.device, max(map(len, texts))
        most, row = PASS[device.type == "cuda"] // width, self._footprint.prefill(width, start + width)
        row += self._footprint.cache * (start + width) if start else 0  # a layer's, gathered, is less than all layers'
        size = max(1, int(min(most, spare / row)))
        filled = torch.tensor([[*ids, *[self._plain.pad_id] * (width - len(ids))] for ids in texts], device=device)
        last = torch.tensor([len(ids) - 1 for ids in texts], device=device)
        found: list[torch.Tensor] = []
        for first in range(0, len(read), size):
            rows, slots, chosen = torch.tensor(read[first : first + size]).T.to(device)
            members = slots.int() if served else torch.full_like(slots, -1, dtype=torch.int32)
            with kernels.on(device):
                found.append(self._blocks.read(
                    filled[chosen], start, rows, last[chosen], members, made.store, made.rotations, made.factors,
                    fixed=self._plain.deterministic,
                ))  # fmt: skip
        return found[0] if len(found) == 1 else torch.cat(found)

    def _copy(self, made: _Made, moves: Sequence[tuple[int, int]], columns: int) -> None:
        """The first columns of rows of the store to other rows."""
        moves = [(source, to) for source, to in moves if source != to]
        if not moves:
            return
        source, to = torch.tensor(moves, device=self.forward.device).T
        for kept in (*made.store.keys, *made.store.values):
            kept[to, :, :columns] = kept[source, :, :columns]

    def _begin(self, asked: Sequence[tuple[int, Request]], served: bool, state: _State) -> None:
        rows, device = len(asked), self.forward.device
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

    def _step(self, made: _Made, size: int, drawn: _Drawn) -> None:
        """One more token of the first `size` rows."""
        with kernels.on(self.forward.device):
            if (size, drawn) in made.graphs:
                made.graphs[size, drawn].replay()
                return
            self._compute(made, size, drawn)
            if self.forward.device.type == "cuda":  # kernels are compiled by now and libraries loaded
                made.graphs[size, drawn] = self._captured(made, lambda: self._compute(made, size, drawn))

    @staticmethod
    def _captured(made: _Made, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of that work; all of a shape share their memory, since one runs at a time."""
        graph, other = torch.cuda.CUDAGraph(), next(iter(made.graphs.values()), None)
        pool = None if other is None else other.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # others may use the device
            work()
        return graph

    def _compute(self, made: _Made, size: int, drawn: _Drawn) -> None:
        state = made.state
        logits = self._blocks.step(
            state.token[:size], state.position[:size], state.place[:size], state.member[:size], made.store,
            made.rotations, made.factors, fixed=self._plain.deterministic,
        )  # fmt: skip
        state.position[:size].add_(1)
        self._choose(logits, state, size, drawn)

    def _choose(self, logits: torch.Tensor, state: _State, size: int, drawn: _Drawn) -> None:
        """Draw a token of each row, and write it down."""
        place, step = state.place[:size], state.step[:size]
        if drawn.temperature == 0:
            token = logits.argmax(-1)
        else:
            sampling = Sampling(1, drawn.temperature, drawn.top_p)
            token = draw(logits, noise.uniforms(self._plain.key, step, state.stream[:size]), sampling)
        own = logits.gather(1, token[:, None])[:, 0].float()
        # Of logits of which one is not a number the highest is none either.
        state.finite.logical_and_(~(own if drawn.temperature == 0 else logits).isnan().any())
        state.ids[place, step] = token
        if drawn.logprobs:
            state.logprobs[place, step] = own - logits.float().logsumexp(-1)
        state.token[:size] = token
        step.add_(1)
        ends = (token[:, None] == self._plain.stop).any(-1) & ~state.done[:size]  # isin of many waits for the device
        state.length[place] = torch.where(ends, step, state.length[place])
        state.done[:size].logical_or_(ends)

    def _look(self, state: _State, size: int, looked: int, step: int, sampling: Sampling) -> list[int]:
        """Of each row how many tokens count, 0 where it goes on. Raises NotFiniteError."""
        place = state.place[:size]
        length = state.length[place].tolist()
        if not bool(state.finite):
            raise NotFiniteError(
                "the model's logits are not numbers; lower es.sigma (GRPO: grpo.learning_rate), or use model.dtype "
                "bfloat16 or float32"
            )
        if sampling.stop:
            tail = TAIL_TOKENS * (1 + max(map(len, sampling.stop)))  # and one character, of which a slice may lose it
            first = max(0, looked + 1 - tail)
            for row, ids in enumerate(state.ids[place, first:step].tolist()):
                end = length[row] or step
                if end > looked:
                    found = self._stopped(ids[: end - first], looked - first, tail, sampling.stop)
                    length[row] = found + first if found else length[row]
            state.length[place] = torch.tensor(length, device=place.device)
            state.done[:size] = state.length[place] > 0
        return length

    def _stopped(self, ids: Sequence[int], looked: int, tail: int, stop: Sequence[str]) -> int:
        """Tokens up to the first after `looked` with which a text of `stop` is there; 0 where none is."""
        decode = self._plain.decode
        whole = decode(ids)
        if not any(s in whole for s in stop) and UNREADABLE not in whole:
            return 0
        for count in range(looked + 1, len(ids) + 1):
            if any(s in decode(ids[max(0, count - tail) : count]) for s in stop):
                return count
        return 0

    @staticmethod
    def _said(state: _State, ended: Mapping[int, int], step: int, wants_logprobs: bool) -> list[tuple[int, Completion]]:
        """Completions of places, of as many tokens each, 0 for all so far."""
        if not ended:
            return []
        rows = torch.tensor(list(ended), device=state.ids.device)
        ids = state.ids[rows, :step].tolist()
        logprobs = state.logprobs[rows, :step].tolist() if wants_logprobs else [[]] * len(ids)
        return [
            (place, Completion(said[: length or step], known[: length or step], "stop" if length else "length"))
            for (place, length), said, known in zip(ended.items(), ids, logprobs, strict=True)
        ]
