# SPDX-License-Identifier: Apache-2.0
"""vLLM's product for the experts of a mixture with adapters, in plain torch: its own is in Triton, for GPUs alone."""

import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend


def product(self, output, hidden_states, w1, w2, topk_weights, topk_ids, **_):
    """Write the sum over a token's experts of weight * down(silu(gate) * up) to output [T, H]; w1 [E, 2 I, H], w2 [E,
    H, I]."""
    lora = self._lora_context  # None where no expert takes adapters
    slots = lora.punica_wrapper.token_lora_indices.tolist() if lora else [-1] * len(hidden_states)
    w13 = list(zip(lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, strict=True)) if lora else []
    down = list(zip(lora.w2_lora_a_stacked, lora.w2_lora_b_stacked, strict=True)) if lora else []

    def linear(x, weight, factors, slot, expert):
        y = functional.linear(x, weight)
        if slot < 0 or not lora.adapter_enabled[slot]:
            return y
        terms = [functional.linear(functional.linear(x, a[slot, expert]), b[slot, expert]) for a, b in factors]
        return y + torch.cat(terms)

    for row, x in enumerate(hidden_states):
        y = torch.zeros_like(x)
        for expert, share in zip(topk_ids[row].tolist(), topk_weights[row], strict=True):
            gate, up = linear(x, w1[expert], w13, slots[row], expert).chunk(2)
            y += share.to(x.dtype) * linear(functional.silu(gate) * up, w2[expert], down, slots[row], expert)
        output[row] = y


def use(replace=setattr) -> None:
    """Put the plain product in the place of vLLM's, and let vLLM take it on a CPU as on a GPU."""
    replace(TritonExperts, "apply", product)
    replace(method, "select_unquantized_moe_backend", lambda moe_config: (UnquantizedMoeBackend.TRITON, TritonExperts))
