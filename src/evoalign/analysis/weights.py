# SPDX-License-Identifier: Apache-2.0
"""Weight changes of targets from their base model, and the parts of a causal language model.

    all            every tensor
    unembedding    the matrix that computes the logits (the head)
    embeddings     token embeddings, and position embeddings where they are learned
    attention      matrices and biases of the layers' attention, without norms
    mlp            other matrices and biases of the layers, experts and routers included, without norms
    norms          norms of the layers, and the last norm
    layer K        all of layer K, norms included

Where the head is the embedding matrix (tied), there is no part `unembedding`.

Changes are read in blocks of rows, and an adapter's change stays factored: see `evoalign.checks.distance`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evoalign.analysis.targets import Target
from evoalign.checks.distance import Base, Change, changes_of
from evoalign.engines.specs import specs_of
from evoalign.errors import ConfigError
from evoalign.models.origin import empty_model, model_path

ALL, UNEMBEDDING, EMBEDDINGS, ATTENTION, MLP, NORMS = "all", "unembedding", "embeddings", "attention", "mlp", "norms"
LAYERS = "layers"
"""Stands for each layer by itself."""
KINDS = (ALL, UNEMBEDDING, EMBEDDINGS, ATTENTION, MLP, NORMS)
OTHER = "other"
"""Tensors outside the layers that are of none of these kinds."""
_ATTENTION = re.compile(r"(?:^|[._])(?:attn|attention)(?:[._]|$)", re.IGNORECASE)


def parts_of(model: Any) -> dict[str, frozenset[str]]:
    """Return the checkpoint names of the tensors in each part of the model; layers come last, in order."""

    def module(name: str) -> str:
        return name.rpartition(".")[0]

    specs = specs_of(model, lambda _: math.nan)
    head = head_of(model)
    norms = {module(s.name) for s in specs if s.kind == "norm"}
    found: dict[str, set[str]] = {ALL: {s.name for s in specs}}
    found[UNEMBEDDING] = {s.name for s in specs if s.name == head}
    found[EMBEDDINGS] = {s.name for s in specs if s.kind == "embedding" and s.name != head}
    inside = [s for s in specs if s.layer is not None and module(s.name) not in norms]
    found[ATTENTION] = {s.name for s in inside if _ATTENTION.search(s.name)}
    found[MLP] = {s.name for s in inside if s.name not in found[ATTENTION]}
    found[NORMS] = {s.name for s in specs if module(s.name) in norms}
    for layer in sorted({s.layer for s in specs if s.layer is not None}):
        found[f"layer {layer}"] = {s.name for s in specs if s.layer == layer}
    return {part: frozenset(names) for part, names in found.items() if names}


def chosen(known: Mapping[str, frozenset[str]], wanted: Sequence[str]) -> list[str]:
    """Return the requested parts, each once, without the head where it is tied. Raises ConfigError."""
    found: dict[str, None] = {}
    for name in wanted:
        if name == LAYERS:
            found.update(dict.fromkeys(part for part in known if part not in KINDS))
        elif name in known:
            found[name] = None
        elif name != UNEMBEDDING:
            raise ConfigError(f"parts: the model has no part {name!r}; it has {', '.join(known)}, and {LAYERS}")
    if not found:
        raise ConfigError(f"parts: {', '.join(wanted) or 'none'} leaves no part to perturb; set parts=[{EMBEDDINGS}]")
    return list(found)


def head_of(model: Any) -> str:
    """Return the name of the head's weight, or "" where it is tied."""
    head = model.get_output_embeddings()
    return next((f"{path}.weight" for path, module in model.named_modules() if module is head), "")


def embeddings_of(model: Any) -> str:
    """Return the name of the token embedding matrix."""
    words = model.get_input_embeddings()
    return next(f"{path}.weight" for path, module in model.named_modules() if module is words)


@dataclass(frozen=True, slots=True)
class Weights:
    """A target's weight changes by tensor name, read on access; a tensor that is missing did not change.

    `parts` names all tensors of the base model by part, tied ones once. `unembedding` is the matrix that computes the
    logits; where it is `tied`, it is the embedding matrix and belongs to that part.
    """

    target: Target
    base: Base
    parts: Mapping[str, frozenset[str]]
    unembedding: str
    tied: bool
    changes: Mapping[str, Change]

    def part_of(self, name: str) -> str:
        """Return the part of a tensor that is neither `all` nor a layer."""
        return next(part for part in (*KINDS[1:], OTHER) if name in self.parts.get(part, ()))


def read(targets: Sequence[Target]) -> list[Weights]:
    """Return the changes of targets that share a base model, which is opened once.

    Raises ConfigError for several base models, and ModelError where a tensor is missing or has another shape.
    """

    def place(target: Target) -> tuple[str, str | None]:
        path, revision = model_path(target.config.model), target.config.model.revision
        return (os.path.realpath(path), None) if os.path.isdir(path) else (path, revision)  # noqa: PTH112

    first = targets[0]
    for target in targets[1:]:
        if place(target) != place(first):
            raise ConfigError(
                f"{first.name} and {target.name} have different base models, {first.config.model.name} and "
                f"{target.config.model.name}; compare targets of one base model"
            )
    base, model = Base(first.config), empty_model(first.config.model)
    head, words = head_of(model), embeddings_of(model)
    tied = head not in base.specs
    parts = parts_of(model)
    rest = parts[ALL].difference(*(parts.get(kind, ()) for kind in KINDS[1:]))
    kinds = {kind: parts[kind] for kind in KINDS if kind in parts}
    parts = {**kinds, **({OTHER: rest} if rest else {}), **parts}
    return [Weights(t, base, parts, words if tied else head, tied, changes_of(t.weights, base)) for t in targets]
