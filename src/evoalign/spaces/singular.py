# SPDX-License-Identifier: Apache-2.0
"""The singular values of a LoRA adapter that `model.name` names (ESSA, arXiv 2507.04453): 2 r numbers per weight.

With A = U_A S_A V_A and B = U_B S_B V_B, a member has the values S (1 + s eps) of both factors. The run starts from the
merged model, so its own adapter is what they change:

    U_B (K o (zb + za + zb za)) V_A    with K = S_B V_B U_A S_A, and z the relative change of each value

Deviations from the paper: there the values themselves evolve, here their relative change, so that one width fits all;
and the optimizer is free (there CMA-ES). The decomposition is computed with exact sums and Jacobi rotations, so that it
has the same bits on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from evoalign.config import Section
from evoalign.errors import ConfigError
from evoalign.models.adapters import plain_factors
from evoalign.models.origin import origin
from evoalign.spaces.base import Adapter, Master, Space, factor_slices
from evoalign.types import EvolvedTensor, Layout, Member, Plan, Slices, TensorSpec

SWEEPS = 30
"""Most sweeps of Jacobi rotations; ten suffice for rank 64."""


class Settings(Section):
    """Settings next to `space.name`."""

    share: float = Field(default=1.0, gt=0, le=1)
    """Leading share of each factor's singular values that evolve."""


class Singular(Space):
    """Members have other singular values in the adapter that the run starts from."""

    name = "singular"
    carrier = "adapter"
    evolves_model = False
    settings = Settings
    smaller = "lower space.share"

    @property
    def has_pairs(self) -> bool:
        """False: the values of both factors change, and (-zb)(-za) = zb za."""
        return False

    @cached_property
    def _adapter(self) -> tuple[float, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """The scaling alpha / r, and A and B by weight. Raises ConfigError where the model is no plain LoRA adapter."""
        found = origin(self.config.model).adapters
        if not found:
            raise ConfigError(
                f"space singular evolves the singular values of an adapter, and model.name {self.config.model.name} is "
                "none; set it to the folder of a PEFT adapter, such as an export of a run in space lora"
            )
        return plain_factors(found[-1])

    @cached_property
    def _parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Decompositions by weight, each made when it is first read."""
        return {}

    def effective(self, layout: Layout) -> str:
        return f"sigma {self.widths(layout)} relative to each singular value"

    @property
    def rank(self) -> int:
        return len(next(iter(self._adapter[1].values()))[0])

    @property
    def scaling(self) -> float:
        return self._adapter[0]

    def layout(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
        """Return `<module>.singular_A` and `<module>.singular_B` [k] of each weight. Raises ConfigError.

        Since these are relative changes, their scale is 1 with `es.noise_multiplier` too.
        """
        _, factors = self._adapter
        of_model = {s.name: s.shape for s in specs}
        for name, (a, b) in factors.items():
            if of_model.get(name) != (len(b), a.shape[1]) or len(a) != self.rank:
                raise ConfigError(
                    f"space singular: the adapter's factors of {name}, {list(a.shape)} and {list(b.shape)}, do not fit "
                    f"the model or differ in rank from the first ones ({self.rank})"
                )
        count = math.ceil(self.options.share * self.rank)
        modules = [s.name for s in specs if s.name in factors]
        shapes = {m: (len(factors[m][1]), factors[m][0].shape[1]) for m in modules}
        return Layout(
            tensors=tuple(EvolvedTensor(_name(m, f"singular_{f}"), (count,), m) for m in modules for f in "AB"),
            frozen=tuple(
                EvolvedTensor(_name(m, part), shape, m)
                for m in modules
                for part, shape in (
                    ("left", (shapes[m][0], self.rank)),
                    ("right", (self.rank, shapes[m][1])),
                    ("middle", (self.rank, self.rank)),
                )
            ),
            seed=self.config.seed,
            dtype=str(dtype).removeprefix("torch."),
            rank=self.rank,
            scaling=self.scaling,
        )

    def start(self, layout: Layout, name: str, device: torch.device | str) -> torch.Tensor:
        """Return zeros for the changes of singular values, and the parts of the decomposition."""
        tensor = layout[name]
        if name not in layout.frozen_names:
            return torch.zeros(tensor.shape, device=device)
        if tensor.module not in self._parts:
            self._parts[tensor.module] = _decomposed(*self._adapter[1][tensor.module])
        return self._parts[tensor.module][name.rpartition(".")[2]].to(device)

    def adapter(
        self,
        layout: Layout,
        module: str,
        master: Master,
        plan: Plan,
        members: Sequence[Member],
        slices: Slices | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Adapter:
        """Return V_A [1, R, in], and U_B (K o ...) [M, out, R] of each member, summed in order."""
        (_, of_a), (of_b, _) = factor_slices(slices)
        into_a, into_b = out or (None, None)
        left, right, middle = (master(_name(module, part)) for part in ("left", "right", "middle"))
        of_values = [self._values(layout, _name(module, f"singular_{f}"), master, plan, members) for f in "AB"]
        za, zb = of_values[0][:, None, :], of_values[1][:, :, None]
        changed = (zb + za + zb * za) * middle  # [M, R, R]
        b = torch.zeros(len(members), *left[of_b].shape, device=left.device)
        for k in range(layout.rank):  # in a fixed order, as no matrix product of a library is
            b += left[of_b, k, None] * changed[:, k, None, :]
        a = right[None, :, of_a]
        return Adapter(
            a.to(layout.torch_dtype) if into_a is None else into_a.copy_(a.expand_as(into_a)),
            b.to(layout.torch_dtype) if into_b is None else into_b.copy_(b),
            layout.scaling,
        )

    def _values(self, layout: Layout, name: str, master: Master, plan: Plan, members: Sequence[Member]) -> torch.Tensor:
        """Return the relative change of each member's singular values, float32 [M, R]; 0 for those that stay."""
        streams, widths = [m.noise for m in members], [m.sign * plan.sigma * layout[name].scale for m in members]
        moved = self._scaled(layout, name, plan.generation, streams, widths, master(name))
        return torch.nn.functional.pad(moved, (0, layout.rank - moved.shape[1]))


def _name(module: str, part: str) -> str:
    return f"{module.removesuffix('.weight')}.{part}"


def _decomposed(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `left` U_B [out, r], `right` V_A [r, in] and `middle` K [r, r], float32; singular values fall."""
    turn_a, size_a, right = _rows_decomposed(a.double().numpy())
    turn_b, size_b, left = _rows_decomposed(b.double().numpy().T)
    between = np.array([[math.fsum(x * y) for y in turn_a.T] for x in turn_b.T])  # V_B U_A
    found = {"left": np.ascontiguousarray(left.T), "right": right, "middle": size_b[:, None] * between * size_a}
    return {name: torch.from_numpy(part.astype(np.float32)) for name, part in found.items()}


def _rows_decomposed(
    rows: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return U [r, r], the singular values [r] and V [r, n] of a matrix [r, n] whose elements are float32 numbers.

    Products of two float32 numbers are exact in float64, and `math.fsum` rounds their sum once.
    """
    count = len(rows)
    gram = np.array([[math.fsum(rows[i] * rows[j]) for j in range(count)] for i in range(count)])
    turned = np.eye(count)
    for _ in range(SWEEPS):
        turns = [_rotate(gram, turned, i, j) for i in range(count) for j in range(i + 1, count)]
        if not any(turns):
            break
    order = sorted(range(count), key=lambda i: -gram[i, i])
    turned, size = turned[:, order], np.sqrt(np.maximum(gram.diagonal()[order], 0))
    size[size < 1e-7 * size[0]] = 0  # below the accuracy of the Gram matrix
    vectors = np.zeros_like(rows)
    for k in range(count):
        vectors += turned[k, :, None] * rows[k]
    kept = size > 0
    vectors[kept] /= size[kept, None]
    vectors[~kept] = 0
    return turned, size, vectors


def _rotate(gram: NDArray[np.float64], turned: NDArray[np.float64], i: int, j: int) -> bool:
    """Make gram[i, j] zero by a Jacobi rotation, in place; return whether it was not yet."""
    away = float(gram[i, j])
    if abs(away) <= 1e-15 * math.sqrt(abs(float(gram[i, i]) * float(gram[j, j]))) or away == 0:
        return False
    ratio = (float(gram[j, j]) - float(gram[i, i])) / (2 * away)
    tangent = math.copysign(1, ratio) / (abs(ratio) + math.sqrt(ratio * ratio + 1))
    cosine = 1 / math.sqrt(tangent * tangent + 1)
    sine = tangent * cosine
    for matrix in (gram.T, gram, turned.T):
        first, second = matrix[i].copy(), matrix[j].copy()
        matrix[i], matrix[j] = cosine * first - sine * second, sine * first + cosine * second
    return True
