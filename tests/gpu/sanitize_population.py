# SPDX-License-Identifier: Apache-2.0
"""Run every population kernel once at small widths, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_population.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_population.py

Tensors are allocated one by one, without torch's pool, so that out-of-bounds accesses are detected. Results are checked
too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
from population_checks import Draw, check_add, check_gate, check_norm, check_rotate

from evoalign.kernels import available


def main() -> None:
    """Run all kernels for a few ranks. Exits with 1 without a CUDA device or Triton."""
    if not (torch.cuda.is_available() and available("cuda")):
        sys.exit("needs a CUDA device and Triton")
    for rank, padded in ((1, 1), (1, 8), (3, 8), (16, 16)):
        draw = Draw(rank, padded, torch.bfloat16, "cuda")
        check_add(draw, 3, 200, (90, 30, 30))
        check_add(draw, 2, 72, (8200,))
        check_norm(draw, 3, "none", carried=False, layers=3, width=200)
        check_norm(draw, 3, "dot", layers=2, width=200, inner=90)
        check_norm(draw, 3, "partial", layers=0, width=200)
        check_rotate(draw, 3, 5, 1, 24, 24, qk_norm=False)
        check_rotate(draw, 3, 5, 2, 24, 16, qk_norm=True)
        check_gate(draw, 3, 2100)
        torch.cuda.synchronize()
        print(f"rank {rank} of {padded}: right")


if __name__ == "__main__":
    main()
