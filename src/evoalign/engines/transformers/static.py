# SPDX-License-Identifier: Apache-2.0
"""Decoding with nothing that changes from step to step but numbers: one CUDA graph for each size of a batch.

Each row of a batch has a place in the store, into which its prompt is read; tokens, positions, members and what rows
have said lie on the device, and the host asks only every `EVERY` steps who has ended. Rows that have leave by a new
order of these few numbers, never by a copy of keys and values, and those that wait move in. On a CPU, without graphs,
the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from evoalign import kernels, noise
from evoalign.engines.transformers.blocks import Blocks, Factors
from evoalign.engines.transformers.decode import Completion, Decoder, draw
from evoalign.engines.transformers.fixed import Drawn, Made, Shape, State, size_for
from evoalign.engines.transformers.memory import WRITTEN, columns
from evoalign.engines.transformers.reading import Reader
from evoalign.errors import EvoalignError, NotFiniteError
from evoalign.kernels import population
from evoalign.spaces.base import Master, Space
from evoalign.tokens import stopped, tail_of
from evoalign.types import Layout, Member, Plan, Request, Sampling

EVERY = 8
"""Steps between two looks of the host."""
MOVE_IN = 8
"""Rows that wait move in where one in so many of the places is free, for prompts are read best many at a time."""
FACTORS = 0.25
"""Share of the room that factors of members may take who do not all fit."""


@dataclass(slots=True)
class _Row:
    """A row of a batch on the host: which pair it answers and where, how many `tokens` it has unless it has ended, and
    how many of them were looked through for texts that end it."""

    pair: int
    place: int
    tokens: int = 1
    looked: int = 0
    stopped: bool = False
    """By one of those texts."""
    told: bool = False


@dataclass(frozen=True, slots=True)
class _Served:
    """What members are made of."""

    space: Space
    layout: Layout
    master: Master


class StaticDecoder:
    """Generates as `Decoder` does, whose settings it shares, with a model of which `blocks.obstacle` says nothing."""

    def __init__(self, decoder: Decoder, blocks: Blocks) -> None:
        self._plain, self._blocks, self._device = decoder, blocks, decoder.forward.device
        self._footprint = decoder.footprint
        self._stop = frozenset(decoder.stop.tolist())
        self._served: _Served | None = None
        self._member = 0
        self._made: Made | None = None
        self._turn = object()
        """Of the batch that is being answered: there is memory for one."""

    def begin(self, space: Space, layout: Layout, master: Master) -> str:
        """Make ready for members with adapters. Why that cannot be, in words; empty where it can."""
        self._made = None  # whose factors, before there were members, are none
        names = [t.module for t in layout.tensors]
        if layout.rank > population.MAX_RANK:
            return f"the adapters' rank {layout.rank} is above {population.MAX_RANK}"
        strange = self._blocks.strange(names)
        if strange:
            return f"{strange[0]} is no projection of a layer"
        self._served = _Served(space, layout, master)
        self._member = self._blocks.factor_bytes(names, layout.rank)
        return ""

    def close(self) -> None:
        """Free the memory and the graphs."""
        self._made = self._served = None

    def bare(self, member: Member) -> bool:
        """Whether a member is the served weights alone, without a slot."""
        served = self._served
        return served is None or (member.is_mean and not served.space.has_mean_adapter)

    def fits(self, requests: Sequence[Request], members: int, room: float) -> tuple[int, int]:
        """How many rows and members find room together; rows beyond wait."""
        sampling, longest = requests[0].sampling, max(len(r.prompt_ids) for r in requests)
        shape = Shape(1, columns(longest + sampling.max_tokens), sampling.max_tokens, 0)
        each = self._kept(shape) + self._footprint.logits(greedy=sampling.temperature == 0)
        pairs = len(requests) * (members if requests[0].member is None else 1)
        room -= self._footprint.least(longest) + each  # and a place for nobody
        if pairs * each + members * self._member > room and self._member:
            members = min(members, max(1, int(FACTORS * room / self._member)))
        return max(1, int((room - members * self._member) / each)), members

    def _kept(self, shape: Shape) -> int:
        """Bytes of what stays from one batch to the next, beside the graphs' own."""
        return shape.rows * (self._footprint.cache * shape.room + WRITTEN * shape.tokens) + shape.slots * self._member

    @torch.inference_mode()
    def generate(
        self, asked: Sequence[tuple[int, Request]], serve: tuple[Plan, Sequence[Member]] | None, rows: int,
        room: float = math.inf,
    ) -> Iterator[list[tuple[int, Completion]]]:  # fmt: skip
        """See `Decoder.generate`. At most so many `rows` at once, of `serve`'s members by slot; -1 is none of them."""
        sampling, full = asked[0][1].sampling, min(rows, len(asked))
        drawn = Drawn(sampling.temperature, sampling.top_p, any(r.logprobs for _, r in asked))
        room -= full * self._footprint.logits(greedy=sampling.temperature == 0)
        turn = self._turn = object()
        made = self._ready(asked, serve, full, room)
        spare = room - self._kept(made.shape)
        if self._plain.deterministic:  # what was answered before makes no difference to how many are read at once
            spare = self._footprint.least(max(len(r.prompt_ids) for _, r in asked))
        reader = Reader(
            self._blocks, self._footprint, made, spare, pad=self._plain.pad_id, fixed=self._plain.deterministic
        )
        made.state.begin(sampling.max_tokens)
        batch, size, waiting, said = list[_Row](), 0, 0, list[tuple[int, Completion]]()
        while True:
            going = [i for i, row in enumerate(batch) if not row.told]
            free, left = full - len(going), len(asked) - waiting
            new = min(free, left) if free >= min(left, full // MOVE_IN) or not going else 0
            if new or size_for(len(going), full) < size:
                made.state.keep(going)
                batch = [batch[i] for i in going]
                if new:
                    batch += self._enter(asked, range(waiting, waiting + new), batch, reader, made, drawn)
                    waiting += new
                size = size_for(len(batch), full)
                made.state.nobody(len(batch), size)
            if all(row.told for row in batch):
                break
            steps = min(EVERY, sampling.max_tokens - min(row.tokens for row in batch if not row.told))
            for _ in range(steps):
                self._step(made, size, drawn)
            if said:  # what ended by the last look is dealt with while the device goes on
                yield said
                if self._turn is not turn:
                    raise EvoalignError("a rollout was gone on with after another had begun; take all of one first")
            for row in batch:
                row.tokens = min(sampling.max_tokens, row.tokens + steps)
            said = self._said(made.state, self._look(made.state, batch, sampling), batch, sampling, drawn.logprobs)
        if said:
            yield said

    def _ready(
        self, asked: Sequence[tuple[int, Request]], serve: tuple[Plan, Sequence[Member]] | None, rows: int, room: float
    ) -> Made:
        """Memory for a batch, that of the last one where it fits; with the members' factors."""
        tokens, longest = asked[0][1].sampling.max_tokens, max(len(r.prompt_ids) for _, r in asked)
        slots = 1 if serve is None else max(1, len(serve[1]))
        wanted = Shape(rows, columns(longest + tokens), tokens, slots)
        whole = wanted if self._made is None else self._made.shape.beside(wanted)
        if self._kept(whole) + self._footprint.least(longest) > room:
            whole = wanted
        if self._made is None or self._made.shape != whole:
            self._made = None  # before there is another
            self._made = self._new(whole)
        if serve is not None and self._made.write is not None:
            self._made.write(*serve)
        return self._made

    def _new(self, shape: Shape) -> Made:
        served, model = self._served, self._blocks.model
        if served is None:
            return Made(shape, self._blocks, Factors(model, (), 1, 1, 1.0), None)
        names = [t.module for t in served.layout.tensors]
        factors = Factors(model, names, shape.slots, served.layout.rank, served.space.scaling)
        return Made(shape, self._blocks, factors, served.space.writer(served.layout, served.master, factors.slots()))

    def _enter(
        self, asked: Sequence[tuple[int, Request]], pairs: Sequence[int], batch: Sequence[_Row], reader: Reader,
        made: Made, drawn: Drawn,
    ) -> list[_Row]:  # fmt: skip
        """More rows of the batch, their prompts read and their first tokens drawn."""
        taken = {row.place for row in batch}
        free = (place for place in range(made.shape.rows) if place not in taken)
        new = [_Row(pair, place) for pair, place in zip(pairs, free, strict=False)]
        these, places = [asked[row.pair] for row in new], [row.place for row in new]
        logits = reader.read(these, places)
        made.state.enter(
            len(batch), places, [len(r.prompt_ids) for _, r in these], [slot for slot, _ in these],
            [r.seed for _, r in these],
        )  # fmt: skip
        self._choose(logits, made.state, slice(len(batch), len(batch) + len(new)), drawn)
        return new

    def _step(self, made: Made, size: int, drawn: Drawn) -> None:
        """One more token of the first `size` rows."""
        with kernels.on(self._device):
            if (size, drawn) in made.graphs:
                made.graphs[size, drawn].replay()
                return
            self._compute(made, size, drawn)
            if self._device.type == "cuda":  # kernels are compiled by now and libraries loaded
                made.graphs[size, drawn] = made.captured(lambda: self._compute(made, size, drawn))

    def _compute(self, made: Made, size: int, drawn: Drawn) -> None:
        state, rows = made.state, slice(0, size)
        logits = self._blocks.step(
            state.token[rows], state.position[rows], state.place[rows], state.member[rows], made.store,
            made.rotations, made.factors, fixed=self._plain.deterministic,
        )  # fmt: skip
        state.position[rows].add_(~state.done[rows])
        self._choose(logits, state, rows, drawn)

    def _choose(self, logits: torch.Tensor, state: State, rows: slice, drawn: Drawn) -> None:
        """Draw a token of each row and write it down; of those that are done, where nobody reads it."""
        place, step, done = state.place[rows], state.step[rows], state.done[rows]
        if drawn.temperature == 0:
            token = logits.argmax(-1)
        else:
            sampling = Sampling(1, drawn.temperature, drawn.top_p)
            token = draw(logits, noise.uniforms(self._plain.key, step, state.stream[rows]), sampling)
        own = logits.gather(1, token[:, None])[:, 0].float()
        # Of logits of which one is not a number the highest is none either.
        odd = own.isnan() if drawn.temperature == 0 else logits.isnan().any(-1)
        state.finite.logical_and_(~(odd & ~done).any())
        state.ids[place, step] = token
        if drawn.logprobs:
            state.logprobs[place, step] = own - logits.float().logsumexp(-1)
        state.token[rows] = token
        step.add_(~done)
        last = (token[:, None] == self._plain.stop).any(-1) | (step >= state.most)  # isin of many waits for the device
        ends = last & ~done
        state.length[place] = torch.where(ends, step, state.length[place])
        done.logical_or_(ends)

    def _look(self, state: State, batch: Sequence[_Row], sampling: Sampling) -> dict[int, int]:
        """Of the rows that have ended since the last look how many tokens count. Raises NotFiniteError."""
        place = state.place[: len(batch)]
        length = state.length[place].tolist()
        if not bool(state.finite):
            raise NotFiniteError(
                "the model's logits are not numbers; lower es.sigma (GRPO: grpo.learning_rate), or use model.dtype "
                "bfloat16 or float32"
            )
        if sampling.stop:
            found = self._texts(state, batch, length, sampling.stop)
            if found:
                rows = torch.tensor(list(found), device=self._device)
                state.length[place[rows]] = torch.tensor(list(found.values()), device=self._device)
                state.done[rows] = True
                length = [found.get(i, n) for i, n in enumerate(length)]
        return {i: n for i, (n, row) in enumerate(zip(length, batch, strict=True)) if n and not row.told}

    def _texts(self, state: State, batch: Sequence[_Row], length: Sequence[int], stop: Sequence[str]) -> dict[int, int]:
        """Of rows in whose new tokens a text of `stop` comes up, the tokens up to there."""
        tail = tail_of(stop)
        rows = [i for i, row in enumerate(batch) if not row.told]
        firsts = [max(0, batch[i].looked + 1 - tail) for i in rows]
        ends = [length[i] or batch[i].tokens for i in rows]
        width = max(end - first for first, end in zip(firsts, ends, strict=True))
        where = torch.tensor([[batch[i].place for i in rows], firsts]).to(self._device)
        at = (where[1][:, None] + torch.arange(width, device=self._device)).clamp_(max=state.ids.shape[1] - 1)
        found: dict[int, int] = {}
        known: dict[tuple[int, ...], int] = {}  # members say the same more often than not
        for i, first, end, ids in zip(rows, firsts, ends, state.ids[where[0][:, None], at].tolist(), strict=True):
            row, said = batch[i], ids[: end - first]
            key = (row.looked - first, *said)
            if key not in known:
                known[key] = stopped(self._plain.decode, said, row.looked - first, stop)
            row.looked = end
            row.stopped = known[key] > 0
            if row.stopped:
                found[i] = known[key] + first
        return found

    def _said(
        self, state: State, ended: Mapping[int, int], batch: Sequence[_Row], sampling: Sampling, wants_logprobs: bool
    ) -> list[tuple[int, Completion]]:
        """Completions of the pairs of rows that have ended, by how many tokens each."""
        if not ended:
            return []
        rows, most = [batch[i] for i in ended], max(ended.values())
        places = torch.tensor([row.place for row in rows], device=self._device)
        ids = state.ids[places, :most].tolist()
        logprobs = state.logprobs[places, :most].tolist() if wants_logprobs else [[]] * len(ids)
        found = list[tuple[int, Completion]]()
        for row, count, said, known in zip(rows, ended.values(), ids, logprobs, strict=True):
            row.told = True
            whole = count == sampling.max_tokens and said[count - 1] not in self._stop and not row.stopped
            found.append((row.pair, Completion(said[:count], known[:count], "length" if whole else "stop")))
        return found
