# SPDX-License-Identifier: Apache-2.0
"""Which share of a model's weights evolves, told before a run: nothing is left out of a training in silence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from evoalign import spaces
from evoalign.config import Config
from evoalign.spaces.targets import module_of
from evoalign.types import Layout, TensorSpec

SHOWN = 8
"""Names of modules in a line."""


def share_lines(config: Config, specs: Sequence[TensorSpec], layout: Layout) -> list[str]:
    """The share of the weights that evolves, or that adapters reach, and of what; a warning where experts do not."""
    reached = {t.module for t in layout.tensors}
    of, rest = [s for s in specs if s.name in reached], [s for s in specs if s.name not in reached]
    says = "evolves" if spaces.create(config).evolves_model else "adapters reach"
    others = _names(s for s in rest if len(s.shape) > 1)
    line = f"{says} {percent(of, specs)} of the weights: {_names(of)}" + (f"; not: {others}" if others else "")
    return [line, *(f"warning: {told}" for told in _passed_over(config, specs, rest))]


def percent(some: Iterable[TensorSpec], of: Iterable[TensorSpec]) -> str:
    """The share that some tensors are of the numbers of others."""
    part, total = (sum(math.prod(s.shape) for s in specs) for specs in (some, of))
    return f"{100.0 if part == total else min(99.9, 100 * part / total):.3g} %"


def _passed_over(config: Config, specs: Sequence[TensorSpec], rest: Sequence[TensorSpec]) -> list[str]:
    """What does not evolve though nobody chose so."""
    if config.space.name not in ("lora", "lowrank"):
        return []
    found: list[str] = []
    experts = [s for s in rest if s.layer is not None and (".experts." in s.name or len(s.shape) == 3)]
    apart = config.engine.carries_experts
    for mute, why in (
        ([s for s in experts if s.kind == "other" and len(s.shape) == 3],
         f"the model has them fused in a form that space {config.space.name} does not take apart; use space full"),
        ([s for s in experts if s.kind == "other" and len(s.shape) == 2 and not apart],
         f"engine {config.engine.name} gives members none of their own; use engine transformers"),
        ([s for s in experts if s.kind == "expert" and not s.peft and config.space.name == "lora"],
         "PEFT has no adapter of theirs; use space lowrank"),
    ):  # fmt: skip
        if mute:
            found.append(f"the experts, {percent(mute, specs)} of the weights, do not evolve: {why}")
    taken = [s for s in rest if s.kind == "linear" and not s.peft]
    if taken and config.space.name == "lora":
        names = _names(taken)
        found.append(
            f"{names} outside the experts, {percent(taken, specs)} of the weights, do not evolve: PEFT takes these "
            "names for those of experts; use space lowrank"
        )
    return found


def _names(specs: Iterable[TensorSpec]) -> str:
    own = ((s.name, module_of(s.name)) for s in specs)
    names = list(dict.fromkeys(f"experts.{module}" if ".experts." in name else module for name, module in own))
    return ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")
