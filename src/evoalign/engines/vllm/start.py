# SPDX-License-Identifier: Apache-2.0
"""Starting vLLM in this process with what a config asks for, and saying in plain words why it does not start."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
from pydantic import ValidationError

from evoalign import spaces
from evoalign.config import Config
from evoalign.engines.specs import specs_of_config
from evoalign.engines.vllm.adapters import KERNEL_RANK, form, rank, room, scaling, settings, slot_rank, slots
from evoalign.engines.vllm.insides import check, check_version
from evoalign.errors import ConfigError, EvoalignError, ModelError
from evoalign.models.files import refuse_pickles, why_not
from evoalign.models.origin import model_config, model_path
from evoalign.spaces.targets import module_of
from evoalign.types import TensorSpec

VOCABULARY = 64
"""vLLM pads the vocabulary to a multiple of this."""
SMALL = (8, 32, 64, 128, 256)
"""Sizes of small batches that have a graph."""
CPU_BATCH = 4096
"""Tokens of one step on a CPU."""
CPU_CACHE = 1 << 30
"""Bytes for keys and values on a CPU, where vLLM would take most of the memory."""


def start(config: Config, on_cpu: bool, deterministic: bool) -> Any:
    """A `vllm.LLM` that serves the model. Raises ModelError in plain words where it does not start, and EngineError
    where vLLM is not what this package works on."""
    check_version()
    path = model_path(config.model)
    refuse_pickles(path, config.model.revision)
    _set_environment(deterministic and not on_cpu)
    check("cpu" if on_cpu else "gpu")
    _check_split(config, on_cpu)
    if not on_cpu:
        _check_invariance(deterministic)
    specs = specs_of_config(config)
    try:
        from vllm import LLM

        arguments = {**_model(config, path, on_cpu), **_room(config, on_cpu, specs), **_adapters(config, specs)}
        # A prompt found in the cache is computed in other pieces than one that is not.
        return LLM(**arguments, enable_prefix_caching=not deterministic)
    except EvoalignError:
        raise
    except Exception as error:  # vLLM raises whatever its parts raise
        gc.collect()
        raise ModelError(_plainly(config, error)) from error


def on_cpu() -> bool:
    """Whether the installed vLLM serves from a CPU. Raises ModelError where none is installed."""
    check_version()
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


_batch_invariant: list[bool] = []
"""Whether engines on GPUs of this process are batch-invariant, once there was one."""


def _set_environment(batch_invariant: bool) -> None:
    """vLLM reads these where it is imported and where an engine starts."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: plans are handed over, not sent
    if batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # what its processes use to find each other
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its start says little else than that all is well
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # leave the caller's threads where they are
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def _check_invariance(batch_invariant: bool) -> None:
    """Raise ConfigError where an earlier engine has settled it: vLLM puts kernels of torch's in or not, for good."""
    if not _batch_invariant:
        _batch_invariant.append(batch_invariant)
    if _batch_invariant != [batch_invariant]:
        raise ConfigError(
            f"deterministic: an engine on a GPU of this process started with {_batch_invariant[0]}, and vLLM settles "
            f"that once; start a new process for {batch_invariant}"
        )


def _check_split(config: Config, cpu: bool) -> None:
    """Raise ModelError where a matrix cannot be split as asked: workers that die of it do not say why."""
    size, text = settings(config).tensor_parallel_size, model_config(config.model).get_text_config()
    there = size if cpu else torch.cuda.device_count()
    if size > there:
        raise ModelError(f"engine.tensor_parallel_size {size}: there are {there} GPUs here; lower it")
    heads, keys = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    words = -(-text.vocab_size // VOCABULARY) * VOCABULARY
    if heads % size or (keys % size and size % keys) or words % size:
        raise ModelError(
            f"engine.tensor_parallel_size {size} does not divide the {heads} attention heads, {keys} key-value heads "
            f"and {words} places of the vocabulary of model {config.model.name}; choose one that does"
        )


def _model(config: Config, path: str, cpu: bool) -> dict[str, Any]:
    """Which model, how it is split and compiled."""
    wanted = settings(config)
    dtype = _dtype(config, cpu)
    worker = "cpu_worker.CpuWorker" if cpu else "worker.GpuWorker"
    adapted = spaces.create(config).carrier == "adapter"
    taken = form(config) if adapted else "stock"
    if adapted and taken == "stock" and dtype == torch.float32 and not cpu:
        raise ConfigError(
            "on a GPU vLLM's own LoRA kernels take half precision only; set model.dtype bfloat16, or "
            f"engine.population auto and a rank up to {KERNEL_RANK}"
        )
    population = {
        "form": taken,
        "rank": rank(config) if adapted else 0,
        "scaling": scaling(config),
        "fixed": bool(config.deterministic),
    }
    arguments: dict[str, Any] = {
        "model": path,
        "revision": config.model.revision,
        "dtype": dtype,
        "load_format": wanted.load_format,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "trust_remote_code": False,
        "seed": config.seed % 2**32 if wanted.seed is None else wanted.seed,
        "tensor_parallel_size": wanted.tensor_parallel_size,
        "enforce_eager": wanted.enforce_eager or cpu,
        # No torch.compile: graphs replay the very kernels that the population path puts in.
        "compilation_config": {"mode": 0} if cpu or wanted.enforce_eager else _graphs(config),
        "worker_cls": f"evoalign.engines.vllm.{worker}",
        "additional_config": {"evoalign": population},
        "logprobs_mode": "raw_logprobs",
        "disable_log_stats": True,
    }
    if wanted.attention_backend is not None:
        arguments["attention_backend"] = wanted.attention_backend
    if wanted.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"  # else it takes Ray where it is in one of Ray's actors
    return arguments


def _graphs(config: Config) -> dict[str, Any]:
    """CUDA graphs of decode steps, up to the most rows that can be in one."""
    most, rows = settings(config).max_num_seqs, set[int]()
    if config.es_ is not None and (prompts := config.task.batch_size or config.task.train_size):
        adapted = spaces.create(config).carrier == "adapter"
        at_once = min(slots(config), config.es.population_size) if adapted else 1
        rows = {at_once * config.task.asked(prompts)}
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": graph_sizes(most, rows)}


def graph_sizes(most: int, rows: Iterable[int] = ()) -> list[int]:
    """Batch sizes that have a graph; each is captured twice at the start, with members and without.

    A step is padded to the next. Up to 256 rows what takes time is the weights' way through memory, and padding hardly
    any; above, padding is half of the rows at most. `rows` are those of whole batches, which need none.
    """
    grid = (n for k in range(most.bit_length()) for n in (2**k, 3 * 2 ** (k - 1)) if n in SMALL or n > max(SMALL))
    return sorted({n for n in (*grid, *rows, most) if n <= most})


def _room(config: Config, cpu: bool, specs: list[TensorSpec]) -> dict[str, Any]:
    """How much may be in flight, and the memory for it."""
    wanted = settings(config)
    room: dict[str, Any] = {
        "max_num_seqs": wanted.max_num_seqs,
        "max_num_batched_tokens": wanted.max_num_batched_tokens,
        "max_model_len": wanted.max_model_len,
    }
    if cpu or wanted.kv_cache_gib is not None:
        room["kv_cache_memory_bytes"] = int((wanted.kv_cache_gib or CPU_CACHE / 2**30) * 2**30)
    if cpu:
        # vLLM cannot go on with a seeded completion whose prompt was computed in pieces on a CPU.
        longest = wanted.max_model_len or model_config(config.model).get_text_config().max_position_embeddings
        room |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(wanted.max_num_batched_tokens or CPU_BATCH, longest),
        }
    else:
        total, beside = torch.cuda.mem_get_info()[1], _beside(config, specs)
        share = wanted.gpu_memory_utilization - beside / total
        if share <= 0:
            raise ModelError(
                f"the float32 mean of space {config.space.name} takes {beside / 2**30:.1f} GiB and "
                f"the GPU has {total / 2**30:.1f}; set engine.master host, or use space lora"
            )
        room["gpu_memory_utilization"] = share
    return {name: value for name, value in room.items() if value is not None}


def _beside(config: Config, specs: list[TensorSpec]) -> int:
    """Bytes on each GPU that vLLM does not know of: the float32 mean, and the start for decay."""
    wanted, space = settings(config), spaces.create(config)
    dtype = _dtype(config, cpu=False)
    if not space.evolves_model or wanted.master == "host":
        return 0
    own = not (space.carrier == "adapter" and dtype == torch.float32)  # else the served weights are the mean
    copies = own + config.decays
    return 4 * copies * space.layout(specs, dtype).parameters // wanted.tensor_parallel_size


def _dtype(config: Config, cpu: bool) -> torch.dtype:
    return getattr(torch, config.model.served_dtype(on_gpu=not cpu))


def _adapters(config: Config, specs: list[TensorSpec]) -> dict[str, Any]:
    """One slot a member, on the modules that evolve."""
    if spaces.create(config).carrier != "adapter":
        return {"enable_lora": False}
    layout = spaces.create(config).layout(specs, _dtype(config, on_cpu()))
    modules = sorted({module_of(t.module) for t in layout.tensors})
    return {
        "enable_lora": True,
        "max_loras": room(config),
        "max_cpu_loras": room(config),
        "max_lora_rank": slot_rank(rank(config)),
        "lora_target_modules": modules,
    }


def _plainly(config: Config, error: Exception) -> str:
    """Why vLLM does not start, and what to do."""
    said, wanted = _reason(error), settings(config)
    low = said.lower()
    if ("kv cache" in low or "cache blocks" in low) and wanted.kv_cache_gib is not None:
        return f"engine vllm: {said}; raise engine.kv_cache_gib, which is {wanted.kv_cache_gib:g}"
    if "max_model_len" in low or "max seq len" in low or "maximum model length" in low:
        return f"engine vllm: {said}; set engine.max_model_len to the longest prompt and completion together"
    if isinstance(error, torch.OutOfMemoryError) or "memory" in low:
        return (
            f"engine vllm does not fit the memory ({said}); lower engine.gpu_memory_utilization if others "
            "use the GPU, engine.max_model_len or engine.max_num_seqs if not, or raise engine.tensor_parallel_size"
        )
    if "max_num_batched_tokens" in low:
        return f"engine vllm: {said}; raise engine.max_num_batched_tokens, or leave it to vLLM"
    if "does not support lora" in low or "not supported for now" in low or "are not supported" in low:
        return f"model {config.model.name} is not one that vLLM adapts ({said}); use engine transformers"
    if "workerproc" in low:
        return f"engine.tensor_parallel_size {wanted.tensor_parallel_size}: a worker does not start, and says above why"
    return f"model {config.model.name} does not start on engine vllm: {said}"


def out_of_memory(config: Config, error: torch.OutOfMemoryError) -> str:
    """What was asked of a GPU that it did not have, and which settings leave it more, in one line."""
    return f"engine vllm does not fit the memory ({_reason(error)}); {settings(config).smaller(config)}"


def _reason(error: Exception) -> str:
    """One line: of a refused setting what is wrong with it, of anything else its first sentence or two."""
    if isinstance(error, ValidationError):
        return error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    line = why_not(error)
    if isinstance(error, torch.OutOfMemoryError):
        return ". ".join(line.split(". ")[:2])  # how much of it lacks; what follows is of torch's own settings
    return line.split(". ")[0] if len(line) > 160 else line
