# SPDX-License-Identifier: Apache-2.0
"""What of a member's noise is left where its weights are served rounded: in half precision, in a dense space.

A member is round(mean + s * noise), and the update takes the noise as it was drawn. A weight whose change is below half
the spacing of its dtype does not move at all, and others move too far: what is served is noise of a lower correlation
with what the update follows, and of a signal weaker by as much.
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
"""Served with intended noise: below, a warning."""
SAMPLE = 65536
"""Weights that are looked at of all that evolve, when an engine has them; `PER_TENSOR` of each, in files."""
PER_TENSOR = 1024
FIRST = Member(0, 0, 1)


@dataclass(frozen=True, slots=True)
class Survival:
    """`moved`: the share of weights that are other than the served mean's. `correlation` of served and intended noise.

    `least` is the tensor with the lowest correlation, and that.
    """

    moved: float
    correlation: float
    least: tuple[str, float]


def rounds(space: Space, dtype: torch.dtype) -> bool:
    """Whether members are rounded weights: dense ones, in less than float32."""
    return space.carrier == "dense" and dtype.itemsize < 4


def survival(
    space: Space, layout: Layout, sigma: float, dtype: torch.dtype, weights: Iterable[tuple[str, torch.Tensor]]
) -> Survival | None:
    """Of member 0 of generation 0. `weights` are some numbers of each tensor; None where there are none.

    Tensors count by all that they have.
    """
    plan, moved, total, products = Plan(0, sigma, (FIRST,)), 0.0, 0, [0.0, 0.0, 0.0]
    least = ("", math.inf)
    for name, sample in weights:
        shape = layout[name].shape
        slices = _block(shape, sample.numel())
        mean = sample.flatten()[: _numel(slices)].view([s.stop - s.start for s in slices]).to(torch.float32)
        member = space.perturbed(layout, name, mean, plan, FIRST, slices)
        intended = (member - mean).double()
        served = (member.to(dtype).double() - mean.to(dtype).double()).view_as(intended)
        share = math.prod(shape) / mean.numel()
        of = [float((a * b).sum()) for a, b in ((served, intended), (served, served), (intended, intended))]
        products = [p + share * x for p, x in zip(products, of, strict=True)]
        moved += share * float((served != 0).sum())
        total += math.prod(shape)
        least = min(least, (name, _correlation(of)), key=lambda item: item[1])
    return Survival(moved / total, _correlation(products), least) if total else None


def _correlation(products: Sequence[float]) -> float:
    """From the products of one with the other, of the one with itself, of the other with itself; noise has mean 0."""
    both, one, other = products
    return both / math.sqrt(one * other) if one and other else 0.0


def _block(shape: Sequence[int], count: int) -> Slices:
    """At most `count` numbers that lie together in the middle of a tensor, at least one."""
    slices: list[slice] = []
    for size in reversed(shape):
        some = min(size, max(1, count))
        slices.insert(0, slice((size - some) // 2, (size - some) // 2 + some))
        count //= some
    return tuple(slices)


def _numel(slices: Slices) -> int:
    return math.prod(s.stop - s.start for s in slices)


def weights_of_engine(engine: Engine, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """A sample of the mean, tensor by tensor."""
    probed = engine.probe_weights(SAMPLE)
    for name, places in sampled_places(layout, SAMPLE):
        yield name, probed[: len(places)]
        probed = probed[len(places) :]


def weights_of_files(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """A block of each tensor from safetensors files that lie here, no whole tensor loaded; nothing where none do."""
    folder = _folder(config)
    for file in sorted(folder.glob("*.safetensors")) if folder else ():
        try:
            with safe_open(file, "pt") as stored:
                for name in sorted(set(stored.keys()) & set(layout.by_name)):
                    tensor = stored.get_slice(name)
                    if tuple(tensor.get_shape()) == layout[name].shape:
                        yield name, tensor[_block(layout[name].shape, PER_TENSOR)]
        except (OSError, SafetensorError):
            return  # loading the model says what is wrong with it


def _folder(config: ModelConfig) -> Path | None:
    """Where a model's files are: its folder, or that of a hub's model in the cache."""
    from huggingface_hub import try_to_load_from_cache

    path, revision = described(config)  # of an adapter, its base: weights of the same size
    if Path(path).is_dir():
        return Path(path)
    found = try_to_load_from_cache(path, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def rounding_lines(
    config: Config, layout: Layout, dtype: torch.dtype, weights: Iterable[tuple[str, torch.Tensor]]
) -> list[str]:
    """What is left of the noise, in words; a warning where that is little. None where nothing is rounded."""
    space = spaces.create(config)
    if not rounds(space, dtype):
        return []
    left = survival(space, layout, config.es.width, dtype, weights)
    short = str(dtype).removeprefix("torch.")
    if left is None:
        return [f"rounding to {short}: what it leaves of the noise is known once the weights are loaded"]
    told = (
        f"rounding to {short}: the noise moves {left.moved:.0%} of the weights; as served, it correlates "
        f"{left.correlation:.2f} with what the update takes it for (least: {left.least[0]}, {left.least[1]:.2f})"
    )
    if left.correlation >= LEAST_CORRELATION:
        return [told]
    wider = "es.sigma" if config.es.sigma is not None else "es.noise_multiplier"
    return [f"warning: {told}; raise {wider}, or use model.dtype float32 or space lora"]
