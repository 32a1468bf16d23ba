# SPDX-License-Identifier: Apache-2.0
"""Attaches the population path to a model, and computes the members' terms inside a decoder's kernels if it can.

In the deep form the terms need no extra launch and no extra pass. A layer of the Qwen2, Qwen3 and Llama families is
four matrix products, attention, and
  norm    residual sum with the term of the preceding layer's down_proj, RMSNorm, dots with A of q, k, v
  rotate  terms of q, k, v, the norms of q and k (Qwen3), rotary embedding
  norm    residual sum with the term of o_proj, RMSNorm, dots with A of gate, up
  gate    SwiGLU with the terms of gate and up, partial dots with A of down_proj
Under tensor parallelism the terms of o_proj and down_proj belong to partial sums, so they are added before the
all-reduce. Prefill uses the same kernels. Whether a model has this shape is decided by its modules, not its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.lora.layers import (
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models import llama, qwen2, qwen3

from evoalign.engines.vllm.insides import replace
from evoalign.engines.vllm.population import Form, Rows, Settings, Terms, replace_step
from evoalign.errors import ModelError
from evoalign.kernels import population

_DECODERS = (qwen2.Qwen2Model.forward, llama.LlamaModel.forward)
_LAYERS = (qwen2.Qwen2DecoderLayer.forward, qwen3.Qwen3DecoderLayer.forward, llama.LlamaDecoderLayer.forward)
_ATTENTIONS = (qwen2.Qwen2Attention.forward, qwen3.Qwen3Attention.forward, llama.LlamaAttention.forward)
_MLPS = (qwen2.Qwen2MLP.forward, llama.LlamaMLP.forward)
_PROJECTIONS = {
    "self_attn.qkv_proj": (MergedQKVParallelLinearWithLoRA, QKVParallelLinear),
    "self_attn.o_proj": (RowParallelLinearWithLoRA, RowParallelLinear),
    "mlp.gate_up_proj": (MergedColumnParallelLinearWithLoRA, MergedColumnParallelLinear),
    "mlp.down_proj": (RowParallelLinearWithLoRA, RowParallelLinear),
}


def attach(model: torch.nn.Module, runner: Any, settings: Settings) -> tuple[Form, str]:
    """Give a loaded model the requested form, before graphs are captured, and compile its kernels.

    Returns the form, and why it is not the requested one (empty where it is). Raises ModelError where vLLM put LoRA on
    layers that no member has, such as the embedding.
    """
    if settings.form == "stock":
        return "stock", ""
    adapters = runner.lora_manager._adapter_manager
    wrappers = list(adapters.punica_wrapper_mapping.values())
    if len(wrappers) != 1 or not isinstance(wrappers[0], Terms):
        names = ", ".join(type(w).__name__ for w in wrappers)
        raise ModelError(f"the population path needs one set of rows, and vLLM made {names}; use population: stock")
    layers: dict[str, Any] = adapters.modules
    for name, layer in layers.items():
        if not isinstance(layer, BaseLinearLayerWithLoRA):
            raise ModelError(f"vLLM put LoRA on {name}, which no member changes; name the linear layers only")
    rows = wrappers[0].rows
    replace_step(runner, rows)
    reason = obstacle(model) if settings.form == "deep" else ""
    if settings.form == "deep" and not reason:
        decoder = decoder_of(model)
        assert decoder is not None
        # An attribute of the instance wins over its class where vLLM's __call__ looks `forward` up.
        replace(decoder, "forward", Deep(decoder, rows, settings))
        decoder.forward.warm_up()
        return "deep", ""
    _warm_up(layers.values(), settings)
    return "generic", reason


def _warm_up(layers: Iterable[Any], settings: Settings) -> None:
    """Compile the generic kernel for every shape of layer, for few rows and for many, so that no rollout waits."""
    seen: set[tuple[int, ...]] = set()
    for layer in layers:
        a, b = layer.lora_a_stacked, layer.lora_b_stacked
        shape = (a[0].shape[3], *(one.shape[2] for one in b))
        if shape not in seen:
            seen.add(shape)
            for count in population.row_sizes(a[0].device):
                members = a[0].new_full((count,), -1, dtype=torch.int32)
                y, x = a[0].new_zeros(count, sum(shape[1:])), a[0].new_zeros(count, shape[0])
                terms = population.Terms(members, settings.rank, fixed=settings.fixed)
                population.add(y, x, a, b, terms)


def decoder_of(model: torch.nn.Module) -> Any | None:
    """Return the one decoder of a known family inside a model, or None."""
    found = [m for m in model.modules() if type(m).forward in _DECODERS]
    return found[0] if len(found) == 1 else None


def obstacle(model: torch.nn.Module) -> str:
    """Return why a model cannot take the deep form; empty where it can."""
    decoder = decoder_of(model)
    if decoder is None:
        return f"{type(model).__name__} is not of the Qwen2, Qwen3 or Llama family"
    if not getattr(decoder, "do_not_compile", True):
        return "torch.compile is on"
    if (decoder.start_layer, decoder.end_layer) != (0, len(decoder.layers)):
        return "the model is split into pipeline stages"
    if decoder.aux_hidden_state_layers:
        return "a draft model reads the hidden states of single layers"
    if not _is_plain_norm(decoder.norm):
        return f"the last norm is {type(decoder.norm).__name__}"
    return next((f"layer {i}: {why}" for i, layer in enumerate(decoder.layers) for why in _differences(layer)), "")


def _differences(layer: Any) -> Iterator[str]:
    """Yield how a layer differs from the block that the kernels compute."""
    for part, known in (("", _LAYERS), ("self_attn", _ATTENTIONS), ("mlp", _MLPS)):
        module: Any = layer.get_submodule(part)
        if type(module).forward not in known:
            yield f"{type(module).__name__} has a custom forward"
            return
    attention, rotary = layer.self_attn, layer.self_attn.rotary_emb
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *_head_norms(attention)]
    if not all(map(_is_plain_norm, norms)):
        yield "its norms are not plain RMSNorm"
    if type(layer.mlp.act_fn) is not SiluAndMul:
        yield f"its activation is {type(layer.mlp.act_fn).__name__}"
    if type(attention.attn) is not Attention:
        yield f"its attention is {type(attention.attn).__name__}"
    if not _is_plain_rotary(rotary):
        yield f"its rotary embedding is {type(rotary).__name__}"
    for name, (wrapper, base) in _PROJECTIONS.items():
        yield from _strange(name, layer.get_submodule(name), wrapper, base)


def _strange(name: str, linear: Any, wrapper: type, base: type) -> Iterator[str]:
    """Yield why a projection is more than a plain product with LoRA slots."""
    if type(linear) is base:
        yield f"{name} has no members: the target modules leave it out"
        return
    if type(linear) is not wrapper:
        yield f"{name} has no LoRA slots of the plain kind ({type(linear).__name__})"
        return
    inner = linear.base_layer
    if type(inner) is not base or not isinstance(inner.quant_method, LinearMethodBase):
        yield f"{name} is special ({type(inner).__name__})"
    if inner.bias is not None and (base is not QKVParallelLinear or inner.skip_bias_add):
        yield f"{name} has a bias"
    if not getattr(inner, "reduce_results", True) or not getattr(inner, "input_is_parallel", True):
        yield f"{name} is sharded in an uncommon way"


def _is_plain_norm(norm: Any) -> bool:
    return type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None


def _is_plain_rotary(rotary: Any) -> bool:
    """Return whether a rotary embedding differs from the plain one at most in its table, as scaled ones do."""
    kept = ("forward_native", "forward_cuda")
    if not isinstance(rotary, RotaryEmbedding) or not rotary.is_neox_style or rotary.use_flashinfer:
        return False
    return all(getattr(type(rotary), name) is getattr(RotaryEmbedding, name) for name in kept)


def _head_norms(attention: Any) -> list[Any]:
    """Return the norms of q and k: two, or none."""
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []


@dataclass(frozen=True, slots=True)
class _Linear:
    """A projection: vLLM's layer, and the slots of its slices."""

    layer: Any
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the base model's product, bias included."""
        return self.layer.quant_method.apply(self.layer, x, self.layer.bias)


class Deep:
    """A decoder's forward that includes the members' terms."""

    def __init__(self, decoder: Any, rows: Rows, settings: Settings) -> None:
        self._decoder, self._rows = decoder, rows
        self._plain = decoder.forward
        self._settings = settings
        self._blocks = [_Block(layer) for layer in decoder.layers]

    def warm_up(self) -> None:
        """Compile the kernels for this model's shapes, so that no rollout waits for them."""
        block = self._blocks[0]
        a = block.qkv.a[0]
        shape = {"hidden": a.shape[3], "intermediate": block.down.a[0].shape[3], "rank": self._settings.rank}
        shape |= {"padded_rank": a.shape[2], "rotary_dim": block.cos_sin.shape[1]}
        table = block.cos_sin.dtype
        population.warm_up(a.device, a.dtype, block.heads(), **shape, cos_sin_dtype=table, fixed=self._settings.fixed)

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """Return hidden states [T, H]. A batch without members runs the base model's forward."""
        if not self._rows.any:
            return self._plain(input_ids, positions, intermediate_tensors, inputs_embeds)
        hidden = self._decoder.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        settings, members = self._settings, self._rows.view(len(hidden))
        terms = population.Terms(members, settings.rank, settings.scaling, settings.fixed)
        residual = source = None
        for block in self._blocks:
            hidden, residual, source = self._layer(block, positions, terms, hidden, residual, source)
        last = self._decoder.norm
        return population.norm(hidden, residual, last.weight, last.variance_epsilon, terms, (), source)[0]

    def _layer(
        self,
        block: _Block,
        positions: torch.Tensor,
        terms: population.Terms,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        source: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Return one layer's output, the residual it is added to, and the source of the term that the output lacks.

        A separate function, so that a layer's activations are freed before those of the next are allocated.
        """
        before, after = ((norm.weight, norm.variance_epsilon, terms) for norm in (block.before, block.after))
        normed, dots = population.norm(hidden, residual, *before, block.qkv.a, source)
        residual = hidden if residual is None else residual
        attended = self._attend(block, block.qkv(normed), positions, dots, terms)
        hidden, source = self._sum(block.o, attended, terms, population.Dot(attended, block.o.a[0], block.o.b[0]))
        normed, dots = population.norm(hidden, residual, *after, block.gate_up.a, source)
        gated, partial = population.gate(block.gate_up(normed), dots, block.gate_up.b, block.down_a, terms)
        hidden, source = self._sum(block.down, gated, terms, population.Partial(partial, block.down.b[0]))
        return hidden, residual, source

    def _attend(
        self, block: _Block, qkv: torch.Tensor, positions: torch.Tensor, dots: torch.Tensor, terms: population.Terms
    ) -> torch.Tensor:
        attention = block.attention
        population.rotate(qkv, positions, block.cos_sin, dots, block.qkv.b, terms, block.heads())
        query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        return attention.attn(query, key, value)

    def _sum(self, linear: _Linear, x: torch.Tensor, terms: population.Terms, source: Any) -> tuple[torch.Tensor, Any]:
        """Return a row-parallel product, and the source of the members' term that it lacks."""
        product = linear(x)
        if linear.layer.tp_size == 1:
            return product, source
        population.add(product, x, linear.a, linear.b, terms)
        return tensor_model_parallel_all_reduce(product), None


class _Block:
    """The parts of one layer. Keeps modules, not their weights, which vLLM may replace."""

    def __init__(self, layer: Any) -> None:
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        self.attention = layer.self_attn
        projections = [layer.get_submodule(name) for name in _PROJECTIONS]
        linears = [_Linear(p.base_layer, p.lora_a_stacked, p.lora_b_stacked) for p in projections]
        self.qkv, self.o, self.gate_up, self.down = linears
        self.down_a = self.down.a[0] if self.down.layer.tp_size == 1 else None  # else `_sum` computes the dots
        weight = self.before.weight
        # The table in the dtype of the queries, as vLLM converts it before it rotates.
        self.cos_sin = self.attention.rotary_emb._match_cos_sin_cache_dtype(weight)

    def heads(self) -> population.Heads:
        """Return the attention heads of this rank, with the norms of q and k."""
        attention, norms = self.attention, _head_norms(self.attention)
        counts = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        if not norms:
            return population.Heads(*counts)
        return population.Heads(*counts, norms[0].weight, norms[1].weight, norms[0].variance_epsilon)
