# SPDX-License-Identifier: Apache-2.0
"""What a run will do and need, told before it starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evoalign.config import Config
from evoalign.engines.transformers.engine import DEFAULT_MEMORY_GIB, specs_of
from evoalign.errors import ModelError
from evoalign.optimizer import reach
from evoalign.tokens import model_path
from evoalign.types import Layout, TensorSpec

ETA_USUAL = (0.05, 2.0)


def step_lines(config: Config, layout: Layout | None) -> list[str]:
    """eta and the effective sigma, in words; a warning where eta is unusual. `layout` None: scales not known yet."""
    es = config.es
    lines = [f"eta {es.eta:.4g} (a step in units of the noise; {_how(config)})"]
    low, high = ETA_USUAL
    eta = es.eta * reach(es)
    if not low <= eta <= high:
        slow = "steps are tiny: little will be learnt" if eta < low else "steps overshoot: the model may break"
        own = "" if reach(es) == 1 else f", which {es.optimizer.name} makes {eta:.4g},"
        lines.append(
            f"warning: eta {es.eta:.4g}{own} is outside {low} to {high} (the paper's is 0.5): {slow}; "
            "change es.learning_rate"
        )
    if layout is not None:
        lines.append(_effective(config, layout))
    elif es.noise_multiplier is not None:
        lines.append("effective sigma: es.noise_multiplier x mean |W| of each layer, known once the weights are loaded")
    return lines


def _how(config: Config) -> str:
    return "es.learning_rate / es.sigma" if config.es.sigma is not None else "es.learning_rate"


def _effective(config: Config, layout: Layout) -> str:
    scales = [t.scale for t in layout.tensors]
    width = config.es.width
    low, high = width * min(scales), width * max(scales)
    shown = f"{low:.4g}" if math.isclose(low, high) else f"{low:.4g} to {high:.4g}"
    if config.space.name != "lora":
        return f"effective sigma {shown} per weight"
    if config.lora.evolve == "ab":
        return f"sigma {shown} per factor element; A and B start at zero, so that of B A is its square"
    # A ~ N(0, 1): rms(A) is 1 up to sampling error.
    factor = layout.scaling * math.sqrt(layout.rank)
    shown = f"{low * factor:.4g}" if math.isclose(low, high) else f"{low * factor:.4g} to {high * factor:.4g}"
    return f"effective sigma of B A {shown} per weight: (alpha / r) sqrt(r) rms(A) s"


def model_config(config: Config) -> Any:
    """The model's own configuration as transformers has it. Raises ModelError."""
    from transformers import AutoConfig

    path = model_path(config.model)
    try:
        return AutoConfig.from_pretrained(path, revision=config.model.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {config.model.name}: {str(error).splitlines()[0]}") from error


def on_gpu(config: Config) -> bool:
    """Whether the engine will serve from a GPU."""
    device = config.engine.device
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def served_dtype(config: Config) -> torch.dtype:
    """The dtype that `model.dtype` comes to on this machine."""
    automatic = "bfloat16" if on_gpu(config) else "float32"
    return getattr(torch, automatic if config.model.dtype == "auto" else config.model.dtype)


def shapes(config: Config) -> list[TensorSpec]:
    """The model's tensors from its configuration alone, no weight loaded (`mean_abs` is NaN). Raises ModelError."""
    from transformers import AutoModelForCausalLM

    hf = model_config(config)
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(hf, trust_remote_code=False)
    except ValueError as error:
        raise ModelError(f"model {config.model.name} ({hf.model_type}) is not a causal language model") from error
    return specs_of(model, lambda _: math.nan)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what they hold. `start`: the starting weights, for decay; `cache`: at most, with one chunk's logits."""

    weights: int
    master: int
    start: int
    cache: float

    @property
    def kept(self) -> int:
        """What is held from the start of a run to its end."""
        return self.weights + self.master + self.start


def memory(config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype) -> Memory:
    """What a run holds on its device."""
    return Memory(
        weights=sum(math.prod(s.shape) for s in specs) * dtype.itemsize,
        master=_master_bytes(config, layout, dtype),
        start=4 * layout.parameters if config.es.decay else 0,
        cache=(config.engine.memory_gib or DEFAULT_MEMORY_GIB) * 2**30,
    )


def memory_lines(config: Config, specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype) -> list[str]:
    """Bytes of weights, master and cache, in words."""
    need, weights = memory(config, specs, layout, dtype), sum(math.prod(s.shape) for s in specs)
    return [
        f"model {weights / 1e6:,.1f} M parameters, {layout.parameters / 1e6:,.3f} M evolve "
        f"in {len(layout.tensors)} tensors",
        f"memory {gib(need.kept + need.cache)}: weights {gib(need.weights)}, float32 master {gib(need.master)}, "
        f"starting weights for decay {gib(need.start)}, cache up to {gib(need.cache)} "
        "(engine.memory_gib; unset, half the free memory of a GPU that is not deterministic)",
        *_left_out(config, specs, layout),
    ]  # fmt: skip


def _left_out(config: Config, specs: Sequence[TensorSpec], layout: Layout) -> list[str]:
    names = [s.name for s in specs if s.name not in layout.by_name] if config.space.name == "full" else []
    shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    return [f"left out: {len(names)} tensors ({shown}); full.exclude: [] takes all in"] if names else []


def work_lines(config: Config, examples: int | None) -> list[str]:
    """Rollouts and tokens, in words."""
    es = config.es
    prompts = min(config.task.batch_size or examples or 0, examples or 0) if examples else config.task.batch_size
    if not prompts:
        return ["rollouts: population x training examples a generation (the data could not be counted)"]
    rollouts = es.population_size * prompts
    tokens = rollouts * config.evaluation.max_tokens
    return [
        f"rollouts {rollouts:,} a generation ({es.population_size} members x {prompts} prompts), "
        f"{rollouts * es.num_generations:,} in all",
        f"tokens at most {tokens:,} a generation, {tokens * es.num_generations:,} in all",
    ]


def _master_bytes(config: Config, layout: Layout, dtype: torch.dtype) -> int:
    everything = sum(math.prod(t.shape) for t in (*layout.tensors, *layout.frozen))
    shared = config.space.name == "lowrank" and dtype == torch.float32
    return 0 if shared else 4 * everything


def gib(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
