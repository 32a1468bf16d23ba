# SPDX-License-Identifier: Apache-2.0
"""The parts of a causal language model, by what its modules are: which tensors lie in which.

    all            every tensor
    unembedding    the matrix that makes logits of the last layer's output (the head)
    embeddings     what tokens, and positions where they are learned, are looked up in
    attention      matrices and biases of the layers' attention, norms apart
    mlp            the other matrices and biases of the layers, those of experts and routers among them, norms apart
    norms          of the layers, and after the last
    layer K        all of layer K, norms too

Where the head is the embedding matrix (tied) there is no unembedding apart from `embeddings`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from evoalign.engines.specs import specs_of
from evoalign.errors import ConfigError

ALL, UNEMBEDDING, EMBEDDINGS, ATTENTION, MLP, NORMS = "all", "unembedding", "embeddings", "attention", "mlp", "norms"
LAYERS = "layers"
"""Stands for each layer by itself."""
KINDS = (ALL, UNEMBEDDING, EMBEDDINGS, ATTENTION, MLP, NORMS)
_ATTENTION = re.compile(r"(?:^|[._])(?:attn|attention)(?:[._]|$)", re.IGNORECASE)


def parts_of(model: Any) -> dict[str, frozenset[str]]:
    """The tensors, by their names in checkpoints, of each part that the model has; the layers last, in their order."""
    specs = specs_of(model, lambda _: math.nan)
    head = head_of(model)
    norms = {_module(s.name) for s in specs if s.kind == "norm"}
    found: dict[str, set[str]] = {ALL: {s.name for s in specs}}
    found[UNEMBEDDING] = {s.name for s in specs if s.name == head}
    found[EMBEDDINGS] = {s.name for s in specs if s.kind == "embedding" and s.name != head}
    inside = [s for s in specs if s.layer is not None and _module(s.name) not in norms]
    found[ATTENTION] = {s.name for s in inside if _ATTENTION.search(s.name)}
    found[MLP] = {s.name for s in inside if s.name not in found[ATTENTION]}
    found[NORMS] = {s.name for s in specs if _module(s.name) in norms}
    for layer in sorted({s.layer for s in specs if s.layer is not None}):
        found[f"layer {layer}"] = {s.name for s in specs if s.layer == layer}
    return {part: frozenset(names) for part, names in found.items() if names}


def chosen(known: Mapping[str, frozenset[str]], wanted: Sequence[str]) -> list[str]:
    """The parts that are asked for, each once; one that a tied head leaves out is passed over. Raises ConfigError."""
    found: dict[str, None] = {}
    for name in wanted:
        if name == LAYERS:
            found.update(dict.fromkeys(part for part in known if part not in KINDS))
        elif name in known:
            found[name] = None
        elif name != UNEMBEDDING:
            raise ConfigError(f"parts: the model has no part {name!r}; it has {', '.join(known)}, and {LAYERS}")
    if not found:
        raise ConfigError(f"parts: {', '.join(wanted) or 'none'} leaves no part to perturb; take {EMBEDDINGS}")
    return list(found)


def head_of(model: Any) -> str:
    """What the head's weight is called where it is a tensor of its own."""
    head = model.get_output_embeddings()
    return next((f"{path}.weight" for path, module in model.named_modules() if module is head), "")


def words_of(model: Any) -> str:
    """What the embedding matrix of the tokens is called."""
    words = model.get_input_embeddings()
    return next(f"{path}.weight" for path, module in model.named_modules() if module is words)


def _module(name: str) -> str:
    return name.rpartition(".")[0]
