# SPDX-License-Identifier: Apache-2.0
"""Where the noise lives. A space is pure maths on named tensors; it owns no model and generates no text.

One step convention for all. The noise of tensor t has standard deviation s_t = plan.sigma * t.scale, where the scale
is 1 (`es.sigma`) or the mean |W| of the tensor's layer (`es.noise_multiplier`). The mean moves by

    step * t.scale * (1/N) * sum_i c_i sign_i eps_i

with step = learning_rate (`es.sigma`; the paper's alpha, 1/sigma folded in) or learning_rate * noise_multiplier, times
the schedule of the learning rate, and in generation 0 of `lora.evolve: ab` times `lora.init_scale`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
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
"""Looks up a tensor of the mean by name."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Noise of rank R for M members: `a` [M, R, in], `b` [M, out, R]; the matrix is B A."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """What members add to one linear layer: y += scaling * (x A^T) B^T.

    `a` is [M, R, in], or [1, R, in] where all members share it; `b` is [M, out, R].
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the factors of one linear weight go: those of member i to `a[i]` [R, in] and `b[i]` [out, R].

    There may be more slots than members, with any strides. `slices` are the rows and columns of the weight in them.
    """

    module: str
    slices: Slices
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class MeanPart:
    """A part of one tensor of the mean, as `Space.accumulate` takes it."""

    name: str
    slices: Slices
    master: torch.Tensor
    start: torch.Tensor | None = None
    served: torch.Tensor | None = None


class Space(ABC):
    """Base of all spaces: which tensors evolve, what a member is, how the mean moves."""

    name: ClassVar[str]
    carrier: ClassVar[Carrier]
    """How a member reaches an engine: an adapter beside shared weights, or dense in place of them."""
    evolves_model: ClassVar[bool]
    """Whether the evolved tensors are the model's own; otherwise they lie beside it."""
    settings: ClassVar[type[BaseModel] | None] = None
    """A pydantic model of what stands beside `space.name`, which `options` then is one of; None takes all as it is."""
    smaller: str = "use space lora"
    """What to do where what evolves does not fit the memory."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options: Any = own_settings(config.space.options, self.settings, "space")

    @property
    def section(self) -> SpaceSection:
        """The config's section of a space that has one, and what follows from it alone."""
        return SpaceSection()

    @property
    def has_pairs(self) -> bool:
        """Whether members of opposite sign lie opposite each other, so that their difference has no curvature in it."""
        return self.section.has_pairs

    @property
    def rank(self) -> int:
        """Rank of the adapters of members; of one's own space its setting `rank`, or 16."""
        return int(self.config.space.options.get("rank", 16))

    @property
    def scaling(self) -> float:
        """What an engine multiplies a member's term with: `scaling` of its `adapter`."""
        return 1.0

    @property
    def has_mean_adapter(self) -> bool:
        """Whether the mean is served with an adapter, too."""
        return self.carrier == "adapter"

    @property
    def summation(self) -> Summation:
        """How the terms of an update are made and added: in a way of its own where any method of that is one's own."""
        methods = ("gradient", "noise", "accumulate", "mover", "_accumulate_fused")
        return "ordered" if all(getattr(type(self), m) is getattr(Space, m) for m in methods) else "own"

    @property
    def default_save_every(self) -> int:
        """Generations between checkpoints where `checkpoint.every` is None.

        0, none, where they are as large as the model, unless the journal may repeat the run on this machine only.
        """
        return 0 if self.evolves_model and self.summation == "ordered" else 10

    def refusal(self, es: EsConfig) -> str | None:
        """What of the section `es` this space cannot do, as a sentence for the user; None where that is nothing."""
        return self.section.refusal(es)

    def width_factor(self, generation: int) -> float:
        """How many times wider than the schedule says a generation's noise is, and how many times longer its step."""
        return 1.0

    def effective(self, layout: Layout) -> str:
        """In words, how wide the noise of generation 0 is."""
        return f"effective sigma {self.widths(layout)} per weight"

    def widths(self, layout: Layout, factor: float = 1.0) -> str:
        """The least and the greatest width of a tensor's noise at generation 0, times a factor, as people read them."""
        scales, width = [t.scale for t in layout.tensors], self.config.es.width
        low, high = width * min(scales), width * max(scales)
        if math.isclose(low, high):
            return f"{low * factor:.4g}"
        return f"{low * factor:.4g} to {high * factor:.4g}"

    def left_out(self, specs: Sequence[TensorSpec], layout: Layout) -> str | None:
        """In words, what of a model the user may expect to evolve and does not."""
        return None

    def mean_bytes(self, layout: Layout, dtype: torch.dtype) -> int:
        """Bytes of the float32 mean that an engine keeps beside what it serves; none where that is the mean itself."""
        is_served = self.evolves_model and self.carrier == "adapter" and dtype == torch.float32
        return 0 if is_served else _float32_bytes(layout)

    def checkpoint_bytes(self, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype, slots: int) -> int:
        """Bytes of a saved mean with `slots` numbers of an optimizer for each that evolves.

        An adapter is saved in float32; a model as it is served, and its mean beside it where that has rounded it.
        """
        state = slots * 4 * layout.parameters
        if not self.evolves_model:
            return _float32_bytes(layout) + state
        model = sum(math.prod(s.shape) for s in specs) * dtype.itemsize
        return model + (0 if dtype == torch.float32 else _float32_bytes(layout)) + state

    @abstractmethod
    def layout(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
        """What evolves, for a model served in `dtype`. Raises ConfigError naming what the model has."""

    def start(self, layout: Layout, name: str, device: torch.device | str) -> torch.Tensor:
        """Starting value, float32, of a tensor that lies beside the model."""
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
        """Standard normals of one tensor, unscaled and unsigned: float32 [M, *shape], or the two factors."""
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
        """The members' adapters of one linear weight in the served dtype; None where they add nothing.

        `slices` cuts rows and columns of the weight: those of B, and those of A. `out` takes the factors, whatever
        its strides: a [M, R, in] and b [M, out, R], of those slices.
        """
        raise NotImplementedError(f"space {self.name} has no adapters")

    def writer(
        self, layout: Layout, master: Master, slots: Sequence[Slots]
    ) -> Callable[[Plan, Sequence[Member]], None]:
        """A function that writes `adapter` of every member to slots 0, 1, ... of every weight, each generation anew.

        What it needs of the slots and the mean it may look up once: they have to stay where they are. Raises ModelError
        where members that are not the mean have no adapter, ConfigError where one's scaling is not `scaling`.
        """

        def write(plan: Plan, members: Sequence[Member]) -> None:
            found = set[float]()
            for s in slots:
                into = s.a[: len(members)], s.b[: len(members)]
                adapter = self.adapter(layout, s.module, master, plan, members, s.slices, into)
                found |= set() if adapter is None else {adapter.scaling}
            if found - {self.scaling}:
                raise ConfigError(f"space {self.name}: an adapter's scaling is {found}, not {self.scaling}; fix it")
            if slots:
                check_adapted(self, bool(found), members)

        return write

    def mover(self, layout: Layout, parts: Sequence[MeanPart]) -> Callable[[Update], None] | None:
        """A function that does `accumulate` of all these parts, without an optimizer; None where no such one is faster.

        What it needs of the parts it may look up once: they have to stay where they are.
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
        """A member's dense tensor, float32: master + fl32(s * noise), one multiply and one add, not rounded yet.

        `master` is the part of the mean that `slices` cuts, all of it without. `out`, of that shape and any dtype,
        takes the numbers rounded once; on a GPU in one pass.
        """
        if member.is_mean:
            return master if out is None else out.copy_(master)
        width = member.sign * plan.sigma * layout[name].scale
        into = None if out is None else out[None]
        return self._scaled(layout, name, plan.generation, [member.noise], [width], master, slices, out=into)[0]

    def _scaled(
        self, layout: Layout, name: str, generation: int, streams: Sequence[int], widths: Sequence[float],
        mean: torch.Tensor, slices: Slices | None = None, dtype: torch.dtype = torch.float32,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`noise.scaled` of one tensor, and the same of the noise of a space that has its own."""
        if type(self).noise is Space.noise:
            return noise_source.scaled(
                _key(layout, name), layout[name].shape, generation, streams, widths,
                mean=mean, dtype=dtype, slices=slices, out=out,
            )  # fmt: skip
        eps = self.noise(layout, name, generation, streams, slices, mean.device)
        assert isinstance(eps, torch.Tensor)
        width = kernels.factors(tuple(widths), mean.device)
        moved = eps.mul_(width.view(-1, *(1 for _ in mean.shape))).add_(mean)
        return moved.to(dtype) if out is None else out.copy_(moved)

    def gradient(self, layout: Layout, name: str, update: Update, slices: Slices, device: torch.device) -> torch.Tensor:
        """(1/N) sum_i c_i sign_i eps_i of one part of one tensor, float32.

        Members are added one by one, so the bits do not depend on device or vector width. An antithetic pair
        costs one noise.
        """
        weights = pair_weights(update)
        total = torch.zeros([s.stop - s.start for s in slices], dtype=torch.float32, device=device)
        for members in batched(list(weights), 16):
            eps = self.noise(layout, name, update.generation, members, slices, device)
            assert isinstance(eps, torch.Tensor)
            for member, part in zip(members, eps, strict=True):
                total.add_(part.mul_(weights[member]))
        return total.mul_(1 / len(update.members))  # CUDA divides by a scalar so; the CPU would not

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

        All coefficients zero move nothing, whatever the optimizer. `start`, the anchor of the decay (arXiv
        2605.30148, L2 form), is needed where `update.decay` is not 0. `served`, that part in the dtype it is served
        in, gets the rounded mean, on a GPU in the same pass.
        """
        if not moves(update, start):
            return
        if optimizer is None and update.summation != "library" and self.fused(master.device):
            self._accumulate_fused(layout, master, name, slices, update, start, served)
            return
        gradient = self.gradient(layout, name, update, slices, master.device)
        direction = gradient if optimizer is None else optimizer.direction(name, gradient)
        if start is not None and update.decay:
            master.sub_((master - start).mul_(update.decay))
        master.add_(direction.mul_(update.step * layout[name].scale))
        if served is not None:
            served.copy_(master)

    def fused(self, device: torch.device | str) -> bool:
        """Whether `accumulate` needs one pass and no temporary there, without an optimizer: parts can be large then."""
        own = type(self)
        has_kernel = kernels.available(device) or compiled.available(device)
        return has_kernel and own.noise is Space.noise and own.gradient is Space.gradient

    def _accumulate_fused(
        self, layout: Layout, master: torch.Tensor, name: str, slices: Slices, update: Update,
        start: torch.Tensor | None, served: torch.Tensor | None,
    ) -> None:  # fmt: skip
        if kernels.available(master.device):
            from evoalign.kernels.update import dense
        else:
            from evoalign.kernels.compiled import dense

        tensor = layout[name]
        dense(
            master, served, start, _key(layout, name), noise_source.table(master.device), tensor.shape,
            noise_source.bounds_of(tensor.shape, slices), update.generation, pair_weights(update),
            len(update.members), update.step * tensor.scale, update.decay,
        )  # fmt: skip


def check_adapted(space: Space, found: bool, members: Sequence[Member]) -> None:
    """Raise ModelError where no adapter was found of members that are not the mean alone."""
    if not found and not all(m.is_mean for m in members):
        raise ModelError(f"space {space.name} has no adapter for members {[m.index for m in members]}; fix it")


def _float32_bytes(layout: Layout) -> int:
    """Of all that a run keeps of the mean, what is frozen among it."""
    return 4 * sum(math.prod(t.shape) for t in (*layout.tensors, *layout.frozen))


def _key(layout: Layout, name: str) -> tuple[int, int]:
    return noise_source.key(layout.seed, "noise", name)


def moves(update: Update, start: torch.Tensor | None) -> bool:
    """Whether an update moves anything. Raises ConfigError where it decays to a `start` that nobody kept."""
    if any(update.coefficients) and update.decay and start is None:
        raise ConfigError(f"an update decays by {update.decay:g}, and es.decay of its config is 0: altered by hand?")
    return any(update.coefficients)


def pair_weights(update: Update) -> dict[int, float]:
    """Summed signed coefficient of each noise; zero sums are left out."""
    weights: dict[int, float] = {}
    for member, coefficient in zip(update.members, update.coefficients, strict=True):
        weights[member.noise] = weights.get(member.noise, 0.0) + member.sign * coefficient
    return {k: w for k, w in weights.items() if w}


def signed(widths: Sequence[float], members: Sequence[Member]) -> torch.Tensor:
    """Each width with each member's sign: [K, M], float64, to be rounded once."""
    signs = torch.tensor([m.sign for m in members], dtype=torch.float64)
    return torch.outer(torch.tensor(widths, dtype=torch.float64), signs)


def batched(items: Sequence[int], size: int) -> Iterator[list[int]]:
    """Consecutive pieces of at most `size` items."""
    for i in range(0, len(items), size):
        yield list(items[i : i + size])


def factor_slices(slices: Slices | None) -> tuple[Slices, Slices]:
    """The parts of A [R, in] and of B [out, R] that belong to some rows and columns of B A."""
    rows, columns = (*(slices or ()), slice(None), slice(None))[:2]
    return (slice(None), columns), (rows, slice(None))
