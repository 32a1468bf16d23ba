# SPDX-License-Identifier: Apache-2.0
"""The memory of the static decoder: rows of keys and values, members' factors, and what each row of a batch is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch

from evoalign.engines.transformers.blocks import Blocks, Factors, Store
from evoalign.types import Member, Plan

LEAST = 8
"""The smallest size of a batch."""
Write = Callable[[Plan, Sequence[Member]], None]
"""Puts members' factors into their slots: `Space.writer`."""


def size_for(rows: int, full: int) -> int:
    """The size of a batch that holds so many rows: the least of 2^k and 3 * 2^(k-1), or `full`, the most there are."""
    power = max(LEAST, 1 << (rows - 1).bit_length())
    return min(full, power * 3 // 4 if power > LEAST and rows <= power * 3 // 4 else power)


@dataclass(frozen=True, slots=True)
class Shape:
    """How much memory there is: rows of `room` columns and at most `tokens` new ones, and members' slots."""

    rows: int
    room: int
    tokens: int
    slots: int

    def beside(self, other: Shape) -> Shape:
        """What holds both."""
        return Shape(*(max(a, b) for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Drawn:
    """What else a graph holds on to: how tokens are drawn, and whether with their log-probabilities."""

    temperature: float
    top_p: float
    logprobs: bool


@dataclass(slots=True)
class State:
    """What the rows of a batch are, at addresses that stay: B of them, and C places in the store for their pasts.

    Of rows: the last `token` and its `position`, the `place`, the `member`'s slot or -1, the seed `stream`, how many
    tokens there are (`step`), and whether that is all (`done`); those beyond the batch are `nobody`, at the last place.
    `ids` and `logprobs` [C, tokens + 1] and `length` [C] are of places: how long an answer is that has ended, else 0.
    `most` is how long one may be. `finite` is False once the logits of a row that counts were not numbers.
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
    most: torch.Tensor
    finite: torch.Tensor

    @classmethod
    def of(cls, rows: int, tokens: int, device: torch.device) -> State:
        """For as many rows, and as many tokens of each."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token=zeros(rows), position=zeros(rows), place=zeros(rows), member=zeros(rows, dtype=torch.int32),
            stream=zeros(rows), step=zeros(rows), done=zeros(rows, dtype=torch.bool), ids=zeros(rows + 1, tokens + 1),
            logprobs=zeros(rows + 1, tokens + 1, dtype=torch.float32), length=zeros(rows + 1), most=zeros(),
            finite=zeros(dtype=torch.bool),
        )  # fmt: skip

    def begin(self, tokens: int) -> None:
        """Nobody is there yet, and answers may have so many tokens."""
        self.most.fill_(tokens)
        self.finite.fill_(True)

    def keep(self, rows: Sequence[int]) -> None:
        """These rows come first, in this order."""
        if list(rows) != list(range(len(rows))):
            index = torch.tensor(rows, device=self.place.device)
            for tensor in (self.token, self.position, self.place, self.member, self.stream, self.step, self.done):
                tensor[: len(rows)] = tensor[index]

    def enter(self, first: int, places: Sequence[int], lengths: Sequence[int], slots: Sequence[int],
              streams: Sequence[int]) -> None:  # fmt: skip
        """Rows from `first` on that have read their prompts, of these `lengths`."""
        rows, device = slice(first, first + len(places)), self.place.device
        numbers = torch.tensor([list(places), list(lengths), list(streams), list(slots)]).to(device)
        self.place[rows], self.position[rows], self.stream[rows], self.member[rows] = numbers
        self.step[rows], self.done[rows] = 0, False
        self.length[numbers[0]] = 0

    def nobody(self, first: int, end: int) -> None:
        """Rows that are in a batch for its size alone: as the one before them, but at the last place."""
        rows = slice(first, end)
        self.place[rows], self.done[rows] = len(self.length) - 1, True
        for tensor in (self.token, self.position, self.step, self.member):
            tensor[rows] = tensor[first - 1]


class Made:
    """The memory of a shape, and its graphs; `write` puts members into the slots, where there are members."""

    def __init__(self, shape: Shape, blocks: Blocks, factors: Factors, write: Write | None) -> None:
        self.shape, self.factors, self.write = shape, factors, write
        self.store: Store = blocks.store(shape.rows + 1, shape.room)
        self.rotations = blocks.rotations(shape.room)
        self.state = State.of(shape.rows, shape.tokens, self.rotations.device)
        self.graphs: dict[tuple[int, Drawn], torch.cuda.CUDAGraph] = {}

    def captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of that work; all of a shape share their memory, since one runs at a time."""
        graph, other = torch.cuda.CUDAGraph(), next(iter(self.graphs.values()), None)
        pool = None if other is None else other.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # others may use the device
            work()
        return graph
