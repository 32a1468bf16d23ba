# SPDX-License-Identifier: Apache-2.0
"""How much of a member's noise survives rounding: in half precision, in a dense space.

A member is round(mean + s * noise), and the update uses the noise before rounding. A weight whose change is below half
the spacing of its dtype does not move, and others move too far. So served and intended noise correlate less, and the
signal is weaker by as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from evoalign import spaces
from evoalign.config import Config, ModelConfig
from evoalign.engines import Engine
from evoalign.engines.base import sampled_places
from evoalign.models.origin import described
from evoalign.spaces import Space
from evoalign.types import Layout, Member, Plan, Slices

LEAST_CORRELATION = 0.9
"""Warn if served and intended noise correlate less than this."""
SAMPLE = 65536
"""Most weights that are sampled from an engine; from files, `PER_TENSOR` of each tensor."""
PER_TENSOR = 1024
FIRST = Member(0, 0, 1)


@dataclass(frozen=True, slots=True)
class Survival:
    """Share of weights that differ from the served mean's, and the correlation of served and intended noise.

    `least` is the tensor with the lowest correlation, with that correlation.
    """

    moved: float
    correlation: float
    least: tuple[str, float]


def rounds(space: Space, dtype: torch.dtype) -> bool:
    """Return whether members are served rounded: in a dense space, with a dtype below float32."""
    return space.carrier == "dense" and dtype.itemsize < 4


def survival(
    space: Space, layout: Layout, sigma: float, dtype: torch.dtype, weights: Iterable[tuple[str, torch.Tensor]]
) -> Survival | None:
    """Measure the noise of member 0 of generation 0 on samples of each tensor; None without samples.

    Tensors are weighted by their size.
    """
    plan, moved, total, products = Plan(0, sigma, (FIRST,)), 0.0, 0, [0.0, 0.0, 0.0]
    least = ("", math.inf)
    for name, sample in weights:
        shape = layout[name].shape
        slices = _block(shape, sample.numel())
        sizes = [s.stop - s.start for s in slices]
        mean = sample.flatten()[: math.prod(sizes)].view(sizes).to(torch.float32)
        member = space.perturbed(layout, name, mean, plan, FIRST, slices)
        intended = (member - mean).double()
        served = (member.to(dtype).double() - mean.to(dtype).double()).view_as(intended)
        share = math.prod(shape) / mean.numel()
        sums = [float((a * b).sum()) for a, b in ((served, intended), (served, served), (intended, intended))]
        products = [p + share * x for p, x in zip(products, sums, strict=True)]
        moved += share * float((served != 0).sum())
        total += math.prod(shape)
        least = min(least, (name, _correlation(sums)), key=lambda item: item[1])
    return Survival(moved / total, _correlation(products), least) if total else None


def _correlation(products: Sequence[float]) -> float:
    """Return the correlation from the sums of ab, aa and bb, where both have mean 0."""
    both, one, other = products
    return both / math.sqrt(one * other) if one and other else 0.0


def _block(shape: Sequence[int], count: int) -> Slices:
    """Return the slices of a contiguous block of at most `count` numbers, at least one, in the middle of a tensor."""
    slices: list[slice] = []
    for size in reversed(shape):
        some = min(size, max(1, count))
        slices.insert(0, slice((size - some) // 2, (size - some) // 2 + some))
        count //= some
    return tuple(slices)


def weights_of_engine(engine: Engine, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a sample of the mean by tensor."""
    probed = engine.probe_weights(SAMPLE)
    for name, places in sampled_places(layout, SAMPLE):
        yield name, probed[: len(places)]
        probed = probed[len(places) :]


def weights_of_files(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a block of each tensor from local safetensors files, without loading whole tensors."""
    folder = _folder(config)
    for file in sorted(folder.glob("*.safetensors")) if folder else ():
        try:
            with safe_open(file, "pt") as stored:
                for name in sorted(set(stored.keys()) & set(layout.by_name)):
                    tensor = stored.get_slice(name)
                    if tuple(tensor.get_shape()) == layout[name].shape:
                        yield name, tensor[_block(layout[name].shape, PER_TENSOR)]
        except (OSError, SafetensorError):
            return  # loading the model raises an error that says what is wrong


def _folder(config: ModelConfig) -> Path | None:
    """Return the folder of a model's files, which may be in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    path, revision = described(config)  # for an adapter, its base model: weights of the same size
    if Path(path).is_dir():
        return Path(path)
    found = try_to_load_from_cache(path, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def rounding_lines(
    config: Config, layout: Layout, dtype: torch.dtype, weights: Iterable[tuple[str, torch.Tensor]]
) -> list[str]:
    """Describe how much noise survives rounding, with a warning if that is little. Empty if nothing is rounded."""
    space = spaces.create(config)
    if not rounds(space, dtype):
        return []
    left = survival(space, layout, config.es.width, dtype, weights)
    short = str(dtype).removeprefix("torch.")
    if left is None:
        return [f"rounding to {short}: how much noise survives is known once the weights are loaded"]
    line = (
        f"rounding to {short}: the noise moves {left.moved:.0%} of the weights; correlation of served and intended "
        f"noise {left.correlation:.2f} (least: {left.least[0]}, {left.least[1]:.2f})"
    )
    if left.correlation >= LEAST_CORRELATION:
        return [line]
    wider = "es.sigma" if config.es.sigma is not None else "es.noise_multiplier"
    return [f"warning: {line}; raise {wider}, or use model.dtype float32 or space lora"]
