# SPDX-License-Identifier: Apache-2.0
"""The members' terms folded into the kernels that a decoder runs anyway: no extra launch, no extra pass.

A layer of the Qwen2, Qwen3 and Llama families becomes four matrix products, attention, and
  norm    residual sum with the term of the layer before's down_proj, RMSNorm, dots with A of q, k, v
  rotate  terms of q, k, v, the norms of q and k (Qwen3), rotary embedding
  norm    residual sum with the term of o_proj, RMSNorm, dots with A of gate, up
  gate    SwiGLU with the terms of gate and up, partial dots with A of down_proj
Under tensor parallelism the terms of o_proj and down_proj belong to partial sums, so they are added before the
all-reduce. Prefill takes the same kernels. Whether a model is of this shape is read off its modules, not its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.lora.layers import (
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models import llama, qwen2, qwen3

from evoalign.engines.vllm.insides import replace
from evoalign.engines.vllm.rows import Rows
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


def decoder_of(model: torch.nn.Module) -> Any | None:
    """The one decoder of a known family inside a model, or None."""
    found = [m for m in model.modules() if type(m).forward in _DECODERS]
    return found[0] if len(found) == 1 else None


def put(model: torch.nn.Module, rows: Rows, rank: int, scaling: float, fixed: bool) -> None:
    """Give a model without an `obstacle` this form, with its kernels compiled."""
    decoder = decoder_of(model)
    assert decoder is not None
    # An entry of the instance wins over its class where vLLM's __call__ looks `forward` up.
    replace(decoder, "forward", Deep(decoder, rows, rank, scaling, fixed))
    decoder.forward.warm_up()


def obstacle(model: torch.nn.Module) -> str:
    """Why a model cannot take this form, in words; empty where it can."""
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
    """How a layer differs from the block that the kernels compute."""
    for part, known in (("", _LAYERS), ("self_attn", _ATTENTIONS), ("mlp", _MLPS)):
        module: Any = layer.get_submodule(part)
        if type(module).forward not in known:
            yield f"{type(module).__name__} has a forward of its own"
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
    """What stands between a projection and a plain product with LoRA slots."""
    if type(linear) is base:
        yield f"{name} has no members: the target modules leave it out"
        return
    if type(linear) is not wrapper:
        yield f"{name} has no LoRA slots of the plain kind ({type(linear).__name__})"
        return
    inner = linear.base_layer
    if type(inner) is not base or type(inner.quant_method) is not UnquantizedLinearMethod:
        yield f"{name} is quantised or otherwise special"
    if inner.bias is not None and (base is not QKVParallelLinear or inner.skip_bias_add):
        yield f"{name} has a bias"
    if not getattr(inner, "reduce_results", True) or not getattr(inner, "input_is_parallel", True):
        yield f"{name} is sharded in an uncommon way"


def _is_plain_norm(norm: Any) -> bool:
    return type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None


def _is_plain_rotary(rotary: Any) -> bool:
    """Scaled ones differ from the plain one in their table alone."""
    kept = ("forward_native", "forward_cuda")
    if not isinstance(rotary, RotaryEmbedding) or not rotary.is_neox_style or rotary.use_flashinfer:
        return False
    return all(getattr(type(rotary), name) is getattr(RotaryEmbedding, name) for name in kept)


def _head_norms(attention: Any) -> list[Any]:
    """The norms of q and k: two, or none."""
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []


@dataclass(frozen=True, slots=True)
class _Linear:
    """A projection: vLLM's layer, and the slots of its slices."""

    layer: Any
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The base model's product, bias included."""
        return self.layer.quant_method.apply(self.layer, x, self.layer.bias)


class Deep:
    """A decoder's forward with the members' terms inside."""

    def __init__(self, decoder: Any, rows: Rows, rank: int, scaling: float, fixed: bool) -> None:
        self._decoder, self._rows = decoder, rows
        self._plain = decoder.forward
        self._rank, self._scaling, self._fixed = rank, scaling, fixed
        self._blocks = [_Block(layer) for layer in decoder.layers]

    def warm_up(self) -> None:
        """Compile the kernels for this model's shapes, so that no rollout waits for them."""
        block = self._blocks[0]
        a = block.qkv.a[0]
        shape = {"hidden": a.shape[3], "intermediate": block.down.a[0].shape[3], "rank": self._rank}
        shape |= {"padded_rank": a.shape[2], "rotary_dim": block.cos_sin.shape[1]}
        table = block.cos_sin.dtype
        population.warm_up(a.device, a.dtype, block.heads(), **shape, cos_sin_dtype=table, fixed=self._fixed)

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """Hidden states [T, H]. A batch without members is the base model's own."""
        if not self._rows.any:
            return self._plain(input_ids, positions, intermediate_tensors, inputs_embeds)
        hidden = self._decoder.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        terms = population.Terms(self._rows.of(len(hidden)), self._rank, self._scaling, self._fixed)
        residual = source = None
        for block in self._blocks:
            hidden, residual, source = self._layer(block, positions, terms, hidden, residual, source)
        return self._norm(self._decoder.norm, hidden, residual, terms, (), source)[0]

    def _layer(
        self,
        block: _Block,
        positions: torch.Tensor,
        terms: population.Terms,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        source: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """One layer: what is to be added to the residual, the residual, and what the former still lacks.

        A function of its own, so that a layer's activations are gone before those of the next are made.
        """
        normed, dots = self._norm(block.before, hidden, residual, terms, block.qkv.a, source)
        residual = hidden if residual is None else residual
        attended = self._attend(block, block.qkv(normed), positions, dots, terms)
        hidden, source = self._sum(block.o, attended, terms, population.Dot(attended, block.o.a[0], block.o.b[0]))
        normed, dots = self._norm(block.after, hidden, residual, terms, block.gate_up.a, source)
        gated, partial = population.gate(block.gate_up(normed), dots, block.gate_up.b, block.down_a, terms)
        hidden, source = self._sum(block.down, gated, terms, population.Partial(partial, block.down.b[0]))
        return hidden, residual, source

    def _norm(
        self,
        norm: Any,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        terms: population.Terms,
        into: tuple[torch.Tensor, ...],
        source: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return population.norm(hidden, residual, norm.weight, norm.variance_epsilon, terms, into, source)

    def _attend(
        self, block: _Block, qkv: torch.Tensor, positions: torch.Tensor, dots: torch.Tensor, terms: population.Terms
    ) -> torch.Tensor:
        attention = block.attention
        population.rotate(qkv, positions, block.cos_sin, dots, block.qkv.b, terms, block.heads())
        query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        return attention.attn(query, key, value)

    def _sum(self, linear: _Linear, x: torch.Tensor, terms: population.Terms, source: Any) -> tuple[torch.Tensor, Any]:
        """A row-parallel product, and where its members' term still has to come from."""
        product = linear(x)
        if linear.layer.tp_size == 1:
            return product, source
        population.add(product, x, linear.a, linear.b, terms)
        return tensor_model_parallel_all_reduce(product), None


class _Block:
    """The parts of one layer. Modules are kept, not their weights, which vLLM may exchange."""

    def __init__(self, layer: Any) -> None:
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        self.attention = layer.self_attn
        self.qkv, self.o, self.gate_up, self.down = (_linear(layer.get_submodule(name)) for name in _PROJECTIONS)
        self.down_a = self.down.a[0] if self.down.layer.tp_size == 1 else None  # else `_sum` takes the dots
        weight = self.before.weight
        # As vLLM does before it rotates: the table in the dtype of the queries.
        self.cos_sin = self.attention.rotary_emb._match_cos_sin_cache_dtype(weight)

    def heads(self) -> population.Heads:
        """Return the attention heads of this rank, with the norms of q and k."""
        attention, norms = self.attention, _head_norms(self.attention)
        counts = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        if not norms:
            return population.Heads(*counts)
        return population.Heads(*counts, norms[0].weight, norms[1].weight, norms[0].variance_epsilon)


def _linear(layer: Any) -> _Linear:
    return _Linear(layer.base_layer, layer.lora_a_stacked, layer.lora_b_stacked)
