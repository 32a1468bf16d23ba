# SPDX-License-Identifier: Apache-2.0
"""The static decoder: steps over fixed memory, on a GPU one CUDA graph for each batch size.

Prompts are read into places of a store of keys and values. Tokens, positions, members and completions stay on the
device, and the host looks every few steps for rows that have ended (`LOOKS`). Rows leave by reordering these few
numbers per row, without a copy of keys and values, and waiting rows take their places. On a CPU the same steps run
without graphs.

A prompt that begins with what a place still holds, such as the next turn of a conversation, is read from there on. If
`deterministic` it is read whole, so that the bits of a completion do not depend on what was computed before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evoalign import kernels, noise
from evoalign.engines.transformers.blocks import SHIFTED, Blocks, Factors
from evoalign.engines.transformers.decode import Completion, Decoder, draw
from evoalign.engines.transformers.settings import WRITTEN, columns
from evoalign.engines.transformers.static_memory import (
    Begun,
    Draws,
    Held,
    Kept,
    Memory,
    Reader,
    Shape,
    State,
    size_for,
    upload,
)
from evoalign.errors import EvoalignError, NotFiniteError
from evoalign.kernels import population
from evoalign.spaces.base import Master, Space
from evoalign.tokens import stopped, tail_of
from evoalign.types import Layout, Member, Plan, Request, Sampling

LOOKS = {"cpu": (8, 0), "cuda": (4, 1)}
"""Steps between two looks of the host at the state, and how many of them are launched after the look: a GPU computes
these while the host finds the rows that have ended."""
MOVE_IN = 8
"""Waiting rows enter when at least 1 / MOVE_IN of the places is free: prompts are best read in large batches."""
FACTORS = 0.25
"""Share of the room for members' factors when not all members fit."""


@dataclass(slots=True)
class _Row:
    """A row of a batch on the host.

    `pair` is the index of its (slot, request), `begun` a place that holds the beginning of its prompt, `place` its own
    place in the store, `origin` the place in which its beginning is read, `tokens` its length while it is active, and
    `searched` the number of tokens that were searched for stop texts.
    """

    pair: int
    prompt: Kept | None
    """The prompt of a session, which is noted with the completion when it ends."""
    begun: Begun | None
    place: int = -1
    origin: int = -1
    tokens: int = 1
    searched: int = 0
    stopped: bool = False
    """Whether a stop text ended it."""
    reported: bool = False
    """Whether it has ended and its completion has been returned, or is returned next."""


class _Copy:
    """A copy of tensors for the host, which a GPU makes after the work that was launched before."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._made = torch.cuda.Event() if tensors[0].is_cuda else None
        if self._made is not None:
            self._made.record(torch.cuda.current_stream(tensors[0].device))

    def lists(self) -> list[list[Any]]:
        """Wait for the copy and return its numbers."""
        if self._made is not None:
            self._made.synchronize()
        return [tensor.tolist() for tensor in self._tensors]


@dataclass(frozen=True, slots=True)
class _EndedRows:
    """Rows that have ended, their lengths, and a copy of their tokens and of log-probabilities if requested."""

    rows: list[_Row]
    lengths: list[int]
    copy: _Copy


@dataclass(frozen=True, slots=True)
class _Source:
    """The space, layout and mean from which members' factors are computed."""

    space: Space
    layout: Layout
    master: Master


class StaticDecoder:
    """Generates like `Decoder`, with the same settings, for a model that `blocks.obstacle` accepts."""

    def __init__(self, decoder: Decoder, blocks: Blocks) -> None:
        self._plain, self._blocks, self._device = decoder, blocks, decoder.forward.device
        self._footprint = decoder.footprint
        self._stop = frozenset(decoder.stop.tolist())
        self._source: _Source | None = None
        self._member_bytes = 0
        self._memory: Memory | None = None
        self._turn = object()
        """Identifies the current batch: there is memory for one."""

    def begin(self, space: Space, layout: Layout, master: Master) -> str:
        """Prepare for members of a space. Returns why they are not supported, or an empty string."""
        self._memory = self._source = None  # memory without members has no factors
        if space.carrier == "dense":
            names = [t.name for t in layout.tensors]
            size = self._blocks.vector_bytes(names)
            if size is None:
                return "tensors evolve other than gains of norms and biases of q, k and v"
            self._source, self._member_bytes = _Source(space, layout, master), size
            return ""
        names = list(layout.modules)
        if layout.rank > population.MAX_RANK:
            return f"the adapters' rank {layout.rank} is above {population.MAX_RANK}"
        unsupported = self._blocks.unsupported(names)
        if unsupported:
            return f"{unsupported[0]} is no projection of a layer"
        biased = [name for name in names if space.has_bias and not name.endswith(SHIFTED)]
        if biased:
            return f"space {space.name} adds a bias to {biased[0]}"
        self._source = _Source(space, layout, master)
        self._member_bytes = self._blocks.factor_bytes(names, layout.rank, biased=space.has_bias)
        return ""

    def release(self) -> None:
        """Free the memory and the graphs."""
        self._memory = None

    def close(self) -> None:
        """Free the memory, the graphs and the source of factors."""
        self._memory = self._source = None

    def is_plain(self, member: Member) -> bool:
        """Return whether a member is served by the plain weights, without a slot."""
        source = self._source
        return source is None or (member.is_mean and not source.space.has_mean_adapter)

    def fits(self, requests: Sequence[Request], members: int, room: float) -> tuple[int, int]:
        """Return how many rows and members fit together in `room` bytes; further rows wait."""
        sampling, longest = requests[0].sampling, max(len(r.prompt_ids) for r in requests)
        shape = Shape(1, columns(longest + sampling.max_tokens), sampling.max_tokens, 0)
        each = self._bytes_of(shape) + self._footprint.logits(sampling)
        pairs = len(requests) * (members if requests[0].member is None else 1)
        room -= self._footprint.least(longest) + each  # one place is for padding rows
        if pairs * each + members * self._member_bytes > room and self._member_bytes:
            members = min(members, max(1, int(FACTORS * room / self._member_bytes)))
        return max(1, int((room - members * self._member_bytes) / each)), members

    def _bytes_of(self, shape: Shape) -> int:
        """Return the bytes that are kept between batches, without the graphs."""
        row = self._footprint.cache * shape.room + WRITTEN * shape.tokens
        return shape.rows * row + shape.slots * self._member_bytes

    @torch.inference_mode()
    def generate(
        self,
        pairs: Sequence[tuple[int, Request]],
        owners: Sequence[int],
        serve: tuple[Plan, Sequence[Member]] | None,
        rows: int,
        room: float = math.inf,
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Generate like `Decoder.generate`, with at most `rows` rows at once.

        The slot of a pair is a member of `serve`, or -1 for the plain weights; `owners` are the indices of the members.
        """
        sampling, full, fixed = pairs[0][1].sampling, min(rows, len(pairs)), self._plain.deterministic
        draws = Draws(sampling.temperature, sampling.top_p, any(r.logprobs for _, r in pairs))
        logits = self._footprint.logits(sampling)
        most = full if fixed or self._memory is None else max(full, self._memory.shape.rows)
        turn = self._turn = object()
        memory = self._prepare(pairs, serve, full, room - size_for(full, most) * logits)
        state, most = memory.state, full if fixed else memory.shape.rows
        spare = room - size_for(full, most) * logits - self._bytes_of(memory.shape)
        if fixed:  # independent of the memory that earlier batches left
            spare = self._footprint.least(max(len(r.prompt_ids) for _, r in pairs))
        reader = Reader(self._blocks, self._footprint, memory, spare, pad=self._plain.pad_id, fixed=fixed)
        state.begin(sampling.max_tokens)
        prompts = [None if fixed else _kept(r, owner) for (_, r), owner in zip(pairs, owners, strict=True)]
        begun = memory.begun(prompts)
        order = sorted(range(len(pairs)), key=lambda i: i not in begun)  # others must not take their places
        waiting = deque(_Row(i, prompts[i], begun.get(i)) for i in order)
        batch, size, ended = list[_Row](), 0, None
        while True:
            active = [i for i, row in enumerate(batch) if not row.reported]
            free, left = full - len(active), len(waiting)
            new = min(free, left) if free >= min(left, full // MOVE_IN) or not active else 0
            if new or size_for(len(active), most) < size:
                state.keep(active)
                batch = [batch[i] for i in active]
                if new:
                    batch += self._enter(pairs, [waiting.popleft() for _ in range(new)], batch, reader, memory, draws)
                size = size_for(len(batch), most)
                state.pad(len(batch), size)
            if all(row.reported for row in batch):
                break
            left = sampling.max_tokens - min(row.tokens for row in batch if not row.reported)
            every, later = LOOKS[self._device.type]
            steps = min(every, left)
            later = 0 if steps == left or sampling.stop else later
            for _ in range(steps - later):
                self._step(memory, size, draws)
            look = _Copy(state.length[state.place[: len(batch)]])
            for _ in range(later):
                self._step(memory, size, draws)
            if ended is not None:  # handled while the device computes these steps
                yield self._completions(memory, ended, batch, sampling)
                if self._turn is not turn:
                    raise EvoalignError("a rollout was resumed after another had begun; consume one rollout at a time")
            for row in batch:
                row.tokens = min(sampling.max_tokens, row.tokens + steps)
            ended = self._find_ended(state, look, batch, sampling, draws.logprobs)
        if ended is not None:
            yield self._completions(memory, ended, batch, sampling)

    def _prepare(
        self, pairs: Sequence[tuple[int, Request]], serve: tuple[Plan, Sequence[Member]] | None, rows: int, room: float
    ) -> Memory:
        """Return memory for a batch, with the members' factors. Reuses the last batch's memory if it fits."""
        tokens, longest = pairs[0][1].sampling.max_tokens, max(len(r.prompt_ids) for _, r in pairs)
        slots = 1 if serve is None else max(1, len(serve[1]))
        wanted = Shape(rows, columns(longest + tokens), tokens, slots)
        shape = wanted if self._memory is None else self._memory.shape.union(wanted)
        if self._bytes_of(shape) + self._footprint.least(longest) > room:
            shape = wanted
        if self._memory is None or self._memory.shape != shape:
            held = (self._memory.store, self._memory.kept) if self._memory is not None and self._memory.kept else None
            self._memory = None  # the rest is freed before allocating
            self._memory = self._allocate(shape, held)
        self._memory.factors.vectors.reset()
        if serve is not None and self._memory.write is not None:
            self._memory.write(*serve)
        return self._memory

    def _allocate(self, shape: Shape, before: Held | None) -> Memory:
        source, model = self._source, self._blocks.model
        if source is None:
            return Memory(shape, self._blocks, Factors(model, (), 1, 0, 1.0), None, before)
        space, layout = source.space, source.layout
        if space.carrier == "dense":
            factors = Factors(model, (), shape.slots, 0, 1.0, [t.name for t in layout.tensors])
            write = factors.vectors.writer(space, layout, source.master)
            return Memory(shape, self._blocks, factors, write, before)
        factors = Factors(model, list(layout.modules), shape.slots, layout.rank, space.scaling, biased=space.has_bias)
        write = space.writer(layout, source.master, factors.slots())
        return Memory(shape, self._blocks, factors, write, before)

    def _enter(
        self,
        pairs: Sequence[tuple[int, Request]],
        new: list[_Row],
        batch: Sequence[_Row],
        reader: Reader,
        memory: Memory,
        draws: Draws,
    ) -> list[_Row]:
        """Return new rows with their places, prompts read and first tokens drawn. Those that are `begun` come first."""
        at = [row.begun for row in new if row.begun is not None]
        taken = {row.place for row in batch} | {one.place for one in at}
        free = (place for place in range(memory.shape.rows) if place not in taken)
        for row in new:
            row.place = next(free) if row.begun is None else row.begun.place
            memory.kept.pop(row.place, None)
        these, places, count = [pairs[row.pair] for row in new], [row.place for row in new], len(at)
        written = frozenset(places)
        memory.state.part([i for i, row in enumerate(batch) if row.origin in written])
        logits, origins = reader.read_on(these[:count], at) if at else None, [Begun(one.place, 0) for one in at]
        if count < len(new):
            rest, others = reader.read(these[count:], places[count:])
            logits, origins = rest if logits is None else torch.cat((logits, rest)), origins + others
        assert logits is not None
        for row, origin in zip(new, origins, strict=True):
            row.origin = origin.place
        lengths, slots = [len(r.prompt_ids) for _, r in these], [slot for slot, _ in these]
        memory.state.enter(len(batch), places, lengths, slots, [r.seed for _, r in these], origins)
        self._draw(logits, memory.state, slice(len(batch), len(batch) + len(new)), draws)
        return new

    def _step(self, memory: Memory, size: int, draws: Draws) -> None:
        """Generate one more token for the first `size` rows."""
        with kernels.on(self._device):
            if (size, draws) in memory.graphs:
                memory.graphs[size, draws].replay()
                return
            self._compute(memory, size, draws)
            if self._device.type == "cuda":  # after one run all kernels are compiled and libraries loaded
                memory.graphs[size, draws] = memory.capture(lambda: self._compute(memory, size, draws))

    def _compute(self, memory: Memory, size: int, draws: Draws) -> None:
        state, rows, fixed = memory.state, slice(0, size), self._plain.deterministic
        begins = (state.origin[rows], state.begun[rows])
        where = (state.token[rows], state.position[rows], state.place[rows], begins, state.member[rows])
        logits = self._blocks.step(*where, memory.store, memory.rotations, memory.factors, fixed=fixed)
        self._draw(logits, state, rows, draws)

    def _draw(self, logits: torch.Tensor, state: State, rows: slice, draws: Draws) -> None:
        """Draw a token for each row and record it; for rows that are done it is never read."""
        if draws.top_p == 1 and kernels.available(logits.device):
            from evoalign.kernels.sampling import draw as draw_on_gpu

            plain = self._plain
            draw_on_gpu(logits, state, rows.start, plain.stop, plain.key, draws.temperature, draws.logprobs)
            return
        place, step, done = state.place[rows], state.step[rows], state.done[rows]
        if draws.temperature == 0:
            token = logits.argmax(-1)
        else:
            sampling = Sampling(1, draws.temperature, draws.top_p)
            token = draw(logits, noise.uniforms(self._plain.key, step, state.stream[rows]), sampling)
        own = logits.gather(1, token[:, None])[:, 0].float()
        # If any logit is NaN, so is the maximum.
        odd = ~(own if draws.temperature == 0 else logits.amax(-1)).isfinite()
        state.ids[place, step] = token
        if draws.logprobs:
            state.logprobs[place, step] = own - logits.float().logsumexp(-1)
        state.token[rows] = token
        state.position[rows].add_(~done)
        step.add_(~done)
        last = (token[:, None] == self._plain.stop).any(-1) | (step >= state.most)  # torch.isin would synchronise
        ends = (last | odd) & ~done
        state.length[place] = torch.where(ends, step.masked_fill(odd, -1), state.length[place])
        done.logical_or_(ends)

    def _find_ended(
        self, state: State, look: _Copy, batch: Sequence[_Row], sampling: Sampling, logprobs: bool
    ) -> _EndedRows | None:
        """Return the rows that have ended since the last look, or None. Raises NotFiniteError."""
        (length,) = look.lists()
        if min(length) < 0:
            raise NotFiniteError(
                "the model's logits are not finite; lower es.sigma (GRPO: grpo.learning_rate), or set model.dtype to "
                "bfloat16 or float32"
            )
        if sampling.stop:
            found = self._search_stop_texts(state, batch, length, sampling.stop)
            if found:
                rows = torch.tensor(list(found), device=self._device)
                state.length[state.place[rows]] = torch.tensor(list(found.values()), device=self._device)
                state.done[rows] = True
                length = [found.get(i, n) for i, n in enumerate(length)]
        lengths = [(row, n) for row, n in zip(batch, length, strict=True) if n and not row.reported]
        if not lengths:
            return None
        for row, _ in lengths:
            row.reported = True
        places, most = upload([row.place for row, _ in lengths], self._device), max(n for _, n in lengths)
        copy = _Copy(*(t[places, :most] for t in ((state.ids, state.logprobs) if logprobs else (state.ids,))))
        return _EndedRows([row for row, _ in lengths], [n for _, n in lengths], copy)

    def _search_stop_texts(
        self, state: State, batch: Sequence[_Row], length: Sequence[int], stop: Sequence[str]
    ) -> dict[int, int]:
        """Return the length, up to the stop text, of each row with a stop text in its new tokens."""
        tail = tail_of(stop)
        rows = [i for i, row in enumerate(batch) if not row.reported]
        firsts = [max(0, batch[i].searched + 1 - tail) for i in rows]
        ends = [length[i] or batch[i].tokens for i in rows]
        width = max(end - first for first, end in zip(firsts, ends, strict=True))
        where = torch.tensor([[batch[i].place for i in rows], firsts]).to(self._device)
        at = (where[1][:, None] + torch.arange(width, device=self._device)).clamp_(max=state.ids.shape[1] - 1)
        found: dict[int, int] = {}
        known: dict[tuple[int, ...], int] = {}  # many members generate the same tokens
        for i, first, end, ids in zip(rows, firsts, ends, state.ids[where[0][:, None], at].tolist(), strict=True):
            row, new = batch[i], ids[: end - first]
            key = (row.searched - first, *new)
            if key not in known:
                known[key] = stopped(self._plain.decode, new, row.searched - first, stop)
            row.searched = end
            row.stopped = known[key] > 0
            if row.stopped:
                found[i] = known[key] + first
        return found

    def _completions(
        self, memory: Memory, ended: _EndedRows, batch: Sequence[_Row], sampling: Sampling
    ) -> list[tuple[int, Completion]]:
        """Return completions with the index of their pair; note what places hold unless a row of `batch` has them."""
        ids, *scores = ended.copy.lists()
        taken = {row.place for row in batch if not row.reported}
        found = list[tuple[int, Completion]]()
        for row, count, tokens, own in zip(ended.rows, ended.lengths, ids, *(scores or [[[]] * len(ids)]), strict=True):
            if row.prompt is not None and row.place not in taken:
                # A step reads the token that the one before has drawn: the last is not read.
                memory.kept[row.place] = Kept(row.prompt.owner, (*row.prompt.ids, *tokens[: count - 1]))
            whole = count == sampling.max_tokens and tokens[count - 1] not in self._stop and not row.stopped
            found.append((row.pair, Completion(tokens[:count], own[:count], "length" if whole else "stop")))
        return found


def _kept(request: Request, owner: int) -> Kept | None:
    """Return the prompt of a request of a session, and None for others."""
    return None if request.session is None else Kept((request.session, owner), request.prompt_ids)
