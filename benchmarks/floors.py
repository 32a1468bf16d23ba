# SPDX-License-Identifier: Apache-2.0
"""The bytes and FLOPs that a rollout needs, the seconds that a card takes for them at least, and the card's figures.

Counted for what a rollout really did: a prompt's shared beginning once per member, the rest of a prompt once per member
and text, and only the tokens that a row generated. Bytes: the weights once per step and per reading of the prompts,
members' factors of rank 1 once per member with active rows, keys and values once each: those of a prompt once for all
rows that have it, and those of a shared beginning once per member. FLOPs: two per weight and token,
two per factor and token, four per head dimension and attended column; the output layer once per generated token. Left
out: activations, normalisation, sampling, and the writing of members. All rows count as decoded together, so a rollout
whose rows wait for room takes more.

A step takes the longer of its bytes at the card's bandwidth and its FLOPs at the card's rate. MBU (model bandwidth
utilisation) is bytes / seconds / bandwidth of the decoding steps.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from evoalign.engines.transformers.prefill import shared_prefix

Row: TypeAlias = tuple[int, tuple[int, ...], int]
"""A completion: slot of its member or -1 for the mean, token ids of its prompt, and number of generated tokens."""
DATASHEET = {"NVIDIA H200": (4.8e12, 989e12), "NVIDIA H100": (3.35e12, 989e12)}
"""Bytes per second of memory and bfloat16 FLOP/s without sparsity, by how the name of a card begins."""


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama or Qwen model: `queries` and `shared` are the widths of all query and all key-value heads."""

    layers: int
    hidden: int
    inner: int
    queries: int
    shared: int
    vocabulary: int
    itemsize: int = 2

    @classmethod
    def of(cls, config: Mapping[str, Any], itemsize: int = 2) -> Model:
        """Return the sizes in a config.json."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        width = config.get("head_dim") or hidden // heads
        return cls(
            config["num_hidden_layers"], hidden, config["intermediate_size"], heads * width,
            config["num_key_value_heads"] * width, config["vocab_size"], itemsize,
        )  # fmt: skip

    @property
    def matrices(self) -> int:
        """Weights of all layers' linear matrices."""
        attention = 2 * self.hidden * (self.queries + self.shared)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def output(self) -> int:
        """Weights of the output layer."""
        return self.hidden * self.vocabulary

    @property
    def factors(self) -> int:
        """Numbers of one member's factors of rank 1 on all linear matrices."""
        attention = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.shared)
        return self.layers * (attention + 3 * (self.hidden + self.inner))

    @property
    def column(self) -> int:
        """Bytes of one token's keys and values."""
        return self.itemsize * 2 * self.layers * self.shared


@dataclass(frozen=True)
class Pass:
    """Bytes and FLOPs of one pass over the weights."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Card:
    """A device: bytes and FLOPs per second of its datasheet, and as measured by a copy and a product of matrices."""

    name: str
    bandwidth: float
    flops: float
    copy: float
    product: float


@dataclass(frozen=True)
class Floor:
    """Bytes, FLOPs and least seconds of some passes; `bound` is the one of both that takes longer in all.

    `serial` are the seconds where each pass moves its bytes and then computes, both at the card's measured rates.
    """

    bytes: float
    flops: float
    seconds: float
    serial: float
    bound: str

    @classmethod
    def of(cls, passes: Sequence[Pass], card: Card) -> Floor:
        """Return the floor of passes that follow one another."""
        moved, computed = sum(p.bytes for p in passes), sum(p.flops for p in passes)
        seconds = sum(max(p.bytes / card.bandwidth, p.flops / card.flops) for p in passes)
        serial = moved / card.copy + computed / card.product
        bound = "bytes" if moved / card.bandwidth > computed / card.flops else "flops"
        return cls(moved, computed, seconds, serial, bound)


def prefill(model: Model, rows: Sequence[Row]) -> Pass:
    """Return the reading of all prompts, and the output layer for each row's first token."""
    texts = {(slot, prompt) for slot, prompt, _ in rows}
    begun = _begun({prompt for _, prompt in texts})
    pieces = [(slot, 0, begun) for slot in {slot for slot, _ in texts}]
    pieces += [(slot, begun, len(prompt)) for slot, prompt in texts]
    tokens = sum(end - start for _, start, end in pieces)
    served = sum(end - start for slot, start, end in pieces if slot >= 0)
    columns = sum(end * (end + 1) // 2 - start * (start + 1) // 2 for _, start, end in pieces)
    members = len({slot for slot, _ in texts if slot >= 0})
    flops = 2 * (model.matrices * tokens + model.output * len(texts) + model.factors * served)
    weights = model.itemsize * (model.matrices + model.output + members * model.factors)
    return Pass(weights + model.column * tokens, flops + 4 * model.layers * model.queries * columns)


def steps(model: Model, rows: Sequence[Row]) -> list[Pass]:
    """Return the passes after the first token: each over the rows that have not ended, with their past tokens.

    A pass writes one column of keys and values per row, and reads those before it.
    """
    alive, columns = Counter(slot for slot, _, _ in rows), sum(len(prompt) for _, prompt, _ in rows)
    asked = Counter((slot, prompt) for slot, prompt, _ in rows)
    begun = _begun({prompt for _, prompt in asked})
    ended: dict[int, list[Row]] = {}
    for row in rows:
        ended.setdefault(row[2], []).append(row)
    found = list[Pass]()
    for step in range(1, max(ended)):
        for slot, prompt, length in ended.get(step, ()):
            alive[slot] -= 1
            asked[slot, prompt] -= 1
            columns -= len(prompt) + length - 1
        count = alive.total()
        columns += count
        served = count - alive[-1]
        members = sum(n > 0 for slot, n in alive.items() if slot >= 0)
        flops = 2 * ((model.matrices + model.output) * count + model.factors * served)
        weights = model.itemsize * (model.matrices + model.output + members * model.factors)
        kept = begun * sum(n > 0 for n in alive.values()) + step * count
        kept += sum(len(prompt) - begun for (_, prompt), n in asked.items() if n > 0)
        found.append(Pass(weights + model.column * kept, flops + 4 * model.layers * model.queries * columns))
    return found


def _begun(prompts: Collection[tuple[int, ...]]) -> int:
    """Return how many tokens several prompts begin with, if they are read apart."""
    return shared_prefix([*prompts]) if len(prompts) > 1 else 0


def mbu(decoding: Floor, seconds: float, card: Card) -> float:
    """Return the share of the card's bandwidth used by decoding steps that took `seconds`."""
    return decoding.bytes / seconds / card.bandwidth


def measured_card() -> Card:
    """Measure this process's GPU, or the CPU. A card that is not in `DATASHEET` gets the measured rates for both."""
    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else "CPU"
    device, dtype, width, size = (
        ("cuda", torch.bfloat16, 8192, 1 << 32) if gpu else ("cpu", torch.float32, 1024, 1 << 26)
    )
    ones = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]
    copy = 2 * size / _seconds(torch.Tensor.copy_, *ones)
    factors = [torch.randn(width, width, device=device, dtype=dtype) for _ in range(2)]
    product = 2 * width**3 / _seconds(torch.matmul, *factors)
    if gpu:
        del ones, factors
        torch.cuda.empty_cache()
    known = next((rates for start, rates in DATASHEET.items() if name.startswith(start)), (copy, product))
    return Card(name, *known, copy, product)


def _seconds(work: Callable[..., object], *tensors: torch.Tensor) -> float:
    """Return the median seconds of ten runs, after a first one."""
    times = list[float]()
    for _ in range(11):
        began = time.perf_counter()
        work(*tensors)
        if tensors[0].is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
