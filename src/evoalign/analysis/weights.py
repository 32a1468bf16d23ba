# SPDX-License-Identifier: Apache-2.0
"""What every analysis of weights reads: of each target, tensor by tensor, its change from the base model.

A target is a run, a saved mean, a Hugging Face checkpoint or a PEFT adapter, made by evoalign or not. The changes are
those of `evoalign.checks.distance`: nothing but blocks of rows is held, and an adapter's change stays its factors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evoalign.analysis.parts import KINDS, head_of, parts_of, words_of
from evoalign.analysis.targets import Target
from evoalign.checks.distance import Base, Change, changes_of
from evoalign.errors import ConfigError
from evoalign.models.origin import empty_model, model_path

OTHER = "other"
"""What is in no layer and of no kind that `evoalign.analysis.parts` knows."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A target's changes by name, each read when it is asked for; what is not among them did not change.

    `parts` has the names of all tensors of the base model, tied ones once, by part and layer. `unembedding` is the one
    that gives the logits; `tied`: it is that of the embeddings, too, and in `parts` among them.
    """

    target: Target
    base: Base
    parts: Mapping[str, frozenset[str]]
    unembedding: str
    tied: bool
    changes: Mapping[str, Change]

    def part_of(self, name: str) -> str:
        """The kind of a tensor: that part of `parts` which is neither all nor a layer."""
        return next(part for part in (*KINDS[1:], OTHER) if name in self.parts.get(part, ()))


def read(targets: Sequence[Target]) -> list[Weights]:
    """The changes of targets of one base model, which is opened once for all.

    Raises ConfigError where they are of several, and ModelError where a tensor is missing or of another shape.
    """
    first = targets[0]
    place = _place(first)
    for target in targets[1:]:
        if _place(target) != place:
            raise ConfigError(
                f"{first.name} and {target.name} have changed from different base models, {first.config.model.name} "
                f"and {target.config.model.name}; compare what has one base"
            )
    base, model = Base(first.config), empty_model(first.config.model)
    head, words = head_of(model), words_of(model)
    tied = head not in base.specs
    parts = _with_rest(parts_of(model))
    return [Weights(t, base, parts, words if tied else head, tied, changes_of(t.weights, base)) for t in targets]


def _with_rest(parts: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """With what is of no kind; kinds first, then layers in their order."""
    all_, *others = KINDS
    rest = parts[all_].difference(*(parts.get(kind, ()) for kind in others))
    kinds = {kind: parts[kind] for kind in KINDS if kind in parts}
    return {**kinds, **({OTHER: rest} if rest else {}), **parts}


def _place(target: Target) -> tuple[str, str | None]:
    """Where the base model is; a folder under another name is the same."""
    path = model_path(target.config.model)
    return (os.path.realpath(path), None) if os.path.isdir(path) else (path, target.config.model.revision)  # noqa: PTH112
