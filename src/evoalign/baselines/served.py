# SPDX-License-Identifier: Apache-2.0
"""A second copy of the policy for GRPO's completions and evaluations, with the static decoder.

The model that is trained completes by transformers' own forward: on a GPU 30 to 60 ms per token at any batch size. The
static decoder needs weights of one dtype, without adapters. Its copy is set from the policy before each round.

In mixed precision the policy's products are those of weights rounded to bfloat16, and so the copy is bfloat16. An
adapter's product is added to the weights, where bfloat16 would round most of a small one away, so that its copy is
float32. The copy keeps all activations in its dtype and autocast some in float32: log-probabilities differ a little.
Evaluations are of the weights as they are saved, in their own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from evoalign.baselines import settings
from evoalign.config import Config
from evoalign.config.engines import EngineSettings
from evoalign.engines.transformers.engine import TransformersEngine
from evoalign.errors import ConfigError, NotFiniteError
from evoalign.models.tensors import tensors_of
from evoalign.tokens import Tokens


class Served:
    """An engine with a copy of a policy, a transformers or PEFT model."""

    def __init__(self, engine: TransformersEngine, policy: Any) -> None:
        self.engine, self._policy = engine, policy
        self._tensors = tensors_of(engine.model)

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the copy's weights to those of the policy, with its adapter merged. Raises NotFiniteError."""
        for name, tensor in _merged(self._policy):
            self._tensors[name].copy_(tensor)
        if bad := next((name for name, tensor in self._tensors.items() if not tensor.isfinite().all()), None):
            raise NotFiniteError(f"{bad}: the trained weights are not finite; lower grpo.learning_rate")

    def close(self) -> None:
        """Free the copy and the memory of its decoder."""
        self._tensors = {}
        self.engine.close()


def engine_of(config: Config, *, on_cpu: bool) -> EngineSettings | None:
    """Return the engine in which a copy would complete; None if the policy itself does."""
    return config.engine.for_copy(mixed_on_gpu=not on_cpu and settings.mixed(config, on_cpu=on_cpu))


def served(config: Config, tokens: Tokens, policy: Any, dtype: torch.dtype | None = None) -> Served | None:
    """Return a copy of the policy, by default in the dtype for its completions; None where the policy itself completes.

    Raises ConfigError with `engine.decoder: static` for a model or an adapter that the static decoder does not support.
    """
    on_cpu = policy.device.type == "cpu"
    own = engine_of(config, on_cpu=on_cpu)
    if own is None:
        return None
    bare = _bare(policy)
    adapted = _adapted(bare)
    lost = adapted.keys() - {name.replace(".base_layer.", ".") for name in tensors_of(bare)}
    if lost and config.engine.for_copy(mixed_on_gpu=False) is not None:
        raise ConfigError(
            f"engine.decoder: static cannot serve an adapter on {min(lost)}, which is tied to another weight; set auto"
        )
    if lost:
        return None
    own = own.model_copy(update={"device": str(policy.device)})  # each process has its own
    own_dtype = str(dtype or policy.dtype).removeprefix("torch.")
    if dtype is None:
        own_dtype = settings.copy_dtype(config, own_dtype, is_adapter=bool(adapted), on_cpu=on_cpu)
    model = config.model.model_copy(update={"dtype": own_dtype})
    engine = TransformersEngine(config.model_copy(update={"engine": own, "model": model}), tokens)
    if engine.is_static:
        return Served(engine, policy)
    engine.close()
    return None


def _bare(policy: Any) -> Any:
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


def _adapted(bare: Any) -> dict[str, Any]:
    """Return the layers with an adapter by the name of their weight."""
    return {f"{name}.weight": m for name, m in bare.named_modules() if hasattr(m, "lora_A")}


def _merged(policy: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the weights by checkpoint name, those of adapted layers in float32 with the adapter's product added."""
    bare = _bare(policy)
    adapted = _adapted(bare)
    for name, tensor in tensors_of(bare).items():
        if ".lora_" not in name:
            name = name.replace(".base_layer.", ".")
            layer = adapted.get(name)
            yield name, tensor if layer is None else tensor.float() + layer.get_delta_weight("default").float()
