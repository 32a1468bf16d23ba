# SPDX-License-Identifier: Apache-2.0
"""What happens where the weights are: vLLM's workers, with the mean, the members and the updates of ES added.

Nothing but plans, updates and, for checkpoints, the mean itself passes between the driver and a worker: each worker
regenerates the noise of its own parts. Methods that the driver calls begin with `es_`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from evoalign.engines.hash import tensor_sum
from evoalign.engines.master import Master, Probed, Shard, Sums
from evoalign.engines.specs import mean_abs
from evoalign.engines.vllm import population
from evoalign.engines.vllm.insides import replace
from evoalign.engines.vllm.shards import shards
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Slots, Space
from evoalign.types import Layout, Member, Plan, Slices, Update

SETTINGS = "evoalign"
"""Where the driver's settings lie in vLLM's `additional_config`."""


class EvolvingWorker:
    """Mixed into vLLM's workers below. All `es_` methods but `es_means` need `es_start` first."""

    vllm_config: Any
    model_runner: Any
    device: torch.device
    rank: int
    _mean: Master
    _shards: list[Shard]
    _slots: Mapping[str, population.Slot]
    _places: Sequence[Slots]
    _write: Callable[[Plan, Sequence[Member]], None]

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
        self._mean = Master(
            space, layout, optimizer, keep_start, self._shards, self.device, host=host, first=self.rank == 0
        )
        self._modules = list(dict.fromkeys(t.module for t in layout.tensors))
        if slots:
            population.register(self.model_runner.lora_manager, slots)
            self._slots = population.stacked(self._model)
            self._places = [self._place(m) for m in self._modules if m in self._slots]
            self._write = space.writer(layout, self._mean.__getitem__, self._places)
        return {
            "device": str(self.device),
            "bytes": self._mean.bytes,
            "sums": [(s.name, s.shape, tensor_sum(s.tensor, s.shape, s.slices)) for s in self._shards if s.counts],
            "form": self._form,
            "why": self._why,
            "missing": [m for m in self._modules if slots and m not in self._slots],
        }

    def _place(self, module: str) -> Slots:
        """The members' slots of one weight, without what pads them."""
        slot, rank = self._slots[module], self._mean.layout.rank
        return Slots(module, (slot.rows, slot.columns), slot.a[:, 0, :rank], slot.b[:, 0, :, :rank])

    @torch.inference_mode()
    def es_put(self, plan: Plan, members: Sequence[Member]) -> None:
        """Write the members' factors into slots 0, 1, ..., in place: no file, no weights through the driver."""
        self._write(plan, members)
        fold = self._mean.layout.scaling / self._multiplied
        if fold != 1:  # stock kernels multiply by nothing; B is rounded once more, unless this is a power of two
            for place in self._places:
                place.b[: len(members)].mul_(fold)

    @torch.inference_mode()
    def es_write(self, plan: Plan, member: Member | None) -> None:
        """Write a dense member over the served weights; None puts the mean back."""
        self._mean.write(plan, member)

    @torch.inference_mode()
    def es_apply(self, update: Update) -> None:
        """Move this worker's parts of the mean and serve them."""
        self._mean.apply(update)

    @torch.inference_mode()
    def es_sums(self) -> Sums:
        """Of each part that counts: its tensor's name and shape, and its share of the hash."""
        return self._mean.sums()

    @torch.inference_mode()
    def es_state(self, name: str) -> list[tuple[Slices, torch.Tensor]]:
        """The parts of one tensor of the mean that count here, on the CPU."""
        return self._mean.parts_of(name)

    @torch.inference_mode()
    def es_optimizer_state(self) -> list[tuple[str, torch.Tensor]]:
        """Momentum's or Adam's slots, on the CPU."""
        return self._mean.optimizer_state()

    @torch.inference_mode()
    def es_load(self, name: str, tensor: torch.Tensor) -> None:
        """Put one tensor of the mean back and serve it."""
        self._mean.put(name, tensor)

    @torch.inference_mode()
    def es_load_optimizer(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put an optimizer's slots back."""
        self._mean.load_optimizer(state)

    @torch.inference_mode()
    def es_probe(self, count: int) -> Probed:
        """Of the numbers at `sampled_places` those that count here."""
        return self._mean.probe(count)

    def es_synchronize(self) -> None:
        """Wait for the device, so that a clock on the host tells what has been done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def _plain_weights() -> Generator[None, None, None]:
    """On a CPU vLLM packs each matrix for its own product and drops the weight; ES has to see and move it."""
    if not current_platform.is_cpu():
        yield
        return
    import vllm.model_executor.layers.utils as layers

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    own = layers.dispatch_cpu_unquantized_gemm
    replace(layers, "dispatch_cpu_unquantized_gemm", plain)
    try:
        yield
    finally:  # another engine of this process may want vLLM as it is
        layers.dispatch_cpu_unquantized_gemm = own


class GpuWorker(EvolvingWorker, Worker):
    """vLLM's worker of one GPU."""
