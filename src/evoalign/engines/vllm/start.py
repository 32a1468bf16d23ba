# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM in this process with a config's settings, and explains why it does not start."""

from __future__ import annotations

import gc
import logging
import math
import os
from typing import Any

import torch
from pydantic import ValidationError

from evoalign import spaces
from evoalign.config import Config
from evoalign.engines.gpu import OUTSIDE, for_tensors, limit_memory, step_tokens
from evoalign.engines.specs import refuse_quantised, specs_of_config
from evoalign.engines.vllm.insides import check, check_version
from evoalign.engines.vllm.settings import KERNEL_RANK, graph_sizes, lora_target, settings_of, slot_rank
from evoalign.errors import ConfigError, EvoalignError, ModelError
from evoalign.models.files import refuse_packed, refuse_pickles, why_not
from evoalign.models.layers import key_heads, layers_of
from evoalign.models.origin import model_config, model_path
from evoalign.types import TensorSpec

VOCABULARY = 64
"""vLLM pads the vocabulary to a multiple of this."""
CPU_BATCH = 4096
"""Tokens of one step on a CPU."""
CPU_CACHE = 1 << 30
"""Bytes for keys and values on a CPU, where vLLM would take most of the memory."""
EXPERTS_ON_CPU = False
"""Whether vLLM's products for experts take adapters on a CPU."""
_batch_invariant: list[bool] = []
"""Whether engines on GPUs of this process are batch-invariant; empty before the first one starts."""


def start(config: Config, on_cpu: bool, deterministic: bool) -> Any:
    """Return a `vllm.LLM` that serves the model. Raises ModelError where it does not start, and EngineError where the
    installed vLLM lacks what this package uses."""
    check_version()
    path = model_path(config.model)
    refuse_pickles(path, config.model.revision)
    packed, specs = refuse_quantised(config, _dtype(config, on_cpu)), specs_of_config(config)
    if not on_cpu and (refused := settings_of(config).refused_on_gpu(config, specs)):
        raise ConfigError(refused)
    if packed is None and settings_of(config).load_format == "safetensors":
        refuse_packed(path, config.model.revision, config.model.name)
    _set_environment(deterministic and not on_cpu)
    check("cpu" if on_cpu else "gpu")
    _check_split(config, on_cpu)
    if not on_cpu:
        _check_invariance(deterministic)
    is_mixture = any(".experts." in spec.name for spec in specs)
    if is_mixture and on_cpu and not EXPERTS_ON_CPU:
        raise ModelError(
            f"model {config.model.name} is a mixture of experts, which vLLM serves with adapters on a GPU alone; use "
            "engine transformers"
        )
    try:
        from vllm import LLM, EngineArgs

        arguments = {**_model(config, path, on_cpu), **_memory(config, on_cpu, specs), **_adapters(config, specs)}
        if is_mixture and EngineArgs(**arguments).create_model_config().using_transformers_backend():
            # It replaces classes of transformers, by which this process reads the model too.
            raise ModelError(
                f"model {config.model.name} is a mixture of experts for which this release of vLLM has no class; use "
                "engine transformers"
            )
        # The rest of a prompt whose beginning is cached is computed in other pieces, which changes bits.
        return LLM(**arguments, enable_prefix_caching=not deterministic)
    except EvoalignError:
        raise
    except Exception as error:  # vLLM passes on any exception of its parts
        gc.collect()
        raise ModelError(_explain(config, error)) from error


def on_cpu() -> bool:
    """Return whether the installed vLLM serves from a CPU. Raises ModelError where none is installed."""
    check_version()
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _set_environment(batch_invariant: bool) -> None:
    """Set variables that vLLM reads when it is imported and when an engine starts."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: plans are passed as objects
    if batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # by which its processes find each other
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # leave the caller's threads where they are
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def _check_invariance(batch_invariant: bool) -> None:
    """Raise ConfigError where an earlier engine chose otherwise: vLLM replaces kernels of torch once per process."""
    if not _batch_invariant:
        _batch_invariant.append(batch_invariant)
    if _batch_invariant != [batch_invariant]:
        raise ConfigError(
            f"deterministic: an engine on a GPU of this process started with {_batch_invariant[0]}, which vLLM cannot "
            f"change in a process; start a new process for {batch_invariant}"
        )


def _check_split(config: Config, cpu: bool) -> None:
    """Raise ModelError where the matrices cannot be split: a worker that fails on it reports no reason."""
    size, text = settings_of(config).tensor_parallel_size, model_config(config.model).get_text_config()
    available = size if cpu else torch.cuda.device_count()
    if size > available:
        raise ModelError(f"engine.tensor_parallel_size {size}: there are {available} GPUs here; lower it")
    words = -(-text.vocab_size // VOCABULARY) * VOCABULARY
    for heads, keys in dict.fromkeys((layer.num_attention_heads, key_heads(layer)) for layer in layers_of(text)):
        if heads % size or (keys % size and size % keys) or words % size:
            raise ModelError(
                f"engine.tensor_parallel_size {size} does not divide the {heads} attention heads, {keys} key-value "
                f"heads and {words} rows of the padded vocabulary of model {config.model.name}; choose one that does"
            )


def _model(config: Config, path: str, cpu: bool) -> dict[str, Any]:
    """Return the arguments that say which model is served, how it is split and how it is compiled."""
    settings, space, dtype = settings_of(config), spaces.create(config), _dtype(config, cpu)
    is_adapter = space.carrier == "adapter"
    form = settings.form(config) if is_adapter else "stock"
    if is_adapter and form == "stock" and dtype == torch.float32 and not cpu:
        raise ConfigError(
            "on a GPU vLLM's LoRA kernels support half precision only; set model.dtype bfloat16, or "
            f"engine.population auto and a rank up to {KERNEL_RANK}"
        )
    population = {
        "form": form,
        "rank": space.rank if is_adapter else 0,
        "scaling": space.scaling,
        "fixed": bool(config.deterministic),
    }
    # No torch.compile: graphs have to replay the kernels of the population path.
    compilation: dict[str, Any] = {"mode": 0} if cpu or settings.enforce_eager else _graphs(config)
    arguments: dict[str, Any] = {
        "model": path,
        "revision": config.model.revision,
        "dtype": dtype,
        "load_format": settings.load_format,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "trust_remote_code": False,
        "seed": config.seed % 2**32 if settings.seed is None else settings.seed,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager or cpu,
        "compilation_config": compilation,
        "worker_cls": "evoalign.engines.vllm.worker.EvolvingWorker",
        "additional_config": {"evoalign": population},
        "logprobs_mode": "raw_logprobs",
        "disable_log_stats": True,
    }
    if settings.attention_backend is not None:
        arguments["attention_backend"] = settings.attention_backend
    if settings.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"  # inside a Ray actor vLLM would choose Ray
    return arguments


def _graphs(config: Config) -> dict[str, Any]:
    """Return vLLM's compilation config: CUDA graphs of decode steps, up to the largest batch."""
    settings, rows = settings_of(config), set[int]()
    if config.es_ is not None and (prompts := config.task.batch_size or config.task.train_size):
        is_adapter = spaces.create(config).carrier == "adapter"
        members = min(settings.slots(config), config.es.population_size) if is_adapter else 1
        rows = {members * config.task.asked(prompts)}
    sizes = graph_sizes(settings.max_num_seqs, rows)
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}


def _memory(config: Config, cpu: bool, specs: list[TensorSpec]) -> dict[str, Any]:
    """Return the arguments that bound batches and memory."""
    settings = settings_of(config)
    arguments: dict[str, Any] = {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_model_len": settings.max_model_len,
    }
    if cpu or settings.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int((settings.kv_cache_gib or CPU_CACHE / 2**30) * 2**30)
    limit_memory(settings.gpu_memory_gib, torch.device("cpu" if cpu else "cuda"))
    if cpu:
        # On a CPU vLLM cannot continue a seeded completion whose prompt was computed in pieces.
        longest = settings.max_model_len or model_config(config.model).get_text_config().max_position_embeddings
        tokens = max(settings.max_num_batched_tokens or CPU_BATCH, longest)
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
    else:
        total, mean, cap = torch.cuda.mem_get_info()[1], _mean_bytes(config, specs), settings.gpu_memory_gib
        size = total if cap is None else cap * 2**30
        wanted = settings.gpu_memory_utilization * size - mean
        if wanted <= 0:
            raise ModelError(
                f"the float32 mean of space {config.space.name} takes {mean / 2**30:.1f} GiB and "
                f"the GPU has {size / 2**30:.1f}; set engine.master host, or use space lora"
            )
        arguments["gpu_memory_utilization"] = wanted / total
        if cap is not None:
            _check_cap(cap, settings.gpu_memory_utilization)
            # vLLM's default follows the memory of the real card.
            arguments["max_num_batched_tokens"] = settings.max_num_batched_tokens or step_tokens(cap)
    return {name: value for name, value in arguments.items() if value is not None}


def _check_cap(cap: float, utilization: float) -> None:
    """Raise ConfigError where vLLM's share leaves no room for what it does not count: the context it starts in."""
    if utilization * cap * 2**30 > for_tensors(cap):
        raise ConfigError(
            f"engine.gpu_memory_utilization {utilization:g} of engine.gpu_memory_gib {cap:g} leaves less than the "
            f"{OUTSIDE / 2**30:g} GiB of the CUDA context and kernels; set gpu_memory_utilization to at most "
            f"{math.floor(1e3 * for_tensors(cap) / (cap * 2**30)) / 1e3:g}"
        )


def _mean_bytes(config: Config, specs: list[TensorSpec]) -> int:
    """Return the bytes per GPU that vLLM does not account for: the float32 mean, and its starting copy for decay."""
    settings, space, dtype = settings_of(config), spaces.create(config), _dtype(config, cpu=False)
    if settings.master == "host":
        return 0
    layout = space.layout(specs, dtype)
    size = space.mean_bytes(layout, dtype) + (4 * layout.parameters if config.decays else 0)
    return size // settings.tensor_parallel_size if space.evolves_model else size


def _dtype(config: Config, cpu: bool) -> torch.dtype:
    return getattr(torch, config.model.served_dtype(on_gpu=not cpu))


def _adapters(config: Config, specs: list[TensorSpec]) -> dict[str, Any]:
    """Return the arguments for one slot per member on the modules that evolve."""
    space, slots = spaces.create(config), settings_of(config)
    if space.carrier != "adapter":
        return {"enable_lora": False}
    layout, count = space.layout(specs, _dtype(config, on_cpu())), slots.allocated_slots(config)
    evolves = set(layout.modules)
    return {
        "enable_lora": True,
        "max_loras": count,
        "max_cpu_loras": count,
        "max_lora_rank": slot_rank(space.rank),
        "lora_target_modules": sorted({lora_target(spec) for spec in specs if spec.name in evolves}),
    }


def _explain(config: Config, error: Exception) -> str:
    """Return why vLLM does not start, and which setting to change."""
    reason, settings = _reason(error), settings_of(config)
    low = reason.lower()
    if ("kv cache" in low or "cache blocks" in low) and settings.kv_cache_gib is not None:
        return f"engine vllm: {reason}; raise engine.kv_cache_gib, which is {settings.kv_cache_gib:g}"
    if "max_model_len" in low or "max seq len" in low or "maximum model length" in low:
        return f"engine vllm: {reason}; set engine.max_model_len to the longest prompt and completion together"
    if isinstance(error, torch.OutOfMemoryError) or "memory" in low:
        cap = "" if settings.gpu_memory_gib is None else f"raise engine.gpu_memory_gib {settings.gpu_memory_gib:g}, "
        return (
            f"engine vllm does not fit the memory ({reason}); {cap}lower engine.gpu_memory_utilization if other "
            "processes use the GPU, engine.max_model_len or engine.max_num_seqs if not, or raise "
            "engine.tensor_parallel_size"
        )
    if "max_num_batched_tokens" in low:
        return f"engine vllm: {reason}; raise engine.max_num_batched_tokens, or set it to null for vLLM's default"
    if "does not support lora" in low or "not supported for now" in low or "are not supported" in low:
        return f"vLLM does not support adapters of model {config.model.name} ({reason}); use engine transformers"
    if "workerproc" in low:
        return f"engine.tensor_parallel_size {settings.tensor_parallel_size}: a worker failed, for the reason above"
    return f"model {config.model.name} does not start on engine vllm: {reason}"


def out_of_memory(config: Config, error: torch.OutOfMemoryError) -> str:
    """Return one line: how much memory was missing on a GPU, and which settings free some."""
    return f"engine vllm does not fit the memory ({_reason(error)}); {settings_of(config).smaller(config)}"


def _reason(error: Exception) -> str:
    """Return one line: the message of a rejected setting, or the first sentence or two of any other error."""
    if isinstance(error, ValidationError):
        return error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    line = why_not(error)
    if isinstance(error, torch.OutOfMemoryError):
        return ". ".join(line.split(". ")[:2])  # the amount; what follows is about settings of torch
    return line.split(". ")[0] if len(line) > 160 else line
