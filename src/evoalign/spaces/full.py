# SPDX-License-Identifier: Apache-2.0
"""Dense Gaussian noise on all the model's tensors, W + s eps_i (Qiu et al., arXiv 2509.24372).

Deviations from the published code: noise is independent across tensors (there, equal shapes got equal noise), a
tensor is restored from the master and never by subtraction, and the update is summed in float32 and applied to a
float32 master. A norm weight near 1 hardly moves in bfloat16 at sigma 1e-3 (its spacing there is 0.0078), so norm
weights are left out when the model is served in half precision, unless `full.exclude` is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evoalign.config import FullConfig
from evoalign.errors import ConfigError
from evoalign.spaces.base import Space
from evoalign.spaces.targets import LINEAR, by_layer, evolved, scales, size_of
from evoalign.types import Layout, TensorSpec


class Full(Space):
    """Dense members, one at a time in place of the weights; the mean is the weights."""

    name = "full"
    carrier = "dense"
    evolves_model = FullConfig.evolves_model

    @property
    def section(self) -> FullConfig:
        return self.config.full

    def layout(self, specs: Sequence[TensorSpec], dtype: torch.dtype) -> Layout:
        """Include all tensors but excluded ones. With `noise_multiplier`, a tensor outside layers has its own scale."""
        exclude = self.section.exclude
        if exclude is None:
            kept = [s for s in specs if s.kind != "norm" or dtype == torch.float32]
        else:
            kept = [s for s in specs if not any(part in s.name for part in exclude)]
        if not kept:
            raise ConfigError(f"full.exclude {exclude} leaves no tensor to evolve")
        scale = scales(self.config, [s for s in specs if s.kind in LINEAR and s.layer is not None])
        own = by_layer(self.config)
        return Layout(
            tensors=tuple(evolved(s, scale.get(s.layer, size_of(s) if own else 1.0)) for s in kept),
            seed=self.config.seed,
            dtype=str(dtype).removeprefix("torch."),
        )

    def left_out(self, specs: Sequence[TensorSpec], layout: Layout) -> str | None:
        names = [s.name for s in specs if s.name not in layout.by_name]
        shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
        return f"left out: {len(names)} tensors ({shown}); full.exclude: [] takes all in" if names else None
