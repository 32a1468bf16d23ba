# SPDX-License-Identifier: Apache-2.0
"""The base class of spaces. A space says which tensors carry noise, what a member is, and how the mean moves.

A space is pure maths on named tensors. It owns no model and generates no text. All spaces share one step convention.
The noise of tensor t has standard deviation s_t = plan.sigma * t.scale, where the scale
is 1 (`es.sigma`) or the mean |W| of the tensor's layer (`es.noise_multiplier`). The mean moves by

    step * t.scale * (1/N) * sum_i c_i sign_i eps_i

with step = learning_rate (`es.sigma`; the paper's alpha, 1/sigma folded in) or learning_rate * noise_multiplier, times
the schedule of the learning rate, and in generation 0 of `lora.evolve: ab` times `lora.init_scale`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel

from evoalign import kernels
from evoalign import noise as noise_source
from evoalign.config import Config, EsConfig, SpaceSection
from evoalign.errors import ConfigError, ModelError
from evoalign.kernels import compiled
from evoalign.optimizer import Optimizer
from evoalign.plugins import own_settings
from evoalign.types import Layout, Member, Plan, Slices, Summation, TensorSpec, Update

Carrier = Literal["adapter", "dense"]
Master = Callable[[str], torch.Tensor]
"""Returns a tensor of the mean by name."""
Write = Callable[[Plan, Sequence[Member]], None]
"""Writes the adapters, or the dense tensors, of a plan's members to memory that it was made for."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Noise of rank R for M members: `a` [M, R, in], `b` [M, out, R]; the matrix is B A."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank terms of members on one linear layer: y += scaling * ((x A^T) B^T + bias).

    `a` is [M, R, in], or [1, R, in] if all members share it; `b` is [M, out, R], and `bias` [M, out] or None.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory for the factors of one linear weight: those of member i go to `a[i]` [R, in] and `b[i]` [out, R].

    There may be more slots than members, with any strides. `slices` are the rows and columns of the weight they cover.
    If the space has biases, scaling times the adapter's goes to `bias[i]` [out].
    """

    module: str
    slices: Slices
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MeanPart:
    """A part of one tensor of the mean; see `Space.accumulate` for the fields."""

    name: str
    slices: Slices
    master: torch.Tensor
    start: torch.Tensor | None = None
    served: torch.Tensor | None = None


class Space(ABC):
    """Base class of all spaces."""

    name: ClassVar[str]
    carrier: ClassVar[Carrier]
    """How an engine serves a member: an adapter on shared weights, or dense weights that replace them."""
    evolves_model: ClassVar[bool]
    """Whether the evolved tensors are the model's own; otherwise they are extra, such as LoRA factors."""
    has_bias: ClassVar[bool] = False
    """Whether members' adapters have a bias, which not every engine carries."""
    settings: ClassVar[type[BaseModel] | None] = None
    """Pydantic model for this space's extra settings, of which `options` is an instance; None accepts any."""
    smaller: str = "use space lora"
    """Advice printed when the evolved tensors do not fit in memory."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options: Any = own_settings(config.space.options, self.settings, "space")

    def derived(self, mixin: type, attributes: Mapping[str, Any]) -> Space:
        """Return a space of this config with these class attributes and the methods of `mixin` before this space's."""
        return type(type(self).__name__, (mixin, type(self)), {"__module__": mixin.__module__, **attributes})(
            self.config
        )

    @property
    def section(self) -> SpaceSection:
        """The config section of a shipped space; a default section for a user-defined one."""
        return SpaceSection()

    @property
    def has_pairs(self) -> bool:
        """Whether members of opposite sign are mirrored around the mean, so that their difference has no curvature."""
        return self.section.has_pairs

    @property
    def rank(self) -> int:
        """Rank of members' adapters; for a user-defined space its setting `rank`, by default 16."""
        return int(self.config.space.options.get("rank", 16))

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose state the noise depends on, or None; see `evoalign.optimizer.cma`."""
        return None

    @property
    def scaling(self) -> float:
        """Factor of a member's term: the `scaling` of each `Adapter` of this space."""
        return 1.0

    @property
    def has_mean_adapter(self) -> bool:
        """Whether the mean itself is served with an adapter."""
        return self.carrier == "adapter"

    @property
    def summation(self) -> Summation:
        """How updates are summed: `ordered`, or `own` if the class overrides a method that takes part in an update."""
        return "ordered" if self._keeps("gradient", "noise", "accumulate", "mover", "_accumulate_fused") else "own"

    def _keeps(self, *methods: str) -> bool:
        """Return whether these methods are those of a shipped class or of this base class, and not overridden."""
        shipped = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("evoalign.spaces."))
        return all(getattr(type(self), m) is getattr(shipped, m) for m in methods)

    @property
    def default_save_every(self) -> int:
        """Generations between checkpoints if `checkpoint.every` is None.

        0 (no checkpoints) if they would be as large as the model and the journal can repeat the run on any machine.
        """
        return 0 if self.evolves_model and self.summation == "ordered" else 10

    def refusal(self, es: EsConfig) -> str | None:
        """Return an error message if this space does not support the settings of `es`, else None."""
        return self.section.refusal(es)

    def width_factor(self, generation: int) -> float:
        """Return the factor on a generation's noise width and step length, on top of the schedule."""
        return 1.0

    def effective(self, layout: Layout) -> str:
        """Describe the width of the noise of generation 0, for the run's output."""
        return f"effective sigma {self.widths(layout)} per weight"

    def widths(self, layout: Layout, factor: float = 1.0) -> str:
        """Format the smallest and largest width of a tensor's noise at generation 0, times a factor."""
        scales, width = [t.scale for t in layout.tensors], self.config.es.width
        low, high = width * min(scales), width * max(scales)
        if math.isclose(low, high):
            return f"{low * factor:.4g}"
        return f"{low * factor:.4g} to {high * factor:.4g}"

    def adds(self, layout: Layout) -> str | None:
        """Describe what a space adds besides weights; None: the share of the weights that evolves is reported."""
        return None

    def left_out(self, specs: Sequence[TensorSpec], layout: Layout) -> str | None:
        """Describe tensors that do not evolve although the user may expect it, or return None."""
        return None

    def mean_bytes(self, layout: Layout, dtype: torch.dtype) -> int:
        """Return the bytes of the float32 mean that an engine keeps besides what it serves; 0 if it serves the mean."""
        is_served = self.evolves_model and self.carrier == "adapter" and dtype == torch.float32
        return 0 if is_served else _float32_bytes(layout)

    def checkpoint_bytes(self, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, slots: int) -> int:
        """Return the bytes of a checkpoint with `slots` optimizer numbers per evolved weight.

        An adapter is saved in float32, a model in its served dtype, with its float32 mean where serving rounds it.
        """
        state = slots * 4 * layout.parameters
        if not self.evolves_model:
            return _float32_bytes(layout) + state
        model = sum(math.prod(s.shape) for s in specs) * dtype.itemsize
        return model + (0 if dtype == torch.float32 else _float32_bytes(layout)) + state

    @abstractmethod
    def layout(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
        """Return the tensors that evolve, for a model served in `dtype`. Raises ConfigError if no tensor matches."""

    def start(self, layout: Layout, name: str, device: torch.device | str) -> torch.Tensor:
        """Return the starting value, float32, of a tensor that is not the model's own."""
        raise NotImplementedError(f"space {self.name} evolves the model's own tensors")

    def noise(
        self,
        layout: Layout,
        name: str,
        generation: int,
        members: Sequence[int],
        slices: Slices | None = None,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor | Factors:
        """Return standard normals of one tensor, unscaled and unsigned: float32 [M, *shape], or the two factors."""
        return noise_source.normals(_key(layout, name), layout[name].shape, generation, members, slices, device)

    def adapter(
        self,
        layout: Layout,
        module: str,
        master: Master,
        plan: Plan,
        members: Sequence[Member],
        slices: Slices | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Adapter | None:
        """Return the members' adapters of one linear weight in the served dtype, or None if they have none.

        `slices` selects rows of the weight (rows of B) and columns (columns of A). If `out` is given, the factors are
        written there, with any strides: a [M, R, in] and b [M, out, R], of those slices.
        """
        raise NotImplementedError(f"space {self.name} has no adapters")

    def writer(self, layout: Layout, master: Master, slots: Sequence[Slots]) -> Write:
        """Return a function that writes every member's `adapter` to slots 0, 1, ... of every weight.

        Engines call it once per generation. It may keep addresses, so the slots and the mean must not move. It raises
        ModelError if members other than the mean have no adapter, and ConfigError if an adapter's scaling is not
        `scaling`.
        """

        fast = slots and kernels.available(slots[0].a.device) and self._keeps("adapter", "noise") and not self.has_bias
        launch = self._launch(layout, master, slots) if fast else None

        def write(plan: Plan, members: Sequence[Member]) -> None:
            if launch is not None and not all(m.is_mean for m in members):
                return launch(plan, members)
            found = set[float]()
            for s in slots:
                into = s.a[: len(members)], s.b[: len(members)]
                adapter = self.adapter(layout, s.module, master, plan, members, s.slices, into)
                found |= set() if adapter is None else {adapter.scaling}
                if s.bias is not None:
                    bias = None if adapter is None else adapter.bias
                    s.bias[: len(members)] = 0 if bias is None else self.scaling * bias
            if found - {self.scaling}:
                raise ConfigError(f"space {self.name}: adapters have scaling {found}, but `scaling` is {self.scaling}")
            if slots:
                check_adapted(self, bool(found), members)
            return None

        return write

    def _launch(self, layout: Layout, master: Master, slots: Sequence[Slots]) -> Write | None:
        """Return a function that writes the adapters with one launch per shape, or None to write one by one."""
        return None

    def mover(self, layout: Layout, parts: Sequence[MeanPart]) -> Callable[[Update], None] | None:
        """Return a function that moves all these parts at once, without an optimizer, or None to use `accumulate`.

        It gives the same bits as `accumulate`. It may keep addresses, so the parts must not move.
        """
        return None

    def perturbed(
        self,
        layout: Layout,
        name: str,
        master: torch.Tensor,
        plan: Plan,
        member: Member,
        slices: Slices | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a member's dense tensor in float32: master + fl32(s * noise), one multiply and one add.

        `master` is the part `slices` of the mean. If `out` is given, of that shape and any dtype, the numbers are
        written there, rounded once.
        """
        if member.is_mean:
            return master if out is None else out.copy_(master)
        width = member.sign * plan.sigma * layout[name].scale
        into = None if out is None else out[None]
        return self._scaled(layout, name, plan.generation, [member.noise], [width], master, slices, out=into)[0]

    def _scaled(
        self,
        layout: Layout,
        name: str,
        generation: int,
        streams: Sequence[int],
        widths: Sequence[float],
        mean: torch.Tensor,
        slices: Slices | None = None,
        dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `noise.scaled` of one tensor, also for a subclass that overrides `noise`."""
        if type(self).noise is Space.noise:
            drawn = (_key(layout, name), layout[name].shape, generation, streams, widths)
            return noise_source.scaled(*drawn, mean=mean, dtype=dtype, slices=slices, out=out)
        eps = self.noise(layout, name, generation, streams, slices, mean.device)
        assert isinstance(eps, torch.Tensor)
        width = kernels.factors(tuple(widths), mean.device)
        moved = eps.mul_(width.view(-1, *(1 for _ in mean.shape))).add_(mean)
        return moved.to(dtype) if out is None else out.copy_(moved)

    def gradient(self, layout: Layout, name: str, update: Update, slices: Slices, device: torch.device) -> torch.Tensor:
        """Return (1/N) sum_i c_i sign_i eps_i of one part of one tensor, float32.

        Members are added one by one, so the bits do not depend on the device or vector width. An antithetic pair is
        drawn once.
        """
        weights = pair_weights(update)
        total = torch.zeros([s.stop - s.start for s in slices], dtype=torch.float32, device=device)
        for members in batched(list(weights), 16):
            eps = self.noise(layout, name, update.generation, members, slices, device)
            assert isinstance(eps, torch.Tensor)
            for member, part in zip(members, eps, strict=True):
                total.add_(part.mul_(weights[member]))
        return total.mul_(1 / len(update.members))  # as CUDA divides by a scalar; the CPU divides otherwise

    def accumulate(
        self,
        layout: Layout,
        master: torch.Tensor,
        name: str,
        slices: Slices,
        update: Update,
        start: torch.Tensor | None = None,
        optimizer: Optimizer | None = None,
        served: torch.Tensor | None = None,
    ) -> None:
        """Move one part of the mean, in place. `master` and `start` are float32 views of that part.

        If all coefficients are zero nothing moves, whatever the optimizer. `start` is the anchor of the decay (arXiv
        2605.30148, L2 form) and required if `update.decay` is not 0. `served` is the same part in its served dtype and
        receives the rounded mean.
        """
        if not moves(update, start):
            return
        if optimizer is None and update.summation != "library" and self.fused(master.device):
            self._accumulate_fused(layout, MeanPart(name, slices, master, start, served), update)
            return
        gradient = self.gradient(layout, name, update, slices, master.device)
        direction = gradient if optimizer is None else optimizer.direction(name, gradient)
        if start is not None and update.decay:
            master.sub_((master - start).mul_(update.decay))
        master.add_(direction.mul_(update.step * layout[name].scale))
        if served is not None:
            served.copy_(master)

    def fused(self, device: torch.device | str) -> bool:
        """Return whether `accumulate` without an optimizer is one pass without temporaries: parts may be large then."""
        own = type(self)
        has_kernel = kernels.available(device) or compiled.available(device)
        return has_kernel and own.noise is Space.noise and own.gradient is Space.gradient

    def _accumulate_fused(self, layout: Layout, part: MeanPart, update: Update) -> None:
        if kernels.available(part.master.device):
            from evoalign.kernels.update import dense
        else:
            from evoalign.kernels.compiled import dense

        tensor, table = layout[part.name], noise_source.table(part.master.device)
        bounds, step = noise_source.bounds_of(tensor.shape, part.slices), update.step * tensor.scale
        drawn = (_key(layout, part.name), table, tensor.shape, bounds, update.generation, pair_weights(update))
        dense(part.master, part.served, part.start, *drawn, len(update.members), step, update.decay)


def check_adapted(space: Space, found: bool, members: Sequence[Member]) -> None:
    """Raise ModelError if members other than the mean have no adapter (`found` is False)."""
    if not found and not all(m.is_mean for m in members):
        raise ModelError(f"space {space.name} has no adapter for members {[m.index for m in members]}")


def _float32_bytes(layout: Layout) -> int:
    """Return the float32 bytes of all evolved and frozen tensors."""
    return 4 * sum(math.prod(t.shape) for t in (*layout.tensors, *layout.frozen))


def _key(layout: Layout, name: str) -> tuple[int, int]:
    return noise_source.key(layout.seed, "noise", name)


def moves(update: Update, start: torch.Tensor | None) -> bool:
    """Return whether an update moves anything. Raises ConfigError if it decays but no `start` was kept."""
    if any(update.coefficients) and update.decay and start is None:
        raise ConfigError(
            f"an update has decay {update.decay:g}, but es.decay is 0 in its config; was the journal edited?"
        )
    return any(update.coefficients)


def pair_weights(update: Update) -> dict[int, float]:
    """Return the summed signed coefficient of each noise, without zero sums."""
    weights: dict[int, float] = {}
    for member, coefficient in zip(update.members, update.coefficients, strict=True):
        weights[member.noise] = weights.get(member.noise, 0.0) + member.sign * coefficient
    return {k: w for k, w in weights.items() if w}


def signed(widths: Sequence[float], members: Sequence[Member]) -> torch.Tensor:
    """Return each width with each member's sign: float64 [K, M], for one rounding later."""
    signs = torch.tensor([m.sign for m in members], dtype=torch.float64)
    return torch.outer(torch.tensor(widths, dtype=torch.float64), signs)


def batched(items: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yield consecutive pieces of at most `size` items."""
    for i in range(0, len(items), size):
        yield list(items[i : i + size])


def factor_slices(slices: Slices | None) -> tuple[Slices, Slices]:
    """Return the parts of A [R, in] and B [out, R] for some rows and columns of B A."""
    rows, columns = (*(slices or ()), slice(None), slice(None))[:2]
    return (slice(None), columns), (rows, slice(None))
