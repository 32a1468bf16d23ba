# SPDX-License-Identifier: Apache-2.0
"""The mean of an engine, in float32: moved by updates, hashed, sampled, saved, loaded, and served rounded.

`Master` keeps the part of the mean in this process: whole tensors (`whole`), or one worker's shards. `hash_of`,
`joined` and `gathered` combine the results of several workers. An engine that keeps the mean in its own process derives
from `KeepsMean` and implements only the serving.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from evoalign import noise
from evoalign.engines.base import EngineDefaults, check_started, sampled_places
from evoalign.engines.hash import summer, tensor_sum, weights_hash_of_sums
from evoalign.errors import ModelError
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import MeanPart, Space
from evoalign.spaces.dense import DenseSlots, dense_writer
from evoalign.types import Layout, Member, Plan, Slices, Update

Sums: TypeAlias = Sequence[tuple[str, tuple[int, ...], int]]
"""Tensor name, whole shape and share of the hash, per part."""
Probed: TypeAlias = Sequence[tuple[int, torch.Tensor, torch.Tensor]]
"""Position of the tensor in the order, indices of the sampled numbers in this process, and their values, per part."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The served part `slices` of the tensor `name`, whose whole shape is `shape`.

    If several devices hold the same part, `counts` is true on one of them, so that sums include the part once.
    """

    name: str
    shape: tuple[int, ...]
    slices: Slices
    tensor: torch.Tensor
    counts: bool


def whole(tensors: Mapping[str, torch.Tensor]) -> list[Shard]:
    """Return unsharded tensors as shards."""
    return [Shard(name, tuple(t.shape), _all(t.shape), t, True) for name, t in tensors.items()]


@dataclass(slots=True)
class Part:
    """A part of the mean: `master` and `start` in float32; `served` is None if the model serves the master itself."""

    name: str
    shape: tuple[int, ...]
    slices: Slices
    master: torch.Tensor
    served: torch.Tensor | None
    start: torch.Tensor | None
    counts: bool
    shared: bool = False
    """Whether the served weight and the master are the same tensor."""


class Master:
    """The part of a space's mean in this process, copied from the served weights `shards` when training starts.

    `host` keeps the mean of weights on a GPU in pinned host memory. `first` is true in one of several processes, which
    counts the tensors that all of them keep whole: those that are not the model's own, such as LoRA factors.
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
        # That of the space may be a copy of `optimizer`, where arguments are pickled one by one.
        self.space, self.layout, self.optimizer, self.device = space, layout, space.optimizer or optimizer, device
        self._host = host
        moving = {t.name for t in layout.tensors}
        self.parts = list(self._parts(shards, first))
        self.moving = [p for p in self.parts if p.name in moving]
        for part in self.moving if keep_start else ():
            # Compare types: `device` may be `cuda` and the tensor's `cuda:0`.
            here = part.master.device.type == device.type
            part.start = part.master.clone() if here else _pinned(part.master.shape).copy_(part.master)
        self._by_name: dict[str, list[Part]] = {}
        for part in self.parts:
            self._by_name.setdefault(part.name, []).append(part)
        self._sampled: dict[int, list[tuple[Part, int, torch.Tensor, torch.Tensor]]] = {}
        """Parts by the argument of `probe`, with the tensor's position and the places in the sample and in the part."""
        away = any(p.master.device.type != device.type for p in self.parts)
        mean = [MeanPart(p.name, p.slices, p.master, p.start, p.served) for p in self.moving]
        self._move = None if self.optimizer is not None or away else space.mover(layout, mean)
        dense = () if away or space.carrier == "adapter" else self.moving
        slots = [DenseSlots(p.name, p.slices, p.master, p.served[None]) for p in dense if p.served is not None]
        self._write = dense_writer(space, layout, slots)
        counted = [(p.master, p.shape, p.slices) for p in self.parts if p.counts]
        self._summed = None if away else summer(counted)

    def _parts(self, shards: Iterable[Shard], first: bool) -> Iterator[Part]:
        """Yield the model's weights that evolve, or the space's own tensors, which are small and kept whole."""
        if not self.space.evolves_model:
            for t in (*self.layout.tensors, *self.layout.frozen):
                master = self.space.start(self.layout, t.name, self.device)
                yield Part(t.name, t.shape, _all(t.shape), master, None, None, first)
            return
        for s in shards:
            if s.name in self.layout.by_name:
                # A weight served in float32 and never perturbed in place is its own master.
                shared = s.tensor.dtype == torch.float32 and self.space.carrier == "adapter"
                master = s.tensor if shared else self._copy(s.tensor)
                yield Part(s.name, s.shape, s.slices, master, None if shared else s.tensor, None, s.counts, shared)

    def _copy(self, served: torch.Tensor) -> torch.Tensor:
        if self._host and served.is_cuda:
            return _pinned(served.shape).copy_(served)
        return served.to(torch.float32, copy=True)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one tensor of the mean, float32, on its device; on a sharded worker, its last part of the tensor."""
        return self._by_name[name][-1].master

    @property
    def bytes(self) -> int:
        """Bytes of the mean and the starting weights, without the served weights."""
        kept = [t for p in self.parts for t in (None if p.shared else p.master, p.start) if t is not None]
        return sum(t.numel() * t.element_size() for t in kept)

    def apply(self, update: Update) -> None:
        """Move the mean and serve it, so that served weights equal round(master)."""
        ordered = update.summation != "library"
        if self._move is not None and ordered:
            self._move(update)
            return
        for part in self.moving:
            away = part.served is not None and part.master.device != part.served.device
            for here, slices in self._blocks(part, whole=ordered):
                master, start = part.master[here], None if part.start is None else part.start[here]
                served = None if part.served is None else part.served[here]
                if away:
                    start = start if start is None else start.to(self.device, non_blocking=True)
                moved = master.to(self.device, non_blocking=True) if away else master
                self.space.accumulate(
                    self.layout, moved, part.name, slices, update, start, self.optimizer, served=served
                )
                if away:
                    master.copy_(moved)

    def _blocks(self, part: Part, *, whole: bool = True) -> Iterator[tuple[Slices, Slices]]:
        """Yield the slices of each block of a part: within the part, and within the whole tensor.

        A part is one block if an optimizer keeps state, or if the update needs no temporaries and `whole` is true. A
        mean in host memory has small blocks, because each is copied to the device.
        """
        here = part.master.device.type == self.device.type
        if self.optimizer is not None or (whole and here and self.space.fused(self.device)):
            yield _all(part.master.shape), part.slices
            return
        for here in noise.row_blocks(part.master.shape):
            moved = zip(here, part.slices, strict=True)
            yield here, tuple(slice(h.start + s.start, h.stop + s.start) for h, s in moved)

    def write(self, plan: Plan, member: Member | None) -> None:
        """Write a dense member over the served weights, computed from the mean; None restores the mean."""
        if member is not None and self._write is not None:
            self._write(plan, (member,))
            return
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
        """Return the share of the hash of each part that counts; see `hash_of`."""
        counted = [p for p in self.parts if p.counts]
        totals = map(self._sum, counted) if self._summed is None else self._summed()
        return [(p.name, p.shape, total) for p, total in zip(counted, totals, strict=True)]

    def _sum(self, part: Part) -> int:
        """Return the sum of a mean in host memory, block by block on the device."""
        return sum(tensor_sum(part.master[here].to(self.device), part.shape, at) for here, at in self._blocks(part))

    def parts_of(self, name: str) -> list[tuple[Slices, torch.Tensor]]:
        """Return the parts of one tensor that count in this process, copied to the CPU; see `joined`."""
        return [(p.slices, _on_host(p.master.detach())) for p in self._by_name.get(name, ()) if p.counts]

    def probe(self, count: int) -> Probed:
        """Return the numbers at `sampled_places` that count in this process; see `gathered`."""
        if count not in self._sampled:
            places = {name: (order, at) for order, (name, at) in enumerate(sampled_places(self.layout, count))}
            self._sampled[count] = [
                (part, places[part.name][0], inside, local.to(part.master.device))
                for part in self.parts
                if part.counts and part.name in places
                for inside, local in [_inside(places[part.name][1], part)]
            ]
        found = self._sampled[count]
        if not found:
            return []
        # One copy from the device: one for each of hundreds of tensors takes ten times as long.
        values = torch.cat([torch.take(part.master, local).to(self.device) for part, _, _, local in found]).to("cpu")
        split = values.split([len(local) for *_, local in found])
        return [(order, inside, own) for (_, order, inside, _), own in zip(found, split, strict=True)]

    def optimizer_state(self) -> list[tuple[str, torch.Tensor]]:
        """Return the optimizer's slots, copied to the CPU."""
        state = self.optimizer.state() if self.optimizer is not None else ()
        return [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in state]

    def copy_state(self, mean: dict[str, torch.Tensor], slots: dict[str, torch.Tensor]) -> None:
        """Copy whole tensors of the mean and the optimizer's slots into host memory that is kept between calls."""
        order = (*self.layout.tensors, *self.layout.frozen)
        _copy_into(mean, ((t.name, self[t.name]) for t in order))
        _copy_into(slots, self.optimizer.state() if self.optimizer is not None else ())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Load one whole tensor of the mean and serve it."""
        for part in self._by_name.get(name, ()):
            part.master.copy_(tensor[part.slices] if tensor.dim() else tensor)
            if part.served is not None:
                part.served.copy_(part.master)

    def load_optimizer(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the optimizer's slots."""
        if self.optimizer is not None:
            self.optimizer.load({name: tensor.to(self.device) for name, tensor in state.items()})


class MeanMethods(EngineDefaults):
    """The methods of `Engine` that concern the mean, over the `Master` of one or several workers."""

    def _mean_layout(self) -> Layout:
        """Return the mean's layout. Raises EvoalignError before `start`."""
        raise NotImplementedError

    def _on_mean(self, method: str, *arguments: object) -> list[Any]:
        """Return the result of a method of `Master`, of each worker."""
        raise NotImplementedError

    def apply(self, update: Update) -> None:
        """Move the mean and serve it, so that served weights equal round(master)."""
        self._on_mean("apply", update)

    def fingerprint(self) -> str:
        """Return the `weights_hash` of the mean."""
        return hash_of(self._on_mean("sums"))

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the mean, on the CPU."""
        layout = self._mean_layout()
        for tensor in (*layout.tensors, *layout.frozen):
            yield tensor.name, joined(tensor.shape, self._on_mean("parts_of", tensor.name))

    def probe_weights(self, count: int) -> torch.Tensor:
        """Return the mean at fixed places."""
        return gathered(self._mean_layout(), count, self._on_mean("probe", count))

    sample = probe_weights
    """The former name of `probe_weights`."""

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the optimizer's slots, on the CPU. They are the same on all workers."""
        yield from self._on_mean("optimizer_state")[0]

    def load(self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor] | None = None) -> None:
        """Load a mean. If names or shapes differ, raises ModelError and changes nothing."""
        check_state(self._mean_layout(), state)
        for name, tensor in state.items():
            self._on_mean("put", name, tensor)
        self._on_mean("load_optimizer", dict(optimizer or {}))


class KeepsMean(MeanMethods):
    """Base of an engine that keeps the mean in its own process.

    The engine's `start` sets `mean`. Reading `mean` before that raises EvoalignError.
    """

    _mean: Master | None = None

    @property
    def mean(self) -> Master:
        """The mean that `start` created. Raises EvoalignError before `start`."""
        check_started(self._mean is not None)
        assert self._mean is not None
        return self._mean

    @mean.setter
    def mean(self, mean: Master) -> None:
        self._mean = mean

    def _mean_layout(self) -> Layout:
        return self.mean.layout

    def _on_mean(self, method: str, *arguments: object) -> list[Any]:
        return [getattr(self.mean, method)(*arguments)]

    def apply(self, update: Update) -> None:
        """Move the mean and serve it, so that served weights equal round(master)."""
        self.mean.apply(update)

    def copy_state(self, mean: dict[str, torch.Tensor], slots: dict[str, torch.Tensor]) -> None:
        """Copy `state` and `optimizer_state` over what `mean` and `slots` hold; the first call allocates it."""
        self.mean.copy_state(mean, slots)

    def close(self) -> None:
        """Free the mean. An engine that overrides this also frees its model."""
        self._mean = None


def check_state(layout: Layout, state: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError if a saved state does not have the names and shapes of this layout."""
    shapes = {t.name: tuple(t.shape) for t in (*layout.tensors, *layout.frozen)}
    if set(state) != set(shapes):
        odd = sorted(set(state) ^ set(shapes))[0]
        raise ModelError(f"the saved mean does not fit this run: only one of the two has the tensor {odd}")
    for name, tensor in state.items():
        if tuple(tensor.shape) != shapes[name]:
            raise ModelError(f"the saved {name} is {tuple(tensor.shape)}, not {shapes[name]}")


def hash_of(workers: Iterable[Sums]) -> str:
    """Return `weights_hash` of tensors that are sharded across workers, or within one worker."""
    total: dict[tuple[str, tuple[int, ...]], int] = {}
    for sums in workers:
        for name, shape, part in sums:
            total[name, tuple(shape)] = total.get((name, tuple(shape)), 0) + part
    return weights_hash_of_sums((name, shape, number) for (name, shape), number in total.items())


def joined(shape: Sequence[int], workers: Iterable[Sequence[tuple[Slices, torch.Tensor]]]) -> torch.Tensor:
    """Join one tensor of the mean, float32 on the CPU, from its parts on all workers."""
    parts = [part for of_worker in workers for part in of_worker]
    if len(parts) == 1 and tuple(parts[0][1].shape) == tuple(shape):
        return parts[0][1]
    tensor = torch.empty(tuple(shape), dtype=torch.float32)
    for slices, part in parts:
        tensor[slices] = part
    return tensor


def gathered(layout: Layout, count: int, workers: Iterable[Probed]) -> torch.Tensor:
    """Return float32 [<= count]: the mean at `sampled_places`, from the `probe` of all workers."""
    places, found = sampled_places(layout, count), dict[int, torch.Tensor]()
    for probed in workers:
        for order, inside, values in probed:
            wanted = len(places[order][1])
            if len(values) == wanted:
                found[order] = values
            else:
                found.setdefault(order, torch.empty(wanted))[inside] = values
    return torch.cat([found[order] for order in range(len(places))])


def _all(shape: Sequence[int]) -> Slices:
    return tuple(slice(0, n) for n in shape)


def _inside(places: torch.Tensor, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of those row-major `places` of a whole tensor that are in a part, and their places there."""
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


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory. A copy from a GPU is staged in page-locked memory: 5 GB take 0.4 s instead of 4."""
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor).clone()


def _copy_into(kept: dict[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy tensors into those of the same names; the first call allocates them, which takes longer than the copies."""
    for name, tensor in tensors:
        if name not in kept:
            kept[name] = _pinned(tensor.shape) if tensor.is_cuda else torch.empty_like(tensor)
        kept[name].copy_(tensor.detach(), non_blocking=True)


def _pinned(shape: Sequence[int]) -> torch.Tensor:
    """Return page-locked float32 host memory. torch's `pin_memory` would round the size up to a power of two."""
    tensor = torch.empty(tuple(shape), dtype=torch.float32)
    runtime: Any = torch.cuda.cudart()
    # If this fails, copies are only slower.
    if int(runtime.cudaHostRegister(tensor.data_ptr(), 4 * tensor.numel(), 0)) == 0:
        weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr())
    return tensor
