# SPDX-License-Identifier: Apache-2.0
"""Which part of which Hugging Face tensor lies where in a vLLM model.

vLLM fuses q, k, v and gate, up into one matrix each, pads the vocabulary and, under tensor parallelism, keeps rows or
columns of a matrix on each GPU. Noise, hashes and checkpoints address the unfused, whole tensor, so each part is a
view of the served weight together with its place in that tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from evoalign.engines.master import Shard

WRAPPED = ".base_layer"
"""What vLLM's LoRA layers add to the name of the layer they wrap."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a fused matrix: `size` of them, from row `start` of the tensor of `total` rows that `child` names."""

    child: str | None
    start: int
    size: int
    total: int
    counts: bool


def shards(model: nn.Module) -> list[Shard]:
    """All parts of a model's weights on this GPU, each tied tensor once."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    seen: set[int] = set()
    found: list[Shard] = []
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found += _parts(path.replace(WRAPPED, ""), kind, module, parameter.data, packed)
    return found


def _parts(
    path: str, kind: str, module: Any, tensor: torch.Tensor, packed: Mapping[str, Sequence[str]]
) -> Iterator[Shard]:
    """The parts of one parameter, in Hugging Face's names."""
    if isinstance(module, RowParallelLinear) and kind == "weight":
        first, width = module.tp_rank * module.input_size_per_partition, module.input_size_per_partition
        shape = (module.output_size, module.input_size)
        yield Shard(f"{path}.weight", shape, (slice(0, shape[0]), slice(first, first + width)), tensor, True)
        return
    rest = tuple(tensor.shape[1:])
    inner = tuple(slice(0, n) for n in rest)
    first = 0
    for rows in _rows(path, module, tensor, packed):
        name = f"{path.rpartition('.')[0]}.{rows.child}" if rows.child else path
        place = (slice(rows.start, rows.start + rows.size), *inner)
        view = tensor[first : first + rows.size] if tensor.dim() else tensor
        yield Shard(f"{name}.{kind}" if name else kind, (rows.total, *rest), place, view, rows.counts)
        first += rows.size


def _rows(path: str, module: Any, tensor: torch.Tensor, packed: Mapping[str, Sequence[str]]) -> Iterable[_Rows]:
    children = packed.get(path.rpartition(".")[2])
    if isinstance(module, QKVParallelLinear):
        return _fused(children, _qkv(module))
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
    return [_Rows(None, 0, total, total, _rank() == 0)]


def _qkv(module: Any) -> list[tuple[int, int, int, bool]]:
    """First row, rows, rows in all, and whether they count: of q, k and v. GPUs may share a key-value head."""
    replicas = module.num_kv_head_replicas
    heads, rank = module.total_num_kv_heads, module.tp_rank // replicas
    counts = module.tp_rank % replicas == 0
    query = module.num_heads * module.head_size
    parts = [(module.tp_rank * query, query, module.total_num_heads * module.head_size, True)]
    for width in (module.head_size, module.v_head_size):
        size = module.num_kv_heads * width
        parts.append((rank * size, size, heads * width, counts))
    return parts


def _fused(children: Sequence[str] | None, parts: list[tuple[int, int, int, bool]]) -> Iterator[_Rows]:
    """One tensor a part where Hugging Face has them apart, and else one tensor of all parts below each other."""
    if children:
        for child, part in zip(children, parts, strict=True):
            yield _Rows(child, *part)
        return
    above, total = 0, sum(part[2] for part in parts)
    for start, size, whole, counts in parts:
        yield _Rows(None, above + start, size, total, counts)
        above += whole


def _rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()
