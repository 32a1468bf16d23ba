# SPDX-License-Identifier: Apache-2.0
"""What happens where the weights are: vLLM's workers, with the mean, the members and the updates of ES added.

Nothing but plans, updates and, for checkpoints, the mean itself passes between the driver and a worker: each worker
regenerates the noise of its own parts. Methods that the driver calls begin with `es_`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from evoalign import noise
from evoalign.engines.base import sampled_places
from evoalign.engines.hash import tensor_sum
from evoalign.engines.specs import mean_abs
from evoalign.engines.vllm import population
from evoalign.engines.vllm.shards import Shard, shards
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import MeanPart, Slots, Space
from evoalign.types import Layout, Member, Plan, Slices, Update

SETTINGS = "evoalign"
"""Where the driver's settings lie in vLLM's `additional_config`."""


@dataclass(slots=True)
class Part:
    """A part of the mean that this worker keeps: `master` and `start` in float32, `served` as the model has it."""

    name: str
    shape: tuple[int, ...]
    slices: Slices
    master: torch.Tensor
    served: torch.Tensor | None
    start: torch.Tensor | None
    counts: bool


class EvolvingWorker:
    """Mixed into vLLM's workers below. All `es_` methods but `es_means` need `es_start` first."""

    vllm_config: Any
    model_runner: Any
    device: torch.device
    rank: int
    _parts: list[Part]
    _shards: list[Shard]
    _slots: Mapping[str, population.Slot]
    _places: Sequence[Slots]
    _write: Callable[[Plan, Sequence[Member]], None]
    _move: Callable[[Update], None] | None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's own, with the population path put in before the model is made and after it is filled."""
        wanted = self.vllm_config.additional_config[SETTINGS]
        with population.installed(**wanted), _plain_weights():
            super().load_model(*args, **kwargs)  # type: ignore[misc]
            self._model = self.model_runner.get_model()
            self._form, self._why = population.attach(self._model, self.model_runner)
        self._multiplied = 1.0 if self._form == "stock" else wanted["scaling"]
        self._shards = shards(self._model)

    @torch.inference_mode()
    def es_means(self) -> list[tuple[str, tuple[int, ...], int, float]]:
        """Of each part that counts: its tensor's name and shape, its numbers, and the mean of |W| over them."""
        return [(s.name, s.shape, s.tensor.numel(), mean_abs(s.tensor)) for s in self._shards if s.counts]

    @torch.inference_mode()
    def es_start(
        self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool, host: bool, slots: int
    ) -> dict[str, Any]:
        """Make the mean and, for adapters, the members' slots; says what there is."""
        self._space, self._layout, self._optimizer, self._host = space, layout, optimizer, host
        self._parts = list(self._first(keep_start))
        self._by_name = {p.name: p.master for p in self._parts}
        self._modules = list(dict.fromkeys(t.module for t in layout.tensors))
        if slots:
            population.register(self.model_runner.lora_manager, slots)
            self._slots = population.stacked(self._model)
            self._places = [self._place(m) for m in self._modules if m in self._slots]
            self._write = space.writer(layout, self._by_name.__getitem__, self._places)
        away = any(p.master.device.type != self.device.type for p in self._parts)
        self._move = None if optimizer is not None or away else space.mover(layout, self._moving())
        kept = [t for p in self._parts for t in (p.master, p.start) if t is not None and t is not p.served]
        return {
            "device": str(self.device),
            "bytes": sum(t.numel() * t.element_size() for t in kept),
            "sums": [(s.name, s.shape, tensor_sum(s.tensor, s.shape, s.slices)) for s in self._shards if s.counts],
            "form": self._form,
            "why": self._why,
            "missing": [m for m in self._modules if slots and m not in self._slots],
        }

    def _first(self, keep_start: bool) -> Iterator[Part]:
        """The mean as training starts: the model's weights, or what the space lays beside them."""
        moving = {t.name for t in self._layout.tensors}
        for name, shape, slices, served, counts in self._evolved():
            master = self._master_of(name, served)
            start = _like(master) if keep_start and name in moving else None
            yield Part(name, shape, slices, master, served, start, counts)

    def _evolved(self) -> Iterator[tuple[str, tuple[int, ...], Slices, torch.Tensor | None, bool]]:
        if self._space.evolves_model:
            for s in self._shards:
                if s.name in self._layout.by_name:
                    yield s.name, s.shape, s.slices, s.tensor, s.counts
            return
        for t in (*self._layout.tensors, *self._layout.frozen):  # small, so every worker keeps them whole
            yield t.name, t.shape, tuple(slice(0, n) for n in t.shape), None, self.rank == 0

    def _master_of(self, name: str, served: torch.Tensor | None) -> torch.Tensor:
        if served is None:
            return self._space.start(self._layout, name, self.device)
        if served.dtype == torch.float32 and self._space.carrier == "adapter":
            return served  # served in float32 and never perturbed in place: its own master
        if self._host and served.is_cuda:
            return _pinned(served.shape).copy_(served)
        return served.to(torch.float32, copy=True)

    def _place(self, module: str) -> Slots:
        """The members' slots of one weight, without what pads them."""
        slot, rank = self._slots[module], self._layout.rank
        return Slots(module, (slot.rows, slot.columns), slot.a[:, 0, :rank], slot.b[:, 0, :, :rank])

    def _moving(self) -> list[MeanPart]:
        """The parts of the mean that updates move."""
        moving = {t.name for t in self._layout.tensors}
        return [
            MeanPart(p.name, p.slices, p.master, p.start, None if p.served is p.master else p.served)
            for p in self._parts
            if p.name in moving
        ]

    @torch.inference_mode()
    def es_put(self, plan: Plan, members: Sequence[Member]) -> None:
        """Write the members' factors into slots 0, 1, ..., in place: no file, no weights through the driver."""
        self._write(plan, members)
        fold = self._layout.scaling / self._multiplied
        if fold != 1:  # stock kernels multiply by nothing; B is rounded once more, unless this is a power of two
            for place in self._places:
                place.b[: len(members)].mul_(fold)

    @torch.inference_mode()
    def es_write(self, plan: Plan, member: Member | None) -> None:
        """Write a dense member over the served weights, straight from the mean; None puts the mean back."""
        moving = {t.name for t in self._layout.tensors}
        for part in self._parts:
            if part.name in moving and part.served is not None:
                for here, slices in self._blocks(part):
                    served = part.served[here]
                    master = part.master[here].to(served.device, non_blocking=True)
                    if member is None:
                        served.copy_(master)
                    else:
                        self._space.perturbed(self._layout, part.name, master, plan, member, slices, served)

    @torch.inference_mode()
    def es_apply(self, update: Update) -> None:
        """Move this worker's parts of the mean and serve them."""
        if self._move is not None:
            self._move(update)
            return
        moving = {t.name for t in self._layout.tensors}
        for part in self._parts:
            if part.name in moving:
                for here, slices in self._blocks(part):
                    self._accumulate(part, here, slices, update)

    def _accumulate(self, part: Part, here: Slices, slices: Slices, update: Update) -> None:
        master, start = part.master[here], None if part.start is None else part.start[here]
        served = None if part.served is None or part.served is part.master else part.served[here]
        away = served is not None and master.device != served.device
        on_device = master.to(self.device, non_blocking=True) if away else master
        start = start if start is None or not away else start.to(self.device, non_blocking=True)
        self._space.accumulate(
            self._layout, on_device, part.name, slices, update, start, self._optimizer, served=served
        )
        if away:
            master.copy_(on_device)

    def _blocks(self, part: Part) -> Iterator[tuple[Slices, Slices]]:
        """Pieces of a part, as they lie in it and in the whole tensor: the same as the in-process engine takes.

        Of a mean in host memory small ones, since each is on the device for a moment.
        """
        here = part.master.device.type == self.device.type
        if self._optimizer is not None or (here and self._space.fused(self.device)):
            yield tuple(slice(0, n) for n in part.master.shape), part.slices
            return
        for here in noise.row_blocks(part.master.shape):
            moved = zip(here, part.slices, strict=True)
            yield here, tuple(slice(h.start + s.start, h.stop + s.start) for h, s in moved)

    @torch.inference_mode()
    def es_sums(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Of each part that counts: its tensor's name and shape, and its share of the hash."""
        return [(p.name, p.shape, self._sum(p)) for p in self._parts if p.counts]

    def _sum(self, part: Part) -> int:
        """A mean in host memory is read block by block where it is fast to sum."""
        if part.master.device.type == self.device.type:
            return tensor_sum(part.master, part.shape, part.slices)
        blocks = self._blocks(part)
        return sum(tensor_sum(part.master[here].to(self.device), part.shape, slices) for here, slices in blocks)

    @torch.inference_mode()
    def es_state(self, name: str) -> list[tuple[Slices, torch.Tensor]]:
        """The parts of one tensor of the mean that count here, on the CPU."""
        return [(p.slices, p.master.to("cpu", copy=True)) for p in self._parts if p.name == name and p.counts]

    @torch.inference_mode()
    def es_optimizer_state(self) -> list[tuple[str, torch.Tensor]]:
        """Momentum's or Adam's slots, on the CPU."""
        state = self._optimizer.state() if self._optimizer is not None else ()
        return [(name, tensor.to("cpu", copy=True)) for name, tensor in state]

    @torch.inference_mode()
    def es_load(self, name: str, tensor: torch.Tensor) -> None:
        """Put one tensor of the mean back and serve it."""
        for part in self._parts:
            if part.name == name:
                part.master.copy_(tensor[part.slices] if tensor.dim() else tensor)
                if part.served is not None and part.served is not part.master:
                    part.served.copy_(part.master)

    @torch.inference_mode()
    def es_load_optimizer(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put an optimizer's slots back."""
        if self._optimizer is not None:
            self._optimizer.load({name: tensor.to(self.device) for name, tensor in state.items()})

    @torch.inference_mode()
    def es_sample(self, count: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Of the numbers at `sampled_places` that count here: the tensor's place in the order, which ones, and they."""
        found: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for order, (name, places) in enumerate(sampled_places(self._layout, count)):
            for part in self._parts:
                if part.name == name and part.counts:
                    inside, local = _inside(places, part)
                    values = part.master.flatten()[local.to(part.master.device)].to("cpu")
                    found.append((order, inside, values))
        return found

    def es_synchronize(self) -> None:
        """Wait for the device, so that a clock on the host tells what has been done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _inside(places: torch.Tensor, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the row-major `places` of a whole tensor lie in a part, and where in it."""
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


def _like(master: torch.Tensor) -> torch.Tensor:
    """A copy where the master lies."""
    return master.clone() if master.is_cuda or not torch.cuda.is_available() else _pinned(master.shape).copy_(master)


@contextmanager
def _plain_weights() -> Generator[None, None, None]:
    """On a CPU vLLM packs each matrix for its own product and drops the weight; ES has to see and move it."""
    if not current_platform.is_cpu():
        yield
        return
    import vllm.model_executor.layers.utils as layers

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    own, layers.dispatch_cpu_unquantized_gemm = layers.dispatch_cpu_unquantized_gemm, plain
    try:
        yield
    finally:  # another engine of this process may want vLLM as it is
        layers.dispatch_cpu_unquantized_gemm = own


class GpuWorker(EvolvingWorker, Worker):
    """vLLM's worker of one GPU."""
