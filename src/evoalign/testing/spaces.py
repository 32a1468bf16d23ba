# SPDX-License-Identifier: Apache-2.0
"""Contract tests of spaces: noise is a pure function, members are made of it, and updates follow the formula.

A check takes the space, one of its layouts and the specs of that layout. Expected values are computed in float64 from
`Space.noise`, independently of `Space.accumulate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from evoalign.spaces import Adapter, Factors, Space
from evoalign.types import MEAN, EvolvedTensor, Layout, Member, Plan, Slices, TensorKind, TensorSpec, Update, population

Check: TypeAlias = Callable[[Space, Layout, Sequence[TensorSpec]], None]

_SIGMA, _STEP, _MEMBERS = 0.01, 0.005, 6


def _layer(index: int) -> list[TensorSpec]:
    rows: list[tuple[str, tuple[int, ...], TensorKind, float]] = [
        ("self_attn.q_proj.weight", (12, 16), "linear", 0.03),
        ("self_attn.q_proj.bias", (12,), "bias", 0.5),
        ("self_attn.k_proj.weight", (6, 16), "linear", 0.05),
        ("self_attn.v_proj.weight", (6, 16), "linear", 0.02),
        ("self_attn.o_proj.weight", (16, 12), "linear", 0.03),
        ("mlp.gate_proj.weight", (20, 16), "linear", 0.04),
        ("mlp.up_proj.weight", (20, 16), "linear", 0.04),
        ("mlp.down_proj.weight", (16, 20), "linear", 0.04),
        ("input_layernorm.weight", (16,), "norm", 1.0),
    ]
    return [TensorSpec(f"model.layers.{index}.{name}", shape, kind, index, mean) for name, shape, kind, mean in rows]


SPECS: tuple[TensorSpec, ...] = (
    TensorSpec("model.embed_tokens.weight", (30, 16), "embedding", None, 0.1),
    *_layer(0),
    *_layer(1),
    TensorSpec("model.norm.weight", (16,), "norm", None, 1.0),
)
"""Tensors of a small model: two layers with the names of Qwen2 and Llama."""


def check_space(space: Space, specs: Sequence[TensorSpec] = SPECS) -> None:
    """Run all of `CHECKS` with layouts in float32 and in bfloat16. Raises AssertionError."""
    for dtype in (torch.float32, torch.bfloat16):
        layout = space.layout(specs, dtype)
        for check in CHECKS:
            check(space, layout, specs)


def check_layout(space: Space, layout: Layout, specs: Sequence[TensorSpec]) -> None:
    """Require a repeatable layout with unique names, tensors of the model, matching shapes and positive scales."""
    assert layout.tensors, "the layout has no evolved tensor"
    names = [t.name for t in (*layout.tensors, *layout.frozen)]
    assert len(set(names)) == len(names), (
        f"names repeat in the layout: {sorted({n for n in names if names.count(n) > 1})}"
    )
    of_model = {s.name: s for s in specs}
    for tensor in (*layout.tensors, *layout.frozen):
        assert tensor.module in of_model or (not tensor.module and layout.modules), (
            f"{tensor.name} belongs to {tensor.module!r}, which the model does not have"
        )
        assert math.isfinite(tensor.scale) and tensor.scale > 0, (
            f"{tensor.name} has scale {tensor.scale}, which is not a positive number"
        )
        if space.evolves_model:
            assert tensor.name == tensor.module, f"{tensor.name} is not a tensor of the model"
            shape = of_model[tensor.name].shape
            assert tensor.shape == shape, f"{tensor.name} has shape {tensor.shape}, but {shape} in the model"
    reached = [*layout.modules, *(t.module for t in (*layout.tensors, *layout.frozen) if t.module)]
    for module in reached if space.carrier == "adapter" else ():
        kind = of_model[module].kind
        assert kind in ("linear", "expert"), f"{module} is a {kind}; only linear weights can have an adapter"
    assert space.layout(specs, layout.torch_dtype) == layout, "layout() returns another layout for the same model"


def check_start(space: Space, layout: Layout, specs: Sequence[TensorSpec]) -> None:
    """Require that added tensors start repeatably in float32 with the layout's shape, leaving the model unchanged."""
    if space.evolves_model:
        return
    for tensor in (*layout.tensors, *layout.frozen):
        start = space.start(layout, tensor.name, "cpu")
        assert start.dtype == torch.float32, f"{tensor.name} starts in {start.dtype}, not float32"
        assert tuple(start.shape) == tensor.shape, f"{tensor.name} starts with shape {start.shape}, not {tensor.shape}"
        assert torch.equal(start, space.start(layout, tensor.name, "cpu")), f"start() of {tensor.name} changes"
    for module, added in _added(space, layout, _masters(space, layout), _plan((MEAN,))).items():
        assert not added.any(), f"the tensors at the start change {module} of the model"


def check_noise_is_pure(space: Space, layout: Layout, specs: Sequence[TensorSpec]) -> None:
    """Require noise with the same bits in any order and grouping of members.

    Another member, generation or tensor has other noise.
    """
    again, seen = space.layout(specs, layout.torch_dtype), list[bytes]()
    for tensor in layout.tensors:
        first = _parts(space, layout, tensor.name, 1, range(_MEMBERS))
        for part in first:
            assert part.dtype == torch.float32, f"the noise of {tensor.name} is {part.dtype}, not float32"
        order = [4, 1, 5, 0, 3, 2]
        for part, other in zip(first, _parts(space, again, tensor.name, 1, order), strict=True):
            assert torch.equal(part[order], other), f"the noise of {tensor.name} depends on the order of members"
        for member in range(_MEMBERS):
            for part, other in zip(first, _parts(space, layout, tensor.name, 1, [member]), strict=True):
                assert torch.equal(part[member], other[0]), f"the noise of {tensor.name} depends on the other members"
        seen += [p[m].numpy().tobytes() for p in first for m in range(_MEMBERS)]
        seen += [p[0].numpy().tobytes() for p in _parts(space, layout, tensor.name, 2, [0])]
    assert len(set(seen)) == len(seen), "two tensors, members or generations have the same noise"


def check_noise_slices(space: Space, layout: Layout, specs: Sequence[TensorSpec]) -> None:
    """Require that the noise of a slice equals that slice of the whole, bit for bit: engines shard and fuse tensors."""
    for tensor in layout.tensors:
        whole = space.noise(layout, tensor.name, 3, [0, 5])
        for slices in _slices(tensor.shape):
            part = space.noise(layout, tensor.name, 3, [0, 5], slices)
            if isinstance(whole, Factors):
                assert isinstance(part, Factors), f"the noise of {tensor.name} is Factors, but not in a slice"
                same = torch.equal(part.b, whole.b[:, slices[0]]) and torch.equal(part.a, whole.a[:, :, slices[1]])
            else:
                assert isinstance(part, torch.Tensor), f"the noise of {tensor.name} is Factors in a slice only"
                same = torch.equal(part, whole[(slice(None), *slices)])
            assert same, f"the noise of {tensor.name} in {slices} differs from the slice of the whole"


def check_noise_is_standard(space: Space, layout: Layout, specs: Sequence[TensorSpec]) -> None:
    """Require mean 0 and variance 1 over 256 members and all tensors; of factors, the product over sqrt(rank)."""
    drawn = torch.cat([_eps(space, layout, t, 0, range(256)).reshape(-1) for t in layout.tensors])
    mean, variance = float(drawn.mean()), float(drawn.var())
    error = 1 / math.sqrt(len(drawn))
    assert abs(mean) < max(0.02, 4 * error), f"the noise has mean {mean:.3f}, not 0"
    assert abs(variance - 1) < max(0.05, 6 * error), f"the noise has variance {variance:.3f}, not 1"


def check_members(space: Space, layout: Layout, specs: Sequence[TensorSpec]) -> None:
    """Require that a member is mean + sign * sigma * scale * noise, and does not depend on the other members."""
    masters = _masters(space, layout)
    # A pair is equal if two factors of a weight evolve from 0: (-B) (-A) is B A.
    modules = [t.module for t in layout.tensors]
    members = population(_MEMBERS, antithetic=len(set(modules)) == len(modules))
    mean = _added(space, layout, masters, _plan((MEAN,)))
    served = _added(space, layout, masters, _plan(members))
    alone = [_added(space, layout, masters, _plan((m,))) for m in members]
    for module, added in served.items():
        away = added - mean[module]
        for i in range(_MEMBERS):
            assert away[i].any(), f"member {i} equals the mean in {module}"
            assert torch.equal(added[i], alone[i][module][0]), f"member {i} depends on the other members in {module}"
            for j in range(i):
                assert not torch.equal(away[i], away[j]), f"members {j} and {i} are equal in {module}"
    for i, member in enumerate(members):
        want = _intended(space, layout, masters, member)
        for module, added in served.items():
            away = added[i] - mean[module][0]
            formula = f"member {i} is not mean + sign * sigma * scale * noise in {module}"
            _close(away, want[module], _tolerance(layout), formula)


def check_update(space: Space, layout: Layout, specs: Sequence[TensorSpec]) -> None:
    """Require that an update changes the mean by step * scale * (1/N) sum_i c_i sign_i eps_i."""
    for antithetic in (False, True):
        update = _update(antithetic=antithetic)
        for tensor in layout.tensors:
            move = _moved(space, layout, tensor, update)
            want = _move(space, layout, tensor, update)
            odd = f"the update of {tensor.name} does not follow the documented formula"
            _close(move, want, _tolerance(layout), odd)


def check_update_is_pure(space: Space, layout: Layout, specs: Sequence[TensorSpec]) -> None:
    """Require that an update repeats to the bit, and that updating slices updates the whole."""
    update = _update()
    for tensor in layout.tensors:
        whole = _moved(space, layout, tensor, update)
        assert torch.equal(whole, _moved(space, layout, tensor, update)), (
            f"the update of {tensor.name} repeats differently"
        )
        parts = torch.zeros(tensor.shape)
        half = tensor.shape[0] // 2
        for rows in (slice(0, half), slice(half, tensor.shape[0])):
            part = (rows, *(slice(0, n) for n in tensor.shape[1:]))
            space.accumulate(layout, parts[part], tensor.name, part, update)
        _close(parts, whole, 1e-5, f"updating {tensor.name} by slices differs from updating the whole")


def check_zero_coefficients(space: Space, layout: Layout, specs: Sequence[TensorSpec]) -> None:
    """Require that an update with all coefficients zero changes nothing, even with decay."""
    update = Update(0, 0, population(_MEMBERS), (0.0,) * _MEMBERS, _SIGMA, _STEP, decay=0.5)
    for tensor in layout.tensors:
        master = _random(tensor.shape)
        before = master.clone()
        space.accumulate(layout, master, tensor.name, _whole(tensor.shape), update, torch.zeros(tensor.shape))
        assert torch.equal(master, before), f"an update with all coefficients zero changes {tensor.name}"


def check_decay(space: Space, layout: Layout, specs: Sequence[TensorSpec]) -> None:
    """Require that decay removes its share of the distance from the start."""
    update = _update(decay=0.25)
    for tensor in layout.tensors:
        master = _random(tensor.shape)
        start = master - 1.0
        before = master.double()
        space.accumulate(layout, master, tensor.name, _whole(tensor.shape), update, start)
        want = start.double() + 0.75 * (before - start.double()) + _move(space, layout, tensor, update)
        odd = f"the decay of {tensor.name} does not follow the documented formula"
        _close(master - start, want - start.double(), 1e-4, odd)


def check_parts(space: Space, layout: Layout, specs: Sequence[TensorSpec]) -> None:
    """Require that members and updates of a slice equal that slice of the whole, rounded to the served dtype."""
    masters, plan, update = _masters(space, layout), _plan(population(_MEMBERS)), _update()
    for tensor in layout.tensors:
        for part in _slices(tensor.shape):
            master = _random(tensor.shape)[part].clone()
            served = torch.zeros(master.shape, dtype=layout.torch_dtype)
            space.accumulate(layout, master, tensor.name, part, update, served=served)
            assert torch.equal(served, master.to(served.dtype)), f"the served {tensor.name} is not the rounded mean"
            if space.carrier == "dense":
                member, mean = plan.members[2], _random(tensor.shape)
                want = space.perturbed(layout, tensor.name, mean, plan, member)[part].to(served.dtype)
                space.perturbed(layout, tensor.name, mean[part], plan, member, part, served)
                assert torch.equal(served, want), f"member 2 of {tensor.name} differs from the slice of the whole"
    shapes = {s.name: s.shape for s in specs}
    for module in layout.modules if space.carrier == "adapter" else ():
        for rows, columns in _slices(shapes[module]):
            whole = space.adapter(layout, module, masters.__getitem__, plan, plan.members)
            assert whole is not None, f"adapter() returns None for {module}"
            want = whole.a[..., columns].expand(_MEMBERS, -1, -1), whole.b[:, rows]
            padded = [torch.ones(n, i + 3, j + 5, dtype=layout.torch_dtype) for n, i, j in (w.shape for w in want)]
            a, b = (p[:, : w.shape[1], : w.shape[2]] for p, w in zip(padded, want, strict=True))
            cut = space.adapter(layout, module, masters.__getitem__, plan, plan.members, (rows, columns), (a, b))
            assert cut is not None, f"adapter() returns None for {module}"
            same = torch.equal(a, want[0]) and torch.equal(b, want[1])
            if whole.bias is not None:
                assert cut.bias is not None and space.has_bias, f"has_bias is false, but {module} has a bias"
                same = same and torch.equal(cut.bias, whole.bias[:, rows])
            assert same, f"the factors of {module} in {rows}, {columns} differ from the slices of the whole"
            a.fill_(1)
            b.fill_(1)
            assert all(bool((p == 1).all()) for p in padded), f"adapter() writes outside the given buffers for {module}"


CHECKS: tuple[Check, ...] = (
    check_layout,
    check_start,
    check_noise_is_pure,
    check_noise_slices,
    check_noise_is_standard,
    check_members,
    check_update,
    check_update_is_pure,
    check_zero_coefficients,
    check_decay,
    check_parts,
)


def _whole(shape: Sequence[int]) -> Slices:
    return tuple(slice(0, n) for n in shape)


def _slices(shape: Sequence[int]) -> list[Slices]:
    """Return slices of rows, of columns, of both, and of a single element."""
    rows = [(slice(n // 3, max(n // 3 + 1, n - 1)),) for n in shape[:1]]
    parts = [(*rows[0], *(slice(0, n) for n in shape[1:])), tuple(slice(n // 2, n) for n in shape)]
    parts.append((slice(0, shape[0]), *(slice(n // 2, n // 2 + 1) for n in shape[1:])))
    parts.append(tuple(slice(n - 1, n) for n in shape))
    return parts


def _random(shape: Sequence[int]) -> torch.Tensor:
    return 0.05 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _masters(space: Space, layout: Layout) -> dict[str, torch.Tensor]:
    """Return a mean; zeros if the model's weights evolve, so that members' noise is not rounded."""
    tensors = (*layout.tensors, *layout.frozen)
    if space.evolves_model:
        return {t.name: torch.zeros(t.shape) for t in tensors}
    return {t.name: space.start(layout, t.name, "cpu") for t in tensors}


def _plan(members: tuple[Member, ...], sigma: float = _SIGMA) -> Plan:
    return Plan(generation=2, sigma=sigma, members=members)


def _added(space: Space, layout: Layout, masters: dict[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
    """Return what each member adds to each weight of the model, float64 [M, *shape]."""
    if space.carrier == "dense":
        each = {
            t.name: [space.perturbed(layout, t.name, masters[t.name], plan, m) for m in plan.members]
            for t in layout.tensors
        }
        return {name: torch.stack(values).double() for name, values in each.items()}
    added: dict[str, torch.Tensor] = {}
    for module in layout.modules:
        adapter = space.adapter(layout, module, masters.__getitem__, plan, plan.members)
        added[module] = torch.zeros(len(plan.members), 1, 1).double() if adapter is None else _product(layout, adapter)
    return added


def _intended(
    space: Space, layout: Layout, masters: dict[str, torch.Tensor], member: Member
) -> dict[str, torch.Tensor]:
    """Return what a member's noise adds to each weight of the model."""
    noise = {
        t.name: _eps(space, layout, t, 2, [member.noise])[0] * (member.sign * _SIGMA * t.scale) for t in layout.tensors
    }
    if space.evolves_model:
        return noise
    moved = {name: (m + noise[name] if name in noise else m).float() for name, m in masters.items()}
    before, after = (_added(space, layout, means, _plan((MEAN,))) for means in (masters, moved))
    return {module: after[module][0] - before[module][0] for module in after}


def _product(layout: Layout, adapter: Adapter) -> torch.Tensor:
    """Return what an adapter adds, float64 [M, out, in]; a bias is one more column."""
    parts = [adapter.a, adapter.b, *([] if adapter.bias is None else [adapter.bias])]
    for part in parts:
        assert part.dtype == layout.torch_dtype, f"an adapter has dtype {part.dtype}, not {layout.torch_dtype}"
    columns = [adapter.b.double() @ adapter.a.double(), *(part.double()[..., None] for part in parts[2:])]
    return adapter.scaling * torch.cat(columns, dim=-1)


def _parts(space: Space, layout: Layout, name: str, generation: int, members: Sequence[int]) -> list[torch.Tensor]:
    drawn = space.noise(layout, name, generation, members)
    return [drawn.a, drawn.b] if isinstance(drawn, Factors) else [drawn]


def _eps(space: Space, layout: Layout, tensor: EvolvedTensor, generation: int, members: Sequence[int]) -> torch.Tensor:
    """Return noise of variance 1, float64 [M, *shape]."""
    drawn = space.noise(layout, tensor.name, generation, members)
    if isinstance(drawn, Factors):
        return drawn.b.double() @ drawn.a.double() / math.sqrt(drawn.a.shape[1])
    return drawn.double()


def _update(*, antithetic: bool = False, decay: float = 0.0) -> Update:
    coefficients = (1.3, -0.2, 0.4, 0.0, -1.9, 0.4)
    return Update(4, 3, population(_MEMBERS, antithetic=antithetic), coefficients, _SIGMA, _STEP, decay)


def _move(space: Space, layout: Layout, tensor: EvolvedTensor, update: Update) -> torch.Tensor:
    eps = _eps(space, layout, tensor, update.generation, [m.noise for m in update.members])
    signs = [m.sign * c for m, c in zip(update.members, update.coefficients, strict=True)]
    total = torch.tensordot(torch.tensor(signs, dtype=torch.float64), eps, dims=1)
    return update.step * tensor.scale * total / len(signs)


def _moved(space: Space, layout: Layout, tensor: EvolvedTensor, update: Update) -> torch.Tensor:
    master = torch.zeros(tensor.shape)
    space.accumulate(layout, master, tensor.name, _whole(tensor.shape), update)
    return master


def _tolerance(layout: Layout) -> float:
    """Return the relative tolerance; factors in bfloat16 are rounded to 8 bits."""
    return 1e-5 if layout.torch_dtype == torch.float32 else 2e-2


def _close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str) -> None:
    distance = float((got.double() - want.double()).norm() / want.double().norm())
    assert distance <= tolerance, f"{what}: relative distance {distance:.2g}, at most {tolerance:.0e} is allowed"
