# SPDX-License-Identifier: Apache-2.0
"""Which share of a model's weights evolves, told before a run: nothing is left out of a training in silence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from evoalign import spaces
from evoalign.config import Config
from evoalign.spaces import Space
from evoalign.spaces.targets import module_of
from evoalign.types import Layout, TensorSpec

SHOWN = 8
"""Names of modules in a line."""
FEW = 8
"""Where one of so many layers evolves, or fewer, it is said: what suits a toy leaves little of a real model."""


def share_lines(config: Config, specs: Sequence[TensorSpec], layout: Layout) -> list[str]:
    """The share of the weights that evolves, or that adapters reach, and of what; a warning where experts do not."""
    reached = {t.module for t in layout.tensors}
    of, rest = [s for s in specs if s.name in reached], [s for s in specs if s.name not in reached]
    space = spaces.create(config)
    says = "evolves" if space.evolves_model else "adapters reach"
    others = _names((s for s in rest if len(s.shape) > 1), beside=of)
    line = f"{says} {percent(of, specs)} of the weights: {_names(of)}" + (f"; not: {others}" if others else "")
    warnings = _passed_over(config, space, specs, rest) if space.carrier == "adapter" else []
    warnings += _few_layers(config, specs, of)
    return [line, *(f"warning: {told}" for told in warnings)]


def _few_layers(config: Config, specs: Sequence[TensorSpec], of: Sequence[TensorSpec]) -> list[str]:
    """What a setting of another, smaller model leaves out of this one."""
    layers, reached = ({s.layer for s in some} - {None} for some in (specs, of))
    chosen = getattr(getattr(config, config.space.name, None), "target_layers", None)
    if chosen is None or len(reached) * FEW >= len(layers):
        return []
    setting = f"{config.space.name}.target_layers"
    return [f"{len(reached)} of {len(layers)} layers evolves, {setting} {chosen}; {setting}=null takes all layers"]


def percent(some: Iterable[TensorSpec], of: Iterable[TensorSpec]) -> str:
    """The share that some tensors are of the numbers of others."""
    part, total = (sum(math.prod(s.shape) for s in specs) for specs in (some, of))
    return f"{100.0 if part == total else min(99.9, 100 * part / total):.3g} %"


def _passed_over(config: Config, space: Space, specs: Sequence[TensorSpec], rest: Sequence[TensorSpec]) -> list[str]:
    """What takes no adapter though nobody chose so."""
    experts = [s for s in rest if s.layer is not None and (".experts." in s.name or len(s.shape) == 3)]
    fused = [s for s in experts if s.kind == "other" and len(s.shape) == 3]
    apart = [s for s in experts if s.kind == "other" and len(s.shape) == 2 and not config.engine.carries_experts]
    unknown, taken = ([s for s in of if not s.peft] for of in (experts, [s for s in rest if s.kind == "linear"]))
    found: list[str] = []
    for mute, why in (
        (fused, "the model has them fused in a form that is not taken apart; use space full"),
        (apart, f"engine {config.engine.name} gives members none of their own; use engine transformers"),
        ([s for s in unknown if s.kind == "expert" and not space.evolves_model],
         "PEFT has no adapter of theirs; use space lowrank"),
    ):  # fmt: skip
        if mute:
            found.append(f"the experts, {percent(mute, specs)} of the weights, do not evolve: {why}")
    if taken and not space.evolves_model:
        found.append(
            f"{_names(taken)} outside the experts, {percent(taken, specs)} of the weights, do not evolve: PEFT takes "
            "these names for those of experts; use space lowrank"
        )
    return found


def _names(specs: Iterable[TensorSpec], beside: Sequence[TensorSpec] = ()) -> str:
    """The names of modules, each once. `beside`: tensors that are named before; what other layers have of them is
    said to be of other layers, for else the same name would be on both sides."""
    named: dict[str, set[int | None]] = {}
    for spec in beside:
        named.setdefault(_name(spec), set()).add(spec.layer)
    names: dict[str, None] = {}
    for spec in specs:
        name = _name(spec)
        others = name in named and spec.layer not in named[name]
        names[f"{name} of other layers" if others else name] = None
    return ", ".join([*names][:SHOWN]) + (" ..." if len(names) > SHOWN else "")


def _name(spec: TensorSpec) -> str:
    module = module_of(spec.name)
    return f"experts.{module}" if ".experts." in spec.name else module
