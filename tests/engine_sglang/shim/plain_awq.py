# SPDX-License-Identifier: Apache-2.0
"""The numbers of AWQ's words in plain torch: SGLang's own kernels need a GPU."""

import torch


def awq_dequantize_triton(qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return the weight [in, out]. Eight columns are in a word, 0, 2, 4, 6, 1, 3, 5, 7; scales are [groups, out]."""
    shifts, each = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32), len(qweight) // len(scales)
    q, z = ((words[..., None] >> shifts & 15).flatten(1) for words in (qweight, zeros))
    return (q - z.repeat_interleave(each, 0)) * scales.repeat_interleave(each, 0)


awq_dequantize_decomposition = awq_dequantize_triton
