# SPDX-License-Identifier: Apache-2.0
"""The memory of a GPU: its limit for one process, and the constants of estimates before a run.

The constants are estimates on the safe side, not measurements, unless their comment says otherwise. What they stand for
differs between cards, drivers and releases of torch.
"""

from __future__ import annotations

import torch

from evoalign.errors import ConfigError

CARDS = {24: 23.6, 48: 47.4, 80: 79.1}
"""GiB that CUDA reports of cards sold with this many: RTX 3090 and 4090; RTX 6000 Ada; H100. Cards with ECC in the same
memory have less: A10 and L4 about 22, A40 and L40S about 44.4."""
OUTSIDE = int(0.8 * 2**30)
"""Bytes of a process that torch does not allocate: the CUDA context (about 0.5 GiB), the code of kernels, and the nodes
of CUDA graphs. 0.67 to 0.78 GiB were measured: vLLM 0.26, a 32B shape in W4A16, an H200."""
SHARED = int(0.3 * 2**30)
"""Bytes of `OUTSIDE` that vLLM takes from its share, since they come after its start. 0.29 GiB, measured as above."""
GRAPH_LAYER = 256 << 10
"""Bytes of a CUDA graph per layer of the model, besides its tensors: about 15 launches of 16 KiB."""
LOGIT = 16
"""Bytes per logit while vLLM draws: the half-precision logits, and float32 logits, probabilities and exponentials."""
STEP_TOKENS = {70: 16384, 0: 8192}
"""vLLM's most tokens of a step by the GiB of the card, at least, unless `max_num_batched_tokens` is set (0.32)."""
WIDE, HIDDEN = 3, 3
"""Numbers per token of a step that are alive at once, as multiples of the widest matrix (gate, up and their product)
and of the hidden size."""


def for_tensors(cap: float) -> float:
    """Return the bytes that torch may allocate in a process of at most `cap` GiB."""
    return cap * 2**30 - OUTSIDE


def step_tokens(size: float) -> int:
    """Return vLLM's most tokens of a step on a GPU of `size` GiB."""
    return next(tokens for least, tokens in STEP_TOKENS.items() if size >= least)


def limit_memory(cap: float | None, device: torch.device) -> None:
    """Make torch refuse tensors that would bring this process above `cap` GiB of a GPU; None: no limit.

    The limit stays until the process ends. Raises ConfigError on a CPU and for a GPU that is smaller.
    """
    if cap is None:
        return
    if device.type != "cuda":
        raise ConfigError(f"engine.gpu_memory_gib {cap:g}: the engine runs on a CPU here; set it to null")
    total = torch.cuda.mem_get_info(device)[1]
    if cap * 2**30 > total:
        raise ConfigError(
            f"engine.gpu_memory_gib {cap:g}: the GPU has {total / 2**30:.1f} GiB; lower it, or set it to null"
        )
    indexed = device if ":" in str(device) else torch.cuda.current_device()  # torch requires an index here
    torch.cuda.set_per_process_memory_fraction(for_tensors(cap) / total, indexed)
