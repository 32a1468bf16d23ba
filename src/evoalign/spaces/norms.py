# SPDX-License-Identifier: Apache-2.0
"""Dense noise on the gains of normalisation layers and the biases of attention: 0.01 % of a model of 1.5B weights.

Among the tensors that ES moves these move furthest relative to their size (arXiv 2608.27351), which leaves open
whether they alone carry the gain. Gains are often near 1, where numbers of bfloat16 are 0.0078 apart: smaller noise is
rounded away, and a run says how much of it is left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from evoalign.config import Section
from evoalign.errors import ConfigError
from evoalign.spaces.base import Space
from evoalign.spaces.targets import by_layer, evolved, size_of
from evoalign.types import Layout, TensorSpec

_ATTENTION = re.compile(r"attn|attention")


class Settings(Section):
    """None: the tensors follow from the model."""


class Norms(Space):
    """Members have their own gains and attention biases; an engine serves them in one batch or one at a time."""

    name = "norms"
    carrier = "dense"
    evolves_model = True
    settings = Settings

    def layout(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
        """Include the gains and biases; with `es.noise_multiplier` the scale of each is its own mean |W|."""
        kept = [s for s in specs if s.kind == "norm" or (s.kind == "bias" and _ATTENTION.search(s.name))]
        if not kept:
            raise ConfigError("the model has no normalisation layers whose weights could evolve; use another space")
        own = by_layer(self.config)
        return Layout(
            tensors=tuple(evolved(s, size_of(s) if own and s.mean_abs != 0 else 1.0) for s in kept),
            seed=self.config.seed,
            dtype=str(dtype).removeprefix("torch."),
        )
