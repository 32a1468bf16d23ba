# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker with the mean, the members and the updates of ES.

Only plans, updates and, for checkpoints, the mean itself pass between the driver and a worker: each worker regenerates
the noise of its parts. Methods that the driver calls begin with `es_`.

Noise, hashes and checkpoints address whole Hugging Face tensors. vLLM fuses q, k, v and gate, up into one matrix each,
pads the vocabulary and, under tensor parallelism, keeps rows or columns of a matrix on each GPU. So each part of the
model is a `Shard`: a view of the served weight with its place in its Hugging Face tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform

from evoalign.engines.hash import tensor_sum
from evoalign.engines.master import Master, Shard
from evoalign.engines.specs import mean_abs
from evoalign.engines.vllm import deep, population
from evoalign.engines.vllm.insides import replace
from evoalign.optimizer import Optimizer
from evoalign.spaces.base import Slots, Space
from evoalign.types import Layout, Member, Plan

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

SETTINGS = "evoalign"
"""Key of the driver's settings in vLLM's `additional_config`."""


class EvolvingWorker(Worker):
    """A worker of vLLM. All `es_` methods but `es_means` need `es_start` first."""

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
        """Load the model as vLLM does, with the layers of a population installed."""
        settings = population.Settings(**self.vllm_config.additional_config[SETTINGS])
        with population.installed(settings), _plain_weights():
            super().load_model(*args, **kwargs)
            self._model = self.model_runner.get_model()
            if self.vllm_config.lora_config is not None:
                population.register(self.model_runner)
            population.wrap_aliases(self._model)
            self._form, self._why = deep.attach(self._model, self.model_runner, settings)
        self._multiplied = 1.0 if self._form == "stock" else settings.scaling
        self._shards = shards(self._model)

    @torch.inference_mode()
    def es_means(self) -> list[tuple[str, tuple[int, ...], int, float]]:
        """Return the tensor name, tensor shape, size and mean |W| of each part that counts."""
        return [(s.name, s.shape, s.tensor.numel(), mean_abs(s.tensor)) for s in self._shards if s.counts]

    @torch.inference_mode()
    def es_start(
        self, space: Space, layout: Layout, optimizer: Optimizer | None, keep_start: bool, host: bool
    ) -> dict[str, Any]:
        """Create the mean and, for adapters, find the members' slots."""
        self._mean = Master(
            space, layout, optimizer, keep_start, self._shards, self.device, host=host, first=self.rank == 0
        )
        modules, missing = list(layout.modules), list[str]()
        if self.vllm_config.lora_config is not None:
            self._slots = population.stacked(self._model)
            missing = [m for m in modules if m not in self._slots]
            self._places = [self._place(m) for m in modules if m in self._slots]
            self._write = space.writer(layout, self._mean.__getitem__, self._places)
        return {
            "device": str(self.device),
            "bytes": self._mean.bytes,
            "sums": [(s.name, s.shape, tensor_sum(s.tensor, s.shape, s.slices)) for s in self._shards if s.counts],
            "form": self._form,
            "why": self._why,
            "missing": missing,
        }

    def _place(self, module: str) -> Slots:
        """Return the members' slots of one weight, without padding."""
        slot, rank = self._slots[module], self._mean.layout.rank
        return Slots(module, (slot.rows, slot.columns), slot.a[:, 0, :rank], slot.b[:, 0, :, :rank])

    @torch.inference_mode()
    def es_put(self, plan: Plan, members: Sequence[Member]) -> None:
        """Write the members' factors into slots 0, 1, ..., in place."""
        self._write(plan, members)
        fold = self._mean.layout.scaling / self._multiplied
        if fold != 1:  # the stock kernels have no scaling; B is rounded once more, unless this is a power of two
            for place in self._places:
                place.b[: len(members)].mul_(fold)

    @torch.inference_mode()
    def es_mean(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of `Master` on this worker's parts of the mean."""
        return getattr(self._mean, method)(*arguments)

    def es_synchronize(self) -> None:
        """Wait for the device, for benchmarks that measure time on the host."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def _plain_weights() -> Generator[None, None, None]:
    """Keep plain weights on a CPU, where vLLM packs each matrix for its product and drops the weight."""
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
    finally:  # another engine of this process may need vLLM as it was
        layers.dispatch_cpu_unquantized_gemm = own


# --- parts of the weights --------------------------------------------------------------------------------------------


_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, NoneType)
"""vLLM's `quant_method` of modules whose weights are as in the files; experts of a mixture have another."""


class _Rows(NamedTuple):
    """Rows of a fused matrix: `size` of them, from row `start` of the tensor of `total` rows named `child`."""

    child: str | None
    start: int
    size: int
    total: int
    counts: bool


def shards(model: nn.Module) -> list[Shard]:
    """Return all parts of a model's weights on this GPU, each tied tensor once, but for packed weights: vLLM arranges
    those, and their biases, for its kernels."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    seen: set[int] = set()
    found: list[Shard] = []
    for path, module in model.named_modules():
        if not isinstance(getattr(module, "quant_method", None), _PLAIN):
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found += _parts(path.replace(population.WRAPPED, ""), kind, module, parameter.data, packed)
    return found


def _parts(
    path: str, kind: str, module: Any, tensor: torch.Tensor, packed: Mapping[str, Sequence[str]]
) -> Iterator[Shard]:
    """Yield the parts of one parameter, under Hugging Face's names."""
    if isinstance(module, RowParallelLinear) and kind == "weight":
        first, width = module.tp_rank * module.input_size_per_partition, module.input_size_per_partition
        shape = (module.output_size, module.input_size)
        yield Shard(f"{path}.weight", shape, (slice(0, shape[0]), slice(first, first + width)), tensor, True)
        return
    parent, _, last = path.rpartition(".")
    inner = tuple(slice(0, n) for n in tensor.shape[1:])
    first = 0
    for rows in _rows(module, tensor, packed.get(last)):
        name = f"{parent}.{rows.child}" if rows.child else path
        place = (slice(rows.start, rows.start + rows.size), *inner)
        view = tensor[first : first + rows.size] if tensor.dim() else tensor
        shape = (rows.total, *tensor.shape[1:])
        yield Shard(f"{name}.{kind}" if name else kind, shape, place, view, rows.counts)
        first += rows.size


def _rows(module: Any, tensor: torch.Tensor, children: Sequence[str] | None) -> Iterable[_Rows]:
    """Return which rows of which tensors a parameter holds, in order."""
    if isinstance(module, QKVParallelLinear):
        query = module.num_heads * module.head_size
        replicas, heads = module.num_kv_head_replicas, module.total_num_kv_heads
        parts = [(module.tp_rank * query, query, module.total_num_heads * module.head_size, True)]
        for width in (module.head_size, module.v_head_size):
            size = module.num_kv_heads * width
            is_first = module.tp_rank % replicas == 0  # several GPUs may hold the same key-value head
            parts.append((module.tp_rank // replicas * size, size, heads * width, is_first))
        return _fused(children, parts)
    if isinstance(module, MergedColumnParallelLinear):
        sizes = [(n // module.tp_size, n) for n in module.output_sizes]
        return _fused(children, [(module.tp_rank * size, size, total, True) for size, total in sizes])
    if isinstance(module, ColumnParallelLinear):
        size = module.output_size_per_partition
        return [_Rows(None, module.tp_rank * size, size, module.output_size, True)]
    if isinstance(module, VocabParallelEmbedding):
        low, high = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        return [_Rows(None, low, high - low, module.org_vocab_size, True)]
    total = tensor.shape[0] if tensor.dim() else 1
    return [_Rows(None, 0, total, total, get_tensor_model_parallel_rank() == 0)]


def _fused(children: Sequence[str] | None, parts: list[tuple[int, int, int, bool]]) -> Iterator[_Rows]:
    """Yield one tensor per part where Hugging Face separates them, otherwise rows of one tensor that stacks them."""
    if children:
        for child, part in zip(children, parts, strict=True):
            yield _Rows(child, *part)
        return
    above, total = 0, sum(part[2] for part in parts)
    for start, size, whole, counts in parts:
        yield _Rows(None, above + start, size, total, counts)
        above += whole
