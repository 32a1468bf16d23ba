# SPDX-License-Identifier: Apache-2.0
"""The mean of an engine: kept in float32, moved by updates, hashed, probed, saved, put back, and served rounded.

`Master` keeps what of it lies in this process: whole tensors (`whole`), or the parts of them that a worker of several
has. What several workers say of their parts is put together by `hash_of`, `joined` and `gathered`. An engine that keeps
the mean where it serves derives from `KeepsMean` and has but to serve.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from evoalign import noise
from evoalign.engines.base import sampled_places
from evoalign.engines.hash import part_sum, weights_hash_of_sums
from evoalign.errors import EvoalignError, ModelError
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import MeanPart, Space
from evoalign.types import Layout, Member, Plan, Slices, Update

Sums: TypeAlias = Sequence[tuple[str, tuple[int, ...], int]]
"""Of each part: its tensor's name and whole shape, and its share of the hash."""
Probed: TypeAlias = Sequence[tuple[int, torch.Tensor, torch.Tensor]]
"""Of each tensor probed: its place in the order, which of the numbers are here, and they."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part `slices` of the tensor `name` of `shape`, seen where it is served.

    Of a part that several devices hold, one `counts` in sums over all of them.
    """

    name: str
    shape: tuple[int, ...]
    slices: Slices
    tensor: torch.Tensor
    counts: bool


def whole(tensors: Mapping[str, torch.Tensor]) -> list[Shard]:
    """Tensors that lie here in one piece."""
    return [Shard(name, tuple(t.shape), _all(t.shape), t, True) for name, t in tensors.items()]


@dataclass(slots=True)
class Part:
    """A part of the mean: `master` and `start` in float32; `served`, where the model has it apart from the master."""

    name: str
    shape: tuple[int, ...]
    slices: Slices
    master: torch.Tensor
    served: torch.Tensor | None
    start: torch.Tensor | None
    counts: bool
    shared: bool = False
    """Whether the model serves the master itself."""


class Master:
    """The mean of a space, as far as it lies in this process, from the served weights `shards` as training starts.

    `host` keeps the mean of weights on a GPU in pinned host memory. `first` says whether this process, of several,
    counts what all of them keep whole: tensors beside the model.
    """

    def __init__(
        self,
        space: Space,
        layout: Layout,
        optimizer: Optimizer | None,
        keep_start: bool,
        shards: Iterable[Shard],
        device: torch.device,
        *,
        host: bool = False,
        first: bool = True,
    ) -> None:
        self.space, self.layout, self.optimizer, self.device = space, layout, optimizer, device
        self._host = host
        moving = {t.name for t in layout.tensors}
        self.parts = list(self._parts(shards, first))
        self.moving = [p for p in self.parts if p.name in moving]
        for part in self.moving if keep_start else ():
            # Of the kind alone: the device may be `cuda`, and a tensor's is `cuda:0`.
            here = part.master.device.type == device.type
            part.start = part.master.clone() if here else _pinned(part.master.shape).copy_(part.master)
        self._by_name = {p.name: p.master for p in self.parts}
        away = any(p.master.device.type != device.type for p in self.parts)
        mean = [MeanPart(p.name, p.slices, p.master, p.start, p.served) for p in self.moving]
        self._move = None if optimizer is not None or away else space.mover(layout, mean)

    def _parts(self, shards: Iterable[Shard], first: bool) -> Iterator[Part]:
        """The model's weights that evolve, or what the space lays beside them: small, so that it is kept whole."""
        if not self.space.evolves_model:
            for t in (*self.layout.tensors, *self.layout.frozen):
                master = self.space.start(self.layout, t.name, self.device)
                yield Part(t.name, t.shape, _all(t.shape), master, None, None, first)
            return
        for s in shards:
            if s.name in self.layout.by_name:
                # Served in float32 and never perturbed in place: its own master.
                shared = s.tensor.dtype == torch.float32 and self.space.carrier == "adapter"
                master = s.tensor if shared else self._copy(s.tensor)
                yield Part(s.name, s.shape, s.slices, master, None if shared else s.tensor, None, s.counts, shared)

    def _copy(self, served: torch.Tensor) -> torch.Tensor:
        if self._host and served.is_cuda:
            return _pinned(served.shape).copy_(served)
        return served.to(torch.float32, copy=True)

    def __getitem__(self, name: str) -> torch.Tensor:
        """One tensor of the mean, float32, where it lies; for a worker of several, its last part of it."""
        return self._by_name[name]

    @property
    def bytes(self) -> int:
        """What the mean takes beside the served weights, with the starting weights."""
        kept = [t for p in self.parts for t in (None if p.shared else p.master, p.start) if t is not None]
        return sum(t.numel() * t.element_size() for t in kept)

    def apply(self, update: Update) -> None:
        """Move the mean and serve it: served weights equal round(master)."""
        ordered = update.summation != "library"
        if self._move is not None and ordered:
            self._move(update)
            return
        for part in self.moving:
            for here, slices in self._blocks(part, whole=ordered):
                self._accumulate(part, here, slices, update)

    def _accumulate(self, part: Part, here: Slices, slices: Slices, update: Update) -> None:
        master, start = part.master[here], None if part.start is None else part.start[here]
        served = None if part.served is None else part.served[here]
        away = served is not None and master.device != served.device
        on_device = master.to(self.device, non_blocking=True) if away else master
        start = start if start is None or not away else start.to(self.device, non_blocking=True)
        self.space.accumulate(self.layout, on_device, part.name, slices, update, start, self.optimizer, served=served)
        if away:
            master.copy_(on_device)

    def _blocks(self, part: Part, *, whole: bool = True) -> Iterator[tuple[Slices, Slices]]:
        """Pieces of a part, as they lie in it and in the whole tensor.

        An optimizer with state takes it whole, and so does an update without temporaries, unless `whole` is False. Of a
        mean in host memory small ones, since each is on the device for a moment.
        """
        here = part.master.device.type == self.device.type
        if self.optimizer is not None or (whole and here and self.space.fused(self.device)):
            yield _all(part.master.shape), part.slices
            return
        for here in noise.row_blocks(part.master.shape):
            moved = zip(here, part.slices, strict=True)
            yield here, tuple(slice(h.start + s.start, h.stop + s.start) for h, s in moved)

    def write(self, plan: Plan, member: Member | None) -> None:
        """Write a dense member over the served weights, straight from the mean; None puts the mean back."""
        for part in self.moving:
            if part.served is None:
                continue
            for here, slices in self._blocks(part):
                served = part.served[here]
                master = part.master[here].to(served.device, non_blocking=True)
                if member is None:
                    served.copy_(master)
                else:
                    self.space.perturbed(self.layout, part.name, master, plan, member, slices, served)

    def sums(self) -> Sums:
        """Of each part that counts its share of the hash; see `hash_of`."""
        found = [(p.name, p.shape, self._sum(p)) for p in self.parts if p.counts]
        return [(name, shape, int(total)) for name, shape, total in found]

    def _sum(self, part: Part) -> torch.Tensor | int:
        """A mean in host memory is read block by block where it is fast to sum."""
        if part.master.device.type == self.device.type:
            return part_sum(part.master, part.shape, part.slices)
        blocks = self._blocks(part)
        return sum(int(part_sum(part.master[here].to(self.device), part.shape, at)) for here, at in blocks)

    def parts_of(self, name: str) -> list[tuple[Slices, torch.Tensor]]:
        """The parts of one tensor of the mean that count here, on the CPU; see `joined`."""
        return [(p.slices, p.master.detach().to("cpu", copy=True)) for p in self.parts if p.name == name and p.counts]

    def probe(self, count: int) -> Probed:
        """Of the numbers at `sampled_places` those that count here; see `gathered`."""
        found: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for order, (name, places) in enumerate(sampled_places(self.layout, count)):
            for part in self.parts:
                if part.name == name and part.counts:
                    inside, local = _inside(places, part)
                    found.append((order, inside, part.master.flatten()[local.to(part.master.device)].to("cpu")))
        return found

    def optimizer_state(self) -> list[tuple[str, torch.Tensor]]:
        """The optimizer's slots, on the CPU."""
        state = self.optimizer.state() if self.optimizer is not None else ()
        return [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in state]

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Put one whole tensor of the mean back and serve it."""
        for part in self.parts:
            if part.name == name:
                part.master.copy_(tensor[part.slices] if tensor.dim() else tensor)
                if part.served is not None:
                    part.served.copy_(part.master)

    def load_optimizer(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put an optimizer's slots back."""
        if self.optimizer is not None:
            self.optimizer.load({name: tensor.to(self.device) for name, tensor in state.items()})


class KeepsMean:
    """The half of `evoalign.engines.base.Engine` that is the mean, for an engine that keeps it in this process.

    `start` sets `mean`; whoever asks before that is told so.
    """

    _mean: Master | None = None

    @property
    def mean(self) -> Master:
        """What `start` made. Raises EvoalignError before that."""
        if self._mean is None:
            raise EvoalignError("the engine has no space yet: call start first, or ask for the mean alone")
        return self._mean

    @mean.setter
    def mean(self, mean: Master) -> None:
        self._mean = mean

    def apply(self, update: Update) -> None:
        """Move the mean and serve it: served weights equal round(master)."""
        self.mean.apply(update)

    def fingerprint(self) -> str:
        """`weights_hash` of the mean."""
        return hash_of([self.mean.sums()])

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The mean, on the CPU."""
        for tensor in (*self.mean.layout.tensors, *self.mean.layout.frozen):
            yield tensor.name, joined(tensor.shape, [self.mean.parts_of(tensor.name)])

    def probe_weights(self, count: int) -> torch.Tensor:
        """The mean at fixed places, gathered where it lies."""
        return gathered(self.mean.layout, count, [self.mean.probe(count)])

    sample = probe_weights
    """Its former name."""

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Momentum's or Adam's slots, on the CPU."""
        yield from self.mean.optimizer_state()

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        """Put a mean back. Raises ModelError where names or shapes differ, and then changes nothing."""
        check_state(self.mean.layout, state)
        for name, tensor in state.items():
            self.mean.put(name, tensor)
        self.mean.load_optimizer(optimizer or {})

    def close(self) -> None:
        """Free the mean. An engine frees its model, too."""
        self._mean = None


def check_state(layout: Layout, state: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError where a state is not of this layout."""
    shapes = {t.name: tuple(t.shape) for t in (*layout.tensors, *layout.frozen)}
    if set(state) != set(shapes):
        odd = sorted(set(state) ^ set(shapes))[0]
        raise ModelError(f"the saved mean does not fit this run: {odd} is in one and not in the other")
    for name, tensor in state.items():
        if tuple(tensor.shape) != shapes[name]:
            raise ModelError(f"the saved {name} is {tuple(tensor.shape)}, not {shapes[name]}")


def hash_of(workers: Iterable[Sums]) -> str:
    """`weights_hash` of tensors whose parts lie on several workers, or in several pieces on one."""
    total: dict[tuple[str, tuple[int, ...]], int] = {}
    for sums in workers:
        for name, shape, part in sums:
            total[name, tuple(shape)] = total.get((name, tuple(shape)), 0) + part
    return weights_hash_of_sums((name, shape, number) for (name, shape), number in total.items())


def joined(shape: Sequence[int], workers: Iterable[Sequence[tuple[Slices, torch.Tensor]]]) -> torch.Tensor:
    """One tensor of the mean, float32 on the CPU, from its parts on all workers."""
    tensor = torch.empty(tuple(shape), dtype=torch.float32)
    for parts in workers:
        for slices, part in parts:
            tensor[slices] = part
    return tensor


def gathered(layout: Layout, count: int, workers: Iterable[Probed]) -> torch.Tensor:
    """float32 [<= count]: the mean at `sampled_places`, from what all workers probed."""
    found = [torch.empty(len(places)) for _, places in sampled_places(layout, count)]
    for probed in workers:
        for order, inside, values in probed:
            found[order][inside] = values
    return torch.cat(found)


def _all(shape: Sequence[int]) -> Slices:
    return tuple(slice(0, n) for n in shape)


def _inside(places: torch.Tensor, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the row-major `places` of a whole tensor lie in a part, and where in it."""
    if math.prod(part.master.shape) == math.prod(part.shape):
        return torch.arange(len(places)), places
    inside, local = torch.ones_like(places, dtype=torch.bool), torch.zeros_like(places)
    rest, stride = places, 1
    for size, held in zip(reversed(part.shape), reversed(part.slices), strict=True):
        index, rest = rest % size, rest // size
        inside &= (index >= held.start) & (index < held.stop)
        local += (index - held.start) * stride
        stride *= held.stop - held.start
    where = inside.nonzero()[:, 0]
    return where, local[where]


def _pinned(shape: Sequence[int]) -> torch.Tensor:
    """float32 host memory that the device reads at full speed. torch's own way rounds sizes up to a power of two."""
    tensor = torch.empty(tuple(shape), dtype=torch.float32)
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(tensor.data_ptr(), 4 * tensor.numel(), 0)) == 0:  # else it is only slower
        weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr())
    return tensor
